"""Units of several blocks: what happens between the blocks, exceptions, skipped blocks, random numbers, contexts."""

from __future__ import annotations

import contextlib
import contextvars
import itertools
from collections.abc import Callable

import pytest
import torch
from parity import FULL, PAIRS, PRECISIONS, assert_parity, assert_same, backward, never_silent, observe, seeded
from plans import PLANS
from torch import Tensor, nn
from torch.nn import functional as F
from toys import Block, Stack, square_loss, stack, step

from lightning_recompute.plan import Full, Keep, RecomputePlan, Segment
from lightning_recompute.policy import RecomputePolicy
from lightning_recompute.recompute import RecomputeError, apply_recompute

THREE = RecomputePolicy(num_layers=3)
UNITS = pytest.mark.parametrize("policy", [FULL, PAIRS, THREE], ids=["unit-1", "unit-2", "unit-3"])
SEVERAL = pytest.mark.parametrize("policy", [PAIRS, THREE], ids=["unit-2", "unit-3"])

# --- glue

Between = Callable[[int, Tensor], Tensor]


def after_first(change: Callable[[Tensor], Tensor]) -> Between:
    """Change the hidden state between block 0 and block 1 only."""
    return lambda index, x: change(x) if index == 0 else x


def under_no_grad(write: Callable[[Tensor], object]) -> Callable[[Tensor], Tensor]:
    def change(x: Tensor) -> Tensor:
        with torch.no_grad():
            write(x)
        return x

    return change


GLUE: dict[str, Callable[[Tensor], Tensor]] = {
    "scaled": lambda x: 2 * x,
    "dropout": lambda x: F.dropout(x, 0.5),
    "added": lambda x: x + 1,
    "view": lambda x: x.view(-1).view_as(x),
    "cast and back": lambda x: x.bfloat16().float(),
}
IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "added in place": lambda x: x.add_(1),
    "multiplied in place": lambda x: x.mul_(2),
    "part of it zeroed": lambda x: (x[:, :2].zero_(), x)[1],
    "relu in place": F.relu_,
    "written under no_grad": under_no_grad(lambda x: x.mul_(2)),
    "dropout in place": lambda x: F.dropout(x, 0.5, inplace=True),
}


@SEVERAL
@pytest.mark.parametrize("glue", [*GLUE, *IN_PLACE])
def test_glue_inside_a_unit_is_refused_by_the_names_of_both_blocks(policy: RecomputePolicy, glue: str) -> None:
    between = after_first({**GLUE, **IN_PLACE}[glue])
    model = stack(4, between=between)
    with apply_recompute(model, policy):
        with pytest.raises(RecomputeError, match=r"blocks\.0.*blocks\.1.*num_layers=1"):
            square_loss(model)
        model.between = None
        assert_same(observe(model, step), observe(_plain_like(model), step))


def _plain_like(model: nn.Module) -> nn.Module:
    twin = stack()
    twin.load_state_dict(model.state_dict())
    return twin


@pytest.mark.parametrize("glue", [*GLUE, *IN_PLACE])
def test_glue_between_two_units_is_nobodys_business(glue: str) -> None:
    between = after_first({**GLUE, **IN_PLACE}[glue])
    assert_parity(lambda: stack(4, between=between), step, FULL)
    one_then_pair = RecomputePlan((Segment(0, 1, Full()), Segment(1, 4, Full())))
    assert_parity(lambda: stack(4, between=between), step, one_then_pair)


@UNITS
def test_a_hidden_state_detached_between_blocks(policy: RecomputePolicy) -> None:
    """The block before gets no gradient; its unit may be refused, or start anew behind the cut."""
    detached = after_first(lambda x: x.detach())
    never_silent(lambda: stack(4, between=detached), step, policy, () if policy is FULL else RecomputeError)


class Keywords(Stack):
    """Hands the hidden state on by keyword, nested in a dict, or as the second positional argument."""

    def __init__(self, how: str, glue: Callable[[Tensor], Tensor] | None) -> None:
        super().__init__(Takes() for _ in range(4))
        self.how = how
        self.glue = glue

    def hidden(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for index, block in enumerate(self.blocks):
            if self.how == "keyword":
                x = block(x=x)
            elif self.how == "nested":
                x = block({"x": x})
            else:
                x = block(None, x)
            if self.glue is not None and index == 0:
                x = self.glue(x)
        return x


class Takes(Block):
    def forward(self, first: object = None, x: Tensor | None = None) -> Tensor:
        hidden = first["x"] if isinstance(first, dict) else x
        return hidden + self.inner(hidden)


@SEVERAL
@pytest.mark.parametrize("how", ["keyword", "nested", "second"])
def test_the_hidden_state_is_followed_however_it_is_passed(policy: RecomputePolicy, how: str) -> None:
    assert_parity(lambda: Keywords(how, None), step, policy)
    for glue in (GLUE["scaled"], IN_PLACE["added in place"]):
        with apply_recompute(model := Keywords(how, glue), policy), pytest.raises(RecomputeError, match="num_layers=1"):
            square_loss(model)


# --- what happens between blocks and does not touch the hidden state


@UNITS
def test_random_numbers_drawn_between_blocks(policy: RecomputePolicy) -> None:
    def draws(index: int, x: Tensor) -> Tensor:
        torch.rand(index + 1)
        return x

    assert_parity(lambda: stack(4, between=draws), step, policy)


@UNITS
def test_the_generator_set_anew_between_blocks(policy: RecomputePolicy) -> None:
    def sets(index: int, x: Tensor) -> Tensor:
        torch.manual_seed(index)
        return x

    assert_parity(lambda: stack(4, between=sets), step, policy)


@UNITS
@pytest.mark.parametrize("kind", ["autocast", "no_grad", "context variable"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_blocks_of_a_unit_under_different_contexts(policy: RecomputePolicy, kind: str, precision: str) -> None:
    calls = {"no_grad": [1, 2, 2, 2]}.get(kind)
    assert_parity(lambda: Contexts(kind), backward(square_loss, precision=precision), policy, calls=calls)


variable: contextvars.ContextVar[float] = contextvars.ContextVar("variable", default=1.0)


class ReadsVariable(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + variable.get() * self.inner(x)


class Contexts(Stack):
    def __init__(self, kind: str) -> None:
        super().__init__(ReadsVariable() for _ in range(4))
        self.kind = kind

    def hidden(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            x = self.embed(x)
        for index, block in enumerate(self.blocks):
            token = variable.set(float(index) if self.kind == "context variable" else 1.0)
            if self.kind == "autocast":
                with torch.autocast("cpu", torch.bfloat16, enabled=index % 2 == 1):
                    x = block(x)
            elif self.kind == "no_grad" and index == 0:
                with torch.no_grad():
                    x = block(x)
            else:
                x = block(x)
            variable.reset(token)
        return x


# --- exceptions


class Fails(Block):
    """Raises in its forward while told to."""

    failing = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        if self.failing:
            raise KeyError("in a block")
        return x + y


@UNITS
@pytest.mark.parametrize("where", ["block 0", "block 1", "block 3", "glue 0", "glue 1", "head", "backward"])
def test_an_exception_anywhere_and_then_a_good_step(policy: RecomputePolicy, where: str) -> None:
    place, index = where.split()[0], int(where[-1]) if where[-1].isdigit() else 0
    armed = [place == "glue"]

    def between(at: int, x: Tensor) -> Tensor:
        if armed[0] and at == index:
            raise KeyError("in the glue")
        return x

    def raises(*_: object) -> None:
        raise KeyError("in a hook")

    due = observe(seeded(lambda: stack(4, Fails)), step)
    model = seeded(lambda: stack(4, Fails, between=between))
    with apply_recompute(model, policy), contextlib.ExitStack() as hooks:
        if place == "block":
            model.blocks[index].failing = True
        elif place == "head":
            hooks.callback(model.head.register_forward_hook(raises).remove)
        elif place == "backward":
            hooks.callback(model.blocks[1].up.weight.register_hook(raises).remove)
        for _ in range(2):
            with pytest.raises(KeyError):
                step(model)
            assert not _hooks_are_pushed()
        model.blocks[index].failing = armed[0] = False
        hooks.close()
        model.zero_grad()
        assert_same(observe(model, step), due)
    model.zero_grad()
    assert_same(observe(model, step), due)


def _hooks_are_pushed() -> bool:
    """Whether somebody left saved-tensor hooks behind on this thread."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


# --- skipped, repeated, reordered blocks


class Order(Stack):
    """Runs its blocks in the order it is given at each step."""

    order: tuple[int, ...] = (0, 1, 2, 3)

    def hidden(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for index in self.order:
            x = self.blocks[index](x)
        return x


def orders(*given: tuple[int, ...]) -> Callable[[nn.Module], list[Tensor]]:
    """A step for each order."""

    def run(model: nn.Module) -> list[Tensor]:
        losses = []
        for order in given:
            model.order = order
            losses.append(step(model))
        return losses

    return run


def build_order() -> nn.Module:
    return Order(Block() for _ in range(4))


SKIPS = [tuple(i for i in range(4) if keep[i]) for keep in itertools.product([True, False], repeat=4)]


@UNITS
@pytest.mark.parametrize("order", SKIPS, ids=str)
def test_skipped_blocks(policy: RecomputePolicy, order: tuple[int, ...]) -> None:
    """LayerDrop: a skipped block, then every block, then the skip again."""
    calls = [2 * (2 * (index in order) + 1) for index in range(4)]
    assert_parity(build_order, orders(order, (0, 1, 2, 3), order), policy, calls=calls)


@UNITS
@pytest.mark.parametrize("first", [(0, 1, 2), (0, 2), (1, 3), (0,)], ids=str)
@pytest.mark.parametrize("second", [(1, 2, 3), (1, 3), (3,), (1,)], ids=str)
def test_other_blocks_skipped_at_each_step(
    policy: RecomputePolicy, first: tuple[int, ...], second: tuple[int, ...]
) -> None:
    never_silent(build_order, orders(first, second, (0, 1, 2, 3)), policy, () if policy is FULL else RecomputeError)


@UNITS
@pytest.mark.parametrize("order", [(3, 2, 1, 0), (0, 0, 1, 1), (0, 1, 0, 1), (1, 0, 3, 2)], ids=str)
def test_repeated_and_reordered_blocks(policy: RecomputePolicy, order: tuple[int, ...]) -> None:
    calls = [4 * order.count(index) for index in range(4)]
    assert_parity(build_order, orders(order, order), policy, calls=calls)


@UNITS
def test_blocks_of_two_units_in_turn(policy: RecomputePolicy) -> None:
    never_silent(build_order, orders((0, 2, 1, 3), (0, 1, 2, 3)), policy, () if policy is FULL else RecomputeError)


# --- layouts


@pytest.mark.parametrize("plan", PLANS)
def test_every_plan_on_ten_blocks(plan: str) -> None:
    assert_parity(lambda: stack(10), step, PLANS[plan]([10]), num_steps=2)


def test_a_last_unit_that_is_shorter() -> None:
    policy = RecomputePolicy(num_layers=7)
    with apply_recompute(stack(24), policy) as handle:
        assert [(s.start, s.stop) for s in handle.plan.segments] == [(0, 7), (7, 14), (14, 21), (21, 24)]
    assert_parity(lambda: stack(24), step, policy)


@pytest.mark.parametrize(
    ("policy", "due"),
    [
        (RecomputePolicy(num_layers=2), [2, 1, 2, 1, 2, 2]),
        (RecomputePolicy(method="block", num_layers=3), [1] * 10),
    ],
    ids=["uniform", "block"],
)
def test_uneven_stages(policy: RecomputePolicy, due: list[int]) -> None:
    """Ten blocks over four stages: no unit spans two stages, block stops at the end of a stage."""
    plan = policy.plan([3, 3, 2, 2])
    assert [s.stop - s.start for s in plan.segments] == due
    assert_parity(lambda: stack(10), step, plan)


def test_a_kept_block_in_the_middle_is_not_run_again() -> None:
    plan = RecomputePlan((Segment(0, 1, Full()), Segment(1, 3, Keep()), Segment(3, 4, Full())))
    assert_parity(stack, step, plan, calls=[2, 1, 1, 2])
