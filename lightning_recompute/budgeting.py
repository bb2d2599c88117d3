"""The plan for a memory budget, made from a fit's own first batch."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_recompute.device_memory import budget_bytes
from lightning_recompute.errors import BudgetError
from lightning_recompute.forecast import Forecast
from lightning_recompute.memory import Meter, open_meter
from lightning_recompute.patch import Patch
from lightning_recompute.plan import RecomputePlan
from lightning_recompute.planning import forecast_within, profile_batch
from lightning_recompute.profiling import Profile
from lightning_recompute.stage_options import Prices
from lightning_recompute.throughput import tensors_in
from lightning_recompute.units import format_bytes

TOLERANCE = 0.01
"""A measured peak above the predicted one by more than this part of it is said."""

TIGHTER = 0.9
"""The share of a plan's predicted peak that the next one may have, after memory ran out under it."""

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
        self.forecast: Forecast | None = None
        self._planned_size = 0
        self._check: _Check | None = None

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"forecast": None, "_planned_size": 0, "_check": None}

    def begin_again(self) -> None:
        """Forget the plan and what was measured."""
        self.stop_watching()
        self.forecast = None
        self._planned_size = 0

    def is_due(self, batch: Any) -> bool:
        """Whether a batch needs a plan: it is the first, or larger than those before."""
        return _size(batch) > self._planned_size

    def plan(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        batch: Any,
        batch_idx: int,
        blocks: str | Sequence[str] | None,
        *,
        below: RecomputePlan | None = None,
    ) -> Forecast:
        """Make the plan for a batch.

        All processes take part: the plan is made by the first one, and tightened until it fits on all.

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
        device = trainer.strategy.root_device
        limit = budget_bytes(self.budget, device)
        alone = trainer.world_size == 1
        with quiet(trainer, module):
            profile = profile_batch(
                module,
                batch,
                step=step_of(trainer, module, batch, batch_idx),
                blocks=blocks,
                optimizers=[each for each in trainer.optimizers if isinstance(each, Optimizer)],
                accumulating=trainer.accumulate_grad_batches > 1 and module.automatic_optimization,
                other_bytes=0 if alone else _bucket_bytes(module),
                exact=alone,
            )
            # times differ from process to process, and with them plans would
            prices = None if alone else Prices()
            if below is None:
                forecast = _agreed(lambda within: forecast_within(profile, within, prices=prices), limit)
            else:
                forecast = _below(profile, below, limit)
        profile.release()  # before the step, whose memory was planned without them
        self.forecast = forecast
        self._planned_size = _size(batch)
        return forecast

    # ---- afterwards

    def watch(self, trainer: pl.Trainer, module: nn.Module) -> None:
        """Begin to measure the steps that follow, where that costs nothing."""
        self.stop_watching()
        meter = open_meter(trainer.strategy.root_device, reset=False)
        if not meter.continuous:
            meter.close()
            return
        self._check = _Check(meter, module, [each for each in trainer.optimizers if isinstance(each, Optimizer)])

    def after_step(self, logger: logging.Logger) -> None:
        """A step is over; after the first few, say by how much their peak exceeds the prediction."""
        check, forecast = self._check, self.forecast
        if check is None or forecast is None:
            return
        check.steps_left -= 1
        if check.steps_left:
            return
        measured = check.meter.peak_bytes
        self.stop_watching()
        if measured > forecast.peak_bytes * (1 + TOLERANCE):
            over = measured - forecast.peak_bytes
            logger.warning(
                "the first steps needed %s, %s (%.1f %%) more than the %s that were predicted%s",
                format_bytes(measured),
                format_bytes(over),
                100 * over / forecast.peak_bytes,
                format_bytes(forecast.peak_bytes),
                ""
                if forecast.budget_bytes is None or measured <= forecast.budget_bytes
                else ", and exceeded the budget",
            )

    def stop_watching(self) -> None:
        """Measure no longer; does nothing when nothing is measured."""
        check, self._check = self._check, None
        if check is not None:
            check.meter.close()


def _agreed(make: Callable[[int], Forecast], limit: int) -> Forecast:
    """The first process's plan, within less where it would not fit on another."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
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
        within -= max(peaks) - limit  # another rank's batch needs more than the first one's


def _below(profile: Profile, plan: RecomputePlan, limit: int) -> Forecast:
    """A plan of a smaller peak than one that needs too much."""
    current = profile.peak_bytes(plan)
    try:
        return forecast_within(profile, min(limit, int(TIGHTER * current)))
    except BudgetError as error:
        if error.smallest_bytes is None or error.smallest_bytes >= current:
            raise
        return forecast_within(profile, error.smallest_bytes)


class _Check:
    """Measures some steps."""

    def __init__(self, meter: Meter, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self.meter = meter
        self.steps_left = _STEPS_TO_CHECK
        meter.count([*module.parameters(), *module.buffers()])
        meter.count(parameter.grad for parameter in module.parameters() if parameter.grad is not None)
        states = tree_leaves([list(optimizer.state.values()) for optimizer in optimizers])
        meter.count(leaf for leaf in states if isinstance(leaf, Tensor))


def _size(batch: Any) -> int:
    return sum(tensor.numel() for tensor in tensors_in(batch)) + 1


def _bucket_bytes(module: nn.Module) -> int:
    """What torch's DistributedDataParallel averages gradients in."""
    return sum(parameter.nbytes for parameter in module.parameters() if parameter.requires_grad)


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


class _Idle:
    """In place of an optimizer or scheduler in a step that is only tried: it takes no step."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Take none."""

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: the gradients are those of stand-ins."""


def _idle(original: Any, /, *args: Any, **kwargs: Any) -> Any:
    found = original(*args, **kwargs)
    return [_Idle(each) for each in found] if isinstance(found, list) else None if found is None else _Idle(found)


def _plain_backward(original: Any, /, loss: Tensor, *args: Any, **kwargs: Any) -> None:
    loss.backward(*args, **kwargs)


@contextmanager
def quiet(trainer: pl.Trainer, module: pl.LightningModule) -> Iterator[None]:
    """Surrounds a step that is only tried: in manual optimization nobody steps, and no callback hears of backward."""
    with ExitStack() as stack:
        if not module.automatic_optimization:
            for name in ("optimizers", "lr_schedulers"):
                stack.callback(Patch(module, _idle, attribute=name).remove)
            stack.callback(Patch(module, _plain_backward, attribute="manual_backward").remove)
        yield
