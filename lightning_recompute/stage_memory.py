"""The memory of one rank of a pipeline over a step, action by action, as torch.distributed.pipelining runs them.

What a microbatch takes on a chunk of the model is known: in forward, while it waits, in backward. This adds what is
alive together: the microbatches in flight, hidden states and gradients on their way (also those that a variable of
torch's own loop still holds), and the parameters' gradients from the moment on at which they are there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class Kind(str, Enum):
    """What a rank may do: forward, backward, its parts for inputs and weights, room for what comes, sending."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"
    WEIGHT = "W"
    RECEIVE_HIDDEN = "RECV_F"
    RECEIVE_GRADIENT = "RECV_B"
    SEND_HIDDEN = "SEND_F"
    SEND_GRADIENT = "SEND_B"


KINDS = {"forward": Kind.FORWARD, "backward": Kind.BACKWARD, "input": Kind.INPUT, "weight": Kind.WEIGHT}
"""By the words of `schedule_actions`."""
KIND_WORDS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT: "backward for inputs",
    Kind.WEIGHT: "backward for weights",
}
"""What runs, for a table."""

Key = tuple[str, int, int]


class RankAction(NamedTuple):
    """One thing that a rank does.

    Args:
        kind: What.
        chunk: Of the model.
        microbatch: From 0.
    """

    kind: Kind
    chunk: int
    microbatch: int


@dataclass(frozen=True)
class SplitMemory:
    """A backward that runs in two parts.

    Args:
        input_bytes: The most in the part for inputs, all of this microbatch included.
        between_bytes: What waits for the other part, all of this microbatch included: what it received and sent, and
            their gradients.
        weight_bytes: The most in the part for weights, likewise; the gradients that it makes included.
        accumulating_bytes: The same where gradients are there before, without them.
    """

    input_bytes: int
    between_bytes: int
    weight_bytes: int
    accumulating_bytes: int


@dataclass(frozen=True)
class ChunkMemory:
    """What one microbatch takes on one chunk of the model.

    Args:
        received_bytes: The hidden state that comes; 0 on the first chunk.
        sent_bytes: The hidden state that goes on; 0 on the last chunk.
        forward_bytes: The most in forward, with what is received.
        waiting_bytes: From forward to backward, with what is received and sent.
        backward_bytes: The most in backward, all of this microbatch included, and the gradients that it makes.
        accumulating_bytes: The same where gradients are there before, without them.
        split: Of a backward in two parts; None where it runs in one.
    """

    received_bytes: int
    sent_bytes: int
    forward_bytes: int
    waiting_bytes: int
    backward_bytes: int
    accumulating_bytes: int
    split: SplitMemory | None = None


@dataclass(frozen=True)
class Window:
    """How gradients come together until an optimizer steps.

    Args:
        accumulating: Whether it steps after several batches.
        keeps_former: Whether gradients of the step before stay aside while a step makes others.
        in_place: Whether a later batch adds to the gradients of earlier ones at once. Else these stay aside meanwhile.
    """

    accumulating: bool = False
    keeps_former: bool = False
    in_place: bool = True


ONE_BATCH = Window()
"""Of an optimizer that steps after each batch."""


@dataclass(frozen=True)
class SpreadBytes:
    """What data parallelism makes of a rank's parameters and gradients, and what gathering and reducing them take.

    Args:
        shards_bytes: Of parameters that are sharded, all the time.
        whole_bytes: The same parameters gathered, while a schedule runs.
        gradients_bytes: Gradients between steps: shards, and those of parameters that are not sharded.
        gathering_bytes: The most while parameters are gathered, the whole ones included.
        reducing_bytes: The most while gradients are reduced, those before and after it included.
    """

    shards_bytes: int
    whole_bytes: int
    gradients_bytes: int
    gathering_bytes: int
    reducing_bytes: int


@dataclass(frozen=True)
class StageLevel:
    """Bytes of a rank at one moment of a step, besides parameters, optimizer state and batch.

    Args:
        action: What runs; None: what comes after all actions.
        gradient_bytes: Gradients of parameters that were there before.
        waiting_bytes: Held by other microbatches than the one that runs.
        passing_bytes: Hidden states and gradients on their way.
        running_bytes: All of the microbatch that runs.
        in_flight: Microbatches of all chunks that are held, the running one included.
        gathered_bytes: Whole parameters beside this rank's shards of them.
        name: Of what comes before or after all actions.
    """

    action: RankAction | None
    gradient_bytes: int
    waiting_bytes: int = 0
    passing_bytes: int = 0
    running_bytes: int = 0
    in_flight: int = 0
    gathered_bytes: int = 0
    name: str = ""

    @property
    def num_bytes(self) -> int:
        """All of it."""
        return self.gradient_bytes + self.waiting_bytes + self.passing_bytes + self.running_bytes + self.gathered_bytes


MemoryOf = Callable[[int, int], ChunkMemory]
"""What a microbatch takes on a chunk: called with the chunk and the microbatch's number."""


@dataclass(frozen=True)
class RankGradients:
    """Gradients of the parameters of a rank.

    Args:
        by_chunk: Bytes that the backward of each chunk leaves.
        all_bytes: Of all together: chunks may share some.
        former_bytes: Those that are there before the step, and stay aside while it makes others.
        accumulating: Whether the step adds to gradients that are there.
    """

    by_chunk: Mapping[int, int]
    all_bytes: int
    former_bytes: int = 0
    accumulating: bool = False


def stage_levels(
    schedule: str,
    actions: Sequence[RankAction],
    memory_of: MemoryOf,
    gradients: RankGradients,
) -> list[StageLevel]:
    """Go through a step of a rank.

    Args:
        schedule: `gpipe` or `1f1b`, whose loops are torch's own; others follow their list of actions.
        actions: Forwards and backwards in order; with transfers for schedules other than those two.
        memory_of: What each takes.
        gradients: Of the rank's parameters.

    Returns:
        The levels at which a peak may be, in the order of time.
    """
    step = _Step(memory_of, gradients, frozenset(action.chunk for action in actions))
    if schedule == "gpipe":
        step.run_gpipe(actions)
    elif schedule == "1f1b":
        step.run_one_forward_one_backward(actions)
    else:
        step.run_actions(actions)
    return step.levels


class _Step:
    """Names of variables and caches, and the tensors that each of them holds."""

    def __init__(self, memory_of: MemoryOf, gradients: RankGradients, chunks: frozenset[int]) -> None:
        self.levels: list[StageLevel] = []
        self._memory_of = memory_of
        self._gradients = gradients
        self._chunks = chunks
        self._made: set[int] = set(chunks) if gradients.accumulating else set()
        self._held: dict[str, tuple[Key, ...]] = {}
        self._sizes: dict[Key, int] = {}

    # ---- tensors

    def _received(self, action: RankAction) -> Key:
        # between chunks of one rank nothing is copied
        _, chunk, microbatch = action
        return ("out", chunk - 1, microbatch) if chunk - 1 in self._chunks else ("in", chunk, microbatch)

    def _gradient_in(self, action: RankAction) -> Key:
        return ("gradient", action.chunk - 1, action.microbatch)

    def _gradient_out(self, action: RankAction) -> Key:
        return ("gradient", action.chunk, action.microbatch)

    def _hold(self, name: str, *keys: Key) -> None:
        """A variable is given something else; the former value goes when the new one is there."""
        former = self._held.get(name, ())
        self._held[name] = (*former, *keys)
        self._passing()
        self._held[name] = keys

    def _drop(self, name: str) -> None:
        self._held.pop(name, None)

    def _passing(self) -> None:
        self._note(None, frozenset(), 0)

    def _note(self, action: RankAction | None, own: frozenset[Key], running: int) -> None:
        alive = {key for keys in self._held.values() for key in keys} - own
        waiting = [name for name in self._held if name.startswith("microbatch")]
        theirs = {key for name in waiting for key in self._held[name]} & alive
        self.levels.append(
            StageLevel(
                action,
                self._gradient_bytes(),
                sum(self._sizes[key] for key in theirs),
                sum(self._sizes[key] for key in alive - theirs),
                running,
                len(waiting) + (action is not None and action.kind == Kind.FORWARD),
            )
        )

    def _gradient_bytes(self) -> int:
        made = sum(self._gradients.by_chunk[chunk] for chunk in self._made)
        return min(made, self._gradients.all_bytes) + self._gradients.former_bytes

    # ---- what runs

    def _make_room(self, action: RankAction, name: str) -> None:
        memory = self._memory_of(action.chunk, action.microbatch)
        if action.kind == Kind.RECEIVE_HIDDEN:
            self._sizes[key := self._received(action)] = memory.received_bytes
        else:
            self._sizes[key := self._gradient_out(action)] = memory.sent_bytes
        self._hold(name, key)

    def _forward(self, action: RankAction) -> None:
        _, chunk, microbatch = action
        memory = self._memory_of(chunk, microbatch)
        received, out, graph = self._received(action), ("out", chunk, microbatch), ("graph", chunk, microbatch)
        self._note(action, frozenset({received}), memory.forward_bytes)
        self._sizes.setdefault(received, memory.received_bytes)
        self._sizes[out] = memory.sent_bytes
        self._sizes[graph] = memory.waiting_bytes - memory.received_bytes - memory.sent_bytes
        self._held[_name(action)] = (received, out, graph)

    def _backward(self, action: RankAction) -> None:
        kind, chunk, microbatch = action
        memory = self._memory_of(chunk, microbatch)
        gradient_in, gradient_out = self._gradient_in(action), self._gradient_out(action)
        self._sizes.setdefault(gradient_out, memory.sent_bytes)
        self._sizes[gradient_in] = memory.received_bytes
        own = frozenset((*self._held[_name(action)], gradient_out))
        is_split = memory.split is not None and kind != Kind.BACKWARD and chunk > 0
        if kind == Kind.INPUT:
            held = (*self._held[_name(action)], gradient_out)
            if is_split:
                assert memory.split is not None
                self._note(action, own, memory.split.input_bytes)
                self._sizes["graph", chunk, microbatch] = memory.split.between_bytes - 2 * (
                    memory.received_bytes + memory.sent_bytes
                )
                held = (*held, gradient_in)
            self._held[_name(action)] = held
            return
        before = memory.backward_bytes, memory.accumulating_bytes
        if is_split:
            assert memory.split is not None
            before = memory.split.weight_bytes, memory.split.accumulating_bytes
        self._note(action, own, before[chunk in self._made])
        self._made.add(chunk)
        self._drop(_name(action))

    # ---- torch's loops

    def run_gpipe(self, actions: Sequence[RankAction]) -> None:
        """All forwards, then all backwards; what was sent is held to the end."""
        sent: list[Key] = []
        for action in actions:
            if action.kind == Kind.FORWARD:
                if action.chunk:
                    self._make_room(action._replace(kind=Kind.RECEIVE_HIDDEN), "operations")
                self._forward(action)
                sent.append(("out", action.chunk, action.microbatch))
            else:
                self._make_room(action._replace(kind=Kind.RECEIVE_GRADIENT), "operations")
                self._backward(action)
                sent.append(self._gradient_in(action))
            self._held["sent"] = tuple(sent)
            self._hold("operations", sent[-1])

    def run_one_forward_one_backward(self, actions: Sequence[RankAction]) -> None:
        """Variables hold the last of each kind of transfer until the next one is there."""
        last = max(place for place, action in enumerate(actions) if action.kind == Kind.FORWARD)
        warmup = next(place for place, action in enumerate(actions) if action.kind == Kind.BACKWARD)
        for place, action in enumerate(actions):
            if action.kind == Kind.FORWARD:
                if action.chunk:
                    self._make_room(action._replace(kind=Kind.RECEIVE_HIDDEN), "hidden states received")
                self._forward(action)
                out = ("out", action.chunk, action.microbatch)
                self._hold("hidden states sent", out)
                if place < warmup - 1:
                    self._hold("being sent", out)
            else:
                self._make_room(action._replace(kind=Kind.RECEIVE_GRADIENT), "gradients received")
                self._backward(action)
                self._hold("gradients sent", self._gradient_in(action))
                if place > last:
                    self._hold("being sent", self._gradient_in(action))

    def run_actions(self, actions: Sequence[RankAction]) -> None:
        """One transfer of a kind is underway at a time."""
        for action in actions:
            kind, chunk, microbatch = action
            if kind in (Kind.RECEIVE_HIDDEN, Kind.RECEIVE_GRADIENT):
                what = "hidden" if kind == Kind.RECEIVE_HIDDEN else "gradient"
                self._make_room(action, f"{what} {chunk} {microbatch}")
            elif kind == Kind.FORWARD:
                self._forward(action)
                self._drop(f"hidden {chunk} {microbatch}")
                if chunk + 1 in self._chunks:
                    self._hold(f"hidden {chunk + 1} {microbatch}", ("out", chunk, microbatch))
            elif kind == Kind.SEND_HIDDEN:
                self._hold(f"hidden state underway from {chunk}", ("out", chunk, microbatch))
            elif kind == Kind.SEND_GRADIENT:
                self._hold(f"gradient underway from {chunk}", self._gradient_in(action))
                self._drop(f"made {chunk} {microbatch}")
            else:
                self._backward(action)
                if kind != Kind.WEIGHT:
                    self._drop(f"gradient {chunk} {microbatch}")
                    if chunk - 1 in self._chunks:
                        self._hold(f"gradient {chunk - 1} {microbatch}", self._gradient_in(action))
                    elif chunk:
                        self._hold(f"made {chunk} {microbatch}", self._gradient_in(action))


def _name(action: RankAction) -> str:
    return f"microbatch {action.microbatch} of {action.chunk}"


def highest(levels: Sequence[StageLevel]) -> StageLevel:
    """The highest of some levels, the first of several."""
    return max(levels, key=lambda level: level.num_bytes)
