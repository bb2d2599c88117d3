"""Core attention that is no module but a few function calls inside an attention module.

A function mode records them, from the product of queries and keys to the product with the values (or one call of
`scaled_dot_product_attention`), as one call of a frame that is replayed function by function.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from lightning_recompute.ambient import version_of
from lightning_recompute.calls import Call
from lightning_recompute.frame import Frame
from lightning_recompute.prior_recompute import others_recompute
from lightning_recompute.recompute_unit import Unit

_PRODUCTS: frozenset[Any] = frozenset(
    {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, torch.baddbmm, Tensor.baddbmm, torch.einsum}
)
_PROJECTIONS: frozenset[Any] = frozenset({F.linear, torch.addmm, Tensor.addmm, torch.conv1d, F.conv1d})


@dataclass(frozen=True, slots=True)
class _Made:
    """Stands for a tensor that an earlier function on the tape made."""

    step: int
    leaf: int


@dataclass(frozen=True, slots=True)
class _Given:
    """Stands for a tensor from outside of the tape."""

    position: int


class _Tape:
    """Functions called one after the other, and which results are arguments of which."""

    def __init__(self) -> None:
        self.steps: list[tuple[Callable[..., Any], list[Any], TreeSpec]] = []
        self.inputs: list[Tensor] = []
        self._versions: list[int] = []
        self._made: dict[int, tuple[weakref.ref[Tensor], _Made]] = {}

    def refer(self, leaf: Any) -> Any:
        """What stands for an argument on the tape."""
        if not isinstance(leaf, Tensor):
            return leaf
        found = self.made(leaf)
        if found is not None:
            return found
        for position, tensor in enumerate(self.inputs):
            if tensor is leaf:
                return _Given(position)
        self.inputs.append(leaf)
        self._versions.append(version_of(leaf))
        return _Given(len(self.inputs) - 1)

    def made(self, tensor: Tensor) -> _Made | None:
        reference, made = self._made.get(id(tensor), (None, None))
        return made if reference is not None and reference() is tensor else None

    def add(self, function: Callable[..., Any], leaves: list[Any], spec: TreeSpec, result: Any) -> None:
        for index, leaf in enumerate(tree_leaves(result)):
            # a function that writes in place returns its argument, which keeps its first place on the tape
            if isinstance(leaf, Tensor) and self.made(leaf) is None:
                self._made[id(leaf)] = weakref.ref(leaf), _Made(len(self.steps), index)
        self.steps.append((function, leaves, spec))

    def written_inputs(self) -> bool:
        return [version_of(tensor) for tensor in self.inputs] != self._versions

    def close(self) -> None:
        self.inputs.clear()
        self._made.clear()

    def run(self, *inputs: Tensor) -> list[Any]:
        """Call everything again; a result is dropped after its last use."""
        last_use = {
            leaf.step: index
            for index, (_, leaves, _) in enumerate(self.steps)
            for leaf in leaves
            if isinstance(leaf, _Made)
        }
        results: dict[int, list[Any]] = {}
        for index, (function, leaves, spec) in enumerate(self.steps):
            arguments = [
                inputs[leaf.position]
                if isinstance(leaf, _Given)
                else results[leaf.step][leaf.leaf]
                if isinstance(leaf, _Made)
                else leaf
                for leaf in leaves
            ]
            args, kwargs = tree_unflatten(arguments, spec)
            results[index] = tree_leaves(function(*args, **kwargs))
            del args, kwargs, arguments
            for step in [step for step in results if last_use.get(step, -1) <= index and step != len(self.steps) - 1]:
                del results[step]
        return results.get(len(self.steps) - 1, [])


class _CoreAttention(TorchFunctionMode):
    """Finds the core attention among the functions called, and leaves its saved tensors to a frame."""

    def __init__(self, unit: Unit, index: int) -> None:
        super().__init__()
        self._unit = unit
        self._index = index
        self._tape: _Tape | None = None
        self._frame: Frame | None = None
        self._call: Call | None = None
        self._softmax_seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _SEEN_THROUGH:
            with self:
                return _SEEN_THROUGH[func](*args, **kwargs)
        if not torch.is_grad_enabled():
            return func(*args, **kwargs)
        if self._tape is None:
            if func is F.scaled_dot_product_attention and _need_grad(args, kwargs):
                self._open(args, kwargs)
                result = self._step(func, args, kwargs)
                self.finish()
                return result
            if not (func in _PRODUCTS and _multiplies_heads(args)):
                return func(*args, **kwargs)
            self._open(args, kwargs)
        elif func in _PROJECTIONS:
            self.finish()
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        result = self._step(func, args, kwargs)
        self._softmax_seen = self._softmax_seen or "softmax" in name
        if self._tape is not None and func in _PRODUCTS and self._softmax_seen:
            self.finish()
        return result

    def _open(self, args: Any, kwargs: Any) -> None:
        self._tape = _Tape()
        self._frame = self._unit.new_frame()
        self._softmax_seen = False
        self._call = self._frame.open_tape(self._unit.names[self._index], self._tape.run, list(_tensors(args, kwargs)))

    def _step(self, func: Any, args: Any, kwargs: Any) -> Any:
        assert self._tape is not None
        assert self._frame is not None
        leaves, spec = tree_flatten((args, kwargs))
        if _writes(func) and any(isinstance(leaf, Tensor) and self._tape.made(leaf) is None for leaf in leaves[:1]):
            # a replay must not write a tensor that is not its own a second time
            self.finish()
            return func(*args, **kwargs)
        references = [self._tape.refer(leaf) for leaf in leaves]
        with self._frame.packing():
            result = func(*args, **kwargs)
        if _writes(func) or any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):
            self._tape.add(func, references, spec, result)
        return result

    def finish(self) -> None:
        """End the tape that is open, if any."""
        if self._tape is None:
            return
        tape, frame, call = self._tape, self._frame, self._call
        self._tape = self._frame = self._call = None
        assert frame is not None
        assert call is not None
        frame.close_tape(call, tape.inputs)
        tape.close()


def _writes(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")


def _tensors(args: Any, kwargs: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))


def _need_grad(args: Any, kwargs: Any) -> bool:
    return any(tensor.requires_grad for tensor in _tensors(args, kwargs))


def _multiplies_heads(args: Any) -> bool:
    """Whether two batched tensors that are no parameters are multiplied, as queries and keys are."""
    factors = [tensor for tensor in _tensors(args, {}) if tensor.dim() >= 3 and not isinstance(tensor, nn.Parameter)]
    return len(factors) >= 2 and any(factor.requires_grad for factor in factors)


def _unguarded(function: Any) -> Callable[..., Any]:
    """A copy of one of torch's Python functions that does not hand itself to function modes, only what it calls."""
    names = {
        **function.__globals__,
        "has_torch_function": lambda *_: False,
        "has_torch_function_unary": lambda *_: False,
    }
    copy = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


# functions with a core attention inside
_SEEN_THROUGH: dict[Any, Callable[..., Any]] = {
    F.multi_head_attention_forward: _unguarded(F.multi_head_attention_forward)
}


@torch.compiler.disable
def taped_forward(original: Callable[..., Any], unit: Unit, index: int, /, *args: Any, **kwargs: Any) -> Any:
    """The patched forward of an attention module whose core attention is recomputed."""
    if not torch.is_grad_enabled() or others_recompute():
        return original(*args, **kwargs)
    mode = _CoreAttention(unit, index)
    with mode:
        result = original(*args, **kwargs)
    mode.finish()
    return result
