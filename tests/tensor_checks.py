"""What two or four ranks do for test_tensor_parallel.py: every check in one group of processes."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from group_cases import (
    LAYOUTS,
    NUM_LAYERS,
    Step,
    difference,
    join_processes,
    next_token_loss,
    some_tokens,
    step_alone,
    step_in_groups,
    tiny_gpt,
    with_whole_masks,
)
from plans import PLANS
from selective_plans import SELECTIVE_PLANS
from torch import nn

from lightning_recompute.groups import ParallelGroups
from lightning_recompute.parallel import ParallelModule, ParallelSettings
from lightning_recompute.plan import RecomputePlan
from lightning_recompute.recompute import apply_recompute
from lightning_recompute.transformer import Dropout

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gpt2": {"tied_head": True, "attention": "eager"},
    "llama": {
        "positions": "rotary",
        "activation": "swiglu",
        "norm": "rmsnorm",
        "bias": False,
        "num_kv_heads": 2,
    },
}


def layouts(world: int) -> list[str]:
    return [name for name in LAYOUTS if ("x" in name) == (world == 4)]


def all_plans() -> dict[str, RecomputePlan]:
    builders = PLANS | {name: build for name, build in SELECTIVE_PLANS.items() if "moe" not in name}
    return {name: build([NUM_LAYERS]) for name, build in builders.items()}


def pairs(every: int) -> Iterator[tuple[str, str, RecomputePlan]]:
    """Each layout with each plan, or so that each layout meets one in `every`, and together they meet all."""
    for row, layout in enumerate(layouts(dist.get_world_size())):
        for column, (name, plan) in enumerate(all_plans().items()):
            if (row + column) % every == 0:
                yield layout, name, plan


def parity(dtype: torch.dtype, options: dict[str, Any], every: int) -> dict[str, float]:
    """For each layout and plan, how far a step is from one process."""
    found = {}
    tokens = some_tokens()
    alone = tiny_gpt(dtype, **options)
    due = step_alone(alone, lambda: next_token_loss(alone, tokens))
    for layout, name, plan in pairs(every):
        if options.get("attention") == "eager" or name != "save-softmax":
            model = tiny_gpt(dtype, **options)
            loss_of = functools.partial(next_token_loss, model)
            step = step_in_groups(model, loss_of, tokens, layout, plan, list(model.blocks))
            found[f"{layout} | {name}"] = difference(step, due)
    return found


def masks_of_the_whole() -> dict[str, float]:
    """With dropout whose masks are those of one process: the same numbers."""
    found = {}
    tokens = some_tokens()
    shapes: dict[int, torch.Size] = {}
    alone = with_whole_masks(tiny_gpt(attention="eager", dropout=0.25), shapes, {})
    due = step_alone(alone, lambda: next_token_loss(alone, tokens))
    for layout in layouts(dist.get_world_size()):
        groups = ParallelGroups.build("cpu", tensor=LAYOUTS[layout].get("tensor", 1))
        place = {axis: (groups.rank(axis), groups.size(axis)) for axis in ("data", "tensor")}
        for plan in (None, all_plans()["uniform-2"]):
            model = with_whole_masks(tiny_gpt(attention="eager", dropout=0.25), shapes, place)
            loss_of = functools.partial(next_token_loss, model)
            step = step_in_groups(model, loss_of, tokens, layout, plan, list(model.blocks))
            found[f"{layout} | {plan is not None}"] = difference(step, due)
    return found


def streams(every: int) -> dict[str, bool]:
    """With torch's own dropout: every plan to the bit what no recompute gives, the generator's state included."""
    found = {}
    tokens = some_tokens()
    due: dict[str, Step] = {}
    for layout, name, plan in pairs(every):
        for given in (None, plan) if layout not in due else (plan,):
            model = tiny_gpt(attention="eager", dropout=0.25)
            loss_of = functools.partial(next_token_loss, model)
            step = step_in_groups(model, loss_of, tokens, layout, given, list(model.blocks))
            without = due.setdefault(layout, step)
        found[f"{layout} | {name}"] = (
            step.loss == without.loss
            and torch.equal(step.rng, without.rng)
            and all(torch.equal(step.gradients[key], value) for key, value in without.gradients.items())
        )
    return found


def masks(sequence: bool) -> dict[str, Any]:
    """Case 49: which masks ranks share; the outputs of each dropout of a block for an input of ones."""
    model = tiny_gpt(attention="eager", dropout=0.5)
    groups = ParallelGroups.build("cpu", tensor=2)
    parallel = ParallelModule(model, groups, ParallelSettings(tensor=2, sequence=sequence))
    torch.manual_seed(10 + dist.get_rank())  # ranks that were seeded apart are brought together
    parallel.divide()
    block: Any = model.blocks[0]
    block.attn.core_attn.dropout = Recording(0.5, "attention")
    block.dropout = Recording(0.5, "residual")
    RECORDED.clear()
    with apply_recompute(model, all_plans()["uniform-1"]):
        parallel.run(next_token_loss, model, some_tokens()).backward()
    parallel.remove()
    same: dict[str, Any] = {}
    for kind, num_calls in {"attention": 1, "residual": 2}.items():
        kept = RECORDED[kind]
        everyone = [torch.empty_like(kept[0], dtype=torch.uint8) for _ in range(2)]
        dist.all_gather(everyone, kept[0].to(torch.uint8), group=groups.group("tensor"))
        same[kind] = bool(torch.equal(*everyone))
        # the replay stops within the block's last dropout
        forward, replay = kept[:num_calls], kept[num_calls:]
        same[f"{kind} again"] = all(map(torch.equal, forward, replay)) and len(replay) == 1
    same["rng"] = torch.get_rng_state()
    return same


RECORDED: dict[str, list[torch.Tensor]] = {}
"""What was dropped, in forward and in replays: not on a module, whose own lists a replay leaves alone."""


class Recording(Dropout):
    """Dropout that tells what it dropped."""

    def __init__(self, p: float, kind: str) -> None:
        super().__init__(p)
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        RECORDED.setdefault(self.kind, []).append((y != 0).detach())
        return y


class Outside(nn.Module):
    """Uses its parameters in every way a user may: its own, a child's, one of torch's modules."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.inner = nn.Linear(8, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.BatchNorm1d(8)
        self.blocks = nn.ModuleList(Divided() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.linear(x * self.scale, self.inner.weight, self.inner.bias)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        for block in self.blocks:
            x = block(x)
        return self.norm(x.transpose(1, 2)).pow(2).mean()


class Divided(nn.Module):
    """Linears straight in a block, a parameter of the block's own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.gain = nn.Parameter(torch.full((8,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        down: torch.Tensor = self.down(torch.nn.functional.gelu(self.up(x)))
        return x + self.gain * down


class Adapted(nn.Module):
    """A linear with a low-rank adapter, by the names of Hugging Face's PEFT."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, base.out_features, bias=False)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))
        return y


def adapters() -> dict[str, float]:
    """LoRA on a frozen model."""
    found = {}

    def make() -> Any:
        model: Any = tiny_gpt(attention="eager").requires_grad_(False)
        torch.manual_seed(4)
        for block in model.blocks:
            block.attn.v_proj = Adapted(block.attn.v_proj).double()
            block.attn.o_proj = Adapted(block.attn.o_proj).double()
        return model

    alone = make()
    due = step_alone(alone, lambda: next_token_loss(alone, some_tokens()))
    for layout in ("tp2", "tp2 sp"):
        for name in ("none", "uniform-1", "norm"):
            model = make()
            loss_of = functools.partial(next_token_loss, model)
            step = step_in_groups(model, loss_of, some_tokens(), layout, all_plans()[name], list(model.blocks))
            found[f"{layout} | {name}"] = difference(step, due)
    return found


def unusual() -> dict[str, float]:
    found = {}
    x = torch.randn(4, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    styles = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}

    def make() -> Outside:
        torch.manual_seed(0)
        return Outside().double()

    alone = make()
    due = step_alone(alone, lambda: alone(x))
    for layout in ("tp2", "tp2 sp"):
        for plan in (None, PLANS["uniform-1"]([2])):
            model = make()
            step = step_in_groups(model, model, x, layout, plan, list(model.blocks), styles)
            found[f"{layout} | {plan is not None}"] = difference(step, due)
    return found


def check_all(folder: Path) -> dict[str, Any]:
    """Two or four ranks."""
    join_processes()
    world = dist.get_world_size()
    found: dict[str, Any] = {
        "fp64 gpt2": parity(torch.float64, ARCHITECTURES["gpt2"], world),
        "fp64 llama": parity(torch.float64, ARCHITECTURES["llama"], 4 * world),
        "fp32 gpt2": parity(torch.float32, ARCHITECTURES["gpt2"], 4 * world),
        "whole masks": masks_of_the_whole(),
        "streams": streams(2 * world),
    }
    if world == 2:
        found |= {"masks": masks(False), "masks sp": masks(True), "unusual": unusual(), "adapters": adapters()}
    return found


def check_every_pair(folder: Path) -> dict[str, Any]:
    """The whole product."""
    join_processes()
    found: dict[str, Any] = {"streams": streams(1)}
    for name, options in ARCHITECTURES.items():
        found |= {f"fp64 {name}": parity(torch.float64, options, 1), f"fp32 {name}": parity(torch.float32, options, 1)}
    return found
