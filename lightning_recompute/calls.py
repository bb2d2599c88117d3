"""One call of a forward, with all that is needed to make it again."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from lightning_recompute.ambient import RngStates, Surroundings, set_rng_states
from lightning_recompute.errors import RecomputeError
from lightning_recompute.module_state import ModuleState, Written
from lightning_recompute.placement import SavedInputs
from lightning_recompute.save_ops import SavedOps

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
HostRng = tuple[Any, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Input:
    """Stands for a tensor argument: its place among the saved inputs."""

    position: int
    requires_grad: bool

    def take(self, saved: Sequence[Tensor], on_copies: bool) -> Tensor:
        """The tensor for a replay, cut off from the graph; a copy where the forward writes to it."""
        tensor = saved[self.position].detach().requires_grad_(self.requires_grad)
        return tensor.clone() if on_copies else tensor


@dataclass(frozen=True, slots=True)
class Returned:
    """Stands for an argument that an earlier call of the same frame returned."""

    call: int
    leaf: int


class FreshCopy:
    """Stands for an argument that the forward fills, such as a cache: each run of the forward gets its own copy.

    Args:
        value: The argument as the caller passed it. Its objects and containers are copied, tensors are shared.
    """

    def __init__(self, value: Any) -> None:
        self._value = _copy_object(value)

    def take(self) -> Any:
        """A copy in the state of the call."""
        return _copy_object(self._value)


def _copy_object(value: Any, depth: int = 5) -> Any:
    if isinstance(value, Tensor | torch.Size | torch.dtype | type) or depth == 0 or callable(value):
        return value
    if isinstance(value, list):
        return [_copy_object(entry, depth - 1) for entry in value]
    if isinstance(value, dict):
        return {key: _copy_object(entry, depth - 1) for key, entry in value.items()}
    if not hasattr(value, "__dict__"):
        return value
    twin = copy.copy(value)
    vars(twin).update({name: _copy_object(entry, depth - 1) for name, entry in vars(value).items()})
    return twin


class Learned:
    """What the first call of a block taught about it.

    Attributes:
        written: Buffers and tensor attributes that its forward writes; None before the first call.
        writes_inputs: Whether it writes to tensors it is given.
        draws_on_host: Whether it draws from Python's or NumPy's random numbers.
        decides: Whether it sorts or picks, as a router does.
        observers: Ids of forward hooks below it that only look on.
        hooks: Ids of all hooks that were watched.
        checked: Whether a replay has been compared with its forward.
    """

    def __init__(self) -> None:
        self.written: Written | None = None
        self.writes_inputs = False
        self.draws_on_host = False
        self.decides = False
        self.observers: set[int] = set()
        self.hooks: set[int] = set()
        self.checked = False


class Call:
    """One call in a frame.

    Args:
        name: Name of the block or module, for messages.
        function: What was called.
        module: The module whose forward it is, None for a tape of functions.
        first_saved: How many tensors the frame's calls before it have saved.
    """

    def __init__(self, name: str, function: Callable[..., Any], module: nn.Module | None, first_saved: int) -> None:
        self.name = name
        self.function = function
        self.module = module
        self.first_saved = first_saved
        self.leaves: list[Any] = []
        self.spec: TreeSpec
        self.inputs: SavedInputs
        self.on_copies = False
        self.parameters = (
            [] if module is None else [(parameter, parameter._version) for parameter in module.parameters()]
        )
        self.devices: tuple[torch.device, ...] = ()
        self.rng: RngStates | None = None
        self.host_rng: HostRng | None = None
        self.surroundings: Surroundings
        self.state: ModuleState | None = None
        self.observers: set[int] = set()
        self.ops: SavedOps | None = None

    def replay(self, outputs: Sequence[Sequence[Any]]) -> list[Any]:
        """Make the call again.

        Args:
            outputs: Leaves of the outputs of the frame's calls before this one.

        Returns:
            The leaves of its output.

        Raises:
            RecomputeError: A parameter or an input is no longer what it was in forward.
        """
        self.check_parameters()
        if self.ops is not None and self.ops.used_up:
            raise RecomputeError(
                f"{self.name}: a second backward over a unit under SaveOps: its saved outputs were freed by the first. "
                "Use Full() or Selective() for this block where a graph is retained"
            )
        try:
            saved = self.inputs.tensors()
        except RuntimeError as error:
            raise RecomputeError(
                f"{self.name}: an input was changed in place after the block read it, so the block cannot be "
                f"recomputed; write to a copy instead ({error})"
            ) from error
        given = {leaf: leaf.take(saved, self.on_copies) for leaf in self.leaves if isinstance(leaf, Input)}
        args, kwargs = tree_unflatten([self._argument(leaf, given, outputs) for leaf in self.leaves], self.spec)
        if self.rng is not None:
            set_rng_states(self.devices, self.rng)
        now = host_rng() if self.host_rng is not None else None
        if self.host_rng is not None:
            set_host_rng(self.host_rng)
        try:
            return tree_flatten(self._run(args, kwargs))[0]
        finally:
            if now is not None:
                set_host_rng(now)

    def _run(self, args: Args, kwargs: Kwargs) -> Any:
        if self.module is None or self.state is None:
            return self.surroundings.run(self.function, args, kwargs)
        with self.state.restored(self.module, frozenset(self.observers)):
            if self.ops is None:
                return self.surroundings.run(self.function, args, kwargs)
            with self.ops.reusing():
                return self.surroundings.run(self.function, args, kwargs)

    @staticmethod
    def _argument(leaf: Any, given: dict[Input, Tensor], outputs: Sequence[Sequence[Any]]) -> Any:
        if isinstance(leaf, Input):
            return given[leaf]
        if isinstance(leaf, Returned):
            return outputs[leaf.call][leaf.leaf]
        return leaf.take() if isinstance(leaf, FreshCopy) else leaf

    def check_parameters(self) -> None:
        """Refuse parameters written since the forward.

        Raises:
            RecomputeError: One was; the message names it.
        """
        if all(parameter._version == version for parameter, version in self.parameters):
            return
        versions = {id(parameter): version for parameter, version in self.parameters}
        named = self.module.named_parameters() if self.module is not None else ()
        changed = [name for name, p in named if versions.get(id(p)) != p._version]
        raise RecomputeError(
            f"{self.name}: parameter {', '.join(changed) or 'of the block'} was changed in place between forward and "
            "backward, so the block cannot be recomputed; run the backward before the optimizer step"
        )


def host_rng() -> HostRng:
    """States of Python's and NumPy's global random numbers."""
    return random.getstate(), np.random.get_state(legacy=False)


def set_host_rng(states: HostRng) -> None:
    """Set what `host_rng` read."""
    random.setstate(states[0])
    np.random.set_state(states[1])


def same_host_rng(one: HostRng, other: HostRng) -> bool:
    """Whether nothing was drawn between two readings."""
    mine, theirs = one[1]["state"], other[1]["state"]
    return one[0] == other[0] and mine["pos"] == theirs["pos"] and np.array_equal(mine["key"], theirs["key"])
