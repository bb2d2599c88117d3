"""The search within a budget: never over it, never slower with more, the same each time; clear when there is none."""

from __future__ import annotations

import re

import planned
import pytest
from models import MODELS
from parity import seeded
from planned import PRICES, ids, language, most, profile, unlimited
from real_steps import measured_peak
from torch.optim import SGD

from lightning_recompute.errors import BudgetError
from lightning_recompute.plan import Keep, RecomputePlan
from lightning_recompute.plan_search import PlanSearch
from lightning_recompute.planning import forecast_within, profile_batch
from lightning_recompute.profiling import everything_kept

SHARES = (0.0, 0.15, 0.3, 0.45, 0.6, 0.75, 0.9, 1.0)


def search() -> PlanSearch:
    return PlanSearch(profile(), unlimited().candidates)


def budgets() -> list[int]:
    least = search().exact(search().leanest())
    return [least + int(share * (most() - least)) for share in SHARES]


def test_everything_kept() -> None:
    plan = everything_kept(profile())
    assert [segment.action for segment in plan.segments] == [Keep()]
    assert search().plan([0] * planned.NUM_BLOCKS) == plan


def test_no_plan_is_over_its_budget_when_it_is_run() -> None:
    module, batch = language(), ids()
    optimizer = SGD(module.parameters(), lr=0.1)
    for budget in budgets():
        plan = search().plan(search().fastest(budget))
        assert measured_peak(module, lambda: module(batch), plan, optimizers=[optimizer], batch=batch) <= budget


def test_more_budget_is_never_slower() -> None:
    found = [forecast_within(profile(), budget, prices=PRICES) for budget in budgets()]
    seconds = [forecast.extra_seconds for forecast in found]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > seconds[-1] == 0.0
    assert all(forecast.fits for forecast in found)
    assert found[-1].plan == everything_kept(profile())


def test_the_same_each_time() -> None:
    for budget in budgets()[::3]:
        plans = [search().plan(search().fastest(budget)) for _ in range(2)]
        assert plans[0] == plans[1]


@pytest.mark.parametrize("name", ["bert-eager", "llama-sdpa"])
def test_nothing_that_is_found_needs_less_than_the_smallest_peak(name: str) -> None:
    """Also where rows are not exact: norms at the end of blocks, caches of keys and values."""
    case = MODELS[name]
    module, data = seeded(case.build), case.batch()
    other = profile_batch(module, data, step=lambda: case.loss(module, data))
    found = forecast_within(other, other.peak_bytes(everything_kept(other)), prices=PRICES)
    there = PlanSearch(other, found.candidates)
    least = there.exact(there.leanest())
    assert there.exact(there.fastest(least)) == least
    with pytest.raises(BudgetError, match=f"{least} bytes"):
        there.fastest(least - 1)


def test_when_there_is_none() -> None:
    least = search().exact(search().leanest())
    with pytest.raises(BudgetError) as caught:
        search().fastest(least - 1)
    text = str(caught.value)
    assert f"({least - 1} bytes): no plan keeps it" in text
    assert f"({least} bytes), at:" in text
    for part in ("parameters", "gradients", "batch"):
        assert re.search(rf"{part} [\d.]+ \w+", text), text
    assert f"Cures: a budget of at least {least} bytes" in text
    for cure in ("a smaller batch with accumulate_grad_batches", "bf16-mixed", "more devices"):
        assert cure in text
    assert "no recompute of blocks helps" not in text


def test_when_the_head_sets_the_peak() -> None:
    module = seeded(lambda: planned.Language(vocabulary=20_000, num_layers=2))
    other = profile_batch(module, ids(20_000))
    with pytest.raises(BudgetError, match=r"The head and loss set the peak; no recompute of blocks helps"):
        forecast_within(other, other.peak_bytes(everything_kept(other)) // 2, prices=PRICES)


def test_plans_are_of_all_blocks() -> None:
    for budget in budgets():
        plan = search().plan(search().fastest(budget))
        assert isinstance(plan, RecomputePlan)
        assert (plan.segments[0].start, plan.segments[-1].stop) == (0, planned.NUM_BLOCKS)
