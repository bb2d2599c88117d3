"""What a replay saves beside what its forward saved: shapes always, values under `check=True`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from lightning_recompute.errors import RecomputeError

DIFFERS = (
    "The block does not compute the same thing twice: look for data-dependent branches, counters, or random numbers "
    "from a source other than torch's default generators; code that must run once can ask is_recomputing()"
)
"""What may be the reason, for the end of messages."""


class Comparison:
    """Copies of the values that a forward saves, each with the module in which it was saved."""

    def __init__(self) -> None:
        self._values: dict[int, tuple[str, Tensor]] = {}
        self._running: list[str] = []

    @contextlib.contextmanager
    def tracking(self, module: nn.Module) -> Iterator[None]:
        """Know which part of a module runs while this is entered."""
        names = {id(part): name for name, part in module.named_modules()}

        def enter(part: nn.Module, args: Any) -> None:
            self._running.append(names.get(id(part), type(part).__name__))

        def leave(part: nn.Module, args: Any, output: Any) -> None:
            self._running.pop()

        handles = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._running.clear()

    def record(self, index: int, tensor: Tensor) -> None:
        """Copy the value that was saved at a place."""
        self._values[index] = self._running[-1] if self._running else "", tensor.detach().clone()

    def check(self, name: str, index: int, replayed: Tensor) -> None:
        """Compare what the replay saved at a place.

        Args:
            name: The block's name.
            index: The place.
            replayed: The value of the replay, of the same shape and dtype.

        Raises:
            RecomputeError: It is another; the message names block and module.
        """
        if index not in self._values:
            return
        module, forward = self._values.pop(index)
        if torch.equal(forward, replayed) or torch.allclose(forward, replayed, rtol=0, atol=0, equal_nan=True):
            return
        difference = (forward.double() - replayed.double()).abs().max().item()
        raise RecomputeError(
            f"{name}: a value saved in {module or 'the block itself'}, {described(forward.shape, forward.dtype)}, "
            f"differs in the replay by up to {difference:.3g}. {DIFFERS}"
        )


def described(shape: torch.Size, dtype: torch.dtype) -> str:
    """A tensor in messages: `(2, 3) float32`."""
    return f"{tuple(shape)} {str(dtype).removeprefix('torch.')}"


def saved_otherwise(name: str, found: int, due: int) -> str:
    """The message for a replay that saved another number of tensors than its forward."""
    return f"{name}: up to its end the replay saved {found} tensors, the forward {due}. {DIFFERS}"
