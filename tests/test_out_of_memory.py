"""When memory runs out: the error keeps its text and gains what would fit; or the step is tried again, to the bit."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.memory import is_oom_error
from lightning_modules import WIDTH, Net, assert_unpatched, fit
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_recompute import RecomputeStrategy, out_of_memory
from lightning_recompute.out_of_memory import SHARE, out_of_memory_in
from lightning_recompute.plan import RecomputePlan


def wide_batches() -> DataLoader[Any]:
    """Three batches that outweigh parameters and random states."""
    rows = torch.randn(3 * 512, WIDTH, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(rows), 512)


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        torch.OutOfMemoryError("HIP out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("XPU out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: you"),
    ],
    ids=str,
)
def test_known_by_its_words_and_in_a_chain(error: RuntimeError) -> None:
    assert out_of_memory_in(error) is error
    outer = ValueError("the step failed")
    outer.__cause__ = error
    assert out_of_memory_in(outer) is error
    assert out_of_memory_in(ValueError("out of range")) is None


def run_out() -> None:
    """Ask for more than there is, in a step that is not only tried: those run under a mode that counts bytes."""
    if not torch._C._len_torch_dispatch_stack():
        torch.empty(2**60)


class Greedy(Net):
    """Runs out of memory in its second step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1:
            run_out()
        return loss


@pytest.mark.parametrize(
    ("room", "words"),
    [
        (1 << 40, ("which is less than the", "something else in the process")),
        (10_000, ("The smallest peak of a step is", "Cures")),
        (None, ("The fastest plan that fits needs", "memory_budget='")),
    ],
    ids=["room", "none fits", "one fits"],
)
def test_says_what_would_fit(room: int | None, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    def wide() -> Greedy:
        return Greedy(num_blocks=6)

    if room is None:
        least, most = least_and_most(wide)
        # between the two
        monkeypatch.setattr(out_of_memory, "device_bytes", lambda device: int(0.5 * (least + most) / SHARE))
    else:
        monkeypatch.setattr(out_of_memory, "device_bytes", lambda device: room)
    module = wide()
    with pytest.raises(RuntimeError) as caught:
        fit(RecomputeStrategy(granularity=None), lambda: module, train=wide_batches, val=None)
    text = str(caught.value)
    assert is_oom_error(caught.value)
    assert "DefaultCPUAllocator: can't allocate memory" in text.splitlines()[0]
    for word in ("RecomputeStrategy: no block was being recomputed", *words):
        assert word in text
    assert_unpatched(module)


def least_and_most(make: Any) -> tuple[int, int]:
    """Peaks with all recomputed and with all kept, as they are predicted."""
    from lightning_recompute.planning import profile_batch
    from lightning_recompute.policy import RecomputePolicy
    from lightning_recompute.profiling import everything_kept

    module = make()
    module.log = lambda *args, **options: None
    batch = next(iter(wide_batches()))
    optimizer = module.configure_optimizers()
    profile = profile_batch(module, batch, step=lambda: module.loss(batch), optimizers=[optimizer])
    return profile.peak_bytes(RecomputePolicy().plan([6])), profile.peak_bytes(everything_kept(profile))


class RunsOut(Net):
    """Runs out of memory in some attempts of its second step; draws, counts, logs and keeps statistics before."""

    where = "forward"

    def __init__(self, failures: int = 1) -> None:
        super().__init__(norm=nn.BatchNorm1d)
        self.failures = failures

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("mean", loss * torch.rand(()), on_epoch=True, on_step=True)
        if batch_idx == 1 and self.where == "forward":
            Left.run_out()
        return FailsInBackward.apply(loss) if batch_idx == 1 and self.where == "backward" else loss


class Left:
    """Failures to come; outside the module, where nothing is put back."""

    over = 0

    @classmethod
    def run_out(cls) -> None:
        if cls.over and not torch._C._len_torch_dispatch_stack():
            cls.over -= 1
            run_out()


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        Left.run_out()
        return gradient


class InBackward(RunsOut):
    where = "backward"


def run(strategy: Any, module: type[RunsOut], failures: int, **options: Any) -> Any:
    Left.over = failures
    return fit(strategy, module, train=wide_batches, val=None, **{"max_epochs": 1, **options})


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("failures", [1, 2])
@pytest.mark.parametrize("module", [RunsOut, InBackward])
def test_another_attempt_ends_as_if_nothing_had_happened(
    module: type[RunsOut], failures: int, accumulate: int, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"accumulate_grad_batches": accumulate}
    plain = run("auto", module, 0, **options)
    with caplog.at_level(logging.INFO, "lightning_recompute"):
        strategy = RecomputeStrategy(granularity=None, on_oom="replan")
        again = run(strategy, module, failures, **options)
    again.assert_equals(plain)
    for name, value in plain.trainer.callback_metrics.items():
        assert torch.equal(again.trainer.callback_metrics[name], value)
    assert sum("tried again under a tighter plan" in record.message for record in caplog.records) == failures
    assert_unpatched(again.module)


def test_the_tighter_plan_stays(tmp_path: Path) -> None:
    seen: list[RecomputePlan | None] = []

    class Looks(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            seen.append(trainer.strategy.active_plan)  # type: ignore[attr-defined]

    strategy = RecomputeStrategy(granularity=None, on_oom="replan")
    run(strategy, RunsOut, 1, callbacks=[Looks()], default_root_dir=tmp_path)
    assert seen[0] is None
    assert seen[1] is not None
    assert seen[1] == seen[2] == RecomputePlan.load(tmp_path / "plan.yaml")


def test_when_nothing_is_tighter_the_error_comes_through() -> None:
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator: can't allocate memory"):
        run(RecomputeStrategy(on_oom="replan"), RunsOut, 100)


def test_other_errors_are_not_tried_again() -> None:
    class Breaks(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            raise KeyError("not memory")

    with pytest.raises(KeyError, match="not memory"):
        fit(RecomputeStrategy(on_oom="replan"), Breaks, val=None)


def test_refused() -> None:
    with pytest.raises(ValueError, match="on_oom='retry': 'raise' or 'replan' is due"):
        RecomputeStrategy(on_oom="retry")  # type: ignore[arg-type]
    with pytest.raises(Exception, match="on_oom='replan' with several processes"):  # from the other process
        fit(RecomputeStrategy(on_oom="replan", start_method="fork"), Net, devices=2)
