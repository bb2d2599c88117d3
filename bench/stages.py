"""Plans for every stage against one setting for all: a step of GPT-3 175B over 8 and 16 stages, on the clock.

Where the coefficients come from (arXiv 2205.05198 is Korthikanti et al. 2022; b 1, s 2048, h 12288, a 96, t 8, with
sequence parallelism; all are of one of the t ranks, in units of sbh/t where they are bytes):
    held bytes   section 4.1 of the paper, part by part (`paper_formulas`): 34 + 5as/h is kept without recompute; a
                 label saves the parts that its modules would keep.
    seconds      matrices: their FLOPs at 65 % of an A100's 312 TFLOP/s. What is bound by memory (softmax, masks,
                 dropout, norms, the activation): its bytes read and written at 2.0 TB/s (A100 80 GB: 2.04). Backward
                 takes twice the forward. Communication is left out: full recompute would take a little longer still.
                 For a layer of the paper's 22B this gives 1.1 ms for the attention core; measured there: 1.3.
    transient    a replay makes again what a label saves; beside it 8 for gradients of the widest tensor.
    static       18 bytes a parameter (weights and gradients in 16 bit, AdamW in 32), an embedding on the first and a
                 head on the last stage.
The budget of every rank is what statics of the first stage take, and 25 % of what else it needs at its peak where
everything is kept, blocks divided by count. 1F1B, 64 microbatches (the paper's batch of 64).

Single settings, by who has words for them, each the fastest that fits on every rank:
    paper      none; full uniform and full block with every num_layers; selective of the attention core
    Megatron   besides, selective of any of its modules for dense layers: core_attn, mlp, layernorm
    ours       besides, `attn` and `act` (what no Megatron setting has; the strongest opponent of our own plans)
`ratio_8` and `ratio_16` compare with Megatron's.

Run: .venv/bin/python bench/stages.py
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from common import report
from rich.box import SIMPLE_HEAD
from rich.table import Table

from lightning_recompute.cost import Option
from lightning_recompute.paper_formulas import (
    ACTIVATION_INPUT,
    ACTIVATION_OUTPUT,
    OUTSIDE_OF_CORE,
    PAPER_MODELS,
    PROJECTION_INPUT,
    QKV_INPUT,
    QUERIES_AND_KEYS,
    VALUES,
)
from lightning_recompute.stage_plans import (
    PipelineCosts,
    PipelinePlan,
    best_global,
    everywhere,
    first_blocks,
    in_groups,
    plan_stages,
    rank_peak,
)
from lightning_recompute.stage_split import BlockCosts, EndCosts, ModelCosts, balance, even_bounds
from lightning_recompute.step_time import ChunkSeconds
from lightning_recompute.units import GIB, format_bytes

SHARE = 0.25
OTHER_SHARES = (0.1, 0.15, 0.2, 0.4, 0.6)
NUM_MICROBATCHES = 64
FLOPS_PER_SECOND = 0.65 * 312e12
BYTES_PER_SECOND = 2.0e12
BYTES_A_PARAMETER = 18
NUM_STAGES = (8, 16)

MODEL = next(model for model in PAPER_MODELS if model.name == "175B")
SHAPE = MODEL.shape
UNIT = SHAPE.sbh // SHAPE.tensor
CORE = int(SHAPE.scores)
GRADIENTS = 8


def matrix_seconds(flops: float) -> float:
    return flops / SHAPE.tensor / FLOPS_PER_SECOND


def memory_seconds(units: float) -> float:
    return units * UNIT / BYTES_PER_SECOND


# softmax over 2as²b: scores written and read, probabilities written and read, dropout's mask and output written, read
SOFTMAX_TRAFFIC = 13 / 5 * CORE
NORM_TRAFFIC, DROPOUT_TRAFFIC, ACTIVATION_TRAFFIC = 2 * 4, 2 * 7, 16
SECONDS = {
    "core_attn": matrix_seconds(SHAPE.core_flops) + memory_seconds(SOFTMAX_TRAFFIC),
    "act": memory_seconds(ACTIVATION_TRAFFIC),
    "norm": memory_seconds(NORM_TRAFFIC),
    "mlp": matrix_seconds(SHAPE.linear_flops * 16 / 24) + memory_seconds(ACTIVATION_TRAFFIC),
}
SECONDS["attn"] = matrix_seconds(SHAPE.linear_flops * 8 / 24) + SECONDS["core_attn"]
FORWARD = SECONDS["attn"] + SECONDS["mlp"] + SECONDS["norm"] + memory_seconds(DROPOUT_TRAFFIC)
SAVES = {
    "core_attn": CORE,
    "act": ACTIVATION_OUTPUT,
    "norm": 2 * QKV_INPUT,
    "mlp": ACTIVATION_INPUT + ACTIVATION_OUTPUT,
    "attn": QUERIES_AND_KEYS + VALUES + PROJECTION_INPUT + CORE,
}
CONTAINS = {"attn": "core_attn", "mlp": "act"}
WORDS = {"paper": {"core_attn"}, "Megatron": {"core_attn", "mlp", "norm"}, "ours": set(SAVES)}


@dataclass(frozen=True)
class Menu:
    """The options of a block by name, in order; groups last."""

    names: tuple[str, ...]
    options: tuple[Option, ...]

    def index(self, name: str) -> int:
        """Of an option, by its name."""
        return self.names.index(name)


def option(held: float, seconds: float, made_again: float, num_units: int = 1) -> Option:
    return Option(
        held_bytes=int(held * UNIT),
        extra_seconds=seconds,
        transient_bytes=int((made_again + GRADIENTS) * UNIT),
        forward_bytes=int((held + GRADIENTS) * UNIT),
        num_units=num_units,
    )


def label_sets() -> list[tuple[str, ...]]:
    sets = (chosen for size in range(1, len(SAVES) + 1) for chosen in itertools.combinations(SAVES, size))
    return [chosen for chosen in sets if not any(CONTAINS.get(label) in chosen for label in chosen)]


def menu(groups: Sequence[int]) -> Menu:
    whole = OUTSIDE_OF_CORE + CORE
    made = {"none": option(whole, 0.0, 0), "full 1": option(2, FORWARD, whole - 2)}
    for labels in label_sets():
        saved, seconds = (sum(of[label] for label in labels) for of in (SAVES, SECONDS))
        made["selective " + "+".join(labels)] = option(whole - saved, seconds, max(SAVES[label] for label in labels))
    for size in groups:
        made[f"full {size}"] = option(2, size * FORWARD, size * whole - 2, size)
    return Menu(tuple(made), tuple(made.values()))


def gpt3(groups: Sequence[int]) -> tuple[ModelCosts, Menu]:
    choices = menu(groups)
    table = MODEL.vocabulary * SHAPE.hidden // SHAPE.tensor
    head = matrix_seconds(2 * SHAPE.sbh * MODEL.vocabulary)
    logits = 4 * SHAPE.length * SHAPE.rows * MODEL.vocabulary // SHAPE.tensor
    block = BlockCosts(
        choices.options,
        ChunkSeconds(FORWARD, 2 * FORWARD),
        static_bytes=BYTES_A_PARAMETER * 12 * SHAPE.hidden**2 // SHAPE.tensor,
        entry_bytes=2 * UNIT,
    )
    return (
        ModelCosts(
            (block,) * MODEL.num_layers,
            EndCosts(static_bytes=BYTES_A_PARAMETER * table),
            EndCosts(ChunkSeconds(head, 2 * head), BYTES_A_PARAMETER * table, 2 * logits),
        ),
        choices,
    )


def single_settings(pipeline: PipelineCosts, choices: Menu, words: set[str]) -> dict[str, list[tuple[int | None, ...]]]:
    """Every setting that is one for all stages."""
    full = choices.index("full 1")
    found = {"none": everywhere(pipeline, 0)}
    most = max(part.num_units for part in pipeline.parts)
    for number in range(1, most + 1):
        found[f"full block {number}"] = first_blocks(pipeline, number, full)
    sizes = {int(name.split()[1]): index for index, name in enumerate(choices.names) if name.startswith("full ")}
    for size in sizes:
        found[f"full uniform {size}"] = in_groups(pipeline, {n: at for n, at in sizes.items() if n <= size})
    for index, name in enumerate(choices.names):
        if name.startswith("selective") and set(name.split()[1].split("+")) <= words:
            found[name] = everywhere(pipeline, index)
    return found


def budget_of(pipeline: PipelineCosts, share: float) -> int:
    static = pipeline.parts[0].static_bytes
    return static + int(share * (rank_peak(pipeline, 0, everywhere(pipeline, 0)[:1]) - static))


def against(pipeline: PipelineCosts, choices: Menu, share: float) -> dict[str, PipelinePlan]:
    """The fastest single setting of each kind that fits, and the plans for every stage."""
    budget = budget_of(pipeline, share)
    single = {
        name: best_global(pipeline, budget, single_settings(pipeline, choices, words)) for name, words in WORDS.items()
    }
    return {**single, "per stage": plan_stages(pipeline, budget)}


def describe(plan: PipelinePlan) -> str:
    extra = [f"{100 * rank.extra_seconds / (rank.busy_seconds - rank.extra_seconds):.0f}" for rank in plan.ranks]
    alike = itertools.groupby(extra)
    return " ".join(
        value if len(count) == 1 else f"{value}x{len(count)}" for value, count in ((v, [*c]) for v, c in alike)
    )


def main() -> None:
    table = Table("stages", "plan", "which", "step, s", "peak", "recompute, %", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.title = f"GPT-3 175B, budget {SHARE:.0%}: peak of the fullest rank in GiB, recompute of each stage"
    others = Table("stages", "budget", *(f"{name} / per stage" for name in WORDS), box=SIMPLE_HEAD)
    others.title = "Other budgets: steps of the fastest single setting over that of plans for every stage"
    figures: dict[str, float] = {}
    notes = []
    for num_stages in NUM_STAGES:
        model, choices = gpt3(range(2, MODEL.num_layers // num_stages + 1))
        pipeline = model.pipeline(even_bounds(MODEL.num_layers, num_stages), NUM_MICROBATCHES)
        budget = budget_of(pipeline, SHARE)
        found = {
            "no budget": best_global(pipeline, 2**60, {"none": everywhere(pipeline, 0)}),
            **against(pipeline, choices, SHARE),
        }
        split = balance(model, num_stages, NUM_MICROBATCHES, budget)
        found["balanced"] = split.plan
        for name, plan in found.items():
            counts = ",".join(dict.fromkeys(map(str, split.counts)))
            which = f"{counts} blocks" if name == "balanced" else plan.name
            peak = f"{plan.fullest.peak_bytes / GIB:.1f}"
            table.add_row(str(num_stages), name, which, f"{plan.step.seconds:.3f}", peak, describe(plan))
        table.add_section()
        seconds = {name: plan.step.seconds for name, plan in found.items()}
        figures[f"ratio_{num_stages}"] = round(seconds["Megatron"] / seconds["per stage"], 3)
        for name in ("paper", "ours"):
            figures[f"ratio_{num_stages}_{name}"] = round(seconds[name] / seconds["per stage"], 3)
        figures[f"ratio_{num_stages}_balanced"] = round(seconds["Megatron"] / seconds["balanced"], 3)
        notes.append(
            f"{num_stages} stages: budget {format_bytes(budget)} a rank, of which static "
            f"{format_bytes(pipeline.parts[0].static_bytes)}"
        )
        for share in OTHER_SHARES:
            plans = against(pipeline, choices, share)
            ours = plans["per stage"].step.seconds
            others.add_row(
                str(num_stages), f"{share:.0%}", *(f"{plans[name].step.seconds / ours:.3f}" for name in WORDS)
            )
    notes.append(f"1F1B, {NUM_MICROBATCHES} microbatches, simulated.")
    report("stages", [table, others], figures, notes)


if __name__ == "__main__":
    main()
