"""From a module and a budget to a plan, whatever the batch looks like, without a trace."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from lightning_modules import BATCH_SIZE, WIDTH, Net
from parity import seeded
from planned import LENGTH, NUM_BLOCKS, PRICES, ROWS, Language, ids, language, most, profile, unlimited
from real_steps import measured_peak
from test_capture import Model, state_of
from torch import Tensor
from torch.optim import SGD, AdamW

from lightning_recompute import plan_recompute
from lightning_recompute.errors import BudgetError
from lightning_recompute.forecast import Forecast, ParallelSizes
from lightning_recompute.plan import Keep
from lightning_recompute.planning import first_microbatch, pareto_plans, policy_forecasts, prices_of, profile_batch
from lightning_recompute.policy import RecomputePolicy


def test_a_plan_for_a_budget() -> None:
    module, batch = language(), ids()
    optimizer = SGD(module.parameters(), lr=0.1)
    budget = most() * 3 // 4
    forecast = plan_recompute(module, batch, budget, optimizer=optimizer, prices=PRICES)
    assert forecast.budget_bytes == budget
    assert forecast.fits
    assert any(not isinstance(segment.action, Keep) for segment in forecast.plan.segments)
    measured = measured_peak(module, lambda: module(batch), forecast.plan, optimizers=[optimizer], batch=batch)
    assert 0 <= forecast.peak_bytes - measured <= 2048
    again = plan_recompute(module, batch, budget, optimizer=optimizer, prices=PRICES)
    assert (again.plan, again.stages) == (forecast.plan, forecast.stages)


def test_budgets_are_sizes() -> None:
    found = plan_recompute(language(), ids(), "1GiB", prices=PRICES)
    assert found.budget_bytes == 2**30
    assert [segment.action for segment in found.plan.segments] == [Keep()]
    with pytest.raises(BudgetError, match="no plan keeps it"):
        plan_recompute(language(), ids(), "1KiB", prices=PRICES)
    with pytest.raises(ValueError, match="lots"):
        plan_recompute(language(), ids(), "lots")


def test_what_else_takes_memory() -> None:
    module, batch = language(), ids()

    def peak(**options: Any) -> int:
        return plan_recompute(module, batch, "1GiB", prices=PRICES, **options).peak_bytes

    gradients = sum(parameter.nbytes for parameter in module.parameters())
    optimizer = AdamW(module.parameters())
    # plain SGD, which `most` is of, has no state
    assert peak(parallel=ParallelSizes(data=2), optimizer=optimizer) > most() + 3 * gradients
    assert peak(num_microbatches=ROWS) < most()
    with pytest.raises(ValueError, match="gpipe"):
        plan_recompute(module, batch, "1GiB", schedule="gpipe")
    with pytest.raises(ValueError, match="num_microbatches=3"):
        plan_recompute(module, batch, "1GiB", num_microbatches=3)


@pytest.mark.parametrize("shape", ["tensor", "mapping", "sequence"])
def test_batches_as_they_come(shape: str) -> None:
    batches: dict[str, Any] = {"tensor": ids(), "mapping": {"ids": ids()}, "sequence": [ids()]}
    found = profile_batch(language(), batches[shape], optimizers=[SGD(language().parameters(), lr=0.1)])
    assert found.skeleton == profile().skeleton
    assert found.statics == profile().statics


def test_a_lightning_module_runs_its_training_step() -> None:
    module = seeded(Net)
    assert isinstance(module, Net)
    module.training_step = lambda batch, index: module.loss(batch)  # type: ignore[method-assign]
    batch = [torch.randn(BATCH_SIZE, WIDTH)]
    before = state_of(module)
    found = profile_batch(module, batch)
    assert [passage.name for passage in found.skeleton.passages] == ["blocks.0", "blocks.1", "blocks.2"]
    assert state_of(module) == before


def test_first_microbatch() -> None:
    batch = {"ids": torch.arange(10).view(5, 2), "weight": torch.ones(3), "name": "text"}
    part = first_microbatch(batch, 2)
    assert part["ids"].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert part["ids"].untyped_storage().nbytes() == 6 * 8
    assert (part["weight"].tolist(), part["name"]) == ([1.0] * 3, "text")
    assert first_microbatch(batch, 1) is batch


def test_prices_of_devices() -> None:
    assert prices_of("NVIDIA A100-SXM4-80GB", language()).flops_per_second == 156e12
    assert prices_of("NVIDIA A100-SXM4-80GB", language().bfloat16()).flops_per_second == 312e12
    with pytest.raises(ValueError, match=r"device='toaster'.*prices=Prices"):
        prices_of("toaster", language())


def test_the_curve() -> None:
    points = pareto_plans(unlimited(), 6)
    peaks = [stage.peak_bytes for stage, _ in points]
    seconds = [stage.extra_seconds for stage, _ in points]
    assert len(points) > 2
    assert peaks == sorted(peaks)
    assert seconds == sorted(seconds, reverse=True)
    assert (peaks[-1], seconds[-1]) == (most(), 0.0)
    assert all(profile().peak_bytes(plan) == stage.peak_bytes for stage, plan in points)


def test_named_settings() -> None:
    policies = {
        "none": RecomputePolicy(granularity=None),
        "full": RecomputePolicy(),
        "too many": RecomputePolicy(num_layers=NUM_BLOCKS + 1),
        "no such label": RecomputePolicy(granularity="selective", modules=["moe"]),
    }
    found = policy_forecasts(unlimited(), policies, prices=PRICES)
    assert list(found) == ["none", "full"]
    assert (found["none"].peak_bytes, found["none"].extra_seconds) == (most(), 0.0)
    assert found["full"].extra_seconds > 0
    assert found["full"].peak_bytes == profile().peak_bytes(RecomputePolicy().plan([NUM_BLOCKS]))


class Drawing(Model):
    """Draws, counts, keeps statistics in its forward, as its blocks do; takes a batch and returns a loss."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


def endless() -> Iterator[Tensor]:
    for number in itertools.count():
        yield torch.full((4, WIDTH), float(number))


def test_no_trace() -> None:
    """Of the user's things nothing is another afterwards: values, memory, modes, hooks, streams, what comes next."""
    module = Drawing()
    optimizer = AdamW(module.parameters())
    batches = endless()
    module(next(batches) + torch.randn(4, WIDTH)).backward()
    optimizer.step()
    module.blocks[1].eval()
    module.blocks[0].register_forward_hook(lambda *_: None)
    gradients: Sequence[Any] = [parameter.grad for parameter in module.parameters()]
    before = state_of(module)
    memory = [tensor.data_ptr() for tensor in (*module.parameters(), *module.buffers(), *gradients)]
    state = optimizer.state_dict()
    values = [gradient.clone() for gradient in gradients]

    plan_recompute(module, next(batches), "1GiB", optimizer=optimizer, accumulate=2)

    assert state_of(module) == before
    assert [parameter.grad for parameter in module.parameters()] == gradients
    assert memory == [tensor.data_ptr() for tensor in (*module.parameters(), *module.buffers(), *gradients)]
    torch.testing.assert_close([p.grad for p in module.parameters()], values, rtol=0, atol=0)
    torch.testing.assert_close(optimizer.state_dict(), state, rtol=0, atol=0)
    assert next(batches)[0, 0] == 2
    assert torch.is_grad_enabled()


def test_a_step_that_is_planned_for_goes_on_as_without() -> None:
    """Losses of a run that is planned for in its middle are those of one that is not."""

    def losses(plan: bool) -> list[float]:
        torch.manual_seed(0)
        module = Language()
        optimizer = AdamW(module.parameters(), lr=1e-2)
        found = []
        for number in range(4):
            if plan and number == 2:
                plan_recompute(module, ids(), "1GiB", optimizer=optimizer, prices=PRICES)
            loss = module(ids(length=LENGTH))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    assert losses(plan=True) == losses(plan=False)


def test_each_stage_of_a_pipeline_has_its_plan() -> None:
    module, batch = language(), ids()
    optimizer = AdamW(module.parameters())

    def planned(budget: int, **options: Any) -> Forecast:
        parallel = ParallelSizes(pipeline=2)
        given: dict[str, Any] = {
            "parallel": parallel,
            "num_microbatches": ROWS,
            "optimizer": optimizer,
            "prices": PRICES,
        }
        return plan_recompute(module, batch, budget, **given, **options)

    before = {name: value.clone() for name, value in module.state_dict().items()}
    found = planned(2**30)
    assert found.plan.num_blocks == NUM_BLOCKS
    assert [stage.stage for stage in found.stages] == [0, 1]
    assert [stage.in_flight for stage in found.stages] == [2, 1]
    assert found.stages[0].blocks[1] == found.stages[1].blocks[0]
    for stage in found.stages:
        assert sum(stage.breakdown.values()) == stage.peak_bytes
    assert "stage" in str(found)
    with pytest.raises(BudgetError, match="stage 0"):
        planned(2**10)
    assert [stage.in_flight for stage in planned(2**30, schedule="gpipe").stages] == [ROWS, ROWS]
    with pytest.raises(ValueError, match=r"phase_peaks\(\) of 2 stages"):
        found.phase_peaks()
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())
