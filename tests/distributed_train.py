"""Script for two processes: a plain fit, and then perhaps one in which something goes wrong.

distributed_train.py FOLDER [raise RANK | wait]
"""

from __future__ import annotations

import functools
import os
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from distributed import NUM_PROCESSES, local_rank
from lightning_modules import Fit, Net, assert_unpatched, fit, loader
from torch import Tensor

from lightning_recompute.strategy import RecomputeStrategy


class Keep(pl.Callback):
    """Writes what each process ended with; nothing kept on a callback comes back from spawned ones."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_end(self, trainer: pl.Trainer, pl_module: Net) -> None:
        found = {"losses": pl_module.losses, "weights": dict(pl_module.state_dict())}
        torch.save(found, self.folder / f"rank{trainer.global_rank}.pt")


class Breaks(Net):
    """Fails in the second step, on one rank."""

    rank = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 1 and self.global_rank == self.rank:
            raise ArithmeticError("the user's own mistake")
        return super().training_step(batch, batch_idx)


class Waits(Net):
    """Tells that training is under way, and goes on with it for ever."""

    folder = Path()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (self.folder / f"training-{self.global_rank}").write_text(str(os.getpid()))
        time.sleep(0.05)
        return super().training_step(batch, batch_idx)


def train(folder: Path, strategy: RecomputeStrategy | str | None = None) -> Fit:
    batches = functools.partial(loader, shuffle=True, batch_size=3)
    return fit(strategy or RecomputeStrategy(), train=batches, devices=NUM_PROCESSES, callbacks=[Keep(folder)])


def train_forked_and_spawned(folder: Path) -> dict[str, Any]:
    """Two fits with a start method that brings only the weights back to this process."""
    weights = {}
    for name in ("recompute_fork", "recompute_spawn"):
        (folder / name).mkdir()
        weights[name] = train(folder / name, name).weights
    return weights


def fail(folder: Path, module: Net) -> None:
    saver = pl.callbacks.OnExceptionCheckpoint(folder)
    options: dict[str, Any] = {"callbacks": [saver], "enable_checkpointing": True, "max_epochs": -1}
    try:
        fit(RecomputeStrategy(), lambda: module, devices=NUM_PROCESSES, **options)
    finally:
        assert_unpatched(module)
        (folder / f"unpatched-{local_rank()}").touch()


def main(folder: Path, mode: str = "", *rest: str) -> None:
    os.chdir(folder)
    if mode != "wait":
        train(folder)
    if mode == "raise":
        Breaks.rank = int(rest[0])
        fail(folder, Breaks())
    if mode == "wait":
        Waits.folder = folder
        fail(folder, Waits())


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
