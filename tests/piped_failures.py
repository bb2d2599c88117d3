"""Fits over pipeline stages of which one rank fails: what each rank ends with. A group of processes for each."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from distributed import local_rank
from grouped_modules import seeded
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from piped_modules import Net, Record, left_on, loader, trainer_of
from torchmetrics import MeanMetric

from lightning_recompute.strategy import RecomputeStrategy


class Breaks(Net):
    """Fails in the third step, on the last stage alone: only that one comes behind the blocks."""

    error: Callable[[], BaseException] = staticmethod(lambda: ArithmeticError("the user's own mistake"))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 2:
            raise self.error()
        return loss


class BreaksFirst(Net):
    """Fails in the third step, before the blocks of the first stage."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2 and local_rank() == 0:
            raise ArithmeticError("the user's own mistake")
        return super().training_step(batch, batch_idx)


class Exhausts(Breaks):
    """Memory runs out on one rank."""

    error = staticmethod(lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))


class Returns(Net):
    """Skips a batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 2 else loss


class Loose(Net):
    """Logs a metric that is no attribute."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        metric = MeanMetric()
        metric.update(loss.detach())
        self.log("loose", metric)
        return loss


class BreaksInValidation(Net):
    """Fails in a validation step on the last stage alone."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx, dataloader_idx)
        if self.global_step:
            raise ArithmeticError("the user's own mistake")


class Notes(pl.Callback):
    """What callbacks see of the end."""

    def __init__(self) -> None:
        self.states: list[str] = []

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self.states.append(str(trainer.state.status))

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.states.append("teardown")


def fail(make: Callable[[], Net], folder: Path) -> dict[str, Any]:
    module, notes = seeded(make), Notes()
    callbacks = [Record(), notes, OnExceptionCheckpoint(folder)]
    strategy = RecomputeStrategy(pipeline_parallel_size=2, num_microbatches=4)
    trainer = trainer_of(folder, strategy, callbacks=callbacks, enable_checkpointing=True)
    began = time.monotonic()
    try:
        trainer.fit(module, loader(), loader())
        told = "nothing"
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
    left = left_on(module)
    return {
        "told": told,
        "seconds": time.monotonic() - began,
        "states": notes.states,
        "left": [each for each in left if each not in dict(module.named_parameters())],
        "names": len(dict(module.named_parameters())),
        "devices": sorted({str(parameter.device) for parameter in module.parameters()}),
    }


def last_stage(folder: Path) -> dict[str, Any]:
    return fail(Breaks, folder)


def first_stage(folder: Path) -> dict[str, Any]:
    return fail(BreaksFirst, folder)


def memory(folder: Path) -> dict[str, Any]:
    return fail(Exhausts, folder)


def skipped(folder: Path) -> dict[str, Any]:
    return fail(Returns, folder)


def loose_metric(folder: Path) -> dict[str, Any]:
    return fail(Loose, folder)


def validation(folder: Path) -> dict[str, Any]:
    return fail(BreaksInValidation, folder)
