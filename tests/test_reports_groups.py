"""Both reports where ranks share layers: samples counted once, the model's FLOPs once, and shares of bytes."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from distributed import in_ranks
from reports_groups_checks import (
    HIDDEN,
    INNER,
    LAYERS,
    LENGTH,
    NUM_BATCHES,
    OUT,
    PEAK,
    ROWS,
    VOCABULARY,
    WIDTH,
    check_four,
    check_two,
)

pytestmark = pytest.mark.xdist_group("reports of groups")

FLOAT = 4
SECONDS = (NUM_BATCHES - 1) * 2  # one step of warm-up, and the slowest rank sets the pace
SAMPLES = (NUM_BATCHES - 1) * ROWS  # of one group of ranks
LINEARS = LAYERS * 12 * HIDDEN**2  # weights of linears in blocks
HEAD = VOCABULARY * HIDDEN
SCORES = LAYERS * 2 * LENGTH * HIDDEN  # of one token: queries with keys, probabilities with values
FORWARD = 2 * LENGTH * (LINEARS + HEAD + SCORES)  # FLOPs of a sample
NORMS = (2 * LAYERS + 1) * 2 * HIDDEN
WHOLE = NORMS + LAYERS * 2 * HIDDEN + LENGTH * HIDDEN  # with biases of row-parallel linears, and positions
DIVIDED = LINEARS + HEAD * 2 + LAYERS * (3 + 4) * HIDDEN
Found = dict[str, Any]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    return {number: tmp_path_factory.mktemp(f"of{number}") for number in (2, 4)}


@pytest.fixture(scope="module")
def two(folders: dict[int, Path]) -> Found:
    ranks = in_ranks(check_two, folders[2])
    assert all(rank == ranks[0] for rank in ranks)
    return ranks[0]


@pytest.fixture(scope="module")
def four(folders: dict[int, Path]) -> Found:
    ranks = in_ranks(check_four, folders[4], num_processes=4)
    assert all(rank == ranks[0] for rank in ranks)
    return ranks[0]


def speed(found: Found, name: str) -> dict[str, float]:
    (row,) = found[name]["throughput"]
    return dict(row)


def memory(found: Found, name: str, phase: str) -> list[dict[str, Any]]:
    return [row for row in found[name]["memory"] if row["phase"] == phase]


# ---- speed


@pytest.mark.parametrize("name", ["none", "full", "sequence"])
def test_a_group_counts_its_samples_once(two: Found, name: str) -> None:
    row = speed(two, name)
    assert row["samples_per_second"] == pytest.approx(SAMPLES / SECONDS)
    assert row["tokens_per_second"] == pytest.approx(SAMPLES * (LENGTH + 1) / SECONDS)
    assert row["step_seconds_median"] == 2


@pytest.mark.parametrize("name", ["replicate", "shard"])
def test_groups_add_up(four: Found, name: str) -> None:
    row = speed(four, name)
    assert row["samples_per_second"] == pytest.approx(2 * SAMPLES / SECONDS)
    assert row["mfu"] == row["hfu"] == pytest.approx(3 * FORWARD * 2 * SAMPLES / SECONDS / 4 / PEAK)


def test_ranks_together_do_the_models_flops(two: Found) -> None:
    due = 3 * FORWARD * SAMPLES / SECONDS / 2 / PEAK
    for name in ("none", "sequence"):
        row = speed(two, name)
        assert row["mfu"] == row["hfu"] == pytest.approx(due)
    full = speed(two, "full")
    assert full["mfu"] == pytest.approx(due)
    # all of a block's products again but the last linear's, whose output nobody needs
    again = 2 * LENGTH * (LINEARS - LAYERS * 4 * HIDDEN**2 + SCORES)
    assert full["hfu"] - full["mfu"] == pytest.approx(again * SAMPLES / SECONDS / 2 / PEAK)


@pytest.mark.parametrize("world", [2, 4])
def test_what_ranks_repeat_is_the_models_once(two: Found, four: Found, world: int) -> None:
    shared = 2 * 2 * 3 * 2 * WIDTH * INNER  # of two blocks, forward and backward of a sample
    alone = 2 * (2 * WIDTH**2 + 3 * WIDTH * OUT)  # the first linear's input needs no gradient
    for row in [speed(two, "partly"), speed(two, "dtensor")] if world == 2 else [speed(four, "dtensor")]:
        rate = world / 2 * SAMPLES / SECONDS / world / PEAK
        assert row["mfu"] == pytest.approx((shared + alone) * rate)
        assert row["hfu"] == pytest.approx((shared + 2 * alone) * rate)


def test_which_products_are_repeated(two: Found) -> None:
    assert two["work"] == {
        "nothing": 0,
        "alike": 11,
        "own": 0,
        "mixed": 110,
        "alike in sum": 0,
        "last bits": 1,
        "zeros": 0,
        "not finite": 0,
        "another number": 0,
        "other flops": 0,
        "vectors": 0,
        "half": 1,
    }


@pytest.mark.parametrize("name", ["tensor", "sequence"])
def test_experts_that_stay_whole_are_counted_once(two: Found, name: str) -> None:
    found = two["experts"][name]
    assert 2 * found["own"] - found["repeated"] == found["whole"]
    assert (found["repeated"] > 0) == (name == "tensor")  # by parts of the sequence each token is routed once


def test_the_table_says_what_is_repeated(two: Found, folders: dict[int, Path]) -> None:
    assert two
    shown = " ".join((folders[2] / "0.txt").read_text().split())  # captions are as narrow as their tables
    assert shown.count("work that ranks repeat adds") == 2  # of five fits
    assert "Throughput" not in (folders[2] / "1.txt").read_text()


# ---- bytes


@pytest.mark.parametrize("name", ["none", "full", "sequence"])
def test_a_rank_has_its_share(two: Found, name: str) -> None:
    share = FLOAT * (WHOLE + DIVIDED // 2)
    rows = memory(two, name, "optimizer")
    assert [row["rank"] for row in rows] == [0, 1]
    for row in rows:
        assert row["parameters_bytes"] == share
        assert row["gradients_bytes"] == share


def test_data_parallel_groups_replicate_or_shard_the_share(four: Found) -> None:
    share = FLOAT * (WHOLE + DIVIDED // 2)
    for name, due in (("replicate", share), ("shard", share // 2)):
        rows = memory(four, name, "optimizer")
        assert [row["rank"] for row in rows] == [0, 1, 2, 3]
        assert [row["parameters_bytes"] for row in rows] == [due] * 4


# ---- all ranks, once


@pytest.mark.parametrize("world", [2, 4])
def test_scalars_are_logged_once_and_are_of_all_ranks(
    two: Found, four: Found, folders: dict[int, Path], world: int
) -> None:
    found, name = (two, "full") if world == 2 else (four, "shard")
    with (folders[world] / name / "metrics.csv").open() as file:
        logged = [row for row in csv.DictReader(file) if row["memory/peak_gib"]]
    assert len(logged) == 1
    highest = max(found[name]["memory"], key=lambda row: row["peak_bytes"])
    assert float(logged[0]["memory/peak_gib"]) * 2**30 == pytest.approx(highest["peak_bytes"])
    assert float(logged[0]["memory/worst_rank"]) == highest["rank"]
    with (folders[world] / name / "memory.csv").open() as file:
        assert {int(row["rank"]) for row in csv.DictReader(file)} == set(range(world))
