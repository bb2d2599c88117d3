"""RecomputeStrategy on one device: a drop-in for Lightning's default, to the bit, with every Lightning feature."""

from __future__ import annotations

import copy
import logging
import pickle
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import callbacks as cb
from lightning_modules import NUM_BLOCKS, Block, Fit, Net, assert_unpatched, calls, fit, loader, samples, trainer
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_recompute.plan import Full, Keep, RecomputePlan, Segment
from lightning_recompute.strategy import RecomputeStrategy


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def both(module: Any = Net, **options: Any) -> tuple[Fit, Fit]:
    """The same fit under Lightning's default and under ours, which has really recomputed."""
    make = {key: options.pop(key) for key in list(options) if key == "callbacks"}
    fits = []
    for strategy in ("auto", RecomputeStrategy()):
        calls.clear()
        fits.append(fit(strategy, module, **options, **{key: value() for key, value in make.items()}))
        fits[-1].module.calls = dict(calls)
    for ours, theirs in [(fits[1].module.calls, fits[0].module.calls)]:
        assert ours["train"] > theirs["train"]
        assert {phase: n for phase, n in ours.items() if phase != "train"} == {
            phase: n for phase, n in theirs.items() if phase != "train"
        }
    fits[1].assert_equals(fits[0])
    assert_unpatched(fits[1].module)
    return fits[0], fits[1]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate_grad_batches": 2},
        {"gradient_clip_val": 0.01},
        {"gradient_clip_val": 0.001, "gradient_clip_algorithm": "value"},
        {"precision": "bf16-mixed"},
        {"precision": "bf16-true"},
        {"precision": "64-true"},
        {"detect_anomaly": True, "profiler": "simple"},
        {"overfit_batches": 2},
        {"limit_train_batches": 2, "limit_val_batches": 0},
        {"val_check_interval": 1, "num_sanity_val_steps": 0},
        {"fast_dev_run": 2},
        {"max_epochs": -1, "max_steps": 4},
    ],
    ids=str,
)
def test_equal_to_the_default_to_the_bit(options: dict[str, Any]) -> None:
    theirs, ours = both(**options)
    assert ours.trainer.global_step == theirs.trainer.global_step > 0


class TwoOptimizers(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            loss = self.loss(batch)
            self.losses.append(loss.item())
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self) -> Any:
        inner = torch.optim.SGD(self.blocks.parameters(), 0.05)
        return inner, torch.optim.Adam([*self.embed.parameters(), *self.head.parameters()], 0.01)


class Lbfgs(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), 0.001, max_iter=4)


class Lora(Net):
    """Everything frozen but a small adapter in each block: the first block's input needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        for block in self.blocks:
            block.down = nn.Sequential(block.down, nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False))
            block.down[1:].requires_grad_(True)


class SkipsABatch(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 1 else loss


class LayersMadeLate(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = None

    def configure_model(self) -> None:
        if self.blocks is None:
            self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))


class EvalModeBlocks(Net):
    """As Hugging Face models arrive: in eval mode, trained all the same."""

    def on_train_start(self) -> None:
        self.blocks.eval()


class Scheduled(Net):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "interval": "step"}]


@pytest.mark.parametrize(
    "module",
    [TwoOptimizers, Lbfgs, Lora, SkipsABatch, LayersMadeLate, EvalModeBlocks, Scheduled],
    ids=lambda m: m.__name__,
)
def test_modules_of_every_kind_train_as_under_the_default(module: type[Net]) -> None:
    both(module)


class Unfreeze(cb.BaseFinetuning):
    def freeze_before_training(self, pl_module: Net) -> None:
        self.freeze(pl_module.blocks[0])

    def finetune_function(self, pl_module: Net, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.blocks[0], optimizer)


@pytest.mark.parametrize(
    "make",
    [
        lambda: [cb.EMAWeightAveraging()],
        lambda: [cb.StochasticWeightAveraging(0.01, swa_epoch_start=1)],
        lambda: [cb.GradientAccumulationScheduler({1: 2}), cb.Timer(), cb.ModelSummary(2)],
        lambda: [Unfreeze()],
        lambda: [cb.LearningRateFinder(num_training_steps=5)],
        lambda: [cb.EarlyStopping("val_loss", mode="max", patience=0), cb.ModelCheckpoint(monitor="val_loss")],
    ],
    ids=["ema", "swa", "scheduler", "finetuning", "lr finder", "early stopping"],
)
def test_callbacks_work_as_under_the_default(make: Any) -> None:
    class WithLoader(Net):
        def __init__(self, batch_size: int = 4) -> None:
            super().__init__()
            self.batch_size = batch_size

        def train_dataloader(self) -> Any:
            return loader(shuffle=True, batch_size=self.batch_size)

    theirs, ours = both(WithLoader, callbacks=make, train=lambda: None, max_epochs=3, enable_checkpointing=True)
    assert ours.trainer.current_epoch == theirs.trainer.current_epoch


def test_loaders_of_other_kinds() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(samples()[:][0].split(1))

    both(train=lambda: DataLoader(Stream(), 3), val=lambda: [loader(), loader()][0])
    # a sampler of one device stays the user's: the same object, neither split nor shuffled
    train = loader()
    run = fit(RecomputeStrategy(), train=lambda: train)
    assert run.trainer.train_dataloader.sampler is train.sampler


@pytest.mark.parametrize("options", [{"max_epochs": 0}, {"limit_train_batches": 0}], ids=str)
def test_a_fit_without_a_step(options: dict[str, Any]) -> None:
    run = fit(RecomputeStrategy(), **options)
    assert not run.losses
    assert_unpatched(run.module)


def test_hooks_come_in_lightnings_order_and_see_gradients() -> None:
    class Order(cb.Callback):
        def __init__(self) -> None:
            self.events: list[str] = []

        def on_before_zero_grad(self, *_: Any) -> None:
            self.events.append("zero_grad")

        def on_before_backward(self, *_: Any) -> None:
            self.events.append("backward")

        def on_after_backward(self, _: Any, module: Net) -> None:
            self.events.append(f"gradients {all(p.grad is not None for p in module.parameters())}")

        def on_before_optimizer_step(self, *_: Any) -> None:
            self.events.append("step")

    orders = [Order(), Order()]
    for order, strategy in zip(orders, ("auto", RecomputeStrategy()), strict=True):
        fit(strategy, callbacks=[order])
    assert orders[1].events == orders[0].events
    assert orders[1].events[:4] == ["zero_grad", "backward", "gradients True", "step"]


def test_evaluation_without_fit_recomputes_nothing() -> None:
    results = []
    for strategy in ("auto", RecomputeStrategy()):
        pl.seed_everything(3, verbose=False)
        module, run = Net(), trainer(strategy)
        calls.clear()
        metrics = [run.validate(module, loader(), verbose=False), run.test(module, loader(), verbose=False)]
        predictions = run.predict(module, loader())
        results.append((metrics, torch.cat(predictions)))
        assert calls["val"] == calls["test"] == 3 * NUM_BLOCKS
        assert_unpatched(module)
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])


def test_two_fits_on_one_trainer() -> None:
    """T22: the second fit makes its own optimizer and patches once."""
    run, modules = trainer(RecomputeStrategy(), max_epochs=1), [Net(), Net()]
    for module in modules:
        calls.clear()
        run.fit_loop.epoch_progress.reset()
        run.fit(module, loader())
        assert calls["train"] == 2 * 3 * NUM_BLOCKS
        assert len(run.strategy.optimizers) == len(run.strategy._lightning_optimizers) == 1
        assert set(run.optimizers[0].param_groups[0]["params"]) == set(module.parameters())
        assert_unpatched(module)


def test_the_module_is_the_users_own_during_and_after_fit() -> None:
    """T14, T15, T16: names, classes and the root's forward stay; copies made while training are whole."""

    class Look(cb.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, module: Net, *_: Any) -> None:
            assert "forward" not in vars(module)
            assert [(name, type(part)) for name, part in module.named_modules()] == before
            assert [name for name, _ in module.named_parameters()] == names
            copied = copy.deepcopy(module)
            with torch.no_grad():
                for parameter in copied.parameters():
                    parameter.zero_()
            assert copied(torch.ones(1, 8)).item() == 0.0
            assert isinstance(pickle.loads(pickle.dumps(module.blocks[0])), Block)

    module = Net()
    before = [(name, type(part)) for name, part in module.named_modules()]
    names = [name for name, _ in module.named_parameters()]
    fit(RecomputeStrategy(), lambda: module, callbacks=[Look()])
    assert_unpatched(module)


def test_the_plan_is_logged_once_and_written_beside_the_logs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plan = RecomputePlan((Segment(0, 2, Full()), Segment(2, 3, Keep())))
    with caplog.at_level(logging.INFO, logger="lightning_recompute"):
        run = fit(RecomputeStrategy(plan=plan), logger=pl.loggers.CSVLogger(tmp_path / "logs"))
    said = [record.message for record in caplog.records if record.name == "lightning_recompute.strategy"]
    assert said == ["Recompute: blocks (3 x Block): blocks 0-1 full, units of 2; block 2 kept"]
    written = Path(run.trainer.logger.log_dir) / "plan.yaml"
    assert RecomputePlan.load(written) == plan
    record = OmegaConf.load(written).record
    assert (record.device, record.processes, record.seed) == ("cpu", 1, 1)
    assert (record.torch, record.block_lists) == (torch.__version__, {"blocks": 3})
    # the file is a plan argument again, and is not written over where it lies
    again = written.rename(tmp_path / "plan.yaml")
    mark = again.stat().st_mtime_ns
    fit(RecomputeStrategy(plan=str(again)))
    assert again.stat().st_mtime_ns == mark


def test_a_remote_log_folder_gets_its_plan() -> None:
    import fsspec

    fit(RecomputeStrategy(), default_root_dir="memory://run")
    text = fsspec.filesystem("memory").cat("memory://run/plan.yaml").decode()
    assert text.count("action: full") == NUM_BLOCKS


def test_fast_dev_run_leaves_no_file_and_none_turns_recompute_off(tmp_path: Path) -> None:
    fit(RecomputeStrategy(), fast_dev_run=True)
    calls.clear()
    run = fit(RecomputeStrategy(granularity=None))
    assert calls["train"] == len(run.losses) * NUM_BLOCKS
    assert list(tmp_path.iterdir()) == []
