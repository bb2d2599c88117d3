"""The search for the fastest plan within a budget: the planner's answers, checked against exact bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from lightning_recompute.cost import Choices, extra_seconds, peak_bytes
from lightning_recompute.errors import BudgetError
from lightning_recompute.forecast import stage_forecast
from lightning_recompute.plan import RecomputePlan
from lightning_recompute.planner import smallest_peak, solve
from lightning_recompute.profiling import Profile, everything_kept
from lightning_recompute.stage_options import Candidate, StageOptions, stage_options
from lightning_recompute.units import format_bytes

_ROUNDS = 8


class PlanSearch:
    """Asks the planner, and checks what it says against the exact bytes of the profile.

    Args:
        profile: What was measured.
        found: The actions that plans are made of.
    """

    def __init__(self, profile: Profile, found: Sequence[Sequence[Candidate]]) -> None:
        self.profile = profile
        self.candidates = found
        self.options: StageOptions = stage_options(
            profile, found, 0, profile.num_blocks, static_bytes=profile.statics.num_bytes
        )
        self._leanest: Choices | None = None

    def plan(self, choices: Choices) -> RecomputePlan:
        """What choices mean."""
        return RecomputePlan(tuple(self.options.segments(choices)))

    def exact(self, choices: Choices) -> int:
        """The peak of a step under choices."""
        return self.profile.peak_bytes(self.plan(choices))

    def leanest(self) -> Choices:
        """The choices of the smallest peak that was found."""
        if self._leanest is None:
            tried: list[Choices] = [smallest_peak(self.options.stage)]
            for block_options in (_last, _first):  # the leanest single option everywhere, or keeping everything
                tried.append(tuple(block_options(options) for options in self.options.stage.options))
            found = min(tried, key=self.exact)
            # among the fastest choices of that peak may be some of a smaller one, since rows are not exact
            while self._leanest is None or self.exact(found) < self.exact(self._leanest):
                self._leanest = found
                found = self._within(self.exact(found), found)
        return self._leanest

    def fastest(self, budget_bytes: int) -> Choices:
        """The choices of least time within a budget.

        Raises:
            BudgetError: There are none.
        """
        least = self.leanest()
        if self.exact(least) > budget_bytes:
            raise BudgetError(_why_none(self.profile, self.plan(least), budget_bytes), self.exact(least))
        return self._within(budget_bytes, least)

    def _within(self, budget_bytes: int, known: Choices) -> Choices:
        """The choices of least time within a budget, from some that keep it.

        The planner's rows are sums. Where the exact peak of its answer is another, the planner is asked again with
        more or less in the rows before the loss, or in all of them.
        """
        tries = _Tries(self, budget_bytes, known)
        if tries.fits(0, 0):
            tries.loosen()
        else:
            # casts in autocast's cache live until the loss: most often it is the rows before it that lack something
            tries.tighten(lambda more: (more, 0))
            tries.tighten(lambda more: (0, more))
        return tries.best


class _Tries:
    """Asks the planner with changed rows, and keeps the best answer that fits.

    Args:
        search: Holds the rows and the exact bytes.
        budget_bytes: The budget.
        best: Choices that fit.
    """

    def __init__(self, search: PlanSearch, budget_bytes: int, best: Choices) -> None:
        self._search = search
        self._stage = search.options.stage
        self._budget_bytes = budget_bytes
        self.best = best
        self._too_much = 0
        self._over = 0

    def fits(self, before_loss: int, everywhere: int) -> bool:
        """Whether the answer to changed rows fits; where there is none, nothing more can be asked for, which does.

        Args:
            before_loss: Bytes to add to the rows before the loss.
            everywhere: Bytes to add to all rows; may be negative.
        """
        stage = self._stage
        entries = stage.entry_bytes
        assert not isinstance(entries, int)
        asked = replace(
            stage,
            head_bytes=stage.head_bytes + before_loss,
            entry_bytes=tuple(entry + before_loss for entry in entries),
            static_bytes=max(stage.static_bytes + everywhere, 0),
        )
        try:
            choices = solve(asked, max(self._budget_bytes, asked.floor_bytes))
        except BudgetError:
            return True
        exact = self._search.exact(choices)
        self._over = exact - self._budget_bytes
        self._too_much = peak_bytes(asked, choices) - exact
        if self._over > 0:
            return False
        if extra_seconds(stage, choices) < extra_seconds(stage, self.best):
            self.best = choices
        return True

    def loosen(self) -> None:
        """Ask for as much less as the rows said too much, for as long as the answers fit."""
        less = 0
        for _ in range(_ROUNDS):
            if self._too_much <= 0 or not self.fits(0, -less - self._too_much):
                return
            less += self._too_much

    def tighten(self, change: Callable[[int], tuple[int, int]]) -> None:
        """Find the least that has to be added to the rows for an answer that fits."""
        if self.fits(*change(0)):
            return
        low, high = 0, self._over
        while not self.fits(*change(high)):
            low, high = high, 2 * high
        for _ in range(_ROUNDS):
            middle = (low + high) // 2
            if self.fits(*change(middle)):
                high = middle
            else:
                low = middle


def _last(options: Sequence[object]) -> int:
    return max(index for index, option in enumerate(options) if getattr(option, "num_units", 1) == 1)


def _first(options: Sequence[object]) -> int:
    return 0


def _why_none(profile: Profile, plan: RecomputePlan, budget_bytes: int) -> str:
    """That no plan fits, what the smallest peak consists of, and what would help."""
    stage = stage_forecast(profile, plan)
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in stage.breakdown.items() if size)
    kept = stage_forecast(profile, everything_kept(profile))
    lines = [
        f"memory_budget of {format_bytes(budget_bytes)} ({budget_bytes} bytes): no plan keeps it. The smallest peak "
        f"of a step is {format_bytes(stage.peak_bytes)} ({stage.peak_bytes} bytes), at: {stage.moment}. It consists "
        f"of {parts}",
    ]
    if kept.peak_bytes - stage.peak_bytes < 0.05 * kept.peak_bytes:
        what = "The head and loss set the peak" if "head" in stage.moment else f"The peak is set by: {stage.moment}"
        lines.append(
            f"{what}; no recompute of blocks helps (with none at all the peak is {format_bytes(kept.peak_bytes)})"
        )
    lines.append(
        f"Cures: a budget of at least {stage.peak_bytes} bytes; a smaller batch with accumulate_grad_batches (or "
        "shorter sequences), which shrinks everything but parameters, gradients and optimizer; precision='bf16-mixed' "
        "or an optimizer with less state; more devices"
    )
    return ". ".join(lines)
