"""What `plan` answers for a model over several ranks: tables, files and a picture."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from lightning_recompute.files import csv_text, write_atomically
from lightning_recompute.pictures import save_picture
from lightning_recompute.pipeline_forecast import WORDS, LayoutForecast, RankForecast
from lightning_recompute.pipeline_layout import counts
from lightning_recompute.schedule_pictures import schedule_picture
from lightning_recompute.stage_plans import PER_STAGE
from lightning_recompute.staged_model import CATEGORIES
from lightning_recompute.step_memory import in_words
from lightning_recompute.units import format_bytes, format_seconds
from lightning_recompute.version import __version__

STAGE_COLUMNS = (
    "stage",
    "blocks",
    "in_flight",
    "actions",
    "peak_bytes",
    "moment",
    *(f"{name}_bytes" for name in CATEGORIES),
    "busy_seconds",
    "extra_seconds",
    "spare_seconds",
    "held_bytes",
    "formula_bytes",
)
SCHEDULE_COLUMNS = ("stage", "chunk", "microbatch", "work", "start", "stop")


def stages_table(view: LayoutForecast) -> Table:
    """A row for each rank: its blocks, its peak and what that consists of.

    Args:
        view: What was found.
    """
    budget = "" if view.budget_bytes is None else f", budget {format_bytes(view.budget_bytes)}"
    pipeline = view.staged.pipeline
    table = Table(
        title=f"Stages: {view.staged.layout}, {pipeline.num_microbatches} microbatches, "
        f"{counts(view.staged.division.lengths)}{budget}",
        title_justify="left",
    )
    for column in ("stage", "blocks"):
        table.add_column(column, justify="right", no_wrap=True)
    for column in ("peak", *([] if view.budget_bytes is None else ["of it"]), *CATEGORIES):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("at", overflow="fold")
    for rank in view.ranks:
        over = view.budget_bytes is not None and rank.peak_bytes > view.budget_bytes
        table.add_row(
            str(rank.rank),
            _spans(rank),
            format_bytes(rank.peak_bytes),
            *([] if view.budget_bytes is None else [f"{rank.peak_bytes / view.budget_bytes:.1%}"]),
            *(format_bytes(rank.breakdown[name]) for name in CATEGORIES),
            rank.moment,
            style="red" if over else "bold" if rank is view.worst else None,
        )
    return table


def plans_table(view: LayoutForecast) -> Table:
    """A row for each rank: what it recomputes, and how long a microbatch takes it.

    Args:
        view: What was found.
    """
    table = Table(title=f"Plans: {view.chosen.name}, {view.staged.pipeline.schedule}", title_justify="left")
    for column in ("stage", "in flight"):
        table.add_column(column, justify="right")
    table.add_column("recompute", overflow="fold")
    for column in ("a microbatch", "of that recompute", "spare"):
        table.add_column(column, justify="right", no_wrap=True)
    for rank in view.ranks:
        table.add_row(
            str(rank.rank),
            str(rank.in_flight),
            rank.actions,
            format_seconds(rank.busy_seconds),
            format_seconds(rank.extra_seconds),
            format_seconds(rank.spare_seconds),
            style="bold" if rank is view.slowest else None,
        )
    return table


def formula_table(view: LayoutForecast) -> Table | None:
    """What blocks hold by the profile and by the paper's formulas; None where those do not apply.

    Args:
        view: What was found.
    """
    if not view.by_paper:
        return None
    table = Table(title="Held by blocks in flight: profile (formula of Korthikanti et al. 2022)", title_justify="left")
    table.add_column("stage", justify="right")
    for name in view.by_paper:
        table.add_column(name, justify="right")
    for rank, pairs in enumerate(zip(*view.by_paper.values(), strict=True)):
        cells = [f"{format_bytes(held)} ({format_bytes(formula)})" for held, formula in pairs]
        table.add_row(str(rank), *cells)
    table.add_section()
    worst = [max(held / formula - 1 for held, formula in pairs) for pairs in view.by_paper.values()]
    table.add_row("worst", *(f"{difference:+.3%}" for difference in worst))
    return table


def settings_table(view: LayoutForecast) -> Table:
    """The plan beside settings that are one for all ranks.

    Args:
        view: What was found.
    """
    table = Table(title="One setting for all stages, beside the plan", title_justify="left")
    table.add_column("setting")
    for column in ("largest peak", "on stage", "step", "ranks wait"):
        table.add_column(column, justify="right")
    if view.budget_bytes is not None:
        table.add_column("fits")
    step = view.chosen.step
    rows = [(view.chosen.name, view.worst.peak_bytes, view.worst.rank, step.seconds, step.bubble_fraction)]
    rows += [(one.name, one.peak_bytes, one.rank, one.seconds, one.bubble_fraction) for one in view.beside]
    for name, peak, rank, seconds, bubble in sorted(rows, key=lambda row: (row[1], row[3])):
        fits = [] if view.budget_bytes is None else ["yes" if peak <= view.budget_bytes else "no"]
        style = "bold" if name == view.chosen.name else "cyan" if name == view.best else None
        table.add_row(name, format_bytes(peak), str(rank), format_seconds(seconds), f"{bubble:.1%}", *fits, style=style)
    return table


def remarks(view: LayoutForecast) -> Iterator[str]:
    """What is to be said in words: the worst stage, the step, the best single setting.

    Args:
        view: What was found.
    """
    yield from view.notices
    worst, step = view.worst, view.chosen.step
    share = "" if view.budget_bytes is None else f", {worst.peak_bytes / view.budget_bytes:.1%} of the budget"
    yield f"Worst stage: {worst.rank}, {format_bytes(worst.peak_bytes)}{share}, at: {worst.moment}."
    slowest = view.slowest
    yield (
        f"A step takes {format_seconds(step.seconds)} ({view.device}); ranks wait {step.bubble_fraction:.1%} of it. "
        f"Stage {slowest.rank} sets the pace: {format_seconds(slowest.busy_seconds)} a microbatch. Transfers, "
        "collectives and the optimizer are left out."
    )
    if view.budget_bytes is None:
        return
    best = next((one for one in view.beside if one.name == view.best), None)
    if best is None:
        yield "No single setting keeps the budget on every stage."
    elif view.refusal is None:
        ratio = best.seconds / step.seconds if step.seconds else 1.0
        yield (
            f"The fastest single setting that fits on every stage, {best.name}: {format_seconds(best.seconds)}, "
            f"{ratio:.3f} times as long."
        )


def _spans(rank: RankForecast) -> str:
    return " ".join(f"{start}..{stop - 1}" if stop - start > 1 else str(start) for start, stop in rank.blocks)


# ---- what is written


def save(view: LayoutForecast, folder: str | os.PathLike[str]) -> list[Path]:
    """Write plan, figures and pictures, each file whole or not at all.

    Args:
        view: What was found.
        folder: Where; made if it is not there.

    Returns:
        The files: `plan.yaml` (where a plan keeps the budget, or none was given), `plan.csv` (the plan, the settings
        and the budget), `plan_stages.csv`, `plan_blocks.csv` (what blocks hold), `plan_schedule.csv` (the step on the
        clock), `plan.png` and `plan.svg`.
    """
    target = Path(folder)
    written = []
    if view.refusal is None:
        layout, pipeline = view.staged.layout, view.staged.pipeline
        record = {
            "predicted_peak_bytes": view.worst.peak_bytes,
            "memory_budget_bytes": view.budget_bytes,
            "worst_stage": view.worst.rank,
            "tensor_parallel_size": layout.tensor,
            "sequence_parallel": layout.sequence,
            "pipeline_parallel_size": layout.pipeline,
            "virtual_pipeline_size": layout.settled[1],
            "schedule": pipeline.schedule,
            "num_microbatches": pipeline.num_microbatches,
            "split": list(view.staged.division.lengths),
            "data_parallel": layout.data_parallel,
            "replicas": layout.data,
            "lightning_recompute": __version__,
            "torch": str(torch.__version__),
            "device": view.device,
        }
        written.append(view.plan.save(target / "plan.yaml", record))
    for name, columns, rows in (
        ("plan.csv", ("name", "kind", "peak_bytes", "extra_seconds"), _setting_rows(view)),
        ("plan_stages.csv", STAGE_COLUMNS, _stage_rows(view)),
        ("plan_blocks.csv", ("block", "action", "held_bytes"), _block_rows(view)),
        ("plan_schedule.csv", SCHEDULE_COLUMNS, _schedule_rows(view)),
    ):
        written.append(write_atomically(target / name, csv_text(columns, rows)))
    categories = [rank.breakdown for rank in view.ranks]
    picture = schedule_picture(view.staged.pipeline, view.chosen, view.budget_bytes, categories)
    return [*written, *save_picture(picture, target / "plan")]


def _setting_rows(view: LayoutForecast) -> Iterator[Mapping[str, Any]]:
    """As for one rank; seconds are those by which a step is longer than without recompute."""
    base = next((one.seconds for one in view.beside if one.name == "none"), 0.0)
    for one in view.beside:
        kind = "plan" if one.name == WORDS else "setting"
        yield {"name": one.name, "kind": kind, "peak_bytes": one.peak_bytes, "extra_seconds": one.seconds - base}
    if view.refusal is None:
        name = "planned" if view.chosen.name == PER_STAGE else view.chosen.name
        seconds = view.chosen.step.seconds - base
        yield {"name": name, "kind": "plan", "peak_bytes": view.worst.peak_bytes, "extra_seconds": seconds}
    if view.budget_bytes is not None:
        yield {"name": "budget", "kind": "budget", "peak_bytes": view.budget_bytes}


def _stage_rows(view: LayoutForecast) -> Iterator[Mapping[str, Any]]:
    for rank in view.ranks:
        row = {name: getattr(rank, name) for name in STAGE_COLUMNS if hasattr(rank, name)}
        parts = {f"{name}_bytes": rank.breakdown[name] for name in CATEGORIES}
        yield {**row, **parts, "stage": rank.rank, "blocks": _spans(rank)}


def _block_rows(view: LayoutForecast) -> Iterator[Mapping[str, Any]]:
    names = view.staged.measured.profile.names
    choices = view.staged.pipeline.by_part([rank.choices for rank in view.chosen.ranks])
    for number, part in enumerate(view.staged.parts):
        for index, choice in enumerate(choices[number][1:-1]):
            if choice is not None:
                action, size = part.options[index][choice]
                held = part.costs.options[index + 1][choice].held_bytes
                last = "" if size == 1 else f" .. {names[part.start + index + size - 1]}"
                yield {
                    "block": names[part.start + index] + last,
                    "action": in_words(action),
                    "held_bytes": held,
                }


def _schedule_rows(view: LayoutForecast) -> Iterator[Mapping[str, Any]]:
    for intervals in view.chosen.step.ranks:
        for one in intervals:
            yield {"stage": one.rank, **{name: getattr(one, name) for name in SCHEDULE_COLUMNS[1:]}}


def show(view: LayoutForecast, console: Console) -> None:
    """Print tables and remarks.

    Args:
        view: What was found.
        console: Where to.
    """
    console.print(stages_table(view))
    console.print(plans_table(view))
    formulas = formula_table(view)
    if formulas is not None:
        console.print(formulas)
    console.print(settings_table(view))
    for line in remarks(view):
        console.print(line, highlight=False)
