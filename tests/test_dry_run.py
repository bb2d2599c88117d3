"""One rank on tensors without memory takes what it takes for real, and what the closed formula says."""

from __future__ import annotations

import functools
import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import in_ranks
from dry_run_checks import CASES, HIDDEN_BYTES, POLICIES, SCHEDULES, Case, check, dry, make
from models import MODELS

sys.path.append(str(Path(__file__).parent.parent / "bench"))

import dry_run as bench

from lightning_recompute.cost import in_flight
from lightning_recompute.dry_run import dry_run
from lightning_recompute.measured_model import MeasuredModel, measure_model
from lightning_recompute.microbatches import split_batch
from lightning_recompute.paper_formulas import layer_bytes
from lightning_recompute.pipeline_forecast import forecast_ranks
from lightning_recompute.pipeline_layout import Layout
from lightning_recompute.pipeline_settings import PipelineSettings, settled_schedule
from lightning_recompute.policy import RecomputePolicy
from lightning_recompute.stage_options import Prices

pytestmark = pytest.mark.xdist_group("dry-run")

TOLERANCE = 0.01
FULL = ("full", "distributed")
SPLIT = ("interleaved-zb", "zbv")
SCALARS_BYTES = 256
RANDOM_BYTES = torch.get_rng_state().nbytes
Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return in_ranks(check, tmp_path_factory.mktemp("dry"), num_processes=4)


def in_words(case: Case) -> str:
    return f"{case.schedule} {case.policy} {case.tensor}{' sequence' if case.sequence_parallel else ''}"


cases = pytest.mark.parametrize("case", CASES, ids=in_words)


def num_states(case: Case, run: dict[str, Any]) -> int:
    """What frames keep of random numbers: the default generator's state, and that of a tensor-parallel rank's own."""
    return 0 if case.policy == "none" else int(run["in_flight"]) * (1 + (case.tensor > 1))


@cases
def test_peaks_are_those_of_the_allocator(ranks: Ranks, case: Case) -> None:
    """To the byte, but for a hidden state on its way to a peer, states of random numbers, and some scalars."""
    sent = HIDDEN_BYTES // (case.tensor if case.sequence_parallel else 1)
    for rank in ranks:
        run, real = rank[str(case)]["dry"], rank[str(case)]["real"]
        beside = real["peak"] - (run["peak_bytes"] - run["parameters_bytes"])
        states = range(1, num_states(case, run) + 4)
        due = [number * sent + count * RANDOM_BYTES for number in range(2) for count in states]
        assert any(0 <= beside - each < SCALARS_BYTES for each in due), (run["rank"], beside)
        assert abs(run["left_bytes"] - run["parameters_bytes"] - real["left"]) < SCALARS_BYTES


@cases
def test_as_many_are_in_flight_as_the_planner_counts(ranks: Ranks, case: Case) -> None:
    schedule, virtual = settled_schedule(SCHEDULES[case.schedule].schedule, SCHEDULES[case.schedule].virtual)
    due = in_flight(schedule, case.pipeline, case.num_microbatches, virtual)
    runs = [rank[str(case)]["dry"] for rank in ranks[:: case.tensor]]
    assert [run["rank"] for run in runs] == list(range(case.pipeline))
    assert tuple(run["in_flight"] for run in runs) == due
    names = [name for run in runs for name in run["num_forwards"]]
    assert sorted(names) == [f"blocks.{index}" for index in range(case.num_layers)]
    for run in runs:
        assert set(run["num_forwards"].values()) == {case.num_microbatches * (1 + (case.policy in FULL))}


@cases
def test_parts_of_the_peak(ranks: Ranks, case: Case) -> None:
    for rank in ranks:
        run = rank[str(case)]["dry"]
        parts = [run[f"{name}_bytes"] for name in ("parameters", "gradients", "activations", "other")]
        assert sum(parts) == run["peak_bytes"]
        assert min(parts) > 0
        assert run["parameters_bytes"] + run["gradients_bytes"] <= run["left_bytes"]


# ---- the closed formula


@functools.cache
def measured(num_layers: int) -> MeasuredModel:
    module = make(num_layers)
    (microbatch, *_) = split_batch(CASES[0].batch, CASES[0].num_microbatches)
    whole = dict(module.named_parameters())
    return measure_model(
        module, lambda part: module.training_step(part, 0), microbatch, whole=whole, prices=Prices(), exact=False
    )


@pytest.mark.parametrize("case", [case for case in CASES if case.tensor == 1], ids=in_words)
def test_peaks_are_those_of_the_closed_formula(ranks: Ranks, case: Case) -> None:
    """Beside them it has what the CPU adds, as above. It is for a steady state, where all gradients are there.

    Where all microbatches are alive at once it is an upper bound. Where backward has two parts the rank's actions are
    gone through, and what of the head waits for the second part is one: `test_split_ranks.py`.
    """
    settings = SCHEDULES[case.schedule]
    layout = Layout(pipeline=case.pipeline, virtual=settings.virtual, schedule=settings.schedule)
    words = POLICIES[case.policy] or RecomputePolicy(granularity=None)
    forecast = forecast_ranks(
        measured(case.num_layers), layout, case.num_microbatches, words=words, batch_bytes=case.batch.nbytes, names=()
    )
    for rank, due in zip(ranks, forecast.ranks, strict=True):
        run = rank[str(case)]["dry"]
        assert run["in_flight"] == due.in_flight
        least = (1 - TOLERANCE) * run["peak_bytes"]
        most = (1 + TOLERANCE) * run["peak_bytes"] + num_states(case, run) * RANDOM_BYTES
        most += HIDDEN_BYTES * settings.virtual  # on their way
        assert due.peak_bytes >= least, run["rank"]
        if case.schedule in SPLIT:
            most += (0.05 if run["rank"] == case.pipeline - 1 else 0.02) * run["peak_bytes"]
        if case.schedule != "gpipe":
            assert due.peak_bytes <= most, run["rank"]


@pytest.mark.long
def test_all_stages_of_the_175b() -> None:
    """In less than three minutes where nobody else computes; the limit of a test leaves more."""
    runs = bench.all_ranks(bench.MODEL)
    each = layer_bytes(bench.MODEL.shape, sequence_parallel=True, recompute="selective")
    assert [run.in_flight for run in runs] == [8, 7, 6, 5, 4, 3, 2, 1]
    for run in runs:
        assert set(run.num_forwards.values()) == {bench.MODEL.num_microbatches}
        assert len(run.num_forwards) == 12
    for run, after in itertools.pairwise(runs[1:-1]):  # without embedding and head: one microbatch less
        assert run.activations_bytes - after.activations_bytes == pytest.approx(12 * each, rel=TOLERANCE)
    for run, due in zip(runs, bench.closed_formula(bench.MODEL), strict=True):
        assert due == pytest.approx(run.peak_bytes, rel=TOLERANCE)


# ---- other models, and what is refused


def test_a_model_of_hugging_face() -> None:
    case = MODELS["llama-sdpa"]
    batch = {"input_ids": torch.ones(4, 12, dtype=torch.long), "labels": torch.ones(4, 12, dtype=torch.long)}
    runs = [
        dry_run(
            case.build,
            batch,
            pipeline=2,
            rank=rank,
            settings=PipelineSettings(num_microbatches=4),
            plan=RecomputePolicy(),
            step=lambda module, part: module(**part).loss,
        )
        for rank in range(2)
    ]
    assert [run.in_flight for run in runs] == [2, 1]
    assert {count for run in runs for count in run.num_forwards.values()} == {8}
    assert sum(len(run.num_forwards) for run in runs) == sum(case.chunks)


def test_nothing_is_left() -> None:
    state = torch.get_rng_state()
    dry(Case("1f1b", "none"), 3)
    assert torch.equal(torch.get_rng_state(), state)
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match="rank=4 of 4 pipeline ranks"):
        dry(Case("1f1b", "none"), 4)
    with pytest.raises(ValueError, match="num_layers=9"):
        dry_run(lambda: make(4), CASES[0].batch, pipeline=2, plan=RecomputePolicy(num_layers=9))
    assert not dist.is_initialized()
