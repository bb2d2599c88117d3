"""Run by two processes: every case of data parallelism, each leaving what the tests look at."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from data_parallel_toys import (
    AsForward,
    ByForward,
    Collectives,
    Crossed,
    Differs,
    Dtypes,
    Fails,
    Frozen,
    Manual,
    Nested,
    Net,
    Norms,
    PerRank,
    Shared,
    Stop,
    Tied,
    batches,
    difference,
    gradients,
    join_world,
    looks,
    made,
    reference,
    step,
)
from distributed import settle_collectives
from plans import PLANS
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import lightning_recompute.sharding as sharding
from lightning_recompute.data_parallel import DataParallel, replicate
from lightning_recompute.groups import ParallelGroups
from lightning_recompute.memory import open_meter
from lightning_recompute.plan import Full, RecomputePlan
from lightning_recompute.policy import RecomputePolicy
from lightning_recompute.recompute import apply_recompute
from lightning_recompute.sharding import Sharded, shard
from lightning_recompute.whole import make_whole

MODELS: dict[str, Callable[[], Any]] = {
    cls.__name__: cls for cls in (Net, ByForward, Tied, Shared, Nested, Crossed, Frozen, Norms, Dtypes)
}


def blocks_of(module: Any) -> list[nn.Module]:
    return list(module.body.inner.layers if hasattr(module, "body") else module.blocks)


def sharded(module: Any, groups: ParallelGroups, unit: int = 1, **options: Any) -> Sharded:
    return shard(module, groups, [list(blocks) for blocks in _in_units(blocks_of(module), unit)], **options)


def _in_units(blocks: Sequence[nn.Module], size: int) -> list[Sequence[nn.Module]]:
    return [blocks[start : start + size] for start in range(0, len(blocks), size)]


def units_of(plan: RecomputePlan, blocks: Sequence[nn.Module]) -> list[Sequence[nn.Module]]:
    found: list[Sequence[nn.Module]] = []
    for segment in plan.segments:
        part = blocks[segment.start : segment.stop]
        found += [part] if isinstance(segment.action, Full) else [[block] for block in part]
    return found


def check_models(groups: ParallelGroups) -> dict[str, float]:
    """The largest difference to one process over two steps, by model and unit; and its replicated twin, seeds apart."""
    rank, size = groups.rank("data"), groups.size("data")
    steps, found = batches(2, size), {}
    for (name, build), unit in itertools.product(MODELS.items(), (1, 2)):
        due = reference(made(build), steps)
        module = made(build, seed=rank)
        handles: dict[str, DataParallel] = {"shard": sharded(module, groups, unit)}
        if unit == 1:
            handles["replicate"] = replicate(made(build, seed=rank), groups)
        for kind, parallel in handles.items():
            worst = 0.0
            for ranks, expected in zip(steps, due, strict=True):
                step(parallel, ranks[rank])
                worst = max(worst, difference(gradients(parallel.module), expected))
            found[f"{name} {kind} {unit}"] = worst
            parallel.remove()
    return found


def check_plans(groups: ParallelGroups) -> dict[str, float]:
    """Every plan, accumulated over two batches, clipped and stepped, against one process without recompute."""
    rank, size = groups.rank("data"), groups.size("data")
    (first, second), found = batches(2, size), {}
    plain = made(Net)
    (sum(plain.training_step(batch) for batch in (*first, *second)) / (2 * size)).backward()
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    torch.optim.SGD(plain.parameters(), 0.1).step()
    due = {name: parameter.detach() for name, parameter in plain.named_parameters()}
    for (name, build), order in zip(PLANS.items(), itertools.cycle(("before", "after")), strict=False):
        module = made(Net)
        plan = build([4])
        handle = apply_recompute(module, plan) if order == "before" else None
        parallel = shard(module, groups, units_of(plan, list(module.blocks)))
        handle = handle or apply_recompute(module, plan)
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        with parallel.no_sync():
            step(parallel, first[rank], 0.5)
        step(parallel, second[rank], 0.5)
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.01)
        optimizer.step()
        handle.remove()
        parallel.remove()
        make_whole(module, [optimizer])
        found[name] = difference({key: p.detach() for key, p in module.named_parameters()}, due)
    return found


def check_counts(groups: ParallelGroups) -> dict[tuple[Any, ...], dict[str, int]]:
    """Collectives of the second step, by `reshard_after_forward`, unit size and when recompute is applied."""
    rank, size = groups.rank("data"), groups.size("data")
    first, second = (ranks[rank] for ranks in batches(2, size))
    found = {}
    for reshard, unit, when in itertools.product((None, True, False), (1, 2), ("none", "before", "after")):
        module = made(Net)
        policy = RecomputePolicy(num_layers=unit)
        handle = apply_recompute(module, policy) if when == "before" else None
        parallel = sharded(module, groups, unit, reshard_after_forward=reshard)
        handle = apply_recompute(module, policy) if when == "after" else handle
        step(parallel, first)
        with Collectives() as counted:
            step(parallel, second)
        found[reshard, unit, when] = dict(counted.counts)
        parallel.remove()
    return found


def check_accumulation(groups: ParallelGroups) -> dict[str, Any]:
    rank, size = groups.rank("data"), groups.size("data")
    steps, found = batches(3, size), {}
    due = reference(made(Net), steps)[-1]
    for kind in ("shard", "replicate"):
        module = made(Net)
        parallel = sharded(module, groups) if kind == "shard" else replicate(module, groups)
        with Collectives() as alone, parallel.no_sync():
            step(parallel, steps[0][rank])
            step(parallel, steps[1][rank])
        with Collectives() as together:
            step(parallel, steps[2][rank])
        found[kind] = {
            "alone": dict(alone.counts),
            "together": dict(together.counts),
            "difference": difference(gradients(module), due),
        }
        parallel.remove()
    return found


def check_manual(groups: ParallelGroups) -> dict[str, float]:
    rank, size = groups.rank("data"), groups.size("data")
    (ranks,), found = batches(1, size), {}
    plain = made(Manual)
    plain.size = size
    for batch in ranks:
        plain.training_step(batch)
    for kind in ("shard", "replicate"):
        module = made(Manual)
        # not a part of the module
        vars(module)["parallel"] = sharded(module, groups) if kind == "shard" else replicate(module, groups)
        module.parallel.run(module.training_step, ranks[rank])
        found[kind] = difference(gradients(module), gradients(plain))
        module.parallel.remove()
    return found


def check_ranks_that_differ(groups: ParallelGroups) -> float:
    rank, size = groups.rank("data"), groups.size("data")
    (ranks,) = batches(1, size)
    plain, module = made(Differs), made(Differs)
    for index, batch in enumerate(ranks):
        plain.skips = index == 1
        (plain.training_step(batch) / size).backward()
    module.skips = rank == 1
    parallel = replicate(module, groups)
    step(parallel, ranks[rank])
    parallel.remove()
    return difference(gradients(module), gradients(plain))


def check_unused(groups: ParallelGroups) -> dict[str, float]:
    """Of sharded parameters: what one rank uses, and what none does, which has zeros for a gradient."""
    rank, size = groups.rank("data"), groups.size("data")
    (ranks,) = batches(1, size)
    plain, module = made(PerRank), made(PerRank)
    for index, batch in enumerate(ranks):
        plain.rank = index
        (plain.training_step(batch) / size).backward()
    module.rank = rank
    parallel = sharded(module, groups, find_unused_parameters=True)
    step(parallel, ranks[rank])
    found, due = gradients(module), gradients(plain)
    parallel.remove()
    never = [name for name, gradient in due.items() if gradient is None]
    zeros = [found.pop(name) for name in never]
    return {
        "difference": difference(found, {name: due[name] for name in found}),
        "num zeros": sum(gradient is not None and not gradient.any() for gradient in zeros),
    }


def check_refused(groups: ParallelGroups) -> tuple[str, bool]:
    """Torch refuses the second unit: nothing is left of the first."""
    module = made(Net)
    before = looks(module)
    try:
        shard(module, groups, [[module.blocks[0]], [module.blocks]])
    except ValueError as error:
        make_whole(module)
        return str(error), looks(module) == before
    return "", False


def check_evaluation_and_thawing(groups: ParallelGroups) -> dict[str, Any]:
    """Validation first, under inference_mode; then a step; then frozen blocks are trained as well."""
    rank, size = groups.rank("data"), groups.size("data")
    steps = batches(2, size)
    module = made(Tied)
    for block in module.blocks:
        block.requires_grad_(False)
    plain = copy.deepcopy(module)
    parallel = sharded(module, groups)
    with torch.inference_mode():
        loss = parallel.run(module.validation_step, steps[0][rank])
    with torch.no_grad():
        own_forward = module(steps[0][rank])
    shown = {type(parameter.data).__name__ for parameter in module.parameters()}
    found: dict[str, Any] = {
        "loss": abs(loss.item() - plain.validation_step(steps[0][rank]).item()),
        "own forward": torch.equal(own_forward, plain(steps[0][rank])),
        "shown": sorted(shown),
    }
    step(parallel, steps[0][rank])
    found["frozen"] = difference(gradients(module), reference(plain, steps[:1])[0])
    for thawed in (module, plain):
        thawed.requires_grad_(True)
        thawed.zero_grad()
    step(parallel, steps[1][rank])
    found["thawed"] = difference(gradients(module), reference(plain, steps[1:])[0])
    parallel.remove()
    return found


def check_removal(groups: ParallelGroups) -> dict[str, Any]:
    """Trained, failed or not, removed, whole again, copied, sharded again."""
    rank, size = groups.rank("data"), groups.size("data")
    steps, found = batches(2, size), {}
    for where in ("nowhere", "forward", "backward"):
        module = made(Tied)
        module.embed.weight.mark = "the user's"
        fired: list[str] = []
        handle = module.embed.weight.register_post_accumulate_grad_hook(lambda p, fired=fired: fired.append("hook"))
        before = looks(module)
        parallel = sharded(module, groups)
        optimizer = torch.optim.AdamW(module.parameters())
        step(parallel, steps[0][rank])
        optimizer.step()
        marked = getattr(module.embed.weight, "mark", None)
        block = module.blocks[2]
        own = block.forward
        if where != "nowhere":
            block.forward = lambda x, own=own, where=where: Fails.apply(own(x), where)
            try:
                step(parallel, steps[0][rank])
            except Stop:
                pass
            else:
                raise AssertionError("nothing was raised")
            del block.forward
        parallel.remove()
        parallel.remove()
        make_whole(module, [optimizer])
        found[f"same after {where}"] = looks(module) == before
        found[f"carried after {where}"] = (marked, bool(fired))
        handle.remove()
        optimizer.zero_grad()
        plain = copy.deepcopy(module)
        again = sharded(module, groups)
        step(again, steps[1][rank])
        found[f"again after {where}"] = difference(gradients(module), reference(plain, steps[1:])[0])
        again.remove()
    return found


def check_precisions(groups: ParallelGroups) -> dict[str, float]:
    """Differences to torch's DistributedDataParallel; and what casting all parameters would do under autocast."""
    (ranks,) = batches(1, groups.size("data"), torch.float32)
    found = {}
    dtypes = {"32-true": torch.float32, "bf16-mixed": torch.float32, "bf16-true": torch.bfloat16}
    for precision, dtype in dtypes.items():
        batch = ranks[groups.rank("data")].to(dtype)
        mixed = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed")
        theirs = AsForward(made(Tied, dtype))
        wrapped = nn.parallel.DistributedDataParallel(theirs)
        with mixed:
            loss = wrapped(batch)
        loss.backward()
        due = gradients(theirs.net)
        for cast in (False, True) if precision == "bf16-mixed" else (False,):
            module = made(Tied, dtype)
            policy = sharding.MixedPrecisionPolicy
            if cast:
                sharding.MixedPrecisionPolicy = lambda **_: MixedPrecisionPolicy(torch.bfloat16, torch.float32)
            parallel = sharded(module, groups)
            sharding.MixedPrecisionPolicy = policy
            with mixed:
                loss = parallel.run(module.training_step, batch)
            loss.backward()
            parallel.finish()
            found[f"{precision}{' cast' * cast}"] = difference(gradients(module), due)
            parallel.remove()
    return found


def check_memory(groups: ParallelGroups) -> dict[str, float]:
    """Bytes beyond the module's own parameters, as a part of them: held between steps, and at a step's peak."""
    (ranks,), found = batches(1, groups.size("data")), {}
    meter = open_meter("cpu")
    for kind in ("alone", "replicate"):
        module = made(lambda: Net(8, lambda: nn.Sequential(nn.Linear(8, 32768), nn.ReLU(), nn.Linear(32768, 8))))
        size = sum(p.numel() * p.element_size() for p in module.parameters())
        before = meter.live_bytes
        parallel: Any = replicate(module, groups) if kind == "replicate" else None
        for _ in range(2):
            module.zero_grad()
            held = meter.live_bytes - before
            meter.reset_peak()
            if parallel:
                step(parallel, ranks[groups.rank("data")])
            else:
                module.training_step(ranks[0]).backward()
        found[f"{kind} held"] = held / size
        found[f"{kind} peak"] = (meter.peak_bytes - before) / size
        if parallel:
            parallel.remove()
    meter.close()
    return found


def check_two(folder: Path) -> dict[str, Any]:
    settle_collectives()
    groups = join_world()
    return {
        "models": check_models(groups),
        "plans": check_plans(groups),
        "counts": check_counts(groups),
        "accumulation": check_accumulation(groups),
        "manual": check_manual(groups),
        "ranks that differ": check_ranks_that_differ(groups),
        "unused": check_unused(groups),
        "refused": check_refused(groups),
        "evaluation": check_evaluation_and_thawing(groups),
        "removal": check_removal(groups),
        "precisions": check_precisions(groups),
        "memory": check_memory(groups),
    }
