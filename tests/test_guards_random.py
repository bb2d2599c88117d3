"""Random numbers are those of the forward wherever a block draws them, and every stream stands right afterwards."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from guards import assert_exact, each_kind, each_whole, plan_of
from parity import seeded
from torch import Tensor, nn
from torch.nn import functional as F
from toys import WIDTH, Block, square_loss, stack, step

from lightning_recompute.ambient import host_rng, same_host_rng
from lightning_recompute.errors import RecomputeError
from lightning_recompute.recompute import apply_recompute

GLOBAL = torch.Generator()
Draw = Callable[[nn.Module, Tensor], Any]


class Draws(Block):
    """Multiplies by what it draws, where the inner linears keep the product; from its call number `since` on."""

    def __init__(self, draw: Draw, since: int) -> None:
        super().__init__()
        self.draw = draw
        self.since = since
        self.num_calls = 0
        self.torchs = torch.Generator().manual_seed(5)
        self.pythons = random.Random(5)
        self.numpys = np.random.default_rng(5)
        self.legacy = np.random.RandomState(5)
        self.held = {"generator": torch.Generator().manual_seed(6)}

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        if self.num_calls >= self.since:
            x = x * (1 + self.draw(self, x))
        return x + self.inner(x)


def like(x: Tensor, generator: torch.Generator) -> Tensor:
    return torch.rand(x.shape, generator=generator)


SOURCES: dict[str, Draw] = {
    "python": lambda block, x: random.random(),
    "python's normal": lambda block, x: random.gauss(0, 1),
    "numpy": lambda block, x: np.random.rand(),
    "numpy's normal": lambda block, x: np.random.randn(),
    "numpy array": lambda block, x: torch.from_numpy(np.random.rand(*x.shape)).float(),
    "torch": lambda block, x: torch.rand_like(x),
    "torch generator": lambda block, x: like(x, block.torchs),
    "python generator": lambda block, x: block.pythons.random(),
    "numpy generator": lambda block, x: block.numpys.random(),
    "numpy state": lambda block, x: block.legacy.rand(),
    "global generator": lambda block, x: like(x, GLOBAL),
    "generator made in forward": lambda block, x: like(x, torch.Generator().manual_seed(block.num_calls)),
    "several": lambda block, x: random.random() * np.random.rand() + torch.rand(()) * like(x, block.torchs),
    "layer drop": lambda block, x: 0.0 if random.random() < 0.5 else torch.rand_like(x),
}
LATE = [source for source in SOURCES if source not in ("global generator", "generator made in forward")]


def run(model: nn.Module) -> list[Any]:
    random.seed(1)
    np.random.seed(1)
    GLOBAL.manual_seed(1)
    losses = [step(model) for _ in range(4)]
    streams = [(b.torchs.get_state(), b.pythons.getstate(), b.numpys.random(), b.legacy.rand()) for b in model.blocks]
    return [losses, random.random(), np.random.randn(), np.random.randn(), GLOBAL.get_state(), streams]


@each_whole
@pytest.mark.parametrize("source", SOURCES)
def test_drawn_in_every_call(source: str, kind: str) -> None:
    assert_exact(lambda: stack(4, lambda: Draws(SOURCES[source], since=1)), run, kind)


@each_whole
@pytest.mark.parametrize("source", LATE)
def test_drawn_from_a_later_call_on(source: str, kind: str) -> None:
    """As stochastic depth that is switched on after an epoch of warm-up."""
    assert_exact(lambda: stack(4, lambda: Draws(SOURCES[source], since=3)), run, kind)


@each_kind
def test_blocks_of_which_some_draw(kind: str) -> None:
    def build() -> nn.Module:
        draws = [SOURCES["numpy"], SOURCES["torch generator"], SOURCES["layer drop"], lambda block, x: 0.0]
        return stack(4, lambda: Draws(draws.pop(0), since=1))

    assert_exact(build, run, kind)


class RandomNorm(nn.LayerNorm):
    """A norm that adds noise from a generator of its own; its output is made again for its consumer."""

    def __init__(self) -> None:
        super().__init__(WIDTH)
        self.generator = torch.Generator().manual_seed(7)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = F.dropout(super().forward(x), 0.2, self.training)
        return y + 0.1 * like(x, self.generator)


@each_kind
def test_a_norm_that_draws(kind: str) -> None:
    def build() -> nn.Module:
        model = stack()
        for block in model.blocks:
            block.norm = RandomNorm()
        return model

    assert_exact(build, lambda model: [step(model) for _ in range(2)], kind)


def test_what_backward_draws_does_not_meet_the_replay() -> None:
    """Somebody draws between forward and backward: the replay neither sees that nor takes it away."""

    def between(model: nn.Module) -> list[Any]:
        random.seed(2)
        np.random.seed(2)
        loss = square_loss(model)
        drawn = [random.random(), np.random.randn(), torch.rand(3)]
        loss.backward()
        return [loss, *drawn, random.random(), np.random.randn(), torch.rand(3)]

    for source in ("several", "layer drop", "numpy's normal"):
        assert_exact(lambda source=source: stack(4, lambda: Draws(SOURCES[source], since=1)), between, "pairs")


def test_a_global_generator_that_is_first_used_later_is_reported_by_check() -> None:
    model = seeded(lambda: stack(4, lambda: Draws(SOURCES["global generator"], since=2)))
    with apply_recompute(model, plan_of("full"), check=True):
        with torch.no_grad():
            square_loss(model)
        square_loss(model).backward()  # with a plain call first: the first call under grad learns the generator

    class Hidden(Block):
        draws = False

        def forward(self, x: Tensor) -> Tensor:
            return x + self.inner(x * like(x, GLOBAL)) if self.draws else x + self.inner(x)

    model = seeded(lambda: stack(4, Hidden))
    with apply_recompute(model, plan_of("full"), check=True):
        square_loss(model)
        Hidden.draws = True
        loss = square_loss(model)
        with pytest.raises(RecomputeError, match=r"(?s)blocks\.3.*differs in the replay.*random numbers from a source"):
            loss.backward()
    Hidden.draws = False


def test_readings_of_the_host_streams() -> None:
    """Equal until something is drawn, be it the second normal number that NumPy keeps from the first."""
    np.random.seed(3)
    one = host_rng()
    assert same_host_rng(one, host_rng())
    random.random()
    assert not same_host_rng(one, host_rng())
    one = host_rng()
    np.random.randn()
    two = host_rng()
    assert not same_host_rng(one, two)
    np.random.randn()
    assert not same_host_rng(two, host_rng())
    assert not same_host_rng(one, two)


def test_another_global_bit_generator() -> None:
    former = np.random.get_bit_generator()
    found = []
    try:
        for kind in ("none", "full", "pairs"):
            np.random.set_bit_generator(np.random.PCG64(3))
            torch.manual_seed(0)
            model = seeded(lambda: stack(4, lambda: Draws(SOURCES["numpy"], since=1)))
            with contextlib.nullcontext() if kind == "none" else apply_recompute(model, plan_of(kind)):
                found.append([*(step(model).item() for _ in range(3)), np.random.rand()])
    finally:
        np.random.set_bit_generator(former)
    assert found[1] == found[2] == found[0]
