"""The picture of a pipeline's plan: its step on the clock, and its stages side by side under the budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from lightning_recompute.pictures import PALETTE, new_figure
from lightning_recompute.stage_plans import PipelineCosts, PipelinePlan, RankPlan
from lightning_recompute.step_time import Work
from lightning_recompute.units import binary_unit, format_bytes, format_seconds

WORK_COLOURS: dict[Work, str] = {
    "forward": PALETTE[0],
    "recompute": PALETTE[1],
    "backward": PALETTE[2],
    "weight": PALETTE[3],
}
"""Colours of the timeline: forward, recompute, backward, and the part of a split backward for weights."""

_STATIC, _ABOVE, _OVER = "#bbbbbb", PALETTE[0], PALETTE[1]
_BUDGET: dict[str, Any] = {"color": "black", "linestyle": "--", "linewidth": 1.2}
CATEGORY_COLOURS = {
    "parameters": "#bbbbbb",
    "optimizer": "#999999",
    "other": "#777777",
    "gradients": "#ccbb44",
    "activations": "#4477aa",
    "outside": "#66ccee",
    "running": "#ee6677",
}
"""Colours of what a rank's peak consists of, from the bottom up."""
_WORDS = {
    "optimizer": "optimizer state",
    "other": "batch and other",
    "activations": "activations in flight",
    "outside": "outside of blocks",
    "running": "what runs",
}
_MOST_NUMBERED = 160
_MOST_TICKS = 20
# beyond these, intervals are drawn as an image in SVG files too, which would be very large
_MOST_DRAWN = 3000


def schedule_picture(
    pipeline: PipelineCosts,
    plan: PipelinePlan,
    budget_bytes: int | None = None,
    categories: Sequence[Mapping[str, int]] | None = None,
) -> Figure:
    """Draw a step of a pipeline and the memory of its stages.

    Args:
        pipeline: Costs and schedule.
        plan: How each rank recomputes.
        budget_bytes: What each rank's peak may be; None where there is no budget.
        categories: For each rank what its peak consists of; None: what is there all the time, and the rest.

    Returns:
        The figure; `pictures.save_picture` writes it.
    """
    num_stages = len(plan.ranks)
    figure = new_figure(14, 5 + 0.35 * num_stages)
    clock, memory = figure.subplots(2, 1, height_ratios=(1 + 0.35 * num_stages, 4))
    _draw_clock(clock, pipeline, plan)
    if categories is None:
        _draw_stages(memory, pipeline, plan, budget_bytes)
    else:
        _draw_categories(memory, pipeline, plan, budget_bytes, categories)
    return figure


def _draw_clock(axes: Axes, pipeline: PipelineCosts, plan: PipelinePlan) -> None:
    step = plan.step
    factor, unit = (1.0, "s") if step.seconds >= 1 else (1e3, "ms") if step.seconds >= 1e-3 else (1e6, "us")
    several = len(pipeline.parts) > len(plan.ranks)
    many = sum(map(len, step.ranks)) > _MOST_DRAWN
    there: dict[Work, None] = {}
    for rank, intervals in enumerate(step.ranks):
        for work, colour in WORK_COLOURS.items():
            mine = [one for one in intervals if one.work == work]
            if mine:
                there[work] = None
                spans = [(one.start * factor, (one.stop - one.start) * factor) for one in mine]
                # an edge would hide what is thin
                edge = 0.0 if work == "recompute" or many else 0.3
                axes.broken_barh(
                    spans, (rank - 0.4, 0.8), facecolors=colour, edgecolor="white", linewidth=edge, rasterized=many
                )
        if several:
            # chunks after the first are marked, as they look alike
            later = [(one.start * factor, (one.stop - one.start) * factor) for one in intervals if one.chunk]
            axes.broken_barh(later, (rank + 0.28, 0.12), facecolors="black", alpha=0.45, linewidth=0, rasterized=many)
    if sum(map(len, step.ranks)) <= _MOST_NUMBERED:
        for rank, intervals in enumerate(step.ranks):
            for one in intervals:
                if one.work != "recompute":
                    middle = (one.start + one.stop) / 2 * factor
                    axes.text(middle, rank, str(one.microbatch), ha="center", va="center", color="white", fontsize=7)
    axes.set_title(
        f"{pipeline.schedule}, {pipeline.num_microbatches} microbatches: {format_seconds(step.seconds)} a step, "
        f"ranks wait {100 * step.bubble_fraction:.1f} % of it",
        loc="left",
    )
    axes.set_xlabel(f"time in {unit}")
    axes.set_xlim(0, step.seconds * factor)
    axes.set_yticks(range(len(plan.ranks)), [f"stage {rank}" for rank in range(len(plan.ranks))])
    axes.set_ylim(len(plan.ranks) - 0.5, -0.5)
    words = {"weight": "backward, weights"}
    handles = [Patch(color=WORK_COLOURS[work], label=words.get(work, work)) for work in WORK_COLOURS if work in there]
    if several:
        handles.append(Patch(color="black", alpha=0.45, label="chunks after the first"))
    axes.legend(handles=handles, loc="center left", bbox_to_anchor=(1.005, 0.5), frameon=False)


def _draw_stages(axes: Axes, pipeline: PipelineCosts, plan: PipelinePlan, budget_bytes: int | None) -> None:
    peaks = [rank.peak_bytes for rank in plan.ranks]
    static = [sum(pipeline.parts[part].static_bytes for part in pipeline.parts_of(rank.rank)) for rank in plan.ranks]
    # a peak of the optimizer's step may have less static beside it than there is in backward
    static = [min(pair) for pair in zip(static, peaks, strict=True)]
    _, size = binary_unit(max(peaks))
    places = range(len(peaks))
    fits = [budget_bytes is None or peak <= budget_bytes for peak in peaks]
    axes.bar(places, [one / size for one in static], color=_STATIC, width=0.7)
    axes.bar(
        places,
        [(peak - one) / size for peak, one in zip(peaks, static, strict=True)],
        bottom=[one / size for one in static],
        color=[_ABOVE if fit else _OVER for fit in fits],
        width=0.7,
    )
    handles: list[Any] = [Patch(color=_STATIC, label="parameters, gradients, optimizer")]
    handles += [Patch(color=_ABOVE, label="activations and what runs")] * any(fits)
    handles += [Patch(color=_OVER, label="the same, over the budget")] * (not all(fits))
    _finish_stages(axes, pipeline, plan, budget_bytes, handles)


def _draw_categories(
    axes: Axes,
    pipeline: PipelineCosts,
    plan: PipelinePlan,
    budget_bytes: int | None,
    categories: Sequence[Mapping[str, int]],
) -> None:
    places = range(len(categories))
    _, size = binary_unit(max(rank.peak_bytes for rank in plan.ranks))
    below = [0.0] * len(categories)
    handles: list[Any] = []
    for name, colour in CATEGORY_COLOURS.items():
        parts = [found[name] / size for found in categories]
        if any(parts):
            axes.bar(places, parts, bottom=below, color=colour, width=0.7)
            handles.append(Patch(color=colour, label=_WORDS.get(name, name)))
        below = [low + part for low, part in zip(below, parts, strict=True)]
    _finish_stages(axes, pipeline, plan, budget_bytes, handles[::-1])


def _finish_stages(
    axes: Axes, pipeline: PipelineCosts, plan: PipelinePlan, budget_bytes: int | None, handles: list[Any]
) -> None:
    peaks = [rank.peak_bytes for rank in plan.ranks]
    unit, size = binary_unit(max(peaks))
    places = range(len(peaks))
    top = max(peaks)
    if budget_bytes is not None:
        handles.append(axes.axhline(budget_bytes / size, label=f"budget {format_bytes(budget_bytes)}", **_BUDGET))
        # one far beyond all peaks would leave no room for them
        top = max(top, min(budget_bytes, 2 * top))
    axes.set_title(f"Peak of each stage: {plan.name}", loc="left")
    axes.set_ylabel(f"memory in {unit}")
    axes.set_ylim(0, 1.1 * top / size)
    every = -(-len(peaks) // _MOST_TICKS)
    shown = plan.ranks[::every]
    axes.set_xticks(places[::every], [f"{rank.rank}\n{rank.in_flight}\n{_share(rank)}" for rank in shown])
    of_chunks = " (of chunks)" if len(pipeline.parts) > len(peaks) else ""
    axes.set_xlabel(f"stage, microbatches{of_chunks} in flight, recompute in % of its other time")
    axes.set_xlim(-0.6, len(peaks) - 0.4)
    axes.legend(handles=handles, loc="center left", bbox_to_anchor=(1.005, 0.5), frameon=False)


def _share(rank: RankPlan) -> str:
    kept = rank.busy_seconds - rank.extra_seconds
    return f"+{100 * rank.extra_seconds / kept:.1f} %" if kept > 0 else ""
