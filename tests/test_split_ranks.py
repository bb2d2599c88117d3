"""Where backward runs in two parts, forecasts are those of the real schedule on tensors without memory."""

from __future__ import annotations

import functools

import pytest
from dry_run_checks import POLICIES, SCHEDULES, Case, dry, make

from lightning_recompute.errors import BudgetError
from lightning_recompute.measured_model import MeasuredModel, measure_model
from lightning_recompute.microbatches import split_batch
from lightning_recompute.pipeline_forecast import LayoutForecast, forecast_ranks
from lightning_recompute.pipeline_layout import Layout
from lightning_recompute.policy import RecomputePolicy
from lightning_recompute.stage_options import Prices
from lightning_recompute.stage_plans import rank_peak
from lightning_recompute.staged_model import CATEGORIES

pytestmark = pytest.mark.xdist_group("dry-run")

CASES = [
    *(Case(schedule, policy) for schedule in ("interleaved-zb", "zbv") for policy in ("none", "full", "core_attn")),
    # head and loss are most of what their stage holds
    *(Case(schedule, "none", vocab_size=8192) for schedule in ("interleaved-zb", "zbv")),
    Case("zbv", "core_attn", blocks_per_chunk=2),
]


@functools.cache
def measured(num_layers: int, vocab_size: int) -> MeasuredModel:
    module = make(num_layers, vocab_size)
    (microbatch, *_) = split_batch(CASES[0].batch, CASES[0].num_microbatches)
    whole = dict(module.named_parameters())
    return measure_model(
        module, lambda part: module.training_step(part, 0), microbatch, whole=whole, prices=Prices(), exact=False
    )


def forecast(case: Case, budget: int | None = None) -> LayoutForecast:
    settings = SCHEDULES[case.schedule]
    layout = Layout(pipeline=case.pipeline, virtual=settings.virtual, schedule=settings.schedule)
    words = POLICIES[case.policy] or RecomputePolicy(granularity=None)
    return forecast_ranks(
        measured(case.num_layers, case.vocab_size),
        layout,
        case.num_microbatches,
        words=None if budget else words,
        budget_bytes=budget,
        batch_bytes=case.batch.nbytes,
        names=(),
    )


@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{case.schedule} {case.policy} {case.vocab_size} {case.blocks_per_chunk}"
)
def test_peaks_are_those_of_the_real_schedule(case: Case) -> None:
    view = forecast(case)
    for rank in (0, case.pipeline - 1):
        found, due = view.ranks[rank], dry(case, rank).peak_bytes
        assert 0.995 * due <= found.peak_bytes <= 1.015 * due, rank
        assert set(found.breakdown) == set(CATEGORIES)
        assert sum(found.breakdown.values()) == found.peak_bytes
        # what is searched by is an upper bound
        assert found.peak_bytes <= rank_peak(view.staged.pipeline, rank, view.chosen.ranks[rank].choices)


@pytest.mark.parametrize("schedule", ["interleaved-zb", "zbv"])
def test_plans_use_what_the_closed_formula_leaves(schedule: str) -> None:
    peaks = [forecast(Case(schedule, policy)).worst.peak_bytes for policy in ("full", "none")]
    budget = sum(peaks) // 2
    view = forecast(Case(schedule, "none"), budget)
    assert view.refusal is None
    assert view.worst.peak_bytes <= budget
    # everything kept fits where its real peak does
    assert forecast(Case(schedule, "none"), peaks[1]).slowest.extra_seconds == 0
    tight = forecast(Case(schedule, "none"), peaks[0] // 2)
    assert isinstance(tight.refusal, BudgetError)
    assert tight.refusal.smallest_bytes > peaks[0] // 2
