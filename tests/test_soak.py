"""Many steps with every kind of plan: live bytes stay, and nothing is left after backward, without the collector."""

from __future__ import annotations

import gc
from contextlib import closing, nullcontext

import pytest
import torch
from models import MODELS
from parity import seeded
from plans import PLANS, PlanBuilder
from selective_plans import SELECTIVE_PLANS
from torch import nn

from lightning_recompute.memory import open_meter
from lightning_recompute.recompute import apply_recompute

EVERY_PLAN = PLANS | {name: build for name, build in SELECTIVE_PLANS.items() if not {"moe"} & set(name.split("+"))}
KINDS = ("uniform-2", "block-some", "core_attn", "attn+norm", "norm+act", "save-matmul", "full-norm-keep")


def run(plan: str, model: str, num_steps: int) -> None:
    case = MODELS[model]
    module: nn.Module = seeded(case.build)
    batch = case.batch()
    optimizer = torch.optim.SGD(module.parameters(), 1e-3)
    with apply_recompute(module, EVERY_PLAN[plan](case.chunks)):
        gc.collect()
        gc.disable()
        meter = open_meter("cpu")
        try:
            live = []
            for step in range(num_steps):
                loss = case.loss(module, batch)
                if step % 3:  # a forward without backward leaves nothing either
                    loss.backward()
                    optimizer.step()
                optimizer.zero_grad()
                del loss
                live.append(meter.live_bytes)
        finally:
            meter.close()
            gc.enable()
    assert set(live[num_steps // 2 :]) == {live[-1]}


@pytest.mark.parametrize("plan", KINDS)
def test_live_bytes_stay(plan: str) -> None:
    run(plan, "gpt-eager", 12)


@pytest.mark.long
@pytest.mark.parametrize("plan", [plan for plan in EVERY_PLAN if plan != "none"])
def test_500_steps(plan: str) -> None:
    run(plan, "gpt-eager", 500)


def left_after_backward(model: str, build: PlanBuilder | None) -> int:
    """Bytes that a step leaves while its loss is kept, the gradients' aside."""
    case = MODELS[model]
    module, batch = seeded(case.build), case.batch()
    with apply_recompute(module, build(case.chunks)) if build else nullcontext(), closing(open_meter()) as meter:
        case.loss(module, batch).backward()  # allocates the gradients
        gc.collect()
        before = meter.live_bytes
        loss = case.loss(module, batch)
        loss.backward()
        return meter.live_bytes - before


@pytest.mark.parametrize("plan", EVERY_PLAN)
@pytest.mark.parametrize("model", ["gpt-eager", "bert-eager"])
def test_backward_frees_all_even_while_the_loss_is_kept(model: str, plan: str) -> None:
    assert left_after_backward(model, EVERY_PLAN[plan]) <= left_after_backward(model, None)
