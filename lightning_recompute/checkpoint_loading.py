"""Checkpoints into a module and optimizers of any layout: a folder or a file, each rank reads its part.

Two steps, as Lightning takes them: `read_checkpoint` gives a dict of Lightning's form without reading the tensors;
`load_module_state` and `load_optimizer_states` put them where they belong. Nothing here waits for other ranks.
"""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_recompute.optimizer_names import by_number, matched
from lightning_recompute.saved_states import EntryReader, Saved, SavedStates, put_together
from lightning_recompute.sharded_checkpoint import ENTRIES, FORMAT, META, is_remote, local_path, missing_parts


def is_sharded_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a checkpoint folder (or one that lacks parts), and not a file.

    Lightning's `load_from_checkpoint` takes files only (IsADirectoryError); make one by
    `lightning-recompute consolidate CHECKPOINT_DIR FILE`.
    """
    if is_remote(path):
        return False
    folder = local_path(path)
    return folder.is_dir() and any((folder / name).is_file() for name in (META, ENTRIES))


def read_checkpoint(path: str | os.PathLike[str], *, weights_only: bool | None = None) -> dict[str, Any]:
    """Read a checkpoint but for its tensors; not collective.

    Args:
        path: A checkpoint folder, or a file that `torch.save` wrote.
        weights_only: As for `torch.load`: whether to refuse everything but tensors, numbers and the like.

    Returns:
        Lightning's dict, optimizer states numbered. The tensors of a folder are read when they are asked for
        (`SavedStates`), those of a file are mapped: either way memory is taken only for what is used.

    Raises:
        FileNotFoundError: Nothing is there, or the folder lacks files.
        ValueError: The folder is no checkpoint, or one of another program.
    """
    path = local_path(path)
    if path.is_dir():
        return _read_folder(path, weights_only)
    if not path.exists():
        raise FileNotFoundError(f"there is no checkpoint at {path}")
    try:
        return dict(torch.load(path, map_location="cpu", weights_only=weights_only, mmap=True))
    except RuntimeError as error:
        if "mmap can only be used" not in str(error):  # a file of an old torch
            raise
    return dict(torch.load(path, map_location="cpu", weights_only=weights_only))


def _read_folder(folder: Path, weights_only: bool | None) -> dict[str, Any]:
    found = [name for name in (META, ENTRIES) if (folder / name).is_file()]
    if not found:
        raise ValueError(f"{folder} is no checkpoint: a folder with the files {META} and {ENTRIES} is due")
    if len(found) == 1:
        lacking = ENTRIES if found == [META] else META
        raise FileNotFoundError(f"{folder} is half a checkpoint: it has no {lacking}; take an older one")
    outline = torch.load(folder / META, map_location="cpu", weights_only=weights_only)
    form = outline.pop(FORMAT, None) if isinstance(outline, dict) else None
    if form is None:
        raise ValueError(
            f"{folder} was not written by lightning-recompute; if Lightning's ModelParallelStrategy or FSDPStrategy "
            "did, make one file of it by `python -m lightning.pytorch.utilities.consolidate_checkpoint` and load that"
        )
    if form["version"] != 1:
        raise ValueError(
            f"{folder} has form {form['version']}, written by lightning-recompute {form['package']}; this one knows "
            "form 1; install the newer one"
        )
    try:
        reader = EntryReader(folder)
    except (EOFError, pickle.UnpicklingError) as error:
        raise FileNotFoundError(
            f"{folder} is half a checkpoint: {ENTRIES} ends too early; take an older one"
        ) from error
    if missing := missing_parts(folder, reader.entries):
        raise FileNotFoundError(
            f"{folder} is half a checkpoint: {', '.join(missing)} is not there, or ends too early; take an older one"
        )
    checkpoint: dict[str, Any] = put_together(outline, reader)
    if "optimizer_states" in checkpoint:
        checkpoint["optimizer_states"] = [by_number(state) for state in checkpoint["optimizer_states"]]
    return checkpoint


def load_module_state(module: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> Any:
    """Load the state of a module, sharded or not; not collective.

    Args:
        module: The module; its DTensors get their part.
        state: `checkpoint["state_dict"]`: whole tensors, read or not, or DTensors.
        strict: As for `Module.load_state_dict`.

    Returns:
        What `Module.load_state_dict` returns: missing and unexpected keys.

    Raises:
        RuntimeError: Keys are missing or unexpected (when strict) or shapes differ; torch's message names them, with
            both shapes.
    """
    layouts = {name: value for name, value in module.state_dict().items() if isinstance(value, DTensor)}
    values = state.data if isinstance(state, SavedStates) else state
    laid_out = laid_out_as([(value, layouts.get(name)) for name, value in values.items()])
    complete = OrderedDict(zip(values, laid_out, strict=True))
    if (versions := getattr(state, "_metadata", None)) is not None:  # of the modules, as torch keeps them
        vars(complete)["_metadata"] = versions
    return module.load_state_dict(complete, strict=strict)


def load_optimizer_states(
    module: nn.Module, optimizers: Sequence[Optimizer], states: Sequence[Mapping[str, Any]], *, strict: bool = True
) -> None:
    """Load the states of optimizers whose parameters may be DTensors; not collective.

    Parameters are found by name where the checkpoint is a folder, in any order, tied or not; by number where it is
    an ordinary file, as torch does.

    Args:
        module: The module whose parameters they have.
        optimizers: The optimizers.
        states: `checkpoint["optimizer_states"]`.
        strict: Refuse parameters that the saved optimizers did not have, and the other way round.

    Raises:
        ValueError: The numbers of optimizers, groups or (when strict) the parameters differ.
    """
    if len(states) != len(optimizers):
        raise ValueError(
            f"the checkpoint has the states of {len(states)} optimizers, configure_optimizers made {len(optimizers)}; "
            "make those that were saved, or load the weights only"
        )
    for optimizer, state in zip(optimizers, states, strict=True):
        own = matched(state, optimizer, module, strict=strict)
        if "param_groups" in own:
            own["state"] = laid_out_states(own["state"], optimizer)
        optimizer.load_state_dict(own)


def load_sharded(
    path: str | os.PathLike[str],
    module: nn.Module,
    optimizers: Sequence[Optimizer] = (),
    *,
    strict: bool = True,
    weights_only: bool | None = None,
) -> dict[str, Any]:
    """Load a checkpoint into a module and, when given, its optimizers; not collective.

    Args:
        path: See `read_checkpoint`.
        module: See `load_module_state`.
        optimizers: See `load_optimizer_states`.
        strict: For both.
        weights_only: See `read_checkpoint`.

    Returns:
        The checkpoint, for what else is in it.
    """
    checkpoint = read_checkpoint(path, weights_only=weights_only)
    load_module_state(module, checkpoint["state_dict"], strict=strict)
    if optimizers:
        load_optimizer_states(module, optimizers, checkpoint["optimizer_states"], strict=strict)
    return checkpoint


def laid_out_as(wanted: Iterable[tuple[Any, Tensor | None]]) -> list[Any]:
    """Values of a checkpoint in the layouts of other tensors; what has not been read is read all at once.

    Args:
        wanted: A value (a whole tensor, a `Saved`, anything else) and the tensor that says how it is due.

    Returns:
        The values. Where a DTensor of the same shape is due: a DTensor laid out so. Otherwise as they are, and read.
    """
    pairs = [(value, like if isinstance(like, DTensor) else None) for value, like in wanted]
    unread: dict[int, tuple[Saved, Tensor | None]] = {}
    made: list[Any] = []
    for index, (value, like) in enumerate(pairs):
        fits = like is not None and isinstance(value, Tensor | Saved) and value.shape == like.shape
        if isinstance(value, Saved):
            unread[index] = (value, like if fits else None)
        elif fits and not isinstance(value, DTensor):
            assert like is not None
            value = _part(value, like)
        made.append(value)
    if unread:
        reader = next(iter(unread.values()))[0].reader
        for index, tensor in zip(unread, reader.read(list(unread.values())), strict=True):
            made[index] = tensor
    return made


def _part(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a tensor that it has as a whole."""
    made = torch.empty_like(like, dtype=whole.dtype)
    assert isinstance(made, DTensor)
    for chunk in made.__create_chunk_list__():
        place = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
        made.to_local().copy_(whole[place])
    return made


def laid_out_states(states: Mapping[Any, Any], optimizer: Optimizer) -> dict[Any, Any]:
    """States of parameters, each tensor laid out as its parameter.

    Args:
        states: By the numbers of the parameters, read or not.
        optimizer: Whose parameters they are.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    plain = {key: _raw(state) for key, state in states.items()}
    places = [(key, name) for key, state in plain.items() if isinstance(state, dict) for name in state]
    wanted = []
    for key, name in places:
        is_state = isinstance(key, int) and key < len(parameters) and name != "step"
        wanted.append((plain[key][name], parameters[key] if is_state else None))
    for (key, name), value, (_, parameter) in zip(places, laid_out_as(wanted), wanted, strict=True):
        plain[key][name] = _spread(value, parameter)
    return plain


def _raw(state: Any) -> Any:
    if isinstance(state, SavedStates):
        return dict(state.data)
    return dict(state) if isinstance(state, dict) else state


def _spread(value: Any, parameter: Tensor | None) -> Any:
    """Plain tensors beside a DTensor cannot be computed with: those of other shapes (factors) are on every rank."""
    if not isinstance(parameter, DTensor):
        return value
    if isinstance(value, dict):
        return {key: _spread(part, parameter) for key, part in value.items()}
    if isinstance(value, list):
        return [_spread(part, parameter) for part in value]
    if not isinstance(value, Tensor) or isinstance(value, DTensor) or value.ndim == 0:
        return value
    if value.shape == parameter.shape:
        return _part(value, parameter)
    local = value.to(parameter.to_local().device)
    return DTensor.from_local(local, parameter.device_mesh, run_check=False)
