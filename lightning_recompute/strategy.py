"""The strategy: recompute as one argument of Lightning's Trainer."""

from __future__ import annotations

import itertools
import logging
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import ClassVar

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.utilities.memory import is_oom_error
from torch.distributed.constants import default_pg_timeout
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from lightning_recompute.blocks import BlockList
from lightning_recompute.lightning_private import (
    ReplicatedStrategy,
    StartMethod,
    accept_compiled_modules,
    is_compiled,
    meet_other_lightning,
)
from lightning_recompute.plan import Action, Full, Keep, RecomputePlan, SaveOps, Selective
from lightning_recompute.policy import Granularity, Method, RecomputePolicy
from lightning_recompute.recompute import RecomputeHandle, apply_recompute
from lightning_recompute.version import __version__

logger = logging.getLogger(__name__)

PLAN_FILE = "plan.yaml"


class RecomputeStrategy(ReplicatedStrategy):
    """Trains any LightningModule in less memory, with the same numbers to the bit.

    In forward each unit (one or some consecutive blocks of the model) keeps only its inputs; in backward it is
    run again. On one device everything else is what Lightning does by default; with several, one process a
    device trains on its part of the data and torch's DistributedDataParallel averages the gradients.

    `RecomputeStrategy()` alone recomputes every block, one at a time. While fitting, `plan.yaml` beside the
    logs says what was recomputed where; after fit, or an exception, the module is as it was before.

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
        plan: An explicit plan, or the path of one that a run wrote (`plan.yaml`). Excludes the six words above: each
            has to be left at its default.
        blocks: Where the blocks are: dotted path(s) of block lists (`model.layers`) or class name(s) of blocks
            (`LlamaDecoderLayer`). Null: found.
        find_unused_parameters: With several processes: look for parameters that got no gradient in each step.
        process_group_backend: With several processes: the backend of torch.distributed (`nccl`, `gloo`). Null: the
            device's usual one.
        timeout: With several processes: how long a collective waits for the others before it fails.
        start_method: With several processes: how they are started. `popen` runs the script again in each; `spawn`,
            `fork` and `forkserver` use multiprocessing, where only the weights and metrics come back.
        accelerator: The accelerator; usually set through the Trainer.
        parallel_devices: The devices of this node, one a process; usually set through the Trainer.
        cluster_environment: Tells ranks and addresses; usually found by the Trainer.
        checkpoint_io: Writes and reads checkpoint files; usually set through the Trainer's plugins.
        precision_plugin: The precision; usually set through the Trainer.

    Raises:
        ValueError: A value, or a combination of arguments, that would mean nothing. What depends on the model
            or the device (num_layers, blocks, offloading) is checked when fitting begins.
        FileNotFoundError: `plan` is a path and there is no such file.
        TypeError: An argument of another type.
    """

    registered_names: ClassVar[dict[str, StartMethod]] = {
        "recompute": "popen",
        "recompute_spawn": "spawn",
        "recompute_fork": "fork",
        # Lightning lower-cases what the command line gives as a class name without any option
        "recomputestrategy": "popen",
    }

    def __init__(
        self,
        *,
        granularity: Granularity | None = "full",
        method: Method | None = None,
        num_layers: int | None = None,
        modules: Sequence[str] | None = None,
        distribute_saved_activations: bool = False,
        offload_saved_activations: bool = False,
        plan: str | Path | RecomputePlan | None = None,
        blocks: str | Sequence[str] | None = None,
        find_unused_parameters: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        start_method: StartMethod = "popen",
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(
            find_unused_parameters=find_unused_parameters,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self.granularity = granularity
        self.method = method
        self.num_layers = num_layers
        self.modules = modules
        self.distribute_saved_activations = distribute_saved_activations
        self.offload_saved_activations = offload_saved_activations
        self.plan = plan
        self.blocks = blocks
        policy = RecomputePolicy(
            granularity=granularity,
            method=method,
            num_layers=num_layers,
            modules=modules,
            distribute_saved_activations=distribute_saved_activations,
            offload_saved_activations=offload_saved_activations,
        )
        self._what = policy if plan is None else _explicit(plan, policy)
        if distribute_saved_activations:
            raise ValueError(
                "distribute_saved_activations=True needs tensor-parallel ranks to keep the shards; every process of "
                "this strategy holds the whole model. Leave it out"
            )
        self._recompute: RecomputeHandle | None = None
        meet_other_lightning(type(self))

    @property
    def active_plan(self) -> RecomputePlan | None:
        """What is recomputed where while a module is being fitted; None at any other time."""
        return self._recompute.plan if self._recompute is not None else None

    def setup(self, trainer: pl.Trainer) -> None:
        """Bring the module to its device and, when fitting, patch its blocks, wrap it and make the optimizers."""
        assert self.lightning_module is not None
        _refuse_sharded(self.lightning_module)
        super().setup(trainer)

    def prepare_module(self, trainer: pl.Trainer) -> None:
        """Patch the blocks, and say once what is recomputed where."""
        assert self.lightning_module is not None
        if isinstance(self._what, RecomputePolicy) and self._what.granularity is None:
            logger.info("granularity=None: nothing is recomputed")
            return
        self._recompute = apply_recompute(self.lightning_module, self._what, blocks=self.blocks)
        # asks the other processes for the folder, so all of them go through it
        folder = trainer.log_dir
        if self.is_global_zero:
            logger.info("%s", describe(self._recompute.plan, self._recompute.block_lists))
            # fast_dev_run (set on the Trainer by name) means to leave no files
            if folder is not None and not getattr(trainer, "fast_dev_run", False):
                self._write_plan(folder, trainer)

    def teardown(self) -> None:
        """Restore the module's own forwards, then do what Lightning does at the end of a run."""
        if self._recompute is not None:
            self._recompute.remove()
            self._recompute = None
        super().teardown()

    def on_exception(self, exception: BaseException) -> None:
        """Add to an error that training met what this strategy knows about it; the error's own text stays."""
        if hint := self._hint(exception):
            exception.args = (f"{exception.args[0]}\n{hint}", *exception.args[1:])

    def _hint(self, exception: BaseException) -> str | None:
        if not exception.args or not isinstance(exception.args[0], str):
            return None
        text = exception.args[0]
        if isinstance(exception, torch.OutOfMemoryError) or is_oom_error(exception):
            return self._memory_hint()
        if "Expected to have finished reduction in the prior iteration" in text:
            return (
                "Some parameters took no part in the loss that training_step returned. If that is intended: "
                "RecomputeStrategy(find_unused_parameters=True)"
            )
        compiled = self.lightning_module is not None and is_compiled(self.lightning_module)
        if compiled and type(exception).__module__.startswith("torch._dynamo") and "in log\n" in text:
            return (
                "torch.compile of the whole LightningModule does not get through self.log in this pair of Lightning "
                "and torch, under any strategy. Compile the model inside it (self.model.compile()), or call self.log "
                "from a method decorated with @torch.compiler.disable"
            )
        return None

    def _memory_hint(self) -> str:
        plan = self.active_plan
        if plan is not None and all(isinstance(segment.action, Full) for segment in plan.segments):
            return (
                "RecomputeStrategy: every block is being recomputed. What is left: a smaller batch with "
                "accumulate_grad_batches, precision='bf16-mixed', or more devices"
            )
        return (
            f"RecomputeStrategy: {'not every block is' if plan is not None else 'no block was'} being recomputed. "
            "granularity='full' with method='uniform' keeps least; after that, a smaller batch"
        )

    def _write_plan(self, folder: str, trainer: pl.Trainer) -> None:
        assert self._recompute is not None
        record = {
            "lightning_recompute": __version__,
            "lightning": version("lightning"),
            "torch": str(torch.__version__),
            "python": ".".join(map(str, sys.version_info[:3])),
            "device": _device_name(self.root_device),
            "processes": self.world_size,
            "precision": trainer.precision,
            "seed": torch.initial_seed(),
            "block_lists": {block_list.name: len(block_list) for block_list in self._recompute.block_lists},
        }
        filesystem = get_filesystem(folder)
        if "file" not in filesystem.protocol:
            with tempfile.TemporaryDirectory() as local:
                path = self._recompute.plan.save(Path(local) / PLAN_FILE, record)
                filesystem.put(str(path), f"{folder.rstrip('/')}/{PLAN_FILE}")
            return
        target = Path(folder) / PLAN_FILE
        # without a logger the folder is the working directory, where a user's own plan may lie
        if isinstance(self.plan, str | Path) and target.exists() and target.samefile(self.plan):
            return
        self._recompute.plan.save(target, record)


def describe(plan: RecomputePlan, block_lists: Sequence[BlockList]) -> str:
    """What a plan does to a model, in a line for each block list.

    Args:
        plan: The plan.
        block_lists: The model's block lists in forward order; the plan's indices run on through them.

    Returns:
        E.g. `Recompute: net.blocks (8 x Block): blocks 0-3 full, one by one; blocks 4-7 kept`.
    """
    lines = []
    start = 0
    for block_list in block_lists:
        stop = start + len(block_list)
        lines.append(f"{block_list}: {'; '.join(_runs(plan, start, stop))}")
        start = stop
    return "\n  ".join(["Recompute:", *lines]) if len(lines) > 1 else f"Recompute: {lines[0]}"


def _runs(plan: RecomputePlan, start: int, stop: int) -> Iterator[str]:
    """Equal neighbours of a plan as one phrase each, for the blocks of one list."""
    inside = [segment for segment in plan.segments if start <= segment.start < stop]
    for action, equal in itertools.groupby(inside, key=lambda segment: segment.action):
        run = list(equal)
        first, last = run[0].start - start, run[-1].stop - 1 - start
        size = max(segment.stop - segment.start for segment in run)
        where = f"blocks {first}-{last}" if last > first else f"block {first}"
        units = "" if not isinstance(action, Full | SaveOps) else f", units of {size}" if size > 1 else ", one by one"
        yield f"{where} {_in_words(action)}{units if last > first else ''}"


def _in_words(action: Action) -> str:
    if isinstance(action, Keep):
        return "kept"
    place = "" if action.inputs == "device" else f", inputs in {action.inputs}"
    if isinstance(action, Selective):
        return f"selective ({', '.join(action.modules)}){place}"
    return f"{'full' if isinstance(action, Full) else 'all but ' + ', '.join(action.ops)}{place}"


def _explicit(plan: str | Path | RecomputePlan, policy: RecomputePolicy) -> RecomputePlan:
    default = RecomputePolicy()
    words = [word for word in vars(default) if getattr(policy, word) != getattr(default, word)]
    if words:
        given = ", ".join(f"{word}={getattr(policy, word)!r}" for word in words)
        raise ValueError(f"plan and {given}: a plan says it all. Leave out {' and '.join(words)}, or leave out plan")
    if isinstance(plan, RecomputePlan):
        return plan
    if not isinstance(plan, str | os.PathLike):
        raise TypeError(f"plan={plan!r}: a RecomputePlan, or the path of one, is due")
    return RecomputePlan.load(plan)


def _refuse_sharded(module: torch.nn.Module) -> None:
    for name, part in module.named_modules():
        if isinstance(part, FSDPModule | FullyShardedDataParallel):
            raise ValueError(
                f"{name or 'the LightningModule'} is sharded by {type(part).__name__}; RecomputeStrategy keeps a whole "
                "copy in each process. Keep the strategy that shards (FSDPStrategy, ModelParallelStrategy) and add the "
                "callback lightning_recompute.Recompute(...) to the Trainer: the same recompute under it"
            )


def _device_name(device: torch.device) -> str:
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)


accept_compiled_modules(RecomputeStrategy)
RecomputeStrategy.register_strategies(StrategyRegistry)
meet_other_lightning(RecomputeStrategy)
