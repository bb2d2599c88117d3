"""A whole model seen as one rank of a run that does not take place: for a while, and then as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from lightning_recompute.groups import ParallelGroups
from lightning_recompute.tensor_parallel import TensorParallel, apply_tensor_parallel
from lightning_recompute.tensor_plan import Plan
from lightning_recompute.tried_step import TriedStep


@contextlib.contextmanager
def own_parameters(module: nn.Module) -> Iterator[None]:
    """On leaving, the module has the very parameters again that it has now.

    Args:
        module: The module.
    """
    former = [(part, dict(part._parameters)) for part in module.modules()]
    try:
        yield
    finally:
        for part, parameters in former:
            part._parameters.clear()
            part._parameters.update(parameters)


@contextlib.contextmanager
def untied(module: nn.Module) -> Iterator[None]:
    """While this is entered, each use of a parameter in several modules is one of its own, in the same memory.

    Two stages of a pipeline that share a parameter have a gradient of it each.

    Args:
        module: The module.
    """
    with own_parameters(module):
        seen: set[nn.Parameter] = set()
        for part in module.modules():
            for name, parameter in part._parameters.items():
                if parameter is None:
                    continue
                if parameter in seen:
                    part._parameters[name] = nn.Parameter(parameter.detach(), parameter.requires_grad)
                seen.add(parameter)
        yield


@contextlib.contextmanager
def tensor_rank(
    module: nn.Module,
    groups: ParallelGroups,
    *,
    sequence_parallel: bool = False,
    plan: Plan | None = None,
    blocks: str | Sequence[str] | None = None,
) -> Iterator[TensorParallel]:
    """While this is entered, the module is divided as the first tensor-parallel rank has it.

    Args:
        module: The whole module; its own parameters are not changed.
        groups: Of a run that does not take place.
        sequence_parallel: Whether hidden states are divided along the sequence.
        plan: How layers are divided; None: the module's own plan.
        blocks: Where the blocks are.

    Yields:
        The divided module's handle.

    Raises:
        ValueError: See `apply_tensor_parallel`.
    """
    with own_parameters(module):
        with unset_fake_temporarily():  # the seeds of ranks are numbers, not shapes
            handle = apply_tensor_parallel(
                module, groups.tensor_mesh, plan=plan, sequence_parallel=sequence_parallel, blocks=blocks
            )
        try:
            yield handle
        finally:
            handle.remove()


class RankStep(TriedStep):
    """A step of one rank whose peers are not there.

    Args:
        tensor: What divides the module; None where nothing does.
    """

    def __init__(self, tensor: TensorParallel | None) -> None:
        self._tensor = tensor

    def forward(self, run: Callable[[], Any]) -> Any:
        """Run the forward."""
        with contextlib.nullcontext() if self._tensor is None else self._tensor.step():
            return run()

    def after_backward(self) -> None:
        """After each backward."""
        if self._tensor is not None:
            self._tensor.sum_gradients()
