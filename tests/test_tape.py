"""Core attention that is function calls: every way in which the field writes it, exact and without its scores."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_recompute.memory import measure_step
from lightning_recompute.plan import RecomputePlan, Segment, Selective
from lightning_recompute.recompute import apply_recompute

WIDTH, HEADS, LENGTH = 16, 4, 12
CORE = Selective(("core_attn",))


class Attention(nn.Module):
    """nanoGPT's, with the core to be chosen."""

    def __init__(self, core: str) -> None:
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.randn(HEADS, LENGTH, LENGTH) * 0.1)
        self.register_buffer("mask", torch.ones(LENGTH, LENGTH).tril().bool())
        self.core = core

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (part.view(b, s, HEADS, -1).transpose(1, 2) for part in self.c_attn(x).split(WIDTH, dim=2))
        y = getattr(self, self.core)(q, k, v)
        return self.c_proj(y.transpose(1, 2).reshape(b, s, WIDTH))

    def plain(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
        scores = scores.masked_fill(~self.mask, float("-inf"))
        return F.dropout(F.softmax(scores, dim=-1), 0.2) @ v

    def in_place(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.matmul(q, k.transpose(-2, -1))
        scores += self.bias
        scores.masked_fill_(~self.mask, -1e4)
        scores[..., 0] = scores[..., 0] * 0.5
        return torch.matmul(torch.softmax(scores, -1), v)

    def einsum(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        probabilities = torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1)
        return torch.einsum("bhij,bhjd->bhid", probabilities, v)

    def batched(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        b = q.shape[0]
        q, k, v = (part.reshape(b * HEADS, LENGTH, -1) for part in (q, k, v))
        probabilities = torch.bmm(q, k.transpose(1, 2)).softmax(-1)
        return torch.bmm(probabilities, v).view(b, HEADS, LENGTH, -1)

    def fused(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def fused_with_dropout(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask, dropout_p=0.2)

    def linear(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.elu(q) @ (F.elu(k).transpose(-2, -1) @ v)  # no softmax anywhere

    def twice(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.plain(q, k, v) + self.fused_with_dropout(q, k, self.plain(k, q, v))


class Block(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attn = attention

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(self.norm(x))


class Torchs(nn.Module):
    """torch's own attention, whose core lies inside one function."""

    def __init__(self, need_weights: bool) -> None:
        super().__init__()
        self.self_attn = nn.MultiheadAttention(WIDTH, HEADS, dropout=0.2, batch_first=True)
        self.need_weights = need_weights

    def forward(self, x: Tensor) -> Tensor:
        y, weights = self.self_attn(x, x, x, need_weights=self.need_weights)
        return x + y if weights is None else x + y + weights.square().mean()


def stack(core: str) -> nn.Module:
    torch.manual_seed(0)
    if core.startswith("torch"):
        return nn.Sequential(*(Torchs(core.endswith("weights")) for _ in range(3)))
    return nn.Sequential(*(Block(Attention(core)) for _ in range(3)))


CORES = ["plain", "in_place", "einsum", "batched", "fused", "fused_with_dropout", "linear", "twice"]
CORES += ["torch", "torch with weights"]


def step(model: nn.Module, mixed: bool = False) -> list[Tensor]:
    torch.manual_seed(1)
    x = torch.randn(2, LENGTH, WIDTH, requires_grad=True)
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        loss = model(x).float().square().sum()
    loss.backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [loss.detach(), x.grad, *gradients, torch.get_rng_state()]


def plan() -> RecomputePlan:
    return RecomputePlan((Segment(0, 3, CORE),))


@pytest.mark.parametrize("mixed", [False, True], ids=["32", "bf16-mixed"])
@pytest.mark.parametrize("core", CORES)
def test_exact(core: str, mixed: bool) -> None:
    model = stack(core)
    due = step(model, mixed)
    with apply_recompute(model, plan()):
        for _ in range(2):
            found = step(model, mixed)
            assert len(due) == len(found)
            assert all(map(torch.equal, due, found))


@pytest.mark.parametrize("core", ["plain", "einsum", "batched", "torch with weights", "fused_with_dropout"])
def test_scores_are_not_held(core: str) -> None:
    model, x = stack(core), torch.randn(2, LENGTH, WIDTH, requires_grad=True)
    scores = 2 * HEADS * LENGTH**2 * 4

    def held() -> int:
        model(x).sum().backward()
        return measure_step(lambda: model(x).sum()).held_bytes

    none = held()
    with apply_recompute(model, plan()):
        freed = none - held()
    assert freed > 3 * scores - 3 * 5056  # at least one tensor of scores a block, less a random state where it drew


def test_exception_in_the_middle_then_a_good_step() -> None:
    model = stack("plain")
    due = step(model)
    with apply_recompute(model, plan()):
        attention = model[1].attn
        attention.core = "missing"
        with pytest.raises(AttributeError):
            step(model)
        attention.core = "plain"
        assert all(map(torch.equal, due, step(model)))
        assert torch.overrides._get_current_function_mode_stack() == []


def test_evaluation_is_untouched() -> None:
    model = stack("plain").eval()
    x = torch.randn(2, LENGTH, WIDTH)
    with torch.no_grad():
        torch.manual_seed(2)
        due = model(x)
        with apply_recompute(model, plan()):
            torch.manual_seed(2)
            assert torch.equal(due, model(x))
