"""One ordinary checkpoint file of a checkpoint folder, and the command for it."""

from __future__ import annotations

import argparse
import contextlib
import os
import pickle
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lightning_recompute.checkpoint_loading import read_checkpoint
from lightning_recompute.folders import sync_folder
from lightning_recompute.optimizer_names import without_names
from lightning_recompute.saved_states import Saved, with_unread
from lightning_recompute.sharded_checkpoint import local_path

SUBCOMMAND = "consolidate"


def consolidate(
    directory: str | os.PathLike[str],
    file: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    weights_only: bool | None = None,
) -> Path:
    """Make one file of a checkpoint folder: Lightning's own form, optimizer states numbered.

    In one process, without a process group. Tensors are read one at a time while the file is written, so that memory
    is needed for the largest one only.

    Args:
        directory: The folder.
        file: The file to make; it is whole or absent.
        overwrite: Replace an existing file.
        weights_only: As for `torch.load`: whether to refuse what is no tensor, number or the like in the folder. None:
            torch's default (refuse).

    Returns:
        The file.

    Raises:
        FileExistsError: `file` exists.
        FileNotFoundError: There is no folder, or it lacks files.
        ValueError: It is no checkpoint folder; a path is remote; or, with `weights_only`, it holds other objects.
    """
    directory, file = local_path(directory), local_path(file)
    if file.is_dir():
        raise FileExistsError(f"{file} is a folder; name the file to make")
    if file.exists() and not overwrite:
        raise FileExistsError(f"{file} exists; choose another name, or overwrite it (--overwrite)")
    if directory.is_file():
        raise ValueError(f"{directory} is a file already; `Trainer(...).fit(..., ckpt_path=...)` takes it as it is")
    try:
        checkpoint = read_checkpoint(directory, weights_only=weights_only)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{directory} holds objects other than tensors, numbers and the like (hyper-parameters, callbacks). If you "
            f"trust it: weights_only=False (--weights_only=false). torch says: {str(error).splitlines()[0]}"
        ) from error
    if "optimizer_states" in checkpoint:
        checkpoint["optimizer_states"] = [without_names(state) for state in checkpoint["optimizer_states"]]
    storages: dict[str, _Storage] = {}
    _save(with_unread(checkpoint, lambda saved: _Unread(saved, storages)), file)
    return file


def run(arguments: Sequence[str], program: str) -> str:
    """`lightning-recompute consolidate CHECKPOINT_DIR FILE`.

    Args:
        arguments: What follows the subcommand.
        program: The name of the program, for its help.

    Returns:
        What to tell the user.

    Raises:
        ValueError, OSError: As `consolidate`.
        SystemExit: Help was asked for, or an argument is wrong.
    """
    parser = argparse.ArgumentParser(
        prog=f"{program} {SUBCOMMAND}",
        description="Make one ordinary checkpoint file of a checkpoint folder, for load_from_checkpoint, for any "
        "Trainer, and for torch.load.",
    )
    parser.add_argument("checkpoint_dir", help="the folder that a run saved")
    parser.add_argument("file", help="the file to make")
    parser.add_argument("--overwrite", action="store_true", help="replace the file if it exists")
    parser.add_argument(
        "--weights_only",
        type=_boolean,
        help="true: refuse what is no tensor, number or the like; false: you trust the folder (default: torch's)",
    )
    given = parser.parse_args(arguments)
    made = consolidate(given.checkpoint_dir, given.file, overwrite=given.overwrite, weights_only=given.weights_only)
    return f"{made}: {made.stat().st_size / 2**20:.1f} MiB"


class _Storage(torch.UntypedStorage):
    """The memory of a tensor that is read when torch.save asks for it on the CPU, and let go of then."""

    saved: Saved

    def cpu(self) -> torch.UntypedStorage:
        """The content."""
        return self.saved.read().untyped_storage()


class _Unread:
    """Is pickled as the tensor that it stands for, as torch pickles one.

    Args:
        saved: The tensor.
        storages: By entry: tensors that are one in memory are one in the file.
    """

    def __init__(self, saved: Saved, storages: dict[str, _Storage]) -> None:
        self.saved = saved
        if saved.key not in storages:
            storage = _Storage(saved.shape.numel() * saved.dtype.itemsize, device="meta")  # type: ignore[no-untyped-call]
            storage.saved = saved
            storages[saved.key] = storage
        self.storage = storages[saved.key]

    def __reduce__(self) -> tuple[Any, ...]:
        typed = torch.storage.TypedStorage(wrap_storage=self.storage, dtype=self.saved.dtype, _internal=True)
        # what torch writes as the place of the data
        typed._fake_device = torch.device("cpu")
        strides = torch.empty(self.saved.shape, device="meta").stride()
        return torch._utils._rebuild_tensor_v2, (typed, 0, tuple(self.saved.shape), strides, False, OrderedDict())


def _save(checkpoint: dict[str, Any], file: Path) -> None:
    """Write beside the final name, then rename."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.parent / f".{uuid.uuid4().hex}.tmp"
    try:
        torch.save(checkpoint, temporary)
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())
        os.replace(temporary, file)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync_folder(file.parent)


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"found {text!r}; true or false is due")
    return text.lower() == "true"
