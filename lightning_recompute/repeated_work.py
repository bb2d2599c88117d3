"""Which work tensor-parallel ranks repeat: products that each of them makes of the same numbers.

Most products under tensor parallelism are shared, each rank makes its part. Some are not: a router, experts that stay
whole, a head that no plan divides. Nothing in a tensor says which, so their operands are compared between the ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_OPERANDS = 3
_PARTS = 4
"""Sums that are taken of a sample, of every fourth element each: of one sum shards agree too often by chance."""
_SAMPLE = 4096
"""Elements of an operand that are looked at, spread over all of it: a sum over the whole would take memory."""
_TOLERANCE = 1e-4
"""Of sums over a sample: ranks that do the same may differ in last bits, shards differ by more."""


class RepeatedWork:
    """Notes what products were made of, and finds out which of them all ranks made alike.

    Products are alike where samples of all their operands are. One with an operand of zeros counts as shared: shards
    of zeros look the same on all ranks.
    """

    def __init__(self) -> None:
        self._noted: list[tuple[int, list[list[float]] | Tensor]] = []

    @torch.no_grad()
    def note(self, flops: int, args: Any) -> None:
        """Remember a product.

        Args:
            flops: Its FLOPs.
            args: What the operator was given; matrices among them are its operands.
        """
        matrices = [x for x in tree_leaves(args) if isinstance(x, Tensor) and x.ndim > 1 and x.dtype in _DTYPES]
        if not matrices:
            return
        sums = torch.stack([_sums(x) for x in matrices[:_OPERANDS]])
        # on an accelerator read later, so as not to wait for it
        self._noted.append((flops, sums.tolist() if sums.device.type == "cpu" else sums))

    def flops(self, group: dist.ProcessGroup, device: torch.device) -> int:
        """FLOPs that all ranks did alike; collective, and forgets what was noted.

        Args:
            group: The ranks.
            device: Where collectives run.

        Returns:
            How many, on each of them; 0 where ranks did not make equally many products.
        """
        noted, self._noted = self._noted, []
        size = torch.tensor([len(noted), -len(noted)], device=device)
        dist.all_reduce(size, dist.ReduceOp.MAX, group)
        if size.sum() != 0 or not noted:
            return 0
        mine = torch.tensor([_row(*product) for product in noted], dtype=torch.float64, device=device)  # (n, 25)
        everyone = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather(everyone, mine, group=group)
        ranks = torch.stack(everyone)  # (t, n, 25)
        spread = ranks.amax(0) - ranks.amin(0)  # NaN is within no bound
        sums = spread[:, 1:].unflatten(1, (_OPERANDS, 2, _PARTS))
        magnitudes = ranks.amax(0)[:, 1:].unflatten(1, (_OPERANDS, 2, _PARTS))[:, :, 1]  # (n, 3, 4)
        within = (sums <= _TOLERANCE * magnitudes.unsqueeze(2)).flatten(2).all(-1)  # (n, 3)
        present = magnitudes.sum(-1)
        same = ((within & (present > 0)) | (present < 0)).all(-1) & (spread[:, 0] == 0)
        return int(mine[same, 0].sum())


def _sums(x: Tensor) -> Tensor:
    """The sums over the parts of a sample, then over their magnitudes."""
    most = int(_SAMPLE ** (1 / x.ndim) + 1e-9)
    sample = x[tuple(slice(None, None, -(-size // most) or 1) for size in x.shape)].double().flatten()
    parts = nn.functional.pad(sample, (0, -len(sample) % _PARTS)).view(-1, _PARTS)
    return torch.cat((parts.sum(0), parts.abs().sum(0)))


def _row(flops: int, sums: list[list[float]] | Tensor) -> list[float]:
    found = sums.tolist() if isinstance(sums, Tensor) else sums
    found = [*found, *[[-1.0] * (2 * _PARTS)] * (_OPERANDS - len(found))]
    return [float(flops), *(value for operand in found for value in operand)]
