"""A memory budget for every rank of a pipeline: measured on a batch, planned rank by rank, told to all."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any, TypeVar

import torch.distributed as dist
from torch.optim import Optimizer

from lightning_recompute.agreement import ALONE, Agreement
from lightning_recompute.errors import BudgetError
from lightning_recompute.pipeline import PipelineModule
from lightning_recompute.plan import RecomputePlan
from lightning_recompute.probe import Step
from lightning_recompute.stage_forecast import PipelineForecast, phase_peaks, rank_forecast, whole_plan
from lightning_recompute.stage_memory import ONE_BATCH, Window
from lightning_recompute.stage_options import Prices
from lightning_recompute.stage_profile import StageProfile, profile_stage
from lightning_recompute.stage_search import StageSearch
from lightning_recompute.tried_step import LONE_STEP, TriedStep

TIGHTER = 0.9
"""The share of a plan's predicted peak that the next one may have, after memory ran out under it."""

Found = TypeVar("Found")


class StageBudget:
    """Plans of one rank of a pipeline, and forecasts of all; every method is collective over the world.

    An error of one rank ends all, with its reason. What is sharded is gathered until `release`.

    Args:
        pipeline: The divided module, in training mode, with no plan applied.
        step: Runs the training step on a microbatch; see `PipelineModule.run`.
        batch: As for `PipelineModule.run`.
        optimizers: That train the parameters of this rank; none has to have taken a step.
        window: How gradients come together until the optimizers step.
        tried: How a chunk's part of a step is run, where several ranks share this stage.
        agreement: With the ranks that share this stage.
        prices: Count time by these. None: blocks are timed on their device.

    Raises:
        ValueError: The step cannot be measured.
        RuntimeError: Not on another rank.
    """

    def __init__(
        self,
        pipeline: PipelineModule,
        step: Step,
        batch: Any,
        *,
        optimizers: Iterable[Optimizer] = (),
        window: Window = ONE_BATCH,
        tried: TriedStep = LONE_STEP,
        agreement: Agreement = ALONE,
        prices: Prices | None = None,
    ) -> None:
        self._pipeline = pipeline
        self._gathered = ExitStack()
        self.profile: StageProfile

        def measure() -> None:
            spread = pipeline.spread_bytes()
            self._gathered.enter_context(pipeline.gathered())
            self.profile = profile_stage(
                pipeline,
                step,
                batch,
                optimizers=optimizers,
                window=window,
                tried=tried,
                agreement=agreement,
                spread=spread,
            )

        try:
            self._on_all(measure)
        except BaseException:
            self._gathered.close()
            raise
        self._search = StageSearch(self.profile, prices)

    def plan(self, budget_bytes: int, *, below: RecomputePlan | None = None) -> PipelineForecast:
        """The plan of each rank that costs it least time and keeps a budget.

        Args:
            budget_bytes: What the peak of this rank may be, parameters, gradients and optimizer state included.
            below: A plan that needs too much: the new one is to need `TIGHTER` of its peak, or the least there is.

        Raises:
            BudgetError: No plan of some rank keeps it; the message says which and why.
        """
        search = self._search
        within = budget_bytes

        def find() -> RecomputePlan:
            if below is None:
                return search.fastest(within)
            # the least there is may be above what is left for a rank that shares the stage: none then
            return tighter(lambda room: search.fastest(min(room, within)), search.exact(below), within)

        while True:
            _, plans = self._on_all(find)
            plan = whole_plan(plans, self.profile.division)
            # ranks that share a stage do what the first of them found, and may need more
            over = max(self._told(search.exact(plan) - budget_bytes))
            if over <= 0:
                return self.forecast(plan, budget_bytes)
            within -= over

    def forecast(self, plan: RecomputePlan, budget_bytes: int | None = None) -> PipelineForecast:
        """What every rank will need under a plan.

        Args:
            plan: For all blocks of the model; units end where stages do.
            budget_bytes: A budget to hold it against.
        """
        search, pipeline = self._search, self._pipeline
        own = pipeline.division.part_of(plan, pipeline.rank)

        def look() -> Any:
            return rank_forecast(self.profile, own, search.seconds(own)), phase_peaks(self.profile, own)

        (_, phases), found = self._on_all(look)
        return PipelineForecast(plan, budget_bytes, tuple(stage for stage, _ in found), pipeline.rank, phases)

    def release(self) -> None:
        """Let go of the tensors that blocks were called with; other plans can then be forecast no longer."""
        self.profile.release()
        self._gathered.close()

    # ---- what ranks tell each other

    def _told(self, found: Found) -> list[Found]:
        everything: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everything, found)
        return everything

    def _on_all(self, find: Callable[[], Found]) -> tuple[Found, list[Found]]:
        """What each rank of the pipeline finds, of those that share a stage the first."""
        error: Exception | None = None
        found: Any = None
        try:
            found = find()
        except Exception as caught:  # every rank has to come to the exchange
            error = caught
        told = self._told((self._pipeline.rank, _reason(error), found))
        if error is not None:
            raise error
        for rank, (stage, wrong, _) in enumerate(told):
            if wrong is not None:
                is_budget, text = wrong
                kind = BudgetError if is_budget else RuntimeError
                raise kind(f"rank {rank}, stage {stage} of the pipeline: {text}")
        first = {stage: result for stage, _, result in reversed(told)}
        return found, [first[stage] for stage in sorted(first)]


def tighter(find: Callable[[int], Found], current_bytes: int, budget_bytes: int) -> Found:
    """A plan of a smaller peak than one that needs too much.

    Args:
        find: Finds the fastest within so many bytes.
        current_bytes: What needs too much.
        budget_bytes: What may be needed at most.

    Raises:
        BudgetError: Nothing needs less.
    """
    try:
        return find(min(budget_bytes, int(TIGHTER * current_bytes)))
    except BudgetError as error:
        if error.smallest_bytes is None or error.smallest_bytes >= current_bytes:
            raise
        return find(error.smallest_bytes)


def _reason(error: Exception | None) -> tuple[bool, str] | None:
    """What other ranks are told of an error: whether it is about the budget, and its text."""
    if error is None:
        return None
    is_budget = isinstance(error, BudgetError)
    return is_budget, str(error) if is_budget else f"{type(error).__name__}: {error}"
