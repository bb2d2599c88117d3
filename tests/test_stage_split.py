"""Blocks divided over stages: the best of all divisions by brute force, each stage within the budget."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_recompute.cost import Option, in_flight, peak_bytes
from lightning_recompute.errors import BudgetError
from lightning_recompute.stage_plans import plan_stages
from lightning_recompute.stage_split import BlockCosts, EndCosts, ModelCosts, _cuts, _Times, balance, even_bounds
from lightning_recompute.step_time import ChunkSeconds, estimate_seconds

BLOCK = BlockCosts(
    options=(Option(10, 0.0, 2, 12), Option(4, 0.25, 8, 12), Option(1, 1.0, 11, 12)),
    seconds=ChunkSeconds(1.0, 2.0),
    static_bytes=5,
)
HEAVY_HEAD = EndCosts(ChunkSeconds(1.0, 2.0), static_bytes=20, working_bytes=10)


def of_alike(num_blocks: int, head: EndCosts = HEAVY_HEAD) -> ModelCosts:
    return ModelCosts((BLOCK,) * num_blocks, head=head)


def all_bounds(num_blocks: int, num_stages: int) -> list[tuple[int, ...]]:
    cuts = itertools.combinations(range(1, num_blocks), num_stages - 1)
    return [(0, *inner, num_blocks) for inner in cuts]


@st.composite
def models(draw: st.DrawFn) -> ModelCosts:
    sizes = st.integers(0, 20)
    eighths = st.integers(0, 16).map(lambda number: number / 8)
    # recompute may be measured slightly negative
    extra = st.integers(-1, 16).map(lambda number: number / 8)
    seconds = st.builds(ChunkSeconds, eighths, eighths)
    option = st.builds(Option, sizes, extra, sizes, sizes)
    pair = st.builds(Option, sizes, extra, sizes, sizes, st.just(2))

    def block() -> BlockCosts:
        options = (*draw(st.lists(option, min_size=1, max_size=2)), *draw(st.lists(pair, max_size=1)))
        return BlockCosts(options, draw(seconds), draw(sizes), draw(sizes), draw(sizes))

    ends = st.builds(EndCosts, seconds, sizes, sizes)
    return ModelCosts(tuple(block() for _ in range(draw(st.integers(2, 6)))), draw(ends), draw(ends))


@settings(max_examples=60, deadline=None)
@given(models(), st.data())
def test_no_division_has_a_better_estimate(model: ModelCosts, data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, min(4, len(model.blocks))))
    num_microbatches, schedule = data.draw(st.integers(1, 6)), data.draw(st.sampled_from(["1f1b", "gpipe"]))
    budget = data.draw(st.integers(20, 400))
    estimates, steps = {}, {}
    for bounds in all_bounds(len(model.blocks), num_stages):
        pipeline = model.pipeline(bounds, num_microbatches, schedule=schedule)
        try:
            plan = plan_stages(pipeline, budget)
        except BudgetError:
            continue
        busy = [ChunkSeconds(rank.busy_seconds, 0.0) for rank in plan.ranks]
        estimates[bounds], steps[bounds] = estimate_seconds(busy, num_microbatches), plan.step.seconds
    if not estimates:
        with pytest.raises(BudgetError, match="no division of"):
            balance(model, num_stages, num_microbatches, budget, schedule=schedule)
        return
    times = _Times(model, in_flight(schedule, num_stages, num_microbatches), budget)
    tried = [times.estimate(bounds, num_microbatches) for bounds in _cuts(times, num_microbatches)]
    assert min(tried) == pytest.approx(min(estimates.values()))
    found = balance(model, num_stages, num_microbatches, budget, schedule=schedule)
    assert found.plan.fullest.peak_bytes <= budget
    assert found.plan.step.seconds == pytest.approx(steps[found.bounds])
    assert found.estimate_seconds == pytest.approx(estimates[found.bounds])
    # the clock may prefer another one than the estimate, but never one that is slower
    best = [bounds for bounds, one in estimates.items() if one <= min(estimates.values()) * (1 + 1e-12)]
    assert found.plan.step.seconds <= max(steps[bounds] for bounds in best) * (1 + 1e-12)
    even = even_bounds(len(model.blocks), num_stages)
    if even in steps:
        assert found.plan.step.seconds <= steps[even] * (1 + 1e-12)


def test_the_last_stage_has_fewer_blocks_where_the_head_is_heavy() -> None:
    found = balance(of_alike(15), 4, 16, 10**6)
    assert found.counts == (4, 4, 4, 3)
    assert {rank.extra_seconds for rank in found.plan.ranks} == {0.0}
    assert found.plan.step.seconds == found.estimate_seconds == (16 + 3) * 12.0


def test_the_first_stage_has_fewer_blocks_where_it_has_to_recompute() -> None:
    model = ModelCosts((replace(BLOCK, options=BLOCK.options[::2], static_bytes=0),) * 16)
    budget = 53
    even, found = plan_stages(model.pipeline(even_bounds(16, 4), 32), budget), balance(model, 4, 32, budget)
    assert even.ranks[0].extra_seconds > 0
    assert found.counts[0] < found.counts[-1]
    assert found.plan.step.seconds < even.step.seconds
    for rank, part in zip(found.plan.ranks, found.pipeline.parts, strict=True):
        assert peak_bytes(replace(part, in_flight=rank.in_flight), rank.choices[0]) == rank.peak_bytes <= budget


def test_uneven_division_may_be_the_only_one_that_fits() -> None:
    model, alive = of_alike(8), in_flight("1f1b", 4, 8)
    fullest = {
        bounds: max(
            peak_bytes(replace(part, in_flight=number), (2,) * part.num_units)
            for part, number in zip(model.pipeline(bounds, 8).parts, alive, strict=True)
        )
        for bounds in all_bounds(8, 4)
    }
    budget = min(fullest.values())
    assert budget < fullest[even_bounds(8, 4)]
    found = balance(model, 4, 8, budget)
    assert found.plan.fullest.peak_bytes <= budget
    with pytest.raises(BudgetError, match="no division of 8 blocks over 4 stages keeps"):
        balance(model, 4, 8, budget - 1)


def test_groups_stay_on_their_side_of_a_cut() -> None:
    pair = Option(1, 2.0, num_units=2)
    model = ModelCosts((replace(BLOCK, options=(*BLOCK.options, pair)),) * 4)
    pipeline = model.pipeline((0, 1, 4), 2)
    assert [[pair in options for options in part.options] for part in pipeline.parts] == [
        [False],
        [True, True, False],
    ]


def test_ends_count_where_they_are() -> None:
    model = ModelCosts((BLOCK,) * 3, EndCosts(ChunkSeconds(0.5, 0.5), 7), HEAVY_HEAD)
    parts = [model.part(start, start + 1) for start in range(3)]
    assert [costs.static_bytes for costs, _ in parts] == [12, 5, 25]
    assert [costs.head_bytes for costs, _ in parts] == [0, 0, 10]
    assert [(one.forward, one.backward, one.weight) for _, one in parts] == [(1.5, 2.5, 1.25), (1, 2, 1), (2, 4, 2)]
    assert model.part(0, 3)[1].total == 13.0


@settings(max_examples=25, deadline=None)
@given(models())
def test_the_bound_on_times_is_one(model: ModelCosts) -> None:
    times = _Times(model, (1, 1), 10**9)
    for start, stop in itertools.combinations(range(len(model.blocks) + 1), 2):
        assert times.base(start, stop) <= times.of(0, start, stop) + 1e-9
    assert math.isinf(_Times(model, (1, 1), -1).of(0, 0, 1))


def test_many_different_blocks_take_little_time() -> None:
    blocks = tuple(
        replace(BLOCK, seconds=ChunkSeconds(1 + number % 7 / 10, 2 + number % 5 / 10), static_bytes=number % 3)
        for number in range(32)
    )
    found = balance(ModelCosts(blocks, head=HEAVY_HEAD), 4, 16, 300)
    assert sum(found.counts) == 32


def test_parts_for_schedules_of_several_chunks() -> None:
    pipeline = of_alike(8).pipeline(even_bounds(8, 4), 4, schedule="zbv-zero-bubble")
    assert (pipeline.num_stages, pipeline.parts_of(1)) == (2, (1, 2))
    assert even_bounds(7, 3) == (0, 3, 5, 7)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: balance(of_alike(4), 2, 4, 100, schedule="interleaved-1f1b"), "one chunk a rank, found 'interleaved"),
        (lambda: balance(of_alike(2), 3, 4, 100), "2 blocks do not make 3 stages"),
        (lambda: of_alike(4).pipeline((0, 2, 2, 4), 4), r"bounds \[0, 2, 2, 4\] do not divide 4 blocks"),
        (lambda: of_alike(4).pipeline((0, 2, 3), 4), r"bounds \[0, 2, 3\] do not divide 4 blocks"),
        (
            lambda: of_alike(3).pipeline((0, 1, 2, 3), 4, schedule="zbv-zero-bubble"),
            "3 parts do not fall into 2 chunks",
        ),
        (lambda: ModelCosts(()), "a model without blocks"),
    ],
)
def test_what_makes_no_sense_is_refused(call: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()
