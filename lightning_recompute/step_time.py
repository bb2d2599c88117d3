"""How long a pipeline step takes: the schedule's actions, each as soon as its rank is free and what it needs is there.

The model: an action runs without a pause; transfers take a time of their own and keep no rank busy; a unit is
recomputed when the gradient has arrived, right before its backward (in the part for inputs, where backward is split).
What comes after the last backward (reduction, optimizer) is not part of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_recompute.schedule_actions import SPLITTING, Action, num_chunks, place, rank_actions

Work = Literal["forward", "recompute", "backward", "weight"]
"""What a rank is busy with. `weight` is the part of a split backward that no other rank waits for."""


@dataclass(frozen=True, slots=True)
class ChunkSeconds:
    """Seconds of one microbatch in one part of the model.

    Args:
        forward: Of its forward.
        backward: Of its whole backward, without recompute.
        recompute: Of what is computed again. A measured one may be slightly negative, but not below minus the backward.
        weight: The part of the backward for weights, where the schedule splits it; None means half.

    Raises:
        TypeError: An argument is no number.
        ValueError: One is not finite or negative, or the part for weights is more than the backward.
    """

    forward: float
    backward: float
    recompute: float = 0.0
    weight: float | None = None

    def __post_init__(self) -> None:
        for name in ("forward", "backward", "recompute", "weight"):
            value = getattr(self, name)
            if name == "weight" and value is None:
                continue
            _check_seconds(f"ChunkSeconds({name}=...)", value, least=-self.backward if name == "recompute" else 0.0)
        if self.weight is not None and self.weight > self.backward:
            raise ValueError(f"ChunkSeconds(weight={self.weight}): more than the whole backward's {self.backward}")

    @property
    def total(self) -> float:
        """Seconds that a microbatch keeps the rank busy."""
        return self.forward + self.recompute + self.backward

    def parts(self, action: Action) -> list[tuple[Work, float]]:
        """What an action consists of, in order.

        Args:
            action: An action of the chunk.
        """
        weight = self.backward / 2 if self.weight is None else self.weight
        if action.kind == "forward":
            return [("forward", self.forward)]
        if action.kind == "weight":
            return [("weight", weight)]
        rest = self.backward - (weight if action.kind == "input" else 0.0)
        parts: list[tuple[Work, float]] = [("recompute", self.recompute)] if self.recompute > 0 else []
        # one that is negative within the noise of its measurement makes the backward shorter
        return [*parts, ("backward", max(rest + min(self.recompute, 0.0), 0.0))]


@dataclass(frozen=True, slots=True)
class Interval:
    """A time in which a rank is busy with one thing.

    Args:
        work: With what.
        rank: The rank.
        chunk: Chunk of the rank.
        microbatch: From 0.
        start: Seconds from the step's begin.
        stop: Seconds from the step's begin.
    """

    work: Work
    rank: int
    chunk: int
    microbatch: int
    start: float
    stop: float


@dataclass(frozen=True)
class StepTimeline:
    """A pipeline step on the clock.

    Args:
        ranks: For each rank its intervals in order of time.
    """

    ranks: tuple[tuple[Interval, ...], ...]

    @property
    def seconds(self) -> float:
        """From the first forward to the end of the last backward of any rank."""
        return max(intervals[-1].stop for intervals in self.ranks)

    @property
    def busy_seconds(self) -> tuple[float, ...]:
        """For each rank the time it works."""
        return tuple(math.fsum(one.stop - one.start for one in intervals) for intervals in self.ranks)

    @property
    def bubble_seconds(self) -> tuple[float, ...]:
        """For each rank the time it waits, before its first and after its last action too."""
        return tuple(self.seconds - busy for busy in self.busy_seconds)

    @property
    def bubble_fraction(self) -> float:
        """The part of all ranks' time in which they wait."""
        return math.fsum(self.bubble_seconds) / (len(self.ranks) * self.seconds) if self.seconds else 0.0

    def work_seconds(self) -> dict[Work, float]:
        """Seconds of all ranks together, by what they do."""
        kinds: tuple[Work, ...] = ("forward", "recompute", "backward", "weight")
        return {
            work: math.fsum(one.stop - one.start for intervals in self.ranks for one in intervals if one.work == work)
            for work in kinds
        }


def simulate(
    schedule: str,
    parts: Sequence[ChunkSeconds],
    num_stages: int,
    num_microbatches: int,
    virtual: int = 1,
    send_seconds: float = 0.0,
) -> StepTimeline:
    """Run a step on the clock.

    Args:
        schedule: One of `schedules.SCHEDULES`.
        parts: Seconds of each part of the model, in forward order: one a rank, or one a chunk where ranks have several
            (parts p and p + P on the same rank; under zbv p and 2P - 1 - p).
        num_stages: Ranks P of the pipeline.
        num_microbatches: Microbatches of one step.
        virtual: Chunks on each rank, where the schedule is interleaved.
        send_seconds: From the end of an action to when another rank has its result.

    Returns:
        The timeline.

    Raises:
        TypeError: A count is no int, or a time no number.
        ValueError: The schedule cannot run these counts, there are not as many parts as chunks, or the send time is
            negative.
    """
    orders = rank_actions(schedule, num_stages, num_microbatches, virtual)
    due = num_stages * num_chunks(schedule, virtual)
    if len(parts) != due:
        raise ValueError(
            f"found seconds of {len(parts)} parts of the model; {schedule} over {num_stages} ranks has {due}"
        )
    _check_seconds("send_seconds", send_seconds)
    clock = _Clock(schedule, parts, num_stages, send_seconds)
    waiting = [list(reversed(order)) for order in orders]
    going = True
    while going:
        going = False
        for rank, order in enumerate(waiting):
            while order and clock.run(rank, order[-1]):
                order.pop()
                going = True
    assert not any(waiting), f"the order of {schedule} waits for itself"
    return StepTimeline(tuple(map(tuple, clock.intervals)))


class _Clock:
    """When what is done and where it is."""

    def __init__(self, schedule: str, parts: Sequence[ChunkSeconds], num_stages: int, send_seconds: float) -> None:
        self._parts = parts
        self._schedule = schedule
        self._num_stages = num_stages
        self._send = send_seconds
        self._last = len(parts) - 1
        self._back = "input" if schedule in SPLITTING else "backward"
        self._free = [0.0] * num_stages
        # by kind, part of the model and microbatch: when it ended, and on which rank
        self._done: dict[tuple[str, int, int], tuple[float, int]] = {}
        self.intervals: list[list[Interval]] = [[] for _ in range(num_stages)]

    def run(self, rank: int, action: Action) -> bool:
        """Run an action if what it needs has been made; say whether."""
        part = place(self._schedule, self._num_stages, action.chunk, rank)
        start = self._free[rank]
        needed = self._needed(action, part)
        if needed is not None:
            if needed not in self._done:
                return False
            end, where = self._done[needed]
            start = max(start, end + (self._send if where != rank else 0.0))
        for work, seconds in self._parts[part].parts(action):
            interval = Interval(work, rank, action.chunk, action.microbatch, start, start + seconds)
            self.intervals[rank].append(interval)
            start = interval.stop
        self._free[rank] = start
        self._done[action.kind, part, action.microbatch] = start, rank
        return True

    def _needed(self, action: Action, part: int) -> tuple[str, int, int] | None:
        kind, _, microbatch = action
        if kind == "forward":
            return (kind, part - 1, microbatch) if part else None
        if kind == "weight":
            return "input", part, microbatch
        return (self._back, part + 1, microbatch) if part < self._last else ("forward", part, microbatch)


def estimate_seconds(parts: Sequence[ChunkSeconds], num_microbatches: int) -> float:
    """A step of gpipe or 1F1B by the usual formula: each stage once, and the slowest for all other microbatches.

    Exact where stages are alike, and close to the simulation where they are nearly so.

    Args:
        parts: Seconds of each stage.
        num_microbatches: Microbatches of one step.
    """
    totals = [part.total for part in parts]
    return math.fsum(totals) + (num_microbatches - 1) * max(totals)


def _check_seconds(what: str, value: object, least: float = 0.0) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{what}: a number is due, found {value!r}")
    if not math.isfinite(value) or value < least:
        raise ValueError(f"{what}: a finite number of at least {least:g} is due, found {value}")
