"""What a backward in two parts takes on a chunk of a pipeline, measured on one that runs.

Between the parts a microbatch has all of its activations, recomputed ones too, and the gradients at which the part for
weights begins: so much is there in every step of such a schedule, and one microbatch may run for real to be measured.
"""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import torch
from torch import Tensor

from lightning_recompute.ambient import lasting_values
from lightning_recompute.lazy_stage import LazyStage
from lightning_recompute.lone_block import silenced
from lightning_recompute.memory import open_meter
from lightning_recompute.only_tried import only_tried
from lightning_recompute.pipeline import PipelineModule
from lightning_recompute.plan import RecomputePlan
from lightning_recompute.probe import Step
from lightning_recompute.recompute import apply_recompute
from lightning_recompute.recompute import logger as engine_logger
from lightning_recompute.stage_memory import SplitMemory
from lightning_recompute.step_form import TensorForm
from lightning_recompute.tried_step import LONE_STEP, TriedStep
from lightning_recompute.untouched import undone


def measure_split(
    pipeline: PipelineModule,
    step: Step,
    batch: Any,
    chunk: int,
    microbatch: int,
    plan: RecomputePlan,
    tried: TriedStep = LONE_STEP,
) -> SplitMemory:
    """Run one microbatch of a chunk under a plan, and measure its backward in two parts.

    Afterwards parameters, gradients, buffers, random streams, modes and hooks are what they were.

    Args:
        pipeline: The divided module, with no plan applied.
        step: As for `PipelineModule.run`.
        batch: As for `PipelineModule.run`.
        chunk: One of this rank, not the first of the model, whose backward has one part.
        microbatch: Its number.
        plan: Of all blocks; units end where chunks do.
        tried: How a chunk's part of a step is run.
    """
    module, blocks = pipeline.module, pipeline.block_list
    own = pipeline.division.part_of(plan, pipeline.rank)
    with undone(module, [blocks]), only_tried(module), pipeline.alone(step, batch) as alone:
        with silenced(engine_logger):  # what it has to say is said when the plan is applied for good
            handle = apply_recompute(module, own, blocks=blocks.name)
        start, stop = pipeline.division.bounds[chunk]
        form = alone.forms[microbatch]
        sent = form.blocks[stop].hidden if stop < len(form.blocks) else None
        place = [stage.stage_index for stage in pipeline.lazy_stages()].index(chunk)
        with handle:
            run = _Run(pipeline, len(alone.microbatches), place, microbatch, form.blocks[start].hidden, sent, tried)
            parameters = [p for p in module.parameters() if p.requires_grad]
            for parameter in parameters:
                parameter.grad = None
            run.measured()  # the first run under a plan learns about the blocks
            for parameter in parameters:
                parameter.grad = None
            fresh = run.measured()
            again = run.measured()
    return SplitMemory(fresh[0], fresh[1], fresh[2], again[2])


class _Run:
    """Runs a microbatch through a chunk, without peers."""

    def __init__(
        self,
        pipeline: PipelineModule,
        num_microbatches: int,
        place: int,
        microbatch: int,
        received: TensorForm,
        sent: TensorForm | None,
        tried: TriedStep,
    ) -> None:
        self._pipeline = pipeline
        self._num_microbatches = num_microbatches
        self._place = place
        self._microbatch = microbatch
        self._received = received
        self._sent = sent
        self._tried = tried

    def measured(self) -> tuple[int, int, int]:
        """The most in the part for inputs, what waits, the most in the part for weights: all of the microbatch."""
        stage = self._pipeline.lazy_stages()[self._place]
        stage.prepare_alone(self._num_microbatches)
        gc.collect()
        with contextlib.closing(open_meter(self._pipeline.device)) as meter, meter.watching(), lasting_values():
            before = meter.live_bytes
            loss = self._forward(stage)
            meter.reset_peak()
            if self._sent is not None:
                stage.give(self._microbatch, gradient=self._drawn(self._sent))
            stage.backward_one_chunk(self._microbatch, loss=loss, full_backward=False)
            del loss
            first, between = meter.peak_bytes - before, meter.live_bytes - before
            stage.bwd_cache.clear()
            meter.reset_peak()
            stage.backward_weight_one_chunk(self._microbatch)
            return first, between, meter.peak_bytes - before

    def _forward(self, stage: LazyStage) -> Tensor | None:
        stage.give(self._microbatch, received=self._drawn(self._received))
        numbers = {"microbatch": torch.tensor([self._microbatch])}
        output = self._tried.forward(
            lambda: stage.forward_one_chunk(self._microbatch, (), numbers, save_forward_output=False)
        )
        assert isinstance(output, Tensor)
        return output if stage.is_last else None

    def _drawn(self, form: TensorForm) -> Tensor:
        return torch.randn(form.shape, dtype=form.dtype, device=self._pipeline.device)
