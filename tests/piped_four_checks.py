"""What four ranks do for test_piped_strategy.py: pipelines inside and around other groups."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from distributed import local_rank, world_size
from piped_models import Own, Tokens, gpt2
from piped_modules import Net, PerStep, fit, samples
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchmetrics import MeanMetric, SumMetric

from lightning_recompute.strategy import RecomputeStrategy


class Counts(Net):
    """Metrics and logs that are of all data-parallel ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.mean = SumMetric(), MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        errors = self.errors(batch)
        loss: Tensor = errors.square().mean()
        self.rows.update(len(errors))
        self.mean.update(loss, len(errors))
        self.log("rows", self.rows, on_step=False, on_epoch=True)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss


FITS: dict[str, tuple[Callable[[], pl.LightningModule], Callable[[], Dataset[Any]], dict[str, Any], dict[str, Any]]] = {
    # name: the module, the data, the Trainer's options, the strategy's
    "tp2": (Own, Tokens, {"gradient_clip_val": 0.1}, {"tensor_parallel_size": 2}),
    "tp2 sp": (
        Own,
        Tokens,
        {"accumulate_grad_batches": 2},
        {"tensor_parallel_size": 2, "sequence_parallel": True, "schedule": "zbv-zero-bubble"},
    ),
    "dp2": (Counts, lambda: samples(40), {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2}, {}),
    "dp2 tied": (gpt2, Tokens, {"precision": "64-true"}, {"virtual_pipeline_size": 2}),
    "dp2 shard": (Counts, lambda: samples(40), {"gradient_clip_val": 0.05}, {"data_parallel": "shard"}),
    "dp2 shard steps": (
        PerStep,
        lambda: samples(40),
        {"accumulate_grad_batches": 2},
        {"data_parallel": "shard", "virtual_pipeline_size": 2},
    ),
    "pp4": (PerStep, lambda: samples(40), {"gradient_clip_val": 0.05}, {"pipeline_parallel_size": 4}),
}


class Ordered(pl.Callback):
    """Notes which rows this rank is given."""

    def __init__(self) -> None:
        self.given: list[int] = []

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.given += (batch[0][:, 0] * 1e6).int().tolist()


def check_four(folder: Path) -> dict[str, Any]:
    """Every fit, and which rows each rank is given by the sampler that Lightning puts in."""
    found: dict[str, Any] = {}
    for name, (make, data, options, words) in FITS.items():
        shares = "dp2" in name and world_size() > 1
        settings = {"pipeline_parallel_size": 2, "num_microbatches": 4} | words
        strategy: Any = RecomputeStrategy(**settings) if world_size() > 1 else "auto"  # type: ignore[arg-type]

        def batches(data: Any = data, rows: int = 4 if shares else 8, shares: bool = shares) -> DataLoader[Any]:
            # Lightning's own sampler would shuffle
            sampler = DistributedSampler(data(), 2, local_rank() % 2, shuffle=False) if shares else None
            return DataLoader(data(), rows, sampler=sampler)

        options = {"data": batches, "val": batches} | options
        found[name] = fit(make, folder, strategy, **options)
    if world_size() > 1:  # each rank's rows by Lightning's sampler
        ordered = Ordered()
        strategy = RecomputeStrategy(pipeline_parallel_size=2, num_microbatches=2)
        fit(
            Net,
            folder,
            strategy,
            data=lambda: DataLoader(samples(40), 4, shuffle=True),
            val=None,
            max_epochs=1,
            callbacks=[ordered],
        )
        found["given"] = ordered.given
    return found
