"""The engine's heart: calls that keep their inputs in forward and are made again in backward.

While a frame's calls run, every tensor that autograd saves is packed into an empty holder; the first holder that
backward asks for makes the frame replay its calls and fill all holders that are still alive. Public torch API
only: this file and discard.py are the owners of `saved_tensors_hooks`.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.module_tracker import ModuleTracker

from lightning_recompute.ambient import (
    RngStates,
    Surroundings,
    rng_devices,
    rng_states,
    same_rng,
    set_rng_states,
    version_of,
)
from lightning_recompute.calls import (
    Args,
    Call,
    FreshCopy,
    Input,
    Kwargs,
    Learned,
    Returned,
    host_rng,
    same_host_rng,
)
from lightning_recompute.errors import RecomputeError
from lightning_recompute.module_state import ModuleState, watch_hooks
from lightning_recompute.patch import CompiledOriginal
from lightning_recompute.placement import DevicePlacement, Placement
from lightning_recompute.save_ops import DECISIONS, OpSet, SavedOps

_DECISIONS = OpSet(DECISIONS)
_ON_DEVICE = DevicePlacement()
_DIFFERS = (
    "The block does not compute the same thing twice: look for data-dependent branches, counters, or random numbers "
    "from a source other than torch's default generators; code that must run once can ask is_recomputing()"
)


class _Stop(BaseException):
    """Leaves a replay at the last tensor still needed; no `except Exception` of a user's forward stops it."""


class _Holder:
    """What autograd keeps in place of a tensor. It lives as long as the graph node that saved the tensor."""

    __slots__ = ("__weakref__", "frame", "value")

    def __init__(self, frame: Frame) -> None:
        self.frame = frame
        self.value: Tensor | None = None


Packed = _Holder | tuple[Call, nn.Parameter, int]


class Frame:
    """The calls of one unit in one forward, and the tensors that autograd saved in them.

    Args:
        placement: Where the inputs of its calls live until backward.
        ops: Operators whose outputs are saved rather than computed again.
        check: Compare the first replay of each block with its forward, value by value.
    """

    def __init__(self, placement: Placement = _ON_DEVICE, ops: OpSet | None = None, check: bool = False) -> None:
        self.calls: list[Call] = []
        # for each tensor saved, in order: its holder, shape and dtype; None for a parameter, which is kept itself
        self.saved: list[tuple[weakref.ref[_Holder], torch.Size, torch.dtype] | None] = []
        self._placement = placement
        self._ops = ops
        self._check = check
        # under check: where each tensor was saved, and a copy of it
        self._copies: list[tuple[str, Tensor]] = []
        self._tracker: ModuleTracker | None = None
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

        Raises:
            RecomputeError: The forward wrote a buffer for the first time after its first call.
        """
        module: nn.Module = function.__self__  # type: ignore[attr-defined]  # a bound method, or an Original
        call = Call(name, function, module, len(self.saved))
        first = learned.written is None
        leaves, call.spec = tree_flatten((args, kwargs))
        tensors = self._refer(call, leaves)
        self._surround(call, tensors)
        call.state = ModuleState(module, learned.written)
        call.observers = learned.observers
        # a forward that writes its inputs is replayed on copies; its first call finds that out
        versions = [version_of(tensor) for tensor in tensors]
        copies = [tensor.detach().clone() for tensor in tensors] if first or learned.writes_inputs else []
        call.on_copies = learned.writes_inputs
        call.inputs = self._placement.save(copies if call.on_copies else tensors)
        start = call.rng
        assert start is not None
        if first or learned.draws_on_host:
            call.host_rng = host_rng()
        self.calls.append(call)
        result = self._run(call, leaves, learned, first)
        if first:
            learned.writes_inputs = call.on_copies = versions != [version_of(tensor) for tensor in tensors]
            if call.on_copies:
                call.inputs = self._placement.save(copies)
            learned.draws_on_host = call.host_rng is not None and not same_host_rng(call.host_rng, host_rng())
            if not learned.draws_on_host:
                call.host_rng = None
        self._settle_rng(call, start)
        try:
            written = call.state.settle(module, compare_values=first)
        except LookupError as error:
            raise RecomputeError(
                f"{name}: its forward wrote {error.args[0]!r} for the first time after its first call, so the value "
                "before is not known; write it from the first step on, or keep this block out of recompute"
            ) from None
        learned.written = written | (learned.written or frozenset())
        self._outputs.append(
            [
                (index, weakref.ref(leaf), version_of(leaf))
                for index, leaf in enumerate(tree_flatten(result)[0])
                if isinstance(leaf, Tensor)
            ]
        )
        return result

    def _run(self, call: Call, leaves: Sequence[Any], learned: Learned, first: bool) -> Any:
        assert call.module is not None
        assert call.state is not None
        args, kwargs = tree_unflatten(
            [leaf.take() if isinstance(leaf, FreshCopy) else leaf for leaf in leaves], call.spec
        )
        with contextlib.ExitStack() as stack:
            if not call.state.hooks <= learned.hooks:
                learned.hooks |= call.state.hooks
                stack.enter_context(watch_hooks(call.module, learned.observers))
            if self._check and not learned.checked:
                self._tracker = stack.enter_context(ModuleTracker())
            stack.enter_context(self.packing())
            if self._ops is not None:
                call.ops = SavedOps(self._ops)
            elif learned.decides or (first and not isinstance(call.function, CompiledOriginal)):
                call.ops = SavedOps(_DECISIONS, keep=True)
            if call.ops is not None:
                stack.enter_context(call.ops.saving())
            result = call.function(*args, **kwargs)
        self._tracker = None
        if self._ops is None and call.ops is not None:
            learned.decides = bool(call.ops.outputs)
            if not learned.decides:
                call.ops = None
        return result

    def _surround(self, call: Call, tensors: Sequence[Tensor]) -> None:
        call.devices = rng_devices(tensors)
        call.surroundings = Surroundings(("cpu", *dict.fromkeys(device.type for device in call.devices)))
        call.rng = rng_states(call.devices)

    def packing(self) -> saved_tensors_hooks:
        """While this is entered, tensors that autograd saves are left to the frame."""
        return saved_tensors_hooks(self._pack, _unpack)

    def open_tape(self, name: str, function: Callable[..., Any], tensors: Sequence[Tensor]) -> Call:
        """Begin a call that is recorded function by function; its inputs are told when it is closed."""
        call = Call(name, function, None, len(self.saved))
        self._surround(call, tensors)
        self.calls.append(call)
        return call

    def close_tape(self, call: Call, inputs: Sequence[Tensor]) -> None:
        """End it: `function(*inputs)` makes the whole call again."""
        call.leaves = [Input(index, tensor.requires_grad) for index, tensor in enumerate(inputs)]
        call.spec = tree_flatten((tuple(inputs), {}))[1]
        call.inputs = self._placement.save(inputs)
        assert call.rng is not None
        self._settle_rng(call, call.rng)

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

    def _refer(self, call: Call, leaves: list[Any]) -> list[Tensor]:
        """Fill the call's leaves with references for tensors; returns the tensors to be saved."""
        returned = {
            id(output()): (Returned(index, leaf), version)
            for index, outputs in enumerate(self._outputs)
            for leaf, output, version in outputs
        }
        tensors: dict[int, tuple[Tensor, Input]] = {}
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                call.leaves.append(leaf)
                continue
            reference, version = returned.get(id(leaf), (None, 0))
            if reference is not None and version == version_of(leaf):
                call.leaves.append(reference)
            else:
                # one tensor given twice is one tensor in the replay: attention asks whether `query is key`
                _, given = tensors.setdefault(id(leaf), (leaf, Input(len(tensors), leaf.requires_grad)))
                call.leaves.append(given)
        return [tensor for tensor, _ in tensors.values()]

    def _settle_rng(self, call: Call, start: RngStates) -> None:
        """Keep a state only where something was drawn and the replay of the calls before does not end in it."""
        after = rng_states(call.devices)
        if same_rng(start, after):
            call.rng = None
            return
        if self._rng_after is not None and same_rng(start, self._rng_after):
            call.rng = None
        self._rng_after = after

    def _pack(self, tensor: Tensor) -> Packed:
        if self._tracker is not None:
            # under check: the innermost module now running, as torch's tracker names it
            where = max(self._tracker.parents - {"Global"}, key=len, default="")
            self._copies.append((where.partition(".")[2], tensor.detach().clone()))
        if isinstance(tensor, nn.Parameter):
            self.saved.append(None)
            return self.calls[-1], tensor, tensor._version
        holder = _Holder(self)
        self.saved.append((weakref.ref(holder), tensor.shape, tensor.dtype))
        return holder

    # ---- backward

    def replay(self, for_output: bool = False) -> list[Any]:
        """Make the calls again and give every holder that is still alive its value.

        Args:
            for_output: Run to the end. Otherwise the replay stops at the last tensor that is still needed.

        Returns:
            The leaves of the last call's output, if it ran to the end.

        Raises:
            RecomputeError: The replay does not do what the forward did.
        """
        live = [index for index, entry in enumerate(self.saved) if entry is not None and entry[0]() is not None]
        last = -1 if for_output else live[-1]
        copies, self._copies = self._copies, []
        position = 0
        call = self.calls[0]

        def pack(tensor: Tensor) -> Tensor:
            nonlocal position
            index, position = position, position + 1
            entry = self.saved[index] if index < len(self.saved) else None
            value = tensor.detach()
            if entry is not None:
                reference, shape, dtype = entry
                if (tensor.shape, tensor.dtype) != (shape, dtype):
                    raise RecomputeError(
                        f"{call.name}: the replay saved {_describe(tensor.shape, tensor.dtype)} where the forward "
                        f"saved {_describe(shape, dtype)} (tensor {index - call.first_saved} of the block). {_DIFFERS}"
                    )
                if index < len(copies):
                    _compare(call.name, *copies[index], value)
                holder = reference()
                if holder is not None and holder.value is None:
                    holder.value = value
            if index == last:
                raise _Stop
            return value

        devices = tuple(dict.fromkeys(device for call in self.calls for device in call.devices))
        now = rng_states(devices) if any(call.rng is not None for call in self.calls) else None
        outputs: list[list[Any]] = []
        try:
            with torch.enable_grad(), saved_tensors_hooks(pack, _as_it_is):
                for call in self.calls:  # pack() names the call that runs
                    if position != call.first_saved:
                        before = self.calls[len(outputs) - 1]
                        raise RecomputeError(_saved_otherwise(before, position, call.first_saved))
                    outputs.append(call.replay(outputs))
        except _Stop:
            return []
        finally:
            if now is not None:
                set_rng_states(devices, now)
        if position != len(self.saved) or not for_output:
            raise RecomputeError(_saved_otherwise(self.calls[-1], position, len(self.saved)))
        return outputs[-1]


def _unpack(packed: Packed) -> Tensor:
    if not isinstance(packed, _Holder):
        call, parameter, version = packed
        if parameter._version != version:
            call.check_parameters()
        return parameter
    if packed.value is None:
        packed.frame.replay()
    value, packed.value = packed.value, None  # dropped as torch's own saved tensors are: a second backward replays
    assert value is not None, "a replay fills every live holder"
    return value


def _as_it_is(value: Tensor) -> Tensor:
    return value


def _compare(name: str, module: str, forward: Tensor, replayed: Tensor) -> None:
    if not torch.equal(forward, replayed) and not torch.allclose(forward, replayed, rtol=0, atol=0, equal_nan=True):
        difference = (forward.double() - replayed.double()).abs().max().item()
        raise RecomputeError(
            f"{name}: a value saved in {module or 'the block itself'} {_describe(forward.shape, forward.dtype)} "
            f"differs in the replay by up to {difference:.3g}. {_DIFFERS}"
        )


def _saved_otherwise(call: Call, found: int, due: int) -> str:
    return f"{call.name}: up to its end the replay saved {found} tensors, the forward {due}. {_DIFFERS}"


def _describe(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{tuple(shape)} {str(dtype).removeprefix('torch.')}"
