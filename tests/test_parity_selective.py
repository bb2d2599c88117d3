"""Selective labels, saved operators and mixed plans x models x precisions: the same numbers to the bit."""

from __future__ import annotations

import functools

import pytest
import torch
from models import LENGTH, MODELS, VOCABULARY, WIDTH, ModelCase, output_loss, padded_text
from parity import PRECISIONS, Outcome, assert_same, backward, observe, seeded
from plans import PLANS
from selective_plans import SELECTIVE_PLANS, words_of
from torch import nn

from lightning_recompute.blocks import find_blocks
from lightning_recompute.labels import available_labels
from lightning_recompute.plan import RecomputePlan
from lightning_recompute.recompute import apply_recompute

NUM_STEPS = 2


def mixtral(attention: str) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=48,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            max_position_embeddings=LENGTH,
            attention_dropout=0.1,
            attn_implementation=attention,
        )
    ).train()


CASES = MODELS | {
    f"mixtral-{attention}": ModelCase(functools.partial(mixtral, attention), padded_text, output_loss, (4,))
    for attention in ("eager", "sdpa")
}
# no plain softmax runs there; Mixtral has one in its router
FUSED = {model for model in MODELS if model.endswith("sdpa") or "encoder" in model or "rotary" in model}


@functools.cache
def labels_of(model: str) -> set[str]:
    lists = find_blocks(seeded(CASES[model].build))
    return {label for block_list in lists for label in available_labels(block_list.blocks[0])}


def suits(plan: str, model: str) -> bool:
    if plan == "save-softmax" and model in FUSED:
        return False  # no such operator runs there, which is an error of its own
    return words_of(plan) <= labels_of(model)


def steps(module: nn.Module, model: str, precision: str) -> list[Outcome]:
    """Two steps of SGD: the first is the one that teaches a block's units, the second uses it."""
    case = CASES[model]
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
    return steps(seeded(CASES[model].build), model, precision)


def check(plan: str, model: str, precision: str) -> None:
    module = seeded(CASES[model].build)
    names = [name for name, _ in module.named_parameters()]
    state = {id(part): vars(part).copy() for part in module.modules()}
    with apply_recompute(module, SELECTIVE_PLANS[plan](CASES[model].chunks)):
        assert [name for name, _ in module.named_parameters()] == names
        found = steps(module, model, precision)
    for part in module.modules():
        assert vars(part).keys() == state[id(part)].keys(), "the handle left something on the module"
    assert_same(found, due_steps(model, precision), f"{model} under {plan}")


def product() -> list[tuple[str, str, str]]:
    return [(plan, model, precision) for precision in PRECISIONS for plan in SELECTIVE_PLANS for model in CASES]


# a third of the (plan, model) pairs, each model and plan with both precisions; the rest is long
SHORT = [
    (plan, model, PRECISIONS[(i + j) % 2])
    for i, plan in enumerate(SELECTIVE_PLANS)
    for j, model in enumerate(CASES)
    if (i + j) % 4 == 0 or ("moe" in words_of(plan) and "mixtral" in model)
]


@pytest.mark.parametrize(("plan", "model", "precision"), SHORT)
def test_same_as_without_recompute(plan: str, model: str, precision: str) -> None:
    if suits(plan, model):
        check(plan, model, precision)
    else:
        # a label that nothing answers to, an operator that does not run: said, not ignored
        with pytest.raises((ValueError, RuntimeError), match=r"answers to|no such operator ran"):
            check(plan, model, precision)


@pytest.mark.long
@pytest.mark.parametrize(("plan", "model", "precision"), [case for case in product() if case not in set(SHORT)])
def test_full_product(plan: str, model: str, precision: str) -> None:
    if suits(plan, model):
        check(plan, model, precision)


def test_every_plan_meets_a_model() -> None:
    assert len(PLANS | SELECTIVE_PLANS) >= 25
    met = {plan for plan, model, _ in SHORT if suits(plan, model)}
    assert set(SELECTIVE_PLANS) - met == set()


@pytest.mark.parametrize("plan", SELECTIVE_PLANS)
def test_plans_survive_their_file(plan: str, tmp_path: object) -> None:
    value = SELECTIVE_PLANS[plan]((5, 3))
    path = value.save(f"{tmp_path}/plan.yaml")
    assert RecomputePlan.load(path) == value
