"""A plan for every stage of a pipeline, each with its own microbatches in flight, against one setting for all.

Early stages hold more microbatches, and so have to recompute more. Memory decouples the ranks: each takes its own
least extra time. In the steady state only the slowest rank sets the pace; what another needs less is its spare time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_recompute.cost import StageCosts, extra_seconds, live_vectors
from lightning_recompute.errors import BudgetError
from lightning_recompute.rank_solver import Loaded, PartChoices, RankSolver, peak_of
from lightning_recompute.schedule_actions import num_chunks, place
from lightning_recompute.step_time import ChunkSeconds, StepTimeline, simulate
from lightning_recompute.units import format_bytes

PER_STAGE = "per stage"  # the name of a plan that has one of its own for each


@dataclass(frozen=True)
class PipelineCosts:
    """What the parts of a model cost, and the schedule that runs them.

    Args:
        parts: Costs of each part, in forward order; one a rank, or one a chunk where ranks have several. Their
            `in_flight` is not looked at: the schedule says it.
        seconds: Forward and backward of each part where everything is kept.
        num_stages: Ranks of the pipeline.
        num_microbatches: Microbatches of one step.
        schedule: One of `schedules.SCHEDULES`.
        virtual: Chunks on each rank, where the schedule is interleaved.
        send_seconds: Of a transfer.

    Raises:
        TypeError: A count is no int.
        ValueError: The schedule cannot run these counts, or there are not as many parts as chunks.
    """

    parts: tuple[StageCosts, ...]
    seconds: tuple[ChunkSeconds, ...]
    num_stages: int
    num_microbatches: int
    schedule: str = "1f1b"
    virtual: int = 1
    send_seconds: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(self.parts))
        object.__setattr__(self, "seconds", tuple(self.seconds))
        live_vectors(self.schedule, self.num_stages, self.num_microbatches, self.virtual)  # refuses what cannot run
        due = self.num_stages * num_chunks(self.schedule, self.virtual)
        if not len(self.parts) == len(self.seconds) == due:
            raise ValueError(
                f"found costs of {len(self.parts)} parts and seconds of {len(self.seconds)}; {self.schedule} on "
                f"{self.num_stages} ranks has {due}"
            )

    def parts_of(self, rank: int) -> tuple[int, ...]:
        """The parts of the model that a rank has, in forward order of its chunks.

        Args:
            rank: The rank.
        """
        chunks = range(num_chunks(self.schedule, self.virtual))
        return tuple(place(self.schedule, self.num_stages, chunk, rank) for chunk in chunks)

    def by_part(self, of_ranks: Iterable[Sequence[PartChoices]]) -> list[PartChoices]:
        """Choices in the order of the model's parts.

        Args:
            of_ranks: For each rank those for its chunks.
        """
        choices: list[PartChoices] = [()] * len(self.parts)
        for rank, chosen in enumerate(of_ranks):
            for number, of_part in zip(self.parts_of(rank), chosen, strict=True):
                choices[number] = of_part
        return choices

    def alive(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """For each rank the microbatches of its chunks that are alive together, as `live_vectors` has them."""
        return live_vectors(self.schedule, self.num_stages, self.num_microbatches, self.virtual)


@dataclass(frozen=True)
class RankPlan:
    """How one rank recomputes.

    Args:
        rank: The rank.
        in_flight: Microbatches (or chunk-microbatches) alive at most.
        choices: For each of its chunks, in forward order.
        peak_bytes: Over a step, statics included.
        busy_seconds: Forward, recompute and backward of one microbatch, through all of its chunks.
        extra_seconds: The part of that which is recompute.
        spare_seconds: What the slowest rank needs more for a microbatch: so much more recompute is free in the steady
            state.
    """

    rank: int
    in_flight: int
    choices: tuple[PartChoices, ...]
    peak_bytes: int
    busy_seconds: float
    extra_seconds: float
    spare_seconds: float


@dataclass(frozen=True)
class PipelinePlan:
    """How all ranks recompute, and the step that comes of it.

    Args:
        name: Of the setting, or that it is planned.
        ranks: Each rank's.
        step: The simulated step.
    """

    name: str
    ranks: tuple[RankPlan, ...]
    step: StepTimeline

    @property
    def slowest(self) -> RankPlan:
        """The rank that sets the pace of the steady state."""
        return max(self.ranks, key=lambda one: one.busy_seconds)

    @property
    def fullest(self) -> RankPlan:
        """The rank of the highest peak."""
        return max(self.ranks, key=lambda one: one.peak_bytes)


def rank_peak(pipeline: PipelineCosts, rank: int, choices: Sequence[PartChoices]) -> int:
    """The peak of a rank, statics of all its chunks included.

    Args:
        pipeline: Costs and schedule.
        rank: The rank.
        choices: For each of its chunks.

    Raises:
        ValueError: The choices do not fit the parts.
    """
    parts = [pipeline.parts[number] for number in pipeline.parts_of(rank)]
    return peak_of([Loaded.by(*pair) for pair in zip(parts, choices, strict=True)], pipeline.alive()[rank])


def with_choices(pipeline: PipelineCosts, choices: Sequence[PartChoices], name: str) -> PipelinePlan:
    """What comes of given choices, whatever budget there is.

    Args:
        pipeline: Costs and schedule.
        choices: For each part of the model, in forward order.
        name: Of the plan.

    Raises:
        ValueError: There are not as many choices as parts, or they do not fit them.
    """
    if len(choices) != len(pipeline.parts):
        raise ValueError(f"{name}: found choices for {len(choices)} parts of {len(pipeline.parts)}")
    extra = [extra_seconds(part, chosen) for part, chosen in zip(pipeline.parts, choices, strict=True)]
    seconds = [
        replace(base, recompute=base.recompute + more) for base, more in zip(pipeline.seconds, extra, strict=True)
    ]
    step = simulate(
        pipeline.schedule,
        seconds,
        pipeline.num_stages,
        pipeline.num_microbatches,
        pipeline.virtual,
        pipeline.send_seconds,
    )
    of_ranks = [pipeline.parts_of(rank) for rank in range(pipeline.num_stages)]
    busy = [math.fsum(seconds[part].total for part in parts) for parts in of_ranks]
    alive = pipeline.alive()
    ranks = tuple(
        RankPlan(
            rank=rank,
            in_flight=max(map(sum, alive[rank])),
            choices=tuple(tuple(choices[part]) for part in parts),
            peak_bytes=rank_peak(pipeline, rank, [choices[part] for part in parts]),
            busy_seconds=busy[rank],
            extra_seconds=math.fsum(extra[part] for part in parts),
            spare_seconds=max(busy) - busy[rank],
        )
        for rank, parts in enumerate(of_ranks)
    )
    return PipelinePlan(name, ranks, step)


def plan_stages(pipeline: PipelineCosts, budget_bytes: int) -> PipelinePlan:
    """Plan each rank by itself: the least extra time within the budget, with its own microbatches in flight.

    Exact, as `planner.solve` is, where a rank has one chunk. Several chunks share the budget; how is found by a search
    over their curves from budget to time, and then chunk by chunk: within the budget, but not proven to be the fastest.

    Args:
        pipeline: Costs and schedule.
        budget_bytes: What the peak of each rank may be, statics included.

    Raises:
        BudgetError: A rank has no choices within the budget. The message names it.
        TypeError: The budget is no int.
    """
    if not isinstance(budget_bytes, int) or isinstance(budget_bytes, bool):
        raise TypeError(f"budget_bytes={budget_bytes!r}: an int is due")
    of_ranks: list[list[PartChoices]] = []
    found: dict[object, list[PartChoices]] = {}
    for rank, vectors in enumerate(pipeline.alive()):
        parts = tuple(pipeline.parts[number] for number in pipeline.parts_of(rank))
        # ranks that are alike get the same plan
        if (parts, vectors) not in found:
            try:
                found[parts, vectors] = RankSolver(parts, vectors).solve(budget_bytes)
            except BudgetError as error:
                alive = max(map(sum, vectors))
                what = "microbatches" if len(parts) == 1 else "chunk-microbatches"
                raise BudgetError(f"stage {rank} ({alive} {what} in flight): {error}", error.smallest_bytes) from error
        of_ranks.append(found[parts, vectors])
    plan = with_choices(pipeline, pipeline.by_part(of_ranks), PER_STAGE)
    assert plan.fullest.peak_bytes <= budget_bytes, f"rank {plan.fullest.rank} exceeds {budget_bytes} bytes"
    return plan


def best_global(
    pipeline: PipelineCosts, budget_bytes: int, settings: Mapping[str, Sequence[PartChoices]]
) -> PipelinePlan:
    """The setting of the shortest step among those that fit on every rank.

    Args:
        pipeline: Costs and schedule.
        budget_bytes: What the peak of each rank may be, statics included.
        settings: By name, what each means for each part of the model.

    Raises:
        BudgetError: None fits. The message has the one of the smallest peak.
        ValueError: There is no setting, or one does not fit the parts.
    """
    if not settings:
        raise ValueError("no setting to compare with; one at least is due")
    plans = [with_choices(pipeline, choices, name) for name, choices in settings.items()]
    fitting = [plan for plan in plans if plan.fullest.peak_bytes <= budget_bytes]
    if not fitting:
        least = min(plans, key=lambda plan: plan.fullest.peak_bytes)
        raise BudgetError(
            f"none of {len(plans)} settings keeps {format_bytes(budget_bytes)} on every stage: that of the smallest "
            f"peak, {least.name}, takes {format_bytes(least.fullest.peak_bytes)} on stage {least.fullest.rank}",
            least.fullest.peak_bytes,
        )
    return min(fitting, key=lambda plan: (plan.step.seconds, plan.fullest.peak_bytes))


def everywhere(pipeline: PipelineCosts, option: int) -> list[PartChoices]:
    """The same option at every unit.

    Args:
        pipeline: Costs and schedule.
        option: Its index; it covers one unit.
    """
    return [(option,) * part.num_units for part in pipeline.parts]


def first_blocks(pipeline: PipelineCosts, num_layers: int, option: int, otherwise: int = 0) -> list[PartChoices]:
    """Megatron's `block`: an option at the first units of each part, another at the rest.

    Args:
        pipeline: Costs and schedule.
        num_layers: How many units of each part.
        option: Index of the option there.
        otherwise: Index of the option elsewhere.
    """
    return [
        (option,) * min(num_layers, part.num_units) + (otherwise,) * (part.num_units - num_layers)
        for part in pipeline.parts
    ]


def in_groups(pipeline: PipelineCosts, options: Mapping[int, int]) -> list[PartChoices]:
    """Megatron's `uniform`: groups of so many units, the last one of a part shorter.

    Args:
        pipeline: Costs and schedule.
        options: For each number of units up to that of the groups the index of the option that covers them.
    """
    size = max(options)
    return [
        tuple(itertools.chain.from_iterable(_group(options, min(size, n - at)) for at in range(0, n, size)))
        for n in (part.num_units for part in pipeline.parts)
    ]


def _group(options: Mapping[int, int], size: int) -> Iterator[int | None]:
    yield options[size]
    yield from [None] * (size - 1)
