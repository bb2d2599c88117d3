"""A plan for every stage: never over budget, never slower than any one setting, and exact against brute force."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stage_costs import all_choices, layers, stages

from lightning_recompute.cost import Option, StageCosts, extra_seconds, in_flight, live_vectors, peak_bytes
from lightning_recompute.errors import BudgetError
from lightning_recompute.schedules import SCHEDULES
from lightning_recompute.stage_plans import (
    PipelineCosts,
    best_global,
    everywhere,
    first_blocks,
    in_groups,
    plan_stages,
    rank_peak,
    with_choices,
)
from lightning_recompute.step_time import ChunkSeconds, simulate

KEEP, SELECTIVE, FULL = 0, 1, 6
"""Options of `layers`."""


def pipeline(num_stages: int = 4, units: int = 3, schedule: str = "1f1b", virtual: int = 1) -> PipelineCosts:
    num_parts = num_stages * virtual
    return PipelineCosts(
        parts=tuple(layers(units) for _ in range(num_parts)),
        seconds=tuple(ChunkSeconds(1.0 * units, 2.0 * units) for _ in range(num_parts)),
        num_stages=num_stages,
        num_microbatches=2 * num_stages,
        schedule=schedule,
        virtual=virtual,
    )


def fixed_settings(costs: PipelineCosts) -> dict[str, Any]:
    units = costs.parts[0].num_units
    return {
        "none": everywhere(costs, KEEP),
        "selective": everywhere(costs, SELECTIVE),
        "full": everywhere(costs, FULL),
        **{f"block {number}": first_blocks(costs, number, FULL) for number in range(1, units)},
    }


def budget_between(costs: PipelineCosts, share: float) -> int:
    least, most = (rank_peak(costs, 0, [everywhere(costs, option)[0]]) for option in (FULL, KEEP))
    return least + int(share * (most - least))


def test_each_stage_has_its_own_microbatches_in_flight() -> None:
    costs = pipeline()
    plan = plan_stages(costs, budget_between(costs, 0.3))
    assert [rank.in_flight for rank in plan.ranks] == [4, 3, 2, 1] == list(in_flight("1f1b", 4, 8))
    extra = [rank.extra_seconds for rank in plan.ranks]
    assert extra == sorted(extra, reverse=True)
    assert extra[0] > extra[-1] == 0
    for rank, part in zip(plan.ranks, costs.parts, strict=True):
        (choices,) = rank.choices
        assert rank.peak_bytes == peak_bytes(replace(part, in_flight=rank.in_flight), choices)
        assert rank.extra_seconds == extra_seconds(part, choices)
        assert rank.busy_seconds == pytest.approx(9.0 + rank.extra_seconds)


def test_spare_time_is_what_the_slowest_stage_needs_more() -> None:
    costs = pipeline()
    plan = plan_stages(costs, budget_between(costs, 0.3))
    assert plan.slowest.rank == 0
    assert plan.slowest.spare_seconds == 0
    for rank in plan.ranks:
        assert rank.busy_seconds + rank.spare_seconds == pytest.approx(plan.slowest.busy_seconds)


def test_recompute_up_to_the_slowest_stage_is_free_in_the_steady_state() -> None:
    many = replace(pipeline(), num_microbatches=64)
    plan = plan_stages(many, budget_between(many, 0.3))
    spent = [
        replace(base, recompute=rank.extra_seconds + rank.spare_seconds)
        for base, rank in zip(many.seconds, plan.ranks, strict=True)
    ]
    steps = [simulate("1f1b", spent, 4, number).seconds for number in (64, 128)]
    base = [replace(one, recompute=rank.extra_seconds) for one, rank in zip(many.seconds, plan.ranks, strict=True)]
    assert steps[1] - steps[0] == pytest.approx(
        simulate("1f1b", base, 4, 128).seconds - simulate("1f1b", base, 4, 64).seconds
    )


@pytest.mark.parametrize("share", [0.1, 0.3, 0.6])
def test_no_single_setting_is_faster(share: float) -> None:
    costs = pipeline()
    budget = budget_between(costs, share)
    plan, fixed = plan_stages(costs, budget), best_global(costs, budget, fixed_settings(costs))
    assert plan.fullest.peak_bytes <= budget
    assert fixed.fullest.peak_bytes <= budget
    assert plan.step.seconds < fixed.step.seconds


def test_the_best_setting_is_the_fastest_that_fits() -> None:
    costs = pipeline()
    fixed = fixed_settings(costs)
    plans = {name: with_choices(costs, choices, name) for name, choices in fixed.items()}
    for budget in sorted(plan.fullest.peak_bytes for plan in plans.values()):
        fitting = [plan for plan in plans.values() if plan.fullest.peak_bytes <= budget]
        assert best_global(costs, budget, fixed).step.seconds == min(plan.step.seconds for plan in fitting)
    with pytest.raises(BudgetError, match=r"none of 5 settings keeps .* full, takes .* on stage 0") as caught:
        best_global(costs, plans["full"].fullest.peak_bytes - 1, fixed)
    assert caught.value.smallest_bytes == plans["full"].fullest.peak_bytes


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_one_chunk_a_rank_is_planned_exactly(data: st.DataObject) -> None:
    parts = tuple(data.draw(stages(max_units=3)) for _ in range(2))
    costs = PipelineCosts(parts, (ChunkSeconds(50.0, 100.0),) * 2, 2, 4)
    points = [
        [
            (peak_bytes(loaded, choices), extra_seconds(loaded, choices))
            for loaded in [replace(part, in_flight=number)]
            for choices in all_choices(loaded)
        ]
        for part, number in zip(parts, (2, 1), strict=True)
    ]
    least = max(min(of_rank)[0] for of_rank in points)
    budget = least + data.draw(st.integers(0, least + 10))
    plan = plan_stages(costs, budget)
    for rank, of_rank in zip(plan.ranks, points, strict=True):
        assert rank.peak_bytes <= budget
        assert rank.extra_seconds == min(seconds for peak, seconds in of_rank if peak <= budget)
    with pytest.raises(BudgetError, match=r"stage \d \(\d microbatches in flight\): no choice") as caught:
        plan_stages(costs, least - 1)
    assert caught.value.smallest_bytes is None or caught.value.smallest_bytes >= least


def peak_of_chunks(parts: list[StageCosts], choices: Any, vector: tuple[int, ...]) -> int:
    """What lives at most with these microbatches alive, counted chunk by chunk."""
    held = [
        sum(part.options[unit][choice].held_bytes for unit, choice in enumerate(chosen) if choice is not None)
        for part, chosen in zip(parts, choices, strict=True)
    ]
    waiting = sum(number * one for number, one in zip(vector, held, strict=True))
    static = sum(part.static_bytes for part in parts)
    rows = []
    for index, (part, chosen) in enumerate(zip(parts, choices, strict=True)):
        if vector[index]:
            alone = replace(part, static_bytes=0, floor_bytes=0, in_flight=1)
            rows.append(static + waiting - held[index] + peak_bytes(alone, chosen))
    return max(rows)


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_chunks_share_the_budget_of_their_rank(data: st.DataObject) -> None:
    schedule = data.draw(st.sampled_from(SCHEDULES[2:]))
    parts = tuple(replace(data.draw(stages(max_units=2)), floor_bytes=0) for _ in range(4))
    costs = PipelineCosts(parts, (ChunkSeconds(50.0, 100.0),) * 4, 2, 4, schedule, 2)
    points = []
    for rank, vectors in enumerate(live_vectors(schedule, 2, 4, 2)):
        mine = [parts[number] for number in costs.parts_of(rank)]
        of_rank = {}
        for choices in itertools.product(*map(list, map(all_choices, mine))):
            peak = max(peak_of_chunks(mine, choices, vector) for vector in vectors)
            assert rank_peak(costs, rank, choices) == peak
            of_rank[choices] = peak, sum(extra_seconds(*pair) for pair in zip(mine, choices, strict=True))
        points.append(of_rank)
    least = max(min(of_rank.values())[0] for of_rank in points)
    plan = plan_stages(costs, 2 * least + 20)
    for rank, of_rank in zip(plan.ranks, points, strict=True):
        assert rank.peak_bytes == of_rank[rank.choices][0] <= 2 * least + 20
        # found by a search that proves nothing: not below the best, and the best where all fits
        assert rank.extra_seconds >= min(s for peak, s in of_rank.values() if peak <= 2 * least + 20) - 1e-9
    most = max(peak for of_rank in points for peak, _ in of_rank.values())
    for rank, of_rank in zip(plan_stages(costs, most).ranks, points, strict=True):
        assert rank.extra_seconds == pytest.approx(min(seconds for _, seconds in of_rank.values()))


@pytest.mark.parametrize(("schedule", "virtual"), [("interleaved-1f1b", 3), ("zbv-zero-bubble", 2)])
def test_chunks_of_layers_use_the_budget(schedule: str, virtual: int) -> None:
    costs = pipeline(2, 2, schedule, virtual)
    peaks = [rank_peak(costs, 0, [(option,) * 2] * virtual) for option in (FULL, KEEP)]
    budget = peaks[0] + int(0.5 * (peaks[1] - peaks[0]))
    plan = plan_stages(costs, budget)
    fixed = best_global(costs, budget, fixed_settings(costs))
    assert plan.fullest.peak_bytes <= budget
    assert plan.step.seconds < fixed.step.seconds
    with pytest.raises(BudgetError, match=r"stage 0 \(\d chunk-microbatches in flight\)") as caught:
        plan_stages(costs, costs.parts[0].static_bytes)
    assert caught.value.smallest_bytes is not None


def test_megatrons_settings() -> None:
    single, pair = Option(1, 1.0), Option(1, 2.0, num_units=2)
    parts = (StageCosts(((single, pair), (single, pair), (single,))), StageCosts(((single, pair), (single,))))
    costs = PipelineCosts(parts, (ChunkSeconds(1.0, 1.0),) * 2, 2, 2)
    assert in_groups(costs, {1: 0, 2: 1}) == [(1, None, 0), (1, None)]
    assert in_groups(costs, {1: 0}) == everywhere(costs, 0) == [(0, 0, 0), (0, 0)]
    assert first_blocks(costs, 2, 1) == [(1, 1, 0), (1, 1)]
    assert first_blocks(costs, 3, 1) == [(1, 1, 1), (1, 1)]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: replace(pipeline(), num_stages=3), "costs of 4 parts and seconds of 4; 1f1b on 3 ranks has 3"),
        (lambda: replace(pipeline(), schedule="dual"), "unknown schedule 'dual'"),
        (lambda: with_choices(pipeline(), [], "x"), "x: found choices for 0 parts of 4"),
        (lambda: best_global(pipeline(), 0, {}), "no setting to compare with"),
    ],
)
def test_what_makes_no_sense_is_refused(call: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()


def test_budgets_are_ints() -> None:
    with pytest.raises(TypeError, match=r"budget_bytes=1\.5: an int is due"):
        plan_stages(pipeline(), 1.5)  # type: ignore[arg-type]
