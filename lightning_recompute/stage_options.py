"""From a profile to what the planner chooses from: the options of every block, and the rows that they add up to.

Options are keeping, every label the block has and their combinations, saving the outputs of matmuls and attention,
recompute of the whole block, and of several blocks together. What another option beats in bytes and time is left out.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from lightning_recompute.capture import BlockCall
from lightning_recompute.cost import Choices, Option, StageCosts
from lightning_recompute.errors import RecomputeError
from lightning_recompute.inspection import is_useless
from lightning_recompute.labels import available_labels
from lightning_recompute.plan import Action, Full, Keep, SaveOps, Segment, Selective
from lightning_recompute.profiling import Profile, everything_kept
from lightning_recompute.timeline import CallCost

logger = logging.getLogger(__name__)

LEAST_SHARE = 0.8
"""Of the time that recomputed FLOPs would take at the rate of the block itself: no measurement counts as less."""

NEVER_LESS = 0.002
"""Of the block's own time: what any recompute takes at least, so that none is chosen where there is room."""

GROUP_SIZES = (2, 3, 4, 8)
"""Numbers of blocks that may be recomputed together."""

_OPERATORS = (("matmul",), ("attention",), ("matmul", "attention"))
# of two labels of which one covers the other, a plan has one
_NESTED = (
    frozenset({"core_attn", "attn"}),
    frozenset({"act", "mlp"}),
    frozenset({"act", "moe"}),
    frozenset({"mlp", "moe"}),
)


@dataclass(frozen=True)
class Prices:
    """What turns counts into seconds where blocks cannot be timed on the device that is planned for.

    Args:
        flops_per_second: Of its matrix units.
        bytes_per_second: Of its memory.
    """

    flops_per_second: float = 4e14
    bytes_per_second: float = 2e12

    def seconds(self, flops: int, num_bytes: int) -> float:
        """Time of an amount of work."""
        return flops / self.flops_per_second + num_bytes / self.bytes_per_second


@dataclass(frozen=True)
class Candidate:
    """An action that may be worth while on blocks of one kind.

    Args:
        action: The action.
        seconds: What forward and backward of a call take longer with it.
    """

    action: Action
    seconds: float


@dataclass(frozen=True)
class StageOptions:
    """What may be done to the blocks of a stage.

    Args:
        stage: The options and rows, for the planner.
        actions: For each block the action of each option.
        start: Index of the stage's first block.
        same_as: Blocks that are another one, whose action they share, by index.
    """

    stage: StageCosts
    actions: tuple[tuple[Action, ...], ...]
    start: int
    same_as: Mapping[int, int]

    def segments(self, choices: Choices) -> Iterator[Segment]:
        """What choices mean, as segments of a plan; neighbours that are alike become one where that is the same."""
        found: list[Segment] = []
        for block, choice in enumerate(choices):
            if choice is None:
                continue
            action = self.actions[block][choice]
            first = self.start + block
            if first in self.same_as:
                other = self.same_as[first] - self.start
                chosen = choices[other]
                assert chosen is not None, "a block that is called several times is in no group"
                action = self.actions[other][chosen]
            stop = first + self.stage.options[block][choice].num_units
            if found and found[-1].action == action and isinstance(action, Keep | Selective):
                found[-1] = Segment(found[-1].start, stop, action)
            else:
                found.append(Segment(first, stop, action))
        yield from found


def candidates(profile: Profile, prices: Prices | None = None) -> list[list[Candidate]]:
    """The actions that may be worth while, for each kind of call.

    Args:
        profile: Measures them.
        prices: Seconds from counts; None: blocks are timed on their device.

    Returns:
        For each of `profile.capture.kinds`: keeping first, and whatever no other action beats in everything.
    """
    with _little_to_collect():
        return [_of_kind(profile, index, prices) for index in range(len(profile.capture.kinds))]


@contextlib.contextmanager
def _little_to_collect() -> Iterator[None]:
    """Let the many collections between measurements look at new objects only."""
    is_ours = gc.get_freeze_count() == 0
    if is_ours:
        gc.collect()
        gc.freeze()
    try:
        yield
    finally:
        if is_ours:
            gc.unfreeze()


def _of_kind(profile: Profile, index: int, prices: Prices | None) -> list[Candidate]:
    call = profile.capture.order.index(index)
    block = profile.kind_of(call)
    costs: dict[Action, tuple[int, ...]] = {}
    measured = []
    for number, action in enumerate(_actions(profile, block)):
        try:
            phases = profile.costs.of(block, action).phases
        except (ValueError, RecomputeError):  # an operator that the block does not have
            continue
        except RuntimeError as error:
            if getattr(action, "inputs", None) != "host":
                raise
            logger.info("inputs in host memory are left out of the plan: %s", error)  # no room to pin, perhaps
            continue
        measured.append(number)
        costs[action] = (
            phases.inner_bytes,
            len(phases.given),
            phases.cached_bytes,
            phases.forward_bytes,
            phases.backward_bytes,
            profile.flops(call, action),
        )
    if not profile.agreement.is_same(measured):
        raise RuntimeError(f"{block.name} could not be measured in the same ways on all processes")
    agreed = iter(profile.agreement.largest([number for cost in costs.values() for number in cost]))
    costs = {action: tuple(int(next(agreed)) for _ in cost) for action, cost in costs.items()}
    worthwhile = [
        action
        for number, (action, cost) in enumerate(costs.items())
        if isinstance(action, Keep | Full)
        or not any(_beats(other, cost, before=position < number) for position, other in enumerate(costs.values()))
    ]
    seconds = action_seconds(profile, call, worthwhile, prices)
    return [Candidate(action, seconds[action]) for action in worthwhile]


def _actions(profile: Profile, block: BlockCall) -> Iterator[Action]:
    yield Keep()
    kept = profile.costs.of(block, Keep()).phases.inner_bytes
    available = available_labels(block.module)
    saved = [kept - profile.costs.of(block, Selective((label,))).phases.inner_bytes for label in available]
    most, *largest = map(int, profile.agreement.largest([kept, *saved]))
    labels = [label for label, num_bytes in zip(available, largest, strict=True) if not is_useless(num_bytes, most)]
    for size in range(1, len(labels) + 1):
        for words in itertools.combinations(labels, size):
            if not any(pair <= set(words) for pair in _NESTED):
                yield Selective(words)
    for ops in _OPERATORS:
        yield SaveOps(ops)
    yield Full()
    if block.device.type == "cuda":
        yield Full(inputs="host")


def _beats(one: Sequence[int], other: Sequence[int], *, before: bool) -> bool:
    """Whether one cost is nowhere larger than another; of equals the one before."""
    return (one != other and all(a <= b for a, b in zip(one, other, strict=True))) or (before and one == other)


def action_seconds(
    profile: Profile, call: int, actions: Sequence[Action], prices: Prices | None = None
) -> dict[Action, float]:
    """What each action takes longer than keeping.

    Args:
        profile: Measures them.
        call: The number of a block's call.
        actions: On that block.
        prices: Seconds from counts; None: the block is timed on its device.

    Raises:
        ValueError: The block does not admit an action.
    """
    kept = profile.costs.of(profile.kind_of(call), Keep()).phases
    work = {
        action: (
            max(profile.flops(call, action) - profile.flops(call, Keep()), 0),
            # what is made again is written once and read once
            2 * max(kept.inner_bytes - profile.costs.of(profile.kind_of(call), action).phases.inner_bytes, 0),
        )
        for action in actions
    }
    if prices is not None:
        return {action: prices.seconds(*counts) for action, counts in work.items()}
    profile.time(actions)
    base = profile.seconds(call, Keep())
    # a measurement may be off, but not by much of what the matrix units have to do again; and nothing is free
    rate = base / max(profile.flops(call, Keep()), 1)
    least = {action: max(LEAST_SHARE * rate * flops, NEVER_LESS * base) for action, (flops, _) in work.items()}
    longer = {action: max(profile.seconds(call, action) - base, least[action]) for action in actions}
    return {action: 0.0 if isinstance(action, Keep) else seconds for action, seconds in longer.items()}


# ---- rows


def stage_options(
    profile: Profile,
    found: Sequence[Sequence[Candidate]],
    start: int,
    stop: int,
    *,
    static_bytes: int,
    in_flight: int = 1,
    sizes: Sequence[int] = GROUP_SIZES,
    accumulating: bool = False,
) -> StageOptions:
    """The options of the blocks of a stage.

    Args:
        profile: What was measured.
        found: The actions that may be worth while; see `candidates`.
        start: Index of the stage's first block.
        stop: One after its last block.
        static_bytes: What is there all the time.
        in_flight: Microbatches alive when a backward starts.
        sizes: Numbers of blocks that may be one unit.
        accumulating: Gradients are there all the time, among `static_bytes`; the profile has measured such a step.
    """
    rows = _Rows(profile, start, stop, accumulating)
    options: list[tuple[Option, ...]] = []
    actions: list[tuple[Action, ...]] = []
    for block in range(start, stop):
        pairs = list(_options(profile, rows, found, block, stop, sizes))
        options.append(tuple(option for option, _ in pairs))
        actions.append(tuple(action for _, action in pairs))
    floor = max(rows.floor_bytes if start == 0 else 0, profile.optimizer_bytes)
    stage = StageCosts(
        tuple(options),
        static_bytes=static_bytes,
        head_bytes=rows.head_bytes if stop == profile.num_blocks else 0,
        gradient_bytes=tuple(rows.backward[block] for block in range(start, stop)),
        entry_bytes=tuple(rows.forward[block] for block in range(start, stop)),
        floor_bytes=static_bytes + floor,
        in_flight=in_flight,
    )
    return StageOptions(stage, tuple(actions), start, profile.same_as)


class _Rows:
    """What is there besides the blocks while each of them runs."""

    def __init__(self, profile: Profile, start: int, stop: int, accumulating: bool) -> None:
        self.accumulating = accumulating
        self.forward: dict[int, int] = dict.fromkeys(range(start, stop), 0)
        self.backward: dict[int, int] = dict.fromkeys(range(start, stop), 0)
        self.head_bytes = self.floor_bytes = 0
        seen: set[int] = set()
        done: set[int] = set()
        last = 0
        plan = everything_kept(profile)
        for level in profile.accumulating_levels(plan) if accumulating else profile.levels(plan):
            besides = level.outside_bytes + (0 if accumulating else level.gradient_bytes)
            call = level.moment.call
            if call >= 0:
                block = profile.block_of(call)
                side = self.backward if level.moment.kind == "backward" else self.forward
                if block in side:
                    side[block] = max(side[block], besides, last)
                (done if level.moment.kind == "backward" else seen).add(call)
                last = 0
            elif len(done) == len(seen) and seen:
                self.floor_bytes = max(self.floor_bytes, besides)
                seen, done = set(), set()
            elif len(seen) == len(profile.capture.order) and not done:
                self.head_bytes = max(self.head_bytes, besides)
            else:
                last = besides


def _options(
    profile: Profile, rows: _Rows, found: Sequence[Sequence[Candidate]], block: int, stop: int, sizes: Sequence[int]
) -> Iterator[tuple[Option, Action]]:
    calls = profile.calls_of(block)
    if not calls:  # backward does not come to it
        yield Option(0, 0.0), Keep()
        return
    kinds = {profile.capture.order[call] for call in calls}
    # a block that is called in different ways: what is worth while in each
    shared = [each for each in found[min(kinds)] if all(each.action in _actions_of(found[kind]) for kind in kinds)]
    for candidate in shared:
        costs = _costs(profile, calls, candidate.action, rows.accumulating)
        seconds = sum(_actions_of(found[profile.capture.order[call]])[candidate.action] for call in calls)
        yield _option(profile, rows, [block] * len(calls), calls, costs, seconds, 1), candidate.action
    for size in sizes if profile.has_units else ():
        blocks = range(block, block + size)
        if block + size > stop or not _follow(profile, blocks):
            return
        unit = [profile.calls_of(each)[0] for each in blocks]
        # all others are kept
        actions: list[Action] = [Full() if call in unit else Keep() for call in range(len(profile.capture.order))]
        costs = profile.unit_costs(unit, actions, accumulating=rows.accumulating)
        seconds = sum(_actions_of(found[profile.capture.order[call]])[Full()] for call in unit)
        yield _option(profile, rows, blocks, unit, costs, seconds, size), Full()


def _actions_of(found: Sequence[Candidate]) -> dict[Action, float]:
    return {candidate.action: candidate.seconds for candidate in found}


def _costs(profile: Profile, calls: Sequence[int], action: Action, accumulating: bool) -> list[CallCost]:
    actions: list[Action] = [action] * len(profile.capture.order)
    return [profile.call_cost(call, actions, accumulating=accumulating) for call in calls]


def _follow(profile: Profile, blocks: Sequence[int]) -> bool:
    """Whether blocks may be one unit: of one list, called once, each with what the one before returned."""
    calls = [profile.calls_of(block) for block in blocks]
    if any(len(each) != 1 for each in calls):
        return False
    in_list = {index for index, block_list in enumerate(profile.spans) if blocks[0] in block_list}
    together = all(blocks[-1] in profile.spans[index] for index in in_list)
    unit = [each[0] for each in calls]
    return together and all(
        call == before + 1 and call in profile.capture.chained for before, call in itertools.pairwise(unit)
    )


def _option(
    profile: Profile,
    rows: _Rows,
    blocks: Sequence[int],
    calls: Sequence[int],
    costs: Sequence[CallCost],
    seconds: float,
    num_units: int,
) -> Option:
    """One option from the costs of its calls, of one block or of the blocks of a group."""
    sizes = profile.skeleton.sizes
    held = forward = backward = replayed = 0
    counted: set[int] = set()
    for call, block, cost in zip(calls, blocks, costs, strict=True):
        forward = max(forward, held + cost.forward_bytes + rows.forward[block] - rows.forward[blocks[0]])
        # what an earlier call is given, too, is held for that one
        new = {number for number in cost.holds if profile.first_given(number) in (call, None)} - counted
        counted |= new
        held += cost.inner_bytes + sum(sizes[number] for number in new)
        replayed += cost.replayed_bytes
        backward = max(backward, replayed + cost.backward_bytes + rows.backward[block] - rows.backward[blocks[-1]])
    return Option(max(held, 0), seconds, max(backward, 0), max(forward, 0), num_units)
