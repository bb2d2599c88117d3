"""Measuring memory: one meter for every device, peaks by phase of the training step, and what a peak consists of.

Bytes are what allocators and operators say. Hooks on saved tensors are no substitute: they are blind to what
selective contexts keep.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_recompute import cpualloc
from lightning_recompute.ledger import Ledger, Meter, storage_bytes, storages

__all__ = [
    "PHASES",
    "CudaMeter",
    "Ledger",
    "Meter",
    "Phase",
    "PhaseMemory",
    "PhaseRecorder",
    "StepMemory",
    "measure_step",
    "open_meter",
]

Phase = Literal["forward", "backward", "optimizer", "validation"]
PHASES: tuple[Phase, ...] = ("forward", "backward", "optimizer", "validation")


class CudaMeter(Meter):
    """What torch's CUDA allocator says: allocated and reserved bytes.

    torch has one peak for the whole process, so `reset_peak` changes what others read of it (Lightning's
    DeviceStatsMonitor). The meter keeps the largest it ever saw in `process_peak_bytes`. If somebody else resets the
    counter between two readings, what came before that reset is lost.

    Args:
        device: The CUDA device.
        reset: Whether to reset torch's counter. If not, a peak below an earlier one is only known from below, by
            what is live when it begins and when it is read.
    """

    def __init__(self, device: torch.device, *, reset: bool = True) -> None:
        super().__init__(device)
        self.reset = reset
        self.process_peak_bytes = 0
        self._floor_bytes = 0
        self._live_at_reset = 0
        self._live_before_forward = 0
        self._forward_bytes = 0
        self._in_forward = False
        self.reset_peak()

    @property
    def live_bytes(self) -> int:
        """Bytes allocated now."""
        return torch.cuda.memory_allocated(self.device)

    @property
    def peak_bytes(self) -> int:
        """The largest `live_bytes` since the last `reset_peak`."""
        peak = torch.cuda.max_memory_allocated(self.device)
        self.process_peak_bytes = max(self.process_peak_bytes, peak)
        return peak if peak > self._floor_bytes else max(self._live_at_reset, self.live_bytes)

    @property
    def reserved_bytes(self) -> int:
        """Peak of what the caching allocator holds from the device."""
        return torch.cuda.max_memory_reserved(self.device)

    @property
    def num_retries(self) -> int:
        """How often the process freed cached memory and tried an allocation again."""
        return int(torch.cuda.memory_stats(self.device).get("num_alloc_retries", 0))

    def reset_peak(self) -> None:
        """Start a new peak at what is live now."""
        peak = torch.cuda.max_memory_allocated(self.device)
        self.process_peak_bytes = max(self.process_peak_bytes, peak)
        if self.reset:
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            self._floor_bytes = peak
        self._live_at_reset = self.live_bytes

    def count(self, tensors: Iterable[Tensor]) -> list[int]:
        """Nothing to do: the allocator counts whatever is on its device."""
        return []

    def discount(self, added: Iterable[int]) -> None:
        """Nothing to do."""

    def bytes_at_peak(self, tensors: Iterable[Tensor]) -> int:
        """Bytes of those tensors, each storage once; whether they existed at the peak is not known."""
        return storage_bytes(tensors, self.device)

    def begin_forward(self) -> None:
        """What is allocated from now on belongs to a forward pass."""
        self._live_before_forward = self.live_bytes
        self._in_forward = True

    def end_forward(self) -> None:
        """The forward pass is over."""
        self._forward_bytes = self.forward_bytes
        self._in_forward = False

    @property
    def forward_bytes(self) -> int:
        """Live bytes that the forward pass allocated; after its end, what they were then."""
        return max(self.live_bytes - self._live_before_forward, 0) if self._in_forward else self._forward_bytes

    @property
    def forward_bytes_at_peak(self) -> int:
        """The same as `forward_bytes`: the allocator does not tell what was there at the peak."""
        return self.forward_bytes

    def close(self) -> None:
        """Nothing to do."""


def open_meter(device: str | torch.device = "cpu", *, reset: bool = True) -> Meter:
    """The best meter for a device: CUDA's allocator, on the CPU the counting allocator, else a `Ledger`.

    Args:
        device: What to measure.
        reset: On CUDA, whether torch's peak counter may be reset; see `CudaMeter`.

    Returns:
        The meter; close it after use.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return CudaMeter(device, reset=reset)
    if device.type == "cpu" and (library := cpualloc.load()) is not None:
        try:
            return cpualloc.AllocatorMeter(library)
        except OSError as error:
            cpualloc.logger.warning("CPU memory is counted by watching operators: %s", error)
    return Ledger(device)


@dataclass(frozen=True)
class StepMemory:
    """Memory of one forward and backward pass, less what was live before it.

    Attributes:
        held_bytes: Live after forward: what the graph holds for backward, and the loss.
        peak_bytes: The largest in forward and backward, gradients that backward allocates included.
        after_bytes: Live after backward, the loss freed: new gradients, and leaks.
    """

    held_bytes: int
    peak_bytes: int
    after_bytes: int


def measure_step(
    loss: Callable[[], Tensor],
    *,
    backward: Callable[[Tensor], Any] = Tensor.backward,
    known: Iterable[Tensor] = (),
    meter: Meter | None = None,
    device: str | torch.device = "cpu",
) -> StepMemory:
    """Run one forward and backward pass and measure it.

    Args:
        loss: Runs forward and returns the loss, a scalar.
        backward: Runs backward from the loss.
        known: Tensors from before that may be freed inside (gradients, when `loss` begins by dropping them). What is
            freed counts against the peak only if it is known.
        meter: The meter; None: `open_meter(device)`, closed at the end.
        device: What to measure, without `meter`.
    """
    with nullcontext(meter) if meter is not None else closing(open_meter(device)) as used:
        gc.collect()  # what earlier graphs left in cycles would be freed inside
        used.count(known)
        with used.watching():
            before = used.live_bytes
            used.reset_peak()
            result = loss()
            held = used.live_bytes - before
            backward(result)
            del result
            return StepMemory(held, used.peak_bytes - before, used.live_bytes - before)


@dataclass(frozen=True)
class PhaseMemory:
    """The peak of a phase and what it consisted of; the five parts sum to the peak.

    Attributes:
        peak_bytes: The largest number of bytes allocated at once.
        reserved_bytes: On devices with a caching allocator, what that held from the device at most.
        parameters_bytes: Parameters and buffers, each storage once; of a DTensor the local shard.
        gradients_bytes: Gradients that existed at the peak.
        optimizer_bytes: Optimizer state.
        activations_bytes: What forward allocated and backward still needed.
        temporary_bytes: The rest: gradients of activations, recomputed activations, workspaces, the batch.
    """

    peak_bytes: int
    reserved_bytes: int | None
    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    temporary_bytes: int


class PhaseRecorder:
    """Peaks of the phases of training steps, each with its parts.

    On the CPU a part is what existed at the moment of the peak. CUDA's allocator does not tell: activations of
    backward are then those of its beginning, and gradients all that fit beside them under the peak.

    Args:
        meter: Counts bytes. The tensors of `modules` and `optimizers` are counted by it from now on.
        modules: Whose parameters, buffers and gradients are meant; usually one module.
        optimizers: Whose state is meant. Parameters that only they know (fp32 masters) are parameters, too.

    Attributes:
        peaks: The highest peak of each phase since `start_over`.
        activations_bytes: The most that forward passes left for backward since `start_over`.
    """

    def __init__(self, meter: Meter, modules: Sequence[nn.Module], optimizers: Sequence[Optimizer] = ()) -> None:
        self.meter = meter
        self.modules = tuple(modules)
        self.optimizers = tuple(optimizers)
        self.peaks: dict[Phase, PhaseMemory] = {}
        self.activations_bytes = 0
        self._phase: Phase | None = None
        self.count()

    def count(self) -> None:
        """Let the meter count all parameters, buffers, gradients and optimizer state there are by now."""
        self.meter.count(self._parameters())
        self.meter.count(self._gradients())
        self.meter.count(self._states())

    def start_over(self) -> None:
        """Forget peaks and activations, for a new epoch."""
        self.end()
        self.peaks = {}
        self.activations_bytes = 0

    def begin(self, phase: Phase) -> None:
        """Begin a phase, ending the one before."""
        self.end()
        self._phase = phase
        self.meter.reset_peak()
        if phase == "forward":
            self.meter.begin_forward()

    def end(self, *, keep: bool = True) -> None:
        """End the phase, if one is on; without `keep` it has not been."""
        phase, self._phase = self._phase, None
        if phase is None:
            return
        peak = self.meter.peak_bytes
        held = self.meter.forward_bytes
        if phase == "forward":
            self.meter.end_forward()
        if not keep:
            return
        if phase == "forward":
            self.activations_bytes = max(self.activations_bytes, held)
        best = self.peaks.get(phase)
        if best is None or peak > best.peak_bytes:
            self.peaks[phase] = self._split(phase, peak)

    def _split(self, phase: Phase, peak: int) -> PhaseMemory:
        meter = self.meter
        activations = 0
        if phase in ("forward", "backward"):
            activations = meter.forward_bytes_at_peak
        if phase == "forward":  # what is gone at its end was temporary
            activations = min(activations, meter.forward_bytes)
        rest = peak
        parts = []
        # in this order, because only the later ones can be more than the device had at its peak
        for part in (
            meter.bytes_at_peak(self._parameters()),
            meter.bytes_at_peak(self._states()),
            activations,
            meter.bytes_at_peak(self._gradients()),
        ):
            parts.append(max(min(part, rest), 0))
            rest -= parts[-1]
        parameters, states, activations, gradients = parts
        return PhaseMemory(peak, meter.reserved_bytes, parameters, gradients, states, activations, rest)

    def _weights(self) -> Iterator[Tensor]:
        for module in self.modules:
            yield from module.parameters()
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                yield from group["params"]

    def _parameters(self) -> Iterator[Tensor]:
        yield from self._weights()
        for module in self.modules:
            yield from module.buffers()

    def _gradients(self) -> Iterator[Tensor]:
        return (weight.grad for weight in self._weights() if weight.grad is not None)

    def _states(self) -> Iterator[Tensor]:
        known = storages(self._parameters(), self.meter.device)
        for optimizer in self.optimizers:
            for leaf in tree_leaves(list(optimizer.state.values())):
                if isinstance(leaf, Tensor) and known.keys().isdisjoint(storages([leaf])):
                    yield leaf
