"""Saved operators: torch's selective contexts as the oracle, writes in place, random operators, refusals."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lightning_recompute.errors import RecomputeError
from lightning_recompute.memory import measure_step
from lightning_recompute.plan import RecomputePlan, SaveOps, Segment
from lightning_recompute.recompute import apply_recompute
from lightning_recompute.save_ops import OpSet

aten = torch.ops.aten
SAVED = [aten.mm.default, aten.addmm.default, aten.bmm.default]


class Block(nn.Module):
    def __init__(self, inner: Callable[[Tensor], Tensor] = F.gelu) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)
        self.dropout = nn.Dropout(0.2)
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.second(self.inner(self.first(x))))


class Stack(nn.Module):
    def __init__(self, make: Callable[[], nn.Module] = Block, num_blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(make() for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def plan(*ops: str, size: int = 1) -> RecomputePlan:
    return RecomputePlan(tuple(Segment(i, i + size, SaveOps(ops)) for i in range(0, 4, size)))


def step(model: nn.Module) -> list[Tensor]:
    torch.manual_seed(3)
    x = torch.randn(5, 16, requires_grad=True)
    model.zero_grad()
    loss = model(x).square().sum()
    loss.backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [loss.detach(), x.grad, *gradients, torch.get_rng_state()]


def assert_exact(model: nn.Module, value: RecomputePlan) -> None:
    due = step(model)
    with apply_recompute(model, value):
        for _ in range(2):
            found = step(model)
            assert all(map(torch.equal, due, found))


INNER: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": F.gelu,
    "relu in place on a saved output": functools.partial(F.relu, inplace=True),
    "add in place": lambda h: h.add_(1.0).tanh(),
    "slice assigned": lambda h: torch.cat([h[:, :4].zero_(), h[:, 4:]], 1),
    "dropout in place": lambda h: F.dropout(h, 0.3, inplace=True),
}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", INNER)
def test_exact(name: str, size: int) -> None:
    assert_exact(Stack(functools.partial(Block, INNER[name])), plan("matmul", size=size))


def test_holds_no_more_than_torchs_contexts() -> None:
    torch.manual_seed(0)
    model, x = Stack(), torch.randn(64, 16, requires_grad=True)
    step(model)

    def held() -> int:
        return measure_step(lambda: model(x).sum()).held_bytes

    with apply_recompute(model, plan("matmul")):
        model(x).sum().backward()
        ours = held()
    contexts = functools.partial(create_selective_checkpoint_contexts, SAVED)
    for block in model.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)
    assert ours <= held()


def test_attention_that_draws_moves_the_stream_on() -> None:
    """A saved operator is not run again, but what is drawn after it must be drawn as in forward."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            noise = torch.bernoulli(torch.full((5, 16), 0.5))
            return x + F.dropout(self.project(x) * noise, 0.5)

    assert_exact(Stack(Attention), plan("aten.bernoulli", "matmul"))


def test_unknown_operator_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"'addmmm' is neither a group nor an aten operator; did you mean 'addmm'"):
        OpSet(("addmmm",))


def test_operator_that_does_not_run_is_refused() -> None:
    model = Stack()
    with (
        apply_recompute(model, plan("attention")),
        pytest.raises(RecomputeError, match=r"blocks\.0: SaveOps names 'attention'.*addmm"),
    ):
        step(model)
    step(model)


def test_second_backward_is_refused() -> None:
    model = Stack()
    with apply_recompute(model, plan("matmul")):
        loss = model(torch.randn(5, 16, requires_grad=True)).sum()
        loss.backward(retain_graph=True)
        with pytest.raises(RecomputeError, match="second backward"):
            loss.backward()


def test_groups_know_collectives_and_kernels() -> None:
    groups = OpSet(("matmul", "attention", "collective"))
    assert groups.word_for(aten.mm.default) == "matmul"
    assert groups.word_for(aten._scaled_dot_product_flash_attention_for_cpu.default) == "attention"
    assert groups.word_for(torch.ops._c10d_functional.all_reduce.default) == "collective"
    assert groups.word_for(aten.add.Tensor) is None
    assert OpSet(("aten.sum.dim_IntList",)).word_for(aten.sum.default) is None
