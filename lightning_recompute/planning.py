"""From a module and a budget in bytes to the fastest plan that keeps it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_recompute.blocks import find_blocks
from lightning_recompute.cost import Choices, extra_seconds, peak_bytes
from lightning_recompute.errors import BudgetError
from lightning_recompute.forecast import Forecast, ParallelSizes, StageForecast, stage_forecast
from lightning_recompute.patch import Patch
from lightning_recompute.plan import Keep, RecomputePlan, Segment
from lightning_recompute.planner import smallest_peak, solve
from lightning_recompute.policy import RecomputePolicy
from lightning_recompute.profiling import Profile, profile_step
from lightning_recompute.side_effects import is_lightning_module
from lightning_recompute.stage_options import Candidate, Prices, StageOptions, candidates, stage_options
from lightning_recompute.units import format_bytes, parse_bytes

logger = logging.getLogger(__name__)

_ROUNDS = 8


def plan_recompute(
    module: nn.Module,
    batch: Any,
    memory_budget: str | int,
    *,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    blocks: str | Sequence[str] | None = None,
    parallel: ParallelSizes | None = None,
    accumulate: int = 1,
    prices: Prices | None = None,
) -> Forecast:
    """Find the plan that costs least time and keeps a budget.

    The step is measured on the batch; module, gradients, optimizer and random streams are afterwards what they were.

    Args:
        module: A LightningModule, of which `training_step(batch, 0)` runs, or any module, which is called with the
            batch (a mapping as keywords, a tuple or list as positional arguments). In training mode, on its device.
        batch: One batch as it comes to training, on that device.
        memory_budget: Bytes that the peak of a step may have, parameters, gradients and optimizer state included:
            `"22GiB"`, or a number.
        optimizer: What trains the module. None: it has no state.
        blocks: Where the blocks are; see `find_blocks`.
        parallel: Sizes of the parallel groups; None: one device.
        accumulate: Batches to an optimizer step.
        prices: Count time by these. None: blocks are timed on the module's device.

    Returns:
        The plan and what it will need.

    Raises:
        BudgetError: No plan keeps the budget; the message says what the smallest peak is and consists of.
        ValueError: The budget is no size, or the model's blocks cannot be found or measured.
    """
    budget_bytes = parse_bytes(memory_budget)
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer or ())
    parallel = parallel or ParallelSizes()
    gradient_bytes = sum(p.nbytes for p in module.parameters() if p.requires_grad)
    profile = profile_batch(
        module,
        batch,
        blocks=blocks,
        optimizers=optimizers,
        accumulating=accumulate > 1,
        # the buckets that gradients are averaged in
        other_bytes=gradient_bytes if parallel.data > 1 else 0,
    )
    return forecast_within(profile, budget_bytes, prices=prices)


def profile_batch(
    module: nn.Module,
    batch: Any,
    *,
    step: Callable[[], object] | None = None,
    blocks: str | Sequence[str] | None = None,
    optimizers: Iterable[Optimizer] = (),
    accumulating: bool = False,
    other_bytes: int = 0,
    exact: bool = True,
) -> Profile:
    """Measure a module's step on a batch.

    Args:
        module: See `plan_recompute`.
        batch: The batch.
        step: Runs the step's forward and returns its loss. None: made from module and batch, as `plan_recompute`
            says.
        blocks: Where the blocks are.
        optimizers: What trains the module.
        accumulating: Whether an optimizer step follows several backward passes.
        other_bytes: What else is there all the time.
        exact: Whether blocks run on real tensors at once; see `measure_bytes`.
    """
    run = step or _step(module, batch)
    with ExitStack() as stack:
        if is_lightning_module(module):  # nothing is trained, so nothing is logged
            for name in ("log", "log_dict"):
                stack.callback(Patch(module, _ignored, attribute=name).remove)
        return profile_step(
            module,
            run,
            find_blocks(module, blocks),
            optimizers=optimizers,
            batch=batch,
            accumulating=accumulating,
            other_bytes=other_bytes,
            exact=exact,
        )


def _step(module: nn.Module, batch: Any) -> Callable[[], object]:
    if is_lightning_module(module):
        training_step: Any = module.training_step
        return lambda: training_step(batch, 0)
    if isinstance(batch, Mapping):
        return lambda: module(**batch)
    if isinstance(batch, tuple | list):
        return lambda: module(*batch)
    return lambda: module(batch)


def _ignored(original: Any, /, *args: Any, **kwargs: Any) -> None:
    """In place of `log`."""


def forecast_within(profile: Profile, budget_bytes: int, *, prices: Prices | None = None) -> Forecast:
    """Find the plan that costs least time and keeps a budget, from what was measured.

    Args:
        profile: What was measured.
        budget_bytes: The budget.
        prices: Count time by these. None: blocks are timed on their device.

    Raises:
        BudgetError: No plan keeps the budget.
    """
    found = candidates(profile, prices)
    search = _Search(profile, found)
    choices = search.fastest(budget_bytes)
    plan = search.plan(choices)
    seconds = extra_seconds(search.options.stage, choices)
    return Forecast(plan, budget_bytes, (stage_forecast(profile, plan, seconds),), profile, found)


def pareto_plans(forecast: Forecast, num_points: int = 12) -> list[tuple[StageForecast, RecomputePlan]]:
    """The plans between the smallest peak and the fastest step, for a curve.

    Args:
        forecast: Of one of them; nothing is measured anew.
        num_points: Budgets tried, evenly spaced.

    Returns:
        What each needs, and the plan; peaks go up, seconds down.
    """
    search = _Search(forecast.profile, forecast.candidates)
    least = search.leanest()
    least_bytes = search.exact(least)
    most_bytes = forecast.profile.peak_bytes(everything_kept(forecast.profile))
    points: list[tuple[StageForecast, RecomputePlan]] = []
    for point in range(num_points):
        budget = least_bytes + max(most_bytes - least_bytes, 0) * point // max(num_points - 1, 1)
        choices = search.fastest(budget)
        plan = search.plan(choices)
        stage = stage_forecast(forecast.profile, plan, extra_seconds(search.options.stage, choices))
        if not points or stage.extra_seconds < points[-1][0].extra_seconds:
            points.append((stage, plan))
    return points


def policy_forecasts(forecast: Forecast, policies: Mapping[str, RecomputePolicy]) -> dict[str, StageForecast]:
    """What named settings would need on the same model.

    Args:
        forecast: Holds what was measured.
        policies: Settings by name; one that the model does not admit is left out.
    """
    found = {}
    profile = forecast.profile
    for name, policy in policies.items():
        try:
            plan = policy.plan([len(span) for span in profile.spans])
            actions = profile.actions(plan)
            profile.time([*dict.fromkeys(actions)])
            seconds = sum(
                profile.seconds(call, action) - profile.seconds(call, Keep()) for call, action in enumerate(actions)
            )
            found[name] = stage_forecast(profile, plan, seconds)
        except ValueError as error:
            logger.debug("%s: %s", name, error)
    return found


def everything_kept(profile: Profile) -> RecomputePlan:
    """The plan that recomputes nothing."""
    return RecomputePlan((Segment(0, profile.num_blocks, Keep()),))


class _Search:
    """Asks the planner, and checks what it says against the exact bytes of the profile."""

    def __init__(self, profile: Profile, found: Sequence[Sequence[Candidate]]) -> None:
        self.profile = profile
        self.options: StageOptions = stage_options(
            profile, found, 0, profile.num_blocks, static_bytes=profile.statics.num_bytes
        )
        self._leanest: Choices | None = None

    def plan(self, choices: Choices) -> RecomputePlan:
        return RecomputePlan(tuple(self.options.segments(choices)))

    def exact(self, choices: Choices) -> int:
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

    def __init__(self, search: _Search, budget_bytes: int, best: Choices) -> None:
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
    if kept.peak_bytes - stage.peak_bytes < 0.01 * kept.peak_bytes or "head" in stage.moment:
        what = "the head and loss set the peak" if "head" in stage.moment else f"the peak is set by: {stage.moment}"
        lines.append(
            f"{what}, which recompute of blocks does not change (without any it is {format_bytes(kept.peak_bytes)})"
        )
    lines.append(
        f"Cures: a budget of at least {stage.peak_bytes} bytes; a smaller batch with accumulate_grad_batches (or "
        "shorter sequences), which shrinks everything but parameters, gradients and optimizer; precision='bf16-mixed' "
        "or an optimizer with less state; more devices"
    )
    return ". ".join(lines)
