"""The engine against bare torch.utils.checkpoint on each block of the same model: time, FLOPs, bytes.

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
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_recompute.gpt import GPT
from lightning_recompute.memory import StepMemory, measure_step
from lightning_recompute.policy import RecomputePolicy
from lightning_recompute.recompute import apply_recompute

ATTENTIONS: tuple[Attention, ...] = ("eager", "sdpa")
KINDS = ("none", "torch", "ours")
SMALL_ROUNDS = 41


@contextlib.contextmanager
def recomputed(model: GPT, kind: str) -> Iterator[GPT]:
    """The model without recompute, with torch's checkpoint on each block, or with ours (full, uniform, 1)."""
    if kind == "ours":
        with apply_recompute(model, RecomputePolicy()):
            yield model
        return
    if kind == "torch":
        for block in model.blocks:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    try:
        yield model
    finally:
        if kind == "torch":
            for block in model.blocks:
                del block.forward


def measure(model: GPT) -> tuple[StepMemory, tuple[int, int]]:
    """Bytes of a step by the allocator and, in another step, its FLOPs."""
    memory = measure_step(lambda: next_token_loss(model))
    return memory, count_flops(lambda: next_token_loss(model).backward())


def times(
    build: Callable[[], GPT], loss: Callable[[GPT], Tensor], kinds: Sequence[str], rounds: int
) -> dict[str, list[float]]:
    """CPU seconds of a step under each kind, in alternating rounds; each kind has its own copy of the model."""
    with contextlib.ExitStack() as stack:
        models = {kind: stack.enter_context(recomputed(build(), kind)) for kind in kinds}
        steps = {kind: functools.partial(_step, model, loss) for kind, model in models.items()}
        return alternate(steps, rounds)


def _step(model: GPT, loss: Callable[[GPT], Tensor]) -> None:
    loss(model).backward()


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

    seconds = times(lambda: reference_gpt("sdpa"), next_token_loss, ("torch", "ours"), rounds)
    figures["step_time_ratio"] = round(ratio_of_medians(seconds, "ours", "torch"), 4)
    figures["rounds"] = rounds

    loss = functools.partial(next_token_loss, rows=2, length=32, vocabulary=64)
    small = times(small_gpt, loss, KINDS, SMALL_ROUNDS)
    figures["small_step_time_ratio"] = round(ratio_of_medians(small, "ours", "torch"), 4)

    tables = [
        exact,
        time_table(f"Reference GPT, sdpa, {rounds} alternating rounds", seconds),
        time_table(f"8 small blocks (h 64, s 32, b 2), {SMALL_ROUNDS} alternating rounds", small),
    ]
    notes = ["Bytes are beyond parameters and gradients. Seconds are of one process on a shared machine."]
    report("engine", tables, figures, notes)


if __name__ == "__main__":
    main()
