"""The fastest choices of one pipeline rank within a budget, which its chunks share."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_recompute.cost import StageCosts, extra_seconds, peak_bytes, segments
from lightning_recompute.errors import BudgetError
from lightning_recompute.planner import pareto, solve
from lightning_recompute.units import format_bytes

PartChoices = tuple[int | None, ...]
"""For each unit of a part of the model the index of its option; None where a group that began before covers it."""

_COMBINATIONS = 4096  # of the curves of a rank's chunks
_MOST_POINTS = 16


@dataclass(frozen=True)
class Loaded:
    """A chunk under its choices: what of it counts for the peak of its rank.

    Attributes:
        choices: The choices.
        held: Bytes of one microbatch from forward to backward.
        reach: How far what runs goes above what is held.
        static: Bytes that are there all the time.
        floor: The least that the peak is above the static bytes.
        seconds: What the choices cost.
    """

    choices: PartChoices
    held: int
    reach: int
    static: int
    floor: int
    seconds: float

    @staticmethod
    def by(part: StageCosts, choices: PartChoices) -> Loaded:
        """A chunk under some choices.

        Args:
            part: Its costs.
            choices: The choices.

        Raises:
            ValueError: They do not fit.
        """
        held = sum(option.held_bytes for _, option in segments(part, choices))
        alone = replace(part, static_bytes=0, floor_bytes=0, in_flight=1)
        reach = peak_bytes(alone, choices) - held
        floor = max(part.floor_bytes - part.static_bytes, 0)
        return Loaded(tuple(choices), held, reach, part.static_bytes, floor, extra_seconds(part, choices))


def peak_of(chunks: Sequence[Loaded], vectors: Sequence[Sequence[int]]) -> int:
    """The peak of a rank, statics included.

    Args:
        chunks: Its chunks.
        vectors: Microbatches of them that are alive together, at each moment that may set the peak.
    """
    static = sum(chunk.static for chunk in chunks)
    rows = [
        sum(number * chunk.held for number, chunk in zip(vector, chunks, strict=True))
        + max(chunk.reach for number, chunk in zip(vector, chunks, strict=True) if number)
        for vector in vectors
    ]
    return static + max(*rows, *(chunk.floor for chunk in chunks))


def _seconds(chunks: Sequence[Loaded]) -> float:
    return math.fsum(chunk.seconds for chunk in chunks)


class RankSolver:
    """The choices of least time of the chunks of one rank, for one budget after the other; see `plan_stages`.

    Args:
        parts: Costs of its chunks.
        vectors: Microbatches of them that are alive together, at each moment that may set the peak.
    """

    def __init__(self, parts: Sequence[StageCosts], vectors: Sequence[Sequence[int]]) -> None:
        self._parts = parts
        self._vectors = vectors

    def solve(self, budget: int) -> list[PartChoices]:
        """The choices within a budget.

        Args:
            budget: What the peak may be, statics included.

        Raises:
            BudgetError: There are none.
        """
        parts, vectors = self._parts, self._vectors
        if len(parts) == 1:
            (vector,) = vectors
            return [solve(replace(parts[0], in_flight=vector[0]), budget)]
        fitting = [chosen for chosen, peak in self._combinations if peak <= budget]
        if not fitting:
            least = min(peak for _, peak in self._combinations)
            static = sum(part.static_bytes for part in parts)
            text = f"no choice of recompute found that keeps {format_bytes(budget)} ({budget} bytes): the smallest peak"
            text += f" found is {format_bytes(least)} ({least} bytes), of which static {format_bytes(static)}"
            raise BudgetError(text, least)
        best = [*min(fitting, key=lambda chosen: (_seconds(chosen), peak_of(chosen, vectors)))]
        for index in (*range(len(parts)), *range(len(parts))):
            _improve(best, index, parts[index], vectors, budget)
        return [one.choices for one in best]

    @functools.cached_property
    def _combinations(self) -> list[tuple[tuple[Loaded, ...], int]]:
        """Points of the chunks' curves together, each with its peak."""
        most = [max(column) for column in zip(*self._vectors, strict=True)]
        num_points = max(3, min(_MOST_POINTS, int(_COMBINATIONS ** (1 / len(self._parts)))))
        curves = [
            [Loaded.by(part, chosen) for _, _, chosen in pareto(replace(part, in_flight=number), num_points)]
            for part, number in zip(self._parts, most, strict=True)
        ]
        return [(chosen, peak_of(chosen, self._vectors)) for chosen in itertools.product(*curves)]


def _improve(best: list[Loaded], index: int, part: StageCosts, vectors: Sequence[Sequence[int]], budget: int) -> None:
    """Give one chunk all that the others leave."""
    left: dict[int, int] = {}
    for vector in (one for one in vectors if one[index]):
        pairs = [pair for at, pair in enumerate(zip(vector, best, strict=True)) if at != index]
        others = sum(number * one.held + one.static for number, one in pairs)
        # of moments with as many of its microbatches the one that leaves least decides
        left[vector[index]] = min(budget - others, left.get(vector[index], budget))
    for own, room in left.items():
        try:
            chosen = solve(replace(part, in_flight=own), room)
        except BudgetError:
            continue
        tried = [*best[:index], Loaded.by(part, chosen), *best[index + 1 :]]
        if tried[index].seconds < best[index].seconds and peak_of(tried, vectors) <= budget:
            best[:] = tried
