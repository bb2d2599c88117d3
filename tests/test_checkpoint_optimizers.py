"""States of torch's optimizers between plain parameters and DTensors, in lists, of other shapes, beside the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_toys import differences, everything
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim import Optimizer

from lightning_recompute.checkpoint_loading import load_sharded
from lightning_recompute.optimizer_names import named_state
from lightning_recompute.sharded_checkpoint import save_sharded

# those that work on DTensors at all: not Adafactor, Rprop
MAKERS: dict[str, Callable[[nn.Linear], Optimizer]] = {
    "ASGD": lambda net: optim.ASGD(net.parameters()),
    "Adagrad": lambda net: optim.Adagrad(net.parameters()),
    "Adam": lambda net: optim.Adam(net.parameters(), lr=torch.tensor(0.1), amsgrad=True),
    "LBFGS": lambda net: optim.LBFGS(net.parameters(), max_iter=3),
    "Muon": lambda net: optim.Muon([net.weight]),
    "NAdam": lambda net: optim.NAdam(net.parameters()),
    "RMSprop": lambda net: optim.RMSprop(net.parameters(), centered=True, momentum=0.1),
}


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def build(seed: int, mesh: DeviceMesh | None) -> nn.Linear:
    torch.manual_seed(seed)
    net = nn.Linear(4, 6)
    if mesh is not None:
        for name, value in list(net.named_parameters()):
            setattr(net, name, nn.Parameter(distribute_tensor(value.detach(), mesh, [Shard(0)])))
    return net


def step(net: nn.Linear, optimizer: Optimizer, mesh: DeviceMesh | None) -> None:
    inputs = torch.ones(3, 4) if mesh is None else distribute_tensor(torch.ones(3, 4), mesh, [Replicate()])

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = net(inputs).square().mean()
        loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("saves_parts", [False, True])
def test_a_state_goes_from_any_to_any(mesh: DeviceMesh, tmp_path: Path, name: str, saves_parts: bool) -> None:
    own = mesh if saves_parts else None
    net = build(1, own)
    optimizer = MAKERS[name](net)
    step(net, optimizer, own)
    checkpoint: dict[str, Any] = {"state_dict": net.state_dict(), "optimizer_states": [named_state(optimizer, net)]}
    save_sharded(tmp_path / "a", checkpoint)
    due = everything(net, [optimizer])
    for other in (None, mesh):
        again = build(2, other)
        loaded = MAKERS[name](again)
        load_sharded(tmp_path / "a", again, [loaded])
        assert differences(everything(again, [loaded]), due) == []
        step(again, loaded, other)


def test_factors_are_whole_beside_dtensors(mesh: DeviceMesh, tmp_path: Path) -> None:
    net = build(1, None)
    optimizer = optim.Adafactor(net.parameters())
    step(net, optimizer, None)
    save_sharded(tmp_path / "a", {"state_dict": net.state_dict(), "optimizer_states": [named_state(optimizer, net)]})
    again = build(2, mesh)
    loaded = optim.Adafactor(again.parameters())
    load_sharded(tmp_path / "a", again, [loaded])
    state = loaded.state[again.weight]
    assert isinstance(state["row_var"], DTensor)
    assert torch.equal(state["row_var"].full_tensor(), optimizer.state[net.weight]["row_var"])
    assert not isinstance(state["step"], DTensor)
