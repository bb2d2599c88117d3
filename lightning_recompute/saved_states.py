"""What a checkpoint folder holds, tensors read when they are asked for.

In a checkpoint folder the tensors of the state dict and of the optimizers, and every DTensor, are entries of
torch.distributed.checkpoint under a key that says where they belong (`state_dict.net.weight`,
`optimizer_states.0.state.net.weight.exp_avg`). All the rest is one ordinary file, with a mark in each tensor's place.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor

MARK = "saved tensor"
"""`{MARK: key}` stands in the place of a tensor that is an entry of the folder."""

_ABSENT = "of another rank"


class EntryReader(FileSystemReader):
    """Reads entries of a folder, each process for itself and only the part that it asks for.

    Args:
        folder: The folder.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        super().__init__(folder)
        self.folder = Path(folder)
        self.entries: Metadata = super().read_metadata()

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """What the folder holds, read from the disk once."""
        return self.entries

    def __deepcopy__(self, _: dict[int, Any]) -> EntryReader:
        return self

    def read(self, wanted: Sequence[tuple[Saved, Tensor | None]]) -> list[Tensor]:
        """Read entries.

        Args:
            wanted: Each entry, and a DTensor of the same shape that says which part of it is due; None: the whole.

        Returns:
            For each a tensor of the saved type: a DTensor laid out as the one given, or a plain one on the CPU.
        """
        made = [
            torch.empty(entry.shape, dtype=entry.dtype) if like is None else torch.empty_like(like, dtype=entry.dtype)
            for entry, like in wanted
        ]
        left = list(range(len(wanted)))
        while left:  # tensors under two names are one entry
            batch = {wanted[index][0].key: index for index in reversed(left)}
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled")
                load(
                    {key: made[index] for key, index in batch.items()},
                    storage_reader=self,
                    planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                    no_dist=True,
                )
            left = [index for index in left if index not in batch.values()]
        return made


@dataclass(frozen=True)
class Saved:
    """A tensor that has not been read.

    Args:
        key: Its entry.
        reader: Who reads it.
    """

    key: str
    reader: EntryReader

    @property
    def entry(self) -> TensorStorageMetadata:
        """What is known of it."""
        entry = self.reader.entries.state_dict_metadata[self.key]
        assert isinstance(entry, TensorStorageMetadata)
        return entry

    @property
    def shape(self) -> torch.Size:
        """The shape of the whole."""
        return self.entry.size

    @property
    def dtype(self) -> torch.dtype:
        """The type of its elements."""
        return self.entry.properties.dtype

    def read(self) -> Tensor:
        """The whole, on the CPU."""
        return self.reader.read([(self, None)])[0]


class SavedStates(UserDict[Any, Any]):
    """A dict some of whose tensors are still in a checkpoint folder.

    Looked at from outside it is a dict of whole tensors on the CPU, as Lightning's own loading gives: asking for one
    reads it, and it stays. `data` has a `Saved` in the place of each that nobody has asked for.

    Args:
        form: The dict of which this is one: its type, its attributes (torch keeps the versions of modules in one).
        data: Its values.
    """

    def __init__(self, form: dict[Any, Any] | None = None, data: Mapping[Any, Any] | None = None) -> None:
        super().__init__()
        self.form = copy.copy(form) if form is not None else {}
        self.form.clear()
        vars(self).update(getattr(form, "__dict__", {}))
        self.data.update(data or {})

    def __getitem__(self, key: Any) -> Any:
        value = self.data[key]
        if isinstance(value, Saved):
            value = self.data[key] = value.read()
        return value

    def copy(self) -> SavedStates:
        """A dict of its own with the same tensors, read or not."""
        return copy.copy(self)


def take_apart(tree: Any, into: dict[str, Tensor]) -> Any:
    """A checkpoint without its tensors: those in `state_dict` and in the states of optimizers, and every DTensor.

    Args:
        tree: The checkpoint, of dicts, lists and tuples; what is inside of other objects is not seen.
        into: Where the tensors go, by key. One that stands in two places (tied weights) is there once.

    Returns:
        The checkpoint with marks in their places. A part that holds none of them is the same object as before.
    """
    places: dict[tuple[Any, ...], str] = {}

    def visit(value: Any, path: tuple[Any, ...], every: bool) -> Any:
        if isinstance(value, DTensor) or (every and isinstance(value, Tensor)):
            place = _place(value)
            if place not in places:
                key = places[place] = ".".join(map(str, path))
                assert key not in into, f"two tensors under {key}"
                into[key] = value
            return {MARK: places[place]}
        every = every or path == ("state_dict",) or (path[:1] == ("optimizer_states",) and path[2:] == ("state",))
        return _mapped(value, lambda key, part: visit(part, (*path, key), every))

    return visit(tree, (), False)


def filled(tree: Any, tensors: Mapping[str, Any]) -> Any:
    """A checkpoint with marks, and the tensors back in their places.

    Args:
        tree: What `take_apart` returned.
        tensors: What it took, or others in their place.
    """
    if _is_mark(tree):
        return tensors[tree[MARK]]
    return _mapped(tree, lambda _, part: filled(part, tensors))


def put_together(tree: Any, reader: EntryReader) -> Any:
    """The inverse of `take_apart`.

    Args:
        tree: The checkpoint with marks.
        reader: Has the tensors.

    Returns:
        The checkpoint. Dicts that hold tensors are `SavedStates`; tensors in lists and tuples are read at once.
    """
    if _is_mark(tree):
        return Saved(tree[MARK], reader).read()
    if not isinstance(tree, dict) or not any(_is_mark(value) for value in tree.values()):
        return _mapped(tree, lambda _, part: put_together(part, reader))
    data = {
        key: Saved(value[MARK], reader) if _is_mark(value) else put_together(value, reader)
        for key, value in tree.items()
    }
    return SavedStates(tree, data)


def with_unread(tree: Any, put: Callable[[Saved], Any]) -> Any:
    """A checkpoint of plain dicts, with something else in place of the tensors that have not been read.

    Args:
        tree: What `put_together` returns, or a part.
        put: Called with each of them.
    """
    if isinstance(tree, Saved):
        return put(tree)
    if isinstance(tree, SavedStates):
        made = copy.copy(tree.form)
        made.update(tree.data)
        tree = made
    return _mapped(tree, lambda _, part: with_unread(part, put))


def _mapped(tree: Any, function: Callable[[Any, Any], Any]) -> Any:
    """A container with `function(key, value)` for its values; itself where nothing differs, or it is no container."""
    if isinstance(tree, dict):
        items: Iterable[tuple[Any, Any]] = tree.items()
    elif isinstance(tree, list | tuple):
        items = enumerate(tree)
    else:
        return tree
    old = list(items)
    new = [function(key, value) for key, value in old]
    if all(before is after for (_, before), after in zip(old, new, strict=True)):
        return tree
    if isinstance(tree, dict):
        made = copy.copy(tree)
        made.update(zip((key for key, _ in old), new, strict=True))
        return made
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*new)
    return type(tree)(new)


def absent() -> dict[str, None]:
    """What stands, in a state dict that ranks have parts of, in the place of a value of another rank."""
    return {_ABSENT: None}


def is_absent(value: Any) -> bool:
    """Whether something is an `absent()`."""
    return isinstance(value, Mapping) and len(value) == 1 and _ABSENT in value


def _is_mark(value: Any) -> bool:
    return isinstance(value, Mapping) and len(value) == 1 and MARK in value


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """Equal for tensors that are one in memory, on each rank alike: a shard without elements counts as the others."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    layout = tensor.placements if isinstance(tensor, DTensor) else None
    form = (local.storage_offset(), tuple(local.shape), local.stride(), tensor.dtype, tuple(tensor.shape), layout)
    return (local.untyped_storage()._cdata, *form)
