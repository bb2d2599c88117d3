"""What the reports share: values of all ranks, files, loggers, tables, and contexts around a strategy's steps.

Callbacks made of this work in the Trainer of `lightning` and in that of `pytorch_lightning`.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.callbacks import Callback
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torchmetrics.aggregation import CatMetric

from lightning_recompute.files import csv_text, write_atomically
from lightning_recompute.printing import wide_console

logger = logging.getLogger(__name__)

Context = Callable[[str], AbstractContextManager[Any]]


class _Around:
    """Stands in for a method of an object and enters contexts around each call."""

    def __init__(self, owner: Any, name: str) -> None:
        self.name = name
        self.before = vars(owner).get(name)
        self.method = getattr(owner, name)
        self.contexts: list[Context] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for context in self.contexts:
                stack.enter_context(context(self.name))
            return self.method(*args, **kwargs)


def enter_around(owner: Any, names: Iterable[str], context: Context) -> Callable[[], None]:
    """Enter a context around every call of some methods of an object, until undone.

    Contexts cannot be entered in one callback hook and left in another: other callbacks do the same in the same
    order, not in reverse, and torch's modes are a stack. Around a call they always nest.

    Args:
        owner: The object, for example a strategy. Several users may share a method and leave in any order.
        names: Its methods.
        context: Makes the context, from the method's name.

    Returns:
        Undoes it; calling that twice is as good as once.
    """
    entered = []
    for name in names:
        around = vars(owner).get(name)
        if not isinstance(around, _Around):
            around = _Around(owner, name)
            setattr(owner, name, around)
        around.contexts.append(context)
        entered.append(around)

    def undo() -> None:
        while entered:
            around = entered.pop()
            around.contexts.remove(context)
            if around.contexts or vars(owner).get(around.name) is not around:
                continue
            if around.before is None:
                delattr(owner, around.name)
            else:
                setattr(owner, around.name, around.before)

    return undo


def gather(trainer: pl.Trainer, values: Sequence[float]) -> list[list[float]]:
    """The values of every rank, by rank. All ranks call it together, with equally many values.

    Args:
        trainer: The Trainer, for its device and world.
        values: This rank's values; integers are exact up to 2**53, and NaN is not allowed.
    """
    device = trainer.strategy.root_device
    # alone there is nobody to ask, and MPS has no float64
    alone = trainer.world_size == 1
    metric = CatMetric(nan_strategy="error", sync_on_compute=not alone).set_dtype(torch.float64)
    metric = metric.to("cpu" if alone else device)
    metric.update(torch.tensor([list(values)], dtype=torch.float64, device=metric.device))
    rows = metric.compute().reshape(-1, len(values)).tolist()
    metric.reset()  # it refers to itself and would live on, with its tensors, until the garbage is collected
    return [list(row) for row in rows]


def num_replicas(trainer: pl.Trainer) -> int:
    """Into how many parts the data is divided; ranks that share layers (tensor, pipeline) see the same samples."""
    strategy = trainer.strategy
    if isinstance(size := getattr(strategy, "data_parallel_size", None), int):
        return size
    kwargs = getattr(strategy, "distributed_sampler_kwargs", None) or {}
    return int(kwargs.get("num_replicas", trainer.world_size))


def tensor_group(trainer: pl.Trainer) -> dist.ProcessGroup | None:
    """The ranks that share each layer with this one, under RecomputeStrategy or Lightning's ModelParallelStrategy.

    None where there are none, or the strategy does not say.
    """
    strategy: Any = trainer.strategy
    mesh = getattr(getattr(strategy, "groups", None), "mesh", None)
    if mesh is None and trainer.world_size > 1:
        with suppress(AttributeError, RuntimeError):  # other strategies, and one that is not set up
            mesh = strategy.device_mesh
    names = getattr(mesh, "mesh_dim_names", None) or ()
    for name in ("tensor", "tensor_parallel"):
        if mesh is not None and name in names and mesh.size(names.index(name)) > 1:
            group: dist.ProcessGroup = mesh.get_group(name)
            return group
    return None


def report_folder(trainer: pl.Trainer) -> str | None:
    """The folder for reports: the logger's, else the Trainer's default; None in a fast_dev_run, which leaves no files.

    All ranks call it together.
    """
    folder = trainer.log_dir  # asks the other ranks, so not after an `or` or an `if`
    return None if getattr(trainer, "fast_dev_run", False) else str(folder or trainer.default_root_dir)


def log_scalars(trainer: pl.Trainer, scalars: Mapping[str, float | None]) -> None:
    """Give values to every logger of the Trainer, at the step at which Lightning logs the epoch. None is left out."""
    module = trainer.lightning_module
    step = trainer.global_step - 1 if module.automatic_optimization else trainer.fit_loop.total_batch_idx
    known = {name: value for name, value in scalars.items() if value is not None}
    for logger in trainer.loggers:
        logger.log_metrics(known, step=max(step, 0))


def show(trainer: pl.Trainer, table: Table) -> None:
    """Print a table without breaking the progress bar."""
    console = wide_console(120)
    with console.capture() as capture:
        console.print(table)
    progress_bar = trainer.progress_bar_callback
    (progress_bar or trainer).print(capture.get().rstrip("\n"))


class Report(Callback):
    """What both reports do: rows that become a CSV file, said-once messages, and no trace of a run left behind.

    Args:
        print_table: Whether rank 0 prints a table at the end of each epoch and of the run.

    Attributes:
        rows: The rows of the file, by column; filled on every rank.
    """

    file_name: str
    columns: Sequence[str]

    def __init__(self, *, print_table: bool = True) -> None:
        super().__init__()
        self.print_table = print_table
        self.rows: list[dict[str, Any]] = []
        self._folder: str | None = None
        self._cleanup = ExitStack()
        self._said: set[str] = set()

    def __getstate__(self) -> dict[str, Any]:
        """A copy starts without the run."""
        return {**vars(self), "_cleanup": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the state of the original."""
        vars(self).update(state)
        self._cleanup = ExitStack()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Undo everything that the run set up."""
        self._stop()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Undo everything that the run set up."""
        self._stop()

    def _start(self, trainer: pl.Trainer) -> None:
        self._stop()
        folder = report_folder(trainer)
        if folder != self._folder or (trainer.training and trainer.current_epoch == 0):
            self.rows = []  # another run, another file
        self._folder = folder
        self._said = set()

    def _stop(self) -> None:
        self._cleanup.close()

    def _write(self, trainer: pl.Trainer) -> None:
        if not trainer.is_global_zero or self._folder is None:
            return
        text = csv_text(self.columns, self.rows)
        filesystem = get_filesystem(self._folder)
        if "file" in filesystem.protocol:
            write_atomically(Path(self._folder) / self.file_name, text)
            return
        with tempfile.TemporaryDirectory() as local:
            whole = write_atomically(Path(local) / self.file_name, text)
            filesystem.put(str(whole), f"{self._folder.rstrip('/')}/{self.file_name}")

    def _show(self, trainer: pl.Trainer, title: str, rows: Iterable[Mapping[str, str]], caption: str) -> None:
        rows = list(rows)
        if not (self.print_table and trainer.is_global_zero and rows):
            return
        table = Table(
            title=title, caption=caption or None, title_justify="left", caption_justify="left", box=SIMPLE_HEAD
        )
        for column in rows[0]:
            table.add_column(column, justify="left" if column == "phase" else "right")
        for row in rows:
            table.add_row(*row.values())
        show(trainer, table)

    def _say_once(self, trainer: pl.Trainer, message: str) -> None:
        if trainer.is_global_zero and message not in self._said:
            self._said.add(message)
            logger.warning(message)
