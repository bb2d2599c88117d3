"""Run by two processes: many small fits under RecomputeStrategy, each leaving what the test looks at."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torchmetrics
from distributed import NUM_PROCESSES, error_of, local_rank
from lightning_modules import NUM_SAMPLES, WIDTH, Fit, Net, SeedSteps, assert_unpatched, samples
from lightning_modules import fit as fit_on
from lightning_modules import loader as batches
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_recompute.strategy import RecomputeStrategy

ROWS = 2
"""Rows of a batch on each process; the joined batch of one process has twice as many."""

DOUBLE: dict[str, Any] = {"precision": "64-true", "max_epochs": 1, "use_distributed_sampler": False}


class Exact(Net):
    """No dropout, plain SGD: two processes and one with the joined batch do the same sums."""

    def __init__(self, **options: Any) -> None:
        super().__init__(dropout=0.0, **options)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class Shared(Exact):
    """One block three times, as in ALBERT, and the head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__(num_blocks=1)
        self.blocks.extend([self.blocks[0], self.blocks[0]])
        self.head = nn.Linear(WIDTH, WIDTH)
        self.head.weight = self.embed.weight


class Unused(Exact):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].spare = nn.Linear(WIDTH, WIDTH)


class BatchNorms(Net):
    def __init__(self) -> None:
        super().__init__(norm=nn.BatchNorm1d, dropout=0.0)


class Manual(Exact):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class Gradients(pl.Callback):
    """Every gradient after each backward, how often each parameter's hook fired, and what stood around the module."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Tensor]] = []
        self.fired: Counter[str] = Counter()
        self.wrapper = ""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.wrapper = type(trainer.model).__name__
        for name, parameter in pl_module.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: self.fired.update([name]))

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        grads = {name: p.grad.clone() for name, p in pl_module.named_parameters() if p.grad is not None}
        self.seen.append(grads)

    def found(self) -> dict[str, Any]:
        return {"gradients": self.seen, "fired": dict(self.fired), "wrapper": self.wrapper}


def loader(rows: int = ROWS) -> DataLoader[Any]:
    """Every second sample on each rank, in order; Lightning's injected sampler would shuffle."""
    data = samples(torch.float64)
    alone = rows > ROWS
    sampler = None if alone else DistributedSampler(data, NUM_PROCESSES, local_rank(), shuffle=False)
    return DataLoader(data, rows, sampler=sampler)


def gradients(strategy: Any, module: Callable[[], Any], rows: int = ROWS, **options: Any) -> tuple[dict[str, Any], Fit]:
    """Gradients of every backward; the test calls this too, for one process and the joined batch."""
    callback = Gradients()
    fitted = fit_on(strategy, module, train=lambda: loader(rows), val=None, callbacks=[callback], **DOUBLE, **options)
    return {**callback.found(), "weights": fitted.weights}, fitted


def fit(module: Callable[[], Any] = Net, strategy: Any = None, **options: Any) -> Fit:
    return fit_on(strategy or RecomputeStrategy(), module, devices=NUM_PROCESSES, **options)


def check_gradients() -> dict[str, Any]:
    cases: dict[str, tuple[Callable[[], Any], dict[str, Any], dict[str, Any]]] = {
        "plain": (Exact, {}, {}),
        "pairs": (Exact, {"num_layers": 2}, {}),
        "accumulate": (Exact, {}, {"accumulate_grad_batches": 2}),
        "clip": (Exact, {}, {"gradient_clip_val": 0.01}),
        "shared": (Shared, {}, {}),
        "shared, searched": (Shared, {"find_unused_parameters": True}, {}),
        "unused, searched": (Unused, {"find_unused_parameters": True}, {}),
        "manual": (Manual, {}, {}),
    }
    found = {}
    for name, (module, words, options) in cases.items():
        found[name], fitted = gradients(RecomputeStrategy(**words), module, devices=NUM_PROCESSES, **options)
        assert_unpatched(fitted.module)
    return found


def check_equal_to_ddp() -> dict[str, Any]:
    """Shuffled data, dropout, validation, T29: the same losses, weights and statistics as Lightning's own DDP."""
    found = {}
    for name, module in {"dropout": Net, "batch norms": BatchNorms}.items():
        ours, theirs = (fit(module, strategy, train=lambda: batches(True, 3)) for strategy in (None, "ddp"))
        ours.assert_equals(theirs)
        found[name] = {"losses": ours.losses, "weights": ours.weights}
    return found


class Samples(Net):
    """Remembers which samples it was given, and logs its rank."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[int] = []
        self.total = torchmetrics.SumMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.given += batch[1].tolist()
        self.total.update(batch[1].numel())
        self.log("rank", float(self.global_rank), sync_dist=True, on_epoch=True, on_step=False)
        self.log("total", self.total, on_epoch=True, on_step=False)
        return super().training_step(batch, batch_idx)


def numbered() -> TensorDataset:
    return TensorDataset(torch.randn(NUM_SAMPLES, WIDTH), torch.arange(NUM_SAMPLES))


def check_data() -> dict[str, Any]:
    def own() -> DataLoader[Any]:
        sampler = DistributedSampler(numbered(), NUM_PROCESSES, local_rank(), shuffle=False)
        return DataLoader(numbered(), 5, sampler=sampler)

    injected = fit(Samples, train=lambda: DataLoader(numbered(), 5, shuffle=True), max_epochs=1)
    users = fit(Samples, train=own, max_epochs=1, use_distributed_sampler=False)
    metrics = injected.trainer.callback_metrics
    return {
        "given": injected.module.given,
        "own": users.module.given,
        "mean_rank": metrics["rank"].item(),
        "total": metrics["total"].item(),
        "sampler": injected.trainer.strategy.distributed_sampler_kwargs,
    }


def check_collectives() -> dict[str, Any]:
    """T4, on the strategy of a run that just ended: its process group is still there."""
    strategy = fit(max_epochs=1).trainer.strategy
    mine = torch.tensor([float(strategy.global_rank + 1)])
    votes = [[False, False], [True, False], [False, True], [True, True]]
    return {
        "booleans": [
            [strategy.reduce_boolean_decision(vote[strategy.global_rank], all=every) for vote in votes]
            for every in (True, False)
        ],
        "mean": strategy.reduce(mine.clone()).item(),
        "sum": strategy.reduce(mine.clone(), reduce_op="sum").item(),
        "gathered": strategy.all_gather(mine).tolist(),
        "broadcast": strategy.broadcast({"from": strategy.global_rank}),
        "not a tensor": strategy.reduce("text"),
    }


def check_refusals() -> dict[str, Any]:
    """Errors that every rank meets; the processes go on together after each."""

    class SkipsABatch(Net):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            return None

    norms = BatchNorms()
    found = {"synchronized": error_of(lambda: fit(lambda: norms, sync_batchnorm=True))}
    # setup failed half-way: neither patches nor synchronized layers are left
    assert_unpatched(norms)
    assert not any(isinstance(part, nn.SyncBatchNorm) for part in norms.modules())
    return found | {
        "none": error_of(lambda: fit(SkipsABatch)),
        "unused": error_of(lambda: fit(Unused)),
        "batch size finder": error_of(lambda: fit(callbacks=[pl.callbacks.BatchSizeFinder()])),
    }


def check_two_fits_and_evaluation() -> dict[str, Any]:
    module = Net()
    run = fit(lambda: module).trainer
    run.fit_loop.max_epochs = 3
    run.fit(module, DataLoader(samples(), 4))
    validated = run.validate(module, DataLoader(samples(), 4), verbose=False)
    predicted = run.predict(module, DataLoader(samples(), 4))
    assert_unpatched(module)
    return {"epochs": run.current_epoch, "validated": validated, "predicted": torch.cat(predicted)}


def check_checkpoint(folder: Path) -> dict[str, Any]:
    """Saved at an epoch border, resumed under another policy."""

    saver = pl.callbacks.ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    whole = fit(max_epochs=3, enable_checkpointing=True, callbacks=[SeedSteps(), saver])
    other, path = RecomputeStrategy(method="block", num_layers=1), str(folder / "epoch=1.ckpt")
    rest = fit(strategy=other, ckpt_path=path, max_epochs=3, callbacks=[SeedSteps()])
    return {"whole": whole.losses, "rest": rest.losses}


class Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(record.getMessage())


def check_all(folder: Path) -> dict[str, Any]:
    """What one rank found, by check."""
    messages = Messages()
    logging.getLogger("lightning_recompute").addHandler(messages)
    logging.getLogger("lightning_recompute").setLevel(logging.INFO)
    return {
        "gradients": check_gradients(),
        "ddp": check_equal_to_ddp(),
        "data": check_data(),
        "collectives": check_collectives(),
        "evaluation": check_two_fits_and_evaluation(),
        "checkpoint": check_checkpoint(folder),
        "refusals": check_refusals(),
        "messages": messages.seen,
    }
