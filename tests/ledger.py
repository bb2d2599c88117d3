"""A small meter of tensor storages for tests, independent of the package's own measuring."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Ledger(TorchDispatchMode):
    """Counts the bytes of storages that operators make while it is entered, until they are freed.

    Args:
        known: Modules and tensors that exist already; their storages are not counted.
    """

    def __init__(self, *known: nn.Module | Tensor) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self._seen: set[int] = set()
        for thing in known:
            tensors = [*thing.parameters(), *thing.buffers()] if isinstance(thing, nn.Module) else [thing]
            for tensor in tensors:
                self._meet(tensor.untyped_storage(), 0)

    def _meet(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        key = storage._cdata
        if key in self._seen:
            return
        self._seen.add(key)
        self.live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._forget, key, num_bytes)

    def _forget(self, key: int, num_bytes: int) -> None:
        self._seen.discard(key)
        self.live_bytes -= num_bytes

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                self._meet(storage, storage.nbytes())
        return result
