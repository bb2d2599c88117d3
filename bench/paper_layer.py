"""Bytes that one transformer layer keeps for backward, counted, against the formulas of Korthikanti et al. 2022.

The paper (arXiv 2205.05198, table 2) counts 16-bit activations with dropout. Here the blocks of our GPT run in bfloat16
with eager attention on two processes that share each layer (t = 2); a counting allocator sees every byte. The bytes of
a layer are the difference of models of one and of two layers, so that what stands outside of layers cancels.

What the paper leaves out is named and computed, never fitted:
    norms:   mean and reciprocal deviation of each row, of both LayerNorms;
    √d:      the number that the queries are divided by, which autograd saves with the division (8 bytes);
    random:  states of the generators, where dropout is to be made again (two of them under tensor parallelism);
    digest:  8 bytes beside an input that is kept in parts, by which the ranks see that they agree on it.

Run: .venv/bin/python bench/paper_layer.py
"""

from __future__ import annotations

import contextlib
import gc
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import report
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_recompute.gpt import GPT
from lightning_recompute.groups import ParallelGroups
from lightning_recompute.memory import Meter, open_meter
from lightning_recompute.paper_formulas import LayerShape, per_sbh
from lightning_recompute.policy import RecomputePolicy
from lightning_recompute.recompute import apply_recompute
from lightning_recompute.tensor_parallel import apply_tensor_parallel
from lightning_recompute.vocabulary import cross_entropy

NUM_RANKS = 2
VOCABULARY = 64
DTYPE = torch.bfloat16


SIZES = (
    LayerShape(length=64, rows=2, hidden=128, heads=4),
    LayerShape(length=256, rows=1, hidden=96, heads=6),
    LayerShape(length=512, rows=4, hidden=512, heads=8),
)
"""The last is that of the other benches, and the one whose ratios are reported."""


@dataclass(frozen=True)
class Variant:
    """A row of the paper's table.

    Args:
        formula: As the paper writes it.
        per_sbh: Bytes over sbh, from 5as/h and t.
        tensor: Whether ranks share the layer.
        sequence: Whether hidden states are divided along the sequence.
        policy: What is recomputed.
    """

    formula: str
    per_sbh: Callable[[Fraction, int], Fraction]
    tensor: bool = True
    sequence: bool = False
    policy: RecomputePolicy = field(default_factory=lambda: RecomputePolicy(granularity=None))

    @property
    def keeps_norms(self) -> bool:
        """Whether the norms' statistics outlive forward."""
        return self.policy.granularity != "full"

    @property
    def t(self) -> int:
        """Ranks that share the layer."""
        return NUM_RANKS if self.tensor else 1

    def due(self, sizes: LayerShape) -> int:
        """The paper's bytes of a layer."""
        found = self.per_sbh(sizes.scores, self.t) * sizes.sbh
        assert found.denominator == 1, "sizes that ranks divide"
        return int(found)

    def extras(self, sizes: LayerShape) -> dict[str, int]:
        """Bytes of a layer that the paper leaves out, by name."""
        statistics = 2 * 2 * sizes.length * sizes.rows * statistics_itemsize() // (self.t if self.sequence else 1)
        states = (2 if self.tensor else 1) * torch.get_rng_state().nbytes
        return {
            "norms": statistics if self.keeps_norms else 0,
            "√d": torch.float64.itemsize,
            "random": 0 if self.policy.granularity is None else states,
            "digest": torch.int64.itemsize if self.policy.distribute_saved_activations else 0,
        }


_SELECTIVE = RecomputePolicy(granularity="selective")
VARIANTS = {
    "none": Variant("34 + 5as/h", lambda scores, _: per_sbh(scores), tensor=False),
    "tp": Variant("10 + 24/t + 5as/ht", per_sbh),
    "tp_sp": Variant("(34 + 5as/h)/t", partial(per_sbh, sequence_parallel=True), sequence=True),
    "tp_selective": Variant("10 + 24/t", partial(per_sbh, recompute="selective"), policy=_SELECTIVE),
    "tp_sp_selective": Variant(
        "34/t", partial(per_sbh, sequence_parallel=True, recompute="selective"), sequence=True, policy=_SELECTIVE
    ),
    "full": Variant("2", partial(per_sbh, recompute="full"), policy=RecomputePolicy()),
    "full_distributed": Variant(
        "2/t",
        partial(per_sbh, recompute="full", distributed=True),
        policy=RecomputePolicy(distribute_saved_activations=True),
    ),
}


def statistics_itemsize() -> int:
    """Bytes of a LayerNorm's mean in the model's precision; CUDA keeps it in float32."""
    row, weight = torch.zeros(1, 2, dtype=DTYPE), torch.ones(2, dtype=DTYPE)
    return torch.native_layer_norm(row, [2], weight, None, 1e-5)[1].element_size()


# ---- counting, on each of two processes


@dataclass(frozen=True)
class StepBytes:
    """What a step took beyond what was there before.

    Attributes:
        held: Live between forward and backward.
        transient: The most that backward had beside them.
        left: Live after backward.
    """

    held: int
    transient: int
    left: int


def settled(meter: Meter) -> int:
    """Live bytes; gloo's threads let go of a tensor a moment after its collective."""
    lowest, unchanged = meter.live_bytes, 0
    while unchanged < 5:
        time.sleep(0.01)
        unchanged = unchanged + 1 if meter.live_bytes >= lowest else 0
        lowest = min(lowest, meter.live_bytes)
    return lowest


def count_step(loss: Callable[[], Tensor], parameters: list[nn.Parameter]) -> StepBytes:
    """Run a forward and backward pass, with gradients allocated before it, and count."""
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    gc.collect()
    gradients = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in parameters]
    with contextlib.closing(open_meter("cpu")) as meter:
        meter.count(gradient for gradient in gradients if gradient is not None)
        before = settled(meter)
        result = loss()
        held = settled(meter)
        meter.reset_peak()
        result.backward()
        peak = meter.peak_bytes
        del result
        return StepBytes(held - before, peak - held, settled(meter) - before)


@contextlib.contextmanager
def divided(model: nn.Module, groups: ParallelGroups, variant: Variant) -> Iterator[Any]:
    """A model under a variant; gives what a step is to be run within."""
    with contextlib.ExitStack() as stack:
        step: Any = contextlib.nullcontext
        if variant.tensor:
            tensor = apply_tensor_parallel(model, groups.tensor_mesh, sequence_parallel=variant.sequence)
            stack.callback(tensor.remove)
            step = tensor.step
        if variant.policy.granularity is not None:
            group = groups.group("tensor") if variant.policy.distribute_saved_activations else None
            stack.enter_context(apply_recompute(model, variant.policy, tensor_group=group))
        yield step


def count(variant: Variant, sizes: LayerShape, num_layers: int, groups: ParallelGroups, times: int = 1) -> StepBytes:
    """Bytes of a step of a GPT, the first one not counted.

    Args:
        variant: How it is run.
        sizes: Of its layers and the batch.
        num_layers: How many.
        groups: The ranks.
        times: How many steps are counted: the least of each figure is taken.
    """
    torch.manual_seed(0)
    model = GPT(
        vocab_size=VOCABULARY,
        num_layers=num_layers,
        num_heads=sizes.heads,
        hidden_size=sizes.hidden,
        max_length=sizes.length,
        dropout=0.1,
        attention="eager",
    ).to(DTYPE)
    ids = torch.randint(VOCABULARY, (sizes.rows, sizes.length + 1))
    with divided(model, groups, variant) as step:

        def loss() -> Tensor:
            with step():
                return cross_entropy(model.divided_logits(ids[:, :-1]), ids[:, 1:])

        loss().backward()
        steps = [count_step(loss, list(model.parameters())) for _ in range(times)]
    return StepBytes(*(min(getattr(one, name) for one in steps) for name in ("held", "transient", "left")))


def layer_bytes(variant: Variant, sizes: LayerShape, groups: ParallelGroups) -> int:
    """What one layer keeps for backward on this rank."""
    one, two = (count(variant, sizes, num_layers, groups).held for num_layers in (1, 2))
    return two - one


# ---- the table


def _worker(rank: int, folder: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    gc.freeze()  # what the libraries hold need not be searched at every step
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=NUM_RANKS)
    try:
        groups = ParallelGroups.build("cpu", tensor=NUM_RANKS)
        found = [{name: layer_bytes(variant, sizes, groups) for name, variant in VARIANTS.items()} for sizes in SIZES]
        torch.save(found, f"{folder}/{rank}")
    finally:
        dist.destroy_process_group()


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_worker, (folder,), NUM_RANKS)
        ranks = [torch.load(Path(folder) / str(rank)) for rank in range(NUM_RANKS)]
    tables, figures = [], {}
    for index, sizes in enumerate(SIZES):
        left_out = VARIANTS["none"].extras(sizes)
        table = Table("bytes / sbh", "paper", "counted", *left_out, "ratio", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.title = f"Bytes of a layer: s {sizes.length}, b {sizes.rows}, h {sizes.hidden}, a {sizes.heads}, t 2"
        for column in table.columns[1:]:
            column.justify = "right"
        for name, variant in VARIANTS.items():
            counted = max(rank[index][name] for rank in ranks)
            due, extras = variant.due(sizes), variant.extras(sizes)
            ratio = (counted - sum(extras.values())) / due
            figures[name] = round(ratio, 6)
            cells = (f"{number:,}" for number in (due, counted, *extras.values()))
            table.add_row(f"{name}: {variant.formula}", *cells, f"{ratio:.4f}")
        tables.append(table)
    notes = [
        "bfloat16, dropout 0.1, eager attention, t 2 (none: 1); of both ranks the larger.",
        "Ratio: counted, less norms, √d, random and digest (which the paper leaves out), over the paper's.",
        "Ratios below are those of the last table.",
    ]
    report("paper_layer", tables, {"ratios": figures}, notes)


if __name__ == "__main__":
    main()
