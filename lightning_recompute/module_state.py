"""What a module's forward may change besides its outputs, so that a replay can neither see nor repeat it."""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_leaves

from lightning_recompute.ambient import host_rng, rng_devices, rng_states, version_of
from lightning_recompute.object_state import Stream, Twin, has_content, same_state, stream_of, without_graph

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_HOOK_FLAGS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
# torch's own bookkeeping in a module's attributes
_TORCH_OWN = frozenset(vars(nn.Module())) - {"training"}
_STATISTICS = frozenset({"running_mean", "running_var"})
_MISSING: Any = object()

Written = frozenset[tuple[int, str]]
"""Tensors of a module that its forward writes in place, by (position in `modules()`, name)."""
Keeping = Callable[[], contextlib.AbstractContextManager[object]]
"""Makes a context in which what autograd saves is kept, not left to a frame."""


class ModuleState:
    """A module and all below it as a forward saw them: attributes, tensors, hooks, random streams, training flags.

    Made before the forward; `settle` after it finds what was written. A replay runs under `restored`: it sees
    everything as the forward saw it, whatever has been rebound, filled or removed since, and leaves nothing of its
    own behind. Values of buffers and tensor attributes are cloned before the forward only where a write is to be
    expected: the statistics of normalisations (their kernels write without a trace in the version counter) and the
    names in `written`; all of them when that is None, on a module's first call. Others that are written after the
    forward are found by `written_since`.

    Args:
        module: The module about to run.
        written: What earlier calls wrote, None before the first call.
        generators: Further ones that earlier calls drew from.
    """

    def __init__(self, module: nn.Module, written: Written | None, generators: Iterable[Any] = ()) -> None:
        self._parts = list(module.modules())
        self._attributes: list[dict[str, Any]] = []
        self._parameters: list[dict[str, nn.Parameter | None]] = []
        self._buffers: list[dict[str, Tensor | None]] = []
        self._modules: list[dict[str, nn.Module | None]] = []
        self._hooks: dict[int, dict[str, OrderedDict[int, Any]]] = {}
        self.streams = {id(source): stream for source in generators if (stream := stream_of(source)) is not None}
        """Random streams that the forward may draw from, as they were before; to be added to while it runs."""
        # containers and plain objects by place, and whether the forward changed them
        self._objects: list[dict[str, tuple[Twin, bool]]] = []
        # the tensors in these, by name of the object and number in it: `table.0`
        self._held: list[dict[str, Tensor]] = []
        self._versions: dict[tuple[int, str], tuple[Tensor, int]] = {}
        self._values: dict[tuple[int, str], Tensor] = {}
        twins: dict[int, Twin] = {}
        clones: dict[int, Tensor] = {}
        with torch.no_grad():
            for index, part in enumerate(self._parts):
                self._look_at(part, twins)
                for name, tensor in (self._attributes[index] | self._buffers[index] | self._held[index]).items():
                    if isinstance(tensor, Tensor):
                        self._versions[index, name] = tensor, version_of(tensor)
                        expected = (index, name) in (written or ()) or _has_statistics(part)
                        if expected or (written is None and not _is_spread(tensor)):
                            clones.setdefault(id(tensor), tensor.detach().clone())
                            self._values[index, name] = clones[id(tensor)]

    def _look_at(self, part: nn.Module, twins: dict[int, Twin]) -> None:
        everything = vars(part)
        attributes: dict[str, Any] = {}
        objects: dict[str, tuple[Twin, bool]] = {}
        for name, value in everything.items():
            if name in _TORCH_OWN:
                continue
            if has_content(value):
                objects[name] = twins.get(id(value)) or Twin(value, twins), True
            else:
                attributes[name] = without_graph(value)
                if (stream := stream_of(value)) is not None:
                    self.streams[id(value)] = stream
        if any(everything[kind] for kind in _HOOKS):
            self._hooks[len(self._attributes)] = {kind: everything[kind].copy() for kind in _HOOKS + _HOOK_FLAGS}
        self._attributes.append(attributes)
        self._objects.append(objects)
        self._held.append(
            {f"{name}.{n}": tensor for name, (twin, _) in objects.items() for n, tensor in enumerate(twin.tensors())}
        )
        self._parameters.append({name: without_graph(value) for name, value in part._parameters.items()})
        self._buffers.append({name: without_graph(value) for name, value in part._buffers.items()})
        self._modules.append(dict(part._modules))

    @property
    def hooks(self) -> set[int]:
        """Ids of the forward hooks on the module and all below it."""
        return {key for kinds in self._hooks.values() for kind in _HOOKS for key in kinds[kind]}

    def settle(self, module: nn.Module, compare_values: bool) -> Written:
        """Find out what the forward changed.

        Args:
            module: The same module, after its forward.
            compare_values: Also find writes that no version counter shows.

        Returns:
            The tensors that were written in place.

        Raises:
            LookupError: A tensor was written whose former value is not known; the argument is its name.
        """
        assert module is self._parts[0]
        written: set[tuple[int, str]] = set()
        for (index, name), (tensor, version) in self._versions.items():
            former = self._values.get((index, name))
            if former is None:
                if version_of(tensor) != version:
                    raise LookupError(name)
            elif (
                _has_statistics(self._parts[index])
                or version_of(tensor) != version
                or (compare_values and not torch.equal(former, tensor))
            ):
                written.add((index, name))
            else:
                del self._values[index, name]
        for key in written:
            del self._versions[key]
        self.streams = {key: stream for key, stream in self.streams.items() if stream.moved()}
        for index, part in enumerate(self._parts):
            writes = {key.rpartition(".")[0] for place, key in written if place == index}
            for name, (twin, _) in self._objects[index].items():
                self._objects[index][name] = twin, name in writes or not twin.same_as(vars(part).get(name))
        return frozenset(written)

    def written_since(self) -> str | None:
        """The name of a buffer or tensor attribute that was written in place after the forward, None if none was."""
        for (index, name), (tensor, version) in self._versions.items():
            if version_of(tensor) != version:
                path = next(path for path, part in self._parts[0].named_modules() if part is self._parts[index])
                return f"{path}.{name}".removeprefix(".")
        return None

    @contextlib.contextmanager
    def restored(
        self, module: nn.Module, observers: frozenset[int], keeping: Keeping = contextlib.nullcontext
    ) -> Iterator[None]:
        """Set the module as its forward saw it; on leaving put everything back as it is now.

        Args:
            module: The module.
            observers: Ids of hooks that only look on: they do not run again.
            keeping: What other hooks run in.
        """
        assert module is self._parts[0]
        now = [(dict(vars(part)), dict(part._buffers), dict(part._modules)) for part in self._parts]
        exchanged: list[tuple[dict[str, Any], str, Any, Any]] = []
        streams = [(stream, stream.read()) for stream in self.streams.values()]
        copies: dict[Twin, Any] = {}
        clones: dict[int, Tensor] = {}
        former_of = {
            id(self._held[index][name]): former
            for (index, name), former in self._values.items()
            if name in self._held[index]
        }

        def clone(former: Tensor) -> Tensor:
            return clones.setdefault(id(former), former.clone())

        def give(held: Any) -> Any:
            return clone(former_of[id(held)]) if id(held) in former_of else held

        try:
            for index, part in enumerate(self._parts):
                attributes, buffers, modules = now[index]
                due = dict(self._attributes[index])
                for name, (twin, changed) in self._objects[index].items():
                    value = attributes.get(name)
                    due[name] = twin.build(copies, give) if changed or not twin.same_as(value) else value
                _put_back(vars(part), _to_put_back(due, _own(attributes)))
                _put_back(part._buffers, _to_put_back(self._buffers[index], buffers))
                _put_back(part._modules, _to_put_back(self._modules[index], modules))
                exchanged += _exchange(part._parameters, self._parameters[index])
                self._set_hooks(index, part, observers, keeping)
            for (index, name), former in self._values.items():
                if name in self._held[index]:
                    continue
                buffers = self._parts[index]._buffers
                target: dict[str, Any] = buffers if name in buffers else vars(self._parts[index])
                target[name] = clone(former)
            for stream in self.streams.values():
                stream.write(stream.state)
            yield
        finally:
            for part, (attributes, buffers, modules) in zip(self._parts, now, strict=True):
                _put_back(vars(part), _to_put_back(attributes, vars(part)))
                _put_back(part._buffers, _to_put_back(buffers, part._buffers))
                _put_back(part._modules, _to_put_back(modules, part._modules))
            for target, name, ours, theirs in exchanged:
                if target.get(name) is ours:  # FSDP exchanges parameters itself
                    target[name] = theirs
            for stream, state in streams:
                stream.write(state)

    def _set_hooks(self, index: int, part: nn.Module, observers: frozenset[int], keeping: Keeping) -> None:
        due = self._hooks.get(index)
        if due is None and not any(vars(part)[kind] for kind in _HOOKS):
            return
        for kind in _HOOKS + _HOOK_FLAGS:
            hooks = {} if due is None else due[kind]
            if kind in _HOOKS:
                hooks = {key: _kept(hook, keeping) for key, hook in hooks.items() if key not in observers}
            vars(part)[kind] = OrderedDict(hooks)


@contextlib.contextmanager
def watch_hooks(
    module: nn.Module,
    observers: set[int],
    keeping: Keeping = contextlib.nullcontext,
    streams: Mapping[int, Stream] | None = None,
) -> Iterator[None]:
    """Find out which forward hooks below a module only look on, while its forward runs.

    An observer returns None, draws no random number and changes no tensor it sees and no attribute, parameter or
    buffer of the module and all below it. It does not run again in a replay. What any hook computes is kept, whatever
    it then does with it.

    Args:
        module: The module about to run; its own hooks run outside of its forward and do not count.
        observers: Filled with the ids of such hooks.
        keeping: What hooks run in.
        streams: Random streams beside torch's, Python's and NumPy's own; more may be added while the forward runs.
    """
    parts = list(module.modules())
    former: list[tuple[nn.Module, str, Any]] = []
    traces = functools.partial(_Traces, parts, {} if streams is None else streams)
    for part in parts[1:]:
        for kind in _HOOKS:
            hooks = vars(part)[kind]
            if hooks:
                former.append((part, kind, hooks))
                watched = ((key, _watched(hook, key, observers, keeping, traces)) for key, hook in hooks.items())
                vars(part)[kind] = OrderedDict(watched)
    try:
        yield
    finally:
        for part, kind, hooks in former:
            vars(part)[kind] = hooks


def _watched(
    hook: Callable[..., Any], key: int, observers: set[int], keeping: Keeping, traces: Callable[..., _Traces]
) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        before = traces(args, kwargs)
        with keeping():
            result = hook(*args, **kwargs)
        if result is not None or before.are_left():
            observers.discard(key)
        else:
            observers.add(key)
        return result

    return run


def _kept(hook: Callable[..., Any], keeping: Keeping) -> Callable[..., Any]:
    @functools.wraps(hook)
    def run(*args: Any, **kwargs: Any) -> Any:
        with keeping():
            return hook(*args, **kwargs)

    return run


class _Traces:
    """What a hook could leave a trace in, as it is before the hook.

    Args:
        parts: The modules of the block.
        streams: Random streams; more may be added later.
        args: What the hook is given.
        kwargs: What it is given by keyword.
    """

    def __init__(self, parts: Sequence[nn.Module], streams: Mapping[int, Stream], args: Any, kwargs: Any) -> None:
        self._parts = parts
        self._streams = streams
        self._args = args, kwargs
        self._marks = self._read_marks()
        self._states = self._read_states()
        twins: dict[int, Twin] = {}
        self._objects = [
            (value, Twin(value, twins)) for part in parts for value in _own(vars(part)).values() if has_content(value)
        ]

    def are_left(self) -> bool:
        """Whether anything has changed since."""
        return (
            self._marks != self._read_marks()
            or not same_state(self._states, self._read_states())
            or not all(twin.same_as(value) for value, twin in self._objects)
        )

    def _read_marks(self) -> list[Any]:
        """Attributes of the modules by identity, tensors with their versions."""
        marks: list[Any] = []
        values = tree_leaves(self._args)
        for part in self._parts:
            named = _own(vars(part)) | part._modules | part._parameters | part._buffers
            marks.append({name: id(value) for name, value in named.items()})
            values += named.values()
        return marks + [(id(value), version_of(value)) for value in values if isinstance(value, Tensor)]

    def _read_states(self) -> dict[Any, Any]:
        """Where all random streams stand."""
        devices = rng_devices(value for value in tree_leaves(self._args) if isinstance(value, Tensor))
        states: dict[Any, Any] = dict(enumerate(rng_states(devices)))
        states["Python"], states["NumPy"] = host_rng()
        return states | {stream.source: stream.read() for stream in self._streams.values()}


def _has_statistics(part: nn.Module) -> bool:
    """Whether a module is a normalisation that updates running statistics, torch's own or a library's."""
    return isinstance(part, _NormBase) or part._buffers.keys() >= _STATISTICS


def _is_spread(tensor: Tensor) -> bool:
    """Whether elements share memory, so that torch refuses to write them, and a clone would be larger than it is."""
    return tensor.layout == torch.strided and any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    )


def _own(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """A module's attributes without torch's bookkeeping."""
    return {name: value for name, value in attributes.items() if name not in _TORCH_OWN}


def _to_put_back(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """What to set so that `after` becomes what `before` was."""
    due = {name: value for name, value in before.items() if after.get(name, _MISSING) is not value}
    due.update((name, _MISSING) for name in after.keys() - before.keys())
    return due


def _put_back(target: dict[str, Any], due: Mapping[str, Any]) -> None:
    for name, value in due.items():
        if value is _MISSING:
            target.pop(name, None)
        else:
            target[name] = value


def _exchange(parameters: dict[str, Any], due: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], str, Any, Any]]:
    """Set parameters that have been replaced since; yields where, what and instead of what."""
    for name, tensor in due.items():
        now = parameters.get(name)
        # FSDP frees the memory of what it had gathered: that is not to be used again
        if now is not tensor and not (tensor is not None and tensor.numel() and not tensor.untyped_storage().nbytes()):
            parameters[name] = tensor
            yield parameters, name, tensor, now
