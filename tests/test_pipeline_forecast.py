"""What every rank of a layout needs where ranks share layers: the paper's figures, and a plan for each stage."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from measured import BLOCKS, NONE, OF_BLOCK, SHAPE, TENSOR, measured_on, staged

from lightning_recompute.errors import BudgetError
from lightning_recompute.measured_model import MeasuredModel
from lightning_recompute.pipeline_forecast import WORDS, forecast_ranks
from lightning_recompute.pipeline_layout import Layout
from lightning_recompute.policy import RecomputePolicy

pytestmark = pytest.mark.xdist_group("forecasts")


@pytest.fixture(scope="module")
def shared() -> Iterator[MeasuredModel]:
    """On one of four ranks that share layers and sequences."""
    with measured_on(TENSOR, True, searches=True) as found:
        yield found


@pytest.mark.parametrize(("pipeline", "virtual"), [(1, 1), (2, 1), (4, 1), (2, 2), (4, 2)])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_blocks_hold_what_the_paper_says(shared: MeasuredModel, pipeline: int, virtual: int, recompute: str) -> None:
    """Every stage of every layout, by profile and by formula."""
    words = NONE if recompute == "none" else RecomputePolicy(granularity=recompute)  # type: ignore[arg-type]
    layout = Layout(tensor=TENSOR, sequence=True, pipeline=pipeline, virtual=virtual)
    view = forecast_ranks(shared, layout, 8, words=words, shape=SHAPE)
    assert len(view.ranks) == pipeline
    for rank in view.ranks:
        assert rank.formula_bytes is not None
        # what is drawn again takes random states, of 5056 bytes each on a CPU: little of a large model's layer
        room = 12000 * rank.in_flight * BLOCKS // (pipeline * virtual) if recompute != "none" else 0
        assert 0 <= rank.held_bytes - rank.formula_bytes <= 0.005 * rank.formula_bytes + room
    name = {"none": "none", "selective": "selective core_attn", "full": "full uniform 1"}[recompute]
    assert view.by_paper[name] == tuple((rank.held_bytes, rank.formula_bytes) for rank in view.ranks)
    # more microbatches in flight on earlier stages
    flights = [rank.in_flight for rank in view.ranks]
    assert flights == sorted(flights, reverse=True)


def test_each_stage_is_planned_for_itself(shared: MeasuredModel) -> None:
    layout = Layout(tensor=TENSOR, sequence=True, pipeline=4)
    none, full = (forecast_ranks(shared, layout, 8, words=words, names=["none"]) for words in (NONE, RecomputePolicy()))
    budget = (none.worst.peak_bytes + full.worst.peak_bytes) // 2
    view = forecast_ranks(shared, layout, 8, budget_bytes=budget, words=RecomputePolicy(), shape=SHAPE)
    assert view.chosen.name == "per stage"
    assert all(rank.peak_bytes <= budget for rank in view.ranks)
    assert view.ranks[0].extra_seconds > view.ranks[-1].extra_seconds == 0
    best = next(one for one in view.beside if one.name == view.best)
    assert best.peak_bytes <= budget
    assert none.chosen.step.seconds < view.chosen.step.seconds <= best.seconds
    assert WORDS in [one.name for one in view.beside]
    assert view.plan.num_blocks == BLOCKS


def test_blocks_are_balanced_with_their_plans(shared: MeasuredModel) -> None:
    layout = Layout(tensor=TENSOR, sequence=True, pipeline=4, split="balanced")
    with pytest.raises(ValueError, match="give a memory_budget"):
        forecast_ranks(shared, layout, 8, words=NONE)
    view = forecast_ranks(shared, layout, 8, budget_bytes=2**30, names=["none"])
    even = forecast_ranks(shared, Layout(tensor=TENSOR, sequence=True, pipeline=4), 8, budget_bytes=2**30)
    assert sum(view.staged.division.lengths) == BLOCKS
    assert view.chosen.step.seconds <= even.chosen.step.seconds


def test_a_budget_that_no_plan_keeps(shared: MeasuredModel) -> None:
    view = forecast_ranks(shared, Layout(tensor=TENSOR, sequence=True, pipeline=2), 4, budget_bytes=2**16)
    assert isinstance(view.refusal, BudgetError)
    assert "stage 0" in str(view.refusal)
    assert view.best is None
    assert len(view.ranks) == 2  # of the smallest peaks


def test_a_rank_that_shares_layers_has_a_part_of_their_matrices(shared: MeasuredModel) -> None:
    found = staged(shared, tensor=TENSOR, sequence=True, pipeline=4).statics[1]
    assert 2 * OF_BLOCK / TENSOR < found.parameters_bytes < 2 * OF_BLOCK / TENSOR * 1.05
