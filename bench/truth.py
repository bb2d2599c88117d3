"""Predicted against measured peaks: real fits of seven models under explicit plans and under planned budgets.

Of each model and setting (precision, optimizer, accumulation) one batch is profiled; then a Trainer fits it under one
plan after the other while the allocator counts. Budgets go from the smallest peak that a plan can have to what the
step needs without recompute.

Run: .venv/bin/python bench/truth.py [--models gpt-eager llama]
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import statistics
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import lightning.pytorch as pl
import torch
from common import report
from lightning.pytorch.plugins import MixedPrecision
from rich.table import Table
from small_models import MODELS, Batch, Model
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_recompute.memory_report import MemoryReport
from lightning_recompute.plan import RecomputePlan, SaveOps, Segment
from lightning_recompute.planning import forecast_within, pareto_plans, profile_batch
from lightning_recompute.policy import RecomputePolicy
from lightning_recompute.profiling import Profile, everything_kept
from lightning_recompute.stage_options import Prices
from lightning_recompute.strategy import RecomputeStrategy

NUM_STEPS = 3
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Budgets: parts of the way from the smallest peak to that of keeping everything."""

POLICIES = {
    "none": RecomputePolicy(granularity=None),
    "full, uniform 1": RecomputePolicy(),
    "full, uniform 2": RecomputePolicy(num_layers=2),
    "full, block 2": RecomputePolicy(method="block", num_layers=2),
    **{
        f"selective: {', '.join(labels)}": RecomputePolicy(granularity="selective", modules=labels)
        for labels in (["core_attn"], ["attn"], ["mlp"], ["norm", "act"])
    },
}


@dataclass(frozen=True)
class Setting:
    """How a model is trained."""

    precision: str
    optimizer: str
    accumulate: int

    def __str__(self) -> str:
        times = "" if self.accumulate == 1 else f" x {self.accumulate}"
        return f"{self.precision} {self.optimizer}{times}"


SETTINGS = (
    Setting("32-true", "AdamW", 1),
    Setting("32-true", "SGD", 2),
    Setting("bf16-mixed", "SGD", 2),
    Setting("bf16-mixed", "AdamW", 1),
)


class Trained(pl.LightningModule):
    """A model with its loss and optimizer."""

    def __init__(self, model: Model, setting: Setting) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = model.build().train()
        self.loss_of = model.loss
        self.setting = setting

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """The loss."""
        return self.loss_of(self.net, batch)

    def configure_optimizers(self) -> Optimizer:
        """What the setting says."""
        optimizer: type[Optimizer] = getattr(torch.optim, self.setting.optimizer)
        return optimizer(self.parameters(), lr=1e-4)


@dataclass(frozen=True)
class Row:
    """One fit: what was predicted and measured, in bytes; the budget if the plan was made for one."""

    model: str
    setting: Setting
    name: str
    predicted: int
    measured: int
    budget: int | None = None

    @property
    def error_pct(self) -> float:
        """How far the prediction is from the truth."""
        return 100 * (self.predicted - self.measured) / self.measured

    @property
    def over_budget(self) -> bool:
        """Whether the fit needed more than it was allowed."""
        return self.budget is not None and self.measured > self.budget


def profiled(model: Model, setting: Setting) -> Profile:
    module = Trained(model, setting)
    batch = model.batch()

    def step() -> torch.Tensor:
        # Lightning's autocast keeps no cache of cast weights, torch's own does
        mixed = setting.precision == "bf16-mixed"
        with MixedPrecision("bf16-mixed", "cpu").train_step_context() if mixed else contextlib.nullcontext():
            return module.training_step(batch, 0)

    accumulating = setting.accumulate > 1
    optimizers = [module.configure_optimizers()]
    return profile_batch(module, batch, step=step, optimizers=optimizers, accumulating=accumulating)


def measured_peak(model: Model, setting: Setting, plan: RecomputePlan) -> int:
    """The highest peak of a fit under a plan, counted by the allocator."""
    memory = MemoryReport(print_table=False)
    num_batches = NUM_STEPS * setting.accumulate
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            accelerator="cpu",
            strategy=RecomputeStrategy(plan=plan),
            callbacks=[memory],
            precision=setting.precision,
            accumulate_grad_batches=setting.accumulate,
            max_epochs=1,
            limit_train_batches=num_batches,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        loader = DataLoader([model.batch() for _ in range(num_batches)], batch_size=None)
        trainer.fit(Trained(model, setting), loader)
    return max(int(row["peak_bytes"]) for row in memory.rows)


def plans(profile: Profile) -> Iterator[tuple[str, RecomputePlan, int | None]]:
    """Names, plans and budgets to try on a model."""
    chunks = [len(span) for span in profile.spans]
    for name, policy in POLICIES.items():
        with contextlib.suppress(ValueError):  # a label that the model does not have
            plan = policy.plan(chunks)
            profile.peak_bytes(plan)
            yield name, plan, None
    blocks = range(profile.num_blocks)
    yield "save ops", RecomputePlan(tuple(Segment(block, block + 1, SaveOps(("matmul",))) for block in blocks)), None
    most = profile.peak_bytes(everything_kept(profile))
    least = pareto_plans(forecast_within(profile, most, prices=Prices()), 1)[0][0].peak_bytes
    for share in SHARES:
        budget = least + int(share * (most - least))
        yield f"budget {share:.0%}", forecast_within(profile, budget, prices=Prices()).plan, budget


def fits(models: Mapping[str, Model]) -> Iterator[Row]:
    for number, (name, model) in enumerate(models.items()):
        for setting in SETTINGS[number % 2 :: 2]:
            profile = profiled(model, setting)
            for label, plan, budget in plans(profile):
                predicted = profile.peak_bytes(plan)
                yield Row(name, setting, label, predicted, measured_peak(model, setting, plan), budget)


def table_of(rows: list[Row]) -> Table:
    table = Table(
        "model", "setting", "plan", "predicted MB", "measured MB", "error %", "budget MB", title="Peaks of fits"
    )
    for row in rows:
        budget = "" if row.budget is None else f"{row.budget / 1e6:.3f}{' OVER' if row.over_budget else ''}"
        sizes = (f"{size / 1e6:.3f}" for size in (row.predicted, row.measured))
        table.add_row(row.model, str(row.setting), row.name, *sizes, f"{row.error_pct:+.4f}", budget)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    names = parser.parse_args().models
    torch.set_num_threads(1)
    for name in ("lightning.pytorch", "lightning_recompute"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    rows = list(fits({name: MODELS[name] for name in names}))
    errors = [abs(row.error_pct) for row in rows]
    figures = {
        "cases": len(rows),
        "median_error_pct": round(statistics.median(errors), 4),
        "worst_error_pct": round(max(errors), 4),
        "over_budget": sum(row.over_budget for row in rows),
    }
    notes = [
        f"Fits of {NUM_STEPS} optimizer steps. Peaks of the allocator, parameters and optimizer state included.",
        "Budgets are parts of the way from the smallest peak of any plan to that of keeping everything.",
    ]
    report("truth", [table_of(rows)], figures, notes)


if __name__ == "__main__":
    main()
