"""What two processes do in the tests of how checkpoint folders are saved."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpoint_toys import build, differences, dumped, everything, join_world, train
from distributed import error_of
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.tensor import DTensor
from torch.optim import SGD

from lightning_recompute.checkpoint_loading import (
    load_module_state,
    load_optimizer_states,
    load_sharded,
    read_checkpoint,
)
from lightning_recompute.optimizer_names import named_state
from lightning_recompute.sharded_checkpoint import ShardedSaver, save_sharded

WRITE = FileSystemWriter.write_data


@contextmanager
def before_writing(action: Callable[[], Any]) -> Iterator[None]:
    """While the block runs, every writer does something first."""

    def write(self: FileSystemWriter, plan: Any, planner: Any) -> Any:
        action()
        return WRITE(self, plan, planner)

    FileSystemWriter.write_data = write  # type: ignore[method-assign]
    try:
        yield
    finally:
        FileSystemWriter.write_data = WRITE  # type: ignore[method-assign]


def told(action: Callable[[], Any]) -> str:
    """The error of an action."""
    return error_of(action, "no error")


def names(folder: Path) -> list[str]:
    """What is in a folder, once every rank has come here and before one goes on."""
    dist.barrier()
    found = sorted(os.listdir(folder))
    dist.barrier()
    return found


def epoch(path: Path) -> int:
    return int(read_checkpoint(path)["epoch"])


def small(number: int, **others: Any) -> dict[str, Any]:
    return {"epoch": number, "state_dict": {"weight": torch.full((3,), float(number))}, **others}


def asynchronous(folder: Path) -> dict[str, Any]:
    saver = ShardedSaver()
    module, optimizers = build("tensor", seed=1)
    train(module, optimizers)
    due = everything(module, optimizers)
    go = threading.Event()
    with before_writing(lambda: go.wait(20)):
        saver.save(folder / "a", dumped(module, optimizers), asynchronous=True)
        absent = not (folder / "a").exists()
        train(module, optimizers)
        with torch.no_grad():
            module.mean.zero_()
        go.set()
        saver.save(folder / "b", small(2), asynchronous=True)
    # the second waited for the first
    waited = (folder / "a").exists()
    saver.wait()
    again, others = build("tensor", seed=2)
    checkpoint = read_checkpoint(folder / "a")
    load_module_state(again, checkpoint["state_dict"])
    load_optimizer_states(again, others, checkpoint["optimizer_states"])
    wrong = differences(everything(again, others), due)
    saver.close()
    return {"absent": absent, "waited": waited, "wrong": wrong, "names": names(folder)}


def removal(folder: Path) -> dict[str, Any]:
    saver = ShardedSaver()
    saver.save(folder / "old", small(1))
    dist.barrier()
    begun, go = threading.Event(), threading.Event()
    with before_writing(lambda: begun.set() or go.wait(20)):  # type: ignore[func-returns-value]
        saver.save(folder / "new", small(2), asynchronous=True)
        if dist.get_rank() == 0:
            saver.remove(folder / "old")
        begun.wait(20)
        before = names(folder)
        go.set()
        saver.wait()
    after = names(folder)

    def fail() -> None:
        go.wait(20)
        raise OSError("the disk is full")

    go.clear()
    with before_writing(fail):
        saver.save(folder / "newest", small(3), asynchronous=True)
        if dist.get_rank() == 0:
            saver.remove(folder / "new")
        go.set()
        error = told(saver.wait)
    kept = names(folder)
    if dist.get_rank() == 0:
        saver.remove(folder / "new")
    saver.close()
    return {"before": before, "after": after, "error": error, "kept": kept, "end": names(folder)}


def failing(folder: Path) -> dict[str, Any]:
    """One rank cannot write: both say so, and what was there stays."""

    def fail() -> None:
        if dist.get_rank() == 1:
            raise OSError("the disk is full")

    saver = ShardedSaver()
    module, optimizers = build("tensor", seed=1)
    saver.save(folder / "a", small(1))
    with before_writing(fail):
        now = told(lambda: saver.save(folder / "a", {**dumped(module, optimizers), "epoch": 2}))
        saver.save(folder / "a", {**dumped(module, optimizers), "epoch": 2}, asynchronous=True)
        later = told(lambda: saver.save(folder / "a", small(3)))
    found = {"now": now, "later": later, "epoch": epoch(folder / "a"), "names": names(folder)}
    saver.save(folder / "a", small(4))
    saver.close()
    return found | {"end": epoch(folder / "a")}


def replacing(folder: Path) -> dict[str, Any]:
    """Every rank has a path of its own; the first one's counts."""
    mine = folder / f"rank{dist.get_rank()}"
    save_sharded(mine, small(1))
    save_sharded(mine, small(2))
    found = {"names": names(folder), "epoch": epoch(folder / "rank0")}
    if dist.get_rank() == 0:
        (folder / "file").write_text("x")
    dist.barrier()
    save_sharded(folder / "file", small(3))
    return found | {"file": epoch(folder / "file"), "content": names(folder / "file")}


def refused(folder: Path) -> dict[str, Any]:
    module, _ = build("tensor", seed=1)
    hidden = small(1, callbacks={"mine": Holder(module.up.weight.detach())})

    def only_here() -> Any:
        return folder / "x" if dist.get_rank() == 0 else "s3://bucket/x"

    return {
        "remote": told(lambda: save_sharded("memory://x", small(1))),
        "hidden": told(lambda: save_sharded(folder / "x", hidden)),
        "one rank": told(lambda: save_sharded(only_here(), small(1))),
        "names": names(folder),
    }


class Holder:
    def __init__(self, value: DTensor) -> None:
        self.value = value


def others(folder: Path) -> dict[str, Any]:
    """What callbacks and users add: DTensors whole, all else as rank 0 has it."""
    rank = dist.get_rank()
    module, _ = build("tensor+shard" if dist.get_world_size() == 4 else "tensor", seed=1)
    weight = module.up.weight.detach()
    part = {"nested": [weight, (weight + 1, "text")], "direct": weight + 2, "whose": torch.tensor(rank)}
    # statistics of normalisation layers differ between ranks, and belong together
    state = {**module.state_dict(), **{f"mean{number}": torch.full((4,), float(rank)) for number in range(8)}}
    save_sharded(folder / "a", {"state_dict": state, "callbacks": {"EMA": part}, "mine": {"rank": rank}})
    found = read_checkpoint(folder / "a", weights_only=True)
    ema, due = found["callbacks"]["EMA"], weight.full_tensor()
    return {
        "list": torch.equal(ema["nested"][0], due),
        "tuple": torch.equal(ema["nested"][1][0], due + 1) and ema["nested"][1][1] == "text",
        "dict": torch.equal(ema["direct"], due + 2),
        "whose": [
            int(ema["whose"]),
            found["mine"]["rank"],
            sum(float(found["state_dict"][f"mean{number}"][0]) for number in range(8)),
        ],
        "types": [type(part).__name__ for part in ema["nested"]],
    }


def stages(folder: Path) -> dict[str, Any]:
    """As pipeline stages: each rank has parameters of its own under global names."""
    rank = dist.get_rank()
    torch.manual_seed(3)
    whole = nn.ModuleDict({"0": nn.Linear(2, 3), "1": nn.Linear(3, 2)})
    mine = nn.ModuleDict({str(rank): whole[str(rank)]})
    optimizer = SGD(mine.parameters(), lr=0.1, momentum=0.5)
    for parameter in mine.parameters():
        parameter.grad = torch.full_like(parameter, 1.0 + rank)
    optimizer.step()
    due = {name: value.clone() for name, value in mine.state_dict().items()}
    save_sharded(folder / "a", {"state_dict": mine.state_dict(), "optimizer_states": [named_state(optimizer, mine)]})
    torch.manual_seed(4)
    again = nn.ModuleDict({"0": nn.Linear(2, 3), "1": nn.Linear(3, 2)})
    all_of_it = SGD(again.parameters(), lr=0.2, momentum=0.5)
    checkpoint = read_checkpoint(folder / "a")
    load_module_state(again, checkpoint["state_dict"])
    load_optimizer_states(again, [all_of_it], checkpoint["optimizer_states"])
    return {
        "wrong": [name for name, value in due.items() if not torch.equal(value, again.state_dict()[name])],
        "momenta": [float(all_of_it.state[value]["momentum_buffer"].mean()) for value in again.parameters()],
        "groups": len(all_of_it.param_groups[0]["params"]),
    }


def still_whole(folder: Path) -> dict[str, Any]:
    """A sharded module after a forward without backward: parameters are not those that optimizers have."""
    module, optimizers = build("shard", seed=1)
    train(module, optimizers)
    due = everything(module, optimizers)
    module.unshard()
    states = [named_state(optimizer, module) for optimizer in optimizers]
    module.unshard()
    save_sharded(folder / "a", {"state_dict": module.state_dict(), "optimizer_states": states})
    again, others = build("shard", seed=2)
    again.unshard()
    load_sharded(folder / "a", again, others)
    return {"wrong": differences(everything(again, others), due), "name": states[0]["parameter_names"][0]}


CASES = (still_whole, asynchronous, removal, failing, replacing, refused, others, stages)


def check_all(folder: Path) -> dict[str, Any]:
    """Every case in a folder of its own."""
    join_world()
    found = {}
    for case in CASES:
        place = folder / case.__name__
        place.mkdir(exist_ok=True)
        dist.barrier()
        found[case.__name__] = case(place)
    return found


def dying(folder: Path) -> None:
    """Save, then save again and lose rank 1 in the middle of it."""
    join_world()
    saver = ShardedSaver()
    module, optimizers = build("tensor", seed=1)
    for number, path in enumerate((folder / "step=1.ckpt", folder / "last.ckpt")):
        saver.save(path, {**dumped(module, optimizers), "epoch": number})

    def die() -> None:
        if dist.get_rank() == 1:
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)

    with before_writing(die):
        saver.save(folder / "last.ckpt", {**dumped(module, optimizers), "epoch": 7})


def killed(folder: Path) -> None:
    """The same, and rank 0 dies with the other, before it could clean up."""
    join_world()
    saver = ShardedSaver()
    saver.save(folder / "last.ckpt", small(1))
    with before_writing(lambda: os.kill(os.getpid(), signal.SIGKILL)):
        saver.save(folder / "last.ckpt", small(7), asynchronous=True)
        saver.wait()
