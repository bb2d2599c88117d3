"""One rank of parallel groups without its peers: a process group that sends nothing (torch's `fake` one)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_recompute.groups import ParallelGroups


@contextmanager
def fake_groups(*, pipeline: int = 1, data: int = 1, tensor: int = 1, rank: int = 0) -> Iterator[ParallelGroups]:
    """The groups of one rank of a world that is not there, in this process.

    What is received has whatever values, so only shapes and bytes of what runs inside mean something.

    Args:
        pipeline: Pipeline stages.
        data: Ranks that hold the same for other data.
        tensor: Ranks that share each layer.
        rank: Of the pipeline; along the other axes it is the first.

    Yields:
        The groups; gone on leaving.

    Raises:
        ValueError: There is no such rank, or this process has a process group.
    """
    if not 0 <= rank < pipeline:
        raise ValueError(f"rank={rank} of {pipeline} pipeline ranks: 0 to {pipeline - 1} is due")
    if dist.is_initialized():
        raise ValueError(
            "this process has joined a process group, which a group that sends nothing would stand in the way of: run "
            "this before the processes meet, or in a process of its own"
        )
    store = FakeStore()
    world_size = pipeline * data * tensor
    dist.init_process_group("fake", store=store, rank=rank * data * tensor, world_size=world_size)
    try:
        yield ParallelGroups.build("cpu", tensor=tensor, pipeline=pipeline)
    finally:
        dist.destroy_process_group()
        # it has names of groups, which the next ones have again
        _clear_sharding_prop_cache()
