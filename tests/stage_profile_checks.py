"""Run by two or four processes: the predicted peak of each rank of a pipeline against its allocator, and budgets."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from distributed import agreed, error_of, settle_collectives
from pipeline_checks import join, state_of
from torch import Tensor
from torch.optim import AdamW

from lightning_recompute import profiling, stage_options
from lightning_recompute.balanced_split import balanced_settings
from lightning_recompute.gpt import GPT
from lightning_recompute.groups import ParallelGroups
from lightning_recompute.memory import open_meter
from lightning_recompute.pipeline import PipelineModule
from lightning_recompute.pipeline_settings import PipelineSettings
from lightning_recompute.plan import Action, RecomputePlan
from lightning_recompute.policy import RecomputePolicy
from lightning_recompute.recompute import apply_recompute
from lightning_recompute.stage_budget import StageBudget
from lightning_recompute.stage_memory import Window
from lightning_recompute.stage_search import StageSearch

VOCABULARY, WIDTH, LENGTH, NUM_HEADS = 256, 64, 64, 4
TOLERANCE = 0.01
VIRTUAL = {"interleaved-1f1b": 2, "interleaved-zero-bubble": 2}
KEEP, FULL = RecomputePolicy(granularity=None), RecomputePolicy()
POLICIES = {
    "keep": KEEP,
    "full": FULL,
    "block": RecomputePolicy(method="block", num_layers=1),
    "selective": RecomputePolicy(granularity="selective"),
    "units": RecomputePolicy(num_layers=2),
}


def model(num_layers: int, **changes: Any) -> GPT:
    """Our GPT, with dropout."""
    torch.manual_seed(0)
    words: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "num_layers": num_layers,
        "num_heads": NUM_HEADS,
        "hidden_size": WIDTH,
        "max_length": LENGTH,
        "dropout": 0.1,
        "attention": "eager",
    }
    return GPT(**words | changes)


class Piped:
    """A divided model with an optimizer, and what its ranks know of their memory."""

    def __init__(
        self,
        groups: ParallelGroups,
        schedule: str,
        num_layers: int,
        num_microbatches: int,
        *,
        rows: int | None = None,
        accumulate: int = 1,
        keeps_gradients: bool = False,
        module: Any = None,
    ) -> None:
        self.module = module or model(num_layers)
        self.num_layers = num_layers
        self.rank = groups.rank("pipeline")
        self.accumulate = accumulate
        self.keeps_gradients = keeps_gradients
        draw = torch.Generator().manual_seed(1)
        self.batch = torch.randint(VOCABULARY, (rows or 2 * num_microbatches, LENGTH + 1), generator=draw)
        settings = PipelineSettings(
            schedule=schedule, virtual=VIRTUAL.get(schedule, 1), num_microbatches=num_microbatches
        )
        self.pipeline = PipelineModule(self.module, groups, settings)
        self.pipeline.divide(None, self.batch, self.step)
        self.optimizer = AdamW(self.pipeline.ownership.parameters.values(), lr=1e-4)
        self.budget = StageBudget(
            self.pipeline,
            self.step,
            self.batch,
            optimizers=[self.optimizer],
            window=Window(accumulating=accumulate > 1, keeps_former=keeps_gradients),
        )

    def step(self, batch: Any) -> Any:
        return self.module.training_step(batch, 0)

    def plan(self, name: str) -> RecomputePlan:
        return POLICIES[name].plan(self.pipeline.division.lengths)

    def window(self) -> None:
        """The batches up to an optimizer step, and the step."""
        for number in range(self.accumulate):
            is_first = number == 0 and not self.keeps_gradients
            loss = self.pipeline.run(self.step, self.batch, drop_gradients=is_first, in_place=number > 0)
            if self.keeps_gradients:  # as Lightning does, after the step
                self.optimizer.zero_grad()
            loss.backward()
        del loss
        self.optimizer.step()

    def measured(self, plan: RecomputePlan) -> int:
        """The peak of the second step under a plan, with what is there before."""
        own = self.pipeline.division.part_of(plan, self.rank)
        with apply_recompute(self.module, own, blocks=self.pipeline.block_list.name):
            self.window()
            if not self.keeps_gradients:
                self.optimizer.zero_grad()
            gc.collect()
            dist.barrier()
            meter = open_meter("cpu")
            before = meter.live_bytes - sum(p.grad.nbytes for p in self.module.parameters() if p.grad is not None)
            self.window()
            peak = meter.peak_bytes - before
            meter.close()
        self.optimizer.zero_grad()
        state = [value for one in self.optimizer.state.values() for value in one.values()]
        there = [*self.module.parameters(), *self.module.buffers(), *state, self.batch]
        return peak + sum({t.data_ptr(): t.untyped_storage().nbytes() for t in there}.values())

    def error(self, plan: RecomputePlan, predicted: int) -> float:
        """How far a prediction is off, the worst of all ranks."""
        measured = self.measured(plan)
        return agreed(abs(predicted - measured) / measured)

    def errors(self, *names: str) -> dict[str, Any]:
        """Of the predictions of some plans."""
        plans = {name: self.plan(name) for name in names}
        forecasts = {name: self.budget.forecast(plan) for name, plan in plans.items()}
        self.budget.release()
        found: dict[str, Any] = {name: self.error(plan, forecasts[name].own.peak_bytes) for name, plan in plans.items()}
        self.pipeline.remove()
        return found


def some_seconds(call: Any, actions: list[Action], num_runs: int = 0) -> list[float]:
    """In place of measured times: each action a little longer than the one before."""
    return [1 + 0.1 * index for index in range(len(actions))]


def planned(groups: ParallelGroups, schedule: str, num_layers: int = 8) -> dict[str, Any]:
    """A budget between everything and nothing, one that has room, and one that cannot be kept."""
    piped = Piped(groups, schedule, num_layers, 4)
    before = state_of(piped.module), [parameter.grad for parameter in piped.module.parameters()]
    budget = piped.budget
    kept, full = (budget.forecast(policy.plan([num_layers])) for policy in (KEEP, FULL))
    found: dict[str, Any] = {"is kept": budget.plan(kept.peak_bytes).plan == KEEP.plan(piped.pipeline.division.lengths)}
    most, least = kept.own.peak_bytes, full.own.peak_bytes
    within = (largest(most) + largest(least)) // 2
    forecast = budget.plan(within)
    again = budget.forecast(forecast.plan, within)
    found |= {
        "keeps": forecast.fits and again.stages == forecast.stages,
        "seconds": [forecast.own.extra_seconds, full.own.extra_seconds],
        "tighter": budget.plan(most, below=forecast.plan).own.peak_bytes < forecast.own.peak_bytes,
        "refusal": error_of(lambda: budget.plan(least // 4)),
        "refusal on one": error_of(lambda: budget.plan(most if piped.rank == 0 else least // 4)),
        "table": str(forecast),
        "plan": str(forecast.plan),
        "clean": before == (state_of(piped.module), [parameter.grad for parameter in piped.module.parameters()]),
    }
    budget.release()
    found["error"] = piped.error(forecast.plan, forecast.own.peak_bytes)
    found["phases"] = max(forecast.phase_peaks().values()) == forecast.own.peak_bytes
    piped.pipeline.remove()
    return found


def frozen() -> GPT:
    """The first stage has nothing to train."""
    module = model(4)
    module.requires_grad_(False)
    for part in (module.blocks[2:], *(child for name, child in module.named_children() if "head" in name)):
        part.requires_grad_(True)
    return module


def against_all(groups: ParallelGroups) -> list[tuple[float, float]]:
    """For some budgets the time of the plan that was chosen for this rank, and of the best of all plans."""
    piped = Piped(groups, "1f1b", 4, 4)
    search = StageSearch(piped.budget.profile)
    (part,) = search.parts()
    plans = {search.plan_of([choices]) for choices in all_choices(part.stage.options)}
    peaks = sorted({search.exact(plan) for plan in plans})
    found = []
    for budget in peaks[:: max(len(peaks) // 6, 1)]:
        best = min(search.seconds(plan) for plan in plans if search.exact(plan) <= budget)
        fresh = StageSearch(piped.budget.profile)
        found.append((fresh.seconds(fresh.fastest(budget)), best))
    piped.budget.release()
    piped.pipeline.remove()
    return found


def all_choices(options: Any, start: int = 0) -> Any:
    if start == len(options):
        yield ()
        return
    for choice, option in enumerate(options[start]):
        for others in all_choices(options, start + option.num_units):
            yield (choice, *[None] * (option.num_units - 1), *others)


def largest(mine: int) -> int:
    """The largest of all ranks'."""
    found = torch.tensor(mine)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return int(found)


class Fails(GPT):
    """One rank cannot run its step."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if os.environ["LOCAL_RANK"] == "1" and self.fails:
            raise RuntimeError("only here")
        return super().training_step(batch, batch_idx)


def failing(groups: ParallelGroups) -> str:
    """What a rank says when another one cannot measure its step."""
    module = Fails(vocab_size=32, num_layers=2, num_heads=2, hidden_size=16, max_length=8)
    module.fails = False
    batch = torch.zeros(4, 9, dtype=torch.long)
    pipeline = PipelineModule(module, groups, PipelineSettings(num_microbatches=4))

    def step(part: Tensor) -> Any:
        return module.training_step(part, 0)

    pipeline.divide(None, batch, step)
    module.fails = True
    text = error_of(lambda: StageBudget(pipeline, step, batch))
    pipeline.remove()
    return text


def balanced(groups: ParallelGroups) -> dict[str, Any]:
    """Blocks of a model with a heavy head, divided by time, and by time within a budget; a step of the result."""
    module = model(6, vocab_size=32 * VOCABULARY)
    batch = torch.randint(VOCABULARY, (8, LENGTH + 1))
    before = state_of(module)

    def step(part: Tensor) -> Any:
        return module.training_step(part, 0)

    settings = PipelineSettings(num_microbatches=4, split="balanced")
    found = balanced_settings(module, step, batch, settings, groups)
    clean = before == state_of(module)
    listed = PipelineSettings(num_microbatches=4, split=[3, 3])
    result = {
        "split": list(found.split),
        "clean": clean,
        "listed": balanced_settings(module, step, batch, listed, groups) is listed,
        "refusal": error_of(
            lambda: balanced_settings(
                module, step, batch, settings, groups, optimizers=[AdamW(module.parameters())], budget_bytes=1000
            )
        ),
    }
    pipeline = PipelineModule(module, groups, found)
    pipeline.divide(None, batch, step)
    pipeline.run(step, batch).backward()
    pipeline.remove()
    return result


def quiet() -> None:
    settle_collectives()
    torch.set_num_threads(1)
    # of what may be tried a part, which takes less time
    profiling.measure_seconds = some_seconds  # type: ignore[assignment]
    stage_options.available_labels = lambda block: ["core_attn", "norm"]  # type: ignore[assignment]
    stage_options._OPERATORS = (("matmul",),)  # type: ignore[assignment]


def check_two(folder: Path) -> dict[str, Any]:
    """On two processes."""
    quiet()
    groups = join()
    found: dict[str, Any] = {
        "1f1b": Piped(groups, "1f1b", 4, 4).errors(*POLICIES),
        "gpipe": Piped(groups, "gpipe", 4, 4, accumulate=2).errors("keep", "units"),
        "interleaved-1f1b": Piped(groups, "interleaved-1f1b", 8, 4).errors("selective", "units"),
        "interleaved-zero-bubble": Piped(groups, "interleaved-zero-bubble", 8, 4).errors("units"),
        "zbv-zero-bubble": Piped(groups, "zbv-zero-bubble", 8, 4, accumulate=2).errors("selective", "units"),
        "uneven": Piped(groups, "1f1b", 5, 4, rows=9).errors("keep", "units"),
        "few": Piped(groups, "1f1b", 4, 1, rows=2).errors("full"),
        "kept gradients": Piped(groups, "1f1b", 4, 4, keeps_gradients=True).errors("full"),
        "frozen": Piped(groups, "1f1b", 4, 4, module=frozen()).errors("full"),
        "tied": Piped(groups, "1f1b", 4, 4, accumulate=2, module=model(4, tied_head=True)).errors("full"),
    }
    return {
        "errors": found,
        "planned": {name: planned(groups, name) for name in ("1f1b", "zbv-zero-bubble")},
        "failing": failing(groups),
        "against all": against_all(groups),
        "balanced": balanced(groups),
    }


def check_four(folder: Path) -> dict[str, Any]:
    """On four processes."""
    quiet()
    groups = join()
    schedules = ("1f1b", "gpipe", "interleaved-1f1b", "interleaved-zero-bubble", "zbv-zero-bubble")
    return {schedule: Piped(groups, schedule, 8, 8).errors("keep", "full") for schedule in schedules}
