"""Unit inputs in host memory: one copy at a time, counted, fetched one unit ahead. The copies are a test double."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import Tensor, nn

from lightning_recompute.patch import Patch
from lightning_recompute.placement import DevicePlacement, HostPlacement
from lightning_recompute.plan import Full, RecomputePlan, Segment
from lightning_recompute.recompute import apply_recompute
from lightning_recompute.recompute_unit import Unit, UnitSettings, recomputed_forward


class Copies:
    """Notes what is copied when, by the first value of the tensor."""

    def __init__(self) -> None:
        self.log: list[tuple[str, float]] = []

    def note(self, what: str, tensor: Tensor) -> None:
        self.log.append((what, tensor.flatten()[0].item()))

    def to_host(self, tensor: Tensor) -> Tensor:
        self.note("out", tensor)
        return tensor.clone()

    def to_device(self, host: Tensor, device: torch.device) -> Tensor:
        self.note("back", host)
        return host.clone()

    def wait(self, tensor: Tensor) -> None:
        self.note("wait", tensor)


class AddOne(nn.Module):
    """Its input's first value tells which block it is given to."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x + 1 + 0 * (self.weight * x).tanh()


def stack(copies: Copies, num_blocks: int = 4) -> tuple[nn.Sequential, HostPlacement]:
    model = nn.Sequential(*(AddOne() for _ in range(num_blocks)))
    host = HostPlacement(copies, moves_cpu=True)
    for index, block in enumerate(model):
        Patch(block, recomputed_forward, Unit([f"{index}"], UnitSettings(host)), 0)
    return model, host


def test_order_and_count() -> None:
    copies = Copies()
    model, host = stack(copies)
    loss = model(torch.zeros(2, 4)).sum()
    model.zero_grad()
    copies.log.clear()
    loss = model(torch.zeros(2, 4, requires_grad=True)).sum()
    assert copies.log == [("out", 0.0), ("out", 1.0), ("out", 2.0), ("out", 3.0)]
    assert host.host_bytes == 4 * 8 * 4  # four inputs of 8 floats; those of the forward before are gone
    copies.log.clear()
    loss.backward()
    assert copies.log == [
        *(("back", 3.0), ("back", 2.0), ("wait", 3.0)),  # the unit before is on its way while this one is replayed
        *(("back", 1.0), ("wait", 2.0)),
        *(("back", 0.0), ("wait", 1.0)),
        ("wait", 0.0),
    ]


def test_gradients_are_the_same_and_nothing_stays() -> None:
    x = torch.randn(2, 4, requires_grad=True)
    model, host = stack(Copies())
    for _ in range(2):
        loss = model(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        del loss
        assert host.host_bytes == 0
    found = x.grad.clone()
    x.grad = None
    plain = nn.Sequential(*(AddOne() for _ in range(4)))
    for _ in range(4):
        plain(x).square().sum().backward()
    assert torch.equal(found, x.grad)


def test_dropped_graph_frees_the_host() -> None:
    model, host = stack(Copies())
    output = model(torch.randn(2, 4, requires_grad=True))
    assert host.host_bytes > 0
    del output
    assert host.host_bytes == 0


def test_parameters_and_host_tensors_stay_where_they_are() -> None:
    copies = Copies()
    weight, table = nn.Parameter(torch.ones(3)), torch.ones(3)
    saved = HostPlacement(copies).save([weight, table])
    assert copies.log == []
    assert saved.tensors()[0] is weight
    assert saved.tensors()[1] is table


def test_placements_pickle() -> None:
    assert isinstance(pickle.loads(pickle.dumps(HostPlacement(Copies()))), HostPlacement)
    assert isinstance(pickle.loads(pickle.dumps(DevicePlacement())), DevicePlacement)


def test_host_on_a_cpu_run_is_refused() -> None:
    plan = RecomputePlan(tuple(Segment(i, i + 1, Full(inputs="host")) for i in range(4)))
    with pytest.raises(ValueError, match=r"offload_saved_activations.*the model is on cpu; leave it out"):
        apply_recompute(nn.Sequential(*(AddOne() for _ in range(4))), plan)


@pytest.mark.gpu
def test_on_a_card() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    torch.manual_seed(0)
    model = nn.Sequential(*(AddOne() for _ in range(4))).cuda()
    x = torch.randn(256, 1024, 4, device="cuda", requires_grad=True)
    model(x).square().sum().backward()
    due, x.grad = x.grad, None
    plan = RecomputePlan(tuple(Segment(i, i + 1, Full(inputs="host")) for i in range(4)))
    with apply_recompute(model, plan):
        model(x).square().sum().backward()
    assert torch.equal(x.grad, due)
