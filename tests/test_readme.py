"""What the README shows is so: every block runs, every command parses, every figure of memory is measured again."""

from __future__ import annotations

import csv
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from jsonargparse import ArgumentParser
from lightning.pytorch import Trainer
from omegaconf import OmegaConf

import lightning_recompute
from lightning_recompute.cli import main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
LINES = [line for kind, text in BLOCKS if kind == "sh" for line in text.splitlines()]


def blocks(language: str) -> list[str]:
    return [text for kind, text in BLOCKS if kind == language]


@pytest.fixture
def _in_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["pytest"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(ROOT)


def test_every_block_is_of_a_kind_that_is_tried() -> None:
    assert {kind for kind, _ in BLOCKS} == {"python", "yaml", "sh", "text"}


def test_the_first_two_commands() -> None:
    assert LINES[:2] == ["make train", "make test"]


def test_python_blocks_run(tmp_path: Path) -> None:
    """In one fresh process and an empty folder, each block with names of its own."""
    script = tmp_path / "blocks.py"
    script.write_text(
        f"for number, block in enumerate({blocks('python')!r}):\n"
        "    exec(compile(block, f'block {number} of README.md', 'exec'), {'__name__': f'block{number}'})\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(blocks("python")) >= 5


def test_the_first_example_is_short() -> None:
    """What a newcomer adds: one argument and the callbacks."""
    lines = [line for line in blocks("python")[0].splitlines() if line]
    assert len(lines) <= 8 + 2
    assert "RecomputeStrategy()" in blocks("python")[0]


@pytest.mark.parametrize("text", blocks("yaml"), ids=range(len(blocks("yaml"))))
def test_yaml_blocks_build_a_trainer(text: str) -> None:
    parser = ArgumentParser()
    parser.add_class_arguments(Trainer, "trainer")
    config = parser.parse_object(OmegaConf.to_container(OmegaConf.create(text)))
    trainer = parser.instantiate_classes(config).trainer
    assert (trainer.strategy.granularity, trainer.strategy.method, trainer.strategy.num_layers) == ("full", "block", 4)
    assert {"MemoryReport", "ThroughputReport"} <= {type(callback).__name__ for callback in trainer.callbacks}


@pytest.mark.usefixtures("_in_the_project")
@pytest.mark.parametrize("line", LINES)
def test_commands_are_commands(line: str) -> None:
    """Those of ours parse with all their options; make has the targets; scripts are there, and run by other tests."""
    command, *words = shlex.split(line)
    if command == "make":
        assert re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    elif command == "python":
        assert (ROOT / words[0]).is_file()
    elif command == "lightning-recompute":
        if words[0] == "consolidate":  # has no config
            words = ["consolidate", "--help"]
        helping = any(word.endswith("help") for word in words)
        with pytest.raises(SystemExit) as left:
            main(words if helping else [*words, "--print_config"])
        assert left.value.code == 0
    else:
        assert line == "pip install ."


@pytest.mark.usefixtures("_in_the_project")
@pytest.mark.parametrize("strategy", ["recompute", "auto"])
def test_figures_of_memory_are_those_of_the_demo(strategy: str, tmp_path: Path) -> None:
    """Two steps reach the peaks of all; only what the parts are rounded to may differ."""
    short = ["--trainer.max_epochs=1", "--trainer.limit_train_batches=2", "--trainer.limit_val_batches=1"]
    config = ["--config", "configs/gpt_bytes.yaml", "--trainer.strategy", strategy]
    main(["fit", *config, *short, f"--trainer.logger.save_dir={tmp_path}", "--data.max_bytes=1000000"])
    (report,) = tmp_path.rglob("memory.csv")
    rows = {row["phase"]: row for row in csv.DictReader(report.open())}

    def mib(phase: str, column: str) -> float:
        return int(rows[phase][f"{column}_bytes"]) / 2**20

    if strategy == "auto":
        held, peak = re.search(r"has ([\d.]+) MiB of activations and a peak of ([\d.]+) MiB", README).groups()
        assert mib("forward", "activations") == pytest.approx(float(held), rel=0.01)
        assert mib("forward", "peak") == pytest.approx(float(peak), rel=0.01)
        return
    shown = re.findall(r"^  (forward|backward|optimizer|validation) +(.*)$", blocks("text")[0], flags=re.MULTILINE)
    assert len(shown) == 4
    columns = ("peak", "parameters", "gradients", "optimizer", "activations", "temporary")
    for phase, figures in shown:
        for column, figure in zip(columns, figures.split(), strict=True):
            assert mib(phase, column) == pytest.approx(float(figure), rel=0.02, abs=0.3), (phase, column)


@pytest.mark.long
@pytest.mark.usefixtures("_in_the_project")
def test_what_the_rule_of_thumb_saves_on_the_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved, peak = re.search(r"it saves (\d+) bytes of ([\d.]+ MiB)", README).groups()
    counted = ["--device", "H100", "--memory_budget", "40MiB", "--output", str(tmp_path)]
    main(["plan", "--config", "configs/gpt_bytes.yaml", *counted])
    printed = capsys.readouterr().out
    assert f"({saved} bytes) of the {peak} without recompute" in printed
    assert "The rule is wrong here" in printed


@pytest.mark.usefixtures("_in_the_project")
def test_the_message_that_is_shown_is_the_one_that_comes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(blocks("yaml")[0].replace("granularity: full", "granularity: ful"))
    with pytest.raises(SystemExit):
        main(["fit", "--config", str(config)])
    assert capsys.readouterr().err in blocks("text")


def test_names_are_exported_and_links_lead_somewhere() -> None:
    for text in blocks("python"):
        for names in re.findall(r"from lightning_recompute import (.*)", text):
            assert set(names.split(", ")) <= set(lightning_recompute.__all__)
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
    for path in re.findall(r"`((?:examples|bench|configs|docs)/[\w./]+)`", README):
        assert (ROOT / path).exists(), path


def test_every_argument_of_recompute_is_in_the_table() -> None:
    import inspect

    table = re.findall(r"^\| `(\w+)` \|", README, flags=re.MULTILINE)
    assert set(inspect.signature(lightning_recompute.Recompute).parameters) == set(table)
