"""Checkpoints of runs whose processes each have a part of the module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointing_fits import LAYOUTS, differing, fit, fit_all, make, make_model, trainer
from distributed import in_ranks

from lightning_recompute.checkpoint_loading import is_sharded_checkpoint
from lightning_recompute.consolidate import consolidate
from lightning_recompute.gpt import GPT

pytestmark = pytest.mark.xdist_group("checkpointing strategy")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fits")


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Any]:
    first, second = in_ranks(fit_all, folder)
    assert first == second
    return first  # type: ignore[no-any-return]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_goes_on_from_folders_and_files(found: dict[str, Any], layout: str) -> None:
    assert found[f"{layout} kinds"] == [True, True, False]
    for kind in (".", "async", "file"):
        assert found[f"{layout} from {kind}"] == []


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("origin", LAYOUTS)
def test_one_layout_loads_anothers(found: dict[str, Any], origin: str, layout: str) -> None:
    assert found[f"{origin} -> {layout}"] == []


@pytest.mark.usefixtures("found")
@pytest.mark.parametrize("origin", LAYOUTS)
def test_one_process_loads_them_and_goes_on(folder: Path, tmp_path: Path, origin: str) -> None:
    saved = torch.load(folder / "saved0.pt")[origin]
    path = folder / origin / "epoch=0.ckpt"
    assert differing(fit(tmp_path, make("one"), 1, path), saved) == []
    file = consolidate(path, tmp_path / "file.ckpt")
    assert differing(dict(GPT.load_from_checkpoint(file).state_dict()), saved) == []
    # from the folder and from the file alike
    due = fit(tmp_path / "due", make("one"), 2, path)
    assert differing(fit(tmp_path / "again", "auto", 2, file), due) == []


def test_objects_other_than_tensors(found: dict[str, Any]) -> None:
    assert found["refused"].startswith("UnpicklingError: Weights only load failed")
    assert found["trusted"] == "no error"


def test_lr_finder_gives_everything_back(found: dict[str, Any]) -> None:
    points, wrong = found["lr"]
    assert points > 3
    assert wrong == []


def test_after_an_error_nobody_waits_for_parts(found: dict[str, Any]) -> None:
    assert found["exception"].startswith("RuntimeError: as planned")
    assert found["left"] == ["plan.yaml"]


def test_plugins_that_write_files_are_refused(found: dict[str, Any]) -> None:
    assert found["plugin"].startswith("ValueError: AsyncCheckpointIO writes files, and this run saves folders")


def test_after_the_fit_and_validation(found: dict[str, Any]) -> None:
    assert found["after"] is True
    assert found["validated"] == "no error"


def test_modules_on_the_meta_device_load_their_parts(found: dict[str, Any]) -> None:
    cases = {key: wrong for key, wrong in found.items() if key.startswith("meta")}
    assert len(cases) == 4
    assert not any(cases.values())


# ---- one process


def test_one_process_saves_files_unless_folders_are_asked_for(tmp_path: Path) -> None:
    due = fit(tmp_path / "due", "auto", 2)
    for number, (checkpoint_format, is_folder) in enumerate([("auto", False), ("single", False), ("sharded", True)]):
        place = tmp_path / str(number)
        fit(place, make("one", checkpoint_format), 1)
        assert is_sharded_checkpoint(place / "epoch=0.ckpt") == is_folder
        assert differing(fit(place, make("one"), 2, place / "epoch=0.ckpt"), due) == []
    keys = [set(torch.load(tmp_path / name / "epoch=0.ckpt", weights_only=True)) for name in ("due", "0")]
    assert keys[0] == keys[1]


def test_a_file_replaces_a_folder_of_its_name(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    for checkpoint_format in ("sharded", "single", "sharded"):
        run = trainer(tmp_path, make("one", checkpoint_format), 1)
        run.fit(make_model(), torch.utils.data.DataLoader([torch.arange(9)]))
        run.save_checkpoint(path)
        assert is_sharded_checkpoint(path) == (checkpoint_format == "sharded")
        run.strategy.remove_checkpoint(path) if checkpoint_format == "single" else None
    run.strategy.remove_checkpoint(path)
    assert not path.exists()


def test_saving_in_the_background_needs_folders(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="this run saves files; add checkpoint_format='sharded'"):
        fit(tmp_path, make("one", async_checkpoint=True), 1)
    fit(tmp_path, make("one", "sharded", async_checkpoint=True), 1)
    assert is_sharded_checkpoint(tmp_path / "epoch=0.ckpt")


def test_a_module_without_memory_takes_its_weights_when_it_has_some(tmp_path: Path) -> None:
    due = fit(tmp_path, make("one", "sharded"), 1)
    with torch.device("meta"):
        model = make_model()
    assert differing(fit(tmp_path / "again", make("one"), 1, tmp_path / "epoch=0.ckpt", model=model), due) == []
