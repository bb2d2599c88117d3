"""Run by two and by four processes: fits with both reports on ranks that share layers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from distributed_reports import clock
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning_modules import QUIET
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader
from transformers import MixtralConfig, MixtralForCausalLM

from lightning_recompute.callbacks import MemoryReport, ThroughputReport
from lightning_recompute.gpt import GPT
from lightning_recompute.groups import ParallelGroups
from lightning_recompute.repeated_work import RepeatedWork
from lightning_recompute.strategy import RecomputeStrategy
from lightning_recompute.tensor_parallel import apply_tensor_parallel
from lightning_recompute.throughput import FlopCounter

LAYERS, HEADS, HIDDEN, LENGTH, VOCABULARY = 2, 4, 32, 16, 64
ROWS, NUM_BATCHES = 2, 4
WIDTH, INNER, OUT = 16, 48, 8
PEAK = 1e9


class TimedGPT(GPT):
    """A step takes a second, on the last rank two."""

    def __init__(self) -> None:
        shape = {"num_layers": LAYERS, "num_heads": HEADS, "hidden_size": HIDDEN, "max_length": LENGTH}
        super().__init__(vocab_size=VOCABULARY, attention="eager", decay_steps=100, **shape)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        tick(self)
        return super().training_step(batch, batch_idx)


class Pair(nn.Module):
    """Two linears that ranks share."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(self.up(x).relu())
        return y


class Partly(pl.LightningModule):
    """Two blocks that ranks share, between linears that all of them have."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Pair(), Pair()])
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, OUT)

    def tensor_parallel_plan(self) -> dict[str, str]:
        return {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        tick(self)
        hidden = self.first(batch)
        for block in self.blocks:
            hidden = block(hidden)
        value: Tensor = self.head(hidden).square().mean()
        return value

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


class ByDTensor(Partly):
    """Divided by torch's own styles, as under Lightning's ModelParallelStrategy."""

    def configure_model(self) -> None:
        styles = {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()}
        parallelize_module(self.blocks, self.device_mesh["tensor_parallel"], styles)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def tick(module: pl.LightningModule) -> None:
    clock.time += 2 if module.global_rank == module.trainer.world_size - 1 else 1


def check_two(folder: Path) -> dict[str, Any]:
    """Two ranks that share layers."""
    found = {
        name: fit(folder, name, TimedGPT(), RecomputeStrategy(tensor_parallel_size=2, **options))
        for name, options in (
            ("none", {"granularity": None}),
            ("full", {"granularity": "full"}),
            ("sequence", {"granularity": None, "sequence_parallel": True}),
        )
    }
    found["partly"] = fit(folder, "partly", Partly(), RecomputeStrategy(granularity=None, tensor_parallel_size=2))
    found["dtensor"] = fit(folder, "dtensor", ByDTensor(), ModelParallelStrategy(1, 2))
    found["work"] = compare_work()
    found["experts"] = {name: experts(name == "sequence") for name in ("tensor", "sequence")}
    return found


def check_four(folder: Path) -> dict[str, Any]:
    """Two groups of two ranks."""
    found = {}
    for data in ("replicate", "shard"):
        strategy = RecomputeStrategy(granularity=None, tensor_parallel_size=2, data_parallel=data)  # type: ignore[arg-type]
        found[data] = fit(folder, data, TimedGPT(), strategy, 4)
    found["dtensor"] = fit(folder, "dtensor", ByDTensor(), ModelParallelStrategy(2, 2), 4)
    return found


def fit(folder: Path, name: str, module: pl.LightningModule, strategy: Any, devices: int = 2) -> dict[str, Any]:
    """Rows of both reports; the logger writes to the folder of that name."""
    time.perf_counter = clock  # type: ignore[assignment]  # a clock that training moves
    memory, throughput = MemoryReport(), ThroughputReport(PEAK, warmup_steps=1)
    num_samples = ROWS * NUM_BATCHES * devices // 2
    samples: Any = torch.randn(num_samples, WIDTH, generator=torch.Generator().manual_seed(1))
    if isinstance(module, GPT):
        samples = torch.arange(num_samples * (LENGTH + 1)).view(num_samples, -1) % VOCABULARY
    logger = CSVLogger(folder, name=name, version="")
    options = {**QUIET, "devices": devices, "max_epochs": 1, "logger": logger}
    trainer = pl.Trainer(**options, strategy=strategy, callbacks=[throughput, memory])
    trainer.fit(module, DataLoader(samples, batch_size=ROWS))
    return {"memory": memory.rows, "throughput": throughput.rows}


def compare_work() -> dict[str, int]:
    """FLOPs that two ranks repeat, of products made by hand."""
    group, cpu = dist.group.WORLD, torch.device("cpu")
    assert group is not None
    both, own = torch.ones(2, 3), torch.ones(2, 3) + group.rank()
    cases: dict[str, list[tuple[int, Any]]] = {
        "nothing": [],
        "alike": [(1, (both, both)), (10, (both,))],
        "own": [(1, (both, own)), (10, (own, both))],
        "mixed": [(1, (both, own)), (10, (both, both)), (100, ((torch.ones(3) + group.rank(), both), {"x": both}))],
        "alike in sum": [(1, (torch.arange(1.0, 7).view(2, 3).roll(group.rank(), 1), both))],
        "last bits": [(1, (both * (1 + 1e-7 * group.rank()), both))],
        "zeros": [(1, (both, 0 * own))],
        "not finite": [(1, (both, both * float("inf"))), (10, (both, both * float("nan")))],
        "another number": [(1, (both, both))] * (1 + group.rank()),
        "other flops": [(1 + group.rank(), (both, both))],
        "vectors": [(1, (both[0], both[0]))],
        "half": [(1, (both.half(), both.bfloat16()))],
    }
    found = {}
    for name, products in cases.items():
        work = RepeatedWork()
        for flops, args in products:
            work.note(flops, args)
        found[name] = work.flops(group, cpu)
        assert work.flops(group, cpu) == 0, "what was noted is forgotten"
    return found


def experts(sequence: bool) -> dict[str, int]:
    """FLOPs of a step of a Mixtral, whose experts stay whole: undivided, and by this rank."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    model = MixtralForCausalLM(MixtralConfig(**sizes, **heads))
    ids = torch.randint(64, (2, 16))
    with FlopCounter() as whole:
        model(ids, labels=ids).loss.backward()
    model.zero_grad()
    groups = ParallelGroups.build("cpu", tensor=2)
    parallel = apply_tensor_parallel(model, groups.tensor_mesh, sequence_parallel=sequence)
    work = RepeatedWork()
    with FlopCounter(note=work.note) as own:
        with parallel.step():
            loss = model(ids, labels=ids).loss
        loss.backward()
    parallel.remove()
    repeated = work.flops(groups.group("tensor"), torch.device("cpu"))
    return {"whole": whole.model_flops, "own": own.model_flops, "repeated": repeated}
