"""All stages of GPT-3 175B, each run in a process of this machine: its schedule for real, its tensors without memory.

96 layers of width 12288 over 8 pipeline stages (1F1B, 9 microbatches of one row of 2048 tokens: more than stages, so
that every rank comes to as many in flight as in a long step) and 8 tensor-parallel ranks with sequence parallelism;
bfloat16, dropout 0.1, eager attention, the attention core recomputed. No optimizer, no data parallelism.

    dry run   peak of a rank of the pipeline that torch.distributed.pipelining runs, on fake tensors, under a process
              group that sends nothing (`lightning_recompute.dry_run`)
    formula   the closed formula that plans are made with: the model measured once, one microbatch, by blocks
    layers    what the stage's layers keep for their microbatches in flight by the paper (arXiv 2205.05198, table 2),
              beside the activations of the dry run, in which there are also embeddings, masks, hidden states on their
              way and what a forward under way needs for a moment

Ranks are shared out to two processes.

Run: .venv/bin/python bench/dry_run.py
"""

from __future__ import annotations

import logging
import multiprocessing
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import torch
from common import report
from lightning.pytorch import Trainer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from lightning_recompute.dry_run import DryRun, dry_run
from lightning_recompute.first_step import ON_ONE_DEVICE
from lightning_recompute.gpt import GPT
from lightning_recompute.paper_formulas import PAPER_MODELS, PaperModel, layer_bytes
from lightning_recompute.pipeline_command import forecast_on_fake_tensors
from lightning_recompute.pipeline_layout import Layout
from lightning_recompute.pipeline_settings import PipelineSettings
from lightning_recompute.policy import RecomputePolicy
from lightning_recompute.units import GIB

MODEL = replace(next(model for model in PAPER_MODELS if model.name == "175B"), chunks=1, num_microbatches=9)
POLICY = RecomputePolicy(granularity="selective")
NUM_WORKERS = 2


def gpt(model: PaperModel) -> GPT:
    return GPT(
        vocab_size=model.vocabulary,
        num_layers=model.num_layers,
        num_heads=model.shape.heads,
        hidden_size=model.shape.hidden,
        max_length=model.shape.length,
        dropout=0.1,
        attention="eager",
        decay_steps=100,
    )


def batch_of(model: PaperModel) -> torch.Tensor:
    return torch.zeros(model.num_microbatches * model.shape.rows, model.shape.length + 1, dtype=torch.long)


def one_rank(model: PaperModel, rank: int) -> DryRun:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="You are trying to `self.log")
    return dry_run(
        lambda: gpt(model),
        batch_of(model),
        pipeline=model.pipeline,
        rank=rank,
        settings=PipelineSettings(virtual=model.chunks, num_microbatches=model.num_microbatches),
        plan=POLICY,
        tensor=model.shape.tensor,
        sequence_parallel=True,
        dtype=torch.bfloat16,
    )


def all_ranks(model: PaperModel) -> list[DryRun]:
    """Every rank's, those of the ends first, which take longest."""
    order = sorted(range(model.pipeline), key=lambda rank: min(rank, model.pipeline - 1 - rank))
    with ProcessPoolExecutor(NUM_WORKERS, multiprocessing.get_context("spawn")) as pool:
        found = list(pool.map(one_rank, [model] * len(order), order))
    return sorted(found, key=lambda run: run.rank)


def closed_formula(model: PaperModel) -> list[int]:
    """The peak of each rank, without the optimizer's state."""
    layout = Layout(
        tensor=model.shape.tensor,
        sequence=True,
        pipeline=model.pipeline,
        virtual=model.chunks,
        num_microbatches=model.num_microbatches,
    )
    trainer = Trainer(accelerator="cpu", precision="bf16-true", **ON_ONE_DEVICE)
    with torch.device("meta"):
        module = gpt(model)
    forecast = forecast_on_fake_tensors(trainer, module, [batch_of(model)], layout=layout, words=POLICY)
    return [rank.peak_bytes - rank.breakdown["optimizer"] for rank in forecast.ranks]


def stages_table(model: PaperModel, runs: list[DryRun], formulas: list[int]) -> tuple[Table, float]:
    """Every rank's bytes; and the largest difference of its peak from the formula, in percent."""
    table = Table("stage", "alive", "dry run", "formula", "off by", "weights", "activations", "layers", "s")
    table.title = f"Peaks of all stages of the {model.name}, GiB: 1F1B, {model.num_microbatches} microbatches"
    table.box = SIMPLE_HEAD
    each = layer_bytes(model.shape, sequence_parallel=True, recompute="selective")
    worst = 0.0
    for run, formula in zip(runs, formulas, strict=True):
        off = 100 * (formula / run.peak_bytes - 1)
        worst = max(worst, abs(off))
        weights = run.parameters_bytes + run.gradients_bytes
        sizes = (weights, run.activations_bytes, each * run.in_flight * len(run.num_forwards))
        table.add_row(
            str(run.rank),
            str(run.in_flight),
            f"{run.peak_bytes / GIB:.3f}",
            f"{formula / GIB:.3f}",
            f"{off:+.2f} %",
            *(f"{size / GIB:.3f}" for size in sizes),
            f"{run.seconds:.0f}",
        )
    return table, worst


def main() -> None:
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    start = time.perf_counter()
    runs = all_ranks(MODEL)
    seconds = time.perf_counter() - start
    formulas = closed_formula(MODEL)
    table, worst = stages_table(MODEL, runs, formulas)
    figures = {
        "worst_difference_pct": round(worst, 3),
        "seconds": round(seconds, 1),
        "seconds_formula": round(time.perf_counter() - start - seconds, 1),
    }
    notes = [
        f"Dry runs of {MODEL.pipeline} ranks in {NUM_WORKERS} processes. Every block's forward ran "
        f"{sorted({count for run in runs for count in run.num_forwards.values()})} times.",
        "Alive: microbatches in flight. Weights: with their gradients. Activations: all that forwards have made, of",
        "which layers keep so much by the paper's formula.",
    ]
    report("dry_run", [table], figures, notes)


if __name__ == "__main__":
    main()
