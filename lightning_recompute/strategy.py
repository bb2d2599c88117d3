"""The strategy: recompute as one argument of Lightning's Trainer."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import StrategyRegistry
from torch import Tensor
from torch.distributed.constants import default_pg_timeout
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.optim import Optimizer

from lightning_recompute.checkpointing_strategy import CheckpointFormat
from lightning_recompute.division import OwnStages, Split
from lightning_recompute.forecast import Forecast
from lightning_recompute.lightning_private import (
    StartMethod,
    accept_compiled_modules,
    is_compiled,
    meet_other_lightning,
)
from lightning_recompute.out_of_memory import Attempts, advice, free, out_of_memory_in
from lightning_recompute.parallel import DataParallelKind, ParallelSettings
from lightning_recompute.piped_fit import PipedFit
from lightning_recompute.piped_strategy import PipedStrategy
from lightning_recompute.pipeline_settings import settings_of
from lightning_recompute.plan import Full, RecomputePlan
from lightning_recompute.policy import Granularity, Method, RecomputePolicy
from lightning_recompute.schedules import Schedule
from lightning_recompute.session import RecomputeSession
from lightning_recompute.stage_forecast import PipelineForecast

logger = logging.getLogger(__name__)


class RecomputeStrategy(PipedStrategy):
    """Trains any LightningModule in less memory, with the same numbers to the bit.

    In forward each unit (one or some consecutive blocks of the model) keeps only its inputs; in backward it is
    run again. On one device everything else is what Lightning does by default; with several, one process a
    device trains on its part of the data and torch's DistributedDataParallel averages the gradients. Under
    `tensor_parallel_size` neighbouring processes share each layer, and the data.

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
        memory_budget: Choose the fastest plan whose peak keeps this budget, from a measurement on the first batch: a
            size (`22GiB`), a number of bytes, or a fraction of the device (0.9; of a CPU, of what the process may use,
            divided by the processes of the run on this machine). With several processes it is what each of them may
            need, and all get the same plan, where blocks are sharded with one block as a unit; stages of a pipeline
            get a plan each. The plan and its predicted peak are logged; a larger batch is planned for anew. Excludes
            the six words above: each has to be left at its default.
        plan: An explicit plan, or the path of one that a run wrote (`plan.yaml`). Excludes the six words and
            `memory_budget`.
        tensor_parallel_size: Ranks that share each layer; the others divide the data. The module says how its layers
            are divided by a method `tensor_parallel_plan`; Hugging Face models bring their plans.
        sequence_parallel: With tensor parallelism: divide hidden states along the sequence between the layers that are
            divided, so that norms and residuals are kept once, not on every rank.
        tensor_parallel_plan: Patterns of module names (`model.layers.*.mlp.up_proj`) with the style of each: `colwise`,
            `rowwise` and others of `lightning_recompute.tensor_plan.STYLES`. Null: the module's own.
        pipeline_parallel_size: Ranks that have consecutive blocks of the model each; a batch runs through them in
            microbatches. Automatic optimization only.
        virtual_pipeline_size: Stages on each of these ranks.
        num_microbatches: Of each batch, by rows. Null: four for each rank of the pipeline. They count in the loss by
            their rows, or by the module's `microbatch_weight(microbatch)` if it has such a method.
        schedule: Their order: `gpipe`, `1f1b`, `interleaved-1f1b`, `interleaved-zero-bubble` or `zbv-zero-bubble`.
            `1f1b` with several stages on a rank is the interleaved one.
        split: How the blocks are divided over stages: `count`; `balanced`, by measured time, and with `memory_budget`
            together with the plans; or the number of blocks of each stage in forward order.
        data_parallel: What the ranks that divide the data hold: `replicate`, all of the module; or `shard`, parts of
            its parameters, gradients and optimizer states (torch's FSDP2).
        blocks: Where the blocks are: dotted path(s) of block lists (`model.layers`) or class name(s) of blocks
            (`LlamaDecoderLayer`). Null: found.
        check: Debugging: compare every value of each block's first replay with its forward and name block and module
            on a difference. Needs the memory that recompute would save.
        on_oom: When memory runs out: `raise`, with what would fit beside the error; or `replan`, in one process and
            automatic optimization: try the step again under a tighter plan, and keep that. It ends as if that plan had
            been there from the start. Buffers, and gradients that are there already, are copied before each step.
        checkpoint_format: `single`: a checkpoint is an ordinary file; `sharded`: a folder into which each rank writes
            its part; `auto`: a folder under tensor parallelism and sharding. Either loads under any layout;
            `lightning-recompute consolidate` makes a file of a folder.
        async_checkpoint: Folders are written while training goes on.
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
        memory_budget: str | int | float | None = None,
        plan: str | Path | RecomputePlan | None = None,
        blocks: str | Sequence[str] | None = None,
        tensor_parallel_size: int = 1,
        sequence_parallel: bool = False,
        tensor_parallel_plan: Mapping[str, Any] | None = None,
        pipeline_parallel_size: int = 1,
        virtual_pipeline_size: int = 1,
        num_microbatches: int | None = None,
        schedule: Schedule = "1f1b",
        split: Split = "count",
        data_parallel: DataParallelKind = "replicate",
        check: bool = False,
        on_oom: Literal["raise", "replan"] = "raise",
        checkpoint_format: CheckpointFormat = "auto",
        async_checkpoint: bool = False,
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
            ParallelSettings(
                tensor=tensor_parallel_size,
                pipeline=pipeline_parallel_size,
                sequence=sequence_parallel,
                plan=tensor_parallel_plan,
                data=data_parallel,
            ),
            settings_of(pipeline_parallel_size, virtual_pipeline_size, num_microbatches, schedule, split),
            checkpoint_format=checkpoint_format,
            async_checkpoint=async_checkpoint,
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
        self.memory_budget = memory_budget
        self.plan = plan
        self.blocks = blocks
        self.tensor_parallel_size = tensor_parallel_size
        self.sequence_parallel = sequence_parallel
        self.tensor_parallel_plan = tensor_parallel_plan
        self.pipeline_parallel_size = pipeline_parallel_size
        self.virtual_pipeline_size = virtual_pipeline_size
        self.num_microbatches = num_microbatches
        self.schedule = schedule
        self.split = split
        self.data_parallel = data_parallel
        self.check = check
        policy = RecomputePolicy(
            granularity=granularity,
            method=method,
            num_layers=num_layers,
            modules=modules,
            distribute_saved_activations=distribute_saved_activations,
            offload_saved_activations=offload_saved_activations,
        )
        if on_oom not in ("raise", "replan"):
            raise ValueError(f"on_oom={on_oom!r}: 'raise' or 'replan' is due")
        self.on_oom = on_oom
        # the batch that is being trained on, and its number
        self._step: tuple[Any, int] | None = None
        self._attempts = Attempts(self._tighten)
        self._session = RecomputeSession(policy, plan, blocks, check, memory_budget)
        if distribute_saved_activations and (tensor_parallel_size == 1 or sequence_parallel):
            found = "sequence_parallel=True" if sequence_parallel else "tensor_parallel_size=1"
            raise ValueError(
                f"distribute_saved_activations=True with {found}: "
                + (
                    "each rank keeps its part of a unit's inputs already, and no more can be saved"
                    if sequence_parallel
                    else "the shards are kept by the tensor-parallel ranks, and there is one"
                )
                + ". Leave one of the two out"
            )
        meet_other_lightning(type(self))

    @property
    def active_plan(self) -> RecomputePlan | None:
        """What is recomputed where while a module is being fitted; None at any other time."""
        return self._session.active_plan

    @property
    def forecast(self) -> Forecast | PipelineForecast | None:
        """What the plan for `memory_budget` will need; None without one, and before the first batch."""
        return self._session.forecast

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Under a memory budget: make the plan when a batch needs one."""
        was_piped = self.piped is not None
        super().on_train_batch_start(batch, batch_idx)
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        planned = self._session.before_batch(self.lightning_module, trainer, batch, batch_idx, logger)
        if planned or (self.piped is not None) != was_piped:
            for callback in vars(trainer)["callbacks"]:  # an attribute that Lightning's types do not know
                if hasattr(callback, "begin_forward_again"):  # MemoryReport has begun before
                    callback.begin_forward_again()

    def setup(self, trainer: pl.Trainer) -> None:
        """Bring the module to its device and, when fitting, patch its blocks, wrap it and make the optimizers."""
        assert self.lightning_module is not None
        _refuse_sharded(self.lightning_module)
        if self.on_oom == "replan" and self.has_peers:
            raise ValueError("on_oom='replan' with several processes: one alone cannot repeat a step; on_oom='raise'")
        super().setup(trainer)

    def prepare_module(self, trainer: pl.Trainer) -> None:
        """Patch the blocks, and say once what is recomputed where; of a pipeline when its stages are known."""
        if not self.is_piped:
            self._begin(trainer, None)

    def prepare_stages(self, piped: PipedFit) -> None:
        """Patch the blocks of this rank's stages."""
        self._begin(self._module.trainer, piped.own_stages)

    def rank_budget_bytes(self) -> int | None:
        """What the peak of each rank may be; None without `memory_budget`."""
        budget = self._session.budget
        return None if budget is None else budget.limit_bytes(self._module.trainer)

    def _begin(self, trainer: pl.Trainer, stages: OwnStages | None) -> None:
        assert self.lightning_module is not None
        shares = self._groups is not None and self.tensor_parallel_size > 1 and not self.sequence_parallel
        self._session.tensor_group = self._groups.group("tensor") if shares and self._groups is not None else None
        self._session.begin(self.lightning_module, trainer, self.root_device, logger, stages)

    @property
    def block_names(self) -> str | Sequence[str] | None:
        """Where the user said the blocks are."""
        return self.blocks

    def units_of_blocks(self) -> list[list[torch.nn.Module]]:
        """Blocks that are recomputed together."""
        assert self.lightning_module is not None
        return self._session.units(self.lightning_module)

    def teardown(self) -> None:
        """Restore the module's own forwards, then do what Lightning does at the end of a run."""
        self._session.end()
        super().teardown()

    def on_exception(self, exception: BaseException) -> None:
        """Add to an error that training met what this strategy knows about it; the error's own text stays."""
        super().on_exception(exception)
        if hint := self._hint(exception):
            exception.args = (f"{exception.args[0]}\n{hint}", *exception.args[1:])

    def _hint(self, exception: BaseException) -> str | None:
        if not exception.args or not isinstance(exception.args[0], str):
            return None
        text = exception.args[0]
        if out_of_memory_in(exception) is not None:
            return self._memory_hint(exception)
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

    def _memory_hint(self, exception: BaseException) -> str:
        plan, module, step = self.active_plan, self.lightning_module, self._step
        full = plan is not None and all(isinstance(segment.action, Full) for segment in plan.segments)
        known = "every block is" if full else "no block was" if plan is None else "not every block is"
        hint = f"RecomputeStrategy: {known} being recomputed."
        if module is not None and step is not None and not self.has_peers:
            free(exception, self.root_device)
            self._session.end()
            try:
                return f"{hint} {advice(module.trainer, module, step, plan, self.blocks)}"
            except Exception as error:  # the device may be beyond use
                logger.debug("what would fit could not be measured: %s", error)
        rest = (
            "What is left: a smaller batch with accumulate_grad_batches, precision='bf16-mixed', or more devices"
            if full
            else "granularity='full' with method='uniform' keeps least; after that, a smaller batch"
        )
        return f"{hint} {rest}"

    # ---- another attempt

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a training step; with `on_oom="replan"` again when memory runs out."""
        module = self.lightning_module
        assert module is not None
        self._step = (args[0], args[1] if len(args) > 1 else 0) if args else None
        step = functools.partial(super().training_step, *args, **kwargs)
        if self.on_oom == "raise" or not module.automatic_optimization:
            return step()
        return self._attempts.forward(module, step)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Run backward; with `on_oom="replan"` the whole step again when memory runs out."""
        module = self.lightning_module
        assert module is not None
        if self.on_oom == "raise" or not module.automatic_optimization:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        run = super().backward
        scale = 1 / module.trainer.accumulate_grad_batches
        return self._attempts.backward(module, closure_loss, scale, lambda loss: run(loss, optimizer, *args, **kwargs))

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Step, and let go of the batch."""
        result = super().optimizer_step(*args, **kwargs)
        self._step = None
        return result

    def _tighten(self) -> bool:
        assert self.lightning_module is not None
        assert self._step is not None
        return self._session.tighten(self.lightning_module, self.lightning_module.trainer, self._step, logger)


def _refuse_sharded(module: torch.nn.Module) -> None:
    for name, part in module.named_modules():
        if isinstance(part, FSDPModule | FullyShardedDataParallel):
            raise ValueError(
                f"{name or 'the LightningModule'} is sharded by {type(part).__name__}; RecomputeStrategy keeps a whole "
                "copy in each process. Keep the strategy that shards (FSDPStrategy, ModelParallelStrategy) and add the "
                "callback lightning_recompute.Recompute(...) to the Trainer: the same recompute under it"
            )


accept_compiled_modules(RecomputeStrategy)
RecomputeStrategy.register_strategies(StrategyRegistry)
meet_other_lightning(RecomputeStrategy)
