"""How a step of a module that several ranks train together is run in order to be measured."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from lightning_recompute.data_parallel import Replicated
from lightning_recompute.parallel import ParallelModule
from lightning_recompute.reduction import GradientReduction
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
        self.averages = isinstance(parallel.data, Replicated)
        self._averaged: GradientReduction | None = None
        self.has_middle = has_middle and self.gathers

    @contextlib.contextmanager
    def trying(self, stand_ins: Iterable[nn.Parameter] = ()) -> Iterator[None]:
        """Surrounds steps that are to leave nothing.

        Args:
            stand_ins: What stands in for the module's parameters, if backward is run.
        """
        parameters = list(stand_ins)
        if self.averages and parameters:
            self._averaged = GradientReduction(parameters, self._parallel.groups.group("data"))
        try:
            with contextlib.nullcontext() if self._sharded is None else self._sharded.trying():
                yield
        finally:
            averaged, self._averaged = self._averaged, None
            if averaged is not None:
                averaged.remove()

    def forward(self, run: Callable[[], Any]) -> Any:
        """Run the forward."""
        if self._sharded is not None:
            return self._parallel.run(run)
        if self._averaged is not None:
            self._averaged.prepare()
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
        if self._averaged is not None:
            self._averaged.finish()
        if self._sharded is not None:
            self._sharded.finish()

    def without_reduction(self) -> contextlib.AbstractContextManager[object]:
        """Within, backward is one of several before the optimizer's step, and not the last."""
        return self._parallel.no_sync()

    def whole(self, block: nn.Module) -> contextlib.AbstractContextManager[object]:
        """Within, a block has its whole parameters; collective."""
        return contextlib.nullcontext() if self._sharded is None else self._sharded.whole(block)
