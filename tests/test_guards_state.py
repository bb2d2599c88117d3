"""What a block's forward changes besides its outputs happens once a step."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from guards import assert_exact, each_kind, each_whole, refusal
from torch import Tensor, nn
from torch.nn import functional as F
from toys import WIDTH, Block, Stack, rows, square_loss, stack, step

from lightning_recompute.plan import RecomputePlan, Segment, Selective


def steps(number: int) -> Callable[[nn.Module], list[Tensor]]:
    return lambda model: [step(model) for _ in range(number)]


# --- statistics


class OwnNorm(nn.Module):
    """Batch statistics by the function, in a class that torch does not know; switched on late."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(WIDTH))
        self.register_buffer("running_var", torch.ones(WIDTH))
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return F.batch_norm(x, self.running_mean, self.running_var, training=self.num_calls > 1)


class WithNorm(Block):
    def __init__(self, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.norm = norm()


NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch": lambda: nn.BatchNorm1d(WIDTH),
    "synchronised": lambda: nn.SyncBatchNorm(WIDTH).eval(),
    "a library's own": OwnNorm,
}


@each_kind
@pytest.mark.parametrize("norm", NORMS)
def test_statistics(norm: str, kind: str) -> None:
    assert_exact(lambda: stack(4, lambda: WithNorm(NORMS[norm])), steps(3), kind)


@each_kind
def test_statistics_of_a_forward_without_backward(kind: str) -> None:
    def run(model: nn.Module) -> Tensor:
        square_loss(model)
        with torch.no_grad():
            square_loss(model)
        return step(model)

    assert_exact(lambda: stack(4, lambda: WithNorm(NORMS["batch"])), run, kind)


def test_statistics_of_a_norm_that_two_blocks_share() -> None:
    def build() -> nn.Module:
        norm = nn.BatchNorm1d(WIDTH)
        return stack(4, lambda: WithNorm(lambda: norm))

    for kind in ("full", "pairs", "freed"):
        assert_exact(build, steps(2), kind)


# --- counters, lists and objects


class Meter:
    """Not a module and not a tensor: a user's own."""

    def __init__(self) -> None:
        self.total = 0.0
        self.values: list[float] = []

    def update(self, value: float) -> None:
        self.total += value
        self.values.append(value)


@dataclass
class Record:
    number: int = 0
    seen: dict[str, list[int]] = field(default_factory=lambda: {"calls": []})


class Settings(dict[str, Any]):
    """A dictionary with its entries as attributes, as configurations often are."""

    __getattr__ = dict.__getitem__

    def __setitem__(self, key: str, value: Any) -> None:
        raise TypeError("settings are read-only")


class Collects(Block):
    """Fills whatever it holds, and reads it again to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: list[int] = []
        self.nested = {"a": [[0]], "b": OrderedDict(first=1)}
        self.last: deque[int] = deque(maxlen=2)
        self.kinds = {"start"}
        self.by_name: defaultdict[str, int] = defaultdict(int)
        self.counter: Counter[str] = Counter()
        self.meter = Meter()
        self.record = Record()
        self.settings = Settings(gain=0.5)
        self.tensors: dict[str, Tensor] = {}
        self.register_buffer("average", torch.zeros(WIDTH))
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        number = len(self.numbers)
        self.numbers.append(number)
        self.nested["a"][0][0] += 1
        self.nested["b"][f"call {number}"] = number
        self.last.append(number)
        self.kinds.add(str(number))
        self.by_name["calls"] += 1
        self.counter.update(["calls"])
        self.meter.update(1.0)
        self.record.number += 1
        self.record.seen["calls"].append(number)
        self.num_calls += 1
        factor = self.settings.gain * (1 + number) + self.meter.total + self.counter["calls"] + len(self.last)
        x = x * (factor + self.nested["a"][0][0] + self.by_name["calls"] + self.record.number) / 10
        y = x + self.inner(x + self.average)
        with torch.no_grad():
            self.average.lerp_(y.mean(0), 0.1)
        self.tensors["output"] = y
        return y

    def content(self) -> list[Any]:
        return [
            *(list(self.numbers), str(self.nested), list(self.last), self.last.maxlen, sorted(self.kinds)),
            *(dict(self.by_name), dict(self.counter), self.meter.total, list(self.meter.values)),
            *(self.record.number, str(self.record.seen), self.num_calls.item(), self.tensors["output"]),
        ]


@each_kind
def test_whatever_a_block_fills(kind: str) -> None:
    def run(model: nn.Module) -> list[Any]:
        losses = steps(3)(model)
        return [losses, *(block.content() for block in model.blocks)]

    assert_exact(lambda: stack(4, Collects), run, kind)


@each_whole
def test_two_forwards_before_their_backwards(kind: str) -> None:
    def run(model: nn.Module) -> list[Any]:
        one, other = square_loss(model), square_loss(model)
        other.backward()
        one.backward()
        return [one, other, *(block.content() for block in model.blocks)]

    assert_exact(lambda: stack(4, Collects), run, kind)


def test_objects_are_the_same_ones_afterwards() -> None:
    """A replay works on copies; what others hold on to is still what the block holds."""

    def run(model: nn.Module) -> list[bool]:
        held = [(block.meter, block.numbers, block.nested, block.tensors) for block in model.blocks]
        step(model)
        now = [(block.meter, block.numbers, block.nested, block.tensors) for block in model.blocks]
        return [one is other for a, b in zip(held, now, strict=True) for one, other in zip(a, b, strict=True)]

    assert_exact(lambda: stack(4, Collects), run, "full")
    assert_exact(lambda: stack(4, Collects), run, "pairs")


class Auxiliary(Stack):
    """Blocks add losses to a list that the model makes anew in each forward."""

    class Adds(Block):
        losses: list[Tensor]

        def forward(self, x: Tensor) -> Tensor:
            y = self.inner(x)
            self.losses.append(y.square().mean())
            return x + y

    def __init__(self) -> None:
        super().__init__(Auxiliary.Adds() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        losses: list[Tensor] = []
        for block in self.blocks:
            block.losses = losses
        y = self.head(self.hidden(x))
        assert len(losses) == 4
        return y + torch.stack(losses).sum()


@each_kind
def test_losses_collected_in_a_shared_list(kind: str) -> None:
    assert_exact(Auxiliary, steps(2), kind)


# --- written for the first time later


class Late(Block):
    """Writes a buffer from its third call on; in the replay of that call it would be written already."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.register_buffer("level", torch.ones(WIDTH))
        self.kind = kind
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.inner(x * self.level.clone())
        if self.calls > 2:
            if self.kind == "in place":
                self.level.mul_(2)
            else:
                self.level = self.level * 2
        return x + y


@each_whole
def test_a_buffer_written_in_place_for_the_first_time_later_is_refused(kind: str) -> None:
    message = refusal(lambda: stack(4, lambda: Late("in place")), steps(4), kind)
    assert message is not None
    for words in ("blocks.0", "'level'", "for the first time after its first call", "from the first step on"):
        assert words in message


@each_kind
def test_a_buffer_rebound_for_the_first_time_later(kind: str) -> None:
    assert_exact(lambda: stack(4, lambda: Late("rebound")), steps(4), kind)


def test_a_parameter_that_its_forward_writes_is_refused() -> None:
    class Clamps(Block):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.up.weight.clamp_(-0.1, 0.1)
            return x + self.inner(x)

    message = refusal(lambda: stack(4, Clamps), steps(1), "full")
    assert message is not None
    assert "writes its own parameter up.weight in place" in message
    # the parts of the block do not write it
    parts = RecomputePlan(tuple(Segment(i, i + 1, Selective(("norm", "*down"))) for i in range(4)))
    assert_exact(lambda: stack(4, Clamps), steps(2), parts)


# --- outside of blocks nothing changes


def test_evaluation_and_frozen_blocks_keep_their_state() -> None:
    def run(model: nn.Module) -> list[Any]:
        model.blocks[0].requires_grad_(False)
        model.embed.requires_grad_(False)
        losses = steps(2)(model)
        with torch.no_grad():
            losses.append(model(rows()).sum())
        return [losses, *(block.content() for block in model.blocks)]

    assert_exact(lambda: stack(4, Collects), run, "pairs")
