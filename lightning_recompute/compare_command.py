"""`lightning-recompute compare --config FILE`: settings side by side on the user's model, each in a process of its own.

First `plan` predicts; then each setting trains for some steps. The processes run the same command line with a config
that is made from the user's (`command_config`).
"""

from __future__ import annotations

import csv
import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from lightning_recompute.command_config import Config, config_of_setting, recompute_entry
from lightning_recompute.files import csv_text, write_atomically
from lightning_recompute.overview import PLANNED
from lightning_recompute.pictures import compare_picture, save_picture
from lightning_recompute.plan_command import CURVE_FILE, PLAN_FILE
from lightning_recompute.printing import wide_console
from lightning_recompute.runs import run_command
from lightning_recompute.settings import setting
from lightning_recompute.trials import Trial, measured_peak, measured_speed, to_table

logger = logging.getLogger(__name__)

FOLDER = "compare"
"""For the reports and logs of the settings, inside of the folder for output."""

WARMUP_STEPS = 2
"""Steps before the speed counts; they also bring the optimizer's state."""

_REPORTS = ("memory.csv", "throughput.csv")


@dataclass(frozen=True)
class _Prediction:
    """What `plan` said before anything ran.

    Attributes:
        peaks: Predicted peaks of settings, by name.
        limit_bytes: The budget, or the device; None where it is not known.
        plan: The file of the plan for the budget, where there is one.
        reason: Why there is none.
    """

    peaks: Mapping[str, int]
    limit_bytes: int | None
    plan: Path | None
    reason: str


def compare(
    config: Config,
    memory_budget: str | int | float | None = None,
    blocks: str | list[str] | None = None,
    settings: list[str] | None = None,
    steps: int = 4,
    timeout: float = 600.0,
    output: str = ".",
    ckpt_path: str | None = None,
    weights_only: bool | None = None,
) -> list[Trial]:
    """Train for some steps under each recompute setting, in fresh processes, and print what each needs and costs.

    Args:
        config: The user's config, as for `fit`.
        memory_budget: What the peak of a step may be: a size (22GiB), a number of bytes, or a fraction of the device
            (0.9); the plan for it is compared, too. Null: the strategy's in the config, else the device is the limit
            and nothing is planned.
        blocks: Where the blocks are: dotted path(s) of block lists or class name(s) of blocks. Null: the strategy's
            in the config, else found.
        settings: Settings to compare, such as [none, selective norm+act, full uniform 1, full block 4, planned].
            Null: none, selective core_attn, full uniform 1, full block with half of the blocks, planned.
        steps: Steps whose speed is measured, after two to warm up.
        timeout: Seconds that a setting may take.
        output: Folder for compare.csv, compare.png and compare.svg; reports and logs are in its folder compare.
        ckpt_path: Not read; here so that the config of a fit can be used.
        weights_only: Not read; here so that the config of a fit can be used.

    Returns:
        What was printed.

    Raises:
        ValueError: A setting is none, `planned` has no budget, or a number is out of range.
    """
    if steps < 1 or timeout <= 0:
        raise ValueError(f"steps={steps}, timeout={timeout:g}: at least 1 step and more than 0 seconds are due")
    if memory_budget is None:
        memory_budget = recompute_entry(config["trainer"]).get("init_args", {}).get("memory_budget")
    names = [name for name in settings or () if name != PLANNED]
    for name in names:
        setting(name)
    if PLANNED in (settings or ()) and memory_budget is None:
        raise ValueError(f"settings: {PLANNED!r} without a memory_budget to plan for: give --memory_budget 22GiB")
    folder = Path(output) / FOLDER
    asked = {"memory_budget": memory_budget if memory_budget is not None else 1.0, "blocks": blocks}
    logger.info("plan")
    prediction = _predict({**config, **asked, "settings": names or None}, folder / "plan", timeout)
    if settings is None:
        names = _usual(prediction.peaks)
        settings = names if memory_budget is None else [*names, PLANNED]
    where = {} if blocks is None else {"blocks": blocks}
    trials = []
    for number, name in enumerate(settings, start=1):
        logger.info("%s (%d of %d)", name, number, len(settings))
        choice = _choice(name, prediction)
        if choice is None:
            trials.append(Trial(name, reason=prediction.reason))
        else:
            trials.append(_try(name, config, {**choice, **where}, folder / _slug(name), steps, timeout, prediction))
    trials = _beside_none(trials)
    limit = "device" if memory_budget is None else "budget"
    paths = _save(trials, prediction.limit_bytes, limit, Path(output))
    console = wide_console()
    console.print(to_table(trials, prediction.limit_bytes, limit))
    console.print(f"Written: {', '.join(map(str, paths))}; reports and logs: {folder}", highlight=False)
    if all(trial.reason for trial in trials):
        raise ValueError(f"no setting could be run: {trials[0].reason}")
    return trials


def _predict(config: Config, folder: Path, timeout: float) -> _Prediction:
    """Let `plan` say what each setting will need, in a process of its own."""
    for name in (CURVE_FILE, PLAN_FILE):
        (folder / name).unlink(missing_ok=True)
    failure = run_command(
        ["plan", "--config", _write({**config, "output": str(folder)}, folder)], folder / "log.txt", seconds=timeout
    )
    reason = "" if failure is None else failure.reason
    if not (folder / CURVE_FILE).exists():
        logger.warning("nothing is predicted: %s (%s)", reason, folder / "log.txt")
        return _Prediction({}, None, None, reason)
    with open(folder / CURVE_FILE, encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    peaks = {row["name"]: int(row["peak_bytes"]) for row in rows if row["kind"] in ("setting", "plan")}
    (limit,) = (int(row["peak_bytes"]) for row in rows if row["kind"] == "budget")
    plan = folder / PLAN_FILE
    return _Prediction(peaks, limit, plan if plan.exists() else None, reason)


def _usual(predicted: Mapping[str, int]) -> list[str]:
    blocks = [name for name in predicted if name.startswith("full block")]
    return ["none", "selective core_attn", "full uniform 1", *blocks[len(blocks) // 2 :][:1]]


def _choice(name: str, prediction: _Prediction) -> dict[str, Any] | None:
    """A setting as arguments of `Recompute`; None where there is no plan."""
    if name == PLANNED:
        return None if prediction.plan is None else {"plan": str(prediction.plan.resolve())}
    words = setting(name).words()
    return {word: list(value) if isinstance(value, tuple) else value for word, value in words.items()}


def _try(
    name: str,
    config: Config,
    choice: Config,
    folder: Path,
    steps: int,
    timeout: float,
    prediction: _Prediction,
) -> Trial:
    """Train under a setting, in a process of its own."""
    for report in _REPORTS:
        (folder / report).unlink(missing_ok=True)
    fit = config_of_setting(
        config, choice, steps=steps + WARMUP_STEPS, warmup_steps=WARMUP_STEPS, folder=str(folder.resolve())
    )
    predicted = prediction.peaks.get(name)
    failure = run_command(["fit", "--config", _write(fit, folder)], folder / "log.txt", seconds=timeout)
    if failure is not None:
        return Trial(name, predicted_bytes=predicted, reason=failure.reason)
    peak = measured_peak(folder / _REPORTS[0])
    speed, flops = measured_speed(folder / _REPORTS[1])
    fits = None if prediction.limit_bytes is None else peak <= prediction.limit_bytes
    return Trial(name, peak, predicted, samples_per_second=speed, flops_ratio=flops, fits=fits)


def _write(config: Config, folder: Path) -> str:
    return str(write_atomically(folder / "settings.json", json.dumps(config, indent=2)))


def _slug(name: str) -> str:
    return re.sub(r"[^\w+.]+", "_", name)


def _beside_none(trials: Sequence[Trial]) -> list[Trial]:
    """The same trials with their speed as a multiple of that without recompute, where that is known."""
    speed = next((trial.samples_per_second for trial in trials if trial.setting == "none"), None)
    return [
        replace(trial, relative_speed=trial.samples_per_second / speed) if trial.samples_per_second and speed else trial
        for trial in trials
    ]


def _save(trials: Sequence[Trial], limit_bytes: int | None, limit: str, output: Path) -> list[Path]:
    columns = [field.name for field in fields(Trial)]
    rows = [asdict(trial) for trial in trials]
    if limit_bytes is not None:
        rows.append({"setting": limit, "peak_bytes": limit_bytes})
    table = write_atomically(output / "compare.csv", csv_text(columns, rows))
    return [table, *save_picture(compare_picture(trials, limit_bytes, limit), output / "compare")]
