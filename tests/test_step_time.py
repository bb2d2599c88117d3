"""The clock of a pipeline step: closed forms, and a naive relaxation over all start times as oracle."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_recompute.schedule_actions import num_chunks, place, rank_actions
from lightning_recompute.schedules import SCHEDULES
from lightning_recompute.step_time import ChunkSeconds, Interval, StepTimeline, estimate_seconds, simulate

SINGLE = ("gpipe", "1f1b")


def relaxed(schedule: str, parts: list[ChunkSeconds], num_stages: int, num_microbatches: int, send: float) -> float:
    """A step's seconds: ends of all actions raised until each is after what it has to be after."""
    virtual = len(parts) // num_stages
    ends: dict[tuple[str, int, int], float] = {}
    before: dict[tuple[str, int, int], list[tuple[tuple[str, int, int], float]]] = {}
    lengths: dict[tuple[str, int, int], float] = {}
    rank_of: dict[int, int] = {}
    for rank, actions in enumerate(rank_actions(schedule, num_stages, num_microbatches, virtual)):
        previous = None
        for kind, chunk, number in actions:
            part = place(schedule, num_stages, chunk, rank)
            rank_of[part] = rank
            key = ("back" if kind in ("input", "backward") else kind, part, number)
            one = parts[part]
            weight = one.backward / 2 if one.weight is None else one.weight
            lengths[key] = {
                "forward": one.forward,
                "backward": one.recompute + one.backward,
                "input": one.recompute + one.backward - weight,
                "weight": weight,
            }[kind]
            before[key] = [(previous, 0.0)] if previous else []
            ends[key] = 0.0
            previous = key
    for (kind, part, number), needs in before.items():
        if kind == "weight":
            needs.append((("back", part, number), 0.0))
            continue
        other = part - 1 if kind == "forward" else part + 1
        if 0 <= other < len(parts):
            needs.append(((kind, other, number), send if rank_of[other] != rank_of[part] else 0.0))
        elif kind == "back":
            needs.append((("forward", part, number), 0.0))
    changed = True
    while changed:
        changed = False
        for key, needs in before.items():
            end = max((ends[other] + wait for other, wait in needs), default=0.0) + lengths[key]
            if end != ends[key]:
                ends[key], changed = end, True
    return max(ends.values())


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, list[ChunkSeconds], int, int, float]:
    schedule = draw(st.sampled_from(SCHEDULES))
    num_stages = draw(st.integers(1, 4))
    virtual = 1 if schedule in SINGLE else 2 if schedule.startswith("zbv") else draw(st.integers(1, 3))
    num_microbatches = draw(st.integers(1, 3)) * (num_stages if schedule not in SINGLE else 1)
    # eighths add up without rounding
    eighths = st.integers(0, 16).map(lambda number: number / 8)
    part = st.tuples(eighths, eighths, eighths, st.none() | st.integers(0, 8)).map(
        lambda some: ChunkSeconds(*some[:3], weight=None if some[3] is None else some[1] * some[3] / 8)
    )
    parts = draw(st.lists(part, min_size=num_stages * virtual, max_size=num_stages * virtual))
    return schedule, parts, num_stages, num_microbatches, draw(eighths)


@settings(max_examples=150, deadline=None)
@given(cases())
def test_steps_take_what_a_naive_relaxation_finds(case: Any) -> None:
    schedule, parts, num_stages, num_microbatches, send = case
    virtual = len(parts) // num_stages
    step = simulate(schedule, parts, num_stages, num_microbatches, virtual, send)
    assert step.seconds == relaxed(*case)
    # all work is done, once, and a rank does one thing at a time
    for rank, intervals in enumerate(step.ranks):
        mine = [parts[place(schedule, num_stages, chunk, rank)] for chunk in range(num_chunks(schedule, virtual))]
        assert step.busy_seconds[rank] == num_microbatches * sum(part.total for part in mine)
        for one, following in itertools.pairwise(intervals):
            assert one.start <= one.stop <= following.start


@pytest.mark.parametrize("schedule", SINGLE)
@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(1, 1), (2, 8), (4, 2), (8, 64)])
def test_equal_stages_take_m_plus_p_minus_1_turns(schedule: str, num_stages: int, num_microbatches: int) -> None:
    part = ChunkSeconds(1.0, 2.0, 0.5)
    step = simulate(schedule, [part] * num_stages, num_stages, num_microbatches)
    assert step.seconds == (num_microbatches + num_stages - 1) * 3.5
    assert step.seconds == estimate_seconds([part] * num_stages, num_microbatches)
    assert step.bubble_seconds == (3.5 * (num_stages - 1),) * num_stages
    assert step.bubble_fraction == pytest.approx((num_stages - 1) / (num_microbatches + num_stages - 1))


@pytest.mark.parametrize("virtual", [1, 2, 4])
@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(2, 8), (4, 16), (8, 16)])
def test_interleaving_divides_the_bubble(virtual: int, num_stages: int, num_microbatches: int) -> None:
    # arXiv 2104.04473, section 2.2: (p - 1)(f + b) / v
    part = ChunkSeconds(1.0 / virtual, 2.0 / virtual)
    step = simulate("interleaved-1f1b", [part] * (num_stages * virtual), num_stages, num_microbatches, virtual)
    assert step.seconds == pytest.approx(3.0 * num_microbatches + 3.0 * (num_stages - 1) / virtual, rel=1e-12)


def test_zbv_has_no_bubble_in_its_middle() -> None:
    # arXiv 2401.10241: where forward and both parts of backward take the same time
    part = ChunkSeconds(1.0, 2.0)
    steps = [simulate("zbv-zero-bubble", [part] * 8, 4, number, 2).seconds for number in (8, 16)]
    assert steps[1] - steps[0] == 8 * 2 * 3.0
    assert steps[0] < simulate("interleaved-1f1b", [part] * 8, 4, 8, 2).seconds


def test_the_part_for_weights_fills_the_bubble() -> None:
    part = ChunkSeconds(1.0, 2.0)
    split = simulate("interleaved-zero-bubble", [part] * 4, 4, 8).seconds
    assert split < simulate("interleaved-1f1b", [part] * 4, 4, 8).seconds == 33.0


def test_recompute_waits_for_the_gradient() -> None:
    step = simulate("1f1b", [ChunkSeconds(1.0, 2.0, 0.5), ChunkSeconds(1.0, 1.0)], 2, 1, send_seconds=0.25)
    assert step.ranks[0] == (
        Interval("forward", 0, 0, 0, 0.0, 1.0),
        Interval("recompute", 0, 0, 0, 3.5, 4.0),
        Interval("backward", 0, 0, 0, 4.0, 6.0),
    )
    assert step.work_seconds() == {"forward": 2.0, "recompute": 0.5, "backward": 3.0, "weight": 0.0}
    assert step.bubble_seconds == (2.5, 4.0)


def test_a_recompute_below_zero_makes_backward_shorter() -> None:
    step = simulate("gpipe", [ChunkSeconds(1.0, 2.0, -0.5)], 1, 2)
    assert isinstance(step, StepTimeline)
    assert step.seconds == 5.0
    assert {one.work for one in step.ranks[0]} == {"forward", "backward"}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ChunkSeconds(-1.0, 2.0), r"forward=.*at least 0 is due, found -1"),
        (lambda: ChunkSeconds(1.0, float("inf")), "backward=.*a finite number"),
        (lambda: ChunkSeconds(1.0, 2.0, -3.0), "recompute=.*at least -2 is due"),
        (lambda: ChunkSeconds(1.0, 2.0, weight=3.0), "more than the whole backward's 2.0"),
        (lambda: simulate("1f1b", [ChunkSeconds(1.0, 2.0)], 2, 4), "seconds of 1 parts.* 2 ranks has 2"),
        (lambda: simulate("1f1b", [ChunkSeconds(1.0, 2.0)], 1, 4, send_seconds=-1.0), "send_seconds: .* found -1"),
    ],
)
def test_what_makes_no_sense_is_refused(call: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()


def test_seconds_are_numbers() -> None:
    with pytest.raises(TypeError, match=r"forward=.*a number is due, found '1'"):
        ChunkSeconds("1", 2.0)  # type: ignore[arg-type]
