"""Blocks divided over pipeline stages together with how each stage recomputes.

A stage of few blocks needs little recompute, and its neighbours more. With t the seconds of a microbatch on a stage
under its fastest plan within the budget, a step takes about sum(t) + (M - 1) max(t). For each bound on max(t) that may
matter a dynamic program over cut points finds the least sum; the best of these by simulation is taken. (AdaPipe, Sun
et al. 2024, divides and recomputes together in this way.)
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lightning_recompute.cost import Option, StageCosts, extra_seconds, in_flight
from lightning_recompute.errors import BudgetError
from lightning_recompute.planner import solve
from lightning_recompute.stage_plans import PipelineCosts, PipelinePlan, plan_stages
from lightning_recompute.step_time import ChunkSeconds, estimate_seconds
from lightning_recompute.units import format_bytes

Floats = NDArray[np.float64]

# cuts that are simulated, those of the best estimates
_SIMULATED = 12
# sums of the same seconds in another order
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class BlockCosts:
    """One block of the model.

    Args:
        options: How it, or a group of blocks from it on, can be treated. Groups go last, larger ones later: near a
            cut those that would go past it are left out.
        seconds: Of its forward and backward where everything is kept.
        static_bytes: Its parameters, gradients and optimizer state.
        entry_bytes: Live besides during its forward.
        gradient_bytes: Live besides during its backward.
    """

    options: tuple[Option, ...]
    seconds: ChunkSeconds
    static_bytes: int = 0
    entry_bytes: int = 0
    gradient_bytes: int = 0


@dataclass(frozen=True, slots=True)
class EndCosts:
    """What comes before the first block, or after the last one.

    Args:
        seconds: Of its forward and backward.
        static_bytes: Its parameters, gradients and optimizer state.
        working_bytes: After the last block: peak between its forward and its backward, above all that is held.
    """

    seconds: ChunkSeconds = ChunkSeconds(0.0, 0.0)  # noqa: RUF009  (frozen)
    static_bytes: int = 0
    working_bytes: int = 0


@dataclass(frozen=True)
class ModelCosts:
    """A model as blocks between an embedding and a head.

    Args:
        blocks: In forward order.
        embedding: What the first stage has besides.
        head: What the last stage has besides.
    """

    blocks: tuple[BlockCosts, ...]
    embedding: EndCosts = EndCosts()
    head: EndCosts = EndCosts()

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocks", tuple(self.blocks))
        if not self.blocks:
            raise ValueError("a model without blocks has nothing to divide")

    def part(self, start: int, stop: int) -> tuple[StageCosts, ChunkSeconds]:
        """Costs of a part of the model, one microbatch in flight, and its seconds.

        Args:
            start: Its first block.
            stop: The block after its last.
        """
        blocks = self.blocks[start:stop]
        ends = [self.embedding] * (start == 0) + [self.head] * (stop == len(self.blocks))
        static = sum(block.static_bytes for block in blocks) + sum(end.static_bytes for end in ends)
        options = tuple(
            tuple(option for option in block.options if at + option.num_units <= len(blocks))
            for at, block in enumerate(blocks)
        )
        costs = StageCosts(
            options=options,
            static_bytes=static,
            head_bytes=self.head.working_bytes if stop == len(self.blocks) else 0,
            gradient_bytes=tuple(block.gradient_bytes for block in blocks),
            entry_bytes=tuple(block.entry_bytes for block in blocks),
        )
        return costs, _summed([*(block.seconds for block in blocks), *(end.seconds for end in ends)])

    def pipeline(
        self,
        bounds: Sequence[int],
        num_microbatches: int,
        *,
        schedule: str = "1f1b",
        virtual: int = 1,
        send_seconds: float = 0.0,
    ) -> PipelineCosts:
        """The model cut into parts.

        Args:
            bounds: First block of each part, and the number of blocks.
            num_microbatches: Microbatches of one step.
            schedule: One of `schedules.SCHEDULES`.
            virtual: Chunks on each rank, where the schedule is interleaved.
            send_seconds: Of a transfer.

        Raises:
            ValueError: The parts are not as many as the schedule needs, or do not cover all blocks once.
        """
        if list(bounds) != sorted(set(bounds)) or (bounds[0], bounds[-1]) != (0, len(self.blocks)):
            raise ValueError(f"bounds {list(bounds)} do not divide {len(self.blocks)} blocks into parts")
        parts = [self.part(start, stop) for start, stop in itertools.pairwise(bounds)]
        chunks = 2 if schedule == "zbv-zero-bubble" else virtual
        if len(parts) % chunks:
            raise ValueError(f"{len(parts)} parts do not fall into {chunks} chunks a rank")
        costs, seconds = zip(*parts, strict=True)
        return PipelineCosts(
            costs, seconds, len(parts) // chunks, num_microbatches, schedule, virtual, send_seconds=send_seconds
        )


@dataclass(frozen=True)
class Split:
    """Blocks over stages.

    Args:
        bounds: First block of each stage, and the number of blocks.
        pipeline: The stages; the plan's choices are indices into their options.
        plan: How each recomputes, and the simulated step.
        estimate_seconds: Of the step, by the formula.
    """

    bounds: tuple[int, ...]
    pipeline: PipelineCosts
    plan: PipelinePlan
    estimate_seconds: float

    @property
    def counts(self) -> tuple[int, ...]:
        """Blocks of each stage."""
        return tuple(stop - start for start, stop in itertools.pairwise(self.bounds))


def even_bounds(num_blocks: int, num_parts: int) -> tuple[int, ...]:
    """As many blocks a part as can be, the first ones with one more.

    Args:
        num_blocks: Blocks of the model.
        num_parts: Parts, each of one block at least.

    Raises:
        ValueError: There are fewer blocks than parts.
    """
    if num_blocks < num_parts:
        raise ValueError(f"{num_blocks} blocks do not make {num_parts} stages; each needs one at least")
    size, more = divmod(num_blocks, num_parts)
    return tuple(part * size + min(part, more) for part in range(num_parts + 1))


def balance(
    model: ModelCosts,
    num_stages: int,
    num_microbatches: int,
    budget_bytes: int,
    *,
    schedule: str = "1f1b",
    send_seconds: float = 0.0,
) -> Split:
    """Divide blocks over stages so that a step, with the fastest plan of each stage within the budget, is shortest.

    Quick where blocks are alike; where all differ and the budget is tight it may take a minute.

    Of all divisions the estimate `sum(t) + (M - 1) max(t)` is minimised exactly; of the best ones, and of the even
    division where it fits, the one of the shortest simulated step is taken.

    Args:
        model: Blocks and ends.
        num_stages: Ranks, each of one block at least.
        num_microbatches: Microbatches of one step.
        budget_bytes: What the peak of each rank may be, statics included.
        schedule: `1f1b` or `gpipe`: those that have one chunk a rank.
        send_seconds: Of a transfer.

    Raises:
        BudgetError: No division fits.
        ValueError: The schedule has several chunks a rank, or there are fewer blocks than stages.
    """
    if schedule not in ("1f1b", "gpipe"):
        raise ValueError(
            f"blocks are balanced for schedules of one chunk a rank, found {schedule!r}; divide them by count, or list "
            "them"
        )
    even = even_bounds(len(model.blocks), num_stages)
    times = _Times(model, in_flight(schedule, num_stages, num_microbatches), budget_bytes)
    estimates = {bounds: times.estimate(bounds, num_microbatches) for bounds in _cuts(times, num_microbatches)}
    if not estimates:
        raise BudgetError(
            f"no division of {len(model.blocks)} blocks over {num_stages} stages keeps {format_bytes(budget_bytes)} on "
            "every stage, however it recomputes; more stages, a larger budget or a smaller microbatch may"
        )
    chosen = sorted(estimates, key=lambda bounds: estimates[bounds])[:_SIMULATED]
    if math.isfinite(estimate := times.estimate(even, num_microbatches)):
        estimates[even] = estimate
        chosen.append(even)
    splits = []
    for bounds in chosen:
        pipeline = model.pipeline(bounds, num_microbatches, schedule=schedule, send_seconds=send_seconds)
        splits.append(Split(bounds, pipeline, plan_stages(pipeline, budget_bytes), estimates[bounds]))
    # of equal ones the first: the one of the better estimate
    return min(splits, key=lambda split: split.plan.step.seconds)


class _Times:
    """Seconds of a microbatch on each stage that a cut could make, under its fastest plan within the budget."""

    def __init__(self, model: ModelCosts, alive: Sequence[int], budget: int) -> None:
        self.num_blocks, self.num_stages = len(model.blocks), len(alive)
        self._model, self._alive, self._budget = model, alive, budget
        self._part = functools.cache(model.part)
        self._extra = functools.cache(self._solved)
        # a group may be counted more than once: it stays a bound
        fastest = [min(0.0, *(option.extra_seconds for option in block.options)) for block in model.blocks]
        blocks = [block.seconds.total + least for block, least in zip(model.blocks, fastest, strict=True)]
        self._sums = [0.0, *itertools.accumulate(blocks)]

    def base(self, start: int, stop: int) -> float:
        """Seconds where everything is kept: no plan takes less (but for the noise of measured times, allowed for)."""
        ends = self._model.embedding.seconds.total * (start == 0)
        ends += self._model.head.seconds.total * (stop == self.num_blocks)
        return self._sums[stop] - self._sums[start] + ends

    def of(self, stage: int, start: int, stop: int) -> float:
        """Seconds of a stage, infinite where nothing fits."""
        costs, seconds = self._part(start, stop)
        return seconds.total + self._extra(replace(costs, in_flight=self._alive[stage]))

    def estimate(self, bounds: Sequence[int], num_microbatches: int) -> float:
        """Seconds of a step, infinite where a stage does not fit."""
        each = [self.of(stage, *ends) for stage, ends in enumerate(itertools.pairwise(bounds))]
        if not all(map(math.isfinite, each)):
            return math.inf
        return estimate_seconds([ChunkSeconds(one, 0.0) for one in each], num_microbatches)

    def _solved(self, costs: StageCosts) -> float:
        try:
            return extra_seconds(costs, solve(costs, self._budget))
        except BudgetError:
            return math.inf


def _cuts(times: _Times, num_microbatches: int) -> Iterator[tuple[int, ...]]:
    """For each bound on the slowest stage that may belong to the best division, the one of the least sum."""
    table = np.full((times.num_stages, times.num_blocks + 1, times.num_blocks + 1), np.inf)
    known = times.estimate(even_bounds(times.num_blocks, times.num_stages), num_microbatches)
    least = times.base(0, times.num_blocks)
    within = (known * (1 + _ROUNDING) - least) / (num_microbatches - 1) if num_microbatches > 1 else math.inf
    leads_on = _ways_on(times, within)
    starts = {0}
    for stage in range(times.num_stages):
        # only from where the stages before can end, to where those after can begin, none of them slower than that
        for start, stop in itertools.product(sorted(starts), sorted(leads_on[stage])):
            if start < stop and times.base(start, stop) <= within:
                table[stage, start, stop] = times.of(stage, start, stop)
        ends = (table[stage] <= within) & np.isfinite(table[stage])
        starts = set(np.flatnonzero(ends.any(0)).tolist())
    paces = np.unique(table[np.isfinite(table)])
    unbounded = _shortest(table, np.inf)
    if unbounded is None:
        return
    best = min(known, times.estimate(unbounded, num_microbatches))
    shortest = sum(table[stage, start, stop] for stage, (start, stop) in enumerate(itertools.pairwise(unbounded)))
    for pace in paces:
        if shortest + (num_microbatches - 1) * pace > best * (1 + _ROUNDING):
            break
        bounds = _shortest(table, pace)
        if bounds is not None:
            best = min(best, times.estimate(bounds, num_microbatches))
            yield bounds
    yield unbounded


def _ways_on(times: _Times, within: float) -> list[set[int]]:
    """For each stage where it can end, so that those after it can take the rest, at least a block each."""
    ends = [{times.num_blocks}]
    for stage in reversed(range(1, times.num_stages)):
        starts = range(stage, times.num_blocks)
        ends.append(
            {start for start in starts if any(start < end and times.base(start, end) <= within for end in ends[-1])}
        )
    return ends[::-1]


def _shortest(table: Floats, pace: float) -> tuple[int, ...] | None:
    """The cuts of the least sum with no stage above a pace."""
    allowed = np.where(table <= pace, table, np.inf)
    sums = np.full(table.shape[1], np.inf)
    sums[0] = 0.0
    origins = []
    for of_stage in allowed:
        through = sums[:, None] + of_stage
        origins.append(through.argmin(0))
        sums = through.min(0)
    if not np.isfinite(sums[-1]):
        return None
    bounds = [table.shape[1] - 1]
    for origin in reversed(origins):
        bounds.append(int(origin[bounds[-1]]))
    return tuple(reversed(bounds))


def _summed(each: Sequence[ChunkSeconds]) -> ChunkSeconds:
    weights = [one.backward / 2 if one.weight is None else one.weight for one in each]
    return ChunkSeconds(
        forward=math.fsum(one.forward for one in each),
        backward=math.fsum(one.backward for one in each),
        recompute=math.fsum(one.recompute for one in each),
        weight=math.fsum(weights),
    )
