"""What a user says of a pipeline, and what follows from it for its schedule and microbatches."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_recompute.division import Split
from lightning_recompute.schedules import SCHEDULES

_PER_RANK = 4
"""Microbatches for each rank of the pipeline, where the user says nothing."""


def settled_schedule(schedule: str, virtual: int) -> tuple[str, int]:
    """The schedule that runs and the chunks of each rank.

    Args:
        schedule: What the user said: one of `schedules.SCHEDULES`.
        virtual: Chunks on each rank, as the user said; 1 for not said.

    Returns:
        `interleaved-1f1b` for `1f1b` with several chunks, two chunks for `zbv-zero-bubble`.

    Raises:
        ValueError: The two do not go together, or one is unknown.
        TypeError: `virtual` is no int.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule={schedule!r}: one of {', '.join(SCHEDULES)} is due")
    if isinstance(virtual, bool) or not isinstance(virtual, int):
        raise TypeError(f"virtual_pipeline_size={virtual!r}: an int is due")
    if virtual < 1:
        raise ValueError(f"virtual_pipeline_size={virtual}: at least 1 is due")
    if schedule == "zbv-zero-bubble":
        if virtual > 2:
            raise ValueError(
                f"virtual_pipeline_size={virtual} with schedule='zbv-zero-bubble', which has 2 chunks on each rank: "
                "leave virtual_pipeline_size out, or take schedule='interleaved-zero-bubble'"
            )
        return schedule, 2
    if schedule == "gpipe" and virtual > 1:
        raise ValueError(
            f"virtual_pipeline_size={virtual} with schedule='gpipe', which has 1 chunk on each rank: leave "
            "virtual_pipeline_size out, or take schedule='interleaved-1f1b'"
        )
    return ("interleaved-1f1b" if schedule == "1f1b" and virtual > 1 else schedule), virtual


def runnable(schedule: str, num_ranks: int, wanted: int) -> int:
    """The most microbatches up to some number that a schedule can run: interleaved ones go in equal rounds.

    Args:
        schedule: The schedule that runs; see `settled_schedule`.
        num_ranks: Ranks of the pipeline.
        wanted: The number.
    """
    if schedule.startswith("interleaved"):
        while wanted % max(1, wanted // num_ranks):
            wanted -= 1
    return wanted


@dataclass(frozen=True, kw_only=True)
class PipelineSettings:
    """What a user says of a pipeline.

    Args:
        schedule: One of `schedules.SCHEDULES`.
        virtual: Chunks of the model on each rank.
        num_microbatches: Of one step; None: four for each rank. At most the rows of a batch.
        split: How blocks are divided; see `Division.of`. Or `balanced`: by measured time and memory, for schedules of
            one chunk on each rank; `balanced_settings` makes numbers of it before the module is divided.

    Raises:
        ValueError: A value, or two, that mean nothing.
        TypeError: A number that is no int.
    """

    schedule: str = "1f1b"
    virtual: int = 1
    num_microbatches: int | None = None
    split: Split = "count"

    def __post_init__(self) -> None:
        schedule, _ = settled_schedule(self.schedule, self.virtual)
        if self.split == "balanced" and schedule not in ("1f1b", "gpipe"):
            raise ValueError(
                f"split='balanced' with schedule={schedule!r}: blocks are balanced for schedules of one chunk on each "
                "rank, '1f1b' and 'gpipe'; divide them by split='count', or list the number of blocks of each chunk"
            )
        number = self.num_microbatches
        if number is not None and (isinstance(number, bool) or not isinstance(number, int)):
            raise TypeError(f"num_microbatches={number!r}: an int is due")
        if number is not None and number < 1:
            raise ValueError(f"num_microbatches={number}: at least 1 is due")

    def num_microbatches_of(self, rows: int, num_ranks: int) -> int:
        """Microbatches of a batch: as many as wanted, at most its rows, and as many as the schedule can run.

        Args:
            rows: Of the batch.
            num_ranks: Ranks of the pipeline.
        """
        schedule, _ = settled_schedule(self.schedule, self.virtual)
        return runnable(schedule, num_ranks, min(self.num_microbatches or _PER_RANK * num_ranks, rows))

    def check_ranks(self, num_ranks: int) -> None:
        """Refuse numbers that do not go together.

        Args:
            num_ranks: Ranks of the pipeline.

        Raises:
            ValueError: One rank, or a number of microbatches that the schedule cannot run.
        """
        if num_ranks < 2:
            raise ValueError(
                f"pipeline_parallel_size={num_ranks}: a pipeline has at least 2 ranks; leave its settings out"
            )
        schedule, _ = settled_schedule(self.schedule, self.virtual)
        wanted = self.num_microbatches
        if wanted is not None and (near := runnable(schedule, num_ranks, wanted)) != wanted:
            raise ValueError(
                f"num_microbatches={wanted} do not fall into equal rounds over {num_ranks} pipeline ranks, which "
                f"schedule={schedule!r} needs; take {near}, or a multiple of {num_ranks}"
            )


def settings_of(
    size: int, virtual: int, num_microbatches: int | None, schedule: str, split: Split
) -> PipelineSettings | None:
    """The settings of a pipeline from the words of a strategy.

    Args:
        size: `pipeline_parallel_size`.
        virtual: `virtual_pipeline_size`.
        num_microbatches: The same.
        schedule: The same.
        split: The same.

    Returns:
        None where there is one rank.

    Raises:
        ValueError: A value, or two, that mean nothing.
        TypeError: A number that is no int.
    """
    settings = PipelineSettings(schedule=schedule, virtual=virtual, num_microbatches=num_microbatches, split=split)
    if size != 1:
        return settings
    defaults = PipelineSettings()
    words = {
        "virtual_pipeline_size": (virtual, defaults.virtual),
        "num_microbatches": (num_microbatches, defaults.num_microbatches),
        "schedule": (schedule, defaults.schedule),
        "split": (split, defaults.split),
    }
    given = ", ".join(f"{word}={value!r}" for word, (value, default) in words.items() if value != default)
    if given:
        raise ValueError(
            f"{given} with pipeline_parallel_size=1, which has one stage: set pipeline_parallel_size, or leave the "
            "rest out (a batch is divided into steps by accumulate_grad_batches)"
        )
    return None
