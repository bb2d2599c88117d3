"""Where a unit's inputs live between forward and backward."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from lightning_recompute.errors import RecomputeError


class PlacementError(RecomputeError):
    """Inputs cannot be brought back; the message says which and why."""


Learned = dict[Any, Any]
"""What a placement keeps from one call of a block to the next; no other part reads it."""


class SavedInputs(Protocol):
    """Tensors held until a replay asks for them; they may be asked for again."""

    def tensors(self) -> Sequence[Tensor]:
        """The tensors as they were, on their device."""
        ...


class Placement(Protocol):
    """Takes over tensors in forward."""

    def open(self) -> Placement:
        """A placement for the calls of one frame, whose inputs backward needs together."""
        ...

    def save(self, tensors: Sequence[Tensor], name: str = "", learned: Learned | None = None) -> SavedInputs:
        """Hold them, in one copy, until backward.

        Args:
            tensors: The inputs of one call.
            name: The block or module, for messages.
            learned: What the placement has learned about its inputs; filled by it.
        """
        ...


class _SaveForBackward(torch.autograd.Function):
    """Holds tensors as autograd holds them: hooks around a unit see them, and writes to them are found."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(0)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        return torch.empty(0)


class _OnDevice:
    def __init__(self, tensors: Sequence[Tensor]) -> None:
        apply: Any = _SaveForBackward.apply  # torch leaves it untyped
        with torch.enable_grad():  # a tape may end where gradients are off
            anchor = torch.empty(0, requires_grad=True)  # so that there is a node even where no input needs grad
            self._node: Any = apply(anchor, *tensors).grad_fn

    def tensors(self) -> Sequence[Tensor]:
        saved: tuple[Tensor, ...] = self._node.saved_tensors
        return saved


class DevicePlacement:
    """Inputs stay where they are, held as autograd holds its own saved tensors."""

    def open(self) -> DevicePlacement:
        """Itself: every call is held alone."""
        return self

    def save(self, tensors: Sequence[Tensor], name: str = "", learned: Learned | None = None) -> SavedInputs:
        """Hold them; a write to one of them is found when it is asked for."""
        return _OnDevice(tensors)


class Transfer(Protocol):
    """Copies between a device and host memory, in the order they are asked for."""

    def to_host(self, tensor: Tensor) -> Tensor:
        """Start the copy; the tensor itself may be freed at once."""
        ...

    def to_device(self, host: Tensor, device: torch.device) -> Tensor:
        """Start the copy back."""
        ...

    def wait(self, tensor: Tensor) -> None:
        """Make the current work wait for the copy back of this tensor."""
        ...


class CudaTransfer:
    """Copies over pinned memory on a stream of their own, beside the computation."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._events: WeakIdKeyDictionary = WeakIdKeyDictionary()  # a tensor is not equal to itself

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def to_host(self, tensor: Tensor) -> Tensor:
        """Copy out once the computation that made the tensor is done."""
        stream = self._stream(tensor.device)
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(stream)  # its memory is not reused before the copy has read it
        return host

    def to_device(self, host: Tensor, device: torch.device) -> Tensor:
        """Copy back; ordered after the copy out, which ran on the same stream."""
        stream = self._stream(device)
        with torch.cuda.stream(stream):
            tensor = host.to(device, non_blocking=True)
            self._events[tensor] = stream.record_event()
        return tensor

    def wait(self, tensor: Tensor) -> None:
        """The current stream waits, the host does not."""
        current = torch.cuda.current_stream(tensor.device)
        current.wait_event(self._events.pop(tensor))
        tensor.record_stream(current)


class _OnHost:
    """The inputs of one unit: on the host, or on their way back, or handed out; never in two places for long."""

    def __init__(self, store: HostPlacement, tensors: Sequence[Tensor]) -> None:
        self._store = store
        self._held: list[Tensor] = []
        self._devices: list[torch.device | None] = []
        self._fetched: list[Tensor] | None = None
        for tensor in tensors:
            stays = (tensor.device.type == "cpu" and not store.moves_cpu) or isinstance(tensor, nn.Parameter)
            self._devices.append(None if stays else tensor.device)
            self._held.append(tensor if stays else store.transfer.to_host(tensor.detach()))

    @property
    def host_bytes(self) -> int:
        return sum(
            tensor.untyped_storage().nbytes()
            for tensor, device in zip(self._held, self._devices, strict=True)
            if device is not None
        )

    def fetch(self) -> None:
        if self._fetched is None:
            self._fetched = [
                tensor if device is None else self._store.transfer.to_device(tensor, device)
                for tensor, device in zip(self._held, self._devices, strict=True)
            ]

    def tensors(self) -> Sequence[Tensor]:
        self.fetch()
        self._store.fetch_before(self)
        fetched, self._fetched = self._fetched or [], None  # the replay owns the copy and frees it
        for tensor, device in zip(fetched, self._devices, strict=True):
            if device is not None:
                self._store.transfer.wait(tensor)
        return fetched


class HostPlacement:
    """Inputs live in host memory; backward fetches those of one unit ahead.

    Args:
        transfer: Makes the copies. None: over pinned memory on a side stream (CUDA).
        moves_cpu: Copy tensors that are on the CPU as well (for tests of the order of copies).
    """

    def __init__(self, transfer: Transfer | None = None, moves_cpu: bool = False) -> None:
        self.transfer: Transfer = transfer if transfer is not None else CudaTransfer()
        self.moves_cpu = moves_cpu
        # in forward order; backward comes from the end. An entry dies with the graph that needs it
        self._entries: list[weakref.ref[_OnHost]] = []

    def __reduce__(self) -> tuple[type[HostPlacement], tuple[()]]:
        return HostPlacement, ()

    def open(self) -> HostPlacement:
        """Itself: every call is fetched alone."""
        return self

    def save(self, tensors: Sequence[Tensor], name: str = "", learned: Learned | None = None) -> SavedInputs:
        """Start copying the tensors out; the device copy is freed when the forward lets go of it."""
        entry = _OnHost(self, tensors)
        self._entries = [reference for reference in self._entries if reference() is not None]
        self._entries.append(weakref.ref(entry))
        return entry

    def fetch_before(self, entry: _OnHost) -> None:
        """Start the way back of the unit that backward needs after this one."""
        live = [found for reference in self._entries if (found := reference()) is not None]
        index = next((index for index, found in enumerate(live) if found is entry), 0)
        if index > 0:
            live[index - 1].fetch()

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that hold unit inputs now."""
        return sum(found.host_bytes for reference in self._entries if (found := reference()) is not None)
