"""Numbers that all processes of a run agree on, so that what follows from them is the same everywhere."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


class Agreement:
    """What measurements on several processes come to.

    Each process measures for itself. Where a choice follows from that (what to measure next, whether to plan at all)
    it has to follow from numbers that are the same on all: else one waits in a collective for another that never
    comes. Every method is collective; a process alone agrees with itself.

    Args:
        device: Where collectives run; None: this process is alone, or what it measures is nobody else's.
        groups: The processes: those that several groups join one after the other; none: all of the world.
    """

    def __init__(self, device: torch.device | None = None, *groups: dist.ProcessGroup) -> None:
        self._device = device
        self._groups = groups or (None,)

    @property
    def is_shared(self) -> bool:
        """Whether there are other processes."""
        return self._device is not None

    def largest(self, numbers: Sequence[float]) -> list[float]:
        """The largest of each number over the processes.

        Args:
            numbers: As many on every process; ints are exact below 2**53.
        """
        if self._device is None or not numbers:
            return list(numbers)
        found = torch.tensor([float(number) for number in numbers], dtype=torch.float64, device=self._device)
        for group in self._groups:
            dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
        return [float(number) for number in found.tolist()]

    def smallest(self, number: int) -> int:
        """The smallest of a number over the processes."""
        return -int(self.largest([-number])[0])

    def is_same(self, numbers: Sequence[int]) -> bool:
        """Whether all processes have the same numbers, also as many.

        Args:
            numbers: At least one on every process.
        """
        mark = hash(tuple(numbers)) % 2**50
        high, low = self.largest([mark, -mark])
        return high == -low


ALONE = Agreement()
"""Of a process that measures for itself."""
