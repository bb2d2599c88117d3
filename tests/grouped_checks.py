"""What two or four ranks do for test_grouped_strategy.py: every fit in one group of processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from distributed import world_size
from group_cases import SMALL, next_token_loss
from grouped_modules import Manual, Momentum, Plain, fit, loader, outcome, seeded, whole
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    EarlyStopping,
    EMAWeightAveraging,
    StochasticWeightAveraging,
)
from torch import nn

from lightning_recompute.gpt import GPT
from lightning_recompute.reduction import local_part
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


def fits_of(layout: str, world: int) -> list[str]:
    """Each layout with some of the fits, all of them with some of the layouts."""
    row = list(LAYOUTS[world]).index(layout)
    return [name for column, name in enumerate(FITS) if (row + column) % (3 if world == 2 else 2)]


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
    return found | {"meta": on_meta(folder, {"one": RecomputeStrategy()})["one"]}


def in_groups(folder: Path) -> dict[str, Any]:
    found = {}
    for layout in LAYOUTS[world_size()]:
        for name in fits_of(layout, world_size()):
            make, options = FITS[name]
            module = seeded(make)
            options = options | {"devices": world_size()}
            trainer = fit(module, folder, strategy(layout), rows(layout), **options)
            found[f"{layout} | {name}"] = outcome(module, trainer)
    return found


class Large(pl.LightningModule):
    """Builds its network on the meta device, where the processes have met."""

    def __init__(self) -> None:
        super().__init__()
        self.net: GPT | None = None
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.net is None:
            with torch.device("meta"):
                self.net = GPT(**SMALL, tied_head=True)

    def tensor_parallel_plan(self) -> dict[str, str]:
        assert self.net is not None
        return {f"net.{name}": style for name, style in self.net.tensor_parallel_plan().items()}

    def loss(self, batch: Any) -> torch.Tensor:
        assert self.net is not None
        return next_token_loss(self.net, batch[0])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        held = sum(local_part(p.detach()).numel() for p in self.parameters())
        due = 0.6 if world_size() > 1 else 1
        assert held <= due * sum(p.numel() for p in self.parameters()), "a rank holds its share"

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def on_meta(folder: Path, strategies: dict[str, RecomputeStrategy]) -> dict[str, Any]:
    """The weights that a fit ends with, and what a further validation of the same module sees."""
    found = {}
    for layout, chosen in strategies.items():
        pl.seed_everything(0)
        module: Any = Large()
        options = {"devices": world_size(), "precision": "32-true", "max_epochs": 1}
        trainer = fit(module, folder, chosen, rows(layout), **options)
        value = trainer.callback_metrics["val_loss"]
        again = trainer.validate(module, loader(trainer, rows(layout)), verbose=False)[0]["val_loss"]
        found[layout] = {
            "weights": {name: whole(p).clone() for name, p in module.named_parameters()},
            "tied": module.net.head.weight is module.net.token_embedding.weight,
            "same": float(value) == again,
            "kinds": sorted({type(p.data).__name__ for p in module.parameters()}),
        }
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
    for callback in (BatchSizeFinder(), EMAWeightAveraging(), StochasticWeightAveraging(0.1)):
        try:
            fit(seeded(Plain), folder, strategy("tp2"), devices=2, callbacks=[callback])
            found[type(callback).__name__] = "nothing"
        except ValueError as error:
            found[type(callback).__name__] = str(error)
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
    found["meta"] = on_meta(folder, {layout: strategy(layout) for layout in LAYOUTS[world_size()]})
    if world_size() == 2:
        found["refusals"] = refusals(folder)
    return found
