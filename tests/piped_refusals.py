"""What a strategy over pipeline stages refuses, in words of its own; and what that leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from distributed import error_of, local_rank
from grouped_modules import seeded
from lightning.pytorch.callbacks import BatchSizeFinder, EMAWeightAveraging, StochasticWeightAveraging
from piped_modules import Net, fit, left_on, loader

from lightning_recompute.recompute_callback import Recompute
from lightning_recompute.strategy import RecomputeStrategy


class Manual(Net):
    """Manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class SecondOrder(Net):
    """An optimizer that looks at all parameters together."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class Penalty(Net):
    """Uses the embedding behind the blocks."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        embedded = self.embed(batch[0])
        return super().training_step(batch, batch_idx) + embedded.square().mean()


class Apart(Net):
    """Gives each rank other data."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] + local_rank(), batch[1]] if self.training else batch


def shuffled() -> Any:
    torch.seed()
    return loader(shuffle=True)


def refusals(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def refuse(name: str, make: Any = Net, words: dict[str, Any] | None = None, **options: Any) -> None:
        module = seeded(make)
        strategy = RecomputeStrategy(**{"pipeline_parallel_size": 2} | (words or {}))  # type: ignore[arg-type]
        found[name] = error_of(lambda: fit(lambda: module, folder, strategy, **options), "nothing")
        found[f"{name} left"] = left_on(module)

    for callback in (BatchSizeFinder(), EMAWeightAveraging(), StochasticWeightAveraging(0.1), Recompute()):
        refuse(type(callback).__name__, callbacks=[callback])
    refuse("manual", Manual)
    refuse("LBFGS", SecondOrder)
    refuse("penalty", Penalty)
    refuse("apart", Apart)
    refuse("shuffled", data=shuffled)
    refuse("few blocks", words={"virtual_pipeline_size": 3})
    refuse("split", words={"split": [1, 1]})
    return found
