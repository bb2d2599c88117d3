"""Models around lists of blocks, as people write them; nothing in them is run."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

D = 8


class Called(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class Block(Called):
    def __init__(self, width: int = D) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)


class OtherBlock(Block):
    pass


class Plain(Called):
    """A feed-forward without a norm."""

    def __init__(self, width: int = D) -> None:
        super().__init__()
        self.up = nn.Linear(width, 8 * width)
        self.down = nn.Linear(8 * width, width)


class Attention(Called):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.qkv = nn.Linear(D, 3 * D)
        self.out = nn.Linear(D, D)


class PreNorm(Called):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.inner = inner


class Tower(nn.Module):
    """Has no forward of its own: the model calls `tower.blocks`."""

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Linear(3, D)
        self.blocks = nn.ModuleList(blocks)


class Experts(Called):
    """A transformer block with a mixture of experts, and the experts deeper still in a second one."""

    def __init__(self, expert: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.attention = nn.Linear(D, D)
        self.experts = nn.ModuleList(expert() for _ in range(4))
        self.shared = nn.Module()
        self.shared.local_experts = nn.ModuleList(expert() for _ in range(2))


def model(**parts: nn.Module) -> nn.Module:
    root = nn.Module()
    for name, part in parts.items():
        root.add_module(name, part)
    return root


def blocks(number: int = 3, kind: Callable[[], nn.Module] = Block) -> nn.ModuleList:
    return nn.ModuleList(kind() for _ in range(number))


def chain(number: int = 3, kind: Callable[[], nn.Module] = Block) -> nn.Sequential:
    return nn.Sequential(*(kind() for _ in range(number)))


def head() -> nn.Module:
    return PreNorm(nn.Linear(D, 2))


class Residual(Called):
    def __init__(self) -> None:
        super().__init__()
        self.layer = chain(3, lambda: with_parts(Called(), conv=nn.Conv2d(D, D, 3), norm=nn.BatchNorm2d(D)))


class LowRank(nn.Module):
    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(rows, 2))
        self.b = nn.Parameter(torch.zeros(2, columns))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.a @ self.b


def low_rank(module: nn.Module) -> nn.Module:
    module.requires_grad_(False)
    for part in list(module.modules()):
        if isinstance(part, nn.Linear):
            parametrize.register_parametrization(part, "weight", LowRank(*part.weight.shape))
    return module


def with_parts(module: nn.Module, **parts: nn.Module) -> nn.Module:
    for name, part in parts.items():
        module.add_module(name, part)
    return module


def twice(layers: nn.ModuleList) -> nn.Module:
    return model(model=model(blocks=layers), shortcut=layers)
