"""What an optimizer holds, and what its step needs besides, without taking a step."""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from lightning_recompute.ledger import Ledger, allocated_bytes, storage_bytes
from lightning_recompute.lone_block import FAKE_LOGGER, silenced

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OptimizerCost:
    """Memory of an optimizer.

    Attributes:
        state_bytes: Its state from the second step on.
        transient_bytes: The most that its step needs besides parameters, gradients and state.
    """

    state_bytes: int
    transient_bytes: int


def measure_optimizers(optimizers: Iterable[Optimizer]) -> OptimizerCost:
    """Measure optimizers on stand-ins for their parameters; they and their parameters are not touched.

    The step runs on fake tensors. Where it looks at values (Adafactor), it runs on real ones, parameter by parameter.

    Args:
        optimizers: Of the module that is trained; they step one after the other.
    """
    costs = [_measure(optimizer) for optimizer in optimizers]
    return OptimizerCost(
        sum(cost.state_bytes for cost in costs), max((cost.transient_bytes for cost in costs), default=0)
    )


def _measure(optimizer: Optimizer) -> OptimizerCost:
    try:
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with silenced(FAKE_LOGGER), fake:
            return _step_twice(optimizer, [group["params"] for group in optimizer.param_groups], fake.from_tensor, True)
    except Exception as error:  # whatever an optimizer does to fake tensors
        logger.debug("%s is measured on real tensors: %s", type(optimizer).__name__, error)
    try:
        return _one_by_one(optimizer)
    except Exception as error:  # of an optimizer that needs a closure, or its parameters together
        known = storage_bytes(_tensors(optimizer.state))
        logger.warning(
            "the memory of %s could not be measured (%s); its state counts as %d bytes",
            type(optimizer).__name__,
            error,
            known,
        )
        return OptimizerCost(known, 0)


def _one_by_one(optimizer: Optimizer) -> OptimizerCost:
    """On copies of one parameter at a time, or of two that follow each other, equal shapes once."""
    known: dict[Any, OptimizerCost] = {}

    def measured(number: int, parameters: Sequence[Tensor]) -> OptimizerCost:
        key = number, *((each.shape, each.dtype, each.requires_grad) for each in parameters)
        if key not in known:
            alone: list[Sequence[Tensor]] = [[] for _ in optimizer.param_groups]
            alone[number] = parameters
            known[key] = _step_twice(optimizer, alone, lambda tensor: tensor.clone(), False)
        return known[key]

    state, transient = 0, 0
    for number, group in enumerate(optimizer.param_groups):
        parameters = group["params"]
        for index in range(len(parameters)):
            state += measured(number, parameters[index : index + 1]).state_bytes
            # names in a loop hold what was made for one parameter until it is made for the next
            transient = max(transient, measured(number, parameters[max(index - 1, 0) : index + 1]).transient_bytes)
    return OptimizerCost(state, transient)


def _step_twice(
    optimizer: Optimizer, parameters: Sequence[Sequence[Tensor]], stand_in: Callable[[Tensor], Tensor], fake: bool
) -> OptimizerCost:
    twin = copy.copy(optimizer)
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        setattr(twin, hooks, OrderedDict())
    ledger = Ledger(next((tensor.device for group in parameters for tensor in group), torch.device("cpu")), fake=fake)
    twin.state = defaultdict(dict)
    twin.param_groups = []
    held: list[Tensor] = []
    for group, tensors in zip(optimizer.param_groups, parameters, strict=True):
        copies = []
        for tensor in tensors:
            copies.append(nn.Parameter(stand_in(tensor.detach()), tensor.requires_grad))
            copies[-1].grad = torch.zeros_like(copies[-1]) if tensor.requires_grad else None
            if state := optimizer.state.get(tensor):
                twin.state[copies[-1]] = tree_map(lambda leaf: _stood_in(leaf, stand_in), state)
        held += copies
        twin.param_groups.append({**group, "params": copies})
    # a scheduler may have put a step of its own on the instance, which would run the original
    step: Any = type(twin).step
    with ledger, torch.no_grad():
        step(twin)
        state_bytes = allocated_bytes(_tensors(twin.state), ledger.device)
        ledger.reset_peak()
        before = ledger.live_bytes
        step(twin)
        return OptimizerCost(state_bytes, ledger.peak_bytes - before)


def _stood_in(leaf: Any, stand_in: Callable[[Tensor], Tensor]) -> Any:
    return stand_in(leaf.detach()) if isinstance(leaf, Tensor) else copy.copy(leaf)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(list(dict(tree).values())) if isinstance(leaf, Tensor)]
