"""The engine's heart: calls that keep their inputs in forward and are made again in backward.

While a frame's calls run, every tensor that autograd saves is packed into an empty holder; the first holder that
backward asks for makes the frame replay its calls and fill all holders that are still alive. Public torch API
only: this file and discard.py are the owners of `saved_tensors_hooks`.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten

from lightning_recompute.ambient import (
    RngStates,
    Surroundings,
    check_version,
    host_rng,
    rng_devices,
    rng_states,
    same_host_rng,
    same_rng,
    set_rng_states,
    values_last,
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
    output_leaves,
)
from lightning_recompute.comparison import DIFFERS, Comparison, described, saved_otherwise
from lightning_recompute.errors import RecomputeError
from lightning_recompute.module_state import ModuleState, watch_hooks
from lightning_recompute.object_state import Snapshot, Twin, has_content
from lightning_recompute.patch import CompiledOriginal, without_dynamo
from lightning_recompute.placement import DevicePlacement, Placement
from lightning_recompute.prior_recompute import inside_torch_checkpoint
from lightning_recompute.save_ops import DECISIONS, OpSet, SavedOps, unsaved

_DECISIONS = OpSet(DECISIONS)
_ON_DEVICE = DevicePlacement()


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
        self._placement = placement.open()
        self._ops = ops
        self._comparison = Comparison() if check else None
        # for each call the tensors it returned: place in the output, the tensor, its version
        self._outputs: list[list[tuple[int, weakref.ref[Tensor], int]]] = []
        self._rng_after: RngStates | None = None
        self.values_last = values_last()

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
        call = Call(name, function, module, len(self.saved), learned)
        first = learned.written is None
        leaves, call.spec = tree_flatten((args, kwargs))
        tensors = self._refer(call, leaves)
        self._surround(call, tensors)
        call.state = ModuleState(module, learned.written, learned.generators)
        if isinstance(function, CompiledOriginal):
            call.observers = learned.observers
        # a forward that writes its inputs is replayed on copies; its first call finds that out
        versions = [version_of(tensor) for tensor in tensors]
        copies = [tensor.detach().clone() for tensor in tensors] if first or learned.writes_inputs else []
        call.on_copies = learned.writes_inputs
        call.inputs = self._placement.save(copies if call.on_copies else tensors, name, learned.inputs)
        start = call.rng
        assert start is not None
        call.host_rng = host_rng()
        self.calls.append(call)
        result = self._run(call, args, kwargs, learned, first)
        call.check_unwritten()
        call.settle_leaves()
        if first:
            learned.writes_inputs = call.on_copies = versions != [version_of(tensor) for tensor in tensors]
            if call.on_copies:
                call.inputs = self._placement.save(copies, name, learned.inputs)
        if same_host_rng(call.host_rng, host_rng()):
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
                for index, leaf in enumerate(output_leaves(result))
                if isinstance(leaf, Tensor)
            ]
        )
        return result

    def _run(self, call: Call, args: Args, kwargs: Kwargs, learned: Learned, first: bool) -> Any:
        assert call.module is not None
        assert call.state is not None
        # the caller's own arguments: what the forward adds to a list of theirs, they see
        args = tuple(value.take() if isinstance(value, FreshCopy) else value for value in args)
        kwargs = {key: value.take() if isinstance(value, FreshCopy) else value for key, value in kwargs.items()}
        with contextlib.ExitStack() as stack:
            if not isinstance(call.function, CompiledOriginal):
                call.keeping = keeping
                if call.state.hooks:
                    stack.enter_context(watch_hooks(call.module, call.observers, keeping, call.state.streams))
            elif not call.state.hooks <= learned.hooks:  # once, since it makes dynamo compile again
                learned.hooks |= call.state.hooks
                stack.enter_context(watch_hooks(call.module, learned.observers))
            if self._comparison is not None and not learned.checked:
                stack.enter_context(self._comparison.tracking(call.module))
            stack.enter_context(self.packing())
            if self._ops is not None:
                call.ops = SavedOps(self._ops, call.state.streams)
            elif learned.decides or (first and not isinstance(call.function, CompiledOriginal)):
                call.ops = SavedOps(_DECISIONS, call.state.streams, keep=True)
            if call.ops is not None:
                stack.enter_context(call.ops.saving())
            result = call.function(*args, **kwargs)
        if first:
            learned.generators = [stream.source for stream in call.state.streams.values()]
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

    def open_tape(
        self, name: str, function: Callable[..., Any], tensors: Sequence[Tensor], learned: Learned | None = None
    ) -> Call:
        """Begin a call that is recorded function by function; its inputs are told when it is closed."""
        call = Call(name, function, None, len(self.saved), learned or Learned())
        self._surround(call, tensors)
        self.calls.append(call)
        return call

    def close_tape(self, call: Call, inputs: Sequence[Tensor]) -> None:
        """End it: `function(*inputs)` makes the whole call again."""
        call.leaves = call.given = [Input.of(index, tensor) for index, tensor in enumerate(inputs)]
        call.spec = tree_flatten((tuple(inputs), {}))[1]
        call.inputs = self._placement.save(inputs, call.name, call.learned.inputs)
        assert call.rng is not None
        self._settle_rng(call, call.rng)

    def check_follows(self, name: str, args: Args, kwargs: Kwargs) -> None:
        """Refuse a call whose hidden state is not what the block before returned.

        Raises:
            RecomputeError: Something between the two blocks of a unit made another tensor of it, or wrote to it.
        """
        first = next((leaf for leaf in output_leaves((args, kwargs)) if isinstance(leaf, Tensor)), None)
        for _, output, version in self._outputs[-1]:
            if first is not None and output() is first and version_of(first) == version:
                return
        raise RecomputeError(
            f"{self.calls[-1].name} -> {name}: the hidden state is not the tensor that the block before returned. "
            "Something between these two blocks of one unit changes it (code of the model, a hook), which a replay of "
            "the unit would miss; use num_layers=1 (a unit for each block)"
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
        twins: dict[int, Twin] = {}

        def refer(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            reference, version = returned.get(id(value), (None, 0))
            if reference is not None and version == version_of(value):
                return reference
            # one tensor given twice is one tensor in the replay: attention asks whether `query is key`
            return tensors.setdefault(id(value), (value, Input.of(len(tensors), value)))[1]

        for leaf in leaves:
            is_object = has_content(leaf) and not isinstance(leaf, FreshCopy)
            call.leaves.append(Snapshot(leaf, twins, refer) if is_object else refer(leaf))
        call.given = [given for _, given in tensors.values()]
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
        if self._comparison is not None and not self.calls[-1].learned.checked:
            self._comparison.record(len(self.saved), tensor)
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
        position = 0
        done = False
        call = self.calls[0]

        def pack(tensor: Tensor) -> Tensor:
            nonlocal position, done
            index, position = position, position + 1
            entry = self.saved[index] if index < len(self.saved) else None
            value = tensor.detach()
            if entry is not None:
                reference, shape, dtype = entry
                if (tensor.shape, tensor.dtype) != (shape, dtype):
                    raise RecomputeError(
                        f"{call.name}: the replay saved {described(tensor.shape, tensor.dtype)} where the forward "
                        f"saved {described(shape, dtype)} (tensor {index - call.first_saved} of the block). {DIFFERS}"
                    )
                if self._comparison is not None:
                    self._comparison.check(call.name, index, value)
                holder = reference()
                if holder is not None and holder.value is None:
                    holder.value = value
            if index == last:
                done = True
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
                        raise RecomputeError(saved_otherwise(before.name, position, call.first_saved))
                    outputs.append(call.replay(outputs))
        except BaseException as error:
            # the stop itself, or what a forward made of it that catches everything
            if not done or isinstance(error, KeyboardInterrupt | SystemExit):
                raise
        finally:
            if now is not None:
                set_rng_states(devices, now)
        for call in self.calls if self._comparison is not None else ():
            call.learned.checked = True
        if done:
            return []
        if position != len(self.saved) or not for_output:
            raise RecomputeError(saved_otherwise(self.calls[-1].name, position, len(self.saved)))
        return outputs[-1]


def _unpack(packed: Packed) -> Tensor:
    if not isinstance(packed, _Holder):
        call, parameter, version = packed
        if parameter._version != version:
            call.check_parameters()
        return parameter
    if packed.value is None:
        packed.frame.replay()
    value = packed.value
    assert value is not None, "a replay fills every live holder"
    if not packed.frame.values_last:
        packed.value = None  # dropped as torch's own saved tensors are: a second backward replays
    return value


def _as_it_is(value: Tensor) -> Tensor:
    return value


def keep(tensor: Tensor) -> tuple[Tensor, int]:
    """Pack a tensor that is kept: a detached alias, for the tensor itself would keep its own graph alive for ever."""
    return tensor if tensor.grad_fn is None else tensor.detach(), version_of(tensor)


def kept(packed: tuple[Tensor, int]) -> Tensor:
    """Unpack it.

    Raises:
        RecomputeError: It was written in place.
    """
    tensor, version = packed
    check_version(tensor, version, tensor.shape)
    return tensor


@contextlib.contextmanager
def keeping() -> Iterator[None]:
    """While this is entered, tensors that autograd saves are kept, whatever frame is open, and no operator's output."""
    with contextlib.nullcontext() if inside_torch_checkpoint() else saved_tensors_hooks(keep, kept), unsaved():
        yield


# hooks run inside compiled code too
without_dynamo(Frame._pack, Frame.replay, _unpack, _as_it_is, keep, kept)
