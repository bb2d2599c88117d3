"""Attributes of a module that a step changes behind the blocks: only the last stage does, the others are told.

Lists that steps append to and counters that they add to are read by hooks at the end of an epoch, on every rank.
"""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_NUM_ITEMS = 16
"""Lists of more are not searched for containers: these are the outputs of an epoch, and not a list for each loader."""
_NUM_KEYS = 256
"""Dicts of more are left alone: to look through a vocabulary at every step would take long."""


@dataclass(frozen=True)
class _List:
    """A list before a step: its length and, of a short one, what is in it."""

    length: int
    items: list[Any]


@dataclass(frozen=True)
class _Tensor:
    """A tensor before a step. Not held: what a step replaces is free at once."""

    itself: weakref.ref[Tensor]
    version: int | None


@dataclass(frozen=True)
class _Other:
    """What cannot be sent."""


@dataclass(frozen=True)
class _Value:
    """A change: the value that was set."""

    value: Any


@dataclass(frozen=True)
class _Grown:
    """A change: what a list got behind its former items, and changes in these."""

    length: int
    added: list[Any]
    inside: dict[int, Any]


@dataclass(frozen=True)
class _Inside:
    """A change: changes in a dict, and keys that are gone."""

    changes: dict[Any, Any]
    gone: list[Any]


class SharedAttributes:
    """The plain attributes of one module: numbers, strings, tensors, arrays, and lists and dicts of them.

    The order of calls: on the rank that runs the end of a step `look` before it, and `changes` after it; then `follow`
    on the others. Attributes whose names begin with `_`, and other objects, are left alone.

    Args:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before: dict[str, Any] = {}

    def look(self) -> None:
        """Note what is there."""
        self._before = {name: _token(value) for name, value in self._attributes().items()}

    def changes(self, largest_bytes: int | None = None) -> tuple[dict[str, Any], list[str]]:
        """What came since `look`, on the CPU.

        Args:
            largest_bytes: Attributes with more to send are left out; None: there is no limit.

        Returns:
            What the others are sent, and the names of attributes that were left out.
        """
        found, left_out = {}, []
        for name, change in _changes(self._before, self._attributes()).items():
            if largest_bytes is not None and _num_bytes(change) > largest_bytes:
                left_out.append(name)
            else:
                found[name] = change
        self._before = {}
        return found, left_out

    def follow(self, changes: Mapping[str, Any], device: torch.device) -> None:
        """Take over what another rank's `changes` says.

        Args:
            changes: What it sent.
            device: Where the module is; tensors come there.
        """
        _follow(vars(self._module), changes, device)

    def _attributes(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self._module).items() if not name.startswith("_")}


def _token(value: Any) -> Any:
    """What tells later whether a value is still the same."""
    if type(value) is list:
        return _List(len(value), [_token(item) for item in value] if len(value) <= _NUM_ITEMS else [])
    if isinstance(value, dict):
        return {key: _token(item) for key, item in value.items()} if len(value) <= _NUM_KEYS else _Other()
    if type(value) is tuple and len(value) <= _NUM_ITEMS:
        return tuple(_token(item) for item in value)
    if isinstance(value, Tensor):
        # a tensor of inference mode counts no writes
        return _Tensor(weakref.ref(value), None if value.is_inference() else value._version)
    if isinstance(value, np.ndarray):
        return value.copy()
    return value if isinstance(value, _PLAIN) else _Other()


def _is_same(before: Any, value: Any) -> bool:
    if isinstance(value, Tensor):
        same = isinstance(before, _Tensor) and before.itself() is value and before.version is not None
        return same and before.version == value._version
    if isinstance(value, np.ndarray):
        return isinstance(before, np.ndarray) and value.dtype == before.dtype and np.array_equal(value, before)
    if type(value) is tuple and type(before) is tuple:
        return len(value) == len(before) and all(map(_is_same, before, value))
    return type(value) is type(before) and isinstance(value, _PLAIN) and bool(value == before)


def _change(before: Any, value: Any) -> Any:
    """The change of a value since its token was made; None where there is none, or none that can be sent."""
    if type(value) is list and isinstance(before, _List) and len(value) >= before.length:
        inside = _changes(dict(enumerate(before.items)), dict(enumerate(value[: len(before.items)])))
        added = _sent(value[before.length :]) or []
        return _Grown(before.length, added, inside) if added or inside else None
    if isinstance(value, dict) and isinstance(before, dict):
        changes, gone = _changes(before, value), list(before.keys() - value.keys())
        return _Inside(changes, gone) if changes or gone else None
    if (isinstance(value, dict) and isinstance(before, _Other)) or _is_same(before, value):
        return None
    return _new(value)


def _changes(before: Mapping[Any, Any], values: Mapping[Any, Any]) -> dict[Any, Any]:
    found = {key: _change(before[key], value) if key in before else _new(value) for key, value in values.items()}
    return {key: change for key, change in found.items() if change is not None}


def _new(value: Any) -> _Value | None:
    sent = _sent(value)
    return None if sent is None and value is not None else _Value(sent)


def _sent(value: Any) -> Any:
    """A copy of a value that can be sent; None where there is something in it that is not plain."""
    if not all(isinstance(leaf, (*_PLAIN, Tensor, np.ndarray, np.generic)) for leaf in tree_leaves(value)):
        return None
    copied = tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), value)
    if isinstance(value, dict) and type(value) is not dict:  # what it makes missing values with, perhaps
        try:
            pickle.dumps(copied)
        except (pickle.PicklingError, AttributeError, TypeError):
            return None
    return copied


def _num_bytes(change: Any) -> int:
    if isinstance(change, _Value):
        return sum(leaf.nbytes for leaf in tree_leaves(change.value) if isinstance(leaf, Tensor | np.ndarray))
    if isinstance(change, _Grown):
        return _num_bytes(_Value(change.added)) + sum(map(_num_bytes, change.inside.values()))
    return sum(map(_num_bytes, change.changes.values()))


def _follow(here: Any, changes: Mapping[Any, Any], device: torch.device) -> None:
    """Make changes in a dict or list, by key; what they are made in stays the same object."""
    for key, change in changes.items():
        mine = here[key] if isinstance(here, list) or key in here else None
        if isinstance(change, _Grown) and isinstance(mine, list):
            mine[change.length :] = _moved(change.added, device)
            _follow(mine, change.inside, device)
        elif isinstance(change, _Inside) and isinstance(mine, dict):
            for name in change.gone:
                mine.pop(name, None)
            _follow(mine, change.changes, device)
        elif isinstance(change, _Value):
            value = _moved(change.value, device)
            if type(mine) is list and type(value) is list:
                mine[:] = value
            else:
                here[key] = value


def _moved(value: Any, device: torch.device) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), value)
