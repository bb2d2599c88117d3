"""How a step calls the blocks of its model, as values: shapes, places, structures; no tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_unflatten


@dataclass(frozen=True)
class TensorForm:
    """What a tensor is but its values.

    Args:
        shape: Its shape.
        dtype: Its dtype.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> TensorForm:
        """The form of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype)

    @property
    def is_floating_point(self) -> bool:
        """Whether it can carry a gradient."""
        return self.dtype.is_floating_point or self.dtype.is_complex

    @property
    def num_bytes(self) -> int:
        """Of the values."""
        return math.prod(self.shape) * self.dtype.itemsize

    def poison(self, device: torch.device, *, own: bool) -> Tensor:
        """A tensor of this form that shows wherever it is used: NaN, or 0 where there is no NaN.

        Args:
            device: Where.
            own: With memory of its own, so that it can be written; otherwise it has next to none.
        """
        fill = float("nan") if self.is_floating_point else 0
        if own:
            return torch.full(self.shape, fill, dtype=self.dtype, device=device)
        return torch.full((), fill, dtype=self.dtype, device=device).expand(self.shape)

    def with_rows(self, former: int, rows: int) -> TensorForm:
        """The form for another number of rows."""
        return replace(self, shape=(rows, *self.shape[1:])) if self.shape[:1] == (former,) else self


@dataclass(frozen=True)
class BlockForm:
    """How a block is called and what it returns.

    Args:
        places: Which leaves of its (args, kwargs) are the hidden state.
        hidden: The hidden state that it is given.
        spec: The structure of what it returns.
        returned: The leaves of that: forms for tensors, and what is None, a number or a word.
        main: Which of them goes on as the hidden state.
    """

    places: tuple[int, ...]
    hidden: TensorForm
    spec: TreeSpec
    returned: tuple[Any, ...]
    main: int

    def poison(self, device: torch.device) -> Any:
        """What stands for the block's output where it does not run."""
        leaves = [
            leaf.poison(device, own=index == self.main) if isinstance(leaf, TensorForm) else leaf
            for index, leaf in enumerate(self.returned)
        ]
        return tree_unflatten(leaves, self.spec)

    def with_rows(self, former: int, rows: int) -> BlockForm:
        """The form for another number of rows."""
        returned = tuple(
            leaf.with_rows(former, rows) if isinstance(leaf, TensorForm) else leaf for leaf in self.returned
        )
        return replace(self, hidden=self.hidden.with_rows(former, rows), returned=returned)


@dataclass(frozen=True)
class StepForm:
    """How a step calls the blocks.

    Args:
        blocks: For each block, in forward order.
        rows: The rows of the microbatch.
    """

    blocks: tuple[BlockForm, ...]
    rows: int

    def with_rows(self, rows: int) -> StepForm:
        """The form for another number of rows."""
        return StepForm(tuple(block.with_rows(self.rows, rows) for block in self.blocks), rows)
