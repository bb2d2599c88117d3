"""`inspect` on a user's model, data and first batch, through Lightning, without training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from lightning_modules import Net, loader
from torch import Tensor, nn

from lightning_recompute.data import TextDataModule
from lightning_recompute.first_step import ON_ONE_DEVICE
from lightning_recompute.gpt import GPT
from lightning_recompute.inspect_command import SUBCOMMAND, InspectingTrainer, inspect_first_batch
from lightning_recompute.inspection import FULL, inspect_blocks
from lightning_recompute.recompute_callback import Recompute


class CLI(LightningCLI):
    """Wired as a command line wires it."""

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        return {**LightningCLI.subcommands(), **SUBCOMMAND}

    def instantiate_trainer(self, **options: Any) -> pl.Trainer:
        return super().instantiate_trainer(**(ON_ONE_DEVICE if self.subcommand == "inspect" else {}), **options)


def trainer(**options: Any) -> pl.Trainer:
    return pl.Trainer(**{**ON_ONE_DEVICE, "accelerator": "cpu", "max_epochs": 1, **options})


def test_from_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 100)
    config = tmp_path / "config.yaml"
    config.write_text(
        """
seed_everything: 1
model: {num_layers: 2, hidden_size: 64, num_heads: 2, max_length: 16}
data: {path: text.txt, length: 16, batch_size: 2}
trainer: {accelerator: cpu, devices: 2, strategy: ddp, precision: bf16-mixed, max_epochs: 1, logger: true}
ckpt_path: null
"""
    )
    before = {path.name for path in tmp_path.iterdir()}
    arguments = ["inspect", "--config", str(config), "--labels=[core_attn,norm,act]", "--seconds=false"]
    monkeypatch.setattr("sys.argv", ["program", *arguments])
    CLI(GPT, TextDataModule, trainer_class=InspectingTrainer)
    printed = capsys.readouterr().out
    for part in (
        "2 x TransformerBlock: blocks.0 .. blocks.1",
        "attn_norm, mlp_norm",
        "fused attention keeps no scores",
    ):
        assert part in printed
    assert {path.name for path in tmp_path.iterdir()} == before


class Stepping(Net):
    """Counts what a user's module does; takes the batch alone."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.done: list[str] = []

    def training_step(self, batch: Any) -> Tensor:  # type: ignore[override]
        self.log("before", 1.0)
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.done.append("batch start")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.done.append("optimizer step")


def test_nothing_is_trained() -> None:
    module = Stepping()
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    run = trainer()
    inspection = inspect_first_batch(run, module, loader(), labels=["norm", FULL], seconds=False)
    assert inspection.rows[0].num_calls == 3
    assert inspection.saved_bytes(FULL) > 0
    assert module.done == ["batch start"]
    assert module.losses == []
    assert run.global_step == 0
    assert all(torch.equal(value, weights[name]) for name, value in module.state_dict().items())
    assert not {"training_step", "log", "log_dict", "forward"} & vars(module).keys()
    assert all(parameter.grad is None for parameter in module.parameters())
    # and it can be trained afterwards
    trainer(limit_val_batches=0).fit(module, loader())
    assert len(module.losses) == 3


class Taking(Net):
    """Two optimizers by hand, which take turns by switching gradients off."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        first, _ = self.optimizers()
        self.toggle_optimizer(first)
        self.manual_backward(self.loss(batch))
        raise AssertionError("the first backward ends it")

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), 0.1) for part in (self.blocks, self.head)]


def test_manual_optimization() -> None:
    module = Taking()
    inspection = inspect_first_batch(trainer(), module, loader(), labels=["norm"], seconds=False)
    assert inspection.rows[0].num_calls == 3
    assert all(parameter.requires_grad for parameter in module.parameters())


def test_the_figures_are_those_of_the_precision() -> None:
    module = Net(dropout=0.0)
    batch = next(iter(loader()))
    plain = inspect_blocks(module, lambda: module.loss(batch), labels=[FULL], seconds=False)
    double = inspect_first_batch(trainer(precision="64-true"), Net(dropout=0.0), loader(), labels=[FULL], seconds=False)
    assert double.kept_bytes == 2 * plain.kept_bytes
    assert double.saved_bytes(FULL) == 2 * plain.saved_bytes(FULL)


def test_callbacks_are_left_out_and_come_back() -> None:
    callback = Recompute(granularity="selective", modules=["norm"])
    run = trainer(callbacks=[callback])
    inspect_first_batch(run, Net(), loader(), labels=["norm"], seconds=False)
    assert callback in vars(run)["callbacks"]
    assert callback.active_plan is None


def broken() -> pl.LightningModule:
    class Broken(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            raise KeyError("label of the user's batch")

    return Broken()


@pytest.mark.parametrize(
    ("options", "module", "error", "words"),
    [
        ({"devices": 2, "strategy": "ddp"}, Net, ValueError, "in one process, the Trainer has 2"),
        ({"limit_train_batches": 0}, Net, ValueError, "training ended before its first batch"),
        ({}, broken, KeyError, "label of the user's batch"),
    ],
)
def test_what_is_refused(
    options: dict[str, Any], module: Callable[[], pl.LightningModule], error: type[Exception], words: str
) -> None:
    built = module()
    with pytest.raises(error, match=words):
        inspect_first_batch(trainer(**options), built, loader(), seconds=False)
    assert isinstance(built, nn.Module)
    assert "training_step" not in vars(built)
