"""One call of a forward, with all that is needed to make it again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_leaves, tree_unflatten

from lightning_recompute.ambient import HostRng, RngStates, Surroundings, host_rng, set_host_rng, set_rng_states
from lightning_recompute.errors import RecomputeError
from lightning_recompute.module_state import Keeping, ModuleState, Written
from lightning_recompute.object_state import Snapshot, Twin, content_of, has_content
from lightning_recompute.placement import PlacementError, SavedInputs
from lightning_recompute.save_ops import SavedOps

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Input:
    """Stands for a tensor argument: its place among the saved inputs."""

    position: int
    requires_grad: bool
    attributes: tuple[tuple[str, Any], ...] = field(default=(), compare=False)

    @classmethod
    def of(cls, position: int, tensor: Tensor) -> Input:
        """Stands for this tensor, with the attributes that somebody has put on it."""
        return cls(position, tensor.requires_grad, tuple(vars(tensor).items()))

    def take(self, saved: Sequence[Tensor], on_copies: bool) -> Tensor:
        """The tensor for a replay, cut off from the graph; a copy where the forward writes to it."""
        tensor = saved[self.position].detach().requires_grad_(self.requires_grad)
        if on_copies:
            tensor = tensor.clone()
        for name, value in self.attributes:
            vars(tensor).setdefault(name, value)
        return tensor


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
        self._twin = Twin(value)

    def take(self) -> Any:
        """A copy in the state of the call."""
        return self._twin.build()


class Learned:
    """What the first call of a block taught about it.

    Attributes:
        written: Buffers and tensor attributes that its forward writes; None before the first call.
        writes_inputs: Whether it writes to tensors it is given.
        decides: Whether it sorts or picks, as a router does.
        generators: Private ones that it was seen to draw from.
        observers: Of a compiled block, ids of forward hooks below it that only look on.
        hooks: Of a compiled block, ids of all hooks that were watched.
        checked: Whether a replay has been compared with its forward.
        inputs: What the placement has learned about its inputs.
    """

    def __init__(self) -> None:
        self.written: Written | None = None
        self.writes_inputs = False
        self.decides = False
        self.generators: list[Any] = []
        self.observers: set[int] = set()
        self.hooks: set[int] = set()
        self.checked = False
        self.inputs: dict[Any, Any] = {}


class Call:
    """One call in a frame.

    Args:
        name: Name of the block or module, for messages.
        function: What was called.
        module: The module whose forward it is, None for a tape of functions.
        first_saved: How many tensors the frame's calls before it have saved.
        learned: What was learned about the block.
    """

    def __init__(
        self, name: str, function: Callable[..., Any], module: nn.Module | None, first_saved: int, learned: Learned
    ) -> None:
        self.name = name
        self.learned = learned
        self.function = function
        self.module = module
        self.first_saved = first_saved
        self.leaves: list[Any] = []
        self.given: list[Input] = []  # all tensors among the leaves, and in the objects among them
        self.spec: TreeSpec
        self.inputs: SavedInputs
        self.on_copies = False
        # each with its version and whether it needed grad
        self.parameters = [] if module is None else [(p, p._version, p.requires_grad) for p in module.parameters()]
        self.devices: tuple[torch.device, ...] = ()
        self.rng: RngStates | None = None
        self.host_rng: HostRng | None = None
        self.surroundings: Surroundings
        self.state: ModuleState | None = None
        self.observers: set[int] = set()
        self.keeping: Keeping = contextlib.nullcontext
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
        if self.state is not None and (changed := self.state.written_since()):
            raise RecomputeError(
                f"{self.name}: buffer or tensor {changed} was changed in place between forward and backward, so the "
                "block cannot be recomputed; write to a copy instead, or after the backward"
            )
        if self.ops is not None and self.ops.used_up:
            raise RecomputeError(
                f"{self.name}: a second backward over a unit under SaveOps: its saved outputs were freed by the first. "
                "Use Full() or Selective() for this block where a graph is retained"
            )
        try:
            saved = self.inputs.tensors()
        except (PlacementError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            raise RecomputeError(
                f"{self.name}: an input was changed in place after the block read it, so the block cannot be "
                f"recomputed; write to a copy instead ({error})"
            ) from error
        args, kwargs = self._arguments(saved, outputs)
        if self.rng is not None:
            set_rng_states(self.devices, self.rng)
        now = host_rng() if self.host_rng is not None else None
        if self.host_rng is not None:
            set_host_rng(self.host_rng)
        try:
            return output_leaves(self._run(args, kwargs))
        finally:
            if now is not None:
                set_host_rng(now)

    def _run(self, args: Args, kwargs: Kwargs) -> Any:
        if self.module is None or self.state is None:
            return self.surroundings.run(self.function, args, kwargs)
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.state.restored(self.module, frozenset(self.observers), self.keeping))
            if self.ops is not None:
                stack.enter_context(self.ops.reusing())
            for parameter, _, needed_grad in self.parameters:
                if parameter.requires_grad != needed_grad:  # toggled since
                    stack.callback(parameter.requires_grad_, parameter.requires_grad)
                    parameter.requires_grad_(needed_grad)
            return self.surroundings.run(self.function, args, kwargs)

    def _arguments(self, saved: Sequence[Tensor], outputs: Sequence[Sequence[Any]]) -> Any:
        given = {reference: reference.take(saved, self.on_copies) for reference in self.given}
        copies: dict[Twin, Any] = {}

        def tensor(leaf: Any) -> Any:
            if isinstance(leaf, Input):
                return given[leaf]
            return outputs[leaf.call][leaf.leaf] if isinstance(leaf, Returned) else leaf

        def argument(leaf: Any) -> Any:
            if isinstance(leaf, Snapshot):
                return leaf.take(copies, tensor)
            return leaf.take() if isinstance(leaf, FreshCopy) else tensor(leaf)

        return tree_unflatten([argument(leaf) for leaf in self.leaves], self.spec)

    def settle_leaves(self) -> None:
        """After the forward: look what it has changed of the objects it was given."""
        for leaf in self.leaves:
            if isinstance(leaf, Snapshot):
                leaf.settle()

    def check_parameters(self) -> None:
        """Refuse parameters written since the forward.

        Raises:
            RecomputeError: One was; the message names it.
        """
        if changed := self._written_parameters():
            raise RecomputeError(
                f"{self.name}: parameter {changed} was changed in place between forward and backward, so the block "
                "cannot be recomputed; run the backward before the optimizer step"
            )

    def check_unwritten(self) -> None:
        """Refuse a forward that writes a parameter.

        Raises:
            RecomputeError: It did; the message names it.
        """
        if changed := self._written_parameters():
            raise RecomputeError(
                f"{self.name}: its forward writes its own parameter {changed} in place, so a replay would see another "
                "value than the forward; keep this block out of recompute"
            )

    def _written_parameters(self) -> str:
        if all(parameter._version == version for parameter, version, _ in self.parameters):
            return ""
        versions = {id(parameter): version for parameter, version, _ in self.parameters}
        named = self.module.named_parameters() if self.module is not None else ()
        return ", ".join(name for name, p in named if versions.get(id(p)) != p._version) or "of the block"


def output_leaves(result: Any, max_depth: int = 4) -> list[Any]:
    """Everything in an output or in arguments, the attributes of objects included, in the same order every time."""
    leaves: list[Any] = []
    for leaf in tree_leaves(result):
        if max_depth and has_content(leaf) and not isinstance(leaf, set):
            leaves += output_leaves([entry for _, entry in content_of(leaf)], max_depth - 1)
        else:
            leaves.append(leaf)
    return leaves
