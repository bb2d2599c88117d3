"""Time of one block alone: actions take turns, each warmed up; FLOPs to the last one."""

from __future__ import annotations

import pytest
import torch
from parity import seeded
from test_block_cost import Data, first_call
from test_capture import batch, state_of
from torch import Tensor, nn
from toys import ROWS, WIDTH, Block, stack

from lightning_recompute import block_time
from lightning_recompute.block_time import measure_flops, measure_seconds
from lightning_recompute.capture import BlockCall
from lightning_recompute.plan import Full, Keep, SaveOps, Selective

PRODUCT = 2 * ROWS * WIDTH * 2 * WIDTH
"""FLOPs of one of the two linears of a block, forward."""

clock = 0.0
ran: list[float] = []


class Ticking(Block):
    """A block whose forward takes a second of a clock of its own."""

    def forward(self, x: Tensor) -> Tensor:
        global clock
        clock += 1
        return super().forward(x)


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> BlockCall:
    model = seeded(lambda: stack(2, Ticking))
    call = first_call(model, lambda: model(batch()))
    monkeypatch.setattr(block_time.time, "process_time", lambda: ran.append(clock) or clock)
    ran.clear()
    return call


def test_seconds_are_those_of_forward_and_backward_once_warm(ticking: BlockCall) -> None:
    assert measure_seconds(ticking, [Keep(), Full(), Selective(("norm",))]) == [1.0, 2.0, 1.0]


def test_actions_take_turns(ticking: BlockCall) -> None:
    measure_seconds(ticking, [Keep(), Full()], num_runs=2)
    spans = [stop - start for start, stop in zip(ran[::2], ran[1::2], strict=True)]
    assert spans == [1.0, 2.0, 1.0, 2.0]


def test_flops_to_the_last_one() -> None:
    model = seeded(stack)
    call = first_call(model, lambda: model(batch()))
    kept = measure_flops(call, Keep())
    assert kept == 3 * 2 * PRODUCT  # backward has two products to each of forward
    # the second linear's output is not needed: a replay stops before it
    assert measure_flops(call, Full()) - kept == PRODUCT
    assert measure_flops(call, Selective(("norm",))) == kept
    assert measure_flops(call, SaveOps(("matmul",))) == kept


def test_flops_of_what_cannot_run_on_fake_tensors() -> None:
    values = seeded(lambda: stack(2, Data))
    call = first_call(values, lambda: values(batch()))
    assert measure_flops(call, Keep()) == 3 * 2 * ROWS * WIDTH * WIDTH
    compiled = seeded(lambda: stack(2, lambda: Block(dropout=0.0)))
    for block in compiled.blocks:
        block.compile(backend="aot_eager")
    call = first_call(compiled, lambda: compiled(batch()))
    assert measure_flops(call, Keep()) == 3 * 2 * PRODUCT


class Fused(nn.Module):
    """Fused attention, of which torch's own counter knows nothing on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.project(x).view(1, 2, ROWS, WIDTH // 2)
        out = nn.functional.scaled_dot_product_attention(heads, heads, heads)
        return x + out.reshape(x.shape)


def test_flops_of_fused_attention_count() -> None:
    model = seeded(lambda: stack(2, Fused))
    call = first_call(model, lambda: model(batch()))
    products = 2 * ROWS * WIDTH * WIDTH
    attention = 2 * 2 * 2 * ROWS * ROWS * (WIDTH // 2)
    # backward makes the scores again: five products to the two of forward
    assert measure_flops(call, Keep()) == 3 * products + attention + attention * 5 // 2


def test_no_trace() -> None:
    model = seeded(stack)
    model(batch()).sum().backward()
    call = first_call(model, lambda: model(batch()))
    before = state_of(model)
    random = torch.get_rng_state()
    for action in (Keep(), Full()):
        measure_flops(call, action)
    assert len(measure_seconds(call, [Keep(), Full()], num_runs=2)) == 2
    assert state_of(model) == before
    assert torch.equal(torch.get_rng_state(), random)
