"""What each chunk of a pipeline rank needs under any plan: measured once, on the microbatches of a batch.

A chunk runs alone, as in a step of the pipeline but for its hidden state, which is drawn; its blocks and all that is
outside of them are measured by `profile_step`, as those of a whole model are. `stage_memory` puts the microbatches of
a step together.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_recompute.agreement import ALONE, Agreement
from lightning_recompute.division import Division
from lightning_recompute.lazy_stage import actions_of
from lightning_recompute.ledger import allocated_bytes
from lightning_recompute.memory import open_meter
from lightning_recompute.microbatches import signature, tensors_of
from lightning_recompute.only_tried import only_tried
from lightning_recompute.optimizer_cost import OptimizerCost, measure_optimizers
from lightning_recompute.pipeline import PipelineModule
from lightning_recompute.pipeline_step import Alone
from lightning_recompute.plan import RecomputePlan, Segment
from lightning_recompute.probe import Step
from lightning_recompute.profiling import SCALARS_BYTES, Profile, Statics, profile_step
from lightning_recompute.schedule_actions import SPLITTING, rank_actions
from lightning_recompute.skeleton import SHELL
from lightning_recompute.split_memory import measure_split
from lightning_recompute.stage_memory import (
    KINDS,
    ONE_BATCH,
    ChunkMemory,
    Kind,
    RankAction,
    RankGradients,
    SplitMemory,
    SpreadBytes,
    StageLevel,
    Window,
    stage_levels,
)
from lightning_recompute.timeline import Level, levels
from lightning_recompute.tried_step import LONE_STEP, TriedStep
from lightning_recompute.untouched import undone


class ChunkCosts:
    """One chunk on microbatches of one size.

    Args:
        profile: Its blocks, and what is outside of them; None where backward does not come to it.
        span: Its first block, and the one after its last.
        received_bytes: The hidden state that comes.
        sent_bytes: The hidden state that goes on.
        measure_split: Measures backward in two parts under a plan; None where it has one.
        fixed: What it takes where there is no profile, whatever the plan.
    """

    def __init__(
        self,
        profile: Profile | None,
        span: tuple[int, int],
        received_bytes: int,
        sent_bytes: int,
        measure_split: Callable[[RecomputePlan], SplitMemory] | None = None,
        fixed: ChunkMemory | None = None,
    ) -> None:
        self.profile = profile
        self.span = span
        self.received_bytes = received_bytes
        self.sent_bytes = sent_bytes
        self._measure_split = measure_split
        self._fixed = fixed
        self._known: dict[tuple[Segment, ...], ChunkMemory] = {}

    def under(self, plan: RecomputePlan) -> ChunkMemory:
        """What a microbatch takes under a plan.

        Args:
            plan: Of all blocks of the model, its segments within chunks; other chunks' count for nothing.
        """
        if self.profile is None:
            assert self._fixed is not None
            return self._fixed
        start, stop = self.span
        own = tuple(segment for segment in plan.segments if start <= segment.start < stop)
        if own not in self._known:
            self._known[own] = self._counted(self.profile, plan)
        return self._known[own]

    def _counted(self, profile: Profile, plan: RecomputePlan) -> ChunkMemory:
        (again,) = profile.accumulating
        skeleton, units = profile.skeleton, profile.units(plan)
        costs = profile.call_costs(plan)
        fresh = list(levels(skeleton, costs, units, former_gradients=False))
        added = levels(again, profile.call_costs(plan, accumulating=True), units, accumulating=True)
        return ChunkMemory(
            self.received_bytes,
            self.sent_bytes,
            forward_bytes=_most(fresh, in_backward=False),
            waiting_bytes=skeleton.waiting_bytes(costs),
            backward_bytes=_most(fresh, in_backward=True),
            accumulating_bytes=_most(added, in_backward=True) - again.gradient_bytes,
            split=None if self._measure_split is None else self._measure_split(plan),
        )


def _most(found: Iterable[Level], *, in_backward: bool) -> int:
    return max(level.num_bytes for level in found if level.moment.in_backward == in_backward)


class StageProfile:
    """The measured parts of one rank of a pipeline; made by `profile_stage`.

    Args:
        division: The blocks over the ranks.
        rank: Of the pipeline.
        schedule: That runs.
        actions: What the rank does in a step.
        costs: For each chunk of the rank and each size of microbatches.
        size_of: For each microbatch its size, as in `costs`.
        statics: What is there all the time.
        optimizer: What the optimizers need.
        gradients: Of a step that drops those of the step before.
        tied_bytes: Gradients of parameters that other ranks have too: of all of them, and of the largest.
        window: How gradients come together until the optimizers step.
        spread: What data parallelism makes of parameters and gradients; None where there is none.
    """

    def __init__(
        self,
        division: Division,
        rank: int,
        schedule: str,
        actions: Sequence[RankAction],
        costs: Mapping[tuple[int, int], ChunkCosts],
        size_of: Sequence[int],
        statics: Statics,
        optimizer: OptimizerCost,
        gradients: RankGradients,
        tied_bytes: tuple[int, int],
        window: Window = ONE_BATCH,
        spread: SpreadBytes | None = None,
    ) -> None:
        self.division = division
        self.rank = rank
        self.schedule = schedule
        self.actions = tuple(actions)
        self.costs = dict(costs)
        self.size_of = tuple(size_of)
        self.statics = statics
        self.optimizer = optimizer
        self.gradients = gradients
        self.tied_bytes = tied_bytes
        self.window = window
        self.spread = spread

    @property
    def chunks(self) -> tuple[int, ...]:
        """Those of the rank."""
        return self.division.chunks_of(self.rank)

    @property
    def splits(self) -> frozenset[int]:
        """The chunks whose backward runs in two parts."""
        return frozenset(chunk for chunk in self.chunks if self.schedule in SPLITTING and chunk)

    def profile_of(self, chunk: int) -> Profile | None:
        """What was measured of a chunk on the first microbatch, the largest; None where nothing is trained."""
        return self.costs[chunk, self.size_of[0]].profile

    def levels(self, plan: RecomputePlan) -> list[StageLevel]:
        """Bytes at each moment of a step under a plan, without the statics.

        Args:
            plan: Of all blocks of the model.
        """
        made = self.gradients.all_bytes
        optimizer = StageLevel(None, self.optimizer_bytes, name="optimizer step")
        reduction = StageLevel(None, made, self.reduction_bytes - made, name="reduction of gradients")
        return [*self.run_levels(plan), optimizer, reduction]

    def run_levels(self, plan: RecomputePlan) -> list[StageLevel]:
        """The same of what happens until the schedule has run.

        Args:
            plan: Of all blocks of the model.
        """
        own = self.division.part_of(plan, self.rank)
        found = {key: costs.under(own) for key, costs in self.costs.items()}

        def memory_of(chunk: int, microbatch: int) -> ChunkMemory:
            return found[chunk, self.size_of[microbatch]]

        made = self.gradients.all_bytes
        tied, largest = self.tied_bytes
        batches = [replace(self.gradients, former_bytes=self.left_bytes if self.window.keeps_former else 0)]
        if self.window.accumulating:
            in_place = self.window.in_place
            batches.append(replace(self.gradients, former_bytes=tied if in_place else made, accumulating=in_place))
        steps = (stage_levels(self.schedule, self.actions, memory_of, gradients) for gradients in batches)
        result = [level for step in steps for level in step]
        aside = max(gradients.former_bytes for gradients in batches)
        if tied:
            result.append(StageLevel(None, made + aside + largest, name="sum of the gradients of tied parameters"))
        if self.spread is not None:
            result = [replace(level, gathered_bytes=self.spread.whole_bytes) for level in result]
            there = made if self.window.accumulating else aside
            result.append(StageLevel(None, there, self.spread.gathering_bytes, name="gathering of parameters"))
        return result

    @property
    def reduction_bytes(self) -> int:
        """The most while gradients are reduced, without the statics; those of the step before are zeroed by then."""
        made = self.gradients.all_bytes
        return made if self.spread is None else max(made, self.spread.reducing_bytes)

    @property
    def left_bytes(self) -> int:
        """Gradients between steps."""
        if self.spread is None or not self.spread.whole_bytes:
            return self.gradients.all_bytes
        return self.spread.gradients_bytes

    @property
    def optimizer_bytes(self) -> int:
        """The most in the optimizer's step, without the statics."""
        return self.left_bytes + self.optimizer.transient_bytes

    def peak_bytes(self, plan: RecomputePlan) -> int:
        """The peak of a step under a plan, statics included.

        Args:
            plan: Of all blocks of the model.
        """
        return self.statics.num_bytes + max(level.num_bytes for level in self.levels(plan))

    def release(self) -> None:
        """Let go of the tensors that blocks were called with; from now on only what was measured is known."""
        for costs in self.costs.values():
            if costs.profile is not None:
                costs.profile.release()


def profile_stage(
    pipeline: PipelineModule,
    step: Step,
    batch: Any,
    *,
    optimizers: Iterable[Optimizer] = (),
    window: Window = ONE_BATCH,
    tried: TriedStep = LONE_STEP,
    agreement: Agreement = ALONE,
    spread: SpreadBytes | None = None,
) -> StageProfile:
    """Measure this rank's chunks on a batch.

    Not collective over the pipeline; the ranks that share a stage do it together. What is sharded has to be gathered,
    until nothing more is asked of the profile. Afterwards parameters, gradients, buffers, random streams, modes and
    hooks are what they were.

    Args:
        pipeline: The divided module, in training mode, with no plan applied.
        step: Runs the training step on a microbatch; see `PipelineModule.run`.
        batch: As for `PipelineModule.run`.
        optimizers: That train the parameters of this rank.
        window: How gradients come together until the optimizers step.
        tried: How a chunk's part of a step is run.
        agreement: With the ranks that share this stage.
        spread: What data parallelism makes of parameters and gradients; None where there is none.

    Raises:
        ValueError: What `profile_step` refuses.
    """
    module, division, rank = pipeline.module, pipeline.division, pipeline.rank
    chunks = division.chunks_of(rank)
    with only_tried(module), pipeline.alone(step, batch) as alone:
        kinds = [signature(microbatch) for microbatch in alone.microbatches]
        sizes = list(dict.fromkeys(kinds))
        costs = {
            (chunk, size): _chunk_costs(pipeline, step, batch, alone, chunk, kinds.index(kind), tried, agreement)
            for chunk in chunks
            for size, kind in enumerate(sizes)
        }
    num_microbatches = len(kinds)
    schedule = pipeline.schedule_of(num_microbatches)
    owned = pipeline.ownership.parameters
    trained = {name: parameter for name, parameter in owned.items() if parameter.requires_grad}
    by_chunk = {
        chunk: allocated_bytes(
            [trained[name] for name in trained if chunk in pipeline.ownership.users[name]], pipeline.device
        )
        for chunk in chunks
    }
    used = [parameter for name, parameter in trained.items() if pipeline.ownership.users[name]]
    tied = [allocated_bytes([trained[name]], pipeline.device) for name in pipeline.ownership.tied if name in trained]
    optimizer = measure_optimizers(optimizers)
    gathered = 0 if spread is None else spread.whole_bytes - spread.shards_bytes
    statics = Statics(
        allocated_bytes([*module.parameters(), *module.buffers()], pipeline.device) - gathered,
        optimizer.state_bytes,
        allocated_bytes(tensors_of(batch), pipeline.device),
        SCALARS_BYTES + (torch.get_rng_state().nbytes if pipeline.device.type == "cpu" else 0),
    )
    return StageProfile(
        division,
        rank,
        schedule,
        _actions(pipeline, schedule, num_microbatches),
        costs,
        [sizes.index(kind) for kind in kinds],
        statics,
        optimizer,
        RankGradients(by_chunk, allocated_bytes(used, pipeline.device)),
        (sum(tied), max(tied, default=0)),
        window,
        spread,
    )


def _actions(pipeline: PipelineModule, schedule: str, num_microbatches: int) -> list[RankAction]:
    if schedule not in ("gpipe", "1f1b"):
        found = actions_of(schedule, pipeline.lazy_stages(), num_microbatches)
        return [RankAction(Kind(kind), chunk, microbatch) for kind, chunk, microbatch in found]
    rank = pipeline.rank
    order = rank_actions(schedule, pipeline.num_ranks, num_microbatches)[rank]
    return [RankAction(KINDS[action.kind], rank, action.microbatch) for action in order]


def _chunk_costs(
    pipeline: PipelineModule,
    step: Step,
    batch: Any,
    alone: Alone,
    chunk: int,
    microbatch: int,
    tried: TriedStep,
    agreement: Agreement,
) -> ChunkCosts:
    """Measure one chunk on one microbatch."""
    start, stop = pipeline.division.bounds[chunk]
    form = alone.forms[microbatch]
    received = form.blocks[start].hidden if chunk else None
    sent = form.blocks[stop].hidden if stop < len(form.blocks) else None

    users, owned = pipeline.ownership.users, pipeline.ownership.parameters
    if received is None and not any(p.requires_grad and chunk in users[name] for name, p in owned.items()):
        assert sent is not None
        fixed = _frozen(pipeline, lambda: alone.forward(chunk, None, microbatch), sent.num_bytes)
        return ChunkCosts(None, (start, stop), 0, sent.num_bytes, fixed=fixed)
    nodes: list[str] = []

    def run() -> Tensor:
        hidden = None
        if received is not None:
            hidden = torch.randn(received.shape, dtype=received.dtype, device=pipeline.device).requires_grad_()
        result = alone.forward(chunk, hidden, microbatch)
        nodes.append(type(result.grad_fn).__name__)
        return result

    profile = profile_step(
        pipeline.module, run, [pipeline.block_list], accumulating=True, tried=tried, agreement=agreement
    )
    if nodes[-1].startswith(SHELL):
        profile.hold_last_gradient()  # it was received

    def measure(plan: RecomputePlan) -> SplitMemory:
        return measure_split(pipeline, step, batch, chunk, microbatch, plan, tried)

    is_split = pipeline.schedule in SPLITTING and chunk > 0
    return ChunkCosts(
        profile,
        (start, stop),
        received.num_bytes if received is not None else 0,
        sent.num_bytes if sent is not None else 0,
        measure if is_split else None,
    )


def _frozen(pipeline: PipelineModule, forward: Callable[[], Tensor], sent_bytes: int) -> ChunkMemory:
    """What a first chunk takes that has nothing to train: its hidden state, and what torch gives that as gradient."""
    with (
        undone(pipeline.module, [pipeline.block_list]),
        contextlib.closing(open_meter(pipeline.device)) as meter,
        meter.watching(),
    ):
        forward()  # what the first run makes for all of them
        before = meter.live_bytes
        meter.reset_peak()
        result = forward()
        most, waiting = meter.peak_bytes - before, meter.live_bytes - before
        del result
    most_in_backward = waiting + 2 * sent_bytes
    return ChunkMemory(0, sent_bytes, most, waiting, most_in_backward, most_in_backward)
