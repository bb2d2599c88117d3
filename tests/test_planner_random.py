"""Planner against every way through small random stages: groups, several microbatches in flight, varying rows."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from stage_costs import all_points, stages

from lightning_recompute.cost import StageCosts, extra_seconds, peak_bytes
from lightning_recompute.errors import BudgetError
from lightning_recompute.label_search import Chain
from lightning_recompute.path_program import RELATIVE_GAP, PathProgram
from lightning_recompute.planner import pareto, smallest_peak, solve

a_budget = st.floats(0, 1.1)


def budget_at(points: list[tuple[int, float]], share: float) -> int:
    least, most = min(points)[0], max(points)[0]
    return least + int(share * (most - least))


@settings(max_examples=150, deadline=None)
@given(stages(), a_budget)
def test_the_fastest_within_the_budget_and_of_those_the_smallest_peak(stage: StageCosts, share: float) -> None:
    points = all_points(stage)
    budget = budget_at(points, share)
    seconds, peak = min((seconds, peak) for peak, seconds in points if peak <= budget)
    choices = solve(stage, budget)
    assert (extra_seconds(stage, choices), peak_bytes(stage, choices)) == (seconds, peak)
    assert solve(stage, budget) == choices


@settings(max_examples=100, deadline=None)
@given(stages())
def test_the_smallest_peak_and_nothing_below_it(stage: StageCosts) -> None:
    peak, seconds = min(all_points(stage))
    choices = smallest_peak(stage)
    assert (peak_bytes(stage, choices), extra_seconds(stage, choices)) == (peak, seconds)
    with pytest.raises(BudgetError, match=f"{peak} bytes"):
        solve(stage, peak - 1)


@settings(max_examples=50, deadline=None)
@given(stages(), a_budget, a_budget)
def test_more_budget_is_never_slower(stage: StageCosts, one: float, other: float) -> None:
    points = all_points(stage)
    low, high = sorted(budget_at(points, share) for share in (one, other))
    assert extra_seconds(stage, solve(stage, high)) <= extra_seconds(stage, solve(stage, low))


@settings(max_examples=40, deadline=None)
@given(stages(), st.integers(2, 8))
def test_the_curve_runs_from_the_smallest_peak_to_the_fastest(stage: StageCosts, num_points: int) -> None:
    points = all_points(stage)
    curve = pareto(stage, num_points)
    assert curve[0][:2] == min(points)
    assert curve[-1][1] == min(seconds for _, seconds in points)
    assert len(curve) <= num_points
    for left, right in itertools.pairwise(curve):
        assert left[0] < right[0]
        assert left[1] > right[1]
    for peak, seconds, choices in curve:
        assert (peak, seconds) == (peak_bytes(stage, choices), extra_seconds(stage, choices))


@settings(max_examples=60, deadline=None)
@given(stages(), a_budget)
def test_the_integer_program_agrees(stage: StageCosts, share: float) -> None:
    budget = budget_at(all_points(stage), share)
    chain = Chain(stage)
    due = ticks(chain, extra_seconds(stage, solve(stage, budget)))
    found = PathProgram(chain, max(1, budget - stage.static_bytes)).solve()
    # where the last byte decides the solver's tolerances may cost it a path, or all; never a byte too much
    if found is not None:
        assert found.peak_bytes <= max(1, budget - stage.static_bytes)
        assert found.ticks >= due
        event(f"the same time: {found.ticks <= due * (1 + RELATIVE_GAP)}")


@settings(max_examples=60, deadline=None)
@given(stages(), a_budget)
def test_prices_bound_the_time_of_all_that_fits(stage: StageCosts, share: float) -> None:
    budget = budget_at(all_points(stage), share)
    chain = Chain(stage)
    bound = PathProgram(chain, max(1, budget - stage.static_bytes)).prices().to_end(chain)[0]
    # a millionth of a millionth of all time is rounding
    assert bound <= ticks(chain, extra_seconds(stage, solve(stage, budget))) + 2**20


def ticks(chain: Chain, seconds: float) -> int:
    return round(seconds * chain.ticks_per_second)
