"""The models of Korthikanti et al. 2022, counted here: what the layers of a first pipeline stage keep for backward.

The paper's models (arXiv 2205.05198, table 3) run on tensors that have shapes and no memory, each layer over 8 ranks
of a process group that sends nothing (torch's `fake` one): real modules, the real division of tensors, the real
recompute. A ledger counts what is alive after forward; the bytes of a layer are the difference of models of two layers
and of one. How many microbatches a rank holds follows from the order of its schedule, action by action.

    first stage   bytes of a layer x layers of a chunk x chunk-microbatches alive, against equation 5 of the paper
    175B          every stage of the pipeline, its layers run whole as often as microbatches are under way there:
                  12 layers (1F1B), or the 4 of each chunk (interleaved), against the formula

The paper gives formulas and percentages, no GiB; its formulas leave out the means and deviations of norms (at most
0.02 % here).

Run: .venv/bin/python bench/paper_models.py
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from common import report
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_recompute.cost import in_flight
from lightning_recompute.fake_model import on_fake_tensors
from lightning_recompute.gpt import GPT
from lightning_recompute.groups import ParallelGroups
from lightning_recompute.ledger import Ledger
from lightning_recompute.paper_formulas import PAPER_MODELS, LayerShape, PaperModel, Recompute, layer_bytes
from lightning_recompute.policy import RecomputePolicy
from lightning_recompute.recompute import apply_recompute
from lightning_recompute.tensor_parallel import apply_tensor_parallel
from lightning_recompute.units import GIB

VOCABULARY = 512
"""It does not matter for layers: what stands around them cancels."""


@dataclass(frozen=True)
class Technique:
    """A column of the paper's figure 7.

    Args:
        sequence_parallel: Whether hidden states are divided along the sequence.
        recompute: What is computed again.
    """

    sequence_parallel: bool = False
    recompute: Recompute = "none"

    @property
    def policy(self) -> RecomputePolicy:
        """The words for it."""
        return RecomputePolicy(granularity=None if self.recompute == "none" else self.recompute)


TECHNIQUES = {
    "none": Technique(),
    "sequence parallel": Technique(sequence_parallel=True),
    "selective": Technique(recompute="selective"),
    "both": Technique(sequence_parallel=True, recompute="selective"),
    "full": Technique(recompute="full"),
}


@contextlib.contextmanager
def ranks(size: int) -> Iterator[DeviceMesh]:
    """The first of so many tensor-parallel ranks, which sends nothing to the others."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield ParallelGroups.build("cpu", tensor=size).mesh["tensor"]
    finally:
        dist.destroy_process_group()


def alive_bytes(
    shape: LayerShape, technique: Technique, num_layers: int, num_forwards: int, mesh: DeviceMesh
) -> list[int]:
    """What is alive on one rank after each of so many forwards of so many layers."""

    def make() -> GPT:
        return GPT(
            vocab_size=VOCABULARY,
            num_layers=num_layers,
            num_heads=shape.heads,
            hidden_size=shape.hidden,
            max_length=shape.length,
            dropout=0.1,
            attention="eager",
        )

    with on_fake_tensors(make, dtype=torch.bfloat16) as model, contextlib.ExitStack() as stack:
        with unset_fake_temporarily():  # the seeds of ranks are numbers, not shapes
            tensor = apply_tensor_parallel(model, mesh, sequence_parallel=technique.sequence_parallel)
        if technique.policy.granularity is not None:
            stack.enter_context(apply_recompute(model, technique.policy))
        ids = torch.zeros(shape.rows, shape.length, dtype=torch.long)
        with Ledger("cpu", fake=True) as ledger:
            before = ledger.live_bytes
            outputs, alive = [], []
            for _ in range(num_forwards):
                with tensor.step():
                    outputs.append(model.divided_logits(ids))
                alive.append(ledger.live_bytes - before)
            return alive


def held_by_layers(
    shape: LayerShape, technique: Technique, mesh: DeviceMesh, num_layers: int = 1, num_forwards: int = 1
) -> list[int]:
    """What so many layers hold after each of so many forwards, without what stands around them."""
    fewer, more = (alive_bytes(shape, technique, count, num_forwards, mesh) for count in (1, num_layers + 1))
    return [all_of_them - one for one, all_of_them in zip(fewer, more, strict=True)]


def stages_table(model: PaperModel, mesh: DeviceMesh) -> tuple[Table, float]:
    """Every stage of a model under both schedules, profiled whole; and the worst error in percent."""
    technique = TECHNIQUES["both"]
    each = layer_bytes(model.shape, sequence_parallel=True, recompute="selective")
    table = Table("stage", "1F1B alive", "counted, GiB", "formula", "interleaved alive", "counted, GiB", "formula")
    table.title = f"All stages of the {model.name}: sequence parallel and selective"
    table.box = SIMPLE_HEAD
    worst = 0.0
    cells = [[str(stage)] for stage in range(model.pipeline)]
    for schedule, chunks in (("1f1b", 1), ("interleaved-1f1b", model.chunks)):
        alive = in_flight(schedule, model.pipeline, model.num_microbatches, chunks)
        num_layers = model.num_layers // model.pipeline // chunks
        held = held_by_layers(model.shape, technique, mesh, num_layers, max(alive))
        for stage, number in enumerate(alive):
            # rank r of 1F1B holds p - r microbatches (section 4.2.3); interleaved: arXiv 2104.04473, section 2.2
            ahead = model.pipeline - 1 - stage
            due = each * num_layers * (ahead + 1 if chunks == 1 else (chunks - 1) * model.pipeline + 2 * ahead + 1)
            counted = held[number - 1]
            worst = max(worst, 100 * abs(counted / due - 1))
            cells[stage] += [str(number), f"{counted / GIB:.3f}", f"{due / GIB:.3f}"]
    for row in cells:
        table.add_row(*row)
    return table, worst


def main() -> None:
    torch.set_num_threads(1)
    table = Table("model", "alive", "factor", *TECHNIQUES, box=SIMPLE_HEAD)
    table.title = "First stage, GiB: counted (paper's formula)"
    worst, factors = 0.0, {}
    with ranks(PAPER_MODELS[0].shape.tensor) as mesh:
        for model in PAPER_MODELS:
            alive = in_flight(model.schedule, model.pipeline, model.num_microbatches, model.chunks)[0]
            factor = alive / (model.chunks * model.pipeline)
            if model.chunks > 1:
                factors[model.name] = round(factor, 3)
            layers = model.num_layers // (model.pipeline * model.chunks)
            cells = []
            for technique in TECHNIQUES.values():
                counted = held_by_layers(model.shape, technique, mesh)[0] * layers * alive
                due = model.first_stage_bytes(
                    sequence_parallel=technique.sequence_parallel, recompute=technique.recompute
                )
                worst = max(worst, 100 * abs(counted / float(due) - 1))
                cells.append(f"{counted / GIB:.2f} ({float(due) / GIB:.2f})")
            table.add_row(model.name, str(alive), f"{factor:.3f}", *cells)
        start = time.perf_counter()
        stages, worst_of_stages = stages_table(PAPER_MODELS[1], mesh)
        seconds = time.perf_counter() - start
    figures = {
        "worst_error_pct": round(max(worst, worst_of_stages), 4),
        "interleave_factors": factors,
        "seconds_175b": round(seconds, 1),
    }
    notes = [
        "Alive: chunk-microbatches of the first rank when its first backward starts, from the schedule's order.",
        "Layers on one of 8 tensor-parallel ranks, b 1 (22B: 4), s 2048, bfloat16, dropout 0.1, eager attention.",
    ]
    report("paper_models", [table, stages], figures, notes)


if __name__ == "__main__":
    main()
