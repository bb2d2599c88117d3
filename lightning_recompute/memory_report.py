"""The callback that reports where memory goes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_recompute.memory import PHASES, Phase, PhaseMemory, PhaseRecorder, open_meter
from lightning_recompute.reporting import Report, enter_around, gather, log_scalars
from lightning_recompute.throughput import tensors_in
from lightning_recompute.units import GIB, binary_unit

_PARTS = ("parameters", "gradients", "optimizer", "activations", "temporary")
COLUMNS = (
    "epoch",
    "phase",
    "rank",
    "peak_bytes",
    "reserved_bytes",
    "predicted_peak_bytes",
    *(f"{part}_bytes" for part in _PARTS),
)


class MemoryReport(Report):
    """Reports where memory goes: peaks by epoch and phase on every rank, and what they consist of.

    Phases are forward, backward, optimizer and validation (sanity checking does not count). In manual
    optimization call `self.manual_backward`, not `loss.backward()`, so that backward is told from forward (and
    gradients dropped within a forward are temporary). The peak of each phase is split into parameters (with
    buffers), gradients, optimizer state, activations (what forward left for backward) and temporary (the rest:
    gradients of activations, recomputed activations, the batch), each storage once, of DTensors the local shards;
    the five are what there was at the peak, and sum to it.

    On CUDA bytes are those of torch's caching allocator, allocated and reserved. On the CPU a counting allocator is
    compiled on first use (g++, some seconds, kept in the user's cache folder), which is exact and costs no time. It
    counts what is allocated while fitting, and from before that the parameters, buffers, gradients and optimizer
    state of the module and of modules that other callbacks hold (an averaged copy); data sets and other models of
    the process do not show. Without a compiler, and on other devices, the operators of the first steps of each
    epoch are watched instead.

    Writes `memory.csv` beside the logs after every epoch, gives `memory/peak_gib` (the highest of all phases and
    ranks), `memory/activations_gib` (the most that one forward pass left), `memory/predicted_peak_gib` (where a plan
    predicts one) and `memory/worst_rank` to every logger, GiB being 1024**3 bytes, and prints a table.

    Args:
        print_table: Whether rank 0 prints a table at the end of each epoch and of the run.
        reset_peak: On CUDA, whether torch's peak counter may be reset at each phase. Without that, peaks below the
            highest of the process are only known from below; with it, DeviceStatsMonitor and others that read the
            counter see peaks of phases.
    """

    file_name = "memory.csv"
    columns = COLUMNS

    def __init__(self, *, print_table: bool = True, reset_peak: bool = True) -> None:
        super().__init__(print_table=print_table)
        self.reset_peak = reset_peak
        self._recorder: PhaseRecorder | None = None
        self._watching = False
        self._inside = False
        self._automatic = True
        self._steps_to_watch = 0
        self._resumed_after: Phase | None = None
        self._batch: list[int] = []

    def __getstate__(self) -> dict[str, Any]:
        """A copy starts without the run."""
        return {**super().__getstate__(), "_recorder": None, "_watching": False}

    # ---- a run ----------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin to measure."""
        self._start(trainer)
        self._open(trainer, trainer.optimizers)
        self._steps_to_watch = 1  # one more in the first epoch: only the second has all of the optimizer's state

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin the epoch's peaks."""
        if self._recorder is not None:
            self._recorder.start_over()
            self._steps_to_watch += 1

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Forward begins."""
        if self._recorder is None:
            return
        self._batch = self._recorder.meter.count(_owners(batch))
        self._watching = self._steps_to_watch > 0
        if self._watching and not self._recorder.meter.continuous:
            self._recorder.count()
        self._recorder.begin("forward")

    def begin_forward_again(self) -> None:
        """What has been run since forward began was no part of the step: a plan was made."""
        if self._recorder is not None:
            self._recorder.end(keep=False)
            self._recorder.begin("forward")

    def on_before_zero_grad(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer) -> None:
        """Forward is over; Lightning drops the old gradients between forward and backward."""
        self._end()

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        """Backward begins."""
        self._begin("backward")

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Backward is over."""
        self._end()
        if not self._automatic:
            self._begin("forward", after="backward")  # of another loss, perhaps

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """The optimizer's step begins, clipping included."""
        self._end(keep=self._resumed_after != "backward")
        self._begin("optimizer")

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """The step is over."""
        self._end(keep=self._resumed_after is None)
        self._end_batch()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Validation begins."""
        if trainer.sanity_checking:
            return
        if self._recorder is None:  # trainer.validate()
            self._start(trainer)
            self._open(trainer, ())
        self._watching = True
        self._begin("validation")

    def on_validation_batch_start(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Count the batch."""
        if self._recorder is not None and not trainer.sanity_checking:
            self._batch = self._recorder.meter.count(_owners(batch))
            self._watching = batch_idx == 0

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """The batch is over."""
        self._end_batch()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Validation is over; after `trainer.validate()` report it."""
        if self._recorder is None or trainer.sanity_checking:
            return
        self._end()
        if trainer.state.fn == "validate":
            self._report(trainer)
            self._stop()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Report the epoch."""
        if self._recorder is not None:
            self._report(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Print the run's highest peaks and stop measuring, while the module is still on its device."""
        if self._recorder is not None:
            highest = [self._highest([row for row in self.rows if row["phase"] == phase]) for phase in PHASES]
            self._table(trainer, "highest of all epochs", [row for row in highest if row], with_epoch=True)
        self._stop()

    def _open(self, trainer: pl.Trainer, optimizers: Sequence[Optimizer]) -> None:
        device = trainer.strategy.root_device
        meter = open_meter(device, reset=self.reset_peak)
        self._cleanup.callback(meter.close)
        modules: list[nn.Module] = [trainer.lightning_module]
        for callback in _callbacks(trainer):
            modules += [value for value in vars(callback).values() if isinstance(value, nn.Module)]
        optimizers = [optimizer for optimizer in optimizers if isinstance(optimizer, Optimizer)]
        self._automatic = trainer.lightning_module.automatic_optimization
        self._recorder = PhaseRecorder(meter, modules, optimizers)
        self._cleanup.callback(setattr, self, "_recorder", None)
        self._cleanup.callback(self._end_batch)
        for optimizer in optimizers:
            self._cleanup.callback(optimizer.register_step_post_hook(self._after_step).remove)
        if not meter.continuous:
            methods = ("training_step", "backward", "optimizer_step", "validation_step")
            self._cleanup.callback(enter_around(trainer.strategy, methods, self._watch))

    # ---- phases ---------------------------------------------------------------------------------------------

    def _begin(self, phase: Phase, after: Phase | None = None) -> None:
        # in manual optimization what follows a backward or a step may be the forward of another loss, or nothing
        self._resumed_after = after
        if self._recorder is not None:
            self._recorder.begin(phase)

    def _end(self, *, keep: bool = True) -> None:
        if self._recorder is not None:
            self._recorder.end(keep=keep)

    def _end_batch(self) -> None:
        if self._recorder is not None:
            self._recorder.meter.discount(self._batch)
        self._batch = []
        self._watching = False

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._end()
        self._steps_to_watch -= self._watching
        if not self._automatic:
            self._begin("forward", after="optimizer")

    @contextmanager
    def _watch(self, method: str) -> Iterator[None]:
        # the optimizer's step calls the training step, and that backward in manual optimization
        if self._recorder is None or self._inside or not self._watching:
            yield
            return
        self._inside = True
        try:
            with self._recorder.meter.watching():
                yield
        finally:
            self._inside = False

    # ---- reporting ------------------------------------------------------------------------------------------

    def _report(self, trainer: pl.Trainer) -> None:
        recorder = self._recorder
        assert recorder is not None
        predictions = _predicted(trainer)
        own: list[float] = [recorder.activations_bytes, recorder.meter.num_retries]
        own += [_number(predictions.get(phase)) for phase in PHASES]
        for phase in PHASES:
            own += _to_numbers(recorder.peaks.get(phase))
        epoch = trainer.current_epoch
        rows: list[dict[str, Any]] = []
        ranks = gather(trainer, own)
        for rank, (_, _, *numbers) in enumerate(ranks):
            predicted, numbers = numbers[: len(PHASES)], numbers[len(PHASES) :]
            for phase, number in zip(PHASES, predicted, strict=True):
                peak, numbers = _from_numbers(numbers)
                if peak is not None:
                    row = {"epoch": epoch, "phase": phase, "rank": rank, **asdict(peak)}
                    rows.append({**row, "predicted_peak_bytes": None if number < 0 else int(number)})
        self.rows += rows
        self._write(trainer)
        highest = self._highest(rows)
        if highest is not None and trainer.state.fn == "fit":  # validation alone is no point of the curve
            known = [row["predicted_peak_bytes"] for row in rows if row["predicted_peak_bytes"] is not None]
            scalars = {
                "memory/peak_gib": highest["peak_bytes"] / GIB,
                "memory/activations_gib": max(rank[0] for rank in ranks) / GIB,
                "memory/predicted_peak_gib": max(known) / GIB if known else None,
                "memory/worst_rank": float(highest["rank"]),
            }
            log_scalars(trainer, scalars)
        retries = max(rank[1] for rank in ranks)
        caption = "" if recorder.meter.continuous else "from watching the operators of the epoch's first steps"
        if retries:
            caption = f"{retries:.0f} allocations needed a retry: memory is nearly full, or fragmented"
        worst = [self._highest([row for row in rows if row["phase"] == phase]) for phase in PHASES]
        self._table(trainer, f"epoch {epoch}", [row for row in worst if row], caption=caption)

    @staticmethod
    def _highest(rows: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
        return max(rows, key=lambda row: row["peak_bytes"], default=None)

    def _table(
        self,
        trainer: pl.Trainer,
        title: str,
        rows: Sequence[Mapping[str, Any]],
        *,
        caption: str = "",
        with_epoch: bool = False,
    ) -> None:
        unit, size = binary_unit(max((row["peak_bytes"] for row in rows), default=0))
        write = f"{{:.{0 if size == 1 else 2}f}}".format
        lines = []
        for row in rows:
            line = {"phase": str(row["phase"]), "peak": write(row["peak_bytes"] / size)}
            if with_epoch:
                line["epoch"] = str(row["epoch"])
            if trainer.world_size > 1:
                line["rank"] = str(row["rank"])
            if any(other["reserved_bytes"] is not None for other in rows):
                line["reserved"] = write((row["reserved_bytes"] or 0) / size)
            if any(other["predicted_peak_bytes"] is not None for other in rows):
                predicted, peak = row["predicted_peak_bytes"], row["peak_bytes"]
                line["predicted"] = "" if predicted is None else write(predicted / size)
                line["error"] = "" if predicted is None or not peak else f"{100 * (predicted - peak) / peak:+.2f} %"
            lines.append(line | {part: write(row[f"{part}_bytes"] / size) for part in _PARTS})
        title = f"Memory in {unit}, {title}"
        if trainer.world_size > 1:
            title += ", on the rank that needed most"
        self._show(trainer, title, lines, caption)


def _owners(batch: Any) -> Iterator[Tensor]:
    # A batch that workers sent lies in shared memory, and one may be a piece of the data set: it counts during its
    # step. A view of the data set does not, as the storage behind it is all of the data.
    for tensor in tensors_in(batch):
        plain = type(tensor) is Tensor and tensor.layout == torch.strided
        if plain and tensor.untyped_storage().nbytes() == tensor.nbytes:
            yield tensor


def _callbacks(trainer: Any) -> list[Any]:
    return list(trainer.callbacks)  # an attribute that Lightning's types do not know


def _predicted(trainer: pl.Trainer) -> dict[str, int]:
    """The predicted peak of each phase, from whoever made a plan within a budget."""
    for owner in (trainer.strategy, *_callbacks(trainer)):
        if (forecast := getattr(owner, "forecast", None)) is not None and hasattr(forecast, "phase_peaks"):
            return dict(forecast.phase_peaks())
        predicted = getattr(owner, "predicted_peak_bytes", None)
        if isinstance(predicted, int):  # one for all
            return dict.fromkeys(PHASES, predicted)
    return {}


def _number(value: int | None) -> float:
    return -1.0 if value is None else float(value)


def _to_numbers(peak: PhaseMemory | None) -> list[float]:
    fields = asdict(peak).values() if peak is not None else [None] * 7
    return [_number(value) for value in fields]


def _from_numbers(numbers: list[float]) -> tuple[PhaseMemory | None, list[float]]:
    values, rest = numbers[:7], numbers[7:]
    if values[0] < 0:
        return None, rest
    peak, reserved, *parts = (int(value) for value in values)
    return PhaseMemory(peak, None if reserved < 0 else reserved, *parts), rest
