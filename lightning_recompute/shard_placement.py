"""Unit inputs kept as one part on each rank of a tensor-parallel group, gathered once in backward.

Only tensors that are the same on all ranks can be kept so. Hidden states between tensor-parallel layers are, the
queries and keys inside are not; nothing in a tensor says which. So the first call of a block compares its inputs over
the group: those that differ are kept whole from then on. Later calls keep a digest of each input beside its part; the
digests of all ranks come back with the parts, and inputs that have come to differ are an error, on every rank.

All ranks call the same collectives in the same order, given that they run the same forwards and backwards. No choice
here depends on when a graph dies: its part in a collective is then made of nothing.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lightning_recompute.ambient import is_recomputing
from lightning_recompute.placement import DevicePlacement, Learned, PlacementError, SavedInputs
from lightning_recompute.replicas import Replicas, Verdict, digest, flat

_ALIGNMENT = 16
_DIGEST_BYTES = 8
_ON_DEVICE = DevicePlacement()

# torch 2.13 has a new name for it
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


def all_gather(output: Tensor, part: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Begin to gather parts of one size.

    Args:
        output: (t n,), filled with the ranks' parts.
        part: (n,), this rank's.
        group: The t ranks.
    """
    work: dist.Work = _all_gather(output, part, group=group, async_op=True)
    return work


@dataclass(frozen=True, slots=True)
class _Slot:
    """Where a tensor's part lies in its entry, and how the tensor is made of the parts."""

    position: int
    start: int
    num_bytes: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    verdict: Verdict


class _Gather:
    """The parts of one unit from all ranks, on their way."""

    def __init__(self, output: Tensor, work: dist.Work, starts: dict[int, int]) -> None:
        self._output = output
        self._work = work
        self._starts = starts

    def of(self, entry: _Entry, store: ShardPlacement) -> list[Tensor]:
        """The whole tensors of an entry, in memory of their own."""
        start = self._starts[id(entry)]
        parts = self._output[:, start : start + entry.num_bytes]
        with store.beside(parts.device):  # the host waits for the gather, not for the computation before it
            self._work.wait()
            digests = parts[:, entry.num_bytes - _DIGEST_BYTES * len(entry.slots) :].contiguous()
            ranks = [] if isinstance(digests, FakeTensor) else digests.view(torch.int64).tolist()
        self._work.wait()
        seen = zip(*ranks, strict=True) if ranks else [()] * len(entry.slots)
        wrong = [slot for slot, values in zip(entry.slots, seen, strict=True) if len(set(values)) > 1]
        for slot in wrong:
            slot.verdict.keep_whole("it differs between ranks")
        if wrong:
            found = ", ".join(f"{slot.position} of shape {tuple(slot.size)}" for slot in wrong)
            raise PlacementError(
                f"{entry.name}: tensor input {found} was the same on all {store.num_ranks} ranks of the "
                "tensor-parallel group in the first step and differs now, so that a part on each rank does not make "
                "it whole. Keep the inputs of this block on the device (inputs='device', or "
                "distribute_saved_activations=False); if it should be the same, look for random numbers or data "
                "that differ between the ranks"
            )
        return [
            parts[:, slot.start : slot.start + slot.num_bytes]
            .reshape(-1)
            .view(slot.dtype)
            .as_strided(slot.size, slot.stride)
            for slot in entry.slots
        ]


class _Entry:
    """The inputs of one call: some whole, of the others a part."""

    def __init__(self, unit: _UnitInputs, name: str, tensors: Sequence[Tensor], verdicts: Sequence[Verdict]) -> None:
        self.name = name
        self._unit = unit
        can_shard = [
            verdict.shards is True and unit.store.replicas.can_shard(tensor)
            for tensor, verdict in zip(tensors, verdicts, strict=True)
        ]
        device = unit.device or _device_of([t for t, can in zip(tensors, can_shard, strict=True) if can])
        self._shards = [can and t.device == device for t, can in zip(tensors, can_shard, strict=True)]
        whole = [tensor for tensor, shards in zip(tensors, self._shards, strict=True) if not shards]
        self._whole: SavedInputs | None = _ON_DEVICE.save(whole) if whole else None
        self.slots: list[_Slot] = []
        self.asked = 0
        self.gather: _Gather | None = None
        start = 0
        flats = []
        for position, (tensor, shards) in enumerate(zip(tensors, self._shards, strict=True)):
            if shards:
                flats.append(flat(tensor))
                num_bytes = -(-tensor.numel() // unit.store.num_ranks) * tensor.element_size()
                layout = tensor.dtype, tensor.size(), tensor.stride()
                self.slots.append(_Slot(position, start, num_bytes, *layout, verdicts[position]))
                start += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        self.num_bytes = start + _DIGEST_BYTES * len(flats)
        self.part: Tensor | None = None
        if flats:
            self.part = torch.empty(self.num_bytes, dtype=torch.uint8, device=device)
            if not isinstance(self.part, FakeTensor):  # it has no values
                torch.stack(list(map(digest, flats)), out=self.part[start:].view(torch.int64))
            for slot, elements in zip(self.slots, flats, strict=True):
                self._copy_part(slot, elements)

    def _copy_part(self, slot: _Slot, elements: Tensor) -> None:
        assert self.part is not None
        part = self.part[slot.start : slot.start + slot.num_bytes].view(slot.dtype)
        first = min(self._unit.store.group.rank() * part.numel(), elements.numel())
        own = elements[first : first + part.numel()]
        part[: own.numel()] = own
        part[own.numel() :] = 0

    def tensors(self) -> Sequence[Tensor]:
        whole = iter(self._whole.tensors() if self._whole is not None else ())
        gathered = iter(self._unit.take(self) if self.slots else ())
        return [next(gathered if shards else whole) for shards in self._shards]


class _UnitInputs:
    """The inputs of one unit in one forward: gathered together, and those of the unit before started.

    It lives on in the unit after it, without its entries, which die with their graph.
    """

    def __init__(self, store: ShardPlacement) -> None:
        self.store = store
        self._entries: list[tuple[weakref.ref[_Entry], int]] = []
        self.device: torch.device | None = None
        self._before: _UnitInputs | None = None
        # the same on all ranks, as whether an entry is alive may not be
        self._asked = 0
        self._is_under_way = False

    def open(self) -> _UnitInputs:
        return self

    @torch.no_grad()
    def save(self, tensors: Sequence[Tensor], name: str = "", learned: Learned | None = None) -> SavedInputs:
        if is_recomputing():  # a unit inside a unit that is replayed: needed at once
            return _ON_DEVICE.save(tensors)
        known = learned if learned is not None else {}
        entry = _Entry(self, name, tensors, self.store.replicas.judge(tensors, name, known, not self._entries))
        if entry.part is not None:
            if not self._entries:
                self.device = entry.part.device
                self._before = None if learned is None else self.store.follow(self, learned)
            self._entries.append((weakref.ref(entry), entry.num_bytes))
        return entry

    @torch.no_grad()
    def take(self, entry: _Entry) -> list[Tensor]:
        """The tensors of one of its entries; the first that a replay asks for brings all."""
        entry.asked += 1
        is_first = entry.asked > self._asked
        self._asked = max(self._asked, entry.asked)
        try:
            if entry.gather is None:
                self._start()
            gather, entry.gather = entry.gather, None  # the replay owns what was gathered and frees it
            self._is_under_way = False
            assert gather is not None
            tensors = gather.of(entry, self.store)
            del gather  # before there is room for the next
            before = self._before
            if is_first and before is not None and not before._is_under_way and before._asked < self._asked:
                before._start()
            return tensors
        except (PlacementError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            raise PlacementError(
                f"{entry.name}: its inputs could not be gathered from the other ranks: {error}"
            ) from error

    def _start(self) -> None:
        self._is_under_way = True
        live = [found() for found, _ in self._entries]
        parts: list[Tensor] = []
        starts: dict[int, int] = {}
        start = 0
        for entry, (_, num_bytes) in zip(live, self._entries, strict=True):
            if entry is not None:
                starts[id(entry)] = start
            part = None if entry is None else entry.part
            parts.append(part if part is not None else torch.zeros(num_bytes, dtype=torch.uint8, device=self.device))
            # entries lie behind one another: each must begin where any dtype may
            rest = -num_bytes % _ALIGNMENT
            parts += [torch.zeros(rest, dtype=torch.uint8, device=self.device)] if rest and len(live) > 1 else []
            start += num_bytes + (rest if len(live) > 1 else 0)
        part = torch.cat(parts) if len(parts) > 1 else parts[0]
        output = torch.empty(self.store.num_ranks, start, dtype=torch.uint8, device=self.device)
        work = all_gather(output.view(-1), part, self.store.group)
        if not starts:  # of a graph that is gone here, and perhaps not yet elsewhere
            work.wait()
        gather = _Gather(output, work, starts)
        for entry in live:
            if entry is not None:
                entry.gather = gather


class ShardPlacement:
    """Inputs live in parts: each rank of a group keeps 1/t of the elements; backward gathers one unit ahead.

    The caller's tensor is not touched: a part is a copy, so that later writes to the tensor do no harm. Kept whole,
    as `DevicePlacement` keeps them: tensors that differ between ranks, that are given to several units, that are no
    dense floating-point tensors on a device of the group, parameters and views of them, small ones, and what is
    freed anyway by a unit around. A copy of a model (deepcopy, pickle) keeps its inputs on the device: whether the
    other ranks copy it as well, nobody knows.

    Args:
        group: The tensor-parallel ranks. Each runs the same forwards and backwards in the same order.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.num_ranks = group.size()
        self.replicas = Replicas(group)
        self._last: _UnitInputs | None = None
        self._pass = object()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def __reduce__(self) -> tuple[type[DevicePlacement], tuple[()]]:
        return DevicePlacement, ()

    def open(self) -> _UnitInputs:
        """A placement for the calls of one frame; one gather brings all their inputs back."""
        return _UnitInputs(self)

    def save(self, tensors: Sequence[Tensor], name: str = "", learned: Learned | None = None) -> SavedInputs:
        """Copy this rank's parts, as a unit of one call; the first time a collective of the group."""
        return self.open().save(tensors, name, learned)

    def follow(self, unit: _UnitInputs, learned: Learned) -> _UnitInputs | None:
        """The unit that backward needs after this one: the one saved before it, unless it is of another pass."""
        if learned.get("pass") is self._pass:  # the same block again: another microbatch, or the next step
            self._pass, self._last = object(), None
        learned["pass"] = self._pass
        before, self._last = self._last, unit
        return before

    def beside(self, device: torch.device) -> Any:
        """Work that does not wait for the computation, where the device has streams."""
        if device.type != "cuda":
            return contextlib.nullcontext()
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return torch.cuda.stream(self._streams[device])


def _device_of(tensors: Sequence[Tensor]) -> torch.device | None:
    """The one device whose tensors are kept in parts: the accelerator before the CPU."""
    devices = sorted((tensor.device for tensor in tensors), key=lambda device: device.type == "cpu")
    return devices[0] if devices else None
