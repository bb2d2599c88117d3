"""Small hand-written models that provoke one thing each; all at module level, so they can be pickled."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH = 8
ROWS = 4


class Block(nn.Module):
    """norm - linear - GELU - dropout - linear, added to its input."""

    def __init__(self, width: int = WIDTH, dropout: float = 0.25) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.dropout = nn.Dropout(dropout)
        self.down = nn.Linear(2 * width, width)

    def inner(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.dropout(F.gelu(self.up(self.norm(x)))))
        return y

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Attention(nn.Module):
    """Attention of two heads whose core is functions."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (project(x).view(1, 2, ROWS, -1) for project in (self.q_proj, self.k_proj, self.v_proj))
        return ((q @ k.transpose(-2, -1)).softmax(-1) @ v).reshape(x.shape)


class Stack(nn.Module):
    """embed - blocks - head, with a seam between two blocks.

    Args:
        blocks: The blocks, run in this order.
        between: Called as between(index, hidden) after each block; what it returns goes on.
    """

    def __init__(self, blocks: Iterable[nn.Module], between: Callable[[int, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, WIDTH)
        self.between = between

    def hidden(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for index, block in enumerate(self.blocks):
            x = block(x)
            if self.between is not None:
                x = self.between(index, x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.hidden(x))
        return y


def stack(
    num_blocks: int = 4,
    block: Callable[[], nn.Module] = Block,
    between: Callable[[int, Tensor], Tensor] | None = None,
) -> Stack:
    return Stack((block() for _ in range(num_blocks)), between)


def rows(requires_grad: bool = False) -> Tensor:
    """(ROWS, WIDTH) numbers that do not depend on the global RNG and do not move it."""
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(3))
    return x.requires_grad_(requires_grad)


def square_loss(module: nn.Module) -> Tensor:
    loss: Tensor = module(rows()).square().mean()
    return loss


def step(module: nn.Module) -> Tensor:
    """The ordinary step: loss, backward."""
    loss = square_loss(module)
    loss.backward()
    return loss.detach()


class Adapted(nn.Module):
    """A frozen linear with a trainable rank-2 adapter beside it, as LoRA adds to each projection."""

    def __init__(self, frozen: nn.Linear) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, frozen.in_features) * 0.1)
        self.b = nn.Parameter(torch.randn(frozen.out_features, 2) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.frozen(x) + x @ self.a.T @ self.b.T
        return y


def with_adapters(model: Stack, blocks: Sequence[int] | None = None) -> Stack:
    """Freeze a stack, embedding included, and put adapters into the linears of some blocks (None: all)."""
    model.requires_grad_(False)
    for index, block in enumerate(model.blocks):
        if isinstance(block, Block) and (blocks is None or index in blocks):
            block.up, block.down = Adapted(block.up), Adapted(block.down)
    return model
