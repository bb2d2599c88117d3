"""Training that goes on under another layout: saved under each, resumed under each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from distributed import settle_collectives, world_size
from grouped_modules import Momentum, Plain, loader, trainer_of
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from piped_checkpoint_checks import Saves, parts

from lightning_recompute.checkpoint_loading import read_checkpoint
from lightning_recompute.strategy import RecomputeStrategy

NUM_STEPS = 3
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"one": {}},
    2: {
        "dp2": {},
        "dp2 shard": {"data_parallel": "shard"},
        "tp2": {"tensor_parallel_size": 2, "sequence_parallel": True},
        "pp2": {"pipeline_parallel_size": 2, "num_microbatches": 2},
        "pp2 zbv": {"pipeline_parallel_size": 2, "virtual_pipeline_size": 2, "schedule": "zbv-zero-bubble"},
    },
    4: {
        "tp2 x dp2 shard": {"tensor_parallel_size": 2, "data_parallel": "shard"},
        "tp2 x pp2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "sequence_parallel": True},
        "pp2 x dp2": {"pipeline_parallel_size": 2, "virtual_pipeline_size": 2, "schedule": "interleaved-1f1b"},
        "pp2 x dp2 shard": {"pipeline_parallel_size": 2, "data_parallel": "shard"},
    },
}
ORDER = [layout for layouts in LAYOUTS.values() for layout in layouts]
KINDS: dict[str, type[Plain]] = {"adam": Plain, "momentum": Momentum}


class Losses(Callback):
    """The loss of each batch."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *_: Any) -> None:
        self.found.append(float(outputs["loss"]))


def train(folder: Path, layout: str, kind: str, resumed: Path | None) -> list[float]:
    """One epoch with a checkpoint at its end, or the first steps of the next one; the mean loss of each step."""
    torch.manual_seed(0)
    module = KINDS[kind](num_layers=4).double()
    losses = Losses()
    ends = ModelCheckpoint(folder, filename=f"{layout}, {kind}")
    trainer = trainer_of(
        folder,
        RecomputeStrategy(**LAYOUTS[world_size()][layout]),
        devices=world_size(),
        max_epochs=1 if resumed is None else 2,
        limit_train_batches=5 if resumed is None else NUM_STEPS,
        enable_checkpointing=resumed is None,
        callbacks=[losses, ends] if resumed is None else [losses],
        num_sanity_val_steps=0,
    )
    if saves := resumed is None and "pp2" in layout and kind == "adam":
        trainer.callbacks.append(Saves(folder.parent / layout, 0))  # type: ignore[attr-defined]
    rows = 2 if "dp2" in layout else 4
    trainer.fit(module, loader(trainer, rows), ckpt_path=resumed)
    if saves:
        assert_one_file(trainer, module, folder.parent / layout)
    found = torch.tensor(losses.found, dtype=torch.float64)
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(found)
        found /= torch.distributed.get_world_size()
    return found.tolist()


def assert_one_file(trainer: pl.Trainer, module: Plain, folder: Path) -> None:
    """One file holds what the folder does, and what both do after the fit."""
    trainer.save_checkpoint(folder / "late.ckpt")
    trainer.strategy.checkpoint_format = "single"  # type: ignore[attr-defined]
    trainer.save_checkpoint(folder / "late.file")
    torch.distributed.barrier()
    due = torch.load(folder / "end.file")
    for name in ("end.ckpt", "late.ckpt", "late.file"):
        assert parts(read_checkpoint(folder / name), due) == [], name
    assert list(due["state_dict"]) == list(module.state_dict())
    assert len(due["optimizer_states"][0]["state"]) == len(list(module.parameters()))


def save(folder: Path) -> dict[str, Any]:
    settle_collectives()
    kept = folder.parent / "kept"
    return {f"{layout}, {kind}": train(kept, layout, kind, None) for layout in LAYOUTS[world_size()] for kind in KINDS}


def resume(folder: Path, chosen: Callable[[str, str], bool] | None = None) -> dict[str, Any]:
    """The pairs of layouts that are always tried."""
    settle_collectives()
    found = {}
    for layout in LAYOUTS[world_size()]:
        for path in sorted((folder.parent / "kept").glob("*.ckpt")):
            source, _, kind = path.stem.partition(", ")
            if not (chosen or is_tried)(source, layout):
                continue
            if kind == kind_of(source, layout) or source == layout == "one":
                found[f"{path.stem} -> {layout}"] = train(folder, layout, kind, path)
    return found


def resume_rest(folder: Path) -> dict[str, Any]:
    """The other pairs, and those of one process to compare with."""
    return resume(folder, lambda source, target: not is_tried(source, target) or source == target == "one")


def is_tried(source: str, target: str) -> bool:
    """Without a pipeline all pairs; each layout with one goes to itself, to one process and to another, and back."""
    if source == target or "one" in (source, target) or not ("pp2" in source or "pp2" in target):
        return True
    return (ORDER.index(source) + 3 * ORDER.index(target) + 2) % 7 == 0


def kind_of(source: str, target: str) -> str:
    """Each pair of layouts with one optimizer, each optimizer with half of the pairs."""
    return list(KINDS)[(ORDER.index(source) + ORDER.index(target)) % len(KINDS)]
