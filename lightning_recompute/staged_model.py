"""A model that was measured whole, over the ranks of a layout: its plans, and what each rank needs under them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_recompute.cost import PeakRow, StageCosts, live_vectors, peak_row, segments
from lightning_recompute.division import Division
from lightning_recompute.measured_model import MeasuredModel
from lightning_recompute.optimizer_cost import OptimizerCost
from lightning_recompute.pipeline_costs import (
    Part,
    RankStatics,
    Surroundings,
    gathered,
    gradients_of_units,
    names_of_ranks,
    part_of,
    statics_of,
)
from lightning_recompute.pipeline_layout import Layout
from lightning_recompute.plan import Full, Keep, RecomputePlan, SaveOps, Segment, Selective
from lightning_recompute.rank_solver import PartChoices
from lightning_recompute.schedule_actions import SPLITTING
from lightning_recompute.split_backward import waiting_shares, with_waiting
from lightning_recompute.split_ranks import SplitRanks, split_ranks
from lightning_recompute.stage_plans import (
    PER_STAGE,
    PipelineCosts,
    PipelinePlan,
    plan_stages,
    rank_peak,
    with_choices,
)
from lightning_recompute.stage_split import BlockCosts, EndCosts, ModelCosts, balance

CATEGORIES = ("parameters", "gradients", "optimizer", "other", "activations", "running", "outside")
"""What the peak of a rank consists of: other is the batch and buffers, activations what all microbatches in flight
hold, running the block that runs, outside embeddings, head, loss, and hidden states on their way."""


@dataclass(frozen=True)
class StagedModel:
    """A model over the ranks of a layout.

    Attributes:
        measured: The model.
        layout: The layout.
        division: Its blocks over ranks.
        pipeline: Costs and schedule, for plans.
        parts: Of each chunk, in forward order.
        statics: Of each rank.
        growing: Of a rank whose microbatches are all alive when its first backward starts: gradients that are there at
            the backward of each unit. None where all gradients are there all the time.
        split: The ranks' real actions, where backward runs in two parts; None where it does not.
    """

    measured: MeasuredModel
    layout: Layout
    division: Division
    pipeline: PipelineCosts
    parts: tuple[Part, ...]
    statics: tuple[RankStatics, ...]
    growing: tuple[tuple[int, ...] | None, ...]
    split: SplitRanks | None = None

    def choices_of(self, plan: RecomputePlan) -> list[PartChoices]:
        """What a plan for all blocks means for each part.

        Args:
            plan: No unit of it goes over a part's end, or its blocks are units of their own.

        Raises:
            ValueError: An action of it is none that was measured (`MeasuredModel.with_action`), or a unit too long.
        """
        found: list[PartChoices] = []
        for part in self.parts:
            choices: list[int | None] = [0]
            for segment in plan.segments:
                start, stop = max(segment.start, part.start), min(segment.stop, part.stop)
                if start >= stop:
                    continue
                is_unit = isinstance(segment.action, Full | SaveOps) and stop - start > 1
                size = stop - start if is_unit else 1
                for block in range(start, stop, size):
                    known = part.options[block - part.start]
                    if (segment.action, size) not in known:
                        raise ValueError(f"{segment}: {segment.action} of {size} block(s) was not measured")
                    choices += [known.index((segment.action, size)), *[None] * (size - 1)]
            found.append((*choices, 0))
        return found

    def plan_of(self, choices: Sequence[PartChoices]) -> RecomputePlan:
        """The plan for all blocks that choices mean.

        Args:
            choices: For each part.
        """
        segments: list[Segment] = []
        for part, chosen in zip(self.parts, choices, strict=True):
            for index, choice in enumerate(chosen[1:-1]):
                if choice is None:
                    continue
                action, size = part.options[index][choice]
                start = part.start + index
                joins = isinstance(action, Keep | Selective) and segments and segments[-1].action == action
                if joins and start > part.start:
                    segments[-1] = replace(segments[-1], stop=start + size)
                else:
                    segments.append(Segment(start, start + size, action))
        return RecomputePlan(tuple(segments))

    def peak_bytes(self, rank: int, choices: Sequence[PartChoices]) -> int:
        """The peak of a rank, statics included.

        Args:
            rank: The rank.
            choices: For each of its chunks.
        """
        if self.split is not None:
            return self.split.peak_bytes(rank, choices)
        return rank_peak(self.pipeline, rank, choices)

    def with_choices(self, choices: Sequence[PartChoices], name: str) -> PipelinePlan:
        """What comes of given choices.

        Args:
            choices: For each part.
            name: Of the plan.
        """
        plan = with_choices(self.pipeline, choices, name)
        if self.split is None:
            return plan
        ranks = (replace(each, peak_bytes=self.peak_bytes(each.rank, each.choices)) for each in plan.ranks)
        return replace(plan, ranks=tuple(ranks))

    def plan_within(self, budget_bytes: int) -> PipelinePlan:
        """Plan each rank by itself; see `plan_stages`.

        Args:
            budget_bytes: What the peak of each rank may be.

        Raises:
            BudgetError: A rank has no choices within the budget.
        """
        if self.split is None:
            return plan_stages(self.pipeline, budget_bytes)
        found = [self.split.plan(self.pipeline, rank, budget_bytes) for rank in range(self.layout.pipeline)]
        return self.with_choices(self.pipeline.by_part(found), PER_STAGE)

    def breakdown(self, plan: PipelinePlan, rank: int) -> tuple[str, dict[str, int]]:
        """When a rank's peak is, in words, and what it consists of.

        Args:
            plan: Of all ranks.
            rank: The rank.

        Returns:
            The moment, and bytes of `CATEGORIES`, which add up to the peak.
        """
        of_rank, statics, growing = plan.ranks[rank], self.statics[rank], self.growing[rank]
        if self.split is not None:
            return self.split.breakdown(rank, of_rank.choices)
        numbers = self.pipeline.parts_of(rank)
        costs = [replace(self.pipeline.parts[part], static_bytes=0, floor_bytes=0, in_flight=1) for part in numbers]
        rows = [peak_row(*pair) for pair in zip(costs, of_rank.choices, strict=True)]
        chosen = [segments(*pair) for pair in zip(costs, of_rank.choices, strict=True)]
        held = [sum(option.held_bytes for _, option in each) for each in chosen]
        best: dict[str, int] = {}
        moment = ""
        for vector in self.pipeline.alive()[rank]:
            waiting = sum(number * each for number, each in zip(vector, held, strict=True))
            for index, (number, row) in enumerate(zip(vector, rows, strict=True)):
                others = waiting - held[index]
                if not number or (best and others + row.total_bytes <= sum(best.values())):
                    continue
                there = 0
                if growing is not None and row.moment == "backward":
                    there = growing[next(unit + o.num_units - 1 for unit, o in chosen[index] if unit == row.unit)]
                part = self.parts[numbers[index]]
                is_end = row.unit in (0, part.num_blocks + 1)
                best = {
                    "gradients": there,
                    "activations": others + row.held_bytes,
                    "running": 0 if is_end else row.working_bytes,
                    "outside": row.besides_bytes - there + (row.working_bytes if is_end else 0),
                }
                moment = self._in_words(row, part)
        best["gradients"] += 0 if growing is not None else statics.gradients_bytes
        best |= {
            "parameters": statics.parameters_bytes,
            "optimizer": statics.optimizer_bytes,
            "other": statics.other_bytes,
        }
        if sum(best.values()) < of_rank.peak_bytes:
            best |= {"gradients": statics.gradients_bytes, "activations": 0, "outside": 0}
            best["running"] = of_rank.peak_bytes - statics.num_bytes
            moment = "optimizer step"
        assert sum(best.values()) == of_rank.peak_bytes, (best, of_rank.peak_bytes)
        return moment, {name: best[name] for name in CATEGORIES}

    def _in_words(self, row: PeakRow, part: Part) -> str:
        names = self.measured.profile.names
        if row.unit == 0:
            return f"{row.moment} before the first block"
        if row.unit == part.num_blocks + 1:
            what = "head and loss" if part.stop == len(names) else "sending"
            return f"{what}, {row.moment}"
        assert row.unit is not None, row
        return f"{row.moment} of {names[part.start + row.unit - 1]}"


def stage_model(
    measured: MeasuredModel,
    layout: Layout,
    division: Division,
    num_microbatches: int,
    *,
    batch_bytes: int = 0,
    sizes: Sequence[int] = (),
) -> StagedModel:
    """Divide a model over the ranks of a layout.

    Args:
        measured: The model.
        layout: The layout.
        division: Its blocks over ranks.
        num_microbatches: Of a step.
        batch_bytes: The batch of a step.
        sizes: Numbers of blocks that may be one unit, besides the usual ones.

    Raises:
        ValueError: The schedule cannot run so many microbatches.
    """
    around = Surroundings(measured, *gathered(measured, layout))
    schedule, virtual = layout.runs(num_microbatches), layout.settled[1]
    alive = live_vectors(schedule, layout.pipeline, num_microbatches, virtual)
    parts = [
        part_of(measured, around, start, stop, tensor=layout.tensor, sizes=sizes, several=virtual > 1)
        for start, stop in division.bounds
    ]
    alone = parts
    if schedule in SPLITTING:
        parts = _with_waiting(
            measured, around, division, parts, waiting_shares(schedule, layout.pipeline, num_microbatches, virtual)
        )
    known: dict[Any, OptimizerCost] = {}
    statics, growing = [], []
    for rank, names in enumerate(names_of_ranks(measured, division)):
        cost = _optimizer_cost(measured, names, known)
        statics.append(statics_of(measured, layout, names, batch_bytes, cost))
        # chunks of a rank share what it holds: the first one has it
        first = division.chunks_of(rank)[0]
        all_alive = virtual == 1 and layout.pipeline > 1 and alive[rank] == ((num_microbatches,),)
        growing.append(_growing(measured, parts[first], names) if all_alive else None)
        parts[first] = replace(parts[first], costs=_with_statics(parts[first].costs, statics[rank], growing[rank]))
    pipeline = PipelineCosts(
        tuple(part.costs for part in parts),
        tuple(part.seconds for part in parts),
        layout.pipeline,
        num_microbatches,
        schedule,
        virtual,
    )
    split = split_ranks(measured, around, division, alone, pipeline, statics) if schedule in SPLITTING else None
    return StagedModel(measured, layout, division, pipeline, tuple(parts), tuple(statics), tuple(growing), split)


def _with_waiting(
    measured: MeasuredModel,
    around: Surroundings,
    division: Division,
    parts: Sequence[Part],
    shares: Sequence[Sequence[float]],
) -> list[Part]:
    """Parts some of whose microbatches wait for their part for weights; but for the first, which has no inputs."""
    num_blocks = measured.profile.num_blocks
    between, found = [measured.split_block(index, Keep()).between_bytes for index in range(num_blocks)], list(parts)
    for rank in range(division.num_ranks):
        for part, share in zip(division.chunks_of(rank), shares[rank], strict=True):
            if part == 0:
                continue
            start, stop = parts[part].start, parts[part].stop
            sent = around.returned[stop - 1]
            # what came and what was sent, and the gradients of both
            end = around.head_held + around.head_backward if stop == len(between) else 2 * sent
            costs = with_waiting(parts[part].costs, (around.given[start], *between[start:stop], end), share)
            found[part] = replace(parts[part], costs=costs)
    return found


def _growing(measured: MeasuredModel, part: Part, names: frozenset[str]) -> tuple[int, ...]:
    """Where all microbatches are alive when the first backward starts: gradients that are there at each unit's.

    Later, when all of them are there, a microbatch has gone: what that held at least is taken off.
    """
    made = gradients_of_units(measured, names, part.start, part.stop)
    least = sum(min(option.held_bytes for option in options) for options in part.costs.options)
    return tuple(max(sum(made[unit + 1 :]), sum(made) - least) for unit in range(len(made)))


def _with_statics(costs: StageCosts, statics: RankStatics, growing: tuple[int, ...] | None) -> StageCosts:
    floor = max(statics.step_bytes, statics.num_bytes)
    if growing is None:
        return replace(costs, static_bytes=statics.num_bytes, floor_bytes=floor)
    gradients = tuple(costs.gradients_at(unit) + there for unit, there in enumerate(growing))
    static = statics.num_bytes - statics.gradients_bytes
    return replace(costs, static_bytes=static, floor_bytes=floor, gradient_bytes=gradients)


def divide(measured: MeasuredModel, layout: Layout, num_microbatches: int, budget_bytes: int | None) -> Division:
    """Divide a model's blocks over ranks, as a layout says.

    Args:
        measured: The model.
        layout: The layout.
        num_microbatches: Of a step.
        budget_bytes: What each rank's peak may be; `split="balanced"` needs it.

    Raises:
        ValueError: There are fewer blocks than chunks, or no budget to balance them by.
        BudgetError: No division keeps the budget.
    """
    num_blocks = measured.profile.num_blocks
    even = layout.division(num_blocks)
    if layout.split != "balanced":
        return even
    if budget_bytes is None:
        raise ValueError(
            "split='balanced' divides blocks together with their plans, within a budget: give a memory_budget, or "
            "split='count'"
        )
    # a stage of one block each: what belongs to ends is what the first and the last have more
    single = replace(layout, pipeline=num_blocks, split="count")
    alone = stage_model(measured, single, single.division(num_blocks), num_blocks)
    share = _static_bytes_of_blocks(measured, layout)
    blocks = tuple(
        BlockCosts(
            part.costs.options[1],
            seconds,
            static_bytes=static,
            entry_bytes=part.costs.entry_at(1),
            gradient_bytes=part.costs.gradients_at(1),
        )
        for part, seconds, static in zip(alone.parts, measured.blocks, share, strict=True)
    )
    first, last = (alone.parts[end].costs.static_bytes - share[end] for end in (0, -1))
    head = alone.parts[-1].costs.options[-1][0]
    model = ModelCosts(
        blocks,
        EndCosts(measured.ends[0], max(first, 0)),
        EndCosts(measured.ends[1], max(last, 0), max(head.forward_bytes, head.held_bytes + head.transient_bytes)),
    )
    split = balance(model, layout.pipeline, num_microbatches, budget_bytes, schedule=layout.runs(num_microbatches))
    return layout.division(num_blocks, split.counts)


def _static_bytes_of_blocks(measured: MeasuredModel, layout: Layout) -> list[int]:
    """Parameters, gradients and optimizer state of each block."""
    known: dict[Any, OptimizerCost] = {}
    found = []
    for block in range(measured.profile.num_blocks):
        names = frozenset(name for name in measured.parameters if measured.probe.uses[name] == {block})
        found.append(statics_of(measured, layout, names, 0, _optimizer_cost(measured, names, known)).num_bytes)
    return found


def _optimizer_cost(measured: MeasuredModel, names: frozenset[str], known: dict[Any, OptimizerCost]) -> OptimizerCost:
    own = [measured.parameters[name] for name in names]
    key = tuple(sorted((tuple(tensor.shape), str(tensor.dtype)) for tensor in own))
    if key not in known:
        known[key] = measured.optimizer_cost(names)
    return known[key]
