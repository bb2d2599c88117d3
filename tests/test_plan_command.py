"""`plan` on a user's model, data and first batch, through Lightning, without training."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from cli_modules import MODULES
from jsonargparse import Namespace
from lightning_modules import Net, loader
from omegaconf import OmegaConf

from lightning_recompute import device_memory, plan_command, profiling
from lightning_recompute.block_time import measure_flops
from lightning_recompute.capture import BlockCall
from lightning_recompute.cli import main
from lightning_recompute.data import TextDataModule
from lightning_recompute.errors import BudgetError
from lightning_recompute.first_step import ON_ONE_DEVICE
from lightning_recompute.gpt import GPT
from lightning_recompute.memory_report import MemoryReport
from lightning_recompute.overview import Overview
from lightning_recompute.plan import Action, RecomputePlan
from lightning_recompute.plan_command import is_too_large, plan_first_batch, plan_on_fake_tensors, save
from lightning_recompute.recompute_callback import Recompute

BUDGET = 2_400_000
FILES = {"plan.yaml", "plan.csv", "plan_step.csv", "plan_blocks.csv", "plan.png", "plan.svg"}


def trainer(**options: Any) -> pl.Trainer:
    return pl.Trainer(**{**ON_ONE_DEVICE, "accelerator": "cpu", "max_epochs": 1, **options})


def gpt(**options: Any) -> GPT:
    return GPT(num_layers=3, hidden_size=32, num_heads=2, max_length=32, **options)


def text() -> TextDataModule:
    return TextDataModule(length=32, max_bytes=20_000, batch_size=8)


@pytest.fixture(scope="module", autouse=True)
def _time_is_counted() -> Iterator[None]:
    """A nanosecond a FLOP: the same plans on any machine, however busy."""

    def seconds(call: BlockCall, actions: Sequence[Action]) -> list[float]:
        return [1e-9 * measure_flops(call, action) for action in actions]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profiling, "measure_seconds", seconds)
        yield


@pytest.fixture(scope="module")
def view() -> Overview:
    return plan_first_batch(trainer(), gpt(attention="eager"), datamodule=text(), memory_budget=BUDGET)


def rows(file: Path) -> list[dict[str, str]]:
    with open(file, encoding="utf-8") as opened:
        return list(csv.DictReader(opened))


# ---- what is found


def test_the_plan_keeps_the_budget(view: Overview) -> None:
    assert view.forecast is not None
    assert view.forecast.fits
    (planned,) = view.of_kind("plan")
    assert planned.peak_bytes == view.forecast.peak_bytes <= BUDGET
    # and is no slower than any setting that does
    slower = [point for point in view.of_kind("setting") if point.peak_bytes <= BUDGET]
    assert slower
    assert all(planned.extra_seconds <= point.extra_seconds for point in slower)


def test_settings_are_those_of_practice(view: Overview) -> None:
    names = [point.name for point in view.of_kind("setting")]
    assert names == ["none", "selective core_attn", "full uniform 1", "full block 1", "full block 2"]
    curve = view.of_kind("pareto")
    assert [point.peak_bytes for point in curve] == sorted({point.peak_bytes for point in curve})
    assert [-point.extra_seconds for point in curve] == sorted({-point.extra_seconds for point in curve})
    assert curve[-1].extra_seconds == 0


def test_figures_of_the_step_agree_with_the_forecast(view: Overview) -> None:
    assert view.forecast is not None
    assert max(moment.num_bytes for moment in view.steps) == view.forecast.peak_bytes
    none = next(point for point in view.points if point.name == "none")
    assert max(moment.num_bytes for moment in view.kept) == none.peak_bytes
    assert [moment.block for moment in view.steps] == [moment.block for moment in view.kept]
    assert list(dict.fromkeys(moment.phase for moment in view.steps)) == ["forward", "backward", "optimizer"]
    forward = [moment.block for moment in view.steps if moment.phase == "forward" and moment.block]
    assert forward == [block.name for block in view.blocks] == ["blocks.0", "blocks.1", "blocks.2"]
    # at the loss all that blocks hold is there, but for what is counted outside
    held = max(moment.parts["blocks"] for moment in view.steps if moment.phase == "forward")
    assert held <= sum(block.num_bytes for block in view.blocks) <= 1.2 * held


def test_predictions_are_measurements(view: Overview, tmp_path: Path) -> None:
    """Of the plan, under Lightning."""
    assert view.forecast is not None
    report = MemoryReport(print_table=False)
    callbacks = [report, Recompute(plan=view.forecast.plan)]
    run = trainer(callbacks=callbacks, max_steps=3, limit_val_batches=0, default_root_dir=tmp_path)
    run.fit(gpt(attention="eager"), datamodule=text())
    measured = max(row["peak_bytes"] for row in report.rows)
    assert view.forecast.peak_bytes == pytest.approx(measured, rel=0.01)
    assert measured <= BUDGET


def test_advice_where_the_rule_is_wrong(view: Overview) -> None:
    saved = re.search(r"saves .* \((\d+) bytes\)", view.advice[1])
    assert "below 10 B parameters (here 55.6 k)" in view.advice[0]
    assert "--recompute-activations" in view.advice[0]
    assert saved is not None
    # scores and probabilities: batch x heads x 32 x 32 floats, twice in each of three blocks
    assert int(saved[1]) == 3 * 2 * 8 * 2 * 32 * 32 * 4 // 2 == 196_608
    assert "over the budget" in view.advice[1]
    assert view.advice[2].endswith("The rule is wrong here: it does not keep the budget.")


# ---- what is written


def test_files(view: Overview, tmp_path: Path) -> None:
    assert view.forecast is not None
    written = save(view, tmp_path / "new")
    assert {path.name for path in written} == {path.name for path in (tmp_path / "new").iterdir()} == FILES
    assert RecomputePlan.load(written[0]) == view.forecast.plan
    record = OmegaConf.load(written[0]).record
    assert (record.memory_budget_bytes, record.predicted_peak_bytes) == (BUDGET, view.forecast.peak_bytes)
    points = [(row["name"], row["kind"], int(row["peak_bytes"])) for row in rows(tmp_path / "new" / "plan.csv")]
    assert points == [
        *((point.name, point.kind, point.peak_bytes) for point in view.points),
        ("budget", "budget", BUDGET),
    ]
    steps = rows(tmp_path / "new" / "plan_step.csv")
    for row in steps:
        parts = [int(value) for name, value in row.items() if name.endswith("_bytes")]
        assert sum(parts[:-2]) == int(row["total_bytes"])
    assert max(int(row["total_bytes"]) for row in steps) == view.forecast.peak_bytes
    blocks = rows(tmp_path / "new" / "plan_blocks.csv")
    assert [row["block"] for row in blocks] == ["blocks.0", "blocks.1", "blocks.2"]


# ---- other models


def test_nothing_is_trained(tmp_path: Path) -> None:
    module = Net(dropout=0.0)
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    run = trainer(accumulate_grad_batches=2)
    view = plan_first_batch(run, module, loader(), memory_budget="1MiB", settings=["none", "full uniform 3"])
    assert run.global_step == 0
    assert module.losses == []
    assert all(torch.equal(value, weights[name]) for name, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())
    assert not {"training_step", "log", "log_dict", "forward"} & vars(module).keys()
    assert [point.name for point in view.of_kind("setting")] == ["none", "full uniform 3"]
    assert view.advice[1].startswith("Here: not possible, the model has nothing that 'selective core_attn' would")
    # gradients are there from the first batch of a window on, in the heavier of its steps
    assert len({moment.parts["gradients"] for moment in view.steps[:-1]}) == 1


def test_replicas_have_buckets() -> None:
    def peak(num_replicas: int) -> int:
        view = plan_first_batch(trainer(), Net(), loader(), memory_budget="1MiB", num_replicas=num_replicas)
        return view.of_kind("setting")[0].peak_bytes

    assert peak(2) - peak(1) == sum(parameter.nbytes for parameter in Net().parameters())


def test_another_device_is_counted_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "measure_seconds", None)
    options: dict[str, Any] = {"memory_budget": "1MiB", "settings": ["none", "full uniform 1"]}
    slow, fast = (plan_first_batch(trainer(), Net(), loader(), device=name, **options) for name in ("A100", "H100"))
    assert slow.device == "A100"
    assert slow.of_kind("setting")[1].extra_seconds > fast.of_kind("setting")[1].extra_seconds > 0


LONG = [pytest.param(precision, marks=pytest.mark.long) for precision in ("32-true", "bf16-mixed")]


@pytest.mark.parametrize("precision", ["bf16-true", *LONG])
def test_a_model_that_is_not_built(precision: str) -> None:
    """Its peaks are those of the real one."""
    options: dict[str, Any] = {"memory_budget": BUDGET, "settings": ["none", "full uniform 1", "selective norm+act"]}
    real = plan_first_batch(trainer(precision=precision), gpt(), datamodule=text(), **options)
    with torch.device("meta"):
        unbuilt = gpt(decay_steps=10)
    fake = plan_on_fake_tensors(trainer(precision=precision), unbuilt, datamodule=text(), num_replicas=1, **options)
    found, due = ([(point.name, point.peak_bytes) for point in view.of_kind("setting")] for view in (fake, real))
    assert [name for name, _ in found] == [name for name, _ in due] == options["settings"]
    for (_, one), (_, other) in zip(found, due, strict=True):
        assert one == pytest.approx(other, rel=0.002)


def test_a_budget_that_no_plan_keeps(tmp_path: Path) -> None:
    view = plan_first_batch(trainer(), Net(), loader(), memory_budget=10_000)
    assert view.forecast is None
    assert isinstance(view.refusal, BudgetError)
    assert "smallest peak" in str(view.refusal)
    assert view.of_kind("plan") == []
    # what is shown is the plan of the smallest peak
    assert max(moment.num_bytes for moment in view.steps) == view.of_kind("pareto")[0].peak_bytes
    assert {path.name for path in save(view, tmp_path)} == FILES - {"plan.yaml"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"memory_budget": "a lot"}, "memory_budget='a lot'"),
        ({"settings": ["full"]}, "settings: found 'full'"),
        ({"blocks": "layers"}, "layers"),
    ],
)
def test_what_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        plan_first_batch(trainer(), Net(), loader(), **{"memory_budget": "1MiB", **options})


# ---- the command


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's project and its config, in the current folder."""
    monkeypatch.setattr("sys.argv", ["pytest"])
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "project", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "project.py").write_text(MODULES)
    return tmp_path


def config(**strategy: Any) -> None:
    entry = {"class_path": "lightning_recompute.RecomputeStrategy", "init_args": strategy}
    content = {"seed_everything": 1, "trainer": {"accelerator": "cpu", "devices": 2, "strategy": entry}}
    OmegaConf.save(OmegaConf.create({**content, "model": {"class_path": "project.Net"}}), "c.yaml")


def test_the_command(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config(blocks="blocks")
    before = {path.name for path in project.iterdir()}
    main(["plan", "--config", "c.yaml", "--memory_budget", "1MiB", "--settings", "[none, full uniform 1]"])
    printed = capsys.readouterr().out
    for part in (
        "Recompute plan",
        "Forecast, budget 1.00 MiB",
        "full uniform 1",
        "Rule of thumb",
        "Written: plan.yaml",
    ):
        assert part in printed
    assert {path.name for path in project.iterdir()} - before - {"__pycache__"} == FILES
    # two processes would train, which have buckets
    assert OmegaConf.load("plan.yaml").record.memory_budget_bytes == 2**20
    parameters = 3 * (8 * 8 + 8 + 2 * 8) * 4
    assert int(rows(project / "plan_step.csv")[0]["other_bytes"]) >= parameters


def test_a_budget_that_cannot_be_kept_is_one_message(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config()
    with pytest.raises(SystemExit) as left:
        main(["plan", "--config", "c.yaml", "--memory_budget", "4KiB", "--output", "out"])
    assert left.value.code == 2
    said = capsys.readouterr()
    assert "no plan keeps it" in said.err.partition("error: ")[2]
    assert "Traceback" not in said.err
    # what there is beside the plan is there nevertheless
    assert "full uniform 1" in said.out
    assert {path.name for path in (project / "out").iterdir()} == FILES - {"plan.yaml"}


def test_a_sharded_model_is_looked_at_as_a_whole(project: Path, caplog: pytest.LogCaptureFixture) -> None:
    config()
    # one process, and so no shards
    main(["plan", "--config", "c.yaml", "--trainer.strategy", "fsdp", "--memory_budget", "1MiB"])
    assert "spreads the model over processes" in caplog.text


def test_another_device_needs_a_size(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config()
    for option in ("--device=A100", "--fake=true"):
        with pytest.raises(SystemExit) as left:
            main(["plan", "--config", "c.yaml", option])
        assert left.value.code == 2
        assert "error: memory_budget: none is given" in capsys.readouterr().err


def test_without_a_budget_it_is_a_part_of_the_device(view: Overview, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def planned(*args: Any, memory_budget: Any, **options: Any) -> Overview:
        asked.append(memory_budget)
        return replace(view, refusal=None)

    monkeypatch.setattr(plan_command, "plan_first_batch", planned)
    monkeypatch.setattr(plan_command, "save", lambda view, folder: [])
    plan_command.PlanningTrainer.plan(trainer(), Net())  # type: ignore[arg-type]
    assert asked == [device_memory.DEFAULT_FRACTION]


@pytest.mark.parametrize(
    ("class_path", "hidden_size", "due"),
    [("lightning_recompute.GPT", 64, False), ("lightning_recompute.gpt.GPT", 65536, True), ("my.Model", 65536, False)],
)
def test_which_models_are_too_large_to_build(class_path: str, hidden_size: int, due: bool) -> None:
    sizes = {"num_layers": 96, "num_heads": 8, "hidden_size": hidden_size, "max_length": 64}
    assert is_too_large(Namespace(class_path=class_path, init_args=Namespace(**sizes))) is due
