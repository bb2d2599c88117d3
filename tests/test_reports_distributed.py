"""Both reports over two processes: every rank in the file, the worst one named, each sample counted once."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from distributed import in_ranks
from distributed_reports import HIDDEN, NUM_BATCHES, PEAK, ROWS, WIDTH, fit_all

FLOAT = 4
PARAMETERS = FLOAT * (WIDTH * HIDDEN + HIDDEN + HIDDEN * 2 + 2)
SECONDS = (NUM_BATCHES - 1) * 2  # a step of warm-up, and the slower rank sets the pace
Found = dict[str, dict[str, list[dict[str, Any]]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reports")


@pytest.fixture(scope="module")
def found(folder: Path) -> Found:
    """Rows that both ranks have, by kind of training."""
    first, second = in_ranks(fit_all, folder)
    assert first == second
    return first


pytestmark = pytest.mark.xdist_group("reports")


def rows(found: Found, kind: str, rank: int) -> dict[str, dict[str, Any]]:
    return {row["phase"]: row for row in found[kind]["memory"] if row["rank"] == rank}


def test_every_rank_has_its_own_figures(found: Found) -> None:
    for rank, count in enumerate(ROWS):
        phases = rows(found, "ddp", rank)
        assert list(phases) == ["forward", "backward", "optimizer"]
        held = FLOAT * (count * HIDDEN + count * 2)
        assert held < phases["forward"]["activations_bytes"] < held * 1.1 + 4000  # and DDP's buckets
        for row in phases.values():
            assert row["parameters_bytes"] == PARAMETERS
        assert phases["optimizer"]["gradients_bytes"] == PARAMETERS
        assert phases["optimizer"]["optimizer_bytes"] == 2 * PARAMETERS + 4 * FLOAT


def test_the_file_and_the_table_have_all_ranks(found: Found, folder: Path) -> None:
    with (folder / "ddp" / "memory.csv").open() as file:
        written = list(csv.DictReader(file))
    assert [(row["rank"], row["phase"], row["peak_bytes"]) for row in written] == [
        (str(row["rank"]), row["phase"], str(row["peak_bytes"])) for row in found["ddp"]["memory"]
    ]
    shown = (folder / "0.txt").read_text()
    worst = max(found["ddp"]["memory"], key=lambda row: row["peak_bytes"])
    assert worst["rank"] == 1
    line = next(line for line in shown.splitlines() if line.strip().startswith("backward"))
    assert line.split()[1:3] == [f"{worst['peak_bytes'] / 1024:.2f}", "1"]
    assert "on the rank that needed most" in shown
    assert "phase" not in (folder / "1.txt").read_text()


def test_shards_count_as_shards(found: Found) -> None:
    for rank in range(2):
        optimizer = rows(found, "fsdp", rank)["optimizer"]
        assert optimizer["parameters_bytes"] == optimizer["gradients_bytes"] == PARAMETERS // 2
        assert optimizer["optimizer_bytes"] == PARAMETERS + 4 * FLOAT


def test_samples_of_data_parallel_ranks_add_up_and_others_do_not(found: Found) -> None:
    samples = (NUM_BATCHES - 1) * sum(ROWS)
    (parallel,), (tensor,), (sharded,) = (found[kind]["throughput"] for kind in ("ddp", "tensor", "fsdp"))
    assert parallel["samples_per_second"] == sharded["samples_per_second"] == pytest.approx(samples / SECONDS)
    assert tensor["samples_per_second"] == pytest.approx(samples / 2 / SECONDS)
    assert parallel["step_seconds_median"] == 2
    # every rank's work counts, over what both devices could do
    flops = samples * 2 * (2 * (WIDTH * HIDDEN + HIDDEN * 2) + HIDDEN * 2)
    assert parallel["mfu"] == parallel["hfu"] == tensor["mfu"] == pytest.approx(flops / SECONDS / 2 / PEAK)
