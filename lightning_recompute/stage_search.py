"""The fastest plan of one pipeline rank within a budget: the planner's answers, checked against exact bytes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from lightning_recompute.cost import Option, StageCosts, extra_seconds
from lightning_recompute.errors import BudgetError
from lightning_recompute.plan import Keep, RecomputePlan, Segment
from lightning_recompute.planner import smallest_peak
from lightning_recompute.rank_solver import PartChoices, RankSolver
from lightning_recompute.schedules import greatest
from lightning_recompute.stage_forecast import rank_forecast
from lightning_recompute.stage_memory import Kind, RankAction
from lightning_recompute.stage_options import Candidate, Prices, StageOptions, action_seconds, candidates, stage_options
from lightning_recompute.stage_profile import StageProfile
from lightning_recompute.units import format_bytes

_ROUNDS = 8
# exact peaks that may be counted in order to improve a plan
_CHANGES = 300
# changes of single blocks of which pairs are tried, too
_FEW = 60
# seconds by which plans differ that take the same time
_ROUNDING = 1e-12


class StageSearch:
    """Asks the planner for plans of one rank, and checks them against the exact bytes of its profile.

    Memory decouples the ranks: each takes its own least time.

    Args:
        profile: What was measured of the rank.
        prices: Count time by these. None: blocks are timed on their device.
    """

    def __init__(self, profile: StageProfile, prices: Prices | None = None) -> None:
        self.profile = profile
        self._prices = prices
        self._candidates: dict[int, list[list[Candidate]]] = {}
        self._parts: list[StageOptions] | None = None
        self._vectors = alive_together(profile.actions, profile.chunks, profile.splits)
        self._peaks: dict[RecomputePlan, int] = {}
        self.choices: dict[RecomputePlan, tuple[PartChoices, ...]] = {}
        """Of each plan that was looked at, those for each chunk."""

    def exact(self, plan: RecomputePlan) -> int:
        """The peak of a step under a plan of all blocks."""
        if plan not in self._peaks:
            self._peaks[plan] = self.profile.peak_bytes(plan)
        return self._peaks[plan]

    @property
    def kept(self) -> RecomputePlan:
        """The plan that recomputes nothing."""
        return RecomputePlan((Segment(0, sum(self.profile.division.lengths), Keep()),))

    def seconds(self, plan: RecomputePlan) -> float:
        """What a plan takes a microbatch longer on this rank."""
        total = 0.0
        for chunk in self.profile.chunks:
            profile = self.profile.profile_of(chunk)
            if profile is None:
                continue
            kinds = self._candidates.get(chunk, [[] for _ in profile.capture.kinds])
            found = [{one.action: one.seconds for one in kind} for kind in kinds]
            for call, action in enumerate(profile.actions(plan)):
                if isinstance(action, Keep):  # takes nothing longer: not to be timed
                    continue
                known = found[profile.capture.order[call]]
                if action not in known:
                    known |= action_seconds(profile, call, [Keep(), action], self._prices)
                total += known[action]
        return total

    def fastest(self, budget_bytes: int) -> RecomputePlan:
        """The plan of least time within a budget: of all blocks, those of other ranks kept.

        Raises:
            BudgetError: There is none.
        """
        if self.exact(self.kept) <= budget_bytes:
            return self.kept
        tries = _Tries(self, budget_bytes)
        tries.run()
        if not self.profile.splits:  # whose peaks are measured and not counted
            tries.improve()
        for plan in list(self._peaks):  # also of former searches
            if tries.best is None and self.exact(plan) <= budget_bytes:
                tries.consider(plan, self.seconds(plan))
        if tries.best is None:
            raise BudgetError(self._why_none(budget_bytes), self.exact(self.leanest()))
        return tries.best

    def leanest(self) -> RecomputePlan:
        """Of the plans that were looked at the one of the smallest peak."""
        return min(self._peaks, key=lambda plan: self._peaks[plan])

    def _why_none(self, budget_bytes: int) -> str:
        """That no plan fits, what the smallest peak consists of, and what would help."""
        stage = rank_forecast(self.profile, self.leanest())
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in stage.breakdown.items() if size)
        return (
            f"memory_budget of {format_bytes(budget_bytes)} ({budget_bytes} bytes): no plan for pipeline rank "
            f"{self.profile.rank} keeps it. The smallest peak found is {format_bytes(stage.peak_bytes)} "
            f"({stage.peak_bytes} bytes), at: {stage.moment}, {stage.in_flight} microbatches in flight. It consists of "
            f"{parts}. Without any recompute the peak is {format_bytes(self.exact(self.kept))}. Cures: a budget of at "
            f"least {stage.peak_bytes} bytes; more microbatches of fewer rows (num_microbatches); fewer blocks on this "
            "rank (split=); precision='bf16-mixed' or an optimizer with less state; more devices"
        )

    # ---- rows

    def least_rows(self) -> int:
        """The smallest peak by the planner's rows."""
        static = sum(part.stage.static_bytes for part in self.parts())
        try:
            self._solver.solve(static)
        except BudgetError as error:
            return error.smallest_bytes or 0
        return static

    def answer(self, budget_bytes: int) -> tuple[RecomputePlan, float]:
        """The planner's choices within a budget, and their time; by its rows.

        Raises:
            BudgetError: There are none.
        """
        parts = self.parts()
        chosen = tuple(self._solver.solve(budget_bytes))
        self.choices[self.plan_of(chosen)] = chosen
        time = sum(extra_seconds(part.stage, choices) for part, choices in zip(parts, chosen, strict=True))
        return self.plan_of(chosen), time

    def leanest_blocks(self) -> list[RecomputePlan]:
        """Plans that may have a smaller peak than the rows say: the leanest single option of every block."""
        parts = self.parts()
        last = [tuple(_last_single(options) for options in part.stage.options) for part in parts]
        smallest = [smallest_peak(part.stage) for part in parts]
        self.choices |= {self.plan_of(chosen): tuple(chosen) for chosen in (last, smallest)}
        return [self.plan_of(last), self.plan_of(smallest)]

    @functools.cached_property
    def _solver(self) -> RankSolver:
        return RankSolver([part.stage for part in self.parts()], self._vectors)

    def parts(self) -> list[StageOptions]:
        """The options of the blocks of each chunk."""
        if self._parts is None:
            self._parts = [self._options(place) for place in range(len(self.profile.chunks))]
        return self._parts

    def plan_of(self, chosen: Sequence[PartChoices]) -> RecomputePlan:
        """What choices mean, for all blocks.

        Args:
            chosen: For each chunk of the rank.
        """
        division = self.profile.division
        own = {
            chunk: part.segments(choices)
            for chunk, part, choices in zip(self.profile.chunks, self.parts(), chosen, strict=True)
        }
        segments: list[Segment] = []
        for chunk, (start, stop) in enumerate(division.bounds):
            segments += own.get(chunk) or [Segment(start, stop, Keep())]
        return RecomputePlan(tuple(segments))

    def _candidates_of(self, chunk: int) -> list[list[Candidate]]:
        profile = self.profile.profile_of(chunk)
        if chunk not in self._candidates:
            self._candidates[chunk] = [] if profile is None else candidates(profile, self._prices)
        return self._candidates[chunk]

    def _static_bytes(self) -> int:
        """What is there all the time while the schedule runs, whole parameters and gradients included."""
        gathered = 0 if self.profile.spread is None else self.profile.spread.whole_bytes
        return self.profile.statics.num_bytes + self.profile.gradients.all_bytes + gathered

    def _options(self, place: int) -> StageOptions:
        chunk = self.profile.chunks[place]
        profile = self.profile.profile_of(chunk)
        most = max(vector[place] for vector in self._vectors)
        # what is alive besides at most: of the whole rank counted with its first chunk
        static = self._static_bytes() if place == 0 else 0
        start, stop = self.profile.division.bounds[chunk]
        if profile is None:
            nothing = ((Option(0, 0.0),),) * (stop - start)
            return StageOptions(
                StageCosts(nothing, static, floor_bytes=static, in_flight=most),
                ((Keep(),),) * (stop - start),
                start,
                {},
            )
        middle = profile.skeleton.middle
        static += (most - 1) * (0 if middle is None else middle.num_bytes)
        found = stage_options(
            profile,
            self._candidates_of(chunk),
            start,
            stop,
            static_bytes=static,
            in_flight=most,
            accumulating=True,
        )
        return replace(found, stage=replace(found.stage, floor_bytes=static))


class _Change(NamedTuple):
    """Another option of one block, and the seconds that it gains."""

    gain: float
    place: int
    unit: int
    choice: int


class _Tries:
    """Asks with more or less than the budget, and keeps the best answer that fits."""

    def __init__(self, search: StageSearch, budget_bytes: int) -> None:
        self._search = search
        self._budget_bytes = budget_bytes
        self.best: RecomputePlan | None = None
        self._best_seconds = float("inf")

    def run(self) -> None:
        """Find the largest amount to ask with whose answer fits."""
        search, budget = self._search, self._budget_bytes
        least = search.least_rows()
        asked = max(budget, least)
        exact = self._try(asked)
        if exact is not None and exact <= budget:
            self._loosen(asked, exact)
            return
        self._try(least)
        for plan in search.leanest_blocks():
            self.consider(plan, search.seconds(plan))
        low, high = min(least, asked), asked
        for _ in range(_ROUNDS):
            middle = (low + high) // 2
            exact = self._try(middle)
            if exact is not None and exact <= budget:
                low = middle
            else:
                high = middle

    def improve(self) -> None:
        """The planner's rows are not exact: try other options of one block, and of two, the largest gain first."""
        search, left = self._search, _CHANGES
        while self.best in search.choices:
            chosen = search.choices[self.best]
            singles = self._changes(chosen)
            pairs = itertools.combinations(singles, 2) if len(singles) <= _FEW else ()
            moves: list[tuple[_Change, ...]] = [(one,) for one in singles]
            moves += [(one, other) for one, other in pairs if (one.place, one.unit) != (other.place, other.unit)]
            gains = [(sum(change.gain for change in move), move) for move in moves]
            for gain, move in sorted((pair for pair in gains if pair[0] > _ROUNDING), key=lambda pair: -pair[0]):
                tried = [list(choices) for choices in chosen]
                for change in move:
                    tried[change.place][change.unit] = change.choice
                plan = search.plan_of([tuple(choices) for choices in tried])
                search.choices[plan] = tuple(map(tuple, tried))
                left -= 1
                if self.consider(plan, self._best_seconds - gain) <= self._budget_bytes or not left:
                    break
            else:
                return
            if not left:
                return

    def _changes(self, chosen: Sequence[PartChoices]) -> list[_Change]:
        """Other options of single blocks."""
        found = []
        for place, (part, choices) in enumerate(zip(self._search.parts(), chosen, strict=True)):
            for unit, choice in enumerate(choices):
                options = part.stage.options[unit]
                if choice is None or options[choice].num_units > 1:
                    continue
                found += [
                    _Change(options[choice].extra_seconds - option.extra_seconds, place, unit, other)
                    for other, option in enumerate(options)
                    if option.num_units == 1 and other != choice
                ]
        return found

    def _loosen(self, asked: int, exact: int) -> None:
        budget, high = self._budget_bytes, None
        for _ in range(_ROUNDS):
            more = asked + max(budget - exact, 1) if high is None else (asked + high) // 2
            found = self._try(more)
            if found is None or found > budget:
                high = more
            elif found == exact and high is None and budget - exact <= 1:
                return
            else:
                asked, exact = more, found

    def _try(self, asked: int) -> int | None:
        try:
            plan, seconds = self._search.answer(asked)
        except BudgetError:
            return None
        return self.consider(plan, seconds)

    def consider(self, plan: RecomputePlan, seconds: float) -> int:
        """Take a plan if it fits and is faster; returns its peak."""
        exact = self._search.exact(plan)
        if exact <= self._budget_bytes and seconds < self._best_seconds:
            self.best, self._best_seconds = plan, seconds
        return exact


def _last_single(options: Sequence[object]) -> int:
    return max(index for index, option in enumerate(options) if getattr(option, "num_units", 1) == 1)


def alive_together(
    actions: Sequence[RankAction], chunks: Sequence[int], splits: frozenset[int]
) -> tuple[tuple[int, ...], ...]:
    """Microbatches of each chunk that a plan decides about and that are alive together.

    Args:
        actions: Of the rank.
        chunks: Of the rank.
        splits: Those whose backward has two parts: after the first a microbatch holds everything under any plan.

    Returns:
        Vectors with an entry a chunk; those that another one covers are left out.
    """
    alive = dict.fromkeys(chunks, 0)
    found: set[tuple[int, ...]] = set()
    for kind, chunk, _ in actions:
        ends = kind == Kind.BACKWARD or kind == (Kind.INPUT if chunk in splits else Kind.WEIGHT)
        if kind == Kind.FORWARD:
            alive[chunk] += 1
        elif ends:
            found.add(tuple(alive.values()))
            alive[chunk] -= 1
    return tuple(sorted(greatest(found)))
