"""What a step of a model that is not built needs from Lightning: its first batch, its optimizers, its precision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.types import TRAIN_DATALOADERS
from torch.optim import Optimizer

FAKE_DTYPES = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}
"""Of parameters, by the Trainer's precision; under any other they are as the model makes them."""


def first_batch(
    model: pl.LightningModule, loader: TRAIN_DATALOADERS | None, datamodule: pl.LightningDataModule | None
) -> Any:
    """The first batch of training data.

    Args:
        model: The model, whose loader it is where there is no other.
        loader: A loader, or None.
        datamodule: The data, or None.
    """
    if loader is None and datamodule is not None:
        datamodule.prepare_data()
        datamodule.setup("fit")
        loader = datamodule.train_dataloader()
    return next(iter(model.train_dataloader() if loader is None else loader))


def configured_optimizers(configured: Any) -> list[Optimizer]:
    """The optimizers in what `configure_optimizers` returned, in any of its forms.

    Args:
        configured: What it returned.
    """
    if isinstance(configured, Optimizer):
        return [configured]
    if isinstance(configured, Mapping):
        return configured_optimizers(configured["optimizer"])
    if isinstance(configured, tuple | list):
        return [optimizer for each in configured for optimizer in configured_optimizers(each)]
    return []  # a scheduler, or none
