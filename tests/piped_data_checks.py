"""Run by four processes: fits of two pipelines side by side, against one process that is given all rows."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_recompute.strategy import RecomputeStrategy

WIDTH, NUM_ROWS, ROWS, SIZE = 6, 42, 8, 2
"""Two data ranks: three batches an epoch for each, of 8, 8 and 5 rows."""

STEPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "windows": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
}
FITS: dict[str, tuple[str, dict[str, Any]]] = {
    "replicate 1f1b": ("windows", {}),
    "replicate zbv": ("plain", {"schedule": "zbv-zero-bubble"}),
    "shard 1f1b": ("windows", {"granularity": "full"}),
    "shard interleaved": ("windows", {"virtual_pipeline_size": 2, "granularity": "full"}),
    "shard zbv": ("plain", {"schedule": "zbv-zero-bubble", "granularity": "full"}),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 11), nn.Linear(11, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(torch.tanh(self.up(self.norm(hidden))))


class Net(pl.LightningModule):
    """A head that is tied to what is before the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.head.weight = self.embed.weight
        self.double()

    def error(self, batch: Sequence[Tensor]) -> Tensor:
        hidden = self.embed(batch[0])
        for block in self.blocks:
            hidden = block(hidden)
        return (self.head(hidden) - batch[1]).square().mean()

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        loss = self.error(batch)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.error(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        # else small gradients count by their last bits
        return torch.optim.AdamW(self.parameters(), 0.05, eps=1e-2)


class Losses(pl.Callback):
    def __init__(self) -> None:
        self.found: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.found.append(float(trainer.callback_metrics["train_loss"]))


def samples() -> Dataset[Any]:
    x = torch.randn(NUM_ROWS, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return TensorDataset(x, x.sin().flip(1))


def merged() -> list[list[int]]:
    """For each step the rows of all data ranks."""
    orders = [list(range(rank, NUM_ROWS, SIZE)) for rank in range(SIZE)]
    return [
        [row for order in orders for row in order[first : first + ROWS]] for first in range(0, len(orders[0]), ROWS)
    ]


def fit(folder: Path, strategy: Any, loader: DataLoader[Any], **options: Any) -> dict[str, Any]:
    torch.manual_seed(3)
    module, losses = Net(), Losses()
    torch.manual_seed(4)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2 * SIZE if isinstance(strategy, RecomputeStrategy) else 1,
        strategy=strategy,
        max_epochs=2,
        callbacks=[losses],
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **options,
    )
    trainer.fit(module, loader, loader)
    return {
        "weights": {name: value.detach().clone() for name, value in module.state_dict().items()},
        "losses": losses.found,
        "val_loss": float(trainer.callback_metrics["val_loss"]),
        "is_tied": module.head.weight is module.embed.weight,
    }


def check_fits(folder: Path) -> dict[str, Any]:
    """Largest differences of weights, of the mean of losses, of the validation's."""
    mine = int(os.environ["LOCAL_RANK"]) % SIZE
    found: dict[str, Any] = {}
    due: dict[str, Any] = {}
    for name, (step, options) in FITS.items():
        kind = name.split()[0]
        strategy = RecomputeStrategy(pipeline_parallel_size=2, num_microbatches=4, data_parallel=kind, **options)
        own = DataLoader(samples(), ROWS, sampler=range(mine, NUM_ROWS, SIZE))
        one = fit(folder, strategy, own, **STEPS[step])
        found[name] = one
    for step, options in STEPS.items():  # last: Lightning takes the world for one process from here on
        due[step] = fit(folder, "auto", DataLoader(samples(), batch_sampler=merged()), **options)
    for name, (step, _) in FITS.items():
        one, other = found[name], due[step]
        pairs = zip(one["weights"].values(), other["weights"].values(), strict=True)
        found[name] = {
            "weights": max(float((left - right).abs().max()) for left, right in pairs),
            "losses": max(abs(left - right) for left, right in zip(one["losses"], other["losses"], strict=True)),
            "val_loss": abs(one["val_loss"] - other["val_loss"]),
            "is_tied": one["is_tied"],
        }
    return found
