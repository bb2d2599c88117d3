"""The callback that reports how fast training is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_recompute.ambient import is_recomputing
from lightning_recompute.repeated_work import RepeatedWork
from lightning_recompute.reporting import Report, enter_around, gather, log_scalars, num_replicas, tensor_group
from lightning_recompute.throughput import (
    FlopCounter,
    StepClock,
    device_peak_flops,
    median_and_p95,
    sample_counts,
    token_count,
    utilization,
)
from lightning_recompute.units import format_count, format_seconds

COLUMNS = (
    "epoch",
    "samples_per_second",
    "tokens_per_second",
    "step_seconds_median",
    "step_seconds_p95",
    "mfu",
    "hfu",
)
_EPOCHS_SHOWN = 20


@dataclass
class _Tally:
    """What an epoch adds up to on this rank."""

    samples: float | Tensor = 0
    tokens: float | Tensor = 0
    seconds: float = 0.0
    steps: int = 0

    def add(self, samples: float | Tensor, tokens: float | Tensor) -> None:
        self.samples = self.samples + samples
        self.tokens = self.tokens + tokens
        self.steps += 1


@dataclass
class _Run:
    """What lasts for one fit."""

    clock: StepClock
    group: dist.ProcessGroup | None
    repeats: RepeatedWork
    counter: FlopCounter
    stop_counting: Callable[[], None] = lambda: None
    counted: _Tally = field(default_factory=_Tally)
    epoch: _Tally = field(default_factory=_Tally)
    batch: tuple[float, float | Tensor] | None = None
    steps: int = 0
    since: float | None = None  # training time runs
    repeated_flops: int = 0  # counted ones that every rank of the group did alike
    _inside: bool = False

    @contextmanager
    def count(self, method: str) -> Iterator[None]:
        """Counts FLOPs around a call of the strategy; manual optimization calls backward inside training_step."""
        outermost, self._inside = not self._inside, True
        try:
            with ExitStack() as stack:
                if outermost:
                    stack.enter_context(self.counter)
                if method == "backward":
                    stack.enter_context(self.counter.backward())
                yield
        finally:
            self._inside = not outermost

    def compare(self) -> None:
        """Find out what the ranks repeated of what was counted; collective."""
        if self.group is not None:
            self.repeated_flops += self.repeats.flops(self.group, self.clock.device)

    def flops(self, samples: float, tokens: float) -> tuple[float, float, float]:
        """This rank's FLOPs for so many samples (tokens, where they are known): the model's, repeated, recomputed.

        What the t ranks of a group all do is the model's for one of them, so for each to 1/t, and repeated else.
        """
        counted = float(self.counted.tokens)
        amount = tokens
        if math.isnan(counted) or math.isnan(tokens):
            counted, amount = float(self.counted.samples), samples
        share = amount / counted if counted else math.nan
        alike = 0.0 if self.group is None else self.repeated_flops * (1 - 1 / self.group.size())
        counter = self.counter
        repeated = alike + counter.repeated_flops
        return (counter.model_flops - alike) * share, repeated * share, counter.recompute_flops * share


class ThroughputReport(Report):
    """Reports how fast training is and how much of the device it uses.

    Samples and tokens per second are those of all data-parallel ranks together, each sample once, over the time of
    the training epoch: waiting for data is in it, validation is not. A step is one training batch (also under
    accumulation), without waiting for data; its median and 95th percentile are those of the slowest rank. The
    first steps of a run do not count (`warmup_steps`).

    MFU is the FLOPs of forward and backward over what all devices could do in that time; HFU has the FLOPs of
    recomputation, too, so that HFU - MFU is what recomputation costs (Chowdhery et al. 2022, PaLM, appendix B).
    Tensor-parallel ranks count what each of them does; what all of them do alike (a router, experts or a head that
    are not divided) is in MFU once and in HFU as often as it is done. It is found by comparing the operands of the
    counted steps. What pipeline stages but the first do before the blocks is in HFU only.
    FLOPs are counted by operator in the first steps (matrix products, convolutions, attention; fused attention's
    backward with its own second look at the scores, as torch counts it) and go on per token, where tokens
    are known, else per sample. Recomputed are: what this package replays, and what torch's own checkpoint
    (Hugging Face's `gradient_checkpointing_enable`) does inside `backward`. Recomputation that torch.compile
    chose inside compiled code counts as the model's.

    Writes `throughput.csv` beside the logs after every epoch, gives `throughput/samples_per_second`,
    `throughput/tokens_per_second`, `throughput/step_seconds` (the median), `throughput/mfu` and `throughput/hfu`
    (0 to 1) to every logger, and prints a table. What is not known is left out.

    Args:
        peak_flops: FLOP/s that one device can do for dense matrices in the precision of the run. None: from a table
            of devices; without it (CPU, unknown devices) MFU and HFU are not reported.
        tokens_per_sample: Tokens of a sample. None: counted in batches of token sequences (integers of shape
            (batch, sequence) as `input_ids` or as the first tensor), where there is an `attention_mask` without
            padding; not reported for other batches.
        batch_size: Samples in a batch: a number, or a function of the batch. None: the first dimension of its
            first tensor.
        num_tokens: Function of the batch that returns its number of tokens, in place of `tokens_per_sample`.
        warmup_steps: How many of the run's first batches do not count.
        print_table: Whether rank 0 prints a table at the end of each epoch and of the run.

    Raises:
        ValueError: A number is out of range, or both `tokens_per_sample` and `num_tokens` are given.
    """

    file_name = "throughput.csv"
    columns = COLUMNS

    def __init__(
        self,
        peak_flops: float | None = None,
        tokens_per_sample: int | None = None,
        *,
        batch_size: int | Callable[[Any], int] | None = None,
        num_tokens: Callable[[Any], int] | None = None,
        warmup_steps: int = 2,
        print_table: bool = True,
    ) -> None:
        super().__init__(print_table=print_table)
        if peak_flops is not None and not peak_flops > 0:
            raise ValueError(f"found peak_flops={peak_flops!r}; the FLOP/s of one device are due, more than 0")
        if tokens_per_sample is not None and tokens_per_sample < 1:
            raise ValueError(f"found tokens_per_sample={tokens_per_sample!r}; at least 1 is due")
        if isinstance(batch_size, int) and batch_size < 1:
            raise ValueError(f"found batch_size={batch_size!r}; at least 1 is due")
        if warmup_steps < 0:
            raise ValueError(f"found warmup_steps={warmup_steps!r}; at least 0 is due")
        if tokens_per_sample is not None and num_tokens is not None:
            raise ValueError("found tokens_per_sample and num_tokens; one of them is due")
        self.peak_flops = peak_flops
        self.tokens_per_sample = tokens_per_sample
        self.batch_size = batch_size
        self.num_tokens = num_tokens
        self.warmup_steps = warmup_steps
        self._run: _Run | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy starts without the run."""
        return {**super().__getstate__(), "_run": None}

    # ---- a run ----------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin to count FLOPs."""
        self._start(trainer)
        group, repeats = tensor_group(trainer), RepeatedWork()
        repeating = partial(getattr, trainer.strategy, "repeats_work", False)
        counter = FlopCounter(is_recomputing, None if group is None else repeats.note, repeating)
        self._run = run = _Run(StepClock(trainer.strategy.root_device), group, repeats, counter)
        self._cleanup.callback(setattr, self, "_run", None)
        run.stop_counting = enter_around(trainer.strategy, ("training_step", "backward"), run.count)
        self._cleanup.callback(run.stop_counting)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin the epoch's sums."""
        if self._run is not None:
            self._run.epoch = _Tally()
            self._resume(self._run)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """A step begins."""
        if self._run is not None:
            # before the step, which may change the batch
            self._run.batch = None if batch is None else self._sizes(trainer, batch)
            self._resume(self._run)  # where Lightning goes on in mid-epoch, no epoch began
            self._run.clock.begin()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """A step is over."""
        run = self._run
        if run is None:
            return
        measured = run.steps >= self.warmup_steps
        run.clock.end(keep=measured)
        # a training_step that takes the data iterator itself shows its batch only now
        sizes = self._sizes(trainer, batch) if run.batch is None else run.batch
        run.steps += 1
        if run.steps <= max(self.warmup_steps, 1):
            run.counted.add(*sizes)
        if run.steps == max(self.warmup_steps, 1):
            run.stop_counting()
            run.compare()
        if measured:
            run.epoch.add(*sizes)
        elif run.steps == self.warmup_steps:
            self._resume(run)
        if trainer.is_last_batch:
            self._pause(run)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Validation is not training time."""
        if self._run is not None:
            self._pause(self._run)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Training goes on."""
        if self._run is not None and not trainer.is_last_batch:
            self._resume(self._run)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Report the epoch."""
        if self._run is not None:
            self._pause(self._run)
            self._report(trainer, self._run)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Print all epochs and stop."""
        if self._run is not None and len(self.rows) > 1:
            self._table(trainer, "Throughput", self.rows[-_EPOCHS_SHOWN:])
        self._stop()

    def _resume(self, run: _Run) -> None:
        if run.since is None and run.steps >= self.warmup_steps:
            run.since = run.clock.now()

    @staticmethod
    def _pause(run: _Run) -> None:
        if run.since is not None:
            run.epoch.seconds += run.clock.now() - run.since
            run.since = None

    # ---- sizes ----------------------------------------------------------------------------------------------

    def _sizes(self, trainer: pl.Trainer, batch: Any) -> tuple[float, float | Tensor]:
        """Samples and tokens of a batch; NaN where they are not known."""
        samples = self._samples(trainer, batch)
        if self.num_tokens is not None:
            return samples, self.num_tokens(batch)
        if self.tokens_per_sample is not None:
            return samples, samples * self.tokens_per_sample
        tokens = token_count(batch)
        return samples, math.nan if tokens is None else tokens

    def _samples(self, trainer: pl.Trainer, batch: Any) -> float:
        if self.batch_size is not None:
            return self.batch_size(batch) if callable(self.batch_size) else self.batch_size
        counts = sample_counts(batch)
        if not counts:
            self._say_once(
                trainer,
                f"found a batch of type {type(batch).__name__} with neither tensors nor lists, so samples per second "
                "are not reported: give ThroughputReport(batch_size=...), a number or a function of the batch",
            )
            return math.nan
        if len(counts) > 1:
            self._say_once(
                trainer,
                f"found tensors of {', '.join(map(str, counts))} rows in one batch and took {counts[0]} as the number "
                "of samples: if that is wrong give ThroughputReport(batch_size=...), a number or a function of the "
                "batch",
            )
        return counts[0]

    # ---- reporting ------------------------------------------------------------------------------------------

    def _report(self, trainer: pl.Trainer, run: _Run) -> None:
        epoch, times = run.epoch, run.clock.take()
        samples, tokens = float(epoch.samples), float(epoch.tokens)
        if run.steps < max(self.warmup_steps, 1):
            run.compare()
        flops = run.flops(samples, tokens)
        median, p95 = median_and_p95(times) if times else (0.0, 0.0)
        seconds = epoch.seconds if epoch.steps else 0.0
        own = (samples, tokens, *flops, seconds, median, p95)
        ranks = gather(trainer, [-1.0 if math.isnan(value) else value for value in own])
        columns = list(zip(*ranks, strict=True))
        # -1 on any rank: not known
        samples, tokens, model_flops, repeated_flops, recompute_flops = (
            math.nan if min(column) < 0 else sum(column) for column in columns[:5]
        )
        seconds, median, p95 = (max(column) for column in columns[5:])
        row: dict[str, Any] = dict.fromkeys(self.columns) | {"epoch": trainer.current_epoch}
        if seconds > 0:
            once = num_replicas(trainer) / trainer.world_size
            row["samples_per_second"] = samples * once / seconds
            row["tokens_per_second"] = tokens * once / seconds
            row["step_seconds_median"], row["step_seconds_p95"] = median, p95
            if model_flops == 0:
                self._say_once(
                    trainer,
                    "mfu and hfu are not reported: no matrix product, convolution or attention was seen in the steps "
                    "of the warm-up (kernels of your own need torch.utils.flop_counter.register_flop_formula)",
                )
            elif model_flops > 0 and (peak := self._peak(trainer)) is not None:
                row["mfu"] = utilization(model_flops, seconds, trainer.world_size, peak)
                done_flops = model_flops + repeated_flops + recompute_flops
                row["hfu"] = utilization(done_flops, seconds, trainer.world_size, peak)
        else:
            self._say_once(
                trainer,
                f"epoch {trainer.current_epoch} had no steps after the warm-up of {self.warmup_steps}, so its speed is "
                "not reported: give ThroughputReport(warmup_steps=...)",
            )
        row = {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in row.items()}
        self.rows.append(row)
        self._write(trainer)
        names = ("samples_per_second", "tokens_per_second", "step_seconds_median", "mfu", "hfu")
        log_scalars(trainer, {f"throughput/{name.removesuffix('_median')}": row[name] for name in names})
        extra = (recompute_flops / model_flops, repeated_flops / model_flops) if model_flops > 0 else (0.0, 0.0)
        self._table(trainer, f"Throughput, epoch {trainer.current_epoch}", [row], *extra)

    def _peak(self, trainer: pl.Trainer) -> float | None:
        if self.peak_flops is not None:
            return self.peak_flops
        device = trainer.strategy.root_device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        tf32 = torch.get_float32_matmul_precision() != "highest"
        peak = device_peak_flops(name, str(trainer.precision), tf32=tf32)
        if peak is None:
            self._say_once(
                trainer,
                f"mfu and hfu are not reported: no peak FLOP/s is known for {name!r} with precision "
                f"{trainer.precision}; give ThroughputReport(peak_flops=...)",
            )
        return peak

    def _table(
        self, trainer: pl.Trainer, title: str, rows: list[dict[str, Any]], recomputed: float = 0, repeated: float = 0
    ) -> None:
        lines = []
        for row in rows:
            line = {"epoch": str(row["epoch"])}
            for column, name, write in _SHOWN:
                if any(other[name] is not None for other in rows):
                    line[column] = "" if row[name] is None else write(row[name])
            lines.append(line)
        caption = f"without validation and the run's first {self.warmup_steps} steps"
        if recomputed > 0:
            caption += f"; recomputation adds {recomputed:.1%} of the model's FLOPs"
        if repeated > 0:
            caption += f"; work that ranks repeat adds {repeated:.1%}"
        self._show(trainer, title, lines, caption)


_SHOWN: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("samples/s", "samples_per_second", format_count),
    ("tokens/s", "tokens_per_second", format_count),
    ("step, median", "step_seconds_median", format_seconds),
    ("step, p95", "step_seconds_p95", format_seconds),
    ("MFU", "mfu", "{:.1%}".format),
    ("HFU", "hfu", "{:.1%}".format),
)
