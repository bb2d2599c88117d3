"""The engine's heart: calls that keep their inputs in forward and are made again in backward.

While a frame's calls run, every tensor that autograd saves is packed into an empty holder; the first holder that
backward asks for makes the frame replay its calls and fill all holders that are still alive. Public torch API
only: this file is the owner of `saved_tensors_hooks`.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from lightning_recompute.ambient import (
    BufferNames,
    ModuleState,
    RngStates,
    Surroundings,
    rng_states,
    same_rng,
    set_rng_states,
    version_of,
)

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class RecomputeError(RuntimeError):
    """Found while training: a replay cannot give, or did not give, what the forward gave."""


class _Stop(BaseException):
    """Leaves a replay at the last tensor still needed; no `except Exception` of a user's forward stops it."""


class _SaveInputs(torch.autograd.Function):
    """Holds tensors as autograd holds them: hooks around a unit see them, and writes to them are found."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(0)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        return torch.empty(0)


@dataclass(frozen=True, slots=True)
class _Input:
    """Stands for a tensor argument: its place among the saved inputs."""

    position: int
    requires_grad: bool

    def take(self, saved: Sequence[Tensor], copy: bool) -> Tensor:
        tensor = saved[self.position].detach().requires_grad_(self.requires_grad)
        return tensor.clone() if copy else tensor


@dataclass(frozen=True, slots=True)
class _Returned:
    """Stands for an argument that an earlier call of the same frame returned."""

    call: int
    leaf: int


class FreshCopy:
    """Stands for an argument that the forward fills, such as a cache: each run of the forward gets its own copy.

    Args:
        value: The argument as the caller passed it. Its objects and containers are copied, tensors are shared.
    """

    def __init__(self, value: Any) -> None:
        self._value = _copy_object(value)

    def take(self) -> Any:
        """A copy in the state of the call."""
        return _copy_object(self._value)


def _copy_object(value: Any, depth: int = 5) -> Any:
    if isinstance(value, Tensor | torch.Size | torch.dtype | type) or depth == 0 or callable(value):
        return value
    if isinstance(value, list):
        return [_copy_object(entry, depth - 1) for entry in value]
    if isinstance(value, dict):
        return {key: _copy_object(entry, depth - 1) for key, entry in value.items()}
    if not hasattr(value, "__dict__"):
        return value
    twin = copy.copy(value)
    vars(twin).update({name: _copy_object(entry, depth - 1) for name, entry in vars(value).items()})
    return twin


class _Holder:
    """What autograd keeps in place of a tensor. It lives as long as the graph node that saved the tensor."""

    __slots__ = ("__weakref__", "frame", "value")

    def __init__(self, frame: Frame) -> None:
        self.frame = frame
        self.value: Tensor | None = None


class Learned:
    """What the first call of a block taught about it: the buffers and inputs that it writes."""

    __slots__ = ("buffers", "writes_inputs")

    def __init__(self) -> None:
        self.buffers: BufferNames | None = None
        self.writes_inputs: bool | None = None


class _Call:
    """One call of a frame, with all that is needed to make it again."""

    def __init__(self, name: str, function: Callable[..., Any], first_saved: int) -> None:
        self.name = name
        self.function = function
        # a bound method, or an Original
        self.module: nn.Module = function.__self__  # type: ignore[attr-defined]
        self.first_saved = first_saved
        self.leaves: list[Any] = []
        self.spec: TreeSpec
        self.saver: Any = None
        self.on_copies = False
        self.parameters = [(parameter, parameter._version) for parameter in self.module.parameters()]
        self.devices: tuple[torch.device, ...] = ()
        self.rng: RngStates | None = None
        self.surroundings: Surroundings
        self.state: ModuleState

    def replay(self, outputs: Sequence[Sequence[Any]]) -> list[Any]:
        """Run the forward again; returns the leaves of its output."""
        for parameter, version in self.parameters:
            if parameter._version != version:
                raise RecomputeError(_changed_parameter(self))
        try:
            saved = self.saver.saved_tensors
        except RuntimeError as error:
            raise RecomputeError(
                f"{self.name}: an input was changed in place after the block read it, so the block cannot be "
                f"recomputed; write to a copy instead ({error})"
            ) from error
        args, kwargs = tree_unflatten([self._argument(leaf, saved, outputs) for leaf in self.leaves], self.spec)
        if self.rng is not None:
            set_rng_states(self.devices, self.rng)
        with self.state.restored(self.module):
            return tree_flatten(self.surroundings.run(self.function, args, kwargs))[0]

    def _argument(self, leaf: Any, saved: Sequence[Tensor], outputs: Sequence[Sequence[Any]]) -> Any:
        if isinstance(leaf, _Input):
            return leaf.take(saved, self.on_copies)
        if isinstance(leaf, _Returned):
            return outputs[leaf.call][leaf.leaf]
        return leaf.take() if isinstance(leaf, FreshCopy) else leaf


class Frame:
    """The calls of one unit in one forward, and the tensors that autograd saved in them."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []
        # for each tensor saved, in order: its holder, shape and dtype; None for a parameter, which is kept itself
        self.saved: list[tuple[weakref.ref[_Holder], torch.Size, torch.dtype] | None] = []
        # for each call the tensors it returned: place in the output, the tensor, its version
        self._outputs: list[list[tuple[int, weakref.ref[Tensor], int]]] = []
        self._rng_after: RngStates | None = None

    # ---- forward

    def call(self, name: str, function: Callable[..., Any], args: Args, kwargs: Kwargs, learned: Learned) -> Any:
        """Run one block's forward and remember it.

        Args:
            name: The block's name, for messages.
            function: Its forward, bound to the module.
            args: Positional arguments.
            kwargs: Keyword arguments.
            learned: What earlier calls of the block taught; filled by the first.

        Returns:
            What the forward returns.
        """
        call = _Call(name, function, len(self.saved))
        leaves, call.spec = tree_flatten((args, kwargs))
        tensors = self._refer(call, leaves)
        call.devices = tuple(dict.fromkeys(t.device for t in tensors if t.device.type not in ("cpu", "meta")))
        call.surroundings = Surroundings(("cpu", *dict.fromkeys(device.type for device in call.devices)))
        call.state = ModuleState(call.module, learned.buffers)
        # a forward that writes its inputs is replayed on copies; its first call finds that out
        versions = [version_of(tensor) for tensor in tensors]
        copies = [] if learned.writes_inputs is False else [tensor.detach().clone() for tensor in tensors]
        call.on_copies = bool(learned.writes_inputs)
        call.saver = _save(copies if call.on_copies else tensors)
        start = call.rng = rng_states(call.devices)
        self.calls.append(call)
        args, kwargs = tree_unflatten(
            [leaf.take() if isinstance(leaf, FreshCopy) else leaf for leaf in leaves], call.spec
        )
        with saved_tensors_hooks(self._pack, _unpack):
            result = function(*args, **kwargs)
        if learned.writes_inputs is None:
            learned.writes_inputs = call.on_copies = versions != [version_of(tensor) for tensor in tensors]
            if call.on_copies:
                call.saver = _save(copies)
        self._settle_rng(call, start)
        try:
            written = call.state.settle(call.module, compare_values=learned.buffers is None)
        except LookupError as error:
            raise RecomputeError(
                f"{name}: its forward wrote the buffer {error} for the first time after its first call, so the value "
                "before is not known; write it from the first step on, or keep this block out of recompute"
            ) from None
        learned.buffers = written | (learned.buffers or frozenset())
        self._outputs.append(
            [
                (index, weakref.ref(leaf), version_of(leaf))
                for index, leaf in enumerate(tree_flatten(result)[0])
                if isinstance(leaf, Tensor)
            ]
        )
        return result

    def check_follows(self, name: str, args: Args, kwargs: Kwargs) -> None:
        """Refuse a call whose hidden state is not what the block before returned.

        Raises:
            RecomputeError: Something between the two blocks of a unit made another tensor of it, or wrote to it.
        """
        first = next((leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)), None)
        for _, output, version in self._outputs[-1]:
            if first is not None and output() is first and version_of(first) == version:
                return
        raise RecomputeError(
            f"{self.calls[-1].name} -> {name}: something between these two blocks of one unit changes the hidden "
            "state, which a replay of the unit would miss; use num_layers=1 (a unit for each block)"
        )

    def close(self) -> None:
        """Drop what only a further call would need."""
        self._rng_after = None
        self._outputs.clear()

    def _refer(self, call: _Call, leaves: list[Any]) -> list[Tensor]:
        """Fill the call's leaves with references for tensors; returns the tensors to be saved."""
        returned = {
            id(output()): (_Returned(index, leaf), version)
            for index, outputs in enumerate(self._outputs)
            for leaf, output, version in outputs
        }
        tensors: list[Tensor] = []
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                call.leaves.append(leaf)
                continue
            reference, version = returned.get(id(leaf), (None, 0))
            if reference is not None and version == version_of(leaf):
                call.leaves.append(reference)
            else:
                call.leaves.append(_Input(len(tensors), leaf.requires_grad))
                tensors.append(leaf)
        return tensors

    def _settle_rng(self, call: _Call, start: RngStates) -> None:
        """Keep a state only where something was drawn and the replay of the calls before does not end in it."""
        after = rng_states(call.devices)
        if same_rng(start, after):
            call.rng = None
            return
        if self._rng_after is not None and same_rng(start, self._rng_after):
            call.rng = None
        self._rng_after = after

    def _pack(self, tensor: Tensor) -> _Holder | tuple[_Call, nn.Parameter, int]:
        if isinstance(tensor, nn.Parameter):
            self.saved.append(None)
            return self.calls[-1], tensor, tensor._version
        holder = _Holder(self)
        self.saved.append((weakref.ref(holder), tensor.shape, tensor.dtype))
        return holder

    # ---- backward

    def replay(self) -> None:
        """Run the calls again, up to the last tensor still needed, and give every live holder its value."""
        last = max(index for index, entry in enumerate(self.saved) if entry is not None and entry[0]() is not None)
        position = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal position
            index, position = position, position + 1
            entry = self.saved[index] if index < len(self.saved) else None
            value = tensor.detach()
            if entry is not None:
                reference, shape, dtype = entry
                if (tensor.shape, tensor.dtype) != (shape, dtype):
                    raise RecomputeError(
                        f"{name}: the replay saved {_describe(tensor.shape, tensor.dtype)} where the forward saved "
                        f"{_describe(shape, dtype)} (tensor {index - first} of the block). {_DIFFERS}"
                    )
                holder = reference()
                if holder is not None and holder.value is None:
                    holder.value = value
            if index == last:
                raise _Stop
            return value

        devices = tuple(dict.fromkeys(device for call in self.calls for device in call.devices))
        now = rng_states(devices) if any(call.rng is not None for call in self.calls) else None
        outputs: list[list[Any]] = []
        name, first = self.calls[0].name, 0
        try:
            with torch.enable_grad(), saved_tensors_hooks(pack, _as_it_is):
                for call in self.calls:
                    name, first = call.name, call.first_saved
                    if position != first:
                        raise RecomputeError(
                            f"{self.calls[len(outputs) - 1].name}: the replay saved {position} tensors up to the end "
                            f"of this block, the forward {first}. {_DIFFERS}"
                        )
                    outputs.append(call.replay(outputs))
        except _Stop:
            return
        finally:
            if now is not None:
                set_rng_states(devices, now)
        raise RecomputeError(
            f"{self.calls[-1].name}: the replay saved {position} tensors, the forward {len(self.saved)}. {_DIFFERS}"
        )


_DIFFERS = (
    "The block does not compute the same thing twice: look for data-dependent branches, counters, or random numbers "
    "from a source other than torch's default generators; code that must run once can ask is_recomputing()"
)


def _unpack(packed: _Holder | tuple[_Call, nn.Parameter, int]) -> Tensor:
    if not isinstance(packed, _Holder):
        call, parameter, version = packed
        if parameter._version != version:
            raise RecomputeError(_changed_parameter(call))
        return parameter
    if packed.value is None:
        packed.frame.replay()
    value, packed.value = packed.value, None  # dropped as torch's own saved tensors are: a second backward replays
    assert value is not None, "a replay fills every live holder"
    return value


def _as_it_is(value: Tensor) -> Tensor:
    return value


def _save(tensors: Sequence[Tensor]) -> Any:
    anchor = torch.empty(0, requires_grad=True)  # so that there is a node even where no input needs grad
    return _SaveInputs.apply(anchor, *tensors).grad_fn  # type: ignore[no-untyped-call]  # torch leaves it untyped


def _changed_parameter(call: _Call) -> str:
    versions = {id(parameter): version for parameter, version in call.parameters}
    changed = [name for name, p in call.module.named_parameters() if versions.get(id(p)) != p._version]
    return (
        f"{call.name}: parameter {', '.join(changed) or 'of the block'} was changed in place between forward and "
        "backward, so the block cannot be recomputed; run the backward before the optimizer step"
    )


def _describe(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{tuple(shape)} {str(dtype).removeprefix('torch.')}"
