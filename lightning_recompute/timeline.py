"""The memory of one training step under a plan, moment by moment.

A step is a sequence of moments: what stands between blocks, and forward and backward of each block. Of each is known
what the model holds then outside of its blocks (`Skeleton`, measured once) and what each block adds under each action
(`CallCost`). Their sum at every moment is the step's memory; its largest value is the peak. All numbers are ints, and
nothing here runs a model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

MomentKind = Literal["between", "forward", "backward"]


@dataclass(frozen=True)
class Moment:
    """A stretch of a step.

    Attributes:
        kind: Forward or backward of a block, or what stands between two of those.
        call: The number of the block's call; -1 between blocks.
        num_bytes: Live outside of blocks when the block begins; between blocks the most in that stretch.
        alive: Numbers of the tensors into and out of blocks that are among those bytes.
        in_backward: Whether the loss has been computed.
    """

    kind: MomentKind
    call: int
    num_bytes: int
    alive: frozenset[int]
    in_backward: bool


@dataclass(frozen=True)
class Passage:
    """What goes into a call of a block and comes out of it.

    Attributes:
        name: The block's name.
        given: Numbers of the tensors it is given, by position.
        made: Numbers of the tensors it returns, by index.
    """

    name: str
    given: tuple[int, ...]
    made: tuple[int, ...]


@dataclass(frozen=True)
class Skeleton:
    """A step without what blocks do inside.

    Attributes:
        moments: In the order in which they happen.
        passages: Calls of blocks, in the order of their forwards.
        sizes: Bytes of the tensors into and out of blocks, by number; 0 for what was there before the step.
        gradient_bytes: Gradients of all trainable parameters.
        has_gradients: Whether gradients of blocks are among the bytes of the moments: those that the step makes, and
            those that are there before.
        middle: What is there when forward is over and backward has not begun.
    """

    moments: tuple[Moment, ...]
    passages: tuple[Passage, ...]
    sizes: tuple[int, ...]
    gradient_bytes: int
    has_gradients: bool = False
    middle: Moment | None = None

    def waiting_bytes(self, costs: Sequence[CallCost]) -> int:
        """What waits for backward when forward is over.

        Args:
            costs: What each call adds.
        """
        assert self.middle is not None
        held = frozenset(number for cost in costs for number in cost.holds) - self.middle.alive
        inside = sum(cost.inner_bytes for cost in costs) + sum(self.sizes[number] for number in held)
        return self.middle.num_bytes + inside


@dataclass(frozen=True)
class CallCost:
    """What a call of a block adds to the skeleton under an action.

    Attributes:
        inner_bytes: Held between forward and backward, without any tensor that the block is given or returns.
        holds: Numbers of those that it holds.
        cached_bytes: Alive besides until the loss is computed.
        forward_bytes: The most in its forward, above what is there when it begins.
        backward_bytes: The most in its backward, above what is there when it begins.
        gradient_bytes: Gradients that its backward leaves; 0 where they were there before.
        replayed_bytes: In a unit of several blocks: what is held, besides `inner_bytes`, from the beginning of the
            unit's backward to the end of this call's.
    """

    inner_bytes: int
    holds: frozenset[int]
    cached_bytes: int
    forward_bytes: int
    backward_bytes: int
    gradient_bytes: int
    replayed_bytes: int = 0


@dataclass(frozen=True)
class Level:
    """Bytes at one moment of a step, above what is there before it.

    Attributes:
        moment: When.
        outside_bytes: What the model holds outside of its blocks.
        held_bytes: What blocks hold for backward.
        transient_bytes: What is alive only in the forward or backward of the block that runs.
        gradient_bytes: Gradients of parameters inside of blocks, and in forward all those of the step before.
    """

    moment: Moment
    outside_bytes: int
    held_bytes: int
    transient_bytes: int
    gradient_bytes: int

    @property
    def num_bytes(self) -> int:
        """All of it."""
        return self.outside_bytes + self.held_bytes + self.transient_bytes + self.gradient_bytes


@dataclass
class _State:
    """What is there while a step goes on."""

    inner_bytes: int = 0
    cached_bytes: int = 0
    # for each tensor into or out of blocks, how many calls hold it
    holders: dict[int, int] = field(default_factory=dict)
    replayed: dict[int, int] = field(default_factory=dict)
    gradients: dict[str, int] = field(default_factory=dict)

    def hold(self, cost: CallCost) -> None:
        self.inner_bytes += cost.inner_bytes
        self.cached_bytes += cost.cached_bytes
        for number in cost.holds:
            self.holders[number] = self.holders.get(number, 0) + 1

    def release(self, cost: CallCost) -> None:
        self.inner_bytes -= cost.inner_bytes
        for number in cost.holds:
            self.holders[number] -= 1
            if not self.holders[number]:
                del self.holders[number]


def levels(
    skeleton: Skeleton,
    costs: Sequence[CallCost],
    units: Sequence[Sequence[int]] = (),
    *,
    former_gradients: bool = True,
    accumulating: bool = False,
) -> Iterator[Level]:
    """Go through a step.

    Args:
        skeleton: The step without its blocks.
        costs: What each call adds, in the order of `skeleton.passages`.
        units: Numbers of calls that are recomputed together, where those are several.
        former_gradients: Whether the gradients of the step before are there until the loss is computed, as under
            Lightning.
        accumulating: Whether gradients are there all the time; `costs` and `skeleton` are then those of such a step.

    Yields:
        Bytes at each moment, without parameters, optimizer state and whatever else is there before the step.
    """
    state = _State()
    unit_of = {call: tuple(unit) for unit in units for call in unit}
    forward_gradients = skeleton.gradient_bytes if former_gradients or accumulating else 0
    for moment in skeleton.moments:
        if moment.in_backward:
            state.cached_bytes = 0
        gradients = sum(state.gradients.values()) if moment.in_backward else forward_gradients
        if accumulating:
            gradients = 0 if skeleton.has_gradients else skeleton.gradient_bytes
        transient = 0
        cost = costs[moment.call] if moment.kind != "between" else None
        if cost is not None and moment.kind == "forward":
            transient = cost.forward_bytes
        elif cost is not None:
            if moment.call not in state.replayed:
                state.replayed |= {call: costs[call].replayed_bytes for call in unit_of.get(moment.call, ())}
            transient = cost.backward_bytes
        besides = sum(skeleton.sizes[number] for number in state.holders.keys() - moment.alive)
        held = state.inner_bytes + state.cached_bytes + besides + sum(state.replayed.values())
        yield Level(moment, moment.num_bytes, held, transient, gradients)
        if cost is not None and moment.kind == "forward":
            state.hold(cost)
        elif cost is not None:
            state.release(cost)
            state.replayed[moment.call] = 0
            if not skeleton.has_gradients:
                state.gradients[skeleton.passages[moment.call].name] = cost.gradient_bytes


def peak(found: Iterator[Level]) -> Level:
    """The highest level, the first of several."""
    return max(found, key=lambda level: level.num_bytes)
