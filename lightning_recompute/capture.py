"""The real calls of a model's blocks, caught in one forward that keeps nothing and leaves no trace.

What a block holds for backward depends on how its model calls it: on shapes, masks, precision, on which inputs need
gradients. One call of each kind of block is kept, so that `block_cost` can make it again alone.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from lightning_recompute.ambient import (
    Surroundings,
)
from lightning_recompute.blocks import BlockList, class_of
from lightning_recompute.calls import Args, FreshCopy, Kwargs, output_leaves
from lightning_recompute.frame import Frame
from lightning_recompute.ledger import Ledger, plain_tensors
from lightning_recompute.module_state import ModuleState, watch_hooks
from lightning_recompute.object_state import Twin, has_content
from lightning_recompute.patch import Patch
from lightning_recompute.recompute_unit import is_cache, needs_grad
from lightning_recompute.untouched import distinct_blocks, undone

Run = Callable[[], object] | tuple[Args, Kwargs]
"""Runs a model's forward once: a function without arguments, or the (args, kwargs) of the model."""


@dataclass(frozen=True, slots=True)
class _Slot:
    position: int


class BlockCall:
    """One call of a block, to be made again alone; it holds the call's tensors, cut off from their graph.

    Args:
        module: The block, not yet running.
        name: Its dotted path in the model.
        args: What it is called with.
        kwargs: What it is called with by keyword.

    Attributes:
        tensors: The tensors among the arguments, each once.
        needs_grad: Which of them need a gradient.
        shared: For those of `tensors` that other calls are given too, by position: a number that is the same for the
            same memory everywhere.
        returned: The same for tensors that it returns, by index in `tensors_in` of its output.
        free: Positions of tensors that were there before the forward, so that holding them costs nothing.
        chain: For those of `tensors` that are what the call before returned, in calls of this kind: by position, the
            index in `tensors_in` of the output.
        holds_gradients: Whether somebody holds the gradients of what it returns as long as its backward runs.
        observers: Ids of forward hooks inside the block that only look on; None: all hooks are to be left out.
    """

    def __init__(self, module: nn.Module, name: str, args: Args, kwargs: Kwargs) -> None:
        self.module = module
        self.name = name
        given, self._leaves, self._spec = slotted(args, kwargs)
        self.tensors = [tensor.detach() for tensor in given]
        self.needs_grad = [tensor.requires_grad for tensor in given]
        self.shared: dict[int, int] = {}
        self.returned: dict[int, int] = {}
        self.free: set[int] = set()
        self.chain: dict[int, int] = {}
        self.holds_gradients = False
        self.observers: set[int] | None = None
        first = next(iter([*module.parameters(), *self.tensors]), torch.empty(0))
        self.device = first.device
        self.surroundings = Surroundings(tuple(dict.fromkeys(("cpu", self.device.type))))
        self.state = ModuleState(module, None)

    def arguments(self, tensors: Sequence[Tensor]) -> tuple[Args, Kwargs]:
        """The call's arguments with other tensors in the places of its own, and caches as they were."""
        copies: dict[Twin, Any] = {}

        def argument(leaf: Any) -> Any:
            if isinstance(leaf, Twin):
                return leaf.build(copies, argument)
            if isinstance(leaf, _Slot):
                return tensors[leaf.position]
            return leaf.take() if isinstance(leaf, FreshCopy) else leaf

        args, kwargs = tree_unflatten([argument(leaf) for leaf in self._leaves], self._spec)
        return args, kwargs

    def release(self) -> None:
        """Let go of the tensors, after which the call cannot be made again."""
        self.tensors.clear()
        self._leaves.clear()  # a cache of keys and values holds tensors of blocks before
        del self.state


def slotted(args: Args, kwargs: Kwargs) -> tuple[list[Tensor], list[Any], TreeSpec]:
    """The tensors among arguments, those in objects included, each once; and the arguments with slots in their places.

    Args:
        args: Positional arguments.
        kwargs: Keyword arguments.

    Returns:
        The tensors, the leaves of the arguments, and how these belong together. Of an object or container among the
        leaves there is a twin, of a key-value cache a copy for each run.
    """
    tensors: list[Tensor] = []
    slots: dict[int, _Slot] = {}
    twins: dict[int, Twin] = {}

    def hold(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in slots:
            slots[id(value)] = _Slot(len(tensors))
            tensors.append(value)
        return slots[id(value)]

    def leaf_of(value: Any) -> Any:
        if is_cache(value):
            return FreshCopy(value)
        return Twin(value, twins, hold=hold) if has_content(value) else hold(value)

    leaves, spec = tree_flatten((args, kwargs))
    return tensors, [leaf_of(leaf) for leaf in leaves], spec


@dataclass
class CallKind:
    """Calls that are alike: block class, parameter and argument shapes, dtypes and modes agree.

    Attributes:
        call: The first of them.
        names: Name of the block of each call, in the order of the calls; a block that runs twice stands there twice.
    """

    call: BlockCall
    names: list[str] = field(default_factory=list)


@dataclass
class Capture:
    """The calls of a model's blocks in one forward.

    Attributes:
        kinds: One entry for each kind of call.
        order: Index of the kind of each call, in the order in which the calls were made.
        names: Name of the block of each call, in the same order.
        chained: Positions in `order` of calls that were given what the call before returned.
    """

    kinds: list[CallKind] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    chained: set[int] = field(default_factory=set)


class _Left(BaseException):
    """Leaves the run where its forward ends: at the first backward pass."""


def capture_calls(module: nn.Module, run: Run, block_lists: Sequence[BlockList]) -> Capture:
    """Run one forward of a model and catch how its blocks are called.

    The forward runs with gradients switched on, so that every block sees which of its inputs need them, but nothing
    is kept for backward: it takes the memory of a forward without gradients. If the run comes to a backward pass
    (manual optimization), it ends there. It runs through to the end of forward since a block may be called again
    (two views of a batch, shared blocks). Random streams, buffers, statistics, attributes, training flags and
    gradients are afterwards what they were. The run's own doings outside of the module (prints, files) stay.

    Args:
        module: The model, in the mode that is meant (usually training).
        run: One forward; see `Run`.
        block_lists: Where its blocks are.

    Returns:
        The calls that backward would go through; a block that runs under no_grad, or has neither a trainable
        parameter nor an input that needs a gradient, has none.

    Raises:
        ValueError: No block was called so that backward would come to it.
    """
    forward = run if callable(run) else functools.partial(module, *run[0], **run[1])
    recorder = _Recorder()
    with undone(module, block_lists) as stack:
        observers: set[int] = set()
        stack.enter_context(watch_hooks(module, observers))
        for block, name in distinct_blocks(block_lists):
            stack.callback(Patch(block, recorded_forward, recorder, name).remove)
        # an open frame keeps no tensor that autograd saves, and this one only leaves when asked for one
        frame = Frame()
        frame.close_tape(frame.open_tape("capture", _leave, ()), ())
        device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
        recorder.ledger = stack.enter_context(Ledger(device))
        stack.callback(recorder.ledger.close)
        stack.enter_context(frame.packing())
        stack.enter_context(torch.enable_grad())
        with contextlib.suppress(_Left):
            forward()
    if not recorder.capture.kinds:
        raise ValueError(
            f"no block of {', '.join(map(str, block_lists))} was called with gradients in the forward that was run: "
            "let it run the training forward, or name other blocks with blocks="
        )
    for kind in recorder.capture.kinds:
        kind.call.observers = observers
    return recorder.capture


def _leave() -> None:
    raise _Left


@torch.compiler.disable
def recorded_forward(original: Callable[..., Any], recorder: _Recorder, name: str, /, *args: Any, **kwargs: Any) -> Any:
    """The patched forward of a block whose calls are caught."""
    module: nn.Module = original.__self__  # type: ignore[attr-defined]  # a bound method, or an Original
    if not torch.is_grad_enabled() or not needs_grad(module, args, kwargs):
        return original(*args, **kwargs)
    call = recorder.begin(module, name, args, kwargs)
    result = original(*args, **kwargs)
    recorder.end(call, result)
    return result


class _Recorder:
    def __init__(self) -> None:
        self.capture = Capture()
        self.ledger: Ledger
        self._index: dict[Any, int] = {}
        # memory of the arguments that are kept, which therefore is not used again: whose argument it is
        self._memory: dict[int, tuple[BlockCall, int]] = {}
        self._last_returned: list[tuple[weakref.ref[torch.UntypedStorage], torch.Size]] = []
        # what the first call of each kind returned
        self._returned: list[tuple[BlockCall, int, weakref.ref[torch.UntypedStorage]]] = []

    def begin(self, module: nn.Module, name: str, args: Args, kwargs: Kwargs) -> BlockCall | None:
        """A block is called; returns its call if it is the first of its kind."""
        capture = self.capture
        key = call_key(module, args, kwargs)
        given = slotted(args, kwargs)[0]
        for tensor in given:
            if (address := _address(tensor)) in self._memory:
                self._share(*self._memory[address], address)
        is_first = key not in self._index
        if is_first:
            self._index[key] = len(capture.kinds)
            capture.kinds.append(CallKind(self._kept(BlockCall(module, name, args, kwargs))))
        index = self._index[key]
        if chain := self._chain(given):
            capture.chained.add(len(capture.order))
            capture.kinds[index].call.chain = chain
        capture.kinds[index].names.append(name)
        capture.order.append(index)
        capture.names.append(name)
        return capture.kinds[index].call if is_first else None

    def _chain(self, given: Sequence[Tensor]) -> dict[int, int]:
        addresses = {
            storage._cdata: (index, shape)
            for index, (reference, shape) in enumerate(self._last_returned)
            if (storage := reference()) is not None
        }
        found = ((position, addresses.get(_address(tensor))) for position, tensor in enumerate(given))
        return {position: made[0] for position, made in found if made is not None and made[1] == given[position].shape}

    def _kept(self, call: BlockCall) -> BlockCall:
        for position, tensor in enumerate(call.tensors):
            added = self.ledger.count([tensor])
            if added:  # the ledger has not seen it made
                call.free.add(position)
                self.ledger.discount(added)
            address = _address(tensor)
            if address in self._memory:  # an argument of a call of another kind
                self._share(call, position, address)
            else:
                self._memory[address] = (call, position)
        return call

    def _share(self, call: BlockCall, position: int, address: int) -> None:
        call.shared[position] = address
        for maker, index, reference in self._returned:
            storage = reference()
            if storage is not None and storage._cdata == address:
                maker.returned[index] = address

    def end(self, call: BlockCall | None, result: Any) -> None:
        """The block has returned."""
        made = [(weakref.ref(plain_storage(tensor)), tensor.shape) for tensor in tensors_in(result)]
        self._last_returned = made
        if call is not None:
            self._returned += [(call, index, reference) for index, (reference, _) in enumerate(made)]


def plain_storage(tensor: Tensor) -> torch.UntypedStorage:
    """The storage that holds a tensor's data; of a DTensor its local shard's."""
    return next(plain_tensors(tensor)).untyped_storage()


def _address(tensor: Tensor) -> int:
    return int(plain_storage(tensor)._cdata)


def tensors_in(result: Any) -> list[Tensor]:
    """The tensors in what a forward returned, in the attributes of objects too."""
    return [leaf for leaf in output_leaves(result) if isinstance(leaf, Tensor)]


def module_key(module: nn.Module) -> Any:
    """What decides whether two blocks are alike: classes, parameters, modes, words and which rates are zero."""
    parts = tuple((name, class_of(part), part.training, _settings(part)) for name, part in module.named_modules())
    parameters = tuple(
        (name, parameter.dtype, parameter.requires_grad, None if nn.parameter.is_lazy(parameter) else parameter.shape)
        for name, parameter in module.named_parameters()
    )
    return parts, parameters


def call_key(module: nn.Module, args: Args, kwargs: Kwargs) -> Any:
    """What decides whether two calls are alike."""
    leaves, spec = tree_flatten((args, kwargs))
    tensors = slotted(args, kwargs)[0]  # those in objects, too
    autocast = tuple(
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in dict.fromkeys(("cpu", *(tensor.device.type for tensor in tensors)))
        if kind != "meta"
    )
    return module_key(module), str(spec), tuple(map(_kind_of, [*leaves, *tensors])), autocast


def _kind_of(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad
    return leaf if isinstance(leaf, bool | str | None) else type(leaf)


def _settings(part: nn.Module) -> tuple[Any, ...]:
    """Switches, words and whether rates are zero; not integers, among which is a layer's number."""
    found: list[tuple[str, Any]] = []
    for name, value in sorted(vars(part).items()):
        if isinstance(value, bool | str):
            found.append((name, value))
        elif isinstance(value, float):
            found.append((name, value == 0))
        elif isinstance(value, functools.partial):  # a patched method: switches among its arguments
            found.append((name, tuple(each for each in value.args if isinstance(each, bool))))
    return tuple(found)
