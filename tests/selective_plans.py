"""Plans with selective labels and saved operators, as `plans.PLANS` has those of whole blocks."""

from __future__ import annotations

import itertools

from plans import PlanBuilder, tiled

from lightning_recompute.plan import Full, Keep, SaveOps, Selective

LABELS = ("core_attn", "attn", "mlp", "norm", "act", "moe")


def every_block(*labels: str) -> PlanBuilder:
    """The same labels in every block."""
    return tiled((1, Selective(labels)))


SELECTIVE_PLANS: dict[str, PlanBuilder] = {
    **{label: every_block(label) for label in LABELS},
    **{f"{one}+{other}": every_block(one, other) for one, other in itertools.combinations(LABELS[:5], 2)},
    "moe+norm": every_block("moe", "norm"),
    "core_attn+norm+act": every_block("core_attn", "norm", "act"),
    "save-matmul": tiled((1, SaveOps(("matmul",)))),
    "save-matmul-pairs": tiled((2, SaveOps(("matmul",)))),
    "save-softmax": tiled((1, SaveOps(("_softmax",)))),
    "full-norm-keep": tiled((1, Full()), (1, Selective(("norm", "act"))), (1, Keep())),
    "save-full-core": tiled((1, SaveOps(("matmul",))), (1, Full()), (1, Selective(("core_attn",)))),
    "pair-then-attn": tiled((2, Full()), (1, Selective(("attn", "norm")))),
}


def words_of(plan: str) -> set[str]:
    """The labels that a plan of the dictionary needs its model to have."""
    actions = [segment.action for segment in SELECTIVE_PLANS[plan]((6,)).segments]
    return {word for action in actions for word in getattr(action, "modules", ())}
