"""The real calls of a model's blocks, caught in one forward that keeps nothing and leaves no trace.

What a block holds for backward depends on how its model calls it: on shapes, masks, precision, on which inputs need
gradients. One call of each kind of block is kept, so that `block_cost` can make it again alone.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from lightning_recompute.ambient import Surroundings, rng_devices, rng_states, set_rng_states
from lightning_recompute.blocks import BlockList, class_of
from lightning_recompute.calls import Args, FreshCopy, Kwargs, host_rng, output_leaves, set_host_rng
from lightning_recompute.frame import Frame
from lightning_recompute.ledger import Ledger, plain_tensors
from lightning_recompute.module_state import ModuleState, watch_hooks
from lightning_recompute.patch import Patch
from lightning_recompute.prior_recompute import stand_in_for
from lightning_recompute.recompute_unit import needs_grad

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
        observers: Ids of forward hooks inside the block that only look on; None: all hooks are to be left out.
    """

    def __init__(self, module: nn.Module, name: str, args: Args, kwargs: Kwargs) -> None:
        self.module = module
        self.name = name
        leaves, self._spec = tree_flatten((args, kwargs))
        positions: dict[int, int] = {}
        self.tensors: list[Tensor] = []
        self.needs_grad: list[bool] = []
        self._leaves: list[Any] = []
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                self._leaves.append(FreshCopy(leaf) if is_cache(leaf) else leaf)
                continue
            if id(leaf) not in positions:
                positions[id(leaf)] = len(self.tensors)
                self.tensors.append(leaf.detach())
                self.needs_grad.append(leaf.requires_grad)
            self._leaves.append(_Slot(positions[id(leaf)]))
        self.shared: dict[int, int] = {}
        self.returned: dict[int, int] = {}
        self.free: set[int] = set()
        self.chain: dict[int, int] = {}
        self.observers: set[int] | None = None
        first = next(iter([*module.parameters(), *self.tensors]), torch.empty(0))
        self.device = first.device
        self.surroundings = Surroundings(tuple(dict.fromkeys(("cpu", self.device.type))))
        self.state = ModuleState(module, None)

    def arguments(self, tensors: Sequence[Tensor]) -> tuple[Args, Kwargs]:
        """The call's arguments with other tensors in the places of its own, and caches as they were."""
        leaves = [
            tensors[leaf.position] if isinstance(leaf, _Slot) else leaf.take() if isinstance(leaf, FreshCopy) else leaf
            for leaf in self._leaves
        ]
        args, kwargs = tree_unflatten(leaves, self._spec)
        return args, kwargs

    def release(self) -> None:
        """Let go of the tensors, after which the call cannot be made again."""
        self.tensors.clear()
        del self.state


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


@contextmanager
def undone(module: nn.Module, block_lists: Sequence[BlockList]) -> Iterator[ExitStack]:
    """Surrounds a run of a model that is to leave no trace, and in which its blocks do not recompute themselves.

    Put back are random streams, buffers, statistics, attributes, training flags, gradients and which parameters need
    one. What a run does outside of the module (prints, files) stays.

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
        for parameter in parameters:
            stack.callback(setattr, parameter, "grad", parameter.grad)
            stack.callback(parameter.requires_grad_, parameter.requires_grad)  # several optimizers take turns by it
        blocks, names = zip(*distinct_blocks(block_lists), strict=True)
        for found in stand_in_for(module, blocks, names):
            stack.callback(found.remove)
        yield stack


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
        given = list({id(leaf): leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}.values())
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


def is_cache(leaf: Any) -> bool:
    """Whether an argument is a key-value cache, which a block fills: each run gets its own."""
    return hasattr(leaf, "get_seq_length") and hasattr(leaf, "update")


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
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    autocast = tuple(
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in dict.fromkeys(("cpu", *(tensor.device.type for tensor in tensors)))
        if kind != "meta"
    )
    return module_key(module), _shape_of(spec), tuple(map(_kind_of, leaves)), autocast


def _shape_of(spec: TreeSpec) -> str:
    return str(spec)


def _kind_of(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad
    return leaf if isinstance(leaf, bool | str | None) else type(leaf)


def _settings(part: nn.Module) -> tuple[Any, ...]:
    """Switches, words and whether rates are zero; not integers, among which is a layer's number."""
    found = []
    for name, value in sorted(vars(part).items()):
        if isinstance(value, bool | str):
            found.append((name, value))
        elif isinstance(value, float):
            found.append((name, value == 0))
    return tuple(found)
