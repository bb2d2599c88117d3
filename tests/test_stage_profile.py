"""What each rank of a pipeline needs: predicted against measured, and budgets that are kept."""

from __future__ import annotations

from typing import Any

import pytest
from distributed import in_ranks
from stage_profile_checks import POLICIES, TOLERANCE, check_four, check_two

from lightning_recompute.schedules import SCHEDULES

pytestmark = pytest.mark.xdist_group("stage_profile")

Ranks = list[dict[str, Any]]
PLANNED = ("1f1b", "zbv-zero-bubble")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return in_ranks(check_two, tmp_path_factory.mktemp("two"), limit=280)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return in_ranks(check_four, tmp_path_factory.mktemp("four"), limit=280, num_processes=4)


def test_peaks_of_two_ranks_are_predicted(two: Ranks) -> None:
    for rank in two:
        assert set(rank["errors"]) == {*SCHEDULES, "uneven", "few", "kept gradients", "frozen", "tied"}
        assert set(rank["errors"]["1f1b"]) == set(POLICIES)
        for case, errors in rank["errors"].items():
            assert max(errors.values()) < TOLERANCE, (case, errors)


def test_peaks_of_four_ranks_are_predicted(four: Ranks) -> None:
    for rank in four:
        assert set(rank) == set(SCHEDULES)
        for case, errors in rank.items():
            assert max(errors.values()) < TOLERANCE, (case, errors)


@pytest.mark.parametrize("schedule", PLANNED)
def test_budgets_are_kept(schedule: str, two: Ranks) -> None:
    for rank in two:
        found = rank["planned"][schedule]
        assert found["is kept"]
        assert found["keeps"]
        assert found["tighter"]
        assert found["error"] < TOLERANCE
        assert found["phases"]
        assert found["clean"], "measuring left something on the module"
        chosen, full = found["seconds"]
        assert 0 <= chosen < full
    assert two[0]["planned"][schedule]["plan"] == two[1]["planned"][schedule]["plan"]
    assert any(rank["planned"][schedule]["seconds"][0] > 0 for rank in two)
    assert two[0]["planned"][schedule]["table"] == two[1]["planned"][schedule]["table"]


def test_no_plan_is_faster(two: Ranks) -> None:
    for rank in two:
        assert len(rank["against all"]) > 4
        for chosen, best in rank["against all"]:
            assert chosen == pytest.approx(best)


@pytest.mark.parametrize("schedule", PLANNED)
def test_a_budget_that_cannot_be_kept_is_refused_on_all(schedule: str, two: Ranks) -> None:
    for place, rank in enumerate(two):
        found = rank["planned"][schedule]
        assert found["refusal"].startswith("BudgetError: memory_budget of")
        assert f"no plan for pipeline rank {place} keeps it" in found["refusal"]
        assert "no plan for pipeline rank 1 keeps it" in found["refusal on one"]
        assert found["refusal on one"].startswith("BudgetError")


def test_blocks_are_balanced_by_time(two: Ranks) -> None:
    for rank in two:
        found = rank["balanced"]
        # the head takes about as long as some blocks
        assert found["split"] in ([4, 2], [5, 1])
        assert found["clean"]
        assert found["listed"]
    assert two[0]["balanced"]["split"] == two[1]["balanced"]["split"]
    assert two[0]["balanced"]["refusal"].startswith("BudgetError: no division of 6 blocks over 2 stages keeps")
    assert "RuntimeError: rank 0 could not balance" in two[1]["balanced"]["refusal"]


def test_an_error_while_measuring_ends_all(two: Ranks) -> None:
    assert two[1]["failing"] == "RuntimeError: only here"
    assert two[0]["failing"] == "RuntimeError: rank 1, stage 1 of the pipeline: RuntimeError: only here"
