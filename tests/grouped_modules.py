"""LightningModules over our GPT as users write them, for fits in groups of ranks; and one fit of each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from group_cases import SMALL, some_tokens
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchmetrics import MeanMetric, SumMetric

from lightning_recompute.gpt import GPT
from lightning_recompute.vocabulary import cross_entropy

NUM_ROWS = 20
"""Rows of the data; with 4 a step, five steps an epoch: an accumulation of two ends with a window of one."""


class Plain(GPT):
    """The reference model, which keeps what each step gave."""

    def __init__(self, lr: float = 1e-2, **options: Any) -> None:
        super().__init__(**SMALL | {"tied_head": True} | options)
        self.lr = lr
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.seen = SumMetric()
        self.mean = MeanMetric()

    def loss(self, batch: Any) -> Tensor:
        return cross_entropy(self.divided_logits(batch[0][:, :-1]), batch[0][:, 1:])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(float(loss.detach()))
        self.seen.update(len(batch[0]))
        self.log("seen", self.seen, on_step=False, on_epoch=True)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.mean.update(loss, len(batch[0]))
        self.log("val_loss", loss, sync_dist=True, batch_size=len(batch[0]))
        self.log("val_mean", self.mean)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True, batch_size=len(batch[0]))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0][:, :-1]).argmax(-1)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        gradients = [whole(p.grad) for p in self.parameters() if p.grad is not None]
        self.norms.append(float(torch.nn.utils.get_total_norm(gradients)))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), self.lr)


class Momentum(Plain):
    """SGD, whose first step shows gradients as they are, and a schedule."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), self.lr, momentum=0.9)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)}


class Manual(Plain):
    """Two optimizers, each with a backward of its own; one clips."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        for index, optimizer in enumerate(self.optimizers()):  # type: ignore[arg-type]
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            if index == 0:
                self.clip_gradients(optimizer, 0.05, "norm")
            optimizer.step()
            self.losses.append(float(loss.detach()))

    def configure_optimizers(self) -> Any:
        blocks = list(self.blocks.parameters())
        others = [p for name, p in self.named_parameters() if not name.startswith("blocks")]
        return torch.optim.AdamW(others, self.lr), torch.optim.SGD(blocks, self.lr)


def whole(tensor: Any) -> Tensor:
    result: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return result.detach()


def loader(trainer: pl.Trainer, rows: int) -> DataLoader[Any]:
    """The same rows a step in any layout, `rows` of them here, in order."""
    data = TensorDataset(some_tokens(NUM_ROWS))
    options = getattr(trainer.strategy, "distributed_sampler_kwargs", {"num_replicas": 1, "rank": 0})
    if trainer.world_size == 1:
        options = {"num_replicas": 1, "rank": 0}
    return DataLoader(data, rows, sampler=DistributedSampler(data, shuffle=False, **options))


def fit(module: Plain, folder: Path, strategy: Any, rows: int = 4, **options: Any) -> pl.Trainer:
    """Two epochs in float64 (unless `precision` says else), no files."""
    torch.manual_seed(0)
    trainer = trainer_of(folder, strategy, **options)
    trainer.fit(module, loader(trainer, rows), loader(trainer, rows))
    return trainer


def trainer_of(folder: Path, strategy: Any, **options: Any) -> pl.Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 2,
        "precision": "64-true",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
        "num_sanity_val_steps": 1,
    }
    return pl.Trainer(strategy=strategy, **defaults | options)


def seeded(make: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    return make()


def outcome(module: Plain, trainer: pl.Trainer) -> dict[str, Any]:
    """What a fit left, in a form that a rank can send."""
    assert type(module) in (Plain, Momentum, Manual)
    assert {type(p) for p in module.parameters()} == {torch.nn.Parameter}, "made whole again"
    left = [
        (name, key)
        for name, part in module.named_modules()
        for key in ("forward", *part._parameters)
        if key in vars(part)
    ]
    assert left == [], "nothing is left on the module"
    assert module.head.weight is module.token_embedding.weight
    assert all(part.process_group is None for part in (module.seen, module.mean))
    return {
        "losses": module.losses,
        "norms": module.norms,
        "weights": {name: p.detach().clone() for name, p in module.named_parameters()},
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "steps": trainer.global_step,
    }
