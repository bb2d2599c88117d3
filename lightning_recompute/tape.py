"""Core attention that is no module but a few function calls inside an attention module.

A function mode records them, from the product of queries and keys to the product with the values (or one call of
`scaled_dot_product_attention`), as one call of a frame that is replayed function by function.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
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
from lightning_recompute.object_state import Stream, stream_of
from lightning_recompute.prior_recompute import inside_torch_checkpoint, others_recompute
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


@dataclass(frozen=True, slots=True)
class _Modes:
    """Whether gradients and autocast were on for a step; a module may switch them in the middle."""

    grad: bool
    device_type: str
    autocast: bool
    dtype: torch.dtype

    @classmethod
    def now(cls, device_type: str) -> _Modes:
        autocast, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
        return cls(torch.is_grad_enabled(), device_type, autocast, dtype)

    def entered(self, stack: contextlib.ExitStack) -> None:
        now = _Modes.now(self.device_type)
        if now.grad != self.grad:
            stack.enter_context(torch.set_grad_enabled(self.grad))
        if (now.autocast, now.dtype) != (self.autocast, self.dtype):
            stack.enter_context(torch.autocast(self.device_type, self.dtype, self.autocast))


@dataclass(frozen=True, slots=True)
class _Step:
    function: Callable[..., Any]
    leaves: Sequence[Any]
    spec: TreeSpec
    modes: _Modes


class _Result:
    """A tensor that was made on the tape, in the state in which the tape left it."""

    def __init__(self, tensor: Tensor, made: _Made) -> None:
        self.tensor = weakref.ref(tensor)
        self.made = made
        self.see(tensor)

    def see(self, tensor: Tensor) -> None:
        self._needed_grad = tensor.requires_grad
        self._version = version_of(tensor)

    def is_still(self, tensor: Tensor) -> bool:
        """Whether it is this tensor, not written off the tape and not what an autograd.Function has made of it."""
        seen = self._needed_grad, self._version
        return self.tensor() is tensor and (tensor.requires_grad, version_of(tensor)) == seen


class _Tape:
    """Functions called one after the other, and which results are arguments of which.

    Args:
        device_type: Where it runs.
    """

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self.inputs: list[Tensor] = []
        self._steps: list[_Step] = []
        self._made: dict[int, _Result] = {}

    def refer(self, leaf: Any) -> Any:
        """What stands for an argument on the tape."""
        if isinstance(leaf, torch.Generator):
            return stream_of(leaf)
        if not isinstance(leaf, Tensor):
            return leaf
        found = self._find(leaf)
        if found is not None:
            return found
        for position, tensor in enumerate(self.inputs):
            if tensor is leaf:
                return _Given(position)
        self.inputs.append(leaf)
        return _Given(len(self.inputs) - 1)

    def owns(self, tensor: Tensor) -> bool:
        """Whether a tensor was made on the tape and is no view of one from outside, so that a replay may write it."""
        return self._find(tensor) is not None and not self.has_used(tensor)

    def has_used(self, tensor: Tensor) -> bool:
        """Whether a tensor shares memory with one from outside that the tape has used."""
        storage = tensor.untyped_storage()._cdata
        return any(given.untyped_storage()._cdata == storage for given in self.inputs)

    def _find(self, tensor: Tensor) -> _Made | None:
        result = self._made.get(id(tensor))
        return result.made if result is not None and result.is_still(tensor) else None

    def add(self, step: _Step, result: Any, written: Sequence[Tensor]) -> None:
        """Go on with a step that has just been made."""
        memory = {tensor.untyped_storage()._cdata for tensor in written}
        for known in self._made.values() if written else ():
            tensor = known.tensor()
            if tensor is not None and tensor.untyped_storage()._cdata in memory:
                known.see(tensor)
        for index, leaf in enumerate(tree_leaves(result)):
            if (
                isinstance(leaf, Tensor)
                and self._find(leaf) is None
                and not any(leaf is given for given in self.inputs)
            ):
                self._made[id(leaf)] = _Result(leaf, _Made(len(self._steps), index))
        self._steps.append(step)

    def close(self) -> None:
        self.inputs.clear()
        self._made.clear()

    def run(self, *inputs: Tensor) -> list[Any]:
        """Call everything again; a result is dropped after its last use."""
        last_use = {
            leaf.step: index
            for index, step in enumerate(self._steps)
            for leaf in step.leaves
            if isinstance(leaf, _Made)
        }
        results: dict[int, list[Any]] = {}
        streams: dict[int, tuple[Stream, Any]] = {}

        def argument(leaf: Any) -> Any:
            if isinstance(leaf, _Given):
                return inputs[leaf.position]
            if isinstance(leaf, _Made):
                return results[leaf.step][leaf.leaf]
            if isinstance(leaf, Stream):
                streams.setdefault(id(leaf.source), (leaf, leaf.read()))
                leaf.write(leaf.state)
                return leaf.source
            return leaf

        try:
            for index, step in enumerate(self._steps):
                args, kwargs = tree_unflatten([argument(leaf) for leaf in step.leaves], step.spec)
                with contextlib.ExitStack() as stack:
                    step.modes.entered(stack)
                    results[index] = tree_leaves(step.function(*args, **kwargs))
                del args, kwargs
                for used in [used for used in results if last_use.get(used, -1) <= index < len(self._steps) - 1]:
                    del results[used]
        finally:
            for stream, state in streams.values():
                stream.write(state)
        return results.get(len(self._steps) - 1, [])


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
        if inside_torch_checkpoint():  # of the module itself: that one wins
            return func(*args, **kwargs)
        if self._tape is None:
            if not torch.is_grad_enabled():
                return func(*args, **kwargs)
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
        tensors = list(_tensors(args, kwargs))
        self._tape = _Tape(tensors[0].device.type)
        self._frame = self._unit.new_frame()
        self._softmax_seen = False
        self._call = self._frame.open_tape(
            self._unit.names[self._index], self._tape.run, tensors, self._unit.learned[self._index]
        )

    def _step(self, func: Any, args: Any, kwargs: Any) -> Any:
        assert self._tape is not None
        assert self._frame is not None
        written = list(_written(func, args, kwargs))
        if not all(map(self._tape.owns, written)):
            # a replay must not write a tensor that is not its own a second time
            if any(map(self._tape.has_used, written)):
                self.finish(written)
            return func(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        references = [self._tape.refer(leaf) for leaf in leaves]
        modes = _Modes.now(self._tape.device_type)
        with self._frame.packing():
            result = func(*args, **kwargs)
        if written or any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):
            self._tape.add(_Step(func, references, spec, modes), result, written)
        return result

    def finish(self, written: Sequence[Tensor] = ()) -> None:
        """End the tape that is open, if any.

        Args:
            written: Tensors about to be written; of inputs that share their memory the replay needs a copy.
        """
        if self._tape is None:
            return
        tape, frame, call = self._tape, self._frame, self._call
        self._tape = self._frame = self._call = None
        assert frame is not None
        assert call is not None
        lost = {tensor.untyped_storage()._cdata for tensor in written}
        inputs = [
            tensor.detach().clone().requires_grad_(tensor.requires_grad)
            if tensor.untyped_storage()._cdata in lost
            else tensor
            for tensor in tape.inputs
        ]
        frame.close_tape(call, inputs)
        tape.close()


# __iadd__ beside __add__ and so on
_IN_PLACE = frozenset(name for name in dir(Tensor) if name.startswith("__i") and hasattr(Tensor, f"__{name[3:]}"))


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """The tensors that a function writes in place."""
    name = getattr(func, "__name__", "")
    in_place = name == "__setitem__" or name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
    position = _position_of_inplace(func)
    if in_place or kwargs.get("inplace") is True or (position is not None and args[position : position + 1] == (True,)):
        yield from (arg for arg in args[:1] if isinstance(arg, Tensor))
    yield from _tensors(kwargs.get("out"), None)


@functools.cache
def _position_of_inplace(func: Any) -> int | None:
    """Where a function of torch.nn.functional has its `inplace`."""
    names = list(inspect.signature(func).parameters) if inspect.isfunction(func) else []
    return names.index("inplace") if "inplace" in names else None


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
