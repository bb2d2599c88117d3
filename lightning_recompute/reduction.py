"""Gradients averaged over the ranks that hold the same parameters, while backward still runs or when it is over.

Torch's DistributedDataParallel does this for ordinary parameters. Here they may be DTensors of another axis of the
mesh: what each rank holds of them is averaged. Nothing is kept between steps; a gradient of `LARGE_BYTES` or more
is averaged where it lies, smaller ones together in a passing buffer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Partial, Placement
from torch.utils.hooks import RemovableHandle

LARGE_BYTES = 1 << 20
"""From this size on a gradient is averaged alone."""
BUCKET_BYTES = 4 << 20
"""Size of the buffers for smaller ones."""
MAX_IN_FLIGHT = 2
"""Collectives that are under way at once: one runs while the next is prepared."""


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor; in place operations on it change the tensor."""
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    if isinstance(tensor, AsyncCollectiveTensor):
        tensor = tensor.wait()
    return tensor


def set_local_part(tensor: Tensor, part: Tensor) -> None:
    """Let a tensor have other memory, of the same shape, for what this rank holds of it; the former is let go."""
    if isinstance(tensor, DTensor):  # its `data` are a tensor of their own: a new value of them is not kept
        tensor._local_tensor = part
    else:
        tensor.data = part


@torch.no_grad()
def broadcast_from_first(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Give all ranks of a group the values of its first; collective.

    Args:
        tensors: The same on all ranks, of any dtype; of DTensors the part that the rank holds.
        group: The group.
    """
    for tensor in tensors:
        local = local_part(tensor.detach())
        if not local.numel():
            continue
        dense = local.contiguous()
        # bytes: backends know some dtypes only
        dist.broadcast(dense.view(-1).view(torch.uint8), group=group, group_src=0)
        if dense is not local and not torch.equal(dense, local):
            local.copy_(dense)


@dataclass(eq=False)
class _Bucket:
    indices: list[int]
    parameters: list[nn.Parameter]
    missing: int = 0


@dataclass(eq=False)
class _Flight:
    """Averages under way: `pieces` are parts of `buffer`, or the gradient itself."""

    bucket: _Bucket
    work: dist.Work
    pieces: list[Tensor]
    in_place: bool


@dataclass(eq=False)
class _Backward:
    """What is known of the current backward."""

    phase: Literal["idle", "running", "done"] = "idle"
    next_bucket: int = 0
    flights: deque[_Flight] = field(default_factory=deque)
    without: list[tuple[int, nn.Parameter, Tensor]] = field(default_factory=list)


class GradientReduction:
    """Averages gradients over a group of ranks, once for each backward in which `active` is set.

    The collectives of a backward are the same on every rank, in the same order and of the same sizes, whichever
    parameters got a gradient there: a rank without one takes part with zeros, and ends with the average where
    another rank has one, with None where none has. Gradients that earlier backwards left, with `active` off, are part
    of the average. A hook of the user's on a parameter sees the gradient of its rank.

    Args:
        parameters: Of every rank, in the same order.
        group: The ranks.
        by_hooks: Average while backward runs, as soon as gradients are there. Else all by `finish`, whatever made
            them.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], group: dist.ProcessGroup, by_hooks: bool = True) -> None:
        self.active = True
        self._by_hooks = by_hooks
        self._parameters = list(parameters)
        self._group = group
        self._handles: list[RemovableHandle] = []
        self._backward = _Backward()
        self._trainable: list[bool] = []
        self._buckets: list[_Bucket] = []
        self.prepare()

    def prepare(self) -> None:
        """Before forward: forget an earlier backward, and look which parameters are trained."""
        self._backward = _Backward()
        trainable = [parameter.requires_grad for parameter in self._parameters]
        if trainable != self._trainable:
            self.remove()
            self._trainable = trainable
            self._buckets = _buckets([p for p in self._parameters if p.requires_grad])
            for bucket in self._buckets if self._by_hooks else ():
                for parameter in bucket.parameters:
                    self._handles.append(parameter.register_post_accumulate_grad_hook(self._hook(bucket)))

    def finish(self) -> None:
        """After backward: the averages are in `grad` when this returns. Needed where no hook fired."""
        if self.active and self._backward.phase != "done":
            self._end()
        self._backward = _Backward()

    def remove(self) -> None:
        """Take the hooks off; not collective."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._buckets.clear()
        self._trainable.clear()
        self._backward = _Backward()

    def _hook(self, bucket: _Bucket) -> Callable[[Tensor], None]:
        def ready(parameter: Tensor) -> None:
            if not self.active:
                return
            if self._backward.phase != "running":
                self._backward = _Backward("running")
                for each in self._buckets:
                    each.missing = len(each.parameters)
                torch.autograd.Variable._execution_engine.queue_callback(self._end)
            # one parameter late: the user's own hooks on the last one have run
            self._launch_complete()
            bucket.missing -= 1

        return ready

    def _launch_complete(self) -> None:
        backward = self._backward
        while backward.next_bucket < len(self._buckets) and self._buckets[backward.next_bucket].missing <= 0:
            self._launch(self._buckets[backward.next_bucket])
            backward.next_bucket += 1

    @torch.no_grad()
    def _launch(self, bucket: _Bucket) -> None:
        flights = self._backward.flights
        while len(flights) >= MAX_IN_FLIGHT:
            self._land(flights.popleft())
        pieces = [
            torch.zeros_like(local_part(p.detach())) if p.grad is None else local_part(p.grad)
            for p in bucket.parameters
        ]
        in_place = len(pieces) == 1 and pieces[0].is_contiguous()
        buffer = pieces[0] if in_place else torch.cat([piece.reshape(-1) for piece in pieces])
        work = dist.all_reduce(buffer, dist.ReduceOp.AVG, self._group, async_op=True)
        if not in_place:
            shapes = [piece.shape for piece in pieces]
            parts = buffer.split([shape.numel() for shape in shapes])
            pieces = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
        assert work is not None
        flights.append(_Flight(bucket, work, pieces, in_place))

    def _land(self, flight: _Flight) -> None:
        flight.work.wait()
        for index, parameter, piece in zip(flight.bucket.indices, flight.bucket.parameters, flight.pieces, strict=True):
            if parameter.grad is None:
                self._backward.without.append((index, parameter, piece))
            elif not flight.in_place:
                local_part(parameter.grad).copy_(piece)

    @torch.no_grad()
    def _end(self) -> None:
        backward = self._backward
        if not self._buckets:
            backward.phase = "done"
            return
        for bucket in self._buckets[backward.next_bucket :]:
            self._launch(bucket)
        trained = [parameter for bucket in self._buckets for parameter in bucket.parameters]
        device = local_part(trained[0].detach()).device
        counts = torch.tensor([_facts(parameter.grad) for parameter in trained], device=device)
        work = dist.all_reduce(counts, group=self._group, async_op=True)
        while backward.flights:
            self._land(backward.flights.popleft())
        assert work is not None
        work.wait()
        if backward.without:
            found = counts.tolist()
            for index, parameter, piece in backward.without:
                num_with, num_partial = found[index]
                if num_with:
                    parameter.grad = _like(parameter, piece, is_partial=num_partial > 0)
        backward.phase = "done"


def _buckets(parameters: Sequence[nn.Parameter]) -> list[_Bucket]:
    """Parameters in the order in which backward is likely to reach them, small ones together; indices as listed."""
    groups: list[list[nn.Parameter]] = []
    filling: dict[tuple[torch.dtype, torch.device], tuple[list[nn.Parameter], int]] = {}
    for parameter in reversed(parameters):
        local = local_part(parameter.detach())
        size = local.numel() * local.element_size()
        if size >= LARGE_BYTES:
            groups.append([parameter])
            continue
        key = (local.dtype, local.device)
        members, filled = filling.pop(key, ([], 0))
        members.append(parameter)
        if filled + size >= BUCKET_BYTES:
            groups.append(members)
        else:
            filling[key] = (members, filled + size)
    groups += [members for members, _ in filling.values()]
    starts = [sum(map(len, groups[:number])) for number in range(len(groups))]
    return [_Bucket(list(range(start, start + len(group))), group) for start, group in zip(starts, groups, strict=True)]


def _facts(gradient: Tensor | None) -> tuple[float, float]:
    """Whether there is one, and whether it is a term of a sum over another axis."""
    is_partial = isinstance(gradient, DTensor) and any(map(Placement.is_partial, gradient.placements))
    return float(gradient is not None), float(is_partial)


def _like(parameter: nn.Parameter, local: Tensor, is_partial: bool) -> Tensor:
    """A gradient of a parameter from this rank's part of it."""
    data = parameter.data
    if not isinstance(data, DTensor):
        return local.clone()
    placements = [Partial() if is_partial and where.is_replicate() else where for where in data.placements]
    whole: Tensor = DTensor.from_local(
        local.clone(), data.device_mesh, placements, run_check=False, shape=data.shape, stride=data.stride()
    )
    return whole
