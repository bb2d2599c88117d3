"""A Lightning strategy of one process that saves checkpoint folders: what RecomputeStrategy does when it shards."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

from lightning_recompute.checkpoint_loading import load_module_state, load_optimizer_states, read_checkpoint
from lightning_recompute.folders import set_aside
from lightning_recompute.optimizer_names import named_state
from lightning_recompute.sharded_checkpoint import ShardedSaver


class FolderStrategy(SingleDeviceStrategy):
    def __init__(self, asynchronous: bool = False, after_setup: bool = False, single: bool = False) -> None:
        super().__init__(device="cpu")
        self.asynchronous = asynchronous
        self.after_setup = after_setup
        self.single = single
        self.saver = ShardedSaver()

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return self.after_setup

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        assert self.lightning_module is not None
        return named_state(optimizer, self.lightning_module)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if self.single:
            with set_aside(filepath):
                super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        self.saver.save(filepath, checkpoint, asynchronous=self.asynchronous)

    def remove_checkpoint(self, filepath: Any) -> None:
        self.saver.remove(filepath)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        self.saver.wait()
        return read_checkpoint(checkpoint_path, weights_only=weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        load_module_state(self.lightning_module, checkpoint["state_dict"], strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        module = self.lightning_module
        assert module is not None
        load_optimizer_states(
            module, self.optimizers, checkpoint["optimizer_states"], strict=getattr(module, "strict_loading", True)
        )

    def teardown(self) -> None:
        self.saver.close()
        super().teardown()


class Model(pl.LightningModule):
    """Tied weights, frozen weights, two groups of options, a scheduler, hyper-parameters."""

    def __init__(self, width: int = 4, lr: float = 0.05, momentum: float | None = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Embedding(6, width)
        self.hidden = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 6, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.lr = lr

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        (tokens,) = batch
        hidden = self.norm(self.hidden(self.embed(tokens)).flatten(0, 1))
        loss = nn.functional.cross_entropy(self.head(hidden), tokens.flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        momentum = self.hparams["momentum"]
        optimizer: Optimizer
        if momentum is not None:
            optimizer = torch.optim.SGD(trained, lr=self.lr, momentum=momentum)
        else:
            groups = [{"params": trained[:1], "weight_decay": 0.1}, {"params": trained[1:]}]
            optimizer = torch.optim.AdamW(groups, lr=self.lr)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)}

    def train_dataloader(self) -> DataLoader[Any]:
        tokens = torch.randint(0, 6, (16, 5), generator=torch.Generator().manual_seed(3))
        return DataLoader(TensorDataset(tokens), batch_size=4)


def trainer(folder: Path, epochs: int, strategy: Any = "auto", callbacks: Any = (), **arguments: Any) -> pl.Trainer:
    if not callbacks:
        callbacks = [ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)]
    return pl.Trainer(
        default_root_dir=folder,
        max_epochs=epochs,
        accelerator="cpu",
        strategy=strategy,
        callbacks=list(callbacks),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **arguments,
    )


def fit(folder: Path, epochs: int, strategy: Any = "auto", ckpt_path: Any = None, **arguments: Any) -> Model:
    """A model trained for some epochs, from a seed or a checkpoint."""
    weights_only = arguments.pop("weights_only", None)
    torch.manual_seed(1 if ckpt_path is None else 2)
    model = arguments.pop("model", None) or Model()
    trainer(folder, epochs, strategy, **arguments).fit(model, ckpt_path=ckpt_path, weights_only=weights_only)
    return model


def same(first: nn.Module, second: nn.Module) -> bool:
    """Whether two modules have the same values, to the bit."""
    mine, other = first.state_dict(), second.state_dict()
    return mine.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in mine.items())
