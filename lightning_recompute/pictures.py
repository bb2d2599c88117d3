"""The pictures of `plan` and `compare`, drawn without a display and without matplotlib's global state."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from lightning_recompute.files import write_atomically
from lightning_recompute.overview import Overview, Point
from lightning_recompute.step_memory import PARTS, BlockBytes, MomentBytes
from lightning_recompute.trials import Trial
from lightning_recompute.units import binary_unit, format_bytes

PALETTE = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb", "#ee8866", "#332288", "#999933")
"""Colours that are told apart by most eyes (Paul Tol's bright scheme, and more)."""

_WORDS = {
    "parameters": "parameters",
    "optimizer": "optimizer state",
    "other": "batch and other",
    "gradients": "gradients",
    "outside": "outside of blocks",
    "blocks": "held by blocks",
    "running": "what runs",
}
_COLOURS = dict(zip(PARTS, ("#bbbbbb", "#999999", "#777777", "#ccbb44", "#66ccee", "#4477aa", "#ee6677"), strict=True))
_ACTIONS = {"keep": "#bbbbbb", "full": PALETTE[0]}
_BUDGET: dict[str, Any] = {"color": "black", "linestyle": "--", "linewidth": 1.2}
_MARKERS = "sD^vPX<>hp*"
_LONGEST_REASON = 64


def save_picture(figure: Figure, path: str | os.PathLike[str]) -> list[Path]:
    """Write a figure as PNG and SVG, each whole or not at all.

    Args:
        figure: The figure.
        path: Of the files, without the ending.

    Returns:
        The two paths.
    """
    written = []
    # letters stay letters, and the same figure becomes the same file
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "lightning-recompute"}):
        for kind, metadata in (("png", {}), ("svg", {"Date": None})):
            content = io.BytesIO()
            figure.savefig(content, format=kind, dpi=130, metadata=metadata)
            written.append(write_atomically(f"{os.fspath(path)}.{kind}", content.getvalue()))
    return written


def new_figure(width: float, height: float) -> Figure:
    """An empty figure whose parts keep out of each other's way.

    Args:
        width: In inches.
        height: In inches.
    """
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def plan_picture(view: Overview) -> Figure:
    """Memory over the step, what blocks hold, and the curve from budget to time.

    Args:
        view: What `plan` answers.
    """
    figure = new_figure(13, 9)
    grid = figure.add_gridspec(2, 2, height_ratios=(1.15, 1))
    unit, size = binary_unit(max(point.peak_bytes for point in view.points))
    _draw_step(figure.add_subplot(grid[0, :]), view, unit, size)
    _draw_blocks(figure.add_subplot(grid[1, 0]), view.blocks)
    _draw_curve(figure.add_subplot(grid[1, 1]), view, unit, size)
    return figure


# ---- memory over the step


def _draw_step(axes: Axes, view: Overview, unit: str, size: int) -> None:
    steps = view.steps
    edges = [position - 0.5 for position in range(len(steps) + 1)]
    below = [0.0] * len(steps)
    for part in PARTS:
        above = [low + moment.parts[part] / size for low, moment in zip(below, steps, strict=True)]
        axes.stairs(above, edges, baseline=below, fill=True, color=_COLOURS[part], label=_WORDS[part])
        below = above
    kept = [moment.num_bytes / size for moment in view.kept]
    axes.stairs(kept, edges, baseline=None, color="#aa3377", linewidth=1, label="without recompute")
    axes.axhline(view.budget_bytes / size, label=f"budget {format_bytes(view.budget_bytes)}", **_BUDGET)
    top = max(range(len(steps)), key=lambda position: steps[position].num_bytes)
    peak = steps[top].num_bytes
    where = f" of {steps[top].block}" if steps[top].block else ""
    axes.plot(top, peak / size, marker="v", color="black", linestyle="none", label=f"peak {format_bytes(peak)}")
    under = "the plan" if view.forecast is not None else "the plan of the smallest peak (no plan keeps the budget)"
    axes.set_title(f"Memory over a step under {under}; the peak is in {steps[top].phase}{where}", loc="left")
    axes.set_ylabel(f"memory in {unit}")
    axes.set_xlim(edges[0], edges[-1])
    axes.set_ylim(0, 1.06 * max(*kept, peak / size, min(view.budget_bytes / size, 1.6 * max(kept))))
    _mark_phases(axes, steps)
    axes.legend(loc="center left", bbox_to_anchor=(1.005, 0.5), frameon=False)


def _mark_phases(axes: Axes, steps: Sequence[MomentBytes]) -> None:
    """The phases in place of numbers of moments."""
    ticks = []
    for phase in dict.fromkeys(moment.phase for moment in steps):
        places = [position for position, moment in enumerate(steps) if moment.phase == phase]
        ticks.append((places[0] + places[-1]) / 2)
        axes.axvline(places[0] - 0.5, color="black", linewidth=0.6)
    # the last is one moment wide: its name goes to the left of its end
    axes.set_xticks(ticks, list(dict.fromkeys(moment.phase for moment in steps)))
    axes.get_xticklabels()[-1].set_horizontalalignment("right")
    axes.tick_params(axis="x", length=0)


# ---- what blocks hold


def _draw_blocks(axes: Axes, blocks: Sequence[BlockBytes]) -> None:
    unit, size = binary_unit(max(block.num_bytes for block in blocks))
    actions = list(dict.fromkeys(block.action for block in blocks))
    others = [action for action in actions if action not in _ACTIONS]
    colours = _ACTIONS | {action: PALETTE[(number + 1) % len(PALETTE)] for number, action in enumerate(others)}
    axes.bar(
        range(len(blocks)),
        [block.num_bytes / size for block in blocks],
        color=[colours[block.action] for block in blocks],
        width=0.85,
    )
    axes.set_title("Held for backward, by block", loc="left")
    axes.set_ylabel(f"memory in {unit}")
    axes.set_xlabel("block")
    axes.set_xlim(-0.6, len(blocks) - 0.4)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(0, 1.1 * max(block.num_bytes for block in blocks) / size or 1)
    handles = [Patch(color=colours[action], label=action) for action in actions]
    axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, frameon=False)


# ---- the curve


def _draw_curve(axes: Axes, view: Overview, unit: str, size: int) -> None:
    factor, seconds = _time_unit(view.points)

    def draw(points: Sequence[Point], **options: Any) -> None:
        axes.plot(
            [point.peak_bytes / size for point in points],
            [point.extra_seconds * factor for point in points],
            **options,
        )

    draw(
        view.of_kind("pareto"),
        color="#4477aa",
        marker="o",
        markersize=4,
        drawstyle="steps-post",
        label="fastest plan within",
    )
    for number, point in enumerate(view.of_kind("setting")):
        style = {"marker": _MARKERS[number % len(_MARKERS)], "color": PALETTE[(number + 1) % len(PALETTE)]}
        draw([point], linestyle="none", markersize=9, markerfacecolor="none", label=point.name, zorder=3, **style)
    # under the settings: one of them may be the plan
    draw(view.of_kind("plan"), linestyle="none", marker="*", markersize=14, color="black", label="planned", zorder=2)
    axes.axvline(view.budget_bytes / size, label="budget", **_BUDGET)
    axes.set_title("Extra time for a batch, by peak memory", loc="left")
    axes.set_xlabel(f"peak of a step in {unit}")
    axes.set_ylabel(f"extra time in {seconds}")
    axes.set_ylim(bottom=-0.04 * axes.get_ylim()[1])
    peaks = [point.peak_bytes / size for point in view.points]
    room = 0.06 * (max(peaks) - min(peaks) or max(peaks))
    # a budget far beyond what any plan needs would leave no room for the plans
    axes.set_xlim(min(peaks) - room, max(max(peaks), min(view.budget_bytes / size, 1.5 * max(peaks))) + room)
    axes.grid(alpha=0.3)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3, frameon=False)


def _time_unit(points: Sequence[Point]) -> tuple[float, str]:
    longest = max(point.extra_seconds for point in points)
    return (1.0, "s") if longest >= 1 else (1e3, "ms") if longest >= 1e-3 else (1e6, "us")


# ---- settings side by side


def compare_picture(trials: Sequence[Trial], limit_bytes: int | None, limit: str) -> Figure:
    """Peaks and speeds of settings, a bar each.

    Args:
        trials: From top to bottom; one without a measurement has its reason in place of a speed.
        limit_bytes: What peaks are held against.
        limit: That in a word: budget or device.
    """
    figure = new_figure(12, 1.8 + 0.5 * len(trials))
    memory, speed = figure.subplots(1, 2, sharey=True, width_ratios=(1.5, 1))
    handles = _draw_peaks(memory, trials, limit_bytes, limit)
    _draw_speeds(speed, trials)
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    return figure


def _draw_peaks(axes: Axes, trials: Sequence[Trial], limit_bytes: int | None, limit: str) -> list[Artist]:
    """Draw them, and return what the legend explains."""
    largest = max(trial.peak_bytes or trial.predicted_bytes or 1 for trial in trials)
    unit, size = binary_unit(largest)
    places = range(len(trials))
    colours = {None: "#bbbbbb", True: "#4477aa", False: "#ee6677"}
    axes.barh(
        places,
        [(trial.peak_bytes or 0) / size for trial in trials],
        color=[colours[trial.fits] for trial in trials],
        height=0.6,
    )
    mark: dict[str, Any] = {"marker": "|", "markeredgewidth": 2.5, "color": "black", "linestyle": "none"}
    predicted = [(place, trial.predicted_bytes / size) for place, trial in enumerate(trials) if trial.predicted_bytes]
    axes.plot([peak for _, peak in predicted], [place for place, _ in predicted], markersize=20, **mark)
    axes.set_yticks(places, [trial.setting for trial in trials])
    axes.set_ylim(len(trials) - 0.5, -0.5)
    axes.set_title("Peak memory of a step", loc="left")
    axes.set_xlabel(f"memory in {unit}")
    words_of = {None: "measured", True: "measured, fits", False: "measured, does not fit"}
    there = dict.fromkeys(trial.fits for trial in trials if trial.peak_bytes)
    handles: list[Artist] = [Patch(color=colours[fits], label=words_of[fits]) for fits in there]
    handles.append(Line2D([], [], markersize=12, label="predicted", **mark))
    # a limit far beyond all peaks would leave no room for them
    if limit_bytes is not None and limit_bytes <= 2 * largest:
        handles.append(axes.axvline(limit_bytes / size, label=f"{limit} {format_bytes(limit_bytes)}", **_BUDGET))
        largest = max(largest, limit_bytes)
    axes.set_xlim(0, 1.06 * largest / size)
    return handles


def _draw_speeds(axes: Axes, trials: Sequence[Trial]) -> None:
    relative = any(trial.relative_speed for trial in trials)
    speeds = [(trial.relative_speed if relative else trial.samples_per_second) or 0.0 for trial in trials]
    axes.barh(range(len(trials)), speeds, color="#228833", height=0.6)
    for place, (trial, speed) in enumerate(zip(trials, speeds, strict=True)):
        if speed:
            flops = f"   FLOPs × {trial.flops_ratio:.2f}" if trial.flops_ratio else ""
            axes.text(0.02 * max(speeds), place, f"{speed:.3g}{flops}", va="center", color="white", fontsize=9)
        if trial.reason:
            words = shorten(trial.reason, _LONGEST_REASON, placeholder=" ...")
            axes.text(0.01, place, words, transform=axes.get_yaxis_transform(), va="center", fontsize=8)
    axes.set_title("Speed", loc="left")
    axes.set_xlabel("as a multiple of that without recompute" if relative else "samples per second")
    axes.tick_params(axis="y", length=0)
