"""Memory of optimizers without a step: what the allocator counts when they take one, and no trace."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from parity import seeded
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adam, AdamW, Optimizer, RMSprop
from torch.utils._pytree import tree_leaves

from lightning_recompute.memory import open_meter
from lightning_recompute.optimizer_cost import OptimizerCost, measure_optimizers

Build = Callable[[Iterable[Any]], Optimizer]

OPTIMIZERS: dict[str, Build] = {
    "AdamW": AdamW,
    "AdamW foreach": lambda parameters: AdamW(parameters, foreach=True),
    "AdamW fused": lambda parameters: AdamW(parameters, fused=True),
    "Adam amsgrad": lambda parameters: Adam(parameters, amsgrad=True),
    "SGD": lambda parameters: SGD(parameters, lr=0.1),
    "SGD momentum": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9),
    "SGD momentum foreach": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9, foreach=True),
    "RMSprop": RMSprop,
    "Adafactor": Adafactor,
}


def model() -> nn.Module:
    """Parameters of several sizes, one of them frozen."""
    net = seeded(lambda: nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 48), nn.Linear(48, 48)))
    net[3].requires_grad_(False)
    return net


def trained(optimizer: Optimizer) -> OptimizerCost:
    """What the allocator counts in the second of two steps."""
    meter = open_meter()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    before = meter.live_bytes
    optimizer.step()
    state_bytes = meter.live_bytes - before
    meter.reset_peak()
    optimizer.step()
    transient_bytes = meter.peak_bytes - meter.live_bytes
    meter.close()
    return OptimizerCost(state_bytes, transient_bytes)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_is_what_the_allocator_counts(name: str) -> None:
    found = measure_optimizers([OPTIMIZERS[name](model().parameters())])
    due = trained(OPTIMIZERS[name](model().parameters()))
    assert found.state_bytes == due.state_bytes
    # three scalars of the C++ side, which no operator returns
    assert 0 <= due.transient_bytes - found.transient_bytes <= 12


def test_parameters_alike_in_shape_only() -> None:
    """Of Adafactor, which is measured parameter by parameter: the frozen one of two alike has no state."""
    net = seeded(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    whole = measure_optimizers([Adafactor(net.parameters())]).state_bytes
    net[1].requires_grad_(False)
    assert measure_optimizers([Adafactor(net.parameters())]).state_bytes == whole // 2 > 0


def test_optimizers_step_one_after_the_other() -> None:
    net = model()
    first, second = AdamW(net[0].parameters()), SGD(net[2].parameters(), lr=0.1, momentum=0.9)
    alone = [measure_optimizers([each]) for each in (first, second)]
    together = measure_optimizers([first, second])
    assert together.state_bytes == sum(cost.state_bytes for cost in alone)
    assert together.transient_bytes == max(cost.transient_bytes for cost in alone)
    assert measure_optimizers([]) == OptimizerCost(0, 0)


def test_groups_count_by_their_own_options() -> None:
    net = model()
    groups = [{"params": net[0].parameters(), "momentum": 0.9}, {"params": net[2].parameters()}]
    assert measure_optimizers([SGD(groups, lr=0.1)]).state_bytes == sum(p.nbytes for p in net[0].parameters())


def contents(optimizer: Optimizer) -> tuple[Any, list[Any], list[int]]:
    """All that an optimizer holds: values, and which tensors they are."""
    leaves = tree_leaves([dict(optimizer.state), optimizer.param_groups])
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
    addresses = [tensor.data_ptr() for tensor in (*tensors, *(g for g in gradients if g is not None))]
    return copy.deepcopy(optimizer.state_dict()), [None if g is None else g.clone() for g in gradients], addresses


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("steps", [0, 1])
def test_no_trace(name: str, steps: int) -> None:
    net = model()
    optimizer = OPTIMIZERS[name](net.parameters())
    for _ in range(steps):
        net(torch.ones(2, 32)).sum().backward()
        optimizer.step()
    values = [parameter.detach().clone() for parameter in net.parameters()]
    state, gradients, addresses = contents(optimizer)
    random = torch.get_rng_state()

    assert measure_optimizers([optimizer]).state_bytes >= 0

    after, gradients_after, addresses_after = contents(optimizer)
    assert addresses_after == addresses
    torch.testing.assert_close(after, state, rtol=0, atol=0)
    torch.testing.assert_close(gradients_after, gradients, rtol=0, atol=0)
    assert all(map(torch.equal, values, net.parameters()))
    assert torch.equal(torch.get_rng_state(), random)


def test_the_state_there_is_goes_on() -> None:
    """A state that a checkpoint brought counts as it is, here in another dtype."""
    net = model()
    optimizer = SGD(net.parameters(), lr=0.1, momentum=0.9)
    net(torch.ones(2, 32)).sum().backward()
    optimizer.step()
    whole = measure_optimizers([optimizer]).state_bytes
    for state in optimizer.state.values():
        state["momentum_buffer"] = state["momentum_buffer"].bfloat16()
    assert measure_optimizers([optimizer]).state_bytes == whole // 2 > 0


def test_hooks_and_schedulers_are_not_triggered() -> None:
    net = model()
    optimizer = AdamW(net.parameters())
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    # puts a counting step on the instance
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    measured = measure_optimizers([optimizer])
    assert measured == measure_optimizers([AdamW(model().parameters())])
    assert not seen
    assert not getattr(optimizer, "_opt_called", False)
    net(torch.ones(2, 32)).sum().backward()
    optimizer.step()
    scheduler.step()
    assert seen == ["before", "after"]
    assert optimizer.param_groups[0]["lr"] == 0.5e-3


class Closure(Optimizer):
    """Cannot step without a closure."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Callable[[], float]) -> float:  # type: ignore[override]
        return closure()


def test_what_cannot_be_measured_is_said(caplog: pytest.LogCaptureFixture) -> None:
    optimizer = Closure(model().parameters())
    with caplog.at_level(logging.WARNING):
        assert measure_optimizers([optimizer]) == OptimizerCost(0, 0)
    assert "the memory of Closure could not be measured" in caplog.text
    assert "counts as 0 bytes" in caplog.text
