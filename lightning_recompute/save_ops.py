"""Saving the outputs of chosen operators, so that a replay computes everything but them.

Two dispatch modes, one around the forward and one around the replay. An output that was written in place after
it was saved is computed again, which makes any forward exact.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from lightning_recompute.ambient import RngStates, rng_devices, rng_states, set_rng_states, version_of
from lightning_recompute.errors import RecomputeError
from lightning_recompute.object_state import Stream, stream_of
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

# they make a view that does not share the version counter, so that a write to it does not show
_UNSAFE_VIEWS = frozenset(
    {
        torch.ops.aten._unsafe_view.default,
        torch.ops.aten.unsafe_split.Tensor,
        torch.ops.aten.unsafe_split_with_sizes.default,
    }
)
_unsaved = contextvars.ContextVar("lightning_recompute.unsaved", default=False)


@contextlib.contextmanager
def unsaved() -> Iterator[None]:
    """While this is entered, no operator's output is saved or reused: for what does not run in forward and replay."""
    token = _unsaved.set(True)
    try:
        yield
    finally:
        _unsaved.reset(token)


class OpSet:
    """Operators by group or aten name.

    Args:
        ops: `matmul`, `attention`, `collective`, or names of aten operators with or without overload.
        optional: Further ones, which need not occur.

    Raises:
        ValueError: A name is neither a group nor an operator, or one that works in place.
    """

    def __init__(self, ops: Iterable[str], optional: Iterable[str] = ()) -> None:
        self._due = tuple(ops)
        self.ops = (*self._due, *optional)
        self._unseen = set(self._due)
        self._known: dict[Any, str | None] = {}
        for word in self.ops:
            name = word.removeprefix("aten.").partition(".")[0]
            if word not in GROUPS and not hasattr(torch.ops.aten, name):
                known = [*GROUPS, *(name for name in dir(torch.ops.aten) if not name.startswith("__"))]
                raise ValueError(f"ops: {word!r} is neither a group nor an aten operator; {nearest(word, known)}")
            if name.endswith("_") and not name.endswith("__"):
                raise ValueError(
                    f"ops: {word!r} works in place, so that it has no output of its own to save; leave it out"
                )

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
        if name.endswith("_") or any(result.alias_info is not None for result in function._schema.returns):
            return None  # what it writes to has to be written in a replay as well
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
    inputs: list[torch.Size]
    output: Any
    aliases: list[tuple[Tensor, int]]  # the outputs and views of them, each with its version
    rng_after: RngStates | None

    def fits(self, function: Any, args: Any) -> bool:
        """Whether it is the output of this call, and not written since."""
        unwritten = all(version_of(alias) == version for alias, version in self.aliases)
        return unwritten and self.function is function and self.inputs == _shapes(args)


class SavedOps:
    """The outputs saved in one forward of a unit.

    Args:
        wanted: The operators to save.
        streams: Filled with the generators that operators are given, as they were before.
        keep: Whether outputs stay after a replay took them; else each is freed when it is taken.
    """

    def __init__(self, wanted: OpSet, streams: dict[int, Stream], keep: bool = False) -> None:
        self.wanted = wanted
        self.keep = keep
        self.outputs: list[_Saved | None] = []
        self.position = 0
        self.streams = streams
        self._by_storage: dict[int, _Saved] = {}

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

    def wants(self, function: Any, kwargs: Any) -> bool:
        """Whether the output is saved and reused: not with a generator, which a replay has to move on."""
        return not _unsaved.get() and self.wanted.word_for(function) is not None and kwargs.get("generator") is None

    def save(self, function: Any, args: Any, output: Any) -> None:
        """Save an output."""
        # decisions (a router's) are few and copied: writes to them do no harm
        copies = self.wanted.word_for(function) in DECISIONS
        saved = tree_map(_copy if copies else _alias, output)
        aliases = [(tensor, version_of(tensor)) for tensor in _tensors(saved)]
        rng_after = rng_states(_devices(saved)) if _draws(function) else None
        entry = _Saved(function, _shapes(args), saved, aliases, rng_after)
        self.outputs.append(entry)
        if not self.keep:
            self._by_storage.update((tensor.untyped_storage()._cdata, entry) for tensor, _ in aliases)

    def watch(self, base: Tensor, views: Any) -> None:
        """Find writes to views of a saved output that its own version does not show."""
        entry = self._by_storage.get(base.untyped_storage()._cdata)
        if entry is not None:
            entry.aliases.extend((_alias(view), version_of(view)) for view in _tensors(views))

    def close(self) -> None:
        """The forward is over."""
        self._by_storage.clear()


class _Mode(Mode):
    def __init__(self, store: SavedOps) -> None:
        Mode.__init__(self)
        self._store = store

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # else what is compiled below would run uncompiled


class _Saving(_Mode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        store, kwargs = self._store, kwargs or {}
        if (generator := kwargs.get("generator")) is not None and (stream := stream_of(generator)) is not None:
            store.streams.setdefault(id(generator), stream)
        output = func(*args, **kwargs)
        if store.wants(func, kwargs):
            store.save(func, args, output)
        elif func in _UNSAFE_VIEWS:
            store.watch(args[0], output)
        return output

    def __exit__(self, *error: Any) -> None:
        self._store.close()
        super().__exit__(*error)


class _Reusing(_Mode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        store, kwargs = self._store, kwargs or {}
        if not store.wants(func, kwargs) or store.position >= len(store.outputs):
            return func(*args, **kwargs)
        index, store.position = store.position, store.position + 1
        entry = store.outputs[index]
        if not store.keep:
            store.outputs[index] = None
        if entry is None or not entry.fits(func, args):
            return func(*args, **kwargs)
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


def _shapes(args: Any) -> list[torch.Size]:
    return [arg.shape for arg in args if isinstance(arg, Tensor)]


def _devices(output: Any) -> tuple[torch.device, ...]:
    return rng_devices(_tensors(output))


def _draws(function: OpOverload) -> bool:
    """Whether the operator may advance a random stream, which its reuse then must do as well."""
    return torch.Tag.nondeterministic_seeded in function.tags
