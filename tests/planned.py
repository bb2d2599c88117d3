"""A small model whose step is profiled once, for the tests of what is made from profiles."""

from __future__ import annotations

import functools

import torch
from parity import seeded
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

from lightning_recompute.forecast import Forecast
from lightning_recompute.gpt import GPT
from lightning_recompute.planning import forecast_within, profile_batch
from lightning_recompute.profiling import Profile, everything_kept
from lightning_recompute.stage_options import Prices

PRICES = Prices()
VOCABULARY, LENGTH, ROWS, NUM_BLOCKS = 64, 32, 2, 4


class Language(nn.Module):
    """Our GPT with its loss."""

    def __init__(self, vocabulary: int = VOCABULARY, num_layers: int = NUM_BLOCKS, length: int = LENGTH) -> None:
        super().__init__()
        self.net = GPT(
            vocab_size=vocabulary, num_layers=num_layers, num_heads=2, hidden_size=32, max_length=length, dropout=0.1
        )

    def forward(self, ids: Tensor) -> Tensor:
        return F.cross_entropy(self.net(ids).flatten(0, 1), ids.flatten())


def ids(vocabulary: int = VOCABULARY, length: int = LENGTH) -> Tensor:
    return torch.randint(vocabulary, (ROWS, length), generator=torch.Generator().manual_seed(0))


def language() -> Language:
    module = seeded(Language)
    assert isinstance(module, Language)
    return module


@functools.cache
def profile() -> Profile:
    """Of `language()` under SGD."""
    module = language()
    return profile_batch(module, ids(), optimizers=[SGD(module.parameters(), lr=0.1)])


@functools.cache
def most() -> int:
    """The peak without recompute."""
    return profile().peak_bytes(everything_kept(profile()))


@functools.cache
def unlimited() -> Forecast:
    """The forecast within a budget for everything."""
    return forecast_within(profile(), most(), prices=PRICES)
