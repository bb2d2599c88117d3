"""The memory of a rank over a step, from what one microbatch takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_recompute.cost import in_flight, live_vectors
from lightning_recompute.schedule_actions import num_chunks, place, rank_actions
from lightning_recompute.stage_memory import (
    ChunkMemory,
    Kind,
    RankAction,
    RankGradients,
    SplitMemory,
    highest,
    stage_levels,
)
from lightning_recompute.stage_search import alive_together

KINDS = {"forward": Kind.FORWARD, "backward": Kind.BACKWARD, "input": Kind.INPUT, "weight": Kind.WEIGHT}
NO_GRADIENTS = RankGradients(dict.fromkeys(range(16), 0), 0)
# a hidden state has 10 bytes
MIDDLE = ChunkMemory(10, 10, forward_bytes=80, waiting_bytes=50, backward_bytes=130, accumulating_bytes=110)
FIRST = replace(MIDDLE, received_bytes=0, forward_bytes=70, waiting_bytes=40, backward_bytes=120, accumulating_bytes=95)


def actions_of(schedule: str, num_ranks: int, num_microbatches: int, rank: int, virtual: int = 1) -> list[RankAction]:
    found = rank_actions(schedule, num_ranks, num_microbatches, virtual)[rank]
    return [
        RankAction(KINDS[action.kind], place(schedule, num_ranks, action.chunk, rank), action.microbatch)
        for action in found
    ]


def test_the_first_rank_of_two() -> None:
    gradients = RankGradients({0: 30}, 30)
    levels = stage_levels("1f1b", actions_of("1f1b", 2, 3, 0), lambda chunk, number: FIRST, gradients)
    running = [level for level in levels if level.action is not None]
    assert [f"{level.action.kind.value}{level.action.microbatch}" for level in running if level.action] == [
        *("F0", "F1", "B0", "F2", "B1", "B2")
    ]
    forward, second, backward, third, again, last = running
    assert (forward.num_bytes, second.num_bytes) == (70, 40 + 70)
    # the other one waits; of the first backward the gradients are among what runs
    assert (backward.gradient_bytes, backward.waiting_bytes, backward.running_bytes) == (0, 40, 120)
    assert (third.gradient_bytes, third.waiting_bytes, third.running_bytes) == (30, 40, 70)
    # torch's variables hold the gradient that was received last, and what was sent in the warm-up
    assert third.passing_bytes == 10 + 10
    assert (again.gradient_bytes, again.waiting_bytes, again.running_bytes) == (30, 40, 95)
    assert last.waiting_bytes == 0
    assert highest(levels).num_bytes == max(level.num_bytes for level in levels)
    assert max(level.in_flight for level in levels) == 2


def test_gradients_that_are_there() -> None:
    actions = actions_of("gpipe", 2, 2, 1)
    aside = RankGradients({1: 30}, 30, former_bytes=7, accumulating=True)
    levels = stage_levels("gpipe", actions, lambda chunk, number: MIDDLE, aside)
    assert {level.gradient_bytes for level in levels} == {37}
    assert {level.running_bytes for level in levels if level.action} == {80, 110}


def test_chunks_share_gradients_and_hidden_states() -> None:
    # the second and the third stage are on the second rank of a V
    actions = [RankAction(kind, chunk, 0) for kind, chunk in ((Kind.FORWARD, 1), (Kind.FORWARD, 2))]
    actions += [RankAction(Kind.BACKWARD, 2, 0), RankAction(Kind.BACKWARD, 1, 0)]
    levels = stage_levels("other", actions, lambda chunk, number: MIDDLE, RankGradients({1: 30, 2: 30}, 40))
    running = [level for level in levels if level.action is not None]
    # what the one sends is what the other receives
    assert [level.num_bytes for level in running] == [80, 50 - 10 + 80, 50 - 10 + 130, 30 + 130]
    assert levels[-1].gradient_bytes <= 40


def test_between_the_parts_of_a_backward() -> None:
    split = replace(MIDDLE, split=SplitMemory(200, 150, 170, 160))
    kinds = Kind.FORWARD, Kind.INPUT, Kind.SEND_GRADIENT
    actions = [RankAction(kind, 1, number) for number in range(2) for kind in kinds]
    actions += [RankAction(Kind.WEIGHT, 1, number) for number in range(2)]
    levels = stage_levels("other", actions, lambda chunk, number: split, NO_GRADIENTS)
    running = [(level.action.kind.value, level.num_bytes) for level in levels if level.action is not None]
    assert running == [("F", 80), ("I", 200), ("F", 230), ("I", 350), ("W", 320), ("W", 160)]
    whole = stage_levels("other", actions, lambda chunk, number: replace(split, split=None), NO_GRADIENTS)
    assert highest(whole).num_bytes < highest(levels).num_bytes


@pytest.mark.parametrize(
    "schedule", ["gpipe", "1f1b", "interleaved-1f1b", "interleaved-zero-bubble", "zbv-zero-bubble"]
)
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(2, 4), (4, 8), (4, 4)])
def test_as_many_are_held_as_the_planner_counts(schedule: str, num_ranks: int, num_microbatches: int) -> None:
    virtual = 2 if schedule.startswith("interleaved") else 1
    due = in_flight(schedule, num_ranks, num_microbatches, virtual)
    vectors = live_vectors(schedule, num_ranks, num_microbatches, virtual)
    for rank in range(num_ranks):
        actions = actions_of(schedule, num_ranks, num_microbatches, rank, virtual)
        levels = stage_levels(schedule, actions, lambda chunk, number: MIDDLE, NO_GRADIENTS)
        assert max(level.in_flight for level in levels) >= due[rank]
        chunks = sorted({action.chunk for action in actions})
        assert len(chunks) == num_chunks(schedule, virtual)
        assert set(alive_together(actions, chunks, frozenset())) == set(vectors[rank])
