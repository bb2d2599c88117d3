"""`lightning-recompute plan` for several ranks: the model is measured as one has it, and never divided for real.

A model that can be built is measured in the first step of a fit on one device, which then ends; one that is too large
on tensors that have shapes and no memory.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.types import TRAIN_DATALOADERS
from torch import Tensor, nn

from lightning_recompute.budgeting import optimizers_of
from lightning_recompute.device_memory import budget_bytes, device_name
from lightning_recompute.fake_groups import fake_groups
from lightning_recompute.fake_model import on_fake_tensors
from lightning_recompute.first_batch import FAKE_DTYPES, configured_optimizers, first_batch
from lightning_recompute.first_step import in_first_step
from lightning_recompute.gpt import GPT
from lightning_recompute.groups import ParallelGroups
from lightning_recompute.ledger import allocated_bytes
from lightning_recompute.measured_model import MeasuredModel, measure_model
from lightning_recompute.microbatches import num_rows, split_batch, tensors_of
from lightning_recompute.only_tried import only_tried
from lightning_recompute.paper_formulas import LayerShape
from lightning_recompute.pipeline_confirm import confirm, to_table
from lightning_recompute.pipeline_forecast import LayoutForecast, forecast_ranks
from lightning_recompute.pipeline_layout import Layout
from lightning_recompute.pipeline_overview import save, show
from lightning_recompute.plan import RecomputePlan
from lightning_recompute.planning import prices_of
from lightning_recompute.policy import RecomputePolicy
from lightning_recompute.printing import wide_console
from lightning_recompute.rank_view import RankStep, tensor_rank
from lightning_recompute.settings import settings as named
from lightning_recompute.stage_options import Prices
from lightning_recompute.tensor_plan import Plan
from lightning_recompute.tried_step import LONE_STEP, TriedStep

Words = RecomputePolicy | RecomputePlan


def words_of(given: Mapping[str, Any] | None) -> Words | None:
    """What a config's strategy or callback says about recompute.

    Args:
        given: Its arguments of the six words, or `plan`; None where it says nothing.

    Raises:
        ValueError: They mean nothing.
        TypeError: A word of another type, or an unknown one.
    """
    if given is None:
        return None
    plan = given.get("plan")
    if plan is not None:
        return plan if isinstance(plan, RecomputePlan) else RecomputePlan.load(plan)
    return RecomputePolicy(**{name: value for name, value in given.items() if name != "plan"})


def plan_ranks(
    trainer: pl.Trainer,
    model: pl.LightningModule,
    train_dataloaders: TRAIN_DATALOADERS | None = None,
    datamodule: pl.LightningDataModule | None = None,
    *,
    output: str = ".",
    confirms: bool = False,
    **options: Any,
) -> LayoutForecast:
    """Forecast, write, print; and where that is asked for, run the schedule of each rank on fake tensors.

    Args:
        trainer: A Trainer with one process.
        model: The model, built or on the meta device.
        train_dataloaders: The training data, as for `fit`.
        datamodule: The data, as for `fit`.
        output: Folder for the files.
        confirms: Whether schedules are run.
        options: As for `forecast_first_batch`.

    Raises:
        BudgetError: No plan keeps the budget; what there is beside it is printed and written nevertheless.
        ValueError: As for `forecast_first_batch`.
    """
    is_unbuilt = any(parameter.is_meta for parameter in model.parameters())
    unbuilt = copy.deepcopy(model).to("meta") if confirms else None
    forecast = forecast_on_fake_tensors if is_unbuilt else forecast_first_batch
    view = forecast(trainer, model, train_dataloaders, datamodule, **options)
    written = save(view, output)
    console = wide_console()
    show(view, console)
    console.print(f"Written: {', '.join(map(str, written))}", highlight=False)
    if unbuilt is not None:

        def step(module: Any, microbatch: Any) -> Any:
            with only_tried(module), trainer.precision_plugin.train_step_context():
                return module.training_step(microbatch, 0)

        found = confirm(
            view,
            lambda: copy.deepcopy(unbuilt),
            first_batch(unbuilt, train_dataloaders, datamodule),
            step=step,
            dtype=FAKE_DTYPES.get(trainer.precision),
            blocks=options.get("blocks"),
        )
        console.print(to_table(found))
    if view.refusal is not None:
        raise view.refusal
    return view


def forecast_first_batch(
    trainer: pl.Trainer,
    model: pl.LightningModule,
    train_dataloaders: TRAIN_DATALOADERS | None = None,
    datamodule: pl.LightningDataModule | None = None,
    *,
    layout: Layout,
    memory_budget: str | int | float | None = None,
    words: Words | None = None,
    blocks: str | Sequence[str] | None = None,
    settings: Sequence[str] | None = None,
    device: str | None = None,
    tensor_plan: Plan | None = None,
) -> LayoutForecast:
    """Say what every rank of a layout will need, from the first training step of a fit, which then ends.

    Args:
        trainer: A Trainer with one process (see `ON_ONE_DEVICE`); its callbacks are left out.
        model: The model; afterwards it is whole and as it was.
        train_dataloaders: The training data, as for `fit`.
        datamodule: The data, as for `fit`.
        layout: The layout.
        memory_budget: See `budget_bytes`; None: `words` are forecast.
        words: What is recomputed.
        blocks: See `find_blocks`.
        settings: Names of settings to put beside the plan; None: the usual ones.
        device: Name of another device, by whose peak time is counted; None: it is measured on this one.
        tensor_plan: How layers are divided over tensor-parallel ranks; None: the model's own plan.

    Raises:
        ValueError: What `in_first_step`, `measure_model` and `forecast_ranks` refuse.
    """
    named(settings or ())  # refused before anything is measured
    here = trainer.strategy.root_device
    budget = None if memory_budget is None else budget_bytes(memory_budget, here)

    def look(step: Callable[..., Any], batch: Any) -> LayoutForecast:
        whole = dict(model.named_parameters())
        prices = None if device is None else prices_of(device, model)
        microbatch, number = _microbatch(layout, batch)
        with _groups(layout) as groups, _as_rank(model, groups, layout, tensor_plan, blocks) as tried:
            measured = measure_model(
                model,
                step,
                microbatch,
                whole=whole,
                blocks=blocks,
                optimizers=optimizers_of(trainer),
                prices=prices,
                tried=tried,
                searches=budget is not None,
            )
            words_for_time = f"counted for {device}" if device is not None else f"measured on {device_name(here)}"
            return _forecast(
                measured,
                layout,
                number,
                batch,
                budget,
                words,
                settings,
                _shape(model, layout, microbatch),
                words_for_time,
            )

    return in_first_step(trainer, model, look, train_dataloaders, datamodule)


def forecast_on_fake_tensors(
    trainer: pl.Trainer,
    model: pl.LightningModule,
    train_dataloaders: TRAIN_DATALOADERS | None = None,
    datamodule: pl.LightningDataModule | None = None,
    *,
    layout: Layout,
    memory_budget: str | int | float | None = None,
    words: Words | None = None,
    blocks: str | Sequence[str] | None = None,
    settings: Sequence[str] | None = None,
    device: str | None = None,
    tensor_plan: Plan | None = None,
) -> LayoutForecast:
    """The same for a model that is too large to build, with its first batch, without a fit.

    Args:
        trainer: Says the precision.
        model: The model, on the meta device.
        train_dataloaders: A loader; None: that of the datamodule or the model.
        datamodule: The data.
        layout: As for `forecast_first_batch`.
        memory_budget: As for `forecast_first_batch`.
        words: As for `forecast_first_batch`.
        blocks: As for `forecast_first_batch`.
        settings: As for `forecast_first_batch`.
        device: Name of the device by whose peak time is counted; None: an accelerator of today.
        tensor_plan: As for `forecast_first_batch`.

    Raises:
        ValueError: What `measure_model` and `forecast_ranks` refuse.
    """
    named(settings or ())
    budget = None if memory_budget is None else budget_bytes(memory_budget, "cpu")
    batch = first_batch(model, train_dataloaders, datamodule)
    microbatch, number = _microbatch(layout, batch)
    model.trainer = trainer
    with contextlib.ExitStack() as stack:
        groups = stack.enter_context(_groups(layout))
        fake = stack.enter_context(on_fake_tensors(lambda: model, dtype=FAKE_DTYPES.get(trainer.precision)))
        optimizers = configured_optimizers(fake.configure_optimizers())
        whole = dict(fake.named_parameters())
        tried = stack.enter_context(_as_rank(fake, groups, layout, tensor_plan, blocks))
        stack.enter_context(trainer.precision_plugin.train_step_context())
        prices = Prices() if device is None else prices_of(device, fake)
        training_step: Any = fake.training_step
        measured = measure_model(
            fake,
            lambda given: training_step(given, 0),
            microbatch,
            whole=whole,
            blocks=blocks,
            optimizers=optimizers,
            prices=prices,
            exact=False,
            tried=tried,
            searches=budget is not None,
        )
        time = f"counted for {device or 'an accelerator of 400 TFLOP/s'}"
        shape = _shape(fake, layout, microbatch)
        return _forecast(measured, layout, number, batch, budget, words, settings, shape, time)


def _groups(layout: Layout) -> AbstractContextManager[ParallelGroups | None]:
    """The groups of a tensor-parallel rank; made where tensors are real, as meshes look at numbers."""
    return fake_groups(tensor=layout.tensor) if layout.tensor > 1 else contextlib.nullcontext()


@contextlib.contextmanager
def _as_rank(
    module: nn.Module,
    groups: ParallelGroups | None,
    layout: Layout,
    tensor_plan: Plan | None,
    blocks: str | Sequence[str] | None,
) -> Iterator[TriedStep]:
    """The module as one tensor-parallel rank has it."""
    if groups is None:
        yield LONE_STEP
        return
    with tensor_rank(module, groups, sequence_parallel=layout.sequence, plan=tensor_plan, blocks=blocks) as divided:
        yield RankStep(divided)


def _microbatch(layout: Layout, batch: Any) -> tuple[Any, int]:
    """The first and largest microbatch, and how many there are."""
    number = layout.num_microbatches_of(num_rows(batch))
    return split_batch(batch, number)[0], number


def _forecast(
    measured: MeasuredModel,
    layout: Layout,
    number: int,
    batch: Any,
    budget: int | None,
    words: Words | None,
    settings: Sequence[str] | None,
    shape: LayerShape | None,
    device: str,
) -> LayoutForecast:
    return forecast_ranks(
        measured,
        layout,
        number,
        budget_bytes=budget,
        words=words,
        names=settings,
        batch_bytes=allocated_bytes(tensors_of(batch)),
        shape=shape,
        device=device,
    )


def _shape(module: nn.Module, layout: Layout, microbatch: Any) -> LayerShape | None:
    """A layer as the paper's formulas know it, if the model's are such."""
    if not isinstance(module, GPT) or not isinstance(microbatch, Tensor):
        return None
    config = module.config
    is_such = (
        config.attention == "eager"
        and config.activation == "gelu"
        and config.norm == "layernorm"
        and config.ffn_hidden_size == 4 * config.hidden_size
        and config.num_kv_heads == config.num_heads
        and min(config.dropout, config.attention_dropout) > 0
        and module.position_embedding is not None
        and all(parameter.dtype in (torch.bfloat16, torch.float16) for parameter in module.parameters())
    )
    rows, length = microbatch.shape[0], microbatch.shape[1] - 1
    return LayerShape(config.num_heads, config.hidden_size, length, rows, layout.tensor) if is_such else None
