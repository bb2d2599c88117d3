"""Forecasts: what a plan will need, part by part, as values that print and save themselves."""

from __future__ import annotations

from pathlib import Path

import planned
import pytest
from planned import NUM_BLOCKS, most, profile, unlimited
from plans import PLANS

from lightning_recompute.forecast import ParallelSizes, stage_forecast
from lightning_recompute.plan import Full, RecomputePlan, Segment

FULL = RecomputePlan(tuple(Segment(block, block + 1, Full()) for block in range(NUM_BLOCKS)))
PARTS = ["parameters", "optimizer", "batch", "other", "gradients", "blocks", "running", "outside"]


def test_parallel_sizes() -> None:
    assert ParallelSizes(data=4) == ParallelSizes(1, 1, 4, 1)
    for wrong in (0, -1, True, 1.5):
        with pytest.raises(ValueError, match="an int of at least 1"):
            ParallelSizes(data=wrong)  # type: ignore[arg-type]
    assert ParallelSizes(pipeline=2, virtual=2).virtual == 2
    with pytest.raises(ValueError, match=r"virtual=2, pipeline=1.*there is one stage"):
        ParallelSizes(virtual=2)


@pytest.mark.parametrize("name", ["none", "uniform-1", "uniform-2", "block-1"])
def test_the_parts_are_the_peak(name: str) -> None:
    plan = PLANS[name]([NUM_BLOCKS])
    found = stage_forecast(profile(), plan, 0.5)
    assert found.peak_bytes == profile().peak_bytes(plan) == sum(found.breakdown.values())
    assert list(found.breakdown) == PARTS
    assert (found.stage, found.blocks, found.in_flight, found.extra_seconds) == (0, (0, NUM_BLOCKS), 1, 0.5)
    statics = profile().statics
    assert (found.breakdown["parameters"], found.breakdown["batch"]) == (statics.parameters_bytes, statics.batch_bytes)


def test_the_moment_is_in_words() -> None:
    moment = stage_forecast(profile(), PLANS["none"]([NUM_BLOCKS])).moment
    assert moment in {f"{way} of net.blocks.{NUM_BLOCKS - 1}" for way in ("forward", "backward")} | {
        f"head and loss, {way}" for way in ("forward", "backward")
    }


def test_a_forecast_of_another_plan() -> None:
    forecast = unlimited()
    assert forecast.fits
    assert forecast.peak_bytes == most()
    assert forecast.extra_seconds == 0.0
    full = forecast.under(FULL, most() // 2)
    assert full.plan == FULL
    assert full.peak_bytes == profile().peak_bytes(FULL) < most()
    assert full.extra_seconds > 0
    assert full.fits == (full.peak_bytes <= most() // 2)
    assert forecast.under(FULL, None).fits
    assert not forecast.under(FULL, full.peak_bytes - 1).fits
    assert forecast.under(forecast.plan, most()) == forecast


def test_phases() -> None:
    phases = unlimited().phase_peaks()
    assert list(phases) == ["forward", "backward", "optimizer"]
    assert max(phases.values()) == most()
    assert phases["optimizer"] == profile().statics.num_bytes + profile().optimizer_bytes


def test_it_prints() -> None:
    text = str(unlimited())
    assert "Forecast, budget" in text
    for part in PARTS:
        assert part in text
    assert f"0..{NUM_BLOCKS - 1}" in text
    assert "budget" not in str(unlimited().under(FULL, None))


def test_it_saves_its_plan(tmp_path: Path) -> None:
    path = unlimited().under(FULL, 123).save(tmp_path / "plan.yaml", {"seed": 1})
    assert RecomputePlan.load(path) == FULL
    text = path.read_text()
    assert f"predicted_peak_bytes: {planned.profile().peak_bytes(FULL)}" in text
    assert "memory_budget_bytes: 123" in text
    assert "seed: 1" in text
