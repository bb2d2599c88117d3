"""A batch of any structure as microbatches, and what each counts."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Weight = Callable[[Any], float | Tensor]
"""What a microbatch counts in the loss of its batch, e.g. its number of target tokens."""


def num_rows(batch: Any) -> int:
    """The rows of a batch: the first dimension that most of its tensors have; of equals the first one's.

    Args:
        batch: Tensors in dicts, lists, tuples and dataclasses, to any depth, among anything else.

    Raises:
        ValueError: It has no tensor with rows.
    """
    counts = Counter(len(tensor) for tensor in tensors_of(batch) if tensor.dim())
    if not counts:
        raise ValueError(
            f"a batch ({type(batch).__name__}) without a tensor that has rows cannot be split into microbatches: give "
            "tensors in dicts, lists, tuples or dataclasses, their first dimension that of the batch"
        )
    return counts.most_common(1)[0][0]


def split_batch(batch: Any, num_microbatches: int) -> list[Any]:
    """Split a batch by rows, as evenly as it goes; the first microbatches have one more.

    Tensors with as many rows as the batch are split, and lists with as many entries that are no tensors and hold
    none (texts, names); everything else is in each microbatch.

    Args:
        batch: As for `num_rows`.
        num_microbatches: How many; at most the rows.

    Returns:
        The microbatches, views of the batch's tensors.

    Raises:
        ValueError: There are fewer rows.
    """
    rows = num_rows(batch)
    if not 1 <= num_microbatches <= rows:
        raise ValueError(f"{num_microbatches} microbatches of a batch with {rows} rows: 1..{rows} is due")
    least, rest = divmod(rows, num_microbatches)
    parts, start = [], 0
    for index in range(num_microbatches):
        stop = start + least + (index < rest)
        parts.append(_part(batch, rows, slice(start, stop)))
        start = stop
    return parts


def weights_of(microbatches: Sequence[Any], weight: Weight | None = None) -> list[float]:
    """What each microbatch counts, 1 together.

    Args:
        microbatches: The microbatches.
        weight: What one counts; None: its rows, so that the mean over rows stays what it is.

    Raises:
        ValueError: A number below 0 or none, or nothing counts.
    """
    numbers = [float(num_rows(part) if weight is None else weight(part)) for part in microbatches]
    total = sum(numbers)
    if not all(number >= 0 for number in numbers) or not 0 < total < float("inf"):
        raise ValueError(
            f"microbatch_weight gave {numbers}: numbers from 0 are due, at least one above it, e.g. how many target "
            "tokens a microbatch has"
        )
    return [number / total for number in numbers]


def signature(batch: Any) -> Any:
    """Equal for batches that make a model run the same shapes: their structure, shapes, dtypes, numbers and words."""
    if isinstance(batch, Tensor):
        return tuple(batch.shape), batch.dtype
    fields = _fields(batch)
    if fields is not None:
        return type(batch), tuple((key, signature(value)) for key, value in fields)
    return batch if isinstance(batch, int | float | str | bool | None) else type(batch)


def map_tensors(function: Callable[[Tensor], Any], batch: Any) -> Any:
    """The batch with something else for each tensor.

    Args:
        function: Of a tensor.
        batch: As for `num_rows`.
    """

    def convert(value: Any) -> Any:
        return function(value) if isinstance(value, Tensor) else _rebuilt(value, convert)

    return convert(batch)


def _part(batch: Any, rows: int, which: slice) -> Any:
    def convert(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value[which] if value.dim() and len(value) == rows else value
        if isinstance(value, list) and len(value) == rows and not any(map(_fields_or_tensor, value)):
            return value[which]
        return _rebuilt(value, convert)

    return convert(batch)


def _fields_or_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) or _fields(value) is not None


def tensors_of(value: Any) -> Iterator[Tensor]:
    """All tensors of a batch.

    Args:
        value: As for `num_rows`.
    """
    if isinstance(value, Tensor):
        yield value
    for _, part in _fields(value) or ():
        yield from tensors_of(part)


def _fields(value: Any) -> list[tuple[Any, Any]] | None:
    """What a container has in it; None for anything that is none."""
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return list(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    return None


def _rebuilt(value: Any, convert: Callable[[Any], Any]) -> Any:
    fields = _fields(value)
    if fields is None:
        return value
    if isinstance(value, Mapping):
        new = copy.copy(value)
        if not hasattr(new, "__setitem__"):
            return {key: convert(part) for key, part in fields}
        for key, part in fields:
            new[key] = convert(part)
        return new
    if isinstance(value, list | tuple):
        parts = [convert(part) for _, part in fields]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    new = copy.copy(value)
    for name, part in fields:
        object.__setattr__(new, name, convert(part))
    return new
