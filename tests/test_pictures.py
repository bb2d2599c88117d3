"""The pictures of `plan` and `compare`: their figures are those of the tables, and nothing global is left behind."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import matplotlib
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from lightning_recompute.errors import BudgetError
from lightning_recompute.overview import Overview, Point
from lightning_recompute.pictures import compare_picture, plan_picture, save_picture
from lightning_recompute.step_memory import PARTS, BlockBytes, MomentBytes
from lightning_recompute.trials import Trial
from lightning_recompute.units import MIB


def moment(phase: str, block: str, *sizes: int) -> MomentBytes:
    return MomentBytes(phase, block, dict(zip(PARTS, (size * MIB for size in sizes), strict=True)))


def overview(num_blocks: int = 4) -> Overview:
    steps = [
        moment("forward", "blocks.0", 10, 20, 1, 10, 2, 0, 8),
        moment("forward", "", 10, 20, 1, 10, 6, 9, 0),
        moment("backward", "blocks.0", 10, 20, 1, 3, 2, 9, 16),
        moment("optimizer", "", 10, 20, 1, 10, 0, 0, 4),
    ]
    kept = [replace(each, parts={**each.parts, "blocks": 2 * each.parts["blocks"]}) for each in steps]
    return Overview(
        budget_bytes=64 * MIB,
        device="cpu",
        forecast=None,
        refusal=BudgetError("no plan"),
        points=(
            Point("curve 0", "pareto", 61 * MIB, 0.02),
            Point("curve 1", "pareto", 70 * MIB, 0.0),
            Point("none", "setting", 70 * MIB, 0.0),
            Point("full uniform 1", "setting", 62 * MIB, 0.03),
            Point("planned", "plan", 61 * MIB, 0.02),
        ),
        steps=tuple(steps),
        kept=tuple(kept),
        blocks=tuple(
            BlockBytes(f"blocks.{number}", ("full", "keep", "selective norm")[number % 3], (number + 1) * MIB)
            for number in range(num_blocks)
        ),
        advice=(),
    )


def heights(axes: Axes) -> list[float]:
    return [bar.get_height() for bar in axes.patches if hasattr(bar, "get_height")]


def line(axes: Axes, label: str) -> list[tuple[float, float]]:
    (found,) = (each for each in axes.lines if each.get_label() == label)
    return [(float(x), float(y)) for x, y in zip(found.get_xdata(), found.get_ydata(), strict=True)]  # type: ignore[arg-type]


def test_memory_over_the_step_is_that_of_the_moments() -> None:
    view = overview()
    axes = plan_picture(view).axes[0]
    stacked = [patch for patch in axes.patches if hasattr(patch, "get_data") and patch.get_fill()]
    assert len(stacked) == len(PARTS)
    below = [0.0] * len(view.steps)
    for part, patch in zip(PARTS, stacked, strict=True):
        values, _, baseline = patch.get_data()  # type: ignore[attr-defined]
        assert list(baseline) == below
        below = list(values)
        assert [high - low for high, low in zip(values, baseline, strict=True)] == [
            each.parts[part] / MIB for each in view.steps
        ]
    assert below == [each.num_bytes / MIB for each in view.steps]
    assert line(axes, "peak 61.00 MiB") == [(2, 61)]
    assert line(axes, "budget 64.00 MiB") == [(0, 64), (1, 64)]
    assert "peak is in backward of blocks.0" in axes.get_title(loc="left")
    assert "no plan keeps the budget" in axes.get_title(loc="left")
    assert [label.get_text() for label in axes.get_xticklabels()] == ["forward", "backward", "optimizer"]
    assert axes.get_ylabel() == "memory in MiB"
    # the line without recompute and the budget are inside
    assert axes.get_ylim()[1] > max(70, 64)


def test_bars_are_what_blocks_hold_coloured_by_action() -> None:
    axes = plan_picture(overview()).axes[1]
    assert heights(axes) == [1, 2, 3, 4]
    colours = [bar.get_facecolor() for bar in axes.patches]
    assert colours[0] == colours[3] != colours[1] != colours[2]
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["full", "keep", "selective norm"]
    assert [to_rgba(patch.get_facecolor()) for patch in legend.get_patches()] == colours[:3]


def test_the_curve_is_that_of_the_points() -> None:
    axes = plan_picture(overview()).axes[2]
    assert line(axes, "fastest plan within") == [(61, 20), (70, 0)]
    assert line(axes, "none") == [(70, 0)]
    assert line(axes, "full uniform 1") == [(62, 30)]
    assert line(axes, "planned") == [(61, 20)]
    assert line(axes, "budget") == [(64, 0), (64, 1)]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("peak of a step in MiB", "extra time in ms")
    left, right = axes.get_xlim()
    assert left < 61 < 70 < right


@pytest.mark.parametrize("budget", [1, 10**15])
def test_a_budget_far_away_leaves_room_for_the_plans(budget: int) -> None:
    step, _, curve = plan_picture(replace(overview(), budget_bytes=budget)).axes
    assert step.get_ylabel() == "memory in MiB"
    assert 70 < step.get_ylim()[1] < 2 * 70
    left, right = curve.get_xlim()
    assert 9 < right - left < 2 * 70


TRIALS = [
    Trial("none", 100 * MIB, 101 * MIB, 50.0, 1.0, 1.0, False),
    Trial("full uniform 1", 60 * MIB, 61 * MIB, 40.0, 0.8, 1.25, True),
    Trial("selective core_attn", reason="OutOfMemoryError: " + "much more memory than there is " * 9),
    Trial("planned", predicted_bytes=70 * MIB, reason="not done within 600 s"),
]


def test_settings_side_by_side() -> None:
    figure = compare_picture(TRIALS, 80 * MIB, "budget")
    memory, speed = figure.axes
    assert [bar.get_width() for bar in memory.patches] == [100, 60, 0, 0]
    assert [bar.get_width() for bar in speed.patches] == [1.0, 0.8, 0, 0]
    assert len({bar.get_facecolor() for bar in memory.patches[:2]}) == 2
    predicted = memory.lines[0]
    assert list(predicted.get_xdata()) == [101, 61, 70]
    assert list(predicted.get_ydata()) == [0, 1, 3]
    assert line(memory, "budget 80.00 MiB") == [(80, 0), (80, 1)]
    assert [label.get_text() for label in memory.get_yticklabels()] == [trial.setting for trial in TRIALS]
    first, second, long, short = (text.get_text() for text in speed.texts)
    assert (first, second) == ("1   FLOPs × 1.00", "0.8   FLOPs × 1.25")
    assert short == "not done within 600 s"
    assert long == "OutOfMemoryError: much more memory than there is much more ..."
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    assert words == ["measured, does not fit", "measured, fits", "predicted", "budget 80.00 MiB"]


def test_without_what_is_not_known() -> None:
    trials = [replace(trial, fits=None, relative_speed=None, predicted_bytes=None) for trial in TRIALS]
    memory, speed = compare_picture(trials, None, "device").axes
    assert [bar.get_width() for bar in speed.patches] == [50.0, 40.0, 0, 0]
    assert speed.get_xlabel() == "samples per second"
    assert len(memory.lines) == 1
    # a device far beyond all peaks
    assert len(compare_picture(TRIALS, 10**13, "device").axes[0].lines) == 1
    # and where nothing could be run
    compare_picture([replace(TRIALS[2])], None, "device")


# ---- files


def test_both_files_have_the_words(tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    png, svg = save_picture(plan_picture(overview()), tmp_path / "new" / "plan")
    assert (png.name, svg.name) == ("plan.png", "plan.svg")
    assert png.read_bytes().startswith(b"\x89PNG")
    text = svg.read_text()
    for words in ("Memory over a step", "full uniform 1", "budget 64.00 MiB", "extra time in ms", "held by blocks"):
        assert words in text
    assert {path.name for path in png.parent.iterdir()} == {"plan.png", "plan.svg"}
    assert dict(matplotlib.rcParams) == before


def test_the_same_figures_are_the_same_file(tmp_path: Path) -> None:
    first, second = (save_picture(plan_picture(overview()), tmp_path / name)[1].read_text() for name in "ab")
    assert first == second
    assert not re.search(r"20\d\d-\d\d-\d\dT", first)


def boxes(figure: Figure) -> list[tuple[str, Bbox]]:
    """The words of a figure and where they are."""
    figure.canvas.draw()
    texts: list[Text] = [text for legend in figure.legends for text in legend.get_texts()]
    for axes in figure.axes:
        texts += [axes._left_title, axes.xaxis.label, axes.yaxis.label, *axes.texts]  # type: ignore[attr-defined]
        low, high = axes.get_xlim()
        labels = zip(axes.get_xticks(), axes.get_xticklabels(), strict=True)
        texts += [label for place, label in labels if low <= place <= high]
        legend = axes.get_legend()
        texts += legend.get_texts() if legend is not None else []
    return [(text.get_text(), text.get_window_extent()) for text in texts if text.get_text()]


@pytest.mark.parametrize("num_blocks", [1, 4, 96])
def test_words_are_inside_and_do_not_overlap(num_blocks: int) -> None:
    for figure in (plan_picture(overview(num_blocks)), compare_picture(TRIALS, 80 * MIB, "budget")):
        placed = boxes(figure)
        inside = figure.bbox.padded(1)
        for number, (words, box) in enumerate(placed):
            assert inside.containsx(box.x0), words
            assert inside.containsx(box.x1), words
            assert inside.containsy(box.y0), words
            assert inside.containsy(box.y1), words
            assert [other for other, place in placed[:number] if box.overlaps(place)] == [], words
