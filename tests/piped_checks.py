"""What two or four ranks do for test_piped_strategy.py: every fit in one group of processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from distributed import world_size
from lightning.pytorch.plugins.precision import MixedPrecision
from piped_habits import habits, tuned
from piped_models import models, reports
from piped_modules import (
    Bursts,
    FrozenEnd,
    FrozenFront,
    Logs,
    Net,
    Norms,
    OnPlateau,
    PerStep,
    Stream,
    Weighted,
    fit,
    loader,
)
from piped_refusals import refusals
from torch.utils.data import DataLoader

from lightning_recompute.strategy import RecomputeStrategy


def half_precision() -> dict[str, Any]:
    """Mixed precision with a scaler, which Lightning makes on CUDA only; made anew, as it keeps the scale."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=5)
    return {"precision": None, "plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}


SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "gpipe": {"schedule": "gpipe", "granularity": None},
    "interleaved": {"virtual_pipeline_size": 2},
    "zero bubble": {"virtual_pipeline_size": 2, "schedule": "interleaved-zero-bubble"},
    "zbv": {"schedule": "zbv-zero-bubble"},
    "uneven": {"split": [1, 3], "num_layers": 1, "method": "block"},
}
FITS: dict[str, tuple[Callable[[], Net], dict[str, Any], str]] = {
    # name: the module, the Trainer's options, the schedule
    "plain": (Net, {}, "uneven"),
    "accumulate": (Net, {"accumulate_grad_batches": 4}, "1f1b"),
    "accumulate zbv": (PerStep, {"accumulate_grad_batches": 4, "gradient_clip_val": 0.05}, "zbv"),
    "clip": (PerStep, {"gradient_clip_val": 0.05}, "1f1b"),
    "clip values": (Net, {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}, "interleaved"),
    "plateau": (OnPlateau, {}, "gpipe"),
    "weighted": (Weighted, {}, "1f1b"),
    "frozen front": (FrozenFront, {}, "zero bubble"),
    "frozen end": (FrozenEnd, {"gradient_clip_val": 0.05}, "1f1b"),
    "logs": (Logs, {}, "1f1b"),
    "logs zbv": (Logs, {"accumulate_grad_batches": 2, "log_every_n_steps": 1}, "zbv"),
    "32": (Net, {"precision": "32-true"}, "1f1b"),
    "bf16-mixed": (Net, {"precision": "bf16-mixed"}, "1f1b"),
    "bf16-true": (Net, {"precision": "bf16-true"}, "zbv"),
    "16-mixed": (Net, {"precision": "16-mixed", "gradient_clip_val": 0.05, "accumulate_grad_batches": 2}, "1f1b"),
    "overflow": (Bursts, {"precision": "16-mixed"}, "interleaved"),
    "stream": (Net, {"data": lambda: DataLoader(Stream(), 8), "max_epochs": -1, "max_steps": 8}, "1f1b"),
    "overfit": (Net, {"overfit_batches": 2}, "1f1b"),
    "mid-epoch": (Logs, {"val_check_interval": 2, "max_epochs": 1}, "interleaved"),
    "several": (Net, {"val": lambda: [loader(), loader(9)], "limit_val_batches": 2}, "zbv"),
    "no validation": (Net, {"val": None, "limit_train_batches": 3}, "1f1b"),
    "limit 0": (Net, {"limit_train_batches": 0}, "1f1b"),
    "limit val 0": (Net, {"limit_val_batches": 0, "num_sanity_val_steps": 0, "max_epochs": 1}, "1f1b"),
    "no epoch": (Net, {"max_epochs": 0}, "1f1b"),
    "fast_dev_run": (Net, {"fast_dev_run": 2}, "1f1b"),
    "workers": (Net, {"data": lambda: loader(num_workers=1, shuffle=True), "max_epochs": 1}, "1f1b"),
}


def strategy(name: str, **options: Any) -> RecomputeStrategy:
    return RecomputeStrategy(**{"pipeline_parallel_size": 2, "num_microbatches": 4} | SCHEDULES[name] | options)


def fits(folder: Path) -> dict[str, Any]:
    """Every fit, under the strategy where there are several processes."""
    found = {}
    for name, (make, options, schedule) in FITS.items():
        if options.get("precision") == "16-mixed":
            options = options | half_precision()
        found[name] = fit(make, folder, strategy(schedule) if world_size() > 1 else "auto", **options)
    return found


def norms(folder: Path) -> dict[str, Any]:
    """BatchNorm sees microbatches: in one process batches of two rows, four of them accumulated."""
    if world_size() > 1:
        return fit(Norms, folder, strategy("1f1b"), data=lambda: loader(40), val=None)

    def data() -> DataLoader[Any]:
        return DataLoader(loader(40).dataset, 2)

    return fit(Norms, folder, "auto", data=data, val=None, accumulate_grad_batches=4)


def check_all(folder: Path) -> dict[str, Any]:
    """What two ranks do, or one without this package."""
    found = {"fits": fits(folder), "norms": norms(folder), "habits": habits(folder), "tuned": tuned(folder)}
    found |= {"models": models(folder), "reports": reports(folder)}
    return found | ({"refusals": refusals(folder)} if world_size() > 1 else {})
