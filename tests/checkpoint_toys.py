"""A module and its optimizers under several layouts, for checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from lightning_recompute.groups import ParallelGroups
from lightning_recompute.optimizer_names import by_name, named_state

# layouts by the number of processes
LAYOUTS = {1: ("one",), 2: ("replicate", "shard", "tensor"), 4: ("tensor+shard",)}
EVERY = tuple(layout for layouts in LAYOUTS.values() for layout in layouts)


class Toy(nn.Module):
    """Tied, frozen, of uneven sizes, in two types, with buffers."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(10, 6)
        self.up = nn.Linear(6, 7)
        self.down = nn.Linear(7, 6).bfloat16()
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.late = nn.Parameter(torch.randn(3, 2))
        self.plain = nn.Parameter(torch.randn(1))
        self.register_buffer("mean", torch.randn(4))
        self.register_buffer("count", torch.tensor(seed))


# how tensor parallelism cuts them, as columns and rows
CUTS: dict[str, Placement] = {
    "embed.weight": Shard(0),
    "head.weight": Shard(0),
    "up.weight": Shard(0),
    "up.bias": Shard(0),
    "down.weight": Shard(1),
}


def join_world() -> None:
    """Join the processes that `in_ranks` started."""
    dist.init_process_group("gloo", rank=int(os.environ["LOCAL_RANK"]), world_size=int(os.environ["WORLD_SIZE"]))


def laid_out(module: nn.Module, layout: str) -> nn.Module:
    """Give the parameters of a module a layout; every process holds it whole before."""
    if layout in ("one", "replicate"):
        return module
    groups = ParallelGroups.build("cpu", tensor=2 if "tensor" in layout else 1)
    if "tensor" in layout:
        made: dict[Tensor, nn.Parameter] = {}
        for owner_name, owner in module.named_modules():
            for name, parameter in list(owner.named_parameters(recurse=False)):
                if parameter not in made:
                    cut = CUTS.get(f"{owner_name}.{name}", Replicate())
                    spread = distribute_tensor(parameter.detach(), groups.tensor_mesh, [cut])
                    made[parameter] = nn.Parameter(spread, requires_grad=parameter.requires_grad)
                setattr(owner, name, made[parameter])
    if "shard" in layout:
        fully_shard(module.get_submodule("down"), mesh=groups.data_mesh)  # of another type
        fully_shard(module, mesh=groups.data_mesh)
    return module


def make_optimizers(module: Any, *, reverse: bool = False) -> list[Optimizer]:
    """AdamW with two groups, SGD with momentum, SGD without state, Adam that is never stepped."""
    weights = [module.up.weight, module.down.weight]
    rest = [module.up.bias, module.down.bias, module.norm.weight, module.norm.bias]
    step = -1 if reverse else 1
    return [
        AdamW([{"params": weights[::step], "lr": 0.1}, {"params": rest[::step], "weight_decay": 0.0}], lr=0.02),
        SGD([module.embed.weight, module.frozen], lr=0.1, momentum=0.9),
        SGD([module.plain], lr=0.3),
        Adam([module.late], lr=0.5),
    ]


def train(module: nn.Module, optimizers: list[Optimizer], steps: int = 3) -> None:
    """Step all but the last optimizer, on gradients from a seed."""
    for step in range(steps):
        for index, parameter in enumerate(module.parameters()):
            generator = torch.Generator().manual_seed(100 * step + index)
            gradient = torch.randn(parameter.shape, generator=generator, dtype=torch.float32).to(parameter.dtype)
            if not parameter.requires_grad:
                continue
            if isinstance(parameter, DTensor):
                gradient = part_like(gradient, parameter)
            parameter.grad = gradient
        for optimizer in optimizers[:-1]:
            optimizer.step()
            optimizer.zero_grad()


def part_like(whole: Tensor, like: DTensor) -> Tensor:
    """A rank's part of a tensor, by torch's own list of chunks."""
    made = torch.empty_like(like, dtype=whole.dtype)
    (chunk,) = made.__create_chunk_list__()
    place = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
    made.to_local().copy_(whole[place])
    return made


def build(layout: str, seed: int, *, reverse: bool = False) -> tuple[Any, list[Optimizer]]:
    """A module of a layout, and its optimizers."""
    module = laid_out(Toy(seed), layout)
    return module, make_optimizers(module, reverse=reverse)


def dumped(module: nn.Module, optimizers: list[Optimizer], **others: Any) -> dict[str, Any]:
    """What a strategy hands to the saver."""
    return {
        "epoch": 3,
        "pytorch-lightning_version": "2.6.6",
        "state_dict": module.state_dict(),
        "loops": {"fit_loop": {"progress": [1, 2]}},
        "optimizer_states": [named_state(optimizer, module) for optimizer in optimizers],
        "lr_schedulers": [{"last_epoch": 2}],
        **others,
    }


def whole(value: Any) -> Any:
    """A tree with whole plain tensors; collective."""
    if isinstance(value, DTensor):
        return value.full_tensor().clone()
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: whole(part) for key, part in value.items()}
    return [whole(part) for part in value] if isinstance(value, list) else value


def as_is(value: Any) -> Any:
    """Values in place of copies; `differences` looks at a rank's own part then."""
    return value


def everything(module: nn.Module, optimizers: list[Optimizer], copy: Callable[[Any], Any] = whole) -> dict[str, Any]:
    """All values of a module and its optimizers, by name, to be compared."""
    states = [by_name(named_state(optimizer, module)) for optimizer in optimizers]
    return {"module": copy(dict(module.state_dict())), "optimizers": [copy(dict(state)) for state in states]}


def differences(found: Any, due: Any, path: str = "") -> list[str]:
    """Where two trees differ: bits of tensors, types, values; the order of parameters in a group does not count."""
    if isinstance(due, Tensor):
        if isinstance(found, DTensor):
            found, due = found.to_local(), part_like(due, found).to_local()
        same = isinstance(found, Tensor) and found.dtype == due.dtype and torch.equal(found, due)
        return [] if same else [path]
    if isinstance(due, dict):
        if set(found) != set(due):
            return [f"{path}: {sorted(map(str, set(found) ^ set(due)))}"]
        return [text for key in due for text in differences(found[key], due[key], f"{path}.{key}")]
    if path.endswith(".params"):
        found, due = sorted(found), sorted(due)
    if isinstance(due, list):
        if len(found) != len(due):
            return [f"{path}: {len(found)}"]
        return [text for i, part in enumerate(due) for text in differences(found[i], part, f"{path}.{i}")]
    return [] if found == due and type(found) is type(due) else [f"{path}: {found!r}, not {due!r}"]
