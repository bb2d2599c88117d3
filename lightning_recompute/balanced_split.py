"""Blocks divided over pipeline stages by measured time and memory, before the module is divided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from lightning_recompute.groups import ParallelGroups
from lightning_recompute.measured_model import measure_model
from lightning_recompute.microbatches import num_rows, split_batch
from lightning_recompute.pipeline_layout import Layout
from lightning_recompute.pipeline_settings import PipelineSettings
from lightning_recompute.probe import Step
from lightning_recompute.stage_options import Prices
from lightning_recompute.staged_model import divide
from lightning_recompute.tried_step import LONE_STEP, TriedStep

_NO_LIMIT = 1 << 60


def balanced_settings(
    module: nn.Module,
    step: Step,
    example: Any,
    settings: PipelineSettings,
    groups: ParallelGroups,
    *,
    data_parallel: Literal["replicate", "shard"] = "replicate",
    blocks: str | Sequence[str] | None = None,
    optimizers: Sequence[Optimizer] = (),
    budget_bytes: int | None = None,
    tried: TriedStep = LONE_STEP,
    prices: Prices | None = None,
) -> PipelineSettings:
    """Settings with `split="balanced"` resolved to a number of blocks for each stage; others as they are.

    Collective over the world. The first stage's ranks measure the whole module on one microbatch; the others wait, and
    all go by what the very first comes to. The module is afterwards what it was.

    Args:
        module: The whole module, in training mode, on its device, not yet divided over stages.
        step: Runs the training step on a microbatch; see `PipelineModule.run`.
        example: A batch.
        settings: What the user said.
        groups: The groups of this process.
        data_parallel: What the ranks that divide the data will hold: all of a stage, or parts of it.
        blocks: Where the blocks are; see `find_blocks`.
        optimizers: That train the module.
        budget_bytes: What the peak of each rank may be: blocks are divided together with the plans that keep it. None:
            by time alone.
        tried: How a step is run.
        prices: Count time by these. None: blocks are timed on their device.

    Raises:
        BudgetError: No division keeps the budget.
        ValueError: The model cannot be measured or divided.
        RuntimeError: Not on the first stage's ranks, of which one could not.
    """
    if settings.split != "balanced":
        return settings
    lengths: list[int] | None = None
    error: Exception | None = None
    if groups.rank("pipeline") == 0:
        try:
            number = settings.num_microbatches_of(num_rows(example), groups.size("pipeline"))
            measured = measure_model(
                module,
                step,
                split_batch(example, number)[0],
                whole=dict(module.named_parameters()),
                blocks=blocks,
                optimizers=optimizers,
                prices=prices,
                tried=tried,
            )
            layout = Layout(
                tensor=groups.size("tensor"),
                pipeline=groups.size("pipeline"),
                schedule=settings.schedule,
                num_microbatches=number,
                split="balanced",
                data=groups.size("data"),
                data_parallel=data_parallel,
            )
            lengths = list(divide(measured, layout, number, budget_bytes or _NO_LIMIT).lengths)
            measured.profile.release()
        except Exception as caught:  # every rank has to come to the exchange
            error = caught
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, (lengths, None if error is None else f"{type(error).__name__}: {error}"))
    if error is not None:
        raise error
    for rank, (_, wrong) in enumerate(told):
        if wrong is not None:
            raise RuntimeError(f"rank {rank} could not balance the pipeline's stages: {wrong}")
    first = next(found for found, _ in told if found is not None)
    return replace(settings, split=first)
