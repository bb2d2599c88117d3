"""Every kind of recompute that a guard has to hold under, for tests of what a replay must not see or repeat."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from ledger import Ledger
from parity import Run, assert_same, observe, seeded
from torch import nn
from toys import rows, step

from lightning_recompute.errors import RecomputeError
from lightning_recompute.plan import Action, Full, RecomputePlan, SaveOps, Segment, Selective
from lightning_recompute.recompute import apply_recompute

NUM_BLOCKS = 4

# for blocks like those of toys.py: (blocks in a unit, action)
KINDS: dict[str, tuple[int, Action]] = {
    "full": (1, Full()),
    "pairs": (2, Full()),
    "freed": (1, Selective(("norm", "act"))),
    "parts": (1, Selective(("*up", "*down"))),
    "saved": (1, SaveOps(("matmul",))),
    "saved pairs": (2, SaveOps(("matmul",))),
}
WHOLE = [kind for kind in KINDS if kind not in ("freed", "parts")]
"""Kinds that run the forward of whole blocks again."""

each_kind = pytest.mark.parametrize("kind", KINDS)
each_whole = pytest.mark.parametrize("kind", WHOLE)


def plan_of(kind: str, num_blocks: int = NUM_BLOCKS) -> RecomputePlan:
    """The plan of one kind for a number of blocks."""
    size, action = KINDS[kind]
    return RecomputePlan(
        tuple(Segment(start, min(start + size, num_blocks), action) for start in range(0, num_blocks, size))
    )


def assert_exact(build: Callable[[], nn.Module], run: Run, kind: str | RecomputePlan, **options: Any) -> None:
    """The same steps without and with recompute leave the same, to the bit."""
    due = observe(seeded(build), run)
    module = seeded(build)
    with apply_recompute(module, plan_of(kind) if isinstance(kind, str) else kind, **options):
        found = observe(module, run)
    assert_same(found, due)


def refusal(build: Callable[[], nn.Module], run: Run, kind: str | RecomputePlan) -> str | None:
    """The step is exact (None), or refused with an error of ours, whose message is returned.

    Where the step fails without recompute, it has to fail with it too.
    """
    try:
        due = observe(seeded(build), run)
    except RuntimeError:
        due = None
    module = seeded(build)
    with apply_recompute(module, plan_of(kind) if isinstance(kind, str) else kind):
        try:
            found = observe(module, run)
        except RuntimeError as error:
            if due is not None and not isinstance(error, RecomputeError):
                raise
            return str(error)
    assert due is not None, "without recompute this is an error"
    assert_same(found, due)
    return None


def held_bytes(build: Callable[[], nn.Module], plan: RecomputePlan) -> int:
    """What one forward after a first step leaves for backward."""
    model, x = seeded(build), rows()
    with apply_recompute(model, plan):
        step(model)
        with Ledger(model, x) as ledger:
            loss = model(x).sum()
            live = ledger.live_bytes
        loss.backward()
    return live
