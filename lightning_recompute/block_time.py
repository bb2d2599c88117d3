"""How long one block takes under an action of a plan: in seconds of its device, and in FLOPs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from lightning_recompute.capture import BlockCall
from lightning_recompute.lone_block import FAKE_LOGGER, alone, is_compiled, silenced
from lightning_recompute.plan import Action
from lightning_recompute.throughput import own_formulas

NUM_RUNS = 5
"""Timed runs of each action; the fastest counts."""


def measure_seconds(call: BlockCall, actions: Sequence[Action], num_runs: int = NUM_RUNS) -> list[float]:
    """Measure the time of forward and backward of a block under some actions.

    The actions take turns, so that a machine that slows down does so for all of them. Of each the fastest run counts:
    what else the machine does only adds.

    Args:
        call: The block's call.
        actions: What is recomputed.
        num_runs: How often each is timed.

    Returns:
        For each action seconds: time of the process on a CPU, of the device elsewhere.
    """
    times: list[list[float]] = [[] for _ in actions]
    for _ in range(num_runs):
        for action, found in zip(actions, times, strict=True):
            with alone(call, action, None) as block:
                block.step()  # the first run under a patch learns about the block
                start = _now(call.device)
                block.step()
                found.append(_now(call.device) - start)
    return list(map(min, times))


def measure_flops(call: BlockCall, action: Action, *, exact: bool = False) -> int:
    """Count the FLOPs of forward and backward of a block under an action, on fake tensors where it can run on those.

    Args:
        call: The block's call.
        action: What is recomputed.
        exact: Run on real tensors at once.
    """

    def count(fake: FakeTensorMode | None) -> int:
        with silenced(FAKE_LOGGER), alone(call, action, fake) as block:
            block.within(block.forward)  # the first run under a patch learns about the block
            counter = FlopCounterMode(display=False, custom_mapping=own_formulas())
            block.step(counter)
            return counter.get_total_flops()

    if not is_compiled(call.module) and not exact:
        with contextlib.suppress(Exception):  # whatever a kernel says of fake tensors
            return count(FakeTensorMode(allow_non_fake_inputs=True))
    return count(None)


def _now(device: torch.device) -> float:
    if device.type == "cpu":
        return time.process_time()
    torch.get_device_module(device.type).synchronize(device)
    return time.perf_counter()
