"""Values for a module that was built on the meta device, one module at a time: no rank ever holds all of it.

What a module's parameters start from follows from a seed and its name alone, so that they are the same for any number
of ranks and any layout.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from lightning_recompute.ambient import rng_devices
from lightning_recompute.whole import replace_parameters


def is_meta(module: nn.Module) -> bool:
    """Whether a parameter or buffer of a module is on the meta device."""
    return any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


def move_values(module: nn.Module, device: torch.device) -> None:
    """Move to a device what of a module has values."""
    if not is_meta(module):
        module.to(device)
        return
    module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))


class Materializer:
    """Gives values to modules on the meta device, whole or divided over tensor-parallel ranks.

    Args:
        root: The model.
        device: Where values go.
        seed: Where random values come from, the same on all ranks.
    """

    def __init__(self, root: nn.Module, device: torch.device, seed: int) -> None:
        self._device = device
        self._seed = seed
        self._names = {part: name for name, part in root.named_modules()}
        # a parameter that several modules have starts from what the first of them says
        self._owners: dict[nn.Parameter, nn.Module] = {}
        for part in self._names:
            for parameter in part._parameters.values():
                if parameter is not None:
                    self._owners.setdefault(parameter, part)
        self._initializers = dict(_initializers(root))
        self._made: dict[nn.Parameter, nn.Parameter] = {}

    def __call__(self, parts: Iterable[nn.Module]) -> dict[nn.Parameter, nn.Parameter]:
        """Give values to the own parameters and buffers of modules; those that have some stay as they are.

        Args:
            parts: The modules, without what is inside of them.

        Returns:
            For each parameter that has been exchanged since the beginning the new one.

        Raises:
            ValueError: Nothing says what a module starts from.
        """
        for part in parts:
            self._make(part)
        return self._made

    def _make(self, part: nn.Module) -> None:
        due = {name: p for name, p in part._parameters.items() if p is not None and p.is_meta}
        for name, former in list(due.items()):
            first = self._owners.get(former, part)
            if first is not part and former not in self._made:
                self._make(first)
            if former in self._made:  # tied to what has values by now
                part._parameters[name] = self._made[former]
                del due[name]
        buffers = [name for name, buffer in part._buffers.items() if buffer is not None and buffer.is_meta]
        if not due and not buffers:
            return
        name = self._names[part]
        for key, former in due.items():
            whole = torch.empty(former.shape, dtype=former.dtype, device=self._device)
            part._parameters[key] = nn.Parameter(whole, requires_grad=former.requires_grad)
        for key in buffers:
            buffer: Any = part._buffers[key]
            part._buffers[key] = torch.empty_like(buffer, device=self._device)
        try:
            self._initialize(name, part, [*due, *buffers])
        except BaseException:
            part._parameters.update(due)
            raise
        finally:
            values = {key: part._parameters[key] for key in due}
            part._parameters.update(due)

        def convert(key: str, former: nn.Parameter) -> nn.Parameter | None:
            value = values.get(key)
            if value is None:
                return None
            data = value.detach()
            if isinstance(former.data, DTensor):
                data = distribute_tensor(data, former.device_mesh, former.placements)  # type: ignore[attr-defined]
            self._made[former] = nn.Parameter(data, requires_grad=former.requires_grad)
            return self._made[former]

        replace_parameters(_Alone(part), convert)

    def _initialize(self, name: str, part: nn.Module, due: list[str]) -> None:
        seed = int.from_bytes(hashlib.sha256(f"{self._seed} {name}".encode()).digest()[:6], "big")
        devices = rng_devices([torch.empty(0, device=self._device)])
        initialize = self._initializers.get(part)
        with torch.random.fork_rng(devices, device_type=self._device.type if devices else "cuda"), torch.no_grad():
            torch.manual_seed(seed)
            if initialize is not None:
                initialize(part)
        unset = [key for key in due if getattr(part, key)._version == 0]
        if unset:
            raise ValueError(
                f"{name or 'the LightningModule'} ({type(part).__name__}) was built on the meta device and nothing "
                f"says what {', '.join(unset)} start{'s' if len(unset) == 1 else ''} from: give it a method "
                "reset_parameters() that sets all of them, or a module around it a method _init_weights(module), or "
                "build it outside of torch.device('meta')"
            )


def gather_over_data(parts: Iterable[nn.Module], known: dict[nn.Parameter, nn.Parameter]) -> None:
    """Undo a sharding over `data` that an earlier fit left, for the own parameters of some modules; collective.

    Args:
        parts: The modules, without what is inside of them; parameters end divided over `tensor`, or whole.
        known: For each parameter that was exchanged the new one; added to.
    """

    def convert(name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        value = parameter.data
        if parameter in known:
            return known[parameter]
        if not isinstance(value, DTensor) or "data" not in (value.device_mesh.mesh_dim_names or ()):
            return None
        axis = (value.device_mesh.mesh_dim_names or ()).index("data")
        placements = [Replicate() if index == axis else place for index, place in enumerate(value.placements)]
        gathered = value.redistribute(placements=placements)
        if value.device_mesh.ndim == 1:
            data: Tensor = gathered.to_local()
        else:
            mesh = value.device_mesh["tensor"]
            (place,) = [p for index, p in enumerate(gathered.placements) if index != axis]
            data = DTensor.from_local(gathered.to_local(), mesh, [place], run_check=False)
        return nn.Parameter(data, requires_grad=parameter.requires_grad)

    with torch.no_grad():
        for part in parts:
            known |= replace_parameters(_Alone(part), convert)


def _initializers(root: nn.Module) -> Iterable[tuple[nn.Module, Callable[[nn.Module], None]]]:
    """For each module what sets its values: the nearest `_init_weights` around it, or its own `reset_parameters`."""
    for name, part in root.named_modules():
        path, around = root, [root]
        for piece in name.split(".") if name else ():
            path = path.get_submodule(piece)
            around.append(path)
        found = [getattr(outer, "_init_weights", None) for outer in around]
        nearest = next((method for method in reversed(found) if callable(method)), None)
        own = getattr(part, "reset_parameters", None)
        if nearest is not None or callable(own):
            yield part, _both(nearest, own if callable(own) else None)


def _both(around: Any, own: Any) -> Callable[[nn.Module], None]:
    def initialize(part: nn.Module) -> None:
        if own is not None:
            own()
        if around is not None:
            around(part)

    return initialize


class _Alone(nn.Module):
    """A module as if it had no children."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self._parameters = part._parameters
