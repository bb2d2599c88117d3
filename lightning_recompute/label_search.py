"""Exact search for the fastest path through a chain of units under a peak of bytes.

A plan for a stage is a path from unit 0 to the end; each chosen option is an arc from its unit to the one after what
it covers. For the peak an arc is two numbers: what it holds, and how far its own rows reach above what earlier arcs
hold. A path to a unit is summed up by a label: bytes held so far, highest row so far (both for one microbatch),
seconds so far. Of two labels at a unit the one that is no better in any of the three is dropped, and so are labels
that no way on can bring within the capacity, or below the time of a path that is known.

Seconds are whole numbers of a tiny tick here, so that equal sums are equal in whatever order they were added.
"""

from __future__ import annotations

import bisect
import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_recompute.cost import StageCosts

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

# finer than any clock, and coarse enough that ticks of a whole path stay exact as floats, too
_TICK_BITS = 50
_TICKS_OF_ALL = 2**_TICK_BITS
_LARGEST = 2**62


@dataclass(frozen=True, slots=True)
class Arc:
    """An option as a step of a path.

    Args:
        start: The unit at which it begins.
        stop: The unit after those it covers.
        choice: Index of the option among those of its unit.
        held_bytes: What it holds from forward to backward.
        reach_bytes: The highest of its rows above what earlier arcs hold, for one microbatch.
        ticks: Its extra time.
    """

    start: int
    stop: int
    choice: int
    held_bytes: int
    reach_bytes: int
    ticks: int


class Arrival(NamedTuple):
    """The best path that a search found.

    Args:
        arcs: In order.
        ticks: Their extra time.
        peak_bytes: Their peak above static.
    """

    arcs: tuple[Arc, ...]
    ticks: int
    peak_bytes: int


class Chain:
    """A stage as arcs between its units, without those that are no better than another of the same units.

    Args:
        stage: The stage.

    Raises:
        ValueError: Its bytes are too many for whole numbers of 64 bits.
    """

    def __init__(self, stage: StageCosts) -> None:
        self.num_units = stage.num_units
        self.num_waiting = stage.in_flight - 1
        self.head_bytes = stage.head_bytes
        self.ticks_per_second = _ticks_per_second(stage)
        self.arcs = tuple(_undominated(self._arcs_from(stage, unit)) for unit in range(self.num_units))
        self.most_bytes = self._most_bytes(stage.in_flight)
        """No path's peak is above this."""
        self.need_bytes, lowest = self._least_from_end(
            lambda arc, rest: max(arc.reach_bytes, arc.held_bytes + rest), self.head_bytes
        )
        """For each unit how far the rows from it on reach at least, above what is held before it."""
        self.least_held, lightest = self._least_from_end(lambda arc, rest: arc.held_bytes + rest, 0)
        """For each unit what it and those after it hold at least."""
        self.leanest = min(map(self._follow, (lowest, lightest)), key=lambda found: found.peak_bytes)
        """A path of small peak: of the smallest, where one microbatch is in flight."""

    def _most_bytes(self, num_in_flight: int) -> int:
        most = sum(max(arc.reach_bytes for arc in arcs) for arcs in self.arcs) * num_in_flight + self.head_bytes
        if most > _LARGEST:
            raise ValueError(f"the units of a stage take up to {most} bytes together: no machine has that many")
        return most

    def _arcs_from(self, stage: StageCosts, unit: int) -> list[Arc]:
        arcs = []
        for choice, option in enumerate(stage.options[unit]):
            stop = unit + option.num_units
            forward = stage.entry_at(unit) + option.forward_bytes
            backward = option.held_bytes + option.transient_bytes + stage.gradients_at(stop - 1)
            ticks = round(option.extra_seconds * self.ticks_per_second)
            arcs.append(Arc(unit, stop, choice, option.held_bytes, max(forward, backward), ticks))
        return arcs

    def _least_from_end(self, through: Callable[[Arc, int], int], at_end: int) -> tuple[list[int], list[Arc]]:
        """For each unit the least of something over all ways to the end, and the first arc of such a way."""
        least = [at_end] * (self.num_units + 1)
        first: list[Arc] = []
        for unit in reversed(range(self.num_units)):
            values = [through(arc, least[arc.stop]) for arc in self.arcs[unit]]
            least[unit] = min(values)
            first.append(self.arcs[unit][values.index(least[unit])])
        return least, first[::-1]

    def _follow(self, arcs: Sequence[Arc]) -> Arrival:
        path: list[Arc] = []
        while (unit := path[-1].stop if path else 0) < self.num_units:
            path.append(arcs[unit])
        return self.arrival(path)

    def without_time(self) -> Chain:
        """The same chain where nothing takes time, so that a search finds the smallest peak."""
        timeless = copy.copy(self)
        timeless.arcs = tuple(_undominated([replace(arc, ticks=0) for arc in arcs]) for arcs in self.arcs)
        return timeless

    def with_time(self, arcs: Sequence[Arc]) -> Arrival:
        """Sum up a path that was found without time.

        Args:
            arcs: In order, from unit 0 to the end.
        """
        timed = {(arc.start, arc.choice): arc for of_unit in self.arcs for arc in of_unit}
        return self.arrival([timed[arc.start, arc.choice] for arc in arcs])

    def arrival(self, arcs: Sequence[Arc]) -> Arrival:
        """Sum up a path.

        Args:
            arcs: In order, from unit 0 to the end.
        """
        held = reach = 0
        for arc in arcs:
            reach = max(reach, held + arc.reach_bytes)
            held += arc.held_bytes
        reach = max(reach, held + self.head_bytes)
        return Arrival(tuple(arcs), sum(arc.ticks for arc in arcs), self.num_waiting * held + reach)


@dataclass(frozen=True)
class Prices:
    """Times of the arcs with what their bytes cost added, from a relaxation; their least sum bounds every path's time.

    Args:
        of_arcs: For each unit the price of each of its arcs, in ticks.
        refund: What a path's prices exceed its time by at most, if the path keeps the capacity.
    """

    of_arcs: Sequence[Sequence[float]]
    refund: float

    def to_end(self, chain: Chain) -> list[float]:
        """For each unit the least price of a way from it to the end, less the refund."""
        least = [-self.refund] * (chain.num_units + 1)
        for unit in reversed(range(chain.num_units)):
            priced = zip(chain.arcs[unit], self.of_arcs[unit], strict=True)
            least[unit] = min(price + least[arc.stop] for arc, price in priced)
        return least


def free_of_charge(chain: Chain) -> Prices:
    """The times alone: a bound that always holds."""
    return Prices([[float(arc.ticks) for arc in arcs] for arcs in chain.arcs], 0.0)


@dataclass(frozen=True)
class _Labels:
    """Labels at one unit, one entry of each array a label."""

    held: Ints
    reach: Ints
    ticks: Ints
    price: Floats
    came_from: Ints
    """Index among the labels of the unit where the last arc began."""
    arc: Ints
    """Number of the last arc, counted through the chain."""

    def __len__(self) -> int:
        return len(self.held)

    def take(self, kept: Ints) -> _Labels:
        return _Labels(*(getattr(self, name)[kept] for name in _FIELDS))

    @staticmethod
    def join(parts: Sequence[_Labels]) -> _Labels:
        return _Labels(*(np.concatenate([getattr(part, name) for part in parts]) for name in _FIELDS))


_FIELDS = ("held", "reach", "ticks", "price", "came_from", "arc")


class Search:
    """A search for the path of least time whose peak keeps a capacity; among equals, that of least peak.

    Args:
        chain: The chain.
        capacity_bytes: What the peak above static may be.
        prices: A bound on the time of all paths within the capacity.
        limit_ticks: Only paths of at most this time are looked for.
        width: Labels kept at a unit, those of the best bound.
    """

    def __init__(
        self, chain: Chain, capacity_bytes: int, prices: Prices, limit_ticks: float = math.inf, width: int | None = None
    ) -> None:
        self._chain = chain
        self._capacity = capacity_bytes
        self._prices = prices
        self._to_end = prices.to_end(chain)
        self._width = width
        # bounds are floats: what they cannot tell from the limit stays
        self._limit = limit_ticks + _TICKS_OF_ALL * 1e-9
        self._arcs = [arc for arcs in chain.arcs for arc in arcs]
        self.best_dropped = math.inf
        """No path of less time than this was lost to the width."""

    def run(self) -> Arrival | None:
        """The best path, or None where there is none within capacity and limit (or the width lost all of them)."""
        chain = self._chain
        assert chain.num_units, "a chain without units has nothing to choose"
        zero = np.zeros(1, np.int64)
        waiting: list[list[_Labels]] = [[] for _ in range(chain.num_units + 1)]
        waiting[0].append(_Labels(zero, zero, zero, np.zeros(1), zero, zero))
        kept: list[_Labels] = []
        first = 0
        for unit in range(chain.num_units):
            labels = _Labels.join(waiting[unit]) if waiting[unit] else kept[0].take(zero[:0])
            kept.append(labels := self._narrow(unit, labels.take(_undominated_labels(labels))))
            for number, arc in enumerate(chain.arcs[unit]):
                further = self._extend(labels, arc, self._prices.of_arcs[unit][number], first + number)
                if len(further):
                    waiting[arc.stop].append(further)
            first += len(chain.arcs[unit])
        if not waiting[chain.num_units]:
            return None
        return self._trace(kept, _Labels.join(waiting[chain.num_units]))

    def _extend(self, labels: _Labels, arc: Arc, price: float, number: int) -> _Labels:
        chain = self._chain
        held = labels.held + arc.held_bytes
        # raised to what the rows still to come reach at least: then fewer labels differ
        reach = np.maximum(np.maximum(labels.reach, labels.held + arc.reach_bytes), held + chain.need_bytes[arc.stop])
        prices = labels.price + price
        fits = chain.num_waiting * (held + chain.least_held[arc.stop]) + reach <= self._capacity
        kept = np.flatnonzero(fits & (prices + self._to_end[arc.stop] <= self._limit))
        ticks = labels.ticks[kept] + arc.ticks
        return _Labels(held[kept], reach[kept], ticks, prices[kept], kept, np.full(len(kept), number))

    def _narrow(self, unit: int, labels: _Labels) -> _Labels:
        if self._width is None or len(labels) <= self._width:
            return labels
        by_price = np.argsort(labels.price, kind="stable")
        best, rest = np.split(by_price, [self._width // 2])
        # where bounds are nearly alike, it is labels of all sizes that lead to a good end
        by_held = rest[np.argsort(labels.held[rest], kind="stable")]
        spread = np.linspace(0, len(rest) - 1, self._width - len(best)).astype(np.int64)
        lost = np.delete(by_held, spread)
        self.best_dropped = min(self.best_dropped, float(labels.price[lost].min()) + self._to_end[unit])
        return labels.take(np.sort(np.concatenate([best, by_held[spread]])))

    def _trace(self, kept: Sequence[_Labels], arrived: _Labels) -> Arrival:
        peaks = self._chain.num_waiting * arrived.held + arrived.reach
        index = int(np.lexsort((peaks, arrived.ticks))[0])
        labels, path = arrived, []
        while True:
            arc = self._arcs[labels.arc[index]]
            path.append(arc)
            index = int(labels.came_from[index])
            if arc.start == 0:
                return self._chain.arrival(path[::-1])
            labels = kept[arc.start]


def _ticks_per_second(stage: StageCosts) -> float:
    """A power of 2, so that times that are exact as binary fractions stay exact."""
    longest = max((abs(option.extra_seconds) for options in stage.options for option in options), default=0.0)
    bits = math.frexp(longest)[1] + stage.num_units.bit_length()
    return math.ldexp(1.0, _TICK_BITS - max(bits, -900))


def _undominated(arcs: Sequence[Arc]) -> tuple[Arc, ...]:
    """Arcs without those that another to the same unit beats or equals in every respect; of equals the first stays."""
    kept: list[Arc] = []
    for arc in sorted(arcs, key=lambda arc: (arc.ticks, arc.held_bytes, arc.reach_bytes, arc.choice)):
        if not any(
            other.stop == arc.stop and other.held_bytes <= arc.held_bytes and other.reach_bytes <= arc.reach_bytes
            for other in kept
        ):
            kept.append(arc)
    return tuple(kept)


def _undominated_labels(labels: _Labels) -> Ints:
    """Indices of the labels that no other beats or equals in held bytes, reach and time."""
    order = np.lexsort((labels.reach, labels.held, labels.ticks))
    kept: list[int] = []
    # of the labels that take no more time: held bytes going up, reach going down
    stairs_held: list[int] = []
    stairs_reach: list[int] = []
    in_order = zip(order.tolist(), labels.held[order].tolist(), labels.reach[order].tolist(), strict=True)
    for index, held, reach in in_order:
        below = bisect.bisect_right(stairs_held, held)
        if below and stairs_reach[below - 1] <= reach:
            continue
        first = last = bisect.bisect_left(stairs_held, held)
        while last < len(stairs_held) and stairs_reach[last] >= reach:
            last += 1
        stairs_held[first:last] = [held]
        stairs_reach[first:last] = [reach]
        kept.append(index)
    return np.array(kept, np.int64)
