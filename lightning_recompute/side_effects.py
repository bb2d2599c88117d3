"""What must happen once a step although a block's forward runs twice: metric updates and logging."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from lightning_recompute.ambient import is_recomputing
from lightning_recompute.frame import keeping
from lightning_recompute.patch import Patch


def skipped_in_replay(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """The patched method: does nothing in a replay, and in forward leaves nothing for one to do."""
    if is_recomputing():
        return None
    with keeping():
        return original(*args, **kwargs)


def remembered_in_replay(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """The patched forward of a metric: gives in a replay what it gave last."""
    if is_recomputing():
        metric: Any = original.__self__  # type: ignore[attr-defined]  # a bound method, or an Original
        return metric._forward_cache
    with keeping():
        return original(*args, **kwargs)


def quiet_in_replay(module: nn.Module) -> Iterator[Patch]:
    """Patch `update` and forward of every torchmetrics metric in a module, and its `log` if it is a LightningModule.

    A LightningModule that is to be compiled keeps its own `log`.
    """
    for part in module.modules():
        if _derives_from(part, "torchmetrics.metric", "Metric"):
            yield Patch(part, skipped_in_replay, attribute="update")
            yield Patch(part, remembered_in_replay)
        elif is_lightning_module(part) and getattr(part, "_compiler_ctx", None) is None:
            yield Patch(part, skipped_in_replay, attribute="log")


def is_lightning_module(part: nn.Module) -> bool:
    """Whether a module is a LightningModule of either package; it imports neither."""
    return any(
        _derives_from(part, f"{package}.core.module", "LightningModule")
        for package in ("lightning.pytorch", "pytorch_lightning")
    )


def _derives_from(part: nn.Module, module: str, name: str) -> bool:
    return any(cls.__module__ == module and cls.__name__ == name for cls in type(part).__mro__)
