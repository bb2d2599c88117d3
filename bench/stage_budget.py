"""A plan for each stage against the best single setting, measured on two processes.

The reference model (8 blocks, h 512, s 512, eager attention) as two stages under 1F1B, 8 microbatches of one row. The
budget of each rank is what the first stage has all the time and 25 % of what else it needs where nothing is recomputed.
Settings are those of `usual_settings` and full block with every number of layers; of those that keep the budget on both
ranks, by the forecast, the three that the forecast has as fastest are run (or as many as there are), beside the plans
that `memory_budget` makes. `ratio` is the median step of the best of them over that of the plans, in alternating
rounds.

With two stages there is little to gain: the last holds one microbatch in place of two. `bench/stages.py` simulates 8
and 16.

Run: .venv/bin/python bench/stage_budget.py [--rounds 5]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from common import LENGTH, reference_gpt, report
from pipeline import NUM_MICROBATCHES, batch, measure, step_of
from rich.table import Table

from lightning_recompute.groups import ParallelGroups
from lightning_recompute.pipeline import PipelineModule
from lightning_recompute.pipeline_settings import PipelineSettings
from lightning_recompute.plan import RecomputePlan
from lightning_recompute.recompute import apply_recompute
from lightning_recompute.settings import settings, usual_settings
from lightning_recompute.stage_budget import StageBudget

SHARE = 0.25
PLANNED = "planned for each stage"
NUM_OPPONENTS = 3


def piped(groups: ParallelGroups, plan: RecomputePlan | None = None) -> PipelineModule:
    """The model as two stages, with a plan applied."""
    model = reference_gpt("eager")
    pipeline = PipelineModule(model, groups, PipelineSettings(num_microbatches=NUM_MICROBATCHES))
    pipeline.divide(None, batch(LENGTH), step_of(model))
    if plan is not None:
        own = pipeline.division.part_of(plan, groups.rank("pipeline"))
        apply_recompute(model, own, blocks=pipeline.block_list.name)
    return pipeline


def plans(groups: ParallelGroups) -> dict[str, RecomputePlan]:
    """The planned one, and the fastest single settings that fit; the same on both ranks."""
    pipeline = piped(groups)
    budget = StageBudget(pipeline, step_of(pipeline.module), batch(LENGTH))
    lengths = pipeline.division.lengths
    blocks = [f"full block {number}" for number in range(1, max(lengths) + 1)]
    named = settings(dict.fromkeys([*usual_settings(sum(lengths)), *blocks]))
    fits = {}
    kept = budget.forecast(named["none"].plan(lengths)).stages[0]
    statics = sum(kept.breakdown[part] for part in ("parameters", "optimizer", "batch", "other", "gradients"))
    limit = statics + int(SHARE * (kept.peak_bytes - statics))
    for name, policy in named.items():
        try:
            forecast = budget.forecast(policy.plan(lengths), limit)
        except ValueError:  # the model does not admit it
            continue
        if forecast.fits:
            fits[name] = forecast
    best = sorted(fits, key=lambda name: fits[name].extra_seconds)[:NUM_OPPONENTS]
    return {PLANNED: budget.plan(limit).plan} | {name: fits[name].plan for name in best}


def steps_of(groups: ParallelGroups) -> dict[str, Callable[[], None]]:
    """A step under each plan."""
    steps: dict[str, Callable[[], None]] = {}

    def add(name: str, plan: RecomputePlan) -> None:
        pipeline = piped(groups, plan)
        step = step_of(pipeline.module)
        steps[name] = lambda: pipeline.run(step, batch(LENGTH), drop_gradients=True).backward()

    for name, plan in plans(groups).items():
        add(name, plan)
    return steps


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    seconds = measure(steps_of, rounds)
    planned = seconds.pop(PLANNED)
    best = min(seconds, key=seconds.__getitem__)
    table = Table("plan", "seconds", "of the planned", title=f"25 % budget, {rounds} rounds")
    table.add_row(PLANNED, f"{planned:.3f}", "1.000")
    for name, taken in seconds.items():
        table.add_row(name, f"{taken:.3f}", f"{taken / planned:.3f}")
    report("stage_budget", [table], {"ratio": round(seconds[best] / planned, 3), "best": best})


if __name__ == "__main__":
    main()
