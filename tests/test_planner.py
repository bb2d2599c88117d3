"""Planner on stages that look like transformers, and on those that have no way."""

from __future__ import annotations

from dataclasses import replace

import pytest
from stage_costs import between, layers

from lightning_recompute import planner
from lightning_recompute.cost import Option, StageCosts, extra_seconds, peak_bytes
from lightning_recompute.errors import BudgetError
from lightning_recompute.planner import pareto, smallest_peak, solve

SHARES = (0.02, 0.1, 0.3, 0.6, 0.9)


def test_all_is_kept_where_all_fits() -> None:
    stage = layers(8)
    keep = (0,) * 8
    assert solve(stage, peak_bytes(stage, keep)) == keep


@pytest.mark.parametrize("in_flight", [1, 3])
@pytest.mark.parametrize("spread", [0.0, 0.3])
def test_every_budget_is_kept_and_more_is_never_slower(in_flight: int, spread: float) -> None:
    stage = layers(12, in_flight=in_flight, spread=spread)
    lean = smallest_peak(stage)
    seconds = []
    for share in SHARES:
        budget = between(stage, lean, share)
        choices = solve(stage, budget)
        assert peak_bytes(stage, choices) <= budget
        seconds.append(extra_seconds(stage, choices))
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > seconds[-1]


def test_planning_for_saved_bytes_alone_overshoots() -> None:
    """Why rows, and not a knapsack: what is recomputed lives again during its own backward."""
    stage = layers(6)
    budget = between(stage, smallest_peak(stage), 0.1)
    above_static = StageCosts(
        tuple(
            tuple(replace(option, transient_bytes=0, forward_bytes=0) for option in options)
            for options in stage.options
        )
    )
    knapsack = solve(above_static, budget - stage.static_bytes)
    assert sum(stage.options[unit][index].held_bytes for unit, index in enumerate(knapsack)) <= budget  # type: ignore[index]
    assert peak_bytes(stage, knapsack) > 1.02 * budget
    assert peak_bytes(stage, solve(stage, budget)) <= budget


def test_the_last_layers_are_kept_where_one_microbatch_is_in_flight() -> None:
    # recomputed last, a layer's transient comes on top of all that is held
    keep, full = Option(100, 0.0, 6, 110), Option(2, 1.0, 104, 110)
    stage = StageCosts(((keep, full),) * 6)
    assert solve(stage, 330) == (1, 1, 1, 0, 0, 0)


def test_gradients_that_pile_up_move_the_recompute() -> None:
    # much more lives while early units run backward: there transients have no room, and first is not best
    keep, full = Option(10, 0.0, 1, 10), Option(1, 1.0, 30, 10)
    alike = StageCosts(((keep, full),) * 4)
    piling = replace(alike, gradient_bytes=(60, 40, 20, 0))
    assert solve(alike, 36) == (1, 0, 0, 0)
    budget = peak_bytes(piling, (0, 0, 0, 0))
    assert solve(piling, budget) == (0, 0, 0, 0)
    # the head leaves room for three kept layers; a first or second one recomputed would reach 91 or 81
    assert solve(replace(piling, head_bytes=40), 71) in ((0, 0, 1, 0), (0, 0, 0, 1))


@pytest.mark.parametrize("in_flight", [1, 4])
def test_long_chains_of_equal_layers_are_solved_exactly(in_flight: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner.PathProgram, "solve", lambda program: pytest.fail("the search should be enough"))
    stage = layers(96, in_flight=in_flight)
    budget = between(stage, smallest_peak(stage), 0.2)
    assert peak_bytes(stage, solve(stage, budget)) <= budget


def in_step(num_units: int, in_flight: int) -> StageCosts:
    """Layers of different size whose time and bytes are in step: too many paths are nearly alike for the search."""
    stage = layers(num_units, in_flight=in_flight, spread=0.3, gradient_units=0)
    longest = [options[-1].held_bytes / 2_000_006 for options in stage.options]
    fair = layers(1).options[0]
    return replace(
        stage,
        options=tuple(
            tuple(
                replace(option, extra_seconds=like.extra_seconds * factor)
                for option, like in zip(options, fair, strict=True)
            )
            for options, factor in zip(stage.options, longest, strict=True)
        ),
    )


def test_the_integer_program_helps_where_too_many_paths_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = in_step(24, 1)
    budget = between(stage, smallest_peak(stage), 0.1)
    asked = []
    solve_program = planner.PathProgram.solve

    def watched(program: planner.PathProgram) -> object:
        asked.append(solve_program(program))
        return asked[-1]

    monkeypatch.setattr(planner.PathProgram, "solve", watched)
    # fewer labels than the product has, so that the test stays short
    monkeypatch.setattr(planner, "_LABELS", (24 * 50, 24 * 200))
    choices = solve(stage, budget)
    assert len(asked) == 1
    assert peak_bytes(stage, choices) <= budget
    monkeypatch.setattr(planner.PathProgram, "solve", lambda program: None)
    assert extra_seconds(stage, choices) < extra_seconds(stage, solve(stage, budget))


def test_the_curve_of_a_stage() -> None:
    stage = layers(12, in_flight=2)
    curve = pareto(stage, 6)
    assert len(curve) == 6
    assert curve[0][2] == smallest_peak(stage)
    assert curve[-1][1:] == (0.0, (0,) * 12)


def test_too_small_a_budget_says_what_the_smallest_peak_consists_of() -> None:
    stage = StageCosts(((Option(100, 0.0), Option(10, 1.0, 90)),), static_bytes=2048, gradient_bytes=50, in_flight=3)
    assert peak_bytes(stage, smallest_peak(stage)) == 2048 + 170
    with pytest.raises(BudgetError) as caught:
        solve(stage, 2000)
    assert str(caught.value) == (
        "no choice of recompute keeps 1.95 KiB (2000 bytes): the smallest peak is 2.17 KiB (2218 bytes), at the "
        "backward of unit 0: static 2.00 KiB, waiting 20 B, held 10 B, working 90 B, besides 50 B"
    )


def test_a_floor_that_no_choice_changes_is_named() -> None:
    stage = StageCosts(((Option(100, 0.0), Option(10, 1.0)),), floor_bytes=5000)
    assert smallest_peak(stage) == (0,)
    with pytest.raises(BudgetError, match=r"4999 bytes.*at the floor: working 4\.88 KiB"):
        solve(stage, 4999)


def test_a_head_that_sets_the_peak_is_named() -> None:
    stage = StageCosts(((Option(100, 0.0), Option(10, 1.0)),), head_bytes=10**6)
    with pytest.raises(BudgetError, match="at the head"):
        solve(stage, 10**6)


def test_a_stage_without_units() -> None:
    stage = StageCosts((), static_bytes=10, head_bytes=5, in_flight=2)
    assert solve(stage, 15) == smallest_peak(stage) == ()
    assert pareto(stage) == [(15, 0.0, ())]
    with pytest.raises(BudgetError, match="at the head"):
        solve(stage, 14)


@pytest.mark.parametrize("seconds", [0.0, -1e-3, 1e-200, 1e300])
def test_extreme_times(seconds: float) -> None:
    stage = StageCosts(((Option(10, 0.0), Option(1, seconds)),) * 3)
    assert peak_bytes(stage, solve(stage, 25)) <= 25
    assert solve(stage, 100) == ((1, 1, 1) if seconds <= 0 else (0, 0, 0))


def test_times_that_no_clock_shows_count_as_none() -> None:
    # of equals the smaller peak
    assert solve(StageCosts(((Option(10, 0.0), Option(1, 5e-324)),)), 100) == (1,)


def test_exabytes_are_refused() -> None:
    with pytest.raises(ValueError, match="no machine has that many"):
        solve(StageCosts(((Option(2**61, 0.0),),), in_flight=3), 2**62)


@pytest.mark.parametrize("budget", [1.5, "22GiB", True, None])
def test_budgets_are_ints(budget: object) -> None:
    with pytest.raises(TypeError, match=r"budget_bytes=.*an int is due"):
        solve(layers(1), budget)  # type: ignore[arg-type]


def test_a_curve_has_two_ends() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        pareto(layers(1), 1)
    with pytest.raises(TypeError, match="an int is due"):
        pareto(layers(1), 2.0)  # type: ignore[arg-type]
