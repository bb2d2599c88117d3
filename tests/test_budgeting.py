"""A budget in place of the words: the plan keeps it, costs no bit, is said once and follows the largest batch."""

from __future__ import annotations

import copy
import csv
import logging
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning_modules import Fit, Net, assert_unpatched, fit
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_recompute import MemoryReport, Recompute, RecomputeStrategy
from lightning_recompute.errors import BudgetError
from lightning_recompute.gpt import GPT
from lightning_recompute.plan import Keep, RecomputePlan

VOCABULARY, LENGTH = 64, 64


class Language(pl.LightningModule):
    """Our GPT; counts its steps in ways that a step which is only tried must not show in."""

    def __init__(self) -> None:
        super().__init__()
        self.net = GPT(
            vocab_size=VOCABULARY, num_layers=4, num_heads=2, hidden_size=32, max_length=LENGTH, attention="eager"
        )
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, number: int) -> Tensor:  # the second argument has any name
        loss = F.cross_entropy(self.net(batch).flatten(0, 1), batch.flatten())
        self.losses.append(loss.item())
        self.log("loss", loss, prog_bar=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-2)


class ByHand(Language):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, number: int) -> None:  # type: ignore[override]
        loss = super().training_step(batch, number)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


def batches(*lengths: int) -> DataLoader[Any]:
    drawn = torch.Generator().manual_seed(0)
    return DataLoader(
        [torch.randint(VOCABULARY, (2, length), generator=drawn) for length in lengths], batch_size=None, shuffle=False
    )


def train(strategy: Any, module: Any = Language, lengths: Sequence[int] = (LENGTH,) * 6, **options: Any) -> Fit:
    return fit(strategy, module, train=lambda: batches(*lengths), val=None, **{"max_epochs": 1, **options})


@pytest.fixture(scope="module")
def plain() -> Fit:
    return train("auto")


@pytest.fixture(scope="module")
def peak_of_none() -> int:
    return measured(train(RecomputeStrategy(granularity=None), callbacks=[MemoryReport(print_table=False)]))


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def report_of(run: Fit) -> MemoryReport:
    (report,) = (each for each in run.trainer.callbacks if isinstance(each, MemoryReport))  # type: ignore[attr-defined]
    return report


def measured(run: Fit) -> int:
    return max(int(row["peak_bytes"]) for row in report_of(run).rows)


@pytest.mark.parametrize("how", ["strategy", "callback"])
def test_keeps_the_budget_and_every_bit(how: str, plain: Fit, peak_of_none: int, tmp_path: Path) -> None:
    budget = int(0.8 * peak_of_none)
    report = MemoryReport(print_table=False)
    if how == "strategy":
        run = train(RecomputeStrategy(memory_budget=budget), callbacks=[report], default_root_dir=tmp_path)
    else:
        callbacks = [report, Recompute(memory_budget=f"{budget}")]
        run = train("auto", callbacks=callbacks, default_root_dir=tmp_path)
    run.assert_equals(plain)
    assert_unpatched(run.module)
    assert measured(run) <= budget
    for row in report.rows:
        assert row["predicted_peak_bytes"] == pytest.approx(row["peak_bytes"], abs=2048)
    plan = RecomputePlan.load(tmp_path / "plan.yaml")
    assert any(not isinstance(segment.action, Keep) for segment in plan.segments)
    again = train(RecomputeStrategy(plan=tmp_path / "plan.yaml"), callbacks=[MemoryReport(print_table=False)])
    again.assert_equals(plain)
    assert measured(again) == pytest.approx(measured(run), abs=64)


def test_a_step_that_is_only_tried_is_not_logged(plain: Fit) -> None:
    run = train(RecomputeStrategy(memory_budget="1GiB"))
    assert run.trainer.callback_metrics.keys() == plain.trainer.callback_metrics.keys()
    for name, value in plain.trainer.callback_metrics.items():
        assert torch.equal(run.trainer.callback_metrics[name], value)
    assert run.trainer.global_step == plain.trainer.global_step


@pytest.mark.parametrize("options", [{"precision": "bf16-mixed"}, {"accumulate_grad_batches": 2}], ids=str)
def test_precision_and_accumulation(options: dict[str, Any]) -> None:
    none = train(RecomputeStrategy(granularity=None), callbacks=[MemoryReport(print_table=False)], **options)
    budget = int(0.85 * measured(none))
    run = train(RecomputeStrategy(memory_budget=budget), callbacks=[MemoryReport(print_table=False)], **options)
    run.assert_equals(none)
    assert measured(run) <= budget


def test_manual_optimization() -> None:
    none = train("auto", ByHand)
    run = train(RecomputeStrategy(memory_budget="1GiB"), ByHand)
    run.assert_equals(none)
    assert run.trainer.global_step == none.trainer.global_step


def test_a_larger_batch_is_planned_for_anew(peak_of_none: int, caplog: pytest.LogCaptureFixture) -> None:
    lengths = (16, 16, LENGTH, 32, LENGTH)
    none = train("auto", lengths=lengths)
    budget = int(0.8 * peak_of_none)
    with caplog.at_level(logging.INFO, "lightning_recompute"):
        run = train(
            RecomputeStrategy(memory_budget=budget), lengths=lengths, callbacks=[MemoryReport(print_table=False)]
        )
    run.assert_equals(none)
    assert measured(run) <= budget
    said = [record.message for record in caplog.records if record.message.startswith("Predicted peak")]
    assert len(said) == 2  # for 16 and for 64


def test_what_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "lightning_recompute"):
        train(RecomputeStrategy(memory_budget="1GiB"))
    (plan,) = (record.message for record in caplog.records if record.message.startswith("Recompute: "))
    assert "blocks 0-3 kept" in plan
    (said,) = (record.message for record in caplog.records if record.message.startswith("Predicted peak"))
    assert "of the budget of 1.00 GiB" in said
    assert "head and loss" in said


def test_says_by_how_much_the_first_steps_exceed_the_prediction(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[Tensor] = []

    class Hoards(Language):
        def on_before_zero_grad(self, optimizer: Any) -> None:
            held.append(torch.zeros(1_000_000))

    with caplog.at_level(logging.WARNING, "lightning_recompute"):
        train(RecomputeStrategy(memory_budget="1GiB"), Hoards)
    (said,) = (record.message for record in caplog.records if "than the" in record.message)
    assert "the first steps needed" in said
    assert "more than the" in said


def test_no_plan_keeps_it(plain: Fit) -> None:
    module = Language()
    with pytest.raises(BudgetError, match="The smallest peak of a step is") as caught:
        train(RecomputeStrategy(memory_budget=100_000), lambda: module)
    text = str(caught.value)
    for word in ("100000 bytes", "parameters", "optimizer", "Cures", "smaller batch", "bf16-mixed", "more devices"):
        assert word in text
    assert_unpatched(module)
    assert module.losses == []


@pytest.mark.parametrize("what", [RecomputeStrategy, Recompute])
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"granularity": "selective"}, "memory_budget='1GiB' and granularity='selective'"),
        ({"num_layers": 2}, "Leave out one or the other"),
        ({"plan": "plan.yaml"}, "memory_budget='1GiB' and plan='plan.yaml'"),
        ({"memory_budget": "22 apples"}, "22 apples"),
        ({"memory_budget": 0}, "memory_budget=0"),
        ({"memory_budget": 1.5}, "1.5"),
    ],
    ids=str,
)
def test_refused_when_made(what: Any, words: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        what(**{"memory_budget": "1GiB", **words})


def test_a_step_that_fetches_its_batches_is_refused() -> None:
    class Fetches(Net):
        def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
            return self.loss(next(dataloader_iter)[0])

    with pytest.raises(ValueError, match="dataloader_iter"):
        fit(RecomputeStrategy(memory_budget="1GiB"), Fetches, val=None)


def test_a_copy_has_no_plan_yet() -> None:
    strategy = RecomputeStrategy(memory_budget="1GiB")
    train(strategy)
    for twin in (copy.deepcopy(strategy), pickle.loads(pickle.dumps(strategy))):
        assert twin.forecast is None
        assert twin.memory_budget == "1GiB"


def test_the_report_has_a_prediction_for_each_phase(tmp_path: Path) -> None:
    logger = pl.loggers.CSVLogger(tmp_path)
    train(RecomputeStrategy(memory_budget="1GiB"), callbacks=[MemoryReport(print_table=False)], logger=logger)
    (path,) = tmp_path.rglob("memory.csv")
    rows = list(csv.DictReader(path.open()))
    assert {row["phase"] for row in rows} == {"forward", "backward", "optimizer"}
    assert len({row["predicted_peak_bytes"] for row in rows}) == 3
