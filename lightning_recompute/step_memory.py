"""The memory of a step under a plan as figures for a table or a picture: moment by moment, and block by block."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lightning_recompute.plan import Action, RecomputePlan, SaveOps, Selective
from lightning_recompute.profiling import Profile
from lightning_recompute.timeline import Level

PARTS = ("parameters", "optimizer", "other", "gradients", "outside", "blocks", "running")
"""What the memory of a step consists of: other is the batch and what else is there all the time, outside what the
model holds outside of its blocks, blocks what they hold for backward, running the block or optimizer that runs."""


@dataclass(frozen=True)
class MomentBytes:
    """Memory at one moment of a step.

    Attributes:
        phase: `forward`, `backward` or `optimizer`.
        block: Name of the block that runs; empty between blocks.
        parts: Bytes of each of `PARTS`.
    """

    phase: str
    block: str
    parts: dict[str, int]

    @property
    def num_bytes(self) -> int:
        """All of it."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class BlockBytes:
    """What a block holds between its forward and its backward.

    Attributes:
        name: The block's.
        action: What the plan does to it, in words.
        num_bytes: What it holds; of tensors that several blocks hold, those that no block before it does.
    """

    name: str
    action: str
    num_bytes: int


def moments(profile: Profile, plan: RecomputePlan) -> list[MomentBytes]:
    """Memory at each moment of a step under a plan, in order; where steps differ, of the heavier one.

    Args:
        profile: What was measured.
        plan: For all blocks.
    """
    every = list(profile.levels(plan))
    length = len(profile.skeleton.moments)
    steps = [every[start : start + length] for start in range(0, len(every), length)]
    heaviest = max(steps, key=lambda step: max(level.num_bytes for level in step))
    found = [_at(profile, level) for level in heaviest]
    parts = _parts(profile, profile.skeleton.gradient_bytes, 0, 0, profile.optimizer.transient_bytes)
    return [*found, MomentBytes("optimizer", "", parts)]


def _at(profile: Profile, level: Level) -> MomentBytes:
    call = level.moment.call
    return MomentBytes(
        "backward" if level.moment.in_backward else "forward",
        profile.capture.names[call] if call >= 0 else "",
        _parts(profile, level.gradient_bytes, level.outside_bytes, level.held_bytes, level.transient_bytes),
    )


def _parts(profile: Profile, *changing: int) -> dict[str, int]:
    statics = profile.statics
    constant = (statics.parameters_bytes, statics.optimizer_bytes, statics.batch_bytes + statics.other_bytes)
    return dict(zip(PARTS, (*constant, *changing), strict=True))


def held_by_blocks(profile: Profile, plan: RecomputePlan) -> list[BlockBytes]:
    """What each block holds under a plan.

    Args:
        profile: What was measured.
        plan: For all blocks.
    """
    by_block = dict.fromkeys(range(profile.num_blocks), 0)
    counted: set[int] = set()
    for call, cost in enumerate(profile.call_costs(plan)):
        new = cost.holds - counted
        counted |= new
        by_block[profile.block_of(call)] += cost.inner_bytes + sum(profile.skeleton.sizes[number] for number in new)
    actions = list(_actions(plan))
    return [BlockBytes(name, in_words(actions[block]), by_block[block]) for block, name in enumerate(profile.names)]


def _actions(plan: RecomputePlan) -> Iterator[Action]:
    for segment in plan.segments:
        yield from [segment.action] * (segment.stop - segment.start)


def in_words(action: Action) -> str:
    """An action in a few words: `keep`, `full`, `selective norm+act`, `save matmul`."""
    if isinstance(action, Selective):
        return f"selective {'+'.join(action.modules)}"
    return f"save {'+'.join(action.ops)}" if isinstance(action, SaveOps) else action.name
