"""Backward in two parts, for plans: what waits for the second one, for how many microbatches.

Between its part for inputs and its part for weights a microbatch has all activations of a chunk, recomputed ones too,
and the gradients at which the second part begins. The first chunk of a model has no inputs, and a backward in one part.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_recompute.blocks import BlockList
from lightning_recompute.capture import BlockCall
from lightning_recompute.cost import StageCosts, live_vectors
from lightning_recompute.ledger import Ledger, plain_tensors
from lightning_recompute.lone_block import FAKE_LOGGER, alone, silenced
from lightning_recompute.patch import Patch
from lightning_recompute.plan import Keep
from lightning_recompute.schedule_actions import SPLITTING, rank_actions
from lightning_recompute.schedules import covers
from lightning_recompute.step_form import BlockForm
from lightning_recompute.untouched import undone


@dataclass(frozen=True)
class SplitBlock:
    """A microbatch on a block whose backward runs in two parts, its input included.

    Args:
        kept_bytes: What it holds before the part for inputs, recomputed or not.
        input_bytes: The most in the part for inputs.
        during_bytes: What is there when that part is over, before what it alone needed goes; without the gradients of
            what was given.
        between_bytes: What waits for the part for weights.
        captured_bytes: How much of that are gradients of what it returned.
        weight_bytes: The most in that part, without what waits, where it makes the first gradients.
        left_bytes: What it leaves then, likewise: below 0 where more goes than is made.
        again_bytes: The most in that part, without what waits, where it adds to gradients.
    """

    kept_bytes: int
    input_bytes: int
    during_bytes: int
    between_bytes: int
    captured_bytes: int
    weight_bytes: int
    left_bytes: int
    again_bytes: int

    def with_more(self, num_bytes: int) -> SplitBlock:
        """The same where more is held.

        Args:
            num_bytes: So much, until all of it goes.
        """
        return replace(
            self,
            kept_bytes=self.kept_bytes + num_bytes,
            input_bytes=self.input_bytes + num_bytes,
            during_bytes=self.during_bytes + num_bytes,
            between_bytes=self.between_bytes + num_bytes,
        )


def split_block(call: BlockCall, kept_bytes: int, *, exact: bool) -> SplitBlock:
    """Run both parts of a block's backward, and see what they take.

    Args:
        call: The block's call.
        kept_bytes: What it holds where everything is kept, its input included.
        exact: Run on real tensors; else on fake ones.
    """
    fake = None if exact else FakeTensorMode(allow_non_fake_inputs=True)
    with silenced(FAKE_LOGGER), alone(call, Keep(), fake) as block:

        def run() -> SplitBlock:
            given = [block.given(position) for position in range(len(call.tensors))]
            parameters = [p for p in call.module.parameters() if p.requires_grad]
            ledger = Ledger(call.device, fake=fake is not None)

            def once() -> SplitBlock:
                leaves = [
                    tensor.detach().requires_grad_() if needs else tensor
                    for tensor, needs in zip(given, call.needs_grad, strict=True)
                ]
                made = [tensor for tensor in block.forward(list(leaves)) if tensor.grad_fn is not None]
                made = _no_views(made)
                return _in_two_parts(ledger, made, [torch.zeros_like(tensor) for tensor in made], leaves, parameters)

            with contextlib.closing(ledger), ledger, _without_gradients(parameters):
                return _fresh_and_again(once).with_more(kept_bytes)

        found = block.within(run)
        assert isinstance(found, SplitBlock)
        return found


def split_head(
    module: nn.Module, block_list: BlockList, form: BlockForm, run: Callable[[], Tensor], device: torch.device
) -> SplitBlock:
    """Run both parts of the backward of what comes after a model's blocks, and see what they take.

    Args:
        module: The model.
        block_list: Its blocks.
        form: Of the last one.
        run: Runs the training step and returns its loss.
        device: Whose memory counts.

    Returns:
        All is over what the forward has left, the output of the last block included; below 0 where more goes.
    """
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    is_fake = any(isinstance(part, FakeTensor) for each in parameters for part in plain_tensors(each))
    with undone(module, [block_list]) as stack, _without_gradients(parameters):
        given: list[Tensor] = []
        for block in block_list.blocks:
            into = (form, given) if block is block_list.blocks[-1] else None
            stack.callback(Patch(block, _without_graph, into).remove)
        ledger = stack.enter_context(contextlib.closing(Ledger(device, fake=is_fake)))
        with torch.enable_grad(), ledger:
            return _fresh_and_again(lambda: _in_two_parts(ledger, _no_views([run()]), [None], given, parameters))


@torch.compiler.disable
def _without_graph(
    original: Callable[..., Any], into: tuple[BlockForm, list[Tensor]] | None, /, *args: Any, **kwargs: Any
) -> Any:
    """The patched forward of a block that is not in the graph; what the last one returns is where the graph begins."""
    with torch.no_grad():
        result = original(*args, **kwargs)
    if into is None:
        return result
    form, given = into
    leaves, spec = tree_flatten(result)
    leaves[form.main] = leaves[form.main].detach().requires_grad_()
    given[:] = [leaves[form.main]]
    return tree_unflatten(leaves, spec)


def _no_views(made: Sequence[Tensor]) -> list[Tensor]:
    """Torch detaches in place what the part for inputs begins at."""
    return [tensor.clone() if tensor._is_view() else tensor for tensor in made]


def _fresh_and_again(once: Callable[[], SplitBlock]) -> SplitBlock:
    fresh = once()
    return replace(fresh, again_bytes=once().weight_bytes)


def _in_two_parts(
    ledger: Ledger,
    made: list[Tensor],
    gradients: list[Tensor | None],
    given: Sequence[Tensor],
    parameters: Sequence[nn.Parameter],
) -> SplitBlock:
    """Both parts of a backward: what they take over what is there before, with the gradients of what is returned."""
    entering = sum(each.nbytes for each in gradients if each is not None)
    before = ledger.live_bytes
    ends: list[int] = []
    for tensor in given:
        if tensor.requires_grad:
            tensor.register_hook(lambda _: ends.append(ledger.live_bytes))
    ledger.reset_peak()
    of_outputs: list[Any] = gradients[:]  # None, which its type leaves out, stands for 1
    found, groups = stage_backward_input(made, of_outputs, list(given), iter(parameters))
    del of_outputs  # what nothing else holds goes with `gradients`
    first, held = ledger.peak_bytes, ledger.live_bytes
    gradients.clear()
    between = ledger.live_bytes
    of_inputs = sum(each.nbytes for each in found if each is not None)
    captured = entering - (held - between)
    ledger.reset_peak()
    stage_backward_weight(iter(parameters), groups)
    return SplitBlock(
        kept_bytes=0,
        input_bytes=first - before,
        during_bytes=(ends[-1] if ends else held) - of_inputs - before + captured,
        between_bytes=between - of_inputs - before + entering,
        captured_bytes=captured,
        weight_bytes=ledger.peak_bytes - between,
        left_bytes=ledger.live_bytes - between,
        again_bytes=0,
    )


@contextlib.contextmanager
def _without_gradients(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Gradients of parameters are aside meanwhile."""
    former = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, former, strict=True):
            parameter.grad = gradient


def waiting_shares(
    schedule: str, num_stages: int, num_microbatches: int, virtual: int
) -> tuple[tuple[float, ...], ...]:
    """The part of the microbatches in flight that are between the parts of their backward, at most.

    Args:
        schedule: One of `schedules.SCHEDULES`.
        num_stages: Ranks of the pipeline.
        num_microbatches: Of a step.
        virtual: Chunks on each rank.

    Returns:
        For each rank and each of its chunks a share, so that (in flight) x (share) is an upper bound at any time: 0
        where backward has one part.
    """
    vectors = live_vectors(schedule, num_stages, num_microbatches, virtual)
    if schedule not in SPLITTING:
        return tuple((0.0,) * len(of_rank[0]) for of_rank in vectors)
    orders = rank_actions(schedule, num_stages, num_microbatches, virtual)
    shares = []
    for of_rank, order in zip(vectors, orders, strict=True):
        alive, waiting = [0] * len(of_rank[0]), [0] * len(of_rank[0])
        most = [0.0] * len(alive)
        for action in order:
            alive[action.chunk] += action.kind == "forward"
            waiting[action.chunk] += action.kind == "input"
            covering = [one for one in of_rank if covers(one, alive)]
            found = [
                [number / many if number else 0.0 for number, many in zip(waiting, one, strict=True)]
                for one in covering
            ]
            best = min(found, key=max)
            most = [max(pair) for pair in zip(most, best, strict=True)]
            alive[action.chunk] -= action.kind == "weight"
            waiting[action.chunk] -= action.kind == "weight"
        shares.append(tuple(most))
    return tuple(shares)


def with_waiting(costs: StageCosts, between: Sequence[int], share: float) -> StageCosts:
    """A part of a model some of whose microbatches are between the parts of their backward.

    Args:
        costs: The part.
        between: For each unit what a microbatch holds there then, however it is recomputed.
        share: Of the microbatches in flight.

    Returns:
        The part with options that hold as much more, spread over all microbatches in flight.
    """
    options = tuple(
        tuple(
            replace(
                option,
                held_bytes=option.held_bytes
                + math.ceil(share * max(sum(between[unit : unit + option.num_units]) - option.held_bytes, 0)),
            )
            for option in of_unit
        )
        for unit, of_unit in enumerate(costs.options)
    )
    # while a unit runs its part for inputs, those after it have run theirs, and wait
    after = [sum(between[unit + 1 :]) for unit in range(len(between))]
    gradients = tuple(costs.gradients_at(unit) + after[unit] for unit in range(len(after)))
    return replace(costs, options=options, gradient_bytes=gradients)
