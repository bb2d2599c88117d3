"""What a short fit under a setting showed, read from its reports."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from lightning_recompute.units import format_bytes


@dataclass(frozen=True)
class Trial:
    """A setting, and what it needed; None is not known.

    Attributes:
        setting: Its name.
        peak_bytes: The highest measured peak of a training step, on the rank that needed most.
        predicted_bytes: The predicted one.
        samples_per_second: Of all processes together.
        relative_speed: Samples per second, as a multiple of those without recompute.
        flops_ratio: FLOPs, as a multiple of those without recompute.
        fits: Whether the measured peak keeps the budget, or the device.
        reason: Why there is no measurement; empty where there is one.
    """

    setting: str
    peak_bytes: int | None = None
    predicted_bytes: int | None = None
    samples_per_second: float | None = None
    relative_speed: float | None = None
    flops_ratio: float | None = None
    fits: bool | None = None
    reason: str = ""


def measured_peak(report: Path) -> int:
    """The highest peak of training in a `memory.csv`.

    Args:
        report: The file.
    """
    with open(report, encoding="utf-8") as file:
        return max(int(row["peak_bytes"]) for row in csv.DictReader(file) if row["phase"] != "validation")


def measured_speed(report: Path) -> tuple[float | None, float | None]:
    """Samples per second in a `throughput.csv`, and FLOPs as a multiple of those without recompute.

    Args:
        report: The file; an epoch without speed does not count.
    """
    with open(report, encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    speeds = [float(row["samples_per_second"]) for row in rows if row["samples_per_second"]]
    ratios = [float(row["hfu"]) / float(row["mfu"]) for row in rows if row["mfu"] and float(row["mfu"])]
    return (statistics.median(speeds) if speeds else None, statistics.median(ratios) if ratios else None)


def to_table(trials: Sequence[Trial], limit_bytes: int | None, limit: str) -> Table:
    """Trials as a rich table, a row each.

    Args:
        trials: In the order of the rows.
        limit_bytes: What a peak is held against.
        limit: That in a word: budget or device.
    """
    against = f", {limit} {format_bytes(limit_bytes)}" if limit_bytes is not None else ""
    table = Table(title=f"Settings side by side{against}", title_justify="left")
    table.add_column("setting")
    for column in ("peak measured", "predicted", "error", "samples/s", "relative speed", "FLOPs"):
        table.add_column(column, justify="right")
    table.add_column("fits")
    if any(trial.reason for trial in trials):
        table.add_column("why not", overflow="fold")
    for trial in trials:
        cells = [
            trial.setting,
            _bytes(trial.peak_bytes),
            _bytes(trial.predicted_bytes),
            _error(trial),
            _number(trial.samples_per_second, "{:.3g}"),
            _number(trial.relative_speed, "× {:.2f}"),
            _number(trial.flops_ratio, "× {:.3f}"),
            {True: "yes", False: "no", None: ""}[trial.fits],
        ]
        table.add_row(*cells, *([trial.reason] if len(table.columns) > len(cells) else []))
    return table


def _bytes(number: int | None) -> str:
    return "" if number is None else format_bytes(number)


def _number(number: float | None, form: str) -> str:
    return "" if number is None else form.format(number)


def _error(trial: Trial) -> str:
    if trial.peak_bytes is None or trial.predicted_bytes is None:
        return ""
    return f"{(trial.predicted_bytes - trial.peak_bytes) / trial.peak_bytes:+.2%}"
