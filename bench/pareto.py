"""Plans for budgets against the fastest fixed setting that needs no more memory: FLOPs and time.

Of each model every fixed setting is measured once: torch's checkpoint on every k-th block (Hugging Face's own, where
there is one), and Megatron's uniform, block and selective at any number. For each budget the two of fewest FLOPs that
keep it are timed beside our plan, all in alternating rounds of one run.

Run: .venv/bin/python bench/pareto.py [--rounds 3] [--rows 2]
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import transformers
from common import (
    LENGTH,
    VOCABULARY,
    allocate_gradients,
    alternate,
    count_flops,
    next_token_loss,
    reference_gpt,
    report,
)
from rich.table import Table
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_recompute.ledger import storage_bytes
from lightning_recompute.memory import measure_step
from lightning_recompute.plan import RecomputePlan
from lightning_recompute.planning import forecast_within, profile_batch
from lightning_recompute.policy import LABELS, RecomputePolicy
from lightning_recompute.recompute import apply_recompute

SHARES = (0.25, 0.4, 0.55, 0.7, 0.85)
NUM_BLOCKS = 8
NUM_TIMED = 2
"""Fixed settings that are timed for each budget."""


@dataclass(frozen=True)
class Subject:
    """A model and its step; gradients are there before it.

    Attributes:
        model: The model.
        blocks: Its blocks.
        loss: The loss of the model at a number of rows and a length.
        rows: Rows of a batch.
    """

    model: nn.Module
    blocks: nn.ModuleList
    loss: Callable[[nn.Module, int, int], Tensor]
    rows: int

    def forward(self) -> Tensor:
        """The loss that is measured and timed."""
        return self.loss(self.model, self.rows, LENGTH)

    def step(self) -> None:
        """Forward and backward."""
        self.forward().backward()

    def warm_up(self) -> None:
        """A step on next to nothing: recompute learns about each block in its first."""
        self.loss(self.model, 1, 16).backward()


@dataclass(frozen=True)
class Measured:
    """Bytes of a step above what is there before it, and its FLOPs."""

    peak_bytes: int
    flops: int


Setting = Callable[[], AbstractContextManager[object]]


def gpt(rows: int) -> Subject:
    model = reference_gpt("sdpa")
    return Subject(model, model.blocks, lambda model, rows, length: next_token_loss(model, rows, length), rows)


def gpt2(rows: int) -> Subject:
    """Hugging Face's GPT-2 of the size of the reference model."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_layer=NUM_BLOCKS,
        n_head=8,
        n_embd=512,
        n_positions=LENGTH,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    model = transformers.GPT2LMHeadModel(config).train()
    allocate_gradients(model)

    def loss(model: nn.Module, rows: int, length: int) -> Tensor:
        ids = torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(1))
        found: Tensor = model(input_ids=ids, labels=ids).loss
        return found

    return Subject(model, model.transformer.h, loss, rows)


MODELS: dict[str, Callable[[int], Subject]] = {"gpt": gpt, "gpt2": gpt2}


# ---- settings


def fixed_settings(subject: Subject) -> dict[str, Setting]:
    """Everything that can be asked for by a few words."""
    found: dict[str, Setting] = {}
    has_own = hasattr(subject.model, "activation_checkpointing_enable")
    for number in range(1, NUM_BLOCKS + 1):
        if has_own:
            found[f"HF every {number}"] = functools.partial(hugging_face, subject.model, number)
        else:
            found[f"torch every {number}"] = functools.partial(every_kth, subject.blocks, number)
        policies = {
            f"uniform {number}": RecomputePolicy(num_layers=number),
            f"block {number}": RecomputePolicy(method="block", num_layers=number),
        }
        found |= {name: functools.partial(apply_recompute, subject.model, what) for name, what in policies.items()}
    for labels in (*([label] for label in LABELS), ["norm", "act"]):
        policy = RecomputePolicy(granularity="selective", modules=labels)
        found[f"selective {'+'.join(labels)}"] = functools.partial(apply_recompute, subject.model, policy)
    return found


@contextlib.contextmanager
def every_kth(blocks: Sequence[nn.Module], number: int) -> Iterator[None]:
    """Torch's checkpoint on every `number`-th block."""
    for block in blocks[::number]:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    try:
        yield
    finally:
        for block in blocks:
            block.__dict__.pop("forward", None)


@contextlib.contextmanager
def hugging_face(model: nn.Module, number: int) -> Iterator[None]:
    """Hugging Face's own on every `number`-th block."""
    model.activation_checkpointing_enable(every_n_layers=number)
    try:
        yield
    finally:
        model.activation_checkpointing_disable()


def measured(subject: Subject, setting: Setting) -> Measured:
    """Bytes by the allocator; FLOPs of one row in another step, since a counter keeps tensors alive."""
    with setting():
        subject.warm_up()
        peak_bytes = measure_step(subject.forward).peak_bytes
        flops = count_flops(lambda: subject.loss(subject.model, 1, LENGTH).backward())[1]
    return Measured(peak_bytes, flops)


def screened(subject: Subject) -> tuple[dict[str, Setting], dict[str, Measured]]:
    """The fixed settings that the model admits, with their bytes and FLOPs."""
    settings: dict[str, Setting] = {"none": contextlib.nullcontext, **fixed_settings(subject)}
    found = {}
    for name, setting in settings.items():
        with contextlib.suppress(ValueError):  # a label that the model does not have
            found[name] = measured(subject, setting)
    return {name: settings[name] for name in found}, found


def planned(subject: Subject, none: Measured) -> dict[float, RecomputePlan]:
    """Our plan for each budget."""
    profile = profile_batch(subject.model, (), step=subject.forward, accumulating=True)
    live = storage_bytes(subject.model.parameters()) + profile.skeleton.gradient_bytes
    return {
        share: forecast_within(profile, live + profile.statics.other_bytes + int(share * none.peak_bytes)).plan
        for share in SHARES
    }


def times(subject: Subject, settings: Mapping[str, Setting], rounds: int) -> dict[str, float]:
    """Median CPU seconds of a step under each setting."""
    active = contextlib.ExitStack()

    def select(name: str) -> None:
        active.close()
        active.enter_context(settings[name]())
        subject.warm_up()

    with active:
        seconds = alternate(dict.fromkeys(settings, subject.step), rounds, before=select)
    return {name: statistics.median(values) for name, values in seconds.items()}


# ---- comparison


@dataclass(frozen=True)
class Row:
    """Our plan for a budget beside the fastest fixed setting that keeps it."""

    budget_bytes: int
    ours: Measured
    fixed: Measured
    fastest: str
    flops_ratio: float
    time_ratio: float


def compared(subject: Subject, rounds: int) -> dict[str, Row]:
    """A row for each budget."""
    settings, found = screened(subject)
    none = found["none"]
    rivals: dict[float, list[str]] = {}
    for share in SHARES:
        fits = [name for name in found if found[name].peak_bytes <= share * none.peak_bytes]
        rivals[share] = sorted(fits, key=lambda name: (found[name].flops, -found[name].peak_bytes))[:NUM_TIMED]
    timed = {name: settings[name] for names in rivals.values() for name in names}
    plans = planned(subject, none)
    for share, plan in plans.items():
        timed[f"ours {share:.0%}"] = functools.partial(apply_recompute, subject.model, plan)
        found[f"ours {share:.0%}"] = measured(subject, timed[f"ours {share:.0%}"])
    seconds = times(subject, timed, rounds)
    rows = {}
    for share, names in rivals.items():
        if not names:
            continue
        ours = f"ours {share:.0%}"
        fastest = min(names, key=seconds.__getitem__)
        rows[f"{share:.0%}"] = Row(
            int(share * none.peak_bytes),
            found[ours],
            found[fastest],
            fastest,
            found[ours].flops / min(found[name].flops for name in names),
            seconds[ours] / seconds[fastest],
        )
        print(f"{share:.0%}: {plans[share]}")
        print({name: round(value, 3) for name, value in seconds.items() if name in (ours, *names)}, flush=True)
    return rows


def table_of(rows: Mapping[str, Row]) -> Table:
    columns = ("model / budget", "budget MB", "ours MB", "fixed MB", "fastest fixed", "FLOPs ratio", "time ratio")
    table = Table(*columns, title="Plans for budgets against the fastest fixed setting that keeps them")
    for name, row in rows.items():
        sizes = (row.budget_bytes, row.ours.peak_bytes, row.fixed.peak_bytes)
        cells = (row.fastest, f"{row.flops_ratio:.4f}", f"{row.time_ratio:.4f}")
        over = " OVER" if row.ours.peak_bytes > row.budget_bytes else ""
        table.add_row(name + over, *(f"{size / 1e6:.2f}" for size in sizes), *cells)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=3, help="alternating rounds")
    parser.add_argument("--rows", type=int, default=2, help="rows of a batch")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    rows: dict[str, Row] = {}
    for name in options.models:
        rows |= {f"{name}/{share}": row for share, row in compared(MODELS[name](options.rows), options.rounds).items()}
    ratios = {name: round(row.time_ratio, 4) for name, row in rows.items()}
    figures = {
        "ratios": ratios,
        "worst_ratio": max(ratios.values()),
        "best_ratio": min(ratios.values()),
        "flops_worst_ratio": round(max(row.flops_ratio for row in rows.values()), 4),
        "over_budget": sum(row.ours.peak_bytes > row.budget_bytes for row in rows.values()),
    }
    notes = [
        f"{options.rows} row(s) of {LENGTH} tokens. Bytes are above parameters and gradients; budgets are parts of "
        "what a step without recompute needs. CPU seconds of this process, medians.",
    ]
    report("pareto", [table_of(rows)], figures, notes)


if __name__ == "__main__":
    main()
