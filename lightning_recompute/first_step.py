"""Running something in the first training step of a fit, which then ends: nothing is trained.

Lightning itself prepares everything as for a fit, up to the first training step: hooks, device, precision, data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import lightning.pytorch as pl
from lightning.pytorch.utilities.types import TRAIN_DATALOADERS

from lightning_recompute.patch import Patch

Found = TypeVar("Found")

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


class _Left(BaseException):
    """Ends the fit once its first step has been looked at; no `except Exception` of a user stops it."""


def in_first_step(
    trainer: pl.Trainer,
    model: pl.LightningModule,
    look: Callable[[Callable[..., Any], Any], Found],
    train_dataloaders: TRAIN_DATALOADERS | None = None,
    datamodule: pl.LightningDataModule | None = None,
) -> Found:
    """Do something in place of the first training step of a fit, which then ends.

    The Trainer's callbacks are left out; that nobody else hears of the step is up to `look` (`only_tried`).

    Args:
        trainer: A Trainer with one process (see `ON_ONE_DEVICE`).
        model: The model.
        look: What to do; given a function that runs the step (with another batch, if it is given one), and the batch.
        train_dataloaders: The training data, as for `fit`.
        datamodule: The data, as for `fit`.

    Returns:
        What `look` returned.

    Raises:
        ValueError: The Trainer has several processes, or training ends before a first batch.
    """
    if trainer.world_size > 1:
        raise ValueError(
            f"this looks at the first step in one process, the Trainer has {trainer.world_size}: devices=1, "
            "num_nodes=1 is due"
        )
    found: list[Found] = []

    def instead(original: Any, /, *args: Any, **kwargs: Any) -> Any:
        batch = next(iter((*args, *kwargs.values())), None)

        def run(given: Any = batch) -> Any:
            if args:
                return original(given, *args[1:], **kwargs)
            return original(**{**kwargs, **dict.fromkeys(list(kwargs)[:1], given)})

        found.append(look(run, batch))
        raise _Left

    # Lightning sets these by name
    options = vars(trainer)
    former = {name: options[name] for name in ("callbacks", "num_sanity_val_steps", "limit_val_batches")}
    options.update(callbacks=[], num_sanity_val_steps=0, limit_val_batches=0)
    step = model.training_step
    patch = Patch(model, instead, attribute="training_step")
    vars(model)["training_step"].__wrapped__ = step  # Lightning reads from its signature what it takes
    try:
        trainer.fit(model, train_dataloaders, datamodule=datamodule)
    except _Left:
        return found[0]
    finally:
        patch.remove()
        options.update(former)
    raise ValueError(
        "training ended before its first batch, so there was nothing to look at: check max_epochs, max_steps, "
        "limit_train_batches and the training data"
    )
