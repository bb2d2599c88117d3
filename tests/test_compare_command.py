"""`compare`: configs of short fits made from a user's, and the settings side by side, each in a process of its own."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from cli_modules import MODULES
from omegaconf import OmegaConf

from lightning_recompute import compare_command
from lightning_recompute.cli import main
from lightning_recompute.command_config import config_of_setting, is_sharded, num_replicas, recompute_entry
from lightning_recompute.compare_command import compare
from lightning_recompute.recompute_callback import Recompute
from lightning_recompute.runs import Failure
from lightning_recompute.strategy import RecomputeStrategy
from lightning_recompute.trials import Trial, measured_peak, measured_speed, to_table

STRATEGY = "lightning_recompute.RecomputeStrategy"
CALLBACK = "lightning_recompute.Recompute"


class Sharper(RecomputeStrategy):
    """A user's own, made of ours."""


# ---- the config of a setting


def changed(trainer: dict[str, Any], **choice: Any) -> dict[str, Any]:
    config = {"model": {"class_path": "project.Net"}, "trainer": trainer}
    made = config_of_setting(config, choice or {"granularity": None}, steps=6, warmup_steps=2, folder="there")
    assert made["model"] == config["model"]
    assert config["trainer"] is trainer
    return made["trainer"]


def callbacks_of(trainer: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {entry["class_path"].rpartition(".")[2]: entry["init_args"] for entry in trainer["callbacks"]}


def test_a_strategy_of_ours_is_told_the_setting_and_keeps_the_rest() -> None:
    words = {"granularity": "full", "num_layers": 2, "memory_budget": "2GiB", "plan": None}
    entry = {"class_path": STRATEGY, "init_args": {**words, "blocks": "layers", "find_unused_parameters": True}}
    made = changed({"strategy": entry, "devices": 2}, granularity="selective", modules=["norm"])
    kept = {"blocks": "layers", "find_unused_parameters": True}
    due = {**kept, "granularity": "selective", "modules": ["norm"]}
    assert made["strategy"] == {"class_path": STRATEGY, "init_args": due}
    assert set(callbacks_of(made)) == {"MemoryReport", "ThroughputReport"}
    assert made["devices"] == 2
    assert entry["init_args"]["memory_budget"] == "2GiB"


@pytest.mark.parametrize(
    ("strategy", "class_path"),
    [
        ("recompute", RecomputeStrategy),
        ({"class_path": "lightning_recompute.strategy.RecomputeStrategy"}, RecomputeStrategy),
        ({"class_path": f"{__name__}.Sharper", "init_args": {"check": True}}, Sharper),
    ],
)
def test_all_forms_of_a_strategy_of_ours(strategy: Any, class_path: type) -> None:
    made = changed({"strategy": strategy}, plan="p.yaml")["strategy"]
    assert made["class_path"].rpartition(".")[2] == class_path.__name__
    assert made["init_args"]["plan"] == "p.yaml"


def test_the_start_method_of_a_name_stays() -> None:
    assert changed({"strategy": "recompute_spawn"})["strategy"]["init_args"]["start_method"] == "spawn"


@pytest.mark.parametrize("strategy", ["auto", "ddp", {"class_path": "lightning.pytorch.strategies.FSDPStrategy"}, None])
def test_another_strategy_stays_beside_our_callback(strategy: Any) -> None:
    others = [{"class_path": "lightning.pytorch.callbacks.EarlyStopping"}, {"class_path": CALLBACK}]
    made = changed({"strategy": strategy, "callbacks": others}, granularity="full", method="block", num_layers=3)
    assert made["strategy"] == strategy
    found = callbacks_of(made)
    assert set(found) == {"MemoryReport", "ThroughputReport", "Recompute"}
    assert found["Recompute"] == {"granularity": "full", "method": "block", "num_layers": 3}


def test_the_users_callback_keeps_its_blocks() -> None:
    ours = {"class_path": CALLBACK, "init_args": {"granularity": "full", "blocks": "layers"}}
    assert callbacks_of(changed({"callbacks": ours}))["Recompute"] == {"blocks": "layers", "granularity": None}


def test_training_alone_is_left() -> None:
    given = {"max_epochs": 9, "min_steps": 50, "logger": True, "val_check_interval": 1000, "accumulate_grad_batches": 2}
    made = changed(given)
    assert (made["max_steps"], made["max_epochs"], made["min_steps"], made["logger"]) == (6, -1, None, False)
    assert (made["limit_val_batches"], made["val_check_interval"], made["enable_checkpointing"]) == (0, None, False)
    assert (made["accumulate_grad_batches"], made["default_root_dir"]) == (2, "there")
    assert callbacks_of(made)["ThroughputReport"]["warmup_steps"] == 2


@pytest.mark.parametrize(
    ("trainer", "number"),
    [
        ({"devices": 3}, 3),
        ({"devices": "2", "num_nodes": 4}, 8),
        ({"devices": [0, 3]}, 2),
        ({"devices": "0,3,"}, 2),
        ({"devices": "auto", "accelerator": "cpu"}, 1),
        ({"accelerator": "cpu", "devices": -1}, 1),
    ],
)
def test_number_of_processes(trainer: dict[str, Any], number: int) -> None:
    assert num_replicas(trainer) == number


@pytest.mark.parametrize(
    ("strategy", "sharded"),
    [
        ("fsdp", True),
        ({"class_path": "lightning.pytorch.strategies.FSDPStrategy"}, True),
        ({"class_path": "lightning.pytorch.strategies.ModelParallelStrategy", "init_args": {}}, True),
        ("deepspeed_stage_2", True),
        ("ddp", False),
        ({"class_path": STRATEGY}, False),
        (None, False),
    ],
)
def test_sharded_strategies_are_known(strategy: Any, sharded: bool) -> None:
    assert is_sharded({"strategy": strategy}) == sharded


def test_what_recomputes_is_found() -> None:
    assert recompute_entry({"strategy": "auto", "callbacks": None}) == {}
    entry = {"class_path": f"{Recompute.__module__}.Recompute", "init_args": {"memory_budget": 0.5}}
    assert recompute_entry({"strategy": "ddp", "callbacks": [{"class_path": "a.B"}, entry]}) == entry


# ---- what reports say


def test_reports_are_read(tmp_path: Path) -> None:
    memory = tmp_path / "memory.csv"
    memory.write_text("phase,rank,peak_bytes\nforward,0,10\nbackward,1,30\nvalidation,0,99\n")
    assert measured_peak(memory) == 30
    speed = tmp_path / "throughput.csv"
    speed.write_text("samples_per_second,mfu,hfu\n,,\n10,2,3\n30,2,3\n20,4,6\n")
    assert measured_speed(speed) == (20.0, 1.5)
    speed.write_text("samples_per_second,mfu,hfu\n,,\n")
    assert measured_speed(speed) == (None, None)


def test_the_table_has_reasons_only_where_there_are_some() -> None:
    done = Trial("none", 1024, 1023, 5.0, 1.0, 1.0, True)
    assert len(to_table([done], 2048, "budget").columns) + 1 == len(
        to_table([done, Trial("full uniform 1", reason="so")], None, "device").columns
    )


# ---- settings side by side, with the processes left out


class Processes:
    """In place of `run_command`: notes what would run, and leaves what it would."""

    def __init__(self, *, plan: str | None = None, fail: Sequence[str] = ()) -> None:
        self.plan = plan
        self.fail = fail
        self.ran: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, arguments: Sequence[str], log: Path, *, seconds: float) -> Failure | None:
        command, _, file = arguments
        config = json.loads(Path(file).read_text())
        self.ran.append((command, config))
        if command == "plan":
            return self._plan(config, log)
        name = log.parent.name
        if name in self.fail:
            return Failure(f"no {name}", log)
        peak, speed, hfu = (100, 10.0, 4) if name == "none" else (60, 8.0, 5)
        (log.parent / "memory.csv").write_text(f"phase,peak_bytes\nforward,{peak - 1}\nbackward,{peak}\n")
        (log.parent / "throughput.csv").write_text(f"samples_per_second,mfu,hfu\n{speed},4,{hfu}\n")
        return None

    def _plan(self, config: dict[str, Any], log: Path) -> Failure | None:
        if self.plan == "nothing":
            return Failure("cannot be measured", log)
        names = config["settings"] or ["none", "full uniform 1", "full block 1", "full block 2", "full block 3"]
        points = [f"{name},setting,{99 if name == 'none' else 61},0.1" for name in names]
        if self.plan == "none fits":
            points.append("budget,budget,50,")
        else:
            points += ["planned,plan,61,0.1", "budget,budget,80,"]
            (log.parent / "plan.yaml").write_text("")
        (log.parent / "plan.csv").write_text("\n".join(["name,kind,peak_bytes,extra_seconds", *points]))
        return Failure("no plan keeps it", log) if self.plan == "none fits" else None


def compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, processes: Processes, **options: Any) -> dict[str, Trial]:
    monkeypatch.setattr(compare_command, "run_command", processes)
    config = {"model": {"class_path": "project.Net"}, "trainer": {"strategy": options.pop("strategy", "auto")}}
    trials = compare(config, output=str(tmp_path), **options)
    assert {path.name for path in tmp_path.iterdir()} == {"compare", "compare.csv", "compare.png", "compare.svg"}
    with open(tmp_path / "compare.csv", encoding="utf-8") as file:
        rows = {row["setting"]: row for row in csv.DictReader(file)}
    for trial in trials:
        row = rows[trial.setting]
        assert row["peak_bytes"] == ("" if trial.peak_bytes is None else str(trial.peak_bytes))
        assert row["reason"] == trial.reason
    return {trial.setting: trial for trial in trials}


def test_the_usual_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    processes = Processes()
    found = compared(monkeypatch, tmp_path, processes, memory_budget="80B", steps=3)
    assert list(found) == ["none", "selective core_attn", "full uniform 1", "full block 2", "planned"]
    assert found["none"] == Trial("none", 100, 99, 10.0, 1.0, 1.0, False)
    assert found["planned"] == Trial("planned", 60, 61, 8.0, 0.8, 1.25, True)
    assert found["selective core_attn"].predicted_bytes is None
    (_, plan), *fits = processes.ran
    assert (plan["memory_budget"], plan["settings"]) == ("80B", None)
    assert [command for command, _ in fits] == ["fit"] * 5
    choices = [callbacks_of(config["trainer"])["Recompute"] for _, config in fits]
    assert choices[:4] == [
        {"granularity": None},
        {"granularity": "selective", "modules": ["core_attn"]},
        {"method": "uniform", "num_layers": 1},
        {"method": "block", "num_layers": 2},
    ]
    assert Path(choices[4]["plan"]).samefile(tmp_path / "compare" / "plan" / "plan.yaml")
    assert all(config["trainer"]["max_steps"] == 3 + 2 for _, config in fits)


def test_a_setting_that_fails_is_a_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = ["none", "full uniform 1"]
    found = compared(monkeypatch, tmp_path, Processes(fail=["none"]), settings=names)
    assert found["none"] == Trial("none", predicted_bytes=99, reason="no none")
    # nothing to be a multiple of
    assert found["full uniform 1"] == Trial("full uniform 1", 60, 61, 8.0, None, 1.25, True)


def test_a_budget_that_no_plan_keeps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = compared(monkeypatch, tmp_path, Processes(plan="none fits"), memory_budget=50)
    assert found["planned"] == Trial("planned", reason="no plan keeps it")
    assert (found["full uniform 1"].predicted_bytes, found["full uniform 1"].fits) == (61, False)


def test_without_predictions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = compared(monkeypatch, tmp_path, Processes(plan="nothing"))
    assert list(found) == ["none", "selective core_attn", "full uniform 1"]
    assert found["none"] == Trial("none", 100, None, 10.0, 1.0, 1.0, None)


def test_the_budget_and_the_blocks_of_the_config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    processes = Processes()
    entry = {"class_path": STRATEGY, "init_args": {"memory_budget": "80B", "blocks": "layers"}}
    found = compared(monkeypatch, tmp_path, processes, strategy=entry, blocks="others")
    assert "planned" in found
    assert (processes.ran[0][1]["memory_budget"], processes.ran[0][1]["blocks"]) == ("80B", "others")
    assert processes.ran[1][1]["trainer"]["strategy"]["init_args"] == {"blocks": "others", "granularity": None}


def test_without_a_budget_the_device_is_the_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    processes = Processes()
    found = compared(monkeypatch, tmp_path, processes)
    assert "planned" not in found
    assert processes.ran[0][1]["memory_budget"] == 1.0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"settings": ["none", "ful"]}, "settings: found 'ful'"),
        ({"settings": ["none", "planned"]}, "'planned' without a memory_budget"),
        ({"steps": 0}, "steps=0"),
        ({"timeout": 0}, "timeout=0"),
    ],
)
def test_what_is_refused_before_anything_runs(
    options: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    processes = Processes()
    with pytest.raises(ValueError, match=words):
        compared(monkeypatch, tmp_path, processes, **options)
    assert processes.ran == []


def test_where_no_setting_can_be_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no setting could be run: no none"):
        compared(monkeypatch, tmp_path, Processes(fail=["none"]), settings=["none"])


# ---- for real


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Three fresh processes; what was predicted is what is measured."""
    monkeypatch.setattr("sys.argv", ["pytest"])
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "project.py").write_text(
        MODULES.replace("torch.ones(4, self.width), 2", "torch.ones(900, self.width), 300")
    )
    trainer = {"accelerator": "cpu", "devices": 1, "strategy": {"class_path": STRATEGY}}
    model = {"class_path": "project.Net", "init_args": {"width": 64}}
    OmegaConf.save(OmegaConf.create({"seed_everything": 1, "trainer": trainer, "model": model}), "c.yaml")
    main(["compare", "--config", "c.yaml", "--memory_budget", "850KiB", "--settings", "[none, planned]"])
    assert "Settings side by side, budget 850.00 KiB" in capsys.readouterr().out
    with open("compare.csv", encoding="utf-8") as file:
        none, planned, budget = csv.DictReader(file)
    for row in (none, planned):
        assert row["reason"] == ""
        assert int(row["predicted_bytes"]) == pytest.approx(int(row["peak_bytes"]), rel=0.01)
        assert float(row["samples_per_second"]) > 0
    assert int(planned["peak_bytes"]) <= int(budget["peak_bytes"]) < int(none["peak_bytes"])
    assert (none["fits"], planned["fits"]) == ("False", "True")
    # which of two plans is faster is measured: what is recomputed may cost no FLOPs that count
    assert float(planned["flops_ratio"]) >= float(none["flops_ratio"]) == 1
    assert {path.name for path in Path("compare").iterdir()} == {"none", "plan", "planned"}
