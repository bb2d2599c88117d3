"""The picture of a pipeline's plan: its bars are the plan's figures."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgba
from stage_costs import layers

from lightning_recompute.pictures import save_picture
from lightning_recompute.schedule_pictures import WORK_COLOURS, schedule_picture
from lightning_recompute.stage_plans import PipelineCosts, PipelinePlan, everywhere, plan_stages, with_choices
from lightning_recompute.step_time import ChunkSeconds
from lightning_recompute.units import GIB, binary_unit, format_bytes

BUDGET = GIB


def planned(schedule: str = "1f1b", virtual: int = 1) -> tuple[PipelineCosts, PipelinePlan]:
    num_parts = 3 * virtual
    pipeline = PipelineCosts(
        tuple(layers(2) for _ in range(num_parts)),
        (ChunkSeconds(1.0, 2.0),) * num_parts,
        3,
        6,
        schedule,
        virtual,
    )
    return pipeline, plan_stages(pipeline, BUDGET if virtual == 1 else 2 * BUDGET)


def spans(axes: Axes, colour: str) -> list[tuple[float, float]]:
    """Begin and end of all bars of a colour on the clock."""
    found = []
    for collection in axes.collections:
        if isinstance(collection, PolyCollection) and tuple(collection.get_facecolor()[0]) == to_rgba(colour):
            for path in collection.get_paths():
                across = path.vertices[:, 0]
                found.append((float(across.min()), float(across.max())))
    return sorted(found)


def test_the_clock_shows_every_interval() -> None:
    pipeline, plan = planned()
    clock, _ = schedule_picture(pipeline, plan, BUDGET).axes
    for work in ("forward", "recompute", "backward"):
        due = [(one.start, one.stop) for intervals in plan.step.ranks for one in intervals if one.work == work]
        assert due
        assert spans(clock, WORK_COLOURS[work]) == [pytest.approx(one) for one in sorted(due)]
    assert clock.get_xlim() == (0, pytest.approx(plan.step.seconds))
    legend = clock.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["forward", "recompute", "backward"]
    assert [label.get_text() for label in clock.get_yticklabels()] == ["stage 0", "stage 1", "stage 2"]


def test_the_stages_are_side_by_side_under_the_budget() -> None:
    pipeline, plan = planned()
    _, memory = schedule_picture(pipeline, plan, BUDGET).axes
    bars = [(bar.get_y(), bar.get_height()) for bar in memory.patches if hasattr(bar, "get_height")]
    static = [part.static_bytes for part in pipeline.parts]
    unit, size = binary_unit(max(rank.peak_bytes for rank in plan.ranks))
    assert memory.get_ylabel() == f"memory in {unit}"
    assert bars[:3] == [(0, pytest.approx(one / size)) for one in static]
    assert [sum(bar) for bar in bars[3:]] == pytest.approx([rank.peak_bytes / size for rank in plan.ranks])
    (line,) = memory.lines
    assert line.get_ydata() == pytest.approx([BUDGET / size] * 2)
    assert line.get_label() == f"budget {format_bytes(BUDGET)}"
    shares = [f"+{100 * rank.extra_seconds / 3:.1f} %" for rank in plan.ranks]
    due = [f"{rank}\n{3 - rank}\n{share}" for rank, share in enumerate(shares)]
    assert [label.get_text() for label in memory.get_xticklabels()] == due
    assert plan.ranks[0].extra_seconds > 0


def test_what_is_over_the_budget_stands_out() -> None:
    pipeline, _ = planned()
    plan = with_choices(pipeline, everywhere(pipeline, 0), "none")
    budget = plan.ranks[1].peak_bytes
    _, memory = schedule_picture(pipeline, plan, budget).axes
    colours = [bar.get_facecolor() for bar in memory.patches[3:6]]
    assert colours[0] != colours[1] == colours[2]
    legend = memory.get_legend()
    assert legend is not None
    assert any("over the budget" in text.get_text() for text in legend.get_texts())


@pytest.mark.parametrize(("schedule", "virtual"), [("interleaved-1f1b", 2), ("zbv-zero-bubble", 2)])
def test_several_chunks_and_split_backwards(schedule: str, virtual: int) -> None:
    pipeline, plan = planned(schedule, virtual)
    clock, _ = schedule_picture(pipeline, plan).axes
    words = [text.get_text() for text in clock.get_legend().get_texts()]  # type: ignore[union-attr]
    assert "chunks after the first" in words
    assert ("backward, weights" in words) == schedule.startswith("zbv")
    assert clock.get_title(loc="left").startswith(f"{schedule}, 6 microbatches: ")


def test_files_come_out(tmp_path: Path) -> None:
    pipeline, plan = planned()
    png, svg = save_picture(schedule_picture(pipeline, plan, BUDGET), tmp_path / "stages")
    assert png.read_bytes().startswith(b"\x89PNG")
    text = svg.read_text()
    assert "Peak of each stage: per stage" in text
    assert f"budget {format_bytes(BUDGET)}" in text
