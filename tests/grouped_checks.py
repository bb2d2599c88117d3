"""What two or four ranks do for test_grouped_strategy.py: every fit in one group of processes."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from grouped_modules import Manual, Momentum, Plain, fit, loader, outcome, seeded
from lightning.pytorch.callbacks import EarlyStopping
from torch import nn

from lightning_recompute.strategy import RecomputeStrategy

LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "tp2": {"tensor_parallel_size": 2},
        "tp2 sp": {"tensor_parallel_size": 2, "sequence_parallel": True},
        "dp2 shard": {"data_parallel": "shard"},
    },
    4: {
        "tp2 x dp2": {"tensor_parallel_size": 2, "num_layers": 2},
        "tp2 sp x dp2 shard": {"tensor_parallel_size": 2, "sequence_parallel": True, "data_parallel": "shard"},
    },
}
FITS: dict[str, tuple[Callable[[], Plain], dict[str, Any]]] = {
    "plain": (Momentum, {}),
    "accumulate": (Momentum, {"accumulate_grad_batches": 2}),
    "clip": (Plain, {"gradient_clip_val": 0.05}),
    "clip values": (Momentum, {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}),
    "manual": (Manual, {}),
    "bf16-mixed": (Momentum, {"precision": "bf16-mixed"}),
    "16-mixed": (Momentum, {"precision": "16-mixed", "gradient_clip_val": 0.05}),
}


@functools.cache
def world_size() -> int:
    """Read at once: Lightning takes it out of the environment at the end of a fit."""
    return int(os.environ["WORLD_SIZE"])


def strategy(layout: str, **options: Any) -> RecomputeStrategy:
    return RecomputeStrategy(**LAYOUTS[world_size()][layout] | options)


def rows(layout: str) -> int:
    """Of one rank, so that four make a step together."""
    return 2 if "dp2" in layout else 4


def alone(folder: Path) -> dict[str, Any]:
    """Every fit in one process, without this package."""
    found = {}
    for name, (make, options) in FITS.items():
        module = seeded(make)
        found[name] = outcome(module, fit(module, folder, "auto", **options))
    return found


def in_groups(folder: Path) -> dict[str, Any]:
    found = {}
    for layout in LAYOUTS[world_size()]:
        for name, (make, options) in FITS.items():
            module = seeded(make)
            options = options | {"devices": world_size()}
            trainer = fit(module, folder, strategy(layout), rows(layout), **options)
            found[f"{layout} | {name}"] = outcome(module, trainer)
    return found


class Stops(pl.Callback):
    """Asks all ranks at each epoch's end, and one of them says yes."""

    def __init__(self) -> None:
        self.found: list[bool] = []

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        decide = trainer.strategy.reduce_boolean_decision
        self.found += [decide(True, all=True), decide(trainer.global_rank == 1, all=False)]
        self.found += [decide(trainer.global_rank == 1, all=True), decide(False, all=False)]


def habits(folder: Path) -> dict[str, Any]:
    """Evaluation beside training, early stopping, decisions of all ranks."""
    layout = next(iter(LAYOUTS[world_size()]))
    module = seeded(Plain)
    stops = Stops()
    stopping = EarlyStopping("val_loss", min_delta=10.0, patience=2)
    trainer = fit(
        module, folder, strategy(layout), rows(layout), devices=world_size(), max_epochs=9, callbacks=[stops, stopping]
    )
    batches = loader(trainer, rows(layout))
    tested = trainer.test(module, batches, verbose=False)[0]["test_loss"]
    validated = trainer.validate(module, batches, verbose=False)[0]
    predicted = trainer.predict(module, batches)
    again = fit(module, folder, strategy(layout), rows(layout), devices=world_size(), max_epochs=1)
    return {
        "decisions": stops.found,
        "epochs": trainer.current_epoch,
        "tested": tested,
        "validated": validated,
        "predicted": torch.cat(predicted),
        "again": again.global_step,
        "mesh": module.device_mesh is None,
    }


class ForgottenNorm(Plain):
    """A norm on each rank's own heads that the plan does not tell of."""

    def __init__(self) -> None:
        super().__init__(num_layers=1)
        self.blocks[0].attn.q_proj = nn.Sequential(self.blocks[0].attn.q_proj, HeadNorm())

    def tensor_parallel_plan(self) -> dict[str, str]:
        plan = super().tensor_parallel_plan()
        del plan["blocks.*.attn.q_proj"]
        return plan | {"blocks.*.attn.q_proj.0": "colwise"}


class HeadNorm(nn.Module):
    """RMSNorm over the channels of each head."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.norm(x.unflatten(-1, (-1, 4))).flatten(-2)
        return normed


class Breaks(Plain):
    """Fails in the second step, on all ranks alike."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1:
            raise ArithmeticError("the user's own mistake")
        return loss


class Apart(Plain):
    """Gives each rank other data."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [(batch[0] + int(os.environ["LOCAL_RANK"])) % 32] if self.training else batch


def refusals(folder: Path) -> dict[str, Any]:
    """Errors that need ranks to be found; what they leave on the module."""
    found = {}
    for name, make in {"norm": ForgottenNorm, "batch": Apart, "breaks": Breaks}.items():
        module = seeded(make)
        try:
            fit(module, folder, strategy("tp2"), devices=2)
            found[name] = "nothing"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
        left = [key for part in module.modules() for key in ("forward", *part._parameters) if key in vars(part)]
        found[f"{name} left"] = [*left, *(["mesh"] if module.device_mesh is not None else [])]
    return found


def check_all(folder: Path) -> dict[str, Any]:
    assert world_size() in LAYOUTS
    found = {"fits": in_groups(folder), "habits": habits(folder)}
    if world_size() == 2:
        found["refusals"] = refusals(folder)
    return found
