"""Run by four processes, two by two: gradients on meshes of all kinds clipped, and unscaled, together."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from data_parallel_toys import full, join_world
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from lightning_recompute.clipping import OverflowAgreement, clip_norm, clip_value
from lightning_recompute.groups import ParallelGroups

NORM_TYPES = (1.0, 2.0, 3.0, float("inf"))
FACTORS = (0.1, 10.0)
VALUE = 1e-3


def relative(found: Tensor, due: Tensor) -> float:
    return float((found - due).abs() / due)


def mixed_parameters(groups: ParallelGroups) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Parameters with gradients on meshes of all kinds, one twice, one without; and the same whole ones."""
    both = groups.mesh["data", "tensor"]
    generator = torch.Generator().manual_seed(5)
    places: list[tuple[Any, Any]] = [
        (groups.tensor_mesh, [Shard(0)]),
        (groups.tensor_mesh, [Replicate()]),
        (both, [Shard(0), Shard(1)]),
        (both, [Shard(0), Shard(0)]),
        (both, [Replicate(), Shard(0)]),
        (groups.data_mesh, [Shard(0)]),
        (None, None),
    ]
    spread, whole = [], []
    for mesh, placements in places:
        values = torch.randn(7, 5, generator=generator, dtype=torch.float64)
        plain = nn.Parameter(torch.zeros_like(values))
        plain.grad = values.clone()
        parameter = nn.Parameter(torch.zeros_like(values))
        parameter.grad = values.clone()
        if mesh is not None:
            parameter = nn.Parameter(distribute_tensor(plain.detach(), mesh, placements))
            parameter.grad = distribute_tensor(values, mesh, placements)
        spread.append(parameter)
        whole.append(plain)
    without = nn.Parameter(torch.zeros(3))
    return [*spread, spread[0], without], [*whole, without]


def check_clipping(groups: ParallelGroups) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for norm_type, factor in itertools.product(NORM_TYPES, FACTORS):
        spread, whole = mixed_parameters(groups)
        limit = factor * float(nn.utils.get_total_norm([p.grad for p in whole if p.grad is not None], norm_type))
        norm = clip_norm(spread, limit, norm_type)
        due = nn.utils.clip_grad_norm_(whole, limit, norm_type)
        found[f"{norm_type} {factor}"] = max(relative(norm, due), apart(spread, whole))
    spread, whole = mixed_parameters(groups)
    clip_value(spread, VALUE)
    nn.utils.clip_grad_value_(whole, VALUE)
    found["value"] = apart(spread, whole)
    found["nothing"] = clip_norm([], 1.0).item()
    spread, whole = mixed_parameters(groups)
    found["torch"] = error_of(lambda: nn.utils.clip_grad_norm_(spread, 1.0))
    partial = nn.Parameter(spread[1].detach())
    partial.grad = DTensor.from_local(torch.ones(7, 5, dtype=torch.float64), groups.tensor_mesh, [Partial()])
    found["partial"] = error_of(lambda: clip_norm([partial], 1.0))
    found["norm type"] = error_of(lambda: clip_norm(spread, 1.0, 0.0))
    return found


def check_stages(groups: ParallelGroups) -> dict[str, float]:
    """Each data rank stands for a stage: with parameters of its own, divided over `tensor`, and one of both stages."""
    found: dict[str, float] = {}
    stage, group = groups.rank("data"), groups.group("data")
    generator = torch.Generator().manual_seed(6)
    values = [torch.randn(7, 5, generator=generator, dtype=torch.float64) for _ in range(4)]
    for norm_type, factor, has_both in itertools.product(NORM_TYPES, FACTORS, (True, False)):
        whole = [nn.Parameter(torch.zeros(7, 5, dtype=torch.float64)) for _ in values]
        for parameter, value in zip(whole, values, strict=True):
            parameter.grad = value.clone()
        due_of = whole if has_both else whole[:3]
        limit = factor * float(nn.utils.get_total_norm([p.grad for p in due_of if p.grad is not None], norm_type))
        due = nn.utils.clip_grad_norm_(due_of, limit, norm_type)
        # the first is of both stages; the second stage has one more, or that one alone
        indices = [0, 1, 2] if stage == 0 else [0, 3] if has_both else [0]
        mine = []
        for index in indices:
            places = [Shard(0)] if index else [Replicate()]
            mine.append(nn.Parameter(distribute_tensor(torch.zeros_like(values[index]), groups.tensor_mesh, places)))
            mine[-1].grad = distribute_tensor(values[index].clone(), groups.tensor_mesh, places)
        norm = clip_norm(mine, limit, norm_type, group=group, counted_elsewhere=mine[:1] if stage else ())
        found[f"{norm_type} {factor} {has_both}"] = max(relative(norm, due), apart(mine, [whole[i] for i in indices]))
    # a stage without parameters, and one in another dtype
    lone = nn.Parameter(torch.zeros(3))
    lone.grad = torch.full((3,), 2.0)
    found["empty"] = float(clip_norm([lone] if stage else [], 1.0, group=group) - 12**0.5)
    return found


def apart(spread: list[nn.Parameter], whole: list[nn.Parameter]) -> float:
    pairs = [(one.grad, other.grad) for one, other in zip(spread, whole, strict=False) if other.grad is not None]
    return max((full(one) - other).abs().max().item() for one, other in pairs if one is not None)


def error_of(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def check_overflow(groups: ParallelGroups) -> dict[str, Any]:
    """An infinity on one rank only, in a gradient of each kind; steps of torch's scaler, and of the one that agrees."""
    found: dict[str, Any] = {}
    for index, agrees in itertools.product((None, 0, 2, 5), (True, False)):
        spread, _ = mixed_parameters(groups)
        parameters = [p for p in dict.fromkeys(spread) if p.grad is not None]
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        agreement = OverflowAgreement(scaler) if agrees else None
        optimizer = torch.optim.SGD(parameters, 0.1, foreach=False)
        scaler.scale(torch.ones(()))
        if index is not None and dist.get_rank() == 1:
            gradient: Any = parameters[index].grad
            gradient._local_tensor[0, 0] = float("inf")
        before = [full(p) for p in parameters]
        key = f"{index} {'agreed' if agrees else 'alone'}"
        found[key] = error_of(lambda scaler=scaler, optimizer=optimizer: scaler.unscale_(optimizer))
        if agreement is not None:
            scaler.step(optimizer)
            scaler.update()
            stepped = any(not torch.equal(full(p), value) for p, value in zip(parameters, before, strict=True))
            found[key] = (stepped, scaler.get_scale())
            agreement.remove()
            assert "_unscale_grads_" not in vars(scaler)
    # torch's own way with one mesh: the placement of the first gradient decides who is asked
    for first in ("replicated", "divided"):
        pair, _ = mixed_parameters(groups)
        order = [pair[1], pair[0]] if first == "replicated" else [pair[0], pair[1]]
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        optimizer = torch.optim.SGD(order, 0.1)
        scaler.scale(torch.ones(()))
        if groups.rank("tensor") == 1:
            gradient = pair[0].grad
            gradient._local_tensor[0, 0] = float("inf")
        scaler.unscale_(optimizer)
        state = scaler._per_optimizer_states[id(optimizer)]
        found[f"torch, {first} first"] = [float(flag) for flag in state["found_inf_per_device"].values()]
    return found


def check_halves(groups: ParallelGroups) -> float:
    """Gradients in float16 whose squares would overflow in it."""
    values = torch.full((8, 4), 1e4, dtype=torch.float16)
    parameter = nn.Parameter(distribute_tensor(torch.zeros_like(values), groups.tensor_mesh, [Shard(0)]))
    parameter.grad = distribute_tensor(values, groups.tensor_mesh, [Shard(0)])
    return relative(clip_norm([parameter], 1.0), values.double().norm())


def check_all(folder: Path) -> dict[str, Any]:
    groups = join_world(tensor=2)
    return {
        "clipping": check_clipping(groups),
        "overflow": check_overflow(groups),
        "stages": check_stages(groups),
        "halves": check_halves(groups),
    }
