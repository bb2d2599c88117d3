"""Torchmetrics of a module that only one rank of a group updates: the others are given what was added."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torchmetrics import Metric, MetricCollection

from lightning_recompute.patch import Patch


class SharedMetrics:
    """The metrics of a module, at any depth.

    The order of calls on each rank: within `listening`, what updates them; then `changes` on the rank that did, and
    `follow` on the others.

    Args:
        module: The module.
        listens: Whether what runs at the moment may update them; elsewhere updates do nothing.
    """

    def __init__(self, module: nn.Module, listens: Callable[[], bool]) -> None:
        self._listens = listens
        self._metrics = {name: part for name, part in module.named_modules() if isinstance(part, Metric)}
        self._collections = [part for part in module.modules() if isinstance(part, MetricCollection)]
        self._names = {id(metric): name for name, metric in self._metrics.items()}
        self._former: dict[str, tuple[int, dict[str, int]]] = {}
        # what has been given to `forward` since `listening` began
        self._batches: dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {}

    def name_of(self, metric: Metric) -> str | None:
        """The name of a metric in the module; None for one that is not of it."""
        return self._names.get(id(metric))

    def named(self, name: str) -> Metric:
        """The metric of a name."""
        return self._metrics[name]

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Within, updates count where they may."""
        self._batches = {}
        with ExitStack() as stack:
            for name, metric in self._metrics.items():
                self._former[name] = metric.update_count, _lengths(metric)
                stack.callback(Patch(metric, _unless_deaf, self._listens, attribute="update").remove)
                stack.callback(Patch(metric, _forward, self, attribute="forward").remove)
            yield
        self._look_at_whole_batches()

    def forward(self, original: Any, /, *args: Any, **kwargs: Any) -> Any:
        """In place of a metric's: value of a microbatch, as far as the step knows."""
        if not self._listens():
            return None
        given = _moved((args, kwargs), None)
        self._batches.setdefault(self._names[id(original.__self__)], []).append(given)
        return original(*args, **kwargs)

    def _look_at_whole_batches(self) -> None:
        """Let what is logged of a step be the value of its batch, not of the last microbatch."""
        for name, batches in self._batches.items():
            if len(batches) < 2:
                continue
            metric = self._metrics[name]
            # what cannot be copied: a process group, and the last value with its graph; and what the epoch has so far
            group, metric.process_group, metric._forward_cache = metric.process_group, None, None
            held = {state: value for state, value in metric.metric_state.items() if isinstance(value, list)}
            for state in held:
                setattr(metric, state, [])
            try:
                alone = metric.clone()
            finally:
                metric.process_group = group
                for state, value in held.items():
                    setattr(metric, state, value)
            alone.process_group = group
            alone.reset()
            alone.sync_on_compute = metric.dist_sync_on_step
            with torch.no_grad():
                for args, kwargs in batches:
                    alone.update(*args, **kwargs)
                metric._forward_cache = alone.compute()

    def changes(self) -> dict[str, Any]:
        """What came to the metrics since `listening` began, on the CPU; empty where nothing did."""
        for collection in self._collections:
            collection.values(copy_state=False)  # members of a group get the state of the one that was updated
        found = {}
        for name, metric in self._metrics.items():
            count, lengths = self._former[name]
            if metric.update_count == count:
                continue
            if metric.update_count < count:  # reset meanwhile
                lengths = {}
            states = {
                state: value[lengths.get(state, 0) :] if isinstance(value, list) else value
                for state, value in metric.metric_state.items()
            }
            found[name] = _moved((metric.update_count, lengths, states, metric._forward_cache), torch.device("cpu"))
        return found

    def follow(self, changes: dict[str, Any]) -> None:
        """Take over what another rank's `changes` says."""
        for name, change in changes.items():
            metric = self._metrics[name]
            count, lengths, states, last = _moved(change, metric.device)
            for state, value in states.items():
                former = getattr(metric, state)
                setattr(metric, state, former[: lengths.get(state, 0)] + value if isinstance(value, list) else value)
            metric._update_count = count
            metric._computed = None
            metric._forward_cache = last


def _lengths(metric: Metric) -> dict[str, int]:
    return {state: len(value) for state, value in metric.metric_state.items() if isinstance(value, list)}


def _moved(tree: Any, device: torch.device | None) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.detach().to(device), tree)


def _forward(original: Any, metrics: SharedMetrics, /, *args: Any, **kwargs: Any) -> Any:
    """In place of `forward`."""
    return metrics.forward(original, *args, **kwargs)


def _unless_deaf(original: Any, listens: Callable[[], bool], /, *args: Any, **kwargs: Any) -> Any:
    """In place of `update`."""
    return original(*args, **kwargs) if listens() else None
