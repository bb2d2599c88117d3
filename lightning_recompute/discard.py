"""Freed outputs: what a norm or an activation made is not kept for its consumer but made again in backward.

A consumer never saves the output object itself: a linear saves a 2-D view of it, autocast a cast. So the block's
pack hook follows a saved tensor's `grad_fn` through views and casts. Where it comes to a node that a patched
module marked, or to a node that can be evaluated again from what it saved itself (`F.gelu`, the product of
SwiGLU), it keeps a reference to that instead of the tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from lightning_recompute.ambient import check_version, version_of
from lightning_recompute.errors import RecomputeError
from lightning_recompute.frame import Frame, keep, kept
from lightning_recompute.patch import without_dynamo
from lightning_recompute.prior_recompute import others_recompute
from lightning_recompute.recompute_unit import Unit, checked_arguments, needs_grad

_MARK = "lightning_recompute.output"
_MAX_STEPS = 8


def _nodes(names: str) -> frozenset[str]:
    return frozenset(f"{name}Backward{number}" for name in names.split() for number in (0, 1))


_RESHAPES = _nodes("View UnsafeView ReshapeAlias Alias Unsqueeze Squeeze Unflatten")
_VIEWS = _RESHAPES | _nodes("Transpose T Expand Permute Slice Select Split SplitWithSizes AsStrided")
_CAST = "ToCopyBackward0"


class _Output:
    """The output of a marked module: how to make it again.

    It lives as long as its graph node, so it does not hold the frame: that goes when backward has passed the module
    and every consumer, also where somebody keeps the loss.

    Args:
        frame: Holds the module's call.
        leaf: Place of the tensor in the output.
        tensor: The tensor.
    """

    def __init__(self, frame: Frame, leaf: int, tensor: Tensor) -> None:
        self._frame = weakref.ref(frame)
        self._leaf = leaf
        self._tensor = weakref.ref(tensor)
        self._version = version_of(tensor)
        self._contiguous = tensor.is_contiguous()
        self._numel = tensor.numel()
        self.offset = int(tensor.storage_offset())
        self.output_nr = tensor.output_nr
        self._references: list[weakref.ref[_Reference]] = []

    def refer(self, saved: Tensor, was_cast: bool) -> _Reference | None:
        """A reference in place of a saved tensor; None if it may hold something else than the output."""
        tensor = self._tensor()
        if was_cast:
            # a cast makes a new tensor: it is the output's only if nothing was cut on the way
            same = tensor is not None and version_of(tensor) == self._version
            if not (same and self._contiguous and saved.is_contiguous() and saved.numel() == self._numel):
                return None
        elif version_of(saved) != self._version:
            return None
        frame = self._frame()
        if frame is None:  # the module saved nothing, so there is nothing to make its output from
            return None
        reference = _Reference(self, frame, saved, 0 if was_cast else int(saved.storage_offset()) - self.offset)
        self._references.append(weakref.ref(reference))
        return reference

    def make(self, frame: Frame) -> None:
        """Make the output again and give it to every reference that is still alive."""
        value = frame.replay(for_output=True)[self._leaf].detach()
        for found in self._references:
            reference = found()
            if reference is not None:
                reference.value = value


class _Freed:
    """Kept by the consumer in place of a tensor that can be made again.

    Args:
        saved: The tensor.
        offset: Where in the memory of what will be made it begins.
    """

    __slots__ = ("_counter", "_dtype", "_offset", "_size", "_stride", "_version")

    def __init__(self, saved: Tensor, offset: int) -> None:
        self._dtype = saved.dtype
        self._size = saved.size()
        self._stride = saved.stride()
        self._offset = offset
        self._counter = _version_counter(saved)
        self._version = version_of(self._counter)

    def check_unwritten(self) -> None:
        """Refuse what autograd would: a write after the consumer has read it."""
        check_version(self._counter, self._version, self._size)

    def shaped(self, value: Tensor) -> Tensor:
        """What was saved, of the value that was made again."""
        value = value.to(self._dtype)
        return value.as_strided(self._size, self._stride, value.storage_offset() + self._offset)


def _version_counter(tensor: Tensor) -> Tensor | None:
    """A tensor without memory that shares the version counter; None for a subclass, which may have none."""
    if type(tensor) is not Tensor:
        return None
    alias = tensor.detach()
    alias.data = tensor.new_empty(0)
    return alias


class _Reference(_Freed):
    """In place of a marked module's output, a view or a cast of it."""

    __slots__ = ("__weakref__", "_frame", "_output", "value")

    def __init__(self, output: _Output, frame: Frame, saved: Tensor, offset: int) -> None:
        super().__init__(saved, offset)
        self._output = output
        self._frame = frame
        self.value: Tensor | None = None

    def take(self) -> Tensor:
        self.check_unwritten()
        if self.value is None:
            self._output.make(self._frame)
        value = self.value
        assert value is not None, "an output is given to every live reference"
        if not self._frame.values_last:
            self.value = None
        return self.shaped(value)


def _signed(saved: int) -> int:
    """A dimension, which nodes save without its sign."""
    return saved - 2**64 if saved >= 2**63 else saved


def _multiplied(node: Any) -> Tensor:
    product: Tensor = node._saved_self * node._saved_other
    return product


# nodes whose output follows from what they saved anyway
_NODES: dict[str, Callable[[Any], Tensor]] = {
    "GeluBackward0": lambda node: F.gelu(node._saved_self, approximate=node._saved_approximate),
    "SiluBackward0": lambda node: F.silu(node._saved_self),
    "MishBackward0": lambda node: F.mish(node._saved_self),
    "HardswishBackward0": lambda node: F.hardswish(node._saved_self),
    "LeakyReluBackward0": lambda node: F.leaky_relu(node._saved_self, node._saved_negative_slope),
    "SoftplusBackward0": lambda node: F.softplus(node._saved_self, node._saved_beta, node._saved_threshold),
    "GluBackward0": lambda node: F.glu(node._saved_self, _signed(node._saved_dim)),
    "MulBackward0": _multiplied,
}
_ACTIVATIONS = frozenset(_NODES) - {"MulBackward0"} | {"SigmoidBackward0", "TanhBackward0", "ReluBackward0"}


def _marks(node: Node) -> dict[str, Any]:
    marks: Any = node.metadata  # a property, which torch's stub declares as a method
    found: dict[str, Any] = marks
    return found


def _can_evaluate(node: Node) -> bool:
    if node.name() != "MulBackward0":
        return node.name() in _NODES
    # both factors are saved only if both need grad; a product counts as an activation when one factor is one
    factors = [_through(factor) for factor, _ in node.next_functions if factor is not None]
    return len(factors) == 2 and any(factor.name() in _ACTIVATIONS for factor in factors)


def _through(node: Node) -> Node:
    """The node behind views and casts."""
    for _ in range(_MAX_STEPS):
        following = node.next_functions[0][0] if node.name() in _VIEWS or node.name() == _CAST else None
        if following is None:
            break
        node = following
    return node


class _Evaluation(_Freed):
    """In place of a node's output."""

    __slots__ = ("_device_type", "_node")

    def __init__(self, node: Node, saved: Tensor) -> None:
        super().__init__(saved, int(saved.storage_offset()))
        self._node = node
        self._device_type = saved.device.type

    def take(self) -> Tensor:
        self.check_unwritten()
        try:
            with torch.no_grad(), torch.autocast(self._device_type, enabled=False):
                value = _NODES[self._node.name()](self._node)
        except RuntimeError as error:
            if "have already been freed" not in str(error):
                raise
            raise RecomputeError(
                "an activation's output is computed again from what the activation itself saved, and an earlier "
                "backward has freed that; give that backward retain_graph=True, or leave out the label 'act'"
            ) from error
        return self.shaped(value)


Packed = _Reference | _Evaluation | tuple[Tensor, int]


class _Recogniser:
    """Hooks around a block's forward.

    Args:
        nodes: Recognise activations by their nodes as well.
    """

    def __init__(self, nodes: bool) -> None:
        self._nodes = nodes

    def hooks(self) -> saved_tensors_hooks:
        return saved_tensors_hooks(self._pack, _unpack)

    def recognises(self, saved: Tensor) -> bool:
        """Whether a tensor would not be kept."""
        return saved.grad_fn is not None and self._recognised(saved, saved.grad_fn) is not None

    def _pack(self, saved: Tensor) -> Packed:
        node = saved.grad_fn
        return (None if node is None else self._recognised(saved, node)) or keep(saved)

    def _recognised(self, saved: Tensor, node: Node) -> _Reference | _Evaluation | None:
        was_cast, reordered, output_nr = False, False, saved.output_nr
        for _ in range(_MAX_STEPS):
            mark = _marks(node).get(_MARK)
            if isinstance(mark, _Output):
                found = mark.output_nr == output_nr and not (was_cast and reordered)
                return mark.refer(saved, was_cast) if found else None
            if self._nodes and _can_evaluate(node):
                # whether an output was written before it was cast, the cast does not tell
                return None if was_cast or version_of(saved) else _Evaluation(node, saved)
            if node.name() == _CAST:
                was_cast = True
            elif node.name() not in _VIEWS:
                return None
            elif node.name() not in _RESHAPES:
                reordered = True
            following, output_nr = node.next_functions[0]
            if following is None:
                return None
            node = following
        return None


def is_freed(tensor: Tensor) -> bool:
    """Whether what is saved of a tensor at this place is freed anyway: by the unit around, or as a freed output."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    owner = None if hooks is None else getattr(hooks[0], "__self__", None)
    return isinstance(owner, Frame) or (isinstance(owner, _Recogniser) and owner.recognises(tensor))


def _unpack(packed: Packed) -> Tensor:
    return kept(packed) if isinstance(packed, tuple) else packed.take()


# the hooks run inside compiled code too
without_dynamo(_Recogniser._pack, _unpack)


@torch.compiler.disable
def recognising_forward(original: Callable[..., Any], nodes: bool, /, *args: Any, **kwargs: Any) -> Any:
    """The patched forward of a block whose norms or activations free their outputs."""
    if not torch.is_grad_enabled() or others_recompute():
        return original(*args, **kwargs)
    with _Recogniser(nodes).hooks():
        return original(*args, **kwargs)


@torch.compiler.disable
def freeing_forward(original: Callable[..., Any], unit: Unit, index: int, /, *args: Any, **kwargs: Any) -> Any:
    """The patched forward of a module whose output is freed after its consumer has read it."""
    module: nn.Module = original.__self__  # type: ignore[attr-defined]  # a bound method, or an Original
    if not torch.is_grad_enabled() or others_recompute() or not needs_grad(module, args, kwargs):
        return original(*args, **kwargs)
    name = unit.names[index]
    args, kwargs = checked_arguments(module, name, args, kwargs)
    frame = unit.new_frame()
    result = frame.call(name, original, args, kwargs, unit.learned[index])
    frame.close()
    # the graph of a module that returns what it was given is not its own, and holding it here would make a circle
    given = [leaf.grad_fn for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if isinstance(result, Tensor) and result.grad_fn is not None and result.grad_fn not in given:
        _marks(result.grad_fn)[_MARK] = _Output(frame, 0, result)
    return result
