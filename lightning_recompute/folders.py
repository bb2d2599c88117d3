"""Folders that are whole or absent: written beside their final name, then put in its place.

`NAME` is being written as `.NAME.saving`, and its writer holds a lock on that folder for as long as it lives: one
that nobody locks was left by a process that ended while writing, and goes when something is saved next to it. So does
what is being deleted, as `.NAME.removed`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

if sys.platform != "win32":
    import fcntl

SAVING = ".saving"
REPLACED = ".replaced"
REMOVED = ".removed"

_HERE = -100  # AT_FDCWD
_EXCHANGE = 2  # RENAME_EXCHANGE


def unfinished(path: str | os.PathLike[str]) -> Path:
    """Where a folder is written before it gets its name."""
    path = Path(path)
    return path.with_name(f".{path.name}{SAVING}")


@contextlib.contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A new, empty folder that is going to be `path`, locked until the end of the block.

    What an interrupted writer left in the same place is cleaned up first. An exception removes the folder.

    Args:
        path: The final name; folders on the way are made.

    Yields:
        The folder to write into; hand it to `publish`.

    Raises:
        OSError: The folder cannot be made, or another process is just writing it.
    """
    folder = unfinished(path)
    folder.parent.mkdir(parents=True, exist_ok=True)
    clean(folder.parent)
    if folder.exists():
        with _locked(folder) as ours:
            if not ours:
                raise FileExistsError(f"{folder} is being written by another process; save under another name")
            _delete(folder)
    folder.mkdir()
    with _locked(folder):
        try:
            yield folder
        except BaseException:
            _delete(folder)
            raise


def publish(folder: Path, path: str | os.PathLike[str]) -> None:
    """Give a finished folder its final name; what had that name before is deleted.

    The two change places in one step where the file system can do that (most on Linux). Elsewhere the older one is
    renamed to `.NAME.replaced` first: it is whole at any moment, and gets its name back by `clean` after a crash.

    Args:
        folder: What `writing` gave; all its files have reached the disk.
        path: The final name; a file or folder of that name is replaced, a link is replaced and not followed.
    """
    path = Path(path)
    sync_folder(folder)
    if not os.path.lexists(path):
        os.rename(folder, path)
        sync_folder(path.parent)
        return
    if _exchange(folder, path):
        sync_folder(path.parent)
        _delete(folder)
        return
    older = path.with_name(f".{path.name}{REPLACED}")
    _delete(older)
    os.rename(path, older)
    os.rename(folder, path)
    sync_folder(path.parent)
    _delete(older)


@contextlib.contextmanager
def set_aside(path: str | os.PathLike[str]) -> Iterator[None]:
    """While a file is written to `path`: a folder of that name is out of the way, and gone once the file is there.

    Args:
        path: Where the file goes; nothing happens where no folder is.
    """
    path = Path(path)
    if not path.is_dir() or path.is_symlink():
        yield
        return
    older = path.with_name(f".{path.name}{REPLACED}")
    _delete(older)
    os.rename(path, older)
    try:
        yield
    except BaseException:
        if not os.path.lexists(path):
            os.rename(older, path)
        raise
    _delete(older)


def clean(parent: Path) -> list[Path]:
    """Remove what interrupted writers left in a folder, and give a replaced folder its name back where it is missing.

    Args:
        parent: The folder to look in.

    Returns:
        The leftovers that are gone.
    """
    gone = []
    for name in sorted(os.listdir(parent)):
        leftover = parent / name
        if not name.startswith(".") or name in (SAVING, REPLACED, REMOVED):
            continue
        if name.endswith(REPLACED):
            path = parent / name[1 : -len(REPLACED)]
            if os.path.lexists(path):
                _delete(leftover)
            else:
                os.rename(leftover, path)
            gone.append(leftover)
        elif name.endswith(REMOVED) and leftover.is_dir():
            _delete(leftover)
            gone.append(leftover)
        elif name.endswith(SAVING) and leftover.is_dir():
            with _locked(leftover) as ours:
                if ours:
                    _delete(leftover)
                    gone.append(leftover)
    return gone


def remove(path: str | os.PathLike[str]) -> None:
    """Delete a file, a link or a folder with all it holds; nothing happens where nothing is.

    A folder loses its name first, so that no part of it is taken for the whole, even after a crash.
    """
    path = Path(path)
    if path.is_dir() and not path.is_symlink():
        hidden = path.with_name(f".{path.name}{REMOVED}")
        _delete(hidden)
        os.rename(path, hidden)
        path = hidden
    _delete(path)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Wait until the entries of a folder have reached the disk; does nothing where folders cannot be opened."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two names in one step; whether the system could."""
    if sys.platform != "linux":
        return False
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    return bool(rename(_HERE, os.fsencode(first), _HERE, os.fsencode(second), _EXCHANGE) == 0)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Hold the lock of a folder; False: its writer lives, or nobody can tell."""
    if sys.platform == "win32":
        yield False
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # also where the file system has no locks
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)
