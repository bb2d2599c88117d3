"""What Lightning does around training, over pipeline stages and in one process: both do this."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from distributed import world_size
from grouped_modules import seeded
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, ProgressBar, RichProgressBar, TQDMProgressBar
from lightning.pytorch.tuner import Tuner
from piped_modules import Net, Record, fit, loader, outcome, trainer_of

from lightning_recompute.strategy import RecomputeStrategy


def strategy(**options: Any) -> Any:
    if world_size() == 1:
        return "auto"
    return RecomputeStrategy(**{"pipeline_parallel_size": 2, "num_microbatches": 4} | options)


# ---- hooks

HOOKS = (
    *("setup", "configure_model", "on_fit_start", "on_fit_end", "teardown", "on_before_backward"),
    *("on_train_start", "on_train_end", "on_train_epoch_start", "on_train_epoch_end"),
    *("on_train_batch_start", "on_train_batch_end", "on_before_optimizer_step", "on_after_backward"),
    *("on_validation_start", "on_validation_end", "on_validation_epoch_start", "on_validation_epoch_end"),
    *("on_validation_batch_start", "on_validation_batch_end", "on_validation_model_eval", "on_validation_model_train"),
    *("on_before_zero_grad", "optimizer_zero_grad", "optimizer_step", "backward", "lr_scheduler_step"),
    *("configure_gradient_clipping", "on_before_batch_transfer", "on_after_batch_transfer"),
)


class Listens(Net):
    """Notes each hook, and what is to be seen of gradients and modes there."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []
        self.blocks[0].norm.eval()

    def note(self, name: str) -> None:
        gradients = [parameter.grad is not None for parameter in self.parameters() if parameter.numel()]
        seen = "every" if all(gradients) else "some" if any(gradients) else "no"
        modes = f"{sum(part.training for part in self.modules())} in training"
        self.events.append(f"{name}: {seen} gradients, {modes}")


def _noting(name: str) -> Callable[..., Any]:
    theirs = getattr(pl.LightningModule, name)

    @functools.wraps(theirs)
    def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.note(name)
        return theirs(self, *args, **kwargs)

    return hook


for _name in HOOKS:
    setattr(Listens, _name, _noting(_name))


class Hears(pl.Callback):
    """Notes the hooks of callbacks."""


def _heard(name: str) -> Callable[..., None]:
    def hook(self: Any, trainer: pl.Trainer, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        pl_module.note(f"callback {name}")

    return hook


for _name in set(HOOKS) & set(vars(pl.Callback)):
    setattr(Hears, _name, _heard(_name))


def events(folder: Path) -> dict[str, list[str]]:
    """All hooks of fits, in order."""
    found = {}
    for name, options in {"plain": {}, "window": {"accumulate_grad_batches": 4, "val_check_interval": 2}}.items():
        module = seeded(Listens)
        fit(lambda module=module: module, folder, strategy(), max_epochs=1, callbacks=[Hears()], **options)
        found[name] = module.events
    return found


# ---- what metrics decide


class Shown(ProgressBar):
    """Keeps what it shows."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[dict[str, Any]] = []

    def get_metrics(self, *args: Any, **kwargs: Any) -> Any:
        self.shown.append(dict(super().get_metrics(*args, **kwargs)))
        return self.shown[-1]


class Bar(Shown, TQDMProgressBar):
    """Lightning's usual one."""


class RichBar(Shown, RichProgressBar):
    """On rank 0 only, where it is one."""


class Decides(pl.Callback):
    """Asks all ranks at the end of an epoch."""

    def __init__(self) -> None:
        self.found: list[bool] = []

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        first = trainer.global_rank == 0
        for vote in (True, first, not first, False):
            self.found += [trainer.strategy.reduce_boolean_decision(vote, all=every) for every in (True, False)]


def stopping(folder: Path) -> dict[str, Any]:
    """Early stopping, the best checkpoint and evaluations of it, bars."""
    name = f"best {world_size()}"
    saver = ModelCheckpoint(folder / name, monitor="val_loss", save_top_k=2, save_last=True)
    patient = EarlyStopping("val_loss", min_delta=0.05, patience=1)
    bar, decides = Bar(), Decides()
    module, record = seeded(Net), Record()
    callbacks = [record, saver, patient, bar, decides]
    options: dict[str, Any] = {"enable_checkpointing": True, "enable_progress_bar": True, "max_epochs": 8}
    trainer = trainer_of(folder, strategy(), callbacks=callbacks, **options)
    trainer.fit(module, loader(), loader())
    found = outcome(module, trainer, record) | {
        "bar": [{key: str(value) for key, value in shown.items()} for shown in bar.shown],
        "epoch": trainer.current_epoch,
        "stopped": patient.stopped_epoch,
        "best": float(saver.best_model_score),
        "files": sorted(Path(path).name for path in saver.best_k_models),
        "decisions": decides.found,
    }
    found["tested"] = trainer.test(module, loader(), ckpt_path="best", verbose=False)
    found["validated"] = trainer.validate(module, loader(), ckpt_path="last", verbose=False)
    found["predicted"] = torch.cat(trainer.predict(module, loader(), ckpt_path="best"))
    return found


def rich(folder: Path) -> list[dict[str, str]]:
    """What a bar of the other kind shows."""
    bar = RichBar()
    fit(Net, folder, strategy(), max_epochs=1, callbacks=[bar], enable_progress_bar=True)
    return [{key: str(value) for key, value in shown.items()} for shown in bar.shown]


def several_fits(folder: Path) -> list[dict[str, Any]]:
    """Two fits on one Trainer, evaluation between, and one more on another."""
    module, record = seeded(Net), Record()
    trainer = trainer_of(folder, strategy(), callbacks=[record], max_epochs=1)
    trainer.fit(module, loader(), loader())
    found = [outcome(module, trainer, record) | {"tested": trainer.test(module, loader(), verbose=False)}]
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader(), loader())
    found.append(outcome(module, trainer, record) | {"optimizers": len(trainer.strategy.optimizers)})
    record = Record()
    other = trainer_of(folder, strategy(schedule="zbv-zero-bubble"), callbacks=[record], max_epochs=1)
    other.fit(module, loader(), loader())
    return [*found, outcome(module, other, record)]


def habits(folder: Path) -> dict[str, Any]:
    return {
        "events": events(folder),
        "stopping": stopping(folder),
        "rich": rich(folder),
        "several": several_fits(folder),
    }


def tuned(folder: Path) -> dict[str, Any]:
    """The search for a learning rate leaves the module as it was; then a fit with what it found."""
    module, record = seeded(Net), Record()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    torch.manual_seed(0)
    trainer = trainer_of(folder, strategy(), callbacks=[record], num_sanity_val_steps=0, max_epochs=4)
    found = Tuner(trainer).lr_find(module, loader(), num_training=20, max_lr=0.1, early_stop_threshold=None)
    assert found is not None
    left = {
        "rates": found.results["lr"],
        "losses": found.results["loss"],
        "restored": all(torch.equal(value, before[name]) for name, value in module.state_dict().items()),
        "lr": module.lr,
    }
    record.steps, record.epochs, record.modes = [], [], []
    trainer.fit(module, loader(), loader())
    return left | {"fit": outcome(module, trainer, record)}
