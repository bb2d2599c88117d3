"""From a module and a budget in bytes to the fastest plan that keeps it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from lightning_recompute.agreement import ALONE, Agreement
from lightning_recompute.blocks import find_blocks
from lightning_recompute.cost import extra_seconds
from lightning_recompute.device_memory import budget_bytes
from lightning_recompute.forecast import Forecast, ParallelSizes, StageForecast, stage_forecast
from lightning_recompute.ledger import allocated_bytes
from lightning_recompute.measured_model import measure_model
from lightning_recompute.only_tried import only_tried
from lightning_recompute.pipeline_forecast import forecast_ranks
from lightning_recompute.pipeline_layout import Layout
from lightning_recompute.plan import RecomputePlan
from lightning_recompute.plan_search import PlanSearch
from lightning_recompute.policy import RecomputePolicy
from lightning_recompute.profiling import Profile, everything_kept, profile_step
from lightning_recompute.side_effects import is_lightning_module
from lightning_recompute.stage_options import Prices, action_seconds, candidates
from lightning_recompute.throughput import device_peak_flops
from lightning_recompute.tried_step import LONE_STEP, TriedStep

logger = logging.getLogger(__name__)

_PARTS = ("parameters", "optimizer", "batch", "other", "gradients", "blocks", "running", "outside")


def plan_recompute(
    module: nn.Module,
    batch: Any,
    memory_budget: str | int | float,
    *,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    blocks: str | Sequence[str] | None = None,
    parallel: ParallelSizes | None = None,
    num_microbatches: int = 1,
    schedule: str = "1f1b",
    device: str | None = None,
    accumulate: int = 1,
    prices: Prices | None = None,
) -> Forecast:
    """Find the plan that costs least time and keeps a budget.

    The step is measured on the batch; module, gradients, optimizer and random streams are afterwards what they were.

    Args:
        module: A LightningModule, of which `training_step(batch, 0)` runs, or any module, which is called with the
            batch (a mapping as keywords, a tuple or list as positional arguments). In training mode, on its device.
        batch: One batch as it comes to training, on that device.
        memory_budget: Bytes that the peak of a step may have, parameters, gradients and optimizer state included:
            `"22GiB"`, a number of bytes, or a fraction of the module's device.
        optimizer: What trains the module. None: it has no state.
        blocks: Where the blocks are; see `find_blocks`.
        parallel: Sizes of the parallel groups; None: one device. With `data` each process holds the whole module, as
            under torch's DistributedDataParallel. With `pipeline` each stage gets a plan of its own: the module is
            measured whole, on one microbatch, and never divided.
        num_microbatches: Parts, by rows, in which a batch is run; gradients add up.
        schedule: The order of microbatches on several pipeline stages; on one there is nothing to order.
        device: Name of another device to plan for (`"NVIDIA H100 80GB HBM3"`, `"A100"`): time is counted by its peak
            and not measured. None: blocks are timed on the module's device.
        accumulate: Batches to an optimizer step.
        prices: Count time by these instead.

    Returns:
        The plan and what it will need.

    Raises:
        BudgetError: No plan keeps the budget; the message says what the smallest peak is and consists of.
        ValueError: The budget is no size, or the model's blocks cannot be found or measured; or the module is, or is
            to be, divided over processes, which have to measure it together.
    """
    parallel = parallel or ParallelSizes()
    if schedule != "1f1b" and parallel.pipeline == 1:
        raise ValueError(
            f"schedule={schedule!r}: it orders microbatches on several stages, and there is one; leave it out"
        )
    _check_whole(module, parallel)
    where = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    within = budget_bytes(memory_budget, where)
    if device is not None:
        prices = prices or prices_of(device, module)
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer or ())
    if parallel.pipeline > 1:
        layout = Layout(
            pipeline=parallel.pipeline,
            virtual=parallel.virtual,
            schedule=schedule,
            num_microbatches=num_microbatches,
            data=parallel.data,
        )
        return _plan_stages(module, batch, within, layout, optimizers, blocks, prices)
    profile = profile_batch(
        module,
        first_microbatch(batch, num_microbatches),
        blocks=blocks,
        optimizers=optimizers,
        accumulating=accumulate * num_microbatches > 1,
        other_bytes=bucket_bytes(module, parallel.data),
    )
    return forecast_within(profile, within, prices=prices)


def _plan_stages(
    module: nn.Module,
    batch: Any,
    within: int,
    layout: Layout,
    optimizers: Sequence[Optimizer],
    blocks: str | Sequence[str] | None,
    prices: Prices | None,
) -> Forecast:
    assert layout.num_microbatches is not None
    number = layout.num_microbatches
    measured = measure_model(
        module,
        lambda given: _step(module, given)(),
        first_microbatch(batch, number),
        whole=dict(module.named_parameters()),
        blocks=blocks,
        optimizers=optimizers,
        prices=prices,
    )
    batch_bytes = allocated_bytes(leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))
    view = forecast_ranks(measured, layout, number, budget_bytes=within, names=[], batch_bytes=batch_bytes)
    if view.refusal is not None:
        raise view.refusal
    stages = []
    for rank in view.ranks:
        parts = dict(rank.breakdown)
        other = parts.pop("other") - batch_bytes
        parts |= {"batch": batch_bytes, "other": other, "blocks": parts.pop("activations")}
        first, *more = rank.blocks
        stages.append(
            StageForecast(
                rank.rank,
                first,
                rank.in_flight,
                rank.peak_bytes,
                rank.moment,
                {name: parts[name] for name in _PARTS},
                rank.extra_seconds,
                tuple(more),
            )
        )
    return Forecast(view.plan, within, tuple(stages), measured.profile, measured.found)


def _check_whole(module: nn.Module, parallel: ParallelSizes) -> None:
    """Refuse a module of which a process has, or is to have, a part."""
    divided = next((name for name, p in module.named_parameters() if isinstance(p.data, DTensor)), None)
    if divided is not None or parallel.tensor > 1:
        found = f"{divided} is divided over processes" if divided else f"ParallelSizes(tensor={parallel.tensor})"
        raise ValueError(
            f"{found}: what a rank needs is measured by all ranks together, in a fit: "
            f"Trainer(strategy=RecomputeStrategy(memory_budget=..., tensor_parallel_size={max(parallel.tensor, 2)})) "
            "makes the plan at the first batch, and strategy.forecast holds it. Here give the whole module, and "
            "ParallelSizes without tensor"
        )


def first_microbatch(batch: Any, num_microbatches: int) -> Any:
    """The first of the equal parts, by rows, of a batch.

    Args:
        batch: Tensors, in mappings and sequences; the rows of a batch are the first dimension of its first tensor.
        num_microbatches: Number of parts.

    Raises:
        ValueError: There are fewer rows than parts.
    """
    if num_microbatches == 1:
        return batch
    rows = next((leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()), 0)
    if not 1 <= num_microbatches <= rows:
        raise ValueError(f"num_microbatches={num_microbatches}: 1 up to the {rows} row(s) of the batch is due")
    part = -(-rows // num_microbatches)

    def cut(leaf: Any) -> Any:
        is_row_wise = isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == rows
        return leaf[:part].clone() if is_row_wise else leaf

    return tree_map(cut, batch)


def prices_of(device: str, module: nn.Module) -> Prices:
    """What work costs on a device by its name, in the precision of a module's parameters.

    Raises:
        ValueError: The device is not known.
    """
    kind = next((parameter.dtype for parameter in module.parameters()), torch.float32)
    word = {torch.bfloat16: "bf16-true", torch.float16: "16-true"}.get(kind, "32-true")
    peak_flops = device_peak_flops(device, word, tf32=True)
    if peak_flops is None:
        raise ValueError(f"device={device!r}: its peak in {word} is not known here; give prices=Prices(...) instead")
    # memory moves one byte for about so many FLOPs on accelerators of the last years
    return Prices(peak_flops, peak_flops / 250)


def profile_batch(
    module: nn.Module,
    batch: Any,
    *,
    step: Callable[[], object] | None = None,
    blocks: str | Sequence[str] | None = None,
    optimizers: Iterable[Optimizer] = (),
    accumulating: bool = False,
    other_bytes: int = 0,
    exact: bool = True,
    tried: TriedStep = LONE_STEP,
    agreement: Agreement = ALONE,
) -> Profile:
    """Measure a module's step on a batch.

    Args:
        module: See `plan_recompute`.
        batch: The batch.
        step: Runs the step's forward and returns its loss. None: made from module and batch, as `plan_recompute`
            says.
        blocks: Where the blocks are.
        optimizers: What trains the module.
        accumulating: Whether an optimizer step follows several backward passes.
        other_bytes: What else is there all the time.
        exact: Whether blocks run on real tensors at once; see `measure_bytes`.
        tried: How a step is run.
        agreement: With the processes that measure the same together.
    """
    run = step or _step(module, batch)
    with only_tried(module):
        return profile_step(
            module,
            run,
            find_blocks(module, blocks),
            optimizers=optimizers,
            batch=batch,
            accumulating=accumulating,
            other_bytes=other_bytes,
            exact=exact,
            tried=tried,
            agreement=agreement,
        )


def bucket_bytes(module: nn.Module, num_replicas: int) -> int:
    """What data-parallel processes average gradients in.

    Args:
        module: The module.
        num_replicas: Number of processes; one alone averages nothing.
    """
    return sum(p.nbytes for p in module.parameters() if p.requires_grad) if num_replicas > 1 else 0


def _step(module: nn.Module, batch: Any) -> Callable[[], object]:
    if is_lightning_module(module):
        training_step: Any = module.training_step
        return lambda: training_step(batch, 0)
    if isinstance(batch, Mapping):
        return lambda: module(**batch)
    if isinstance(batch, tuple | list):
        return lambda: module(*batch)
    return lambda: module(batch)


def forecast_within(profile: Profile, budget_bytes: int, *, prices: Prices | None = None) -> Forecast:
    """Find the plan that costs least time and keeps a budget, from what was measured.

    Args:
        profile: What was measured.
        budget_bytes: The budget.
        prices: Count time by these. None: blocks are timed on their device.

    Raises:
        BudgetError: No plan keeps the budget.
    """
    return forecast_from(search_plans(profile, prices), budget_bytes)


def search_plans(profile: Profile, prices: Prices | None = None) -> PlanSearch:
    """What plans are looked for with, for one budget after the other.

    Args:
        profile: What was measured.
        prices: Count time by these. None: blocks are timed on their device.
    """
    return PlanSearch(profile, candidates(profile, prices))


def forecast_from(search: PlanSearch, budget_bytes: int) -> Forecast:
    """Find the plan that costs least time and keeps a budget.

    Args:
        search: See `search_plans`.
        budget_bytes: The budget.

    Raises:
        BudgetError: No plan keeps the budget.
    """
    choices = search.fastest(budget_bytes)
    plan = search.plan(choices)
    stage = stage_forecast(search.profile, plan, extra_seconds(search.options.stage, choices))
    return Forecast(plan, budget_bytes, (stage,), search.profile, search.candidates)


def pareto_plans(
    forecast: Forecast, num_points: int = 12, *, search: PlanSearch | None = None
) -> list[tuple[StageForecast, RecomputePlan]]:
    """The plans between the smallest peak and the fastest step, for a curve.

    Args:
        forecast: Of one of them; nothing is measured anew.
        num_points: Budgets tried, evenly spaced.
        search: What the forecast's plan was looked for with, if it is still there.

    Returns:
        What each needs, and the plan; peaks go up, seconds down.
    """
    search = search or PlanSearch(forecast.profile, forecast.candidates)
    least_bytes = search.exact(search.leanest())
    most_bytes = forecast.profile.peak_bytes(everything_kept(forecast.profile))
    points: list[tuple[StageForecast, RecomputePlan]] = []
    for point in range(num_points):
        budget = least_bytes + max(most_bytes - least_bytes, 0) * point // max(num_points - 1, 1)
        found = forecast_from(search, budget)
        (stage,) = found.stages
        if not points or stage.extra_seconds < points[-1][0].extra_seconds:
            points.append((stage, found.plan))
    return points


def policy_forecasts(
    forecast: Forecast, policies: Mapping[str, RecomputePolicy], *, prices: Prices | None = None
) -> dict[str, StageForecast]:
    """What named settings would need on the same model.

    Args:
        forecast: Holds what was measured.
        policies: Settings by name; one that the model does not admit is left out.
        prices: Count time by these. None: blocks are timed on their device.
    """
    found = {}
    profile = forecast.profile
    for name, policy in policies.items():
        try:
            plan = policy.plan([len(span) for span in profile.spans])
            seconds = sum(
                action_seconds(profile, call, [action], prices)[action]
                for call, action in enumerate(profile.actions(plan))
            )
            found[name] = stage_forecast(profile, plan, seconds)
        except ValueError as error:
            logger.debug("%s: %s", name, error)
    return found
