"""Budgets on several processes: fits of a GPT and of a Llama, each planned in its first batch and measured after it."""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from distributed import agreed, settle_collectives, world_size
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader

from lightning_recompute import profiling, stage_options
from lightning_recompute.errors import BudgetError
from lightning_recompute.forecast import Forecast
from lightning_recompute.gpt import GPT
from lightning_recompute.memory_report import MemoryReport
from lightning_recompute.plan import Action
from lightning_recompute.plan_search import PlanSearch
from lightning_recompute.policy import RecomputePolicy
from lightning_recompute.strategy import RecomputeStrategy

VOCABULARY, WIDTH, LENGTH, ROWS, NUM_LAYERS, NUM_HEADS = 256, 64, 64, 4, 4, 4
TOLERANCE = 0.005
HUGE = "100GiB"
PAIRS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_parallel_size": 2},
    "tp2 sp": {"tensor_parallel_size": 2, "sequence_parallel": True},
    "dp2 shard": {"data_parallel": "shard"},
    "dp2": {},
}
FOURS: dict[str, dict[str, Any]] = {
    "tp2 x dp2": {"tensor_parallel_size": 2},
    "tp2 sp x dp2 shard": {"tensor_parallel_size": 2, "sequence_parallel": True, "data_parallel": "shard"},
}
FULL, KEPT = RecomputePolicy(), RecomputePolicy(granularity=None)


class Watched(pl.LightningModule):
    """What both models have in common."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def configure_optimizers(self) -> Optimizer:
        return AdamW(self.parameters(), lr=1e-3)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))


class Decoder(Watched, GPT):
    """Our GPT, with dropout."""

    def __init__(self, attention: str) -> None:
        GPT.__init__(
            self,
            vocab_size=VOCABULARY,
            num_layers=NUM_LAYERS,
            num_heads=NUM_HEADS,
            hidden_size=WIDTH,
            max_length=LENGTH,
            dropout=0.1,
            attention=attention,  # type: ignore[arg-type]  # a literal
        )
        self.losses = []


class Llama(Watched):
    """A Hugging Face model, which brings its own tensor-parallel plan."""

    def __init__(self) -> None:
        super().__init__()
        import transformers as hf

        config = hf.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=3 * WIDTH,
            num_hidden_layers=NUM_LAYERS,
            num_attention_heads=NUM_HEADS,
            num_key_value_heads=NUM_HEADS // 2,
            max_position_embeddings=LENGTH,
        )
        self.net = hf.LlamaForCausalLM(config).train()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(input_ids=batch[:, :-1], labels=batch[:, :-1]).loss
        return loss


class Remember(Callback):
    """The forecasts that were in force, in their order."""

    def __init__(self) -> None:
        self.forecasts: list[Forecast] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        forecast = trainer.strategy.forecast  # type: ignore[attr-defined]  # of our strategy
        if forecast is not None and (not self.forecasts or self.forecasts[-1] is not forecast):
            self.forecasts.append(forecast)


class Fit:
    """One fit of a few steps, and what was measured of it."""

    def __init__(
        self, model: str, layout: dict[str, Any], *, accumulate: int = 1, rows: list[int] | None = None, **choice: Any
    ) -> None:
        torch.manual_seed(0)
        module = Llama() if model == "llama" else Decoder(model)
        report, remember = MemoryReport(print_table=False), Remember()
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=world_size(),
            strategy=RecomputeStrategy(**layout, **choice),
            callbacks=[report, remember],
            accumulate_grad_batches=accumulate,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )
        place = int(os.environ["LOCAL_RANK"]) // layout.get("tensor_parallel_size", 1)
        source = torch.Generator().manual_seed(place)
        batches = [
            torch.randint(VOCABULARY, (each, LENGTH + 1), generator=source) for each in rows or [ROWS] * 3 * accumulate
        ]
        trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]  # a list is a data set
        own = [row for row in report.rows if row["rank"] == trainer.global_rank]
        self.peaks = {str(row["phase"]): int(row["peak_bytes"]) for row in own}
        self.predicted = {str(row["phase"]): row["predicted_peak_bytes"] for row in own}
        self.losses = module.losses
        self.forecasts = remember.forecasts
        self.num_reported = len({row["rank"] for row in report.rows})

    @property
    def forecast(self) -> Forecast:
        return self.forecasts[-1]

    @property
    def peak(self) -> int:
        return max(self.peaks.values())


def error_of(predicted: int, fit: Fit) -> float:
    """How far a prediction is from a fit, the worst of all ranks."""
    return agreed(abs(predicted - fit.peak) / fit.peak)


def some_seconds(call: Any, actions: list[Action], num_runs: int = 0) -> list[float]:
    """In place of measured times: each action a little longer than the one before, and on each rank otherwise."""
    return [1 + 0.1 * index + 0.001 * int(os.environ["LOCAL_RANK"]) for index in range(len(actions))]


def one_layout(model: str, layout: dict[str, Any], *, accumulate: int = 1, explicit: bool = True) -> dict[str, Any]:
    """Predictions and truth of a layout, at budgets from tight to everything."""
    kept = KEPT.plan([NUM_LAYERS])
    options: dict[str, Any] = {"accumulate": accumulate}
    before = Fit(model, layout, plan=kept, **options)
    fit = Fit(model, layout, memory_budget=HUGE, **options)
    forecast = fit.forecast
    most = forecast.peak_bytes
    search = PlanSearch(forecast.profile, forecast.candidates)
    least = search.exact(search.leanest())
    found: dict[str, Any] = {
        "errors": {"everything kept": error_of(most, fit)},
        "same losses": fit.losses == before.losses and len(fit.losses) == 3 * accumulate,
        "is kept": forecast.plan == kept,
        "reported": fit.num_reported,
        "predicted": fit.predicted == {**forecast.phase_peaks()},
        "saves": 1 - least / most,
        "largest unit": max(option.num_units for options in search.options.stage.options for option in options),
    }
    if explicit:
        plan = FULL.plan([NUM_LAYERS])
        found["errors"]["full"] = error_of(
            forecast.under(plan, None).peak_bytes, Fit(model, layout, plan=plan, **options)
        )
    budget = int(agreed(least + 0.4 * (most - least)))
    tight = Fit(model, layout, memory_budget=budget, **options)
    predicted = tight.forecast.peak_bytes
    found["errors"]["a budget"] = error_of(predicted, tight)
    found["keeps"] = least <= predicted <= budget and tight.forecast.fits
    found["plan"] = str(tight.forecast.plan)
    return found


def refusal(layout: dict[str, Any]) -> tuple[str, str]:
    """What a budget that cannot be kept is answered with."""
    try:
        Fit("sdpa", layout, memory_budget="300KiB")
    except BudgetError as error:
        return type(error).__name__, str(error)
    return "", ""


def larger_batch_on_one_rank(layout: dict[str, Any]) -> list[int]:
    """Budget plans of a fit whose second batch is larger on the last rank only: the peak of each."""
    is_last = int(os.environ["LOCAL_RANK"]) + 1 == world_size()
    fit = Fit("sdpa", layout, rows=[2, 4 if is_last else 2, 2], memory_budget=HUGE)
    return [forecast.peak_bytes for forecast in fit.forecasts]


def _quiet() -> None:
    world_size()
    settle_collectives()
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning_recompute"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # of what may be tried a part, which takes less time
    profiling.measure_seconds = some_seconds  # type: ignore[assignment]
    stage_options.available_labels = lambda block: ["core_attn", "norm"]  # type: ignore[assignment]
    stage_options._OPERATORS = (("matmul",),)  # type: ignore[assignment]


def check_pairs(folder: Path) -> dict[str, Any]:
    """On two processes."""
    _quiet()
    found: dict[str, Any] = {name: one_layout("eager", layout) for name, layout in PAIRS.items() if name != "dp2"}
    found["dp2"] = one_layout("sdpa", PAIRS["dp2"], explicit=False)
    found["tp2 llama"] = one_layout("llama", PAIRS["tp2 sp"], explicit=False)
    found["dp2 shard x 3"] = one_layout("sdpa", PAIRS["dp2 shard"], accumulate=3, explicit=False)
    found["refusal"] = refusal(PAIRS["tp2"])
    found["larger"] = larger_batch_on_one_rank(PAIRS["dp2 shard"])
    return found


def check_fours(folder: Path) -> dict[str, Any]:
    """On four processes."""
    _quiet()
    return {name: one_layout("sdpa", layout) for name, layout in FOURS.items()}


class Fails(Decoder):
    """One rank cannot run its step."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if os.environ["LOCAL_RANK"] == "1":
            raise RuntimeError("only here")
        return super().training_step(batch, batch_idx)


def fail_on_one_rank(folder: Path) -> str:
    """The error of each rank, when the step of one fails while it is measured."""
    _quiet()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=RecomputeStrategy(tensor_parallel_size=2, memory_budget=HUGE),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    batch = torch.zeros(ROWS, LENGTH + 1, dtype=torch.long)
    try:
        trainer.fit(Fails("sdpa"), DataLoader([batch], batch_size=None))  # type: ignore[arg-type]
    except Exception as error:
        return str(error)
    return ""
