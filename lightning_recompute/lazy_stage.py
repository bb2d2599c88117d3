"""The part of a pipeline that torch.distributed.pipelining runs: the order of forwards and backwards, and transfers.

Torch sees nothing of the user's step: numbers of microbatches go in, a weighted loss of one element comes out. Its
stages keep a buffer for each microbatch and direction from the first step on; those here have one from receive to
use, of the shape that the microbatch at hand needs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining._backward import stage_backward_weight
from torch.distributed.pipelining._utils import InferenceMode
from torch.distributed.pipelining.schedules import _Action, _add_send_recv, _ComputationType
from torch.distributed.pipelining.stage import _RecvInfo

from lightning_recompute.step_form import TensorForm

_SINGLE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_SEVERAL = {
    "interleaved-1f1b": ScheduleInterleaved1F1B,
    "interleaved-zero-bubble": ScheduleInterleavedZeroBubble,
    "zbv-zero-bubble": ScheduleZBVZeroBubble,
}

FormOf = Callable[[int, bool], TensorForm]
"""The hidden state of a microbatch that a stage receives (True) or sends on (False)."""


class Chunk(nn.Module):
    """What torch takes for a stage's module: runs one microbatch by its number.

    Args:
        run: Called with the hidden state that was received and the number of the microbatch.
        parameters: Those that the stage's backward reaches.
        is_first: Whether it receives nothing.
    """

    def __init__(
        self, run: Callable[[Tensor | None, int], Tensor], parameters: Sequence[nn.Parameter], is_first: bool
    ) -> None:
        super().__init__()
        self._run = run
        self._reached = tuple(parameters)
        self._is_first = is_first

    def forward(self, received: Tensor, microbatch: Tensor) -> Tensor:
        """Run a microbatch.

        Args:
            received: The hidden state; on the first stage torch's share of the numbers.
            microbatch: (1,), its number.

        Returns:
            The hidden state for the next stage, or the weighted loss.
        """
        return self._run(None if self._is_first else received, int(microbatch))

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The parameters that backward reaches; the module does not hold them as its own."""
        return iter(self._reached)


class LazyStage(PipelineStage):
    """A stage whose receive buffers are there from receive to use.

    Args:
        chunk: Runs a microbatch.
        index: Of the stage.
        num_stages: Of the pipeline.
        device: Where it runs.
        group: The ranks of the pipeline.
        form_of: What it receives and sends.
    """

    def __init__(
        self,
        chunk: Chunk,
        index: int,
        num_stages: int,
        device: torch.device,
        group: dist.ProcessGroup,
        form_of: FormOf,
    ) -> None:
        # torch asks for examples, or infers them by running the step once more
        numbers = torch.zeros(1, dtype=torch.long)
        hidden = torch.empty(1, device="meta", requires_grad=True)
        super().__init__(
            chunk,
            index,
            num_stages,
            device,
            input_args=(hidden if index else numbers,),
            output_args=(hidden,),
            group=group,
        )
        self._form_of = form_of
        self.sends_itself = False
        """Whether torch is not to send: where it runs several stages it keeps what was sent until the step ends."""
        self._underway: dict[str, tuple[dist.Work, Tensor]] = {}

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        if self.is_first:
            super()._setup_forward_recv_info(num_microbatches, has_backward)
            return
        assert self._stage_meta.inputs is not None
        for number in range(num_microbatches):
            self.args_recv_info[number] = (
                _RecvInfo(f"hidden {number}", self.stage_index - 1, None, self._stage_meta.inputs[0]),
            )

    def _create_grad_recv_info(self, act_send_info: Any) -> tuple[_RecvInfo, ...]:
        if self.is_last:
            return ()
        assert self._stage_meta.output_grads is not None
        return (_RecvInfo("gradient", self.stage_index + 1, None, self._stage_meta.output_grads[0]),)

    def _buffer(self, number: int, received: bool) -> Tensor:
        form = self._form_of(number, received)
        return torch.empty(form.shape, dtype=form.dtype, device=self.device)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Make room for what is about to come."""
        if not self.is_first:
            self.args_recv_info[fwd_chunk_id][0].buffer = self._buffer(fwd_chunk_id, True)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Make room for what is about to come."""
        if not self.is_last:
            self.grad_recv_info[bwd_chunk_id][0].buffer = self._buffer(bwd_chunk_id, False)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Send a hidden state, or leave that to torch."""
        return self._sending("hidden", super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Send a gradient, or leave that to torch."""
        return self._sending("gradient", super().get_bwd_send_ops(bwd_chunk_id))

    def _sending(self, kind: str, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        """One of a kind is underway at a time. Torch places each receive where its send is placed, so none waits long.

        The peer comes to that receive without anything that this rank does later.
        """
        if not self.sends_itself or not ops:
            return ops
        (op,) = ops
        if kind in self._underway:
            self._underway.pop(kind)[0].wait()
        work = dist.isend(op.tensor, group=op.group, group_dst=op.group_peer)
        assert work is not None
        self._underway[kind] = work, op.tensor
        return []

    def prepare_alone(self, num_microbatches: int) -> None:
        """Make it fit to run by itself, without a schedule, which otherwise does this.

        Args:
            num_microbatches: Of a step.
        """
        self.has_backward = True
        self._inference_mode = InferenceMode.STATIC
        self._prepare_forward_infra(num_microbatches, None, has_backward=True)
        self._prepare_backward_infra(num_microbatches)

    def give(self, microbatch: int, received: Tensor | None = None, gradient: Tensor | None = None) -> None:
        """Put something where otherwise what comes from a peer lies.

        Args:
            microbatch: Its number.
            received: The hidden state.
            gradient: Of the hidden state that was sent.
        """
        if received is not None:
            self.args_recv_info[microbatch][0].buffer = received
        if gradient is not None:
            self.grad_recv_info[microbatch][0].buffer = gradient

    def finish_sending(self) -> None:
        """Wait until everything is sent."""
        while self._underway:
            self._underway.popitem()[1][0].wait()

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run it, and let go of what was received: the graph holds it as long as backward needs it."""
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if not self.is_first:
            self.args_recv_info[fwd_chunk_id][0].buffer = None
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """Run it, and let go of the gradient that was received; the one to be sent is fit for it."""
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        if not self.is_last:
            self.grad_recv_info[bwd_chunk_id][0].buffer = None
        if self.is_first:
            self.bwd_cache.pop(bwd_chunk_id)
            return
        (gradient,) = self.bwd_cache[bwd_chunk_id]
        if gradient is None:  # the hidden state was not used
            gradient = self._buffer(bwd_chunk_id, True).zero_()
        self.bwd_cache[bwd_chunk_id] = (gradient.contiguous(),)

    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[Tensor | None, ...], list[dict[str, Any]] | None]:
        """Run a part of backward: torch's own, made right for parameters that come to the loss in several ways.

        A penalty on weights beside the loss is such a way. Torch then has a parameter in several groups, each of
        which adds its whole gradient, and groups that share a part of the graph.
        """
        if backward_type == "weight":
            groups = bwd_kwargs["param_groups"]
            return stage_backward_weight(self.submod.parameters(), groups, retain_graph=True), None
        gradients, groups = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        seen: set[Any] = set()
        for group in groups or ():
            group["params"] -= seen
            seen |= group["params"]
        return gradients, groups and [group for group in groups if group["params"]]


def make_schedule(name: str, stages: Sequence[LazyStage], num_microbatches: int) -> Callable[[], None]:
    """A step of a schedule: forward and backward of all microbatches.

    Args:
        name: One of `schedules.SCHEDULES`.
        stages: Those of this rank, in forward order.
        num_microbatches: How many.

    Returns:
        Runs one; collective over the ranks of the pipeline.
    """
    schedule = _schedule(name, stages, num_microbatches)
    for stage in stages if name in _SEVERAL else ():
        stage.sends_itself = True
    numbers = torch.arange(num_microbatches)
    args = (numbers,) if any(stage.is_first for stage in stages) else ()
    target = {"target": numbers} if any(stage.is_last for stage in stages) else {}

    def step() -> None:
        schedule.step(*args, microbatch=numbers, return_outputs=False, **target)
        for stage in stages:
            stage.finish_sending()

    return step


def _schedule(name: str, stages: Sequence[LazyStage], num_microbatches: int) -> Any:
    def identity(output: Tensor, target: Tensor) -> Tensor:
        # another tensor would keep its graph until the end of the step
        return output

    if name in _SINGLE:
        return _SINGLE[name](stages[0], num_microbatches, loss_fn=identity, scale_grads=False)
    return _SEVERAL[name](list(stages), num_microbatches, loss_fn=identity, scale_grads=False)


def actions_of(name: str, stages: Sequence[LazyStage], num_microbatches: int) -> list[tuple[str, int, int]]:
    """What this rank does in a step of a schedule of several stages, transfers included.

    Args:
        name: One of those in `schedules.SCHEDULES` that run several stages on a rank.
        stages: Those of this rank, in forward order.
        num_microbatches: How many.

    Returns:
        For each action torch's name of its kind, the stage and the microbatch, in order.
    """
    schedule = _schedule(name, stages, num_microbatches)
    actions = schedule.pipeline_order_with_comms[schedule.rank]
    return [
        (action.computation_type.value, action.stage_index, action.microbatch_index)
        for action in actions
        if action.microbatch_index is not None
    ]


def with_transfers(
    orders: Sequence[Sequence[tuple[str, int, int]]], rank_of: Sequence[int]
) -> list[list[tuple[str, int, int]]]:
    """What ranks do with the transfers between them, as torch puts these in.

    Args:
        orders: For each rank its actions, as `actions_of` gives them, without transfers.
        rank_of: The rank of each stage.
    """
    given = {
        rank: [_Action(stage, _ComputationType(kind), microbatch) for kind, stage, microbatch in order]
        for rank, order in enumerate(orders)
    }
    found = _add_send_recv(given, lambda stage: rank_of[stage], len(rank_of))
    return [
        [(action.computation_type.value, action.stage_index, int(action.microbatch_index or 0)) for action in order]
        for _, order in sorted(found.items())
    ]


@contextmanager
def plain_errors() -> Iterator[None]:
    """Errors of the user's code leave as they are: not wrapped by torch, and without its dump of the schedule."""
    logger = logging.getLogger("torch.distributed.pipelining.schedules")
    former = logger.disabled
    logger.disabled = True
    try:
        yield
    except RuntimeError as error:
        cause: BaseException = error
        while isinstance(cause, RuntimeError) and cause.__cause__ is not None and "ailed to run" in str(cause):
            cause = cause.__cause__
        if cause is error:
            raise
        raise cause from None
    finally:
        logger.disabled = former
