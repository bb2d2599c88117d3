"""The actions of each schedule: torch's, microbatch by microbatch, and those that are counted as alive."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.pipelining import schedules as torchs

from lightning_recompute.schedule_actions import Action, num_chunks, place, rank_actions
from lightning_recompute.schedules import SCHEDULES, rank_order

KINDS = {"FORWARD": "forward", "FULL_BACKWARD": "backward", "BACKWARD_INPUT": "input", "BACKWARD_WEIGHT": "weight"}
SIZES = [(1, 3), (2, 2), (2, 8), (3, 2), (4, 4), (4, 8), (4, 16)]
MANY = [
    ("interleaved-1f1b", torchs.ScheduleInterleaved1F1B, 2),
    ("interleaved-1f1b", torchs.ScheduleInterleaved1F1B, 3),
    ("interleaved-zero-bubble", torchs.ScheduleInterleavedZeroBubble, 2),
    ("interleaved-zero-bubble", torchs.ScheduleInterleavedZeroBubble, 1),
    ("zbv-zero-bubble", torchs.ScheduleZBVZeroBubble, 2),
]


def torch_actions(kind: type, num_stages: int, num_microbatches: int, virtual: int, rank: int) -> list[tuple[Any, ...]]:
    """Kind, part of the model and microbatch of each action in torch's own schedule of one rank."""
    schedule: Any = object.__new__(kind)
    schedule.pp_group_size, schedule.n_local_stages = num_stages, virtual
    schedule._num_stages = schedule.num_stages = num_stages * virtual
    schedule._n_microbatches = num_microbatches
    schedule.number_of_rounds = max(1, num_microbatches // num_stages)
    schedule.microbatches_per_round = num_microbatches // schedule.number_of_rounds
    return [
        (KINDS[action.computation_type.name], action.stage_index, action.microbatch_index)
        for action in schedule._calculate_single_rank_operations(rank)
        if action is not None
    ]


@pytest.mark.parametrize(("name", "kind", "virtual"), MANY)
@pytest.mark.parametrize(("num_stages", "num_microbatches"), SIZES)
def test_the_actions_are_torchs(name: str, kind: type, virtual: int, num_stages: int, num_microbatches: int) -> None:
    for rank, actions in enumerate(rank_actions(name, num_stages, num_microbatches, virtual)):
        ours = [(what, place(name, num_stages, chunk, rank), number) for what, chunk, number in actions]
        assert ours == torch_actions(kind, num_stages, num_microbatches, virtual, rank)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("num_stages", "num_microbatches"), SIZES)
def test_what_is_counted_as_alive_has_the_same_order(schedule: str, num_stages: int, num_microbatches: int) -> None:
    virtual = {"gpipe": 1, "1f1b": 1}.get(schedule, 2)
    for rank, actions in enumerate(rank_actions(schedule, num_stages, num_microbatches, virtual)):
        events = [(kind == "forward", chunk) for kind, chunk, _ in actions if kind != "input"]
        assert events == list(rank_order(schedule, num_stages, num_microbatches, virtual, rank))


def test_one_forward_one_backward() -> None:
    first, last = rank_actions("1f1b", 2, 3)
    order = [("forward", 0), ("forward", 1), ("backward", 0), ("forward", 2), ("backward", 1), ("backward", 2)]
    assert first == [Action(kind, 0, number) for kind, number in order]  # type: ignore[arg-type]
    assert [action.kind for action in last] == ["forward", "backward"] * 3


def test_where_the_parts_of_the_model_are() -> None:
    assert [place("interleaved-1f1b", 4, chunk, 1) for chunk in range(3)] == [1, 5, 9]
    assert [place("zbv-zero-bubble", 4, chunk, 1) for chunk in range(2)] == [1, 6]
    assert (num_chunks("zbv-zero-bubble", 1), num_chunks("interleaved-1f1b", 3)) == (2, 3)


def test_what_cannot_run_is_refused() -> None:
    with pytest.raises(ValueError, match="9 microbatches do not fall into 2 equal rounds"):
        rank_actions("interleaved-1f1b", 4, 9, 2)
