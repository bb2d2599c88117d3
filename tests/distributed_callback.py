"""Fits of two processes under each of Lightning's distributed strategies, without and with the callback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed.fsdp._init_utils as fsdp_init
import torch.distributed.fsdp.fully_sharded_data_parallel as fsdp
from distributed import NUM_PROCESSES
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from lightning_modules import Block, Net, calls, loader, trainer
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._common_utils import _FSDPDeviceHandle

from lightning_recompute.recompute_callback import Recompute


class FsdpOnCpu(FSDPStrategy):
    """Lightning refuses FSDPStrategy itself on the CPU; FSDP refuses for want of an accelerator (see below)."""


def on_the_cpu(state: Any, module: Any, ignored: Any, device_id: Any) -> Any:
    state._device_handle = _FSDPDeviceHandle.from_device(torch.device("cpu"))
    return state


class Net2(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.05)


class Sharded(Net2):
    """Shards its blocks and itself, as torch's tutorials do."""

    sharded = False

    def configure_model(self) -> None:
        if not self.sharded:
            self.sharded = True
            mesh = self.device_mesh["data_parallel"]
            for block in self.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(self, mesh=mesh)


class Keep(pl.Callback):
    """Notes what a process ended with, in a file: of spawned processes nothing else comes back."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.weights: dict[str, Any] = {}

    def on_train_end(self, trainer: pl.Trainer, pl_module: Net) -> None:
        parameters = pl_module.named_parameters()  # of sharded ones this rank's part
        self.weights = {name: getattr(p, "_local_tensor", p).detach().clone() for name, p in parameters}
        if self.path is not None and trainer.is_global_zero:
            self.path.write_text(str(calls["train"]))


def make(name: str) -> tuple[Any, type[Net]]:
    if name == "ddp":
        return DDPStrategy(process_group_backend="gloo"), Net2
    if name == "fsdp":
        return FsdpOnCpu(auto_wrap_policy={Block}, process_group_backend="gloo"), Net2
    sizes = {"data_parallel_size": NUM_PROCESSES, "tensor_parallel_size": 1}
    return ModelParallelStrategy(process_group_backend="gloo", **sizes), Sharded


def train(strategy: Any, module: type[Net], keep: Keep, recompute: bool, **words: Any) -> Net:
    pl.seed_everything(1, verbose=False)
    built = module()
    callbacks = [keep, *([Recompute(**words)] if recompute else [])]
    trainer(strategy, devices=NUM_PROCESSES, callbacks=callbacks, limit_val_batches=0).fit(built, loader(shuffle=True))
    return built


def strategies(folder: Path) -> dict[Any, Any]:
    """In each rank: what fits under each strategy, without and with the callback, ended with."""
    fsdp_init._init_device_handle = fsdp._init_device_handle = on_the_cpu
    found: dict[Any, Any] = {}
    for name in ("ddp", "fsdp", "fully_shard"):
        for recompute in (False, True):
            calls.clear()
            strategy, module = make(name)
            keep = Keep()
            built = train(strategy, module, keep, recompute)
            found[name, recompute] = {
                "losses": built.losses,
                "calls": calls["train"],
                "weights": keep.weights,
                "patched": sum("forward" in vars(part) for part in built.blocks.modules()),
            }
    try:
        train(make("fsdp")[0], Net2, Keep(), recompute=True, num_layers=2)
    except ValueError as error:
        found["pairs"] = str(error)
    return found


def spawned(folder: Path) -> dict[str, Any]:
    """In one process: the weights that a fit in spawned processes brought back, and its calls of blocks."""
    path = folder / "calls"
    built = train(DDPStrategy(start_method="spawn", process_group_backend="gloo"), Net2, Keep(path), recompute=True)
    return {"weights": built.state_dict(), "calls": int(path.read_text())}
