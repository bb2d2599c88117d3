"""Small LightningModules as users write them, and one fit of each under any strategy."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

WIDTH = 8
NUM_BLOCKS = 3
NUM_SAMPLES = 10
BATCH_SIZE = 4

calls: Counter[str] = Counter()
"""How often blocks ran, by phase; outside the modules, which a replay leaves as they were."""


class Block(nn.Module):
    """A residual block with dropout."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.LayerNorm, dropout: float = 0.2) -> None:
        super().__init__()
        self.norm = norm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.phase = "train"

    def forward(self, hidden: Tensor) -> Tensor:
        calls[self.phase] += 1
        return hidden + self.dropout(self.down(torch.tanh(self.up(self.norm(hidden)))))


class Net(pl.LightningModule):
    """Blocks between two linears; keeps the loss of every step."""

    def __init__(self, num_blocks: int = NUM_BLOCKS, dropout: float = 0.2, lr: float = 0.05, **block: Any) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout=dropout, **block) for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, 1)
        self.lr = lr
        self.losses: list[float] = []

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.embed(hidden)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        return (self(batch[0]) - batch[0].sum(-1, keepdim=True)).square().mean()

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        self.log("train_loss", loss)
        return loss

    def evaluation_step(self, name: str, batch: Sequence[Tensor]) -> Tensor:
        for block in self.blocks:
            block.phase = name
        loss = self.loss(batch)
        for block in self.blocks:
            block.phase = "train"
        self.log(f"{name}_loss", loss)
        return loss

    def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        self.evaluation_step("val", batch)

    def test_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        self.evaluation_step("test", batch)

    def predict_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), self.lr)


def samples(dtype: torch.dtype = torch.float32) -> TensorDataset:
    """(NUM_SAMPLES, WIDTH), the same ones every time."""
    return TensorDataset(torch.randn(NUM_SAMPLES, WIDTH, generator=torch.Generator().manual_seed(0)).to(dtype))


def loader(shuffle: bool = False, batch_size: int = BATCH_SIZE) -> DataLoader[Any]:
    """Batches of 4, 4 and 2."""
    return DataLoader(samples(), batch_size, shuffle=shuffle)


class SeedSteps(pl.Callback):
    """Lightning's checkpoints hold no RNG state; steps that seed themselves can be resumed to the bit."""

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        torch.manual_seed(trainer.global_step)


@dataclass
class Fit:
    """What a fit left."""

    trainer: pl.Trainer
    module: Net
    losses: list[float] = field(init=False)
    weights: dict[str, Tensor] = field(init=False)
    rng: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.losses = list(self.module.losses)
        self.weights = {name: value.clone() for name, value in self.module.state_dict().items()}
        self.rng = torch.get_rng_state()

    def assert_equals(self, other: Fit) -> None:
        """Losses, weights, buffers and the RNG state are equal to the bit."""
        assert self.losses == other.losses
        assert all(map(math.isfinite, self.losses))
        assert self.losses
        assert self.weights.keys() == other.weights.keys()
        unequal = [name for name, value in self.weights.items() if not torch.equal(value, other.weights[name])]
        assert not unequal
        assert torch.equal(self.rng, other.rng)


QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def trainer(strategy: Any, **options: Any) -> pl.Trainer:
    """A Trainer on one CPU that writes nothing but what is asked for."""
    return pl.Trainer(**{**QUIET, "max_epochs": 2, "strategy": strategy, **options})


def fit(
    strategy: Any,
    module: Callable[[], Any] = Net,
    *,
    seed: int = 1,
    train: Callable[[], Any] = lambda: loader(shuffle=True),
    val: Callable[[], Any] | None = loader,
    ckpt_path: str | None = None,
    **options: Any,
) -> Fit:
    """One seeded fit."""
    pl.seed_everything(seed, verbose=False)
    built = module()
    run = trainer(strategy, **options)
    run.fit(built, train(), val() if val is not None else None, ckpt_path=ckpt_path)
    return Fit(run, getattr(built, "_orig_mod", built))


def assert_unpatched(module: nn.Module) -> None:
    """No module carries a forward, or a hook, of ours."""
    assert not [name for name, part in module.named_modules() if "forward" in vars(part)]
    assert not [name for name, part in module.named_modules() if part._forward_hooks or part._forward_pre_hooks]
