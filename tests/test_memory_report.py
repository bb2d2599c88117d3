"""MemoryReport: exact rows whatever the training looks like, and no trace of it afterwards."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import pytorch_lightning
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning_modules import QUIET, fit, trainer
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.data import DataLoader

from lightning_recompute import cpualloc
from lightning_recompute.callbacks import MemoryReport, ThroughputReport
from lightning_recompute.memory_report import COLUMNS
from lightning_recompute.units import GIB

FLOAT = 4
WIDTH, HIDDEN, ROWS = 16, 48, 6
PARAMETERS = FLOAT * (WIDTH * HIDDEN + HIDDEN + HIDDEN + 1)
ADAM = 2 * PARAMETERS + 4 * FLOAT  # two moments and a step count for each of four tensors
LOSS = 4 + 4 + 4 + 4  # the loss, and Lightning's: divided by accumulate_grad_batches, that number, a copy
Rows = list[dict[str, Any]]


class Perceptron(pl.LightningModule):
    """Two linears around a ReLU; the batch is the input."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.net(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


def batches(*rows: int) -> DataLoader[Any]:
    return DataLoader([torch.randn(count, WIDTH) for count in rows], batch_size=None)


def report(
    module: pl.LightningModule | None = None, train: Any = None, val: Any = None, **options: Any
) -> tuple[MemoryReport, pl.Trainer]:
    memory = MemoryReport()
    options = {"callbacks": [memory], "max_epochs": 1, "fast_dev_run": False, **options}
    run = trainer("auto", **options)
    run.fit(module or Perceptron(), train if train is not None else batches(ROWS, ROWS), val)
    return memory, run


def row(memory: MemoryReport, phase: str, epoch: int = 0) -> dict[str, Any]:
    (found,) = (row for row in memory.rows if row["phase"] == phase and row["epoch"] == epoch and row["rank"] == 0)
    return found


def assert_left_nothing(run: pl.Trainer, memory: MemoryReport) -> None:
    assert memory._recorder is None
    assert not vars(run.strategy).keys() & {"training_step", "backward", "optimizer_step", "validation_step"}
    assert not any(optimizer._optimizer_step_post_hooks for optimizer in run.optimizers)
    assert not _get_current_dispatch_mode_stack()


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


# ---- figures --------------------------------------------------------------------------------------------------------


def test_figures_by_hand_and_the_files_and_scalars_of_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    csv_logger = CSVLogger(tmp_path, name="logs")
    memory, run = report(val=batches(ROWS), max_epochs=2, logger=csv_logger, log_every_n_steps=1)
    # ReLU keeps its output, the square its input
    activations = FLOAT * (ROWS * HIDDEN + ROWS) + LOSS
    for epoch in range(2):
        forward, backward, optimizer, validation = (
            row(memory, phase, epoch) for phase in ("forward", "backward", "optimizer", "validation")
        )
        for line in (forward, backward, optimizer, validation):
            assert line["parameters_bytes"] == PARAMETERS
            assert line["reserved_bytes"] is None
            parts = [line[f"{part}_bytes"] for part in ("gradients", "optimizer", "activations", "temporary")]
            assert line["peak_bytes"] == PARAMETERS + sum(parts)
            assert min(parts) >= 0
        assert forward["activations_bytes"] == activations
        assert forward["gradients_bytes"] == PARAMETERS  # Lightning drops the last step's only after forward
        assert optimizer["gradients_bytes"] == PARAMETERS
        assert optimizer["optimizer_bytes"] == validation["optimizer_bytes"] == ADAM
        assert validation["activations_bytes"] == validation["gradients_bytes"] == 0

    folder = Path(csv_logger.log_dir)
    with (folder / "memory.csv").open() as file:
        written = list(csv.DictReader(file))
    assert tuple(written[0]) == COLUMNS
    assert [line["phase"] for line in written] == ["forward", "backward", "optimizer", "validation"] * 2
    assert [line["peak_bytes"] for line in written] == [str(line["peak_bytes"]) for line in memory.rows]
    assert {line["reserved_bytes"] for line in written} == {""}
    assert not list(folder.glob(".*"))

    with (folder / "metrics.csv").open() as file:
        scalars = [line for line in csv.DictReader(file) if line.get("memory/peak_gib")]
    highest = max(line["peak_bytes"] for line in memory.rows if line["epoch"] == 0)
    assert [line["step"] for line in scalars] == ["1", "3"]
    assert float(scalars[0]["memory/peak_gib"]) == pytest.approx(highest / GIB)
    assert float(scalars[0]["memory/activations_gib"]) == pytest.approx(activations / GIB)
    assert float(scalars[0]["memory/worst_rank"]) == 0
    assert "memory/predicted_peak_gib" not in scalars[0]
    shown = capsys.readouterr().out
    assert "Memory in KiB, epoch 0" in shown
    assert "highest of all epochs" in shown
    assert_left_nothing(run, memory)


def test_epochs_validation_and_sanity_checks_do_not_mix() -> None:
    epochs = [batches(*[200] * 4), batches(*[2] * 4)]

    class Shrinking(Perceptron):
        def train_dataloader(self) -> Any:
            return epochs[self.current_epoch]

    memory = MemoryReport()
    run = trainer(
        "auto", callbacks=[memory], val_check_interval=2, reload_dataloaders_every_n_epochs=1, num_sanity_val_steps=1
    )
    seen: list[int] = []

    class Sizes(pl.Callback):
        def on_sanity_check_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            seen.append(len(memory.rows))

    run.callbacks.append(Sizes())  # type: ignore[attr-defined]
    run.fit(Shrinking(), val_dataloaders=batches(500))
    assert seen == [0]
    for phase in ("forward", "backward"):
        first, second = (row(memory, phase, epoch)["peak_bytes"] for epoch in range(2))
        assert second < first / 3
    assert row(memory, "forward", 1)["activations_bytes"] == FLOAT * (2 * HIDDEN + 2) + LOSS
    # as large in both epochs, and in no other phase
    first, second = (row(memory, "validation", epoch)["peak_bytes"] for epoch in range(2))
    assert first == second
    assert second > 500 * HIDDEN * FLOAT > row(memory, "forward", 1)["peak_bytes"]


def test_two_runs_in_one_process_report_the_same() -> None:
    kept = []
    found: list[Rows] = []
    for _ in range(2):
        torch.manual_seed(0)
        module = Perceptron()
        memory, run = report(module, batches(ROWS, ROWS))
        kept.append((module, run, torch.ones(100_000)))  # what a process did before does not show
        found.append(memory.rows)
    assert found[0] == found[1]
    _, run = kept[0][:2]
    run.fit_loop.max_epochs = 3
    again = (
        run.callbacks[-1]
        if isinstance(run.callbacks[-1], MemoryReport)
        else next(callback for callback in run.callbacks if isinstance(callback, MemoryReport))
    )
    run.fit(kept[0][0], batches(ROWS, ROWS))
    assert [line["epoch"] for line in again.rows if line["phase"] == "forward"] == [0, 1, 2]
    assert row(again, "optimizer", 2) == {**row(again, "optimizer", 0), "epoch": 2}


class Adversarial(Perceptron):
    """Two optimizers in manual optimization, the second with a larger forward."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.other = nn.Linear(WIDTH, 4 * HIDDEN)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        first, second = self.optimizers()
        for optimizer, net in ((first, self.net), (second, self.other)):
            optimizer.zero_grad()
            self.manual_backward(net(batch).square().mean())
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.net.parameters()), torch.optim.SGD(self.other.parameters(), momentum=0.9)


class Scalars(DummyLogger):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, float] = {}

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.found.update(metrics)


def test_manual_optimization_with_two_optimizers() -> None:
    scalars = Scalars()
    memory, run = report(Adversarial(), logger=scalars)
    other = FLOAT * (WIDTH + 1) * 4 * HIDDEN
    assert row(memory, "optimizer")["optimizer_bytes"] == ADAM + other
    assert row(memory, "optimizer")["gradients_bytes"] == PARAMETERS + other
    # the second forward: the linear's output, kept by the square, and its loss
    assert scalars.found["memory/activations_gib"] * GIB == FLOAT * (ROWS * 4 * HIDDEN + 1)
    # the highest backward is the second's: the first net's gradients are there, its own come after the peak
    assert row(memory, "backward")["gradients_bytes"] == PARAMETERS
    assert_left_nothing(run, memory)


def test_accumulation_keeps_gradients_between_batches() -> None:
    memory, _ = report(train=batches(*[ROWS] * 4), accumulate_grad_batches=4)
    assert row(memory, "forward")["gradients_bytes"] == PARAMETERS
    assert row(memory, "forward")["optimizer_bytes"] == 0
    assert row(memory, "optimizer")["optimizer_bytes"] == ADAM


# ---- company --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [True, False])
def test_an_averaged_copy_counts_wherever_the_callback_stands(first: bool) -> None:
    memory, average = MemoryReport(print_table=False), EMAWeightAveraging()
    run = trainer("auto", callbacks=[memory, average] if first else [average, memory], max_epochs=1)
    run.fit(Perceptron(), batches(ROWS, ROWS))
    assert row(memory, "forward")["parameters_bytes"] in (2 * PARAMETERS, 2 * PARAMETERS + 8)  # its own counter


def test_training_is_the_same_to_the_bit_with_reports() -> None:
    options: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    reports = [ThroughputReport(1e12, print_table=False), MemoryReport(print_table=False)]
    fit("auto", callbacks=reports, **options).assert_equals(fit("auto", **options))


def test_validate_alone_is_reported(tmp_path: Path) -> None:
    memory = MemoryReport()
    run = trainer("auto", callbacks=[memory], default_root_dir=tmp_path)
    run.validate(Perceptron(), batches(ROWS), verbose=False)
    assert [line["phase"] for line in memory.rows] == ["validation"]
    assert row(memory, "validation")["parameters_bytes"] == PARAMETERS
    assert (tmp_path / "memory.csv").exists()
    assert_left_nothing(run, memory)


class OtherPerceptron(pytorch_lightning.LightningModule):
    """The perceptron in the other Lightning."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Perceptron().net

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


def test_the_other_lightning(tmp_path: Path) -> None:
    memory, throughput = MemoryReport(), ThroughputReport(warmup_steps=0)
    run = pytorch_lightning.Trainer(
        **{**QUIET, "default_root_dir": tmp_path}, max_epochs=1, callbacks=[memory, throughput]
    )
    run.fit(OtherPerceptron(), batches(ROWS, ROWS))
    assert row(memory, "optimizer")["optimizer_bytes"] == ADAM
    assert throughput.rows[0]["samples_per_second"] > 0
    assert (tmp_path / "memory.csv").exists()
    assert (tmp_path / "throughput.csv").exists()


def test_a_predicted_peak_is_written_beside_the_measured_one() -> None:
    class Planner(pl.Callback):
        predicted_peak_bytes = 12345

    memory = MemoryReport()
    report_options = {"callbacks": [Planner(), memory], "max_epochs": 1}
    trainer("auto", **report_options).fit(Perceptron(), batches(ROWS))
    assert {line["predicted_peak_bytes"] for line in memory.rows} == {12345}


# ---- failures -------------------------------------------------------------------------------------------------------


class Failing(Perceptron):
    """The user's own mistake, in the step after the first."""

    fails = True

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.fails and batch_idx == 1:
            raise ArithmeticError("the user's own mistake")
        return loss


@pytest.mark.parametrize("compiler", [True, False])
def test_an_exception_leaves_nothing(compiler: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiler:
        monkeypatch.setattr(cpualloc, "load", lambda: None)
    module, memory = Failing(), MemoryReport(print_table=False)
    throughput = ThroughputReport(1e12, print_table=False, warmup_steps=3)
    run = trainer("auto", callbacks=[memory, throughput], max_epochs=1)
    with pytest.raises(ArithmeticError, match="own mistake"):
        run.fit(module, batches(ROWS, ROWS, ROWS))
    assert_left_nothing(run, memory)
    assert throughput._run is None
    module.fails = False
    run = trainer("auto", callbacks=[memory, throughput], max_epochs=1)
    run.fit(module, batches(ROWS, ROWS, ROWS))
    assert row(memory, "optimizer")["optimizer_bytes"] == ADAM


def test_without_a_compiler_the_first_steps_say_nearly_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def rows() -> Rows:
        return report(train=batches(*[ROWS] * 4), val=batches(ROWS), max_epochs=2, accumulate_grad_batches=2)[0].rows

    exact = rows()
    monkeypatch.setattr(cpualloc, "load", lambda: None)
    watched = rows()
    assert [(line["epoch"], line["phase"]) for line in watched] == [(line["epoch"], line["phase"]) for line in exact]
    for one, other in zip(watched, exact, strict=True):
        for part in ("parameters", "gradients", "optimizer"):
            assert one[f"{part}_bytes"] == other[f"{part}_bytes"]
        assert abs(one["peak_bytes"] - other["peak_bytes"]) <= 200
    assert "watching the operators" in capsys.readouterr().out
