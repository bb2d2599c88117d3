"""What is held between forward and backward, what backward peaks at, and that nothing stays."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from ledger import Ledger
from models import MODELS
from parity import FULL, PAIRS, seeded
from plans import PLANS
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from toys import ROWS, WIDTH, Block, Stack, square_loss, stack, step

from lightning_recompute.policy import RecomputePolicy
from lightning_recompute.recompute import apply_recompute

ONE_INPUT = ROWS * WIDTH * 4
"""Bytes of one block's input in fp32."""


class Chunked(Stack):
    """Runs `size` blocks under one call of torch's own checkpoint: the oracle for units."""

    def __init__(self, size: int) -> None:
        super().__init__(Block() for _ in range(4))
        self.size = size

    def hidden(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for start in range(0, 4, self.size):
            run = functools.partial(_through, list(self.blocks[start : start + self.size]))
            x = checkpoint(run, x, use_reentrant=False)
        return x


def _through(blocks: list[nn.Module], x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


def measured(model: nn.Module, retain: bool = False) -> tuple[int, int, int]:
    """Bytes held after forward, at the peak of backward and after it (the gradients), of a second step."""
    step(model)
    model.zero_grad()
    torch.manual_seed(1)
    with Ledger(model) as ledger:
        loss = square_loss(model)
        held = ledger.live_bytes
        ledger.peak_bytes = held
        loss.backward(retain_graph=retain)
        after = ledger.live_bytes
        if retain:
            loss.backward()
        peak = ledger.peak_bytes
    return held, peak, after


@pytest.mark.parametrize("size", [1, 2, 4])
def test_held_and_peak_as_with_torchs_checkpoint(size: int) -> None:
    due = measured(seeded(lambda: Chunked(size)))
    model = seeded(stack)
    with apply_recompute(model, RecomputePolicy(num_layers=size)):
        found = measured(model)
    assert found == due
    none = measured(seeded(stack))
    assert found[0] < none[0]
    assert found[2] == none[2]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_retained_graph_holds_no_recomputed_value(size: int) -> None:
    """Between two backwards over one graph only unit inputs are kept, as with torch's checkpoint."""
    due = measured(seeded(lambda: Chunked(size)), retain=True)
    model = seeded(stack)
    with apply_recompute(model, RecomputePolicy(num_layers=size)):
        assert measured(model, retain=True) == due
    assert due[1] < measured(seeded(stack), retain=True)[1] or size == 4


@pytest.mark.parametrize("plan", PLANS)
def test_held_bytes_of_every_plan(plan: str) -> None:
    """A unit holds its input; a kept block holds what it held; the sum is exact."""
    value = PLANS[plan]([6])
    model = seeded(lambda: stack(6))
    none = measured(model)[0]
    kept_block = none - measured(seeded(lambda: stack(5)))[0]
    with apply_recompute(model, value):
        held = measured(model)[0]
    units = [s for s in value.segments if s.action.name == "full"]
    recomputed = sum(s.stop - s.start for s in units)
    # the input of a unit at the start is the embedding's output, which a kept first block's norm holds as well
    assert held == none - recomputed * kept_block + len(units) * ONE_INPUT


# --- nothing stays


@contextlib.contextmanager
def no_collector() -> Iterator[None]:
    """The cyclic collector off: what only it could free counts as a leak."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def without_backward(model: nn.Module) -> None:
    square_loss(model)


def loss_kept_over_the_next_forward(model: nn.Module) -> None:
    losses = [square_loss(model), square_loss(model)]
    losses[0].backward()
    del losses[0]


def backward_retained(model: nn.Module) -> None:
    loss = square_loss(model)
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)


def second_order(model: nn.Module) -> None:
    gradients = torch.autograd.grad(square_loss(model), list(model.parameters()), create_graph=True)
    torch.stack([gradient.square().sum() for gradient in gradients]).sum().backward()


def partial(model: nn.Module) -> None:
    square_loss(model).backward(inputs=[model.get_parameter("blocks.2.up.weight")])


def exception_in_the_middle(model: nn.Module) -> None:
    handle = model.get_submodule("blocks.2.down").register_forward_hook(_fail)
    with contextlib.suppress(KeyError):
        square_loss(model)
    handle.remove()


def exception_in_backward(model: nn.Module) -> None:
    handle = model.get_parameter("blocks.1.up.weight").register_hook(_fail)
    with contextlib.suppress(KeyError):
        square_loss(model).backward()
    handle.remove()


def _fail(*_: object) -> None:
    raise KeyError


def with_some_frozen(model: nn.Module) -> None:
    model.get_submodule("blocks.1").requires_grad_(False)
    step(model)
    model.get_submodule("blocks.1").requires_grad_(True)


HABITS = [
    step,
    without_backward,
    loss_kept_over_the_next_forward,
    backward_retained,
    second_order,
    partial,
    exception_in_the_middle,
    exception_in_backward,
    with_some_frozen,
]


@pytest.mark.parametrize("habit", HABITS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("plan", ["uniform-1", "uniform-2", "uniform-all", "pair-keep", "none"])
def test_live_bytes_stay_constant(plan: str, habit: Callable[[nn.Module], object]) -> None:
    model = seeded(stack)
    with apply_recompute(model, PLANS[plan]([4])), no_collector(), Ledger(model) as ledger:
        live = []
        for _ in range(5):
            habit(model)
            model.zero_grad()
            live.append(ledger.live_bytes)
    assert live[1:] == live[:1] * 4
    if habit is not exception_in_backward:  # after which autograd itself keeps a little, without recompute too
        assert live[0] == 0


@pytest.mark.parametrize("plan", ["uniform-1", "uniform-2"])
@pytest.mark.parametrize("backward", [True, False], ids=["with backward", "forward only"])
@pytest.mark.parametrize("model", ["gpt-sdpa", "llama-eager", "t5-sdpa", "bert-eager"])
def test_live_bytes_stay_constant_in_real_models(plan: str, backward: bool, model: str) -> None:
    """With outputs that hold hidden states and attentions, collected in a context variable in Hugging Face's models."""
    case = MODELS[model]
    torch.manual_seed(7)
    batch: dict[str, object] = dict(case.batch())
    if model != "gpt-sdpa":
        batch |= {"output_hidden_states": True, "output_attentions": model.endswith("eager")}
    module = seeded(case.build)
    with apply_recompute(module, PLANS[plan](case.chunks)), no_collector(), Ledger(module) as ledger:
        live = []
        for _ in range(4):
            loss = case.loss(module, batch)
            if backward:
                loss.backward()
            del loss
            module.zero_grad()
            live.append(ledger.live_bytes)
    assert live[2:] == live[1:2] * 2


def test_removing_between_forward_and_backward_leaves_the_step_right() -> None:
    due = seeded(stack)
    torch.manual_seed(1)
    square_loss(due).backward()
    for policy in (FULL, PAIRS):
        model = seeded(stack)
        torch.manual_seed(1)
        with apply_recompute(model, policy):
            loss = square_loss(model)
        loss.backward()
        for parameter, other in zip(model.parameters(), due.parameters(), strict=True):
            assert torch.equal(parameter.grad, other.grad)
