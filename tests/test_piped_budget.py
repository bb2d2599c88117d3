"""memory_budget over pipeline stages in fits: each rank's own plan, within the budget, its peak as predicted."""

from __future__ import annotations

from typing import Any

import pytest
from distributed import in_ranks
from piped_budget_checks import CASES, MIB, check_all

pytestmark = pytest.mark.xdist_group("piped budget")

Found = list[dict[str, Any]]

BESIDE = 64 * 2**10
"""Bytes of the data and of small things; a set of a stage's parameters is more than ten times as large."""


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return in_ranks(check_all, tmp_path_factory.mktemp("two"), limit=280)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return in_ranks(check_all, tmp_path_factory.mktemp("four"), limit=280, num_processes=4)


def check_peaks(ranks: Found, name: str) -> None:
    """On each rank the measured peak is the predicted one, and within the budget."""
    budget = CASES[len(ranks)][name]["memory_budget"]
    for number, rank in enumerate(ranks):
        fit = rank[name]
        assert max(fit["predicted"]) <= budget
        assert fit["own"] == fit["predicted"][number * 2 // len(ranks)]
        assert fit["own"] == pytest.approx(fit["measured"][number], rel=0.005)
        assert fit["beside"] < BESIDE, "between steps a rank has its share only"
    assert len({rank[name]["plan"] for rank in ranks}) == 1, "all ranks know the whole plan"


@pytest.mark.parametrize("name", CASES[2])
def test_peaks_on_two_ranks(two: Found, name: str) -> None:
    check_peaks(two, name)


@pytest.mark.parametrize("name", CASES[4])
def test_peaks_on_four_ranks(four: Found, name: str) -> None:
    check_peaks(four, name)


@pytest.mark.parametrize("name", [name for name in CASES[4] if "tp2" not in name])
def test_what_averaging_takes_is_predicted(four: Found, name: str) -> None:
    for number, rank in enumerate(four):
        fit = rank[name]
        assert fit["predicted backward"] == pytest.approx(fit["measured backward"][number], rel=0.005)


def test_early_stages_recompute_more(two: Found) -> None:
    roomy, tight, zbv = (two[0][name] for name in ("roomy", "tight", "zbv"))
    assert tight["in flight"] == [2, 1]
    assert roomy["extra"] == [0, 0]
    assert tight["extra"][0] > 0
    assert tight["extra"][1] == 0, "the last stage holds one microbatch, and has room"
    assert zbv["in flight"] == [4, 4]
    assert roomy["predicted"][0] > 9 * MIB


def test_sharded_stages_recompute_where_they_have_to(four: Found) -> None:
    roomy, tight, zbv = (four[0][name] for name in ("shard, roomy", "shard", "shard, zbv"))
    assert roomy["extra"] == [0, 0]
    assert tight["extra"][0] > 0
    assert zbv["extra"][0] > 0


def test_plans_change_no_numbers(two: Found, four: Found) -> None:
    for ranks, first in ((two, "roomy"), (four, "dp2")):
        losses = {name: rank["loss"] for name, rank in ranks[0].items() if "loss" in rank and "tp2" not in name}
        assert losses == {name: pytest.approx(losses[first], rel=1e-12) for name in losses}


def test_balanced_stages_have_all_blocks(two: Found) -> None:
    assert sum(two[0]["balanced"]["lengths"]) == 6


def test_a_budget_that_no_plan_keeps(two: Found) -> None:
    """Every rank is told which one needs more, and of what it consists."""
    for rank in two:
        assert rank["refused"].startswith("BudgetError")
        assert "The smallest peak found is" in rank["refused"]
        assert "num_microbatches" in rank["refused"]
