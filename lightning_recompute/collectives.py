"""Collectives that autograd sees: how activations enter and leave what tensor-parallel ranks share.

The pairs of operators f, f̄, g, ḡ of Korthikanti et al. 2022 (arXiv 2205.05198, figures 4 and 5), as functions of
plain tensors. They are made of torch's functional collectives, which run on fake tensors as well; every backward is
made of such functions again, so that it can be differentiated.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup


def summed(x: Tensor, group: Group) -> Tensor:
    """The sum over the ranks; no gradient. A new tensor."""
    return _wait(torch.ops._c10d_functional.all_reduce(x.contiguous(), "sum", group.group_name))


def largest(x: Tensor, group: Group) -> Tensor:
    """The maximum over the ranks; no gradient. A new tensor."""
    return _wait(torch.ops._c10d_functional.all_reduce(x.contiguous(), "max", group.group_name))


def joined(x: Tensor, dim: int, group: Group) -> Tensor:
    """The ranks' tensors side by side along a dimension; no gradient."""
    size, dim = group.size(), dim % x.ndim
    parts = _wait(torch.ops._c10d_functional.all_gather_into_tensor(x.contiguous(), size, group.group_name))
    if dim == 0 or all(length == 1 for length in x.shape[:dim]):
        return parts.view(*x.shape[:dim], -1, *x.shape[dim + 1 :])
    # (t, ..., n, ...) -> (..., t, n, ...)
    return parts.view(size, *x.shape).movedim(0, dim).flatten(dim, dim + 1)


def summed_part(x: Tensor, dim: int, group: Group) -> Tensor:
    """This rank's part, along a dimension, of the sum over the ranks; no gradient."""
    size, dim = group.size(), dim % x.ndim
    if dim > 0 and any(length > 1 for length in x.shape[:dim]):
        # (..., t, n, ...) -> (t, ..., n, ...)
        stacked = x.unflatten(dim, (size, -1)).movedim(dim, 0).contiguous()
    else:
        stacked = x.contiguous().view(size, *x.shape[:dim], -1, *x.shape[dim + 1 :])
    part = _wait(torch.ops._c10d_functional.reduce_scatter_tensor(stacked, "sum", size, group.group_name))
    return part.view(*x.shape[:dim], -1, *x.shape[dim + 1 :])


def part_of(x: Tensor, dim: int, group: Group) -> Tensor:
    """This rank's part of a tensor along a dimension: memory of its own, no gradient."""
    length = x.shape[dim] // group.size()
    return x.narrow(dim, group.rank() * length, length).clone(memory_format=torch.contiguous_format)


def _wait(x: Tensor) -> Tensor:
    done: Tensor = torch.ops._c10d_functional.wait_tensor(x)
    return done


class _EnterShared(torch.autograd.Function):
    """f: nothing in forward, the sum over the ranks in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return sum_parts(gradients[0], ctx.group), None


class _SumParts(torch.autograd.Function):
    """f̄: the sum over the ranks in forward, nothing in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return summed(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return enter(gradients[0], ctx.group), None


class _Join(torch.autograd.Function):
    """All parts in forward, for work that every rank does alike: its own part of the gradient in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return joined(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return split(gradients[0], ctx.dim, ctx.group), None, None


class _Split(torch.autograd.Function):
    """Its own part in forward, all parts in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return part_of(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return join(gradients[0], ctx.dim, ctx.group), None, None


class _EnterJoined(torch.autograd.Function):
    """g: all parts in forward (`whole`, if they are there already), the part of the sum in backward."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, whole: Tensor | None, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return joined(part, dim, group) if whole is None else whole.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return sum_and_split(gradients[0], ctx.dim, ctx.group), None, None, None


class _SumAndSplit(torch.autograd.Function):
    """ḡ: the part of the sum in forward, all parts in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return summed_part(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return enter_joined(gradients[0], ctx.dim, ctx.group), None, None


def _apply(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    apply: Any = function.apply  # torch leaves it untyped
    result: Tensor = apply(*args)
    return result


def enter(x: Tensor, group: Group) -> Tensor:
    """What every rank has alike, before each works on it with weights of its own: gradients are summed."""
    return _apply(_EnterShared, x, group)


def sum_parts(x: Tensor, group: Group) -> Tensor:
    """Sum what each rank made with weights of its own; afterwards all have it alike."""
    return _apply(_SumParts, x, group)


def join(x: Tensor, dim: int, group: Group) -> Tensor:
    """Put the ranks' parts side by side along a dimension, for work that every rank does alike."""
    return _apply(_Join, x, dim, group)


def split(x: Tensor, dim: int, group: Group) -> Tensor:
    """This rank's part, along a dimension, of what every rank has alike.

    Raises:
        ValueError: The ranks do not divide the dimension.
    """
    check_divides(x, dim, group)
    return _apply(_Split, x, dim, group)


def enter_joined(part: Tensor, dim: int, group: Group, whole: Tensor | None = None) -> Tensor:
    """Put the ranks' parts side by side before each works on them with weights of its own: gradients are summed.

    Args:
        part: This rank's part.
        dim: The dimension that is divided over the ranks.
        group: The ranks.
        whole: The result's values, where they are known.
    """
    return _apply(_EnterJoined, part, whole, dim, group)


def sum_and_split(x: Tensor, dim: int, group: Group) -> Tensor:
    """This rank's part, along a dimension, of the sum of what each rank made with weights of its own.

    Raises:
        ValueError: The ranks do not divide the dimension.
    """
    check_divides(x, dim, group)
    return _apply(_SumAndSplit, x, dim, group)


def check_divides(x: Tensor, dim: int, group: Group) -> None:
    """Refuse a dimension that cannot be divided over the ranks.

    Raises:
        ValueError: It cannot.
    """
    if x.shape[dim] % group.size():
        raise ValueError(
            f"a tensor of shape {tuple(x.shape)} cannot be divided over {group.size()} tensor-parallel ranks along its "
            f"dimension {dim % x.ndim} of {x.shape[dim]}: under sequence_parallel=True the length of a sequence has to "
            "be a multiple of tensor_parallel_size; pad or cut the sequences, or leave sequence_parallel out"
        )
