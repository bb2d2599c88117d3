"""When recompute acts: by grad mode and need, not by `training`; frozen parts, adapters, precisions, random numbers."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from parity import FULL, PAIRS, assert_parity, assert_same, counted_calls, never_silent, observe, seeded
from torch import Tensor, nn
from torch.nn import functional as F
from toys import WIDTH, Block, Stack, rows, square_loss, stack, step, with_adapters

from lightning_recompute.plan import Full, RecomputePlan, Segment
from lightning_recompute.policy import RecomputePolicy
from lightning_recompute.recompute import apply_recompute

THREE = RecomputePolicy(num_layers=3)
UNITS = pytest.mark.parametrize("policy", [FULL, PAIRS, THREE], ids=["unit-1", "unit-2", "unit-3"])

# --- forward calls of each block: training 2, anything without a graph 1


def evaluate(model: nn.Module) -> object:
    model.eval()
    with torch.no_grad():
        y = model(rows())
    model.train()
    return y


def infer(model: nn.Module) -> object:
    with torch.inference_mode():
        y = model(rows())
        assert y.is_inference()
        return y.clone()


def train_in_eval_mode(model: nn.Module) -> object:
    model.eval()
    loss = step(model)
    model.train()
    return loss


def gradient_metric(model: nn.Module) -> object:
    """A validation step that needs a gradient, as with inference_mode=False."""
    model.eval()
    with torch.no_grad():
        model(rows())
        with torch.enable_grad():
            x = rows(requires_grad=True)
            (gradient,) = torch.autograd.grad(model(x).sum(), x)
    model.train()
    return gradient


def all_frozen(model: nn.Module) -> object:
    model.requires_grad_(False)
    y = model(rows())
    assert not y.requires_grad
    model.requires_grad_(True)
    return y


def forward_only(model: nn.Module) -> object:
    return model(rows())


@UNITS
@pytest.mark.parametrize(
    ("run", "calls"),
    [
        (step, 2),
        (evaluate, 1),
        (infer, 1),
        (train_in_eval_mode, 2),
        (gradient_metric, 3),
        (all_frozen, 1),
        (forward_only, 1),
    ],
)
def test_forward_calls(policy: RecomputePolicy, run: Callable[[nn.Module], object], calls: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_parity(stack, run, policy, calls=[calls] * 4)


def test_validation_is_the_plain_forward() -> None:
    """Nothing is kept, packed or copied without grad: the block sees the caller's own objects."""
    seen: list[object] = []

    class Sees(Block):
        def forward(self, x: Tensor, more: object = None) -> Tensor:
            seen.extend((x, more))
            return x

    model = stack(2, Sees)
    x, more = rows(), object()
    with apply_recompute(model, FULL), torch.no_grad():
        assert model.blocks[0](x, more) is x
    assert seen[0] is x
    assert seen[1] is more


# --- frozen parts


def freeze_first(model: nn.Module, num_blocks: int) -> nn.Module:
    model.get_submodule("embed").requires_grad_(False)
    for index in range(num_blocks):
        model.get_submodule(f"blocks.{index}").requires_grad_(False)
    return model


@UNITS
@pytest.mark.parametrize("num_frozen", [1, 2, 3, 4])
def test_a_frozen_prefix_is_not_run_again(policy: RecomputePolicy, num_frozen: int) -> None:
    module = assert_parity(
        lambda: freeze_first(stack(), num_frozen), step, policy, calls=[1] * num_frozen + [2] * (4 - num_frozen)
    )
    assert all(p.grad is None for p in module.blocks[:num_frozen].parameters())


@UNITS
def test_a_block_frozen_in_the_middle_passes_gradients_on(policy: RecomputePolicy) -> None:
    def build() -> nn.Module:
        model = stack()
        model.blocks[1].requires_grad_(False)
        return model

    assert_parity(build, step, policy)


@UNITS
def test_blocks_thawed_and_frozen_later(policy: RecomputePolicy) -> None:
    def run(model: nn.Module) -> list[Tensor]:
        losses = [step(model)]
        model.requires_grad_(True)
        losses.append(step(model))
        freeze_first(model, 2)
        losses.append(step(model))
        return losses

    assert_parity(lambda: freeze_first(stack(), 3), run, policy, calls=[1 + 2 + 1] * 2 + [1 + 2 + 2] + [6])


@UNITS
@pytest.mark.parametrize("blocks", [None, [1, 3], [2]], ids=["all", "1 and 3", "2"])
def test_adapters_in_a_frozen_model(policy: RecomputePolicy, blocks: list[int] | None) -> None:
    """Embedding and block weights frozen, as parameter-efficient fine-tuning does; no tensor outside needs grad."""

    def run(model: nn.Module) -> list[Tensor]:
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
        losses = []
        for _ in range(2):
            optimizer.zero_grad()
            losses.append(step(model))
            optimizer.step()
        return losses

    first = 0 if blocks is None else blocks[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module = assert_parity(
            lambda: with_adapters(stack(), blocks), run, policy, calls=[2] * first + [4] * (4 - first)
        )
    for name, parameter in module.named_parameters():
        assert parameter.requires_grad == (name.endswith((".a", ".b")))
        assert (parameter.grad is not None) == parameter.requires_grad


def test_an_input_that_needs_grad_while_all_weights_are_frozen() -> None:
    def run(model: nn.Module) -> list[Tensor]:
        model.requires_grad_(False)
        x = rows(requires_grad=True)
        model(x).sum().backward()
        assert x.grad is not None
        return [x.grad]

    assert_parity(stack, run, FULL)
    assert_parity(stack, run, THREE)


# --- precision


passes: dict[nn.Module, list[tuple[object, ...]]] = {}
"""Autocast states by block, outside the module: a replay leaves nothing on its module."""


class Records(Block):
    """Writes down the autocast state of each pass; its middle switches autocast off."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        passes[self] = []

    def forward(self, x: Tensor) -> Tensor:
        state = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()
        passes[self].append(state)
        y = self.up(self.norm(x))
        with torch.autocast("cpu", enabled=False):
            y = F.gelu(y.float())
        z = self.down(y)
        passes[self][-1] += (z.dtype,)
        return x + z


@UNITS
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("around", ["model", "model and backward", "model without cache"])
def test_both_passes_see_the_same_autocast(policy: RecomputePolicy, dtype: torch.dtype | None, around: str) -> None:
    enabled = dtype is not None
    cache = not enabled or around != "model without cache"

    def run(model: nn.Module) -> Tensor:
        with torch.autocast("cpu", dtype, enabled=enabled, cache_enabled=cache):
            loss = square_loss(model)
            if around == "model and backward":
                loss.backward()
        if around != "model and backward":
            loss.backward()
        return loss

    module = assert_parity(lambda: stack(4, Records), run, policy)
    due = (enabled, dtype or torch.get_autocast_dtype("cpu"), cache, dtype or torch.float32)
    for block in module.blocks:
        assert passes[block][0] == due
        # early stop may end the replay of a unit's last block before its last line
        assert [seen[:3] for seen in passes[block]] == [due[:3]] * 2
    passes.clear()


@UNITS
@pytest.mark.parametrize("kind", ["bf16-true", "fp64", "16-mixed with scaler"])
def test_other_precisions(policy: RecomputePolicy, kind: str) -> None:
    dtype = {"bf16-true": torch.bfloat16, "fp64": torch.float64}.get(kind, torch.float32)

    def run(model: nn.Module) -> Tensor:
        x = rows().to(dtype)
        if kind != "16-mixed with scaler":
            loss: Tensor = model(x).square().mean()
            loss.backward()
            return loss
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with torch.autocast("cpu", torch.float16):
            loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    assert_parity(lambda: stack().to(dtype), run, policy)


# --- random numbers


class Draws(Block):
    """Random numbers in a block by the ways people use."""

    def __init__(self, kind: str) -> None:
        super().__init__(dropout=0.0)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        if self.kind == "dropout":
            return x + F.dropout(y, 0.5, self.training)
        if self.kind == "rand":
            return x + y * torch.rand_like(y) + torch.randn(WIDTH) + torch.bernoulli(torch.full((WIDTH,), 0.5))
        if self.kind == "permutation":
            return x + y[torch.randperm(len(y))]
        if self.kind == "drop path":
            return x if torch.rand(()) < 0.5 else x + y
        if self.kind == "gumbel":
            return x + y * F.gumbel_softmax(y, hard=True)
        q = y.view(1, 2, 2, WIDTH)
        return x + F.scaled_dot_product_attention(q, q, q, dropout_p=0.5).view_as(x)


@UNITS
@pytest.mark.parametrize("kind", ["dropout", "rand", "permutation", "drop path", "gumbel", "sdpa with dropout"])
def test_random_numbers_are_the_same_in_both_passes(policy: RecomputePolicy, kind: str) -> None:
    def run(model: nn.Module) -> list[Tensor]:
        return [step(model) for _ in range(4)]

    if kind == "drop path":  # a block that hands its input on has nothing to recompute
        never_silent(lambda: stack(4, lambda: Draws(kind)), run, policy, ())
    else:
        assert_parity(lambda: stack(4, lambda: Draws(kind)), run, policy, calls=[8] * 4)


@UNITS
def test_dropout_switched_on_after_recompute_was_applied(policy: RecomputePolicy) -> None:
    def switch_on(model: nn.Module) -> None:
        for part in model.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.5

    def run(model: nn.Module) -> list[Tensor]:
        first = step(model)
        switch_on(model)
        return [first, step(model)]

    module = assert_parity(lambda: stack(4, lambda: Block(dropout=0.0)), run, policy, calls=[4] * 4)
    assert not torch.equal(observe(module, step, seed=1).rng, observe(module, evaluate, seed=1).rng)


def test_some_blocks_draw_and_others_do_not() -> None:
    def build() -> nn.Module:
        return Stack(Block(dropout=0.5 * (index % 2)) for index in range(4))

    for segments in ([(0, 4)], [(0, 1), (1, 4)], [(0, 3), (3, 4)]):
        assert_parity(build, step, RecomputePlan(tuple(Segment(a, b, Full()) for a, b in segments)), num_steps=2)


def test_two_models_side_by_side() -> None:
    """A plan is a value: applied to two models it gives the same two results; nothing is shared by them."""
    due = observe(seeded(stack), step)
    one, other = seeded(stack), seeded(stack)
    plan = PAIRS.plan([4])
    with counted_calls(one.blocks) as count, apply_recompute(one, plan) as first, apply_recompute(other, plan):
        assert first.plan is plan or first.plan == plan
        torch.manual_seed(1)
        losses = [square_loss(one)]
        torch.manual_seed(1)
        losses.append(square_loss(other))
        for loss in losses:
            loss.backward()
        assert count(one.blocks) == count(other.blocks) == [2] * 4
    for model in (one, other):
        assert_same({n: p.grad for n, p in model.named_parameters()}, due.gradients)
