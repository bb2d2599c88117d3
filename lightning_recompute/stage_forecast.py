"""A plan for the ranks of a pipeline and the memory that each will need, as values that print and save themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_recompute.division import Division
from lightning_recompute.forecast import OfStages, StageForecast
from lightning_recompute.plan import RecomputePlan
from lightning_recompute.stage_memory import KIND_WORDS, StageLevel, highest
from lightning_recompute.stage_profile import StageProfile


@dataclass(frozen=True)
class PipelineForecast(OfStages):
    """A plan and what every rank of a pipeline will need; the same on all ranks but for what is this rank's own.

    Attributes:
        plan: For all blocks of the model; `Division.part_of` gives a rank's part.
        budget_bytes: The budget it was made for; None without one.
        stages: One for each rank of the pipeline.
        rank: This rank of the pipeline.
        own_phase_peaks: The predicted peak of each phase of this rank's step: `forward` (all forwards and backwards
            of the pipeline run in it), `backward` (gradients are handed out), `optimizer`.
    """

    rank: int
    own_phase_peaks: Mapping[str, int]

    @property
    def own(self) -> StageForecast:
        """Of this rank."""
        return self.stages[self.rank]

    def phase_peaks(self) -> dict[str, int]:
        """The predicted peak of each phase of this rank's step: `forward`, `backward`, `optimizer`."""
        return dict(self.own_phase_peaks)


def rank_forecast(profile: StageProfile, plan: RecomputePlan, extra_seconds: float = 0.0) -> StageForecast:
    """What one rank will need under a plan.

    Args:
        profile: What was measured of it.
        plan: For all blocks of the model.
        extra_seconds: What the plan costs a microbatch.
    """
    found = profile.levels(plan)
    level = highest(found)
    statics = profile.statics
    breakdown = {
        "parameters": statics.parameters_bytes + level.gathered_bytes,
        "optimizer": statics.optimizer_bytes,
        "batch": statics.batch_bytes,
        "other": statics.other_bytes,
        "gradients": level.gradient_bytes,
        "blocks": level.waiting_bytes,
        "running": level.running_bytes,
        "outside": level.passing_bytes,
    }
    spans = [profile.division.bounds[chunk] for chunk in profile.chunks]
    return StageForecast(
        profile.rank,
        spans[0],
        max(one.in_flight for one in found),
        sum(breakdown.values()),
        _in_words(level, profile),
        breakdown,
        extra_seconds,
        tuple(spans[1:]),
    )


def phase_peaks(profile: StageProfile, plan: RecomputePlan) -> dict[str, int]:
    """The predicted peak of each phase of a rank's step; see `PipelineForecast`.

    Args:
        profile: What was measured.
        plan: For all blocks of the model.
    """
    peaks = {
        "forward": highest(profile.run_levels(plan)).num_bytes,
        "backward": profile.reduction_bytes,
        "optimizer": profile.optimizer_bytes,
    }
    return {phase: profile.statics.num_bytes + peak for phase, peak in peaks.items()}


def whole_plan(parts: Sequence[RecomputePlan], division: Division) -> RecomputePlan:
    """The plan that has of each rank's plan what that rank's blocks do.

    Args:
        parts: Plans of all blocks, one of each rank of the pipeline.
        division: The blocks over the ranks.
    """
    segments = []
    for chunk, (start, stop) in enumerate(division.bounds):
        own = division.part_of(parts[division.rank_of(chunk)], division.rank_of(chunk))
        segments += [segment for segment in own.segments if start <= segment.start < stop]
    return RecomputePlan(tuple(segments))


def _in_words(level: StageLevel, profile: StageProfile) -> str:
    if level.action is None:
        return level.name or "hidden states on their way"
    kind, chunk, microbatch = level.action
    start, stop = profile.division.bounds[chunk]
    return f"{KIND_WORDS[kind]} of microbatch {microbatch} on blocks {start}..{stop - 1}"
