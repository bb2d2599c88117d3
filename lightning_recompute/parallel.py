"""A module that several ranks train together: tensor parallelism within data parallelism, in one object.

What order things are done in, which is all there is to know here: a module is divided over `tensor` first, then
recompute is applied (by others), then it is replicated or sharded over `data`; the end goes the other way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, ParamSpec, TypeVar, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten

from lightning_recompute.ambient import rng_devices
from lightning_recompute.data_parallel import DataParallel, replicate
from lightning_recompute.groups import ParallelGroups
from lightning_recompute.materialize import Materializer, gather_over_data, is_meta
from lightning_recompute.rank_stream import share_states
from lightning_recompute.reduction import broadcast_from_first
from lightning_recompute.sharding import shard
from lightning_recompute.tensor_parallel import TensorParallel, apply_tensor_parallel
from lightning_recompute.tensor_plan import Plan
from lightning_recompute.whole import make_whole

DataParallelKind = Literal["replicate", "shard"]
Given = ParamSpec("Given")
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class ParallelSettings:
    """What a user says of the groups.

    Args:
        tensor: Ranks that share each layer.
        pipeline: Ranks that have consecutive blocks of the module each.
        sequence: Divide hidden states along the sequence between what the tensor-parallel plan divides.
        plan: Pattern of a module's name -> style; None: the model's own.
        data: `replicate` or `shard`.

    Raises:
        ValueError: A value, or two, that mean nothing.
        TypeError: A size that is no int.
    """

    tensor: int = 1
    pipeline: int = 1
    sequence: bool = False
    plan: Plan | None = None
    data: DataParallelKind = "replicate"

    def __post_init__(self) -> None:
        for axis in ("tensor", "pipeline"):
            size = getattr(self, axis)
            if isinstance(size, bool) or not isinstance(size, int):
                raise TypeError(f"{axis}_parallel_size={size!r}: an int is due")
            if size < 1:
                raise ValueError(f"{axis}_parallel_size={size}: at least 1 is due")
        if self.data not in get_args(DataParallelKind):
            raise ValueError(f"data_parallel={self.data!r}: 'replicate' or 'shard' is due")
        if self.tensor == 1:
            if self.sequence:
                raise ValueError(
                    "sequence_parallel=True divides sequences over the tensor-parallel ranks, and "
                    "tensor_parallel_size=1 is one: set tensor_parallel_size, or leave sequence_parallel out"
                )
            if self.plan is not None:
                raise ValueError(
                    "tensor_parallel_plan says how tensor-parallel ranks share the model, and tensor_parallel_size=1 "
                    "is one: set tensor_parallel_size, or leave tensor_parallel_plan out"
                )


class ParallelModule:
    """A module while several ranks train it.

    Args:
        module: The module, on its device, alike on all ranks of a tensor-parallel group.
        groups: The groups.
        settings: What the user said.
        seed: Where the values come from of what is on the meta device; the same on all ranks.
    """

    def __init__(self, module: nn.Module, groups: ParallelGroups, settings: ParallelSettings, seed: int = 0) -> None:
        self.module = module
        self.groups = groups
        self.settings = settings
        self._seed = seed
        self.stays_apart = is_meta(module) or any(isinstance(p.data, DTensor) for p in module.parameters())
        """Whether the module was never whole on one rank, and is not to be."""
        self._tensor: TensorParallel | None = None
        self._data: DataParallel | None = None
        # modules that have their values, and parameters that were exchanged for that
        self._prepared: set[int] = set()
        self._gathered: dict[nn.Parameter, nn.Parameter] = {}
        self._syncs = True
        self._checked = False

    def divide(self, blocks: str | Sequence[str] | None = None) -> None:
        """Divide the module over the tensor-parallel ranks; collective.

        Ranks that hold parts of one module begin with the values, and under a pipeline with the random numbers, of
        the first of them: a script need not seed them alike.

        Args:
            blocks: Where the blocks are; None: found.

        Raises:
            ValueError: See `apply_tensor_parallel`.
        """
        self._begin_alike()
        # stages are sharded later, when they are known
        shards = self.settings.data == "shard" and self.groups.size("data") > 1 and self.settings.pipeline == 1
        if self.stays_apart and not shards:
            gather_over_data(self.module.modules(), self._gathered)
        if self.settings.tensor > 1:
            self._tensor = apply_tensor_parallel(
                self.module,
                self.groups.tensor_mesh,
                plan=self.settings.plan,
                sequence_parallel=self.settings.sequence,
                blocks=blocks,
            )
        if self.stays_apart:
            self._materialize = Materializer(self.module, torch.device(self.groups.mesh.device_type), self._seed)
            if not shards:
                self._materialize(self.module.modules())

    def _begin_alike(self) -> None:
        tensors = [*self.module.parameters(), *self.module.buffers()]
        here = [tensor for tensor in tensors if not tensor.is_meta and not isinstance(tensor.data, DTensor)]
        for axis in ("pipeline", "tensor"):
            if self.groups.size(axis) > 1:
                broadcast_from_first(here, self.groups.group(axis))
        if self.groups.size("pipeline") > 1:
            share_states(self.groups.group("pipeline"), rng_devices(here))

    def spread(self, units: Sequence[Sequence[nn.Module]], find_unused_parameters: bool = False) -> None:
        """Replicate or shard the module over `data`; collective.

        Args:
            units: Consecutive blocks that are recomputed together; sharded together.
            find_unused_parameters: Whether ranks may differ in which parameters they use.
        """
        if self.groups.size("data") == 1:
            return
        if self.settings.data == "shard":
            self._data = shard(
                self.module,
                self.groups,
                units,
                find_unused_parameters=find_unused_parameters,
                prepare=self._prepare if self.stays_apart else None,
            )
        else:
            self._data = replicate(self.module, self.groups)

    @property
    def tensor(self) -> TensorParallel | None:
        """What divides it over `tensor`; None where nothing does."""
        return self._tensor

    @property
    def data(self) -> DataParallel | None:
        """What replicates or shards it over `data`; None where nothing does."""
        return self._data

    @property
    def syncs(self) -> bool:
        """Whether backward communicates gradients; not under `no_sync`."""
        return self._syncs

    def _prepare(self, modules: Sequence[nn.Module]) -> dict[nn.Parameter, nn.Parameter]:
        parts = [part for module in modules for part in module.modules() if id(part) not in self._prepared]
        self._prepared |= {id(part) for part in parts}
        gather_over_data(parts, self._gathered)
        return self._gathered | self._materialize(parts)

    # ---- a step

    def run(self, step: Callable[Given, Result], *args: Given.args, **kwargs: Given.kwargs) -> Result:
        """Run a method of the module that takes a batch.

        Args:
            step: The bound method.
            *args: Its arguments.
            **kwargs: Its keyword arguments.

        Returns:
            What it returns.
        """

        def within_data() -> Result:
            with contextlib.nullcontext() if self._tensor is None else self._tensor.step():
                return step(*args, **kwargs)

        return within_data() if self._data is None else self._data.run(within_data)

    def before_backward(self, loss: Tensor) -> None:
        """Before each backward."""
        if self._data is not None:
            self._data.before_backward(loss)

    def after_backward(self) -> None:
        """After each backward: gradients are summed over `tensor`, where they have to be, and averaged over `data`.

        Raises:
            ValueError: In the first: a gradient shows that a style of the tensor-parallel plan is wrong.
        """
        if self._tensor is not None and not self._checked:
            self._checked = True
            self._tensor.check_gradients()
        if self._tensor is not None and self._syncs:
            self._tensor.sum_gradients()
        if self._data is not None:
            self._data.finish()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward within leaves each rank its own gradients, without communication of gradients."""
        former, self._syncs = self._syncs, False
        try:
            with contextlib.nullcontext() if self._data is None else self._data.no_sync():
                yield
        finally:
            self._syncs = former

    # ---- the end

    def remove(self) -> None:
        """Take everything off but the distributed parameters; not collective. A second call does nothing."""
        if self._data is not None:
            self._data.remove()
            self._data = None
        if self._tensor is not None:
            self._tensor.remove()
            self._tensor = None

    def make_whole(self, optimizers: Sequence[Optimizer] = (), device: torch.device | None = None) -> None:
        """After `remove`: make the parameters, and the states of optimizers, ordinary again; collective.

        Args:
            optimizers: Whose states follow.
            device: Where to; None: where they are.
        """
        make_whole(self.module, optimizers, device)


def check_same_batch(batch: Any, group: dist.ProcessGroup, device: torch.device) -> None:
    """Refuse a batch that is not the same on all tensor-parallel ranks; collective.

    Args:
        batch: What the loader gave, of any structure.
        group: The ranks.
        device: Where collectives run.

    Raises:
        ValueError: It differs.
    """
    if group.size() == 1:
        return
    tensors = [leaf for leaf in tree_flatten(batch)[0] if isinstance(leaf, Tensor) and not leaf.is_complex()]
    facts: list[float] = []
    for tensor in tensors:
        values = tensor.detach().to(torch.float64).flatten().cpu()
        weights = torch.arange(1, values.numel() + 1, dtype=torch.float64) % 8191
        facts += [float(tensor.numel()), float(values.nansum()), float((values.nan_to_num() * weights).sum())]
    mine = torch.tensor([float(len(tensors)), *facts], dtype=torch.float64)
    digest = torch.stack((mine.sum(), (mine * torch.arange(1, len(mine) + 1)).sum(), mine.abs().sum())).to(device)
    everyone = [torch.empty_like(digest) for _ in range(group.size())]
    dist.all_gather(everyone, digest, group=group)
    if any(not torch.equal(other, digest) for other in everyone):
        raise ValueError(
            "ranks that share layers, or run stages of one pipeline, were given different batches; they have to see "
            "the same. Where the data is shuffled, seed all of them alike (seed_everything); let the Trainer put its "
            "distributed sampler in (use_distributed_sampler=True), or split the data by "
            "trainer.strategy.distributed_sampler_kwargs (num_replicas, rank) rather than by the global rank"
        )
