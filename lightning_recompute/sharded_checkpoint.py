"""A checkpoint as a folder: every rank writes its part, and the folder gets its name when it is whole.

Such a folder loads under any other layout (`checkpoint_loading`). Lightning's own `load_from_checkpoint` and a Trainer
with another strategy need one file: `lightning-recompute consolidate CHECKPOINT_DIR FILE` makes it.
"""

from __future__ import annotations

import copy
import io
import os
import pickle
import warnings
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from lightning_recompute.folders import publish, remove, unfinished, writing
from lightning_recompute.optimizer_names import by_name, without_names
from lightning_recompute.peers import Peers
from lightning_recompute.saved_states import filled, is_absent, take_apart
from lightning_recompute.version import __version__

META = "meta.pt"
"""The file, in a checkpoint folder, of all that is no entry of torch.distributed.checkpoint."""
ENTRIES = ".metadata"
"""torch.distributed.checkpoint's own list of what the folder holds."""
FORMAT = "lightning_recompute"
"""The key of `META` that says what wrote the folder, and in which form."""

# Parts that pipeline stages have different ones of.
_OF_STAGES = ("state_dict", "optimizer_states")


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Whether a path is one of fsspec's (`s3://...`), other than `file://`."""
    return "://" in os.fspath(path) and not os.fspath(path).startswith("file://")


def local_path(path: str | os.PathLike[str]) -> Path:
    """A path as one of the file system.

    Raises:
        ValueError: It is remote.
    """
    if is_remote(path):
        raise ValueError(
            f"a checkpoint folder is put in place by a rename, which {os.fspath(path)!r} cannot do; save to a path "
            "of a file system that all processes share, or as one file (checkpoint_format='single')"
        )
    return Path(os.fspath(path).removeprefix("file://")).absolute()


class ShardedSaver:
    """Writes checkpoint folders, one at a time.

    Every rank calls the same methods in the same order. What fails on one rank raises on all.

    Args:
        timeout: How long a rank waits for the others; None: torch's default (30 minutes).
    """

    def __init__(self, timeout: timedelta | None = None) -> None:
        self._timeout = timeout
        self._peers: Peers | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._in_flight: Future[None] | None = None

    def save(self, path: str | os.PathLike[str], checkpoint: Mapping[str, Any], *, asynchronous: bool = False) -> None:
        """Save a checkpoint; collective.

        Of tensors that are no DTensors, and of all that is no tensor, the first rank's are saved.

        Args:
            path: The folder to make; rank 0's counts. What has that name is replaced when the new one is whole.
            checkpoint: Lightning's dump, optimizer states by `optimizer_names.named_state`. It is left as it is.
            asynchronous: Copy the tensors to the CPU and return; the rest happens in a thread, its errors are raised
                by the next call. At most one is in flight: a second one waits for the first.

        Raises:
            ValueError: The path is remote, or a DTensor is inside an object where its parts would not be found.
            Exception: What the file system, or another rank, met.
        """
        peers = self._peers = Peers.current(self._peers, self._timeout)
        peers.together(self.wait)
        tensors: dict[str, Tensor] = {}

        def describe() -> tuple[Path, dict[str, Any]]:
            named = dict(checkpoint)
            if "optimizer_states" in named:
                named["optimizer_states"] = [by_name(state) for state in named["optimizer_states"]]
            return local_path(path), take_apart(named, tensors)

        found, outline = peers.together(describe)
        target = peers.first(found)
        outlines = peers.different({key: outline[key] for key in _OF_STAGES if key in outline})
        content = peers.together(lambda: _content(_merged(outline, outlines)) if peers.rank == 0 else b"")
        if not asynchronous:
            _write(target, tensors, content, peers)
            return
        copies = {key: _copied(tensor) for key, tensor in tensors.items()}
        self._in_flight = self._executor().submit(_write, target, copies, content, peers)

    def gather(self, checkpoint: Mapping[str, Any]) -> dict[str, Any] | None:
        """A checkpoint of whole tensors, as Lightning's own without any sharding; collective.

        Args:
            checkpoint: As for `save`. Ranks that share DTensors have the same keys in the same order.

        Returns:
            On rank 0: the checkpoint, its tensors on the CPU, ready for one file. None elsewhere.
        """
        peers = self._peers = Peers.current(self._peers, self._timeout)
        tensors: dict[str, Tensor] = {}
        outline = peers.together(lambda: take_apart(dict(checkpoint), tensors))
        part = {key: outline[key] for key in _OF_STAGES if key in outline}
        forms = {key: (tensor.shape, tensor.dtype) for key, tensor in tensors.items() if key.startswith(_OF_STAGES)}
        parts = peers.different((part, forms))
        outlines = {rank: part for rank, (part, _) in parts.items()}
        merged = peers.together(lambda: _merged(outline, outlines) if peers.rank == 0 else {})
        senders: dict[str, int] = {}
        for rank, (_, theirs) in parts.items():
            for key in theirs:
                senders.setdefault(key, rank)
        whole: dict[str, Tensor] = {}
        for key, tensor in tensors.items():
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if peers.rank == 0:
                whole[key] = full.detach().cpu()
            elif senders.get(key) == peers.rank:
                peers.give_to_first(full)
        if peers.rank != 0:
            return None
        for key, sender in senders.items():
            if sender != 0:
                whole[key] = peers.take_from(sender, *parts[sender][1][key])
        made: dict[str, Any] = filled(merged, whole)
        if "optimizer_states" in made:
            made["optimizer_states"] = [without_names(state) for state in made["optimizer_states"]]
        return made

    def remove(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint, on the rank that is asked; not before what is in flight has its name.

        A folder that would be missed if the save in flight failed stays in that case.
        """
        if self._in_flight is None:
            remove(local_path(path))
            return
        saving = self._in_flight

        def after() -> None:
            saving.result()
            remove(local_path(path))

        self._in_flight = self._executor().submit(after)

    def wait(self) -> None:
        """Wait until nothing is in flight, and raise what it met."""
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is not None:
            in_flight.result()

    def close(self) -> None:
        """Wait, and give up thread and process group; before the run's own process group goes."""
        try:
            self.wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
            if self._peers is not None:
                self._peers.leave()
            self._thread = self._peers = None

    def _executor(self) -> ThreadPoolExecutor:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        return self._thread


def save_sharded(path: str | os.PathLike[str], checkpoint: Mapping[str, Any]) -> None:
    """Save one checkpoint and wait for it; see `ShardedSaver.save`."""
    saver = ShardedSaver()
    try:
        saver.save(path, checkpoint)
    finally:
        saver.close()


def missing_parts(folder: Path, entries: Metadata) -> list[str]:
    """The files of a checkpoint folder that are not there, or end too early."""
    ends: dict[str, int] = {}
    for place in entries.storage_data.values():
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    sizes = {name: path.stat().st_size for name in ends if (path := folder / name).is_file()}
    return sorted(name for name, end in ends.items() if sizes.get(name, -1) < end)


def _write(target: Path, tensors: dict[str, Tensor], content: bytes, peers: Peers) -> None:
    """Write all parts and publish the folder; collective, in any thread."""
    folder = unfinished(target)
    with ExitStack() as stack:
        peers.together(lambda: stack.enter_context(writing(target)) if peers.rank == 0 else None)
        entries = _write_entries(folder, tensors, peers)

        def finish() -> None:
            if peers.rank != 0:
                return
            with open(folder / META, "xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            if missing := missing_parts(folder, entries):
                raise OSError(
                    f"rank 0 does not see {missing[0]} in {folder}, which another rank wrote; a checkpoint folder has "
                    "to be on a file system that all processes share"
                )
            publish(folder, target)

        peers.together(finish)


def _write_entries(folder: Path, tensors: dict[str, Tensor], peers: Peers) -> Metadata:
    with ExitStack() as stack:
        if peers.group is None:  # warnings are filtered for all threads at once: only where torch has one
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
        try:
            entries: Metadata = save(
                tensors,
                storage_writer=FileSystemWriter(folder),
                # what several ranks hold is one tensor, or differs (statistics of BatchNorm) and must not be mixed
                planner=DefaultSavePlanner(flatten_state_dict=False, dedup_save_to_lowest_rank=True),
                process_group=peers.group,
                no_dist=peers.group is None,
            )
        except CheckpointException as error:  # no Exception of Python's
            rank, (cause, _) = min(error.failures.items())
            raise RuntimeError(f"rank {rank} could not write {folder}: {type(cause).__name__}: {cause}") from error
    return entries


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


class _Pickler(pickle.Pickler):
    """Refuses to write one rank's part of a tensor as if it were the whole."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, DTensor):
            raise ValueError(
                f"found a DTensor of shape {tuple(obj.shape)} inside an object of the checkpoint, where only this "
                "rank's part would be saved; keep it in dicts, lists or tuples, or save its full_tensor()"
            )
        return NotImplemented


def _content(outline: Mapping[str, Any]) -> bytes:
    """The file for all but the tensors."""
    form = {"version": 1, "torch": str(torch.__version__), "package": __version__}
    buffer = io.BytesIO()
    torch.save({**outline, FORMAT: form}, buffer, pickle_module=SimpleNamespace(Pickler=_Pickler, __name__="pickle"))
    return buffer.getvalue()


def _merged(outline: Mapping[str, Any], parts: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """A checkpoint without its tensors: the first rank's, and what other pipeline stages have besides."""
    whole = dict(outline)
    _, *others = parts.values()
    for other in others:
        if "state_dict" in other:
            whole["state_dict"] = _joined(whole["state_dict"], other["state_dict"])
        if "optimizer_states" in other:
            pairs = zip(whole["optimizer_states"], other["optimizer_states"], strict=True)
            whole["optimizer_states"] = [_joined_optimizers(ours, theirs) for ours, theirs in pairs]
    if any(is_absent(value) for value in whole.get("state_dict", {}).values()):
        made = copy.copy(whole["state_dict"])  # without what a hook of the user's has taken out on the rank that had it
        for name in [name for name, value in made.items() if is_absent(value)]:
            del made[name]
        whole["state_dict"] = made
    return whole


def _joined(ours: Mapping[Any, Any], theirs: Mapping[Any, Any]) -> Any:
    made: Any = copy.copy(ours)
    made.update({key: value for key, value in theirs.items() if key not in ours or is_absent(ours[key])})
    return made


def _joined_optimizers(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Two ranks' states of the parameters of one optimizer, in their order."""
    pairs = list(zip(ours["param_groups"], theirs["param_groups"], strict=True))
    groups = [
        {**first, "params": list(dict.fromkeys([*first["params"], *second["params"]]))} for first, second in pairs
    ]
    state = _joined(ours["state"], theirs["state"])
    order = [*(key for group in groups for key in group["params"] if key in state), *state]
    return {**ours, "state": {key: state[key] for key in dict.fromkeys(order)}, "param_groups": groups}
