"""Models for unit inputs that are kept in parts, and checks of single tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from parity import assert_same
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_recompute.plan import Keep, RecomputePlan, Segment
from lightning_recompute.replicas import MAX_TRIES
from lightning_recompute.shard_placement import ShardPlacement

ROWS, LENGTH, WIDTH = 3, 5, 7
MANY = 63


def on_shards(plan: RecomputePlan) -> RecomputePlan:
    """The same plan with unit inputs in parts."""
    return RecomputePlan(
        tuple(
            Segment(
                s.start,
                s.stop,
                s.action if isinstance(s.action, Keep) else dataclasses.replace(s.action, inputs="shard"),
            )
            for s in plan.segments
        )
    )


class OddBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.dropout = nn.Dropout(0.25)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        y: Tensor = self.down(self.dropout(F.gelu(self.up(self.norm(x)))))
        return x + y if scale is None else x + y * scale


class Odd(nn.Module):
    """Its hidden states have an odd number of elements, and every block is given the same mask beside them."""

    def __init__(self, num_blocks: int, rows: int = ROWS) -> None:
        super().__init__()
        self.num_rows = rows
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(OddBlock() for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        scale = torch.linspace(1, 2, WIDTH * LENGTH).view(LENGTH, WIDTH)
        for block in self.blocks:
            x = block(x, scale=scale)
        return x

    @staticmethod
    def rows(seed: int = 3, num: int = ROWS) -> Tensor:
        return torch.randn(num, LENGTH, WIDTH, generator=torch.Generator().manual_seed(seed))

    @staticmethod
    def loss(model: nn.Module, seed: int = 3) -> Tensor:
        num: Any = model.num_rows
        loss: Tensor = model(Odd.rows(seed, num)).square().mean()
        return loss

    @staticmethod
    def step(model: nn.Module) -> Tensor:
        loss = Odd.loss(model)
        loss.backward()
        return loss


class Slicing(nn.Module):
    """Gives each block a tensor of its own beside the hidden state."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(OddBlock() for _ in range(num_blocks))

    @staticmethod
    def step(model: Any) -> Tensor:
        x = Odd.rows()
        for index, block in enumerate(model.blocks):
            x = block(x, scale=Odd.rows(index).double().float().sigmoid())
        loss = x.square().mean()
        loss.backward()
        return loss


class Skipping(Odd):
    """Runs some of its blocks."""

    @staticmethod
    def loss(model: Any, blocks: Iterable[int] = range(6)) -> Tensor:  # type: ignore[override]
        x = model.embed(Odd.rows())
        for index in blocks:
            x = model.blocks[index](x)
        loss: Tensor = x.square().mean()
        return loss


# ---- heads over the ranks


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


class Attention(nn.Module):
    """Two heads of this rank; the output is summed over the ranks.

    Args:
        group: The ranks.
        zero: Queries, keys and values are zeros at first.
    """

    def __init__(self, group: dist.ProcessGroup, zero: bool) -> None:
        super().__init__()
        self.group = group
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(8, 8) for _ in range(3))
        self.out_proj = nn.Linear(8, 8, bias=False)
        own = torch.Generator().manual_seed(group.rank())
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=own) / 4)
                if zero and "v_proj" in name:
                    parameter.zero_()

    def forward(self, x: Tensor) -> Tensor:
        x = _Enter.apply(x, self.group)  # type: ignore[no-untyped-call]
        heads = (
            project(x).unflatten(-1, (2, 4)).transpose(1, 2) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k, v = heads
        mixed = ((q @ k.transpose(-2, -1)).softmax(-1) @ v).transpose(1, 2).flatten(2)
        out: Tensor = _Leave.apply(self.out_proj(mixed), self.group)  # type: ignore[no-untyped-call]
        return out


class ParallelBlock(nn.Module):
    def __init__(self, group: dist.ProcessGroup, zero: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.attention = Attention(group, zero)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.attention(self.norm(x))
        return x + y


class Parallel(nn.Module):
    """Attention blocks over a tensor-parallel group."""

    def __init__(self, num_blocks: int, group: dist.ProcessGroup, zero: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(ParallelBlock(group, zero) for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x

    @staticmethod
    def train(model: nn.Module) -> Tensor:
        """A step that moves the weights, so that what begins as zeros is none in the next."""
        x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(3))
        loss: Tensor = model(x).square().mean()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
        return loss


# ---- single tensors


def check_tensors(group: dist.ProcessGroup) -> dict[str, Any]:
    """What comes back of each kind of tensor, and what of it is held as a part."""
    torch.manual_seed(5)
    x = torch.randn(4, 9, 6)
    weight = nn.Parameter(torch.randn(8, 8))
    tensors = {
        "odd": torch.randn(3, 5, 7),
        "fp64": torch.randn(7, 11, dtype=torch.float64),
        "bf16": torch.randn(7, 13).bfloat16(),
        "fp8": torch.randn(64).to(torch.float8_e4m3fn),
        "transposed": x.transpose(0, 2),
        "offset": torch.randn(401)[1:].view(20, 20),
        "bf16 offset": torch.randn(401).bfloat16()[1:],
        "needs grad": torch.randn(5, 7, requires_grad=True),
        "large": torch.randn(3, 8191),
        "complex": torch.randn(32, dtype=torch.complex64),
        "integers": torch.arange(64),
        "bools": torch.ones(64, dtype=torch.bool),
        "scalar": torch.tensor(3.0),
        "small": torch.randn(5),
        "empty": torch.empty(0, 4),
        "parameter": weight,
        "view of a parameter": weight.t(),
        "with gaps": torch.randn(8, 20)[:, ::2],
        "expanded": torch.randn(1, 20).expand(20, 20),
        "of this rank": torch.randn(40) + group.rank(),
        "almost constant": torch.ones(40).index_fill(0, torch.tensor([39]), 2.0),
    }
    placement: Any = ShardPlacement(group)
    found: dict[str, Any] = {}
    for name, tensor in tensors.items():
        known: dict[Any, Any] = {}
        before = tensor.detach().clone()
        for _ in range(2):
            saved = placement.save([tensor], name, known)
            back = saved.tensors()[0]
        if saved.slots:
            assert back.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
            assert (back.stride(), back.dtype) == (tensor.stride(), tensor.dtype)
        assert_same(back.detach(), before, name)
        found[name] = bool(saved.slots)
    # zeros at first, as behind a layer that begins with zeros: nothing is known before there are numbers
    for name, num_zeros in {"soon no zeros": MAX_TRIES - 1, "zeros for long": MAX_TRIES}.items():
        known = {}
        kinds = [torch.zeros(40) for _ in range(num_zeros)] + [torch.randn(40)]
        held = [placement.save([tensor], name, known) for tensor in kinds]
        assert not any(saved.slots for saved in held[:-1])
        found[name] = bool(held[-1].slots)
    return found
