"""What ranks do for test_signal_to_end.py: one of them gets SIGTERM in the middle of a step."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from distributed import local_rank, world_size
from lightning.pytorch.utilities.exceptions import SIGTERMException
from piped_modules import Net, left_on, loader, trainer_of

from lightning_recompute.strategy import RecomputeStrategy

LAYOUTS: dict[str, dict[str, Any]] = {"replicas": {}, "pipeline": {"pipeline_parallel_size": 2, "num_microbatches": 4}}
_TOLD = (
    ("replicas", 0, "before the blocks", 1),
    ("replicas", 1, "behind the blocks", 1),
    ("replicas", 0, "behind the blocks", 2),
    ("pipeline", 0, "before the blocks", 2),
    ("pipeline", 1, "before the blocks", 2),
    ("pipeline", 1, "behind the blocks", 2),
    ("pipeline", 0, "before the blocks", 5),
)
"""Layout, rank, where, and batch: also the last of an epoch, which is the third of replicas, the sixth of stages."""
CASES = {
    f"{layout}, rank {rank}, {where} {batch}": (layout, rank, where, batch) for layout, rank, where, batch in _TOLD
}


class Told(Net):
    """One rank is told to end in a batch of the first epoch."""

    def __init__(self, rank: int, where: str, batch: int) -> None:
        super().__init__()
        self.told = rank == local_rank()
        self.where = where
        self.batch = batch
        self.heard: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.where == "before the blocks":
            self.tell(batch_idx)
        loss = super().training_step(batch, batch_idx)
        if self.where == "behind the blocks":
            self.tell(batch_idx)
        return loss

    def tell(self, batch_idx: int) -> None:
        if self.told and batch_idx == self.batch:
            self.told = False
            os.kill(os.getpid(), signal.SIGTERM)


class Ends(pl.Callback):
    """Keeps what a fit ended with."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self.found.append(f"{type(exception).__name__} after {trainer.global_step}")


def ended(folder: Path, layout: str, rank: int, where: str, batch: int) -> dict[str, Any]:
    handler = signal.getsignal(signal.SIGTERM)
    module, ends = Told(rank, where, batch), Ends()
    strategy = RecomputeStrategy(**LAYOUTS[layout])
    trainer = trainer_of(folder, strategy, devices=world_size(), max_epochs=3, callbacks=[ends])
    raised = "nothing"
    try:
        trainer.fit(module, loader(), loader())
    except SIGTERMException as error:
        raised = type(error).__name__
    parts: list[Any] = [trainer._signal_connector, trainer.fit_loop, trainer.fit_loop.epoch_loop]
    own = {"_sigterm_notifier_fn", "on_advance_end", "_broadcast_sigterm_tensor"}
    return {
        "raised": raised,
        "ends": ends.found,
        "left": [name for part in parts for name in own & vars(part).keys()],
        "on the module": [name for name in left_on(module) if name not in dict(module.named_parameters())],
        "handler": signal.getsignal(signal.SIGTERM) == handler,
        "threads": threading.active_count(),
    }


def check_all(folder: Path) -> dict[str, Any]:
    return {name: ended(folder, *case) for name, case in CASES.items()}
