"""A step with its blocks' graphs left out: what stands outside of blocks to the byte, and no trace."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import MODELS
from parity import autocast, seeded
from test_capture import Model, batch, state_of
from torch import Tensor, nn
from toys import Block, Stack, rows, square_loss, stack

from lightning_recompute.blocks import find_blocks
from lightning_recompute.policy import RecomputePolicy
from lightning_recompute.recompute import apply_recompute
from lightning_recompute.skeleton import run_skeleton
from lightning_recompute.timeline import Passage, Skeleton

HIDDEN = 4 * 8 * 4  # bytes of (ROWS, WIDTH) numbers
LINEAR = 8 * 8 * 4 + 8 * 4  # of an embedding's or a head's gradients


def skeleton_of(module: nn.Module, run: Callable[[], object] | None = None, **options: bool) -> Skeleton:
    return run_skeleton(module, run or (lambda: square_loss(module)), find_blocks(module), **options)


def lines(skeleton: Skeleton) -> list[tuple[str, int, int, list[int]]]:
    return [(each.kind, each.call, each.num_bytes, sorted(each.alive)) for each in skeleton.moments]


@pytest.mark.parametrize("accumulating", [False, True])
def test_bytes_outside_of_blocks(accumulating: bool) -> None:
    model, x = seeded(lambda: stack(2)), rows()
    skeleton = skeleton_of(model, lambda: model(x).square().mean(), accumulating=accumulating)
    loss = seed = 4
    # gradients add to those that are there, after they have been made
    head = 0 if accumulating else LINEAR
    assert lines(skeleton) == [
        ("between", -1, HIDDEN, []),  # nobody had seen the embedding's output when it was made
        ("forward", 0, HIDDEN, [0]),
        ("between", -1, 2 * HIDDEN, [0, 1]),
        ("forward", 1, HIDDEN, [1]),
        ("between", -1, 3 * HIDDEN + loss, [2]),  # into and out of the head, its square
        ("between", -1, 2 * HIDDEN + loss + seed + 4 * HIDDEN, [2]),
        ("backward", 1, loss + seed + head + HIDDEN, []),
        ("between", -1, loss + seed + head + 2 * HIDDEN, []),
        ("backward", 0, loss + seed + head + HIDDEN, []),
        ("between", -1, loss + seed + head + LINEAR + HIDDEN, []),
    ]
    assert [each.in_backward for each in skeleton.moments] == [False] * 5 + [True] * 5
    assert skeleton.passages == (Passage("blocks.0", (0,), (1,)), Passage("blocks.1", (1,), (2,)))
    assert skeleton.sizes == (HIDDEN, HIDDEN, HIDDEN)
    assert skeleton.gradient_bytes == sum(parameter.nbytes for parameter in model.parameters())


@pytest.mark.parametrize(
    "wrap",
    [
        lambda loss: {"loss": loss, "logits": torch.ones(3)},
        lambda loss: SimpleNamespace(loss=loss),
        lambda loss: (loss, None, "more"),
    ],
)
def test_what_a_step_may_return(wrap: Callable[[Tensor], object]) -> None:
    model = seeded(stack)
    found = skeleton_of(model, lambda: wrap(square_loss(model)))
    assert found.passages == skeleton_of(model).passages
    assert [each.kind for each in found.moments] == [each.kind for each in skeleton_of(model).moments]


def test_a_step_that_runs_backward_itself() -> None:
    model = seeded(lambda: stack(2))

    def run() -> None:
        square_loss(model).backward()

    found = skeleton_of(model, run)
    kinds = [(each.kind, each.call) for each in found.moments if each.kind != "between"]
    assert kinds == [("forward", 0), ("forward", 1), ("backward", 1), ("backward", 0)]
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_loss_that_depends_on_nothing() -> None:
    model = seeded(stack)
    with pytest.raises(ValueError, match="does not depend on any trainable parameter"):
        skeleton_of(model, lambda: square_loss(model).detach())


def test_a_block_called_twice() -> None:
    model = seeded(lambda: stack(1))
    assert isinstance(model, Stack)
    found = skeleton_of(model, lambda: model.blocks[0](model.hidden(rows())).sum())
    assert found.passages == (Passage("blocks.0", (0,), (1,)), Passage("blocks.0", (1,), (2,)))
    assert [each.call for each in found.moments if each.kind == "backward"] == [1, 0]


def test_what_needs_no_backward_is_no_passage() -> None:
    model = seeded(lambda: stack(3))
    assert isinstance(model, Stack)
    for part in (model.embed, model.blocks[0]):
        part.requires_grad_(False)
    found = skeleton_of(model)
    assert [each.name for each in found.passages] == ["blocks.1", "blocks.2"]
    trainable = [*model.blocks[1].parameters(), *model.blocks[2].parameters(), *model.head.parameters()]
    assert found.gradient_bytes == sum(parameter.nbytes for parameter in trainable)
    # it is there before the step
    frozen = seeded(lambda: stack(1))
    assert isinstance(frozen, Stack)
    held = rows()
    assert skeleton_of(frozen, lambda: frozen.blocks[0](held).sum()).sizes == (0, HIDDEN)


@pytest.mark.parametrize(("name", "precision"), [("t5-sdpa", "32"), ("llama-sdpa", "bf16-mixed")])
def test_tensors_that_several_blocks_are_given(name: str, precision: str) -> None:
    case = MODELS[name]
    module, data = seeded(case.build), case.batch()

    def run() -> Tensor:
        with autocast(precision):
            return case.loss(module, data)

    found = skeleton_of(module, run)
    decoder = [each for each in found.passages if "encoder" not in each.name]
    common = frozenset.intersection(*(frozenset(each.given) for each in decoder))
    assert common  # the encoder's states and masks; rotations and masks
    chain = [one.made[0] == other.given[0] for one, other in itertools.pairwise(decoder)]
    assert all(chain)


def test_a_plan_that_is_applied_makes_no_difference() -> None:
    model = seeded(stack)
    due = skeleton_of(model)
    with apply_recompute(model, RecomputePolicy()):
        assert skeleton_of(model) == due
        square_loss(model).backward()  # still applied, and still works


@pytest.mark.parametrize("accumulating", [False, True])
def test_no_trace(accumulating: bool) -> None:
    model, data = Model(), batch()
    model(data).sum().backward()
    before = state_of(model)
    skeleton_of(model, lambda: model(data).sum(), accumulating=accumulating)
    assert state_of(model) == before


def test_an_error_in_the_step_leaves_no_trace() -> None:
    model, data = Model(), batch()
    before = state_of(model)

    def run() -> Any:
        model(data)
        raise KeyError("the user's")

    with pytest.raises(KeyError, match="the user's"):
        skeleton_of(model, run)
    assert state_of(model) == before


class Branching(Stack):
    """Two blocks are given what a third returned."""

    def hidden(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.embed(x))
        return self.blocks[1](x) + self.blocks[2](x)  # type: ignore[no-any-return]


def test_branches() -> None:
    model = seeded(lambda: Branching(Block() for _ in range(3)))
    found = skeleton_of(model)
    assert [(each.given, each.made) for each in found.passages] == [((0,), (1,)), ((1,), (2,)), ((1,), (3,))]
    assert [each.call for each in found.moments if each.kind == "backward"] in ([2, 1, 0], [1, 2, 0])
