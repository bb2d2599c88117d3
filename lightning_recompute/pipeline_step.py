"""What a pipeline works on in one step, and what others see of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_recompute.probe import Step
from lightning_recompute.step_form import StepForm


@dataclass(frozen=True)
class Running:
    """What runs on this rank at the moment.

    Args:
        chunk: The stage of the pipeline.
        microbatch: Its number.
        weight: What it counts in the loss of its batch; all together 1.
        is_last: Whether the stage comes to the loss, so that what the user logs is to be recorded.
        is_before: Whether code before the blocks runs, on another stage than the first.
    """

    chunk: int
    microbatch: int
    weight: float
    is_last: bool
    is_before: bool


@dataclass(frozen=True)
class Alone:
    """The forwards of a training step, one by one.

    Args:
        forward: Runs a chunk, given its number, the hidden state (None on the first) and the microbatch's number;
            returns what the chunk sends, or the weighted loss.
        microbatches: The parts of the batch.
        forms: How the step calls the blocks on each.
    """

    forward: Callable[[int, Tensor | None, int], Tensor]
    microbatches: tuple[Any, ...]
    forms: tuple[StepForm, ...]


@dataclass
class Work:
    """One step of the schedule.

    Args:
        step: Runs the user's step on a microbatch.
        microbatches: The parts of the batch.
        weights: What each counts in the loss.
        forms: How the step calls the blocks on each.
        seed: Of the first; the next one's is one more.
        scale: What the gradient of the loss will be.
        loss: The weighted loss so far, where this rank comes to it.
    """

    step: Step
    microbatches: list[Any]
    weights: list[float]
    forms: list[StepForm]
    seed: int
    scale: float
    loss: Tensor | None = None
