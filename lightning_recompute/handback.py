"""Gradients that are there before `backward` is called: kept aside, and given to the parameters by the loss."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class HandBack:
    """Gradients of one step, until its loss is backpropagated.

    Args:
        gradients: For each parameter its gradient, times `scale`.
        scale: What the gradient of the loss will be, as far as known; where it is that, nothing is multiplied.
        fixed: It has to be that, since other gradients of the step have been added to the parameters' already.
    """

    def __init__(self, gradients: Mapping[nn.Parameter, Tensor], scale: float, fixed: bool = False) -> None:
        self._gradients: dict[nn.Parameter, Tensor] | None = dict(gradients)
        self._scale = scale
        self._fixed = fixed

    def __call__(self, gradient: Tensor) -> None:
        """Add them to the parameters' `.grad`.

        Args:
            gradient: (), of the loss.

        Raises:
            RuntimeError: A second time, or with another gradient than was fixed.
        """
        if self._gradients is None:
            raise RuntimeError(
                "the loss of a pipeline was backpropagated a second time: its backward ran with its forward, and the "
                "gradients have been handed out"
            )
        gradients, self._gradients = self._gradients, None
        factor = float(gradient) / self._scale
        if self._fixed and factor != 1.0:
            raise RuntimeError(
                f"the loss of a pipeline was multiplied by {float(gradient)} before its backward, where {self._scale} "
                "was due: gradients of this batch have been added to those of the window already"
            )
        with torch.no_grad():
            while gradients:
                parameter, due = gradients.popitem()
                if factor != 1.0:
                    due = due.mul_(factor)
                if parameter.grad is None:
                    parameter.grad = due
                else:
                    parameter.grad += due


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor, hand_back: HandBack) -> Tensor:
        ctx.hand_back = hand_back
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        ctx.hand_back(gradients[0])
        return None, None, None


def loss_with(value: Tensor, hand_back: HandBack) -> Tensor:
    """A loss whose `backward` hands gradients back.

    Args:
        value: (), its value.
        hand_back: The gradients.

    Returns:
        (), a tensor that requires grad.
    """
    anchor = torch.zeros((), device=value.device, requires_grad=True)
    loss: Tensor = _Loss.apply(anchor, value, hand_back)  # type: ignore[no-untyped-call]
    return loss


class SetAside:
    """The gradients that parameters have, while a step makes others; `restore` puts them back.

    Args:
        parameters: The parameters.
        drop: Do not keep them: they are about to be zeroed anyway.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], drop: bool) -> None:
        self._parameters: Sequence[nn.Parameter] = list(parameters)
        self._former = [None if drop else parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None

    def restore(self) -> dict[nn.Parameter, Tensor]:
        """Put them back.

        Returns:
            The gradients that were made meanwhile.
        """
        made = {parameter: parameter.grad for parameter in self._parameters if parameter.grad is not None}
        for parameter, gradient in zip(self._parameters, self._former, strict=True):
            parameter.grad = gradient
        self._former = []
        return made
