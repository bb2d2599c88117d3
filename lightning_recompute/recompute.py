"""Applying a plan to a model: its blocks keep their inputs in forward and are run again in backward.

A unit is one or several consecutive blocks of an unmodified model; nothing is wrapped, so that names, classes,
state dict, deepcopy and pickle of the model stay as they were.

Stated limits: `parameter.data = ...` between forward and backward is not seen (plain autograd does not see it
either), and the transforms of `torch.func` are refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from lightning_recompute.ambient import is_recomputing
from lightning_recompute.blocks import BlockList, find_blocks
from lightning_recompute.frame import Args, Frame, FreshCopy, Kwargs, Learned, RecomputeError
from lightning_recompute.patch import Patch
from lightning_recompute.plan import Full, Keep, RecomputePlan, Segment
from lightning_recompute.policy import RecomputePolicy

__all__ = ["RecomputeError", "RecomputeHandle", "apply_recompute", "is_recomputing"]


class Unit:
    """What the blocks of one unit share: names, the frame that is open, what was learned. It holds no module.

    A copy (deepcopy, pickle) starts without a frame.

    Args:
        names: Names of the unit's blocks in forward order.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.learned = [Learned() for _ in names]
        # the graph owns the frame: without a graph (an exception, a dropped loss) nothing is left of it
        self._frame: weakref.ref[Frame] | None = None
        self._next = 0

    def __reduce__(self) -> tuple[type[Unit], tuple[tuple[str, ...]]]:
        return Unit, (self.names,)

    def expecting(self, index: int) -> Frame | None:
        """The open frame if block `index` is its next; any other frame is dropped."""
        frame = self._frame() if self._frame is not None and self._next == index else None
        self._frame = None
        return frame

    def leave_open(self, frame: Frame, index: int) -> None:
        """Let block `index + 1` go on with the frame; after the last block it is closed."""
        if index + 1 == len(self.names):
            frame.close()
        else:
            self._frame, self._next = weakref.ref(frame), index + 1


@torch.compiler.disable
def recomputed_forward(original: Callable[..., Any], unit: Unit, index: int, /, *args: Any, **kwargs: Any) -> Any:
    """The patched forward of block `index` of a unit."""
    if not torch.is_grad_enabled():
        return original(*args, **kwargs)
    module: nn.Module = original.__self__  # type: ignore[attr-defined]
    frame = unit.expecting(index)
    if frame is None and not _needs_grad(module, args, kwargs):
        return original(*args, **kwargs)
    name = unit.names[index]
    if torch._C._are_functorch_transforms_active():
        raise RecomputeError(f"{name}: torch.func transforms do not work on a recomputed block; remove() the recompute")
    args = tuple(_checked_cache(value, module, name) for value in args)
    kwargs = {key: _checked_cache(value, module, name) for key, value in kwargs.items()}
    if frame is None:
        frame = Frame()
    else:
        frame.check_follows(name, args, kwargs)
    result = frame.call(name, original, args, kwargs, unit.learned[index])
    unit.leave_open(frame, index)
    return result


def _needs_grad(module: nn.Module, args: Args, kwargs: Kwargs) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters()) or any(
        isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_flatten((args, kwargs))[0]
    )


def _is_cache(value: Any) -> bool:
    return not isinstance(value, Tensor) and hasattr(value, "get_seq_length") and hasattr(value, "update")


def _checked_cache(value: Any, module: nn.Module, name: str) -> Any:
    """A stand-in for an empty key-value cache of Hugging Face's kind; anything else as it is.

    Forward and replay each append to a cache of their own, so that neither sees the other's keys. The model's
    cache stays empty, as it should in training: it would hold the keys and values of every block.
    """
    if not _is_cache(value):
        return value
    layer = next((part.layer_idx for part in module.modules() if isinstance(getattr(part, "layer_idx", None), int)), 0)
    if length := int(value.get_seq_length(layer)):
        raise RecomputeError(
            f"{name}: a key-value cache that holds {length} positions cannot be recomputed, since the block appends to "
            "it; train with use_cache=False, or keep this block out of recompute"
        )
    return FreshCopy(value)


class RecomputeHandle:
    """A plan applied to a model; a context manager that removes it on leaving.

    Args:
        plan: What was applied.
        block_lists: Where.
        patches: The patched forwards.
    """

    def __init__(self, plan: RecomputePlan, block_lists: Sequence[BlockList], patches: Sequence[Patch]) -> None:
        self.plan = plan
        self.block_lists = tuple(block_lists)
        self._patches = list(patches)

    def remove(self) -> None:
        """Put the model's forwards back as they were; a second call does nothing."""
        while self._patches:
            self._patches.pop().remove()

    def __enter__(self) -> RecomputeHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.remove()

    def __str__(self) -> str:
        lists = " and ".join(map(str, self.block_lists))
        return f"{lists}\n{self.plan}"


def apply_recompute(
    module: nn.Module, what: RecomputePolicy | RecomputePlan, *, blocks: str | Sequence[str] | None = None
) -> RecomputeHandle:
    """Recompute a model's blocks as a policy or plan says, until the handle is removed.

    Args:
        module: The model; its own forward, parameters and names are not touched.
        what: A policy in Megatron's words, or an explicit plan.
        blocks: Dotted paths of block lists or class names of blocks. None: found by `find_blocks`.

    Returns:
        The handle: `.plan`, `.block_lists`, `.remove()`; also a context manager.

    Raises:
        ValueError: No blocks, a plan for another number of blocks, a unit that spans two lists, an action or
            placement that this model or device cannot have, or a model that is recomputed already.
        TypeError: `what` is neither policy nor plan.
    """
    lists = find_blocks(module, blocks)
    lengths = [len(block_list) for block_list in lists]
    if isinstance(what, RecomputePolicy):
        plan = what.plan(lengths)
    elif isinstance(what, RecomputePlan):
        plan = what
    else:
        raise TypeError(f"a RecomputePolicy or a RecomputePlan is due, found {type(what).__name__}")
    if plan.num_blocks != sum(lengths):
        raise ValueError(
            f"the plan covers {plan.num_blocks} blocks, the model has {sum(lengths)}: "
            f"{' and '.join(map(str, lists))}. Make the plan for this model, or name other blocks with blocks="
        )
    modules = [block for block_list in lists for block in block_list.blocks]
    names = [name for block_list in lists for name in block_list.names]
    _check(plan, lengths, modules, names)
    patches: list[Patch] = []
    patched: set[int] = set()
    try:
        for segment in plan.segments:
            if isinstance(segment.action, Full):
                unit = Unit(names[segment.start : segment.stop])
                for index in range(segment.start, segment.stop):
                    if id(modules[index]) not in patched:
                        patched.add(id(modules[index]))
                        patches.append(Patch(modules[index], recomputed_forward, unit, index - segment.start))
    except BaseException:
        RecomputeHandle(plan, lists, patches).remove()
        raise
    return RecomputeHandle(plan, lists, patches)


def _check(plan: RecomputePlan, lengths: Sequence[int], modules: Sequence[nn.Module], names: Sequence[str]) -> None:
    """Refuse what cannot be applied, before anything is."""
    borders = {sum(lengths[:index]) for index in range(1, len(lengths))}
    actions: dict[int, tuple[str, Segment]] = {}
    for segment in plan.segments:
        where = f"the plan's segment of {segment}"
        if not isinstance(segment.action, Full | Keep):
            raise ValueError(f"{where}: action {segment.action.name!r} is not supported; full and keep are")
        if isinstance(segment.action, Full):
            _check_placement(segment.action, where)
            if crossed := sorted(border for border in borders if segment.start < border < segment.stop):
                raise ValueError(
                    f"{where} spans two block lists: block {crossed[0]} ({names[crossed[0]]}) begins another; "
                    "end the unit there"
                )
        for index in range(segment.start, segment.stop):
            block, name = modules[index], names[index]
            if is_patched(block):
                raise ValueError(f"{name} is recomputed already; call remove() of the handle that does it first")
            other_name, other = actions.setdefault(id(block), (name, segment))
            if other_name != name and (other.action != segment.action or _is_group(other) or _is_group(segment)):
                raise ValueError(
                    f"{name} is the same module as {other_name}: a block that stands in the list several times needs "
                    "one action everywhere and units of one block (num_layers=1)"
                )


def _is_group(segment: Segment) -> bool:
    return isinstance(segment.action, Full) and segment.stop - segment.start > 1


def _check_placement(action: Full, where: str) -> None:
    if action.inputs == "shard":
        raise ValueError(
            f"{where}: distribute_saved_activations keeps unit inputs as shards over the tensor-parallel group, "
            "and there is none (its size is 1); leave it out"
        )
    if action.inputs == "host":
        raise ValueError(
            f"{where}: offload_saved_activations is not supported on this device: the unit inputs "
            "are in host memory already on a CPU run; leave it out"
        )


def is_patched(module: nn.Module) -> bool:
    """Whether the module's forward is recomputed now."""
    return getattr(module.__dict__.get("forward"), "func", None) is recomputed_forward
