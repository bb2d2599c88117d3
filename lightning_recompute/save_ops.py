"""Saving the outputs of chosen operators, so that a replay computes everything but them.

Two dispatch modes, one around the forward and one around the replay. An output that was written in place after
it was saved is computed again, which makes any forward exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from lightning_recompute.ambient import RngStates, rng_devices, rng_states, set_rng_states, version_of
from lightning_recompute.errors import RecomputeError
from lightning_recompute.policy import nearest

Mode: Any = TorchDispatchMode  # torch's modes carry no types

GROUPS: dict[str, Callable[[str, str], bool]] = {
    "matmul": lambda space, name: (
        space == "aten" and name in {"mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "mv", "addmv"}
    ),
    "attention": lambda space, name: name.startswith(
        ("_scaled_dot_product", "_flash_attention_forward", "_efficient_attention_forward")
    ),
    "collective": lambda space, name: space in {"_c10d_functional", "c10d_functional", "c10d"},
}
"""Groups of operators by what they do, whatever they are called on a device."""

DECISIONS = ("topk", "argmax", "argmin", "sort")
"""Operators whose outputs decide where data goes (a router's); a replay reuses them, so that it goes the same way."""


class OpSet:
    """Operators by group or aten name.

    Args:
        ops: `matmul`, `attention`, `collective`, or names of aten operators with or without overload.
        optional: Further ones, which need not occur.

    Raises:
        ValueError: A name is neither a group nor an operator.
    """

    def __init__(self, ops: Iterable[str], optional: Iterable[str] = ()) -> None:
        self._due = tuple(ops)
        self.ops = (*self._due, *optional)
        self._unseen = set(self._due)
        self._known: dict[Any, str | None] = {}
        for word in self.ops:
            if word not in GROUPS and not hasattr(torch.ops.aten, word.removeprefix("aten.").partition(".")[0]):
                known = [*GROUPS, *(name for name in dir(torch.ops.aten) if not name.startswith("__"))]
                raise ValueError(f"ops: {word!r} is neither a group nor an aten operator; {nearest(word, known)}")

    def word_for(self, function: Any) -> str | None:
        """The word of `ops` that names an operator, None if it is not to be saved."""
        if function not in self._known:
            self._known[function] = self._find(function)
            self._unseen.discard(self._known[function] or "")
        return self._known[function]

    def __reduce__(self) -> tuple[type[OpSet], tuple[tuple[str, ...], tuple[str, ...]]]:
        return OpSet, (self._due, self.ops[len(self._due) :])

    def check_seen(self, names: Sequence[str]) -> None:
        """Refuse words that match no operator that ran.

        Args:
            names: The blocks that ran.

        Raises:
            RecomputeError: A word matched nothing, so that nothing would be saved for it.
        """
        if self._unseen:
            operators = [function for function in self._known if isinstance(function, OpOverload)]
            ran = sorted({operator.name().partition("::")[2].partition(".")[0] for operator in operators})
            missing = ", ".join(map(repr, sorted(self._unseen)))
            raise RecomputeError(
                f"{', '.join(names)}: SaveOps names {missing}, and no such operator ran on this device; leave it out "
                f"or name one of those that did: {', '.join(ran)}"
            )

    def _find(self, function: Any) -> str | None:
        if not isinstance(function, OpOverload):
            return None
        space, _, name = function.name().partition("::")
        name, _, overload = name.partition(".")
        for word in self.ops:
            if word in GROUPS:
                if GROUPS[word](space, name):
                    return word
            elif space == "aten" and word.removeprefix("aten.") in (name, f"{name}.{overload or 'default'}"):
                return word
        return None


@dataclass(frozen=True, slots=True)
class _Saved:
    function: Any
    output: Any
    versions: list[int]
    rng_after: RngStates | None


class SavedOps:
    """The outputs saved in one forward of a unit.

    Args:
        wanted: The operators to save.
        keep: Whether outputs stay after a replay took them; else each is freed when it is taken.
    """

    def __init__(self, wanted: OpSet, keep: bool = False) -> None:
        self.wanted = wanted
        self.keep = keep
        self.outputs: list[_Saved | None] = []
        self.position = 0

    def saving(self) -> TorchDispatchMode:
        """A mode for the forward."""
        return _Saving(self)

    def reusing(self) -> TorchDispatchMode:
        """A mode for one replay."""
        self.position = 0
        return _Reusing(self)

    @property
    def used_up(self) -> bool:
        """Whether a replay has taken an output that a further replay would need."""
        return any(entry is None for entry in self.outputs)


class _Saving(Mode):
    def __init__(self, store: SavedOps) -> None:
        Mode.__init__(self)
        self._store = store

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        word = self._store.wanted.word_for(func)
        if word is not None:
            # what is kept for good (a router's few decisions) is copied: writes to it do no harm
            saved = tree_map(_copy if self._store.keep else _alias, output)
            rng_after = rng_states(_devices(saved)) if _draws(func) else None
            self._store.outputs.append(_Saved(func, saved, _versions(saved), rng_after))
        return output


class _Reusing(Mode):
    def __init__(self, store: SavedOps) -> None:
        Mode.__init__(self)
        self._store = store

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        store = self._store
        if store.wanted.word_for(func) is None or store.position >= len(store.outputs):
            return func(*args, **(kwargs or {}))
        index, store.position = store.position, store.position + 1
        entry = store.outputs[index]
        if not store.keep:
            store.outputs[index] = None
        if entry is None or entry.function is not func or _versions(entry.output) != entry.versions:
            return func(*args, **(kwargs or {}))
        if entry.rng_after is not None:
            set_rng_states(_devices(entry.output), entry.rng_after)
        return tree_map(_alias, entry.output)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _alias(value: Any) -> Any:
    """A detached alias; below autograd it shares the version counter only when that key is let through."""
    if not isinstance(value, Tensor):
        return value
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return value.detach()


def _tensors(output: Any) -> list[Tensor]:
    leaves = output if isinstance(output, list | tuple) else [output]
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _versions(output: Any) -> list[int]:
    return [version_of(tensor) for tensor in _tensors(output)]


def _devices(output: Any) -> tuple[torch.device, ...]:
    return rng_devices(_tensors(output))


def _draws(function: OpOverload) -> bool:
    """Whether the operator may advance a random stream, which its reuse then must do as well."""
    return torch.Tag.nondeterministic_seeded in function.tags
