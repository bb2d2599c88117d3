"""What a way to recompute costs on one pipeline stage: its exact peak in bytes, and its extra seconds.

A stage is a chain of units (blocks, as a rule), each with several options. What counts is not the sum of the bytes
saved but the peak over the step. With m the bytes held from forward to backward and n microbatches in flight, while
unit i runs there live
  in forward   static + (n-1) sum(m) + sum(m_j, j < i)  + what the forward of i makes + what lives besides
  in backward  static + (n-1) sum(m) + sum(m_j, j <= i) + what only the backward of i makes + what lives besides
and in between, at the head and loss, static + n sum(m) + head. The largest of these rows is the peak.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

from lightning_recompute.schedules import in_flight, live_vectors

__all__ = [
    "Choices",
    "Option",
    "PeakRow",
    "StageCosts",
    "extra_seconds",
    "in_flight",
    "live_vectors",
    "peak_bytes",
    "peak_row",
    "peak_rows",
    "segments",
]

Choices = Sequence[int | None]
"""For each unit the index of its option; None where a group that began before covers it."""


@dataclass(frozen=True, slots=True)
class Option:
    """One way to treat a unit, or a group of consecutive units from it on.

    Args:
        held_bytes: From forward to backward, per microbatch in flight.
        extra_seconds: Extra time per microbatch. A measured one may be slightly negative.
        transient_bytes: The most that lives only during the unit's own backward, above what is held then.
        forward_bytes: The most during its own forward, above what earlier units hold; its own held bytes included.
        num_units: Consecutive units that it covers.

    Raises:
        TypeError: A count is no int, or the seconds are no number.
        ValueError: A count is negative, it covers no unit, or the seconds are not finite.
    """

    held_bytes: int
    extra_seconds: float
    transient_bytes: int = 0
    forward_bytes: int = 0
    num_units: int = 1

    def __post_init__(self) -> None:
        for name in ("held_bytes", "transient_bytes", "forward_bytes"):
            _check_int(f"Option({name}=...)", getattr(self, name))
        _check_int("Option(num_units=...)", self.num_units, least=1)
        seconds = self.extra_seconds
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
            raise TypeError(f"Option(extra_seconds={seconds!r}): a number is due")
        if not math.isfinite(seconds):
            raise ValueError(f"Option(extra_seconds={seconds}): a finite number is due")


@dataclass(frozen=True)
class StageCosts:
    """A pipeline stage (or one chunk of it) as a chain of units with their options.

    Args:
        options: For each unit, in forward order, the options that begin there. A unit inside a group has its own
            options too.
        static_bytes: Live all the time.
        head_bytes: Peak between the last unit's forward and its backward, above static and all that is held.
        gradient_bytes: Live besides while unit i runs backward: gradients made so far, and their making. One number
            for all units, or one for each. A group counts with its last unit's, whose backward runs first.
        entry_bytes: Live besides while unit i runs forward: gradients of the step before, the unit's input. One
            number for all units, or one for each. A group counts with its first unit's.
        floor_bytes: A peak, statics included, that no choice changes: the optimizer's step, the embedding's backward.
        in_flight: Microbatches alive when a backward starts, its own included.

    Raises:
        TypeError: A count is no int, or an option no `Option`.
        ValueError: A count is negative, a unit has no option, a group goes past the end, or a list of bytes does not
            have an entry a unit.
    """

    options: tuple[tuple[Option, ...], ...]
    static_bytes: int = 0
    head_bytes: int = 0
    gradient_bytes: int | tuple[int, ...] = 0
    entry_bytes: int | tuple[int, ...] = 0
    floor_bytes: int = 0
    in_flight: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", tuple(map(tuple, self.options)))
        for unit, options in enumerate(self.options):
            self._check_options(unit, options)
        for name in ("static_bytes", "head_bytes", "floor_bytes"):
            _check_int(f"StageCosts({name}=...)", getattr(self, name))
        _check_int("StageCosts(in_flight=...)", self.in_flight, least=1)
        for name in ("gradient_bytes", "entry_bytes"):
            object.__setattr__(self, name, self._per_unit(name))

    @property
    def num_units(self) -> int:
        """Number of units of the chain."""
        return len(self.options)

    def gradients_at(self, unit: int) -> int:
        """Bytes that live besides while a unit runs backward."""
        return self.gradient_bytes if isinstance(self.gradient_bytes, int) else self.gradient_bytes[unit]

    def entry_at(self, unit: int) -> int:
        """Bytes that live besides while a unit runs forward."""
        return self.entry_bytes if isinstance(self.entry_bytes, int) else self.entry_bytes[unit]

    def _check_options(self, unit: int, options: tuple[Option, ...]) -> None:
        if not options:
            raise ValueError(f"unit {unit} has no option; one at least is due, for example to keep everything")
        for option in options:
            if not isinstance(option, Option):
                raise TypeError(f"unit {unit} has {option!r} among its options; an Option is due")
            if unit + option.num_units > self.num_units:
                raise ValueError(
                    f"unit {unit} has an option for {option.num_units} units; only {self.num_units - unit} are left"
                )

    def _per_unit(self, name: str) -> int | tuple[int, ...]:
        given = getattr(self, name)
        what = f"StageCosts({name}=...)"
        if isinstance(given, int):
            _check_int(what, given)
            return given
        counts = tuple(given)
        if len(counts) != self.num_units:
            raise ValueError(f"{what} has {len(counts)} entries for {self.num_units} units")
        for count in counts:
            _check_int(what, count)
        return counts


@dataclass(frozen=True)
class PeakRow:
    """What lives at one moment of a step that may set the peak.

    Args:
        moment: `forward` or `backward` of a unit, `head`, or `floor` (what no choice changes).
        unit: The unit, or the first of the group; None at head and floor.
        static_bytes: Live all the time.
        waiting_bytes: Held by the other microbatches in flight.
        held_bytes: Held by this microbatch, without what the running unit makes in forward.
        working_bytes: Made by the running unit (with what it holds, in forward) or by the head; all of the floor.
        besides_bytes: Live besides: gradients in backward, the unit's input and older gradients in forward.
    """

    moment: Literal["forward", "head", "backward", "floor"]
    unit: int | None
    static_bytes: int = 0
    waiting_bytes: int = 0
    held_bytes: int = 0
    working_bytes: int = 0
    besides_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """All that lives at this moment."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, int]:
        """The bytes by what they are for: `static`, `waiting`, `held`, `working`, `besides`."""
        suffix = "_bytes"
        return {
            field.name.removesuffix(suffix): getattr(self, field.name)
            for field in fields(self)
            if field.name.endswith(suffix)
        }

    def __str__(self) -> str:
        return self.moment if self.unit is None else f"{self.moment} of unit {self.unit}"


def segments(stage: StageCosts, choices: Choices) -> list[tuple[int, Option]]:
    """The chosen options with the unit at which each begins.

    Args:
        stage: The stage.
        choices: An entry a unit.

    Returns:
        Pairs of unit and option, in forward order.

    Raises:
        ValueError: There are more or fewer choices than units, an index is no option's, or the Nones are not just
            the units that a group before covers.
    """
    if len(choices) != stage.num_units:
        raise ValueError(f"found {len(choices)} choices for {stage.num_units} units")
    chosen: list[tuple[int, Option]] = []
    free = 0
    for unit, choice in enumerate(choices):
        if (choice is None) != (unit < free):
            covered = f"is covered by the group before, found {choice}" if unit < free else "needs a choice, found None"
            raise ValueError(f"unit {unit} {covered}")
        if choice is None:
            continue
        options = stage.options[unit]
        if isinstance(choice, bool) or not isinstance(choice, int) or not 0 <= choice < len(options):
            raise ValueError(f"choice {choice!r} at unit {unit}: an index from 0 to {len(options) - 1} is due")
        chosen.append((unit, options[choice]))
        free = unit + options[choice].num_units
    return chosen


def peak_rows(stage: StageCosts, choices: Choices) -> list[PeakRow]:
    """All moments of a step that may set the peak, in the order of time.

    Args:
        stage: The stage.
        choices: An entry a unit.

    Raises:
        ValueError: The choices do not fit the stage, as `segments` says.
    """
    chosen = segments(stage, choices)
    held = sum(option.held_bytes for _, option in chosen)
    static, waiting = stage.static_bytes, (stage.in_flight - 1) * held
    forward: list[PeakRow] = []
    backward: list[PeakRow] = []
    before = 0
    for unit, option in chosen:
        entry, gradients = stage.entry_at(unit), stage.gradients_at(unit + option.num_units - 1)
        forward.append(PeakRow("forward", unit, static, waiting, before, option.forward_bytes, entry))
        before += option.held_bytes
        backward.append(PeakRow("backward", unit, static, waiting, before, option.transient_bytes, gradients))
    head = PeakRow("head", None, static, waiting, held, stage.head_bytes)
    return [*forward, head, *reversed(backward), PeakRow("floor", None, working_bytes=stage.floor_bytes)]


def peak_row(stage: StageCosts, choices: Choices) -> PeakRow:
    """The moment that sets the peak, the earliest one where several do.

    Args:
        stage: The stage.
        choices: An entry a unit.

    Raises:
        ValueError: The choices do not fit the stage, as `segments` says.
    """
    return max(peak_rows(stage, choices), key=lambda row: row.total_bytes)


def peak_bytes(stage: StageCosts, choices: Choices) -> int:
    """The peak over a step, statics included.

    Args:
        stage: The stage.
        choices: An entry a unit.

    Raises:
        ValueError: The choices do not fit the stage, as `segments` says.
    """
    return peak_row(stage, choices).total_bytes


def extra_seconds(stage: StageCosts, choices: Choices) -> float:
    """Extra time per microbatch.

    Args:
        stage: The stage.
        choices: An entry a unit.

    Raises:
        ValueError: The choices do not fit the stage, as `segments` says.
    """
    return math.fsum(option.extra_seconds for _, option in segments(stage, choices))


def _check_int(what: str, count: object, least: int = 0) -> None:
    if not isinstance(count, int) or isinstance(count, bool):
        raise TypeError(f"{what}: an int is due, found {count!r}")
    if count < least:
        raise ValueError(f"{what}: at least {least} is due, found {count}")
