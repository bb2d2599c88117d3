"""One norm over all ranks, and one decision to skip a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from clipping_checks import FACTORS, NORM_TYPES, check_all
from distributed import in_ranks
from torch import nn

from lightning_recompute.clipping import clip_norm

pytestmark = pytest.mark.xdist_group("clipping")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return in_ranks(check_all, tmp_path_factory.mktemp("ranks"), num_processes=4)


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_the_norm_is_that_of_one_process(ranks: list[dict[str, Any]], norm_type: float, factor: float) -> None:
    assert max(rank["clipping"][f"{norm_type} {factor}"] for rank in ranks) < 1e-12


def test_stages_have_one_norm_and_one_factor(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert len(rank["stages"]) == 4 * len(NORM_TYPES) + 1
        for case, found in rank["stages"].items():
            assert abs(found) < (1e-6 if case == "empty" else 1e-12), case


def test_values_are_cut(ranks: list[dict[str, Any]]) -> None:
    assert [rank["clipping"]["value"] for rank in ranks] == [0.0] * 4


def test_nothing_has_no_norm(ranks: list[dict[str, Any]]) -> None:
    assert [rank["clipping"]["nothing"] for rank in ranks] == [0.0] * 4


def test_terms_of_a_sum_are_no_gradients(ranks: list[dict[str, Any]]) -> None:
    assert all(rank["clipping"]["partial"].startswith("AssertionError") for rank in ranks)


def test_what_torch_does_with_these(ranks: list[dict[str, Any]]) -> None:
    """When this fails torch can do it and our own can go."""
    assert all("mixed torch.Tensor and DTensor" in rank["clipping"]["torch"] for rank in ranks)
    assert all("mixed torch.Tensor and DTensor" in rank["overflow"]["None alone"] for rank in ranks)
    # an infinity of one rank is found by the others, or not
    assert {tuple(rank["overflow"]["torch, divided first"]) for rank in ranks} == {(1.0,)}
    assert {tuple(rank["overflow"]["torch, replicated first"]) for rank in ranks} == {(0.0,), (1.0,)}


def test_half_precision_is_summed_in_single(ranks: list[dict[str, Any]]) -> None:
    assert max(rank["halves"] for rank in ranks) < 1e-5


def test_an_overflow_on_one_rank_skips_the_step_on_all(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["overflow"]["None agreed"] == (True, 4.0)
        for index in (0, 2, 5):
            assert rank["overflow"][f"{index} agreed"] == (False, 2.0)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_ordinary_parameters_are_clipped_as_by_torch(norm_type: float) -> None:
    ours, theirs = ([nn.Parameter(torch.zeros(5, size)) for size in (3, 4)] for _ in range(2))
    for one, other in zip(ours, theirs, strict=True):
        one.grad = torch.randn_like(one)
        other.grad = one.grad.clone()
    found, due = clip_norm(ours, 0.5, norm_type), nn.utils.clip_grad_norm_(theirs, 0.5, norm_type)
    assert torch.equal(found, due)
    for one, other in zip(ours, theirs, strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)


def test_a_norm_type_that_is_none() -> None:
    with pytest.raises(ValueError, match="norm_type=-1"):
        clip_norm([], 1.0, -1)
