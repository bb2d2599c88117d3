"""Every meter counts every byte, whenever it was allocated; peaks split into what they consist of."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
import torch
from torch import Tensor, nn

from lightning_recompute import cpualloc
from lightning_recompute.ledger import Ledger, Meter
from lightning_recompute.memory import CudaMeter, PhaseRecorder, measure_step

FLOAT = 4
WIDTH, HIDDEN, ROWS = 16, 48, 5


def allocator_meter() -> Meter:
    library = cpualloc.load()
    assert library is not None, "these tests need a C++ compiler"
    return cpualloc.AllocatorMeter(library)


@pytest.fixture(params=[allocator_meter, Ledger], ids=["allocator", "ledger"])
def meter(request: pytest.FixtureRequest) -> Iterator[Meter]:
    with closing(request.param()) as meter:
        yield meter


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))


def num_bytes(module: nn.Module) -> int:
    return sum(parameter.numel() * FLOAT for parameter in module.parameters())


# ---- a step ---------------------------------------------------------------------------------------------------------


def test_a_step_by_hand(meter: Meter) -> None:
    model, x = perceptron(), torch.randn(ROWS, WIDTH)
    step = measure_step(lambda: model(x).square().mean(), meter=meter)
    # ReLU keeps its output, the square its input, and there is the loss
    assert step.held_bytes == FLOAT * (ROWS * HIDDEN + ROWS + 1)
    assert step.after_bytes == num_bytes(model)
    # nothing in so small a model is larger than the gradients of the first layer, which come last
    assert step.peak_bytes >= step.after_bytes + FLOAT * ROWS * HIDDEN
    again = measure_step(lambda: model(x).square().mean(), meter=meter)
    assert again.held_bytes == step.held_bytes
    assert again.after_bytes == 0  # gradients are there already


def test_meters_agree_on_a_transformer() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    x = torch.randn(2, 24, 32)

    def step(meter: Meter) -> tuple[int, int, int]:
        torch.manual_seed(0)
        layer.zero_grad()
        with closing(meter):
            found = measure_step(lambda: layer(x).square().mean(), meter=meter)
        return found.held_bytes, found.peak_bytes, found.after_bytes

    exact, watched = step(allocator_meter()), step(Ledger())
    assert exact[0] > 100_000
    for one, other in zip(exact, watched, strict=True):
        assert abs(one - other) <= 100


def test_known_tensors_that_are_freed_inside_count_against_the_peak(meter: Meter) -> None:
    model, x = perceptron(), torch.randn(ROWS, WIDTH)
    model(x).sum().backward()

    def loss() -> Tensor:
        model.zero_grad()
        return model(x).sum()

    step = measure_step(loss, known=(p.grad for p in model.parameters() if p.grad is not None), meter=meter)
    assert step.held_bytes == FLOAT * (ROWS * HIDDEN + 1) - num_bytes(model)
    assert step.after_bytes == 0


# ---- what was there before ------------------------------------------------------------------------------------------


def test_older_tensors_count_until_they_die(meter: Meter) -> None:
    model = perceptron()
    total = num_bytes(model)
    tied = nn.Linear(WIDTH, HIDDEN)
    tied.weight = model[0].weight
    view = model[0].weight[3:]
    with meter.watching():
        meter.count([*model.parameters(), *tied.parameters(), view])
        total += HIDDEN * FLOAT  # the tied layer's bias
        assert meter.live_bytes == total
        meter.count(model.parameters())
        assert meter.live_bytes == total
        new = torch.ones(7)
        meter.count([new])  # counted already
        assert meter.live_bytes == total + 7 * FLOAT

        del tied, new
        gc.collect()
        assert meter.live_bytes == num_bytes(model)
        # replaced by a smaller one: the old one lives as long as the view of it
        model[0].weight.data = torch.zeros(1, 1)
        assert meter.live_bytes == num_bytes(model) + FLOAT * WIDTH * HIDDEN
        del view
        assert meter.live_bytes == num_bytes(model)
    del model
    gc.collect()
    assert meter.live_bytes == 0


def test_a_resized_older_storage_is_counted_anew(meter: Meter) -> None:
    weight = torch.ones(100)
    with meter.watching():
        meter.count([weight])
        weight.untyped_storage().resize_(0)  # as FSDP frees a parameter
        meter.count([weight])
        assert meter.live_bytes == 0
        weight.untyped_storage().resize_(400)
        meter.count([weight])
        assert meter.live_bytes == 400


# ---- phases ---------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """Two linears of one weight, a frozen one, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.frozen = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.two.weight = self.one.weight
        self.frozen.requires_grad_(False)
        self.register_buffer("scale", torch.ones(10))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.two(torch.tanh(self.one(self.frozen(x))))
        return y


def run_step(recorder: PhaseRecorder, model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    """One step with the phases as MemoryReport declares them."""
    with recorder.meter.watching():
        recorder.begin("forward")
        loss = model(x).square().mean()
        recorder.end()
        optimizer.zero_grad()
        recorder.begin("backward")
        loss.backward()
        recorder.begin("optimizer")
        optimizer.step()
        recorder.end()


@pytest.mark.parametrize("variant", ["for-loop", "foreach", "fused"])
def test_parts_by_hand(meter: Meter, variant: str) -> None:
    model, x = Tied(), torch.randn(ROWS, WIDTH)
    options = {"for-loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}[variant]
    optimizer = torch.optim.Adam(model.parameters(), **options)
    recorder = PhaseRecorder(meter, [model, model], [optimizer])
    weight = WIDTH * WIDTH * FLOAT
    for step in range(2):
        recorder.start_over()
        run_step(recorder, model, optimizer, x)
        # tanh keeps its output, the first linear (its weight needs a gradient) its input, the square its input
        assert recorder.activations_bytes == FLOAT * (3 * ROWS * WIDTH + 1)
        peaks = recorder.peaks
        assert list(peaks) == ["forward", "backward", "optimizer"]
        for peak in peaks.values():
            assert peak.parameters_bytes == 2 * weight + 40  # the tied one once, the frozen one and the buffer too
            parts = (peak.gradients_bytes, peak.optimizer_bytes, peak.activations_bytes, peak.temporary_bytes)
            assert peak.peak_bytes == peak.parameters_bytes + sum(parts)
            assert min(parts) >= 0
            assert peak.reserved_bytes is None
        assert peaks["optimizer"].gradients_bytes == weight
        assert peaks["optimizer"].optimizer_bytes == 2 * weight + FLOAT  # two moments, one step count
        assert peaks["forward"].optimizer_bytes == (2 * weight + FLOAT if step else 0)
        assert peaks["forward"].gradients_bytes == (weight if step else 0)


def test_gradients_that_came_after_the_peak_are_not_part_of_it(meter: Meter) -> None:
    # the peak is in the last layer's backward: the wide activation, the gradient of it, and that layer's own gradient
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4000, bias=False), nn.Linear(4000, 4, bias=False))
    x = torch.randn(400, 4)
    recorder = PhaseRecorder(meter, [model])
    with meter.watching():
        recorder.begin("backward")
        model(x).sum().backward()
        recorder.end()
    first, middle, last = (FLOAT * layer.weight.numel() for layer in model)
    assert recorder.peaks["backward"].gradients_bytes == last
    recorder.begin("optimizer")
    recorder.end()
    assert recorder.peaks["optimizer"].gradients_bytes == first + middle + last


def test_parameters_that_only_the_optimizer_knows_count(meter: Meter) -> None:
    model = nn.Linear(8, 8, bias=False).bfloat16()
    master = nn.Parameter(model.weight.detach().float())
    optimizer = torch.optim.SGD([master], momentum=0.9)
    master.grad = torch.ones_like(master)
    recorder = PhaseRecorder(meter, [model], [optimizer])
    with meter.watching():
        recorder.begin("optimizer")
        optimizer.step()
        recorder.end()
    peak = recorder.peaks["optimizer"]
    assert (peak.parameters_bytes, peak.gradients_bytes, peak.optimizer_bytes) == (128 + 256, 256, 256)


def test_a_smaller_epoch_has_smaller_peaks(meter: Meter) -> None:
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    recorder = PhaseRecorder(meter, [model], [optimizer])
    run_step(recorder, model, optimizer, torch.randn(100 * ROWS, WIDTH))
    large = recorder.peaks
    recorder.start_over()
    run_step(recorder, model, optimizer, torch.randn(ROWS, WIDTH))
    for phase in ("forward", "backward"):
        assert recorder.peaks[phase].peak_bytes < large[phase].peak_bytes / 5
    # a step that needs less does not hide one that needed more
    run_step(recorder, model, optimizer, torch.randn(1, WIDTH))
    assert recorder.activations_bytes == FLOAT * (ROWS * HIDDEN + ROWS + 1)


# ---- CUDA, by a stand-in: what our meter makes of the allocator's figures -------------------------------------------


class FakeCuda:
    """torch.cuda's counters over numbers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.live = self.peak = 100
        self.reserved = 4096
        counters: dict[str, Callable[[torch.device], object]] = {
            "memory_allocated": lambda _: self.live,
            "max_memory_allocated": lambda _: self.peak,
            "max_memory_reserved": lambda _: self.reserved,
            "memory_stats": lambda _: {"num_alloc_retries": 3},
            "reset_peak_memory_stats": lambda _: self.reset(),
        }
        for name, counter in counters.items():
            monkeypatch.setattr(torch.cuda, name, counter)

    def use(self, num_bytes: int) -> None:
        self.live += num_bytes
        self.peak = max(self.peak, self.live)

    def reset(self) -> None:
        self.peak = self.live


def test_cuda_peaks_by_phase_keep_the_peak_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    cuda.use(900)
    cuda.use(-900)
    meter = CudaMeter(torch.device("cuda", 0))
    recorder = PhaseRecorder(meter, [])
    recorder.begin("forward")
    cuda.use(300)
    cuda.use(-100)
    recorder.begin("backward")
    cuda.use(150)
    cuda.reset()  # another library
    cuda.use(-350)
    recorder.end()
    assert recorder.activations_bytes == 200
    assert {phase: peak.peak_bytes for phase, peak in recorder.peaks.items()} == {"forward": 400, "backward": 450}
    assert recorder.peaks["forward"].activations_bytes == 200
    assert recorder.peaks["forward"].temporary_bytes == 200  # 100 of nobody we know, 100 of a workspace
    assert recorder.peaks["forward"].reserved_bytes == 4096
    assert meter.process_peak_bytes == 1000
    assert meter.num_retries == 3


def test_cuda_without_resets_leaves_the_counter_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    cuda.use(400)
    cuda.use(-400)
    meter = CudaMeter(torch.device("cuda", 0), reset=False)
    recorder = PhaseRecorder(meter, [])
    recorder.begin("forward")
    cuda.use(100)
    recorder.begin("backward")
    cuda.use(500)
    cuda.use(-600)
    recorder.end()
    assert cuda.peak == 700
    assert recorder.peaks["forward"].peak_bytes == 200  # below 500, so known only from below: live at its end
    assert recorder.peaks["backward"].peak_bytes == 700


def test_cuda_gradients_are_what_fits_under_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    cuda.live = cuda.peak = 0
    meter = CudaMeter(torch.device("cuda", 0))
    monkeypatch.setattr(meter, "bytes_at_peak", lambda tensors: sum(t.numel() for t in tensors))
    model = nn.Linear(10, 10, bias=False)
    model.weight.grad = torch.zeros(10, 10)
    recorder = PhaseRecorder(meter, [model])
    cuda.use(100)  # the weight
    recorder.begin("forward")
    cuda.use(200)
    recorder.begin("backward")
    cuda.use(30)
    recorder.end()
    peak = recorder.peaks["backward"]
    parts = (peak.parameters_bytes, peak.activations_bytes, peak.gradients_bytes, peak.temporary_bytes)
    assert (peak.peak_bytes, *parts) == (330, 100, 200, 30, 0)
