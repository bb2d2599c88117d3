"""Run by eight processes: stages of layers that ranks share, beside others for other data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pipeline_checks import SCHEDULES, M, difference, join, plain_step
from pipeline_models import made
from plans import PLANS
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_recompute.groups import ParallelGroups
from lightning_recompute.pipeline_data import SpreadPipeline
from lightning_recompute.recompute import apply_recompute
from lightning_recompute.tensor_parallel import apply_tensor_parallel

MODEL = "gpt-rotary-gqa-swiglu"
CASES = (
    ("replicate", "1f1b", True),
    ("replicate", "zbv", False),
    ("shard", "1f1b", False),
    ("shard", "interleaved", True),
    ("shard", "zbv", True),
)


def cube(groups: ParallelGroups, kind: Any, schedule: str, sequence_parallel: bool) -> dict[str, Any]:
    """Two windows of two batches each, against one process; where the parameters lie; the end."""
    plain, module = made(MODEL), made(MODEL)
    size, mine = groups.size("data"), groups.rank("data")
    tensor = apply_tensor_parallel(module.model, groups.tensor_mesh, sequence_parallel=sequence_parallel)

    def step(microbatch: Any) -> Any:
        with tensor.step():
            return module.training_step(microbatch)

    pipeline = SpreadPipeline(module, groups, SCHEDULES[schedule])
    torch.manual_seed(1)
    pipeline.divide(None, {"ids": plain.batch()["ids"][:, :11]}, step)
    plan = PLANS["uniform-1"](pipeline.division.lengths)
    own = pipeline.division.part_of(plan, groups.rank("pipeline"))
    handle = apply_recompute(module, own, blocks=pipeline.block_list.name)
    pipeline.spread([[block] for block in pipeline.block_list.blocks], kind)
    optimizer = torch.optim.SGD(pipeline.ownership.parameters.values(), 0.1, momentum=0.9)
    due_optimizer = torch.optim.SGD(plain.parameters(), 0.1, momentum=0.9)
    found = {"gradients": 0.0, "norm": 0.0}
    for number in range(2):
        plain.zero_grad()
        for rank in range(size):
            torch.manual_seed(10 * number + rank)
            batches = [{"ids": plain.batch()["ids"][:, :11]} for _ in range(2)]
            for index, batch in enumerate(batches):
                plain_step(plain, batch, M)
                if rank == mine:
                    pipeline.run(step, batch, scale=0.5, drop_gradients=not index, in_place=bool(index)).mul(
                        0.5
                    ).backward()
        for parameter in plain.parameters():
            if parameter.grad is not None:
                parameter.grad /= 2 * size
        tensor.sum_gradients()
        pipeline.reduce_gradients()
        found["gradients"] = max(found["gradients"], difference(plain, pipeline))
        norm = pipeline.clip_norm(list(pipeline.ownership.parameters.values()), 0.01)
        due = nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
        found["norm"] = max(found["norm"], float((norm / due - 1).abs()))
        optimizer.step()
        due_optimizer.step()
    meshes = {p.data.device_mesh.mesh_dim_names for p in module.parameters() if isinstance(p.data, DTensor)}
    handle.remove()
    pipeline.remove()
    tensor.remove()
    pipeline.make_whole([optimizer])
    states = zip(plain.state_dict().values(), module.state_dict().values(), strict=True)
    found["whole"] = max(float((one - other).abs().max()) for one, other in states if one.is_floating_point())
    return {**found, "meshes": sorted(map(str, meshes))}


def check_eight(folder: Path) -> dict[str, Any]:
    join()
    groups = ParallelGroups.build("cpu", pipeline=2, tensor=2)
    found = {f"{kind} {schedule}": cube(groups, kind, schedule, sequence) for kind, schedule, sequence in CASES}
    dist.barrier()
    dist.destroy_process_group()
    return found
