"""Budgets under tensor and data parallelism: predicted against measured peaks on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import planning_groups_checks as checks
import pytest
import torch
from distributed import in_ranks

from lightning_recompute.agreement import ALONE
from lightning_recompute.forecast import ParallelSizes
from lightning_recompute.gpt import GPT
from lightning_recompute.planning import plan_recompute
from lightning_recompute.stragglers import Stragglers
from lightning_recompute.tried_step import LONE_STEP

pytestmark = pytest.mark.xdist_group("planning_groups")

PAIRS = [*checks.PAIRS, "tp2 llama", "dp2 shard x 3"]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return in_ranks(checks.check_pairs, tmp_path_factory.mktemp("pairs"), limit=400)


@pytest.fixture(scope="module")
def fours(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return in_ranks(checks.check_fours, tmp_path_factory.mktemp("fours"), limit=400, num_processes=4)


def check(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["errors"], found
        assert max(found["errors"].values()) < checks.TOLERANCE, found
        assert found["same losses"], "measuring left something, or a plan changed the numbers"
        assert found["is kept"]
        assert found["keeps"]
        assert found["saves"] > 0.1
        assert found["reported"] == len(ranks)
        assert found["predicted"]
    assert len({found["plan"] for found in ranks}) == 1
    assert ranks[0]["plan"] != ""


@pytest.mark.parametrize("name", PAIRS)
def test_predictions_hold_on_two_processes(name: str, pairs: list[Any]) -> None:
    check([rank[name] for rank in pairs])


@pytest.mark.parametrize("name", checks.FOURS)
def test_predictions_hold_on_four_processes(name: str, fours: list[Any]) -> None:
    check([rank[name] for rank in fours])


def test_blocks_that_are_sharded_one_by_one_are_units_of_one(pairs: list[Any]) -> None:
    assert {rank["dp2 shard"]["largest unit"] for rank in pairs} == {1}
    assert {rank["tp2"]["largest unit"] for rank in pairs} == {checks.NUM_LAYERS}


def test_a_budget_that_cannot_be_kept_is_refused_on_all(pairs: list[Any]) -> None:
    for rank in pairs:
        kind, text = rank["refusal"]
        assert kind == "BudgetError"
        assert "no plan keeps it" in text


def test_a_larger_batch_on_one_rank_is_planned_for_on_all(pairs: list[Any]) -> None:
    first, second = (rank["larger"] for rank in pairs)
    assert len(first) == len(second) == 2
    assert first[0] == first[1] == second[0] < second[1]


def test_an_error_of_one_rank_ends_all(tmp_path: Path) -> None:
    first, second = in_ranks(checks.fail_on_one_rank, tmp_path, limit=60)
    assert first != ""
    assert "only here" in second


def test_a_part_of_a_module_is_not_planned_for_alone() -> None:
    module = GPT(num_layers=2, hidden_size=16, num_heads=2, max_length=8)
    with pytest.raises(ValueError, match=r"ParallelSizes\(tensor=2\).*tensor_parallel_size=2"):
        plan_recompute(module, torch.zeros(1, 9, dtype=torch.long), "1GiB", parallel=ParallelSizes(tensor=2))


# ---- alone


def test_a_process_alone_agrees_with_itself() -> None:
    assert not ALONE.is_shared
    assert ALONE.largest([3, 1.5]) == [3, 1.5]
    assert ALONE.smallest(7) == 7
    assert ALONE.is_same([1, 2])


def test_a_step_alone_needs_nothing() -> None:
    assert [LONE_STEP.communicates, LONE_STEP.gathers, LONE_STEP.averages, LONE_STEP.has_middle] == [False] * 4
    assert LONE_STEP.forward(lambda: 3) == 3


def test_stragglers_are_waited_for_after_a_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    naps: list[float] = []
    monkeypatch.setattr("time.sleep", naps.append)
    collective, other = torch.ops._c10d_functional.wait_tensor.default, torch.ops.aten.add.Tensor
    stragglers = Stragglers(are_waited_for=True)
    for func in (other, collective, collective, other, other):
        stragglers.before(func)
    assert len(naps) == 1
    Stragglers(are_waited_for=False).before(collective)
    assert len(naps) == 1
