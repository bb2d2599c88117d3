"""The one list of plans that every parity, naming, FLOP and round-trip test runs over.

A plan is built for given numbers of blocks, one number for each block list (encoder and decoder are two), so
the same names serve every model. A new kind of unit needs one more entry of `PLANS` and no other change.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from lightning_recompute.plan import Action, Full, Keep, RecomputePlan, Segment
from lightning_recompute.policy import RecomputePolicy

PlanBuilder = Callable[[Sequence[int]], RecomputePlan]

ALL = 1 << 20
"""More blocks than any list has: cut to the list's length."""


def uniform(num_layers: int) -> PlanBuilder:
    """Units of `num_layers` blocks, cut to the longest list."""
    return lambda chunks: RecomputePolicy(num_layers=min(num_layers, max(chunks))).plan(chunks)


def first(num_layers: int) -> PlanBuilder:
    """Method block: the first `num_layers` blocks of each list one by one, cut to the longest list."""
    return lambda chunks: RecomputePolicy(method="block", num_layers=min(num_layers, max(chunks))).plan(chunks)


def tiled(*runs: tuple[int, Action]) -> PlanBuilder:
    """Runs of (number of blocks, action) repeated over each list; a unit never leaves its list."""

    def build(chunks: Sequence[int]) -> RecomputePlan:
        segments, start = [], 0
        for stop in itertools.accumulate(chunks):
            for size, action in itertools.cycle(runs):
                end = min(start + size, stop)
                segments.append(Segment(start, end, action))
                start = end
                if start == stop:
                    break
        return RecomputePlan(tuple(segments))

    return build


PLANS: dict[str, PlanBuilder] = {
    "none": RecomputePolicy(granularity=None).plan,
    "uniform-1": uniform(1),
    "uniform-2": uniform(2),
    "uniform-3": uniform(3),
    "uniform-all": uniform(ALL),
    "block-1": first(1),
    "block-some": first(2),
    "block-all": first(ALL),
    "every-other": tiled((1, Full()), (1, Keep())),
    "keep-first": tiled((1, Keep()), (ALL, Full())),
    "pair-keep": tiled((2, Full()), (1, Keep())),
    "one-then-pair": tiled((1, Full()), (2, Full())),
}


def num_calls(plan: RecomputePlan) -> list[int]:
    """How often each block's forward runs in one training step with one backward."""
    return [
        2 if isinstance(segment.action, Full) else 1
        for segment in plan.segments
        for _ in range(segment.start, segment.stop)
    ]
