"""Samples, tokens, seconds and FLOPs by hand."""

from __future__ import annotations

import math
import time
from collections import UserDict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import pack_sequence
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from lightning_recompute.throughput import (
    DEVICE_PEAKS,
    FlopCounter,
    StepClock,
    device_peak_flops,
    grouped_matmul_flops,
    median_and_p95,
    own_formulas,
    sample_counts,
    token_count,
    utilization,
)

WIDTH, HIDDEN, ROWS = 16, 48, 5


def count(step: Callable[[], Tensor], counter: FlopCounter) -> tuple[int, int]:
    """FLOPs of the model and of recomputation in a forward and a backward pass."""
    with counter:
        loss = step()
        with counter.backward():
            loss.backward()
    return counter.model_flops, counter.recompute_flops


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))


# ---- FLOPs ----------------------------------------------------------------------------------------------------------

FORWARD = 2 * ROWS * (WIDTH * HIDDEN + HIDDEN * 1)
INPUT_GRADIENTS = 2 * ROWS * HIDDEN * 1  # the first layer's input needs none


def test_flops_of_a_perceptron() -> None:
    model, x = perceptron(), torch.randn(ROWS, WIDTH)
    assert count(lambda: model(x).sum(), FlopCounter()) == (2 * FORWARD + INPUT_GRADIENTS, 0)


@pytest.mark.parametrize("reentrant", [False, True])
def test_replays_of_torchs_checkpoint_are_recomputation(reentrant: bool) -> None:
    model, x = perceptron(), torch.randn(ROWS, WIDTH, requires_grad=True)
    first = 2 * ROWS * WIDTH * HIDDEN
    model_flops, recompute_flops = count(
        lambda: model[2](checkpoint(model[:2], x, use_reentrant=reentrant)).sum(), FlopCounter()
    )
    assert model_flops == 2 * FORWARD + INPUT_GRADIENTS + first  # here x needs a gradient
    assert recompute_flops == first


def test_replays_of_others_are_told_by_a_function() -> None:
    replaying = True
    counter = FlopCounter(lambda: replaying)
    weight, x = torch.ones(WIDTH, 1, requires_grad=True), torch.ones(ROWS, WIDTH)
    with counter:
        x @ weight
        replaying = False
        x @ weight
    assert counter.model_flops == counter.recompute_flops == 2 * ROWS * WIDTH


def test_gradients_of_gradients_inside_forward_are_the_models() -> None:
    model, x = perceptron(), torch.randn(ROWS, WIDTH, requires_grad=True)

    def penalty() -> Tensor:
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return gradient.square().sum()

    model_flops, recompute_flops = count(penalty, FlopCounter())
    assert model_flops > 2 * FORWARD
    assert recompute_flops == 0


HEADS, QUERIES, KEYS, SIZE, BATCH = 4, 8, 12, 16, 2
ONE_PRODUCT = 2 * BATCH * HEADS * QUERIES * KEYS * SIZE


@pytest.mark.parametrize("key_heads", [HEADS, 2], ids=["heads", "grouped"])
def test_attention_on_the_cpu(key_heads: int) -> None:
    query = torch.randn(BATCH, HEADS, QUERIES, SIZE, requires_grad=True)
    key, value = (torch.randn(BATCH, key_heads, KEYS, SIZE, requires_grad=True) for _ in range(2))

    def attention() -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, enable_gqa=key_heads != HEADS).sum()

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert count(attention, FlopCounter()) == (2 * ONE_PRODUCT + 5 * ONE_PRODUCT, 0)
    with sdpa_kernel(SDPBackend.MATH):
        assert count(attention, FlopCounter()) == (2 * ONE_PRODUCT + 4 * ONE_PRODUCT, 0)


def test_own_formulas_serve_torchs_counter_and_leave_its_registry_alone() -> None:
    before = dict(flop_registry)
    query = torch.randn(BATCH, HEADS, QUERIES, SIZE)

    def seen(**options: Any) -> int:
        with FlopCounterMode(display=False, **options) as counter:
            F.scaled_dot_product_attention(query, query, query)
        return counter.get_total_flops()

    assert seen() == 0
    assert seen(custom_mapping=own_formulas()) == 2 * 2 * BATCH * HEADS * QUERIES * QUERIES * SIZE
    assert flop_registry == before


def test_every_attention_kernel_of_this_torch_has_a_formula() -> None:
    known = set(own_formulas()) | set(flop_registry)
    names = [name for name in dir(torch.ops.aten) if "attention" in name and hasattr(torch.ops.aten, name)]
    # some kernels only run without gradients, the rest composes others
    inference = {"_native_multi_head_attention", "_flash_attention_forward_no_dropout_inplace"}
    inference |= {"scaled_dot_product_attention", "_scaled_dot_product_attention_math"}
    unknown = {name for name in names if getattr(torch.ops.aten, name) not in known}
    assert len(names) > 10
    assert unknown <= inference


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_recurrent_layers(kind: type[nn.RNNBase]) -> None:
    steps, gates = 7, {nn.RNN: 1, nn.GRU: 3, nn.LSTM: 4}[kind]
    layer, x = kind(WIDTH, HIDDEN, batch_first=True), torch.randn(ROWS, steps, WIDTH, requires_grad=True)
    forward = 2 * ROWS * steps * gates * (WIDTH + HIDDEN) * HIDDEN
    model_flops, _ = count(lambda: layer(x)[0].sum(), FlopCounter())
    assert model_flops == pytest.approx(3 * forward, rel=0.05)  # nothing goes back through the first hidden state


def test_convolutions_and_vectors() -> None:
    convolution, image = nn.Conv2d(3, 8, 3, padding=1, bias=False), torch.randn(2, 3, 10, 10)
    forward = 2 * 2 * 10 * 10 * 8 * 3 * 9
    assert count(lambda: convolution(image).sum(), FlopCounter()) == (2 * forward, 0)
    with FlopCounter() as counter:
        torch.mv(torch.ones(6, 4), torch.ones(4))
        torch.addbmm(torch.ones(3, 5), torch.ones(2, 3, 4), torch.ones(2, 4, 5))
    assert counter.model_flops == 2 * 6 * 4 + 2 * 2 * 3 * 4 * 5


def test_grouped_matmuls() -> None:
    assert grouped_matmul_flops((40, 16), (3, 16, 8)) == 2 * 40 * 16 * 8  # rows in groups
    assert grouped_matmul_flops((8, 40), (40, 16)) == 2 * 8 * 40 * 16  # the inner dimension in groups
    assert grouped_matmul_flops((3, 8, 16), (16, 40)) == 2 * 8 * 16 * 40  # columns in groups
    assert grouped_matmul_flops((3, 8, 16), (3, 16, 5)) == 3 * 2 * 8 * 16 * 5


@pytest.fixture
def fake_world() -> Iterator[None]:
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    torch.distributed.destroy_process_group()


def test_shards_are_counted_as_shards(fake_world: None) -> None:
    mesh = init_device_mesh("cpu", (2,))
    weight = distribute_tensor(torch.ones(8, 10), mesh, [Shard(1)])
    x = distribute_tensor(torch.ones(4, 8), mesh, [Replicate()])
    with FlopCounter() as counter:
        x @ weight
    assert counter.model_flops == 2 * 4 * 8 * 5  # and not DTensor's dry run of the whole


def test_fake_tensors_count_where_they_are_meant() -> None:
    with FakeTensorMode(), FlopCounter() as counter:
        torch.ones(4, 8) @ torch.ones(8, 5)
    assert counter.model_flops == 2 * 4 * 8 * 5
    with FlopCounter() as counter, FakeTensorMode():
        torch.ones(4, 8) @ torch.ones(8, 5)
    assert counter.model_flops == 0


def test_counting_leaves_compiled_code_compiled() -> None:
    runs = 0

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            nonlocal runs
            runs += 1
            return graph(*args)

        return run

    model, x = torch.compile(perceptron(), backend=backend), torch.randn(ROWS, WIDTH)
    assert count(lambda: model(x).sum(), FlopCounter()) == (2 * FORWARD + INPUT_GRADIENTS, 0)
    model(x)
    assert runs == 2


# ---- batches --------------------------------------------------------------------------------------------------------

Pair = namedtuple("Pair", ["image", "label"])


@dataclass
class Record:
    name: str
    pixels: Tensor


@dataclass(slots=True)
class Slotted:
    pixels: Tensor


class Custom:
    """A batch as some libraries have it: a plain object."""

    def __init__(self) -> None:
        self.tensor = torch.ones(6, 2)
        self.itself = self


class Graphs:
    """A batch of graphs: nodes and edges come first in its tensors."""

    num_graphs = 3

    def __init__(self) -> None:
        self.x, self.edge_index = torch.ones(17, 4), torch.ones(2, 30)


@pytest.mark.parametrize(
    ("batch", "counts"),
    [
        (torch.ones(6, 2), [6]),
        ([torch.ones(6, 2), torch.ones(6)], [6]),
        ({"scale": torch.tensor(2.0), "x": torch.ones(6, 2)}, [6]),
        (UserDict(x=torch.ones(6, 2)), [6]),
        (Pair(torch.ones(6, 2), torch.ones(6)), [6]),
        ({"inner": [("text", {"x": torch.ones(6)})]}, [6]),
        (Record("a", torch.ones(6)), [6]),
        (Slotted(torch.ones(6)), [6]),
        (Custom(), [6]),
        (Graphs(), [3]),
        (pack_sequence([torch.ones(5, 2), torch.ones(3, 2)]), [2]),
        ([torch.ones(6, 2), torch.ones(4)], [6, 4]),
        (["a sentence", "another", "a third"], [3]),
        ({"text": ["a sentence", "another"]}, [2]),
        ("a string", []),
        (None, []),
        (7, []),
    ],
)
def test_samples_of_any_batch(batch: Any, counts: list[int]) -> None:
    assert sample_counts(batch) == counts


IDS = torch.arange(12).view(3, 4)
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]])


@pytest.mark.parametrize(
    ("batch", "tokens"),
    [
        (IDS, 12),
        ((IDS, torch.ones(3)), 12),
        ({"labels": torch.ones(3), "input_ids": IDS}, 12),
        (UserDict(input_ids=IDS, attention_mask=MASK), 7),
        ({"input_ids": IDS, "attention_mask": torch.ones(3, 1, 4, 4)}, 12),
        (pack_sequence([torch.arange(5), torch.arange(3)]), 8),
        ((torch.ones(3, 4), IDS), None),
        (torch.ones(3, 4, 4, dtype=torch.int64), None),
        (torch.ones(3, 4, dtype=torch.uint8), None),
        (None, None),
    ],
)
def test_tokens_of_token_sequences_only(batch: Any, tokens: int | None) -> None:
    assert token_count(batch) == tokens


# ---- seconds and devices --------------------------------------------------------------------------------------------


def test_medians() -> None:
    assert median_and_p95([3.0]) == (3.0, 3.0)
    assert median_and_p95([2.0, 1.0, 9.0]) == pytest.approx((2.0, 8.3))
    assert median_and_p95([float(i) for i in range(101)]) == (50.0, 95.0)


def test_the_clock_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 1.0, 10.0, 12.0, 20.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(times))
    clock = StepClock(torch.device("cpu"))
    clock.end(keep=True)  # never began
    for keep in (False, True, True):
        clock.begin()
        clock.end(keep=keep)
    assert list(clock.take()) == [9.0, 8.0]
    assert list(clock.take()) == []


@pytest.mark.parametrize(
    ("name", "precision", "tf32", "tera"),
    [
        ("NVIDIA H200", "bf16-mixed", False, 989.5),
        ("NVIDIA H200 NVL", "bf16-true", False, 835.5),
        ("NVIDIA H100 80GB HBM3", "16-mixed", False, 989.4),
        ("NVIDIA H100 PCIe", "32-true", True, 378),
        ("NVIDIA A100-SXM4-80GB", "32-true", False, 19.5),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "32-true", False, None),
        ("NVIDIA L40S", "bf16-mixed", False, 362.05),
        ("NVIDIA L4", "bf16-mixed", False, 121),
        ("NVIDIA A10G", "bf16-mixed", False, None),
        ("Tesla V100-SXM2-16GB", "16-mixed", False, 125),
        ("Tesla V100-SXM2-16GB", "bf16-mixed", False, None),
        ("Tesla T4", "32-true", True, 8.1),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16-mixed", False, None),
        ("NVIDIA H100 80GB HBM3", "64-true", False, None),
        ("cpu", "32-true", False, None),
    ],
)
def test_peaks_of_devices(name: str, precision: str, tf32: bool, tera: float | None) -> None:
    peak = device_peak_flops(name, precision, tf32=tf32)
    assert peak == (None if tera is None else pytest.approx(tera * 1e12))


def test_the_table_is_of_dense_figures_with_sources() -> None:
    for row in DEVICE_PEAKS:
        assert row.source
        half = row.bf16 or row.fp16
        assert half is not None
        # dense: tensor cores do halves at 1 to 16 times the rate of singles, TF32 at half the rate of halves
        assert 1 < half / row.fp32 < 30
        assert row.tf32 is None or math.isclose(half / row.tf32, 2, rel_tol=0.05)


def test_utilization() -> None:
    assert utilization(6e12, seconds=2, num_devices=3, peak_flops=4e12) == 0.25
