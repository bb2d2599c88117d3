"""Recompute changes nothing that a script sees of a module: names, classes, copies, pickles, what remove() leaves."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import MODELS
from parity import FULL, PAIRS, assert_parity, assert_same, counted_calls, never_silent, observe, seeded
from plans import PLANS
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from toys import Block, Stack, rows, square_loss, stack, step

from lightning_recompute.policy import RecomputePolicy
from lightning_recompute.recompute import RecomputeError, apply_recompute

BOTH = pytest.mark.parametrize("policy", [FULL, PAIRS], ids=["single", "pairs"])


def insides(module: nn.Module) -> dict[str, dict[str, Any]]:
    """Every attribute of every module, by identity where it has one; containers by their content."""
    return {
        name: {key: dict(value) if isinstance(value, dict) else value for key, value in vars(part).items()}
        for name, part in module.named_modules()
    }


def assert_untouched(module: nn.Module, before: dict[str, dict[str, Any]]) -> None:
    after = insides(module)
    assert after.keys() == before.keys()
    for name in before:
        assert after[name].keys() == before[name].keys(), name
        for key, value in before[name].items():
            now = after[name][key]
            if isinstance(value, dict):
                assert now.keys() == value.keys(), (name, key)
                assert all(now[k] is value[k] for k in value), (name, key)
            else:
                assert now is value or now == value, (name, key)


@pytest.mark.parametrize("model", MODELS)
def test_names_modules_and_state_dict_are_the_same_under_every_plan(model: str) -> None:
    case = MODELS[model]
    module = seeded(case.build)
    before = insides(module)
    modules = list(module.named_modules(remove_duplicate=False))
    parameters = list(module.named_parameters(remove_duplicate=False))
    buffers = list(module.named_buffers())
    classes = [type(part) for part in module.modules()]
    text = repr(module)
    state = module.state_dict()
    for build in PLANS.values():
        with apply_recompute(module, build(case.chunks)):
            for now, due in (
                (list(module.named_modules(remove_duplicate=False)), modules),
                (list(module.named_parameters(remove_duplicate=False)), parameters),
                (list(module.named_buffers()), buffers),
            ):
                assert [name for name, _ in now] == [name for name, _ in due]
                assert all(one is other for (_, one), (_, other) in zip(now, due, strict=True))
            assert [type(part) for part in module.modules()] == classes
            assert repr(module) == text
            now_state = module.state_dict()
            assert list(now_state) == list(state)
            assert all(now_state[key].data_ptr() == state[key].data_ptr() for key in state)
        assert_untouched(module, before)


@pytest.mark.parametrize("model", ["t5-sdpa", "encoder-pre-norm"])
def test_remove_leaves_nothing_after_training(model: str) -> None:
    case = MODELS[model]
    module = seeded(case.build)
    torch.manual_seed(7)
    batch = case.batch()
    case.loss(module, batch).backward()  # a model's own first-call attributes are made now
    before = insides(module)
    class_forwards = {type(part): type(part).forward for part in module.modules()}
    handle = apply_recompute(module, RecomputePolicy(num_layers=2))
    case.loss(module, batch).backward()
    handle.remove()
    assert_untouched(module, before)
    assert all(cls.forward is forward for cls, forward in class_forwards.items())
    handle.remove()  # a second time does nothing
    assert_untouched(module, before)


@BOTH
def test_an_exception_inside_the_context_leaves_nothing(policy: RecomputePolicy) -> None:
    model = stack()
    before = insides(model)
    with pytest.raises(TypeError), apply_recompute(model, policy):
        model(None)
    assert_untouched(model, before)


def test_a_refused_plan_leaves_nothing() -> None:
    model = stack(4)
    before = insides(model)
    with pytest.raises(ValueError, match="3"):
        apply_recompute(model, PLANS["uniform-1"]([3]))
    assert_untouched(model, before)


def doubled(original: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return 2 * original(x)


def test_a_forward_that_somebody_else_put_on_the_instance_runs_and_comes_back() -> None:
    def build() -> nn.Module:
        model = stack()
        for block in model.blocks:
            block.forward = functools.partial(doubled, block.forward)
        return model

    assert_parity(build, step)
    model = build()
    before = insides(model)
    with apply_recompute(model, PAIRS):
        step(model)
    assert_untouched(model, before)


def zeroed(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


@BOTH
def test_a_deepcopy_runs_on_its_own_weights_and_recomputes(policy: RecomputePolicy) -> None:
    due = observe(seeded(stack), step)
    model = seeded(stack)
    with counted_calls(model.blocks) as count, apply_recompute(model, policy):
        twin = copy.deepcopy(model)
        zeroed(copy.deepcopy(model))(rows())
        assert_same(observe(twin, step), due)
        assert count(twin.blocks) == [2] * 4
        assert count(model.blocks) == [0] * 4
        assert all(parameter.grad is None for parameter in model.parameters())
        assert torch.count_nonzero(zeroed(twin)(rows())) == 0
        assert_same(observe(model, step), due)
    assert_same(observe(copy.deepcopy(zeroed(twin)), square_loss).result, torch.tensor(0.0))


@BOTH
@pytest.mark.parametrize("index", [0, 1])
def test_a_lone_copied_block_runs_on_its_own_weights(policy: RecomputePolicy, index: int) -> None:
    model = seeded(stack)
    plain = copy.deepcopy(model.blocks[index])
    size = len(pickle.dumps(plain))
    with counted_calls([plain]) as count, apply_recompute(model, policy):
        lone = copy.deepcopy(model.blocks[index])
        assert len(pickle.dumps(model.blocks[index])) < 1.5 * size, "the block drags its model along"

    def run(block: nn.Module) -> Tensor:
        y: Tensor = block(rows())
        y.square().sum().backward()
        return y

    for _ in range(2):
        assert_same(observe(lone, run), observe(plain, run))
    assert count([lone]) == [4]
    assert torch.equal(zeroed(lone)(rows()), rows())


def via_pickle(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def via_torch_save(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@BOTH
@pytest.mark.parametrize("through", [via_pickle, via_torch_save, copy.deepcopy])
@pytest.mark.parametrize("moment", ["before the step", "between forward and backward", "after the step"])
def test_copies_at_any_moment_train_as_the_original(
    policy: RecomputePolicy, through: Callable[[nn.Module], nn.Module], moment: str
) -> None:
    due = observe(seeded(stack), step)
    model = seeded(stack)
    with apply_recompute(model, policy):
        loss = square_loss(model) if moment != "before the step" else None
        if loss is not None and moment == "after the step":
            loss.backward()
        twin = through(model)
        if moment == "between forward and backward":
            assert loss is not None
            loss.backward()
        for parameter in twin.parameters():
            parameter.grad = None
        assert_same(observe(twin, step), due)
        assert_same(observe(zeroed(twin), square_loss).result, torch.tensor(0.0))


class CopiesItself(Stack):
    """Copies the model between two of its blocks, as a callback or an EMA in a forward may."""

    def hidden(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            if index % 2 == 1:
                self.__dict__["snapshot"] = copy.deepcopy(self.blocks)
            x = block(x)
        return x


@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_a_copy_made_between_two_blocks_of_a_unit(num_layers: int) -> None:
    def run(model: nn.Module) -> tuple[Tensor, Tensor]:
        loss = step(model)
        y = rows()
        for block in model.snapshot:
            y = block(y)
        y.sum().backward()
        del model.__dict__["snapshot"]
        return loss, y

    assert_parity(
        lambda: CopiesItself(Block() for _ in range(4)), run, RecomputePolicy(num_layers=num_layers), calls=[2] * 4
    )


@BOTH
def test_an_averaged_model_differs_from_the_student(policy: RecomputePolicy) -> None:
    def run(model: nn.Module) -> list[Tensor]:
        averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        for _ in range(2):
            optimizer.zero_grad()
            step(model)
            optimizer.step()
            averaged.update_parameters(model)
        with torch.no_grad():
            student, teacher = model.eval()(rows()), averaged.eval()(rows())
        model.train()
        assert not torch.equal(student, teacher)
        return [student, teacher]

    assert_parity(stack, run, policy, calls=[5] * 4)


@BOTH
def test_functional_call_runs_on_the_given_weights(policy: RecomputePolicy) -> None:
    """The module's own weights are back when backward starts."""

    def run(model: nn.Module) -> list[Tensor]:
        weights = {name: (2 * p.detach()).requires_grad_() for name, p in model.named_parameters()}
        loss = torch.func.functional_call(model, weights, (rows(),)).square().mean()
        return [loss, *torch.autograd.grad(loss, list(weights.values()))]

    never_silent(stack, run, policy, RecomputeError)


@BOTH
def test_functional_call_with_backward_inside(policy: RecomputePolicy) -> None:
    class WithGrad(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = stack()

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            loss = self.model(x).square().mean()
            return loss, *torch.autograd.grad(loss, list(self.model.parameters()))

    def run(model: nn.Module) -> tuple[Tensor, ...]:
        weights = {name: (2 * p.detach()).requires_grad_() for name, p in model.named_parameters()}
        result: tuple[Tensor, ...] = torch.func.functional_call(model, weights, (rows(),))
        return result

    assert_parity(WithGrad, run, policy)


def test_calling_a_blocks_forward_directly_recomputes_too() -> None:
    class Direct(Stack):
        def hidden(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block.forward(x)
            return x

    for policy in (FULL, PAIRS):
        assert_parity(lambda: Direct(Block() for _ in range(4)), step, policy)
