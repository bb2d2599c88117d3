"""Run by two or four processes: pipelines of Hugging Face models against one process with the same microbatches."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers as hf
from pipeline_checks import SCHEDULES, M, difference, join, norm_difference, plain_step, state_of
from pipeline_hugging_face_models import CASES
from pipeline_users import User, made
from plans import PLANS
from selective_plans import SELECTIVE_PLANS

from lightning_recompute.groups import ParallelGroups
from lightning_recompute.pipeline import PipelineModule
from lightning_recompute.plan import RecomputePlan
from lightning_recompute.probe import loss_of
from lightning_recompute.recompute import RecomputeHandle, apply_recompute

# every kind of plan under two schedules, each with another architecture
PLANNED: dict[str, tuple[tuple[str, str], tuple[str, str]]] = {
    "uniform-1": (("1f1b", "bloom"), ("zbv", "bert")),
    "uniform-2": (("interleaved-zb", "qwen3"), ("gpipe", "opt")),
    "block-1": (("interleaved", "gpt2"), ("zbv", "vit")),
    "core_attn": (("interleaved-zb", "llama"), ("1f1b", "gpt2")),
    "norm+act": (("zbv", "llama"), ("interleaved", "gpt_neox")),
    "mlp": (("1f1b", "mistral"), ("zbv", "qwen2")),
    "attn": (("gpipe", "olmo2"), ("interleaved-zb", "vit")),
    "save-matmul": (("interleaved", "bert"), ("zbv", "llama")),
    # other things on each stage
    "every-other": (("1f1b", "falcon"), ("interleaved-zb", "swin")),
    "full-norm-keep": (("interleaved", "llama"), ("1f1b", "bert")),
    "save-full-core": (("zbv", "gpt2"), ("1f1b", "llama")),
}
# every other architecture under one schedule
ARCHITECTURES = {
    name: tuple(SCHEDULES)[index % len(SCHEDULES)]
    for index, name in enumerate(sorted(set(CASES) - {name for pairs in PLANNED.values() for _, name in pairs}))
}
USERS = {
    "llama Adapted": "zbv",
    "mistral Adapted": "1f1b",
    "llama AdaptedBehind": "interleaved-zb",
    "llama FrozenFront": "1f1b",
    "qwen2 FrozenFront": "interleaved-zb",
    "llama FrozenBehind": "zbv",
    "llama OnlyHead": "interleaved",
    "bert Dictionary": "1f1b",
    "llama Encoded": "interleaved",
    "qwen3 Tupled": "zbv",
    "olmo2 Structured": "gpipe",
    "gpt2 Penalty": "1f1b",
    "llama Penalty": "interleaved-zb",
    "bert Penalty": "zbv",
    "gpt2 Teacher": "1f1b",
    "qwen3 GatheringLate": "1f1b",
    "bert GatheringLate": "gpipe",
}
FOUR = {
    "gpt2": ("1f1b", None),
    "swin": ("1f1b", None),
    "bloom": ("gpipe", "uniform-1"),
    "llama-8": ("interleaved", "core_attn"),
    "bert-8": ("interleaved-zb", "uniform-2"),
    "qwen3-8": ("zbv", "every-other"),
}
RAGGED = ("1f1b", "interleaved", "zbv")
REFUSALS = (
    *("t5", "bart", "whisper", "t5-encoder", "albert", "albert-layers", "deberta", "mpnet", "mixtral-routers"),
    *("llama Skipping", "qwen3 Gathering", "vit Gathering", "llama Smooth", "gpt2 TeacherFirst"),
)


def divided(groups: ParallelGroups, module: User, schedule: str) -> PipelineModule:
    pipeline = PipelineModule(module, groups, SCHEDULES[schedule])
    torch.manual_seed(1)
    pipeline.divide(module.blocks, module.batch(), module.training_step)
    return pipeline


def recompute(groups: ParallelGroups, pipeline: PipelineModule, plan: RecomputePlan) -> RecomputeHandle:
    own = pipeline.division.part_of(plan, groups.rank("pipeline"))
    return apply_recompute(pipeline.module, own, blocks=pipeline.block_list.name)


def compare(groups: ParallelGroups, name: str, schedule: str, plan: str | None = None) -> dict[str, Any]:
    """Without a plan two steps and an evaluation, with one a step; and what is left."""
    plain, module = made(name), made(name)
    names = state_of(module)[0]
    User.seen.clear()
    pipeline = divided(groups, module, schedule)
    handle = None
    if plan is not None:
        handle = recompute(groups, pipeline, (PLANS | SELECTIVE_PLANS)[plan](pipeline.division.lengths))
    found: dict[str, Any] = {"gradients": 0.0, "loss": 0.0}
    for step in range(1 if plan else 2):
        torch.manual_seed(step)
        batch = plain.batch()
        due = plain_step(plain, batch, M)
        loss = pipeline.run(module.training_step, batch)
        loss.backward()
        found["gradients"] = max(found["gradients"], difference(plain, pipeline))
        found["loss"] = max(found["loss"], float((loss.detach() - due).abs()))
    found["evaluation"] = 0.0
    if plan is None:
        with torch.no_grad():
            (result,) = pipeline.evaluate(module.training_step, batch)
            found["evaluation"] = float((loss_of(result) - loss_of(plain.training_step(batch))).abs())
    found["norm"] = norm_difference(groups, plain, pipeline)
    found["numel"] = sum(parameter.numel() for parameter in pipeline.ownership.parameters.values())
    found["total"] = sum(parameter.numel() for parameter in plain.parameters())
    found["classes"] = len(User.seen)
    if handle is not None:
        handle.remove()
    pipeline.remove()
    # of the model's own, transformers registers hooks in a first forward
    found["clean"] = state_of(module) == [names, state_of(plain)[1]]
    pipeline.make_whole()
    states = zip(plain.state_dict().items(), module.state_dict().items(), strict=True)
    found["whole"] = all(key == other and torch.equal(one, two) for (key, one), (other, two) in states)
    return found


def forwards(groups: ParallelGroups, schedule: str, plan: str) -> dict[str, Any]:
    """How often each block of a model runs in a step."""
    calls: Counter[int] = Counter()
    block_type: Any = hf.models.llama.modeling_llama.LlamaDecoderLayer
    original = block_type.forward

    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls[self.self_attn.layer_idx] += 1
        return original(self, *args, **kwargs)

    block_type.forward = counting
    try:
        plain, module = made("llama-8"), made("llama-8")
        pipeline = divided(groups, module, schedule)
        handle = recompute(groups, pipeline, PLANS[plan](pipeline.division.lengths))
        batch = plain.batch()
        plain_step(plain, batch, M)
        calls.clear()
        pipeline.run(module.training_step, batch).backward()
        handle.remove()
        pipeline.remove()
    finally:
        block_type.forward = original
    mine = [
        i for c in pipeline.division.chunks_of(groups.rank("pipeline")) for i in range(*pipeline.division.bounds[c])
    ]
    return {
        "gradients": difference(plain, pipeline),
        "calls": dict(calls),
        "due": dict.fromkeys(mine, 2 * M),
    }


def ragged(groups: ParallelGroups, schedule: str) -> dict[str, float]:
    """7 rows of other lengths in 4 microbatches: by target tokens as the whole batch, by rows as their mean."""
    found = {}
    for kind in ("Tokens", "User"):
        plain, module = made(f"llama {kind}"), made(f"llama {kind}")
        pipeline = divided(groups, module, schedule)
        torch.manual_seed(5)
        batch = plain.batch(7)
        weight = getattr(plain, "microbatch_weight", None)
        due = plain_step(plain, batch, M, weight)
        loss = pipeline.run(module.training_step, batch)
        loss.backward()
        found[kind] = max(difference(plain, pipeline), abs(float(loss) - float(due)))
        plain.zero_grad()
        whole = loss_of(plain.training_step(batch))
        whole.backward()
        found[f"{kind}, whole"] = max(difference(plain, pipeline), abs(float(loss) - float(whole)))
        pipeline.remove()
    return found


def refused(groups: ParallelGroups, name: str) -> dict[str, Any]:
    module = made(name)
    clean = state_of(module)
    pipeline = PipelineModule(module, groups, SCHEDULES["1f1b"])
    message = ""
    try:
        pipeline.divide(module.blocks, module.batch(), module.training_step)
        pipeline.run(module.training_step, module.batch())
    except ValueError as error:
        message = str(error)
    pipeline.remove()
    return {"message": message, "clean": state_of(module) == clean}


def finished(found: dict[str, Any]) -> dict[str, Any]:
    dist.barrier()
    dist.destroy_process_group()
    return found


def check_two(folder: Path) -> dict[str, Any]:
    groups = join()
    hf.logging.set_verbosity_error()
    return finished(
        {
            "parity": {
                **{
                    f"{name} {schedule}": compare(groups, name, schedule)
                    for name, schedule in (ARCHITECTURES | USERS).items()
                },
                **{
                    f"{name} {schedule} {plan}": compare(groups, name, schedule, plan)
                    for plan, pairs in PLANNED.items()
                    for schedule, name in pairs
                },
            },
            "forwards": {schedule: forwards(groups, schedule, "uniform-1") for schedule in SCHEDULES},
            "ragged": {schedule: ragged(groups, schedule) for schedule in RAGGED},
            "refused": {name: refused(groups, name) for name in REFUSALS},
        }
    )


def check_four(folder: Path) -> dict[str, Any]:
    groups = join()
    hf.logging.set_verbosity_error()
    return finished({name: compare(groups, name, schedule, plan) for name, (schedule, plan) in FOUR.items()})


def check_product(folder: Path) -> dict[str, Any]:
    """Everything with everything."""
    groups = join()
    hf.logging.set_verbosity_error()
    found = {}
    for schedule in SCHEDULES:
        for name in CASES:
            found[f"{name} {schedule}"] = compare(groups, name, schedule)
        for plan, pairs in PLANNED.items():
            for name in {name for _, name in pairs} | {"llama"}:
                found[f"{name} {schedule} {plan}"] = compare(groups, name, schedule, plan)
    return finished(found)
