"""Run by two processes: a pipeline against one process with the same microbatches."""

from __future__ import annotations

import gc
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pipeline_models import Counting, made
from plans import PLANS, num_calls
from selective_plans import SELECTIVE_PLANS
from torch import Tensor, nn

from lightning_recompute.groups import ParallelGroups
from lightning_recompute.memory import open_meter
from lightning_recompute.microbatches import split_batch, weights_of
from lightning_recompute.pipeline import PipelineModule
from lightning_recompute.pipeline_settings import PipelineSettings
from lightning_recompute.plan import RecomputePlan
from lightning_recompute.probe import loss_of
from lightning_recompute.recompute import RecomputeHandle, apply_recompute

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
    "1f1b": ("gpt-tied", "gpt-rotary-gqa-swiglu", "llama-sdpa", "gpt2-eager", "Shapes", "Frozen", "Data"),
    "gpipe": ("gpt-tied", "bert-sdpa", "vit-sdpa"),
    "interleaved": ("llama-eager", "encoder-post-norm", "ClassToken", "Unused", "bert-eager"),
    "interleaved-zb": ("gpt-tied", "gpt2-sdpa", "ClassToken", "Shapes", "Frozen"),
    "zbv": ("gpt-tied", "llama-sdpa", "vit-eager", "ClassToken", "Shapes", "Masked", "bert-sdpa"),
}
REFUSED_LATE = ("Skip", "Deep", "Hidden")


def join() -> ParallelGroups:
    rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=timedelta(seconds=60))
    return ParallelGroups.build("cpu", pipeline=dist.get_world_size())


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
            worst = max(worst, float((gradient - parameter.grad).abs().max() / largest))
    return worst


def state_of(module: nn.Module) -> list[Any]:
    """Everything on a module that a pipeline could leave something on."""
    names = [(name, id(parameter)) for name, parameter in module.named_parameters(remove_duplicate=False)]
    attributes = [
        (name, sorted(vars(part)), [len(value) for key, value in vars(part).items() if key.endswith("_hooks")])
        for name, part in module.named_modules()
    ]
    return [names, attributes]


def parity(groups: ParallelGroups, name: str, settings: PipelineSettings, num_microbatches: int = M) -> dict[str, Any]:
    """Two steps, an evaluation and the end of one model under one schedule, against one process."""
    plain, before = made(name), made(name)
    module = made(name)
    clean = state_of(module)
    pipeline = PipelineModule(module, groups, settings)
    torch.manual_seed(1)
    pipeline.divide(None, plain.batch(), module.training_step)
    found: dict[str, Any] = {"gradients": 0.0, "loss": 0.0}
    for step in range(2):
        torch.manual_seed(step)
        batch = plain.batch()
        due = plain_step(plain, batch, num_microbatches)
        loss = pipeline.run(module.training_step, batch)
        loss.backward()
        found["gradients"] = max(found["gradients"], difference(plain, pipeline))
        found["loss"] = max(found["loss"], float((loss.detach() - due).abs()))
    with torch.no_grad():
        due = loss_of(plain.training_step(batch))
        whole = loss_of(pipeline.evaluate(module.training_step, batch)[0])
        parts = pipeline.evaluate(module.training_step, batch, num_microbatches=2)
        due_parts = [loss_of(plain.training_step(part)) for part in split_batch(batch, 2)]
    found["evaluation"] = float((whole - due).abs())
    found["parts"] = max(float(loss_of(one) - other) for one, other in zip(parts, due_parts, strict=True))
    found["tied"] = list(pipeline.ownership.tied)
    found["norm"] = norm_difference(plain, pipeline)
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
        for (key, one), (other_key, other) in zip(before.state_dict().items(), module.state_dict().items(), strict=True)
    )
    return found


def trained(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_parameters()}


def norm_difference(plain: nn.Module, pipeline: PipelineModule) -> float:
    """Of the squared norm of all gradients, each parameter counted by one rank."""
    owned = pipeline.ownership.parameters.items()
    mine = [p.grad.square().sum() for name, p in owned if p.grad is not None and pipeline.ownership.counts(name)]
    total = torch.stack([torch.zeros((), dtype=torch.float64), *mine]).sum()
    dist.all_reduce(total)
    due = sum(float(p.grad.square().sum()) for p in plain.parameters() if p.grad is not None)
    return float((total / due - 1).abs())


# ---- recompute


def recompute(groups: ParallelGroups, pipeline: PipelineModule, plan: RecomputePlan) -> RecomputeHandle:
    own = pipeline.division.part_of(plan, groups.rank("pipeline"))
    return apply_recompute(pipeline.module, own, blocks=pipeline.block_list.name)


def recomputed(groups: ParallelGroups, schedule: str, plan_name: str) -> dict[str, Any]:
    """A plan on each rank's own blocks: gradients, and how often each block's forward ran."""
    plain = made("Counted")
    module, pipeline = divided(groups, "Counted", SCHEDULES[schedule])
    plan = (PLANS | SELECTIVE_PLANS)[plan_name](pipeline.division.lengths)
    handle = recompute(groups, pipeline, plan)
    batch = plain.batch()
    plain_step(plain, batch, M)
    Counting.calls.clear()
    pipeline.run(module.training_step, batch).backward()
    chunks = pipeline.division.chunks_of(groups.rank("pipeline"))
    own = [index for chunk in chunks for index in range(*pipeline.division.bounds[chunk])]
    calls = [Counting.calls[block.number] for block in module.blocks]
    due = [count * M if index in own else 0 for index, count in enumerate(num_calls(plan))]
    found = {"gradients": difference(plain, pipeline), "calls": calls, "due": due}
    handle.remove()
    pipeline.remove()
    return found


def freed(groups: ParallelGroups, schedule: str, labels: str) -> dict[str, Any]:
    """Norms and activations whose outputs are freed: how often a norm of the rank's own runs."""
    counts: dict[int, int] = {}
    original = nn.LayerNorm.forward

    def counting(self: nn.LayerNorm, hidden: Tensor) -> Tensor:
        counts[id(self)] = counts.get(id(self), 0) + 1
        return original(self, hidden)

    plain = made("gpt-tied")
    nn.LayerNorm.forward = counting  # type: ignore[method-assign]
    try:
        module, pipeline = divided(groups, "gpt-tied", SCHEDULES[schedule])
        handle = recompute(groups, pipeline, SELECTIVE_PLANS[labels](pipeline.division.lengths))
        batch = plain.batch()
        plain_step(plain, batch, M)
        counts.clear()
        pipeline.run(module.training_step, batch).backward()
    finally:
        nn.LayerNorm.forward = original  # type: ignore[method-assign]
    chunks = pipeline.division.chunks_of(groups.rank("pipeline"))
    own = [block for chunk in chunks for block in pipeline.block_list.blocks[slice(*pipeline.division.bounds[chunk])]]
    norms = [counts[id(part)] for block in own for part in block.modules() if isinstance(part, nn.LayerNorm)]
    found = {"gradients": difference(plain, pipeline), "norms": norms}
    handle.remove()
    pipeline.remove()
    return found


# ---- memory


def memory(groups: ParallelGroups, schedule: str, num_microbatches: int) -> dict[str, int]:
    """Bytes of a step beside gradients, and what is left of it; 16 rows in each microbatch."""
    settings = SCHEDULES[schedule]
    settings = PipelineSettings(schedule=settings.schedule, virtual=settings.virtual, num_microbatches=num_microbatches)
    module, pipeline = divided(groups, "Counted", settings, rows=16 * num_microbatches)
    batch = module.batch(16 * num_microbatches)
    meter = open_meter("cpu")
    found = {}
    for step in range(3):
        for parameter in pipeline.ownership.parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        gc.collect()
        dist.barrier()
        before = meter.live_bytes
        meter.reset_peak()
        loss = pipeline.run(module.training_step, batch, drop_gradients=True)
        loss.backward()
        del loss
        dist.barrier()
        found |= {"peak": meter.peak_bytes - before, f"left {step}": meter.live_bytes - before}
    meter.close()
    pipeline.remove()
    return found


def alive(groups: ParallelGroups, schedule: str, num_microbatches: int) -> tuple[int, int]:
    """Blocks of this rank whose graph is alive at most, and the blocks of a chunk."""
    settings = SCHEDULES[schedule]
    settings = PipelineSettings(schedule=settings.schedule, virtual=settings.virtual, num_microbatches=num_microbatches)
    module, pipeline = divided(groups, "Counted", settings, rows=num_microbatches)
    Counting.most = 0
    pipeline.run(module.training_step, module.batch(num_microbatches)).backward()
    found = Counting.most
    pipeline.remove()
    return found, 8 // pipeline.division.num_chunks


# ---- refusals


def refused(groups: ParallelGroups, name: str, schedule: str = "1f1b") -> dict[str, Any]:
    module = made(name)
    clean = state_of(module)
    pipeline = PipelineModule(module, groups, SCHEDULES[schedule])
    message = ""
    try:
        pipeline.divide(None, module.batch(), module.training_step)
        pipeline.run(module.training_step, module.batch())
    except ValueError as error:
        message = str(error)
    pipeline.remove()
    return {"message": message, "clean": state_of(module) == clean}


def check_two(folder: Path) -> dict[str, Any]:
    groups = join()
    found: dict[str, Any] = {
        "parity": {
            f"{schedule} {name}": parity(groups, name, SCHEDULES[schedule])
            for schedule, names in PAIRS.items()
            for name in names
        },
        "recompute": {
            f"{schedule} {plan}": recomputed(groups, schedule, plan)
            for schedule in ("1f1b", "zbv", "interleaved-zb")
            for plan in ("uniform-1", "uniform-2", "block-1", "core_attn", "save-matmul")
        },
        "freed": {
            f"{schedule} {labels}": freed(groups, schedule, labels)
            for schedule in ("1f1b", "zbv")
            for labels in ("norm", "norm+act", "core_attn+norm+act")
        },
        "memory": {
            f"{schedule} {number}": memory(groups, schedule, number)
            for schedule in ("1f1b", "interleaved", "zbv")
            for number in (4, 12)
        },
        "refused": {name: refused(groups, name) for name in (*REFUSED_LATE, "Extra", "Twice", "Nothing", "t5-sdpa")},
    }
    dist.barrier()
    dist.destroy_process_group()
    return found
