"""Scripts as people have them: what steps made is kept in attributes of the module, data is divided in setup."""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from distributed import error_of, world_size
from grouped_modules import seeded
from piped_modules import ROWS, Net, Record, outcome, samples, trainer_of
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from lightning_recompute.strategy import RecomputeStrategy


def strategy(**options: Any) -> Any:
    if world_size() == 1:
        return "auto"
    return RecomputeStrategy(**{"pipeline_parallel_size": 2, "num_microbatches": 1} | options)


class Keeps(Net):
    """Outputs in lists, counters in numbers, tensors and arrays, all of them changed behind the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Tensor] = []
        self.losses: list[Tensor] = []
        self.by_name: dict[str, list[float]] = defaultdict(list)
        self.by_loader: list[list[Any]] = [[], []]
        self.positive, self.total, self.best = 0, torch.zeros(()), None
        self.table = np.zeros(2)
        self.sizes = (1, 2)
        self.large = torch.zeros(())
        self.epochs: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.detach())
        self.positive += int(loss > 0)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        out = self(batch[0])
        self.outputs.append(out)
        self.by_name["mean"].append(float(out.mean()))
        self.by_loader[1].append({"out": out, "number": batch_idx})
        self.total += out.sum()
        self.table[int(out.sum() > 0)] += 1
        self.best = max(self.best or 0.0, float(out.max()))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return (self(x) - y).square().mean()

    def on_validation_epoch_end(self) -> None:
        out = torch.cat(self.outputs)
        self.log("of the epoch", out.square().mean())
        kept = sum(float(each["out"].sum()) + each["number"] for each in self.by_loader[1])
        self.epochs.append([len(out), float(out.sum()), float(self.total), self.table.tolist(), self.best, kept])
        self.epochs[-1] += [dict(self.by_name), self.sizes]
        self.outputs.clear()
        self.by_name.clear()
        self.total.zero_()
        self.by_loader[1].clear()

    def on_train_epoch_end(self) -> None:
        self.epochs.append([float(torch.stack(self.losses).sum()), self.positive])
        self.losses.clear()


class Enlarges(Keeps):
    """Keeps more than is sent at each step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.large = loss.detach().expand(200_000).clone()
        return loss


class Splits(pl.LightningDataModule):
    """Divides its data anew, without a seed: by each library's random numbers."""

    def setup(self, stage: str) -> None:
        rows = list(range(len(samples())))  # type: ignore[arg-type]
        random.shuffle(rows)
        rows = np.random.permutation(rows).tolist()
        train, val = torch.utils.data.random_split(Subset(samples(), rows), [0.5, 0.5])
        self.rows = [rows[index] for index in train.indices]
        self.train, self.val = train, val

    def train_dataloader(self) -> Any:
        return DataLoader(self.train, ROWS, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(self.val, ROWS)


def kept(folder: Path, make: Any = Keeps, **options: Any) -> dict[str, Any]:
    module, record = seeded(make), Record()
    trainer = trainer_of(folder, strategy(**options), callbacks=[record])
    data = DataLoader(samples(), ROWS)
    trainer.fit(module, data, data)
    found = outcome(module, trainer, record)
    return found | {"kept": module.epochs, "large": module.large.numel()}


def unseeded(folder: Path) -> list[int]:
    """Which rows a rank that was never seeded trains on."""
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(rank + 5)
    data = Splits()
    trainer_of(folder, strategy(num_microbatches=2), max_epochs=1).fit(Net(), data)
    return data.rows


class Generates(Net):
    """Calls the model several times in validation."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        hidden = self.embed(batch[0])
        for block in [*self.blocks, *self.blocks]:
            hidden = block(hidden)


def generated(folder: Path, num_sanity_val_steps: int) -> tuple[str, int]:
    """What is said of it, and after how many steps."""
    trainer = trainer_of(folder, strategy(), num_sanity_val_steps=num_sanity_val_steps)
    module, data = seeded(Generates), DataLoader(samples(), ROWS)
    said = error_of(lambda: trainer.fit(module, data, data))
    assert not any(part._forward_pre_hooks for part in module.modules())
    return said, trainer.global_step


def check_all(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"kept": kept(folder)}
    if world_size() > 1:
        found["zbv"] = kept(folder, schedule="zbv-zero-bubble")
        found["large"] = kept(folder, Enlarges)["large"]
        found["unseeded"] = unseeded(folder)
        found["generates"] = generated(folder, 1)
    return found
