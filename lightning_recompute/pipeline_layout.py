"""Sizes of the groups of a run, and the order of its microbatches: what a forecast of its ranks is for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lightning_recompute.division import Division, Split
from lightning_recompute.pipeline_settings import PipelineSettings, settled_schedule


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A run over ranks.

    Args:
        tensor: Ranks that share each layer.
        sequence: Whether they divide hidden states along the sequence.
        pipeline: Stages.
        virtual: Chunks of blocks on each stage.
        schedule: One of `schedules.SCHEDULES`.
        num_microbatches: Of a step; None: four for each stage, at most the rows of a batch.
        split: How blocks are divided over chunks: `count`, `balanced`, or the number of blocks of each chunk.
        data: Ranks that divide the data.
        data_parallel: What these hold: `replicate`, all of the stage; `shard`, parts of it.

    Raises:
        ValueError: A value, or two, that mean nothing.
        TypeError: A size that is no int.
    """

    tensor: int = 1
    sequence: bool = False
    pipeline: int = 1
    virtual: int = 1
    schedule: str = "1f1b"
    num_microbatches: int | None = None
    split: str | Sequence[int] = "count"
    data: int = 1
    data_parallel: Literal["replicate", "shard"] = "replicate"

    def __post_init__(self) -> None:
        sizes = {
            "tensor_parallel_size": self.tensor,
            "pipeline_parallel_size": self.pipeline,
            "virtual_pipeline_size": self.virtual,
            "num_replicas": self.data,
        }
        for name, size in sizes.items():
            if isinstance(size, bool) or not isinstance(size, int):
                raise TypeError(f"{name}={size!r}: an int is due")
            if size < 1:
                raise ValueError(f"{name}={size}: at least 1 is due")
        if self.sequence and self.tensor == 1:
            raise ValueError(
                "sequence_parallel=True divides sequences over the tensor-parallel ranks, and tensor_parallel_size=1 "
                "is one: set tensor_parallel_size, or leave sequence_parallel out"
            )
        if self.data_parallel not in ("replicate", "shard"):
            raise ValueError(f"data_parallel={self.data_parallel!r}: 'replicate' or 'shard' is due")
        settings = self._settings
        if self.pipeline > 1:
            settings.check_ranks(self.pipeline)
        elif self.virtual > 1:
            raise ValueError(
                f"virtual_pipeline_size={self.virtual} with pipeline_parallel_size=1: the chunks of a stage take turns "
                "with those of others, and there is one stage; set pipeline_parallel_size, or leave it out"
            )
        if self.split == "balanced" and self.settled[0] not in ("1f1b", "gpipe"):
            raise ValueError(
                f"split='balanced' with schedule={self.settled[0]!r}: blocks are balanced for schedules of one chunk a "
                "stage; take 'count', or list the blocks of each chunk"
            )

    @property
    def settled(self) -> tuple[str, int]:
        """The schedule that runs and the chunks of each stage; see `settled_schedule`."""
        return settled_schedule(self.schedule, self.virtual) if self.pipeline > 1 else ("1f1b", 1)

    @property
    def shards(self) -> int:
        """Data-parallel ranks that have a part each of what a stage holds."""
        return self.data if self.data_parallel == "shard" else 1

    @property
    def is_divided(self) -> bool:
        """Whether a rank holds less than the whole model."""
        return self.tensor > 1 or self.pipeline > 1 or self.shards > 1

    def num_microbatches_of(self, rows: int) -> int:
        """Microbatches of a batch.

        Args:
            rows: Of the batch.
        """
        if self.pipeline == 1:
            return min(self.num_microbatches or 1, rows)
        return self._settings.num_microbatches_of(rows, self.pipeline)

    @property
    def _settings(self) -> PipelineSettings:
        return PipelineSettings(schedule=self.schedule, virtual=self.virtual, num_microbatches=self.num_microbatches)

    def runs(self, num_microbatches: int) -> str:
        """The schedule that runs so many microbatches: where 1F1B has too few of them, gpipe.

        Args:
            num_microbatches: Of a step.
        """
        schedule, _ = self.settled
        return "gpipe" if schedule == "1f1b" and num_microbatches < self.pipeline else schedule

    def division(self, num_blocks: int, split: Split | None = None) -> Division:
        """The blocks over chunks and ranks.

        Args:
            num_blocks: Of the model.
            split: What `balanced` came to; None: as the layout says.

        Raises:
            ValueError: Fewer blocks than chunks, or a list that does not fit.
        """
        schedule, virtual = self.settled
        chosen: Any = split if split is not None else "count" if self.split == "balanced" else self.split
        return Division.of(num_blocks, self.pipeline, schedule, virtual, chosen)

    def __str__(self) -> str:
        words = [f"tensor {self.tensor}{' with sequences' if self.sequence else ''}", f"pipeline {self.pipeline}"]
        words.append(f"data {self.data}{' (shard)' if self.shards > 1 else ''}")
        schedule, virtual = self.settled
        chunks = f", {virtual} chunks a stage" if virtual > 1 else ""
        return " x ".join(words) + (f", {schedule}{chunks}" if self.pipeline > 1 else "")


def counts(lengths: Sequence[int]) -> str:
    """Numbers of blocks in a few words: `12 blocks each`, or each of them.

    Args:
        lengths: Of each chunk.
    """
    return f"{lengths[0]} blocks each" if len(set(lengths)) == 1 else f"{', '.join(map(str, lengths))} blocks"
