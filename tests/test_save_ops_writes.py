"""Saved operators where it is easy to be wrong: writes that leave no trace, streams, collectives; torch as oracle."""

from __future__ import annotations

import functools
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from guards import assert_exact, plan_of, refusal
from parity import assert_same, observe, seeded
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from toys import WIDTH, Block, square_loss, stack, step

from lightning_recompute.memory import measure_step
from lightning_recompute.plan import RecomputePlan, SaveOps, Segment
from lightning_recompute.recompute import apply_recompute
from lightning_recompute.save_ops import OpSet

aten = torch.ops.aten


def saving(*ops: str, size: int = 1, num_blocks: int = 4) -> RecomputePlan:
    return RecomputePlan(tuple(Segment(i, i + size, SaveOps(ops)) for i in range(0, num_blocks, size)))


# --- writes


class Writes(nn.Module):
    """A product without a bias is a view of the operator's output that does not share its version counter."""

    def __init__(self, write: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(self.norm(x)[:, None]).squeeze(1)
        return x + self.down(F.gelu(self.write(hidden)))


def add(h: Tensor) -> Tensor:
    return h.add_(1.0)


def add_to_view(h: Tensor) -> Tensor:
    h.view(2, 2, -1)[0].mul_(3.0)
    return h


def add_without_grad(h: Tensor) -> Tensor:
    with torch.no_grad():
        h.add_(1.0)
    return h


def assign(h: Tensor) -> Tensor:
    h[:, ::2] = h.detach()[:, 1::2]
    return h


def add_twice(h: Tensor) -> Tensor:
    return h.add_(1.0).mul_(2.0).clamp_(-1, 1)


WRITES: dict[str, Callable[[Tensor], Tensor]] = {
    f.__name__: f for f in (add, add_to_view, add_without_grad, assign, add_twice)
}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("ops", [("matmul",), ("mm",), ("matmul", "gelu", "native_layer_norm")], ids="+".join)
@pytest.mark.parametrize("write", WRITES)
def test_writes_to_a_saved_output(write: str, ops: tuple[str, ...], size: int) -> None:
    build = functools.partial(stack, 4, lambda: Writes(WRITES[write]))
    assert_exact(build, lambda model: [step(model) for _ in range(2)], saving(*ops, size=size))


class Scores(nn.Module):
    """Attention written out: a 4-D product whose result is scaled, masked and biased in place."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.linspace(-1, 1, 16).view(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(1, 4, 2, 3 * WIDTH // 2).transpose(1, 2).chunk(3, -1)
        scores = q @ k.transpose(-2, -1)
        scores /= 2.0
        scores += self.bias
        scores.masked_fill_(~torch.ones(4, 4).tril().bool(), -1e4)
        return x + self.out((F.dropout(scores.softmax(-1), 0.2) @ v).transpose(1, 2).reshape(4, WIDTH))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("ops", [("matmul",), ("bmm", "_softmax")], ids="+".join)
def test_scores_changed_in_place(ops: tuple[str, ...], size: int) -> None:
    assert_exact(lambda: stack(4, Scores), lambda model: [step(model) for _ in range(2)], saving(*ops, size=size))


def test_an_output_written_by_the_caller() -> None:
    """A product that is returned as well as used; whoever gets it may write to it."""

    class Ends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            logits = self.down(x[:, None])[:, 0]
            return x + torch.tanh(self.up(F.gelu(logits + 1.0))), logits

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Ends() for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            total = x.new_zeros(())
            for block in self.blocks:
                x, logits = block(x)
                total = total + logits.mul_(3.0).mean()
            return x + total

    assert_exact(Model, lambda model: [step(model), step(model)], saving("matmul"))


# --- names


@pytest.mark.parametrize("word", ["add_", "relu_", "aten.bernoulli_", "masked_fill_.Scalar"])
def test_an_operator_that_works_in_place_is_refused(word: str) -> None:
    with pytest.raises(ValueError, match=r"works in place, so that it has no output of its own to save; leave it out"):
        OpSet((word,))


def test_operators_that_write_are_never_saved() -> None:
    assert OpSet(("collective",)).word_for(torch.ops.c10d.allreduce_.default) is None
    assert OpSet(("mm",)).word_for(aten.mm.out) is None
    assert OpSet(("mm",)).word_for(aten.mm.default) == "mm"


@pytest.mark.parametrize("word", ["matmull", "atention", "addm"])
def test_an_unknown_name_is_refused_with_the_nearest(word: str) -> None:
    model = stack()
    with pytest.raises(ValueError, match=r"is neither a group nor an aten operator; did you mean"):
        apply_recompute(model, saving(word))
    assert all("forward" not in vars(part) for part in model.modules())


def test_a_name_that_matches_nothing_here_is_an_error_that_lists_what_ran() -> None:
    message = refusal(stack, step, saving("matmul", "native_dropout"))
    assert message is not None
    for word in ("blocks.0", "'native_dropout'", "no such operator ran on this device", "bernoulli_", "gelu"):
        assert word in message


# --- randomness


class Drops(Block):
    def __init__(self, drop: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.inner(self.drop(x)), 0.2)


def attention(x: Tensor) -> Tensor:
    q = x.view(1, 2, 4, 4)
    return F.scaled_dot_product_attention(q, q, q, dropout_p=0.3).reshape(x.shape)


DROPS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[str, ...]]] = {
    "dropout": (lambda x: F.dropout(x, 0.3), ("mul",)),
    "native dropout": (lambda x: torch.native_dropout(x, 0.3, True)[0], ("native_dropout",)),
    "native dropout beside products": (lambda x: torch.native_dropout(x, 0.3, True)[0], ("matmul", "native_dropout")),
    "attention with dropout": (attention, ("matmul",)),
    "bernoulli": (lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)), ("bernoulli",)),
    "own generator": (
        lambda x: x * torch.bernoulli(torch.full_like(x, 0.5), generator=torch.Generator().manual_seed(3)),
        ("matmul",),
    ),
}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("drop", DROPS)
def test_random_operators(drop: str, size: int) -> None:
    function, ops = DROPS[drop]
    assert_exact(
        lambda: stack(4, lambda: Drops(function)), lambda m: [step(m) for _ in range(2)], saving(*ops, size=size)
    )


# --- torch's selective contexts as the oracle


@pytest.mark.parametrize("wanted", ["products", "activations"])
@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_the_same_as_torchs_contexts(wanted: str, dropout: float) -> None:
    """Numbers to the bit; held and peak bytes no more."""
    ops = [aten.mm.default, aten.addmm.default] if wanted == "products" else [aten.gelu.default]
    words = ("addmm",) if wanted == "products" else ("gelu",)
    x = torch.randn(64, WIDTH, requires_grad=True)

    def measured(model: nn.Module) -> Any:
        outcome = observe(model, step)
        model(x).sum().backward()
        x.grad = None
        return outcome, measure_step(lambda: model(x).sum())

    contexts = functools.partial(create_selective_checkpoint_contexts, ops)
    theirs = seeded(lambda: stack(4, lambda: Block(dropout=dropout)))
    for block in theirs.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)
    ours = seeded(lambda: stack(4, lambda: Block(dropout=dropout)))
    with apply_recompute(ours, saving(*words)):
        found, memory = measured(ours)
    due, their_memory = measured(theirs)
    assert_same(found, due)
    assert memory.held_bytes <= their_memory.held_bytes
    assert memory.peak_bytes <= their_memory.peak_bytes + 512


def test_a_second_backward_is_refused_in_every_unit_size() -> None:
    for kind in ("saved", "saved pairs"):
        model = seeded(stack)
        with apply_recompute(model, plan_of(kind)):
            loss = square_loss(model)
            loss.backward(retain_graph=True)
            with pytest.raises(RuntimeError, match=r"blocks\.\d.*second backward over a unit under SaveOps.*Full\(\)"):
                loss.backward()


# --- collectives


@pytest.fixture
def lonely_group() -> Iterator[dist.ProcessGroup]:
    """A group of this process alone."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    store = dist.TCPStore("127.0.0.1", port, 1, is_master=True)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


class Reduces(Block):
    def __init__(self, reduce: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.reduce = reduce

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.reduce(self.up(self.norm(x)))
        return x + self.down(F.gelu(hidden)) * hidden.mean()


def in_place(h: Tensor) -> Tensor:
    """torch.distributed's ordinary functions write to what they are given."""
    total = h.detach() * 2
    dist.all_reduce(total)
    return h * total.mul_(1.5)


def gathered(h: Tensor) -> Tensor:
    return collectives.all_gather_tensor_autograd(h, 0, dist.group.WORLD) * 1.0


def reduced(h: Tensor) -> Tensor:
    return h * collectives.all_reduce(h.detach(), "sum", dist.group.WORLD)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("reduce", [reduced, gathered], ids=lambda f: f.__name__)
def test_collectives_are_saved(reduce: Callable[[Tensor], Tensor], size: int, lonely_group: object) -> None:
    assert_exact(lambda: stack(4, lambda: Reduces(reduce)), step, saving("matmul", "collective", size=size))


def test_collectives_that_write_run_again(lonely_group: object) -> None:
    build = functools.partial(stack, 4, lambda: Reduces(in_place))
    assert_exact(build, step, saving("matmul"))
    message = refusal(build, step, saving("matmul", "collective"))
    assert message is not None
    assert "'collective'" in message
    assert "allreduce_" in message
