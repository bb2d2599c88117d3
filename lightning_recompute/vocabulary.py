"""Cross-entropy over a vocabulary that is divided over ranks: no rank ever holds all logits.

Megatron-LM's vocabulary-parallel cross-entropy (Shoeybi et al. 2019, arXiv 1909.08053, section 3).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_recompute.collectives import Group, largest, summed


class _DividedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, group: Group) -> Tensor:
        first = group.rank() * logits.shape[-1]
        shifted = logits - largest(logits.amax(-1), group).unsqueeze(-1)  # (n, V/t)
        here = (targets >= first) & (targets < first + logits.shape[-1])
        index = (targets - first).masked_fill(~here, 0).unsqueeze(-1)
        of_target = summed(shifted.gather(-1, index).squeeze(-1).masked_fill(~here, 0), group)
        probabilities = shifted.exp_()
        total = summed(probabilities.sum(-1), group)
        probabilities.div_(total.unsqueeze(-1))
        ctx.save_for_backward(probabilities, index, here)
        return total.log() - of_target

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        probabilities, index, here = ctx.saved_tensors
        (gradient,) = gradients
        of_logits = probabilities.scatter_add(-1, index, -here.unsqueeze(-1).to(probabilities.dtype))
        return of_logits.mul_(gradient.unsqueeze(-1)), None, None


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats.

    Args:
        logits: (..., V); a DTensor whose last dimension is divided over one mesh axis stays so.
        targets: int64 ids (...), alike on all ranks.

    Returns:
        A scalar, in float32 where the logits have 16 bit; alike on all ranks.
    """
    if not isinstance(logits, DTensor):
        return F.cross_entropy(full_precision(logits).flatten(0, -2), targets.flatten())
    local = full_precision(logits.to_local()).flatten(0, -2)
    apply: Any = _DividedCrossEntropy.apply  # torch leaves it untyped
    losses: Tensor = apply(local, targets.flatten(), logits.device_mesh.get_group())
    return losses.mean()


def full_precision(logits: Tensor) -> Tensor:
    """Logits in float32 where they came in 16 bit: softmax over a vocabulary needs it."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def whole(logits: Tensor) -> Tensor:
    """All logits, where they are divided over ranks."""
    return logits.full_tensor() if isinstance(logits, DTensor) else logits
