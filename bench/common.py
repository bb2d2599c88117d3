"""What the benches share: the reference model, alternating rounds of CPU time, FLOPs, and how a result is reported.

Every bench prints a readable table, writes it with a line on the machine to `bench/results/`, and prints as its last
line one JSON object with its figures. Ratios come from alternating rounds in one process and their medians; absolute
times are shown but not quoted, since machines differ.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from lightning_recompute.gpt import GPT
from lightning_recompute.throughput import own_formulas

Attention = Literal["eager", "sdpa"]

RESULTS = Path(__file__).parent / "results"
ROWS, LENGTH, VOCABULARY = 4, 512, 1024


def reference_gpt(attention: Attention) -> GPT:
    """The reference model of the benches: 8 layers, h 512, 8 heads, s 512, vocabulary 1024, fp32, dropout 0.

    Gradients are allocated, so that a step's bytes are activations and temporary values only.

    Args:
        attention: `eager` or `sdpa`.
    """
    torch.manual_seed(0)
    model = GPT(
        vocab_size=VOCABULARY,
        num_layers=8,
        num_heads=8,
        hidden_size=512,
        max_length=LENGTH,
        dropout=0.0,
        attention=attention,
    )
    allocate_gradients(model)
    return model


def allocate_gradients(model: nn.Module) -> None:
    """Give every parameter a gradient of zeros."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)


def next_token_loss(model: nn.Module, rows: int = ROWS, length: int = LENGTH, vocabulary: int = VOCABULARY) -> Tensor:
    """Cross-entropy of a model on random token ids (rows, length), the same at each call."""
    ids = torch.randint(vocabulary, (rows, length + 1), generator=torch.Generator().manual_seed(1))
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def count_flops(step: Callable[[], object]) -> tuple[int, int]:
    """FLOPs of a step as torch's counter sees them, and with the kernels that it does not know."""
    with (
        FlopCounterMode(display=False) as seen,
        FlopCounterMode(display=False, custom_mapping=own_formulas()) as counted,
    ):
        step()
    return seen.get_total_flops(), counted.get_total_flops()


def alternate(
    steps: Mapping[str, Callable[[], object]], rounds: int, before: Callable[[str], object] = lambda name: None
) -> dict[str, list[float]]:
    """CPU seconds of this process for each step in each round, after one round to warm up.

    The order is turned round from one round to the next, so that a drift of the machine hits all alike.

    Args:
        steps: What to time, by name.
        rounds: Number of rounds.
        before: Called with the name of a step before each, untimed.
    """
    for name, step in steps.items():
        before(name)
        step()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds):
        for name in list(steps) if number % 2 == 0 else reversed(list(steps)):
            before(name)
            start = time.process_time()
            steps[name]()
            seconds[name].append(time.process_time() - start)
    return seconds


def ratio_of_medians(seconds: Mapping[str, Sequence[float]], ours: str, theirs: str) -> float:
    """Median of `ours` over median of `theirs`."""
    return statistics.median(seconds[ours]) / statistics.median(seconds[theirs])


def machine_line() -> str:
    """Processor, cores, threads in use and versions."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = names[0].partition(":")[2].strip() if names else model
    return (
        f"{model}, {os.cpu_count()} cores, {torch.get_num_threads()} thread(s) used, "
        f"python {platform.python_version()}, torch {torch.__version__}, {platform.system()}"
    )


def report(name: str, tables: Sequence[Table], figures: Mapping[str, object], notes: Sequence[str] = ()) -> None:
    """Print tables and notes, write them to `bench/results/<name>.txt`, and end with the figures as one JSON line.

    Args:
        name: Name of the bench.
        tables: Rich tables.
        figures: What the JSON object holds.
        notes: Lines below the tables.
    """
    lines = [machine_line(), *notes]
    for console in (Console(), Console(record=True, width=120, file=open(os.devnull, "w", encoding="utf-8"))):  # noqa: SIM115
        for table in tables:
            console.print(table)
        for line in lines:
            console.print(line, highlight=False)
    line = json.dumps(figures)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.txt").write_text(f"{console.export_text()}{line}\n", encoding="utf-8")
    print(line)
