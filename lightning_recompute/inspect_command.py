"""`lightning-recompute inspect --config FILE`: what each label saves and costs on the user's model and first batch.

Lightning itself prepares everything as for a fit, up to the first training step: hooks, device, precision, data. The
step is run once to catch how the blocks are called; then the fit ends. Nothing is trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.types import TRAIN_DATALOADERS
from rich.console import Console

from lightning_recompute.inspection import Inspection, inspect_blocks
from lightning_recompute.patch import Patch

SUBCOMMAND: dict[str, set[str]] = {"inspect": {"model", "train_dataloaders", "datamodule"}}
"""The subcommand and what it does not take from the command line, as `LightningCLI.subcommands()` returns it."""

ON_ONE_DEVICE: Mapping[str, Any] = {
    "strategy": "auto",
    "devices": 1,
    "num_nodes": 1,
    "logger": False,
    "callbacks": None,
    "fast_dev_run": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "profiler": None,
    "num_sanity_val_steps": 0,
}
"""Arguments of a Trainer, whatever a config says, that leave one process, no files and no other output."""


class _Inspected(BaseException):
    """Ends the fit once its first step has been looked at; no `except Exception` of a user stops it."""


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
        console = Console()
        if not console.is_terminal:
            console.width = max(console.width, 200)  # a log file has no edge
        console.print(inspection.to_table())
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
    if trainer.world_size > 1:
        raise ValueError(f"inspect runs in one process, the Trainer has {trainer.world_size}: devices=1, num_nodes=1")
    found: list[Inspection] = []

    def look(original: Any, /, *args: Any, **kwargs: Any) -> Any:
        quiet = [Patch(model, _ignored, attribute=name) for name in ("log", "log_dict")]
        try:
            found.append(
                inspect_blocks(model, lambda: original(*args, **kwargs), blocks=blocks, labels=labels, seconds=seconds)
            )
        finally:
            while quiet:
                quiet.pop().remove()
        raise _Inspected

    # Lightning sets these by name
    options = vars(trainer)
    former = {name: options[name] for name in ("callbacks", "num_sanity_val_steps", "limit_val_batches")}
    options.update(callbacks=[], num_sanity_val_steps=0, limit_val_batches=0)
    step = model.training_step
    patch = Patch(model, look, attribute="training_step")
    vars(model)["training_step"].__wrapped__ = step  # Lightning reads from its signature what it takes
    try:
        trainer.fit(model, train_dataloaders, datamodule=datamodule)
    except _Inspected:
        return found[0]
    finally:
        patch.remove()
        options.update(former)
    raise ValueError(
        "training ended before its first batch, so there was nothing to inspect: look at max_epochs, max_steps, "
        "limit_train_batches and the training data"
    )


def _ignored(original: Any, /, *args: Any, **kwargs: Any) -> None:
    """In place of `log`: nothing is trained, so nothing is logged."""
