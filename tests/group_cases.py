"""Training steps of a GPT in groups of ranks, each compared with the same step in one process."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_recompute.gpt import GPT
from lightning_recompute.groups import ParallelGroups
from lightning_recompute.parallel import ParallelModule, ParallelSettings
from lightning_recompute.plan import RecomputePlan
from lightning_recompute.recompute import apply_recompute
from lightning_recompute.transformer import Dropout
from lightning_recompute.vocabulary import cross_entropy

NUM_LAYERS = 3
VOCABULARY = 32
SMALL: dict[str, Any] = {
    "num_layers": NUM_LAYERS,
    "hidden_size": 16,
    "num_heads": 4,
    "vocab_size": VOCABULARY,
    "max_length": 8,
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor": 2},
    "tp2 sp": {"tensor": 2, "sequence": True},
    "dp2 shard": {"data": "shard"},
    "tp2 x dp2": {"tensor": 2},
    "tp2 sp x dp2": {"tensor": 2, "sequence": True},
    "tp2 x dp2 shard": {"tensor": 2, "data": "shard"},
    "tp2 sp x dp2 shard": {"tensor": 2, "sequence": True, "data": "shard"},
}


def join_processes() -> None:
    """Meet the processes that `in_ranks` started."""
    dist.init_process_group("gloo", rank=int(os.environ["LOCAL_RANK"]), world_size=int(os.environ["WORLD_SIZE"]))


def tiny_gpt(dtype: torch.dtype = torch.float64, seed: int = 0, **options: Any) -> GPT:
    torch.manual_seed(seed)
    return GPT(**SMALL | options).to(dtype)


def next_token_loss(model: GPT, tokens: Tensor) -> Tensor:
    return cross_entropy(model.divided_logits(tokens[:, :-1]), tokens[:, 1:])


def some_tokens(rows: int = 4) -> Tensor:
    return torch.randint(VOCABULARY, (rows, 9), generator=torch.Generator().manual_seed(1))


def units_of(blocks: list[nn.Module], plan: RecomputePlan) -> list[list[nn.Module]]:
    """Blocks that are sharded together."""
    return [blocks[segment.start : segment.stop] for segment in plan.segments]


@dataclass
class Step:
    """What one training step gave.

    Args:
        loss: The loss.
        gradients: By name, whole.
        rng: State of the default generator afterwards.
    """

    loss: float
    gradients: dict[str, Tensor]
    rng: Tensor = field(repr=False)


def whole(tensor: Any) -> Tensor:
    result: Tensor = (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()
    return result


def step_alone(model: nn.Module, loss_of: Callable[[], Tensor]) -> Step:
    """One step in this process, which leaves no gradients."""
    torch.manual_seed(3)
    loss = loss_of()
    loss.backward()
    rng = torch.get_rng_state()
    gradients = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return Step(float(loss.detach()), gradients, rng)


def step_in_groups(
    model: nn.Module,
    loss_of: Callable[[Tensor], Tensor],
    tokens: Tensor,
    layout: str,
    plan: RecomputePlan | None,
    blocks: list[nn.Module],
    plan_of_tensors: dict[str, str] | None = None,
) -> Step:
    """One step of the module that all ranks share; the module is left with distributed parameters."""
    settings = ParallelSettings(**LAYOUTS[layout], plan=plan_of_tensors)
    groups = ParallelGroups.build("cpu", tensor=settings.tensor)
    torch.manual_seed(3)
    parallel = ParallelModule(model, groups, settings)
    parallel.divide()
    handle = apply_recompute(model, plan) if plan is not None else None
    parallel.spread([[block] for block in blocks] if plan is None else units_of(blocks, plan))
    torch.manual_seed(3)
    rows = len(tokens) // groups.size("data")
    mine = tokens[groups.rank("data") * rows :][:rows]
    loss = parallel.run(loss_of, mine)
    parallel.before_backward(loss)
    loss.backward()
    parallel.after_backward()
    rng = torch.get_rng_state()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    gradients = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    if handle is not None:
        handle.remove()
    parallel.remove()
    return Step(float(mean) / dist.get_world_size(), gradients, rng)


def difference(found: Step, due: Step) -> float:
    """The largest difference of any gradient, over the largest gradient; of the loss likewise."""
    assert found.gradients.keys() == due.gradients.keys()
    largest = max(float(gradient.abs().max()) for gradient in due.gradients.values())
    worst = max(float((found.gradients[name] - due.gradients[name]).abs().max()) for name in due.gradients)
    return max(worst / largest, abs(found.loss - due.loss) / abs(due.loss))


class WholeMask(nn.Module):
    """Dropout whose mask depends on the place in the model alone: each rank cuts its part of the whole one.

    Args:
        site: Its number.
        shapes: Filled in one process: shape of what each site is given.
        place: Rank and number of tensor-parallel ranks, and of data-parallel ones.
    """

    def __init__(self, site: int, shapes: dict[int, torch.Size], place: dict[str, tuple[int, int]]) -> None:
        super().__init__()
        self.site, self.shapes, self.place = site, shapes, place
        self.p = 0.25

    def forward(self, x: Tensor) -> Tensor:
        if not self.place:
            self.shapes[self.site] = x.shape
        shape = self.shapes[self.site]
        mask = torch.rand(shape, generator=torch.Generator().manual_seed(self.site), dtype=x.dtype) > self.p
        if self.place:
            rank, size = self.place["data"]
            mask = mask.tensor_split(size)[rank]
            rank, size = self.place["tensor"]
            cut = [dim for dim in range(x.ndim) if x.shape[dim] != mask.shape[dim]]
            assert len(cut) <= 1
            mask = mask.tensor_split(size, cut[0])[rank] if cut else mask
        return x * mask / (1 - self.p)


def with_whole_masks(model: GPT, shapes: dict[int, torch.Size], place: dict[str, tuple[int, int]]) -> GPT:
    """The model, its dropouts exchanged."""
    sites = [(name, part) for name, part in model.named_modules() if isinstance(part, Dropout)]
    for site, (name, _) in enumerate(sites):
        model.set_submodule(name, WholeMask(site, shapes, place))
    return model
