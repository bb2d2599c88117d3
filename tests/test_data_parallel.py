"""Data parallelism on two processes, and beside tensor parallelism on four: the same gradients as one process."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from data_parallel_checks import MODELS, check_two
from data_parallel_four_checks import check_four
from distributed import in_ranks
from plans import PLANS
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_recompute.data_parallel import replicate
from lightning_recompute.shard_choice import carry_over_all
from lightning_recompute.sharding import shard

pytestmark = pytest.mark.xdist_group("data_parallel")

EXACT = 1e-12


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return in_ranks(check_two, tmp_path_factory.mktemp("two"))


def test_gradients_are_those_of_one_process(two: list[dict[str, Any]]) -> None:
    for rank in two:
        due = {f"{name} {kind}" for name in MODELS for kind in ("shard 1", "shard 2", "replicate 1")}
        assert set(rank["models"]) == due
        for name, difference in rank["models"].items():
            # one of its parameters is in single precision
            assert difference < (1e-7 if name.startswith("Dtypes") else EXACT), name


def test_every_plan_accumulated_and_clipped(two: list[dict[str, Any]]) -> None:
    for rank in two:
        assert list(rank["plans"]) == list(PLANS)
        assert max(rank["plans"].values()) < EXACT, rank["plans"]


def test_recompute_gathers_nothing_again(two: list[dict[str, Any]]) -> None:
    """A gather for the forward of each unit, one for its backward if it was freed, one for the rest."""
    for (reshard, unit, when), counts in two[0]["counts"].items():
        num_units = 4 // unit
        gathers = {None: 2 * num_units + 1, True: 2 * num_units + 2, False: num_units + 1}[reshard]
        assert counts == {"_allgather_base_": gathers, "_reduce_scatter_base_": num_units + 1}, (reshard, unit, when)
    assert len(two[0]["counts"]) == 18


def test_gradients_are_averaged_once_a_window(two: list[dict[str, Any]]) -> None:
    for rank in two:
        sharded, replicated = rank["accumulation"]["shard"], rank["accumulation"]["replicate"]
        assert sharded["alone"] == {"_allgather_base_": 18}
        assert sharded["together"] == {"_allgather_base_": 9, "_reduce_scatter_base_": 5}
        assert replicated["alone"] == {}
        # all the gradients, and who has which
        assert replicated["together"] == {"allreduce_": 2}
        assert max(sharded["difference"], replicated["difference"]) < EXACT


def test_several_backwards_in_a_step(two: list[dict[str, Any]]) -> None:
    for rank in two:
        assert max(rank["manual"].values()) < EXACT, rank["manual"]


def test_replicas_may_use_different_parameters(two: list[dict[str, Any]]) -> None:
    assert max(rank["ranks that differ"] for rank in two) < EXACT


def test_sharded_ranks_may_use_different_parameters(two: list[dict[str, Any]]) -> None:
    for rank in two:
        assert rank["unused"]["difference"] < EXACT
        assert rank["unused"]["num zeros"] == 8  # a weight and a bias in each block


def test_a_refused_module_is_as_it_was(two: list[dict[str, Any]]) -> None:
    for rank in two:
        message, same = rank["refused"]
        assert "forward" in message
        assert same


def test_validation_and_parameters_that_are_thawed(two: list[dict[str, Any]]) -> None:
    for rank in two:
        found = rank["evaluation"]
        assert found["own forward"]
        assert found["shown"] == ["DTensor"]
        assert max(found["loss"], found["frozen"], found["thawed"]) < EXACT, found


def test_nothing_is_left_on_the_module(two: list[dict[str, Any]]) -> None:
    for rank in two:
        for where in ("nowhere", "forward", "backward"):
            assert rank["removal"][f"same after {where}"]
            assert rank["removal"][f"carried after {where}"] == ("the user's", True)
            assert rank["removal"][f"again after {where}"] < EXACT


def test_each_precision_is_that_of_ddp(two: list[dict[str, Any]]) -> None:
    for rank in two:
        found = dict(rank["precisions"])
        # why the parameters are gathered in their own dtype
        assert found.pop("bf16-mixed cast") > 1e-4
        assert max(found.values()) < 1e-6, found


def test_replicas_hold_no_copies(two: list[dict[str, Any]]) -> None:
    for rank in two:
        found = rank["memory"]
        assert found["replicate held"] == pytest.approx(found["alone held"], abs=1e-3)
        assert found["replicate peak"] == pytest.approx(found["alone peak"], abs=0.1)


@pytest.mark.parametrize("start", [replicate, lambda module, groups: shard(module, groups, [])])
def test_sparse_gradients_are_refused(start: Callable[..., Any]) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Embedding(3, 2, sparse=True))
    with pytest.raises(ValueError, match=r"1 makes sparse gradients.*sparse=False"):
        start(module, None)


def test_hooks_that_a_shard_does_not_run_are_named(caplog: pytest.LogCaptureFixture) -> None:
    former, new = ({"a": nn.Parameter(torch.ones(2)), "b": nn.Parameter(torch.ones(2))} for _ in range(2))
    former["a"].register_hook(lambda gradient: None)
    with caplog.at_level(logging.WARNING):
        carry_over_all(former, new)
    assert "1 parameters have a hook" in caplog.text


def test_an_older_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(FSDPModule, "reset_iter_state")
    groups: Any = None
    with pytest.raises(ValueError, match="needs torch 2"):
        shard(nn.Linear(2, 2), groups, [])


# ---- beside tensor parallelism


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return in_ranks(check_four, tmp_path_factory.mktemp("four"), num_processes=4)


def test_gradients_beside_tensor_parallelism(four: list[dict[str, Any]]) -> None:
    for rank in four:
        assert len(rank) == 18
        for name, found in rank.items():
            assert max(found["difference"], found["norm"], found["clipped"], found["weights"]) < EXACT, name


def test_parameters_end_on_both_axes(four: list[dict[str, Any]]) -> None:
    for name, found in four[0].items():
        due = ["data,tensor"]
        if "replicate" in name:
            due = ["tensor"]
        elif "Nested" in name:  # its scalars are kept whole
            due = ["data,tensor", "tensor"]
        assert found["meshes"] == due, name


def test_divided_models_become_whole_again(four: list[dict[str, Any]]) -> None:
    for rank in four:
        for name, found in rank.items():
            assert all(found["whole"].values()), (name, found["whole"])
