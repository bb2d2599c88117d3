"""Plans are values: which blocks are recomputed as one unit, and what each unit keeps.

A plan says nothing about a model's classes or devices, so it can be printed, compared, saved beside a
run's logs and read back. Applying one plan to two models gives the same two results.
"""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from yaml import YAMLError  # type: ignore[import-untyped]  # PyYAML ships no types

from lightning_recompute.files import write_atomically

Placement = Literal["device", "shard", "host"]
"""Where a unit's inputs live until backward: on the device, as 1/t shards over the tensor group, or in host memory."""


@dataclass(frozen=True)
class Keep:
    """Keep every activation: no recompute."""

    name: ClassVar[str] = "keep"


@dataclass(frozen=True)
class _Unit:
    name: ClassVar[str]
    inputs: Placement = field(default="device", kw_only=True)

    def __post_init__(self) -> None:
        if self.inputs not in get_args(Placement):
            raise ValueError(
                f"{type(self).__name__}(inputs={self.inputs!r}): a unit's inputs live on 'device', 'shard' or 'host'"
            )


@dataclass(frozen=True)
class Full(_Unit):
    """Keep the unit's inputs only; recompute everything else in backward.

    Args:
        inputs: Where the unit's inputs live until backward.
    """

    name: ClassVar[str] = "full"


@dataclass(frozen=True)
class Selective(_Unit):
    """Recompute the named modules' inner work only.

    Args:
        modules: Labels (`core_attn`, `attn`, `mlp`, `norm`, `act`, `moe`) or patterns of module names.
        inputs: Where the inputs of the recomputed modules live until backward.
    """

    name: ClassVar[str] = "selective"
    modules: tuple[str, ...] = ("core_attn",)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "modules", _words(self.modules, "Selective(modules=...)"))


@dataclass(frozen=True)
class SaveOps(_Unit):
    """Save the outputs of some operators and recompute the rest.

    Args:
        ops: Groups (`matmul`, `attention`, `collective`) or names of aten operators.
        inputs: Where the unit's inputs live until backward.
    """

    name: ClassVar[str] = "save_ops"
    ops: tuple[str, ...] = ("matmul",)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "ops", _words(self.ops, "SaveOps(ops=...)"))


Action = Keep | Full | Selective | SaveOps
_ACTIONS: dict[str, type[Action]] = {kind.name: kind for kind in (Keep, Full, Selective, SaveOps)}


def _words(given: Sequence[str], what: str) -> tuple[str, ...]:
    # no sets: their order differs between processes, and plans are compared by value
    if not isinstance(given, Sequence) or not all(isinstance(word, str) for word in given):
        raise TypeError(f"{what} takes a name or a list of names, found {given!r}")
    words = (given,) if isinstance(given, str) else tuple(given)
    if not words or not all(words):
        raise ValueError(f"{what} takes one or more names, found {given!r}")
    return words


@dataclass(frozen=True)
class Segment:
    """Blocks `start` .. `stop - 1` under one action; under `Full` and `SaveOps` they are one unit.

    Args:
        start: Index of the first block, counted through all block lists in forward order.
        stop: Index after the last block.
        action: What is recomputed.

    Raises:
        ValueError: The range is empty or negative.
        TypeError: An index is no int, or the action is none of the four.
    """

    start: int
    stop: int
    action: Action

    def __post_init__(self) -> None:
        for index in (self.start, self.stop):
            if not isinstance(index, int) or isinstance(index, bool):
                raise TypeError(f"Segment({self.start!r}, {self.stop!r}): block indices are ints")
        if not isinstance(self.action, Action):
            raise TypeError(
                f"Segment({self.start}, {self.stop}, {self.action!r}): the action is Keep(), Full(), Selective() "
                "or SaveOps()"
            )
        if not 0 <= self.start < self.stop:
            raise ValueError(f"Segment({self.start}, {self.stop}) covers no block: 0 <= start < stop is due")

    def __str__(self) -> str:
        return f"blocks {self.start}..{self.stop - 1}" if self.stop - self.start > 1 else f"block {self.start}"


@dataclass(frozen=True)
class RecomputePlan:
    """What each block of a model does between forward and backward.

    Args:
        segments: In order, without gap or overlap, from block 0.

    Raises:
        ValueError: The segments are none, or leave a gap, or overlap.
        TypeError: One of them is no `Segment`.
    """

    segments: tuple[Segment, ...]

    def __post_init__(self) -> None:
        segments = tuple(self.segments)
        object.__setattr__(self, "segments", segments)
        due = 0
        for segment in segments:
            if not isinstance(segment, Segment):
                raise TypeError(f"a plan consists of Segment(start, stop, action), found {segment!r}")
            if segment.start != due:
                fault = "leaves a gap" if segment.start > due else "overlaps the one before"
                raise ValueError(
                    f"Segment({segment.start}, {segment.stop}) {fault}: it should start at block {due}. "
                    "The segments of a plan tile the blocks in order; use Keep() where nothing is recomputed"
                )
            due = segment.stop
        if not segments:
            raise ValueError("a plan needs a segment; RecomputePlan([Segment(0, L, Keep())]) keeps everything")

    @property
    def num_blocks(self) -> int:
        """Number of blocks that the plan covers."""
        return self.segments[-1].stop

    def save(self, path: str | os.PathLike[str], record: Mapping[str, Any] | None = None) -> Path:
        """Write the plan as yaml, whole or not at all.

        Args:
            path: The file.
            record: Facts kept beside the plan (versions, device, seed); not part of its value.

        Returns:
            The path written.
        """
        content: dict[str, Any] = {"segments": [_to_dict(segment) for segment in self.segments]}
        if record:
            content["record"] = dict(record)
        return write_atomically(path, OmegaConf.to_yaml(OmegaConf.create(content)))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> RecomputePlan:
        """Read a plan that `save` wrote, or one written by hand.

        Args:
            path: A yaml file with `segments:`, a list of `{start, stop, action, inputs, modules, ops}`.

        Raises:
            ValueError: The file is no yaml, holds no plan, or an unknown action or key. The message names the file.
            FileNotFoundError: There is no such file.
        """
        text = Path(path).read_bytes()
        try:
            content = OmegaConf.to_container(OmegaConf.load(io.StringIO(text.decode("utf-8"))))
        except (YAMLError, OmegaConfBaseException, UnicodeDecodeError, OSError) as error:  # OSError: a bare number
            raise ValueError(f"{path} cannot be read as yaml: {error}") from error
        if not isinstance(content, dict) or not isinstance(content.get("segments"), list):
            raise ValueError(f"{path} holds no plan: a list under 'segments:' is due")
        if unknown := sorted(set(map(str, content)) - {"segments", "record"}):
            raise ValueError(f"{path}: unknown key(s) {unknown}; a plan file has 'segments' and 'record'")
        try:
            return cls(tuple(map(_from_dict, content["segments"])))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from error

    def to_table(self) -> Table:
        """The plan as a rich table, a row a segment."""
        table = Table("blocks", "units", "action", "recomputed", "inputs", title="Recompute plan")
        for segment in self.segments:
            action = segment.action
            recomputed = {
                "keep": "nothing",
                "full": "all",
                "selective": ", ".join(getattr(action, "modules", ())),
                "save_ops": "all but " + ", ".join(getattr(action, "ops", ())),
            }[action.name]
            length = segment.stop - segment.start
            units = {"keep": "-", "selective": str(length)}.get(action.name, f"1 of {length}" if length > 1 else "1")
            last = f"..{segment.stop - 1}" if length > 1 else ""
            table.add_row(
                f"{segment.start}{last}", units, action.name, escape(recomputed), getattr(action, "inputs", "-")
            )
        return table

    def __str__(self) -> str:
        # in a notebook rich would display the table instead of writing it
        console = Console(file=io.StringIO(), width=100, color_system=None, force_jupyter=False)
        console.print(self.to_table())
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue().rstrip()


def _to_dict(segment: Segment) -> dict[str, Any]:
    options = {
        field.name: list(value) if isinstance(value := getattr(segment.action, field.name), tuple) else value
        for field in dataclasses.fields(segment.action)
    }
    return {"start": segment.start, "stop": segment.stop, "action": segment.action.name, **options}


def _from_dict(entry: Any) -> Segment:
    if not isinstance(entry, dict) or not {"start", "stop", "action"} <= set(entry):
        raise ValueError(f"a segment needs start, stop and action, found {entry!r}")
    options = {str(key): value for key, value in entry.items()}
    start, stop, name = (options.pop(key) for key in ("start", "stop", "action"))
    if not isinstance(name, str) or name not in _ACTIONS:
        raise ValueError(f"unknown action {name!r}; one of {', '.join(_ACTIONS)} is due")
    known = {field.name for field in dataclasses.fields(_ACTIONS[name])}
    if unknown := sorted(set(options) - known):
        raise ValueError(f"action {name!r} takes {sorted(known) or 'no option'}, found {unknown}")
    return Segment(start, stop, _ACTIONS[name](**options))
