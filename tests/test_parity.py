"""Plans x models x precisions: the same numbers to the bit as without recompute."""

from __future__ import annotations

import functools

import pytest
import torch
from models import MODELS
from parity import PRECISIONS, Outcome, assert_same, backward, block_modules, counted_calls, observe, seeded
from plans import PLANS, num_calls
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_recompute.recompute import apply_recompute

NUM_STEPS = 2

PRODUCT = [(plan, model, precision) for precision in PRECISIONS for plan in PLANS for model in MODELS]
# every (plan, model), (plan, precision) and (model, precision) occurs in half of the product; the rest is long
PAIRWISE = [
    (plan, model, PRECISIONS[(i + j) % len(PRECISIONS)])
    for i, plan in enumerate(PLANS)
    for j, model in enumerate(MODELS)
]


def steps(module: nn.Module, model: str, precision: str) -> list[Outcome]:
    """Two steps of plain SGD on one batch, so that the second sees whatever the first left behind."""
    case = MODELS[model]
    torch.manual_seed(7)
    batch = case.batch()
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    outcomes = []
    for step in range(NUM_STEPS):
        outcomes.append(observe(module, backward(case.loss, batch, precision=precision), seed=step))
        optimizer.step()
        optimizer.zero_grad()
    return outcomes


@functools.cache
def due_steps(model: str, precision: str) -> list[Outcome]:
    return steps(seeded(MODELS[model].build), model, precision)


def check(plan: str, model: str, precision: str) -> None:
    case = MODELS[model]
    module = seeded(case.build)
    value = PLANS[plan](case.chunks)
    with counted_calls(block_modules(module)) as count:
        with apply_recompute(module, value):
            found = steps(module, model, precision)
        assert count(block_modules(module)) == [NUM_STEPS * n for n in num_calls(value)]
    assert_same(found, due_steps(model, precision), f"{model} under {plan}")


@pytest.mark.parametrize(("plan", "model", "precision"), PAIRWISE)
def test_same_as_without_recompute(plan: str, model: str, precision: str) -> None:
    check(plan, model, precision)


@pytest.mark.long
@pytest.mark.parametrize(("plan", "model", "precision"), [case for case in PRODUCT if case not in PAIRWISE])
def test_same_as_without_recompute_full_product(plan: str, model: str, precision: str) -> None:
    check(plan, model, precision)


def test_selection_is_pairwise() -> None:
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert {(case[a], case[b]) for case in PAIRWISE} == {(case[a], case[b]) for case in PRODUCT}


@pytest.mark.parametrize("model", MODELS)
def test_models_are_as_described(model: str) -> None:
    """Dropout draws, every parameter but the known unused ones gets a gradient, the chunks are right."""
    case = MODELS[model]
    module = seeded(case.build)
    assert module.training
    assert len(block_modules(module)) == sum(case.chunks)
    first, second = due_steps(model, "32")
    assert not torch.equal(first.rng, torch.Generator().manual_seed(0).get_state())
    assert first.result != second.result
    assert all(gradient is not None for gradient in first.gradients.values())
    assert any(gradient is not None and gradient.abs().sum() > 0 for gradient in first.gradients.values())


@pytest.mark.parametrize("model", ["bert-eager", "encoder-pre-norm"])
def test_the_harness_sees_a_wrong_dropout_mask(model: str) -> None:
    """A recompute that does not restore the RNG gives other gradients, and the harness says so."""
    module = seeded(MODELS[model].build)
    for block in block_modules(module):
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
    with pytest.raises(AssertionError, match="differs by up to"):
        assert_same(steps(module, model, "32"), due_steps(model, "32"))


def test_the_harness_sees_a_recompute_that_does_nothing() -> None:
    module = seeded(MODELS["encoder-pre-norm"].build)
    with counted_calls(block_modules(module)) as count:
        steps(module, "encoder-pre-norm", "32")
    assert count(block_modules(module)) == [NUM_STEPS] * 4
    assert count(block_modules(module)) != [NUM_STEPS * n for n in num_calls(PLANS["uniform-1"]([4]))]


def test_the_harness_sees_one_different_bit() -> None:
    one = torch.ones(3)
    other: Tensor = one.clone()
    other[1] = torch.nextafter(one[1], torch.tensor(2.0))
    with pytest.raises(AssertionError, match="differs"):
        assert_same({"a": [one]}, {"a": [other]})
    assert_same({"a": [one]}, {"a": [one.clone()]})
