"""Plain Python objects and containers as they were at one moment: what a forward may fill, count or clear."""

from __future__ import annotations

import contextlib
import ctypes
import random
import sys
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_MAX_DEPTH = 5
# objects of these libraries, of Python itself, and what can be called hold no state of a user's block
_PYTHON = {"builtins", "enum", "functools", "logging", "random", "re", "threading", "types", "typing", "weakref"}
_FOREIGN = _PYTHON | {"_thread", "lightning", "lightning_fabric", "numpy", "pytorch_lightning", "torch"}
# what is made of these (a Trainer, a datamodule, a data set of the user's) may reach all data there is
_MACHINERY = ("lightning.", "lightning_fabric.", "pytorch_lightning.", "torch.utils.data.")
_CONTAINERS = (list, dict, set, deque)
# the first that fits can make an empty one
_BASES: tuple[Any, ...] = (OrderedDict, defaultdict, *_CONTAINERS, SimpleNamespace, object)
_has_content: dict[type, bool] = {}
_slots: dict[type, tuple[str, ...]] = {}


def without_graph(value: Any) -> Any:
    """A tensor's value without its graph; anything else as it is."""
    if isinstance(value, Tensor) and value.grad_fn is not None:
        return value.detach().requires_grad_()
    return value


def _itself(value: Any) -> Any:
    return value


class Twin:
    """The content of a container or plain object, of which copies can be made.

    Containers and objects inside are taken as well; anything else is shared. A tensor with a graph is held without
    it, so that nothing here keeps a graph alive.

    Args:
        value: What to take; see `has_content`.
        memo: Twins made already, by id of their value: what is shared stays shared.
        depth: How deep to go; below that everything is shared.
        hold: What to hold of anything else.
    """

    def __init__(
        self,
        value: Any,
        memo: dict[int, Twin] | None = None,
        depth: int = _MAX_DEPTH,
        hold: Callable[[Any], Any] = without_graph,
    ) -> None:
        memo = {} if memo is None else memo
        memo[id(value)] = self
        self._kind: Any = type(value)
        self._hull = None if isinstance(value, tuple) else _emptied(value)
        self._content = [(key, _taken(entry, memo, depth - 1, hold)) for key, entry in content_of(value)]

    def same_as(self, value: Any) -> bool:
        """Whether a value has this content still, entry by entry the same objects."""
        return self._same_as(value, set())

    def _same_as(self, value: Any, seen: set[int]) -> bool:
        if id(self) in seen:
            return True
        seen.add(id(self))
        if type(value) is not self._kind:
            return False
        content = content_of(value)
        return len(content) == len(self._content) and all(
            _same_key(mine, theirs) and _same(entry, other, seen)
            for (mine, entry), (theirs, other) in zip(self._content, content, strict=True)
        )

    def tensors(self, seen: set[Twin] | None = None) -> Iterator[Tensor]:
        """The tensors that are held, in the order of the content."""
        seen = set() if seen is None else seen
        if self in seen:
            return
        seen.add(self)
        for _, entry in self._content:
            if isinstance(entry, Twin):
                yield from entry.tensors(seen)
            elif isinstance(entry, Tensor):
                yield entry

    def build(self, memo: dict[Twin, Any] | None = None, give: Callable[[Any], Any] = _itself) -> Any:
        """A copy with this content.

        Args:
            memo: Copies made already: what is shared stays shared.
            give: Makes of what is held what the copy gets.
        """
        memo = {} if memo is None else memo
        if self in memo:
            return memo[self]
        is_tuple = issubclass(self._kind, tuple)  # made with its entries, which anything else may hold itself
        value = None if is_tuple else memo.setdefault(self, _emptied(self._hull))
        entries = [
            (key, entry.build(memo, give) if isinstance(entry, Twin) else give(entry)) for key, entry in self._content
        ]
        # the classes' own methods, whatever a subclass makes of them
        if is_tuple:
            value = memo[self] = getattr(self._kind, "_make", self._kind)(entry for _, entry in entries)
        elif isinstance(value, dict):
            for key, entry in entries:
                _dict_of(value).__setitem__(value, key, entry)
        elif isinstance(value, set):
            set.update(value, (entry for _, entry in entries))
        elif isinstance(value, list):
            list.extend(value, (entry for _, entry in entries))
        elif isinstance(value, deque):
            deque.extend(value, (entry for _, entry in entries))
        else:
            slots = _slots_of(self._kind)
            getattr(value, "__dict__", {}).update((key, entry) for key, entry in entries if key not in slots)
            for key, entry in entries:
                if key in slots:
                    object.__setattr__(value, key, entry)  # frozen ones too
        return value


class Snapshot:
    """A container or object that a forward is given, for a replay: itself where it is as it was, else a copy.

    Args:
        value: What is given; it is not kept alive.
        memo: See `Twin`.
        hold: See `Twin`.
    """

    def __init__(
        self, value: Any, memo: dict[int, Twin] | None = None, hold: Callable[[Any], Any] = without_graph
    ) -> None:
        memo = {} if memo is None else memo
        self._twin = memo.get(id(value)) or Twin(value, memo, hold=hold)
        self._value: Callable[[], Any] = _nothing
        with contextlib.suppress(TypeError):  # of a kind that cannot be referred to
            self._value = weakref.ref(value)

    def settle(self) -> None:
        """After the forward: what it has changed is never given to a replay, which would change it again."""
        if not self._is_as_it_was():
            self._value = _nothing

    def take(self, memo: dict[Twin, Any] | None = None, give: Callable[[Any], Any] = _itself) -> Any:
        """What a replay is given; see `Twin.build`."""
        return self._value() if self._is_as_it_was() else self._twin.build(memo, give)

    def _is_as_it_was(self) -> bool:
        value = self._value()
        return value is not None and self._twin.same_as(value)


def _nothing() -> None:
    """In place of a reference to an object that is gone."""


def has_content(value: Any) -> bool:
    """Whether a value is a container or a plain object: one that is no tensor, module, function or of a library.

    Of tuples those count that hold such values or tensors.
    """
    if isinstance(value, tuple):
        return any(isinstance(entry, Tensor) or has_content(entry) for entry in value)
    kind = type(value)
    if kind not in _has_content:
        _has_content[kind] = issubclass(kind, (*_CONTAINERS, SimpleNamespace)) or (
            kind.__module__.partition(".")[0] not in _FOREIGN
            and not any(base.__module__.startswith(_MACHINERY) for base in kind.__mro__)
            and not issubclass(kind, Tensor | nn.Module | Enum | type)
            and (hasattr(value, "__dict__") or bool(_slots_of(kind)))
            and not hasattr(kind, "__del__")  # it owns something, which a copy would release
            and _can_be_empty(kind)
        )
    return _has_content[kind]


def content_of(value: Any) -> list[tuple[Any, Any]]:
    """The entries of a container with their places, or the attributes of an object, those in slots included."""
    if isinstance(value, dict):
        return list(_dict_of(value).items(value))
    if isinstance(value, set):
        return [(entry, entry) for entry in value]
    if isinstance(value, list | deque | tuple):
        return list(enumerate(value))
    slots = {name: getattr(value, name) for name in _slots_of(type(value)) if hasattr(value, name)}
    return list((getattr(value, "__dict__", {}) | slots).items())


def _slots_of(kind: type) -> tuple[str, ...]:
    """Names of a class's slots that are not private to one of its bases; those of Python's own classes are left out."""
    if kind not in _slots:
        bases = [base for base in kind.__mro__ if base.__module__.partition(".")[0] not in sys.stdlib_module_names]
        named = [vars(base).get("__slots__", ()) for base in bases]
        names = [name for slots in named for name in ((slots,) if isinstance(slots, str) else slots)]
        _slots[kind] = tuple(name for name in names if not name.startswith("__"))
    return _slots[kind]


def _can_be_empty(kind: type) -> bool:
    try:
        _new(kind)
    except TypeError:  # an extension type's own
        return False
    return True


def _new(kind: Any) -> Any:
    """An empty instance, without running `__init__`."""
    return next(base for base in _BASES if issubclass(kind, base)).__new__(kind)


@dataclass(frozen=True, slots=True)
class Stream:
    """A random stream of its own, and where it stood.

    Args:
        source: The generator.
        read: Gives its state.
        write: Sets it.
        state: What `read` gave.
    """

    source: Any
    read: Callable[[], Any]
    write: Callable[[Any], Any]
    state: Any

    def moved(self) -> bool:
        """Whether something was drawn since."""
        return not same_state(self.read(), self.state)


def stream_of(value: Any) -> Stream | None:
    """The stream of a generator of torch, Python or NumPy; None for anything else."""
    if isinstance(value, torch.Generator):
        return Stream(value, value.get_state, value.set_state, value.get_state())
    if isinstance(value, random.Random):
        return Stream(value, value.getstate, value.setstate, value.getstate())
    if isinstance(value, np.random.RandomState):
        state: Any = value.get_state(legacy=False)
        return Stream(value, lambda: value.get_state(legacy=False), value.set_state, state)
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator
        return Stream(value, lambda: bits.state, lambda state: setattr(bits, "state", state), bits.state)
    return None


def same_state(one: Any, other: Any) -> bool:
    """Whether two readings of a random stream are the same."""
    if one is other:
        return True
    if isinstance(one, Tensor):
        return same_bytes(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_state(one[key], other[key]) for key in one)
    return bool(np.array_equal(one, other)) if isinstance(one, np.ndarray) else bool(one == other)


def same_bytes(one: Tensor, other: Tensor) -> bool:
    """Whether two states in host memory are the same, read as such also where torch's functions are faked."""
    return ctypes.string_at(one.data_ptr(), one.numel()) == ctypes.string_at(other.data_ptr(), other.numel())


def _taken(value: Any, memo: dict[int, Twin], depth: int, hold: Callable[[Any], Any]) -> Any:
    if not has_content(value) or depth == 0:
        return hold(value)
    return memo.get(id(value)) or Twin(value, memo, depth, hold)


def _dict_of(value: dict[Any, Any]) -> type[dict[Any, Any]]:
    return OrderedDict if isinstance(value, OrderedDict) else dict


def _emptied(value: Any) -> Any:
    hull = _new(type(value))
    if isinstance(value, deque):
        deque.__init__(hull, (), value.maxlen)
    elif isinstance(value, defaultdict):
        hull.default_factory = value.default_factory
    if isinstance(value, _CONTAINERS) and hasattr(value, "__dict__"):
        if vars(value) is value:  # a dict whose entries are its attributes
            hull.__dict__ = hull
        else:
            vars(hull).update(vars(value))
    return hull


def _same_key(one: Any, other: Any) -> bool:
    return one is other or (not isinstance(one, Tensor) and bool(one == other))


def _same(entry: Any, other: Any, seen: set[int]) -> bool:
    if isinstance(entry, Twin):
        return entry._same_as(other, seen)
    return entry is other
