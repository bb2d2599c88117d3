"""What two ranks do for test_piped_checkpoints.py: every fit in one group of processes."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from checkpoint_saving import before_writing
from distributed import error_of
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.tuner import Tuner
from piped_checkpoint_models import Bare, Model, differing, fit, loader, made, piped, trainer_of
from torch import Tensor

from lightning_recompute.checkpoint_loading import is_sharded_checkpoint, read_checkpoint
from lightning_recompute.saved_states import EntryReader

LAYOUTS: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "interleaved": {"schedule": "interleaved-1f1b", "virtual": 2},
}
KINDS: dict[str, dict[str, Any]] = {"1f1b": {"batch_norm": True}, "interleaved": {}}


class Saves(Callback):
    """Saves in every way at the start, and after some steps."""

    def __init__(self, folder: Path, at: int) -> None:
        self.folder = folder
        self.at = at

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.save(trainer, "start")

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == self.at:
            self.save(trainer, "end")

    def save(self, trainer: pl.Trainer, name: str) -> None:
        strategy: Any = trainer.strategy
        trainer.save_checkpoint(self.folder / f"{name}.ckpt")
        strategy.checkpoint_format = "single"
        trainer.save_checkpoint(self.folder / f"{name}.file")
        trainer.save_checkpoint(self.folder / f"{name}.weights", weights_only=True)
        strategy.checkpoint_format = "auto"
        strategy.async_checkpoint = True
        trainer.save_checkpoint(self.folder / f"{name}.async")
        strategy.async_checkpoint = False


def resume(folder: Path) -> dict[str, Any]:
    """A run of two epochs, and the second one from each of what the first one left."""
    found: dict[str, Any] = {}
    for name, layout in LAYOUTS.items():
        place = folder.parent / name
        run = trainer_of(place, piped(**layout), 2, Saves(place, 0))
        first = fit(run, made(**KINDS[name]))
        whole = first.losses[4:], first.rates[4:]
        found[f"{name} due"] = whole[0]
        for ending in ("ckpt", "file", "async"):
            again = trainer_of(place, piped(**layout), 2)
            record = fit(again, made(seed=9, **KINDS[name]), place / f"end.{ending}", weights_only=True)
            found[f"{name} {ending}"] = differing([record.losses, record.rates], list(whole))
        for ending in ("ckpt", "file") if name == "interleaved" else ():
            again = trainer_of(place, piped(**layout), 2)
            start = fit(again, made(seed=9, **KINDS[name]), place / f"start.{ending}")
            found[f"start {ending}"] = differing(start.losses, first.losses)
        found[f"{name} kinds"] = [is_sharded_checkpoint(place / f"end.{each}") for each in ("ckpt", "file", "async")]
    return found


class Replaces(Callback):
    """Saves where the fit has just come from."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.save_checkpoint(self.path)


def after(folder: Path) -> dict[str, Any]:
    """What is saved when the fit is over, and when no batch has come yet: the same as before."""
    place = folder.parent / "interleaved"
    layout = LAYOUTS["interleaved"]
    model = made(seed=9)
    again = folder / "again"
    run = trainer_of(again, piped(**layout), 1, Saves(again, 0))
    fit(run, model, place / "end.file")  # nothing is left to do
    late = folder / "late"
    run.save_checkpoint(late / "idle.ckpt")
    if dist.get_rank() == 0:
        shutil.copytree(place / "end.ckpt", folder / "replaced.ckpt")
    dist.barrier()
    run = trainer_of(again, piped(**layout), 2, Replaces(folder / "replaced.ckpt"), Saves(again, 1))
    fit(run, model, folder / "replaced.ckpt")
    run.save_checkpoint(late / "whole.ckpt")
    run.strategy.checkpoint_format = "single"
    run.save_checkpoint(late / "whole.file")
    dist.barrier()
    due = torch.load(place / "end.file")
    end = torch.load(again / "end.file")
    found = {
        "replaced": parts(read_checkpoint(folder / "replaced.ckpt"), due),
        "start": differing(torch.load(again / "start.file")["optimizer_states"], due["optimizer_states"]),
        "idle": parts(read_checkpoint(late / "idle.ckpt"), due),
        "folder": parts(read_checkpoint(late / "whole.ckpt"), end),
        "file": parts(torch.load(late / "whole.file"), end),
        "module": differing(dict(model.state_dict()), dict(end["state_dict"])),
    }
    dist.barrier()
    return found


def parts(found: dict[str, Any], due: dict[str, Any]) -> list[str]:
    """Where weights and optimizers of two checkpoints differ; read or not."""
    weights = {name: found["state_dict"][name] for name in found["state_dict"]}
    states = [
        {
            "state": {number: {key: state[key] for key in state} for number, state in each["state"].items()},
            "param_groups": each["param_groups"],
        }
        for each in found["optimizer_states"]
    ]
    return differing(weights, dict(due["state_dict"])) + differing(states, due["optimizer_states"])


@contextmanager
def reading() -> Iterator[list[str]]:
    """The entries that are read meanwhile."""
    keys: list[str] = []
    former = EntryReader.read

    def read(self: EntryReader, wanted: Any) -> Any:
        keys.extend(saved.key for saved, _ in wanted)
        return former(self, wanted)

    EntryReader.read = read  # type: ignore[method-assign]
    try:
        yield keys
    finally:
        EntryReader.read = former  # type: ignore[method-assign]


class Own(Callback):
    """The names of the parameters whose states this rank has."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        has = {id(parameter) for parameter in trainer.optimizers[0].state}
        self.names = [name for name, parameter in pl_module.named_parameters() if id(parameter) in has]


def read_parts(folder: Path) -> dict[str, Any]:
    """Which states a rank reads when a fit goes on."""
    own = Own()
    run = trainer_of(folder, piped(**LAYOUTS["interleaved"]), 2, own)
    with reading() as keys:
        fit(run, made(seed=9), folder.parent / "interleaved" / "end.ckpt")
    start, end = "optimizer_states.0.state.", ".exp_avg"
    names = [key.removeprefix(start).removesuffix(end) for key in keys if key.endswith(end)]
    return {"read": sorted(names), "own": sorted(own.names)}


def habits(folder: Path) -> dict[str, Any]:
    """ModelCheckpoint in the middle of an epoch; its files after the fit."""
    return habits_of(folder, lambda: piped("zbv-zero-bubble", 2))


def habits_of(folder: Path, strategy: Callable[[], Any]) -> dict[str, Any]:
    """See `habits`."""
    best = ModelCheckpoint(folder, "best-{step}", monitor="val_loss", mode="max", save_top_k=2, save_last=True)
    often = ModelCheckpoint(folder, "often-{step}", every_n_train_steps=3, save_top_k=-1)
    model = made()
    run = trainer_of(folder, strategy(), 2, best, often, val_check_interval=2)
    run.fit(model, loader(), loader())
    found: dict[str, Any] = {"names": sorted(path.name for path in folder.iterdir() if path.suffix == ".ckpt")}
    for which in ("best", "last"):
        (validated,) = run.validate(model, loader(), ckpt_path=which, verbose=False)
        (tested,) = run.test(model, loader(), ckpt_path=which, verbose=False)
        found[which] = [validated["val_loss"], tested["test_loss"]]
    found["score"] = float(best.best_model_score or 0)
    again = trainer_of(folder, strategy(), 3, ModelCheckpoint(folder))
    found["losses"] = fit(again, made(seed=9), "last").losses
    return found


class Fails(Callback):
    def __init__(self, rank: int | None) -> None:
        self.rank = rank

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 2 and self.rank in (None, trainer.global_rank):
            raise RuntimeError("as planned")


def exception(folder: Path) -> dict[str, Any]:
    callbacks = [Fails(None), OnExceptionCheckpoint(folder)]
    told = error_of(lambda: fit(trainer_of(folder, piped(), 1, *callbacks), made()))
    return {"told": told, "left": sorted(path.name for path in folder.iterdir())}


class Returns(Callback):
    """Saves after two batches, and after four loads it again, while a rank has its part only."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.found: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        strategy: Any = trainer.strategy
        paths = [self.folder / "folder", self.folder / "file"]
        if batch_idx == 1:
            for path, strategy.checkpoint_format in zip(paths, ("auto", "single"), strict=True):
                trainer.save_checkpoint(path)
            self.due = own_values(trainer)
        if batch_idx == 3:
            later = own_values(trainer)
            assert differing(later, self.due)
            for path in paths:
                checkpoint = strategy.load_checkpoint(path)
                strategy.load_model_state_dict(checkpoint)
                strategy.load_optimizer_state_dict(checkpoint)
                self.found[path.name] = differing(own_values(trainer), self.due)
            self.refusals(strategy, checkpoint)
            strategy.checkpoint_format = "auto"

    def refusals(self, strategy: Any, checkpoint: dict[str, Any]) -> None:
        def load(**changes: Any) -> Callable[[], Any]:
            strict = changes.pop("strict", True)
            state = checkpoint["state_dict"] | changes
            wrong = {name: value for name, value in state.items() if value is not None}
            return lambda: strategy.load_model_state_dict({"state_dict": wrong}, strict=strict)

        one = torch.ones(1)
        self.found["missing"] = error_of(load(**{"blocks.0.up.weight": None}))
        self.found["unexpected"] = error_of(load(other=one))
        self.found["lenient"] = error_of(load(**{"blocks.0.up.weight": None, "other": one, "strict": False}), "nothing")
        shapes = {"blocks.0.up.bias": one, "blocks.3.up.bias": one}
        self.found["shape"] = error_of(load(**shapes))
        states = [{**state, "param_groups": state["param_groups"][:2]} for state in checkpoint["optimizer_states"]]
        self.found["groups"] = error_of(lambda: strategy.load_optimizer_state_dict({"optimizer_states": states}))


def own_values(trainer: pl.Trainer) -> Any:
    module, optimizer = trainer.lightning_module, trainer.optimizers[0]
    options = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    states = {
        name: {key: value.clone() for key, value in optimizer.state[parameter].items()}
        for name, parameter in module.named_parameters()
        if parameter in optimizer.state
    }
    weights = {name: value.detach().clone() for name, value in module.named_parameters()}
    return {"weights": weights, "states": states, "options": options}


def back(folder: Path) -> dict[str, Any]:
    """A module that is divided takes former values."""
    returns = Returns(folder)
    fit(trainer_of(folder, piped(), 1, returns), made())
    model = made()
    before = {name: value.clone() for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    run = trainer_of(folder / "lr", piped(), 3)
    finder = Tuner(run).lr_find(model, loader(), num_training=6)
    assert finder is not None
    left = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    return returns.found | {"points": len(finder.results["lr"]), "finder": differing(left, before)}


class Grows(Model):
    """Has learned to need more."""

    strict = True

    def __init__(self) -> None:
        super().__init__()
        self.shift = torch.nn.Parameter(torch.zeros(6))
        self.strict_loading = self.strict

    def loss(self, tokens: Tensor) -> Tensor:
        return super().loss(tokens) + self.shift.square().mean()


class Lenient(Grows):
    strict = False


class Drops(Bare):
    """Saves half of the type, without what is frozen."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        for name in list(state):
            if name == "scale":
                del state[name]
            elif isinstance(state[name], Tensor):
                state[name] = state[name].cpu().float()


class AddsLate(Callback):
    """Gives an optimizer more when the parameters are divided."""

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        trainer.optimizers[0].add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})


def others(folder: Path) -> dict[str, Any]:
    """Optimizers without states, modules that were less, groups that come late."""
    found: dict[str, Any] = {}
    run = trainer_of(folder, piped(), 2, Saves(folder, 0))
    losses = fit(run, made(Bare)).losses[4:]
    found["bare"] = differing(fit(trainer_of(folder, piped(), 2), made(Bare, 9), folder / "end.ckpt").losses, losses)
    path = folder.parent / "interleaved" / "end.ckpt"
    found["grown"] = error_of(lambda: fit(trainer_of(folder, piped(), 2), made(Grows), path))
    found["lenient"] = len(fit(trainer_of(folder, piped(), 2), made(Lenient), path).losses)
    fit(trainer_of(folder, piped(), 1, Saves(folder / "less", 0)), made(Drops))
    dist.barrier()
    due = [name for name in made(Drops).state_dict() if name != "scale"]
    whole = torch.load(folder / "less" / "end.file")["state_dict"]
    found["less"] = [list(whole) == due, list(read_checkpoint(folder / "less" / "end.ckpt")["state_dict"]) == due]
    found["less"].append({value.dtype for value in whole.values() if isinstance(value, Tensor)} == {torch.float32})
    callbacks = [AddsLate(), Saves(folder / "late", 0)]
    found["late"] = error_of(lambda: fit(trainer_of(folder, piped(), 1, *callbacks), made(Bare)))
    return found


CASES = (resume, after, read_parts, habits, exception, back, others)


def check_all(folder: Path) -> dict[str, Any]:
    """Every case in a folder of its own."""
    found: dict[str, Any] = {}
    for case in CASES:
        place = folder / case.__name__
        place.mkdir(exist_ok=True)
        found[case.__name__] = case(place)
    return found


def killed(folder: Path) -> None:
    """A fit that loses its last stage while it saves a second time, and then wants to save once more."""
    saved: list[int] = []

    def die() -> None:
        saved.append(1)
        if len(saved) == 2 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    often = ModelCheckpoint(folder, "x", every_n_train_steps=2, enable_version_counter=False)
    with before_writing(die):
        fit(trainer_of(folder, piped(), 1, often, OnExceptionCheckpoint(folder)), made())
