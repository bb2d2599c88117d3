"""Checkpoint folders: every layout loads what every layout saved, to the bit; a crash leaves the older one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from checkpoint_layouts import FILES, load_all, names_are_left_out, save_all, save_and_load_all
from checkpoint_saving import check_all, dying, killed, small
from checkpoint_toys import EVERY
from distributed import in_ranks
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_recompute.checkpoint_loading import read_checkpoint
from lightning_recompute.sharded_checkpoint import save_sharded

pytestmark = pytest.mark.xdist_group("sharded_checkpoint")

Found = dict[str, list[str]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Where values differ, by the layouts that saved and loaded."""
    folder = tmp_path_factory.mktemp("layouts")

    def run(function: Callable[[Path], Any], size: int) -> Found:
        place = folder / f"{function.__name__}{size}"
        place.mkdir()
        if size == 1:
            return function(place)  # type: ignore[no-any-return]
        first, *others = in_ranks(function, place, 60, num_processes=size)
        assert all(other == first for other in others)
        return first  # type: ignore[no-any-return]

    run(save_all, 1)
    run(save_all, 4)
    results = {**run(save_and_load_all, 2), **run(load_all, 4), **run(load_all, 1)}
    assert all(names_are_left_out(folder / "x", layout) for layout in EVERY)
    return results


@pytest.mark.parametrize("loading", EVERY)
@pytest.mark.parametrize("saved", EVERY)
def test_every_layout_loads_what_every_layout_saved(found: Found, saved: str, loading: str) -> None:
    assert found[f"{saved}.ckpt -> {loading}"] == []


@pytest.mark.parametrize("loading", EVERY)
def test_every_layout_loads_an_ordinary_file(found: Found, loading: str) -> None:
    for saved in FILES:
        assert found[f"{saved}.file -> {loading}"] == []


# ---- saving


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each case of `checkpoint_saving` found on the first rank."""
    first, second = in_ranks(check_all, tmp_path_factory.mktemp("saving"), 90)
    ours = {"now", "later", "hidden", "one rank", "error"}  # errors differ: one rank's own, and what others say of it
    for case in first:
        assert {key: value for key, value in first[case].items() if key not in ours} == {
            key: value for key, value in second[case].items() if key not in ours
        }
        for key in ours & set(first[case]):
            first[case][f"{key} on 1"] = second[case][key]
    return first  # type: ignore[no-any-return]


def test_an_asynchronous_save_has_the_values_of_its_time(seen: dict[str, Any]) -> None:
    assert seen["asynchronous"] == {"absent": True, "waited": True, "wrong": [], "names": ["a", "b"]}


def test_the_older_one_is_removed_when_the_new_one_is_there(seen: dict[str, Any]) -> None:
    case = seen["removal"]
    assert case["before"] == [".new.saving", "old"]
    assert case["after"] == ["new"]
    assert "the disk is full" in case["error"]
    assert "the disk is full" in case["error on 1"]
    assert case["kept"] == ["new"]
    assert case["end"] == []


def test_a_rank_that_cannot_write_fails_all_and_the_older_one_stays(seen: dict[str, Any]) -> None:
    case = seen["failing"]
    for key in ("now", "later"):
        for text in (case[key], case[f"{key} on 1"]):
            assert text.startswith("RuntimeError: rank 1 could not write")
            assert text.endswith("OSError: the disk is full")
    assert (case["epoch"], case["names"], case["end"]) == (1, ["a"], 4)


def test_what_has_the_name_is_replaced_and_rank_0_names_it(seen: dict[str, Any]) -> None:
    case = seen["replacing"]
    assert (case["names"], case["epoch"], case["file"]) == (["rank0"], 2, 3)
    assert case["content"][-1] == "meta.pt"
    assert case["content"][0] == ".metadata"


def test_what_cannot_be_saved_is_refused_on_all_ranks(seen: dict[str, Any]) -> None:
    case = seen["refused"]
    assert case["remote"].startswith("ValueError: a checkpoint folder is put in place by a rename")
    assert case["hidden"].startswith("ValueError: found a DTensor of shape (7, 6) inside an object")
    assert case["hidden on 1"].startswith("RuntimeError: rank 0 failed: ValueError: found a DTensor")
    assert case["one rank"].startswith("RuntimeError: rank 1 failed: ValueError")
    assert case["one rank on 1"].startswith("ValueError")
    assert case["names"] == []


def test_additions_of_callbacks_and_users(seen: dict[str, Any]) -> None:
    assert seen["others"] == {
        "list": True,
        "tuple": True,
        "dict": True,
        "whose": [0, 0, 0.0],
        "types": ["Tensor", "tuple"],
    }


def test_ranks_with_parameters_of_their_own_make_one_checkpoint(seen: dict[str, Any]) -> None:
    assert seen["stages"] == {"wrong": [], "momenta": [1.0, 1.0, 2.0, 2.0], "groups": 4}


def test_a_sharded_module_that_is_whole_for_the_moment(seen: dict[str, Any]) -> None:
    assert seen["still_whole"] == {"wrong": [], "name": "up.weight"}


# ---- crashes


def test_a_killed_rank_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"exit codes \[1, -9\]"):
        in_ranks(dying, tmp_path, 60)
    assert [read_checkpoint(tmp_path / name)["epoch"] for name in ("step=1.ckpt", "last.ckpt")] == [0, 1]
    # rank 0 lived, and cleaned up
    assert [name for name in os.listdir(tmp_path) if name.endswith(".saving")] == []


def test_what_a_killed_run_leaves_is_no_checkpoint_and_goes_at_the_next_save(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"exit codes \[-9, -9\]"):
        in_ranks(killed, tmp_path, 60)
    assert read_checkpoint(tmp_path / "last.ckpt")["epoch"] == 1
    assert (tmp_path / ".last.ckpt.saving").is_dir()
    callback = ModelCheckpoint(tmp_path)
    # what fit(ckpt_path="last") chooses from
    assert callback._find_last_checkpoints(pl.Trainer(logger=False)) == {str(tmp_path / "last.ckpt")}
    save_sharded(tmp_path / "other.ckpt", small(8))
    assert not (tmp_path / ".last.ckpt.saving").exists()
