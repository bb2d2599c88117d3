"""The memory of a step from its parts, on steps made by hand whose bytes can be added up in the head."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from lightning_recompute.timeline import CallCost, Level, Moment, MomentKind, Passage, Skeleton, levels, peak

SIZES = (100, 200, 400, 0)
"""Tensors into and out of blocks: what goes into block a, what goes from a to b, what b returns, what was there."""


def moment(kind: MomentKind, call: int, num_bytes: int, *alive: int, backward: bool = False) -> Moment:
    return Moment(kind, call, num_bytes, frozenset(alive), backward)


def step(names: Sequence[str] = ("a", "b")) -> Skeleton:
    """Embedding, block a, block b, head and loss, and back."""
    return Skeleton(
        moments=(
            moment("between", -1, 110, 0),
            moment("forward", 0, 100, 0),
            moment("between", -1, 200, 1),
            moment("forward", 1, 200, 1),
            moment("between", -1, 1000, 2),
            moment("between", -1, 1500, backward=True),
            moment("backward", 1, 400, backward=True),
            moment("between", -1, 200, backward=True),
            moment("backward", 0, 200, backward=True),
            moment("between", -1, 130, backward=True),
        ),
        passages=(Passage(names[0], (0, 3), (1,)), Passage(names[1], (1, 3), (2,))),
        sizes=SIZES,
        gradient_bytes=50,
    )


def cost(inner_bytes: int, *holds: int, cached: int = 0, gradient: int = 0, replayed: int = 0) -> CallCost:
    """Forward needs 11 bytes more than there are when it begins, backward 22."""
    return CallCost(inner_bytes, frozenset(holds), cached, 11, 22, gradient, replayed)


def parts(level: Level) -> tuple[int, int, int, int]:
    return level.outside_bytes, level.held_bytes, level.transient_bytes, level.gradient_bytes


def held(costs: Sequence[CallCost], **options: bool) -> list[int]:
    return [level.held_bytes for level in levels(step(), costs, **options)]


def test_every_moment_is_the_sum_of_its_parts() -> None:
    found = list(levels(step(), [cost(1000, gradient=7), cost(2000, gradient=9)]))
    assert [parts(level) for level in found] == [
        (110, 0, 0, 50),
        (100, 0, 11, 50),
        (200, 1000, 0, 50),
        (200, 1000, 11, 50),
        (1000, 3000, 0, 50),
        (1500, 3000, 0, 0),
        (400, 3000, 22, 0),
        (200, 1000, 0, 9),
        (200, 1000, 22, 9),
        (130, 0, 0, 16),
    ]
    assert [level.num_bytes for level in found[:2]] == [160, 161]
    assert [level.moment for level in found] == list(step().moments)


def test_what_blocks_hold_is_theirs_once_nobody_else_has_it() -> None:
    # a's input is alive until a has run, and then held; b's input too, which a holds as well: once
    assert held([cost(0, 0, 1), cost(0, 1)]) == [0, 0, 100, 100, 300, 300, 300, 300, 300, 0]
    assert held([cost(0), cost(0, 1)]) == [0, 0, 0, 0, 200, 200, 200, 0, 0, 0]
    # what b returned is outside's until the loss is computed
    assert held([cost(0), cost(0, 2)]) == [0, 0, 0, 0, 0, 400, 400, 0, 0, 0]
    # what was there before the step costs nothing
    assert held([cost(0, 3), cost(0, 3)]) == [0] * 10


def test_caches_are_gone_with_the_loss() -> None:
    assert held([cost(0, cached=5), cost(0, cached=6)]) == [0, 0, 5, 5, 11, 0, 0, 0, 0, 0]


def test_a_unit_is_replayed_at_the_first_of_its_backwards() -> None:
    costs = [cost(0, 0, replayed=1000), cost(10, replayed=2000)]
    found = [level.held_bytes for level in levels(step(), costs, [(0, 1)])]
    #                                 the unit: all of it, then what is left of it
    assert found == [0, 0, 100, 100, 110, 110, 3110, 1100, 1100, 0]
    without = [level.held_bytes for level in levels(step(), costs)]
    assert without == [0, 0, 100, 100, 110, 110, 110, 100, 100, 0]


@pytest.mark.parametrize(
    ("options", "due"),
    [
        ({}, [50, 50, 50, 50, 50, 0, 0, 9, 9, 16]),
        ({"former_gradients": False}, [0, 0, 0, 0, 0, 0, 0, 9, 9, 16]),
        ({"accumulating": True}, [50] * 10),
        ({"accumulating": True, "former_gradients": False}, [50] * 10),
    ],
)
def test_gradients_of_this_step_and_the_one_before(options: dict[str, bool], due: list[int]) -> None:
    costs = [cost(0, gradient=7), cost(0, gradient=9)]
    assert [level.gradient_bytes for level in levels(step(), costs, **options)] == due


def test_a_block_called_twice_has_its_gradients_once() -> None:
    costs = [cost(0, gradient=9), cost(0, gradient=9)]
    found = [level.gradient_bytes for level in levels(step(["a", "a"]), costs)]
    assert found[-3:] == [9, 9, 9]


def test_the_peak_is_the_first_of_the_highest() -> None:
    found = peak(levels(step(), [cost(1000), cost(2000)]))
    assert (found.num_bytes, found.moment) == (1500 + 3000, step().moments[5])
    even = Skeleton((moment("between", -1, 5), moment("between", -1, 5, backward=True)), (), (), 0)
    assert peak(levels(even, [])).moment == even.moments[0]
