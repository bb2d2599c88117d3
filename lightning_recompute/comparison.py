"""What a replay saves beside what its forward saved: shapes always, values under `check=True`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.module_tracker import ModuleTracker

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
        self._tracker: ModuleTracker | None = None

    @contextlib.contextmanager
    def tracking(self) -> Iterator[None]:
        """Know which module runs while this is entered."""
        with ModuleTracker() as self._tracker:
            yield
        self._tracker = None

    def record(self, index: int, tensor: Tensor) -> None:
        """Copy the value that was saved at a place."""
        names = self._tracker.parents - {"Global"} if self._tracker is not None else ()
        innermost = max(names, key=len, default="").partition(".")[2]
        self._values[index] = innermost, tensor.detach().clone()

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
