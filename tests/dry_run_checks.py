"""Run by four processes: each rank's step on tensors without memory, and then for real beside its peers."""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from distributed import settle_collectives
from pipeline_checks import join
from torch import Tensor

from lightning_recompute.dry_run import DryRun, dry_run
from lightning_recompute.gpt import GPT
from lightning_recompute.groups import ParallelGroups
from lightning_recompute.memory import open_meter
from lightning_recompute.pipeline import PipelineModule
from lightning_recompute.pipeline_settings import PipelineSettings, settled_schedule
from lightning_recompute.policy import RecomputePolicy
from lightning_recompute.recompute import apply_recompute
from lightning_recompute.tensor_parallel import apply_tensor_parallel

WIDTH, LENGTH, ROWS = 128, 64, 2
HIDDEN_BYTES = 4 * ROWS * LENGTH * WIDTH
POLICIES = {
    "none": None,
    "full": RecomputePolicy(),
    "core_attn": RecomputePolicy(granularity="selective"),
    "distributed": RecomputePolicy(distribute_saved_activations=True),
}
SCHEDULES = {
    "1f1b": PipelineSettings(num_microbatches=5),
    "gpipe": PipelineSettings(schedule="gpipe", num_microbatches=4),
    "interleaved": PipelineSettings(virtual=2, num_microbatches=8),
    "interleaved-zb": PipelineSettings(schedule="interleaved-zero-bubble", virtual=2, num_microbatches=4),
    "zbv": PipelineSettings(schedule="zbv-zero-bubble", num_microbatches=5),
}


@dataclass(frozen=True)
class Case:
    """A step: its schedule and plan by name, and how ranks share layers."""

    schedule: str
    policy: str
    tensor: int = 1
    sequence_parallel: bool = False
    vocab_size: int = 256
    blocks_per_chunk: int = 1

    @property
    def pipeline(self) -> int:
        return 4 // self.tensor

    @property
    def num_layers(self) -> int:
        """As many for each chunk."""
        settings = SCHEDULES[self.schedule]
        return self.blocks_per_chunk * self.pipeline * settled_schedule(settings.schedule, settings.virtual)[1]

    @property
    def num_microbatches(self) -> int:
        number = SCHEDULES[self.schedule].num_microbatches
        assert number is not None
        return number

    @property
    def batch(self) -> Tensor:
        return torch.zeros(ROWS * self.num_microbatches, LENGTH + 1, dtype=torch.long)


CASES = (
    Case("1f1b", "none"),
    Case("1f1b", "full"),
    Case("gpipe", "core_attn"),
    Case("interleaved", "none"),
    Case("interleaved-zb", "full"),
    Case("zbv", "full"),
    Case("1f1b", "none", tensor=2),
    Case("1f1b", "distributed", tensor=2),
    Case("interleaved", "full", tensor=2, sequence_parallel=True),
)


def make(num_layers: int, vocab_size: int = 256) -> GPT:
    return GPT(
        vocab_size=vocab_size,
        num_layers=num_layers,
        num_heads=4,
        hidden_size=WIDTH,
        max_length=LENGTH,
        dropout=0.1,
        attention="eager",
    )


def dry(case: Case, rank: int) -> DryRun:
    return dry_run(
        lambda: make(case.num_layers, case.vocab_size),
        case.batch,
        pipeline=case.pipeline,
        rank=rank,
        settings=SCHEDULES[case.schedule],
        plan=POLICIES[case.policy],
        tensor=case.tensor,
        sequence_parallel=case.sequence_parallel,
    )


def real(case: Case) -> dict[str, int]:
    """The peak of a step above parameters and batch, by the allocator; and what is left of it."""
    groups = ParallelGroups.build("cpu", tensor=case.tensor, pipeline=case.pipeline)
    torch.manual_seed(0)
    module: Any = make(case.num_layers)
    tensor = None
    if case.tensor > 1:
        tensor = apply_tensor_parallel(module, groups.tensor_mesh, sequence_parallel=case.sequence_parallel)

    def step(microbatch: Any) -> Any:
        if tensor is None:
            return module.training_step(microbatch, 0)
        with tensor.step():
            return module.training_step(microbatch, 0)

    batch = case.batch
    pipeline = PipelineModule(module, groups, SCHEDULES[case.schedule])
    pipeline.divide(None, batch, step)
    handle = None
    policy = POLICIES[case.policy]
    if policy is not None:
        plan = pipeline.division.part_of(policy.plan(pipeline.division.lengths), groups.rank("pipeline"))
        handle = apply_recompute(module, plan, blocks=pipeline.block_list.name, tensor_group=groups.group("tensor"))
    meter = open_meter("cpu")
    found: dict[str, int] = {}
    for _ in range(2):  # what is looked at in a first step takes memory, too
        module.zero_grad()
        gc.collect()
        dist.barrier()
        before = meter.live_bytes
        meter.reset_peak()
        pipeline.run(step, batch).backward()
        if tensor is not None:
            tensor.sum_gradients()
        found = {"peak": meter.peak_bytes - before, "left": meter.live_bytes - before}
    meter.close()
    if handle is not None:
        handle.remove()
    if tensor is not None:
        tensor.remove()
    pipeline.remove()
    return found


def check(folder: Path) -> dict[str, Any]:
    settle_collectives()
    rank = int(os.environ["LOCAL_RANK"])
    runs = [dry(case, rank // case.tensor) for case in CASES]  # before there is a process group
    join()
    found = {str(case): {"dry": vars(run), "real": real(case)} for case, run in zip(CASES, runs, strict=True)}
    dist.barrier()
    dist.destroy_process_group()
    return found
