"""Steps of every habit under every kind of plan: live bytes stay the same, and no frame outlives its step."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from ledger import Ledger
from models import gpt, gpt_loss, tokens
from parity import seeded
from plans import PLANS
from selective_plans import SELECTIVE_PLANS, words_of
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_recompute.frame import Frame
from lightning_recompute.recompute import apply_recompute

CHUNKS = (4,)
PLAN_BUILDERS = PLANS | {name: build for name, build in SELECTIVE_PLANS.items() if "moe" not in words_of(name)}
USUAL = ("uniform-2", "core_attn+norm+act", "attn+norm", "full-norm-keep", "save-full-core")
SAVES_OPS = {name for name in SELECTIVE_PLANS if "save" in name}

Habit = Callable[[nn.Module], object]


def loss_of(model: nn.Module) -> Tensor:
    return gpt_loss(model, BATCH)


def step(model: nn.Module) -> None:
    loss_of(model).backward()
    model.zero_grad(set_to_none=False)


def forward_only(model: nn.Module) -> None:
    loss_of(model)


def retained(model: nn.Module) -> None:
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    loss.backward()
    model.zero_grad(set_to_none=False)


def partial(model: nn.Module) -> None:
    torch.autograd.grad(loss_of(model), [next(model.parameters())])


def two_forwards(model: nn.Module) -> None:
    one, other = loss_of(model), loss_of(model)
    one.backward()
    other.backward()
    model.zero_grad(set_to_none=False)


def failing(model: nn.Module) -> None:
    handle = next(iter(model.modules())).get_submodule("blocks.2.mlp").register_forward_hook(_raise)
    with contextlib.suppress(KeyError):
        loss_of(model)
    handle.remove()


def _raise(module: nn.Module, args: Any, output: Tensor) -> None:
    raise KeyError


HABITS: tuple[Habit, ...] = (step, forward_only, retained, partial, two_forwards, failing)
BATCH: dict[str, Tensor] = {}


def build() -> nn.Module:
    torch.manual_seed(7)
    BATCH["ids"] = tokens()
    model = gpt("eager")
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


@contextlib.contextmanager
def no_collector() -> Iterator[None]:
    """Only reference counts free anything: what a circle holds stays."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.fixture
def frames(monkeypatch: pytest.MonkeyPatch) -> weakref.WeakSet[Frame]:
    """All frames that are alive."""
    alive: weakref.WeakSet[Frame] = weakref.WeakSet()
    init = Frame.__init__

    def counted(self: Frame, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        alive.add(self)

    monkeypatch.setattr(Frame, "__init__", counted)
    return alive


def soak(plan: str, habits: tuple[Habit, ...], num_rounds: int, frames: weakref.WeakSet[Frame]) -> None:
    model = seeded(build)
    with apply_recompute(model, PLAN_BUILDERS[plan](CHUNKS)), no_collector(), Ledger(model, *BATCH.values()) as ledger:
        live = []
        for _ in range(num_rounds):
            for habit in habits:
                if habit is retained and plan in SAVES_OPS:
                    continue  # a second backward over saved operators is refused
                habit(model)
                live.append(ledger.live_bytes)
                assert len(frames) == 0, f"{len(frames)} frames of {habit.__name__} are still alive"
    assert set(live) == {live[0]}, f"live bytes over the steps: {live}"


@pytest.mark.parametrize(
    "plan", [plan if plan in USUAL else pytest.param(plan, marks=pytest.mark.long) for plan in PLAN_BUILDERS]
)
def test_a_few_steps(plan: str, frames: weakref.WeakSet[Frame]) -> None:
    if plan == "save-softmax":
        assert "eager" in repr(seeded(build)), "a plain softmax runs only there"
    soak(plan, HABITS, 2, frames)


@pytest.mark.long
def test_forty_steps(frames: weakref.WeakSet[Frame]) -> None:
    for plan in ("uniform-2", "core_attn+norm+act", "full-norm-keep", "save-full-core"):
        soak(plan, (step,), 40, frames)


def test_losses_that_nobody_sums_up_again(frames: weakref.WeakSet[Frame]) -> None:
    """What blocks collect from one step to the next is held by the model, not by frames of steps gone by."""

    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
            self.last: list[Tensor] = []
            self.outputs: dict[str, Tensor] = {}

        def forward(self, x: Tensor) -> Tensor:
            y = x + self.down(F.gelu(self.up(self.norm(x))))
            self.aux = y.mean()
            self.last = [*self.last[-1:], y]
            self.outputs["y"] = y
            return y

    for plan in ("uniform-1", "uniform-2", "norm+act"):
        model = seeded(lambda: nn.Sequential(*(Keeps() for _ in range(4))))
        x = torch.randn(4, 8, requires_grad=True)
        with apply_recompute(model, PLAN_BUILDERS[plan](CHUNKS)), no_collector(), Ledger(model, x) as ledger:
            live = []
            for _ in range(6):
                model(x).sum()
                live.append(ledger.live_bytes)
        # a module that keeps two outputs with their graphs keeps two steps: never more
        assert live[3] == live[4] == live[5], live
        assert len(frames) > 0
        for block in model:
            block.last.clear()
            block.outputs.clear()
            del block.aux
        assert len(frames) == 0
