"""Lightning's strategy over tensor- and data-parallel groups: the numbers of one process, and no wrapper module."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Generator, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BatchSizeFinder, StochasticWeightAveraging, WeightAveraging
from torch import Tensor, nn
from torch.nn.modules.batchnorm import SyncBatchNorm
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_recompute.checkpointing_strategy import CheckpointingStrategy
from lightning_recompute.clipping import OverflowAgreement, clip_norm, clip_value
from lightning_recompute.grouped_step import GroupedStep
from lightning_recompute.groups import ParallelGroups, data_size
from lightning_recompute.lightning_private import set_device_mesh
from lightning_recompute.materialize import Materializer, is_meta
from lightning_recompute.parallel import ParallelModule, ParallelSettings, check_same_batch
from lightning_recompute.rank_stream import share_all_states
from lightning_recompute.stage_budget import StageBudget
from lightning_recompute.tried_step import LONE_STEP, TriedStep


class GroupedStrategy(CheckpointingStrategy):
    """Ranks in groups: those that share each layer, and those that share the data.

    Without tensor parallelism and without sharding it is what it inherits from.

    Args:
        settings: The groups.
        options: What `CheckpointingStrategy` takes.

    Raises:
        ValueError: An option that the groups cannot have.
    """

    def __init__(self, settings: ParallelSettings, **options: Any) -> None:
        super().__init__(**options)
        self.settings = settings
        if self._may_be_grouped and self.start_method != "popen":
            raise ValueError(
                f"start_method={self.start_method!r} brings back the weights of one process, and under "
                f"tensor_parallel_size={settings.tensor}, pipeline_parallel_size={settings.pipeline}, "
                f"data_parallel={settings.data!r} no process has them all; take start_method='popen' (the default), or "
                "torchrun"
            )
        self._groups: ParallelGroups | None = None
        self._parallel: ParallelModule | None = None
        self._restore: list[tuple[Any, str, Any]] = []
        self._first_batch = True
        self._overflow: OverflowAgreement | None = None
        self._ignored: Any = None

    # ---- the groups

    @property
    def _may_be_grouped(self) -> bool:
        return self.settings.tensor > 1 or self.settings.pipeline > 1 or self.settings.data == "shard"

    @property
    def _sizes(self) -> dict[str, int]:
        return {"tensor": self.settings.tensor, "pipeline": self.settings.pipeline}

    @property
    def is_grouped(self) -> bool:
        """Whether the module's parameters are distributed while it runs."""
        return self._may_be_grouped and self.has_peers

    @property
    def is_distributed(self) -> bool:
        """Whether the data is divided; Lightning asks by this name. Else loaders stay as the user made them."""
        return self.data_parallel_size > 1

    @property
    def data_parallel_size(self) -> int:
        """How many parts the data is divided into."""
        return data_size(self.world_size, **self._sizes)

    @property
    def data_parallel_rank(self) -> int:
        """Which of them is this process's."""
        return self.global_rank // self.settings.tensor % self.data_parallel_size

    @property
    def groups(self) -> ParallelGroups | None:
        """The mesh and its groups; None before the processes have met, and where there are none."""
        return self._groups

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """How Lightning's injected sampler splits the data."""
        return {"num_replicas": self.data_parallel_size, "rank": self.data_parallel_rank}

    def _configure_launcher(self) -> None:
        data_size(max(self.num_nodes * self.num_processes, self.world_size), **self._sizes)
        super()._configure_launcher()

    def setup_environment(self) -> None:
        """Join the processes, and group them."""
        super().setup_environment()
        if self.is_grouped:
            if self.lightning_module is not None:
                _refuse_callbacks(self.lightning_module.trainer)
            self._groups = ParallelGroups.build(self.root_device.type, **self._sizes)
            for axis in ("pipeline", "tensor"):  # what `setup` draws: a random split of the data has to be the same
                if self._groups.size(axis) > 1:
                    share_all_states(self._groups.group(axis), self.root_device)
            if self.lightning_module is not None:
                set_device_mesh(self.lightning_module, self._groups.mesh)

    # ---- the module

    def divide_module(self, trainer: pl.Trainer) -> None:
        """Divide the module over the tensor-parallel ranks, before recompute is applied."""
        assert self.lightning_module is not None
        seed = self.broadcast(torch.initial_seed()) if is_meta(self.lightning_module) else 0
        if not self.is_grouped:
            if is_meta(self.lightning_module):
                Materializer(self.lightning_module, self.root_device, seed)(self.lightning_module.modules())
            return
        assert self._groups is not None
        self._parallel = ParallelModule(self.lightning_module, self._groups, self.settings, seed)
        self._parallel.divide(self.block_names)
        if not self.is_distributed:  # all ranks have the same data: Lightning asks in vain for more `sync_dist`
            warnings.filterwarnings("ignore", "It is recommended to use `self.log")
            self._ignored = warnings.filters[0]
        group = self._groups.group("data")
        for part in self.lightning_module.modules():
            if isinstance(part, Metric | SyncBatchNorm):
                self._set(part, "process_group", group)
        self._set(self.precision_plugin, "clip_grad_by_norm", self.clip_by_norm)
        self._set(self.precision_plugin, "clip_grad_by_value", _clip_by_value)
        if isinstance(scaler := getattr(self.precision_plugin, "scaler", None), torch.amp.GradScaler):
            self._overflow = OverflowAgreement(scaler)

    def clip_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """In place of the precision plugin's: one norm over all ranks.

        Args:
            optimizer: Whose gradients are clipped.
            clip_val: The largest norm that is left alone.
        """
        clip_norm(parameters_of(optimizer), clip_val)

    def _set(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of an object of the user's, until teardown."""
        self._restore.append((owner, name, vars(owner).get(name, _ABSENT)))
        object.__setattr__(owner, name, value)

    def spread_module(self) -> bool:
        """Replicate or shard the module over the data-parallel ranks, after recompute is applied.

        Returns:
            Whether that is done, or nothing has to be.
        """
        if self._parallel is None:
            return False
        units = self.units_of_blocks() if self.settings.data == "shard" and self.data_parallel_size > 1 else []
        self._parallel.spread(units, self.find_unused_parameters)
        return True

    @property
    def block_names(self) -> str | Sequence[str] | None:
        """Where the user said the blocks are."""
        return None

    def units_of_blocks(self) -> list[list[nn.Module]]:
        """Blocks that are recomputed together, and so have to be sharded together."""
        return []

    def tried_step(self, has_middle: bool) -> TriedStep:
        """How a step is run that is only measured.

        Args:
            has_middle: Whether more than two backwards may come before an optimizer's step.
        """
        return LONE_STEP if self._parallel is None else GroupedStep(self._parallel, has_middle)

    def stage_budget(self, batch: Any, batch_idx: int) -> StageBudget | None:
        """What plans the stages of a pipeline, each by itself; None where there is none.

        Args:
            batch: A batch of the training.
            batch_idx: Its number.
        """
        return None

    # ---- a step

    def _run(self, step: Any, *args: Any, **kwargs: Any) -> Any:
        return step(*args, **kwargs) if self._parallel is None else self._parallel.run(step, *args, **kwargs)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """See that ranks which share each layer, or are stages, share the batch: in the first of each fit."""
        super().on_train_batch_start(batch, batch_idx)
        if self._groups is not None and self._first_batch:
            self._first_batch = False
            for axis in ("tensor", "pipeline"):
                check_same_batch(batch, self._groups.group(axis), self.root_device)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a training step."""
        return self._run(super().training_step, *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a validation step."""
        return self._run(super().validation_step, *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a test step."""
        return self._run(super().test_step, *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a predict step."""
        return self._run(super().predict_step, *args, **kwargs)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Run backward; afterwards, before any hook sees them, gradients are reduced over the groups."""
        if self._parallel is None:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        module = self.lightning_module
        assert module is not None
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        self._parallel.before_backward(closure_loss)
        self.precision_plugin.backward(closure_loss, module, optimizer, *args, **kwargs)
        self.reduce_gradients()
        closure_loss = self.precision_plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    def reduce_gradients(self) -> None:
        """Reduce the gradients over the groups, after a backward."""
        assert self._parallel is not None
        self._parallel.after_backward()

    @contextlib.contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Within, backward does not communicate gradients: a step of an accumulation."""
        with super().block_backward_sync() if self._parallel is None else self._parallel.no_sync():
            yield

    # ---- collectives

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: dist.ReduceOp | str | None = "mean") -> Any:
        """Reduce a tensor over the data-parallel ranks, in place; anything else is returned as it is."""
        return super().reduce(tensor, self._data_group(group), reduce_op)

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Stack the tensors of the data-parallel ranks, (data_parallel_size, *shape); of one: the tensor itself."""
        if group is None and not self.is_distributed:
            return tensor
        return super().all_gather(tensor, self._data_group(group), sync_grads)

    def _data_group(self, group: Any | None) -> Any | None:
        return self._groups.group("data") if group is None and self._groups is not None else group

    # ---- the end

    def teardown(self) -> None:
        """Take everything off the module and make it whole again on the CPU."""
        parallel, self._parallel = self._parallel, None
        while self._restore:
            owner, name, former = self._restore.pop()
            vars(owner).pop(name, None)
            if former is not _ABSENT:
                object.__setattr__(owner, name, former)
        if self._ignored in warnings.filters:
            warnings.filters.remove(self._ignored)  # type: ignore[attr-defined]  # a list, though typed as a sequence
        if self._overflow is not None:
            self._overflow.remove()
            self._overflow = None
        if parallel is not None:
            parallel.remove()
            if self._peers_listen and not parallel.stays_apart:
                parallel.make_whole(self.optimizers, torch.device("cpu"))
        if self.lightning_module is not None and self._groups is not None:
            set_device_mesh(self.lightning_module, None)
        self._first_batch = True
        super().teardown()


_ABSENT = object()


def _refuse_callbacks(trainer: pl.Trainer) -> None:
    """Refuse what works on whole parameters, or on the memory of one process."""
    reasons: dict[type[pl.Callback], str] = {
        BatchSizeFinder: "tries batch sizes until one process runs out of memory, and its peers would wait for ever; "
        "find the size with a plain strategy, or plan it (memory_budget)",
        WeightAveraging: "keeps a copy of the module from before its parameters are distributed; average the "
        "checkpoints of a run after `lightning-recompute consolidate`, or train without it",
        StochasticWeightAveraging: "keeps a copy of the module from before its parameters are distributed; average the "
        "checkpoints of a run after `lightning-recompute consolidate`, or train without it",
    }
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # Lightning's types do not know it
        for kind, reason in reasons.items():
            if isinstance(callback, kind):
                raise ValueError(
                    f"{type(callback).__name__} does not work while the module's parameters are distributed "
                    f"(tensor_parallel_size > 1, pipeline_parallel_size > 1 or data_parallel='shard'): it {reason}"
                )


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """The parameters that an optimizer has."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _clip_by_value(optimizer: Optimizer, clip_val: float) -> None:
    """In place of the precision plugin's."""
    clip_value(parameters_of(optimizer), clip_val)
