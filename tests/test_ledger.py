"""The ledger and how storages are told apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_recompute.ledger import GRANULARITY, Ledger, allocated_bytes, storage_bytes
from lightning_recompute.memory import measure_step

FLOAT = 4


@pytest.fixture
def fake_world() -> Iterator[None]:
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    torch.distributed.destroy_process_group()


def test_views_and_results_in_place_are_not_new() -> None:
    older = torch.ones(8, 8)
    with Ledger() as ledger:
        kept = [older.t(), older.add_(1), older[0].unsqueeze(0), older.detach()]
        assert ledger.held_bytes == 0
        kept.append(older.relu())
        assert ledger.held_bytes == 8 * 8 * FLOAT


def test_storages_are_counted_once_and_whole() -> None:
    base = torch.ones(10)
    assert storage_bytes([base, base[:3], base.view(2, 5)]) == 40
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.ones(2), (3,))
    assert storage_bytes([sparse]) == 2 * 8 + 2 * FLOAT
    assert storage_bytes([torch.ones(4, device="meta")], torch.device("cpu")) == 0
    assert storage_bytes(nn.LazyLinear(3).parameters()) == 0


@pytest.mark.usefixtures("fake_world")
def test_what_was_waited_for_is_no_new_tensor() -> None:
    def step() -> Tensor:
        name = torch.distributed.group.WORLD.group_name  # type: ignore[union-attr]
        part = torch.ones(8, 32)
        total = torch.ops._c10d_functional.all_reduce(part, "sum", name)
        waited: Tensor = torch.ops._c10d_functional.wait_tensor(total.requires_grad_())
        return waited.sum()

    real = measure_step(step, meter=Ledger())
    with FakeTensorMode():
        assert measure_step(step, meter=Ledger()) == real


def test_a_ledger_counts_fake_tensors_as_if_they_were_real() -> None:
    def step() -> Tensor:
        layer = nn.Linear(32, 64)
        return F.gelu(layer(torch.ones(8, 32))).sum()

    real = measure_step(step, meter=Ledger())
    with FakeTensorMode():
        assert measure_step(step, meter=Ledger()) == real
    with Ledger() as ledger, FakeTensorMode():  # somebody's dry run inside of what is measured
        step()
    assert ledger.peak_bytes == 0
    with Ledger(fake=True) as ledger, FakeTensorMode():
        step()
    assert ledger.peak_bytes > 0


@pytest.mark.usefixtures("fake_world")
def test_a_dtensors_look_at_whole_shapes_is_no_part_of_a_run() -> None:
    mesh = init_device_mesh("cpu", (2,))
    shard = torch.ones(4, 1009)  # a shape that torch has not looked at yet
    with FakeTensorMode(allow_non_fake_inputs=True):
        part = DTensor.from_local(torch.empty_like(shard), mesh, [Shard(1)])
        with Ledger() as ledger:
            kept = part.relu()
            assert ledger.peak_bytes == ledger.held_bytes == storage_bytes([kept]) == shard.nbytes


def test_a_ledger_counts_local_shards_and_what_is_gathered(fake_world: None) -> None:
    mesh = init_device_mesh("cpu", (2,))
    weight = distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)])
    assert storage_bytes([weight]) == 4 * 4 * FLOAT
    with Ledger() as ledger:
        doubled = weight * 2
        assert ledger.held_bytes == 4 * 4 * FLOAT
        whole = doubled.redistribute(mesh, [Replicate()])
        assert ledger.held_bytes == 4 * 4 * FLOAT + 8 * 4 * FLOAT
        del doubled, whole
        assert ledger.held_bytes == 0


def test_compiled_code_stays_compiled_under_a_ledger() -> None:
    runs = 0

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., object]:
        def run(*args: object) -> object:
            nonlocal runs
            runs += 1
            return graph(*args)

        return run

    layer, x = torch.compile(nn.Linear(4, 4), backend=backend), torch.ones(2, 4)
    with Ledger() as ledger:
        kept = layer(x)
    assert runs == 1
    assert kept.shape == (2, 4)
    assert ledger.held_bytes == 2 * 4 * FLOAT
    layer(x)
    assert runs == 2


def test_storages_are_rounded_up_as_an_allocator_does() -> None:
    with Ledger(granularity=512) as ledger:
        one = torch.empty(1)
        more = torch.empty(129)
        whole = torch.empty(128)
        assert ledger.live_bytes == 512 + 1024 + 512
        view = more[:3]
        assert ledger.live_bytes == 2048
        del more
        assert ledger.live_bytes == 2048  # the view holds it
        del view
        assert ledger.live_bytes == 1024
        assert allocated_bytes([one, whole, whole[:2]]) == 516  # a CPU's allocator does not round
    assert GRANULARITY["cuda"] == 512
