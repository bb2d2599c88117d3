"""What ranks do for test_piped_budget.py: fits within a budget, with stages that differ in what they hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from distributed import settle_collectives, world_size
from grouped_modules import Momentum, seeded, trainer_of
from stage_profile_checks import quiet
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_recompute.errors import BudgetError
from lightning_recompute.ledger import allocated_bytes
from lightning_recompute.memory import open_meter
from lightning_recompute.memory_report import MemoryReport
from lightning_recompute.strategy import RecomputeStrategy

MIB = 2**20
LENGTH = 64
CASES: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "roomy": {"memory_budget": 64 * MIB},
        "tight": {"memory_budget": 9 * MIB},
        "zbv": {"memory_budget": 14 * MIB, "schedule": "zbv-zero-bubble"},
        "interleaved": {"memory_budget": 9 * MIB, "virtual_pipeline_size": 2},
        "balanced": {"memory_budget": 9 * MIB, "split": "balanced"},
    },
    4: {
        "tp2 sp": {"memory_budget": 9 * MIB, "tensor_parallel_size": 2, "sequence_parallel": True},
        "dp2": {"memory_budget": 9 * MIB},
        "shard, roomy": {"memory_budget": 64 * MIB, "data_parallel": "shard"},
        "shard": {"memory_budget": 6 * MIB, "data_parallel": "shard"},
        "shard, interleaved": {"memory_budget": 6 * MIB, "data_parallel": "shard", "virtual_pipeline_size": 2},
        "shard, zbv": {"memory_budget": 8 * MIB, "data_parallel": "shard", "schedule": "zbv-zero-bubble"},
        "shard, balanced": {"memory_budget": 6 * MIB, "data_parallel": "shard", "split": "balanced"},
        "shard, watched": {"memory_budget": 8 * MIB, "data_parallel": "shard"},
    },
}


class Beside(pl.Callback):
    """Between steps: bytes in memory beside this rank's share of parameters, gradients and optimizer states.

    After the last step of all, when nothing is accumulated.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self.meter = open_meter("cpu")  # counts from here on

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        parameters = list(pl_module.parameters())
        states = [value for state in trainer.optimizers[0].state.values() for value in state.values()]
        gradients = [parameter.grad for parameter in parameters]
        held = [tensor for tensor in (*parameters, *gradients, *states) if isinstance(tensor, torch.Tensor)]
        self.num_bytes = self.meter.live_bytes - allocated_bytes(held)
        self.meter.close()


class Watches(pl.Callback):
    """Sees the last step's gradients once more, which so are there while the next step makes others."""

    def on_before_zero_grad(self, *_: Any) -> None: ...


class Plans(pl.Callback):
    """Keeps the forecast and the plan that were in force."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, RecomputeStrategy)
        forecast, plan = strategy.forecast, strategy.active_plan
        assert forecast is not None
        assert plan is not None
        self.found = {
            "predicted": [stage.peak_bytes for stage in forecast.stages],
            "own": forecast.own.peak_bytes,
            "in flight": [stage.in_flight for stage in forecast.stages],
            "lengths": [stage.blocks[1] - stage.blocks[0] for stage in forecast.stages],
            "extra": [stage.extra_seconds for stage in forecast.stages],
            "plan": repr(plan),
            "predicted backward": forecast.phase_peaks()["backward"],
        }


def run(folder: Path, words: dict[str, Any], *callbacks: pl.Callback, rows: int = 16) -> pl.Trainer:
    """One epoch of four batches; callbacks are made before the module."""
    module: Any = seeded(lambda: Momentum(num_layers=6, hidden_size=64, max_length=LENGTH))
    strategy = RecomputeStrategy(pipeline_parallel_size=2, num_microbatches=8, **words)
    trainer = trainer_of(
        folder,
        strategy,
        devices=world_size(),
        max_epochs=1,
        num_sanity_val_steps=0,
        accumulate_grad_batches=2,
        callbacks=list(callbacks),
    )
    tokens = torch.randint(20, (64, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    data = TensorDataset(tokens)
    sampler: Any = DistributedSampler(data, shuffle=False, **strategy.distributed_sampler_kwargs)
    trainer.fit(module, DataLoader(data, rows // strategy.data_parallel_size, sampler=sampler))
    return trainer


def fit(folder: Path, words: dict[str, Any], *callbacks: pl.Callback) -> dict[str, Any]:
    report, plans, beside = MemoryReport(), Plans(), Beside()
    trainer = run(folder, words, report, plans, beside, *callbacks)
    loss = float(trainer.callback_metrics["train_loss"])
    peaks, backward = (
        [row["peak_bytes"] for row in sorted(report.rows, key=lambda row: row["rank"]) if row["phase"] == phase]
        for phase in ("forward", "backward")
    )
    found = {"measured": peaks, "measured backward": backward, "loss": loss, "beside": beside.num_bytes}
    return plans.found | found


def refusal(folder: Path) -> str:
    try:
        fit(folder, {"memory_budget": 3 * MIB})
    except (BudgetError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def check_all(folder: Path) -> dict[str, Any]:
    settle_collectives()
    if world_size() > 2:  # two look for plans as a user's do
        quiet()
    found: dict[str, Any] = {}
    for name, words in CASES[world_size()].items():
        found[name] = fit(folder, words, *([Watches()] if name.endswith("watched") else []))
    if world_size() == 2:
        found["refused"] = refusal(folder)
    return found
