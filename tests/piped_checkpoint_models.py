"""What the tests of checkpoints under a pipeline train: every kind of value that a rank may have or not have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from distributed import world_size
from grouped_modules import trainer_of as trainer_on
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_recompute.strategy import RecomputeStrategy

WIDTH, VOCABULARY, LENGTH, ROWS = 6, 11, 5, 4
NUM_BATCHES = 4


class Block(nn.Module):
    """A residual block; all blocks have the same buffer, and objects of their own in the state dict."""

    def __init__(self, shared: Tensor, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.up = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("shared", shared)
        self.register_buffer("load", torch.zeros(()))  # as the bias of a router: written by each forward
        self.num_calls = 0

    def forward(self, hidden: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled():
            self.load = self.load + hidden.detach().abs().mean()
            self.num_calls += 1
        normed = self.norm(hidden.flatten(0, 1)).view_as(hidden)
        return hidden + self.shared * torch.tanh(self.up(normed))

    def get_extra_state(self) -> dict[str, int]:
        return {"num_calls": self.num_calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.num_calls = state["num_calls"]


class Model(pl.LightningModule):
    """Tied weights, frozen weights, buffers, groups of options of which a stage has no parameter, a schedule."""

    def __init__(self, num_blocks: int = 4, batch_norm: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        shared = torch.rand(WIDTH)
        kind = nn.BatchNorm1d if batch_norm else nn.LayerNorm
        self.blocks = nn.ModuleList(Block(shared, kind(WIDTH)) for _ in range(num_blocks))
        self.scale = nn.Parameter(torch.rand(WIDTH), requires_grad=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(()))  # written behind the blocks
        self.lr = 0.05

    def loss(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return F.cross_entropy(self.head(self.norm(hidden * self.scale)).flatten(0, 1), tokens.roll(-1, 1).flatten())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch[0])
        self.seen += 1
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch[0]), sync_dist=True)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch[0]), sync_dist=True)

    def groups(self) -> list[dict[str, Any]]:
        """Options for matrices, for vectors, and for the last norm."""
        last = list(self.norm.parameters())
        rest = [p for p in self.parameters() if p.requires_grad and not any(p is other for other in last)]
        return [
            {"params": [p for p in rest if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},
            {"params": last, "lr": 0.02},
        ]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.groups(), self.lr, eps=1e-2)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.05, 0.04, 0.02], total_steps=20)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Bare(Model):
    """An optimizer that keeps nothing of its parameters."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.groups(), lr=0.05)


class Record(pl.Callback):
    """What each batch begins and ends with."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.rates: list[list[float]] = []

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.rates.append([group["lr"] for group in trainer.optimizers[0].param_groups])

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))


def loader() -> DataLoader[Any]:
    tokens = torch.randint(VOCABULARY, (NUM_BATCHES * ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(tokens), ROWS)


def piped(schedule: str = "1f1b", virtual: int = 1, **options: Any) -> RecomputeStrategy:
    return RecomputeStrategy(
        pipeline_parallel_size=2, schedule=schedule, virtual_pipeline_size=virtual, num_microbatches=2, **options
    )


def trainer_of(folder: Path, strategy: Any, epochs: int, *callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    """A Trainer in float64 that saves what its callbacks do."""
    defaults: dict[str, Any] = {
        "devices": world_size() if isinstance(strategy, RecomputeStrategy) else 1,
        "max_epochs": epochs,
        "num_sanity_val_steps": 0,
    }
    if any(isinstance(callback, pl.callbacks.Checkpoint) for callback in callbacks):
        defaults["enable_checkpointing"] = None  # as Lightning has it
    return trainer_on(folder, strategy, callbacks=list(callbacks), **defaults | options)


def made(kind: type[Model] = Model, seed: int = 0, **options: Any) -> Model:
    """A module in float64, as Lightning makes it only after a checkpoint is loaded."""
    torch.manual_seed(seed)
    return kind(**options).double()


def fit(trainer: pl.Trainer, model: Model, ckpt_path: Path | str | None = None, **options: Any) -> Record:
    """Run a fit; a resumed one begins with other values.

    Args:
        trainer: The trainer.
        model: The module.
        ckpt_path: What it goes on from.
        options: Of `Trainer.fit`.
    """
    record = Record()
    trainer.callbacks.append(record)  # type: ignore[attr-defined]  # Lightning's types do not know it
    trainer.fit(model, loader(), ckpt_path=ckpt_path, **options)
    return record


def differing(found: Any, due: Any, path: str = "") -> list[str]:
    """Where two checkpoints, or parts of them, differ; tensors to the bit, dicts in their order."""
    if isinstance(due, Tensor):
        return [] if isinstance(found, Tensor) and torch.equal(found.cpu(), due.cpu()) else [path]
    if isinstance(due, dict):
        if not isinstance(found, dict) or list(found) != list(due):
            return [f"{path}: {list(found) if isinstance(found, dict) else found} for {list(due)}"]
        return [each for key in due for each in differing(found[key], due[key], f"{path}.{key}")]
    if isinstance(due, list | tuple):
        if len(found) != len(due):
            return [f"{path}: {found} for {due}"]
        return [
            each for key, pair in enumerate(zip(found, due, strict=True)) for each in differing(*pair, f"{path}.{key}")
        ]
    return [] if found == due else [f"{path}: {found} for {due}"]
