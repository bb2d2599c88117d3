"""How a training step is run in order to be measured: around its forward, before and after its backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn


class TriedStep:
    """A step of a module in a process that shares nothing of the step with others.

    Attributes:
        communicates: Whether there are collectives in the step, whose buffers no operator returns.
        gathers: Whether parameters are sharded: gathered and let go of in the course of the step, and their gradients
            reduced. Then nothing can stand in for them.
        averages: Whether gradients are averaged over replicas in passing buffers.
        has_middle: Whether more than two backwards may come before an optimizer's step.
    """

    communicates = False
    gathers = False
    averages = False
    has_middle = False

    def trying(self, stand_ins: Iterable[nn.Parameter] = ()) -> AbstractContextManager[object]:
        """Surrounds steps that are to leave nothing.

        Args:
            stand_ins: What stands in for the module's parameters, if backward is run.
        """
        return contextlib.nullcontext()

    def forward(self, run: Callable[[], Any]) -> Any:
        """Run the forward."""
        return run()

    def before_backward(self, loss: Tensor) -> None:
        """Before each backward.

        Args:
            loss: Where it begins.
        """

    def after_backward(self) -> None:
        """After each backward."""

    def without_reduction(self) -> AbstractContextManager[object]:
        """Within, backward is one of several before the optimizer's step, and not the last."""
        return contextlib.nullcontext()

    def whole(self, block: nn.Module) -> AbstractContextManager[object]:
        """Within, a block has its whole parameters; collective."""
        return contextlib.nullcontext()


LONE_STEP = TriedStep()
"""In one process."""
