"""Script for the processes of a pipeline, as a user's: a fit in which something goes wrong.

piped_train.py FOLDER raise | wait
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from distributed import local_rank
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from piped_failures import Breaks
from piped_modules import Net, left_on, loader, trainer_of

from lightning_recompute.strategy import RecomputeStrategy


class Waits(Net):
    """Tells that training is under way, and goes on with it for ever."""

    folder = Path()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        (self.folder / f"training-{local_rank()}").write_text(str(os.getpid()))
        time.sleep(0.02)
        return loss


def main(folder: Path, mode: str) -> None:
    os.chdir(folder)
    Waits.folder = folder
    module = Breaks() if mode == "raise" else Waits()
    strategy = RecomputeStrategy(pipeline_parallel_size=2, num_microbatches=4)
    options: dict[str, Any] = {"devices": 2, "max_epochs": -1, "enable_checkpointing": True}
    trainer = trainer_of(folder, strategy, callbacks=[OnExceptionCheckpoint(folder)], **options)
    try:
        trainer.fit(module, loader(), loader())
    finally:
        left = [name for name in left_on(module) if name not in dict(module.named_parameters())]
        (folder / f"left-{local_rank()}").write_text(f"{left}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
