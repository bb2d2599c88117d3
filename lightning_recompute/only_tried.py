"""Running a LightningModule's step without training: nobody steps, and nobody hears of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from lightning_recompute.patch import Patch
from lightning_recompute.side_effects import is_lightning_module


@contextmanager
def only_tried(module: nn.Module) -> Iterator[None]:
    """Surrounds a step that is only tried.

    Nothing is logged; in manual optimization optimizers and schedulers take no step, and no callback hears of backward.

    Args:
        module: Whose step it is; one that is no LightningModule needs nothing of this.
    """
    with ExitStack() as stack:
        if is_lightning_module(module):
            for name in ("log", "log_dict"):
                stack.callback(Patch(module, _ignored, attribute=name).remove)
            if not module.automatic_optimization:
                for name in ("optimizers", "lr_schedulers"):
                    stack.callback(Patch(module, _idle, attribute=name).remove)
                stack.callback(Patch(module, _plain_backward, attribute="manual_backward").remove)
        yield


class _Idle:
    """In place of an optimizer or scheduler: it takes no step."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Take none."""

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: the gradients are those of stand-ins."""


def _idle(original: Any, /, *args: Any, **kwargs: Any) -> Any:
    found = original(*args, **kwargs)
    return [_Idle(each) for each in found] if isinstance(found, list) else None if found is None else _Idle(found)


def _plain_backward(original: Any, /, loss: Tensor, *args: Any, **kwargs: Any) -> None:
    loss.backward(*args, **kwargs)


def _ignored(original: Any, /, *args: Any, **kwargs: Any) -> None:
    """In place of `log`."""
