"""Running a model so that nothing of the run stays on it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from lightning_recompute.ambient import host_rng, rng_devices, rng_states, set_host_rng, set_rng_states
from lightning_recompute.blocks import BlockList
from lightning_recompute.module_state import ModuleState
from lightning_recompute.prior_recompute import stand_in_for

HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
"""Where torch has a module's hooks."""


@contextmanager
def undone(module: nn.Module, block_lists: Sequence[BlockList]) -> Iterator[ExitStack]:
    """Surrounds a run of a model that is to leave no trace, and in which its blocks do not recompute themselves.

    Put back are random streams, buffers, statistics, attributes, hooks, training flags, gradients and which parameters
    need one. What a run does outside of the module (prints, files) stays.

    Args:
        module: The model.
        block_lists: Where its blocks are.

    Yields:
        A stack for what is to be taken back before.
    """
    parameters = list(module.parameters())
    with ExitStack() as stack:
        stack.enter_context(preserved_rng([*parameters, *module.buffers()]))
        stack.enter_context(ModuleState(module, None).restored(module, frozenset()))
        # transformers registers hooks in the first forward and notes that in an attribute
        for hooks in [
            hooks for part in module.modules() for kind in HOOKS if (hooks := vars(part).get(kind)) is not None
        ]:
            stack.callback(_refill, hooks, hooks.copy())
        for parameter in parameters:
            stack.callback(setattr, parameter, "grad", parameter.grad)
            stack.callback(parameter.requires_grad_, parameter.requires_grad)  # several optimizers take turns by it
        blocks, names = zip(*distinct_blocks(block_lists), strict=True)
        for found in stand_in_for(module, blocks, names):
            stack.callback(found.remove)
        yield stack


def hook_owner(hook: Any) -> str:
    """The package whose code a hook is: torch, transformers, lightning_recompute, or the user's."""
    function = inspect.unwrap(hook)
    function = function.func if isinstance(function, functools.partial) else function
    return (getattr(function, "__module__", None) or "").partition(".")[0]


def _refill(hooks: dict[int, Any], former: dict[int, Any]) -> None:
    hooks.clear()  # handles know this dict
    hooks.update(former)


def distinct_blocks(block_lists: Sequence[BlockList]) -> list[tuple[nn.Module, str]]:
    """The blocks of all lists, each once, with their names."""
    pairs = [pair for found in block_lists for pair in zip(found.blocks, found.names, strict=True)]
    return list({id(block): (block, name) for block, name in pairs}.values())


@contextmanager
def preserved_rng(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Put the random streams back on leaving: the CPU's, Python's, NumPy's, and those of the tensors' devices.

    Args:
        tensors: On the devices whose streams count.
    """
    devices = rng_devices(tensors)
    states, host = rng_states(devices), host_rng()
    try:
        yield
    finally:
        set_rng_states(devices, states)
        set_host_rng(host)
