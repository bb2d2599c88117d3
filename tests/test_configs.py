"""Each config trains a few steps, made small by overrides."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from lightning_recompute.cli import main

ROOT = Path(__file__).parent.parent
CONFIGS = ROOT / "configs"
BASE = CONFIGS / "gpt_bytes.yaml"
SMALL = [
    "--trainer.max_epochs=1",
    "--trainer.limit_train_batches=3",
    "--trainer.limit_val_batches=1",
    "--data.init_args.max_bytes=100000",
    "--model.init_args.hidden_size=32",
]
RUNS = {
    "gpt_bytes": [BASE],
    "gpt_bytes_block": [BASE, CONFIGS / "gpt_bytes_block.yaml"],
    "hf_llama": [CONFIGS / "hf_llama.yaml"],
}


def fit(configs: list[Path], folder: Path, *more: str) -> Path:
    """Train under configs; returns the folder that the run wrote its reports to."""
    words = [word for config in configs for word in ("--config", str(config))]
    main(["fit", *words, f"--trainer.logger.init_args.save_dir={folder}", *SMALL, *more])
    (plan,) = folder.rglob("plan.yaml")
    return plan.parent


def test_every_config_is_run_here() -> None:
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == {*RUNS, "gpt_bytes_2procs"}


@pytest.mark.parametrize("name", RUNS)
def test_config_trains(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.chdir(tmp_path)
    folder = fit(RUNS[name], tmp_path / "logs")
    actions = [segment.action for segment in OmegaConf.load(folder / "plan.yaml").segments]
    due = {"gpt_bytes": ["full"] * 4, "gpt_bytes_block": ["full", "full", "keep"], "hf_llama": ["selective"]}
    assert actions == due[name]
    with (folder / "memory.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["phase"] for row in rows} == {"forward", "backward", "optimizer", "validation"}
    assert all(int(row["peak_bytes"]) > 0 for row in rows)
    with (folder / "throughput.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert float(row["samples_per_second"]) > 0


def test_two_processes(tmp_path: Path) -> None:
    """The config of the two-process group, as its own process: its second process runs the command line again."""
    import os
    import subprocess
    import sys

    command = Path(sys.executable).with_name("lightning-recompute")
    configs = ["--config", str(BASE), "--config", str(CONFIGS / "gpt_bytes_2procs.yaml")]
    run = subprocess.run(
        [str(command), "fit", *configs, f"--trainer.logger.init_args.save_dir={tmp_path}/logs", *SMALL],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    with next((tmp_path / "logs").rglob("memory.csv")).open() as file:
        assert {row["rank"] for row in csv.DictReader(file)} == {"0", "1"}
