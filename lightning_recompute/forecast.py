"""A plan and the memory it will need, as values that print and save themselves."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lightning_recompute.plan import RecomputePlan
from lightning_recompute.profiling import Profile
from lightning_recompute.stage_options import Candidate
from lightning_recompute.timeline import Level, peak
from lightning_recompute.units import format_bytes, format_seconds


@dataclass(frozen=True)
class ParallelSizes:
    """Sizes of the parallel groups that a plan is for.

    Args:
        tensor: Ranks that share each layer.
        pipeline: Stages.
        data: Copies of the model, or shards of it.
        virtual: Chunks of blocks on each stage.

    Raises:
        ValueError: A size below 1, or chunks of one stage, which nothing takes turns with.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    virtual: int = 1

    def __post_init__(self) -> None:
        for name, size in vars(self).items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"ParallelSizes({name}={size!r}): an int of at least 1 is due")
        if self.virtual > 1 and self.pipeline == 1:
            raise ValueError(
                f"ParallelSizes(virtual={self.virtual}, pipeline=1): the chunks of a stage take turns with those of "
                "others, and there is one stage; give pipeline, or leave virtual out"
            )


@dataclass(frozen=True)
class StageForecast:
    """What one pipeline stage will need under a plan.

    Attributes:
        stage: Its number.
        blocks: Indices of its first block and of the one after its last.
        in_flight: Microbatches alive when a backward starts.
        peak_bytes: The peak of a step.
        moment: When that is, in words.
        breakdown: What it consists of: `parameters`, `optimizer`, `batch`, `other`, `gradients`, `blocks` (what blocks
            hold for backward), `running` (the block that runs), `outside` (embeddings, head and loss).
        extra_seconds: What the plan costs a microbatch more than keeping everything.
        more_blocks: The same as `blocks` of a rank's further chunks.
    """

    stage: int
    blocks: tuple[int, int]
    in_flight: int
    peak_bytes: int
    moment: str
    breakdown: dict[str, int]
    extra_seconds: float
    more_blocks: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class OfStages:
    """What every forecast of stages says, prints and saves.

    Attributes:
        plan: The plan.
        budget_bytes: The budget it was made for; None without one.
        stages: One for each pipeline stage.
    """

    plan: RecomputePlan
    budget_bytes: int | None
    stages: tuple[StageForecast, ...]

    @property
    def peak_bytes(self) -> int:
        """The largest peak of all stages."""
        return max(stage.peak_bytes for stage in self.stages)

    @property
    def extra_seconds(self) -> float:
        """What the plan costs a microbatch on its slowest stage."""
        return max(stage.extra_seconds for stage in self.stages)

    @property
    def fits(self) -> bool:
        """Whether every stage keeps the budget; True without one."""
        return self.budget_bytes is None or self.peak_bytes <= self.budget_bytes

    def save(self, path: str | os.PathLike[str], record: Mapping[str, Any] | None = None) -> Path:
        """Write the plan as yaml, with the forecast beside it.

        Args:
            path: The file.
            record: More facts to keep beside it.
        """
        facts = {"predicted_peak_bytes": self.peak_bytes, "memory_budget_bytes": self.budget_bytes, **(record or {})}
        return self.plan.save(path, facts)

    def to_table(self) -> Table:
        """The forecast as a rich table, a row a stage."""
        return stages_table(self.stages, self.budget_bytes)

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=160, color_system=None, force_jupyter=False)
        console.print(self.to_table())
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue().rstrip()


@dataclass(frozen=True)
class Forecast(OfStages):
    """A plan and what it will need.

    Attributes:
        profile: What was measured; makes forecasts of other plans.
        candidates: The actions that the plan was chosen from.
    """

    profile: Profile
    candidates: Sequence[Sequence[Candidate]]

    @property
    def own(self) -> StageForecast:
        """Of this process."""
        return self.stages[0]

    def phase_peaks(self) -> dict[str, int]:
        """The predicted peak of each phase of a step: `forward`, `backward`, `optimizer`."""
        self._check_one_stage("phase_peaks")
        peaks = {"forward": 0, "backward": 0, "optimizer": self.profile.optimizer_bytes}
        for level in self.profile.levels(self.plan):
            phase = "backward" if level.moment.in_backward else "forward"
            peaks[phase] = max(peaks[phase], level.num_bytes)
        return {phase: self.profile.statics.num_bytes + peak for phase, peak in peaks.items()}

    def under(self, plan: RecomputePlan, budget_bytes: int | None) -> Forecast:
        """The forecast of another plan, and against another budget."""
        self._check_one_stage("under")
        times = [{each.action: each.seconds for each in found} for found in self.candidates]
        actions = self.profile.actions(plan)
        seconds = sum(times[self.profile.capture.order[call]].get(action, 0.0) for call, action in enumerate(actions))
        return replace(
            self, plan=plan, budget_bytes=budget_bytes, stages=(stage_forecast(self.profile, plan, seconds),)
        )

    def _check_one_stage(self, what: str) -> None:
        if len(self.stages) > 1:
            raise ValueError(
                f"Forecast.{what}() of {len(self.stages)} stages: they run other parts of the model, with other "
                "microbatches in flight; ask plan_recompute for another budget, and read `stages`"
            )


def stages_table(stages: Sequence[StageForecast], budget_bytes: int | None) -> Table:
    """Forecasts of stages as a rich table, a row a stage.

    Args:
        stages: The forecasts.
        budget_bytes: The budget; None without one.
    """
    parts = list(stages[0].breakdown)
    budget = f", budget {format_bytes(budget_bytes)}" if budget_bytes is not None else ""
    table = Table("stage", "blocks", "in flight", "peak", "when", *parts, "extra time", title=f"Forecast{budget}")
    for stage in stages:
        table.add_row(
            str(stage.stage),
            ", ".join(f"{start}..{stop - 1}" for start, stop in (stage.blocks, *stage.more_blocks)),
            str(stage.in_flight),
            format_bytes(stage.peak_bytes),
            stage.moment,
            *(format_bytes(stage.breakdown[part]) for part in parts),
            format_seconds(stage.extra_seconds),
        )
    return table


def stage_forecast(profile: Profile, plan: RecomputePlan, extra_seconds: float = 0.0) -> StageForecast:
    """What a model on one stage will need under a plan.

    Args:
        profile: What was measured.
        plan: For all of its blocks.
        extra_seconds: What the plan costs a microbatch.
    """
    statics = profile.statics
    breakdown = {
        "parameters": statics.parameters_bytes,
        "optimizer": statics.optimizer_bytes,
        "batch": statics.batch_bytes,
        "other": statics.other_bytes,
    }
    level = peak(profile.levels(plan))
    if level.num_bytes >= profile.optimizer_bytes:
        parts = (level.gradient_bytes, level.held_bytes, level.transient_bytes, level.outside_bytes)
        moment = _in_words(level, profile)
    else:
        parts = (profile.skeleton.gradient_bytes, 0, profile.optimizer.transient_bytes, 0)
        moment = "optimizer step"
    breakdown |= dict(zip(("gradients", "blocks", "running", "outside"), parts, strict=True))
    return StageForecast(0, (0, profile.num_blocks), 1, sum(breakdown.values()), moment, breakdown, extra_seconds)


def _in_words(level: Level, profile: Profile) -> str:
    moment = level.moment
    if moment.call >= 0:
        return f"{moment.kind} of {profile.capture.names[moment.call]}"
    if level.held_bytes:
        return f"head and loss, {'backward' if moment.in_backward else 'forward'}"
    return "backward before the first block" if moment.in_backward else "forward before the first block"
