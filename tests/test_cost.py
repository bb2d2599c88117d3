"""Cost: the peak of a stage is what an event-by-event ledger of its bytes shows."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stage_costs import all_choices, stages

from lightning_recompute.cost import (
    Option,
    PeakRow,
    StageCosts,
    extra_seconds,
    in_flight,
    peak_bytes,
    peak_row,
    peak_rows,
    segments,
)
from lightning_recompute.schedules import rank_order


class Ledger:
    """Bytes alive now and at most."""

    def __init__(self, static_bytes: int) -> None:
        self.alive = self.peak = static_bytes

    def allocate(self, num_bytes: int) -> None:
        self.alive += num_bytes
        self.peak = max(self.peak, self.alive)

    def free(self, num_bytes: int) -> None:
        self.alive -= num_bytes

    def touch(self, num_bytes: int) -> None:
        self.allocate(num_bytes)
        self.free(num_bytes)


def simulated_peak(stage: StageCosts, choices: Any, num_stages: int, num_microbatches: int, rank: int) -> int:
    """Run 1F1B on one rank, unit by unit, and see how many bytes were alive at most."""
    chosen = segments(stage, choices)
    ledger = Ledger(stage.static_bytes)
    for forward, _ in rank_order("1f1b", num_stages, num_microbatches, 1, rank):
        if forward:
            for unit, option in chosen:
                ledger.touch(stage.entry_at(unit) + option.forward_bytes)
                ledger.allocate(option.held_bytes)
        else:
            ledger.touch(stage.head_bytes)
            for unit, option in reversed(chosen):
                ledger.touch(option.transient_bytes + stage.gradients_at(unit + option.num_units - 1))
                ledger.free(option.held_bytes)
    assert ledger.alive == stage.static_bytes
    return max(ledger.peak, stage.floor_bytes)


@settings(max_examples=100, deadline=None)
@given(stages(), st.data())
def test_the_peak_is_that_of_the_ledger(stage: StageCosts, data: st.DataObject) -> None:
    choices = data.draw(st.sampled_from(list(all_choices(stage))))
    num_stages, rank = 4, 4 - stage.in_flight
    assert in_flight("1f1b", num_stages, 6)[rank] == stage.in_flight
    assert peak_bytes(stage, choices) == simulated_peak(stage, choices, num_stages, 6, rank)


KEEP = Option(held_bytes=100, extra_seconds=0.0, transient_bytes=5, forward_bytes=110)
FULL = Option(held_bytes=10, extra_seconds=1.5, transient_bytes=95, forward_bytes=105)
PAIR = Option(held_bytes=10, extra_seconds=3.0, transient_bytes=195, forward_bytes=115, num_units=2)
STAGE = StageCosts(
    options=((KEEP, FULL, PAIR), (KEEP, FULL), (KEEP, FULL)),
    static_bytes=1000,
    head_bytes=30,
    gradient_bytes=(60, 40, 20),
    entry_bytes=(1, 2, 3),
    in_flight=2,
)


def test_each_row_by_hand() -> None:
    rows = peak_rows(STAGE, (1, 0, 0))
    # held by the other microbatch: 10 + 100 + 100
    assert rows == [
        PeakRow("forward", 0, 1000, 210, 0, 105, 1),
        PeakRow("forward", 1, 1000, 210, 10, 110, 2),
        PeakRow("forward", 2, 1000, 210, 110, 110, 3),
        PeakRow("head", None, 1000, 210, 210, 30),
        PeakRow("backward", 2, 1000, 210, 210, 5, 20),
        PeakRow("backward", 1, 1000, 210, 110, 5, 40),
        PeakRow("backward", 0, 1000, 210, 10, 95, 60),
        PeakRow("floor", None),
    ]
    assert peak_bytes(STAGE, (1, 0, 0)) == 1450
    assert str(peak_row(STAGE, (1, 0, 0))) == "head"
    assert extra_seconds(STAGE, (1, 0, 0)) == 1.5


def test_a_group_has_the_entry_of_its_first_unit_and_the_gradients_of_its_last() -> None:
    rows = peak_rows(STAGE, (2, None, 0))
    assert rows[0] == PeakRow("forward", 0, 1000, 110, 0, 115, 1)
    assert rows[-2] == PeakRow("backward", 0, 1000, 110, 10, 195, 40)
    assert str(rows[-2]) == "backward of unit 0"
    assert segments(STAGE, (2, None, 0)) == [(0, PAIR), (2, KEEP)]


def test_rows_say_what_they_consist_of() -> None:
    row = peak_rows(STAGE, (1, 0, 0))[4]
    assert row.parts() == {"static": 1000, "waiting": 210, "held": 210, "working": 5, "besides": 20}
    assert row.total_bytes == 1445


def test_a_floor_hides_what_is_below() -> None:
    stage = StageCosts(((FULL,),), floor_bytes=10**6)
    assert peak_row(stage, (0,)) == PeakRow("floor", None, working_bytes=10**6)


def test_a_stage_without_units() -> None:
    assert peak_bytes(StageCosts((), static_bytes=7, head_bytes=5), ()) == 12
    assert extra_seconds(StageCosts(()), ()) == 0


def test_counts_are_exact_beyond_floats() -> None:
    big = 2**60 + 1
    assert peak_bytes(StageCosts(((Option(big, 0.0),),), in_flight=3), (0,)) == 3 * big


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ((0, 0), "found 2 choices for 3 units"),
        ((0, 0, 2), "choice 2 at unit 2: an index from 0 to 1"),
        ((-1, 0, 0), "choice -1 at unit 0"),
        ((0, None, 0), "unit 1 needs a choice, found None"),
        ((2, 0, 0), "unit 1 is covered by the group before, found 0"),
        ((True, 0, 0), "choice True at unit 0"),
    ],
)
def test_choices_that_do_not_fit_are_refused(choices: Any, words: str) -> None:
    for function in (segments, peak_rows, peak_bytes, extra_seconds):
        with pytest.raises(ValueError, match=words):
            function(STAGE, choices)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"held_bytes": -1}, "held_bytes=.*at least 0 is due, found -1"),
        ({"transient_bytes": -1}, "transient_bytes"),
        ({"forward_bytes": -1}, "forward_bytes"),
        ({"num_units": 0}, "num_units=.*at least 1"),
        ({"extra_seconds": float("nan")}, "finite"),
        ({"extra_seconds": float("inf")}, "finite"),
    ],
)
def test_wrong_options_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Option(**{"held_bytes": 1, "extra_seconds": 0.0, **arguments})


@pytest.mark.parametrize("arguments", [{"held_bytes": 1.0}, {"held_bytes": True}, {"extra_seconds": "1"}])
def test_options_of_the_wrong_type_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="is due"):
        Option(**{"held_bytes": 1, "extra_seconds": 0.0, **arguments})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"options": ((KEEP,), ())}, "unit 1 has no option"),
        ({"options": ((KEEP,), (PAIR,))}, "unit 1 has an option for 2 units; only 1 are left"),
        ({"static_bytes": -1}, "static_bytes"),
        ({"head_bytes": -1}, "head_bytes"),
        ({"floor_bytes": -1}, "floor_bytes"),
        ({"in_flight": 0}, "in_flight=.*at least 1"),
        ({"gradient_bytes": (1,)}, "gradient_bytes=.*has 1 entries for 2 units"),
        ({"entry_bytes": (1, -2)}, "entry_bytes=.*at least 0 is due, found -2"),
        ({"gradient_bytes": -3}, "gradient_bytes"),
    ],
)
def test_wrong_stages_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        StageCosts(**{"options": ((KEEP,), (FULL,)), **arguments})


@pytest.mark.parametrize("arguments", [{"options": ((1,),)}, {"static_bytes": 1.5}, {"entry_bytes": (1.5,)}])
def test_stages_of_the_wrong_type_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="is due"):
        StageCosts(**{"options": ((KEEP,),), **arguments})
