"""Data parallelism beside tensor parallelism: a module replicated over the mesh axis `data`.

Like sharding it averages the gradients over `data` once for each backward that is not under `no_sync()`; gradients
which earlier backwards under `no_sync()` left are part of it. Nothing is left on the module after `remove()`.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import ClassVar, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase

from lightning_recompute.groups import ParallelGroups
from lightning_recompute.reduction import GradientReduction, broadcast_from_first

Result = TypeVar("Result")
Given = ParamSpec("Given")


class DataParallel(ABC):
    """A module that several ranks train on different data.

    Args:
        module: The module; parameters and buffers take the values of data rank 0.
        groups: The groups; only the axis `data` is used.
    """

    reduces_in_backward: ClassVar[bool] = True
    """Whether gradients are averaged while backward makes them."""

    def __init__(self, module: nn.Module, groups: ParallelGroups) -> None:
        for name, part in module.named_modules():
            if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
                raise ValueError(f"{name} makes sparse gradients, which are not averaged over ranks; take sparse=False")
        self.module = module
        self._group = groups.group("data")
        self._norms = [part for part in module.modules() if isinstance(part, _NormBase)]
        tensors = (*module.parameters(), *module.buffers())
        broadcast_from_first((tensor for tensor in tensors if not _is_to_come(tensor)), self._group)

    def run(self, step: Callable[Given, Result], *args: Given.args, **kwargs: Given.kwargs) -> Result:
        """Run a method of the module that takes a batch, `training_step` or another.

        Statistics of batch norms take the values of data rank 0 before a step that is trained, as under torch's
        DistributedDataParallel.

        Args:
            step: The bound method.
            *args: Its arguments.
            **kwargs: Its keyword arguments.

        Returns:
            What it returns.
        """
        if torch.is_grad_enabled() and self._reduction.active:
            tracking = [part for part in self._norms if part.training]
            broadcast_from_first((buffer for part in tracking for buffer in part.buffers(False)), self._group)
        self._reduction.prepare()
        return step(*args, **kwargs)

    @abstractmethod
    def before_backward(self, loss: Tensor) -> None:
        """Before each backward, also of manual optimization.

        Args:
            loss: What backward starts from.
        """

    def finish(self) -> None:
        """After each backward: the averages are in `grad` when this returns."""
        self._reduction.finish()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward within leaves each rank its own gradients, without communication of gradients."""
        former = self._reduction.active
        self._reduction.active = False
        try:
            yield
        finally:
            self._reduction.active = former

    @property
    @abstractmethod
    def _reduction(self) -> GradientReduction: ...

    @abstractmethod
    def reset(self) -> None:
        """After an error in a step or backward: forget it. Gradients of that accumulation window are lost."""

    @abstractmethod
    def remove(self) -> None:
        """Take everything off the module, also after an error; not collective. A second call does nothing."""


class Replicated(DataParallel):
    """Every data rank holds what its place on the other axes holds; see `replicate`."""

    def __init__(self, module: nn.Module, groups: ParallelGroups) -> None:
        super().__init__(module, groups)
        self._averaged = GradientReduction(module.parameters(), self._group, self.reduces_in_backward)

    @property
    def _reduction(self) -> GradientReduction:
        return self._averaged

    def before_backward(self, loss: Tensor) -> None:
        """Nothing is due: the parameters' hooks do it."""

    def reset(self) -> None:
        """After an error in a step or backward: forget it."""
        self._averaged.prepare()

    def remove(self) -> None:
        """Take the hooks off the parameters."""
        self._averaged.remove()


def replicate(module: nn.Module, groups: ParallelGroups) -> Replicated:
    """Average the gradients of a module over `data`; collective. For modules with DTensors on `tensor`.

    A parameter without a gradient on some rank takes part with zeros, so that ranks may differ in what they use.

    Args:
        module: The module.
        groups: The groups.

    Returns:
        What runs its steps and removes itself.
    """
    return Replicated(module, groups)


def _is_to_come(tensor: Tensor) -> bool:
    """Whether its values come later: it is on the meta device, or still sharded by an earlier fit."""
    axes = tensor.device_mesh.mesh_dim_names or () if isinstance(tensor, DTensor) else ()
    return tensor.is_meta or "data" in axes
