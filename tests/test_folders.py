"""Folders that are whole or absent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_recompute import folders
from lightning_recompute.folders import clean, publish, remove, set_aside, unfinished, writing

# without the package around it, which takes its time
HOLD = """
import importlib.util, sys, time
spec = importlib.util.spec_from_file_location("folders", sys.argv[1])
folders = importlib.util.module_from_spec(spec)
spec.loader.exec_module(folders)
with folders.writing(sys.argv[2]) as folder:
    (folder / "part").write_text("half")
    print("ready", flush=True)
    time.sleep(60)
"""


def write(path: Path, text: str) -> None:
    with writing(path) as folder:
        (folder / "content").write_text(text)
        publish(folder, path)


def names(parent: Path) -> list[str]:
    return sorted(os.listdir(parent))


@pytest.fixture(params=[True, False], ids=["exchange", "rename"])
def can_exchange(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if not request.param:
        monkeypatch.setattr(folders, "_exchange", lambda first, second: False)
    return bool(request.param)


@pytest.mark.usefixtures("can_exchange")
def test_a_folder_replaces_whatever_had_its_name(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "x.ckpt"
    write(path, "1")
    write(path, "2")
    assert (path / "content").read_text() == "2"
    remove(path)
    path.write_text("a file")
    write(path, "3")
    assert (path / "content").read_text() == "3"
    remove(path)
    other = tmp_path / "other"
    write(other, "4")
    path.symlink_to(other)
    write(path, "5")
    assert not path.is_symlink()
    assert [(folder / "content").read_text() for folder in (path, other)] == ["5", "4"]
    assert names(path.parent) == ["x.ckpt"]


@pytest.mark.usefixtures("can_exchange")
def test_the_older_one_is_whole_until_the_new_one_is(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    write(path, "1")

    def stop() -> None:
        with writing(path) as folder:
            (folder / "content").write_text("2")
            assert (path / "content").read_text() == "1"
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        stop()
    assert names(tmp_path) == ["x.ckpt"]
    assert (path / "content").read_text() == "1"


def test_a_swap_that_stops_between_two_renames_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.ckpt"
    write(path, "1")
    monkeypatch.setattr(folders, "_exchange", lambda first, second: False)
    rename = os.rename

    def stop(source: Path, target: Path) -> None:
        if Path(source).name.endswith(folders.SAVING):
            raise KeyboardInterrupt
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", stop)
        with pytest.raises(KeyboardInterrupt):
            write(path, "2")
    assert names(tmp_path) == [".x.ckpt.replaced"]
    write(tmp_path / "y.ckpt", "3")
    assert names(tmp_path) == ["x.ckpt", "y.ckpt"]
    assert (path / "content").read_text() == "1"


def test_leftovers_of_the_dead_go_and_those_of_the_living_stay(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    command = [sys.executable, "-c", HOLD, folders.__file__, str(path)]
    writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        assert clean(tmp_path) == []
        write(tmp_path / "y.ckpt", "1")
        with pytest.raises(FileExistsError, match="another process"):
            write(path, "1")
        assert names(tmp_path) == [".x.ckpt.saving", "y.ckpt"]
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.communicate(timeout=20)
    assert clean(tmp_path) == [unfinished(path)]
    assert names(tmp_path) == ["y.ckpt"]


def test_other_hidden_files_stay(tmp_path: Path) -> None:
    (tmp_path / ".saving").mkdir()
    (tmp_path / ".removed").mkdir()
    (tmp_path / ".note").write_text("x")
    (tmp_path / "z.saving").mkdir()
    (tmp_path / ".file.saving").write_text("x")
    before = names(tmp_path)
    clean(tmp_path)
    assert names(tmp_path) == before


def test_a_file_takes_the_name_of_a_folder(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    write(path, "1")
    with pytest.raises(RuntimeError, match="stop"), set_aside(path):
        raise RuntimeError("stop")
    assert (path / "content").read_text() == "1"
    with set_aside(path):
        path.write_text("a file")
    assert path.read_text() == "a file"
    with set_aside(path):
        path.write_text("another")
    assert names(tmp_path) == ["x.ckpt"]


def test_what_is_removed_loses_its_name_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.ckpt"
    write(path, "1")

    def stop(_: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(folders.shutil, "rmtree", stop)
        with pytest.raises(KeyboardInterrupt):
            remove(path)
    assert names(tmp_path) == [".x.ckpt.removed"]
    write(path, "2")
    assert names(tmp_path) == ["x.ckpt"]
    remove(path)
    remove(path)
    assert names(tmp_path) == []
