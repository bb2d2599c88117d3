"""Counting the bytes of tensors: the interface of every meter, and the one that works on any device."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Mode: Any = TorchDispatchMode  # torch's modes carry no types

_WAIT = torch.ops._c10d_functional.wait_tensor.default

GRANULARITY = {"cuda": 512}
"""Bytes that the allocator of a type of device rounds up to (torch's `c10/cuda/CUDACachingAllocator.h`)."""


def is_wrapper(kind: type) -> bool:
    """Whether tensors of this class only wrap others, as a DTensor wraps its shard."""
    return hasattr(kind, "__tensor_flatten__")


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors that hold a tensor's data: the local shard of a DTensor, indices and values of a sparse one."""
    if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
        return
    if is_wrapper(type(tensor)):
        for name in cast(Any, tensor).__tensor_flatten__()[0]:
            part = getattr(tensor, name)
            if isinstance(part, Tensor):  # a DTensor lists its mesh, too
                yield from plain_tensors(part)
    elif tensor.layout == torch.strided:
        yield tensor
    elif tensor.layout == torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())


def storages(tensors: Iterable[Tensor], device: torch.device | None = None) -> dict[int, torch.UntypedStorage]:
    """The storages behind tensors, each once however many tensors (ties, views) share it.

    Args:
        tensors: Any tensors; of a DTensor its local shard counts.
        device: Only storages on devices of this type; None: all.

    Returns:
        Storages by identity (the address of torch's StorageImpl).
    """
    found = {}
    for tensor in tensors:
        for plain in plain_tensors(tensor):
            if device is None or plain.device.type == device.type:
                storage = plain.untyped_storage()
                found[storage._cdata] = storage
    return found


def storage_bytes(tensors: Iterable[Tensor], device: torch.device | None = None) -> int:
    """Bytes of the storages behind tensors, each storage once; see `storages`."""
    return sum(storage.nbytes() for storage in storages(tensors, device).values())


def allocated(storage: torch.UntypedStorage, granularity: int | None = None) -> int:
    """Bytes that a device's allocator takes for a storage.

    Args:
        storage: The storage.
        granularity: What it rounds up to; None: what is known of the device.
    """
    step = granularity or GRANULARITY.get(storage.device.type, 1)
    return -(-storage.nbytes() // step) * step


def allocated_bytes(tensors: Iterable[Tensor], device: torch.device | None = None) -> int:
    """Bytes that allocators take for the storages behind tensors, each storage once; see `storages`."""
    return sum(map(allocated, storages(tensors, device).values()))


class Meter(ABC):
    """Live and peak bytes of the tensors on one device.

    Attributes:
        device: The device whose tensors are counted.
        continuous: Whether the meter sees everything that runs. Otherwise only what runs inside `watching()`.
    """

    continuous = True

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    @abstractmethod
    def live_bytes(self) -> int:
        """Bytes allocated now."""

    @property
    @abstractmethod
    def peak_bytes(self) -> int:
        """The largest `live_bytes` since the last `reset_peak`."""

    @property
    def reserved_bytes(self) -> int | None:
        """Peak of what a caching allocator holds from the device, free blocks included; None where there is none."""
        return None

    @property
    def num_retries(self) -> int:
        """How often the process freed cached memory and tried an allocation again; 0 where there is no cache."""
        return 0

    @abstractmethod
    def reset_peak(self) -> None:
        """Start a new peak at what is live now."""

    @abstractmethod
    def count(self, tensors: Iterable[Tensor]) -> list[int]:
        """Count tensors, for as long as they live, that were there before the meter; known ones are not added twice.

        Returns:
            What was added, for `discount`.
        """

    @abstractmethod
    def discount(self, added: Iterable[int]) -> None:
        """Count no longer what `count` added; what has died since is gone already."""

    @abstractmethod
    def bytes_at_peak(self, tensors: Iterable[Tensor]) -> int:
        """Bytes of those tensors, each storage once, that existed when the peak was reached.

        Where the device cannot tell (CUDA), the bytes of all of them.
        """

    @abstractmethod
    def begin_forward(self) -> None:
        """What is allocated from now on, until `end_forward`, belongs to a forward pass."""

    @abstractmethod
    def end_forward(self) -> None:
        """The forward pass is over."""

    @property
    @abstractmethod
    def forward_bytes(self) -> int:
        """Live bytes that a forward pass allocated."""

    @property
    @abstractmethod
    def forward_bytes_at_peak(self) -> int:
        """What `forward_bytes` was when the peak was reached; where the device cannot tell, when forward ended."""

    @abstractmethod
    def close(self) -> None:
        """Stop counting and leave nothing behind. Closing twice is as good as once."""

    def watching(self) -> AbstractContextManager[Any]:
        """Surrounds the code to be measured."""
        return nullcontext()


@dataclass
class _Entry:
    num_bytes: int
    serial: int
    forward: bool


class _Unseen:
    """Surrounds what DTensor does on fake tensors to learn the whole shape of an operator's result: no part of a run.

    It stands where torch has room for a lock around this.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._locks: list[Any] = []

    def put(self) -> None:
        self._locks.append(ShardingPropagator._fake_mode_lock)
        ShardingPropagator._fake_mode_lock = self  # type: ignore[assignment]

    def take_back(self) -> None:
        ShardingPropagator._fake_mode_lock = self._locks.pop()

    def __enter__(self) -> None:
        self._locks[0].__enter__()
        self.is_on = True

    def __exit__(self, *error: Any) -> None:
        self.is_on = False
        self._locks[0].__exit__(*error)


class Ledger(Mode, Meter):
    """Counts the storages that operators return inside `with ledger:`, until they die.

    Needs no compiler, works on every device and on fake tensors. Exact up to what never passes the dispatcher:
    workspaces inside a kernel, random-number states. Every operator takes some microseconds more, and
    compiled code is seen only where it calls operators. What existed before is not counted; see `count`.

    Args:
        device: Only storages on devices of this type are counted.
        fake: Whether fake tensors count. None: when a FakeTensorMode is active where `with ledger:` begins
            (otherwise they are somebody's dry run, for example DTensor's own of each new operator).
        granularity: Each storage counts as a multiple of this, as the device's allocator takes it. None: what that
            is, where it is known.
    """

    continuous = False

    def __init__(
        self, device: str | torch.device = "cpu", *, fake: bool | None = None, granularity: int | None = None
    ) -> None:
        Mode.__init__(self)
        Meter.__init__(self, torch.device(device))
        self._granularity = granularity
        self._fake = self._counts_fake = fake
        self._unseen = _Unseen()
        self._entries: dict[int, _Entry] = {}
        self._finalizers: dict[int, weakref.finalize[Any, torch.UntypedStorage]] = {}
        self._serial = 0
        self._forward = False
        self._live = self._forward_live = 0
        self._peak = self._forward_at_peak = self._serial_at_peak = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Tells torch.compile to go on under this mode; by default it would give up on every frame, for good."""
        return True

    @property
    def held_bytes(self) -> int:
        """Bytes alive now; the same as `live_bytes`."""
        return self._live

    @property
    def live_bytes(self) -> int:
        """Bytes alive now."""
        return self._live

    @property
    def peak_bytes(self) -> int:
        """The largest `live_bytes` since the last `reset_peak`."""
        return self._peak

    def reset_peak(self) -> None:
        """Start a new peak at what is live now."""
        self._set_peak()

    def count(self, tensors: Iterable[Tensor]) -> list[int]:
        """Count tensors that were there before, for as long as they live."""
        found = storages(tensors, self.device)
        added = [key for key in found if key not in self._entries]
        for key, storage in found.items():
            self._note(key, storage)
        return added

    def discount(self, added: Iterable[int]) -> None:
        """Count no longer what `count` added."""
        for key in added:
            if (finalizer := self._finalizers.get(key)) is not None:
                finalizer()

    def bytes_at_peak(self, tensors: Iterable[Tensor]) -> int:
        """Bytes of those tensors that existed when the peak was reached, each storage once."""
        entries = [(self._entries.get(key), storage) for key, storage in storages(tensors, self.device).items()]
        return sum(s.nbytes() for entry, s in entries if entry is None or entry.serial <= self._serial_at_peak)

    def begin_forward(self) -> None:
        """What is allocated from now on belongs to a forward pass."""
        self._forward = True

    def end_forward(self) -> None:
        """The forward pass is over."""
        self._forward = False

    @property
    def forward_bytes(self) -> int:
        """Live bytes that a forward pass allocated."""
        return self._forward_live

    @property
    def forward_bytes_at_peak(self) -> int:
        """What `forward_bytes` was when the peak was reached."""
        return self._forward_at_peak

    def close(self) -> None:
        """Forget all storages."""
        for finalizer in self._finalizers.values():
            finalizer.detach()
        self._finalizers.clear()
        self._entries.clear()
        self._live = self._forward_live = 0

    def watching(self) -> AbstractContextManager[Any]:
        """Surrounds the code to be measured; the same as `with ledger:`."""
        return self

    def __enter__(self) -> Ledger:
        """Begin to watch operators."""
        self._counts_fake = active_fake_mode() is not None if self._fake is None else self._fake
        self._unseen.put()
        Mode.__enter__(self)
        return self

    def __exit__(self, *error: Any) -> None:
        """Watch no longer."""
        Mode.__exit__(self, *error)
        self._unseen.take_back()

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operator and note the storages that are new in its result."""
        if any(is_wrapper(kind) for kind in types):
            return NotImplemented  # a DTensor: let it come back with the operators on its shards
        kwargs = kwargs or {}
        if self._unseen.is_on:
            return func(*args, **kwargs)
        if func is _WAIT and isinstance(args[0], FakeTensor):
            return args[0]  # as a real one does; for fake ones torch makes a new tensor
        result = func(*args, **kwargs)
        outputs = storages(self._tensors(result), self.device)
        if any(key not in self._entries for key in outputs):
            # a view or an in-place result of something older than this ledger is not new
            inputs = storages(self._tensors((args, kwargs)))
            outputs = {key: storage for key, storage in outputs.items() if key in self._entries or key not in inputs}
        for key, storage in outputs.items():
            self._note(key, storage)
        return result

    def _tensors(self, tree: Any) -> Iterator[Tensor]:
        for leaf in tree_leaves(tree):
            if isinstance(leaf, Tensor) and (self._counts_fake or not isinstance(leaf, FakeTensor)):
                yield leaf

    def _note(self, key: int, storage: torch.UntypedStorage) -> None:
        num_bytes = allocated(storage, self._granularity)
        entry = self._entries.get(key)
        if entry is None:
            self._serial += 1
            entry = self._entries[key] = _Entry(0, self._serial, self._forward)
            finalizer = weakref.finalize(storage, self._forget, key)
            finalizer.atexit = False
            self._finalizers[key] = finalizer
        if grown := num_bytes - entry.num_bytes:  # resized storages differ, too
            entry.num_bytes = num_bytes
            self._add(grown, entry.forward)

    def _forget(self, key: int) -> None:
        self._finalizers.pop(key, None)
        if (entry := self._entries.pop(key, None)) is not None:
            self._add(-entry.num_bytes, entry.forward)

    def _add(self, num_bytes: int, forward: bool) -> None:
        self._live += num_bytes
        if forward:
            self._forward_live += num_bytes
        if self._live > self._peak:
            self._set_peak()

    def _set_peak(self) -> None:
        self._peak, self._forward_at_peak, self._serial_at_peak = self._live, self._forward_live, self._serial
