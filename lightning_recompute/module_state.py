"""What a module's forward may change besides its outputs, so that a replay can neither see nor repeat it."""

from __future__ import annotations

import contextlib
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_leaves

from lightning_recompute.ambient import version_of

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_HOOK_FLAGS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
# torch's own bookkeeping in a module's attributes; never copied
_TORCH_OWN = frozenset(vars(nn.Module()))
_MISSING: Any = object()

Container = list[Any] | dict[Any, Any] | set[Any]
Written = frozenset[tuple[int, str]]
"""Tensors of a module that its forward writes in place, by (position in `modules()`, name)."""


class ModuleState:
    """Attributes, buffers, hooks, private generators and training flags of a module and all below it.

    Made before the forward; `settle` after it keeps only what did change. A replay runs under `restored`: it
    sees the module as the forward saw it and leaves nothing of its own behind. Values of buffers and tensor
    attributes are cloned before the forward only where a write is to be expected: the statistics of
    normalisations (their kernels write without a trace in the version counter) and the names in `written`; all
    of them when that is None, on a module's first call.

    Args:
        module: The module about to run.
        written: What earlier calls wrote, None before the first call.
    """

    def __init__(self, module: nn.Module, written: Written | None) -> None:
        self._attributes: list[dict[str, Any]] = []
        self._buffers: list[dict[str, Tensor | None]] = []
        self._training: list[bool] = []
        self._hooks: dict[int, dict[str, OrderedDict[int, Any]]] = {}
        self._generators: list[tuple[torch.Generator, Tensor]] = []
        self._containers: dict[tuple[int, str], tuple[Container, Container]] = {}
        self._versions: dict[tuple[int, str], tuple[Tensor, int]] = {}
        self._values: dict[tuple[int, str], Tensor] = {}
        with torch.no_grad():
            for index, part in enumerate(module.modules()):
                attributes = dict(vars(part))
                self._attributes.append(attributes)
                self._buffers.append(dict(part._buffers))
                self._training.append(part.training)
                if any(attributes[kind] for kind in _HOOKS):
                    self._hooks[index] = {kind: attributes[kind].copy() for kind in _HOOKS + _HOOK_FLAGS}
                for name, value in _own(attributes, part._buffers):
                    if isinstance(value, torch.Generator):
                        self._generators.append((value, value.get_state()))
                    elif isinstance(value, list | dict | set):
                        self._containers[index, name] = (value, value.copy())
                    elif isinstance(value, Tensor):
                        self._versions[index, name] = (value, version_of(value))
                        if written is None or (index, name) in written or isinstance(part, _NormBase):
                            self._values[index, name] = value.detach().clone()

    @property
    def hooks(self) -> set[int]:
        """Ids of the forward hooks on the module and all below it."""
        return {key for kinds in self._hooks.values() for kind in _HOOKS for key in kinds[kind]}

    def settle(self, module: nn.Module, compare_values: bool) -> Written:
        """Keep only what the forward changed.

        Args:
            module: The same module, after its forward.
            compare_values: Also find writes that no version counter shows.

        Returns:
            The tensors that were written in place.

        Raises:
            LookupError: A tensor was written whose former value is not known; the argument is its name.
        """
        parts = list(module.modules())
        written: set[tuple[int, str]] = set()
        for (index, name), (tensor, version) in self._versions.items():
            former = self._values.get((index, name))
            if former is None:
                if version_of(tensor) != version:
                    raise LookupError(name)
            elif (
                isinstance(parts[index], _NormBase)
                or version_of(tensor) != version
                or (compare_values and not torch.equal(former, tensor))
            ):
                written.add((index, name))
            else:
                del self._values[index, name]
        self._versions.clear()
        self._containers = {key: pair for key, pair in self._containers.items() if not _same_content(*pair)}
        for index, part in enumerate(parts):
            self._attributes[index] = _to_put_back(self._attributes[index], vars(part))
            self._buffers[index] = _to_put_back(self._buffers[index], part._buffers)
        self._generators = [(g, state) for g, state in self._generators if not torch.equal(g.get_state(), state)]
        return frozenset(written)

    @contextlib.contextmanager
    def restored(self, module: nn.Module, observers: frozenset[int]) -> Iterator[None]:
        """Set the module as its forward saw it; on leaving put everything back as it is now.

        Args:
            module: The module.
            observers: Ids of hooks that only look on: they do not run again.
        """
        parts = list(module.modules())
        now = [(dict(vars(part)), dict(part._buffers)) for part in parts]
        generators = [(generator, generator.get_state()) for generator, _ in self._generators]
        try:
            for index, part in enumerate(parts):
                # a replay fills copies of lists, dicts and sets, in the state that the forward found
                due: dict[str, Any] = {
                    name: self._containers.get((index, name), (None, value))[1].copy()
                    for name, value in _own(now[index][0], {})
                    if isinstance(value, list | dict | set)
                }
                due.update(self._attributes[index])
                due["training"] = self._training[index]
                for kind, hooks in self._hooks.get(index, {}).items():
                    kept = ((key, hook) for key, hook in hooks.items() if key not in observers)
                    due[kind] = OrderedDict(kept) if kind in _HOOKS else hooks
                _put_back(vars(part), due)
                _put_back(part._buffers, self._buffers[index])
            for (index, name), value in self._values.items():
                buffers = parts[index]._buffers
                target: dict[str, Any] = buffers if name in buffers else vars(parts[index])
                target[name] = value.clone()
            for generator, state in self._generators:
                generator.set_state(state)
            yield
        finally:
            for part, (attributes, buffers) in zip(parts, now, strict=True):
                _put_back(vars(part), _to_put_back(attributes, vars(part)))
                _put_back(part._buffers, _to_put_back(buffers, part._buffers))
            for generator, state in generators:
                generator.set_state(state)


@contextlib.contextmanager
def watch_hooks(module: nn.Module, observers: set[int]) -> Iterator[None]:
    """Find out which forward hooks below a module only look on, while its forward runs.

    An observer returns None and changes no tensor it sees, no attribute and no parameter of its module.

    Args:
        module: The module about to run; its own hooks run outside of its forward and do not count.
        observers: Filled with the ids of such hooks.
    """
    former: list[tuple[nn.Module, str, Any]] = []
    for part in list(module.modules())[1:]:
        for kind in _HOOKS:
            hooks = vars(part)[kind]
            if hooks:
                former.append((part, kind, hooks))
                watched = ((key, _watched(hook, key, observers)) for key, hook in hooks.items())
                vars(part)[kind] = OrderedDict(watched)
    try:
        yield
    finally:
        for part, kind, hooks in former:
            vars(part)[kind] = hooks


def _watched(hook: Callable[..., Any], key: int, observers: set[int]) -> Callable[..., Any]:
    def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        before = _traces(module, args, kwargs)
        result = hook(module, *args, **kwargs)
        if result is None and _traces(module, args, kwargs) == before:
            observers.add(key)
        else:
            observers.discard(key)
        return result

    return run


def _traces(module: nn.Module, args: Any, kwargs: Any) -> list[Any]:
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    tensors += [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    attributes = [(name, id(value)) for name, value in vars(module).items() if name not in _HOOKS]
    return [(id(tensor), version_of(tensor)) for tensor in tensors] + attributes


def _own(attributes: dict[str, Any], buffers: dict[str, Tensor | None]) -> Iterator[tuple[str, Any]]:
    """Buffers and the module's own attributes."""
    yield from buffers.items()
    for name, value in attributes.items():
        if name not in _TORCH_OWN:
            yield name, value


def _same_content(one: Container, other: Container) -> bool:
    if len(one) != len(other):
        return False
    mine, theirs = (list(part.values() if isinstance(part, dict) else part) for part in (one, other))
    return all(map(operator.is_, mine, theirs))


def _to_put_back(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What to set so that `after` becomes what `before` was."""
    due = {name: value for name, value in before.items() if after.get(name, _MISSING) is not value}
    due.update((name, _MISSING) for name in after.keys() - before.keys())
    return due


def _put_back(target: dict[str, Any], due: dict[str, Any]) -> None:
    for name, value in due.items():
        if value is _MISSING:
            target.pop(name, None)
        else:
            target[name] = value
