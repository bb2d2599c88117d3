"""Core attention on tape where it is easy to be wrong: writes, switched modes, streams, checkpoints, branches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from guards import assert_exact, held_bytes
from parity import seeded
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from toys import WIDTH, square_loss, stack, step

from lightning_recompute.errors import RecomputeError
from lightning_recompute.plan import Keep, RecomputePlan, Segment, Selective
from lightning_recompute.recompute import apply_recompute

HEADS, LENGTH = 2, 4
GLOBAL = torch.Generator()
Core = Callable[[Any, Tensor, Tensor, Tensor], Any]


class Attention(nn.Module):
    """Self-attention whose core is a function of (the module, q, k, v), each (1, heads, length, size)."""

    def __init__(self, core: Core) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.o_proj = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.full((), 0.7))
        self.bias = nn.Parameter(torch.linspace(-1, 1, LENGTH * LENGTH).view(LENGTH, LENGTH))
        self.register_buffer("average", torch.zeros(HEADS, LENGTH, LENGTH))
        self.dropout = nn.Dropout(0.2)
        self.generator = torch.Generator().manual_seed(4)
        self.core = core
        self.mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()

    def forward(self, x: Tensor) -> Tensor:
        parts = (project(x[None]) for project in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (part.view(1, LENGTH, HEADS, -1).transpose(1, 2) for part in parts)
        result = self.core(self, q, k, v)
        y, weights = result if isinstance(result, tuple) else (result, None)
        y = self.o_proj(y.transpose(1, 2).reshape(LENGTH, WIDTH))
        return y if weights is None else y + weights.square().mean()


class Block(nn.Module):
    def __init__(self, core: Core) -> None:
        super().__init__()
        self.norm, self.attn, self.linear = nn.LayerNorm(WIDTH), Attention(core), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm(x))
        return x + torch.tanh(self.linear(x))


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-2, -1)


def inverted_mask(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).masked_fill(~m.mask, -1e4).softmax(-1) @ v


def changed_in_place(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    w = scores(q, k)
    w *= m.scale
    w += m.bias
    w[..., ~m.mask] = -1e4
    w[:, 0].mul_(1.5)
    w.view(HEADS, LENGTH, LENGTH)[1] += 0.25
    return w.softmax(-1) @ v


def filled_buffer(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    w = q.new_zeros(1, HEADS, LENGTH, LENGTH)
    for head in range(HEADS):
        w[:, head] = scores(q[:, head], k[:, head])
    return w.softmax(-1) @ v


def filled_later(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    first = scores(q, k)
    w = torch.zeros_like(first)
    w[:, :1] = first[:, :1]
    w[:, 1:] = first[:, 1:] * m.scale
    return w.softmax(-1) @ v


def dropped_in_place(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.dropout(scores(q, k) + 0.0, 0.3, True, True).softmax(-1) @ v


def values_written(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    w = scores(q, k)
    v = F.dropout(v, 0.3, True, True)
    return w.softmax(-1) @ v


def written_without_grad(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    w = scores(q, k)
    with torch.no_grad():
        w.masked_fill_(~m.mask, -1e4)
        w -= w.amax(-1, keepdim=True)
    return w.softmax(-1) @ v


def statistics_written(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    probabilities = scores(q, k).softmax(-1)
    with torch.no_grad():
        m.average.lerp_(probabilities[0].float(), 0.5)
    return probabilities @ v


def mask_written_after_use(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.zeros(LENGTH, LENGTH)
    w = scores(q, k) + mask
    mask.fill_(3.0)
    return (w * mask).softmax(-1) @ v


def view_of_mask_written(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.zeros(LENGTH, LENGTH)
    w = scores(q, k) + mask
    mask[None].masked_fill_(~m.mask, -1e4)
    return (w + mask).softmax(-1) @ v


def written_by_out(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    probabilities, buffer = scores(q, k).softmax(-1), torch.empty(1, HEADS, LENGTH, LENGTH)
    with torch.no_grad():
        torch.mul(probabilities, 2.0, out=buffer)
    return (probabilities * buffer) @ v


def learned(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (scores(q, k) * m.scale + m.bias).softmax(-1) @ v


def returned(m: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    probabilities = F.dropout(scores(q, k).softmax(-1), 0.2)
    return probabilities @ v, probabilities


def one_without_autocast(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    w = scores(q, k)
    with torch.autocast("cpu", enabled=False):
        probabilities = (w.float() * 1.1).softmax(-1)
        w = probabilities.float() @ torch.ones(LENGTH, LENGTH).tril()
    return w @ v


def from_a_generator(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    probabilities = scores(q, k).softmax(-1)
    noise = torch.rand(probabilities.shape, generator=m.generator) + torch.rand(LENGTH, generator=GLOBAL)
    return (probabilities * noise * torch.rand(LENGTH, generator=m.generator)) @ v


def from_numpy(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (scores(q, k).softmax(-1) * torch.from_numpy(np.random.rand(LENGTH, LENGTH)).float()) @ v


def branching(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    w = scores(q, k)
    if w.max() > 0 and float(w.detach().sum()) != 0:
        w = w * 0.5
    w = w / w.shape[-1] ** 0.5 * w.detach().mean().item()
    return w.softmax(-1) @ v


def stabilised_by_hand(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    w = scores(q, k)
    w = (w - w.detach().amax(-1, keepdim=True)).exp()
    return (w / w.sum(-1, keepdim=True)) @ v


class Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.softmax(-1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return y * (gradient - (gradient * y).sum(-1, keepdim=True))


def of_their_own_function(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return Softmax.apply(scores(q, k) + m.bias) @ v


def head_by_head(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.stack([scores(q[:, h], k[:, h]).softmax(-1) @ v[:, h] for h in range(HEADS)], 1)


def twice(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    once = learned(m, q, k, v)
    return inverted_mask(m, once, k, v) + F.scaled_dot_product_attention(q, k, once, is_causal=True)


def checkpointed(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return checkpoint(lambda *qkv: returned(m, *qkv)[0], q, k, v, use_reentrant=False)


def checkpointed_in_part(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return checkpoint(torch.softmax, scores(q, k), -1, use_reentrant=False) @ v


def written_in_a_checkpoint(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    w = scores(q, k)
    w = w + checkpoint(lambda w: w.detach().mul_(2.0), w, use_reentrant=False)
    return w.softmax(-1) @ v


def grouped(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], enable_gqa=True, attn_mask=m.bias)


def linear_attention(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.elu(q) @ (F.elu(k).transpose(-2, -1) @ v)


def partly_frozen(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q.detach(), k).softmax(-1) @ v + scores(q, k.detach()).softmax(-1) @ v.detach()


CORES = [
    *(inverted_mask, changed_in_place, filled_buffer, filled_later, dropped_in_place, values_written),
    *(written_without_grad, statistics_written, mask_written_after_use, view_of_mask_written, written_by_out),
    *(learned, returned, one_without_autocast, from_a_generator, from_numpy, branching, stabilised_by_hand),
    *(of_their_own_function, head_by_head, twice, checkpointed, checkpointed_in_part, grouped, linear_attention),
    *(written_in_a_checkpoint, partly_frozen),
]


CORE = Selective(("core_attn",))


def taping(action: Any = CORE, num_blocks: int = 2) -> RecomputePlan:
    return RecomputePlan(tuple(Segment(i, i + 1, action) for i in range(num_blocks)))


def steps(mixed: bool) -> Callable[[nn.Module], list[Any]]:
    def run(model: nn.Module) -> list[Any]:
        GLOBAL.manual_seed(0)
        np.random.seed(0)
        losses = []
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
                loss = square_loss(model)
            loss.backward()
            losses.append(loss)
        return [losses, GLOBAL.get_state(), [block.attn.generator.get_state() for block in model.blocks]]

    return run


@pytest.mark.parametrize("mixed", [False, True], ids=["32", "bf16-mixed"])
@pytest.mark.parametrize("core", CORES, ids=lambda f: f.__name__)
def test_exact(core: Core, mixed: bool) -> None:
    assert_exact(lambda: stack(2, lambda: Block(core)), steps(mixed), taping())


@pytest.mark.parametrize("core", [changed_in_place, returned, from_a_generator, twice], ids=lambda f: f.__name__)
def test_with_freed_outputs_and_a_retained_graph(core: Core) -> None:
    def run(model: nn.Module) -> Tensor:
        GLOBAL.manual_seed(0)
        loss = square_loss(model)
        loss.backward(retain_graph=True)
        loss.backward()
        return loss

    assert_exact(lambda: stack(2, lambda: Block(core)), run, taping(Selective(("core_attn", "norm"))))


SAVES = [inverted_mask, changed_in_place, learned, returned, head_by_head, written_without_grad, statistics_written]
SAVES += [from_a_generator, stabilised_by_hand, filled_later, dropped_in_place]


@pytest.mark.parametrize("core", SAVES, ids=lambda f: f.__name__)
def test_scores_are_freed(core: Core) -> None:
    """At least one tensor of scores in each block."""

    def build() -> nn.Module:
        return stack(2, lambda: Block(core))

    scores_bytes = HEADS * LENGTH * LENGTH * 4
    assert held_bytes(build, taping(Keep())) - held_bytes(build, taping(CORE)) >= 2 * scores_bytes


def test_module_and_functions_hold_the_same() -> None:
    """Our GPT's core is a module; written as functions in the attention it frees as much."""
    from lightning_recompute.transformer import CoreAttention

    core = CoreAttention("eager")

    class OfModule(Block):
        def __init__(self) -> None:
            super().__init__(lambda m, q, k, v: m.core_attn(q, k, v))
            self.attn.core_attn = CoreAttention("eager")

    def functions() -> nn.Module:
        return stack(2, lambda: Block(lambda m, q, k, v: CoreAttention.forward(core, q, k, v)))

    def modules() -> nn.Module:
        return stack(2, OfModule)

    assert held_bytes(functions, taping(Keep())) == held_bytes(modules, taping(Keep()))
    assert (
        held_bytes(functions, taping(CORE)) <= held_bytes(modules, taping(CORE)) < held_bytes(modules, taping(Keep()))
    )


def test_an_exception_at_any_function_then_a_good_step() -> None:
    class Fails(Exception):
        pass

    def failing(at: int) -> Core:
        def core(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            w = scores(q, k)
            for place, function in enumerate((lambda w: w * 2, lambda w: w.softmax(-1), m.dropout)):
                if m.armed and place == at:
                    raise Fails
                w = function(w)
            return w @ v

        return core

    for at in range(3):

        def run(model: nn.Module) -> Tensor:
            for block in model.blocks:
                block.attn.armed = block is model.blocks[1]
            with pytest.raises(Fails):
                step(model)
            for block in model.blocks:
                block.attn.armed = False
            torch.manual_seed(2)
            return step(model)

        assert_exact(lambda at=at: stack(2, lambda: Block(failing(at))), run, taping())
    assert torch.overrides._get_current_function_mode_stack() == []


def test_inputs_written_after_the_attention_are_refused() -> None:
    kept: list[Tensor] = []

    def core(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.zeros(LENGTH, LENGTH)
        kept.append(mask)
        return (scores(q, k) + mask).softmax(-1) @ v

    model = seeded(lambda: stack(2, lambda: Block(core)))
    with apply_recompute(model, taping()):
        loss = square_loss(model)
        kept[-1].fill_(1.0)
        with pytest.raises(RecomputeError, match=r"blocks\.1\.attn: an input was changed in place.*write to a copy"):
            loss.backward()
