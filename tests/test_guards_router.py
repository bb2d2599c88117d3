"""Decisions that depend on data: a router's are reused, so that a near tie goes the same way twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from guards import assert_exact, plan_of, refusal
from parity import seeded
from torch import Tensor, nn
from toys import WIDTH, rows, stack, step

from lightning_recompute.errors import RecomputeError
from lightning_recompute.plan import Full, RecomputePlan, SaveOps, Segment, Selective
from lightning_recompute.recompute import apply_recompute

num_calls = [0]


def noise(scores: Tensor) -> Tensor:
    """What another order of a sum does to scores: another last digit in every call. Blind to any restored stream."""
    num_calls[0] += 1
    generator = torch.Generator().manual_seed(num_calls[0])
    return scores + 1e-7 * torch.randn(scores.shape, generator=generator)


Choose = Callable[[Tensor], Tensor]
CHOICES: dict[str, Choose] = {
    "topk": lambda scores: scores.topk(1).indices[:, 0],
    "top 2": lambda scores: scores.topk(2).indices.sum(1).remainder(4),
    "argmax": lambda scores: scores.argmax(-1),
    "argmin": lambda scores: scores.argmin(-1),
    "sort": lambda scores: scores.sort(-1).indices[:, -1],
    "argsort": lambda scores: scores.argsort(-1)[:, -1],
    "max": lambda scores: scores.max(-1).indices,
}


class Mixture(nn.Module):
    """All scores tie but for noise; the experts get as many rows as the choice gives them."""

    def __init__(self, choose: Choose) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.dropout = nn.Dropout(0.2)
        self.choose = choose

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x)
        weights = self.gate(hidden).softmax(-1)
        chosen = self.choose(noise(torch.zeros_like(weights)))
        y = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            (members,) = (chosen == index).nonzero(as_tuple=True)
            y = y.index_add(0, members, expert(hidden[members]) * weights[members, index, None])
        return x + self.dropout(y)


class Block(nn.Module):
    """The mixture as a part of a block."""

    def __init__(self, choose: Choose) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.moe = Mixture(choose)

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(x + torch.tanh(self.up(x)))


def run(model: nn.Module, num_steps: int = 1) -> list[Tensor]:
    losses = []
    for _ in range(num_steps):
        num_calls[0] = 0  # replays count as well
        losses.append(step(model))
    return losses


def tiled(size: int, action: Any) -> RecomputePlan:
    return RecomputePlan(tuple(Segment(start, start + size, action) for start in range(0, 4, size)))


PLANS = {
    "full": plan_of("full"),
    "pairs": plan_of("pairs"),
    "saved": plan_of("saved"),
    "saved pairs": plan_of("saved pairs"),
    "mixture": tiled(1, Selective(("moe",))),
    "mixture by name": tiled(1, Selective(("*.moe", "norm"))),
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("choice", [choice for choice in CHOICES if choice != "max"])
def test_decisions_are_reused(choice: str, plan: str) -> None:
    assert_exact(lambda: stack(4, lambda: Block(CHOICES[choice])), run, PLANS[plan])


def test_without_reuse_the_replay_goes_another_way() -> None:
    """A choice by an operator that is no decision elsewhere: refused by name, and saved where it is named."""

    def build() -> nn.Module:
        return stack(4, lambda: Block(CHOICES["max"]))

    message = refusal(build, run, plan_of("full"))
    assert message is not None
    assert "blocks.3" in message
    assert "data-dependent branches" in message
    assert_exact(build, run, tiled(1, SaveOps(("matmul", "max"))))


def test_decisions_survive_several_backwards_and_forwards() -> None:
    def twice(model: nn.Module) -> list[Tensor]:
        num_calls[0] = 0
        one, other = model(rows()).square().mean(), model(rows()).sum()
        one.backward(retain_graph=True)
        other.backward()
        one.backward()
        return [one, other]

    for plan in ("full", "pairs", "mixture"):
        assert_exact(lambda: stack(4, lambda: Block(CHOICES["topk"])), twice, PLANS[plan])


class Warmed(Block):
    """Routes from its second call on: until then the first expert takes all."""

    def __init__(self) -> None:
        super().__init__(CHOICES["topk"])
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        self.moe.choose = CHOICES["topk"] if self.num_calls > 1 else (lambda scores: scores[:, 0].long())
        return super().forward(x)


def test_a_router_that_begins_later_is_never_silently_wrong() -> None:
    """Decisions are looked for in a block's first call; later ones may be refused, by name."""
    message = refusal(lambda: stack(4, Warmed), lambda model: run(model, 2), plan_of("full"))
    assert message is None or "data-dependent branches" in message
    assert_exact(lambda: stack(4, Warmed), lambda model: run(model, 2), plan_of("saved"))


def test_a_written_decision_is_not_written_twice() -> None:
    """The indices are changed in place after they were chosen."""

    class Shifts(Block):
        def __init__(self) -> None:
            super().__init__(shift)

    def shift(scores: Tensor) -> Tensor:
        indices = scores.topk(1).indices[:, 0]
        indices += 1
        return indices.remainder_(4)

    for plan in ("full", "pairs", "mixture", "saved"):
        assert_exact(lambda: stack(4, Shifts), run, PLANS[plan])


def test_check_compares_mixtures_too() -> None:
    model = seeded(lambda: stack(4, lambda: Block(CHOICES["topk"])))
    with apply_recompute(model, tiled(1, Full()), check=True):
        run(model)
    model = seeded(lambda: stack(4, lambda: Block(CHOICES["max"])))
    with apply_recompute(model, tiled(1, Full()), check=True), pytest.raises(RecomputeError, match=r"blocks\.3"):
        run(model)
