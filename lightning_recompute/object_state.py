"""Plain Python objects and containers as they were at one moment: what a forward may fill, count or clear."""

from __future__ import annotations

import ctypes
import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_MAX_DEPTH = 5
# objects of these libraries, of Python itself, and what can be called hold no state of a user's block
_PYTHON = {"builtins", "enum", "functools", "logging", "random", "re", "threading", "types", "typing", "weakref"}
_FOREIGN = _PYTHON | {"_thread", "lightning", "lightning_fabric", "numpy", "pytorch_lightning", "torch"}
_CONTAINERS = (list, dict, set, deque)
_BASES: tuple[Any, ...] = (OrderedDict, defaultdict, *_CONTAINERS, object)  # the first that fits can make an empty one
_has_content: dict[type, bool] = {}


class Twin:
    """The content of a container or plain object, of which copies can be made.

    Containers and objects inside are taken as well; anything else is shared. A tensor with a graph is held without
    it, so that nothing here keeps a graph alive.

    Args:
        value: What to take; see `has_content`.
        memo: Twins made already, by id of their value: what is shared stays shared.
    """

    def __init__(self, value: Any, memo: dict[int, Twin] | None = None, depth: int = _MAX_DEPTH) -> None:
        memo = {} if memo is None else memo
        memo[id(value)] = self
        self._hull = _emptied(value)
        self._content = [(key, _taken(entry, memo, depth - 1)) for key, entry in _content(value)]

    def same_as(self, value: Any) -> bool:
        """Whether a value has this content still, entry by entry the same objects."""
        return self._same_as(value, set())

    def _same_as(self, value: Any, seen: set[int]) -> bool:
        if id(self) in seen:
            return True
        seen.add(id(self))
        if type(value) is not type(self._hull):
            return False
        content = _content(value)
        return len(content) == len(self._content) and all(
            _same_key(mine, theirs) and _same(entry, other, seen)
            for (mine, entry), (theirs, other) in zip(self._content, content, strict=True)
        )

    def build(self, memo: dict[Twin, Any] | None = None) -> Any:
        """A copy with this content.

        Args:
            memo: Copies made already: what is shared stays shared.
        """
        memo = {} if memo is None else memo
        if self in memo:
            return memo[self]
        value = memo[self] = _emptied(self._hull)
        entries = [(key, entry.build(memo) if isinstance(entry, Twin) else entry) for key, entry in self._content]
        # the classes' own methods, whatever a subclass makes of them
        if isinstance(value, dict):
            for key, entry in entries:
                _dict_of(value).__setitem__(value, key, entry)
        elif isinstance(value, set):
            set.update(value, (entry for _, entry in entries))
        elif isinstance(value, list):
            list.extend(value, (entry for _, entry in entries))
        elif isinstance(value, deque):
            deque.extend(value, (entry for _, entry in entries))
        else:
            vars(value).update(entries)
        return value


def is_container(value: Any) -> bool:
    """Whether a value is a list, dict, set or deque."""
    return isinstance(value, _CONTAINERS)


def has_content(value: Any) -> bool:
    """Whether a value is a container or a plain object: one that is no tensor, module, function or of a library."""
    kind = type(value)
    if kind not in _has_content:
        _has_content[kind] = issubclass(kind, _CONTAINERS) or (
            kind.__module__.partition(".")[0] not in _FOREIGN
            and not issubclass(kind, Tensor | nn.Module | Enum | type)
            and hasattr(value, "__dict__")
            and not hasattr(kind, "__del__")  # it owns something, which a copy would release
            and _can_be_empty(kind)
        )
    return _has_content[kind]


def _can_be_empty(kind: type) -> bool:
    try:
        _new(kind)
    except TypeError:  # an extension type's own
        return False
    return True


def _new(kind: Any) -> Any:
    """An empty instance, without running `__init__`."""
    return next(base for base in _BASES if issubclass(kind, base)).__new__(kind)


def without_graph(value: Any) -> Any:
    """A tensor's value without its graph; anything else as it is."""
    if isinstance(value, Tensor) and value.grad_fn is not None:
        return value.detach().requires_grad_()
    return value


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


def _taken(value: Any, memo: dict[int, Twin], depth: int) -> Any:
    if not has_content(value) or depth == 0:
        return without_graph(value)
    return memo.get(id(value)) or Twin(value, memo, depth)


def _dict_of(value: dict[Any, Any]) -> type[dict[Any, Any]]:
    return OrderedDict if isinstance(value, OrderedDict) else dict


def _content(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, dict):
        return list(_dict_of(value).items(value))
    if isinstance(value, set):
        return [(entry, entry) for entry in value]
    if isinstance(value, list | deque):
        return list(enumerate(value))
    return list(vars(value).items())


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
