"""What surrounds a forward and is no argument of it: random streams, autocast, switches, contexts.

A replay puts all of it back as it was in forward, and afterwards as it was before the replay.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import functools
import operator
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.random import mtrand
from torch import Tensor
from torch.nn.utils import parametrize
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from lightning_recompute.errors import RecomputeError
from lightning_recompute.object_state import Snapshot, has_content, same_bytes, same_state, without_graph

T = TypeVar("T")

_recomputing: contextvars.ContextVar[bool] = contextvars.ContextVar("lightning_recompute.recomputing", default=False)
_values_last: contextvars.ContextVar[bool] = contextvars.ContextVar("lightning_recompute.values_last", default=False)

# process-wide switches that choose kernels or dtypes, each with its setter
_SWITCHES: tuple[tuple[Callable[[], Any], Callable[[Any], None]], ...] = (
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    *(
        (functools.partial(getattr, backend, name), functools.partial(setattr, backend, name))
        for backend, name in (
            (torch.backends.mkldnn, "enabled"),
            (torch.backends.cudnn, "enabled"),
            (torch.backends.cudnn, "benchmark"),
            (torch.backends.cudnn, "deterministic"),
        )
    ),
)

RngStates = tuple[Tensor, ...]
"""States of torch's default generators: the CPU's, then one for each further device; then those of attached streams."""
HostRng = tuple[Any, dict[str, Any]]
"""States of Python's and NumPy's global random numbers."""


def is_recomputing() -> bool:
    """Whether the running code is a replay in backward: True there, False in any forward.

    For code inside a block that must run once a step, such as counters and logging.
    """
    return _recomputing.get()


def values_last() -> bool:
    """Whether values that a replay makes live as long as the graph nodes that saved them, or until they are read."""
    return _values_last.get()


@contextlib.contextmanager
def lasting_values(last: bool = True) -> Iterator[None]:
    """Forwards within make frames whose values last: where several backward calls go through one graph.

    Each of those calls would replay otherwise. The price is memory: a value is kept after its first use.

    Args:
        last: Whether they do; False leaves it as it is.
    """
    token = _values_last.set(last or values_last())
    try:
        yield
    finally:
        _values_last.reset(token)


def rng_devices(tensors: Iterable[Tensor]) -> tuple[torch.device, ...]:
    """The devices of the tensors that have a generator of their own beside the CPU's."""
    return tuple(dict.fromkeys(tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")))


class FurtherStream(Protocol):
    """Random numbers beside the default generators, which a replay restores as well."""

    def read(self) -> RngStates:
        """Its state."""
        ...

    def write(self, states: RngStates) -> None:
        """Restore what `read` gave."""
        ...


_further: list[FurtherStream] = []


def attach(stream: FurtherStream) -> None:
    """Let replays restore a stream."""
    _further.append(stream)


def detach(stream: FurtherStream) -> None:
    """End what `attach` began."""
    _further.remove(stream)


def own_rng_states(devices: tuple[torch.device, ...]) -> RngStates:
    """States of the default generators alone: the CPU's, then one for each of `devices`."""
    return (
        torch.get_rng_state(),
        *(torch.get_device_module(device.type).get_rng_state(device) for device in devices),
    )


def set_own_rng_states(devices: tuple[torch.device, ...], states: RngStates) -> None:
    """Set the generators that `own_rng_states` read."""
    torch.set_rng_state(states[0])
    for device, state in zip(devices, states[1:], strict=True):
        torch.get_device_module(device.type).set_rng_state(state, device)


def rng_states(devices: tuple[torch.device, ...]) -> RngStates:
    """States of the default generators, the CPU's first, then one for each of `devices`; then of attached streams."""
    states = own_rng_states(devices)
    for stream in _further:
        states += stream.read()
    return states


def set_rng_states(devices: tuple[torch.device, ...], states: RngStates) -> None:
    """Set what `rng_states` read."""
    own = 1 + len(devices)
    set_own_rng_states(devices, states[:own])
    for stream in _further:
        size = len(stream.read())
        if len(states) >= own + size:  # else read before the stream was attached
            stream.write(states[own : own + size])
        own += size


def same_rng(one: RngStates, other: RngStates) -> bool:
    """Whether nothing was drawn between two readings."""
    return len(one) == len(other) and all(map(same_bytes, one, other))


def host_rng() -> HostRng:
    """States of Python's and NumPy's global random numbers."""
    return random.getstate(), _numpy_stream.read()


class _NumpyStream:
    """NumPy's global random numbers. To read their state takes long, to see that it is the one last read does not."""

    _NUM_BYTES = 625 * 4  # 624 words of the Mersenne twister and the position in them

    def __init__(self) -> None:
        self._bits = b""
        self._state: dict[str, Any] = {}

    def read(self) -> dict[str, Any]:
        generator = mtrand.get_bit_generator()
        if not isinstance(generator, np.random.MT19937):
            state: Any = np.random.get_state(legacy=False)
            return dict(state)
        bits = ctypes.string_at(generator.ctypes.state_address, self._NUM_BYTES)
        # a second normal number, drawn with the first, waits outside of these bytes
        if bits != self._bits or self._state["has_gauss"]:
            state = np.random.get_state(legacy=False)
            self._bits, self._state = bits, dict(state)
        return self._state


_numpy_stream = _NumpyStream()


def set_host_rng(states: HostRng) -> None:
    """Set what `host_rng` read."""
    random.setstate(states[0])
    np.random.set_state(states[1])


def same_host_rng(one: HostRng, other: HostRng) -> bool:
    """Whether nothing was drawn between two readings."""
    return one[0] == other[0] and same_state(one[1], other[1])


class Surroundings:
    """Autocast of every device type, kernel and dtype switches, function modes and context variables at one moment.

    Args:
        device_types: Device types whose autocast state counts.
    """

    __slots__ = (
        "_autocast",
        "_cache_enabled",
        "_context",
        "_dispatch_modes",
        "_filled",
        "_function_modes",
        "_parametrized",
        "_switches",
    )

    def __init__(self, device_types: tuple[str, ...]) -> None:
        self._autocast = _autocast_states(device_types)
        self._cache_enabled = torch.is_autocast_cache_enabled()
        self._switches = tuple(read() for read, _ in _SWITCHES)
        # modes that may be active around the forward only, such as one that replaces functions
        self._function_modes = _get_current_function_mode_stack()
        self._dispatch_modes = _users_dispatch_modes()
        cached = {key: without_graph(tensor) for key, tensor in parametrize._cache.items()}
        self._parametrized = parametrize._cache_enabled, cached
        self._context = contextvars.copy_context()
        # what collects the outputs of blocks would, held here, keep the graph alive that holds this
        self._filled = [(variable, Snapshot(value)) for variable, value in self._context.items() if has_content(value)]
        for variable, _ in self._filled:
            self._context.run(variable.set, None)

    def run(self, function: Callable[..., T], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> T:
        """Call `function` as a replay under these surroundings."""
        with self._restored():
            # a copy each time: a second replay must not see what the first one set
            context = self._context.copy()
            for variable, snapshot in self._filled:
                context.run(variable.set, snapshot.take())
            return context.run(_run_recomputing, function, args, kwargs)

    @contextlib.contextmanager
    def _restored(self) -> Iterator[None]:
        now = tuple(read() for read, _ in _SWITCHES)
        with contextlib.ExitStack() as stack:
            for device_type, enabled, dtype in self._autocast:
                if _autocast_states((device_type,)) != ((device_type, enabled, dtype),):
                    stack.enter_context(torch.autocast(device_type, dtype, enabled, self._cache_enabled))
            stack.enter_context(_function_modes(self._function_modes))
            active = _users_dispatch_modes()
            for mode in self._dispatch_modes:
                if not any(mode is other for other in active):
                    stack.enter_context(mode)
            _set_switches(now, self._switches)
            parametrized = parametrize._cache_enabled, parametrize._cache
            parametrize._cache_enabled, parametrize._cache = self._parametrized[0], self._parametrized[1].copy()
            try:
                yield
            finally:
                _set_switches(self._switches, now)
                parametrize._cache_enabled, parametrize._cache = parametrized


def _autocast_states(device_types: tuple[str, ...]) -> tuple[tuple[str, bool, torch.dtype], ...]:
    return tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in device_types)


@contextlib.contextmanager
def _function_modes(due: Sequence[Any]) -> Iterator[None]:
    """These function modes and no others."""
    now = _get_current_function_mode_stack()
    if len(now) == len(due) and all(map(operator.is_, now, due)):
        yield
        return
    _exchange_function_modes(due)
    try:
        yield
    finally:
        _exchange_function_modes(now)


def _exchange_function_modes(due: Sequence[Any]) -> None:
    for _ in _get_current_function_mode_stack():
        _pop_mode()
    for mode in due:
        _push_mode(mode)


def _users_dispatch_modes() -> list[Any]:
    """Dispatch modes that may change what operators give; torch's own only count or trace."""
    return [mode for mode in _get_current_dispatch_mode_stack() if _is_users(type(mode))]


def _is_users(kind: type) -> bool:
    return kind.__module__.partition(".")[0] not in ("torch", __name__.partition(".")[0])


def _set_switches(now: tuple[Any, ...], due: tuple[Any, ...]) -> None:
    for (_, write), current, value in zip(_SWITCHES, now, due, strict=True):
        if current != value:
            write(value)


def _run_recomputing(function: Callable[..., T], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> T:
    _recomputing.set(True)  # in the copy of the call's context, which ends with the replay
    return function(*args, **kwargs)


def version_of(tensor: Tensor | None) -> int:
    """The version counter of a tensor; 0 where there is none to read."""
    return 0 if tensor is None or tensor.is_inference() else tensor._version


def check_version(tensor: Tensor | None, version: int, shape: torch.Size) -> None:
    """Refuse a tensor that was written in place since it was saved.

    Raises:
        RecomputeError: It was; in the words of autograd, whose own check hooks switch off.
    """
    if version_of(tensor) != version:
        raise RecomputeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor "
            f"of shape {tuple(shape)} is at version {version_of(tensor)}; expected version {version} instead"
        )
