"""Pipelines side by side: the gradients of one process with all batches, averaged once a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from distributed import in_ranks
from pipeline_checks import M
from pipeline_data_checks import CASES, KINDS, check_data
from pipeline_eight_checks import CASES as EIGHT
from pipeline_eight_checks import check_eight

pytestmark = pytest.mark.xdist_group("pipeline data")

EXACT = 1e-12
Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return in_ranks(check_data, tmp_path_factory.mktemp("ranks"), num_processes=4)


def cases(kind: str) -> list[str]:
    return [f"{kind} {case.schedule} {case.model}" for case in CASES[kind]]


@pytest.mark.parametrize("case", [case for kind in KINDS for case in cases(kind)])
def test_parity(ranks: Ranks, case: str) -> None:
    for rank in ranks:
        for figure in ("gradients", "norm", "clipped", "evaluation", "whole", "momenta"):
            assert rank[case][figure] < EXACT, (figure, rank[case][figure])
        assert rank[case]["names"]
        assert rank[case]["clean"]


def test_one_reduction_for_each_group_and_step(ranks: Ranks) -> None:
    for rank in ranks:
        for case in cases("replicate"):
            # small gradients together, and which there are
            due = {"all_reduce": 2, "reduce_scatter_single": 0, "all_gather_single": 0}
            assert rank[case]["counts"] == [due, due], case
            assert set(rank[case]["quiet"].values()) <= {0}, case
        for case in cases("shard"):
            num_units = rank[case]["units"]
            assert num_units >= (2 if "Frozen" not in case else 0), case
            due = {"all_reduce": 0, "reduce_scatter_single": num_units, "all_gather_single": 0}
            assert rank[case]["counts"] == [due, due], case
            # gathered once a batch, not once a microbatch
            assert rank[case]["quiet"] == {"all_gather_single": rank[case]["gathered"]}, case


def test_a_rank_has_its_share(ranks: Ranks) -> None:
    for rank in ranks:
        for case in cases("replicate"):
            assert rank[case]["share"] == 1
            assert rank[case]["bytes"] == 0
        for case in cases("shard"):
            assert abs(rank[case]["share"] - 0.5) < 0.01, case
            # torch pads what does not divide
            assert 0 <= rank[case]["bytes"] < 1000, case


def test_ranks_differ_in_what_they_use(ranks: Ranks) -> None:
    for rank in ranks:
        assert max(rank["sometimes"].values()) < EXACT


def test_memory_of_a_step(ranks: Ranks) -> None:
    for rank in ranks:
        for kind in KINDS:
            found = rank["memory"][kind]
            assert max(found["left"]) < 100, kind
            # gradients, and the parameters or the buffer in which gradients are averaged
            assert 2 * found["owned"] <= found["peak"] < 3 * found["owned"], kind


def test_units_recompute_once(ranks: Ranks) -> None:
    for rank in ranks:
        for schedule, calls in rank["replays"].items():
            assert calls == [2 * M], schedule


@pytest.mark.long
def test_beside_layers_that_ranks_share(tmp_path: Path) -> None:
    ranks = in_ranks(check_eight, tmp_path, limit=300, num_processes=8)
    for rank in ranks:
        assert len(rank) == len(EIGHT)
        for case, found in rank.items():
            assert max(found["gradients"], found["norm"], found["whole"]) < EXACT, (case, found)
            due = "('tensor',)" if case.startswith("replicate") else "('data', 'tensor')"
            assert found["meshes"] == [due], case
