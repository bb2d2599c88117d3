"""A model measured whole on one microbatch, to be divided over the stages of a pipeline in any way.

It is measured as one tensor-parallel rank has it (`rank_view`), with gradients that are there already, as in all
microbatches but the first.
"""

from __future__ import annotations

import copy
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.flop_counter import FlopCounterMode

from lightning_recompute.blocks import BlockList
from lightning_recompute.ledger import allocated_bytes
from lightning_recompute.only_tried import only_tried
from lightning_recompute.optimizer_cost import OptimizerCost, measure_optimizers
from lightning_recompute.plan import Action, Full, Keep
from lightning_recompute.probe import Probe, Step, loss_of, only_list, probe_step
from lightning_recompute.profiling import Profile, profile_step
from lightning_recompute.rank_view import untied
from lightning_recompute.reduction import local_part
from lightning_recompute.split_backward import SplitBlock, split_block, split_head
from lightning_recompute.stage_options import Candidate, Prices, action_seconds, candidates
from lightning_recompute.step_time import ChunkSeconds
from lightning_recompute.throughput import own_formulas
from lightning_recompute.tried_step import LONE_STEP, TriedStep
from lightning_recompute.untouched import undone

_GIVEN = 3
"""Hidden states of what a recomputed part of a block is given, at most."""

_BACKWARD = 2
"""A backward's FLOPs over those of its forward."""


@dataclass(frozen=True)
class MeasuredModel:
    """A model that was measured whole, to be divided over stages in any way.

    Attributes:
        profile: Its step on one microbatch, uses of tied parameters apart.
        probe: What the step uses where.
        parameters: What this rank has of each parameter, by its first name.
        trained: Which of them have gradients.
        buffers_bytes: Of all buffers, which every stage has.
        optimizers: That train it, with the names of their parameters.
        found: The actions that may be worth while; see `candidates`.
        prices: What turns counts into seconds; None: blocks were timed.
        blocks: Seconds of each block, nothing recomputed.
        ends: Seconds of what comes before and after the blocks.
        measure_head: What comes after the blocks, in the two parts of its backward; see `split_backward.split_head`.
    """

    profile: Profile
    probe: Probe
    parameters: Mapping[str, Tensor]
    trained: frozenset[str]
    buffers_bytes: int
    optimizers: tuple[tuple[Optimizer, Mapping[int, str]], ...]
    found: tuple[tuple[Candidate, ...], ...]
    prices: Prices | None
    blocks: tuple[ChunkSeconds, ...]
    ends: tuple[ChunkSeconds, ChunkSeconds]
    measure_head: Callable[[], SplitBlock]

    def with_action(self, action: Action) -> MeasuredModel:
        """The same with an action among those that may be worth while, on every kind of block.

        Args:
            action: `Full`, whose input may be kept as a part on each tensor-parallel rank, or any other.

        Raises:
            ValueError: The blocks do not admit it.
        """
        sought = Full() if isinstance(action, Full) and action.inputs == "shard" else action
        found = []
        for index, of_kind in enumerate(self.found):
            if all(candidate.action != sought for candidate in of_kind):
                call = self.profile.capture.order.index(index)
                self.profile.costs.of(self.profile.kind_of(call), sought)  # refuses what the block does not admit
                seconds = action_seconds(self.profile, call, [sought], self.prices)[sought]
                of_kind = (*of_kind, Candidate(sought, seconds))
            found.append(of_kind)
        return replace(self, found=tuple(found))

    def split_block(self, index: int, action: Action) -> SplitBlock:
        """What a microbatch takes on a block in the two parts of its backward.

        Args:
            index: Of the block.
            action: How it is recomputed: what it makes again is there in both parts.
        """
        kind = self.profile.capture.order[index]
        call = self.profile.capture.order.index(kind)
        hidden = self.probe.form.blocks[call].hidden.num_bytes
        if kind not in self._split:
            kept = self.profile.call_cost(call, self._kept).inner_bytes + hidden
            self._split[kind] = split_block(self.profile.kind_of(call), kept, exact=self.profile.costs.exact)
        # a part that is recomputed keeps beside it what it is given: queries, keys and values, at most
        is_part = not isinstance(action, Keep | Full)
        return self._split[kind].with_more(_GIVEN * hidden if is_part else 0)

    @functools.cached_property
    def split_head(self) -> SplitBlock:
        """What a microbatch takes after the blocks in the two parts of its backward; see `measure_head`."""
        return self.measure_head()

    @functools.cached_property
    def _split(self) -> dict[int, SplitBlock]:
        return {}

    @property
    def _kept(self) -> list[Action]:
        return [Keep()] * len(self.profile.capture.order)

    def optimizer_cost(self, names: frozenset[str]) -> OptimizerCost:
        """What the optimizers hold and need that train some of the parameters.

        Args:
            names: Of the parameters.
        """
        return measure_optimizers([self._part(*pair, names) for pair in self.optimizers])

    def _part(self, optimizer: Optimizer, known: Mapping[int, str], names: frozenset[str]) -> Optimizer:
        part = copy.copy(optimizer)
        part.state = defaultdict(dict)
        part.param_groups = []
        for group in optimizer.param_groups:
            mine = [known[id(parameter)] for parameter in group["params"] if known.get(id(parameter)) in names]
            params = [nn.Parameter(self.parameters[name], name in self.trained) for name in mine]
            part.param_groups.append({**group, "params": params})
        return part


def measure_model(
    module: nn.Module,
    step: Step,
    microbatch: Any,
    *,
    whole: Mapping[str, nn.Parameter],
    blocks: str | Sequence[str] | None = None,
    optimizers: Sequence[Optimizer] = (),
    prices: Prices | None = None,
    exact: bool = True,
    tried: TriedStep = LONE_STEP,
    searches: bool = True,
) -> MeasuredModel:
    """Measure a model's step on a microbatch.

    Args:
        module: The model, as one tensor-parallel rank has it.
        step: Runs the training step on a microbatch and returns its loss.
        microbatch: One of them.
        whole: The parameters that the optimizers know, by name: those from before the model was divided.
        blocks: Where its blocks are.
        optimizers: That train it.
        prices: What turns counts into seconds; None: blocks are timed on their device.
        exact: Whether blocks run on real tensors at once; see `measure_bytes`.
        tried: How a step is run.
        searches: Whether plans are to be searched for: then all actions that may be worth while are measured, else
            keeping and full recompute only, and what is asked for by `with_action`.

    Raises:
        ValueError: The model cannot be divided over stages (`probe_step`), or not be measured (`profile_step`).
    """
    with only_tried(module):
        block_list = only_list(module, blocks)
        probe = probe_step(module, block_list, lambda given: tried.forward(lambda: step(given)), microbatch)
        with untied(module):
            measure = functools.partial(
                profile_step,
                module,
                lambda: step(microbatch),
                [block_list],
                batch=microbatch,
                accumulating=True,
                exact=exact,
                tried=tried,
            )
            profile = measure()
            if not exact and tried is not LONE_STEP:
                # DTensor tries each operator that is new to it on whole tensors, which a ledger of fake ones counts
                for kind in profile.capture.kinds:
                    profile.costs.of(kind.call, Keep())
                profile = measure()
            once = functools.partial(tried.forward, lambda: step(microbatch))
            ends = _flops_of_ends(module, block_list, once)
        device = next(module.parameters()).device

        def head() -> SplitBlock:
            with only_tried(module), untied(module):
                return split_head(module, block_list, probe.form.blocks[-1], lambda: loss_of(once()), device)

        found = tuple(map(tuple, candidates(profile, prices) if searches else _two_actions(profile, prices)))
        timed = [_block_seconds(profile, index, prices) for index in range(len(profile.capture.kinds))]
        rate = _seconds_per_flop(profile, timed, prices)
        parameters = {name: local_part(parameter.detach()) for name, parameter in module.named_parameters()}
        known = {id(parameter): name for name, parameter in whole.items()}
        return MeasuredModel(
            profile=profile,
            probe=probe,
            parameters=parameters,
            trained=frozenset(name for name, parameter in module.named_parameters() if parameter.requires_grad),
            buffers_bytes=allocated_bytes(module.buffers(), device),
            optimizers=tuple((optimizer, known) for optimizer in optimizers),
            found=found,
            prices=prices,
            blocks=tuple(timed[index] for index in profile.capture.order),
            ends=(_end_seconds(ends[0] * rate), _end_seconds(ends[1] * rate)),
            measure_head=head,
        )


def _two_actions(profile: Profile, prices: Prices | None) -> list[list[Candidate]]:
    calls = [profile.capture.order.index(kind) for kind in range(len(profile.capture.kinds))]
    found = [action_seconds(profile, call, [Keep(), Full()], prices) for call in calls]
    return [[Candidate(action, seconds) for action, seconds in each.items()] for each in found]


# ---- seconds


def _flops_of_ends(module: nn.Module, block_list: BlockList, run: Callable[[], object]) -> tuple[int, int]:
    """FLOPs of a forward before the first block, and after the last one."""
    counter = FlopCounterMode(display=False, custom_mapping=own_formulas())
    marks: list[int] = []

    def mark(*_: Any) -> None:
        marks.append(counter.get_total_flops())

    with undone(module, [block_list]) as stack, torch.no_grad():
        stack.callback(block_list.blocks[0].register_forward_pre_hook(mark).remove)
        stack.callback(block_list.blocks[-1].register_forward_hook(mark).remove)
        with counter:
            run()
    return marks[0], counter.get_total_flops() - marks[-1]


def _block_seconds(profile: Profile, kind: int, prices: Prices | None) -> ChunkSeconds:
    """Forward and backward of a kind of block where everything is kept."""
    call = profile.capture.order.index(kind)
    total = profile.flops(call, Keep())
    forward = min(max(profile.flops(call, Full()) - total, 0), total)
    if prices is None:
        seconds = profile.seconds(call, Keep())
        share = forward / total if forward else 1 / (1 + _BACKWARD)
        return ChunkSeconds(share * seconds, (1 - share) * seconds)
    kept = profile.costs.of(profile.kind_of(call), Keep()).phases.inner_bytes
    # what is kept is written once and read once in forward; backward does so with gradients as well
    return ChunkSeconds(prices.seconds(forward, 2 * kept), prices.seconds(total - forward, 2 * _BACKWARD * kept))


def _seconds_per_flop(profile: Profile, timed: Sequence[ChunkSeconds], prices: Prices | None) -> float:
    if prices is not None:
        return 1 / prices.flops_per_second
    work = sum(profile.flops(profile.capture.order.index(kind), Keep()) for kind in range(len(timed)))
    return math.fsum(each.total for each in timed) / work if work else 0.0


def _end_seconds(forward: float) -> ChunkSeconds:
    return ChunkSeconds(forward, _BACKWARD * forward)
