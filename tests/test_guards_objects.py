"""Objects that blocks are given and change: a replay sees them as the forward did and leaves them as they are."""

from __future__ import annotations

import functools
import gc
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from guards import assert_exact, each_kind, each_whole, plan_of, refusal
from ledger import Ledger
from parity import seeded
from torch import Tensor, nn
from toys import WIDTH, Block, rows, square_loss, stack, step

from lightning_recompute.errors import RecomputeError
from lightning_recompute.recompute import apply_recompute


class State:
    """What a block may carry its hidden state in."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden
        self.num_calls = 0
        self.seen: list[Tensor] = []


@dataclass
class Record:
    hidden: Tensor


@dataclass(slots=True)
class Slots:
    hidden: Tensor


class Entries(dict[str, Tensor]):
    """A dictionary of a kind of its own, with attributes."""

    hidden = property(lambda self: self["hidden"], lambda self, value: self.update(hidden=value))


CARRIERS: dict[str, Callable[[Tensor], Any]] = {
    "object": State,
    "dataclass": Record,
    "slots": Slots,
    "namespace": lambda hidden: SimpleNamespace(hidden=hidden),
    "dictionary": lambda hidden: Entries(hidden=hidden),
    "nested": lambda hidden: SimpleNamespace(hidden=hidden, others=[State(hidden), (hidden, {"a": hidden})]),
}


class Changes(Block):
    def forward(self, state: Any) -> Any:
        state.hidden = state.hidden + self.inner(state.hidden)
        return state


class ChangesAndReturnsNothing(Block):
    def forward(self, state: Any) -> None:
        state.hidden = state.hidden + self.inner(state.hidden)


class Renews(Block):
    def forward(self, state: Any) -> Any:
        return State(state.hidden + self.inner(state.hidden))


class Carried(nn.Module):
    """A stack whose blocks hand an object on."""

    def __init__(self, block: Callable[[], nn.Module], carrier: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(4))
        self.carrier = carrier

    def forward(self, x: Tensor) -> Tensor:
        state = self.carrier(self.embed(x))
        for block in self.blocks:
            result = block(state)
            state = state if result is None else result
        y: Tensor = state.hidden
        return y


@each_kind
@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("block", [Changes, Renews])
def test_a_hidden_state_in_an_object(block: type[nn.Module], carrier: str, kind: str) -> None:
    assert_exact(lambda: Carried(block, CARRIERS[carrier]), lambda model: [step(model), step(model)], kind)


@each_kind
def test_a_block_that_returns_nothing(kind: str) -> None:
    """Between the blocks of a unit the hidden state must be what the block before returned: else it is refused."""
    message = refusal(lambda: Carried(ChangesAndReturnsNothing, State), step, kind)
    assert message is None if "pairs" not in kind else "blocks.0 -> blocks.1" in str(message)


@each_whole
@pytest.mark.parametrize("carrier", ["object", "slots", "nested"])
def test_nothing_is_left_of_a_state(carrier: str, kind: str) -> None:
    """It comes to hold what the last block returned, the graph of which holds the frames of all."""
    model, x = seeded(lambda: Carried(Changes, CARRIERS[carrier])), rows()
    gc.collect()
    gc.disable()
    try:
        with apply_recompute(model, plan_of(kind)), Ledger(model, x) as ledger:
            step(model)
            live = [ledger.live_bytes]
            for _ in range(3):
                model(x)
                live.append(ledger.live_bytes)
    finally:
        gc.enable()
    assert live == live[:1] * 4


class Keeps(Block):
    """Keeps its last output in a tuple."""

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.inner(x)
        self.last = (y, y.mean())
        return y


@each_whole
def test_tuples_of_steps_gone_by(kind: str) -> None:
    """One step holds its own graph, not those of all before."""
    model, x = seeded(lambda: stack(4, Keeps)), rows()
    with apply_recompute(model, plan_of(kind)), Ledger(model, x) as ledger:
        live = []
        for _ in range(4):
            square_loss(model)
            live.append(ledger.live_bytes)
        assert live[1:] == live[1:2] * 3, live


class Counts(Block):
    """Uses an object beside the hidden state, and leaves things in it."""

    def forward(self, x: Tensor, state: State, *, records: Any) -> Tensor:
        state.num_calls += 1
        gain = 1.0 / state.num_calls + len(records)
        records.append(gain)
        state.seen.append(x)
        return x + self.inner(x * gain) + self.inner(state.hidden)


class Gives(nn.Module):
    def __init__(self, records: Callable[[], Any]) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Counts() for _ in range(4))
        self.records = records

    def forward(self, x: Tensor) -> Tensor:
        self.state, self.given = State(self.embed(x) * 2), self.records()
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, self.state, records=self.given)
        return x


@each_kind
@pytest.mark.parametrize("records", [list, deque], ids=lambda f: f.__name__)
def test_what_blocks_count_is_counted_once(records: Callable[[], Any], kind: str) -> None:
    def run(model: nn.Module) -> list[Any]:
        loss = step(model)
        return [loss, model.state.num_calls, list(model.given), [seen.detach() for seen in model.state.seen]]

    assert_exact(lambda: Gives(records), run, kind)


@each_whole
def test_a_tensor_in_an_object_written_after_the_call_is_refused(kind: str) -> None:
    class Reads(Block):
        def forward(self, x: Tensor, table: OrderedDict[str, Any]) -> Tensor:
            return x + self.inner(x) * table["state"].hidden.exp()

    table = OrderedDict(state=Record(torch.ones(WIDTH)))
    model = seeded(lambda: Reading(Reads, table))
    with apply_recompute(model, plan_of(kind)):
        loss = square_loss(model)
        table["state"].hidden.add_(1.0)
        with pytest.raises(RecomputeError, match=r"blocks\.\d: an input was changed in place.*write to a copy"):
            loss.backward()


class Reading(nn.Module):
    def __init__(self, block: Callable[[], nn.Module], table: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(4))
        self.table = table

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, self.table)
        return x


# --- tensors in what a module holds


class Holds(Block):
    """Reads tensors in a list, a dictionary, an object and a tuple; writes to one of them."""

    def __init__(self, write: Callable[[Any], object]) -> None:
        super().__init__()
        self.tables: list[Any] = [torch.full((), 1.5), {"gain": torch.ones(WIDTH)}]
        self.state = SimpleNamespace(shift=torch.zeros(()), pair=(torch.ones(()), 2))
        self.write = write
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        level, gain, shift, (factor, _) = *self.tables, self.state.shift, self.state.pair
        y = x * level.clone() * gain["gain"].clone() * factor.clone() + shift
        self.num_calls += 1
        self.write(self)
        return x + self.inner(y)


WRITES: dict[str, Callable[[Any], object]] = {
    "list": lambda block: block.tables[0].mul_(1.5),
    "dictionary": lambda block: block.tables[1]["gain"].add_(1.0),
    "object": lambda block: block.state.shift.add_(1.0),
    "tuple": lambda block: block.state.pair[0].mul_(1.5),
}


def held(model: nn.Module) -> list[Tensor]:
    states = [(*block.tables, block.state.shift, block.state.pair[0]) for block in model.blocks]
    return [tensor.clone() for level, gain, *rest in states for tensor in (level, gain["gain"], *rest)]


@each_kind
@pytest.mark.parametrize("write", WRITES)
def test_a_tensor_in_an_object_is_written_once(write: str, kind: str) -> None:
    build = functools.partial(stack, 4, lambda: Holds(WRITES[write]))
    assert_exact(build, lambda model: [step(model), step(model), held(model)], kind)


@each_whole
def test_a_tensor_in_an_object_written_for_the_first_time_later_is_refused(kind: str) -> None:
    build = functools.partial(stack, 4, lambda: Holds(lambda block: block.num_calls == 2 and WRITES["list"](block)))
    message = refusal(build, lambda model: [step(model), step(model)], kind)
    assert message is not None
    assert "'tables.0' for the first time after its first call" in message


@each_whole
@pytest.mark.parametrize("write", WRITES)
def test_a_tensor_in_an_object_written_after_the_forward_is_refused(write: str, kind: str) -> None:
    def run(model: nn.Module) -> Tensor:
        loss = square_loss(model)
        WRITES[write](model.blocks[1])
        loss.backward()
        return loss

    message = refusal(lambda: stack(4, lambda: Holds(lambda block: None)), run, kind)
    assert message is not None
    assert "blocks.1: buffer or tensor" in message


def test_an_object_that_did_not_change_is_given_itself() -> None:
    """Nothing is copied that need not be: what a block compares by identity is the same."""
    given: list[int] = []

    class Sees(Block):
        def forward(self, x: Tensor, options: Any) -> Tensor:
            given.append(id(options))
            return x + self.inner(x) * options.gain

    class Options:
        gain = 0.5

    options = Options()
    model = seeded(lambda: Reading(Sees, options))
    with apply_recompute(model, plan_of("full")):
        step(model)
    assert given == [id(options)] * 8
