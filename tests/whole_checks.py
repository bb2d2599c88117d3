"""Run by two processes: modules with distributed parameters become whole."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from data_parallel_toys import join_world
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from lightning_recompute.whole import make_whole, replace_parameters


class Odd(nn.Module):
    """Sizes that two ranks cannot share evenly, a tie, a buffer twice, a frozen parameter, an ordinary one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.second = nn.Linear(3, 5)
        self.second.weight = self.first.weight
        self.second.bias.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("table", torch.arange(5.0))
        self.register_buffer("same", self.table)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = (self.first(x) + self.second(x)) * self.scale
        return y


def distributed(module: Odd, mesh: DeviceMesh) -> Odd:
    """A copy whose parameters are DTensors, gradients too."""
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}  # a deepcopy has none
    module = copy.deepcopy(module)

    def convert(name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if name == "scale":
            parameter.grad = gradients[name]
            return None
        placements = [Replicate() if name == "second.bias" else Shard(0)]
        new = nn.Parameter(distribute_tensor(parameter.detach(), mesh, placements))
        if (gradient := gradients[name]) is not None:
            new.grad = distribute_tensor(gradient, mesh, placements)
        return new

    replace_parameters(module, convert)
    module.table = module.same = distribute_tensor(module.table, mesh, [Shard(0)])
    return module


def check_odd(mesh: DeviceMesh) -> dict[str, Any]:
    torch.manual_seed(0)
    plain = Odd()
    plain(torch.randn(4, 3)).square().sum().backward()
    module = distributed(plain, mesh)
    scale = module.scale
    module.first.weight.tag = "mine"
    steps = [torch.optim.Adam(each.parameters(), 0.1, foreach=False) for each in (plain, module)]
    for optimizer in steps:
        for parameter in optimizer.param_groups[0]["params"]:
            # an ordinary parameter beside DTensors in one state
            optimizer.state[parameter] = {"step": torch.tensor(1.0), "exp_avg": parameter.detach() * 2}
    lists = [group["params"] for group in steps[1].param_groups]
    own = nn.Parameter(distribute_tensor(torch.arange(3.0), mesh, [Shard(0)]))
    steps[1].add_param_group({"params": [own]})
    replaced = make_whole(module, [steps[1]])
    assert not any(isinstance(value, DTensor) for value in (*module.parameters(), *module.buffers()))
    pairs = list(zip(plain.parameters(), module.parameters(), strict=True))
    states = [(steps[0].state[one], steps[1].state[other]) for one, other in pairs]
    return {
        "values": all(torch.equal(one, other) and type(other) is nn.Parameter for one, other in pairs),
        "gradients": all(_equal(one.grad, other.grad) for one, other in pairs),
        "flags": [one.requires_grad == other.requires_grad for one, other in pairs],
        "buffers": torch.equal(module.table, plain.table) and module.same is module.table,
        "ties": module.second.weight is module.first.weight,
        "attributes": [sorted(vars(parameter)) for parameter in module.parameters()],
        "ordinary stays": module.scale is scale,
        "states": all(
            type(second["exp_avg"]) is Tensor and torch.equal(first["exp_avg"], second["exp_avg"])
            for first, second in states
        ),
        "groups": lists == [group["params"] for group in steps[1].param_groups][:1]
        and all(one is other for one, other in zip(lists[0], module.parameters(), strict=True)),
        "own": steps[1].param_groups[1]["params"][0].tolist(),
        "num replaced": len(replaced),
    }


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other if one is None or other is None else type(other) is Tensor and torch.equal(one, other)


def check_device(mesh: DeviceMesh) -> list[str]:
    """Meta stands for another device: values go there, states of optimizers do not."""
    module = distributed(Odd(), mesh)
    optimizer = torch.optim.SGD([module.first.weight], 0.1, momentum=0.9)
    optimizer.state[module.first.weight] = {"momentum_buffer": module.first.weight.detach() + 1}
    make_whole(module, [optimizer], torch.device("meta"))
    state = optimizer.state[module.first.weight]["momentum_buffer"]
    return [module.first.weight.device.type, module.table.device.type, state.device.type]


def check_partial(mesh: DeviceMesh) -> str:
    module = nn.Linear(2, 2)
    module.weight = nn.Parameter(DTensor.from_local(torch.ones(2, 2), mesh, [Partial()]))
    try:
        make_whole(module)
    except AssertionError as error:
        return str(error)
    return ""


def check_all(folder: Path) -> dict[str, Any]:
    mesh = join_world().data_mesh
    return {"odd": check_odd(mesh), "device": check_device(mesh), "partial": check_partial(mesh)}
