"""What processes do in the tests of checkpoint folders: every layout saves, every layout loads all of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpoint_toys import (
    EVERY,
    LAYOUTS,
    Toy,
    as_is,
    build,
    differences,
    dumped,
    everything,
    join_world,
    laid_out,
    make_optimizers,
    train,
)

from lightning_recompute.checkpoint_loading import load_sharded
from lightning_recompute.optimizer_names import without_names
from lightning_recompute.sharded_checkpoint import ShardedSaver

FILES = (EVERY[0], EVERY[-1])


def saved(folder: Path, layout: str, ending: str) -> Path:
    """What a layout saved: `ckpt`, `file`, and `values` to compare with. Groups of processes have folders beside."""
    return folder.parent / f"{layout}.{ending}"


def on_first(action: Callable[[], Any]) -> None:
    """Do something on rank 0; the others wait."""
    if not dist.is_initialized():
        action()
        return
    if dist.get_rank() == 0:
        action()
    dist.barrier()


def join() -> int:
    """Join the other processes, if this is one of several."""
    size = int(os.environ.get("WORLD_SIZE", 1))
    if size > 1:
        join_world()
    return size


def save_all(folder: Path) -> None:
    """Save under each layout of this number of processes, as a folder and as one file."""
    size = join()
    saver = ShardedSaver()
    for index, layout in enumerate(LAYOUTS[size]):
        module, optimizers = build(layout, seed=size * 10 + index)
        train(module, optimizers)
        values = everything(module, optimizers)
        on_first(lambda: torch.save(values, saved(folder, layout, "values")))  # noqa: B023  # called at once
        saver.save(saved(folder, layout, "ckpt"), dumped(module, optimizers))
        whole = saver.gather(dumped(module, optimizers))
        on_first(lambda: torch.save(whole, saved(folder, layout, "file")))  # noqa: B023
    saver.close()


def load_all(folder: Path) -> dict[str, list[str]]:
    """Load every folder and file under each layout of this number of processes; where values differ."""
    size = join()
    return loaded(folder, size)


def save_and_load_all(folder: Path) -> dict[str, list[str]]:
    """`save_all` and `load_all` in one group of processes: the last one that saves."""
    save_all(folder)
    return loaded(folder, int(os.environ.get("WORLD_SIZE", 1)))


def loaded(folder: Path, size: int) -> dict[str, list[str]]:
    """See `load_all`."""
    found = {}
    for layout in LAYOUTS[size]:
        module = laid_out(Toy(seed=5), layout)
        for number, origin in enumerate(EVERY):
            due = torch.load(saved(folder, origin, "values"))
            # files are the same from anywhere
            for ending in ("ckpt", "file") if origin in FILES else ("ckpt",):
                # numbers of an ordinary file mean its own order
                optimizers = make_optimizers(module, reverse=ending == "ckpt")
                checkpoint = load_sharded(saved(folder, origin, ending), module, optimizers)
                # the whole once; collectives take their time
                values = everything(module, optimizers) if number == 0 else everything(module, optimizers, copy=as_is)
                wrong = differences(values, due)
                wrong += [] if module.head.weight is module.embed.weight else ["no longer tied"]
                wrong += [] if checkpoint["loops"] == {"fit_loop": {"progress": [1, 2]}} else ["loops"]
                if number == 0:  # training goes on from it
                    train(module, optimizers, steps=1)
                found[f"{origin}.{ending} -> {layout}"] = wrong
    return found


def names_are_left_out(folder: Path, layout: str) -> bool:
    """Whether a whole checkpoint has the optimizer states of an ordinary one."""
    states = torch.load(saved(folder, layout, "file"))["optimizer_states"]
    return all(state == without_names(state) and set(state) == {"state", "param_groups"} for state in states)
