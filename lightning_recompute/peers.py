"""The processes that write a checkpoint together, agreeing on every step."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

Found = TypeVar("Found")


class Peers:
    """All processes of the run over a process group of their own (gloo).

    Its own, because a thread may use it while training uses the run's; gloo, because what travels is on the CPU.

    Args:
        group: The group; None: this process is alone.
        world: The run's own group at that time.
    """

    def __init__(self, group: dist.ProcessGroup | None, world: dist.ProcessGroup | None) -> None:
        self.group = group
        self.world = world
        self.rank = dist.get_rank(group) if group is not None else 0

    @classmethod
    def current(cls, before: Peers | None, timeout: timedelta | None = None) -> Peers:
        """The processes of this run; collective unless they are those of `before`.

        Args:
            before: What an earlier call returned.
            timeout: How long one waits for another; None: torch's default.
        """
        world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        if before is not None and before.world is world:
            return before
        return cls(None if world is None else dist.new_group(backend="gloo", timeout=timeout), world)

    def together(self, step: Callable[[], Found]) -> Found:
        """Run a step on every rank; collective.

        Args:
            step: Takes part in no collective.

        Returns:
            What it returned on this rank.

        Raises:
            Exception: What the step raised here; where it did only elsewhere, a RuntimeError that says rank and error.
        """
        error: Exception | None = None
        found: Found | None = None
        try:
            found = step()
        except Exception as caught:
            error = caught
        if self.group is not None:
            told: list[str | None] = [None] * dist.get_world_size(self.group)
            dist.all_gather_object(told, error and f"{type(error).__name__}: {error}", self.group)
            failed = [(rank, text) for rank, text in enumerate(told) if text is not None]
            if failed and error is None:
                raise RuntimeError(f"rank {failed[0][0]} failed: {failed[0][1]}")
        if error is not None:
            raise error
        return found  # type: ignore[return-value]  # set, as there was no error

    def first(self, value: Found) -> Found:
        """Rank 0's value; collective."""
        if self.group is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, group=self.group, group_src=0)
        return box[0]

    def different(self, value: Any) -> dict[int, Any]:
        """The different values that ranks have, by the lowest rank that has each, in that order; collective.

        Args:
            value: Picklable, and small: most ranks have the same, and send its digest only.
        """
        if self.group is None:
            return {0: value}
        size = dist.get_world_size(self.group)
        digests: list[Any] = [None] * size
        dist.all_gather_object(digests, hashlib.sha256(pickle.dumps(value)).digest(), self.group)
        values: list[Any] = [None] * size
        is_new = digests.index(digests[self.rank]) == self.rank
        dist.all_gather_object(values, [value] if is_new else None, self.group)
        return {rank: box[0] for rank, box in enumerate(values) if box is not None}

    def give_to_first(self, tensor: Tensor) -> None:
        """Send a tensor to rank 0, which waits for it (`take_from`)."""
        if tensor.numel():
            dist.send(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8), group=self.group, group_dst=0)

    def take_from(self, rank: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """On rank 0: the tensor that another rank sends.

        Args:
            rank: That one.
            shape: Of the tensor.
            dtype: Of its elements.
        """
        received = torch.empty(shape, dtype=dtype)
        if received.numel():
            dist.recv(received.reshape(-1).view(torch.uint8), group=self.group, group_src=rank)
        return received

    def leave(self) -> None:
        """Give the group up."""
        if self.group is not None and dist.is_initialized() and dist.group.WORLD is self.world:
            dist.destroy_process_group(self.group)
        self.group = None
