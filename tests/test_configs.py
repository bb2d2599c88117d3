"""Every config in configs/, made tiny, runs, and so does every command that its comments show."""

from __future__ import annotations

import csv
import os
import re
import resource
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from lightning_recompute.cli import main
from lightning_recompute.plan import Full, Keep, RecomputePlan, Selective

ROOT = Path(__file__).parent.parent
CONFIGS = {path.name: path for path in sorted((ROOT / "configs").glob("*.yaml"))}

# Smaller, not otherwise: what the config says about recompute and reports stays.
TINY = [
    *("--trainer.max_epochs", "2", "--trainer.limit_train_batches", "4", "--trainer.limit_val_batches", "1"),
    *("--data.batch_size", "2", "--data.max_bytes", "100000"),
]
TINY_MODEL = {
    "examples.hf_finetune.CausalLM": ["--model.hidden_size", "32", "--data.length", "32"],
    "lightning_recompute.GPT": ["--model.hidden_size", "32", "--model.num_heads", "2", "--model.max_length", "32"],
}


def commands(text: str) -> list[list[str]]:
    """The arguments of every command line in the comments of a config."""
    return [shlex.split(line, comments=True)[1:] for line in re.findall(r"^#\s+(lightning-recompute .*)$", text, re.M)]


COMMANDS = {name: commands(path.read_text()) for name, path in CONFIGS.items()}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the run leaves its logs; the command is given in the project's folder."""
    monkeypatch.setattr(sys, "argv", ["pytest"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(ROOT)
    return tmp_path


def tiny(arguments: list[str], folder: Path) -> list[str]:
    """A command line made small enough for a test, with its logs elsewhere."""
    files = [argument for argument in arguments if argument.endswith(".yaml")]
    model = OmegaConf.merge(*(OmegaConf.load(ROOT / file) for file in files)).model.class_path
    return [*arguments, *TINY, *TINY_MODEL[model], "--trainer.logger.save_dir", str(folder)]


def test_every_config_shows_how_it_is_run_and_what_it_means() -> None:
    assert len(CONFIGS) >= 4
    for name, path in CONFIGS.items():
        first = COMMANDS[name][0]
        assert first[0] in ("fit", "plan")
        assert first[-2:] == ["--config", f"configs/{name}"]
        assert all((ROOT / value).is_file() for value in first if value.endswith(".yaml"))
        assert path.read_text().startswith("# ")


# What the first command of each config recomputes.
ACTIONS = {
    "gpt_bytes.yaml": [Full()] * 4,
    "gpt_bytes_block.yaml": [Full(), Full(), Keep()],
    "hf_llama.yaml": [Selective(("norm", "act"))],
}
SEVERAL = ("gpt_bytes_2procs.yaml", "gpt_bytes_tp2.yaml", "gpt_bytes_pp2.yaml")
ALONE = [
    (name, command)
    for name, found in COMMANDS.items()
    for command in found
    if name not in SEVERAL and command[0] == "fit"
]


@pytest.mark.parametrize(("name", "command"), ALONE, ids=lambda value: value if isinstance(value, str) else "")
def test_the_commands_run_and_leave_their_reports(name: str, command: list[str], folder: Path) -> None:
    main(tiny(command, folder))
    (logs,) = folder.glob("*/version_0")
    written = {path.name for path in logs.iterdir()}
    assert {"config.yaml", "metrics.csv", "memory.csv", "throughput.csv"} <= written
    rows = list(csv.DictReader((logs / "memory.csv").open()))
    assert {row["phase"] for row in rows} == {"forward", "backward", "optimizer", "validation"}
    assert {row["epoch"] for row in rows} == {"0", "1"}
    assert ("plan.yaml" in written) == ("auto" not in command)
    if command == COMMANDS[name][0]:
        assert [segment.action for segment in RecomputePlan.load(logs / "plan.yaml").segments] == ACTIONS[name]
    # the config that a run leaves is a config
    saved = OmegaConf.load(logs / "config.yaml")
    assert saved.data.init_args.length == 32
    assert (saved.trainer.max_epochs, saved.trainer.limit_train_batches) == (2, 4)


@pytest.mark.xdist_group("two processes")
@pytest.mark.parametrize("name", SEVERAL)
def test_two_processes(name: str, folder: Path) -> None:
    (command,) = COMMANDS[name]
    program = Path(sys.executable).with_name("lightning-recompute")
    done = subprocess.run(
        [program, *tiny(command, folder)],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (plan,) = folder.rglob("plan.yaml")
    assert OmegaConf.load(plan).record.processes == 2
    rows = list(csv.DictReader((plan.parent / "memory.csv").open()))
    assert {row["rank"] for row in rows} == {"0", "1"}
    assert done.stderr.count("Recompute: blocks (4 x TransformerBlock)") == 1


# The others show the same on other sizes, and take as long.
PLANS = [
    pytest.param(name, command, marks=[] if name == "gpt_200b.yaml" else pytest.mark.long)
    for name, found in COMMANDS.items()
    for command in found
    if command[0] == "plan"
]
GIANT = ["--model.hidden_size", "64", "--model.num_heads", "8", "--model.max_length", "32"]


@pytest.mark.parametrize(("name", "command"), PLANS)
def test_plans(name: str, command: list[str], folder: Path) -> None:
    smaller = ["--model.num_layers", "4", "--data.max_bytes", "100000", "--data.batch_size", "4"]
    if "pipeline_parallel_size" in CONFIGS[name].read_text():
        smaller += ["--pipeline_parallel_size", "2", "--virtual_pipeline_size", "1", "--num_microbatches", "4"]
    main([*command, *smaller, *GIANT, "--output", str(folder)])
    assert RecomputePlan.load(folder / "plan.yaml").num_blocks == 4
    with open(folder / "plan_stages.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    # on its own config's layout, by formula too
    assert len(rows) == (1 if name == "gpt_22b.yaml" else 2)
    # what is drawn again takes random states, which are not little beside a block of this size
    assert all(int(row["held_bytes"]) >= int(row["formula_bytes"]) for row in rows if row["formula_bytes"])


@pytest.mark.long
def test_a_model_too_large_to_build_is_planned_for(folder: Path) -> None:
    """Whole, as the config says, in a process of its own whose memory is looked at."""
    program = Path(sys.executable).with_name("lightning-recompute")
    command = [str(program), *COMMANDS["gpt3_175b.yaml"][0], "--output", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 2 * 2**20  # KiB
    plan = folder / "plan.yaml"
    assert OmegaConf.load(plan).record.predicted_peak_bytes <= 40 * 2**30
    # neither nothing nor everything is recomputed
    assert {type(segment.action) for segment in RecomputePlan.load(plan).segments} > {Keep}
    # all eight stages, by profile and by formula
    lines = done.stdout.partition("Held by blocks in flight")[2].splitlines()
    (worst,) = (line for line in lines if "worst" in line)
    found = [float(each) for each in re.findall(r"([+-][\d.]+)%", worst)]
    assert len(found) == 3
    assert all(abs(each) <= 0.5 for each in found)
