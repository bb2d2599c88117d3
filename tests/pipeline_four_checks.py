"""Run by four processes: longer pipelines, few microbatches, how much is alive; two pipelines side by side."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from pipeline_checks import SCHEDULES, difference, divided, join, parity, plain_step
from pipeline_models import Counting, made

from lightning_recompute.groups import ParallelGroups
from lightning_recompute.pipeline_settings import PipelineSettings

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
    dist.barrier()
    dist.destroy_process_group()
    return found
