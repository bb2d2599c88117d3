"""RecomputeStrategy on two processes: the numbers of one process with the joined batch, and of Lightning's DDP."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import finish, in_one, in_ranks, start, wait_for_training
from distributed_checks import ROWS, Exact, Manual, Shared, Unused, check_all, gradients
from distributed_train import train_forked_and_spawned
from lightning_modules import NUM_BLOCKS, NUM_SAMPLES, Net, SeedSteps, fit
from torch import Tensor

from lightning_recompute.plan import RecomputePlan

pytestmark = pytest.mark.xdist_group("two processes")

Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("two")


@pytest.fixture(scope="module")
def found(folder: Path) -> Found:
    """What both ranks found in all the fits of distributed_checks.py."""
    return in_ranks(check_all, folder)


def assert_close(ours: dict[str, Tensor], due: dict[str, Tensor]) -> None:
    """Equal but for the order of additions in float64."""
    assert ours.keys() == due.keys()
    for name, value in due.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("case", "module", "options"),
    [
        ("plain", Exact, {}),
        ("pairs", Exact, {}),
        ("accumulate", Exact, {"accumulate_grad_batches": 2}),
        ("clip", Exact, {"gradient_clip_val": 0.01}),
        ("shared", Shared, {}),
        ("shared, searched", Shared, {}),
        ("unused, searched", Unused, {}),
        ("manual", Manual, {}),
    ],
)
def test_gradients_equal_one_process_with_the_joined_batch(
    found: Found, case: str, module: type[Net], options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T17, case 21: shared blocks, unused parameters and tied weights included; each hook fires once a step."""
    monkeypatch.chdir(tmp_path)
    alone, _ = gradients("auto", module, rows=2 * ROWS, **options)
    ranks = [rank["gradients"][case] for rank in found]
    assert {rank["wrapper"] for rank in ranks} == {"DistributedDataParallel"}
    for step, due in enumerate(alone["gradients"]):
        ours = [rank["gradients"][step] for rank in ranks]
        reduced = "accumulate_grad_batches" not in options or step % 2 == 1 or step == len(alone["gradients"]) - 1
        if reduced:
            # a parameter that never gets a gradient has zeros in one world and None in the other
            assert_close({name: value for name, value in ours[0].items() if name in due}, due)
            assert all(not value.any() for name, value in ours[0].items() if name not in due)
        # an accumulation step sums on each process alone: nothing is sent
        equal = all(torch.equal(value, ours[1][name]) for name, value in ours[0].items())
        assert equal == reduced
    assert_close(ranks[0]["weights"], alone["weights"])
    assert ranks[0]["fired"] == ranks[1]["fired"] == alone["fired"]


def test_equal_to_lightnings_ddp_to_the_bit(found: Found) -> None:
    """Compared in the script; here: both ranks hold the same weights after different data."""
    for case in ("dropout", "batch norms"):
        ours, other = (rank["ddp"][case] for rank in found)
        assert ours["losses"] != other["losses"]
        parameters = [name for name in ours["weights"] if "running" not in name]
        assert all(torch.equal(ours["weights"][name], other["weights"][name]) for name in parameters)
    batches = len(found[0]["ddp"]["batch norms"]["losses"])
    assert found[0]["ddp"]["batch norms"]["weights"]["blocks.0.norm.num_batches_tracked"] == batches


def test_data_is_split_and_logs_are_averaged(found: Found) -> None:
    """T1, T6: each sample on one rank; sync_dist and torchmetrics reduce over both."""
    given, own = [rank["data"]["given"] for rank in found], [rank["data"]["own"] for rank in found]
    assert sorted(given[0] + given[1]) == list(range(NUM_SAMPLES))
    assert own == [list(range(0, NUM_SAMPLES, 2)), list(range(1, NUM_SAMPLES, 2))]
    for index, rank in enumerate(found):
        assert rank["data"]["mean_rank"] == 0.5
        assert rank["data"]["total"] == NUM_SAMPLES
        assert rank["data"]["sampler"] == {"num_replicas": 2, "rank": index}


def test_collectives(found: Found) -> None:
    """T4: booleans are counted over the world, whatever `reduce` means."""
    for rank in found:
        assert rank["collectives"] == {
            "booleans": [[False, False, False, True], [False, True, True, True]],
            "mean": 1.5,
            "sum": 3.0,
            "gathered": [[1.0], [2.0]],
            "broadcast": {"from": 0},
            "not a tensor": "text",
        }


def test_two_fits_and_evaluation(found: Found) -> None:
    for rank in found:
        assert rank["evaluation"]["epochs"] == 3
        assert rank["evaluation"]["predicted"].shape == (NUM_SAMPLES // 2, 1)
        assert rank["evaluation"]["validated"] == found[0]["evaluation"]["validated"] or rank is found[1]


def test_checkpoints_resume_anywhere(
    found: Found, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shows 6 on two processes; the file is an ordinary one for one process and Lightning's default too."""
    monkeypatch.chdir(tmp_path)
    for rank in found:
        steps = len(rank["checkpoint"]["rest"])
        assert steps == len(rank["checkpoint"]["whole"]) // 3
        assert rank["checkpoint"]["rest"] == rank["checkpoint"]["whole"][-steps:]
    assert found[0]["checkpoint"] != found[1]["checkpoint"]
    state = torch.load(folder / "epoch=1.ckpt", weights_only=True)
    assert list(state["state_dict"]) == list(Net().state_dict())
    resumed = fit("auto", ckpt_path=str(folder / "epoch=1.ckpt"), max_epochs=3, callbacks=[SeedSteps()])
    assert resumed.trainer.current_epoch == 3


def test_errors_that_every_rank_meets(found: Found) -> None:
    """T8 and Lightning's own refusals; ours says which argument to set, and keeps torch's text."""
    for rank in found:
        refusals = rank["refusals"]
        assert "SyncBatchNorm layers only work with GPU modules" in refusals["synchronized"]
        assert refusals["none"].startswith("RuntimeError: Skipping the `training_step` by returning None")
        assert "Expected to have finished reduction in the prior iteration" in refusals["unused"]
        assert refusals["unused"].endswith("RecomputeStrategy(find_unused_parameters=True)")
        assert "not supported with distributed strategies" in refusals["batch size finder"]


def test_only_rank_zero_speaks_and_writes(found: Found, folder: Path) -> None:
    assert found[1]["messages"] == []
    assert found[0]["messages"][0] == "Recompute: blocks (3 x Block): blocks 0-2 full, one by one"
    assert RecomputePlan.load(folder / "plan.yaml").num_blocks == NUM_BLOCKS


def assert_trained(found: Found, folder: Path) -> None:
    """Both ranks ended with the numbers of the fit in distributed_checks.py."""
    for rank, other in enumerate(found):
        due, left = other["ddp"]["dropout"], torch.load(folder / f"rank{rank}.pt")
        assert left["losses"] == due["losses"]
        assert all(torch.equal(value, left["weights"][name]) for name, value in due["weights"].items())


def test_fork_and_spawn(found: Found, tmp_path: Path) -> None:
    """Shows 5, by registered name; the process that launched them gets the weights."""
    for name, weights in in_one(train_forked_and_spawned, tmp_path).items():
        assert_trained(found, tmp_path / name)
        due = found[0]["ddp"]["dropout"]["weights"]
        assert all(torch.equal(value, due[key]) for key, value in weights.items())


@pytest.mark.long
def test_torchrun(found: Found, tmp_path: Path) -> None:
    """Shows 5."""
    outcome = finish(start("distributed_train.py", tmp_path, torchrun=True))
    assert outcome.returncode == 0, outcome.output
    assert_trained(found, tmp_path)


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.long)])
def test_popen_and_an_exception_on_one_rank(found: Found, rank: int, tmp_path: Path) -> None:
    """Shows 5 and 8, T18: trains; then non-zero exit in time, module as before, a checkpoint without the other rank."""
    outcome = finish(start("distributed_train.py", tmp_path, "raise", rank))
    assert_trained(found, tmp_path)
    assert outcome.returncode != 0
    assert "ArithmeticError: the user's own mistake" in outcome.output
    assert (tmp_path / f"unpatched-{rank}").exists()
    # rank 0 writes it, where it failed or where it lost its peer
    assert (tmp_path / "on_exception.ckpt").exists()


@pytest.mark.long
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_a_signal_to_the_main_process_ends_all(signum: signal.Signals, tmp_path: Path) -> None:
    process = start("distributed_train.py", tmp_path, "wait")
    children = wait_for_training(tmp_path)
    assert children[0] == process.pid
    os.kill(process.pid, signum)
    outcome = finish(process, limit=60)
    # Lightning's answer to SIGTERM is a plain SystemExit
    assert outcome.returncode == (1 if signum == signal.SIGINT else 0)
    assert (tmp_path / "unpatched-0").exists()
    assert (tmp_path / "on_exception.ckpt").exists()
