"""Training that goes on under another layout: saved under each, resumed under each."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import torch
from grouped_modules import Momentum, Plain, loader, trainer_of
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_recompute.strategy import RecomputeStrategy

NUM_STEPS = 3
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"one": {}},
    2: {
        "dp2": {},
        "dp2 shard": {"data_parallel": "shard"},
        "tp2": {"tensor_parallel_size": 2, "sequence_parallel": True},
    },
    4: {"tp2 x dp2 shard": {"tensor_parallel_size": 2, "data_parallel": "shard"}},
}
KINDS: dict[str, type[Plain]] = {"adam": Plain, "momentum": Momentum}


@functools.cache
def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


def train(folder: Path, layout: str, kind: str, resumed: Path | None) -> list[float]:
    """One epoch with a checkpoint at its end, or the first steps of the next one; the mean loss of each step."""
    torch.manual_seed(0)
    module = KINDS[kind]()
    ends = ModelCheckpoint(folder, filename=f"{layout}, {kind}")
    trainer = trainer_of(
        folder,
        RecomputeStrategy(**LAYOUTS[world_size()][layout]),
        devices=world_size(),
        max_epochs=1 if resumed is None else 2,
        limit_train_batches=5 if resumed is None else NUM_STEPS,
        enable_checkpointing=resumed is None,
        callbacks=[ends] if resumed is None else [],
        num_sanity_val_steps=0,
    )
    rows = 2 if "dp2" in layout else 4
    trainer.fit(module, loader(trainer, rows), ckpt_path=resumed)
    losses = torch.tensor(module.losses, dtype=torch.float64)
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(losses)
        losses /= torch.distributed.get_world_size()
    return losses.tolist()


def save(folder: Path) -> dict[str, Any]:
    kept = folder.parent / "kept"
    return {f"{layout}, {kind}": train(kept, layout, kind, None) for layout in LAYOUTS[world_size()] for kind in KINDS}


def resume(folder: Path) -> dict[str, Any]:
    found = {}
    for layout in LAYOUTS[world_size()]:
        for path in sorted((folder.parent / "kept").glob("*.ckpt")):
            source, _, kind = path.stem.partition(", ")
            if kind == kind_of(source, layout) or source == layout == "one":
                found[f"{path.stem} -> {layout}"] = train(folder, layout, kind, path)
    return found


def kind_of(source: str, target: str) -> str:
    """Each pair of layouts with one optimizer, each optimizer with half of the pairs."""
    layouts = [layout for group in LAYOUTS.values() for layout in group]
    return list(KINDS)[(layouts.index(source) + layouts.index(target)) % len(KINDS)]
