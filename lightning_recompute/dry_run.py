"""One rank of a pipeline in one process, on tensors without memory: its real schedule and stages, its bytes counted.

The peers are not there: what they would send are tensors of the right shape, and what is sent goes nowhere. So the
peak of a rank of a model that no machine here could hold is found by running it, beside any formula.

What never passes torch's operators is not counted: states of random numbers, buffers of the network, workspaces of
kernels. The optimizer does not run, nor does the average over data-parallel ranks.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from lightning_recompute.fake_groups import fake_groups
from lightning_recompute.fake_model import on_fake_tensors
from lightning_recompute.groups import ParallelGroups
from lightning_recompute.lazy_stage import LazyStage
from lightning_recompute.ledger import Ledger
from lightning_recompute.microbatches import map_tensors, num_rows, tensors_of
from lightning_recompute.patch import Patch
from lightning_recompute.pipeline import PipelineModule
from lightning_recompute.pipeline_settings import PipelineSettings
from lightning_recompute.plan import Keep, RecomputePlan
from lightning_recompute.policy import RecomputePolicy
from lightning_recompute.probe import Step
from lightning_recompute.recompute import apply_recompute
from lightning_recompute.tensor_parallel import apply_tensor_parallel
from lightning_recompute.untouched import preserved_rng


@dataclass(frozen=True)
class DryRun:
    """What a step of one rank takes. Bytes by what they are for sum to the peak.

    Attributes:
        rank: Of the pipeline.
        peak_bytes: The most that is alive at once.
        parameters_bytes: Parameters and buffers of the rank, and the batch.
        gradients_bytes: Gradients of parameters that were there at the peak.
        activations_bytes: What forwards had made by then, and what had been received for them.
        other_bytes: What backward had made by then: gradients of activations, recomputed activations.
        left_bytes: Alive after the step: parameters, gradients and what should not be.
        in_flight: Microbatches of all of the rank's chunks that were between forward and the end of backward at most.
        num_microbatches: Of the step.
        num_forwards: How often the forward of each of the rank's blocks ran, recompute included.
        seconds: That this took, without making the module.
    """

    rank: int
    peak_bytes: int
    parameters_bytes: int
    gradients_bytes: int
    activations_bytes: int
    other_bytes: int
    left_bytes: int
    in_flight: int
    num_microbatches: int
    num_forwards: Mapping[str, int]
    seconds: float


def dry_run(
    make: Callable[[], nn.Module],
    batch: Any,
    *,
    pipeline: int,
    rank: int = 0,
    settings: PipelineSettings | None = None,
    plan: RecomputePolicy | RecomputePlan | None = None,
    tensor: int = 1,
    sequence_parallel: bool = False,
    step: Callable[[nn.Module, Any], Any] | None = None,
    dtype: torch.dtype | None = None,
    blocks: str | None = None,
) -> DryRun:
    """Run one training step of one rank of a pipeline on fake tensors.

    Args:
        make: Makes the module; called once, where new tensors have no memory.
        batch: A batch of this rank; only its shapes and dtypes count.
        pipeline: Ranks of the pipeline.
        rank: Which of them.
        settings: Schedule, chunks, microbatches, division of blocks; None: the defaults.
        plan: What is recomputed; `num_layers` of a policy counts in each chunk. None: nothing.
        tensor: Ranks that share each layer.
        sequence_parallel: Whether these divide hidden states along the sequence.
        step: Runs the training step of the module on a microbatch; None: `module.training_step(microbatch, 0)`.
        dtype: Of floating-point parameters; None: what `make` gives them.
        blocks: Where the blocks are; None: found.

    Returns:
        What was counted.

    Raises:
        ValueError: No such rank, a process group is there, or the module cannot be divided; see `PipelineModule`,
            `apply_tensor_parallel`, `apply_recompute`.
        RuntimeError: The model looks at values, which fake tensors do not have.
    """
    with (
        fake_groups(pipeline=pipeline, tensor=tensor, rank=rank) as groups,
        preserved_rng(()),
        on_fake_tensors(make, dtype=dtype) as module,
        unset_fake_temporarily(),
        ExitStack() as stack,
    ):
        start = time.perf_counter()
        mode = next(module.parameters()).fake_mode  # type: ignore[attr-defined]  # its parameters are fake tensors
        watch = _Watch(mode)
        stack.callback(watch.ledger.close)
        take: Step = functools.partial(step or _training_step, module)
        divided = None
        if tensor > 1:
            divided = apply_tensor_parallel(
                module, groups.tensor_mesh, sequence_parallel=sequence_parallel, blocks=blocks
            )
            stack.callback(divided.remove)
            take = _within(divided.step, take)
        stages = _DryPipeline(module, groups, settings or PipelineSettings(), watch)
        stack.callback(stages.remove)
        parts = map_tensors(mode.from_tensor, batch)
        with mode:
            stages.divide(blocks, parts, take)
        own = watch.count_forwards(stages, stack)
        if plan is not None:
            whole = plan.plan(stages.division.lengths) if isinstance(plan, RecomputePolicy) else plan
            part = stages.division.part_of(_without_shards(whole) if sequence_parallel else whole, rank)
            stack.enter_context(
                apply_recompute(module, part, blocks=stages.block_list.name, tensor_group=groups.group("tensor"))
            )
        parameters = list(stages.ownership.parameters.values())
        watch.ledger.count([*parameters, *module.buffers(), *tensors_of(parts)])
        static = watch.ledger.live_bytes
        watch.ledger.reset_peak()
        stages.run(take, parts, weight=num_rows).backward()
        peak, activations = watch.ledger.peak_bytes, watch.ledger.forward_bytes_at_peak
        gradients = watch.ledger.bytes_at_peak(parameter.grad for parameter in parameters if parameter.grad is not None)
        if divided is not None:
            with watch.watching():
                divided.sum_gradients()
        return DryRun(
            rank=rank,
            peak_bytes=peak,
            parameters_bytes=static,
            gradients_bytes=gradients,
            activations_bytes=activations,
            other_bytes=peak - static - gradients - activations,
            left_bytes=watch.ledger.live_bytes,
            in_flight=watch.in_flight,
            num_microbatches=len(stages._split(parts)),
            num_forwards={name: watch.num_forwards[name] for name in own},
            seconds=time.perf_counter() - start,
        )


def _without_shards(plan: RecomputePlan) -> RecomputePlan:
    """What comes of a plan where inputs of blocks differ between tensor-parallel ranks: they are kept whole."""
    return RecomputePlan(
        tuple(
            segment
            if isinstance(segment.action, Keep) or segment.action.inputs != "shard"
            else replace(segment, action=replace(segment.action, inputs="device"))
            for segment in plan.segments
        )
    )


def _training_step(module: Any, microbatch: Any) -> Any:
    return module.training_step(microbatch, 0)


def _within(surroundings: Callable[[], Any], step: Step) -> Step:
    def run(microbatch: Any) -> Any:
        with surroundings():
            return step(microbatch)

    return run


class _Watch:
    """What is seen of a step: bytes, forwards of blocks, microbatches under way.

    The schedule runs outside of the fake mode, since it looks at numbers; only what the rank computes is inside.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        self.ledger = Ledger("cpu", fake=True)
        self.num_forwards: Counter[str] = Counter()
        self.in_flight = 0
        self._alive: set[tuple[int, int]] = set()
        self._is_on = False

    @contextmanager
    def watching(self, *, forward: bool = False) -> Iterator[None]:
        """While this is entered, operators run on fake tensors and are counted."""
        assert not self._is_on
        self._is_on = True
        if forward:
            self.ledger.begin_forward()
        try:
            with self.mode, self.ledger:
                yield
        finally:
            self._is_on = False
            if forward:
                self.ledger.end_forward()

    def begin(self, chunk: int, microbatch: int) -> None:
        self._alive.add((chunk, microbatch))
        self.in_flight = max(self.in_flight, len(self._alive))

    def end(self, chunk: int, microbatch: int) -> None:
        self._alive.remove((chunk, microbatch))

    def count_forwards(self, stages: PipelineModule, stack: ExitStack) -> list[str]:
        """Count forwards of the rank's blocks from now on.

        Returns:
            Their names.
        """
        own = [
            index for chunk in stages.division.chunks_of(stages.rank) for index in range(*stages.division.bounds[chunk])
        ]
        names = [stages.block_list.names[index] for index in own]
        for index, name in zip(own, names, strict=True):
            stack.callback(Patch(stages.block_list.blocks[index], _counted, self, name).remove)
        return names

    def forward(self, name: str) -> None:
        self.num_forwards[name] += self._is_on


def _counted(original: Callable[..., Any], watch: _Watch, name: str, *args: Any, **kwargs: Any) -> Any:
    watch.forward(name)
    return original(*args, **kwargs)


class _DryStage(LazyStage):
    watch: _Watch

    def _warmup_backward_result(self, received_result: Tensor | None = None) -> Tensor:
        # whether all ranks know their shapes: nobody is there to say so
        return torch.ones(1, dtype=torch.int32)

    def _buffer(self, number: int, received: bool) -> Tensor:
        with self.watch.watching(forward=received):
            return super()._buffer(number, received)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run it; from now on it is under way."""
        self.watch.begin(self.stage_index, fwd_chunk_id)
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Run it on fake tensors."""
        with self.watch.watching():
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if full_backward:
            self.watch.end(self.stage_index, bwd_chunk_id)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Run it on fake tensors."""
        with self.watch.watching():
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        self.watch.end(self.stage_index, bwd_chunk_id)


class _DryPipeline(PipelineModule):
    """A pipeline whose peers are not there; what needs their values is left out."""

    stage_type = _DryStage

    def __init__(self, module: nn.Module, groups: ParallelGroups, settings: PipelineSettings, watch: _Watch) -> None:
        super().__init__(module, groups, settings)
        self._watch = watch
        self._checked = True

    def _lazy_stage(self, chunk: int) -> LazyStage:
        stage = super()._lazy_stage(chunk)
        assert isinstance(stage, _DryStage)
        stage.watch = self._watch
        return stage

    def _forward(self, chunk: int, received: Tensor | None, microbatch: int) -> Tensor:
        with self._watch.watching(forward=True):
            return super()._forward(chunk, received, microbatch)

    def _on_all_ranks(self, loss: Tensor | None) -> Tensor:
        return torch.zeros(())

    def _with_ties(self, made: dict[nn.Parameter, Tensor]) -> dict[nn.Parameter, Tensor]:
        with self._watch.watching():
            return super()._with_ties(made)
