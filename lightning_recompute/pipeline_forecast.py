"""What every rank of a pipeline will need, and how long its step takes: for given words, or planned within a budget."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_recompute.cost import segments
from lightning_recompute.errors import BudgetError
from lightning_recompute.measured_model import MeasuredModel
from lightning_recompute.paper_formulas import LayerShape, layer_bytes
from lightning_recompute.pipeline_layout import Layout
from lightning_recompute.plan import Action, Full, Keep, RecomputePlan, Selective
from lightning_recompute.planner import smallest_peak
from lightning_recompute.policy import RecomputePolicy
from lightning_recompute.rank_solver import PartChoices
from lightning_recompute.settings import setting, usual_settings
from lightning_recompute.stage_plans import PipelinePlan
from lightning_recompute.staged_model import StagedModel, divide, stage_model
from lightning_recompute.step_memory import in_words

WORDS = "as given"
_SIMULATED = 4


@dataclass(frozen=True)
class RankForecast:
    """What one rank will need.

    Attributes:
        rank: The stage.
        blocks: First block, and the one after the last, of each of its chunks.
        in_flight: Microbatches (or chunk-microbatches) alive at most.
        actions: What is recomputed, in words.
        peak_bytes: The peak of a step.
        moment: When that is, in words.
        breakdown: Bytes of `staged_model.CATEGORIES`.
        busy_seconds: Forward, recompute and backward of a microbatch.
        extra_seconds: The part of that which is recompute.
        spare_seconds: What the slowest rank takes longer.
        held_bytes: What its blocks hold for all microbatches in flight.
        formula_bytes: The same by the formulas of the paper; None where they do not say it.
    """

    rank: int
    blocks: tuple[tuple[int, int], ...]
    in_flight: int
    actions: str
    peak_bytes: int
    moment: str
    breakdown: Mapping[str, int]
    busy_seconds: float
    extra_seconds: float
    spare_seconds: float
    held_bytes: int
    formula_bytes: int | None


@dataclass(frozen=True)
class GlobalSetting:
    """One setting for all ranks.

    Attributes:
        name: As `settings.setting` takes it.
        peak_bytes: Of the rank that needs most.
        rank: Which that is.
        seconds: Of the simulated step.
        bubble_fraction: The part of it in which ranks wait.
    """

    name: str
    peak_bytes: int
    rank: int
    seconds: float
    bubble_fraction: float


@dataclass(frozen=True)
class LayoutForecast:
    """What all ranks will need.

    Attributes:
        staged: The model over the ranks.
        device: What time was counted or measured for, in words.
        budget_bytes: What each rank's peak may be; None without a budget.
        chosen: How each rank recomputes, and the simulated step.
        plan: The same as a plan for all blocks.
        ranks: Each rank's.
        beside: Settings that are one for all ranks.
        best: The name of the fastest of them that fits; None where none does, or without a budget.
        refusal: Why no plan keeps the budget; what is chosen is then that of the smallest peaks.
        notices: What was understood otherwise than said.
        by_paper: By setting, of each rank what its blocks hold for all microbatches in flight: bytes by profile and
            by the paper's formulas. Empty where these do not apply.
    """

    staged: StagedModel
    device: str
    budget_bytes: int | None
    chosen: PipelinePlan
    plan: RecomputePlan
    ranks: tuple[RankForecast, ...]
    beside: tuple[GlobalSetting, ...]
    best: str | None
    refusal: BudgetError | None
    notices: tuple[str, ...]
    by_paper: Mapping[str, tuple[tuple[int, int], ...]]

    @property
    def worst(self) -> RankForecast:
        """The rank of the highest peak, the first of several."""
        return max(self.ranks, key=lambda rank: rank.peak_bytes)

    @property
    def slowest(self) -> RankForecast:
        """The rank that sets the pace, the first of several."""
        return max(self.ranks, key=lambda rank: rank.busy_seconds)


def forecast_ranks(
    measured: MeasuredModel,
    layout: Layout,
    num_microbatches: int,
    *,
    budget_bytes: int | None = None,
    words: RecomputePolicy | RecomputePlan | None = None,
    names: Sequence[str] | None = None,
    batch_bytes: int = 0,
    shape: LayerShape | None = None,
    device: str = "",
) -> LayoutForecast:
    """Say what every rank of a layout will need.

    Args:
        measured: The model.
        layout: The layout.
        num_microbatches: Of a step.
        budget_bytes: What each rank's peak may be: each is then planned for itself. None: `words` are forecast.
        words: What is recomputed; `num_layers` counts in each chunk. With a budget they stand beside the plan.
        names: Settings to put beside it; None: the usual ones.
        batch_bytes: The batch of a step.
        shape: A layer of the model, for the paper's formulas; None: they do not apply.
        device: What time was counted or measured for, in words.

    Raises:
        ValueError: Neither budget nor words, words that the model does not admit, a setting that is none, or a layout
            that does not fit the model.
    """
    if budget_bytes is None and words is None:
        raise ValueError("neither a budget nor words for recompute: nothing says what is recomputed; give one of them")
    num_blocks = measured.profile.num_blocks
    depth = max(layout.division(num_blocks).lengths)
    notices: list[str] = []
    if isinstance(words, RecomputePolicy):
        words = _fitting(words, layout, depth, notices)
    policies = {name: setting(name) for name in (usual_settings(depth) if names is None else names)}
    measured = _with_actions(measured, words, policies)
    singles = policies if names is not None else policies | _every(measured, depth)
    sizes = [policy.num_layers or 1 for policy in policies.values() if policy.granularity == "full"]
    sizes += _sizes(words)
    division = divide(measured, layout, num_microbatches, budget_bytes)
    staged = stage_model(measured, layout, division, num_microbatches, batch_bytes=batch_bytes, sizes=sizes)
    every = _choices(staged, singles)
    beside = {name: staged.with_choices(every[name], name) for name in policies if name in every}
    refusal = None
    best: str | None = None
    given = None
    if words is not None:
        plan = words.plan(division.lengths) if isinstance(words, RecomputePolicy) else words
        given = staged.with_choices(staged.choices_of(plan), WORDS)
    if budget_bytes is None:
        assert given is not None
        chosen = given
    else:
        if given is not None:
            beside[WORDS] = given
        try:
            chosen = staged.plan_within(budget_bytes)
        except BudgetError as error:
            refusal = error
            chosen = staged.with_choices(_leanest(staged), "smallest peaks")
        found = _best(staged, every, budget_bytes)
        if found is not None:
            best = found.name
            beside[found.name] = found
    choices = staged.pipeline.by_part([rank.choices for rank in chosen.ranks])
    return LayoutForecast(
        staged,
        device,
        budget_bytes,
        chosen,
        staged.plan_of(choices),
        tuple(_rank(staged, chosen, rank, shape) for rank in range(layout.pipeline)),
        tuple(_setting(name, plan) for name, plan in beside.items()),
        best,
        refusal,
        tuple(notices),
        _by_paper(staged, every, shape),
    )


# ---- words


def _fitting(policy: RecomputePolicy, layout: Layout, depth: int, notices: list[str]) -> RecomputePolicy:
    """The words as they can be meant in a layout: a config's were written for another one, perhaps."""
    if policy.num_layers is not None and policy.num_layers > depth:
        notices.append(
            f"num_layers={policy.num_layers}: the largest stage (chunk) has {depth} block(s); {depth} is taken"
        )
        policy = replace(policy, num_layers=depth)
    if policy.distribute_saved_activations and (layout.tensor == 1 or layout.sequence):
        why = "sequences are divided already" if layout.sequence else "there is one tensor-parallel rank"
        notices.append(f"distribute_saved_activations=True is left out: {why}")
        policy = replace(policy, distribute_saved_activations=False)
    return policy


def _with_actions(
    measured: MeasuredModel, words: RecomputePolicy | RecomputePlan | None, policies: dict[str, RecomputePolicy]
) -> MeasuredModel:
    """The model with what words need; settings that it does not admit are taken out."""
    num_blocks = measured.profile.num_blocks
    if words is not None:
        plan = words.plan([num_blocks]) if isinstance(words, RecomputePolicy) else words
        for action in dict.fromkeys(segment.action for segment in plan.segments):
            measured = measured.with_action(action)
    for name, policy in list(policies.items()):
        try:
            for segment in policy.plan([num_blocks]).segments:
                measured = measured.with_action(segment.action)
        except ValueError:
            del policies[name]
    return measured


def _sizes(words: RecomputePolicy | RecomputePlan | None) -> list[int]:
    if isinstance(words, RecomputePolicy):
        return [words.num_layers or 1] if words.granularity == "full" and words.method != "block" else []
    plan = () if words is None else words.segments
    return [each.stop - each.start for each in plan if not isinstance(each.action, Keep | Selective)]


def _every(measured: MeasuredModel, depth: int) -> dict[str, RecomputePolicy]:
    """All single settings among which the best is sought: every number of first blocks, every set of labels."""
    names = [f"full block {number}" for number in range(1, depth + 1)]
    actions = dict.fromkeys(candidate.action for of_kind in measured.found for candidate in of_kind)
    names += [in_words(a) for a in actions if isinstance(a, Selective) and not any("*" in word for word in a.modules)]
    return {name: setting(name) for name in names}


def _choices(staged: StagedModel, policies: Mapping[str, RecomputePolicy]) -> dict[str, list[PartChoices]]:
    found = {}
    for name, policy in policies.items():
        try:
            found[name] = staged.choices_of(policy.plan(staged.division.lengths))
        except ValueError:  # more blocks than a stage has, or labels that some blocks do not have
            continue
    return found


# ---- choosing


def _leanest(staged: StagedModel) -> list[PartChoices]:
    pipeline = staged.pipeline
    found: list[PartChoices] = [()] * len(pipeline.parts)
    for rank, vectors in enumerate(pipeline.alive()):
        for index, part in enumerate(pipeline.parts_of(rank)):
            most = max(vector[index] for vector in vectors)
            found[part] = smallest_peak(replace(pipeline.parts[part], in_flight=max(most, 1)))
    return found


def _best(staged: StagedModel, every: Mapping[str, list[PartChoices]], budget_bytes: int) -> PipelinePlan | None:
    """The fastest of the settings that fit on every rank; of those few are simulated that can be it."""
    pipeline = staged.pipeline

    def fits(choices: Sequence[PartChoices]) -> bool:
        of_ranks = ([choices[part] for part in pipeline.parts_of(rank)] for rank in range(pipeline.num_stages))
        return all(staged.peak_bytes(rank, chosen) <= budget_bytes for rank, chosen in enumerate(of_ranks))

    def extra(name: str) -> float:
        pairs = zip(pipeline.parts, every[name], strict=True)
        return math.fsum(option.extra_seconds for part, chosen in pairs for _, option in segments(part, chosen))

    fitting = sorted((name for name, choices in every.items() if fits(choices)), key=extra)
    plans = [staged.with_choices(every[name], name) for name in fitting[:_SIMULATED]]
    return min(plans, key=lambda plan: plan.step.seconds, default=None)


# ---- what is found


def _setting(name: str, plan: PipelinePlan) -> GlobalSetting:
    return GlobalSetting(name, plan.fullest.peak_bytes, plan.fullest.rank, plan.step.seconds, plan.step.bubble_fraction)


def _rank(staged: StagedModel, plan: PipelinePlan, rank: int, shape: LayerShape | None) -> RankForecast:
    found = plan.ranks[rank]
    moment, breakdown = staged.breakdown(plan, rank)
    numbers = staged.pipeline.parts_of(rank)
    parts = [staged.parts[number] for number in numbers]
    actions = [
        part.options[index][choice]
        for part, chosen in zip(parts, found.choices, strict=True)
        for index, choice in enumerate(chosen[1:-1])
        if choice is not None
    ]
    held, formula = _held(staged, rank, found.choices, shape)
    return RankForecast(
        rank=rank,
        blocks=tuple((part.start, part.stop) for part in parts),
        in_flight=found.in_flight,
        actions=_in_words(actions),
        peak_bytes=found.peak_bytes,
        moment=moment,
        breakdown=breakdown,
        busy_seconds=found.busy_seconds,
        extra_seconds=found.extra_seconds,
        spare_seconds=found.spare_seconds,
        held_bytes=held,
        formula_bytes=formula,
    )


def _held(
    staged: StagedModel, rank: int, choices: Sequence[PartChoices], shape: LayerShape | None
) -> tuple[int, int | None]:
    """What a rank's blocks hold for all microbatches in flight; and the same by the paper's formulas."""
    held, formula = [], []
    for number, chosen in zip(staged.pipeline.parts_of(rank), choices, strict=True):
        part = (staged.split or staged).parts[number]  # what waits for the second part of backward is no choice's
        held.append(sum(o.held_bytes for unit, o in segments(part.costs, chosen) if 0 < unit <= part.num_blocks))
        those = [part.options[index][choice] for index, choice in enumerate(chosen[1:-1]) if choice is not None]
        by_paper = [_by_formula(action, shape, staged.layout.sequence) for action, _ in those]
        formula.append(None if None in by_paper else sum(each for each in by_paper if each is not None))
    vectors = staged.pipeline.alive()[rank]
    most = max(vectors, key=lambda vector: _dot(vector, held))
    known = [each for each in formula if each is not None]
    return _dot(most, held), _dot(most, known) if len(known) == len(formula) else None


def _by_paper(
    staged: StagedModel, every: Mapping[str, list[PartChoices]], shape: LayerShape | None
) -> dict[str, tuple[tuple[int, int], ...]]:
    """For the settings that the formulas know, of each rank what its blocks hold, by profile and by formula."""
    found = {}
    for name in ("none", "selective core_attn", "full uniform 1") if shape is not None else ():
        if name in every:
            of_ranks = [
                _held(staged, rank, [every[name][part] for part in staged.pipeline.parts_of(rank)], shape)
                for rank in range(staged.layout.pipeline)
            ]
            found[name] = tuple((held, formula) for held, formula in of_ranks if formula is not None)
    return found


def _dot(vector: Iterable[int], sizes: Iterable[int]) -> int:
    return sum(number * size for number, size in zip(vector, sizes, strict=True))


def _by_formula(action: Action, shape: LayerShape | None, sequence: bool) -> int | None:
    """What a layer holds under an action by the paper's formulas, which know three."""
    if shape is None:
        return None
    if action == Keep():
        return layer_bytes(shape, sequence_parallel=sequence)
    if action == Selective(("core_attn",)):
        return layer_bytes(shape, sequence_parallel=sequence, recompute="selective")
    if isinstance(action, Full) and action.inputs in ("device", "shard"):
        shared = action.inputs == "shard"
        return layer_bytes(shape, sequence_parallel=sequence, recompute="full", distributed=shared)
    return None


def _in_words(actions: Sequence[tuple[Action, int]]) -> str:
    """What is done to a rank's blocks: `full x4, keep x8`."""

    def word(action: Action, size: int) -> str:
        inputs = "device" if isinstance(action, Keep) else action.inputs
        where = "" if inputs == "device" else f" ({inputs})"
        return f"{in_words(action)}{f' {size}' if size > 1 else ''}{where}"

    runs = [(word(*key), len(list(those))) for key, those in itertools.groupby(actions)]
    return ", ".join(f"{name} x{number}" if number > 1 else name for name, number in runs)
