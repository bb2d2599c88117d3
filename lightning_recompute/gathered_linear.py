"""A linear over a whole sequence that keeps this rank's part of it.

Under sequence parallelism the input of a column-parallel linear is put together from the ranks' parts. What a linear
needs for its weight's gradient is that input; here it is put together again in backward, so that a layer keeps
34·sbh/t bytes (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2 and equation 4).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_recompute.collectives import Group, enter_joined


class Parts:
    """A sequence of which this rank keeps its part, shared by all linears that read it (query, key and value).

    Args:
        part: This rank's part.
        dim: The dimension that is divided over the ranks.
        group: The ranks.
    """

    def __init__(self, part: Tensor, dim: int, group: Group) -> None:
        self.part = part
        self.dim = dim
        self.group = group
        self._cast: Tensor | None = None
        self.readers = _Readers()

    def cast(self, dtype: torch.dtype) -> Tensor:
        """The part in another dtype, made once."""
        if self.part.dtype == dtype:
            return self.part
        if self._cast is None or self._cast.dtype != dtype:
            self._cast = self.part.to(dtype)
        return self._cast


class _Readers:
    """How many backward passes are going to ask for the whole sequence: the last one lets go of it."""

    def __init__(self) -> None:
        self._due = 0
        self._seen = 0
        self._whole: Tensor | None = None

    def add(self) -> None:
        self._due += 1

    def whole(self, part: Tensor, dim: int, group: Group) -> Tensor:
        if torch.is_grad_enabled():  # a backward that is differentiated itself
            return enter_joined(part, dim, group)
        whole = enter_joined(part, dim, group) if self._whole is None else self._whole
        self._seen = (self._seen + 1) % self._due
        self._whole = whole if self._seen else None
        return whole


class _GatheredLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, whole: Tensor, part: Tensor, weight: Tensor, bias: Tensor | None, dim: int, group: Group, readers: Any
    ) -> Tensor:
        ctx.save_for_backward(part if ctx.needs_input_grad[2] else None, weight)
        ctx.dim, ctx.group, ctx.readers = dim, group, readers
        if ctx.needs_input_grad[2]:
            readers.add()
        return F.linear(whole, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        part, weight = ctx.saved_tensors
        rows = gradient.flatten(0, -2)
        of_weight = of_bias = None
        if ctx.needs_input_grad[2]:  # first, so that the whole sequence is gone when its gradient comes
            of_weight = rows.t() @ ctx.readers.whole(part, ctx.dim, ctx.group).flatten(0, -2)
        if ctx.needs_input_grad[3]:
            of_bias = rows.sum(0)
        of_input = gradient @ weight if ctx.needs_input_grad[0] else None
        return of_input, None, of_weight, of_bias, None, None, None


def gathered_linear(whole: Tensor, parts: Parts, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear(whole, weight, bias), keeping this rank's part of `whole` for backward.

    Args:
        whole: The whole sequence (..., h), as `enter_joined` made it.
        parts: Of what.
        weight: (n, h).
        bias: (n,), or None.

    Returns:
        (..., n).
    """
    dtype = whole.dtype
    if torch.is_autocast_enabled(whole.device.type):
        dtype = torch.get_autocast_dtype(whole.device.type)
        weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
    apply: Any = _GatheredLinear.apply  # torch leaves it untyped
    result: Tensor = apply(whole.to(dtype), parts.cast(dtype), weight, bias, parts.dim, parts.group, parts.readers)
    return result
