"""Selective recompute against torch's selective contexts, and compiled blocks: time, bytes.

Run: .venv/bin/python bench/selective.py [--rounds 9]; bench/engine.py runs it too.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence

import torch
from common import Attention, alternate, next_token_loss, ratio_of_medians, reference_gpt, report
from rich.table import Table
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lightning_recompute.gpt import GPT
from lightning_recompute.memory import StepMemory, measure_step
from lightning_recompute.plan import Action, Full, RecomputePlan, SaveOps, Segment, Selective
from lightning_recompute.recompute import apply_recompute

aten = torch.ops.aten
SAVED = [
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
]
OURS: dict[str, Action] = {
    "save ops": SaveOps(("matmul", "attention")),
    "norm, act": Selective(("norm", "act")),
    "core_attn": Selective(("core_attn",)),
}
Kind = str


@contextlib.contextmanager
def recomputed(model: GPT, kind: Kind) -> Iterator[None]:
    """The model under one of ours, under torch's selective contexts (`torch`), or as it is (`none`)."""
    if kind in OURS:
        with apply_recompute(model, _everywhere(model, OURS[kind])):
            yield
        return
    if kind == "torch":
        contexts = functools.partial(create_selective_checkpoint_contexts, SAVED)
        for block in model.blocks:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)
    try:
        yield
    finally:
        for block in model.blocks:
            block.__dict__.pop("forward", None)


def _everywhere(model: GPT, action: Action) -> RecomputePlan:
    return RecomputePlan(tuple(Segment(index, index + 1, action) for index in range(len(model.blocks))))


def bytes_of(attention: Attention, kinds: Sequence[Kind]) -> dict[Kind, StepMemory]:
    """Bytes of a step under each kind; the step before it is the one that a unit learns from."""
    model = reference_gpt(attention)
    found = {}
    for kind in kinds:
        with recomputed(model, kind):
            next_token_loss(model).backward()
            found[kind] = measure_step(lambda: next_token_loss(model))
    return found


def times(rounds: int) -> dict[Kind, list[float]]:
    """CPU seconds of a step in alternating rounds. What a kind patches is switched on just before its step."""
    model = reference_gpt("sdpa")
    with contextlib.ExitStack() as stack:
        active = contextlib.ExitStack()
        stack.callback(lambda: active.close())

        def select(kind: Kind) -> None:
            nonlocal active
            active.close()
            active = contextlib.ExitStack()
            active.enter_context(recomputed(model, kind))
            # a unit's first step copies its inputs to learn about the block; later ones are timed
            next_token_loss(model, rows=1, length=16).backward()

        kinds = ("torch", "save ops", "norm, act", "none")
        return alternate({kind: lambda: next_token_loss(model).backward() for kind in kinds}, rounds, before=select)


def compiled(rounds: int) -> tuple[dict[str, StepMemory], dict[str, list[float]]]:
    """Compiled blocks: ours compiles inside the unit; torch's checkpoint is put around the compiled block."""
    models: dict[str, tuple[GPT, Callable[[], object]]] = {}
    for kind in ("torch", "ours"):
        model = reference_gpt("sdpa")
        for block in model.blocks:
            block.compile()
        if kind == "ours":
            handle = apply_recompute(model, _everywhere(model, Full()))
            models[kind] = model, handle.remove
        else:
            for block in model.blocks:
                call = block._compiled_call_impl
                block._compiled_call_impl = functools.partial(checkpoint, call, use_reentrant=False)
            models[kind] = model, lambda: None
    memory = {}
    for kind, (model, _) in models.items():
        next_token_loss(model).backward()
        memory[kind] = measure_step(functools.partial(next_token_loss, model))
    steps = {
        kind: functools.partial(lambda model: next_token_loss(model).backward(), model)
        for kind, (model, _) in models.items()
    }
    seconds = alternate(steps, rounds)
    for _, remove in models.values():
        remove()
    return memory, seconds


def figures(rounds: int, with_compile: bool = True) -> tuple[list[Table], dict[str, float | int]]:
    """Tables and figures for a report."""
    found: dict[str, float | int] = {}
    table = Table("attention", "", "held %", "peak %", title="Selective recompute of the reference GPT, of none")
    for attention, kinds in (
        ("eager", ("none", "core_attn")),
        ("sdpa", ("none", "torch", "save ops", "norm, act", "core_attn")),
    ):
        memory = bytes_of(attention, kinds)  # type: ignore[arg-type]  # a literal of the line above
        for kind, step in memory.items():
            held = 100 * step.held_bytes / memory["none"].held_bytes
            peak = 100 * step.peak_bytes / memory["none"].peak_bytes
            table.add_row(attention, kind, f"{held:.2f}", f"{peak:.2f}")
            if kind != "none":
                name = kind.replace(", ", "_").replace(" ", "_")
                found[f"{name}_held_pct_{attention}"] = round(held, 3)
                found[f"{name}_peak_pct_{attention}"] = round(peak, 3)
    seconds = times(rounds)
    found["selective_time_ratio"] = round(ratio_of_medians(seconds, "norm, act", "torch"), 4)
    found["save_ops_time_ratio"] = round(ratio_of_medians(seconds, "save ops", "torch"), 4)
    if with_compile:
        memory, seconds = compiled(rounds)
        found["compiled_time_ratio"] = round(ratio_of_medians(seconds, "ours", "torch"), 4)
        found["compiled_peak_ratio"] = round(memory["ours"].peak_bytes / memory["torch"].peak_bytes, 4)
    return [table], found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=9, help="alternating rounds")
    parser.add_argument("--no-compile", action="store_true", help="leave the compiled blocks out")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tables, found = figures(options.rounds, not options.no_compile)
    notes = ["'torch' saves the outputs of matrix products and of fused attention by its selective contexts."]
    report("selective", tables, found, notes)


if __name__ == "__main__":
    main()
