"""Freed outputs where it is easy to be wrong: writes, views, casts, several consumers, consumers elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from guards import assert_exact, held_bytes
from ledger import Ledger
from parity import seeded
from torch import Tensor, nn
from torch.nn import functional as F
from toys import WIDTH, Stack, rows, square_loss, stack, step

from lightning_recompute.errors import RecomputeError
from lightning_recompute.plan import Keep, RecomputePlan, Segment, Selective
from lightning_recompute.recompute import apply_recompute

LABELS = [("norm",), ("act",), ("norm", "act")]
each_label = pytest.mark.parametrize("labels", LABELS, ids="+".join)


def freeing(*labels: str, num_blocks: int = 2) -> RecomputePlan:
    return RecomputePlan(tuple(Segment(i, i + 1, Selective(labels)) for i in range(num_blocks)))


class Block(nn.Module):
    """Norm, linears and an activation, put together by a function."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.out = nn.Linear(2 * WIDTH, WIDTH)
        self.act = nn.GELU()
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


# --- legal without recompute: exact with it


def cast_of_transposed(b: Block, x: Tensor) -> Tensor:
    normed = b.norm(x[:, None].expand(4, WIDTH, WIDTH) * torch.linspace(-1, 1, WIDTH)[:, None])
    turned = normed.transpose(1, 2).to(torch.bfloat16, memory_format=torch.contiguous_format)
    return x + (turned @ b.up.weight.bfloat16().T).float().mean(1) @ b.down.weight.T + normed.mean(1)


def cast_of_permuted_strides(b: Block, x: Tensor) -> Tensor:
    normed = b.norm(x[:, None].expand(4, WIDTH, WIDTH) * torch.linspace(-1, 1, WIDTH)[:, None])
    turned = normed.as_strided((4, WIDTH, WIDTH), (1, 4, 4 * WIDTH)).to(torch.float64)
    return x + (turned @ b.up.weight.double().T).float().mean(1) @ b.down.weight.T + normed.mean(1)


def written_before_a_cast(b: Block, x: Tensor) -> Tensor:
    hidden = b.act(b.up(b.norm(x)))
    with torch.no_grad():
        hidden.mul_(2.0)
    with torch.autocast("cpu", torch.bfloat16):
        return x + b.down(hidden).float()


def norm_written_before_a_cast(b: Block, x: Tensor) -> Tensor:
    normed = b.norm(x)
    with torch.no_grad():
        normed.mul_(2.0)
    with torch.autocast("cpu", torch.bfloat16):
        return x + b.down(b.act(b.up(normed))).float()


def product_written(b: Block, x: Tensor) -> Tensor:
    product = F.silu(b.up(b.norm(x))) * b.up(x)
    with torch.no_grad():
        product.add_(1.0)
    return x + b.down(product)


def view_written(b: Block, x: Tensor) -> Tensor:
    hidden = b.act(b.up(b.norm(x)))
    with torch.no_grad():
        hidden.view(-1)[:5].zero_()
    return x + b.down(hidden)


def in_place_activation(b: Block, x: Tensor) -> Tensor:
    return x + b.down(F.leaky_relu(b.up(b.norm(x).relu_()), 0.1, inplace=True))


def slice_assigned(b: Block, x: Tensor) -> Tensor:
    normed = b.norm(x)
    normed[:, 0] = 0.0
    return x + b.down(b.act(b.up(normed)))


def gated_halves(b: Block, x: Tensor) -> Tensor:
    gate, value = b.up(b.norm(x)).chunk(2, -1)
    product = F.gelu(gate, approximate="tanh") * value
    return x + b.down(torch.cat([product, product.flip(-1)], -1))


def glu(b: Block, x: Tensor) -> Tensor:
    return x + F.glu(b.up(b.norm(x)), -1) @ b.up.weight.T @ b.down.weight.T


def glu_of_another_dimension(b: Block, x: Tensor) -> Tensor:
    return x + b.down(F.glu(b.up(b.norm(x)), 0).repeat(2, 1))


def broadcast_product(b: Block, x: Tensor) -> Tensor:
    hidden = b.up(b.norm(x))
    return x + b.down(torch.sigmoid(hidden.mean(1, keepdim=True)) * hidden)


def other_activations(b: Block, x: Tensor) -> Tensor:
    hidden = b.up(b.norm(x))
    return x + b.down(F.mish(hidden)) + b.out(F.hardswish(hidden)) + b.down(F.softplus(hidden, 2.0, 1.0))


def split_and_expanded(b: Block, x: Tensor) -> Tensor:
    left, right = b.norm(x).split((3, WIDTH - 3), 1)
    wide = torch.cat([right, left], 1)[:, None].expand(4, 3, WIDTH)
    return x + b.down(b.act(b.up(wide))).mean(1)


def viewed_under_autocast(b: Block, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        normed = b.norm(x)
        turned = normed.view(2, 2, WIDTH).transpose(0, 1)
        return x + b.down(b.act(b.up(turned))).float().reshape(4, WIDTH) + b.down(b.act(b.up(normed))).float()


def several_consumers(b: Block, x: Tensor) -> Tensor:
    normed = b.norm(x)
    hidden = b.act(b.up(normed))
    return x + b.down(hidden) + b.out(hidden) * torch.tanh(b.down(b.up(normed))) + normed * normed.exp()


def norm_twice(b: Block, x: Tensor) -> Tensor:
    return x + b.down(b.act(b.up(b.norm(x + b.down(b.act(b.up(b.norm(x))))))))


def partly_without_grad(b: Block, x: Tensor) -> Tensor:
    normed = b.norm(x)
    with torch.no_grad():
        target = b.down(b.act(b.up(normed)))
    return x + b.down(b.act(b.up(normed))) * target


def detached_consumer(b: Block, x: Tensor) -> Tensor:
    normed = b.norm(x)
    return x + b.down(b.act(b.up(normed.detach()))) + normed.detach() * b.down(b.act(b.up(x)))


def saved_by_its_own_function(b: Block, x: Tensor) -> Tensor:
    return x + b.down(Cube.apply(b.act(b.up(b.norm(x)))))


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * gradient


LEGAL = [
    *(cast_of_transposed, cast_of_permuted_strides, written_before_a_cast, norm_written_before_a_cast),
    *(product_written, view_written, in_place_activation, slice_assigned, gated_halves, glu),
    *(glu_of_another_dimension, broadcast_product, other_activations, split_and_expanded, viewed_under_autocast),
    *(several_consumers, norm_twice, partly_without_grad, detached_consumer, saved_by_its_own_function),
]


@each_label
@pytest.mark.parametrize("run", LEGAL, ids=lambda f: f.__name__)
def test_exact(run: Callable[[Any, Tensor], Tensor], labels: tuple[str, ...]) -> None:
    assert_exact(lambda: stack(2, lambda: Block(run)), lambda m: [step(m), step(m)], freeing(*labels))


@each_label
@pytest.mark.parametrize("run", [gated_halves, other_activations, glu, several_consumers], ids=lambda f: f.__name__)
@pytest.mark.parametrize("where", ["both", "backward"])
def test_exact_under_autocast_around_backward(
    run: Callable[[Any, Tensor], Tensor], labels: tuple[str, ...], where: str
) -> None:
    def surrounded(model: nn.Module) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=where == "both"):
            loss = square_loss(model)
        with torch.autocast("cpu", torch.bfloat16):
            loss.backward()
        return loss

    assert_exact(lambda: stack(2, lambda: Block(run)), surrounded, freeing(*labels))


# --- illegal without recompute: the same error


def norm_written_after(b: Block, x: Tensor) -> Tensor:
    normed = b.norm(x)
    hidden = b.up(normed)
    with torch.no_grad():
        normed.mul_(2.0)
    return x + b.down(b.act(hidden))


def activation_written_after(b: Block, x: Tensor) -> Tensor:
    hidden = b.act(b.up(b.norm(x)))
    y = b.down(hidden)
    with torch.no_grad():
        hidden.mul_(2.0)
    return x + y


def factor_written_after(b: Block, x: Tensor) -> Tensor:
    factor = F.silu(b.up(b.norm(x)))
    product = factor * b.up(x)
    with torch.no_grad():
        factor.mul_(2.0)
    return x + b.down(product)


@each_label
@pytest.mark.parametrize(
    "run", [norm_written_after, activation_written_after, factor_written_after], ids=lambda f: f.__name__
)
def test_a_write_after_the_consumer(run: Callable[[Any, Tensor], Tensor], labels: tuple[str, ...]) -> None:
    model = seeded(lambda: stack(2, lambda: Block(run)))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step(model)
    with apply_recompute(model, freeing(*labels)), pytest.raises(RecomputeError, match="modified by an inplace oper"):
        step(model)


# --- where nothing has a module of its own


class Inline(nn.Module):
    """One matrix each way, and functions between them."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.randn(4 * WIDTH, WIDTH) / WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(F.gelu(F.linear(x, self.wide)))


def test_activations_of_a_block_without_parts() -> None:
    def build() -> nn.Module:
        return stack(2, Inline)

    assert_exact(build, lambda m: [step(m), step(m)], freeing("act"))
    keep = RecomputePlan((Segment(0, 2, Keep()),))
    assert held_bytes(build, keep) - held_bytes(build, freeing("act")) == 2 * (
        4 * 4 * WIDTH * 4
    )  # rows, columns, bytes


# --- where outputs go


class Returns(nn.Module):
    """Post-norm: the norm's output is what the block returns."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + torch.tanh(self.linear(x)))


class OutsideConsumer(Stack):
    """The head, no block, saves what the last block returns; so does the loss."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.hidden(x)
        return self.head(hidden) * hidden.exp()


def test_consumers_outside_of_the_block() -> None:
    def build() -> nn.Module:
        return OutsideConsumer(Returns() for _ in range(3))

    assert_exact(build, step, freeing("norm", num_blocks=3))
    # between blocks outputs are freed although another block reads them
    assert held_bytes(build, freeing("norm", num_blocks=3)) < held_bytes(build, RecomputePlan((Segment(0, 3, Keep()),)))


class Pair(nn.Module):
    """A norm that returns the sum too, as fused kernels do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return F.rms_norm(total, (WIDTH,), self.weight), total


class FusedRMSNorm(Pair):
    pass


def test_a_norm_that_returns_several_tensors() -> None:
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = FusedRMSNorm(), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            normed, total = self.norm(x, x.tanh())
            return total + self.linear(normed)

    assert_exact(lambda: stack(2, Fused), lambda m: [step(m), step(m)], freeing("norm"))


def test_a_norm_that_returns_its_input() -> None:
    """Switched off, it makes nothing: nothing is freed, and nothing lives on."""

    class OptionalNorm(nn.LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            return x

    def build() -> nn.Module:
        model = stack(2)
        for block in model.blocks:
            block.norm = OptionalNorm(WIDTH)
        return model

    assert_exact(build, lambda m: [step(m), step(m)], freeing("norm"))
    model, x = seeded(build), rows()
    with apply_recompute(model, freeing("norm")), Ledger(model, x) as ledger:
        step(model)
        live = [ledger.live_bytes]
        for _ in range(3):
            model(x).sum()
            live.append(ledger.live_bytes)
    assert live == live[:1] * 4


def test_only_the_gradient_of_a_later_weight() -> None:
    """A second loss whose gradients stop before the freed output, after the first has freed the graph."""

    class Heads(Block):
        def __init__(self) -> None:
            super().__init__(lambda b, x: x)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.act(self.up(self.norm(x)))
            self.aux = self.out(hidden)
            return x + self.down(hidden)

    def run(model: nn.Module) -> Tensor:
        loss = square_loss(model)
        aux = model.blocks[1].aux.square().sum()
        loss.backward()
        aux.backward(inputs=[model.blocks[1].out.weight])
        for block in model.blocks:
            del block.aux
        return loss

    assert_exact(lambda: stack(2, Heads), run, freeing("norm"))
    model = seeded(lambda: stack(2, Heads))
    # an activation is evaluated from what its own node saved, which the first backward has freed
    with apply_recompute(model, freeing("act")), pytest.raises(RecomputeError, match="retain_graph=True"):
        run(model)
