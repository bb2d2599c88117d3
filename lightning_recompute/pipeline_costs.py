"""What each stage of a pipeline costs, from one measurement of the whole model.

A part of the model is a chain of units: what comes before its blocks (the embedding, or what stands in for it), its
blocks, and what comes after them (head and loss, or the hidden state that is sent on).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lightning_recompute.cost import Option, StageCosts
from lightning_recompute.division import Division
from lightning_recompute.ledger import allocated_bytes
from lightning_recompute.measured_model import MeasuredModel
from lightning_recompute.optimizer_cost import OptimizerCost
from lightning_recompute.pipeline_layout import Layout
from lightning_recompute.plan import Action, Full
from lightning_recompute.probe import BEFORE
from lightning_recompute.profiling import SCALARS_BYTES, everything_kept
from lightning_recompute.reduction import BUCKET_BYTES, MAX_IN_FLIGHT
from lightning_recompute.stage_options import GROUP_SIZES, StageOptions, stage_options
from lightning_recompute.step_time import ChunkSeconds

_DIGESTS = 24
"""Of the part of a unit's input that a rank keeps: a digest, and room for an even address."""


class Surroundings:
    """What there is besides the blocks of a model while one microbatch goes through it.

    Args:
        measured: The model.
        in_forward: For each block what is there besides while it runs forward.
        in_backward: The same in backward.
    """

    def __init__(self, measured: MeasuredModel, in_forward: Sequence[int], in_backward: Sequence[int]) -> None:
        profile, forms = measured.profile, measured.probe.form.blocks
        (skeleton,) = profile.accumulating
        assert skeleton.middle is not None
        kept = profile.call_costs(everything_kept(profile), accumulating=True)
        self.cached = [cost.cached_bytes for cost in kept]
        self.given = [form.hidden.num_bytes for form in forms]
        self.returned = [*self.given[1:], forms[-1].returned[forms[-1].main].num_bytes]
        inside = {(moment.kind, moment.call): moment.num_bytes for moment in skeleton.moments if moment.call >= 0}
        forward = [inside["forward", block] for block in range(len(forms))]
        backward = [inside["backward", block] for block in range(len(forms))]
        between = [moment for moment in skeleton.moments if moment.call < 0]
        turn = [moment.in_backward for moment in between].index(True)
        # the embedding keeps this until its backward, when the gradient of the first block's output is there, too
        self.embedding_held = max(backward[0] - self.returned[0], 0)
        self.embedding_forward = between[0].num_bytes
        self.embedding_backward = max(between[-1].num_bytes - self.embedding_held, 0)
        self.forward = [max(a - self.embedding_held, 0) + b for a, b in zip(forward, in_forward, strict=True)]
        self.backward = [max(a - self.embedding_held, 0) + b for a, b in zip(backward, in_backward, strict=True)]
        self.head_held = max(skeleton.middle.num_bytes - self.embedding_held, 0)
        self.head_forward = max(between[turn - 1].num_bytes - self.embedding_held, 0)
        self.head_backward = max(between[turn].num_bytes - self.embedding_held - self.head_held, 0)
        # the same with the first gradients, which stay
        fresh = [moment.num_bytes for moment in profile.skeleton.moments if moment.call < 0]
        of_head = [measured.parameters[name] for name in measured.trained if len(forms) in measured.probe.uses[name]]
        self.head_first = max(fresh[turn] - self.embedding_held - self.head_held, 0)
        self.embedding_first = max(fresh[-1] - self.embedding_held - allocated_bytes(of_head), 0)


@dataclass(frozen=True)
class Part:
    """A part of the model: the blocks of one chunk between its two ends.

    Attributes:
        costs: For the planner; the first unit is what comes before the blocks, the last one what comes after them.
        seconds: Of a microbatch, nothing recomputed.
        options: For each block the action of each option, and how many blocks it covers.
        start: The first block.
        stop: The block after the last one.
    """

    costs: StageCosts
    seconds: ChunkSeconds
    options: tuple[tuple[tuple[Action, int], ...], ...]
    start: int
    stop: int

    @property
    def num_blocks(self) -> int:
        """Its blocks."""
        return self.stop - self.start


def part_of(
    measured: MeasuredModel,
    around: Surroundings,
    start: int,
    stop: int,
    *,
    tensor: int,
    sizes: Sequence[int],
    several: bool = False,
) -> Part:
    """A part of a model, without statics.

    Args:
        measured: The model.
        around: Its surroundings.
        start: The first block.
        stop: The block after the last one.
        tensor: Tensor-parallel ranks, over which inputs may be kept.
        sizes: Numbers of blocks that may be one unit.
        several: Whether its rank has other chunks, whose transfers are under way meanwhile.
    """
    profile = measured.profile
    is_first, is_last = start == 0, stop == profile.num_blocks
    units = tuple(sorted({*GROUP_SIZES, *sizes} - {1}))
    made = stage_options(profile, measured.found, start, stop, static_bytes=0, sizes=units, accumulating=True)
    options = [list(_options(made, block, around.given[start + block], tensor)) for block in range(stop - start)]
    sent = around.returned[stop - 1]
    received = 0 if is_first else around.given[start]
    passing = received + (2 * sent if several else 0)
    # torch's stage keeps what it has sent and the gradient that came for it, and the gradient that it sent last
    besides = passing + (0 if is_last else 2 * sent)
    cached = [passing + sum(around.cached[start:block]) for block in range(start, stop + 1)]
    entry = Option(
        held_bytes=around.embedding_held if is_first else 0,
        extra_seconds=0.0,
        transient_bytes=around.embedding_backward if is_first else 0,
        # code before the blocks runs on every stage, and what it makes is then left for what was received
        forward_bytes=around.embedding_forward + 2 * received,
    )
    leave = Option(
        held_bytes=around.head_held if is_last else sent,
        extra_seconds=0.0,
        transient_bytes=passing + (around.head_backward if is_last else sent),
        forward_bytes=(around.head_forward if is_last else sent) + cached[-1],
    )
    costs = StageCosts(
        options=((entry,), *(tuple(option for option, _, _ in each) for each in options), (leave,)),
        entry_bytes=(0, *(a + b for a, b in zip(around.forward[start:stop], cached, strict=False)), 0),
        gradient_bytes=(0, *(each + besides for each in around.backward[start:stop]), 0),
    )
    seconds = [*measured.blocks[start:stop], *measured.ends[:1] * is_first, *measured.ends[1:] * is_last]
    total = ChunkSeconds(math.fsum(one.forward for one in seconds), math.fsum(one.backward for one in seconds))
    return Part(costs, total, tuple(tuple((a, n) for _, a, n in each) for each in options), start, stop)


def _options(made: StageOptions, block: int, given: int, tensor: int) -> Iterator[tuple[Option, Action, int]]:
    """The options of a block, single ones first; where ranks can share inputs, also with them shared."""
    pairs = list(zip(made.stage.options[block], made.actions[block], strict=True))
    if tensor > 1:
        # counted and not run: which inputs are the same on all ranks is found from values
        part = -(-given // tensor) + _DIGESTS
        pairs += [
            (
                replace(
                    option,
                    held_bytes=max(option.held_bytes - given, 0) + part,
                    transient_bytes=option.transient_bytes + given,
                ),
                Full(inputs="shard"),
            )
            for option, action in pairs
            if action == Full() and option.held_bytes >= given
        ]
    for option, action in sorted(pairs, key=lambda pair: pair[0].num_units):
        yield option, action, option.num_units


# ---- statics


@dataclass(frozen=True)
class RankStatics:
    """What a rank holds while its schedule runs.

    Attributes:
        parameters_bytes: Its parameters, and all buffers.
        gradients_bytes: Gradients of its parameters.
        optimizer_bytes: State of its optimizers.
        other_bytes: The batch, buffers in which gradients are averaged, scalars.
        step_bytes: The peak of the optimizer's step, all of it.
        averages_bytes: The buffers among `other_bytes`.
    """

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    other_bytes: int
    step_bytes: int
    averages_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        """All that is there all the time."""
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes + self.other_bytes


def names_of_ranks(measured: MeasuredModel, division: Division) -> list[frozenset[str]]:
    """The parameters of each rank; those that several ranks use are on each of them.

    Args:
        measured: The model.
        division: Its blocks over ranks.
    """
    ends = frozenset((BEFORE, measured.profile.num_blocks))
    owned: list[set[str]] = [set() for _ in range(division.num_ranks)]
    for name in measured.parameters:
        for use in measured.probe.uses[name] or ends:
            owned[division.rank_of(division.chunk_with(use))].add(name)
    return [frozenset(names) for names in owned]


def statics_of(
    measured: MeasuredModel, layout: Layout, names: frozenset[str], batch_bytes: int, cost: OptimizerCost
) -> RankStatics:
    """What a rank holds.

    Args:
        measured: The model.
        layout: The layout.
        names: The rank's parameters.
        batch_bytes: The batch of a step.
        cost: Of the optimizers of those parameters.
    """
    device = next(iter(measured.parameters.values())).device

    def size(those: frozenset[str]) -> int:
        return sum(allocated_bytes([measured.parameters[name]], device) for name in those)

    shards = layout.shards
    parameters, gradients = size(names), size(names & measured.trained)
    own, own_gradients = -(-parameters // shards), -(-gradients // shards)
    state, transient = -(-cost.state_bytes // shards), -(-cost.transient_bytes // shards)
    averages = min(MAX_IN_FLIGHT * BUCKET_BYTES, gradients) if layout.data > 1 and shards == 1 else 0
    other = SCALARS_BYTES + batch_bytes + averages
    there, whole = own, own_gradients
    if shards > 1 and layout.pipeline > 1:
        # gathered once for all microbatches; gradients are reduced when all of them are there
        there, whole = own + parameters, gradients
    elif shards > 1:
        there += size(_outside(measured))
    step = own + own_gradients + state + transient + other
    return RankStatics(there + measured.buffers_bytes, whole, state, other, step + measured.buffers_bytes, averages)


def gradients_of_units(measured: MeasuredModel, names: frozenset[str], start: int, stop: int) -> list[int]:
    """Gradients that each unit of a part makes, those of parameters that several use where they come first.

    Args:
        measured: The model.
        names: The parameters of the rank.
        start: The first block.
        stop: The block after the last one.
    """
    device = next(iter(measured.parameters.values())).device
    made, num_blocks = [0] * (stop - start + 2), measured.profile.num_blocks
    for name in names & measured.trained:
        uses = measured.probe.uses[name]
        here = [use for use in uses if start <= use < stop or (use < 0 == start) or use == stop == num_blocks]
        # backward comes to the last use first
        made[max(here, default=stop) - start + 1] += allocated_bytes([measured.parameters[name]], device)
    return made


def _outside(measured: MeasuredModel) -> frozenset[str]:
    """Parameters of no block."""
    inside = range(measured.profile.num_blocks)
    return frozenset(name for name in measured.parameters if not measured.probe.uses[name] & set(inside))


def gathered(measured: MeasuredModel, layout: Layout) -> tuple[list[int], list[int]]:
    """Without a pipeline: what is whole of sharded blocks while each runs.

    Args:
        measured: The model.
        layout: The layout.

    Returns:
        For each block bytes in its forward, and in its backward; 0 where all is gathered at once, or nothing sharded.
    """
    num_blocks = measured.profile.num_blocks
    if layout.shards == 1 or layout.pipeline > 1:
        return [0] * num_blocks, [0] * num_blocks
    sizes = [0] * num_blocks
    for name, parameter in measured.parameters.items():
        for use in measured.probe.uses[name] & set(range(num_blocks)):
            sizes[use] += parameter.nbytes
    # the next one is gathered meanwhile; gradients of the last one are copied to be reduced
    forward = [size + max(sizes[index + 1 : index + 2], default=0) for index, size in enumerate(sizes)]
    backward = [2 * size + max(sizes[max(index - 1, 0) : index], default=0) for index, size in enumerate(sizes)]
    return forward, [each + 2 * size for each, size in zip(backward, sizes, strict=True)]
