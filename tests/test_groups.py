"""The world as a mesh."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_recompute.groups import AXES, ParallelGroups, data_size


@pytest.fixture
def _rank_five_of_eight() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_rank_five_of_eight")
def test_tensor_parallel_ranks_are_neighbours() -> None:
    groups = ParallelGroups.build("cpu", tensor=2, pipeline=2)
    assert {axis: groups.size(axis) for axis in AXES} == {"pipeline": 2, "data": 2, "tensor": 2}
    assert {axis: groups.rank(axis) for axis in AXES} == {"pipeline": 1, "data": 0, "tensor": 1}
    assert dist.get_process_group_ranks(groups.group("tensor")) == [4, 5]
    assert dist.get_process_group_ranks(groups.group("data")) == [5, 7]
    assert dist.get_process_group_ranks(groups.group("pipeline")) == [1, 5]
    assert groups.tensor_mesh.mesh_dim_names == ("tensor",)
    assert groups.data_mesh.size() == 2
    assert not groups.is_alone


@pytest.mark.parametrize(("world", "sizes", "due"), [(8, {"tensor": 2}, 4), (8, {"tensor": 2, "pipeline": 4}, 1)])
def test_what_is_left_divides_the_data(world: int, sizes: dict[str, int], due: int) -> None:
    assert data_size(world, **sizes) == due


@pytest.mark.parametrize(
    ("world", "sizes", "told"),
    [(3, {"tensor": 2}, "the 3 processes of this run; take 2 or 4"), (1, {"tensor": 4}, "the 1 process of this run")],
)
def test_sizes_that_do_not_divide_the_world(world: int, sizes: dict[str, int], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        data_size(world, **sizes)
