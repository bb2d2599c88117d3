"""`lightning-recompute plan --config FILE`: the fastest plan within a budget, on the user's model and first batch.

The first step of a fit is measured; then the fit ends (`first_step`). Nothing is trained.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.types import TRAIN_DATALOADERS
from rich.console import Console

from lightning_recompute.budgeting import accumulates, optimizers_of
from lightning_recompute.device_memory import DEFAULT_FRACTION, budget_bytes, device_bytes, device_name
from lightning_recompute.fake_model import on_fake_tensors
from lightning_recompute.files import csv_text, write_atomically
from lightning_recompute.first_batch import FAKE_DTYPES, configured_optimizers, first_batch
from lightning_recompute.first_step import in_first_step
from lightning_recompute.gpt import GPT
from lightning_recompute.overview import Overview, overview
from lightning_recompute.parallel import DataParallelKind
from lightning_recompute.pictures import plan_picture, save_picture
from lightning_recompute.pipeline_command import plan_ranks, words_of
from lightning_recompute.pipeline_forecast import LayoutForecast
from lightning_recompute.pipeline_layout import Layout
from lightning_recompute.planning import bucket_bytes, prices_of, profile_batch
from lightning_recompute.printing import wide_console
from lightning_recompute.settings import settings as named
from lightning_recompute.stage_options import Prices
from lightning_recompute.step_memory import PARTS
from lightning_recompute.version import __version__

SUBCOMMAND: dict[str, set[str]] = {"plan": {"model", "train_dataloaders", "datamodule"}}
"""The subcommand and what it does not take from the command line, as `LightningCLI.subcommands()` returns it."""

PLAN_FILE = "plan.yaml"
CURVE_FILE = "plan.csv"
CURVE_COLUMNS = ("name", "kind", "peak_bytes", "extra_seconds")
STEP_COLUMNS = ("moment", "phase", "block", *(f"{part}_bytes" for part in PARTS), "total_bytes", "kept_bytes")
BLOCK_COLUMNS = ("block", "action", "held_bytes")


class PlanningTrainer(pl.Trainer):
    """Lightning's Trainer with `plan` beside `fit`: the subcommands of LightningCLI are methods of its Trainer."""

    def plan(
        self,
        model: pl.LightningModule,
        train_dataloaders: TRAIN_DATALOADERS | None = None,
        datamodule: pl.LightningDataModule | None = None,
        memory_budget: str | int | float | None = None,
        blocks: str | list[str] | None = None,
        settings: list[str] | None = None,
        num_replicas: int | None = None,
        device: str | None = None,
        fake: bool | None = None,
        output: str = ".",
        recompute: dict[str, Any] | None = None,
        tensor_parallel_size: int | None = None,
        sequence_parallel: bool | None = None,
        tensor_parallel_plan: dict[str, Any] | None = None,
        pipeline_parallel_size: int | None = None,
        virtual_pipeline_size: int | None = None,
        num_microbatches: int | None = None,
        schedule: str | None = None,
        split: str | list[int] | None = None,
        data_parallel: DataParallelKind | None = None,
        confirm: bool = False,
        ckpt_path: str | None = None,
        weights_only: bool | None = None,
    ) -> Overview | LayoutForecast:
        """Find the fastest recompute plan that keeps a memory budget, without training.

        Where ranks share the model, each stage of the pipeline is planned for itself, and what every stage will need
        is shown; without a budget that of the words in the config.

        Args:
            model: The model.
            train_dataloaders: The training data.
            datamodule: The data.
            memory_budget: What the peak of a step may be: a size (22GiB), a number of bytes, or a fraction of the
                device (0.9). Null: the strategy's in the config, else 0.9 of the device.
            blocks: Where the blocks are: dotted path(s) of block lists or class name(s) of blocks. Null: the
                strategy's in the config, else found.
            settings: Settings to put beside the plan, such as [none, selective norm+act, full uniform 1, full block 4].
                Null: those of practice.
            num_replicas: Data-parallel processes that will train. Null: as the config's devices and num_nodes say.
            device: Name of another device to plan for, such as A100 or H100: time is counted by its peak and not
                measured. Null: this one.
            fake: Measure on tensors that have shapes and no memory, for a model that is too large to build here; time
                is then counted, too. Null: where it is our GPT and its parameters would not fit.
            output: Folder for plan.yaml, plan.csv, plan_step.csv, plan_blocks.csv, plan.png and plan.svg; of several
                ranks plan_stages.csv and plan_schedule.csv in place of plan_step.csv.
            recompute: Where ranks share the model: what is recomputed, as {granularity: full, method: block,
                num_layers: 4}, to be forecast as it is. Null: as the strategy in the config says, where it has no
                memory_budget.
            tensor_parallel_size: Ranks that share each layer. Null: the strategy's in the config, else 1.
            sequence_parallel: Whether these divide hidden states along the sequence. Null: as the config says.
            tensor_parallel_plan: How layers are divided over them. Null: the config's, else the model's own.
            pipeline_parallel_size: Stages of a pipeline. Null: the strategy's in the config, else 1.
            virtual_pipeline_size: Chunks of blocks on each stage. Null: as the config says, else 1.
            num_microbatches: Parts in which a batch runs through the stages. Null: as the config says, else four for
                each stage, at most the rows of the batch.
            schedule: Their order: gpipe, 1f1b, interleaved-1f1b, interleaved-zero-bubble or zbv-zero-bubble. Null: as
                the config says, else 1f1b.
            split: Blocks over stages: count; balanced, by time and memory, together with the plans; or a number for
                each. Null: as the config says, else count.
            data_parallel: What ranks that divide the data hold: replicate or shard. Null: as the config says.
            confirm: Of a pipeline: run the real schedule of each rank, too, on tensors that have shapes and no memory,
                and print its peak beside the predicted one. Takes longer the more microbatches there are.
            ckpt_path: Not read; here so that the config of a fit can be used.
            weights_only: Not read; here so that the config of a fit can be used.

        Returns:
            What was printed.

        Raises:
            BudgetError: No plan keeps the budget; what there is beside it is printed and written nevertheless.
        """
        is_unbuilt = any(parameter.is_meta for parameter in model.parameters())
        if fake and not is_unbuilt:
            raise ValueError(
                "fake=True: this model is built already; make it under torch.device('meta'), or leave it out"
            )
        layout = Layout(
            tensor=tensor_parallel_size or 1,
            sequence=bool(sequence_parallel),
            pipeline=pipeline_parallel_size or 1,
            virtual=virtual_pipeline_size or 1,
            schedule=schedule or "1f1b",
            num_microbatches=num_microbatches,
            split=split or "count",
            data=num_replicas or 1,
            data_parallel=data_parallel or "replicate",
        )
        words = words_of(recompute) if layout.is_divided else None
        if memory_budget is None and words is None and (is_unbuilt or device is not None):
            raise ValueError(
                "memory_budget: none is given, and 0.9 of this device means nothing for another one; give a size such "
                "as 22GiB"
            )
        if layout.is_divided:
            return plan_ranks(
                self,
                model,
                train_dataloaders,
                datamodule,
                output=output,
                confirms=confirm,
                layout=layout,
                memory_budget=DEFAULT_FRACTION if memory_budget is None and words is None else memory_budget,
                words=words,
                blocks=blocks,
                settings=settings,
                device=device,
                tensor_plan=tensor_parallel_plan,
            )
        if confirm:
            raise ValueError("confirm=True on one rank: what is run is the schedule of a pipeline; leave it out")
        look = plan_on_fake_tensors if is_unbuilt else plan_first_batch
        view = look(
            self,
            model,
            train_dataloaders,
            datamodule,
            memory_budget=DEFAULT_FRACTION if memory_budget is None else memory_budget,
            blocks=blocks,
            settings=settings,
            num_replicas=num_replicas or 1,
            device=device,
        )
        paths = save(view, output)
        _print(view, paths, wide_console())
        if view.refusal is not None:
            raise view.refusal
        return view


def plan_first_batch(
    trainer: pl.Trainer,
    model: pl.LightningModule,
    train_dataloaders: TRAIN_DATALOADERS | None = None,
    datamodule: pl.LightningDataModule | None = None,
    *,
    memory_budget: str | int | float = DEFAULT_FRACTION,
    blocks: str | Sequence[str] | None = None,
    settings: Sequence[str] | None = None,
    num_replicas: int = 1,
    device: str | None = None,
) -> Overview:
    """Plan for a model in the first training step of a fit, which then ends.

    Args:
        trainer: A Trainer with one process (see `ON_ONE_DEVICE`); its callbacks are left out.
        model: The model.
        train_dataloaders: The training data, as for `fit`.
        datamodule: The data, as for `fit`.
        memory_budget: See `budget_bytes`.
        blocks: See `find_blocks`.
        settings: Names of settings to put beside the plan; None: the usual ones.
        num_replicas: Data-parallel processes that will train.
        device: Name of another device, by whose peak time is counted; None: it is measured on this one.

    Raises:
        ValueError: The Trainer has several processes, training ends before a first batch, the budget is no size, a
            setting is none, the other device is not known, or the model's blocks cannot be found or measured.
    """
    named(settings or ())  # refused before anything is measured
    here = trainer.strategy.root_device
    budget = budget_bytes(memory_budget, here)

    def look(step: Callable[[], Any], batch: Any) -> Overview:
        profile = profile_batch(
            model,
            batch,
            step=step,
            blocks=blocks,
            optimizers=optimizers_of(trainer),
            accumulating=accumulates(trainer, model),
            other_bytes=bucket_bytes(model, num_replicas),
        )
        prices = None if device is None else prices_of(device, model)
        return overview(model, profile, budget, device or device_name(here), names=settings, prices=prices)

    return in_first_step(trainer, model, look, train_dataloaders, datamodule)


def is_too_large(entry: Any) -> bool:
    """Whether a config's model is our GPT with more parameters than this machine could hold twice.

    Other models are not known to make the same masks and tables on fake tensors.

    Args:
        entry: The model's entry in the config, with `class_path` and `init_args`.
    """
    if getattr(entry, "class_path", None) not in (
        f"{GPT.__module__}.{GPT.__name__}",
        f"lightning_recompute.{GPT.__name__}",
    ):
        return False
    with torch.device("meta"):
        model = GPT(**vars(entry.init_args))
    return 2 * sum(parameter.nbytes for parameter in model.parameters()) > device_bytes("cpu")


def plan_on_fake_tensors(
    trainer: pl.Trainer,
    model: pl.LightningModule,
    train_dataloaders: TRAIN_DATALOADERS | None = None,
    datamodule: pl.LightningDataModule | None = None,
    *,
    memory_budget: str | int | float,
    blocks: str | Sequence[str] | None = None,
    settings: Sequence[str] | None = None,
    num_replicas: int = 1,
    device: str | None = None,
) -> Overview:
    """Plan for a model that is too large to build, with its first batch, without a fit.

    Args:
        trainer: Says precision and accumulation.
        model: The model, on the meta device.
        train_dataloaders: A loader; None: that of the datamodule or the model.
        datamodule: The data.
        memory_budget: See `budget_bytes`.
        blocks: See `find_blocks`.
        settings: Names of settings to put beside the plan; None: the usual ones.
        num_replicas: Data-parallel processes that will train.
        device: Name of the device by whose peak time is counted; None: an accelerator of today.

    Raises:
        ValueError: The budget is no size, a setting is none, the device is not known, or the model's blocks cannot be
            found or measured.
    """
    named(settings or ())
    budget = budget_bytes(memory_budget, "cpu")
    batch = first_batch(model, train_dataloaders, datamodule)
    model.trainer = trainer
    with ExitStack() as stack:
        fake = stack.enter_context(on_fake_tensors(lambda: model, dtype=FAKE_DTYPES.get(trainer.precision)))
        stack.enter_context(trainer.precision_plugin.train_step_context())
        profile = profile_batch(
            fake,
            batch,
            blocks=blocks,
            optimizers=configured_optimizers(fake.configure_optimizers()),
            accumulating=accumulates(trainer, fake),
            other_bytes=bucket_bytes(fake, num_replicas),
            exact=False,
        )
        prices = Prices() if device is None else prices_of(device, fake)
        return overview(fake, profile, budget, device or "fake tensors", names=settings, prices=prices)


# ---- what is written


def save(view: Overview, folder: str | os.PathLike[str]) -> list[Path]:
    """Write plan, figures and pictures, each file whole or not at all.

    Args:
        view: What was found.
        folder: Where; made if it is not there.

    Returns:
        The files: `plan.yaml` (where a plan keeps the budget), `plan.csv` (the curve, the settings and the budget),
        `plan_step.csv` (memory moment by moment), `plan_blocks.csv` (what blocks hold), `plan.png` and `plan.svg`.
    """
    target = Path(folder)
    written = []
    if view.forecast is not None:
        record = {"lightning_recompute": __version__, "torch": str(torch.__version__), "device": view.device}
        written.append(view.forecast.save(target / PLAN_FILE, record))
    for name, columns, rows in (
        (CURVE_FILE, CURVE_COLUMNS, _curve_rows(view)),
        ("plan_step.csv", STEP_COLUMNS, _step_rows(view)),
        ("plan_blocks.csv", BLOCK_COLUMNS, _block_rows(view)),
    ):
        written.append(write_atomically(target / name, csv_text(columns, rows)))
    return [*written, *save_picture(plan_picture(view), target / "plan")]


def _curve_rows(view: Overview) -> Iterator[Mapping[str, Any]]:
    for point in view.points:
        yield {name: getattr(point, name) for name in CURVE_COLUMNS}
    yield {"name": "budget", "kind": "budget", "peak_bytes": view.budget_bytes}


def _step_rows(view: Overview) -> Iterator[Mapping[str, Any]]:
    for number, (moment, kept) in enumerate(zip(view.steps, view.kept, strict=True)):
        row = {"moment": number, "phase": moment.phase, "block": moment.block}
        parts = {f"{part}_bytes": num_bytes for part, num_bytes in moment.parts.items()}
        yield {**row, **parts, "total_bytes": moment.num_bytes, "kept_bytes": kept.num_bytes}


def _block_rows(view: Overview) -> Iterator[Mapping[str, Any]]:
    for block in view.blocks:
        yield {"block": block.name, "action": block.action, "held_bytes": block.num_bytes}


def _print(view: Overview, paths: Sequence[Path], console: Console) -> None:
    if view.forecast is not None:
        console.print(view.forecast.plan.to_table())
        console.print(view.forecast.to_table())
    console.print(view.to_table())
    for line in view.advice:
        console.print(line, highlight=False)
    console.print(f"Written: {', '.join(map(str, paths))}", highlight=False)
