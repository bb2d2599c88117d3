"""One ordinary file of a checkpoint folder."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from checkpoint_strategy import FolderStrategy, Model, fit, same
from checkpoint_toys import build, dumped, train
from distributed import in_one

from lightning_recompute import consolidate as module
from lightning_recompute.cli import main
from lightning_recompute.consolidate import consolidate
from lightning_recompute.sharded_checkpoint import save_sharded

# more than what is let go of at once, less than the whole
SIZE = 2**21


def measure(folder: Path) -> int:
    """How much more memory than before the making of a file needs at most, in bytes."""

    def highest() -> int:
        status = Path("/proc/self/status").read_text()
        return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])

    before = highest()
    consolidate(folder / "a", folder / "x")
    return highest() - before


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Model]:
    """A folder, saved after the second epoch, and the model then."""
    folder = tmp_path_factory.mktemp("run")
    model = fit(folder, 2, FolderStrategy())
    return folder / "epoch=1.ckpt", model


def test_the_file_is_lightnings_own(tmp_path: Path, run: tuple[Path, Model]) -> None:
    path, model = run
    fit(tmp_path / "auto", 2)
    due = torch.load(tmp_path / "auto" / "epoch=1.ckpt", weights_only=True)
    found = torch.load(consolidate(path, tmp_path / "deep" / "x.ckpt"), weights_only=True)
    assert list(found) == list(due)
    assert found["pytorch-lightning_version"] == lightning.__version__
    assert type(found["state_dict"]) is type(due["state_dict"])
    assert list(found["state_dict"]) == list(due["state_dict"])
    assert found["state_dict"]._metadata == due["state_dict"]._metadata
    assert all(torch.equal(value, due["state_dict"][name]) for name, value in found["state_dict"].items())
    assert found["state_dict"]["embed.weight"].data_ptr() == found["state_dict"]["head.weight"].data_ptr()
    (state,), (expected,) = found["optimizer_states"], due["optimizer_states"]
    assert state.keys() == expected.keys()
    assert state["param_groups"] == expected["param_groups"]
    assert {number: list(values) for number, values in state["state"].items()} == {
        number: list(values) for number, values in expected["state"].items()
    }
    assert torch.equal(state["state"][3]["exp_avg"], expected["state"][3]["exp_avg"])
    assert float(state["state"][0]["step"]) == float(expected["state"][0]["step"]) == 8
    assert same(Model.load_from_checkpoint(tmp_path / "deep" / "x.ckpt"), model)


def test_any_trainer_goes_on_from_it(tmp_path: Path, run: tuple[Path, Model]) -> None:
    due = fit(tmp_path / "due", 3)
    assert same(fit(tmp_path, 3, ckpt_path=consolidate(run[0], tmp_path / "x.ckpt")), due)


def test_load_from_checkpoint_does_not_take_the_folder(run: tuple[Path, Model]) -> None:
    with pytest.raises(IsADirectoryError):
        Model.load_from_checkpoint(run[0])


def test_types_shapes_and_sums_of_the_file(tmp_path: Path) -> None:
    values = {
        "empty": torch.empty(0, 3),
        "number": torch.tensor(3),
        "half": torch.randn(3, 2).bfloat16(),
        "turned": torch.randn(3, 4).t(),
        "truth": torch.tensor([True, False]),
        "complex": torch.randn(2, dtype=torch.complex64),
    }
    save_sharded(tmp_path / "a", {"state_dict": values, "mine": {"tensor": torch.arange(3)}})
    file = consolidate(tmp_path / "a", tmp_path / "x.ckpt")
    found = torch.load(file, mmap=True)
    for name, value in values.items():
        assert found["state_dict"][name].dtype == value.dtype
        assert torch.equal(found["state_dict"][name], value)
    assert found["mine"]["tensor"].tolist() == [0, 1, 2]
    with zipfile.ZipFile(file) as archive:
        assert archive.testzip() is None


def test_memory_is_needed_for_one_tensor(tmp_path: Path) -> None:
    count = 24
    state = {str(number): torch.full((SIZE // 4,), float(number)) for number in range(count)}
    save_sharded(tmp_path / "a", {"state_dict": state})
    grown = in_one(measure, tmp_path)
    assert (tmp_path / "x").stat().st_size > count * SIZE
    assert grown < count * SIZE / 2


# ---- what is refused


def test_an_existing_file_stays_unless_it_may_go(tmp_path: Path, run: tuple[Path, Model]) -> None:
    file = tmp_path / "x.ckpt"
    file.write_text("mine")
    with pytest.raises(FileExistsError, match=r"exists; choose another name, or overwrite it \(--overwrite\)"):
        consolidate(run[0], file)
    assert file.read_text() == "mine"
    consolidate(run[0], file, overwrite=True)
    assert torch.load(file)["epoch"] == 1
    with pytest.raises(FileExistsError, match="is a folder; name the file"):
        consolidate(run[0], tmp_path, overwrite=True)


def test_what_is_no_folder_of_ours(tmp_path: Path, run: tuple[Path, Model]) -> None:
    with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
        consolidate(tmp_path / "nothing", tmp_path / "x")
    with pytest.raises(ValueError, match="is no checkpoint"):
        consolidate(tmp_path, tmp_path / "x")
    with pytest.raises(ValueError, match="is a file already"):
        consolidate(consolidate(run[0], tmp_path / "y"), tmp_path / "x")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "meta.pt").write_bytes((run[0] / "meta.pt").read_bytes())
    with pytest.raises(FileNotFoundError, match=r"is half a checkpoint: it has no \.metadata"):
        consolidate(tmp_path / "half", tmp_path / "x")
    assert not (tmp_path / "x").exists()


class Box:
    """No tensor, number or the like."""


def test_other_objects_need_trust(tmp_path: Path) -> None:
    save_sharded(tmp_path / "a", {"state_dict": {"x": torch.ones(2)}, "hyper_parameters": {"box": Box()}})
    with pytest.raises(ValueError, match=r"holds objects other than tensors.*\(--weights_only=false\)"):
        consolidate(tmp_path / "a", tmp_path / "x")
    file = consolidate(tmp_path / "a", tmp_path / "x", weights_only=False)
    assert isinstance(torch.load(file, weights_only=False)["hyper_parameters"]["box"], Box)


def test_a_failure_leaves_nothing(tmp_path: Path, run: tuple[Path, Model], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(module.Saved, "read", full)
    (tmp_path / "x").write_text("mine")
    with pytest.raises(OSError, match="the disk is full"):
        consolidate(run[0], tmp_path / "x", overwrite=True)
    assert os.listdir(tmp_path) == ["x"]
    assert (tmp_path / "x").read_text() == "mine"


# ---- the command


def test_the_command(tmp_path: Path, run: tuple[Path, Model], capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "x.ckpt"
    main(["consolidate", str(run[0]), str(file)])
    assert capsys.readouterr().out == f"{file}: 0.0 MiB\n"
    assert same(Model.load_from_checkpoint(file), run[1])
    with pytest.raises(SystemExit) as left:
        main(["consolidate", str(run[0]), str(file)])
    assert left.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: {file} exists; choose")
    main(["consolidate", str(run[0]), str(file), "--overwrite", "--weights_only=false"])


@pytest.mark.parametrize("arguments", [[], ["a"], ["a", "b", "--weights_only=maybe"]])
def test_wrong_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["consolidate", *arguments])
    assert left.value.code == 2
    assert "usage: lightning-recompute consolidate" in capsys.readouterr().err


def test_help_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "lightning-recompute consolidate --help   (CHECKPOINT_DIR FILE)" in capsys.readouterr().out


def test_optimizers_of_all_kinds(tmp_path: Path) -> None:
    net, optimizers = build("one", 1)
    train(net, optimizers)
    save_sharded(tmp_path / "a", dumped(net, optimizers))
    found = torch.load(consolidate(tmp_path / "a", tmp_path / "x"))["optimizer_states"]
    for state, optimizer in zip(found, optimizers, strict=True):
        due = optimizer.state_dict()
        assert state["param_groups"] == due["param_groups"]
        assert state["state"].keys() == due["state"].keys()
        optimizer.load_state_dict(state)
