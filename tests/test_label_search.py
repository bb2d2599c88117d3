"""Label search: arcs, bounds, and what is lost where few labels are kept."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from stage_costs import all_choices, layers, stages

from lightning_recompute.cost import Option, StageCosts, extra_seconds, peak_bytes
from lightning_recompute.label_search import Chain, Search, free_of_charge


def test_options_that_another_beats_are_dropped() -> None:
    best, costlier, larger = Option(10, 1.0, 5), Option(10, 2.0, 5), Option(11, 1.0, 5)
    other_reach = Option(10, 2.0, 4)
    chain = Chain(StageCosts(((larger, best, costlier, other_reach, best),)))
    assert [arc.choice for arc in chain.arcs[0]] == [1, 3]


def test_a_group_is_not_beaten_by_one_unit() -> None:
    group = Option(10, 1.0, 5, num_units=2)
    chain = Chain(StageCosts(((Option(1, 0.0), group), (Option(1, 0.0),))))
    assert [arc.choice for arc in chain.arcs[0]] == [0, 1]


def test_an_arc_reaches_as_far_as_its_highest_row() -> None:
    stage = StageCosts(
        ((Option(10, 1.0, 5, 40, num_units=2),), (Option(1, 0.0),)), gradient_bytes=(100, 7), entry_bytes=(2, 300)
    )
    assert Chain(stage).arcs[0][0].reach_bytes == 42
    stage = StageCosts(
        ((Option(10, 1.0, 30, 40, num_units=2),), (Option(1, 0.0),)), gradient_bytes=(100, 7), entry_bytes=(2, 300)
    )
    assert Chain(stage).arcs[0][0].reach_bytes == 47


@settings(max_examples=60, deadline=None)
@given(stages())
def test_a_path_sums_up_to_the_peak_and_time_of_its_choices(stage: StageCosts) -> None:
    chain = Chain(stage)
    for choices in all_choices(stage):
        by_choice = {(arc.start, arc.choice): arc for arcs in chain.arcs for arc in arcs}
        chosen = [(unit, choice) for unit, choice in enumerate(choices) if choice is not None]
        if not set(chosen) <= set(by_choice):
            continue
        found = chain.arrival([by_choice[one] for one in chosen])
        assert max(found.peak_bytes + stage.static_bytes, stage.floor_bytes) == peak_bytes(stage, choices)
        # eighths of a second are exact in ticks
        assert found.ticks == extra_seconds(stage, choices) * chain.ticks_per_second
        assert found.peak_bytes <= chain.most_bytes


def test_the_leanest_path_of_one_microbatch_has_the_smallest_peak() -> None:
    stage = layers(4)
    due = min(peak_bytes(stage, choices) for choices in all_choices(stage))
    assert Chain(stage).leanest.peak_bytes + stage.static_bytes == due


def test_nothing_is_found_below_the_limit() -> None:
    stage = layers(6)
    chain = Chain(stage)
    # the search is told when a path is known: it looks for none that is slower
    capacity = chain.leanest.peak_bytes
    best = Search(chain, capacity, free_of_charge(chain)).run()
    assert best is not None
    again = Search(chain, capacity, free_of_charge(chain), best.ticks).run()
    assert again == best
    assert Search(chain, capacity, free_of_charge(chain), best.ticks * 0.9).run() is None
    assert Search(chain, capacity - 1, free_of_charge(chain)).run() is None


@pytest.mark.parametrize("width", [1, 2, 3, 8])
def test_a_narrow_search_says_what_it_may_have_lost(width: int) -> None:
    stage = layers(8, spread=0.3, in_flight=2)
    chain = Chain(stage)
    capacity = chain.leanest.peak_bytes * 2
    exact = Search(chain, capacity, free_of_charge(chain))
    best = exact.run()
    assert best is not None
    assert exact.best_dropped == math.inf
    narrow = Search(chain, capacity, free_of_charge(chain), width=width)
    found = narrow.run()
    assert narrow.best_dropped < math.inf
    assert found is None or best.ticks <= found.ticks
    # a path was lost only if it is no faster than it says
    assert (found is not None and found.ticks == best.ticks) or best.ticks >= narrow.best_dropped


def test_a_chain_without_time_finds_the_smallest_peak() -> None:
    stage = layers(5, in_flight=3, spread=0.3)
    chain = Chain(stage)
    timeless = chain.without_time()
    found = Search(timeless, chain.leanest.peak_bytes, free_of_charge(timeless)).run()
    assert found is not None
    assert found.ticks == 0
    due = min(peak_bytes(stage, choices) for choices in all_choices(stage))
    assert found.peak_bytes + stage.static_bytes == due
    assert chain.with_time(found.arcs).peak_bytes == found.peak_bytes
    assert chain.with_time(found.arcs).ticks > 0
