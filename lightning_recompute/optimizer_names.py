"""Optimizer states by the names of the parameters: a state dict only numbers them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

NAMES = "parameter_names"
"""The key, beside `state` and `param_groups`, of the names: one a parameter, in the order of the numbers."""

# A parameter that the module does not know; no name of a parameter has this form.
_UNNAMED = "<parameter {}>"


def named_state(optimizer: Optimizer, module: nn.Module) -> dict[str, Any]:
    """The state dict of an optimizer, with the names of its parameters beside it.

    Args:
        optimizer: The optimizer.
        module: The module whose parameters it has; names are the module's own (`named_parameters`).

    Returns:
        `optimizer.state_dict()`, numbered as always, and `NAMES`. torch and Lightning do not look at the latter.
    """
    found = [names[0] for group in names_in_groups(optimizer, all_names(module)) for names in group]
    state = optimizer.state_dict()
    # an optimizer of another kind than torch's keeps its form, and is matched by its own load_state_dict
    return {**state, NAMES: found} if is_torchs(state) else state


def by_name(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict with names in place of numbers, in `state` and in the `params` of each group.

    Args:
        state: What `named_state` returns; anything else is returned as it is.

    Returns:
        The same without `NAMES`.
    """
    if NAMES not in state:
        return dict(state)
    names = dict(enumerate(state[NAMES]))
    return {
        **{key: value for key, value in state.items() if key != NAMES},
        # what an optimizer keeps under another key belongs to no parameter
        "state": {names.get(number, number): value for number, value in state["state"].items()},
        "param_groups": [
            {**group, "params": [names[number] for number in group["params"]]} for group in state["param_groups"]
        ],
    }


def by_number(state: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `by_name`: Lightning's own form, and `NAMES` beside it.

    Args:
        state: What `by_name` returns; a state dict with numbers is returned as it is.
    """
    names = [name for group in state.get("param_groups", ()) for name in group["params"]]
    if not names or not all(isinstance(name, str) for name in names):
        return dict(state)
    numbers = {name: number for number, name in enumerate(names)}
    return {
        **state,
        "state": {numbers.get(name, name): value for name, value in state["state"].items()},
        "param_groups": [
            {**group, "params": [numbers[name] for name in group["params"]]} for group in state["param_groups"]
        ],
        NAMES: names,
    }


def without_names(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict as torch writes it."""
    return {key: value for key, value in state.items() if key != NAMES}


def matched(
    state: Mapping[str, Any], optimizer: Optimizer, module: nn.Module, *, strict: bool = True
) -> dict[str, Any]:
    """A saved state dict in the order of an optimizer's own parameters.

    Parameters are matched by name, where the state has names, else by number. A tied parameter is known by each of
    its names. The options of a group come from the saved group that has its parameters.

    Args:
        state: A saved state dict, numbered, with or without `NAMES`.
        optimizer: The optimizer that is going to load it.
        module: The module whose parameters it has.
        strict: Refuse parameters that the saved optimizer did not have, and the other way round.

    Returns:
        A numbered state dict for `optimizer.load_state_dict`; its states are those of `state`, not copies.

    Raises:
        ValueError: The numbers of groups differ; or, when strict, the parameters do.
    """
    aliases = all_names(module)
    return matched_to(state, names_in_groups(optimizer, aliases), type(optimizer).__name__, strict=strict)


def matched_to(
    state: Mapping[str, Any], groups: Sequence[Sequence[Sequence[str]]], kind: str, *, strict: bool = True
) -> dict[str, Any]:
    """A saved state dict in the order of parameters of which the names are known; see `matched`.

    Args:
        state: A saved state dict, numbered, with or without `NAMES`.
        groups: What `names_in_groups` returns.
        kind: What the optimizer is called in errors.
        strict: Refuse parameters that the saved optimizer did not have, and the other way round.

    Returns:
        See `matched`.

    Raises:
        ValueError: See `matched`.
    """
    if not is_torchs(state):
        return dict(state)
    saved_groups = state["param_groups"]
    if len(groups) != len(saved_groups):
        raise ValueError(
            f"the checkpoint's {kind} has {len(saved_groups)} parameter groups, this one {len(groups)}; "
            "configure_optimizers has to make the groups that were saved"
        )
    if NAMES not in state:
        return dict(state)
    numbers = {name: number for number, name in enumerate(state[NAMES])}
    known = [names for group in groups for names in group]
    places = [next((numbers[name] for name in names if name in numbers), None) for names in known]
    if strict:
        missing = [names[0] for names, place in zip(known, places, strict=True) if place is None]
        unexpected = [name for name, number in numbers.items() if number not in places]
        if missing or unexpected:
            raise ValueError(
                f"the parameters of {kind} are not those of the checkpoint: not saved: "
                f"{_list(missing)}; saved and not here: {_list(unexpected)}. Make the optimizer as it was, or set "
                "strict_loading=False on the LightningModule to start those without a state"
            )
    states = {new: state["state"][old] for new, old in enumerate(places) if old is not None and old in state["state"]}
    states |= {key: value for key, value in state["state"].items() if key not in range(len(numbers))}
    homes = {number: index for index, group in enumerate(saved_groups) for number in group["params"]}
    made, first = [], 0
    for index, group in enumerate(groups):
        own = range(first, first := first + len(group))
        home = next((homes[old] for new in own if (old := places[new]) is not None), index)
        made.append({**saved_groups[home], "params": list(own)})
    return {**without_names(state), "state": states, "param_groups": made}


def all_names(module: nn.Module) -> dict[Any, list[str]]:
    """Every name of each parameter of a module: tied ones have several."""
    names: dict[Any, list[str]] = {}
    for name, parameter in _parameters(module):
        names.setdefault(parameter, []).append(name)
    return names


def names_in_groups(optimizer: Optimizer, names: Mapping[Any, list[str]]) -> list[list[list[str]]]:
    """For each group of an optimizer, of each parameter all names; one that the module does not know gets one.

    Args:
        optimizer: The optimizer.
        names: What `all_names` returns.
    """
    made, number = [], 0
    for group in optimizer.param_groups:
        made.append([names.get(each, [_UNNAMED.format(number + place)]) for place, each in enumerate(group["params"])])
        number += len(group["params"])
    return made


def is_torchs(state: Mapping[str, Any]) -> bool:
    """Whether a state dict has the form that torch's own optimizers give it."""
    return "state" in state and "param_groups" in state


def _parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """All names, also of tied parameters; of sharded modules the parameters that optimizers have."""
    for part in module.modules():
        if isinstance(part, FSDPModule):  # after a forward without backward it may still have whole ones
            part.reshard()
    return list(module.named_parameters(remove_duplicate=False))


def _list(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "") if names else "none"
