"""A model that is too large to build, on tensors that have shapes and no memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

Module = TypeVar("Module", bound=nn.Module)


@contextmanager
def on_fake_tensors(
    make: Callable[[], Module], *, dtype: torch.dtype | None = None, device: str | torch.device = "cpu"
) -> Iterator[Module]:
    """Make a module whose parameters are fake tensors; what runs inside this context runs on those.

    Args:
        make: Makes the module; called once, where new tensors have no memory.
        dtype: Of its floating-point parameters. None: what `make` gives them.
        device: Where the tensors are said to be.

    Yields:
        The module, its structure, ties and small tensors outside of parameters as ever.
    """
    with torch.device("meta"):
        module = make()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        made: dict[int, nn.Parameter] = {}
        for part in module.modules():
            for name, parameter in part._parameters.items():
                if parameter is not None:
                    if id(parameter) not in made:
                        made[id(parameter)] = _like(parameter, dtype, device)
                    part._parameters[name] = made[id(parameter)]
    # what is no parameter is real, and zero: tables, statistics, counters
    for part in module.modules():
        for holder in (part._buffers, vars(part)):
            for name, value in list(holder.items()):
                if isinstance(value, Tensor) and value.device.type == "meta":
                    holder[name] = torch.zeros_like(value, device=device)
    with mode:
        yield module


def _like(parameter: nn.Parameter, dtype: torch.dtype | None, device: str | torch.device) -> nn.Parameter:
    kind = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
    return nn.Parameter(torch.empty(parameter.shape, dtype=kind, device=device), parameter.requires_grad)
