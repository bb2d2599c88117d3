"""The cost of one block alone: on fake tensors what it is on real ones, and no trace of either."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from models import MODELS
from parity import autocast, seeded
from test_capture import Model, batch, caught, state_of
from torch import Tensor, nn
from torch.nn import functional as F
from toys import Block, Stack, stack

from lightning_recompute import block_cost
from lightning_recompute.block_cost import BlockCost, measure_bytes
from lightning_recompute.block_time import measure_seconds
from lightning_recompute.blocks import find_blocks
from lightning_recompute.capture import BlockCall, capture_calls
from lightning_recompute.inspection import total_held_bytes, total_peak_bytes
from lightning_recompute.ledger import Ledger
from lightning_recompute.lone_block import alone
from lightning_recompute.memory import measure_step, open_meter
from lightning_recompute.plan import Action, Full, Keep, RecomputePlan, SaveOps, Segment, Selective
from lightning_recompute.recompute import apply_recompute

ACTIONS: tuple[Action, ...] = (Keep(), Selective(("norm", "act")), Full(), SaveOps())


def first_call(module: nn.Module, run: Callable[[], object]) -> BlockCall:
    return capture_calls(module, run, find_blocks(module)).kinds[0].call


def on_real_tensors(call: BlockCall, action: Action, monkeypatch: pytest.MonkeyPatch) -> BlockCost:
    """What the fallback measures."""

    def none(**_: object) -> None:
        raise RuntimeError("no fake tensors today")

    with monkeypatch.context() as patch:
        patch.setattr(block_cost, "FakeTensorMode", none)
        return measure_bytes(call, action)


@pytest.mark.parametrize(("name", "precision"), [("gpt-eager", "32"), ("bert-sdpa", "bf16-mixed")])
def test_fake_tensors_give_the_bytes_of_real_ones(name: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = MODELS[name]
    module, data = seeded(case.build), case.batch()

    def run() -> Tensor:
        with autocast(precision):
            return case.loss(module, data)

    call = first_call(module, run)
    for action in ACTIONS:
        fake, real = measure_bytes(call, action), on_real_tensors(call, action, monkeypatch)
        assert (fake.is_fake, real.is_fake) == (True, False)
        assert fake.held_bytes == real.held_bytes, action
        assert fake.chained_bytes == real.chained_bytes, action
        assert fake.shared_bytes == real.shared_bytes, action
        # a random state that a replay puts back afterwards, and small change of kernels
        assert abs(fake.peak_bytes - real.peak_bytes) <= 24, action


def test_bytes_are_the_allocators() -> None:
    """One block between its input and a loss, run as a user runs it."""
    model = seeded(lambda: stack(1))
    x = torch.randn(4, 8)

    def hidden() -> Tensor:
        return torch.relu(model.embed(x))  # held by the ReLU anyway

    def of_model(action: Action) -> int:
        with apply_recompute(model, RecomputePlan((Segment(0, 1, action),))):
            model.blocks[0](hidden()).sum().backward()
            model.zero_grad()
            return measure_step(lambda: model.blocks[0](hidden()).sum()).held_bytes

    call = first_call(model, lambda: model.blocks[0](hidden()))
    kept, full = (measure_bytes(call, action) for action in (Keep(), Full()))
    assert kept.held_bytes - full.held_bytes == of_model(Keep()) - of_model(Full())
    assert full.held_bytes == 4 * 8 * 4 + 5056  # the input, and the state for its dropout


def test_no_trace_of_a_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    model(batch()).sum().backward()
    call = caught(model).kinds[0].call
    before = state_of(model)
    for action in (Keep(), Full(), Selective(("norm",))):
        measure_bytes(call, action)
        on_real_tensors(call, action, monkeypatch)
    assert len(measure_seconds(call, [Keep(), Full()], num_runs=2)) == 2
    with pytest.raises(ValueError, match="answers to 'moe'"):
        measure_bytes(call, Selective(("moe",)))
    assert state_of(model) == before


def test_a_block_under_a_plan_is_measured_without_it() -> None:
    model = seeded(stack)
    call = first_call(model, lambda: model(batch()))
    due = [measure_bytes(call, action) for action in (Keep(), Selective(("norm",)))]
    for action in (Full(), Selective(("norm", "act"))):
        with apply_recompute(model, RecomputePlan((Segment(0, 4, Keep()),))):
            pass
        with apply_recompute(model, RecomputePlan(tuple(Segment(index, index + 1, action) for index in range(4)))):
            call = first_call(model, lambda: model(batch()))
            assert [measure_bytes(call, action) for action in (Keep(), Selective(("norm",)))] == due
            model(batch()).sum().backward()


def test_hooks_that_only_look_on_see_nothing_of_it() -> None:
    model = seeded(stack)
    seen: list[object] = []
    model.blocks[0].up.register_forward_hook(lambda module, args, out: seen.append(out))  # type: ignore[union-attr]
    model.blocks[0].register_forward_hook(lambda module, args, out: seen.append(out))
    call = first_call(model, lambda: model(batch()))
    assert len(seen) == 2
    measure_bytes(call, Full())
    measure_seconds(call, [Keep()], num_runs=1)
    assert len(seen) == 2


def test_nobody_else_counts_it() -> None:
    model = seeded(stack)
    call = first_call(model, lambda: model(batch()))
    with Ledger() as ledger:
        measure_bytes(call, Full())
        assert ledger.peak_bytes == 0
    meter = open_meter()
    live = meter.live_bytes
    measure_bytes(call, Full())
    assert meter.live_bytes == live
    meter.close()


class Data(nn.Module):
    """A block whose shapes depend on values, which fake tensors do not have."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(self.norm(x))
        return x + y * bool(y.sum() > -1e9)


def test_where_fake_tensors_do_not_do(caplog: pytest.LogCaptureFixture) -> None:
    model = seeded(lambda: stack(2, Data))
    call = first_call(model, lambda: model(batch()))
    with caplog.at_level(logging.INFO):
        cost = measure_bytes(call, Selective(("norm",)))
    assert not cost.is_fake
    assert not caplog.records
    assert measure_bytes(call, Keep()).held_bytes - cost.held_bytes == 4 * 8 * 4 + 2 * 4 * 4
    with pytest.raises(RuntimeError, match=r"blocks\.0 cannot run on fake tensors"):
        measure_bytes(call, Keep(), real=False)


def test_an_error_of_the_block_itself_comes_through() -> None:
    model = seeded(stack)
    call = first_call(model, lambda: model(batch()))
    call.module.up.weight.data = torch.zeros(1)  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="mat2 must be a matrix"):
        measure_bytes(call, Keep())


class Residual(nn.Module):
    """Ends in a ReLU, which holds the output that the next block holds as its input."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm(self.conv(x)), inplace=True)


class PostNorm(nn.Module):
    """Ends in a norm, whose output the next block would hold."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + torch.tanh(self.linear(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize(("block", "action"), [(Residual, Full()), (PostNorm, Selective(("norm",)))])
def test_what_two_blocks_hold_counts_once(block: type[nn.Module], action: Action) -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(8, 8), nn.Sequential(*(block() for _ in range(4)))))
    x = torch.randn(64, 8, 8)
    capture = capture_calls(model, lambda: model(x), find_blocks(model))
    held, peak = [], []
    for each in (Keep(), action):
        costs = [measure_bytes(kind.call, each, exact=True) for kind in capture.kinds]
        with apply_recompute(model, RecomputePlan(tuple(Segment(index, index + 1, each) for index in range(4)))):
            model(x).neg().sum().backward()
            model.zero_grad()
            step = measure_step(lambda: model(x).neg().sum())
        model.zero_grad()
        held.append(step.held_bytes - total_held_bytes(capture, costs))
        peak.append(step.peak_bytes - total_peak_bytes(capture, costs))
    assert held[0] == held[1]  # what is not in the blocks
    assert peak[0] == peak[1]


def test_patterns_of_names_in_the_model() -> None:
    model = seeded(lambda: nn.ModuleDict({"decoder": stack(2)}))
    call = first_call(model, lambda: model["decoder"](batch()))
    assert call.name == "decoder.blocks.0"
    by_model, by_block = (measure_bytes(call, Selective((word,))) for word in ("decoder.blocks.0.u*", "u*"))
    assert by_model == by_block
    with pytest.raises(ValueError, match=r"answers to 'encoder\.\*'"):
        measure_bytes(call, Selective(("encoder.*",)))


def test_a_compiled_block_is_measured_as_it_runs() -> None:
    model = seeded(lambda: stack(2, lambda: Block(dropout=0.0)))
    for block in model.blocks:
        block.compile(backend="aot_eager")
    call = first_call(model, lambda: model(batch()))
    kept, full = (measure_bytes(call, action) for action in (Keep(), Full()))
    assert not kept.is_fake
    assert full.held_bytes == 4 * 8 * 4 < kept.held_bytes
    with pytest.raises(RuntimeError, match="is compiled"):
        measure_bytes(call, Keep(), real=False)


def test_a_lone_block_runs_as_its_model_runs_it() -> None:
    """The same output to the bit, with dropout."""
    model = seeded(stack)
    assert isinstance(model, Stack)
    x = batch()
    state = torch.get_rng_state()
    due = model.blocks[0](model.embed(x))
    torch.set_rng_state(state)
    call = first_call(model, lambda: model(x))
    with alone(call, Full(), None) as block:
        (found,) = block.within(block.forward)
    assert torch.equal(found, due)
