"""ThroughputReport under a clock that we move: rates and FLOPs by hand, whatever the training looks like."""

from __future__ import annotations

import csv
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning_modules import Net, trainer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_recompute.callbacks import ThroughputReport
from lightning_recompute.strategy import RecomputeStrategy
from lightning_recompute.throughput_report import COLUMNS

WIDTH, HIDDEN = 16, 48
FORWARD = 2 * (WIDTH * HIDDEN + HIDDEN * 1)  # FLOPs of a sample
BACKWARD = FORWARD + 2 * HIDDEN * 1  # the first layer's input needs no gradient
PEAK = 1e6


class Clock:
    """Stands still unless moved."""

    def __init__(self) -> None:
        self.time = 1000.0

    def __call__(self) -> float:
        return self.time


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Clock]:
    monkeypatch.chdir(tmp_path)
    clock = Clock()
    with monkeypatch.context() as patch:
        patch.setattr(time, "perf_counter", clock)
        yield clock


class Timed(pl.LightningModule):
    """Takes a second for each training batch and ten for each validation."""

    def __init__(self, clock: Clock, recomputes: bool = False) -> None:
        super().__init__()
        self.clock = clock
        self.net = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))
        self.recomputes = recomputes

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.net[:2], x, use_reentrant=False) if self.recomputes else self.net[:2](x)
        return self.net[2](hidden)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.clock.time += 1
        x = batch[0] if isinstance(batch, list) else batch
        return self(x).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.clock.time += 10
        self(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)


def batches(*rows: int) -> DataLoader[Any]:
    return DataLoader([torch.randn(count, WIDTH) for count in rows], batch_size=None)


def run(
    report: ThroughputReport, module: pl.LightningModule, train: Any = None, val: Any = None, **options: Any
) -> pl.Trainer:
    options = {"callbacks": [report], "max_epochs": 2, "strategy": "auto", **options}
    fitted = trainer(options.pop("strategy"), **options)
    fitted.fit(module, batches(4, 4, 4, 2) if train is None else train, val)
    return fitted


# ---- rates ----------------------------------------------------------------------------------------------------------


def test_validation_accumulation_and_uneven_batches(clock: Clock, tmp_path: Path) -> None:
    report = ThroughputReport(PEAK, warmup_steps=2)
    csv_logger = CSVLogger(tmp_path, name="logs")
    train = DataLoader(torch.randn(158, WIDTH), batch_size=4)
    assert len(train) == 40
    run(
        report,
        Timed(clock),
        train,
        batches(4),
        max_epochs=6,
        accumulate_grad_batches=4,
        val_check_interval=10,
        log_every_n_steps=1,
        logger=csv_logger,
    )
    assert len(report.rows) == 6
    first, *others = report.rows
    assert first["samples_per_second"] == pytest.approx((158 - 2 * 4) / 38)  # without two steps of warm-up
    for row in others:
        assert row["samples_per_second"] == pytest.approx(158 / 40)
        assert row["tokens_per_second"] is None
        assert (row["step_seconds_median"], row["step_seconds_p95"]) == (1, 1)
        assert row["mfu"] == row["hfu"] == pytest.approx(158 / 40 * (FORWARD + BACKWARD) / PEAK)

    folder = Path(csv_logger.log_dir)
    with (folder / "throughput.csv").open() as file:
        written = list(csv.DictReader(file))
    assert tuple(written[0]) == COLUMNS
    assert [float(row["samples_per_second"]) for row in written] == [row["samples_per_second"] for row in report.rows]
    with (folder / "metrics.csv").open() as file:
        scalars = [row for row in csv.DictReader(file) if row.get("throughput/samples_per_second")]
    assert len(scalars) == 6
    assert float(scalars[-1]["throughput/step_seconds"]) == 1
    assert float(scalars[-1]["throughput/mfu"]) == pytest.approx(written[-1]["mfu"] and float(written[-1]["mfu"]))
    assert "throughput/tokens_per_second" not in scalars[-1]


def test_waiting_for_data_is_in_the_rate_and_not_in_the_step(clock: Clock) -> None:
    class Slow(torch.utils.data.IterableDataset[Tensor]):
        def __iter__(self) -> Iterator[Tensor]:
            for _ in range(5):
                clock.time += 3
                yield torch.randn(8, WIDTH)

    report = ThroughputReport(PEAK, warmup_steps=1)
    run(report, Timed(clock), DataLoader(Slow(), batch_size=None))
    # in the first epoch one batch more was fetched before the measured steps
    assert report.rows[1]["samples_per_second"] == pytest.approx(5 * 8 / (5 * 3 + 5))
    assert [row["step_seconds_median"] for row in report.rows] == [1, 1]


def test_median_and_p95_of_steps(clock: Clock) -> None:
    class Stutters(Timed):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.clock.time += 20.0 if batch_idx == 7 else batch_idx * 0.1
            return super().training_step(batch, batch_idx)

    report = ThroughputReport(warmup_steps=0)
    run(report, Stutters(clock), batches(*[4] * 11), max_epochs=1)
    assert report.rows[0]["step_seconds_median"] == pytest.approx(1.5)
    assert 2 < report.rows[0]["step_seconds_p95"] < 21


@pytest.mark.parametrize(
    ("options", "batch", "samples", "tokens"),
    [
        ({}, torch.randn(4, WIDTH), 4, None),
        ({"tokens_per_sample": 100}, torch.randn(4, WIDTH), 4, 400),
        ({"batch_size": 3, "tokens_per_sample": 7}, torch.randn(4, WIDTH), 3, 21),
        ({"batch_size": lambda batch: 2 * len(batch)}, torch.randn(4, WIDTH), 8, None),
        ({"num_tokens": lambda batch: 11}, torch.randn(4, WIDTH), 4, 11),
        ({}, [torch.randn(4, WIDTH), torch.zeros(4)], 4, None),
    ],
)
def test_sizes_of_batches(
    options: dict[str, Any], batch: Any, samples: float, tokens: float | None, clock: Clock
) -> None:
    report = ThroughputReport(warmup_steps=1, **options)
    run(report, Timed(clock), DataLoader([batch] * 3, batch_size=None), max_epochs=1)
    assert report.rows[0]["samples_per_second"] == pytest.approx(samples)
    assert report.rows[0]["tokens_per_second"] == (None if tokens is None else pytest.approx(tokens))


def test_tokens_without_padding_carry_the_flops(clock: Clock) -> None:
    class Language(Timed):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch["input_ids"].float(), batch_idx)

    def batch(length: int) -> dict[str, Tensor]:
        ids = torch.zeros(2, WIDTH, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        mask[:, :length] = 1
        return {"input_ids": ids, "attention_mask": mask}

    report = ThroughputReport(PEAK, warmup_steps=1)
    run(report, Language(clock), DataLoader([batch(8), batch(4), batch(6)], batch_size=None), max_epochs=1)
    (row,) = report.rows
    assert row["tokens_per_second"] == pytest.approx((8 + 12) / 2)
    # counted: 2 samples of 8 tokens; measured: 20 tokens
    assert row["mfu"] == pytest.approx(2 * (FORWARD + BACKWARD) * 20 / 16 / 2 / PEAK)


# ---- utilization ----------------------------------------------------------------------------------------------------


def test_recomputation_by_torchs_checkpoint_is_in_hfu_only(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    report = ThroughputReport(PEAK)
    run(report, Timed(clock, recomputes=True))
    row = report.rows[-1]
    again = 2 * WIDTH * HIDDEN
    assert row["mfu"] == pytest.approx(14 / 4 * (FORWARD + BACKWARD) / PEAK)
    assert row["hfu"] == pytest.approx(14 / 4 * (FORWARD + BACKWARD + again) / PEAK)
    shown = " ".join(capsys.readouterr().out.split())
    assert f"recomputation adds {again / (FORWARD + BACKWARD):.1%} of the model's FLOPs" in shown


def test_recomputation_by_the_strategy_is_in_hfu_only(clock: Clock) -> None:
    def row(strategy: Any) -> dict[str, Any]:
        class Ticking(Net):
            def training_step(self, batch: Any, batch_idx: int) -> Tensor:
                clock.time += 1
                return super().training_step(batch, batch_idx)

        report = ThroughputReport(PEAK, print_table=False)
        run(report, Ticking(dropout=0.0), DataLoader(torch.randn(8, 8).split(1), batch_size=None), strategy=strategy)
        return report.rows[-1]

    kept, recomputed = row("auto"), row(RecomputeStrategy())
    assert kept["mfu"] == kept["hfu"] == recomputed["mfu"]
    # of each of three blocks the first of two linears runs again: replay stops when it has what backward needs
    assert recomputed["hfu"] - recomputed["mfu"] == pytest.approx(3 * 2 * 8 * 16 / PEAK)


def test_unknown_devices_have_no_utilization_and_it_is_said_once(
    clock: Clock, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    report = ThroughputReport()
    run(report, Timed(clock))
    assert [(row["mfu"], row["hfu"]) for row in report.rows] == [(None, None)] * 2
    assert "MFU" not in capsys.readouterr().out
    said = [record.message for record in caplog.records if "peak_flops" in record.message]
    assert len(said) == 1
    assert "'cpu'" in said[0]


def test_a_model_without_known_flops_has_no_utilization(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    class Scaled(Timed):
        def forward(self, x: Tensor) -> Tensor:
            return self.net[0].weight.sum() * x

    report = ThroughputReport(PEAK)
    run(report, Scaled(clock))
    assert report.rows[-1]["samples_per_second"] == pytest.approx(14 / 4)
    assert report.rows[-1]["mfu"] is None
    assert sum("register_flop_formula" in record.message for record in caplog.records) == 1


def test_compiled_modules_stay_compiled_and_are_counted(clock: Clock) -> None:
    runs = 0

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            nonlocal runs
            runs += 1
            return graph(*args)

        return call

    module = Timed(clock)
    module.forward = torch.compile(lambda x: module.net(x), backend=backend)  # type: ignore[method-assign]
    report = ThroughputReport(PEAK)
    run(report, module, batches(4, 4, 4), max_epochs=1)
    assert runs == 3
    assert report.rows[0]["mfu"] == pytest.approx(4 * (FORWARD + BACKWARD) / PEAK)


# ---- edges ----------------------------------------------------------------------------------------------------------


def test_an_epoch_of_warm_up_only_is_empty_and_said(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    report = ThroughputReport(PEAK, warmup_steps=5)
    run(report, Timed(clock), max_epochs=3)
    assert [row["samples_per_second"] is None for row in report.rows] == [True, False, False]
    assert report.rows[1]["samples_per_second"] == pytest.approx((4 + 4 + 2) / 3)
    assert [record.message for record in caplog.records if "warm-up of 5" in record.message]
    # validation after the only step is no training time either
    report = ThroughputReport(PEAK, warmup_steps=1)
    run(report, Timed(clock), batches(4), batches(4), max_epochs=1)
    assert report.rows == [dict.fromkeys(COLUMNS) | {"epoch": 0}]


def test_batches_without_rows_are_said(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    class Blind(Timed):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(torch.ones(4, WIDTH), batch_idx)

    report = ThroughputReport(PEAK)
    run(report, Blind(clock), DataLoader(range(4), batch_size=None, collate_fn=str))
    assert [row["samples_per_second"] for row in report.rows] == [None, None]
    assert report.rows[1]["step_seconds_median"] == 1
    assert sum("batch_size=" in record.message for record in caplog.records) == 1


def test_manual_optimization_counts_backward_inside_the_step(clock: Clock) -> None:
    class Manual(Timed):
        def __init__(self, clock: Clock) -> None:
            super().__init__(clock, recomputes=True)
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            self.optimizers().zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            self.optimizers().step()

    report = ThroughputReport(PEAK)
    fitted = run(report, Manual(clock))
    assert report.rows[-1]["mfu"] == pytest.approx(14 / 4 * (FORWARD + BACKWARD) / PEAK)
    assert report.rows[-1]["hfu"] > report.rows[-1]["mfu"]
    assert not vars(fitted.strategy).keys() & {"training_step", "backward"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"peak_flops": 0}, "peak_flops=0"),
        ({"tokens_per_sample": 0}, "tokens_per_sample=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"warmup_steps": -1}, "warmup_steps=-1"),
        ({"tokens_per_sample": 1, "num_tokens": len}, "one of them is due"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ThroughputReport(**options)
