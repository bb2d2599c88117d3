"""Schedules: the order that torch runs, and how many microbatches are alive."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.pipelining import schedules as torchs

from lightning_recompute.schedules import in_flight, live_vectors, rank_order


def torch_order(kind: type, num_stages: int, num_microbatches: int, virtual: int, rank: int) -> list[tuple[bool, int]]:
    """The events of one rank in torch's own schedule; making it whole would take a process group."""
    schedule: Any = object.__new__(kind)
    schedule.pp_group_size, schedule.n_local_stages = num_stages, virtual
    schedule._num_stages = schedule.num_stages = num_stages * virtual
    schedule._n_microbatches = num_microbatches
    schedule.number_of_rounds = max(1, num_microbatches // num_stages)
    schedule.microbatches_per_round = num_microbatches // schedule.number_of_rounds
    freeing = (torchs._ComputationType.FULL_BACKWARD, torchs._ComputationType.BACKWARD_WEIGHT)
    return [
        (action.computation_type == torchs._ComputationType.FORWARD, action.stage_index // num_stages)
        for action in schedule._calculate_single_rank_operations(rank)
        if action is not None and action.computation_type in (torchs._ComputationType.FORWARD, *freeing)
    ]


@pytest.mark.parametrize(
    ("name", "kind", "virtual"),
    [
        ("interleaved-1f1b", torchs.ScheduleInterleaved1F1B, 2),
        ("interleaved-1f1b", torchs.ScheduleInterleaved1F1B, 3),
        ("interleaved-zero-bubble", torchs.ScheduleInterleavedZeroBubble, 2),
        ("interleaved-zero-bubble", torchs.ScheduleInterleavedZeroBubble, 1),
        ("zbv-zero-bubble", torchs.ScheduleZBVZeroBubble, 2),
    ],
)
@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(1, 3), (2, 2), (2, 8), (3, 2), (4, 4), (4, 8), (4, 16)])
def test_the_order_is_torchs(name: str, kind: type, virtual: int, num_stages: int, num_microbatches: int) -> None:
    for rank in range(num_stages):
        ours = list(rank_order(name, num_stages, num_microbatches, virtual, rank))
        assert ours == torch_order(kind, num_stages, num_microbatches, virtual, rank)


@pytest.mark.parametrize(
    ("schedule", "virtual", "due"),
    [
        ("gpipe", 1, (8, 8, 8, 8)),
        ("1f1b", 1, (4, 3, 2, 1)),
        ("interleaved-1f1b", 2, (11, 9, 7, 5)),
        ("zbv-zero-bubble", 2, (8, 8, 8, 8)),
        ("zbv-zero-bubble", 1, (8, 8, 8, 8)),
        ("interleaved-zero-bubble", 2, (8, 8, 8, 8)),
    ],
)
def test_alive_at_four_stages_and_eight_microbatches(schedule: str, virtual: int, due: tuple[int, ...]) -> None:
    assert in_flight(schedule, 4, 8, virtual) == due


@pytest.mark.parametrize(("num_microbatches", "due"), [(1, (1, 1, 1, 1)), (2, (2, 2, 2, 1)), (16, (4, 3, 2, 1))])
def test_few_microbatches_under_1f1b(num_microbatches: int, due: tuple[int, ...]) -> None:
    assert in_flight("1f1b", 4, num_microbatches) == due


def test_one_stage_has_one_microbatch_alive() -> None:
    assert in_flight("1f1b", 1, 8) == (1,)


@pytest.mark.parametrize(("num_stages", "virtual"), [(8, 3), (35, 3), (16, 2)])
def test_the_first_rank_has_the_papers_factor(num_stages: int, virtual: int) -> None:
    # arXiv 2205.05198: p (1 + (p - 1) / (p m)) stages' worth of activations
    alive = in_flight("interleaved-1f1b", num_stages, 2 * num_stages, virtual)[0]
    assert alive / virtual == pytest.approx(num_stages * (1 + (num_stages - 1) / (num_stages * virtual)))


def test_chunks_are_not_loaded_alike() -> None:
    first = live_vectors("interleaved-1f1b", 8, 64, 3)[0]
    assert (16, 13, 2) in first
    assert max(map(sum, first)) == 31
    assert live_vectors("1f1b", 3, 8) == (((3,),), ((2,),), ((1,),))


def test_no_vector_is_covered_by_another() -> None:
    for vectors in live_vectors("interleaved-1f1b", 4, 8, 3):
        for one in vectors:
            assert not any(
                other != one and all(left >= right for left, right in zip(other, one, strict=True)) for other in vectors
            )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("dualpipe", 4, 8), "unknown schedule 'dualpipe'; one of gpipe"),
        (("1f1b", 0, 8), "num_stages=0: at least 1"),
        (("1f1b", 4, -1), "num_microbatches=-1"),
        (("1f1b", 4, 8, 2), "interleaved-1f1b has more"),
        (("zbv-zero-bubble", 4, 8, 3), "two chunks a rank, found virtual=3"),
        (("interleaved-1f1b", 4, 9, 2), "9 microbatches do not fall into 2 equal rounds over 4 stages"),
    ],
)
def test_what_cannot_run_is_refused(arguments: tuple[Any, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        in_flight(*arguments)


@pytest.mark.parametrize("count", [2.0, "2", True])
def test_counts_are_ints(count: object) -> None:
    with pytest.raises(TypeError, match=r"num_stages=.*an int is due"):
        in_flight("1f1b", count, 8)  # type: ignore[arg-type]
