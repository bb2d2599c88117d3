"""Tensor, sequence and data parallel ranks give the numbers of one process, under every plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import in_ranks
from tensor_checks import ARCHITECTURES, check_all, check_every_pair

pytestmark = pytest.mark.xdist_group("tensor parallel")


@pytest.fixture(scope="module", params=[2, 4])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return in_ranks(check_all, tmp_path_factory.mktemp("ranks"), limit=400, num_processes=request.param)


@pytest.mark.parametrize(
    ("check", "tolerance"),
    [("fp64 gpt2", 1e-12), ("fp64 llama", 1e-12), ("fp32 gpt2", 2e-6), ("whole masks", 1e-12)],
)
def test_equal_to_one_process(found: list[dict[str, Any]], check: str, tolerance: float) -> None:
    for rank in found:
        assert rank[check]
        assert {case: off for case, off in rank[check].items() if not off <= tolerance} == {}


def test_recompute_draws_the_same_numbers_from_every_stream(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["streams"]
        assert [case for case, equal in rank["streams"].items() if not equal] == []


@pytest.mark.parametrize("found", [2], indirect=True)
def test_masks_are_apart_where_ranks_share_the_work(found: list[dict[str, Any]]) -> None:
    """Case 49; and what all ranks have alike is dropped alike, however they were seeded."""
    for rank in found:
        assert (rank["masks"]["attention"], rank["masks"]["residual"]) == (False, True)
        assert (rank["masks sp"]["attention"], rank["masks sp"]["residual"]) == (False, False)
        for check in ("masks", "masks sp"):
            assert rank[check]["attention again"]
            assert rank[check]["residual again"]
    assert torch.equal(found[0]["masks"]["rng"], found[1]["masks"]["rng"])


@pytest.mark.parametrize("found", [2], indirect=True)
def test_parameters_used_outside_of_their_modules(found: list[dict[str, Any]]) -> None:
    """A scale of the root's own, a child's weight, torch's attention, linears straight in a block, a block's gain."""
    for rank in found:
        assert {case: off for case, off in rank["unusual"].items() if not off <= 1e-12} == {}


@pytest.mark.parametrize("found", [2], indirect=True)
def test_adapters_on_a_frozen_model(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert {case: off for case, off in rank["adapters"].items() if not off <= 1e-12} == {}


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("num_processes", [2, 4])
def test_every_plan_under_every_layout(num_processes: int, tmp_path: Path) -> None:
    for rank in in_ranks(check_every_pair, tmp_path, limit=1500, num_processes=num_processes):
        assert [case for case, equal in rank["streams"].items() if not equal] == []
        for check, tolerance in {"fp64": 1e-12, "fp32": 2e-6}.items():
            for name in ARCHITECTURES:
                off = {case: value for case, value in rank[f"{check} {name}"].items() if not value <= tolerance}
                assert off == {}, (check, name)
