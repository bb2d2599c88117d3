"""Path program: the second solver, and the bound from its relaxation."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from stage_costs import between, layers

from lightning_recompute import path_program
from lightning_recompute.cost import StageCosts, extra_seconds, peak_bytes
from lightning_recompute.label_search import Chain, Search, free_of_charge
from lightning_recompute.path_program import RELATIVE_GAP, PathProgram
from lightning_recompute.planner import smallest_peak, solve

STAGES = [layers(10), layers(10, spread=0.3), layers(10, spread=0.3, in_flight=4)]


def program_of(stage: StageCosts, share: float) -> tuple[Chain, PathProgram, int]:
    budget = between(stage, smallest_peak(stage), share)
    chain = Chain(stage)
    return chain, PathProgram(chain, budget - stage.static_bytes), budget


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("share", [0.1, 0.4, 0.8])
def test_it_agrees_with_the_search(stage: StageCosts, share: float) -> None:
    chain, program, budget = program_of(stage, share)
    found = program.solve()
    assert found is not None
    assert found.peak_bytes + stage.static_bytes <= budget
    due = extra_seconds(stage, solve(stage, budget)) * chain.ticks_per_second
    assert found.ticks == pytest.approx(due, rel=RELATIVE_GAP)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("share", [0.1, 0.4, 0.8])
def test_its_prices_bound_closer_than_times_alone(stage: StageCosts, share: float) -> None:
    chain, program, budget = program_of(stage, share)
    due = extra_seconds(stage, solve(stage, budget)) * chain.ticks_per_second
    bound = program.prices().to_end(chain)[0]
    assert free_of_charge(chain).to_end(chain)[0] < bound <= due * (1 + 1e-9)
    assert bound > 0.7 * due


def test_what_does_not_fit_has_no_path() -> None:
    stage = layers(6)
    chain = Chain(stage)
    capacity = peak_bytes(stage, smallest_peak(stage)) - stage.static_bytes
    assert PathProgram(chain, capacity * 9 // 10).solve() is None


def test_times_alone_stand_in_for_prices_that_the_solver_does_not_give() -> None:
    stage = layers(6)
    chain = Chain(stage)
    nothing_fits = PathProgram(chain, 1)
    assert nothing_fits.prices() == free_of_charge(chain)


def test_a_path_over_the_capacity_is_asked_for_again_with_less(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = layers(6)
    chain, program, _ = program_of(stage, 0.4)
    solver = path_program.milp
    rooms = []

    def careless(times: object, **arguments: object) -> object:
        bytes_rows = arguments["constraints"][0]  # type: ignore[index]
        rooms.append(bytes_rows.ub[0])
        if len(rooms) > 1:
            return solver(times, **arguments)
        keep_all = [float(number == 0) for arcs in chain.arcs for number in range(len(arcs))]
        return SimpleNamespace(x=np.array(keep_all))

    monkeypatch.setattr(path_program, "milp", careless)
    found = program.solve()
    assert found is not None
    assert Search(chain, found.peak_bytes, free_of_charge(chain)).run() is not None
    assert rooms == [1.0, pytest.approx(1 - 1e-5)]


def test_a_broken_path_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    _, program, _ = program_of(layers(6), 0.4)
    monkeypatch.setattr(path_program, "milp", lambda times, **arguments: SimpleNamespace(x=np.zeros(len(times))))
    assert program.solve() is None
