"""Containers, plain objects and random streams as they were at one moment."""

from __future__ import annotations

import datetime
import enum
import logging
import random
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.profilers import PassThroughProfiler
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from lightning_recompute.object_state import (
    Snapshot,
    Twin,
    content_of,
    has_content,
    same_state,
    stream_of,
    without_graph,
)


class Plain:
    def __init__(self, value: object) -> None:
        self.value = value
        self.list = [value]


class NeedsArgument:
    def __new__(cls, value: object) -> NeedsArgument:
        return super().__new__(cls)

    def __init__(self, value: object) -> None:
        self.value = value


@dataclass(frozen=True)
class Frozen:
    number: int
    names: list[str] = field(default_factory=list)


class ReadOnly(dict[str, Any]):
    __getattr__ = dict.__getitem__

    def __setitem__(self, key: str, value: Any) -> None:
        raise TypeError("read-only")


class OwnAttributes(dict[str, Any]):
    def __init__(self, **entries: Any) -> None:
        super().__init__(**entries)
        self.__dict__ = self


class Named(list[int]):
    name = "class"


class Slotted:
    __slots__ = ("later", "list", "value")

    def __init__(self, value: object) -> None:
        self.value = value
        self.list = [value]


@dataclass(slots=True, frozen=True)
class FrozenSlots:
    numbers: list[int]


class Callable:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> None:
        self.calls += 1


CONTENTS = {
    "list": lambda: [1, [2, 3]],
    "dict": lambda: {"a": [1], 2: {"b": 3}},
    "set": lambda: {1, "two"},
    "deque": lambda: deque([1, 2], maxlen=3),
    "ordered": lambda: OrderedDict(b=1, a=2),
    "default": lambda: defaultdict(list, {"a": [1]}),
    "counter": lambda: Counter("aab"),
    "object": lambda: Plain({"a": 1}),
    "object whose class needs an argument": lambda: NeedsArgument([1]),
    "frozen dataclass": lambda: Frozen(1, ["a"]),
    "read-only dictionary": lambda: ReadOnly(a=[1], b=2),
    "dictionary of attributes": lambda: OwnAttributes(a=[1], b=2),
    "subclass of list": lambda: Named([1, 2]),
    "what can be called": Callable,
    "namespace": lambda: SimpleNamespace(a=[1]),
    "slots": lambda: Slotted(1),
}


def spelled(value: Any) -> str:
    """A value's whole content."""
    if isinstance(value, deque):
        return f"{value!r} {value.maxlen}"
    if isinstance(value, list | dict | set):
        return f"{type(value).__name__} {sorted(map(str, value)) if isinstance(value, set) else value!r}"
    return (
        f"{type(value).__name__} { {name: spelled(entry) for name, entry in content_of(value)} }"
        if has_content(value)
        else repr(value)
    )


@pytest.mark.parametrize("content", CONTENTS)
def test_a_copy_is_equal_and_apart(content: str) -> None:
    value = CONTENTS[content]()
    assert has_content(value)
    before = spelled(value)
    twin = Twin(value)
    assert twin.same_as(value)
    one, other = twin.build(), twin.build()
    for copy in (one, other):
        assert copy is not value
        assert type(copy) is type(value)
        assert spelled(copy) == before
    change(one)
    assert not twin.same_as(one)
    assert spelled(one) != before
    assert spelled(value) == spelled(other) == before
    change(value)
    assert not twin.same_as(value)
    assert spelled(twin.build()) == before


def change(value: Any) -> None:
    if isinstance(value, Slotted):
        value.later = 1
        return
    if isinstance(value, dict):
        (OrderedDict if isinstance(value, OrderedDict) else dict).__setitem__(value, "new", 1)
    elif isinstance(value, set):
        value.add("new")
    elif isinstance(value, list | deque):
        value.append(9)
    else:
        vars(value)["new"] = 1


def test_nested_content_is_apart_as_well() -> None:
    value = {"a": [Plain([1])]}
    twin = Twin(value)
    value["a"][0].list[0].append(2)
    assert not twin.same_as(value)
    copy = twin.build()
    assert copy["a"][0].list[0] == [1]
    copy["a"][0].list[0].append(3)
    assert twin.build()["a"][0].list[0] == [1]


def test_kinds_keep_their_arguments() -> None:
    copy = Twin(defaultdict(list, a=[1])).build()
    assert copy["missing"] == []
    assert Twin(deque([1, 2, 3], maxlen=2)).build().maxlen == 2
    assert Twin(ReadOnly(a=1)).build().a == 1
    own = Twin(OwnAttributes(a=1)).build()
    own.a = 2
    assert own["a"] == 2
    ordered = OrderedDict(a=1, b=2)
    ordered.move_to_end("a")
    assert list(Twin(ordered).build()) == ["b", "a"]
    named = Named([1])
    named.name = "own"
    assert Twin(named).build().name == "own"


def test_frozen_slots() -> None:
    value = FrozenSlots([1])
    copy = Twin(value).build()
    value.numbers.append(2)
    assert copy == FrozenSlots([1])


def test_tuples_that_hold_something() -> None:
    pair = namedtuple("pair", "a b")
    leaf = torch.ones(2, requires_grad=True)
    value = {"pair": pair([1], 2), "outputs": (leaf * 2, 3), "top": torch.arange(3.0).max(0), "sizes": (1, 2)}
    assert has_content(value["pair"])
    assert has_content(value["outputs"])
    assert not has_content(value["sizes"])
    twin = Twin(value)
    copy = twin.build()
    assert copy["pair"] == pair([1], 2)
    assert copy["outputs"][0].grad_fn is None
    assert copy["top"].values == 2
    assert copy["sizes"] is value["sizes"]
    value["pair"].a.append(2)
    assert twin.build()["pair"] == pair([1], 2)


def test_its_tensors_in_the_order_of_the_content() -> None:
    one, two, three = torch.ones(1), torch.ones(2), torch.ones(3)
    value = Plain({"a": one, "b": [two, (three, 1)]})
    value.list = [value, one]
    assert [len(tensor) for tensor in Twin(value).tensors()] == [1, 2, 3, 1]
    assert next(Twin(value).tensors()) is one


def test_a_snapshot_gives_the_object_or_a_copy() -> None:
    def snapshot(value: Any) -> Snapshot:
        return Snapshot(value, {}, lambda entry: f"held {entry}")

    def taken(of: Snapshot) -> Any:
        return of.take({}, lambda entry: f"given {entry}")

    value = Plain([])
    value.value, value.list = 1, []
    kept = Snapshot(value)
    kept.settle()
    assert taken(kept) is value  # nothing has changed
    value.list.append(2)
    assert taken(kept).list == []
    value.list.clear()
    assert taken(kept) is value
    value.value = 3
    kept.settle()  # changed by the forward: it will be changed again
    value.value = 1
    assert taken(kept) is not value
    assert taken(snapshot(value)).value == "given held 1"
    assert taken(snapshot(ReadOnly(a=1))) == {"a": "given held 1"}
    shared = Plain(1)
    memo: dict[int, Twin] = {}
    one, other = (Snapshot(Plain(shared), memo) for _ in range(2))
    copies: dict[Twin, Any] = {}
    assert one.take(copies).value is other.take(copies).value


def test_what_is_shared_stays_shared() -> None:
    shared = [1]
    value = {"a": shared, "b": shared}
    copy = Twin(value).build()
    assert copy["a"] is copy["b"]
    memo: dict[int, Twin] = {}
    one, other = Twin([shared], memo), Twin([shared], memo)
    copies: dict[Twin, Any] = {}
    assert one.build(copies)[0] is other.build(copies)[0]


def test_circles() -> None:
    value = Plain(1)
    value.list.append(value)
    twin = Twin(value)
    assert twin.same_as(value)
    copy = twin.build()
    assert copy.list[1] is copy


def test_tensors_are_shared_without_their_graph() -> None:
    leaf = torch.ones(2, requires_grad=True)
    value = [leaf, leaf * 2, torch.ones(2)]
    copy = Twin(value).build()
    assert copy[0] is leaf
    assert copy[2] is value[2]
    assert copy[1].grad_fn is None
    assert copy[1].requires_grad
    assert copy[1].data_ptr() == value[1].data_ptr()
    value[1].detach().add_(1)
    assert copy[1]._version == value[1]._version
    assert without_graph("text") == "text"


class OwnsAFile:
    """Made without its `__init__`, it could not even be thrown away."""

    def __init__(self) -> None:
        self.file = "open"

    def __del__(self) -> None:
        assert self.file == "open"


class Colour(enum.Enum):
    RED = 1


class Tagged(str):
    pass


class Rows(torch.utils.data.Dataset[Any]):
    """Of the user's, with all of the data."""


class Data(pl.LightningDataModule):
    """The same."""


class OwnTrainer(pl.Trainer):
    """Reaches both."""


def test_what_has_no_content() -> None:
    pair = namedtuple("pair", "a b")
    values = [1, "text", None, 1.5, (1, (2, None)), pair(1, 2), Tagged("a"), torch.ones(1), nn.Linear(1, 1), len, Plain]
    values += [lambda: 0, random.Random(1), torch.Generator(), np.ones(2), datetime.datetime(2020, 1, 1), Colour.RED]
    values += [logging.getLogger(), torch.device("cpu"), torch.float, ValueError("x"), nn.Parameter(torch.ones(1))]
    values += [OwnsAFile(), PassThroughProfiler(), Rows(), Data(), OwnTrainer(logger=False, barebones=True)]
    assert [value for value in values if has_content(value)] == []


def test_same_as_knows_other_kinds() -> None:
    twin = Twin([1])
    assert not twin.same_as((1,))
    assert not twin.same_as(None)
    assert not twin.same_as(Named([1]))
    assert not Twin({"a": 1}).same_as(OrderedDict(a=1))


def test_keys_that_are_tensors() -> None:
    key = torch.ones(2)
    value = {key: 1, torch.zeros(3): 2}
    twin = Twin(value)
    assert twin.same_as(value)
    assert twin.build()[key] == 1
    assert Twin({key, "a"}).same_as({key, "a"}) in (True, False)  # sets have no order of their own; no error


# --- streams

STREAMS = {
    "torch": (lambda: torch.Generator().manual_seed(3), lambda g: torch.rand(2, generator=g).tolist()),
    "python": (lambda: random.Random(3), lambda g: [g.random(), g.gauss(0, 1)]),
    "numpy": (lambda: np.random.default_rng(3), lambda g: g.random(2).tolist()),
    "numpy, legacy": (lambda: np.random.RandomState(3), lambda g: g.randn(3).tolist()),
}


@pytest.mark.parametrize("kind", STREAMS)
def test_a_stream_is_put_back(kind: str) -> None:
    make, draw = STREAMS[kind]
    source: Any = make()
    draw(source)
    stream = stream_of(source)
    assert stream is not None
    assert stream.source is source
    assert not stream.moved()
    due = draw(source)
    assert stream.moved()
    later = stream.read()
    stream.write(stream.state)
    assert not stream.moved()
    assert draw(source) == due
    stream.write(later)
    assert draw(source) != due


def test_states_compare_where_functions_are_faked() -> None:
    one, again, other = (torch.Generator().manual_seed(seed).get_state() for seed in (1, 1, 2))
    with FakeTensorMode():
        assert same_state(one, again)
        assert not same_state(one, other)


def test_nothing_else_is_a_stream() -> None:
    for value in (1, "text", None, torch.ones(1), random, np.random, Plain(1)):
        assert stream_of(value) is None


def test_a_tensor_that_needs_grad_needs_it_without_its_graph() -> None:
    x: Tensor = torch.ones(2, requires_grad=True) * 2
    alias = without_graph(x)
    assert alias.requires_grad
    assert alias.is_leaf
    leaf = torch.ones(2, requires_grad=True)
    assert without_graph(leaf) is leaf
