"""The arithmetic of speed: samples and tokens of a batch, step times, FLOPs, and utilization of the device.

MFU is the FLOPs that the model needs, over what the device could do in the same time; HFU counts recomputed ones,
too (Chowdhery et al. 2022, PaLM, appendix B). Their difference is what recomputation costs.
"""

from __future__ import annotations

import dataclasses
import re
import statistics
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils import flop_counter

from lightning_recompute.ledger import Mode, is_wrapper

Shape = Sequence[int]
torch_counter: Any = flop_counter  # carries no types

# ---- FLOPs ----------------------------------------------------------------------------------------------------


def attention_flops(query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    """FLOPs of an attention kernel: two products; a causal mask is not taken off, as in torch's own formulas.

    Args:
        query: Shape (batch, heads, queries, head size).
        key: Shape (batch, key heads, keys, head size).
        value: Shape (batch, key heads, keys, value size).
    """
    return int(torch_counter.sdpa_flop_count(query, key, value))


def attention_backward_flops(grad: Shape, query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    """FLOPs of a fused attention kernel's backward: five products, one of which makes the scores again inside.

    The count is torch's own for its CUDA kernels, so one model has the same FLOPs on every device.
    """
    return int(torch_counter.sdpa_backward_flop_count(grad, query, key, value))


def grouped_matmul_flops(a: Shape, b: Shape, *_: Any, **__: Any) -> int:
    """FLOPs of matmuls by groups (mixture of experts), whatever the group sizes; the groups lie in one dimension."""
    rows, inner, columns = a[-2], a[-1], b[-1]
    # in three dimensions both, the groups are the first one; else they cut one of rows, inner, columns up
    return 2 * rows * inner * columns * (a[0] if len(a) == len(b) == 3 else 1)


def _recurrent_flops(x: Shape, weights: Iterable[Shape]) -> int:
    # every weight matrix meets every step of every sequence
    return 2 * sum(weight[0] * weight[1] * _product(x[:-1]) for weight in weights if len(weight) == 2)


def _product(shape: Shape) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


_OWN_FORMULAS: dict[str, Callable[..., int]] = {
    "_scaled_dot_product_flash_attention_for_cpu": attention_flops,
    "_scaled_dot_product_flash_attention_for_cpu_backward": attention_backward_flops,
    "_scaled_dot_product_fused_attention_overrideable": attention_flops,
    "_scaled_dot_product_fused_attention_overrideable_backward": attention_backward_flops,
    "_scaled_dot_product_attention_math_for_mps": attention_flops,
    "_grouped_mm": grouped_matmul_flops,
    "_scaled_grouped_mm": grouped_matmul_flops,
    "mv": lambda matrix, vector, **_: 2 * _product(matrix),
    "addmv": lambda bias, matrix, vector, **_: 2 * _product(matrix),
    "addbmm": lambda bias, a, b, **_: 2 * _product(a) * b[-1],
    "_cudnn_rnn": lambda x, weights, *_, **__: _recurrent_flops(x, weights),
    "_cudnn_rnn_backward": lambda x, weights, *_, **__: 2 * _recurrent_flops(x, weights),
    "mkldnn_rnn_layer": lambda x, w1, w2, *_, **__: _recurrent_flops(x, (w1, w2)),
    "mkldnn_rnn_layer_backward": lambda x, w1, w2, *_, **__: 2 * _recurrent_flops(x, (w1, w2)),
}


def own_formulas() -> dict[Any, Callable[..., int]]:
    """Formulas that torch's counter lacks: attention on CPU and others, grouped matmuls, RNN kernels.

    Returns:
        Formulas of shapes by operator: what `FlopCounterMode(custom_mapping=...)` takes. A formula that is
        registered with torch, by itself or by the user, comes first and is not among them.
    """
    operators = {getattr(torch.ops.aten, name, None): formula for name, formula in _OWN_FORMULAS.items()}
    return {op: f for op, f in operators.items() if op is not None and op not in torch_counter.flop_registry}


class FlopCounter(Mode):
    """Counts the FLOPs of matrix products, convolutions and attention, recomputed ones apart.

    Unlike torch's FlopCounterMode, whose formulas it uses, it leaves operators whole (a replay sees the
    operators of its forward), compiled code compiled, and counts the shards of DTensors, so that the sum over
    ranks is the work done. An operator is recomputed when `replaying` says so, or when it runs with gradients on
    inside `backward()`: that is how torch's own checkpoint replays. (A backward with create_graph=True looks the
    same; do not declare it.) Fake tensors count only if a FakeTensorMode is active where counting begins.

    Args:
        replaying: Whether recomputation is going on, for example `is_recomputing`.
        note: Called with the FLOPs and arguments of each operator that is not recomputed.
        repeating: Whether another rank does the same for the model.

    Attributes:
        model_flops: FLOPs of forward and backward.
        repeated_flops: Those done while `repeating` said so.
        recompute_flops: FLOPs of recomputation.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        replaying: Callable[[], bool] = lambda: False,
        note: Callable[[int, Any], object] | None = None,
        repeating: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__()
        own = {op: torch_counter.shape_wrapper(formula) for op, formula in own_formulas().items()}
        self._formulas = {**own, **torch_counter.flop_registry}
        self.model_flops = 0
        self.recompute_flops = 0
        self.repeated_flops = 0
        self._repeating = repeating
        self._replaying = replaying
        self._note = note
        self._in_backward = False
        self._counts_fake = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Tells torch.compile to go on under this mode; by default it would give up on every frame, for good."""
        return True

    def __enter__(self) -> FlopCounter:
        """Begin to count."""
        self._counts_fake = active_fake_mode() is not None
        super().__enter__()
        return self

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Declares a backward pass."""
        before, self._in_backward = self._in_backward, True
        try:
            yield
        finally:
            self._in_backward = before

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operator and count it."""
        if any(is_wrapper(kind) for kind in types):
            return NotImplemented  # a DTensor: let it come back with the operators on its shards
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        formula = self._formulas.get(getattr(func, "overloadpacket", func))
        if formula is not None and (self._counts_fake or not any(issubclass(kind, FakeTensor) for kind in types)):
            flops = int(formula(*args, **kwargs, out_val=result))
            if self._replaying() or (self._in_backward and torch.is_grad_enabled()):
                self.recompute_flops += flops
            elif self._repeating():
                self.repeated_flops += flops
            else:
                self.model_flops += flops
                if self._note is not None:
                    self._note(flops, (args, kwargs))
        return result


# ---- what the device could do ------------------------------------------------------------------------------------


class DevicePeak(NamedTuple):
    """Peak FLOP/s of one device for dense matrices, by type; None where the type is not supported.

    Attributes:
        name: Pattern of what torch calls the device.
        bf16: bfloat16 with fp32 accumulation.
        fp16: float16 with fp32 accumulation.
        tf32: float32 with TensorFloat-32 products.
        fp32: float32.
        source: Where the figures are from. Data sheets that print figures "with sparsity" are halved.
    """

    name: str
    bf16: float | None
    fp16: float | None
    tf32: float | None
    fp32: float
    source: str


# the first pattern that is found counts
DEVICE_PEAKS = (
    DevicePeak(r"\bB200\b", 2250e12, 2250e12, 1100e12, 80e12, "NVIDIA Blackwell architecture brief, HGX B200"),
    DevicePeak(r"\bGH200\b", 990e12, 990e12, 495e12, 67e12, "NVIDIA GH200 Grace Hopper data sheet"),
    DevicePeak(r"\bH200 NVL\b", 835.5e12, 835.5e12, 417.5e12, 60e12, "NVIDIA H200 data sheet, NVL"),
    DevicePeak(r"\bH200\b", 989.5e12, 989.5e12, 494.5e12, 67e12, "NVIDIA H200 data sheet, SXM"),
    DevicePeak(r"\bH100 NVL\b", 835.5e12, 835.5e12, 417.5e12, 60e12, "NVIDIA H100 data sheet, NVL"),
    DevicePeak(r"\bH100 PCIe\b", 756.5e12, 756.5e12, 378e12, 51.2e12, "NVIDIA H100 data sheet, PCIe"),
    DevicePeak(r"\bH100\b", 989.4e12, 989.4e12, 494.7e12, 66.9e12, "NVIDIA H100 architecture white paper, SXM5"),
    DevicePeak(r"\bA100\b", 312e12, 312e12, 156e12, 19.5e12, "NVIDIA A100 data sheet"),
    DevicePeak(r"\bA40\b", 149.7e12, 149.7e12, 74.8e12, 37.4e12, "NVIDIA A40 data sheet"),
    DevicePeak(r"\bA30\b", 165e12, 165e12, 82e12, 10.3e12, "NVIDIA A30 data sheet"),
    DevicePeak(r"\bA10\b", 125e12, 125e12, 62.5e12, 31.2e12, "NVIDIA A10 data sheet"),
    DevicePeak(r"\bL40S\b", 362.05e12, 362.05e12, 183e12, 91.6e12, "NVIDIA L40S data sheet"),
    DevicePeak(r"\bL40\b", 181.05e12, 181.05e12, 90.5e12, 90.5e12, "NVIDIA L40 data sheet"),
    DevicePeak(r"\bL4\b", 121e12, 121e12, 60e12, 30.3e12, "NVIDIA L4 data sheet"),
    DevicePeak(r"\bRTX 4090$", 165.2e12, 165.2e12, 82.6e12, 82.6e12, "NVIDIA Ada architecture white paper, table 2"),
    DevicePeak(r"\bRTX 3090$", 71e12, 71e12, 35.6e12, 35.6e12, "NVIDIA Ampere GA102 white paper, table 9"),
    DevicePeak(r"\bV100-SXM2\b", None, 125e12, None, 15.7e12, "NVIDIA V100 data sheet, SXM2"),
    DevicePeak(r"\bV100-PCIE\b", None, 112e12, None, 14e12, "NVIDIA V100 data sheet, PCIe"),
    DevicePeak(r"\bT4\b", None, 65e12, None, 8.1e12, "NVIDIA T4 data sheet"),
)


def device_peak_flops(name: str, precision: str, *, tf32: bool = False) -> float | None:
    """Peak FLOP/s of a device for dense matrices.

    Args:
        name: What torch calls the device (`torch.cuda.get_device_name()`).
        precision: Lightning's word: `bf16-mixed`, `16-true`, `32-true`, ...
        tf32: Whether float32 products may run as TensorFloat-32.

    Returns:
        FLOP/s, or None if the device (a MIG slice, too) or its precision is not in the table.
    """
    if "MIG" in name.split():
        return None
    peak = next((peak for peak in DEVICE_PEAKS if re.search(peak.name, name, re.IGNORECASE)), None)
    if peak is None:
        return None
    if precision.startswith("bf16"):
        return peak.bf16
    if precision.startswith("16"):
        return peak.fp16
    if precision.startswith("32"):
        return peak.tf32 or peak.fp32 if tf32 else peak.fp32
    return None


# ---- samples, tokens and seconds -----------------------------------------------------------------------------------


def tensors_in(batch: Any, _depth: int = 6) -> Iterator[Tensor]:
    """The tensors of a batch in order: tensors, mappings, sequences, dataclasses and plain objects, nested."""
    if isinstance(batch, Tensor):
        yield batch
        return
    parts: Iterable[Any] = ()
    if isinstance(batch, Mapping):
        parts = batch.values()
    elif isinstance(batch, (list, tuple)):
        parts = batch
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        parts = [getattr(batch, field.name) for field in dataclasses.fields(batch)]
    elif hasattr(batch, "__dict__") and not isinstance(batch, type):
        parts, _depth = vars(batch).values(), _depth - 2  # an object may refer to half of the program
    if _depth > 0:
        for part in parts:
            yield from tensors_in(part, _depth - 1)


def sample_counts(batch: Any) -> list[int]:
    """What could be the number of samples in a batch, likeliest first: the first dimensions of its tensors.

    Without tensors, the length of the (first) list.
    """
    if isinstance(batch, PackedSequence):
        return [int(batch.batch_sizes[0])]
    if isinstance(graphs := getattr(batch, "num_graphs", None), int):
        return [graphs]  # a batch of graphs has nodes in its first dimensions
    counts = list(dict.fromkeys(tensor.size(0) for tensor in tensors_in(batch) if tensor.dim() > 0))
    if not counts:
        parts = next(iter(batch.values()), None) if isinstance(batch, Mapping) else batch
        counts = [len(parts)] if isinstance(parts, (list, tuple)) else []
    return counts


def token_count(batch: Any) -> int | Tensor | None:
    """Tokens in a batch of token sequences, None if it is no such batch.

    Tokens are the integers of `input_ids` (or of the first tensor), of shape (batch, sequence); where an
    `attention_mask` of the same shape goes with them, only what it does not mask.

    Returns:
        The number; for a mask on an accelerator a tensor, so as not to wait for the device.
    """
    if isinstance(batch, PackedSequence):
        return batch.data.size(0)
    named: Mapping[str, Any] = batch if isinstance(batch, Mapping) else {}
    tokens = named.get("input_ids")
    if tokens is None:
        tokens = next(tensors_in(batch), None)
    if not isinstance(tokens, Tensor) or tokens.dim() != 2 or tokens.dtype not in (torch.int64, torch.int32):
        return None
    mask = named.get("attention_mask")
    if isinstance(mask, Tensor) and mask.shape == tokens.shape:
        with torch.no_grad():
            kept = (mask != 0).sum()
        return int(kept) if mask.device.type == "cpu" else kept
    return tokens.numel()


class StepClock:
    """Times of training steps, without making the host wait for the device at each.

    Args:
        device: The device that works; on CUDA, events are recorded in its stream and read later.
    """

    _PENDING = 256

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds = array("d")
        self._pending: list[tuple[Any, Any]] = []
        self._begin: Any = None

    def now(self) -> float:
        """The time in seconds, once the device has done what it was given."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.perf_counter()

    def begin(self) -> None:
        """A step begins."""
        self._begin = self._mark()

    def end(self, *, keep: bool) -> None:
        """The step ends; `keep` says whether its time is wanted."""
        if self._begin is None or not keep:
            return
        begin, end, self._begin = self._begin, self._mark(), None
        if isinstance(begin, float):
            self.seconds.append(end - begin)
            return
        self._pending.append((begin, end))
        if len(self._pending) > self._PENDING:
            self._read(self._PENDING // 2)

    def take(self) -> array[float]:
        """Seconds of the steps since the last call."""
        self._read(len(self._pending))
        seconds, self.seconds = self.seconds, array("d")
        return seconds

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event: Any = torch.Event(self.device, enable_timing=True)
        event.record()
        return event

    def _read(self, count: int) -> None:
        for begin, end in self._pending[:count]:
            end.synchronize()
            self.seconds.append(begin.elapsed_time(end) / 1000)
        del self._pending[:count]


def median_and_p95(seconds: Sequence[float]) -> tuple[float, float]:
    """Median and 95th percentile (linear between ranks).

    Raises:
        ValueError: There are no values.
    """
    if len(seconds) == 1:
        return seconds[0], seconds[0]
    return statistics.median(seconds), statistics.quantiles(seconds, n=20, method="inclusive")[-1]


def utilization(flops: float, seconds: float, num_devices: int, peak_flops: float) -> float:
    """Share of what the devices could have done: MFU with the model's FLOPs, HFU with recomputed ones, too.

    Args:
        flops: FLOPs done on all devices together.
        seconds: In this time.
        num_devices: Number of devices.
        peak_flops: FLOP/s that one device can do.
    """
    return flops / (seconds * num_devices * peak_flops)
