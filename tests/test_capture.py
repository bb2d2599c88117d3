"""Catching the calls of blocks: which are alike, what their inputs need, and that nothing is left of it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from models import MODELS, gpt, gpt_loss, tokens
from parity import autocast, seeded
from torch import Tensor, nn

from lightning_recompute.blocks import find_blocks
from lightning_recompute.capture import Capture, capture_calls
from lightning_recompute.memory import measure_step
from lightning_recompute.policy import RecomputePolicy
from lightning_recompute.recompute import apply_recompute

WIDTH = 8


class Block(nn.Module):
    """Draws, counts, fills a list and keeps statistics."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.register_buffer("num_calls", torch.zeros(()))
        self.seen: list[int] = []
        self.last: Tensor | None = None
        self.generator = torch.Generator()

    def forward(self, x: Tensor, *, scale: float = 1.0, flag: bool = False) -> Tensor:
        assert isinstance(self.num_calls, Tensor)
        self.num_calls += 1
        self.seen.append(len(x))
        noise = torch.rand(1, generator=self.generator) + torch.rand(1) + random.random() + np.random.rand()
        self.last = self.norm(torch.relu(self.linear(x)) * noise.to(x.dtype)) * scale
        return self.last


class Model(nn.Module):
    def __init__(self, widths: tuple[int, ...] = (WIDTH,) * 3) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(map(Block, widths))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x


def batch() -> Tensor:
    return torch.randn(4, WIDTH)


def caught(module: nn.Module, run: Any = None) -> Capture:
    run = ((batch(),), {}) if run is None else run
    return capture_calls(module, run, find_blocks(module))


def state_of(module: nn.Module) -> list[Any]:
    """Everything that a forward could leave behind."""
    parts = list(module.modules())
    return [
        [(name, id(value)) for part in parts for name, value in vars(part).items()],
        [(name, id(value), value._version) for name, value in [*module.named_parameters(), *module.named_buffers()]],
        [(id(p.grad), p.requires_grad) for p in module.parameters()],
        [(part.training, len(part._forward_hooks), len(part._forward_pre_hooks)) for part in parts],
        [list(part.seen) for part in parts if isinstance(part, Block)],
        [part.generator.get_state().tolist() for part in parts if isinstance(part, Block)],
        {name: value.tolist() for name, value in module.state_dict().items()},
        (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()),
    ]


def test_a_call_as_the_model_makes_it() -> None:
    model, x = Model(), batch()
    capture = caught(model, lambda: model(x))
    (kind,) = capture.kinds
    assert kind.names == capture.names == ["blocks.0", "blocks.1", "blocks.2"]
    assert (capture.order, capture.chained) == ([0, 0, 0], {1, 2})
    call = kind.call
    assert call.module is model.blocks[0]
    assert torch.equal(call.tensors[0], model.embed(x))
    assert call.needs_grad == [True]
    assert not call.tensors[0].requires_grad


@pytest.mark.parametrize("ending", ["returns", "raises", "goes backward"])
def test_nothing_is_left(ending: str) -> None:
    model = Model()
    model(batch()).sum().backward()
    before = state_of(model)

    def run() -> None:
        for parameter in model.embed.parameters():
            parameter.requires_grad_(False)  # as optimizers do that take turns
        result = model(batch())
        if ending == "raises":
            raise KeyError("the user's")
        if ending == "goes backward":
            result.sum().backward()
            raise AssertionError("nobody comes here")

    if ending == "raises":
        with pytest.raises(KeyError, match="the user's"):
            caught(model, run)
    else:
        assert len(caught(model, run).order) == 3
    assert state_of(model) == before


def test_a_model_that_is_recomputed_stays_so() -> None:
    model, x = Model(), batch()
    with apply_recompute(model, RecomputePolicy()):
        before = state_of(model)
        assert len(caught(model, lambda: model(x)).kinds) == 1
        assert state_of(model) == before
        model(batch()).sum().backward()


def test_a_forward_keeps_no_activation() -> None:
    module, ids = seeded(lambda: gpt("sdpa")), {"ids": tokens()}

    def without_gradients() -> Tensor:
        with torch.no_grad():
            return gpt_loss(module, ids)

    def peak(run: Callable[[], Any]) -> int:
        return measure_step(run, backward=lambda _: None).peak_bytes

    full = peak(lambda: gpt_loss(module, ids))
    bare = peak(without_gradients)
    found = peak(lambda: caught(module, lambda: gpt_loss(module, ids)))
    assert bare < full / 2
    # and the input of the first block, the random states that are put back, copies of buffers
    assert found < bare + 30_000


def test_which_inputs_need_gradients() -> None:
    frozen = Model()
    frozen.embed.requires_grad_(False)
    frozen.blocks[0].requires_grad_(False)
    capture = caught(frozen)
    # a block that backward does not come to is not called, as far as memory goes
    assert capture.names == ["blocks.1", "blocks.2"]
    assert [kind.call.needs_grad for kind in capture.kinds] == [[False], [True]]
    case = MODELS["llama-eager"]
    module, text = seeded(case.build), case.batch()
    call = caught(module, lambda: case.loss(module, text)).kinds[0].call
    assert call.needs_grad[0]  # the hidden state, and neither masks nor rotary tables
    assert not any(call.needs_grad[1:])
    assert len(call.shared) == len(call.tensors) - 1


def test_a_teacher_without_gradients_is_left_out() -> None:
    class Distilled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.teacher, self.student = Model(), Model()

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                target = self.teacher(x)
            return self.student(x) - target

    assert caught(Distilled()).names == ["student.blocks.0", "student.blocks.1", "student.blocks.2"]


class Varied(Model):
    """Calls its blocks in ways that differ in one thing."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.change = change
        if change == "mode":
            self.blocks[1].norm.eval()  # type: ignore[operator]
        if change == "trained":
            self.blocks[1].linear.requires_grad_(False)  # type: ignore[operator]

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.blocks
        x = first(self.embed(x))
        if self.change == "shape":
            x = second(x[:2])
        elif self.change == "switch":
            x = second(x, flag=True)
        elif self.change == "precision":
            with autocast("bf16-mixed"):
                x = second(x).float()
        else:
            x = second(x)
        return third(x) if self.change != "shape" else x


@pytest.mark.parametrize(
    ("change", "due"),
    [
        ("shape", [0, 1]),
        ("switch", [0, 1, 0]),
        ("precision", [0, 1, 0]),
        ("mode", [0, 1, 0]),
        ("trained", [0, 1, 0]),
    ],
)
def test_which_calls_are_alike(change: str, due: list[int]) -> None:
    assert caught(Varied(change)).order == due


def test_a_block_that_runs_twice_has_two_calls() -> None:
    model = Model((WIDTH,))
    capture = caught(model, lambda: model(batch()) + model(batch()[:3])[:1].sum() + model(batch()))
    assert capture.names == ["blocks.0"] * 3
    assert capture.order == [0, 1, 0]
    assert capture.kinds[0].names == ["blocks.0", "blocks.0"]
    assert capture.chained == set()


def test_what_blocks_share_and_what_was_there_before() -> None:
    class Masked(nn.Module):
        def forward(self, x: Tensor, mask: Tensor, table: Tensor) -> Tensor:
            return x * mask + table * self.weight

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Masked() for _ in range(2))
            self.register_buffer("table", torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            mask = (x > 0).float()
            for block in self.blocks:
                x = block(x, mask, self.table)
            return x

    outer, x = Outer(), torch.randn(WIDTH, WIDTH)
    first, second = (kind.call for kind in caught(outer, lambda: outer(x)).kinds)  # the batch needs no gradient
    assert set(first.shared) == set(second.shared) == {1, 2}
    assert first.shared == second.shared
    assert (first.free, second.free) == ({0, 2}, {2})
    assert (first.chain, second.chain) == ({}, {0: 0})


def test_a_run_without_blocks_is_refused() -> None:
    model = Model()
    with pytest.raises(ValueError, match=r"no block of blocks \(3 x Block\) was called with gradients"):
        caught(model, lambda: model.embed(batch()))
    with pytest.raises(ValueError, match="let it run the training forward"):
        caught(model, torch.no_grad()(lambda: model(batch())))


@dataclass
class Carried:
    hidden: Tensor
    scale: float


class OnObjects(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, carried: Carried) -> Carried:
        return Carried(torch.tanh(self.linear(carried.hidden)) * carried.scale, carried.scale)


def test_tensors_in_objects_are_inputs() -> None:
    blocks = nn.ModuleList(OnObjects() for _ in range(3))
    model = nn.ModuleDict({"first": nn.Linear(8, 8), "blocks": blocks})
    x = torch.randn(4, 8)

    def run() -> Tensor:
        carried = Carried(model["first"](x), 2.0)
        for block in blocks:
            carried = block(carried)
        return carried.hidden.sum()

    capture = capture_calls(model, run, find_blocks(model))
    assert capture.order == [0, 0, 0]
    (kind,) = capture.kinds
    assert [tuple(tensor.shape) for tensor in kind.call.tensors] == [(4, 8)]
    assert kind.call.needs_grad == [True]
    assert capture.chained == {1, 2}
    (args, _) = kind.call.arguments([torch.ones(4, 8)])
    assert torch.equal(args[0].hidden, torch.ones(4, 8))
    assert args[0].scale == 2.0
