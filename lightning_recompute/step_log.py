"""What a LightningModule logs in the microbatches of a pipeline: heard where the loss is made, said on every rank."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_recompute.patch import Patch
from lightning_recompute.pipeline import PipelineModule
from lightning_recompute.shared_attributes import SharedAttributes
from lightning_recompute.shared_metrics import SharedMetrics

LARGEST_SHARED_BYTES = 2**20
"""Of an attribute that a training step changes: what is larger would slow every step down."""

logger = logging.getLogger(__name__)


@dataclass
class Heard:
    """A key that was logged: once a microbatch.

    Attributes:
        options: The other arguments of `log`.
        values: A value for each microbatch, or the name of a metric.
        weights: What each microbatch counts.
        rows: The batch sizes that were given.
    """

    options: dict[str, Any]
    values: list[Any] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)


class StepLog:
    """The log of one module in a pipeline.

    Args:
        module: The LightningModule.
        pipeline: What divides it.
        group: The ranks of the pipeline.
    """

    def __init__(self, module: nn.Module, pipeline: PipelineModule, group: dist.ProcessGroup) -> None:
        self._module = module
        self._pipeline = pipeline
        self._group = group
        # of the class: the instance's may be another's patch
        self._signature = inspect.signature(type(module).log)  # type: ignore[attr-defined]  # a LightningModule's
        self._metrics = SharedMetrics(module, self._listens)
        self._attributes = SharedAttributes(module)
        self._left_out: set[str] = set()
        self._heard: dict[tuple[str, int], Heard] = {}
        self._times: dict[str, int] = {}
        self._microbatch = -1

    def _listens(self) -> bool:
        running = self._pipeline.running
        return running is not None and running.is_last

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Within, what the step logs is kept, on the stage that comes to the loss; elsewhere it is not said."""
        self._heard, self._times, self._microbatch = {}, {}, -1
        with ExitStack() as stack:
            stack.callback(Patch(self._module, _hear, self, attribute="log").remove)
            stack.enter_context(self._metrics.listening())
            if self._pipeline.has_last:
                self._attributes.look()
            yield

    def repeat(self, is_training: bool = False) -> None:
        """Log what was heard, averaged over the microbatches, on every rank; collective over the pipeline.

        Values are averaged by the microbatches' weights, or joined by `reduce_fx` where that is another function.
        What the step changed of the module's plain attributes is the same on every rank afterwards.

        Args:
            is_training: Whether attributes that would slow the steps down are left as they are, with a warning.
        """
        heard, self._heard = self._heard, {}
        mine = self._pipeline.has_last
        box: list[Any] = [None]
        if mine:
            for each in heard.values():
                each.values = [value.cpu() if isinstance(value, Tensor) else value for value in each.values]
            changed, left_out = self._attributes.changes(LARGEST_SHARED_BYTES if is_training else None)
            self._warn_of(left_out)
            box = [(list(heard.items()), self._metrics.changes(), changed)]
        dist.broadcast_object_list(box, group=self._group, group_src=self._pipeline.division.last_rank)
        assert box[0] is not None
        said, changes, changed = box[0]
        if not mine:
            self._metrics.follow(changes)
            self._attributes.follow(changed, self._pipeline.device)
        for (name, _), each in said:
            self._module.log(name, self._joined(each), **_options(each))  # type: ignore[operator]

    def _warn_of(self, names: Sequence[str]) -> None:
        if new := [name for name in names if name not in self._left_out]:
            self._left_out.update(new)
            logger.warning(
                "training_step gives the module's %s more than %d bytes: under a pipeline only the rank of the last "
                "stage has them; keep less there (a number of each batch), or do it in validation_step",
                ", ".join(map(repr, new)),
                LARGEST_SHARED_BYTES,
            )

    def hear(self, *args: Any, **kwargs: Any) -> None:
        """Keep one call of `log`."""
        running = self._pipeline.running
        if running is None or not running.is_last:
            return
        options = dict(self._signature.bind(self._module, *args, **kwargs).arguments)
        _, name, value = (options.pop(key) for key in list(self._signature.parameters)[:3])
        if running.microbatch != self._microbatch:
            self._microbatch, self._times = running.microbatch, {}
        number = self._times[name] = self._times.get(name, 0) + 1
        each = self._heard.setdefault((name, number), Heard(options))
        rows = options.pop("batch_size", None)
        if rows is not None:
            each.rows.append(int(rows))
        each.values.append(self._kept(value))
        each.weights.append(running.weight)

    def _kept(self, value: Any) -> Any:
        if isinstance(value, Metric):
            name = self._metrics.name_of(value)
            if name is None:
                raise ValueError(
                    f"self.log was given a {type(value).__name__} that is no attribute of the module; set it in "
                    "__init__, as Lightning needs"
                )
            return name
        # on its device, since a copy to the host would wait for the step; of its own, as a sum may be added to
        return value.detach().clone() if isinstance(value, Tensor) else value

    def _joined(self, each: Heard) -> Any:
        last = each.values[-1]
        if isinstance(last, str):
            return self._metrics.named(last)
        if not all(isinstance(value, Tensor | int | float) for value in each.values):
            return last  # what Lightning will refuse, in its own words
        values = torch.stack([torch.as_tensor(value) for value in each.values])
        values = values if values.is_floating_point() else values.to(torch.get_default_dtype())
        return joined(values, each.weights, each.options.get("reduce_fx", "mean")).to(self._pipeline.device)


def joined(values: Tensor, weights: Sequence[float], reduce_fx: str | Callable[..., Any]) -> Tensor:
    """One value of those of microbatches.

    Args:
        values: (microbatches, ...).
        weights: What each counts.
        reduce_fx: As for `LightningModule.log`: `mean` is by weights.

    Returns:
        The value.
    """
    name = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "")
    if name in ("sum", "max", "min"):
        found: Tensor = getattr(values, f"a{name}" if name != "sum" else name)(0)
        return found
    if callable(reduce_fx) and name != "mean":
        result: Tensor = reduce_fx(values)
        return result
    counted = [(value, weight) for value, weight in zip(values, weights, strict=True) if weight]
    if len(counted) < 2:  # the same bits; or nothing counts
        return counted[0][0] if counted else values.mean(0)
    total = sum(weight for _, weight in counted)
    mean = sum((value.to(torch.float64) * (weight / total) for value, weight in counted), torch.zeros(()))
    return mean.to(values.dtype)


def _options(each: Heard) -> dict[str, Any]:
    return each.options | ({"batch_size": sum(each.rows)} if each.rows else {})


def _hear(original: Any, log: StepLog, /, *args: Any, **kwargs: Any) -> None:
    """In place of `log`."""
    log.hear(*args, **kwargs)
