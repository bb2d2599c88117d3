"""Unit inputs as one part on each rank: what two processes found, against inputs on the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import in_ranks
from shard_checks import DEEP, FULL, NUM_BLOCKS, check_all, check_layouts
from shard_models import LENGTH, MANY, ROWS, WIDTH, Odd, on_shards
from torch import nn

from lightning_recompute import replicas
from lightning_recompute.recompute import apply_recompute

pytestmark = pytest.mark.xdist_group("shard placement")

Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return in_ranks(check_all, tmp_path_factory.mktemp("shards"), limit=300)


def both(found: Found, check: str) -> list[Any]:
    return [rank[check] for rank in found]


def problems(results: dict[str, str]) -> dict[str, str]:
    return {name: problem for name, problem in results.items() if problem}


@pytest.mark.parametrize("check", ["plans", "habits", "uneven_garbage"])
def test_the_same_as_on_the_device(found: Found, check: str) -> None:
    for results in both(found, check):
        assert problems(results) == {}
        assert len(results) > 1


def test_one_gather_for_each_unit_and_backward(found: Found) -> None:
    for results in both(found, "counts"):
        for name, units in {"one": NUM_BLOCKS, "pairs": NUM_BLOCKS // 2}.items():
            assert results[name]["gathers"] == [units] * 3
            assert results[name]["forward"] == 0
            assert results[name]["compared"] == [NUM_BLOCKS, 0]  # each block once, in the first step
        assert results["several"] == 4
        assert results["several, pairs"] == 2
        assert results["several parity"] == results["several, pairs parity"] == ""


def test_the_unit_before_is_on_its_way(found: Found) -> None:
    for results in both(found, "counts"):
        due = ["begin 0"]
        for number, block in enumerate(reversed(range(NUM_BLOCKS))):
            due += [f"wait {number}", *[f"begin {number + 1}"] * (block > 0), f"replay {block}"]
        assert results["one"]["order"] == due
        due = ["begin 0", "wait 0", "begin 1", "replay 4", "replay 5", "wait 1", "begin 2", "replay 2", "replay 3"]
        assert results["pairs"]["order"] == [*due, "wait 2", "replay 0", "replay 1"]


def test_heads_are_kept_whole_and_hidden_states_are_not(found: Found) -> None:
    for rank, results in enumerate(both(found, "tensor_parallel")):
        assert problems({name: result["problem"] for name, result in results.items()}) == {}
        for zeros in ("", ", zeros first"):
            # four steps of four blocks
            assert results["full" + zeros]["gathers"] == 16
            assert results["norm" + zeros]["gathers"] == 16
            assert results["attn" + zeros]["gathers"] == 16
            assert results["core_attn" + zeros]["gathers"] == 0
            # norms: hidden states. Core attention: nothing. Attention: its input is freed by the norm
            assert results["norm+core_attn" + zeros]["gathers"] == 16
            assert results["attn+norm" + zeros]["gathers"] == 16
        assert results["full"]["messages"] == []
        attention = [message for message in results["attn+norm"]["messages"] if rank == 0]
        assert [(level, "it is freed anyway" in message) for level, message in attention] == [("INFO", True)] * (
            rank == 0
        )
        if rank == 0:
            ((level, message),) = results["core_attn"]["messages"]
            assert level == "WARNING"
            assert message.startswith("blocks.*.attention: distribute_saved_activations saves nothing here: all inputs")
            assert f"{3 * 3 * 5 * 8 * 4} bytes a call" in message
            assert message.count("it differs between ranks") == 3
            ((level, message),) = results["attn+norm"]["messages"]
            assert (level, "it is freed anyway" in message) == ("INFO", True)
        else:
            assert results["core_attn"]["messages"] == []


def test_inputs_that_come_to_differ_are_an_error_on_all_ranks(found: Found) -> None:
    results = both(found, "divergence")
    assert results[0]["errors"] == results[1]["errors"]
    errors = results[0]["errors"]
    assert errors[-1] == ""
    for index, error in enumerate(errors[:-1]):
        assert error.startswith(
            f"PlacementError: blocks.{NUM_BLOCKS - 1 - index}: tensor input 0 of shape (3, 5, 7) was"
        )
        assert "inputs='device'" in error
    assert all(result["right after"] for result in results)


def test_a_copy_of_the_model_needs_no_other_rank(found: Found) -> None:
    first, second = both(found, "copies")
    assert first == {"deepcopy": [True, 0, 0, True], "pickle": [True, 0, 0, True]}
    assert second == {"deepcopy": [True, 0, 0], "pickle": [True, 0, 0]}


def test_the_callers_tensors_are_not_touched(found: Found) -> None:
    for results in both(found, "writes"):
        assert results == {"shapes": [(ROWS, LENGTH, WIDTH)] * NUM_BLOCKS, "equal": True, "right": True}


def test_unit_inputs_are_halved(found: Found) -> None:
    whole = MANY * LENGTH * WIDTH * 4
    part = -(-MANY * LENGTH * WIDTH // 2) * 4
    for results in both(found, "memory"):
        device, shard = results["device"], results["shard"]
        saved = device["held"] - shard["held"]
        assert saved == pytest.approx(DEEP * (whole - part), abs=DEEP * 64)  # a digest, and what aligns it
        assert [results[name][when] for name in results for when in ("after", "dropped")] == [0] * 4
        # beside the parts there are whole: what is replayed, and the gather on its way, which gloo does in a copy of
        # its own
        assert shard["peak"] <= device["peak"] - saved + (1 + 2) * whole + DEEP * 64 < device["peak"]


def test_nothing_stays(found: Found) -> None:
    for results in both(found, "leaks"):
        assert results == {"one": [0] * 4, "pairs": [0] * 4}


def test_which_tensors_are_kept_in_parts(found: Found) -> None:
    parts = {"odd", "fp64", "bf16", "fp8", "transposed", "offset", "bf16 offset", "needs grad", "large"}
    for results in both(found, "tensors"):
        assert {name for name, is_part in results.items() if is_part} == parts | {"almost constant", "soon no zeros"}


@pytest.mark.parametrize("case", ["alone", "not in it"])
def test_a_group_of_one_is_refused(found: Found, case: str) -> None:
    due = {"alone": "that has one rank", "not in it": "this process is in none"}[case]
    for message in both(found, case):
        assert message.startswith("ValueError: the plan's segment of block 0: distribute_saved_activations keeps")
        assert due in message
        assert "leave it out" in message


def test_no_group_is_refused() -> None:
    with pytest.raises(ValueError, match=r"this process is in none \(tensor_group=None\); leave it out"):
        apply_recompute(Odd(NUM_BLOCKS), on_shards(FULL))


def test_layouts_of_four_ranks(tmp_path: Path) -> None:
    """Case 55."""
    for results in in_ranks(check_layouts, tmp_path, limit=150, num_processes=4):
        assert len(results) == 4
        assert problems(results) == {}


# ---- digests


def of(tensor: torch.Tensor) -> int:
    return int(replicas.digest(replicas.flat(tensor)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float8_e5m2])
@pytest.mark.parametrize("length", [1, 7, 8, 1021, 1022, 5000])
def test_a_digest_depends_on_every_bit_and_place(dtype: torch.dtype, length: int) -> None:
    torch.manual_seed(length)
    x = torch.randn(length).to(dtype)
    due = of(x)
    assert of(x.clone()) == due
    raw = x.view(torch.uint8)
    for byte in {0, len(raw) // 2, len(raw) - 1}:
        raw[byte] ^= 1
        assert of(x) != due
        raw[byte] ^= 1
    assert of(x) == due
    if length > 1:
        assert of(x.float().roll(1).to(dtype)) != due
        assert of(x.float().flip(0).to(dtype)) != due


def test_a_digest_does_not_depend_on_where_a_tensor_lies() -> None:
    x = torch.randn(2001).bfloat16()
    assert of(x[1:]) == of(x[1:].clone())


@pytest.mark.parametrize(
    ("tensor", "due"),
    [
        (torch.randn(3, 5), True),
        (torch.randn(3, 5).t(), True),
        (torch.randn(3, 1, 5).transpose(0, 1), True),
        (torch.randn(3, 5)[1:], True),
        (torch.randn(3, 5)[:, 1:], False),
        (torch.randn(3, 1).expand(3, 5), False),
        (torch.tensor(1.0), True),
        (torch.randn(4, dtype=torch.complex64).conj(), False),
    ],
)
def test_dense_is_without_gap_and_overlap(tensor: torch.Tensor, due: bool) -> None:
    assert replicas.is_dense(tensor) is due


def test_views_of_parameters_are_known() -> None:
    assert isinstance(nn.Parameter(torch.ones(2, 2)).t()._base, nn.Parameter)
