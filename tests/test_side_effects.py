"""Metrics and logging inside a recomputed block happen once a step."""

from __future__ import annotations

from pathlib import Path

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, SumMetric

from lightning_recompute.policy import RecomputePolicy
from lightning_recompute.recompute import apply_recompute
from lightning_recompute.recompute_callback import Recompute


class Block(nn.Module):
    """Updates a metric of its own, and calls whatever it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.count = nn.Linear(8, 8), SumMetric()
        self.report = [lambda value: None]

    def forward(self, x: Tensor) -> Tensor:
        self.count.update(1.0)
        y = x + torch.tanh(self.linear(x))
        self.report[0](y.detach().mean())
        return y


class Module(L.LightningModule):
    """A block logs through the LightningModule and updates a metric of it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.mean, self.total = MeanMetric(), SumMetric()
        self.blocks[0].report[0] = self.report

    def report(self, value: Tensor) -> None:
        self.log("act", 1.0, on_step=False, on_epoch=True, reduce_fx="sum")
        self.mean.update(value)
        self.total.update(1.0)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        return batch.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def fit(folder: Path, *callbacks: L.Callback) -> tuple[Module, L.Trainer]:
    L.seed_everything(0, verbose=False)
    module = Module()
    trainer = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(module, DataLoader(torch.randn(8, 8), batch_size=2))
    return module, trainer


def values(module: Module, trainer: L.Trainer) -> list[float]:
    metrics = [module.total, module.mean, *(block.count for block in module.blocks)]
    return [trainer.callback_metrics["act"].item(), *(metric.compute().item() for metric in metrics)]


def test_a_fit_counts_as_without_recompute(tmp_path: Path) -> None:
    due = values(*fit(tmp_path))
    assert due[:2] == [4.0, 4.0]
    module, trainer = fit(tmp_path, Recompute())
    assert values(module, trainer) == due
    assert "log" not in vars(module)
    module, trainer = fit(tmp_path, Recompute(granularity="selective", modules=["*.linear"]))
    assert values(module, trainer) == due


def test_handle_leaves_metrics_as_they_were() -> None:
    module = Module()
    before = {name: type(vars(part).get("update")) for name, part in module.named_modules()}
    with apply_recompute(module, RecomputePolicy()):
        module.training_step(torch.randn(2, 8), 0).backward()
    assert {name: type(vars(part).get("update")) for name, part in module.named_modules()} == before
    module.blocks[0].count.update(1.0)
    assert module.blocks[0].count.compute().item() == pytest.approx(2.0)
