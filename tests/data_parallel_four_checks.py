"""Run by four processes, two by two: data parallelism of models that tensor parallelism has divided."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from data_parallel_checks import sharded
from data_parallel_toys import (
    Frozen,
    Nested,
    Net,
    Norms,
    Shared,
    Tied,
    batches,
    difference,
    gradients,
    join_world,
    made,
    reference,
)
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_recompute.clipping import clip_norm
from lightning_recompute.data_parallel import DataParallel, replicate
from lightning_recompute.groups import ParallelGroups
from lightning_recompute.policy import RecomputePolicy
from lightning_recompute.recompute import apply_recompute
from lightning_recompute.tensor_parallel import TensorParallel, apply_tensor_parallel
from lightning_recompute.whole import make_whole

MODELS = {cls.__name__: cls for cls in (Net, Tied, Shared, Nested, Frozen, Norms)}
DIVIDED = {"*.up": "colwise", "*.down": "rowwise"}


def divided_step(divided: TensorParallel, parallel: DataParallel, batch: Tensor) -> None:
    module: Any = parallel.module

    def inner(batch: Tensor) -> Tensor:
        with divided.step():
            loss: Tensor = module.training_step(batch)
            return loss

    loss = parallel.run(inner, batch)
    parallel.before_backward(loss)
    loss.backward()
    parallel.finish()
    divided.sum_gradients()


def meshes(module: nn.Module) -> list[str]:
    found = {
        ",".join(p.data.device_mesh.mesh_dim_names or ()) if isinstance(p.data, DTensor) else "none"
        for p in module.parameters()
    }
    return sorted(found)


def check_divided(groups: ParallelGroups) -> dict[str, Any]:
    """Two accumulated steps of every model, clipped, optimized and made whole, against one process."""
    rank, size = groups.rank("data"), groups.size("data")
    steps, found = batches(2, size), {}
    for (name, build), kind in itertools.product(MODELS.items(), ("replicate", "shard", "recompute")):
        plain = made(build)
        expected = reference(plain, steps)
        module = made(build, seed=rank)
        names = [(key, p.shape) for key, p in module.named_parameters(remove_duplicate=False)]
        divided = apply_tensor_parallel(module, groups.tensor_mesh, plan=DIVIDED)
        handle = apply_recompute(module, RecomputePolicy()) if kind == "recompute" else None
        parallel = replicate(module, groups) if kind == "replicate" else sharded(module, groups)
        optimizer, due_optimizer = (torch.optim.SGD(each.parameters(), 0.1, momentum=0.9) for each in (module, plain))
        worst = 0.0
        for ranks, due in zip(steps, expected, strict=True):
            divided_step(divided, parallel, ranks[rank])
            worst = max(worst, difference(gradients(module), due))
        for parameter, gradient in zip(plain.parameters(), unique(plain, expected[-1]), strict=True):
            parameter.grad = gradient
        norm, due_norm = clip_norm(module.parameters(), 0.01), nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
        clipped = difference(gradients(module), gradients(plain))
        optimizer.step()
        due_optimizer.step()
        if handle is not None:
            handle.remove()
        found[f"{name} {kind}"] = {"difference": worst, "norm": relative(norm, due_norm), "clipped": clipped}
        found[f"{name} {kind}"]["meshes"] = meshes(module)
        parallel.remove()
        divided.remove()
        make_whole(module, [optimizer])
        weights, due_weights = ({key: p.detach() for key, p in each.named_parameters()} for each in (module, plain))
        found[f"{name} {kind}"]["weights"] = difference(weights, due_weights)
        found[f"{name} {kind}"]["whole"] = check_whole(module, optimizer, names)
    return found


def unique(module: nn.Module, gradients: dict[str, Tensor | None]) -> list[Tensor | None]:
    return [gradients[name] for name, _ in module.named_parameters()]


def relative(found: Tensor, due: Tensor) -> float:
    return float((found - due).abs() / due)


def check_whole(module: nn.Module, optimizer: torch.optim.Optimizer, names: list[Any]) -> dict[str, bool]:
    """An ordinary module again, the same on every rank, and an optimizer that goes on."""
    parameters = list(module.parameters())
    states = [value for state in optimizer.state.values() for value in state.values()]
    flat = torch.cat([p.detach().flatten() for p in parameters])
    everyone = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, flat)
    optimizer.step()
    return {
        "names": names == [(key, p.shape) for key, p in module.named_parameters(remove_duplicate=False)],
        "ordinary": all(type(p.data) is Tensor and type(p) is nn.Parameter for p in parameters),
        "gradients": all(p.grad is None or type(p.grad) is Tensor for p in parameters),
        "groups": [id(p) for group in optimizer.param_groups for p in group["params"]] == [id(p) for p in parameters],
        "states": bool(states) and all(type(value) is Tensor for value in states),
        "alike": all(torch.equal(other, flat) for other in everyone),
    }


def check_four(folder: Path) -> dict[str, Any]:
    return check_divided(join_world(tensor=2))
