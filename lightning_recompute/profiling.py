"""What a model's step needs under any plan: measured once, on one batch, without a trace.

Two forwards and one backward of the model run with its blocks' graphs left out (`capture`, `skeleton`), and each
distinct block runs alone under each action (`block_cost`), on fake tensors where it can. `Profile.levels` puts them
together for a plan.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_recompute.agreement import ALONE, Agreement
from lightning_recompute.block_time import measure_flops, measure_seconds
from lightning_recompute.blocks import BlockList
from lightning_recompute.capture import BlockCall, Capture, capture_calls
from lightning_recompute.inspection import Costs
from lightning_recompute.ledger import allocated_bytes, storages
from lightning_recompute.optimizer_cost import OptimizerCost, measure_optimizers
from lightning_recompute.plan import Action, Full, Keep, RecomputePlan, SaveOps, Segment
from lightning_recompute.skeleton import run_skeleton
from lightning_recompute.timeline import CallCost, Level, Skeleton, levels
from lightning_recompute.tried_step import LONE_STEP, TriedStep

SCALARS_BYTES = 1024
"""Room for the scalars of a step."""


@dataclass(frozen=True)
class Statics:
    """What is there during the whole step.

    Attributes:
        parameters_bytes: Parameters and buffers, each storage once.
        optimizer_bytes: Optimizer state from the second step on.
        batch_bytes: The batch.
        other_bytes: What else is there: scalars (the loss, counters of steps), and what was said to be, such as the
            buckets of data-parallel gradients.
    """

    parameters_bytes: int
    optimizer_bytes: int
    batch_bytes: int
    other_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        """All of it."""
        return self.parameters_bytes + self.optimizer_bytes + self.batch_bytes + self.other_bytes


class Profile:
    """The measured parts of a model's step.

    Args:
        block_lists: The model's block lists; indices of plans run on through them.
        capture: How its blocks are called.
        skeleton: What it holds outside of them.
        accumulating: The same where gradients are there already: of each kind of step of which that is so.
        statics: What is there all the time.
        optimizer: What the optimizer needs.
        costs: Measures the blocks.
        tried: How a step is run.
        agreement: With the processes that measure the same together.

    Attributes:
        names: Names of the blocks in all lists.
        spans: For each list the indices of its blocks in plans.
        same_as: Of a block that stands in a list several times: the index under which it is counted, for the others.
    """

    def __init__(
        self,
        block_lists: Sequence[BlockList],
        capture: Capture,
        skeleton: Skeleton,
        accumulating: Sequence[Skeleton],
        statics: Statics,
        optimizer: OptimizerCost,
        costs: Costs,
        tried: TriedStep = LONE_STEP,
        agreement: Agreement = ALONE,
    ) -> None:
        self.block_lists = tuple(block_lists)
        self.capture = capture
        self.skeleton = skeleton
        self.accumulating = tuple(accumulating)
        self.statics = statics
        self.optimizer = optimizer
        self.costs = costs
        self.tried = tried
        self.agreement = agreement
        names = [name for block_list in block_lists for name in block_list.names]
        self.names = tuple(names)
        self._index = {name: index for index, name in reversed(list(enumerate(names)))}
        blocks = [block for block_list in block_lists for block in block_list.blocks]
        called = {id(blocks[index]): index for index in map(self._index.__getitem__, capture.names)}
        self.same_as = {
            index: called[id(block)] for index, block in enumerate(blocks) if called.get(id(block), index) != index
        }
        starts = [0, *itertools.accumulate(len(block_list) for block_list in block_lists)]
        self.spans = tuple(range(start, stop) for start, stop in itertools.pairwise(starts))
        self._first_given: dict[int, int] = {}
        for call, passage in enumerate(skeleton.passages):
            for number in passage.given:
                self._first_given.setdefault(number, call)
        # states of the CPU's random numbers, which frames keep, are on no other device
        is_on_cpu = all(kind.call.device.type == "cpu" for kind in capture.kinds)
        self._random_bytes = torch.get_rng_state().nbytes if is_on_cpu else 0
        self._last: BlockCall | None = None
        self._seconds: dict[tuple[int, Action], float] = {}
        self._flops: dict[tuple[int, Action], int] = {}

    @property
    def num_blocks(self) -> int:
        """Blocks in all lists."""
        return len(self.names)

    @property
    def has_units(self) -> bool:
        """Whether several blocks can be one unit: not where each is sharded by itself."""
        return not self.tried.gathers

    def calls_of(self, block: int) -> list[int]:
        """Numbers of the calls of a block, by its index in a plan; none if backward does not come to it."""
        return [call for call, name in enumerate(self.capture.names) if self._index[name] == block]

    def hold_last_gradient(self) -> None:
        """Somebody outside holds the gradient of what the last call returned, as long as backward runs."""
        self._last = copy.copy(self.kind_of(len(self.capture.order) - 1))
        self._last.holds_gradients = True

    def release(self) -> None:
        """Let go of the tensors that blocks were called with; from now on only what was measured is known."""
        for kind in self.capture.kinds:
            kind.call.release()
        if self._last is not None:
            self._last.release()

    def block_of(self, call: int) -> int:
        """Index in a plan of the block of a call."""
        return self._index[self.capture.names[call]]

    def first_given(self, number: int) -> int | None:
        """The first call that is given a tensor, by the tensor's number in the skeleton; None if none is."""
        return self._first_given.get(number)

    # ---- bytes

    def levels(self, plan: RecomputePlan) -> Iterator[Level]:
        """Bytes at each moment of a step under a plan, without the statics; of the heavier step where two differ.

        Args:
            plan: For all of the model's blocks.
        """
        yield from levels(self.skeleton, self.call_costs(plan), self.units(plan))
        yield from self.accumulating_levels(plan)

    def accumulating_levels(self, plan: RecomputePlan) -> Iterator[Level]:
        """The same of steps whose gradients are added to some that are there, if such were measured.

        Args:
            plan: For all of the model's blocks.
        """
        for skeleton in self.accumulating:
            costs = self.call_costs(plan, accumulating=True)
            yield from levels(skeleton, costs, self.units(plan), accumulating=True)

    def peak_bytes(self, plan: RecomputePlan) -> int:
        """The peak of a step under a plan, statics and the optimizer's step included."""
        return self.statics.num_bytes + max(max(level.num_bytes for level in self.levels(plan)), self.optimizer_bytes)

    @property
    def optimizer_bytes(self) -> int:
        """The most in the optimizer's step, without the statics."""
        return self.skeleton.gradient_bytes + self.optimizer.transient_bytes

    def actions(self, plan: RecomputePlan) -> list[Action]:
        """What a plan does to each call."""
        by_block = [segment.action for segment in plan.segments for _ in range(segment.start, segment.stop)]
        return [by_block[self._index[name]] for name in self.capture.names]

    def units(self, plan: RecomputePlan) -> list[tuple[int, ...]]:
        """Calls that a plan recomputes together, where those are several: once for each time that they follow.

        Raises:
            ValueError: There are some, and blocks are sharded one by one.
        """
        found = []
        for segment in plan.segments:
            if isinstance(segment.action, Full | SaveOps) and segment.stop - segment.start > 1:
                if not self.has_units:
                    raise ValueError(
                        f"blocks {segment.start}..{segment.stop - 1} are one unit, and were measured while each of "
                        "them was sharded by itself: take units of one block"
                    )
                rounds = [self.calls_of(block) for block in range(segment.start, segment.stop)]
                found += list(zip(*(calls for calls in rounds if calls), strict=False))
        return found

    def call_costs(self, plan: RecomputePlan, *, accumulating: bool = False) -> list[CallCost]:
        """What each call adds under a plan."""
        actions = self.actions(plan)
        costs = [self.call_cost(call, actions, accumulating=accumulating) for call in range(len(actions))]
        for unit in self.units(plan):
            for call, cost in zip(unit, self.unit_costs(unit, actions, accumulating=accumulating), strict=True):
                costs[call] = cost
        return costs

    def call_cost(self, call: int, actions: Sequence[Action], *, accumulating: bool = False) -> CallCost:
        """What a call adds under the actions of a plan, as a unit of its own."""
        cost = self.costs.of(self.kind_of(call), actions[call])
        phases = cost.phases
        is_last = self._last is not None and call + 1 == len(actions)
        ending = self.costs.of(self._last, actions[call]).phases if is_last and self._last is not None else phases
        passage = self.skeleton.passages[call]
        # of a block that is called several times, gradients wait for those of its first call
        accumulating = accumulating and self.capture.names[call] not in self.capture.names[:call]
        # an input that is freed where it was made is made again for this block's backward
        frees = call in self.capture.chained and self._frees_output(call - 1, actions[call - 1])
        given, inner_bytes, again = (
            (phases.chained.given, phases.chained.inner_bytes, phases.chained.again_bytes)
            if frees
            else (phases.given, phases.inner_bytes, 0)
        )
        # a later block that makes its keys and values again remembers the cache as it was given it
        remembered = phases.appended_bytes if self._remembers_cache(call, actions) else 0
        return CallCost(
            inner_bytes=inner_bytes + remembered,
            holds=frozenset([passage.given[p] for p in given] + [passage.made[index] for index in phases.made]),
            cached_bytes=phases.cached_bytes - remembered,
            forward_bytes=phases.forward_bytes,
            backward_bytes=again + (ending.accumulating_bytes if accumulating else ending.backward_bytes),
            gradient_bytes=0 if accumulating else cost.gradient_bytes,
        )

    def _remembers_cache(self, call: int, actions: Sequence[Action]) -> bool:
        """Whether a block after a call that appends to a cache of keys and values runs on a copy of that cache."""
        kept = self.costs.of(self.kind_of(call), Keep()).phases.appended_bytes
        later = range(call + 1, len(actions)) if kept else ()
        return any(not self.costs.of(self.kind_of(each), actions[each]).phases.appended_bytes for each in later)

    def _frees_output(self, call: int, action: Action) -> bool:
        """Whether what a call returns is freed where the next call would hold it, if that one frees such things too."""
        phases = self.costs.of(self.kind_of(call), action).phases
        return (phases.chained.given, phases.chained.inner_bytes) != (phases.given, phases.inner_bytes)

    def unit_costs(
        self, unit: Sequence[int], actions: Sequence[Action], *, accumulating: bool = False
    ) -> list[CallCost]:
        """What the calls of a unit of several blocks add: they keep the unit's inputs, and replay all at once."""
        keeping: list[Action] = [Keep()] * len(actions)
        kept = [self.call_cost(call, keeping, accumulating=accumulating) for call in unit]
        alone = [self.call_cost(call, actions, accumulating=accumulating) for call in unit]
        inside = frozenset(number for call in unit for number in self.skeleton.passages[call].made)
        sizes = self.skeleton.sizes
        # what frames hold for themselves is not made again; operators' outputs that were saved are let go of
        frames = [self.costs.of(self.kind_of(call), Full()).phases.inner_bytes for call in unit]
        inner = [
            keep.inner_bytes - own.inner_bytes + frame for keep, own, frame in zip(kept, alone, frames, strict=True)
        ]
        # what goes from block to block in the unit is let go of with the first of those that hold it
        holder = {number: index for index, keep in reversed(list(enumerate(kept))) for number in keep.holds & inside}
        replayed = list(inner)
        for number, index in holder.items():
            replayed[index] += sizes[number]
        # of blocks that draw, a unit keeps the random state of the first; one more while it runs on, or is replayed
        drawing = [call for call, frame in zip(unit, frames, strict=True) if 0 < self._random_bytes <= frame]
        extra = [self._random_bytes if call in drawing[1:] else 0 for call in unit]
        # while a block is replayed, those before it have been, and what they returned is there
        running = []
        there = 0
        for index, (call, keep, own) in enumerate(zip(unit, kept, alone, strict=True)):
            replay_bytes = keep.forward_bytes + (self._random_bytes if drawing else 0)
            if index + 1 == len(unit):  # it stops at the last value that is needed, as alone
                replay_bytes = min(replay_bytes, own.backward_bytes)
            running.append(there + replay_bytes - sum(replayed))
            there += inner[index] + sum(sizes[number] for number in self.skeleton.passages[call].made)
        found = []
        for index, (keep, own) in enumerate(zip(kept, alone, strict=True)):
            is_last = index + 1 == len(unit)
            found.append(
                CallCost(
                    inner_bytes=own.inner_bytes - extra[index],
                    holds=own.holds - inside,
                    cached_bytes=own.cached_bytes,
                    forward_bytes=own.forward_bytes + extra[index],
                    backward_bytes=max(keep.backward_bytes, *running) if is_last else keep.backward_bytes,
                    gradient_bytes=own.gradient_bytes,
                    replayed_bytes=replayed[index],
                )
            )
        return found

    def kind_of(self, call: int) -> BlockCall:
        """The call that stands for a call and all that are like it."""
        return self.capture.kinds[self.capture.order[call]].call

    # ---- time

    def flops(self, call: int, action: Action) -> int:
        """FLOPs of forward and backward of a call under an action."""
        key = self.capture.order[call], action
        if key not in self._flops:
            kind = self.kind_of(call)
            with self.tried.whole(kind.module):
                self._flops[key] = measure_flops(kind, action, exact=self.costs.exact)
        return self._flops[key]

    def time(self, actions: Iterable[Action]) -> None:
        """Measure the time of all distinct calls under some actions, for `seconds`."""
        for index, kind in enumerate(self.capture.kinds):
            due = [action for action in actions if (index, action) not in self._seconds]
            with self.tried.whole(kind.call.module):
                found = self.agreement.largest(measure_seconds(kind.call, due))
            for action, seconds in zip(due, found, strict=True):
                self._seconds[index, action] = seconds

    def seconds(self, call: int, action: Action) -> float:
        """Seconds of forward and backward of a call under an action; `time` has measured them."""
        return self._seconds[self.capture.order[call], action]


def everything_kept(profile: Profile) -> RecomputePlan:
    """The plan that recomputes nothing."""
    return RecomputePlan((Segment(0, profile.num_blocks, Keep()),))


def profile_step(
    module: nn.Module,
    run: Callable[[], object],
    block_lists: Sequence[BlockList],
    *,
    optimizers: Iterable[Optimizer] = (),
    batch: Any = None,
    accumulating: bool = False,
    other_bytes: int = 0,
    exact: bool = True,
    tried: TriedStep = LONE_STEP,
    agreement: Agreement = ALONE,
) -> Profile:
    """Measure what a model's step needs.

    Afterwards parameters, gradients, buffers, random streams, modes, hooks and optimizers are what they were.

    Args:
        module: The model, in training mode, on its device; a plan that is applied to it is left out of account.
        run: Runs its training forward once and returns its loss; see `run_skeleton`.
        block_lists: Where its blocks are.
        optimizers: That train it.
        batch: The batch that `run` uses; its tensors are part of the statics.
        accumulating: Whether an optimizer step follows several backward passes.
        other_bytes: What else is there all the time.
        exact: Whether blocks run on real tensors at once; see `measure_bytes`.
        tried: How a step is run.
        agreement: With the processes that measure the same together.

    Raises:
        ValueError: What `capture_calls` and `run_skeleton` refuse; or the processes call different blocks.
    """
    with tried.trying():
        capture = capture_calls(module, lambda: tried.forward(run), block_lists)
    if not agreement.is_same([len(capture.kinds), *capture.order]):
        raise ValueError(
            "the processes call different blocks on their batches, so that they cannot be measured together: a "
            "memory_budget needs steps that are alike on all; give a plan, or the six words"
        )
    skeleton = run_skeleton(module, run, block_lists, tried=tried)
    if len(skeleton.passages) != len(capture.order):
        raise ValueError(
            f"the model calls {len(capture.order)} blocks in one forward and {len(skeleton.passages)} in the next: a "
            "step whose blocks change from one to the next cannot be planned; give a plan, or the six words"
        )
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    optimizer = measure_optimizers(optimizers)
    state = [*module.parameters(), *module.buffers()]
    own = storages(state, device).keys()
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    others = [tensor for tensor in tensors if own.isdisjoint(storages([tensor], device))]
    statics = Statics(
        allocated_bytes(state, device),
        optimizer.state_bytes,
        allocated_bytes(others, device),
        SCALARS_BYTES + other_bytes,
    )
    kinds = [] if not accumulating else [True, False] if tried.has_middle else [True]
    accumulated = [
        run_skeleton(module, run, block_lists, accumulating=True, tried=tried, reduces=reduces) for reduces in kinds
    ]
    costs = Costs(exact=exact, whole=tried.whole)
    return Profile(block_lists, capture, skeleton, accumulated, statics, optimizer, costs, tried, agreement)
