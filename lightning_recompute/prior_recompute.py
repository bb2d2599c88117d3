"""Models that recompute their blocks themselves: one of the two stands back, so that no block runs three times."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

from lightning_recompute.patch import Patch

logger = logging.getLogger(__name__)

_FLAGS = ("gradient_checkpointing", "grad_checkpointing")
"""Flags of Hugging Face and timm models, on the blocks or on the model that loops over them."""


class Flag:
    """A model's own recompute flag, switched off until `remove`.

    Args:
        module: Has the flag.
        name: Its attribute.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module = module
        self._name = name
        setattr(module, name, False)

    def remove(self) -> None:
        """Switch it on again."""
        setattr(self._module, self._name, True)


def unwrapped_forward(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """The patched forward of torch's CheckpointWrapper: the module inside, without its recompute."""
    wrapper: CheckpointWrapper = original.__self__  # type: ignore[attr-defined]  # a bound method
    return wrapper._checkpoint_wrapped_module(*args, **kwargs)


def stand_in_for(module: nn.Module, blocks: Sequence[nn.Module], names: Sequence[str]) -> Iterator[Patch | Flag]:
    """Switch off what a model does itself for blocks that are recomputed now; ours wins, which is said once.

    Args:
        module: The model.
        blocks: Its blocks that a plan recomputes.
        names: Their names.
    """
    inside = {id(part) for block in blocks for part in block.modules()}
    around = {id(part) for part in module.modules() if any(id(child) in inside for child in part.modules())}
    flags = [
        (part, name)
        for part in module.modules()
        for name in _FLAGS
        if getattr(part, name, None) is True and (id(part) in inside or id(part) in around)
    ]
    if flags:
        logger.warning(
            "the model recomputes its blocks itself (%s=True): that is switched off while the plan is applied, so that "
            "no block runs three times",
            flags[0][1],
        )
    for part, name in flags:
        yield Flag(part, name)
    wrapped = [(block, name) for block, name in zip(blocks, names, strict=True) if isinstance(block, CheckpointWrapper)]
    if wrapped:
        logger.warning(
            "%d block(s) from %s on are wrapped in torch's CheckpointWrapper: the plan recomputes them instead",
            len(wrapped),
            wrapped[0][1],
        )
    for block, _ in dict(wrapped).items():
        yield Patch(block, unwrapped_forward)


def in_backward() -> bool:
    """Whether this code runs inside a backward pass."""
    return torch._C._current_graph_task_id() != -1


def others_recompute() -> bool:
    """Whether this forward is run, or run again, by somebody else's recompute.

    Inside a backward any forward is a replay, whose values are used at once.
    """
    return in_backward() or inside_torch_checkpoint()


def inside_torch_checkpoint() -> bool:
    """Whether torch's own non-reentrant checkpoint has its hooks on top."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", None) == "torch.utils.checkpoint"
