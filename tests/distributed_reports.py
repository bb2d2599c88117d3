"""Run by two processes: fits with both reports under DDP, as if tensor-parallel, and under FSDP2."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from distributed import NUM_PROCESSES
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from lightning_modules import QUIET
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from lightning_recompute.callbacks import MemoryReport, ThroughputReport

WIDTH, HIDDEN = 16, 48
ROWS = (4, 400)
"""Rows of a batch on each rank."""
NUM_BATCHES = 4
PEAK = 1e9


class Perceptron(pl.LightningModule):
    """Two linears around a ReLU; a step takes a second on rank 0 and two on rank 1, by a clock of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 2))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        clock.time += 1 + self.global_rank
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())

    def train_dataloader(self) -> Any:
        rows = ROWS[self.global_rank]
        return DataLoader([torch.randn(rows, WIDTH) for _ in range(NUM_BATCHES)], batch_size=None)


class Sharded(Perceptron):
    """The same under FSDP2."""

    def configure_model(self) -> None:
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


class TensorParallel(DDPStrategy):
    """Says that both processes see the same samples."""

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": 1, "rank": 0}


class Clock:
    """Stands still unless moved."""

    time = 0.0

    def __call__(self) -> float:
        return self.time


clock = Clock()


def fit_all(folder: Path) -> dict[str, Any]:
    """Rows of both reports, by kind of training."""
    time.perf_counter = clock  # type: ignore[assignment]  # a clock that training moves
    found: dict[str, Any] = {}
    for name, module, strategy in (
        ("ddp", Perceptron(), DDPStrategy()),
        ("tensor", Perceptron(), TensorParallel()),
        ("fsdp", Sharded(), ModelParallelStrategy(NUM_PROCESSES, 1)),
    ):
        memory, throughput = MemoryReport(), ThroughputReport(PEAK, warmup_steps=1)
        options = {**QUIET, "devices": NUM_PROCESSES, "max_epochs": 1, "use_distributed_sampler": False}
        trainer = pl.Trainer(
            **options, strategy=strategy, callbacks=[throughput, memory], default_root_dir=folder / name
        )
        trainer.fit(module)
        found[name] = {"memory": memory.rows, "throughput": throughput.rows}
    return found
