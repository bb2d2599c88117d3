"""What a plan does to a model, in words for a log."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from lightning_recompute.blocks import BlockList
from lightning_recompute.division import Division
from lightning_recompute.forecast import Forecast
from lightning_recompute.plan import Action, Full, Keep, RecomputePlan, SaveOps, Selective
from lightning_recompute.stage_forecast import PipelineForecast
from lightning_recompute.units import format_bytes, format_seconds


def summary(forecast: Forecast | PipelineForecast) -> str:
    """What a forecast says, in a line; of the stages of a pipeline in a table."""
    if isinstance(forecast, PipelineForecast):
        return f"Predicted peaks:\n{forecast}"
    (stage,) = forecast.stages
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in stage.breakdown.items() if size)
    budget = "" if forecast.budget_bytes is None else f" of the budget of {format_bytes(forecast.budget_bytes)}"
    return (
        f"Predicted peak: {format_bytes(stage.peak_bytes)}{budget}, at: {stage.moment} ({parts}); recompute takes "
        f"about {format_seconds(stage.extra_seconds)} a batch"
    )


def describe(plan: RecomputePlan, block_lists: Sequence[BlockList]) -> str:
    """What a plan does to a model, in a line for each block list.

    Args:
        plan: The plan.
        block_lists: The model's block lists in forward order; the plan's indices run on through them.

    Returns:
        E.g. `Recompute: net.blocks (8 x Block): blocks 0-3 full, one by one; blocks 4-7 kept`.
    """
    lines = []
    start = 0
    for block_list in block_lists:
        stop = start + len(block_list)
        lines.append(f"{block_list}: {'; '.join(_runs(plan, start, stop))}")
        start = stop
    return "\n  ".join(["Recompute:", *lines]) if len(lines) > 1 else f"Recompute: {lines[0]}"


def describe_stages(plan: RecomputePlan, block_list: BlockList, division: Division) -> str:
    """What a plan does to a model in stages, in a line for each.

    Args:
        plan: The plan, of all blocks.
        block_list: The blocks.
        division: How they are divided.

    Returns:
        After a line with the list, e.g. `stage 0 (rank 0): blocks 0-1 full, one by one; blocks 2-3 kept`.
    """
    lines = [f"Recompute: {block_list}"]
    for chunk, (start, stop) in enumerate(division.bounds):
        rank = division.rank_of(chunk)
        own = division.part_of(plan, rank)
        lines.append(f"stage {chunk} (rank {rank}): {'; '.join(_runs(own, start, stop, first_index=start))}")
    return "\n  ".join(lines)


def _runs(plan: RecomputePlan, start: int, stop: int, first_index: int = 0) -> Iterator[str]:
    """Equal neighbours of a plan as one phrase each, for the blocks of one list or stage."""
    inside = [segment for segment in plan.segments if start <= segment.start < stop]
    for action, equal in itertools.groupby(inside, key=lambda segment: segment.action):
        run = list(equal)
        first, last = run[0].start - start + first_index, run[-1].stop - 1 - start + first_index
        size = max(segment.stop - segment.start for segment in run)
        where = f"blocks {first}-{last}" if last > first else f"block {first}"
        units = "" if not isinstance(action, Full | SaveOps) else f", units of {size}" if size > 1 else ", one by one"
        yield f"{where} {_in_words(action)}{units if last > first else ''}"


def _in_words(action: Action) -> str:
    if isinstance(action, Keep):
        return "kept"
    place = "" if action.inputs == "device" else f", inputs in {action.inputs}"
    if isinstance(action, Selective):
        return f"selective ({', '.join(action.modules)}){place}"
    return f"{'full' if isinstance(action, Full) else 'all but ' + ', '.join(action.ops)}{place}"
