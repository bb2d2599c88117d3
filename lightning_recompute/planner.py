"""The fastest choices for a pipeline stage that keep a budget of bytes.

Stages do not depend on each other: each takes its own least extra time within its own budget. Within a stage the
exact search over labels answers nearly always. Where too many paths are nearly alike for it (long chains of units
that differ just a little, with time and bytes in step), an integer program is asked, too: within 0.01 % of the least
time, but for groups of different units near the smallest peak, where the best path found in seconds has to do.
Whoever answers, the peak is counted again in whole bytes: nothing over budget is ever returned.
"""

from __future__ import annotations

from lightning_recompute.cost import PeakRow, StageCosts, extra_seconds, peak_bytes, peak_row
from lightning_recompute.errors import BudgetError
from lightning_recompute.label_search import Arrival, Chain, Search, free_of_charge
from lightning_recompute.path_program import RELATIVE_GAP, PathProgram
from lightning_recompute.units import format_bytes

# labels kept over all units of a chain, in one search after the other
_LABELS = (10_000, 200_000, 2_000_000)
_FEWEST = 100
_WORTHWHILE = 0.2


def solve(stage: StageCosts, budget_bytes: int) -> tuple[int | None, ...]:
    """The choices of least extra time whose peak keeps the budget; among equals those of the smallest peak.

    The same answer each time. Exact but for chains too long and too uneven to search through, where the time is
    as a rule within 0.01 % of the least.

    Args:
        stage: The stage.
        budget_bytes: What the peak may be, statics included.

    Returns:
        For each unit the index of its option, None where a group that began before covers it.

    Raises:
        BudgetError: No choices keep the budget. The message has the smallest peak and what it consists of.
        TypeError: The budget is no int.
    """
    if not isinstance(budget_bytes, int) or isinstance(budget_bytes, bool):
        raise TypeError(f"budget_bytes={budget_bytes!r}: an int is due")
    chain = Chain(stage)
    capacity = budget_bytes - stage.static_bytes
    known = chain.leanest
    if known.peak_bytes > capacity:
        known = _least_peak(chain)
    if max(known.peak_bytes + stage.static_bytes, stage.floor_bytes) > budget_bytes:
        raise BudgetError(_why_none(budget_bytes, peak_row(stage, _choices(stage, known))))
    choices = _choices(stage, _fastest(chain, capacity, known))
    assert peak_bytes(stage, choices) <= budget_bytes, f"{choices} exceed {budget_bytes} bytes"
    return choices


def smallest_peak(stage: StageCosts) -> tuple[int | None, ...]:
    """The choices of the smallest peak, exactly; among equals those of least extra time.

    Args:
        stage: The stage.

    Returns:
        For each unit the index of its option, None where a group that began before covers it.
    """
    least = _least_peak(Chain(stage)).peak_bytes + stage.static_bytes
    # under a floor that no choice changes there may be room for faster ones
    return solve(stage, max(least, stage.floor_bytes))


def pareto(stage: StageCosts, num_points: int = 10) -> list[tuple[int, float, tuple[int | None, ...]]]:
    """The curve from budget to extra time, from the smallest peak to the fastest choices.

    Args:
        stage: The stage.
        num_points: Budgets tried, evenly spaced. Those that bring nothing faster are left out.

    Returns:
        Peaks, extra seconds and choices: peaks go up, seconds down.

    Raises:
        TypeError: `num_points` is no int.
        ValueError: `num_points` is below 2.
    """
    if not isinstance(num_points, int) or isinstance(num_points, bool):
        raise TypeError(f"num_points={num_points!r}: an int is due")
    if num_points < 2:
        raise ValueError(f"num_points={num_points}: at least 2 are due, the smallest peak and the fastest")
    slowest = smallest_peak(stage)
    fastest = solve(stage, max(stage.static_bytes + Chain(stage).most_bytes, stage.floor_bytes))
    least, most = peak_bytes(stage, slowest), peak_bytes(stage, fastest)
    between = [least + (most - least) * number // (num_points - 1) for number in range(1, num_points - 1)]
    curve: list[tuple[int, float, tuple[int | None, ...]]] = []
    for choices in [slowest, *(solve(stage, budget) for budget in between), fastest]:
        point = peak_bytes(stage, choices), extra_seconds(stage, choices), choices
        if not curve or point[1] < curve[-1][1]:
            curve.append(point)
    return curve


def _fastest(chain: Chain, capacity: int, known: Arrival) -> Arrival:
    """The fastest path within the capacity, where one is known."""
    if chain.num_units == 0:
        return known
    program = PathProgram(chain, max(capacity, 1))
    prices = program.prices()
    root = prices.to_end(chain)[0]
    for num_labels in _LABELS:
        search = Search(chain, capacity, prices, known.ticks, max(_FEWEST, num_labels // chain.num_units))
        known = _better(known, search.run())
        if search.best_dropped > known.ticks:
            return known
        if num_labels == _LABELS[0]:
            continue
        if known.ticks - search.best_dropped <= RELATIVE_GAP * abs(known.ticks):
            return known
        # more labels pay where these have raised the bound; else nearly all paths are alike
        if search.best_dropped - root < _WORTHWHILE * (known.ticks - root):
            break
    return _better(known, program.solve())


def _better(known: Arrival, found: Arrival | None) -> Arrival:
    return known if found is None else min(known, found, key=lambda one: (one.ticks, one.peak_bytes))


def _least_peak(chain: Chain) -> Arrival:
    """The path of the smallest peak, whatever its time."""
    if chain.num_waiting == 0 or chain.num_units == 0:
        return chain.leanest
    timeless = chain.without_time()
    found = Search(timeless, chain.leanest.peak_bytes, free_of_charge(timeless)).run()
    assert found is not None, "the leanest path keeps its own peak"
    return chain.with_time(found.arcs)


def _choices(stage: StageCosts, arrival: Arrival) -> tuple[int | None, ...]:
    choices: list[int | None] = [None] * stage.num_units
    for arc in arrival.arcs:
        choices[arc.start] = arc.choice
    return tuple(choices)


def _why_none(budget_bytes: int, row: PeakRow) -> str:
    parts = ", ".join(f"{name} {format_bytes(count)}" for name, count in row.parts().items() if count)
    return (
        f"no choice of recompute keeps {format_bytes(budget_bytes)} ({budget_bytes} bytes): the smallest peak is "
        f"{format_bytes(row.total_bytes)} ({row.total_bytes} bytes), at the {row}: {parts}"
    )
