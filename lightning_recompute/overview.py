"""What `plan` answers: the plan for a budget, beside the other plans and settings that there are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.table import Table
from torch import nn

from lightning_recompute.errors import BudgetError
from lightning_recompute.forecast import Forecast, StageForecast, stage_forecast
from lightning_recompute.planning import forecast_from, pareto_plans, policy_forecasts, search_plans
from lightning_recompute.profiling import Profile, everything_kept
from lightning_recompute.settings import rule_of_thumb, settings, usual_settings
from lightning_recompute.stage_options import Prices
from lightning_recompute.step_memory import BlockBytes, MomentBytes, held_by_blocks, moments
from lightning_recompute.units import format_bytes, format_count, format_seconds

PLANNED = "planned"

Kind = Literal["pareto", "setting", "plan"]


@dataclass(frozen=True)
class Point:
    """What a plan needs and costs.

    Attributes:
        name: Of the plan or setting.
        kind: A point of the curve, a named setting, or the plan for the budget.
        peak_bytes: The predicted peak of a step.
        extra_seconds: What a batch takes longer than without recompute.
    """

    name: str
    kind: Kind
    peak_bytes: int
    extra_seconds: float


@dataclass(frozen=True)
class Overview:
    """Plans, settings and a budget.

    Attributes:
        budget_bytes: The budget.
        device: Where the model was measured, in words.
        forecast: The plan for the budget; None where no plan keeps it.
        refusal: Why not, then.
        points: The curve, from the smallest peak to the fastest step, then the settings, then the plan.
        steps: The step's memory moment by moment, under the plan, or else under that of the smallest peak.
        kept: The same without recompute.
        blocks: What blocks hold under that plan.
        advice: The rule of thumb of practice beside the plan, line by line.
    """

    budget_bytes: int
    device: str
    forecast: Forecast | None
    refusal: BudgetError | None
    points: tuple[Point, ...]
    steps: tuple[MomentBytes, ...]
    kept: tuple[MomentBytes, ...]
    blocks: tuple[BlockBytes, ...]
    advice: tuple[str, ...]

    def of_kind(self, kind: Kind) -> list[Point]:
        """The points of one kind."""
        return [point for point in self.points if point.kind == kind]

    def to_table(self) -> Table:
        """The points as a rich table, by their peaks."""
        table = Table(
            title=f"Peak of a step and extra time, budget {format_bytes(self.budget_bytes)}", title_justify="left"
        )
        table.add_column("plan")
        for column in ("peak", "extra time", "of the budget"):
            table.add_column(column, justify="right")
        table.add_column("fits")
        order: list[Kind] = ["pareto", "plan", "setting"]
        for point in sorted(self.points, key=lambda point: (point.peak_bytes, order.index(point.kind))):
            table.add_row(
                point.name,
                format_bytes(point.peak_bytes),
                format_seconds(point.extra_seconds),
                f"{point.peak_bytes / self.budget_bytes:.1%}",
                "yes" if point.peak_bytes <= self.budget_bytes else "no",
                style={"plan": "bold", "setting": "cyan"}.get(point.kind),
            )
        return table


def overview(
    module: nn.Module,
    profile: Profile,
    budget_bytes: int,
    device: str,
    *,
    names: Sequence[str] | None = None,
    prices: Prices | None = None,
) -> Overview:
    """Look for the plan, and at what there is beside it.

    Args:
        module: The model.
        profile: What was measured of it.
        budget_bytes: The budget.
        device: The device, in words.
        names: Settings to put beside the plan; None: the usual ones that the model admits.
        prices: See `forecast_within`.

    Raises:
        ValueError: A name is no setting's.
    """
    kept = everything_kept(profile)
    search = search_plans(profile, prices)
    base = Forecast(kept, None, (stage_forecast(profile, kept),), profile, search.candidates)
    curve = pareto_plans(base, search=search)
    num_blocks = max(len(span) for span in profile.spans)
    beside = policy_forecasts(base, settings(names if names is not None else usual_settings(num_blocks)), prices=prices)
    forecast, refusal = None, None
    try:
        forecast = forecast_from(search, budget_bytes)
    except BudgetError as error:
        refusal = error
    points = [_point(f"curve {number}", "pareto", stage) for number, (stage, _) in enumerate(curve)]
    points += [_point(name, "setting", stage) for name, stage in beside.items()]
    if forecast is not None:
        points.append(_point(PLANNED, "plan", forecast.stages[0]))
    shown = forecast.plan if forecast is not None else curve[0][1]
    return Overview(
        budget_bytes,
        device,
        forecast,
        refusal,
        tuple(points),
        tuple(moments(profile, shown)),
        tuple(moments(profile, kept)),
        tuple(held_by_blocks(profile, shown)),
        tuple(_advice(module, base, forecast, budget_bytes, prices)),
    )


def _point(name: str, kind: Kind, stage: StageForecast) -> Point:
    return Point(name, kind, stage.peak_bytes, stage.extra_seconds)


def _advice(
    module: nn.Module, base: Forecast, planned: Forecast | None, budget_bytes: int, prices: Prices | None
) -> Iterator[str]:
    """The rule of thumb for a model of this size, what it comes to here, and whether it is right."""
    num_parameters = sum(parameter.numel() for parameter in module.parameters())
    rule = rule_of_thumb(num_parameters, max(len(span) for span in base.profile.spans))
    here = format_count(num_parameters).replace("G", "B")  # models are counted in billions
    yield f"Rule of thumb for {rule.sizes} parameters (here {here}): {rule.words}."
    found = policy_forecasts(base, settings(rule.settings), prices=prices)
    if not found:
        yield f"Here: not possible, the model has nothing that {rule.settings[0]!r} would recompute."
        return
    fitting = [name for name, stage in found.items() if stage.peak_bytes <= budget_bytes]
    name = fitting[0] if fitting else list(found)[-1]
    ruled = found[name]
    saved = base.peak_bytes - ruled.peak_bytes
    yield (
        f"Here: {name} has a peak of {_needs(ruled, budget_bytes)}; it saves {format_bytes(saved)} ({saved} bytes) of "
        f"the {format_bytes(base.peak_bytes)} without recompute."
    )
    if planned is None:
        yield "Planned: no plan keeps the budget."
        return
    verdict = _verdict(ruled, planned, saved, bool(fitting))
    yield f"Planned: a peak of {_needs(planned.stages[0], budget_bytes)}. {verdict}"


def _needs(stage: StageForecast, budget_bytes: int) -> str:
    fits = "within" if stage.peak_bytes <= budget_bytes else "over"
    return f"{format_bytes(stage.peak_bytes)}, {fits} the budget, for {format_seconds(stage.extra_seconds)} a batch"


def _verdict(ruled: StageForecast, planned: Forecast, saved: int, fits: bool) -> str:
    if not fits:
        return "The rule is wrong here: it does not keep the budget."
    if ruled.extra_seconds <= planned.extra_seconds:
        return "The rule holds here."
    if saved < 0.01 * ruled.peak_bytes:
        return "The rule is wrong here: it saves next to nothing, for time."
    return f"The rule costs {format_seconds(ruled.extra_seconds - planned.extra_seconds)} a batch that need not be."
