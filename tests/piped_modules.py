"""LightningModules as users write them, for fits over pipeline stages; and one fit of each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from distributed import world_size
from grouped_modules import seeded
from grouped_modules import trainer_of as trainer_on
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torchmetrics import (
    CatMetric,
    MeanAbsoluteError,
    MeanMetric,
    MeanSquaredError,
    MetricCollection,
    SumMetric,
)

from lightning_recompute.strategy import RecomputeStrategy

WIDTH = 6
NUM_ROWS = 43
ROWS = 8
"""Of a batch, four microbatches: five an epoch and one of three rows, so that a window of four batches ends early."""


class Block(nn.Module):
    """A residual block."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.norm = norm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(torch.tanh(self.up(self.norm(hidden))))


class Net(pl.LightningModule):
    """Blocks between two linears, SGD with momentum and a schedule."""

    def __init__(self, num_blocks: int = 4, lr: float = 0.05, **block: Any) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(**block) for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, 1)
        self.lr = lr

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.embed(hidden)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)

    def errors(self, batch: Sequence[Tensor]) -> Tensor:
        """(rows, 1)."""
        return self(batch[0]) - batch[1]

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Any:
        loss = self.errors(batch).square().mean()
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Sequence[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.errors(batch).square().mean(), prog_bar=True, sync_dist=True)

    def test_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.errors(batch).square().mean())

    def predict_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), self.lr, momentum=0.9)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)}


class PerStep(Net):
    """AdamW, in two groups, and a schedule for each step."""

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": [p for p in self.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in self.parameters() if p.dim() == 1], "weight_decay": 0.0, "lr": self.lr / 2},
        ]
        optimizer = torch.optim.AdamW(groups, self.lr, eps=1e-2)  # else small gradients count by their last bits
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.lr, total_steps=20)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class OnPlateau(Net):
    """A schedule that asks for a metric."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), self.lr)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0, threshold=10.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}


class Logs(Net):
    """Logs in every way, before the blocks and behind; metrics of torchmetrics, as objects and computed."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = SumMetric()
        self.mean = MeanMetric()
        self.all = CatMetric()
        self.several = MetricCollection([MeanSquaredError(), MeanAbsoluteError()], prefix="train/")
        self.by_epoch = MeanMetric()
        self.val_several = self.several.clone(prefix="val/")
        self.val_all = CatMetric()

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Any:
        x, y = batch
        self.log("first", float(len(x)), on_step=False, on_epoch=True, reduce_fx="sum")
        self.log("largest", x.max(), on_step=True, on_epoch=True, reduce_fx="max")
        found = self(x)
        loss = (found - y).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("shown", loss * 2, prog_bar=True, logger=False)
        both = {"a": loss.detach() + 1, "b": 3.0}
        self.log_dict(both, on_step=False, on_epoch=True, batch_size=len(x), sync_dist=True)
        self.log("least", found.min(), on_step=False, on_epoch=True, reduce_fx=torch.min)
        self.rows.update(len(x))
        self.log("rows", self.rows, on_step=False, on_epoch=True)
        self.mean(found.mean(), len(x))
        self.log("mean", self.mean, on_step=True, on_epoch=True)
        self.all.update(found.detach())
        self.several.update(found, y)
        self.log_dict(self.several, on_step=False, on_epoch=True)
        self.by_epoch.update(loss.detach(), len(x))
        return {"loss": loss}

    def on_train_epoch_end(self) -> None:
        self.log("by_epoch", self.by_epoch.compute())
        self.log("spread", self.all.compute().std())
        self.log("number", float(len(self.all.compute())))
        self.by_epoch.reset()
        self.all.reset()

    def validation_step(self, batch: Sequence[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_first", float(len(batch[0])), reduce_fx="sum")
        found = self(batch[0])
        self.val_several(found, batch[1])
        self.log_dict(self.val_several)
        self.val_all.update(found)
        self.log("val_loss", (found - batch[1]).square().mean(), batch_size=len(batch[0]))

    def on_validation_epoch_end(self) -> None:
        self.log("val_spread", self.val_all.compute().std())
        self.val_all.reset()


class Norms(Net):
    """BatchNorm in each block, and a buffer that the step writes behind the blocks."""

    def __init__(self) -> None:
        super().__init__(norm=nn.BatchNorm1d)
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Any:
        errors = self.errors(batch)
        self.seen += len(errors)
        return errors.square().mean()


class FrozenFront(Net):
    """What is before the third block is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(False)
        self.blocks[:2].requires_grad_(False)


class FrozenEnd(Net):
    """The last stage has nothing to train."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2:].requires_grad_(False)
        self.head.requires_grad_(False)


class Bursts(Net):
    """Gradients of the blocks that are in the first half overflow in the second batch, and in no other."""

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Any:
        x, y = batch
        hidden = self.embed(x)
        if batch_idx == 1:
            hidden = _Burst.apply(hidden)
        for block in self.blocks:
            hidden = block(hidden)
        return (self.head(hidden) - y).square().mean()


class _Burst(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * torch.inf


class Weighted(Net):
    """A mean over what a mask says; microbatches count by it, one of them nothing."""

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Any:
        x, y = batch
        mask = _mask(y)
        loss = ((self(x) - y).square() * mask).sum() / mask.sum()
        self.log("train_loss", loss, on_step=True)
        return loss

    def microbatch_weight(self, batch: Sequence[Tensor]) -> Tensor:
        return _mask(batch[1]).sum()


def _mask(y: Tensor) -> Tensor:
    return (y > 0).to(y.dtype)


def samples(rows: int = NUM_ROWS, dtype: torch.dtype = torch.float32) -> Dataset[Any]:
    """Inputs (rows, WIDTH) and targets (rows, 1), the same ones every time."""
    x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(0)).to(dtype)
    return TensorDataset(x, x.sin().sum(-1, keepdim=True))


class Stream(IterableDataset[Any]):
    """The samples without a length."""

    def __iter__(self) -> Any:
        data = samples()
        return (data[row] for row in range(NUM_ROWS))


def loader(rows: int = NUM_ROWS, **options: Any) -> DataLoader[Any]:
    return DataLoader(samples(rows), ROWS, **options)


class Record(pl.Callback):
    """What a user's callbacks see: losses, learning rates, metrics and the bar's, after each batch and epoch."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.epochs: list[dict[str, float]] = []
        self.modes: list[int] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, *_: Any) -> None:
        bar = {f"bar {name}": value for name, value in trainer.progress_bar_metrics.items()}
        logged = {f"logged {name}": value for name, value in trainer.logged_metrics.items()}
        rate = {"lr": trainer.optimizers[0].param_groups[0]["lr"], "loss": outputs["loss"]}
        found = trainer.callback_metrics | bar | logged | rate
        self.steps.append({name: float(value) for name, value in found.items()})
        self.modes.append(sum(part.training for part in pl_module.modules()))

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.epochs.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def trainer_of(folder: Path, strategy: Any, **options: Any) -> pl.Trainer:
    """A Trainer in float64 (unless `precision` says else) that leaves no files, on all ranks under our strategy."""
    devices = world_size() if isinstance(strategy, RecomputeStrategy) else 1
    return trainer_on(folder, strategy, **{"devices": devices} | options)


def left_on(module: nn.Module) -> list[str]:
    """What of ours is still on a module."""
    found = []
    for where, part in module.named_modules():
        found += [f"{where} {key}" for key in ("forward", "log", *part._parameters) if key in vars(part)]
        found += [f"{where} {key}" for key, value in vars(part).items() if type(value) is functools.partial]
        found += [f"{where} hook"] if part._forward_hooks or part._forward_pre_hooks else []
    return found + [name for name, parameter in module.named_parameters() if not parameter.isfinite().all()]


def fit(make: Callable[[], Any], folder: Path, strategy: Any, **options: Any) -> dict[str, Any]:
    """A fit, in a form that a rank can send.

    Args:
        make: The module, or what makes it.
        folder: Where it runs.
        strategy: The strategy.
        options: The Trainer's; `data` and `val` make the loaders.
    """
    data, val = options.pop("data", loader), options.pop("val", loader)
    module = seeded(make)
    record = Record()
    options["callbacks"] = [record, *options.get("callbacks", [])]
    trainer = trainer_of(folder, strategy, **options)
    torch.manual_seed(0)
    trainer.fit(module, data(), val() if val is not None else None)
    return outcome(module, trainer, record)


def outcome(module: pl.LightningModule, trainer: pl.Trainer, record: Record) -> dict[str, Any]:
    """What a fit left."""
    assert left_on(module) == []
    assert {type(parameter) for parameter in module.parameters()} == {nn.Parameter}
    return {
        "steps": record.steps,
        "epochs": record.epochs,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "weights": {name: value.detach().clone() for name, value in module.state_dict().items()},
        "global_step": trainer.global_step,
        "modes": record.modes,
        "state": str(trainer.state.status),
        "scale": float(getattr(getattr(trainer.precision_plugin, "scaler", None), "_scale", None) or 0),
    }
