"""The engine against bare torch.utils.checkpoint on each block of the same model: time, FLOPs, bytes.

Selective recompute and compiled blocks, against torch's own, are in selective.py, whose figures are added here.

Run: .venv/bin/python bench/engine.py [--rounds 9]
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import statistics
from collections.abc import Callable, Iterator, Sequence

import torch
from common import (
    Attention,
    allocate_gradients,
    alternate,
    count_flops,
    next_token_loss,
    ratio_of_medians,
    reference_gpt,
    report,
)
from rich.table import Table
from selective import figures as selective_figures
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_recompute.gpt import GPT
from lightning_recompute.memory import StepMemory, measure_step
from lightning_recompute.policy import RecomputePolicy
from lightning_recompute.recompute import apply_recompute

ATTENTIONS: tuple[Attention, ...] = ("eager", "sdpa")
KINDS = ("none", "torch", "ours")
CONTROL = "torch again"
"""Torch's checkpoint timed a second time: its ratio to the first is what the machine's noise alone makes."""
SMALL_ROUNDS = 201


@contextlib.contextmanager
def recomputed(model: GPT, kind: str) -> Iterator[GPT]:
    """The model without recompute, with torch's checkpoint on each block, or with ours (full, uniform, 1)."""
    if kind == "ours":
        with apply_recompute(model, RecomputePolicy()):
            yield model
        return
    if kind in ("torch", CONTROL):
        for block in model.blocks:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    try:
        yield model
    finally:
        for block in model.blocks:
            block.__dict__.pop("forward", None)


def measure(model: GPT) -> tuple[StepMemory, tuple[int, int]]:
    """Bytes of a step by the allocator and, in another step, its FLOPs."""
    memory = measure_step(lambda: next_token_loss(model))
    return memory, count_flops(lambda: next_token_loss(model).backward())


def times(model: GPT, loss: Callable[[GPT], Tensor], kinds: Sequence[str], rounds: int) -> dict[str, list[float]]:
    """CPU seconds of a step under each kind, in alternating rounds on one model.

    Kinds are switched between the timed steps by the blocks' forwards alone, so that nothing else differs: two copies
    of a model lie elsewhere in memory, and a recompute applied anew would begin with its first step each time.
    """
    forwards = {}
    with contextlib.ExitStack() as stack:
        for kind in kinds:
            with recomputed(model, kind):
                forwards[kind] = [block.forward for block in model.blocks]

        def select(kind: str) -> None:
            for block, forward in zip(model.blocks, forwards[kind], strict=True):
                block.forward = forward

        for block in model.blocks:
            stack.callback(block.__dict__.pop, "forward", None)
        return alternate({kind: lambda: loss(model).backward() for kind in kinds}, rounds, before=select)


def small_gpt() -> GPT:
    """A model whose blocks take a millisecond, so that the cost of a unit itself shows."""
    torch.manual_seed(0)
    model = GPT(vocab_size=64, num_layers=8, num_heads=4, hidden_size=64, max_length=32, dropout=0.0)
    allocate_gradients(model)
    return model


def time_table(title: str, seconds: dict[str, list[float]]) -> Table:
    table = Table("CPU seconds a step", "median", "fastest", "slowest", "/ torch", title=title)
    for kind, values in seconds.items():
        ratio = ratio_of_medians(seconds, kind, "torch")
        cells = (statistics.median(values), min(values), max(values))
        table.add_row(kind, *(f"{value:.4f}" for value in cells), f"{ratio:.4f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=9, help="alternating rounds of the reference model")
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)

    figures: dict[str, float | int] = {}
    exact = Table("attention", "", "held MB", "peak MB", "held %", "peak %", "FLOPs", "FLOPs, all kernels")
    exact.title = "One step of the reference GPT: bytes by the allocator, FLOPs as ratios"
    for attention in ATTENTIONS:
        model = reference_gpt(attention)
        found = {}
        for kind in KINDS:
            with recomputed(model, kind):
                found[kind] = measure(model)
        none, none_flops = found["none"]
        for kind, (memory, (seen, counted)) in found.items():
            held, peak = 100 * memory.held_bytes / none.held_bytes, 100 * memory.peak_bytes / none.peak_bytes
            exact.add_row(
                attention,
                kind,
                f"{memory.held_bytes / 1e6:.1f}",
                f"{memory.peak_bytes / 1e6:.1f}",
                f"{held:.2f}",
                f"{peak:.2f}",
                f"{seen / none_flops[0]:.4f}",
                f"{counted / none_flops[1]:.4f}",
            )
            if kind == "ours":
                figures[f"flops_ratio_{attention}"] = round(seen / none_flops[0], 4)
                figures[f"flops_ratio_{attention}_all_kernels"] = round(counted / none_flops[1], 4)
                figures[f"held_pct_{attention}"] = round(held, 3)
                figures[f"peak_pct_{attention}"] = round(peak, 3)

    seconds = times(reference_gpt("sdpa"), next_token_loss, ("torch", "ours", CONTROL), rounds)
    figures["step_time_ratio"] = round(ratio_of_medians(seconds, "ours", "torch"), 4)
    figures["control_time_ratio"] = round(ratio_of_medians(seconds, CONTROL, "torch"), 4)
    figures["rounds"] = rounds

    loss = functools.partial(next_token_loss, rows=2, length=32, vocabulary=64)
    small = times(small_gpt(), loss, (*KINDS, CONTROL), SMALL_ROUNDS)
    figures["small_step_time_ratio"] = round(ratio_of_medians(small, "ours", "torch"), 4)
    figures["small_control_time_ratio"] = round(ratio_of_medians(small, CONTROL, "torch"), 4)

    selective_tables, selective = selective_figures(rounds)
    figures.update(selective)

    tables = [
        *selective_tables,
        exact,
        time_table(f"Reference GPT, sdpa, {rounds} alternating rounds", seconds),
        time_table(f"8 small blocks (h 64, s 32, b 2), {SMALL_ROUNDS} alternating rounds", small),
    ]
    notes = [
        "Bytes are beyond parameters and gradients. Seconds are CPU time of this process.",
        f"'{CONTROL}' is the same as 'torch': how far its ratio is from 1 is the noise of this run.",
    ]
    report("engine", tables, figures, notes)


if __name__ == "__main__":
    main()
