"""The plan for a memory budget, made from a fit's own first batch."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from lightning_recompute.agreement import ALONE, Agreement
from lightning_recompute.device_memory import budget_bytes
from lightning_recompute.errors import BudgetError
from lightning_recompute.forecast import Forecast
from lightning_recompute.grouped_strategy import GroupedStrategy
from lightning_recompute.memory import PhaseRecorder, open_meter
from lightning_recompute.plan import RecomputePlan
from lightning_recompute.plan_search import PlanSearch
from lightning_recompute.planning import bucket_bytes, forecast_from, profile_batch, search_plans
from lightning_recompute.profiling import Profile
from lightning_recompute.stage_budget import tighter
from lightning_recompute.stage_forecast import PipelineForecast
from lightning_recompute.throughput import tensors_in
from lightning_recompute.tried_step import LONE_STEP
from lightning_recompute.units import format_bytes

Found = TypeVar("Found", Forecast, PipelineForecast)

TOLERANCE = 0.01
"""A measured peak above the predicted one by more than this part of it is said."""

# the second step is the first with all of the optimizer's state
_STEPS_TO_CHECK = 3


class Budget:
    """A memory budget, and the forecast of the plan that was made for it.

    Args:
        budget: As `budget_bytes` takes it.

    Raises:
        ValueError: It is no budget.
        TypeError: It is neither a string nor a number.

    Attributes:
        forecast: Of the plan that is in force; None before the first batch.
    """

    def __init__(self, budget: str | int | float) -> None:
        budget_bytes(budget, "cpu")  # refuses what is none
        self.budget = budget
        self.forecast: Forecast | PipelineForecast | None = None
        self._planned_size = 0
        self._size = 0
        self._recorder: PhaseRecorder | None = None
        self._steps_left = 0

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"forecast": None, "_planned_size": 0, "_recorder": None}

    def begin_again(self) -> None:
        """Forget the plan and what was measured."""
        self.stop_watching()
        self.forecast = None
        self._planned_size = 0

    def is_due(self, trainer: pl.Trainer, batch: Any) -> bool:
        """Whether a batch needs a plan: it is the first, or larger than those before; on any process for all."""
        self._size = int(agreement_of(trainer).largest([_size(batch)])[0])
        return self._size > self._planned_size

    def limit_bytes(self, trainer: pl.Trainer) -> int:
        """The budget of each process in bytes, the same on all; collective."""
        device = trainer.strategy.root_device
        own = budget_bytes(self.budget, device, num_processes=processes_beside(trainer))
        return agreement_of(trainer).smallest(own)

    def plan(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        batch: Any,
        batch_idx: int,
        blocks: str | Sequence[str] | None,
        *,
        below: RecomputePlan | None = None,
    ) -> Forecast | PipelineForecast:
        """Make the plan for a batch.

        Under a pipeline each stage has its own. Else all processes take part, and all come to the same plan: it is
        made by the first one, from times that all agree on, and tightened until it fits on all. Each has a forecast of
        its own.

        Args:
            trainer: Whose fit it is.
            module: The module, on its device.
            batch: The batch that is about to be trained on.
            batch_idx: Its number.
            blocks: Where the blocks are.
            below: A plan that needs too much: the new one is to need `TIGHTER` of its peak, or the least there is.

        Raises:
            BudgetError: No plan keeps the budget, or none needs less.
            ValueError: The module's step cannot be measured.
        """
        together = agreement_of(trainer)
        limit = self.limit_bytes(trainer)
        if isinstance(trainer.strategy, GroupedStrategy):
            stages = trainer.strategy.stage_budget(batch, batch_idx)
            if stages is not None:
                try:
                    of_all = stages.plan(limit, below=below)
                finally:
                    stages.release()
                return self._keep(of_all, batch)
        profile = profile_training_step(trainer, module, batch, batch_idx, blocks)

        @functools.cache
        def search() -> PlanSearch:
            return search_plans(profile)

        if below is None:
            forecast = _agreed(together, lambda within: forecast_from(search(), within), limit)
        else:
            forecast = tighter(
                lambda within: forecast_from(search(), within), search().profile.peak_bytes(below), limit
            )
        profile.release()  # before the step, whose memory was planned without them
        return self._keep(forecast, batch)

    def _keep(self, forecast: Found, batch: Any) -> Found:
        self.forecast = forecast
        self._planned_size = max(self._size, _size(batch))
        return forecast

    # ---- afterwards

    def watch(self, trainer: pl.Trainer, module: nn.Module) -> None:
        """Begin to measure the steps that follow, where that costs nothing."""
        self.stop_watching()
        meter = open_meter(trainer.strategy.root_device, reset=False)
        if not meter.continuous:
            meter.close()
            return
        # it lets the meter count what is there already
        self._recorder = PhaseRecorder(meter, [module], optimizers_of(trainer))
        self._steps_left = _STEPS_TO_CHECK

    def after_step(self, logger: logging.Logger) -> None:
        """A step is over; after the first few, say by how much their peak exceeds the prediction."""
        recorder, forecast = self._recorder, self.forecast
        if recorder is None or forecast is None:
            return
        self._steps_left -= 1
        if self._steps_left:
            return
        measured = recorder.meter.peak_bytes
        self.stop_watching()
        if measured > forecast.own.peak_bytes * (1 + TOLERANCE):
            over = measured - forecast.own.peak_bytes
            logger.warning(
                "the first steps needed %s, %s (%.1f %%) more than the %s that were predicted%s",
                format_bytes(measured),
                format_bytes(over),
                100 * over / forecast.own.peak_bytes,
                format_bytes(forecast.own.peak_bytes),
                ""
                if forecast.budget_bytes is None or measured <= forecast.budget_bytes
                else ", and exceeded the budget",
            )

    def stop_watching(self) -> None:
        """Measure no longer; does nothing when nothing is measured."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.meter.close()


def _agreed(together: Agreement, make: Callable[[int], Forecast], limit: int) -> Forecast:
    """The first process's plan, within less where it would not fit on another."""
    if not together.is_shared:
        return make(limit)
    within = limit
    while True:
        plans: list[Any] = [None] * dist.get_world_size()
        error: Exception | None = None
        forecast = None
        try:
            forecast = make(within)
        except Exception as found:  # every process has to come to the exchange
            error = found
        dist.all_gather_object(plans, None if forecast is None else forecast.plan)
        if error is not None:
            raise error
        if None in plans:
            raise BudgetError(f"rank {plans.index(None)} found no plan within its budget; its error says why")
        assert forecast is not None
        forecast = forecast.under(plans[0], limit)
        peaks: list[Any] = [0] * dist.get_world_size()
        dist.all_gather_object(peaks, forecast.peak_bytes)
        if max(peaks) <= limit:
            return forecast
        within -= max(peaks) - limit  # another rank needs more than the first


def _size(batch: Any) -> int:
    return sum(tensor.numel() for tensor in tensors_in(batch)) + 1


def profile_training_step(
    trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int, blocks: str | Sequence[str] | None
) -> Profile:
    """Measure a step of a fit on a batch.

    Args:
        trainer: Whose fit it is.
        module: The module, on its device.
        batch: The batch.
        batch_idx: Its number.
        blocks: Where the blocks are.

    Raises:
        ValueError: The step cannot be measured.
    """
    accumulating = accumulates(trainer, module)
    tried = LONE_STEP
    if isinstance(trainer.strategy, GroupedStrategy):
        tried = trainer.strategy.tried_step(has_middle=accumulating and trainer.accumulate_grad_batches > 2)
    return profile_batch(
        module,
        batch,
        step=step_of(trainer, module, batch, batch_idx),
        blocks=blocks,
        optimizers=optimizers_of(trainer),
        accumulating=accumulating,
        other_bytes=0 if tried.communicates else bucket_bytes(module, trainer.world_size),
        tried=tried,
        agreement=agreement_of(trainer),
    )


def agreement_of(trainer: pl.Trainer) -> Agreement:
    """What the processes of a run agree by."""
    return ALONE if trainer.world_size == 1 else Agreement(trainer.strategy.root_device)


def processes_beside(trainer: pl.Trainer) -> int:
    """Processes of a run that share this one's device: on a CPU all of the machine's."""
    return max(trainer.num_devices, 1) if trainer.strategy.root_device.type == "cpu" else 1


def optimizers_of(trainer: pl.Trainer) -> list[Optimizer]:
    """The Trainer's optimizers that are torch's."""
    return [optimizer for optimizer in trainer.optimizers if isinstance(optimizer, Optimizer)]


def accumulates(trainer: pl.Trainer, module: pl.LightningModule) -> bool:
    """Whether Lightning lets an optimizer step follow several backward passes."""
    return trainer.accumulate_grad_batches > 1 and module.automatic_optimization


def step_of(trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> Callable[[], object]:
    """The forward of a training step, as the Trainer would call it.

    Raises:
        ValueError: `training_step` takes an iterator, so no batch can be tried.
    """
    parameters = inspect.signature(module.training_step).parameters
    if "dataloader_iter" in parameters:
        raise ValueError(
            "training_step(dataloader_iter) fetches its batches itself, so none can be tried before: a memory_budget "
            "needs training_step(batch, batch_idx). Give the six words, or a plan"
        )
    takes_all = any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in parameters.values())
    arguments = (batch, batch_idx) if takes_all or len(parameters) > 1 else (batch,)
    step: Any = module.training_step

    def run() -> object:
        with trainer.precision_plugin.train_step_context():
            return step(*arguments)

    return run
