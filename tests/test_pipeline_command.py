"""`plan` for several ranks, through Lightning and the command line: models that are built, and one that is not."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from lightning_recompute import pipeline_command, pipeline_overview
from lightning_recompute.cli import main
from lightning_recompute.pipeline_forecast import LayoutForecast
from lightning_recompute.plan import Full, Keep, RecomputePlan

ROOT = Path(__file__).parent.parent
FILES = {
    *("plan.yaml", "plan.csv", "plan_stages.csv", "plan_blocks.csv", "plan_schedule.csv"),
    *("plan.png", "plan.svg"),
}
TINY = ["--data.max_bytes", "20000", "--data.batch_size", "4"]
GPT = ["--model.num_layers", "4", "--model.num_heads", "2", "--model.hidden_size", "32", "--model.max_length", "32"]
SMALL = [*TINY, *GPT]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """For the files; the command is given in the project's folder."""
    monkeypatch.setattr(sys, "argv", ["pytest"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(ROOT)
    return tmp_path


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[LayoutForecast]:
    """The forecasts that commands come to."""
    found: list[LayoutForecast] = []

    def save(view: LayoutForecast, folder: Any) -> list[Path]:
        found.append(view)
        return pipeline_overview.save(view, folder)

    monkeypatch.setattr(pipeline_command, "save", save)
    return found


def plan(config: str, folder: Path, *more: str) -> None:
    main(["plan", "--config", f"configs/{config}.yaml", *more, "--output", str(folder)])


def rows(file: Path) -> list[dict[str, str]]:
    with open(file, encoding="utf-8") as opened:
        return list(csv.DictReader(opened))


def test_a_model_that_is_built(folder: Path, seen: list[LayoutForecast], capsys: pytest.CaptureFixture[str]) -> None:
    """The words of the config, over two stages; confirmed by the real schedule."""
    options = ["--pipeline_parallel_size", "2", "--num_microbatches", "4", "--device", "A100", "--confirm", "true"]
    plan("gpt_bytes", folder, *SMALL, *options)
    (view,) = seen
    assert {path.name for path in folder.iterdir()} == FILES
    assert [segment.action for segment in RecomputePlan.load(folder / "plan.yaml").segments] == [Full()] * 4
    record = OmegaConf.load(folder / "plan.yaml").record
    assert (record.pipeline_parallel_size, record.num_microbatches, record.split) == (2, 4, [2, 2])
    assert record.predicted_peak_bytes == view.worst.peak_bytes
    stages = rows(folder / "plan_stages.csv")
    assert [int(row["peak_bytes"]) for row in stages] == [rank.peak_bytes for rank in view.ranks]
    for row in stages:
        parts = [name for name in row if name.endswith("_bytes") and name not in ("peak_bytes", "held_bytes")]
        assert sum(int(row[name] or 0) for name in parts) == int(row["peak_bytes"])
    assert [row["block"] for row in rows(folder / "plan_blocks.csv")] == [f"blocks.{index}" for index in range(4)]
    works = [row["work"] for row in rows(folder / "plan_schedule.csv")]
    assert works.count("forward") == works.count("recompute") == works.count("backward") == 2 * 4
    said = capsys.readouterr().out
    for words in ("Stages: tensor 1 x pipeline 2 x data 1, 1f1b", "Worst stage: ", "The real schedule on tensors"):
        assert words in said
    cells = [line.split("│") for line in said.splitlines() if line.count("│") == 7]
    differences = [float(row[4].strip().rstrip("%")) for row in cells if row[4].strip()[:1] in ("+", "-")]
    assert len(differences) == 2
    # a hidden state or two, of a model whose hidden states are large beside its weights
    assert all(-1 < difference < 10 for difference in differences)


def test_ranks_that_share_the_layers_of_a_model_that_is_built(folder: Path, seen: list[LayoutForecast]) -> None:
    """Arguments win over the config; afterwards there is no process group."""
    more = ["--tensor_parallel_size", "2", "--sequence_parallel", "true", "--pipeline_parallel_size", "2"]
    budget = ["--memory_budget", "10MiB", "--device", "A100", "--settings", "[none, full uniform 1]"]
    plan("gpt_bytes", folder, *SMALL, *more, *budget, "--trainer.devices", "8")
    (view,) = seen
    layout = view.staged.layout
    assert (layout.tensor, layout.sequence, layout.pipeline, layout.data) == (2, True, 2, 2)
    assert not torch.distributed.is_initialized()
    assert [one.name for one in view.beside[:2]] == ["none", "full uniform 1"]
    assert {segment.action for segment in view.plan.segments} == {Keep()}
    points = [(row["kind"], int(row["peak_bytes"])) for row in rows(folder / "plan.csv")]
    assert points[-1] == ("budget", 10 * 2**20)


def test_a_hugging_face_model(folder: Path, seen: list[LayoutForecast]) -> None:
    pytest.importorskip("transformers")
    model = ["--model.hidden_size", "32", "--model.num_layers", "3", "--data.length", "32"]
    plan("hf_llama", folder, *TINY, *model, "--pipeline_parallel_size", "2", "--split", "[1, 2]", "--device", "A100")
    (view,) = seen
    assert [rank.actions for rank in view.ranks] == ["selective norm+act", "selective norm+act x2"]
    assert [rank.blocks for rank in view.ranks] == [((0, 1),), ((1, 3),)]


def test_words_that_were_meant_for_another_layout(
    folder: Path, seen: list[LayoutForecast], capsys: pytest.CaptureFixture[str]
) -> None:
    """The 200B with stages of fewer blocks than its words name, and one tensor-parallel rank."""
    layout = ["--tensor_parallel_size", "1", "--pipeline_parallel_size", "2", "--num_microbatches", "4"]
    plan("gpt_200b", folder, *SMALL, *layout)
    (view,) = seen
    assert [rank.actions for rank in view.ranks] == ["full x2"] * 2
    assert view.budget_bytes is None
    assert view.staged.layout.data == 32  # what is left of 64 cards
    said = capsys.readouterr().out
    assert "2 is taken" in said
    assert "distribute_saved_activations=True is left out" in said


def test_a_budget_that_cannot_be_kept_is_one_message(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        plan("gpt_bytes", folder, *SMALL, "--pipeline_parallel_size", "2", "--memory_budget", "4KiB", "--device=A100")
    assert left.value.code == 2
    said = capsys.readouterr()
    assert "error: stage 0 (2 microbatches in flight)" in said.err
    assert "Traceback" not in said.err
    assert "No single setting keeps the budget" in said.out
    assert {path.name for path in folder.iterdir()} == FILES - {"plan.yaml"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--pipeline_parallel_size", "5"], "4 blocks for 5 pipeline stages"),
        (["--tensor_parallel_size", "3"], "does not divide"),
        (["--confirm", "true"], "confirm=True on one rank"),
        (["--pipeline_parallel_size", "2", "--schedule", "2f2b"], "schedule='2f2b'"),
    ],
)
def test_what_is_refused(options: list[str], words: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        plan("gpt_bytes", folder, *SMALL, *options, "--device", "A100", "--memory_budget", "1GiB")
    assert left.value.code == 2
    assert words in capsys.readouterr().err
    assert not torch.distributed.is_initialized()
