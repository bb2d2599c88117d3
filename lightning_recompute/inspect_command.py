"""`lightning-recompute inspect --config FILE`: what each label saves and costs on the user's model and first batch.

The first step of a fit is run once to catch how the blocks are called; then the fit ends (`first_step`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.types import TRAIN_DATALOADERS

from lightning_recompute.first_step import in_first_step
from lightning_recompute.inspection import Inspection, inspect_blocks
from lightning_recompute.only_tried import only_tried
from lightning_recompute.printing import wide_console

SUBCOMMAND: dict[str, set[str]] = {"inspect": {"model", "train_dataloaders", "datamodule"}}
"""The subcommand and what it does not take from the command line, as `LightningCLI.subcommands()` returns it."""


class InspectingTrainer(pl.Trainer):
    """Lightning's Trainer with `inspect` beside `fit`: the subcommands of LightningCLI are methods of its Trainer."""

    def inspect(
        self,
        model: pl.LightningModule,
        train_dataloaders: TRAIN_DATALOADERS | None = None,
        datamodule: pl.LightningDataModule | None = None,
        blocks: str | list[str] | None = None,
        labels: list[str] | None = None,
        seconds: bool = True,
        ckpt_path: str | None = None,
        weights_only: bool | None = None,
    ) -> Inspection:
        """Print what each label of selective recompute would save and cost on the first training batch.

        Args:
            model: The model.
            train_dataloaders: The training data.
            datamodule: The data.
            blocks: Where the blocks are: dotted path(s) of block lists or class name(s) of blocks. Null: found.
            labels: Labels or patterns of module names, several joined by + to be measured together. Null: every label
                that the blocks have, and recompute of whole blocks.
            seconds: Also measure time.
            ckpt_path: Not read; here so that the config of a fit can be used.
            weights_only: Not read; here so that the config of a fit can be used.

        Returns:
            What was printed.
        """
        inspection = inspect_first_batch(
            self, model, train_dataloaders, datamodule, blocks=blocks, labels=labels, seconds=seconds
        )
        wide_console().print(inspection.to_table())
        return inspection


def inspect_first_batch(
    trainer: pl.Trainer,
    model: pl.LightningModule,
    train_dataloaders: TRAIN_DATALOADERS | None = None,
    datamodule: pl.LightningDataModule | None = None,
    *,
    blocks: str | Sequence[str] | None = None,
    labels: Sequence[str] | None = None,
    seconds: bool = True,
) -> Inspection:
    """Inspect a model in the first training step of a fit, which then ends.

    Args:
        trainer: A Trainer with one process (see `ON_ONE_DEVICE`); its callbacks are left out.
        model: The model.
        train_dataloaders: The training data, as for `fit`.
        datamodule: The data, as for `fit`.
        blocks: See `inspect_blocks`.
        labels: See `inspect_blocks`.
        seconds: See `inspect_blocks`.

    Raises:
        ValueError: The Trainer has several processes, training ends before a first batch, or what `inspect_blocks`
            refuses.
    """

    def look(step: Callable[[], Any], batch: Any) -> Inspection:
        with only_tried(model):
            return inspect_blocks(model, step, blocks=blocks, labels=labels, seconds=seconds)

    return in_first_step(trainer, model, look, train_dataloaders, datamodule)
