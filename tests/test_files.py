"""Files are whole or absent."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from lightning_recompute.files import write_atomically


def test_content_folders_and_result(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "plan.yaml"
    assert write_atomically(str(path), "größer ≥ 1\n") == path
    assert path.read_bytes() == "größer ≥ 1\n".encode()
    assert list(path.parent.iterdir()) == [path]


def test_a_name_without_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_atomically("report.txt", "x")
    assert os.listdir(tmp_path) == ["report.txt"]


def test_the_longest_name_that_the_file_system_takes(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 255)
    write_atomically(path, "x")
    assert path.read_text() == "x"


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_an_interrupted_write_leaves_the_old_file_and_nothing_else(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_atomically(tmp_path / "plan.yaml", "old")

    def fail(*_: object) -> None:
        raise error

    for step in ("fsync", "replace"):
        monkeypatch.setattr(os, step, fail)
        with pytest.raises(type(error)):
            write_atomically(path, "new")
        monkeypatch.undo()
        assert path.read_text() == "old"
        assert list(tmp_path.iterdir()) == [path]


def test_text_that_cannot_be_encoded_leaves_the_old_file(tmp_path: Path) -> None:
    path = write_atomically(tmp_path / "plan.yaml", "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "\ud800")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_content_is_on_disk_before_the_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    for step in ("fsync", "replace"):
        real = getattr(os, step)
        monkeypatch.setattr(os, step, lambda *args, step=step, real=real: (steps.append(step), real(*args)))
    write_atomically(tmp_path / "plan.yaml", "x")
    assert steps == ["fsync", "replace"]


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_rights_are_those_of_any_new_file(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        ours, plain = write_atomically(tmp_path / "ours", "x"), tmp_path / "plain"
        plain.write_text("x")
    finally:
        os.umask(before)
    assert stat.S_IMODE(ours.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


def test_the_umask_of_the_process_is_never_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is process-wide: another thread would make a file that everybody can write."""

    def touched(mask: int) -> int:
        raise AssertionError(f"umask({mask:o})")

    monkeypatch.setattr(os, "umask", touched)
    write_atomically(tmp_path / "plan.yaml", "x")


def test_a_folder_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").mkdir()
    with pytest.raises(OSError, match=r"plan\.yaml"):
        write_atomically(tmp_path / "plan.yaml", "x")
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.yaml"]


def test_a_file_in_the_place_of_a_folder(tmp_path: Path) -> None:
    write_atomically(tmp_path / "logs", "x")
    with pytest.raises(OSError, match="logs"):
        write_atomically(tmp_path / "logs" / "plan.yaml", "x")


def test_many_writers_at_once_leave_one_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    texts = {letter * 20_000 for letter in "abcdefgh"}
    seen: set[str] = set()

    def write(text: str) -> None:
        for _ in range(5):
            write_atomically(path, text)
            seen.add(path.read_text())

    threads = [threading.Thread(target=write, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen
    assert seen <= texts
    assert list(tmp_path.iterdir()) == [path]
