"""Run by four processes: longer pipelines, few microbatches, how much is alive; two pipelines side by side."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pipeline_checks import SCHEDULES, M, difference, divided, join, parity, plain_step
from pipeline_models import Counting, made
from torch.distributed.tensor import DTensor

from lightning_recompute.groups import ParallelGroups
from lightning_recompute.pipeline import PipelineModule
from lightning_recompute.pipeline_settings import PipelineSettings
from lightning_recompute.tensor_parallel import apply_tensor_parallel
from lightning_recompute.whole import make_whole

MODELS = ("gpt-tied", "ClassToken", "Shared")
# rows, fewer than ranks
FEW = {"1f1b": 2, "interleaved": 3, "interleaved-zb": 2, "zbv": 3}
BLOCKS = 8


def alive(groups: ParallelGroups, schedule: str, num_microbatches: int) -> dict[str, Any]:
    """Chunks of this rank whose graph is alive at most; gradients."""
    plain = made("Counted")
    settings = replace(SCHEDULES[schedule], num_microbatches=num_microbatches)
    module, pipeline = divided(groups, "Counted", settings, rows=num_microbatches)
    batch = plain.batch(num_microbatches)
    plain_step(plain, batch, num_microbatches)
    Counting.most = 0
    pipeline.run(module.training_step, batch).backward()
    pipeline.remove()
    assert not Counting.alive
    chunks = -(-Counting.most // (BLOCKS // pipeline.division.num_chunks))
    return {"chunks": chunks, "gradients": difference(plain, pipeline)}


def whole(gradient: Any) -> Any:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def beside_tensor(groups: ParallelGroups, schedule: str, sequence_parallel: bool) -> dict[str, Any]:
    """Stages of a model whose layers tensor-parallel ranks share."""
    plain, module = made("gpt-rotary-gqa-swiglu"), made("gpt-rotary-gqa-swiglu")
    torch.manual_seed(3)
    batch = {"ids": plain.batch()["ids"][:, :11]}
    tensor = apply_tensor_parallel(module.model, groups.tensor_mesh, sequence_parallel=sequence_parallel)

    def step(microbatch: Any) -> Any:
        with tensor.step():
            return module.training_step(microbatch)

    pipeline = PipelineModule(module, groups, SCHEDULES[schedule])
    pipeline.divide(None, batch, step)
    due = plain_step(plain, batch, M)
    loss = pipeline.run(step, batch)
    loss.backward()
    tensor.sum_gradients()
    found = {"loss": float((loss.detach() - due).abs())}
    gradients = {name: whole(parameter.grad) for name, parameter in pipeline.ownership.parameters.items()}
    tensor.remove()
    pipeline.remove()
    pipeline.make_whole()
    make_whole(module)
    for name, parameter in plain.named_parameters():
        if name in gradients:
            assert parameter.grad is not None
            found[name] = float((gradients[name] - parameter.grad).abs().max())
    states = zip(plain.state_dict().values(), module.state_dict().values(), strict=True)
    return {"worst": max(found.values()), "whole": all(torch.equal(one, other) for one, other in states)}


def check_four(folder: Path) -> dict[str, Any]:
    groups = join()
    found: dict[str, Any] = {
        "parity": {name: parity(groups, name, SCHEDULES["1f1b"], short=True) for name in MODELS},
        "few": {
            schedule: parity(groups, "Counted", SCHEDULES[schedule], rows, rows, short=True)
            for schedule, rows in FEW.items()
        },
        "split": parity(groups, "Counted", PipelineSettings(num_microbatches=4, split=[1, 1, 1, 5]), short=True),
        "alive": {schedule: alive(groups, schedule, 8) for schedule in SCHEDULES},
    }
    two = ParallelGroups.build("cpu", pipeline=2)
    found["side by side"] = {name: parity(two, "Toy", SCHEDULES[name], short=True) for name in ("1f1b", "zbv")}
    both = ParallelGroups.build("cpu", pipeline=2, tensor=2)
    found["beside tensor"] = {
        f"{schedule} {sequence}": beside_tensor(both, schedule, sequence)
        for schedule, sequence in (("1f1b", False), ("zbv", True))
    }
    dist.barrier()
    dist.destroy_process_group()
    return found
