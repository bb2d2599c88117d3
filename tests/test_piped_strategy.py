"""RecomputeStrategy over pipeline stages under Lightning: the numbers, metrics and habits of one process."""

from __future__ import annotations

import contextlib
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import piped_failures
import pytest
import torch
from distributed import finish, in_one, in_ranks, start, wait_for_training
from lightning.pytorch.cli import LightningCLI
from piped_checks import FITS, check_all
from piped_four_checks import FITS as FITS_OF_FOUR
from piped_four_checks import check_four
from piped_models import MODELS
from piped_modules import Net

from lightning_recompute.pipeline_settings import PipelineSettings
from lightning_recompute.strategy import RecomputeStrategy

pytestmark = pytest.mark.xdist_group("piped strategy")

Found = list[dict[str, Any]]
TOLERANCES = {"32": 1e-5, "bf16-mixed": 3e-2, "bf16-true": 6e-2, "16-mixed": 3e-3, "overflow": 1e-2}
"""Of fits that are not in float64: what the order of additions makes of their losses and weights."""

IN_FLOAT32 = ("logs", "logs zbv", "mid-epoch")
"""Fits with torchmetrics, whose states are."""


@pytest.fixture(scope="module")
def due(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    result: dict[str, Any] = in_one(check_all, tmp_path_factory.mktemp("alone"))
    return result


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return in_ranks(check_all, tmp_path_factory.mktemp("ranks"), limit=400)


@pytest.fixture(scope="module")
def due_of_four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    result: dict[str, Any] = in_one(check_four, tmp_path_factory.mktemp("alone"))
    return result


@pytest.fixture(scope="module")
def found_by_four(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return in_ranks(check_four, tmp_path_factory.mktemp("four"), limit=400, num_processes=4)


def assert_alike(ours: Any, due: Any, tolerance: float = 1e-12, where: str = "") -> None:
    """Equal, numbers but for the order of additions; with the same keys in the same places."""
    if isinstance(due, dict):
        assert ours.keys() == due.keys(), where
        for key, value in due.items():
            assert_alike(ours[key], value, tolerance, f"{where} {key}")
    elif isinstance(due, list):
        assert len(ours) == len(due), where
        for index, value in enumerate(due):
            assert_alike(ours[index], value, tolerance, f"{where} {index}")
    elif isinstance(due, torch.Tensor):
        torch.testing.assert_close(
            ours, due, rtol=0, atol=tolerance, equal_nan=True, msg=lambda text: f"{where}: {text}"
        )
    elif isinstance(due, float):
        assert ours == pytest.approx(due, rel=tolerance, abs=tolerance, nan_ok=True), where
    else:
        assert ours == due, where


@pytest.mark.parametrize("name", FITS)
def test_a_fit_equals_one_process(found: Found, due: dict[str, Any], name: str) -> None:
    """After each batch and epoch: loss, learning rate, all metrics and those of the bar; at the end the weights."""
    tolerance = TOLERANCES.get(name, 1e-12)
    for rank in found:
        ours, expected = rank["fits"][name], due["fits"][name]
        assert_alike(ours["weights"], expected["weights"], tolerance)
        assert_alike(ours, expected, 1e-6 if name in IN_FLOAT32 else tolerance)


def test_what_the_fits_have_in_them(due: dict[str, Any]) -> None:
    """So that the test above cannot be right for nothing."""
    fits = due["fits"]
    assert [len(fits[name]["steps"]) for name in ("plain", "accumulate", "stream", "mid-epoch")] == [12, 12, 8, 6]
    assert fits["accumulate"]["global_step"] == 4  # windows of four batches and of two
    assert fits["plateau"]["steps"][-1]["lr"] < fits["plateau"]["steps"][0]["lr"]
    assert fits["overflow"]["scale"] == 2.0**10 / 4 * 2, "two steps were left out"
    assert {"val_loss/dataloader_idx_0", "val_loss/dataloader_idx_1"} <= set(fits["several"]["metrics"])
    logged = fits["logs"]["metrics"]
    assert {"train/MeanSquaredError", "val/MeanAbsoluteError", "a", "spread", "mean_step", "bar shown"} <= {
        *logged,
        *fits["logs"]["steps"][0],
    }
    assert logged["rows"] == logged["first"] == logged["number"] == 43
    assert fits["no epoch"]["steps"] == fits["limit 0"]["steps"] == []


@pytest.mark.parametrize("name", MODELS)
def test_known_models(found: Found, due: dict[str, Any], name: str) -> None:
    """Weights to the last bits; losses of Hugging Face's models are in float32."""
    for rank in found:
        ours, expected = rank["models"][name], due["models"][name]
        assert_alike(ours["weights"], expected["weights"])
        assert_alike(ours, expected, 1e-6)


@pytest.mark.parametrize("name", FITS_OF_FOUR)
def test_pipelines_beside_other_groups(found_by_four: Found, due_of_four: dict[str, Any], name: str) -> None:
    """Tensor parallelism within stages, data parallelism around them; metrics over the data-parallel ranks."""
    expected = due_of_four[name]
    for rank in found_by_four:
        ours = rank[name]
        assert_alike(ours["weights"], expected["weights"])
        if "dp2" not in name:
            assert_alike(ours, expected, 1e-6)
            continue
        assert ours["metrics"].keys() == expected["metrics"].keys()
        synced = set(expected["metrics"]) if name != "dp2 tied" else set()  # which logs without sync_dist
        for key in synced - {"train_loss_step"}:
            assert ours["metrics"][key] == pytest.approx(expected["metrics"][key], rel=1e-6), key


def test_ranks_of_a_pipeline_see_the_same_rows(found_by_four: Found) -> None:
    """Ranks 0 and 2 are one pipeline, 1 and 3 another: the data is divided between the two, each row once."""
    given = [rank["given"] for rank in found_by_four]
    assert given[0] == given[2]
    assert given[1] == given[3]
    assert len(given[0]) == len(given[1]) == 20
    assert len(set(given[0] + given[1])) == 40


def test_reports_of_throughput(found: Found, due: dict[str, Any]) -> None:
    """The FLOPs of the whole model, once; what stages repeat before the blocks is in HFU. Samples are counted once."""
    embedding_flops = 2 * (6 * 4096 + 4096 * 6) * 40
    for rank in found:
        for name, expected in due["reports"].items():
            ours = rank["reports"][name]
            for mine, alone in zip(ours["speed"], expected["speed"], strict=True):
                assert 2 * mine["flops"] == pytest.approx(alone["flops"])
                assert mine["samples_per_second"] > 0
            for mine, alone in zip(ours["done"], expected["done"], strict=True):
                assert 2e9 * mine == pytest.approx(1e9 * alone + embedding_flops)


def test_reports_of_memory(found: Found) -> None:
    """Each rank's own share, and not what it took to divide the module: the first epoch is as the second."""
    for rank in found:
        for report in rank["reports"].values():
            rows = report["memory"]
            shares = {row["rank"]: row["parameters_bytes"] for row in rows if row["phase"] == "optimizer"}
            assert shares[0] + shares[1] == report["parameters"]
            assert shares[1] < 0.01 * report["parameters"]
            peaks = {(row["phase"], row["rank"]): row["peak_bytes"] for row in rows if row["epoch"] == 0}
            for row in rows:
                assert row["peak_bytes"] == pytest.approx(peaks[row["phase"], row["rank"]], abs=4096)


def test_batch_norms_see_microbatches(found: Found, due: dict[str, Any]) -> None:
    """Weights and statistics are those of as many small batches; a buffer behind the blocks is whole again."""
    for rank in found:
        assert_alike(rank["norms"]["weights"], due["norms"]["weights"])
        assert rank["norms"]["weights"]["seen"] == 80


def test_hooks_in_lightnings_order_and_once_a_batch(found: Found, due: dict[str, Any]) -> None:
    """With the gradients and the modes that are to be seen there."""
    for rank in found:
        assert rank["habits"]["events"] == due["habits"]["events"]
    plain = due["habits"]["events"]["plain"]
    assert "on_after_backward: every gradients, 19 in training" in plain
    assert plain.count("backward: no gradients, 19 in training") == 6


def test_early_stopping_the_best_checkpoint_and_evaluation(found: Found, due: dict[str, Any]) -> None:
    expected = due["habits"]["stopping"]
    assert 1 < expected["epoch"] < 8
    for index, rank in enumerate(found):
        ours = rank["habits"]["stopping"]
        for key in set(expected) - {"decisions", "bar"}:
            assert_alike(ours[key], expected[key], where=key)
        votes = [True, True, False, True, False, True, False, False]
        assert ours["decisions"] == votes * expected["epoch"]
        if index == 0:  # the others' bars are off
            assert_alike(_numbers(ours["bar"]), _numbers(expected["bar"]))
            assert_alike(_numbers(rank["habits"]["rich"]), _numbers(due["habits"]["rich"]))


def _numbers(shown: list[dict[str, str]]) -> list[dict[str, float]]:
    return [{key: float(value) for key, value in each.items()} for each in shown]


def test_several_fits(found: Found, due: dict[str, Any]) -> None:
    """Two on one Trainer, evaluation between, one more on another under another schedule."""
    for rank in found:
        assert_alike(rank["habits"]["several"], due["habits"]["several"])
        assert rank["habits"]["several"][1]["optimizers"] == 1


def test_the_search_for_a_learning_rate(found: Found, due: dict[str, Any]) -> None:
    for rank in found:
        assert_alike(rank["tuned"], due["tuned"], 1e-9)
        assert len(rank["tuned"]["rates"]) == 20
        assert rank["tuned"]["restored"]


REFUSED = {
    "BatchSizeFinder": "BatchSizeFinder does not work while the module's parameters are distributed",
    "EMAWeightAveraging": "EMAWeightAveraging does not work while the module's parameters are distributed",
    "StochasticWeightAveraging": "StochasticWeightAveraging does not work while the module's parameters are distr",
    "Recompute": "RecomputeStrategy and the callback Recompute in one Trainer",
    "manual": "manual optimization under pipeline_parallel_size > 1",
    "LBFGS": "LBFGS under pipeline_parallel_size > 1: its step looks at all parameters together",
    "penalty": "the step uses after the blocks a value that was made before the blocks",
    "apart": "ranks that share layers, or run stages of one pipeline, were given different batches",
    "few blocks": "4 blocks for 6 pipeline stages",
    "split": "split=[1, 1] adds up to 2 blocks; the model has 4",
}


def test_what_is_refused(found: Found) -> None:
    """Before or in the first step, in words of ours, on every rank, with nothing left on the module."""
    for rank in found:
        for name, told in REFUSED.items():
            assert rank["refusals"][name].startswith(f"ValueError: {told}"), name
            assert rank["refusals"][f"{name} left"] == [], name


def test_shuffled_data_needs_no_seed(found: Found) -> None:
    assert [rank["refusals"]["shuffled"] for rank in found] == ["nothing", "nothing"]


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"num_microbatches": 4}, ValueError, "num_microbatches=4 with pipeline_parallel_size=1"),
        ({"schedule": "gpipe", "split": [1, 3]}, ValueError, "which has one stage: set pipeline_parallel_size"),
        ({"pipeline_parallel_size": 0}, ValueError, "at least 1 is due"),
        ({"pipeline_parallel_size": 2, "num_microbatches": 0}, ValueError, "at least 1 is due"),
        ({"pipeline_parallel_size": 2, "num_microbatches": 2.0}, TypeError, "an int is due"),
        ({"pipeline_parallel_size": 2, "schedule": "1f2b"}, ValueError, "one of gpipe, 1f1b"),
        (
            {"pipeline_parallel_size": 2, "virtual_pipeline_size": 2, "num_microbatches": 5},
            ValueError,
            "do not fall into equal rounds over 2 pipeline ranks",
        ),
        ({"pipeline_parallel_size": 2, "start_method": "spawn"}, ValueError, "brings back the weights of one process"),
    ],
)
def test_options_that_mean_nothing(options: dict[str, Any], error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        RecomputeStrategy(**options)


CONFIG = """
trainer:
  accelerator: cpu
  devices: 2
  logger: false
  strategy:
    class_path: lightning_recompute.RecomputeStrategy
    init_args:
      pipeline_parallel_size: 2
      virtual_pipeline_size: 2
      num_microbatches: 8
      schedule: interleaved-zero-bubble
"""


def cli(folder: Path, *args: str) -> Any:
    (folder / "config.yaml").write_text(CONFIG)
    given = ["--config", str(folder / "config.yaml"), *args]
    return LightningCLI(Net, run=False, save_config_callback=None, seed_everything_default=False, args=given)


def test_a_config_and_what_overrides_it(tmp_path: Path) -> None:
    prefix = "--trainer.strategy.init_args"
    assert cli(tmp_path).trainer.strategy.pipeline_settings == PipelineSettings(
        virtual=2, num_microbatches=8, schedule="interleaved-zero-bubble"
    )
    others = [f"{prefix}.schedule=1f1b", f"{prefix}.virtual_pipeline_size=1", f"{prefix}.split=[1,3]"]
    assert cli(tmp_path, *others).trainer.strategy.pipeline_settings == PipelineSettings(
        num_microbatches=8, split=[1, 3]
    )


@pytest.mark.parametrize(
    ("argument", "told"),
    [("num_microbatches=many", "num_microbatches"), ("schedule=1f2b", "schedule"), ("spilt=count", "spilt")],
)
def test_a_config_with_a_mistake(argument: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises((SystemExit, ValueError)) as error:
        cli(tmp_path, f"--trainer.strategy.init_args.{argument}")
    assert told in capsys.readouterr().err + str(error.value)


# ---- a rank fails

FAILURES = {
    # what runs: the rank that fails, what it says
    "last_stage": (1, "ArithmeticError: the user's own mistake"),
    "memory": (1, "OutOfMemoryError: CUDA out of memory"),
    "loose_metric": (1, "ValueError: self.log was given a MeanMetric that is no attribute of the module"),
    "first_stage": (0, "ArithmeticError: the user's own mistake"),
    "skipped": (1, ""),
    "validation": (1, "ArithmeticError: the user's own mistake"),
}
OFTEN = ("last_stage", "memory", "first_stage")


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Found]:
    """All of them at once; each is a group of processes, which its failure ends."""

    def run(name: str) -> Found:
        return ended(name, tmp_path_factory.mktemp(name))

    with ThreadPoolExecutor(2) as threads:
        return dict(zip(OFTEN, threads.map(run, OFTEN), strict=True))


def ended(name: str, folder: Path) -> Found:
    """What both ranks came to; a transfer that was underway may crash a process after that."""
    with contextlib.suppress(AssertionError):
        return in_ranks(getattr(piped_failures, name), folder)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def assert_failed(ranks: Found, rank: int, told: str) -> None:
    failing, peer = ranks[rank], ranks[1 - rank]
    assert failing["told"].startswith(told)
    assert f"\nrank {rank} failed: {told}" in peer["told"]
    for each in ranks:
        assert each["seconds"] < 30
        assert each["states"] == ["TrainerStatus.INTERRUPTED"]
        assert each["left"] == []
        assert each["names"] == 28
        assert each["devices"] == ["cpu"]


@pytest.mark.parametrize("name", OFTEN)
def test_a_rank_that_fails_ends_all_with_the_reason(failed: dict[str, Found], name: str) -> None:
    """The failing rank has its own error, its peer says whose; no checkpoint is waited for, no patch stays."""
    assert_failed(failed[name], *FAILURES[name])


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(set(FAILURES) - set(OFTEN)))
def test_more_ranks_that_fail(name: str, tmp_path: Path) -> None:
    assert_failed(ended(name, tmp_path), *FAILURES[name])


def test_processes_of_a_script_end_with_the_reason(tmp_path: Path) -> None:
    """Started by Lightning's launcher: a code other than 0, the cause in the output, nothing left on a module."""
    outcome = finish(start("piped_train.py", tmp_path, "raise"))
    assert outcome.returncode != 0
    assert "ArithmeticError: the user's own mistake" in outcome.output
    assert "rank 1 failed: ArithmeticError" in outcome.output
    assert (tmp_path / "left-1").read_text() == "[]"
    assert not (tmp_path / "on_exception.ckpt").exists(), "a part alone is no checkpoint"


@pytest.mark.long
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_a_signal_ends_all(signum: signal.Signals, tmp_path: Path) -> None:
    process = start("piped_train.py", tmp_path, "wait")
    wait_for_training(tmp_path)
    os.kill(process.pid, signum)
    outcome = finish(process, limit=60)
    assert outcome.returncode == (1 if signum == signal.SIGINT else 0), outcome.output
    assert (tmp_path / "left-0").read_text() == "[]"
