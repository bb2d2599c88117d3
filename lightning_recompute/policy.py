"""Megatron's words for recompute, turned into plans.

Source of the semantics: Megatron-LM, `megatron/core/recompute.py` (uniform, block) and its arguments
`--recompute-granularity`, `--recompute-method`, `--recompute-num-layers`, `--recompute-modules`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from lightning_recompute.plan import Full, Keep, Placement, RecomputePlan, Segment, Selective

Granularity = Literal["full", "selective"]
Method = Literal["uniform", "block"]

LABELS = ("core_attn", "attn", "mlp", "norm", "act", "moe")
"""Labels of selective recompute; which module answers to which label is found by structure."""


@dataclass(frozen=True, kw_only=True)
class RecomputePolicy:
    """What to recompute, in Megatron's words; `plan` makes it a plan for a model's blocks.

    Args:
        granularity: `full` recomputes whole blocks, `selective` only the named modules in every block,
            None nothing.
        method: With `full`: `uniform` (units of num_layers blocks, every block recomputed) or `block`
            (the first num_layers blocks one by one, the rest kept). None means uniform.
        num_layers: With `full`: blocks per unit (uniform), or how many of the first blocks of each stage
            (block). None means 1 under uniform, all under block.
        modules: With `selective`: labels or patterns of module names. None means `core_attn`.
        distribute_saved_activations: Keep unit inputs as shards over the tensor-parallel group.
        offload_saved_activations: Keep unit inputs in host memory.

    Raises:
        ValueError: A value or a combination that would mean nothing.
        TypeError: A value of another type.
    """

    granularity: Granularity | None = "full"
    method: Method | None = None
    num_layers: int | None = None
    modules: Sequence[str] | None = None
    distribute_saved_activations: bool = False
    offload_saved_activations: bool = False

    def __post_init__(self) -> None:
        _one_of("granularity", self.granularity, get_args(Granularity))
        _one_of("method", self.method, get_args(Method))
        if self.modules is not None:
            object.__setattr__(self, "modules", _checked_modules(self.modules))
        if self.num_layers is not None:
            if not isinstance(self.num_layers, int) or isinstance(self.num_layers, bool):
                raise TypeError(f"num_layers={self.num_layers!r}: an int or None is due")
            if self.num_layers < 1:
                raise ValueError(
                    f"num_layers={self.num_layers}: 1 up to the number of blocks is due; "
                    "granularity=None turns recompute off"
                )
        for word, meaning in (
            ("method", "how whole blocks are grouped"),
            ("num_layers", "how many whole blocks"),
        ):
            if self.granularity != "full" and getattr(self, word) is not None:
                raise ValueError(
                    f"{word}={getattr(self, word)!r} with granularity={self.granularity!r}: {word} says {meaning} "
                    f"under granularity='full'; leave it out, or set granularity='full'"
                )
        if self.granularity != "selective" and self.modules is not None:
            raise ValueError(
                f"modules={list(self.modules)} with granularity={self.granularity!r}: modules names what "
                "granularity='selective' recomputes; leave it out, or set granularity='selective'"
            )
        for word in ("distribute_saved_activations", "offload_saved_activations"):
            if not isinstance(getattr(self, word), bool):
                raise TypeError(f"{word}={getattr(self, word)!r}: True or False is due")
            if self.granularity is None and getattr(self, word):
                raise ValueError(f"{word}=True with granularity=None: without recompute there are no unit inputs")
        if self.distribute_saved_activations and self.offload_saved_activations:
            raise ValueError(
                "distribute_saved_activations and offload_saved_activations: unit inputs live in one place; choose one"
            )

    @property
    def inputs(self) -> Placement:
        """Where unit inputs live: `shard`, `host` or `device`."""
        if self.distribute_saved_activations:
            return "shard"
        return "host" if self.offload_saved_activations else "device"

    def words(self) -> dict[str, Any]:
        """The words that differ from their defaults."""
        default = RecomputePolicy()
        return {word: value for word, value in vars(self).items() if value != getattr(default, word)}

    def plan(self, chunks: Sequence[int]) -> RecomputePlan:
        """The plan for a model.

        Args:
            chunks: Numbers of blocks that num_layers counts over, in forward order: one for each block list,
                pipeline stage or virtual chunk.

        Returns:
            Segments through all chunks; no unit spans two of them. A chunk with fewer blocks than num_layers
            recomputes all of its own.

        Raises:
            ValueError: There are no blocks, or num_layers exceeds the largest chunk.
        """
        if not chunks or min(chunks) < 1:
            raise ValueError(f"blocks per list or stage: {list(chunks)}; at least one block in each is due")
        if self.num_layers is not None and self.num_layers > max(chunks):
            raise ValueError(
                f"num_layers={self.num_layers}, but the largest list or stage has {max(chunks)} block(s): "
                f"1..{max(chunks)} is due"
            )
        segments: list[Segment] = []
        start = 0
        for length in chunks:
            segments += self._chunk(start, start + length)
            start += length
        return RecomputePlan(tuple(segments))

    def _chunk(self, start: int, stop: int) -> Iterator[Segment]:
        if self.granularity is None:
            yield Segment(start, stop, Keep())
        elif self.granularity == "selective":
            yield Segment(start, stop, Selective(tuple(self.modules or ("core_attn",)), inputs=self.inputs))
        elif self.method == "block":
            kept_from = stop if self.num_layers is None else min(start + self.num_layers, stop)
            for index in range(start, kept_from):
                yield Segment(index, index + 1, Full(inputs=self.inputs))
            if kept_from < stop:
                yield Segment(kept_from, stop, Keep())
        else:
            size = self.num_layers or 1
            for index in range(start, stop, size):
                yield Segment(index, min(index + size, stop), Full(inputs=self.inputs))


def is_pattern(module: str) -> bool:
    """Whether a word of `modules` is a pattern of module names and not a label."""
    return any(sign in module for sign in "*?[.")


def nearest(word: str, known: Sequence[str]) -> str:
    """A sentence naming the nearest known word, or the known words."""
    if close := difflib.get_close_matches(word, known, n=1):
        return f"did you mean {close[0]!r}?"
    return f"known: {', '.join(known[:12])}{', ...' if len(known) > 12 else '.'}"


def _one_of(word: str, value: object, allowed: Sequence[str]) -> None:
    if value is not None and value not in allowed:
        hint = nearest(value, allowed) if isinstance(value, str) else ""
        raise ValueError(f"{word}={value!r}: one of {', '.join(map(repr, allowed))} or None is due. {hint}".rstrip())


def _checked_modules(modules: Sequence[str]) -> tuple[str, ...]:
    if isinstance(modules, str) or not isinstance(modules, Sequence):
        raise TypeError(f"modules={modules!r}: a list of labels or name patterns is due, e.g. ['core_attn']")
    if not modules:
        raise ValueError("modules=[] recomputes nothing; name at least one, or set granularity=None")
    for module in modules:
        if not isinstance(module, str):
            raise TypeError(f"modules={list(modules)!r}: labels and patterns are strings, found {module!r}")
        if module not in LABELS and not is_pattern(module):
            raise ValueError(
                f"modules: unknown label {module!r}; {nearest(module, LABELS)} "
                "A pattern of module names has a '.' or '*' in it, e.g. '*.mlp'"
            )
    if repeated := sorted({module for module in modules if modules.count(module) > 1}):
        raise ValueError(f"modules: {repeated} named more than once")
    return tuple(modules)
