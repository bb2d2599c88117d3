"""A unit: consecutive blocks, or one module inside a block, that share a frame in each forward."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_recompute.ambient import is_recomputing
from lightning_recompute.calls import Args, FreshCopy, Kwargs, Learned
from lightning_recompute.errors import RecomputeError
from lightning_recompute.frame import Frame
from lightning_recompute.placement import DevicePlacement, Placement
from lightning_recompute.prior_recompute import others_recompute
from lightning_recompute.save_ops import OpSet

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class UnitSettings:
    """What the units of one segment of a plan have in common.

    Args:
        placement: Where unit inputs live.
        ops: Operators whose outputs are saved.
        check: Compare the first replay of each block with its forward.
    """

    placement: Placement = field(default_factory=DevicePlacement)
    ops: OpSet | None = None
    check: bool = False


class Unit:
    """What the blocks of one unit share: names, the frame that is open, what was learned. It holds no module.

    A copy (deepcopy, pickle) starts without a frame.

    Args:
        names: Names of the unit's blocks in forward order.
        settings: How its frames work.
    """

    def __init__(self, names: Sequence[str], settings: UnitSettings | None = None) -> None:
        self.names = tuple(names)
        self.settings = settings or UnitSettings()
        self.learned = [Learned() for _ in names]
        # the graph owns the frame: without a graph (an exception, a dropped loss) nothing is left of it
        self._frame: weakref.ref[Frame] | None = None
        self._next = 0
        self._stood_back = False

    def __reduce__(self) -> tuple[type[Unit], tuple[tuple[str, ...], UnitSettings]]:
        return Unit, (self.names, self.settings)

    def new_frame(self) -> Frame:
        """A frame for one forward."""
        return Frame(self.settings.placement, self.settings.ops, self.settings.check)

    def stand_back(self, name: str) -> None:
        """Say once that the model's own recompute around a block wins."""
        if not self._stood_back and not is_recomputing():
            self._stood_back = True
            logger.warning("%s runs inside torch.utils.checkpoint, called by the model itself: that one wins", name)

    def expecting(self, index: int) -> Frame | None:
        """The open frame if block `index` is its next; any other frame is dropped."""
        frame = self._frame() if self._frame is not None and self._next == index else None
        self._frame = None
        return frame

    def leave_open(self, frame: Frame, index: int) -> None:
        """Let block `index + 1` go on with the frame; after the last block it is closed.

        Raises:
            RecomputeError: An operator to be saved did not occur in the unit.
        """
        if index + 1 == len(self.names):
            frame.close()
            if self.settings.ops is not None:
                self.settings.ops.check_seen(self.names)
        else:
            self._frame, self._next = weakref.ref(frame), index + 1


@torch.compiler.disable
def recomputed_forward(original: Callable[..., Any], unit: Unit, index: int, /, *args: Any, **kwargs: Any) -> Any:
    """The patched forward of block `index` of a unit."""
    if not torch.is_grad_enabled():
        return original(*args, **kwargs)
    if others_recompute():
        unit.stand_back(unit.names[index])
        return original(*args, **kwargs)
    module: nn.Module = original.__self__  # type: ignore[attr-defined]  # a bound method, or an Original
    frame = unit.expecting(index)
    if frame is None and not needs_grad(module, args, kwargs):
        return original(*args, **kwargs)
    name = unit.names[index]
    args, kwargs = checked_arguments(module, name, args, kwargs)
    if frame is None:
        frame = unit.new_frame()
    else:
        frame.check_follows(name, args, kwargs)
    result = frame.call(name, original, args, kwargs, unit.learned[index])
    unit.leave_open(frame, index)
    return result


def needs_grad(module: nn.Module, args: Args, kwargs: Kwargs) -> bool:
    """Whether backward can reach anything in the call."""
    return any(parameter.requires_grad for parameter in module.parameters()) or any(
        isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves((args, kwargs))
    )


def checked_arguments(module: nn.Module, name: str, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """The arguments with stand-ins for empty key-value caches of Hugging Face's kind.

    Forward and replay each append to a cache of their own, so that neither sees the other's keys. The model's
    cache stays empty, as it should in training: it would hold the keys and values of every block.

    Raises:
        RecomputeError: A cache is filled, or a transform of torch.func is active.
    """
    if torch._C._are_functorch_transforms_active():
        raise RecomputeError(f"{name}: torch.func transforms do not work on a recomputed block; remove() the recompute")
    return (
        tuple(_checked_cache(value, module, name) for value in args),
        {key: _checked_cache(value, module, name) for key, value in kwargs.items()},
    )


def is_cache(value: Any) -> bool:
    """Whether an argument is a key-value cache of Hugging Face's kind, which a block fills: each run gets its own."""
    return hasattr(value, "get_seq_length") and hasattr(value, "update")


def _checked_cache(value: Any, module: nn.Module, name: str) -> Any:
    if not is_cache(value):
        return value
    layer = next((part.layer_idx for part in module.modules() if isinstance(getattr(part, "layer_idx", None), int)), 0)
    if length := int(value.get_seq_length(layer)):
        raise RecomputeError(
            f"{name}: a key-value cache that holds {length} positions cannot be recomputed, since the block appends to "
            "it; train with use_cache=False, or keep this block out of recompute"
        )
    return FreshCopy(value)
