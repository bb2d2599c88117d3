"""One rank of a world that is not there: its groups, what they send, and that nothing is left of them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_recompute.fake_groups import fake_groups


def test_places_of_a_rank() -> None:
    with fake_groups(pipeline=4, data=2, tensor=8, rank=3) as groups:
        assert [groups.size(axis) for axis in ("pipeline", "data", "tensor")] == [4, 2, 8]
        assert [groups.rank(axis) for axis in ("pipeline", "data", "tensor")] == [3, 0, 0]
        assert dist.get_rank() == 3 * 2 * 8
    assert not dist.is_initialized()


def test_nothing_is_waited_for() -> None:
    with fake_groups(pipeline=2, tensor=2, rank=1) as groups:
        value = torch.ones(3)
        dist.all_reduce(value, group=groups.group("tensor"))
        dist.recv(value, group=groups.group("pipeline"), group_src=0)
        dist.isend(value, group=groups.group("pipeline"), group_dst=0).wait()
        assert torch.equal(value, torch.ones(3)), "nothing was sent, and nothing came"


@pytest.mark.parametrize("size", [2, 4])
def test_one_after_the_other(size: int) -> None:
    """What torch remembers of DTensors' operators has names of groups."""
    for rank in range(2):
        with fake_groups(pipeline=2, tensor=size, rank=rank) as groups:
            weight = distribute_tensor(torch.ones(8, 4), groups.tensor_mesh, [Shard(0)])
            output = nn.functional.linear(DTensor.from_local(torch.ones(8, 4), groups.tensor_mesh), weight)
            assert output.redistribute(placements=[Shard(0)]).to_local().numel() == 8 * 8 // size


def test_refuses_a_rank_that_is_none() -> None:
    with pytest.raises(ValueError, match="rank=2 of 2 pipeline ranks: 0 to 1 is due"), fake_groups(pipeline=2, rank=2):
        pass
    assert not dist.is_initialized()


def test_leaves_a_process_group_alone() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=3)
    try:
        with pytest.raises(ValueError, match="has joined a process group"), fake_groups():
            pass
        assert dist.get_world_size() == 3
    finally:
        dist.destroy_process_group()


def test_gone_after_an_error() -> None:
    with pytest.raises(KeyError), fake_groups(pipeline=2):
        raise KeyError
    assert not dist.is_initialized()
