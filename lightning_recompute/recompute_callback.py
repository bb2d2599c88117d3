"""The callback: the same recompute under any other strategy, Lightning's own or somebody else's."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from lightning_recompute.forecast import Forecast
from lightning_recompute.plan import Full, RecomputePlan, SaveOps
from lightning_recompute.policy import Granularity, Method, RecomputePolicy
from lightning_recompute.recompute import RecomputeHandle
from lightning_recompute.session import RecomputeSession
from lightning_recompute.stage_forecast import PipelineForecast
from lightning_recompute.strategy import RecomputeStrategy

logger = logging.getLogger(__name__)


class Recompute(pl.Callback):
    """Recomputes a module's blocks under the strategy that the Trainer has: one device, DDP, FSDP, or another.

    The module is patched when fitting begins, after the strategy has put it on its device and wrapped it, and is as
    it was before when fitting ends, also by an exception. While fitting, `plan.yaml` beside the logs says what was
    recomputed where. With `RecomputeStrategy` this callback is not needed. In the Trainer of `pytorch_lightning` it
    works when given in a list.

    Args:
        granularity: What is recomputed: `full`, whole blocks; `selective`, only the modules named by `modules` in
            every block; null, nothing.
        method: With granularity `full`: `uniform` (units of `num_layers` blocks, every block recomputed) or `block`
            (the first `num_layers` blocks one by one, the rest kept). Null means `uniform`.
        num_layers: With granularity `full`: blocks per unit (uniform), or how many of the first blocks of each
            block list are recomputed (block). From 1 to the number of blocks. Null means 1 under uniform, all
            under block.
        modules: With granularity `selective`: labels (`core_attn`, `attn`, `mlp`, `norm`, `act`, `moe`) or patterns
            of module names (`*.mlp.experts`). Null means `core_attn`.
        distribute_saved_activations: Keep unit inputs as shards over the tensor-parallel group. Needs such a group.
        offload_saved_activations: Keep unit inputs in host memory. Refused where the run itself is on the CPU.
        memory_budget: Choose the fastest plan whose peak keeps this budget, from a measurement on the first batch: a
            size (`22GiB`), a number of bytes, or a fraction of the device (0.9; of a CPU, of what the process may use,
            divided by the processes of the run on this machine). With several processes it is what each of them may
            need, and all get the same plan. The plan and its predicted peak are logged; a larger batch is planned for
            anew. Excludes the six words above: each has to be left at its default. Not under FSDP.
        plan: An explicit plan, or the path of one that a run wrote (`plan.yaml`). Excludes the six words and
            `memory_budget`.
        blocks: Where the blocks are: dotted path(s) of block lists (`model.layers`) or class name(s) of blocks
            (`LlamaDecoderLayer`). Null: found.
        check: Debugging: compare every value of each block's first replay with its forward and name block and module
            on a difference. Needs the memory that recompute would save.

    Raises:
        ValueError: A value, or a combination of arguments, that would mean nothing. What depends on the model
            or the device (num_layers, blocks, offloading) is checked when fitting begins, and so is a Trainer that
            has RecomputeStrategy, or two of these callbacks.
        FileNotFoundError: `plan` is a path and there is no such file.
        TypeError: An argument of another type.
    """

    def __init__(
        self,
        *,
        granularity: Granularity | None = "full",
        method: Method | None = None,
        num_layers: int | None = None,
        modules: Sequence[str] | None = None,
        distribute_saved_activations: bool = False,
        offload_saved_activations: bool = False,
        memory_budget: str | int | float | None = None,
        plan: str | Path | RecomputePlan | None = None,
        blocks: str | Sequence[str] | None = None,
        check: bool = False,
    ) -> None:
        policy = RecomputePolicy(
            granularity=granularity,
            method=method,
            num_layers=num_layers,
            modules=modules,
            distribute_saved_activations=distribute_saved_activations,
            offload_saved_activations=offload_saved_activations,
        )
        self._session = RecomputeSession(policy, plan, blocks, check, memory_budget)
        if distribute_saved_activations:
            raise ValueError(
                "distribute_saved_activations=True needs tensor-parallel ranks to keep the shards; this callback knows "
                "of none. Leave it out"
            )

    @property
    def active_plan(self) -> RecomputePlan | None:
        """What is recomputed where while a module is being fitted; None at any other time."""
        return self._session.active_plan

    @property
    def forecast(self) -> Forecast | PipelineForecast | None:
        """What the plan for `memory_budget` will need; None without one, and before the first batch."""
        return self._session.forecast

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse a Trainer that recomputes by other means, and go to the front of its callbacks.

        At the front, so that a callback that runs training steps when fitting begins (BatchSizeFinder) meets the
        module as it will be trained, and none that raises keeps this one from taking its patches off.
        """
        if stage != "fit":
            return
        if isinstance(trainer.strategy, RecomputeStrategy):
            raise ValueError(
                "RecomputeStrategy and the callback Recompute in one Trainer: both recompute the module's blocks. Give "
                "the arguments to RecomputeStrategy and leave the callback out, or keep the callback and take another "
                "strategy"
            )
        # Lightning sets `callbacks` by name
        others = [callback for callback in vars(trainer)["callbacks"] if callback is not self]
        if any(isinstance(callback, Recompute) for callback in others):
            raise ValueError(
                "two Recompute callbacks in one Trainer: both recompute the module's blocks. Keep one; what differs "
                "from block to block goes into its plan=RecomputePlan(...)"
            )
        # a new list: Lightning is walking through the old one
        vars(trainer)["callbacks"] = [self, *others]

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Patch the module's blocks."""
        with _unwrapped(pl_module) as sharded:
            if self._session.budget is not None and (sharded or _is_sharded(pl_module)):
                raise ValueError(
                    "memory_budget under FSDP: a callback cannot measure shards that another strategy made. Give the "
                    "six words, or a plan; or take Trainer(strategy=RecomputeStrategy(memory_budget=..., "
                    "data_parallel='shard'))"
                )
            self._session.begin(pl_module, trainer, trainer.strategy.root_device, logger)
        if self._session.handle is not None and (unit := _unit_across(self._session.handle, sharded)):
            self._session.end()
            raise ValueError(
                f"{' and '.join(unit)} are one unit, but FSDP shards each by itself: in backward it gathers the "
                "parameters of one block at a time, and a unit needs those of all its blocks. Leave num_layers out (a "
                "unit for each block), or wrap the blocks of a unit together"
            )

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Under a memory budget: make the plan when a batch needs one."""
        self._session.before_batch(pl_module, trainer, batch, batch_idx, logger)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take the patches off."""
        self._session.end()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Take the patches off."""
        self._session.end()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Take the patches off: a search for a learning rate or a batch size ends here, before the end of fit."""
        self._session.end()


@contextmanager
def _unwrapped(module: nn.Module) -> Iterator[set[nn.Module]]:
    """Take FSDP's wrappers off the modules inside, so that blocks are found by their own names and classes.

    Recompute belongs inside a wrapper: in backward the wrapper has gathered the parameters before the replay begins,
    and a replay around it would gather them a second time.

    Yields:
        The modules that were wrapped.
    """
    taken: list[tuple[nn.Module, str, FullyShardedDataParallel]] = []
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if isinstance(child, FullyShardedDataParallel):
                setattr(parent, name, child.module)
                taken.append((parent, name, child))
    try:
        yield {child.module for _, _, child in taken}
    finally:
        for parent, name, child in taken:
            setattr(parent, name, child)


def _is_sharded(module: nn.Module) -> bool:
    return any(isinstance(part, FSDPModule) for part in module.modules())


def _unit_across(handle: RecomputeHandle, sharded: set[nn.Module]) -> tuple[str, ...]:
    """Names of the blocks of a unit of which several are sharded by themselves, if there is one."""
    blocks = [block for block_list in handle.block_lists for block in block_list.blocks]
    names = [name for block_list in handle.block_lists for name in block_list.names]
    for segment in handle.plan.segments:
        inside = slice(segment.start, segment.stop)
        if isinstance(segment.action, Full | SaveOps) and len(sharded.intersection(blocks[inside])) > 1:
            return tuple(names[inside])
    return ()
