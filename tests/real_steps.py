"""Real training steps in Lightning's order, with their peak as the allocator counts it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_recompute.memory import open_meter
from lightning_recompute.plan import RecomputePlan
from lightning_recompute.recompute import apply_recompute

NUM_STEPS = 3
"""The first, in which blocks are learnt about and the optimizer makes its state, is not measured."""


def measured_peak(
    module: nn.Module,
    run: Callable[[], Tensor],
    plan: RecomputePlan,
    *,
    optimizers: Sequence[Optimizer] = (),
    batch: Any = None,
    accumulate: int = 1,
) -> int:
    """Bytes of the highest moment of some steps under a plan: parameters, batch and all.

    Args:
        module: The module; it is trained.
        run: Its forward.
        plan: What is recomputed.
        optimizers: Step after backward.
        batch: Its tensors count.
        accumulate: Backwards to a step.
    """
    gc.collect()
    meter = open_meter()
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    states = [each for optimizer in optimizers for each in tree_leaves(list(optimizer.state.values()))]
    before = [*module.parameters(), *module.buffers(), *gradients, *states, *tree_leaves(batch)]
    meter.count(tensor for tensor in before if isinstance(tensor, Tensor))
    del gradients, states, before
    with apply_recompute(module, plan):
        for step in range(NUM_STEPS):
            if step == 1:
                meter.reset_peak()
            for number in range(accumulate):
                loss = run()
                if number == 0:
                    module.zero_grad()
                loss.backward()
            for optimizer in optimizers:
                optimizer.step()
    peak = meter.peak_bytes
    meter.close()
    return peak
