"""Checkpoints of fits over pipeline stages: whole, exact, of the plain module's form, whatever a rank has of it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import in_ranks
from piped_checkpoint_checks import KINDS, LAYOUTS, check_all, habits_of, killed
from piped_checkpoint_models import Model, differing, fit, made, trainer_of

from lightning_recompute.checkpoint_loading import read_checkpoint
from lightning_recompute.consolidate import consolidate
from lightning_recompute.saved_states import EntryReader

pytestmark = pytest.mark.xdist_group("piped checkpoints")

Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fits")


@pytest.fixture(scope="module")
def found(folder: Path) -> Found:
    """What each rank found; the files of `resume` lie in a folder for each layout."""
    (folder / "ranks").mkdir()
    return in_ranks(check_all, folder / "ranks", 300)


@pytest.fixture(params=LAYOUTS)
def files(request: pytest.FixtureRequest, folder: Path, found: Found) -> Path:
    assert found
    return folder / "ranks" / str(request.param)


def test_a_run_goes_on_from_each_format(found: Found) -> None:
    """To the bit, with the learning rates that callbacks see at the start of each batch."""
    for rank in found:
        for name in LAYOUTS:
            assert [rank["resume"][f"{name} {ending}"] for ending in ("ckpt", "file", "async")] == [[], [], []]
            assert rank["resume"][f"{name} kinds"] == [True, False, True]
        assert [rank["resume"]["start ckpt"], rank["resume"]["start file"]] == [[], []]


def test_formats_hold_the_same(files: Path, tmp_path: Path) -> None:
    """At the end and before the first batch, every value and the order of the keys."""
    for name in ("start", "end"):
        due = torch.load(files / f"{name}.file", weights_only=True)
        for ending in ("ckpt", "async"):
            file = consolidate(files / f"{name}.{ending}", tmp_path / f"{name}.{ending}", weights_only=True)
            assert differing(torch.load(file, weights_only=True), due) == []
        weights = torch.load(files / f"{name}.weights", weights_only=True)
        assert "optimizer_states" not in weights
        assert differing(dict(weights["state_dict"]), dict(due["state_dict"])) == []


def test_keys_are_the_plain_modules(files: Path) -> None:
    model = made(**KINDS[files.name])
    for name in ("start", "end"):
        state = torch.load(files / f"{name}.file")["state_dict"]
        assert list(state) == list(model.state_dict())
        assert state._metadata == model.state_dict()._metadata  # type: ignore[attr-defined]
        assert torch.equal(state["head.weight"], state["embed.weight"])


def test_each_entry_is_there_once(files: Path) -> None:
    model = made(**KINDS[files.name])
    tensors = [*model.named_parameters(), *model.named_buffers()]
    due = Counter(f"state_dict.{name}" for name, _ in tensors)
    due += Counter(
        f"optimizer_states.0.state.{name}.{key}"
        for name, parameter in model.named_parameters()
        for key in ("step", "exp_avg", "exp_avg_sq")
        if parameter.requires_grad
    )
    entries = EntryReader(files / "end.ckpt").entries
    assert set(entries.state_dict_metadata) == set(due)
    assert Counter(index.fqn for index in entries.storage_data) == due


def test_buffers_and_objects_are_those_of_the_stage_that_runs_their_block(files: Path) -> None:
    state = torch.load(files / "end.file")["state_dict"]
    assert state["seen"] == 8
    for block in range(4):
        assert state[f"blocks.{block}.load"] > 0
        assert state[f"blocks.{block}._extra_state"]["num_calls"] >= 8
        if files.name == "1f1b":
            assert state[f"blocks.{block}.norm.num_batches_tracked"] == 8
            assert state[f"blocks.{block}.norm.running_mean"].abs().min() > 0


def test_plain_lightning_takes_the_file(folder: Path, found: Found, tmp_path: Path) -> None:
    due = found[0]["resume"]["interleaved due"]
    files = folder / "ranks" / "interleaved"
    file = consolidate(files / "end.ckpt", tmp_path / "whole.ckpt")
    for path in (files / "end.file", file):
        model = Model.load_from_checkpoint(path, map_location="cpu", weights_only=True)
        weights = {name: value for name, value in torch.load(path)["state_dict"].items() if "_extra" not in name}
        own = model.double().state_dict()
        assert [name for name, value in weights.items() if (own[name] - value).abs().max() > 1e-6] == []
        record = fit(trainer_of(tmp_path, "auto", 2), made(seed=9), path, weights_only=True)
        assert record.losses == pytest.approx(due, rel=1e-9)


def test_saved_before_the_first_batch_and_after_the_fit(found: Found) -> None:
    """States that wait for their stage are saved; after the fit each rank gives its part."""
    for rank in found:
        assert rank["after"] == {key: [] for key in ("replaced", "start", "idle", "folder", "file", "module")}


def test_a_rank_reads_the_states_of_its_parameters_only(found: Found) -> None:
    names = [name for name, parameter in made().named_parameters() if parameter.requires_grad]
    for rank in found:
        assert rank["read_parts"]["read"] == rank["read_parts"]["own"]
    both = Counter(name for rank in found for name in rank["read_parts"]["read"])
    assert both == Counter(names) + Counter(["embed.weight"])


def test_checkpoints_in_mid_epoch_and_what_is_done_with_them(found: Found, tmp_path: Path) -> None:
    due = habits_of(tmp_path, lambda: "auto")
    for rank in found:
        ours = rank["habits"]
        assert ours["names"] == due["names"]
        for key in ("best", "last", "losses"):
            assert ours[key] == pytest.approx(due[key], rel=1e-9)
        assert ours["best"][0] == pytest.approx(ours["score"])


def test_values_come_back_while_the_module_is_divided(found: Found) -> None:
    for rank, each in enumerate(found):
        ours = each["back"]
        assert [ours["folder"], ours["file"], ours["finder"]] == [[], [], []]
        assert ours["points"] == 6
        assert "blocks.0.up.weight" in ours["missing"]
        assert "other" in ours["unexpected"]
        assert ours["lenient"] == "nothing"
        assert f"size mismatch for blocks.{3 * rank}.up.bias" in ours["shape"]
        assert "has 2 parameter groups, this one 3" in ours["groups"]


def test_optimizers_and_modules_that_differ(found: Found) -> None:
    for rank in found:
        ours = rank["others"]
        assert ours["bare"] == []
        assert 'Missing key(s) in state_dict: "shift"' in ours["grown"]
        assert ours["lenient"] == 4
        assert ours["less"] == [True, True, True]
        assert ours["late"].startswith("ValueError: SGD was given other parameters after the first batch")


def test_after_an_error_nobody_waits_for_parts(found: Found) -> None:
    for rank in found:
        assert rank["exception"]["told"].startswith("RuntimeError: as planned")
        assert not any(name.endswith(".ckpt") for name in rank["exception"]["left"])


def test_a_killed_stage_leaves_the_former_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"exit codes \[1, -9\]"):
        in_ranks(killed, tmp_path, 60)
    assert read_checkpoint(tmp_path / "x.ckpt")["global_step"] == 2
    assert sorted(path.suffix for path in tmp_path.iterdir() if path.is_dir()) == [".ckpt"]
