"""When memory runs out: what is held, the plan that would fit, and trying the step again under it."""

from __future__ import annotations

import functools
import gc
import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.memory import is_oom_error
from torch import Tensor, nn

from lightning_recompute.ambient import host_rng, rng_devices, rng_states, set_host_rng, set_rng_states
from lightning_recompute.budgeting import profile_training_step
from lightning_recompute.device_memory import device_bytes
from lightning_recompute.errors import BudgetError
from lightning_recompute.forecast import stage_forecast
from lightning_recompute.patch import Patch
from lightning_recompute.plan import RecomputePlan
from lightning_recompute.planning import forecast_within
from lightning_recompute.profiling import everything_kept
from lightning_recompute.units import GIB, format_bytes

SHARE = 0.95
"""What of a device a plan that is advised may take: the rest is for contexts and fragments."""

_TEXTS = re.compile(r"(cuda|hip|xpu|mps)[^\n]*out of memory|DefaultCPUAllocator: can't allocate|out of memory", re.I)


def out_of_memory_in(exception: BaseException) -> BaseException | None:
    """The out-of-memory error that an exception is, or that it was raised from."""
    seen: set[int] = set()
    found: BaseException | None = exception
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        text = str(found.args[0]) if found.args else ""
        is_runtime = isinstance(found, RuntimeError | MemoryError)
        if isinstance(found, torch.OutOfMemoryError) or is_oom_error(found) or (is_runtime and _TEXTS.search(text)):
            return found
        found = found.__cause__ or found.__context__
    return None


def free(error: BaseException, device: torch.device) -> None:
    """Let go of what an error's frames hold, and of what an allocator keeps."""
    found: BaseException | None = error
    while found is not None:
        traceback.clear_frames(found.__traceback__)
        found = found.__cause__ or found.__context__
    gc.collect()
    if device.type != "cpu":
        torch.get_device_module(device.type).empty_cache()


def advice(
    trainer: pl.Trainer,
    module: pl.LightningModule,
    step: tuple[Any, int],
    plan: RecomputePlan | None,
    blocks: str | Sequence[str] | None,
) -> str:
    """What a step needs under the plan it ran under, and which plan would fit; measured after memory ran out.

    Args:
        trainer: Whose fit it is, in one process.
        module: The module.
        step: The batch and its number.
        plan: What was recomputed; None: nothing.
        blocks: Where the blocks are.

    Raises:
        Exception: Whatever keeps the step from being measured.
    """
    device = trainer.strategy.root_device
    limit = int(SHARE * device_bytes(device))
    profile = profile_training_step(trainer, module, *step, blocks)
    now = stage_forecast(profile, plan or everything_kept(profile))
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in now.breakdown.items() if size)
    needs = f"a step needs {format_bytes(now.peak_bytes)} at: {now.moment} ({parts})"
    if now.peak_bytes <= limit:
        return (
            f"By measurement {needs}, which is less than the {format_bytes(limit)} of {device} that a plan may take: "
            "something else in the process, or another process, holds the rest"
        )
    try:
        forecast = forecast_within(profile, limit)
    except BudgetError as error:
        return str(error)
    return (
        f"By measurement {needs}; {device} has room for {format_bytes(limit)}. The fastest plan that fits needs "
        f"{format_bytes(forecast.peak_bytes)}: set memory_budget='{limit / GIB:.2f}GiB' in place of the other words"
    )


class Attempts:
    """Tries steps again under tighter plans when memory runs out, so that they end as if the plan had been there.

    In one process and automatic optimization. What a step changes besides gradients is put back before it is tried
    again: random streams, buffers, attributes of modules, and what was logged.

    Args:
        tighten: Makes a plan of a smaller peak than the one that failed; False if there is none.
    """

    def __init__(self, tighten: Callable[[], bool]) -> None:
        self._tighten = tighten
        self._before: _Before | None = None
        self._step: Callable[[], Any] | None = None

    def forward(self, module: pl.LightningModule, step: Callable[[], Any]) -> Any:
        """Run a step's forward.

        Args:
            module: The module.
            step: Its training step.
        """
        self._before, self._step = _Before(module), step
        while True:
            with _held_back(module) as logged:
                result, error = _tried(step)
            if error is None:
                for name, args, kwargs in logged:
                    getattr(module, name)(*args, **kwargs)
                return result
            self._again(error, module)

    def backward(
        self, module: pl.LightningModule, loss: Tensor, scale: float, run: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Run a step's backward.

        Args:
            module: The module.
            loss: What its forward gave.
            scale: What Lightning multiplied the loss with.
            run: Runs backward from a loss.
        """
        gradients = [None if p.grad is None else p.grad.clone() for p in module.parameters()]
        while True:
            result, error = _tried(functools.partial(run, loss))
            if error is None:
                self._before = self._step = None
                return cast(Tensor, result)
            loss.detach_()  # others hold it, and with it the graph
            for parameter, gradient in zip(module.parameters(), gradients, strict=True):
                parameter.grad = None if gradient is None else gradient.clone()
            self._again(error, module)
            assert self._step is not None
            while True:
                with _held_back(module):  # what the first forward logged stands
                    outcome, error = _tried(self._step)
                if error is None:
                    break
                self._again(error, module)
            loss = (outcome["loss"] if isinstance(outcome, dict) else outcome) * scale
            del outcome

    def _again(self, error: BaseException, module: pl.LightningModule) -> None:
        assert self._before is not None
        free(error, module.device)
        self._before.put_back()
        if not self._tighten():
            raise error


def _tried(step: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    try:
        return step(), None
    except Exception as error:
        if out_of_memory_in(error) is None:
            raise
        return None, error


class _Before:
    """What a step may change, as it was before."""

    def __init__(self, module: nn.Module) -> None:
        self._devices = rng_devices([*module.parameters(), *module.buffers()])
        self._rng, self._host_rng = rng_states(self._devices), host_rng()
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
        self._attributes = [(part, dict(vars(part))) for part in module.modules()]
        self._containers = {
            id(value): (value, value.copy())
            for _, attributes in self._attributes
            for name, value in attributes.items()
            if isinstance(value, list | dict | set) and not name.startswith("_")
        }
        self._tensors = [
            (value, value.detach().clone())
            for _, attributes in self._attributes
            for value in attributes.values()
            if isinstance(value, Tensor) and not value.requires_grad
        ]

    def put_back(self) -> None:
        for part, attributes in self._attributes:
            for name in vars(part).keys() - attributes.keys():
                del vars(part)[name]
            vars(part).update({name: value for name, value in attributes.items() if name != "forward"})
        for value, content in self._containers.values():
            value.clear()
            (value.extend if isinstance(value, list) else value.update)(content)
        with torch.no_grad():
            for tensor, former in (*self._buffers, *self._tensors):
                tensor.copy_(former)
        set_rng_states(self._devices, self._rng)
        set_host_rng(self._host_rng)


@contextmanager
def _held_back(module: pl.LightningModule) -> Iterator[list[tuple[str, tuple[Any, ...], dict[str, Any]]]]:
    """While a step may fail, what it logs is noted."""
    noted: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
    patches = [Patch(module, _noted, noted, name, attribute=name) for name in ("log", "log_dict")]
    try:
        yield noted
    finally:
        while patches:
            patches.pop().remove()


def _noted(original: Any, noted: list[Any], name: str, /, *args: Any, **kwargs: Any) -> None:
    noted.append((name, args, kwargs))
