"""Fits whose processes each have a part of the module, with checkpoints: what two ranks do in the tests."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from distributed import error_of
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.tuner import Tuner
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_recompute.checkpoint_loading import is_sharded_checkpoint
from lightning_recompute.gpt import GPT
from lightning_recompute.strategy import RecomputeStrategy

LAYOUTS: dict[str, dict[str, Any]] = {"tensor": {"tensor_parallel_size": 2}, "shard": {"data_parallel": "shard"}}
SMALL: dict[str, Any] = {"num_layers": 2, "hidden_size": 16, "num_heads": 4, "vocab_size": 32, "max_length": 8}


def make(
    layout: str, checkpoint_format: Any = "auto", async_checkpoint: bool = False, **options: Any
) -> RecomputeStrategy:
    return RecomputeStrategy(
        **LAYOUTS.get(layout, {}), checkpoint_format=checkpoint_format, async_checkpoint=async_checkpoint, **options
    )


def make_model(seed: int = 0) -> GPT:
    torch.manual_seed(seed)
    return GPT(**SMALL, tied_head=True, decay_steps=20, warmup_steps=2)


def batches() -> DataLoader[Tensor]:
    tokens = torch.randint(32, (16, 9), generator=torch.Generator().manual_seed(1))
    return DataLoader(list(tokens), batch_size=4)  # type: ignore[arg-type]


def trainer(folder: Path, strategy: Any, epochs: int, *callbacks: Callback, **arguments: Any) -> pl.Trainer:
    # Lightning takes it out of the environment at the end of a fit
    size = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))
    return pl.Trainer(
        default_root_dir=folder,
        strategy=strategy,
        accelerator="cpu",
        devices=size,
        max_epochs=epochs,
        callbacks=[*callbacks, ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **arguments,
    )


def fit(folder: Path, strategy: Any, epochs: int, ckpt_path: Any = None, **arguments: Any) -> dict[str, Tensor]:
    """The weights after some epochs."""
    weights_only = arguments.pop("weights_only", None)
    model = arguments.pop("model", None) or make_model(0 if ckpt_path is None else 9)
    run = trainer(folder, strategy, epochs, *arguments.pop("callbacks", ()), **arguments)
    run.fit(model, batches(), ckpt_path=ckpt_path, weights_only=weights_only)
    return {name: value.clone() for name, value in model.state_dict().items()}


def differing(found: dict[str, Tensor], due: dict[str, Tensor]) -> list[str]:
    assert found.keys() == due.keys()
    return [name for name, value in due.items() if not torch.equal(found[name], value)]


def whole(model: GPT) -> dict[str, Tensor]:
    """Weights that may still be in parts; collective."""
    values = model.state_dict().items()
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in values}


def told(action: Callable[[], Any]) -> str:
    """The error of an action."""
    return error_of(action, "no error")


class Box:
    """No tensor, number or the like."""


class Boxed(GPT):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["box"] = Box()


class FailsOnOne(Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            raise RuntimeError("as planned")


def fit_all(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    saved, due = {}, {}
    for layout in LAYOUTS:
        place = folder / layout
        due[layout] = fit(place / "due", make(layout), 2)
        saved[layout] = fit(place, make(layout), 1)
        fit(place / "async", make(layout, async_checkpoint=True), 1)
        fit(place / "file", make(layout, "single"), 1)
        dist.barrier()
        found[f"{layout} kinds"] = [
            is_sharded_checkpoint(place / kind / "epoch=0.ckpt") for kind in (".", "async", "file")
        ]
        for kind in (".", "async", "file"):
            again = fit(place / "again" / kind, make(layout), 2, place / kind / "epoch=0.ckpt")
            found[f"{layout} from {kind}"] = differing(again, due[layout])
    for layout in LAYOUTS:
        for origin in LAYOUTS:
            again = fit(folder / "across", make(layout), 1, folder / origin / "epoch=0.ckpt")
            found[f"{origin} -> {layout}"] = differing(again, saved[origin])
    torch.save(saved, folder / f"saved{dist.get_rank()}.pt")
    return found | others(folder / "others")


def others(folder: Path) -> dict[str, Any]:
    boxed = lambda: Boxed(**SMALL, decay_steps=20)  # noqa: E731
    fit(folder, make("tensor"), 1, model=boxed())
    path = folder / "epoch=0.ckpt"
    found = {
        "refused": told(lambda: fit(folder, make("tensor"), 2, path, model=boxed())),
        "trusted": told(lambda: fit(folder, make("tensor"), 2, path, model=boxed(), weights_only=False)),
    }
    model = make_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    run = trainer(folder / "lr", make("tensor"), 3)
    finder = Tuner(run).lr_find(model, batches(), num_training=6)
    assert finder is not None
    found["lr"] = [len(finder.results["lr"]), differing(dict(model.state_dict()), before)]
    callbacks = [FailsOnOne(), OnExceptionCheckpoint(folder / "exception")]
    found["exception"] = told(lambda: fit(folder / "exception", make("tensor"), 1, callbacks=callbacks))
    found["left"] = sorted(os.listdir(folder / "exception")) if (folder / "exception").exists() else []
    plugin = [AsyncCheckpointIO()]
    found["plugin"] = told(lambda: fit(folder / "plugin", make("tensor"), 1, plugins=plugin))
    run = trainer(folder / "after", make("tensor"), 1)
    model = make_model()
    run.fit(model, batches())
    run.save_checkpoint(folder / "after" / "end.ckpt")
    found["after"] = is_sharded_checkpoint(folder / "after" / "end.ckpt")
    run = trainer(folder / "after", make("shard"), 1)
    found["validated"] = told(lambda: run.validate(make_model(3), batches(), ckpt_path=folder / "after" / "end.ckpt"))
    for layout in LAYOUTS:
        for saved in ("epoch=0.ckpt", "file/epoch=0.ckpt"):
            due = torch.load(folder.parent / "tensor" / "file" / "epoch=0.ckpt")["state_dict"]
            with torch.device("meta"):
                model = make_model()
            fit(folder / "meta", make(layout), 1, folder.parent / "tensor" / saved, model=model)
            found[f"meta {layout} {saved}"] = differing(whole(model), due)
    return found
