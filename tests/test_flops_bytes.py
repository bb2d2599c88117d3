"""What recompute costs in FLOPs and saves in bytes, exactly: on the reference model of the benches, on every plan."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, Literal

import pytest
import torch
from models import MODELS, WIDTH, gpt, gpt_loss, tokens
from parity import FULL, block_modules, seeded
from plans import PLANS
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from lightning_recompute.memory import StepMemory, measure_step, open_meter
from lightning_recompute.policy import RecomputePolicy
from lightning_recompute.recompute import apply_recompute

Attention = Literal["eager", "sdpa"]
ATTENTIONS: tuple[Attention, ...] = ("eager", "sdpa")
LENGTH, VOCABULARY, ROWS = 512, 1024, 4


def reference_gpt(attention: Attention) -> nn.Module:
    """8 layers, h 512, 8 heads, s 512, vocabulary 1024, fp32, no dropout; gradients allocated beforehand."""
    from lightning_recompute.gpt import GPT

    torch.manual_seed(0)
    model = GPT(
        vocab_size=VOCABULARY,
        num_layers=8,
        num_heads=8,
        hidden_size=512,
        max_length=LENGTH,
        dropout=0.0,
        attention=attention,
    )
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


def reference_loss(model: nn.Module, rows: int) -> Tensor:
    ids = torch.randint(VOCABULARY, (rows, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


NONE = RecomputePolicy(granularity=None)
aten = torch.ops.aten


def _forward_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(query, key, value)


def _backward_flops(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return sdpa_backward_flop_count(gradient, query, key, value)


# the fused kernel of the CPU, which torch's counter does not know; the same product counts as on CUDA
CPU_ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu: _forward_flops,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _backward_flops,
}


@functools.cache
def reference_flops(attention: Attention, policy: RecomputePolicy) -> tuple[int, int]:
    """FLOPs of a step as torch's counter sees them, and with the CPU's attention kernel counted as well.

    One row: each product of the model has the batch as a factor, so ratios are those of any batch.
    """
    model = reference_gpt(attention)
    with (
        apply_recompute(model, policy),
        FlopCounterMode(display=False) as seen,
        FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION) as counted,
    ):
        reference_loss(model, rows=1).backward()
    return seen.get_total_flops(), counted.get_total_flops()


@pytest.mark.parametrize(("attention", "due_seen", "due_counted"), [("eager", 1.235, 1.235), ("sdpa", 1.22, 1.235)])
def test_flops_of_the_reference_model(attention: Attention, due_seen: float, due_counted: float) -> None:
    """Full, uniform, 1: one more forward less what early stop leaves out; without it the ratio would be 1.33."""
    none, full = reference_flops(attention, NONE), reference_flops(attention, FULL)
    assert 1 < full[0] / none[0] <= due_seen
    assert 1 < full[1] / none[1] <= due_counted
    # b s h² (24 + 4 s/h) and the head for a forward (Korthikanti et al. 2022, appendix A), twice that for backward
    layer = LENGTH * 512**2 * (24 + 4 * LENGTH / 512)
    forward = 8 * layer + 2 * LENGTH * 512 * VOCABULARY
    # the fused kernel multiplies queries and keys once more in its own backward
    assert none[1] == 3 * forward + (8 * 2 * LENGTH**2 * 512 if attention == "sdpa" else 0)
    # early stop spares the last product of a block, 4h times h
    assert full[1] - none[1] == 8 * (layer - 8 * LENGTH * 512**2)


@functools.cache
def reference_bytes(attention: Attention, policy: RecomputePolicy) -> StepMemory:
    """Bytes of a step beyond parameters and gradients, by the allocator."""
    model = reference_gpt(attention)
    meter = open_meter()
    with contextlib.closing(meter), apply_recompute(model, policy):
        return measure_step(lambda: reference_loss(model, ROWS), meter=meter)


@pytest.mark.parametrize(("attention", "held", "peak"), [("eager", 0.062, 0.196), ("sdpa", 0.092, 0.214)])
def test_bytes_of_the_reference_model(attention: Attention, held: float, peak: float) -> None:
    none, full = reference_bytes(attention, NONE), reference_bytes(attention, FULL)
    assert 0 < full.held_bytes / none.held_bytes <= held
    assert 0 < full.peak_bytes / none.peak_bytes <= peak
    assert full.after_bytes == none.after_bytes == 0
    # beside the head's part: a unit's input each, 4 bytes for each of b s h
    inputs = 8 * 4 * ROWS * LENGTH * 512
    assert inputs <= full.held_bytes <= none.held_bytes - inputs


# --- exact on every plan


@contextlib.contextmanager
def flops() -> Iterator[FlopCounterMode]:
    with FlopCounterMode(display=False) as counter:
        yield counter


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_flops_of_every_plan(plan: str, attention: Attention) -> None:
    """A unit costs the forward of its blocks without the last product of its last block."""
    model = gpt(attention, dropout=0.0)
    batch = {"ids": tokens()}
    block = block_modules(model)[0]
    x = torch.randn(len(batch["ids"]), batch["ids"].shape[1] - 1, WIDTH)
    with flops() as one_block:
        block(x)
    last_product = 2 * x.numel() * 4 * WIDTH

    def total(name: str) -> int:
        with apply_recompute(model, PLANS[name]([4])), flops() as counter:
            gpt_loss(model, batch).backward()
        return counter.get_total_flops()

    units = [segment for segment in PLANS[plan]([4]).segments if segment.action.name == "full"]
    recomputed = sum(segment.stop - segment.start for segment in units)
    due = recomputed * one_block.get_total_flops() - len(units) * last_product
    assert total(plan) - total("none") == due


@pytest.mark.parametrize("model", MODELS)
def test_flops_as_torchs_checkpoint(model: str) -> None:
    """Early stop at the same tensor as torch's own checkpoint around each block."""
    case = MODELS[model]
    torch.manual_seed(7)
    batch: dict[str, Any] = dict(case.batch())
    if model.startswith(("llama", "gpt2", "t5")):
        batch["use_cache"] = False  # which torch's checkpoint would fill twice

    def total(module: nn.Module) -> int:
        torch.manual_seed(1)
        with flops() as counter:
            case.loss(module, batch).backward()
        return counter.get_total_flops()

    module = seeded(case.build)
    with apply_recompute(module, FULL):
        found = total(module)
    none = total(module)
    for block in block_modules(module):
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    assert none < found == total(module)
