"""A pipeline of two processes against the ideal: how much of M / (M + P - 1) is left, on the clock and in simulation.

The reference model (8 blocks, h 512), on sequences of 128, runs in M = 8 microbatches of one row, forward and
backward, on P = 2 processes with one thread each. In each round, one after the other, the same two processes

    lone          each run the whole batch by themselves, all 8 microbatches, at the same time (so that they share the
                  machine as a pipeline's ranks do)
    <schedule>    run it together as stages

and the longer of the two counts. With L the median of `lone`, an ideal pipeline without transfers, of stages that are
alike, takes L / P * (M + P - 1) / M under 1F1B; with v stages on each rank L / P * (M v + P - 1) / (M v). The fraction
of the ideal is that over the median of the schedule. `simulated` puts the schedule on the clock (`step_time`) with the
seconds of each stage's parts as measured on one process, against the same ideal.

Two processes on few cores are noisy: medians of alternating rounds, on a machine that does nothing else.

Run: .venv/bin/python bench/pipeline.py [--rounds 5]
"""

from __future__ import annotations

import argparse
import itertools
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import VOCABULARY, reference_gpt, report
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_recompute.groups import ParallelGroups
from lightning_recompute.pipeline import PipelineModule
from lightning_recompute.pipeline_settings import PipelineSettings
from lightning_recompute.plan import RecomputePlan
from lightning_recompute.policy import RecomputePolicy
from lightning_recompute.recompute import apply_recompute
from lightning_recompute.step_time import ChunkSeconds, simulate

NUM_RANKS = 2
NUM_MICROBATCHES = 8
SEQUENCE = 128
SCHEDULES = {"1f1b": 1, "interleaved-1f1b": 2, "zbv-zero-bubble": 2}
"""Schedules, and the stages on each rank."""
FULL = "1f1b, full recompute"


def batch(length: int = SEQUENCE) -> tuple[Tensor, Tensor]:
    """Token ids (8, length) and the ones that follow."""
    shape = (NUM_MICROBATCHES, length + 1)
    ids = torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(1))
    return ids[:, :-1], ids[:, 1:]


def step_of(model: nn.Module) -> Callable[[Any], Tensor]:
    """The loss of a microbatch."""

    def step(microbatch: tuple[Tensor, Tensor]) -> Tensor:
        ids, targets = microbatch
        return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())

    return step


def lone_step(model: nn.Module) -> None:
    """The whole batch in one process, a microbatch at a time."""
    step = step_of(model)
    for ids, targets in zip(*batch(), strict=True):
        (step((ids[None], targets[None])) / NUM_MICROBATCHES).backward()


def piped_steps(groups: ParallelGroups) -> dict[str, Callable[[], None]]:
    """A step of each schedule, on this rank."""
    steps: dict[str, Callable[[], None]] = {}

    def add(name: str, schedule: str, policy: RecomputePolicy | None = None) -> None:
        model = reference_gpt("sdpa")
        settings = PipelineSettings(
            schedule=schedule,
            virtual=SCHEDULES[schedule],
            num_microbatches=NUM_MICROBATCHES,
        )
        pipeline = PipelineModule(model, groups, settings)
        pipeline.divide(None, batch(), step_of(model))
        if policy is not None:
            plan: RecomputePlan = policy.plan(pipeline.division.lengths)
            own = pipeline.division.part_of(plan, groups.rank("pipeline"))
            apply_recompute(model, own, blocks=pipeline.block_list.name)
        steps[name] = lambda: pipeline.run(step_of(model), batch(), drop_gradients=True).backward()

    for schedule in SCHEDULES:
        add(schedule, schedule)
    add(FULL, "1f1b", RecomputePolicy())
    return steps


def all_steps(groups: ParallelGroups) -> dict[str, Callable[[], None]]:
    """What this bench compares."""
    model, recomputed = reference_gpt("sdpa"), reference_gpt("sdpa")
    apply_recompute(recomputed, RecomputePolicy())
    steps = {"lone": lambda: lone_step(model), "lone, full recompute": lambda: lone_step(recomputed)}
    return steps | piped_steps(groups)


def rank_seconds(steps: Mapping[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Wall seconds of this rank, for each step in each round after one to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name in list(steps) if number % 2 == 0 else reversed(list(steps)):
            dist.barrier()
            start = time.perf_counter()
            steps[name]()
            taken = time.perf_counter() - start
            if number:
                seconds[name].append(taken)
    return seconds


def part_seconds(num_parts: int) -> list[ChunkSeconds]:
    """Forward and backward of a microbatch in each of as many parts of the model, medians in this process."""
    model = reference_gpt("sdpa")
    marks: list[float] = []
    cuts: list[tuple[Tensor, Tensor]] = []

    def cut(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        received = args[0].detach().requires_grad_()
        cuts.append((args[0], received))
        marks.append(time.perf_counter())
        return (received, *args[1:])

    blocks = list(model.blocks)
    for number in range(1, num_parts):
        blocks[number * len(blocks) // num_parts].register_forward_pre_hook(cut)
    rows = []
    for _ in range(9):
        cuts.clear()
        marks[:] = [time.perf_counter()]
        loss = step_of(model)(tuple(part[:1] for part in batch()))
        marks.append(time.perf_counter())
        loss.backward()
        marks.append(time.perf_counter())
        for output, received in reversed(cuts):
            output.backward(received.grad)
            marks.append(time.perf_counter())
        rows.append([stop - start for start, stop in itertools.pairwise(marks)])
    medians = [statistics.median(column) for column in zip(*rows, strict=True)]
    backward = medians[num_parts:][::-1]
    return [ChunkSeconds(forward, back) for forward, back in zip(medians[:num_parts], backward, strict=True)]


Make = Callable[[ParallelGroups], Mapping[str, Callable[[], None]]]


def _worker(rank: int, folder: str, port: int, make: Make, rounds: int) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", rank=rank, world_size=NUM_RANKS)
    groups = ParallelGroups.build("cpu", pipeline=NUM_RANKS)
    torch.save(rank_seconds(make(groups), rounds), f"{folder}/{rank}.pt")
    dist.barrier()
    os._exit(0)


def measure(make: Make, rounds: int) -> dict[str, float]:
    """The median of each step, in seconds; of the longer of the two ranks.

    Args:
        make: Makes the steps by name, on each rank.
        rounds: How many alternating rounds.
    """
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_worker, (folder, port, make, rounds), NUM_RANKS)
        ranks = [torch.load(Path(folder) / f"{rank}.pt") for rank in range(NUM_RANKS)]
    return {
        name: statistics.median(max(pair) for pair in zip(*(rank[name] for rank in ranks), strict=True))
        for name in ranks[0]
    }


def ideal_seconds(lone: float, virtual: int) -> float:
    """What an ideal pipeline would take.

    Args:
        lone: Seconds of the whole batch on one process.
        virtual: Stages on each rank.
    """
    passes = NUM_MICROBATCHES * virtual
    return lone / NUM_RANKS * (passes + NUM_RANKS - 1) / passes


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    seconds = measure(all_steps, rounds)
    table = Table("steps", "seconds", "ideal", "fraction of ideal", "simulated", title=f"{rounds} rounds")
    for name in ("lone", "lone, full recompute"):
        table.add_row(name, f"{seconds[name]:.3f}", "", "", "")
    figures: dict[str, float] = {}
    for name in (*SCHEDULES, FULL):
        schedule = "1f1b" if name == FULL else name
        virtual = SCHEDULES[schedule]
        ideal = ideal_seconds(seconds["lone, full recompute" if name == FULL else "lone"], virtual)
        fraction = ideal / seconds[name]
        simulated = ""
        if name != FULL:
            parts = part_seconds(NUM_RANKS * virtual)
            total = sum(part.total for part in parts) * NUM_MICROBATCHES
            step = simulate(
                schedule, parts, NUM_RANKS, NUM_MICROBATCHES, virtual if schedule.startswith("interleaved") else 1
            ).seconds
            figures[f"simulated {name}"] = round(ideal_seconds(total, virtual) / step, 3)
            simulated = f"{figures[f'simulated {name}']:.3f}"
        figures[name] = round(fraction, 3)
        table.add_row(name, f"{seconds[name]:.3f}", f"{ideal:.3f}", f"{fraction:.3f}", simulated)
    report("pipeline", [table], {"fraction_of_ideal": figures["1f1b"], **figures})


if __name__ == "__main__":
    main()
