"""A plan for every stage of a pipeline, each with its own microbatches in flight, against one setting for all.

Early stages hold more microbatches, and so have to recompute more. Memory decouples the ranks: each takes its own
least extra time. In the steady state only the slowest rank sets the pace; what another needs less is its spare time.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_recompute.cost import StageCosts, extra_seconds, live_vectors, peak_bytes, segments
from lightning_recompute.errors import BudgetError
from lightning_recompute.planner import pareto, solve
from lightning_recompute.schedule_actions import num_chunks, place
from lightning_recompute.step_time import ChunkSeconds, StepTimeline, simulate
from lightning_recompute.units import format_bytes

PartChoices = tuple[int | None, ...]
"""For each unit of a part of the model the index of its option; None where a group that began before covers it."""

PER_STAGE = "per stage"  # the name of a plan that has one of its own for each
_COMBINATIONS = 4096  # of the curves of a rank's chunks
_MOST_POINTS = 16


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
    return _peak([_Loaded.by(*pair) for pair in zip(parts, choices, strict=True)], pipeline.alive()[rank])


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
    choices: list[PartChoices] = [()] * len(pipeline.parts)
    found: dict[object, list[PartChoices]] = {}
    for rank, vectors in enumerate(pipeline.alive()):
        numbers = pipeline.parts_of(rank)
        parts = tuple(pipeline.parts[number] for number in numbers)
        # ranks that are alike get the same plan
        if (parts, vectors) not in found:
            try:
                found[parts, vectors] = RankSolver(parts, vectors).solve(budget_bytes)
            except BudgetError as error:
                alive = max(map(sum, vectors))
                what = "microbatches" if len(parts) == 1 else "chunk-microbatches"
                raise BudgetError(f"stage {rank} ({alive} {what} in flight): {error}", error.smallest_bytes) from error
        for number, chosen in zip(numbers, found[parts, vectors], strict=True):
            choices[number] = chosen
    plan = with_choices(pipeline, choices, PER_STAGE)
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


# ---- a rank with several chunks


@dataclass(frozen=True)
class _Loaded:
    """A chunk under its choices: what of it counts for the peak of its rank."""

    choices: PartChoices
    held: int
    """By one microbatch from forward to backward."""
    reach: int
    """How far what runs goes above what is held."""
    static: int
    floor: int
    seconds: float

    @staticmethod
    def by(part: StageCosts, choices: PartChoices) -> _Loaded:
        held = sum(option.held_bytes for _, option in segments(part, choices))
        alone = replace(part, static_bytes=0, floor_bytes=0, in_flight=1)
        reach = peak_bytes(alone, choices) - held
        floor = max(part.floor_bytes - part.static_bytes, 0)
        return _Loaded(tuple(choices), held, reach, part.static_bytes, floor, extra_seconds(part, choices))


def _peak(chunks: Sequence[_Loaded], vectors: Sequence[Sequence[int]]) -> int:
    static = sum(chunk.static for chunk in chunks)
    rows = [
        sum(number * chunk.held for number, chunk in zip(vector, chunks, strict=True))
        + max(chunk.reach for number, chunk in zip(vector, chunks, strict=True) if number)
        for vector in vectors
    ]
    return static + max(*rows, *(chunk.floor for chunk in chunks))


def _seconds(chunks: Sequence[_Loaded]) -> float:
    return math.fsum(chunk.seconds for chunk in chunks)


class RankSolver:
    """The choices of least time of the chunks of one rank, for one budget after the other; see `plan_stages`.

    Args:
        parts: Costs of its chunks.
        vectors: Microbatches of them that are alive together, at each moment that may set the peak.
    """

    def __init__(self, parts: Sequence[StageCosts], vectors: Sequence[Sequence[int]]) -> None:
        self._parts = parts
        self._vectors = vectors

    def solve(self, budget: int) -> list[PartChoices]:
        """The choices within a budget.

        Args:
            budget: What the peak may be, statics included.

        Raises:
            BudgetError: There are none.
        """
        parts, vectors = self._parts, self._vectors
        if len(parts) == 1:
            (vector,) = vectors
            return [solve(replace(parts[0], in_flight=vector[0]), budget)]
        fitting = [chosen for chosen, peak in self._combinations if peak <= budget]
        if not fitting:
            least = min(peak for _, peak in self._combinations)
            static = sum(part.static_bytes for part in parts)
            text = f"no choice of recompute found that keeps {format_bytes(budget)} ({budget} bytes): the smallest peak"
            text += f" found is {format_bytes(least)} ({least} bytes), of which static {format_bytes(static)}"
            raise BudgetError(text, least)
        best = [*min(fitting, key=lambda chosen: (_seconds(chosen), _peak(chosen, vectors)))]
        for index in (*range(len(parts)), *range(len(parts))):
            _improve(best, index, parts[index], vectors, budget)
        return [one.choices for one in best]

    @functools.cached_property
    def _combinations(self) -> list[tuple[tuple[_Loaded, ...], int]]:
        """Points of the chunks' curves together, each with its peak."""
        most = [max(column) for column in zip(*self._vectors, strict=True)]
        num_points = max(3, min(_MOST_POINTS, int(_COMBINATIONS ** (1 / len(self._parts)))))
        curves = [
            [_Loaded.by(part, chosen) for _, _, chosen in pareto(replace(part, in_flight=number), num_points)]
            for part, number in zip(self._parts, most, strict=True)
        ]
        return [(chosen, _peak(chosen, self._vectors)) for chosen in itertools.product(*curves)]


def _improve(best: list[_Loaded], index: int, part: StageCosts, vectors: Sequence[Sequence[int]], budget: int) -> None:
    """Give one chunk all that the others leave."""
    left: dict[int, int] = {}
    for vector in (one for one in vectors if one[index]):
        pairs = [pair for at, pair in enumerate(zip(vector, best, strict=True)) if at != index]
        others = sum(number * one.held + one.static for number, one in pairs)
        # of moments with as many of its microbatches the one that leaves least decides
        left[vector[index]] = min(budget - others, left.get(vector[index], budget))
    for own, room in left.items():
        try:
            chosen = solve(replace(part, in_flight=own), room)
        except BudgetError:
            continue
        tried = [*best[:index], _Loaded.by(part, chosen), *best[index + 1 :]]
        if tried[index].seconds < best[index].seconds and _peak(tried, vectors) <= budget:
            best[:] = tried
