"""What surrounds a forward and is no argument of it: random streams, autocast, switches, contexts, module state.

A replay puts all of it back as it was in forward, and afterwards as it was before the replay.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

T = TypeVar("T")

_recomputing: contextvars.ContextVar[bool] = contextvars.ContextVar("lightning_recompute.recomputing", default=False)

# process-wide switches that choose kernels or dtypes, each with its setter
_SWITCHES: tuple[tuple[Callable[[], Any], Callable[[Any], None]], ...] = (
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
)

RngStates = tuple[Tensor, ...]


def is_recomputing() -> bool:
    """Whether the running code is a replay in backward: True there, False in any forward.

    For code inside a block that must run once a step, such as counters and logging.
    """
    return _recomputing.get()


def rng_states(devices: tuple[torch.device, ...]) -> RngStates:
    """States of the default generators: the CPU's, then one for each of `devices`."""
    return (
        torch.get_rng_state(),
        *(torch.get_device_module(device.type).get_rng_state(device) for device in devices),
    )


def set_rng_states(devices: tuple[torch.device, ...], states: RngStates) -> None:
    """Set the generators that `rng_states` read."""
    torch.set_rng_state(states[0])
    for device, state in zip(devices, states[1:], strict=True):
        torch.get_device_module(device.type).set_rng_state(state, device)


def same_rng(one: RngStates, other: RngStates) -> bool:
    """Whether nothing was drawn between two readings."""
    return len(one) == len(other) and all(map(torch.equal, one, other))


class Surroundings:
    """Autocast of every device type, kernel and dtype switches and context variables at one moment.

    Args:
        device_types: Device types whose autocast state counts.
    """

    __slots__ = ("_autocast", "_cache_enabled", "_context", "_switches")

    def __init__(self, device_types: tuple[str, ...]) -> None:
        self._autocast = _autocast_states(device_types)
        self._cache_enabled = torch.is_autocast_cache_enabled()
        self._switches = tuple(read() for read, _ in _SWITCHES)
        self._context = contextvars.copy_context()

    def run(self, function: Callable[..., T], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> T:
        """Call `function` as a replay under these surroundings."""
        with self._restored():
            return self._context.run(_run_recomputing, function, args, kwargs)

    @contextlib.contextmanager
    def _restored(self) -> Iterator[None]:
        now = tuple(read() for read, _ in _SWITCHES)
        with contextlib.ExitStack() as stack:
            for device_type, enabled, dtype in self._autocast:
                if _autocast_states((device_type,)) != ((device_type, enabled, dtype),):
                    stack.enter_context(torch.autocast(device_type, dtype, enabled, self._cache_enabled))
            _set_switches(now, self._switches)
            try:
                yield
            finally:
                _set_switches(self._switches, now)


def _autocast_states(device_types: tuple[str, ...]) -> tuple[tuple[str, bool, torch.dtype], ...]:
    return tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in device_types)


def _set_switches(now: tuple[Any, ...], due: tuple[Any, ...]) -> None:
    for (_, write), current, value in zip(_SWITCHES, now, due, strict=True):
        if current != value:
            write(value)


def _run_recomputing(function: Callable[..., T], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> T:
    # runs inside the call's own copied context: the value vanishes with it unless the same call is replayed again
    token = _recomputing.set(True)
    try:
        return function(*args, **kwargs)
    finally:
        _recomputing.reset(token)


BufferNames = frozenset[tuple[int, str]]
"""Buffers of a module by (position in `modules()`, name)."""


class ModuleState:
    """What a forward may change in its module: rebound attributes and written or rebound buffers.

    Made before the forward; `settle` after it keeps only what did change. A replay runs under `restored`: it
    sees attributes, buffers and training flags as the forward saw them and leaves none of its own behind.
    Values of buffers are cloned before the forward only where a write is to be expected: the statistics of
    normalisations (their kernels write without a trace in the version counter) and the buffers named in
    `written`; all of them when that is None, on a module's first call.

    Args:
        module: The module about to run.
        written: The buffers that an earlier call wrote, None before the first call.
    """

    __slots__ = ("_attributes", "_buffers", "_training", "_values")

    def __init__(self, module: nn.Module, written: BufferNames | None) -> None:
        self._training: list[bool] = []
        self._attributes: list[dict[str, Any] | None] = []
        self._buffers: list[dict[str, tuple[Tensor | None, int]] | None] = []
        self._values: dict[tuple[int, str], Tensor] = {}
        with torch.no_grad():
            for index, part in enumerate(module.modules()):
                self._training.append(part.training)
                self._attributes.append(dict(vars(part)))
                buffers = part._buffers
                self._buffers.append({name: (buffer, version_of(buffer)) for name, buffer in buffers.items()})
                for name, buffer in buffers.items():
                    expected = written is None or (index, name) in written or isinstance(part, _NormBase)
                    if expected and buffer is not None:
                        self._values[index, name] = buffer.clone()

    def settle(self, module: nn.Module, compare_values: bool) -> BufferNames:
        """Keep only what the forward changed.

        Args:
            module: The same module, after its forward.
            compare_values: Also find writes that no version counter shows.

        Returns:
            The buffers that were written in place.

        Raises:
            LookupError: A buffer was written whose former value is not known; the argument is its name.
        """
        found: set[tuple[int, str]] = set()
        for index, part in enumerate(module.modules()):
            self._attributes[index] = _rebound(self._attributes[index] or {}, vars(part)) or None
            changed: dict[str, tuple[Tensor | None, int]] = {}
            for name, (buffer, version) in (self._buffers[index] or {}).items():
                value = self._values.get((index, name))
                wrote = version_of(buffer) != version or (
                    value is not None
                    and buffer is not None
                    and (isinstance(part, _NormBase) or (compare_values and not torch.equal(value, buffer)))
                )
                if wrote:
                    if value is None:
                        raise LookupError(name)
                    found.add((index, name))
                    changed[name] = (value, 0)
                else:
                    self._values.pop((index, name), None)
                    if part._buffers.get(name) is not buffer:
                        changed[name] = (buffer, 0)
            self._buffers[index] = changed or None
        return frozenset(found)

    @contextlib.contextmanager
    def restored(self, module: nn.Module) -> Iterator[None]:
        """Set the module as its forward saw it; on leaving put everything back as it is now."""
        parts = list(module.modules())
        now = [(dict(vars(part)), dict(part._buffers)) for part in parts]
        try:
            for index, part in enumerate(parts):
                _put_back(vars(part), {**(self._attributes[index] or {}), "training": self._training[index]})
                for name, (buffer, _) in (self._buffers[index] or {}).items():
                    value = self._values.get((index, name), buffer)
                    part._buffers[name] = None if value is None else value.clone()
            yield
        finally:
            for part, (attributes, buffers) in zip(parts, now, strict=True):
                _put_back(vars(part), _rebound(attributes, vars(part)))
                _put_back(part._buffers, _rebound(buffers, part._buffers))


_MISSING: Any = object()


def _rebound(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What to put back to make `after` as `before` was."""
    due = {name: value for name, value in before.items() if after.get(name, _MISSING) is not value}
    due.update((name, _MISSING) for name in after.keys() - before.keys())
    return due


def _put_back(target: dict[str, Any], due: dict[str, Any]) -> None:
    for name, value in due.items():
        if value is _MISSING:
            target.pop(name, None)
        else:
            target[name] = value


def version_of(tensor: Tensor | None) -> int:
    """The version counter of a tensor; 0 where there is none to read."""
    return 0 if tensor is None or tensor.is_inference() else tensor._version
