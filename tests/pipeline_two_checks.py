"""Run by two processes: what a pipeline does beside the right gradients, and all cases of two processes."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from distributed import settle_collectives
from pipeline_checks import PAIRS, SCHEDULES, M, difference, divided, join, parity, plain_step, state_of
from pipeline_models import Counting, made
from plans import PLANS
from selective_plans import SELECTIVE_PLANS
from torch import Tensor, nn

from lightning_recompute.groups import ParallelGroups
from lightning_recompute.memory import open_meter
from lightning_recompute.pipeline import PipelineModule
from lightning_recompute.plan import Full, RecomputePlan, SaveOps
from lightning_recompute.recompute import RecomputeHandle, apply_recompute

RECOMPUTED = {
    "1f1b": ("uniform-1", "uniform-2", "block-1", "core_attn"),
    "interleaved-zb": ("uniform-2",),
    "zbv": ("uniform-1", "uniform-2", "block-1", "core_attn"),
}
REFUSED = (
    "Skip",
    "Deep",
    "Hidden",
    "Number",
    "NumberMask",
    "Extra",
    "Twice",
    "Nothing",
    "meta",
    "t5-sdpa",
)


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
    twice = [
        isinstance(segment.action, Full | SaveOps)
        for segment in plan.segments
        for _ in range(segment.start, segment.stop)
    ]
    due = [(2 if twice[index] else 1) * M if index in own else 0 for index in range(len(calls))]
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
    settle_collectives()
    settings = replace(SCHEDULES[schedule], num_microbatches=num_microbatches)
    module, pipeline = divided(groups, "Counted", settings, rows=16 * num_microbatches)
    batch = module.batch(16 * num_microbatches)
    meter = open_meter("cpu")
    found = {}
    for step in range(2):
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


# ---- refusals


def refused(groups: ParallelGroups, name: str, schedule: str = "1f1b") -> dict[str, Any]:
    module = made("Toy").to("meta") if name == "meta" else made(name)
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


# ---- batches


def uneven(groups: ParallelGroups, schedule: str) -> dict[str, float]:
    """A full batch, then 7 rows in 4 microbatches, then shorter sequences, each twice in a window.

    Microbatches count by their target tokens, so that the whole batch in one comes to the same.
    """
    plain, module = made("Toy"), made("Toy")
    module.microbatch_weight = target_tokens
    pipeline = PipelineModule(module, groups, SCHEDULES[schedule])
    pipeline.divide(None, plain.batch(), module.training_step)
    found = {}
    for name, rows, length in (("full", 8, 12), ("uneven", 7, 12), ("short", 6, 5), ("nothing", 8, 5)):
        batch = {key: value[:, :length] for key, value in plain.batch(rows).items()}
        batch["labels"] = batch["labels"].masked_fill(torch.rand(rows, length) < 0.5, -100)
        batch["labels"][:, 0] = 1
        if name == "nothing":  # in two of the microbatches
            batch["labels"][2:6] = -100
        plain.zero_grad()
        for drop in (True, False):
            plain_step(plain, batch, M, target_tokens)
            in_place = not drop and schedule != "1f1b"
            pipeline.run(module.training_step, batch, drop_gradients=drop, in_place=in_place).backward()
        found[name] = difference(plain, pipeline)
        # of the whole batch, since it counts tokens
        plain.zero_grad()
        plain.training_step(batch).backward()
        pipeline.run(module.training_step, batch, drop_gradients=True).backward()
        found[f"{name} whole"] = difference(plain, pipeline)
    pipeline.remove()
    return found


def target_tokens(batch: Any) -> int:
    return int((batch["labels"] != -100).sum())


def noise(groups: ParallelGroups, schedule: str) -> float:
    """Random numbers that the step draws before its blocks are the same on all stages."""
    plain = made("Noise")
    module, pipeline = divided(groups, "Noise", SCHEDULES[schedule])
    batch = plain.batch()
    torch.manual_seed(11)
    seed = int(torch.randint(2**62, ()))
    torch.manual_seed(11 + groups.rank("pipeline"))  # ranks need not agree
    pipeline.run(module.training_step, batch).backward()
    plain_step(plain, batch, M, seed=seed)
    pipeline.remove()
    return difference(plain, pipeline)


def handed_back(groups: ParallelGroups) -> dict[str, Any]:
    """When gradients come to the parameters, and what they are multiplied by."""
    module, pipeline = divided(groups, "Toy", SCHEDULES["1f1b"])
    batch = module.batch()
    parameter = next(iter(pipeline.ownership.parameters.values()))
    loss = pipeline.run(module.training_step, batch)
    found: dict[str, Any] = {"before": parameter.grad is None, "shape": list(loss.shape)}
    loss.backward()
    assert parameter.grad is not None
    first, kept = parameter.grad.clone(), parameter.grad
    loss = pipeline.run(module.training_step, batch, scale=4.0)
    found["kept"] = parameter.grad is kept and torch.equal(kept, first)
    (loss * 4.0).backward()
    found["added"] = float((parameter.grad - 5 * first).abs().max())
    (pipeline.run(module.training_step, batch, scale=4.0) * 0.5).backward()
    found["scaled"] = float((parameter.grad - 5.5 * first).abs().max())
    loss = pipeline.run(module.training_step, batch, drop_gradients=True)
    found["dropped"] = parameter.grad is None
    loss.backward()
    try:
        loss.backward()
    except RuntimeError as error:
        found["twice"] = str(error)
    pipeline.remove()
    return found


def check_two(folder: Path) -> dict[str, Any]:
    groups = join()
    found: dict[str, Any] = {
        "parity": {
            f"{schedule} {name}": parity(groups, name, SCHEDULES[schedule], short=place > 0)
            for schedule, names in PAIRS.items()
            for place, name in enumerate(names)
        },
        "recompute": {
            f"{schedule} {plan}": recomputed(groups, schedule, plan)
            for schedule, plans in RECOMPUTED.items()
            for plan in plans
        },
        "freed": {
            f"{schedule} {labels}": freed(groups, schedule, labels)
            for schedule in ("1f1b", "zbv")
            for labels in ("norm+act", "core_attn+norm+act")
        },
        "memory": {
            f"{schedule} {number}": memory(groups, schedule, number)
            for schedule in ("1f1b", "interleaved", "zbv")
            for number in (6, 12)
        },
        "uneven": {schedule: uneven(groups, schedule) for schedule in ("1f1b", "interleaved", "zbv")},
        "noise": {schedule: noise(groups, schedule) for schedule in ("1f1b", "zbv")},
        "handed back": handed_back(groups),
        "refused": {name: refused(groups, name) for name in REFUSED},
    }
    dist.barrier()
    dist.destroy_process_group()
    return found


def check_error(folder: Path) -> None:
    """The second rank's step fails."""
    groups = join()
    module, pipeline = divided(groups, "Counted", SCHEDULES["interleaved"])
    batch = module.batch()
    pipeline.run(module.training_step, batch)

    def failing(microbatch: Any) -> Any:
        if groups.rank("pipeline") == 1:
            raise KeyError("a mistake of the user")
        return module.training_step(microbatch)

    pipeline.run(failing, batch)
