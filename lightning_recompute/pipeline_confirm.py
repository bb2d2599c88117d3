"""A forecast of ranks against the real schedule of each, run on tensors that have shapes and no memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table
from torch import nn

from lightning_recompute.dry_run import DryRun, dry_run
from lightning_recompute.pipeline_forecast import LayoutForecast
from lightning_recompute.pipeline_settings import PipelineSettings
from lightning_recompute.units import format_bytes, format_seconds


@dataclass(frozen=True)
class Confirmation:
    """A rank by formula and by a dry run.

    Attributes:
        rank: The stage.
        forecast_bytes: Its predicted peak, without what a dry run lacks: the optimizer's state, buffers of averages.
        found: What the dry run counted.
    """

    rank: int
    forecast_bytes: int
    found: DryRun

    @property
    def difference(self) -> float:
        """By how much the forecast is above the dry run, as a part of it."""
        return self.forecast_bytes / self.found.peak_bytes - 1


def confirm(
    view: LayoutForecast,
    make: Callable[[], nn.Module],
    batch: Any,
    *,
    step: Callable[[nn.Module, Any], Any] | None = None,
    dtype: torch.dtype | None = None,
    blocks: str | None = None,
) -> Iterator[Confirmation]:
    """Run the step of ranks on fake tensors, under the plan that was chosen.

    Args:
        view: The forecast.
        make: Makes the module, on the meta device; called once for each rank.
        batch: A batch; only its shapes and dtypes count.
        step: Runs the training step of the module on a microbatch.
        dtype: Of floating-point parameters; None: what `make` gives them.
        blocks: Where the blocks are; None: found.

    Yields:
        What was found of each rank.

    Raises:
        ValueError: There is no pipeline, or data-parallel ranks share what a rank holds, which no dry run knows.
    """
    layout, pipeline = view.staged.layout, view.staged.pipeline
    if layout.pipeline == 1 or layout.shards > 1:
        found = "pipeline_parallel_size=1" if layout.pipeline == 1 else "data_parallel='shard'"
        raise ValueError(
            f"confirm=True with {found}: what is run is the schedule of one rank of a pipeline, with whole parameters; "
            "leave confirm out, or take a pipeline of replicas"
        )
    settings = PipelineSettings(
        schedule=layout.schedule,
        virtual=layout.virtual,
        num_microbatches=pipeline.num_microbatches,
        split=list(view.staged.division.lengths),
    )
    for rank in range(layout.pipeline):
        statics, predicted = view.staged.statics[rank], view.ranks[rank]
        module = make()
        run = dry_run(
            functools.partial(_itself, module),
            batch,
            pipeline=layout.pipeline,
            rank=rank,
            settings=settings,
            plan=view.plan,
            tensor=layout.tensor,
            sequence_parallel=layout.sequence,
            step=step,
            dtype=dtype,
            blocks=blocks,
        )
        without = predicted.peak_bytes - statics.optimizer_bytes - statics.averages_bytes
        yield Confirmation(rank, without, run)


def _itself(module: nn.Module) -> nn.Module:
    return module


def to_table(found: Iterable[Confirmation]) -> Table:
    """A row for each rank.

    Args:
        found: What was found.
    """
    table = Table(
        title="The real schedule on tensors without memory, without optimizer state, beside the forecast",
        title_justify="left",
    )
    for column in ("stage", "forecast", "dry run", "difference", "in flight", "time"):
        table.add_column(column, justify="right")
    for one in found:
        table.add_row(
            str(one.rank),
            format_bytes(one.forecast_bytes),
            format_bytes(one.found.peak_bytes),
            f"{one.difference:+.2%}",
            str(one.found.in_flight),
            format_seconds(one.found.seconds),
        )
    return table
