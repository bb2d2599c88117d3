"""What a user says of a pipeline."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_recompute.cost import in_flight
from lightning_recompute.pipeline_settings import PipelineSettings, runnable, settled_schedule


@pytest.mark.parametrize(
    ("schedule", "virtual", "due"),
    [
        ("1f1b", 1, ("1f1b", 1)),
        ("1f1b", 2, ("interleaved-1f1b", 2)),
        ("gpipe", 1, ("gpipe", 1)),
        ("interleaved-1f1b", 3, ("interleaved-1f1b", 3)),
        ("interleaved-zero-bubble", 1, ("interleaved-zero-bubble", 1)),
        ("zbv-zero-bubble", 1, ("zbv-zero-bubble", 2)),
        ("zbv-zero-bubble", 2, ("zbv-zero-bubble", 2)),
    ],
)
def test_what_runs(schedule: str, virtual: int, due: tuple[str, int]) -> None:
    assert settled_schedule(schedule, virtual) == due


@pytest.mark.parametrize(
    ("schedule", "virtual", "error", "words"),
    [
        ("dualpipe", 1, ValueError, "1f1b"),
        ("gpipe", 2, ValueError, "1 chunk on each rank"),
        ("zbv-zero-bubble", 3, ValueError, "2 chunks on each rank"),
        ("1f1b", 0, ValueError, "at least 1"),
        ("1f1b", 2.0, TypeError, "an int"),
        ("1f1b", True, TypeError, "an int"),
    ],
)
def test_what_cannot_run(schedule: str, virtual: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        settled_schedule(schedule, virtual)


@pytest.mark.parametrize(("number", "error"), [(0, ValueError), (1.5, TypeError), (True, TypeError)])
def test_numbers_of_microbatches(number: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="num_microbatches"):
        PipelineSettings(num_microbatches=number)


def test_four_for_each_rank_and_no_more_than_rows() -> None:
    assert PipelineSettings().num_microbatches_of(100, 2) == 8
    assert PipelineSettings().num_microbatches_of(5, 2) == 5
    assert PipelineSettings(num_microbatches=3).num_microbatches_of(100, 2) == 3


@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "interleaved-zero-bubble"])
def test_interleaved_schedules_go_in_rounds(schedule: str) -> None:
    for wanted in range(1, 20):
        number = runnable(schedule, 3, wanted)
        assert wanted - 3 < number <= wanted
        in_flight(schedule, 3, number, 2)
        if number < wanted:
            with pytest.raises(ValueError, match="equal rounds"):
                in_flight(schedule, 3, wanted, 2)
            with pytest.raises(ValueError, match=f"take {number}"):
                PipelineSettings(schedule=schedule, virtual=2, num_microbatches=wanted).check_ranks(3)
    assert runnable("1f1b", 3, 7) == 7


def test_a_pipeline_has_two_ranks() -> None:
    PipelineSettings().check_ranks(2)
    with pytest.raises(ValueError, match="at least 2 ranks"):
        PipelineSettings().check_ranks(1)


@pytest.mark.parametrize("words", [{"virtual": 2}, {"schedule": "zbv-zero-bubble"}])
def test_only_single_chunks_are_balanced(words: dict[str, Any]) -> None:
    assert PipelineSettings(schedule="gpipe", split="balanced").split == "balanced"
    with pytest.raises(ValueError, match="split='balanced' with schedule="):
        PipelineSettings(split="balanced", **words)
