"""Run by four processes: two pipelines of two stages side by side, which share what they learn."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from distributed import settle_collectives
from models import VOCABULARY, WIDTH
from pipeline_checks import SCHEDULES, M, difference, join, plain_step, state_of
from pipeline_models import Counting, Toy, cross_entropy, made
from plans import PLANS
from torch import nn

from lightning_recompute.groups import ParallelGroups
from lightning_recompute.memory import open_meter
from lightning_recompute.pipeline_data import SpreadPipeline
from lightning_recompute.probe import loss_of
from lightning_recompute.recompute import apply_recompute
from lightning_recompute.reduction import local_part

KINDS = ("replicate", "shard")
COUNTED = ("all_reduce", "reduce_scatter_single", "all_gather_single")


@dataclass(frozen=True)
class Case:
    """A model under a schedule.

    Args:
        model: Its name.
        schedule: One of `SCHEDULES`.
        plan: One of `PLANS`: what is recomputed.
        accumulated: Batches of each step of the optimizer.
        in_place: Gradients of later batches of a window are added while the schedule runs.
    """

    model: str
    schedule: str
    plan: str = "uniform-1"
    accumulated: int = 1
    in_place: bool = False


CASES = {
    "replicate": (
        Case("Counted", "1f1b", accumulated=2),
        Case("Shared", "interleaved", accumulated=2, in_place=True),
        Case("ClassToken", "zbv", "block-1"),
    ),
    "shard": (
        Case("gpt-tied", "1f1b", accumulated=2),
        Case("Counted", "gpipe"),
        Case("Counted", "interleaved", "uniform-2", accumulated=2, in_place=True),
        Case("Shared", "interleaved"),
        Case("Frozen", "interleaved-zb", accumulated=2),
        Case("ClassToken", "interleaved-zb"),
        Case("gpt-tied", "zbv", "block-1"),
    ),
}


@contextmanager
def counting(group: dist.ProcessGroup) -> Iterator[Counter[str]]:
    """Counts collectives of a group."""
    found: Counter[str] = Counter()
    originals = {name: getattr(dist, name) for name in COUNTED}

    def watched(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if group in (*args, *kwargs.values()):
                found[name] += 1
            return originals[name](*args, **kwargs)

        return call

    for name in COUNTED:
        setattr(dist, name, watched(name))
    try:
        yield found
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def spread(
    groups: ParallelGroups, kind: Any, name: str, schedule: str, plan_name: str, seed: int = 0
) -> tuple[Any, SpreadPipeline, Any]:
    """A module in stages, recomputed, replicated or sharded; with the handle of recompute."""
    module = made(name, seed)
    pipeline = SpreadPipeline(module, groups, SCHEDULES[schedule])
    torch.manual_seed(1)
    pipeline.divide(None, module.batch(), module.training_step)
    plan = PLANS[plan_name](pipeline.division.lengths)
    own = pipeline.division.part_of(plan, groups.rank("pipeline"))
    handle = apply_recompute(module, own, blocks=pipeline.block_list.name)
    blocks = pipeline.block_list.blocks
    units = [blocks[segment.start : segment.stop] for segment in plan.segments]
    pipeline.spread(units, kind)
    return module, pipeline, handle


def units_of(pipeline: SpreadPipeline, trained: bool) -> int:
    """Groups of FSDP2, or those with something to reduce."""
    states = pipeline.data._states  # type: ignore[union-attr]
    groups = [[each.sharded_param for each in group.fsdp_params] for s in states for group in s._fsdp_param_groups]
    return sum(any(p.grad is not None for p in group) or not trained for group in groups)


def due_step(plain: Any, case: Case, size: int, step: int) -> list[Any]:
    """Gradients of one process that has all batches; those of this step by data rank."""
    for parameter in plain.parameters():
        parameter.grad = None
    given: list[Any] = []
    for rank in range(size):
        torch.manual_seed(100 * step + rank)
        given.append([plain.batch() for _ in range(case.accumulated)])
        for batch in given[-1]:
            plain_step(plain, batch, M)
    for parameter in plain.parameters():
        if parameter.grad is not None:
            parameter.grad /= size * case.accumulated
    return given


def parity(groups: ParallelGroups, kind: str, case: Case) -> dict[str, Any]:
    """Two steps of an optimizer with clipping, an evaluation and the end, against one process."""
    size, rank = groups.size("data"), groups.rank("data")
    plain = made(case.model)
    # data ranks start apart
    module, pipeline, handle = spread(groups, kind, case.model, case.schedule, case.plan, seed=rank)
    optimizer, due_optimizer = (
        torch.optim.SGD(parameters, 0.5, momentum=0.9)
        for parameters in (pipeline.ownership.parameters.values(), plain.parameters())
    )
    found: dict[str, Any] = {"gradients": 0.0, "norm": 0.0, "clipped": 0.0, "counts": [], "quiet": Counter()}
    scale = 1 / case.accumulated
    for step in range(2):
        batches = due_step(plain, case, size, step)[rank]
        for index, batch in enumerate(batches):
            is_last = index + 1 == len(batches)
            context = nullcontext() if is_last else pipeline.no_sync()
            with context, counting(groups.group("data")) as counts:
                options = {"drop_gradients": index == 0, "in_place": case.in_place and index > 0}
                loss = pipeline.run(module.training_step, batch, scale=scale, **options)
                (loss * scale).backward()
                before = Counter(counts)
                pipeline.reduce_gradients()
            found["quiet"] |= before if is_last else counts
            if is_last:
                found["counts"].append({name: counts[name] - before[name] for name in COUNTED})
        found["gradients"] = max(found["gradients"], difference(plain, pipeline))
        norm = pipeline.clip_norm(list(pipeline.ownership.parameters.values()), 0.01)
        due = nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
        found["norm"] = max(found["norm"], float((norm / due - 1).abs()))
        found["clipped"] = max(found["clipped"], difference(plain, pipeline))
        optimizer.step()
        due_optimizer.step()
    torch.manual_seed(7)
    batch = plain.batch(6)
    with torch.inference_mode():
        (result,) = pipeline.evaluate(module.training_step, batch)
        found["evaluation"] = float((loss_of(result) - loss_of(plain.training_step(batch))).abs())
    found |= shares(groups, kind, pipeline)
    handle.remove()
    pipeline.remove()
    pipeline.make_whole([optimizer])
    found["names"] = [name for name, _ in module.named_parameters()] == [name for name, _ in plain.named_parameters()]
    states = zip(plain.state_dict().values(), module.state_dict().values(), strict=True)
    found["whole"] = max(float((one - other).abs().max()) for one, other in states if one.is_floating_point())
    found["momenta"] = momenta(groups, plain, module, due_optimizer, optimizer)
    found["clean"] = state_of(module)[1] == state_of(made(case.model))[1]
    return found


def shares(groups: ParallelGroups, kind: str, pipeline: SpreadPipeline) -> dict[str, Any]:
    """Between steps: elements of this rank's parameters, and of all that its place in the pipeline owns."""
    parameters = pipeline.ownership.parameters.values()
    mine = sum(local_part(parameter.detach()).numel() for parameter in parameters)
    storages = {(part := local_part(p.detach())).untyped_storage().data_ptr(): part for p in parameters}
    return {
        "share": mine / sum(parameter.numel() for parameter in parameters),
        "bytes": sum(part.untyped_storage().nbytes() for part in storages.values()) - 8 * mine,
        "units": units_of(pipeline, trained=True) if kind == "shard" else 0,
        "gathered": units_of(pipeline, trained=False) if kind == "shard" else 0,
    }


def momenta(groups: ParallelGroups, plain: nn.Module, module: nn.Module, due: Any, found: Any) -> float:
    """The largest difference of a momentum of this rank's parameters."""
    worst = 0.0
    for (name, one), (other_name, other) in zip(plain.named_parameters(), module.named_parameters(), strict=True):
        assert name == other_name
        if other in found.state and "momentum_buffer" in due.state[one]:
            worst = max(worst, float((due.state[one]["momentum_buffer"] - found.state[other]["momentum_buffer"]).max()))
    return worst


def memory(groups: ParallelGroups, kind: str, schedule: str) -> dict[str, Any]:
    """Bytes at the peak of a step and what is left of it, beside gradients; and what parameters take."""
    settle_collectives()
    module, pipeline, handle = spread(groups, kind, "Counted", schedule, "uniform-1")
    batch = module.batch()
    meter = open_meter("cpu")
    found: dict[str, Any] = {"left": []}
    for _ in range(2):
        gc.collect()
        dist.barrier()
        before = meter.live_bytes
        meter.reset_peak()
        loss = pipeline.run(module.training_step, batch, drop_gradients=True)
        loss.backward()
        pipeline.reduce_gradients()
        del loss
        for parameter in pipeline.ownership.parameters.values():
            parameter.grad = None
        gc.collect()
        dist.barrier()
        found["left"].append(meter.live_bytes - before)
        found["peak"] = meter.peak_bytes - before
    meter.close()
    found["owned"] = 8 * sum(parameter.numel() for parameter in pipeline.ownership.parameters.values())
    handle.remove()
    pipeline.remove()
    return found


def replays(groups: ParallelGroups, schedule: str) -> list[int]:
    """How often each block's forward runs under full recompute, sharded."""
    module, pipeline, handle = spread(groups, "shard", "Counted", schedule, "uniform-1")
    Counting.calls.clear()
    pipeline.run(module.training_step, module.batch()).backward()
    pipeline.reduce_gradients()
    found = sorted({Counting.calls[block.number] for block in pipeline.block_list.blocks} - {0})
    handle.remove()
    pipeline.remove()
    return found


class Sometimes(Toy):
    """A layer behind the blocks that not every batch asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(WIDTH, VOCABULARY).double()

    def batch(self, rows: int = 8, asked: bool = False) -> dict[str, torch.Tensor]:
        return super().batch(rows) | {"asked": torch.full((rows,), asked)}

    def training_step(self, batch: dict[str, torch.Tensor]) -> Any:
        hidden = self.embedding(batch["input_ids"])
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(hidden)
        if batch["asked"].any():
            logits = logits + self.extra(hidden)
        return cross_entropy(logits, batch["labels"])


def sometimes(groups: ParallelGroups, kind: Any) -> float:
    """Gradients where only the first data rank uses a layer."""
    torch.manual_seed(0)
    plain = Sometimes()
    torch.manual_seed(0)
    module = Sometimes()
    pipeline = SpreadPipeline(module, groups, SCHEDULES["1f1b"])
    pipeline.divide(None, module.batch(asked=True), module.training_step)
    pipeline.spread([[block] for block in module.blocks], kind, find_unused_parameters=True)
    torch.manual_seed(2)
    batches = [plain.batch(asked=rank == 0) for rank in range(groups.size("data"))]
    for batch in batches:
        plain_step(plain, batch, M)
    for parameter in plain.parameters():
        parameter.grad /= groups.size("data")  # type: ignore[operator]
    pipeline.run(module.training_step, batches[groups.rank("data")]).backward()
    pipeline.reduce_gradients()
    found = difference(plain, pipeline)
    pipeline.remove()
    return found


def check_data(folder: Path) -> dict[str, Any]:
    groups = join(2)
    found: dict[str, Any] = {
        f"{kind} {case.schedule} {case.model}": parity(groups, kind, case) for kind in KINDS for case in CASES[kind]
    }
    found["sometimes"] = {kind: sometimes(groups, kind) for kind in KINDS}
    found["memory"] = {kind: memory(groups, kind, "1f1b") for kind in KINDS}
    found["replays"] = {schedule: replays(groups, schedule) for schedule in ("interleaved", "zbv")}
    dist.barrier()
    dist.destroy_process_group()
    return found
