"""How a step of a module that several ranks train together is run in order to be measured."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from lightning_recompute.parallel import ParallelModule
from lightning_recompute.sharding import Sharded
from lightning_recompute.tried_step import TriedStep


class GroupedStep(TriedStep):
    """A step of a module over tensor- and data-parallel groups; all ranks try it together.

    Args:
        parallel: The module.
        has_middle: Whether more than two backwards may come before an optimizer's step.
    """

    communicates = True

    def __init__(self, parallel: ParallelModule, has_middle: bool = False) -> None:
        self._parallel = parallel
        self._sharded = parallel.data if isinstance(parallel.data, Sharded) else None
        self.gathers = self._sharded is not None
        self.has_middle = has_middle and self.gathers

    @contextlib.contextmanager
    def trying(self) -> Iterator[None]:
        """Surrounds steps that are to leave nothing."""
        with contextlib.nullcontext() if self._sharded is None else self._sharded.trying():
            yield

    def forward(self, run: Callable[[], Any]) -> Any:
        """Run the forward."""
        if self._sharded is not None:
            return self._parallel.run(run)
        # gradients are those of stand-ins: none is averaged over replicas
        with contextlib.nullcontext() if self._parallel.tensor is None else self._parallel.tensor.step():
            return run()

    def before_backward(self, loss: Tensor) -> None:
        """Before each backward."""
        if self._sharded is not None:
            self._sharded.before_backward(loss)

    def after_backward(self) -> None:
        """After each backward."""
        if self._parallel.tensor is not None and self._parallel.syncs:
            self._parallel.tensor.sum_gradients()
        if self._sharded is not None:
            self._sharded.finish()

    def without_reduction(self) -> contextlib.AbstractContextManager[object]:
        """Within, backward is one of several before the optimizer's step, and not the last."""
        return self._parallel.no_sync()

    def whole(self, block: nn.Module) -> contextlib.AbstractContextManager[object]:
        """Within, a block has its whole parameters; collective."""
        return contextlib.nullcontext() if self._sharded is None else self._sharded.whole(block)
