"""Run by two processes: a pipeline against one process with the same microbatches."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from data_parallel_toys import full
from pipeline_models import made
from torch import Tensor, nn

from lightning_recompute.groups import ParallelGroups
from lightning_recompute.microbatches import split_batch, weights_of
from lightning_recompute.pipeline import PipelineModule
from lightning_recompute.pipeline_settings import PipelineSettings
from lightning_recompute.probe import loss_of

M = 4
SCHEDULES = {
    "1f1b": PipelineSettings(num_microbatches=M),
    "gpipe": PipelineSettings(schedule="gpipe", num_microbatches=M),
    "interleaved": PipelineSettings(virtual=2, num_microbatches=M),
    "interleaved-zb": PipelineSettings(schedule="interleaved-zero-bubble", virtual=2, num_microbatches=M),
    "zbv": PipelineSettings(schedule="zbv-zero-bubble", num_microbatches=M),
}
# every model under one of the schedules at least, every schedule with several models
PAIRS = {
    "1f1b": ("gpt-tied", "gpt-rotary-gqa-swiglu", "gpt2-eager", "Data", "Masked"),
    "gpipe": ("bert-sdpa", "vit-sdpa", "Shapes"),
    "interleaved": ("llama-eager", "encoder-post-norm", "Unused", "Statistics"),
    "interleaved-zb": ("gpt2-sdpa", "ClassToken", "Frozen"),
    "zbv": ("gpt-tied", "llama-sdpa", "ClassToken", "Shapes", "Statistics"),
}


def join(pipeline: int | None = None) -> ParallelGroups:
    rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=timedelta(seconds=60))
    return ParallelGroups.build("cpu", pipeline=pipeline or size)


def divided(groups: ParallelGroups, name: str, settings: PipelineSettings, rows: int = 8) -> tuple[Any, PipelineModule]:
    module = made(name)
    torch.manual_seed(1)
    pipeline = PipelineModule(module, groups, settings)
    pipeline.divide(None, module.batch(rows), module.training_step)
    return module, pipeline


def plain_step(module: Any, batch: Any, num_microbatches: int, weight: Any = None, seed: int | None = None) -> Tensor:
    """One process: the same microbatches, one after the other."""
    microbatches = split_batch(batch, num_microbatches)
    total = torch.zeros(())
    for index, (part, share) in enumerate(zip(microbatches, weights_of(microbatches, weight), strict=True)):
        if seed is not None:
            torch.manual_seed(seed + index)
        if not share:
            continue
        loss = loss_of(module.training_step(part))
        (loss * share).backward()
        total = total + loss.detach() * share
    return total


def difference(plain: nn.Module, pipeline: PipelineModule) -> float:
    """The largest difference of a gradient, relative to the largest gradient of all; 9 where one is missing."""
    due = {name: parameter.grad for name, parameter in plain.named_parameters()}
    largest = max(gradient.abs().max() for gradient in due.values() if gradient is not None)
    worst = 0.0
    for name, parameter in pipeline.ownership.parameters.items():
        gradient = due[name]
        if (gradient is None) != (parameter.grad is None):
            return 9.0
        if gradient is not None and parameter.grad is not None:
            worst = max(worst, float((gradient - full(parameter.grad)).abs().max() / largest))
    return worst


def state_of(module: nn.Module) -> list[Any]:
    """Everything on a module that a pipeline could leave something on."""
    names = [(name, id(parameter)) for name, parameter in module.named_parameters(remove_duplicate=False)]
    attributes = [
        (name, sorted(vars(part)), [len(value) for key, value in vars(part).items() if key.endswith("_hooks")])
        for name, part in module.named_modules()
    ]
    return [names, attributes]


def parity(
    groups: ParallelGroups,
    name: str,
    settings: PipelineSettings,
    num_microbatches: int = M,
    rows: int = 8,
    short: bool = False,
) -> dict[str, Any]:
    """Two steps, an evaluation and the end of one model under one schedule, against one process; one step if short."""
    plain, module = made(name), made(name)
    clean = state_of(module)
    pipeline = PipelineModule(module, groups, settings)
    torch.manual_seed(1)
    pipeline.divide(None, plain.batch(rows), module.training_step)
    found: dict[str, Any] = {"gradients": 0.0, "loss": 0.0}
    for step in range(1 if short else 2):
        torch.manual_seed(step + 2 * groups.rank("data"))
        batch = plain.batch(rows)
        due = plain_step(plain, batch, num_microbatches)
        loss = pipeline.run(module.training_step, batch)
        loss.backward()
        found["gradients"] = max(found["gradients"], difference(plain, pipeline))
        found["loss"] = max(found["loss"], float((loss.detach() - due).abs()))
    found["evaluation"] = 0.0 if short else evaluation(plain, module, pipeline, batch)
    found["tied"] = list(pipeline.ownership.tied)
    found["norm"] = norm_difference(groups, plain, pipeline)
    owned = pipeline.ownership.parameters
    found["numel"] = sum(parameter.numel() for parameter in owned.values())
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in module.parameters()}
    found["bytes"], found["own_bytes"] = sum(storages.values()), 8 * found["numel"]
    found["total"] = sum(parameter.numel() for parameter in plain.parameters())
    found["names"] = sorted(set(owned) - set(dict(plain.named_parameters()))) + sorted(set(owned) ^ trained(module))
    pipeline.remove()
    pipeline.remove()
    found["clean"] = state_of(module) == clean
    pipeline.make_whole()
    found["whole"] = all(
        torch.equal(one, other) and key == other_key
        for (key, one), (other_key, other) in zip(plain.state_dict().items(), module.state_dict().items(), strict=True)
    )
    return found


def evaluation(plain: Any, module: Any, pipeline: PipelineModule, batch: Any) -> float:
    """The largest difference of a loss: of the whole batch, and of two microbatches."""
    found = []
    with torch.no_grad():
        for number in (1, 2):
            results = pipeline.evaluate(module.training_step, batch, num_microbatches=number)
            due = [loss_of(plain.training_step(part)) for part in split_batch(batch, number)]
            found += [float((loss_of(one) - other).abs()) for one, other in zip(results, due, strict=True)]
    return max(found)


def trained(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_parameters()}


def norm_difference(groups: ParallelGroups, plain: nn.Module, pipeline: PipelineModule) -> float:
    """Of the squared norm of all gradients, each parameter counted by one rank."""
    owned = pipeline.ownership.parameters.items()
    mine = [p.grad.square().sum() for name, p in owned if p.grad is not None and pipeline.ownership.counts(name)]
    total = torch.stack([torch.zeros((), dtype=torch.float64), *mine]).sum()
    dist.all_reduce(total, group=groups.group("pipeline"))
    due = sum(float(p.grad.square().sum()) for p in plain.parameters() if p.grad is not None)
    return float((total / due - 1).abs())
