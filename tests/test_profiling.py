"""The predicted peak of a step is what the allocator counts in it, and profiling leaves no trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from models import MODELS
from parity import seeded
from plans import PLANS, PlanBuilder, tiled
from real_steps import measured_peak
from test_block_cost import PostNorm, Residual
from test_capture import Model, state_of
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from toys import Block, Stack, rows, square_loss, stack

from lightning_recompute.blocks import find_blocks
from lightning_recompute.plan import Full, Keep, RecomputePlan, SaveOps, Segment, Selective
from lightning_recompute.profiling import SCALARS_BYTES, Profile, profile_step

NORMS = Selective(("norm",))
FREED: dict[str, PlanBuilder] = {
    "save-matmuls": tiled((1, SaveOps(("matmul",)))),
    "norms": tiled((1, NORMS)),
    "norms-and-more": tiled((1, NORMS), (1, Selective(("norm", "act"))), (1, Keep())),
    "last-ones": tiled((1, Keep()), (1, Full())),
}
SOME = [PLANS[name] for name in ("none", "uniform-1", "uniform-2")] + [FREED["save-matmuls"], FREED["norms-and-more"]]


def profiled(module: nn.Module, run: Callable[[], object], **options: Any) -> Profile:
    return profile_step(module, run, find_blocks(module), **options)


def assert_foretold(
    module: nn.Module,
    run: Callable[[], Tensor],
    plans: Sequence[RecomputePlan],
    optimizer: Optimizer,
    batch: Any = None,
    accumulate: int = 1,
) -> Profile:
    """Of each plan nothing is missing, and hardly more is foretold than the scalars for which there is room."""
    profile = profiled(module, run, optimizers=[optimizer], batch=batch, accumulating=accumulate > 1)
    errors = {}
    for plan in plans:
        measured = measured_peak(module, run, plan, optimizers=[optimizer], batch=batch, accumulate=accumulate)
        errors[str(plan)] = profile.peak_bytes(plan) - measured
    assert {plan: error for plan, error in errors.items() if not 0 <= error <= 1.5 * SCALARS_BYTES} == {}
    return profile


def of_model(name: str, precision: str, accumulate: int, builders: Sequence[PlanBuilder]) -> None:
    case = MODELS[name]
    module, data = seeded(case.build), case.batch()

    def run() -> Tensor:
        # as Lightning enters it: casts of weights are not kept
        with torch.autocast("cpu", torch.bfloat16, enabled=precision != "32", cache_enabled=False):
            return case.loss(module, data)

    optimizer = AdamW(module.parameters()) if accumulate == 1 else SGD(module.parameters(), lr=0.1)
    assert_foretold(module, run, [build(case.chunks) for build in builders], optimizer, data, accumulate)


def test_the_peak_is_the_allocators() -> None:
    of_model("gpt2-sdpa", "bf16-mixed", 2, SOME)


def test_the_peak_of_encoder_and_decoder() -> None:
    of_model("t5-sdpa", "32", 1, [PLANS["none"], PLANS["uniform-2"]])


@pytest.mark.long
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", [name for name in MODELS if not name.startswith("t5")])
def test_the_peak_of_every_model(name: str, accumulate: int) -> None:
    of_model(name, "32", accumulate, [*PLANS.values(), *FREED.values()])


# ---- one thing each

WIDE = 64


class Wide(nn.Module):
    """Embeds 64 rows, runs its blocks one after the other, and sums."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(blocks)
        self.x = torch.randn(WIDE, 8, 8)

    def hidden(self) -> Tensor:
        hidden = self.embed(self.x)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden

    def forward(self) -> Tensor:
        return self.hidden().square().mean()


def one_by_one(num_blocks: int) -> list[RecomputePlan]:
    return [build([num_blocks]) for build in (PLANS["none"], PLANS["uniform-1"], PLANS["every-other"])]


def foretold(model: nn.Module, plans: Sequence[RecomputePlan], accumulate: int = 1) -> Profile:
    return assert_foretold(model, model, plans, AdamW(model.parameters()), accumulate=accumulate)


@pytest.mark.parametrize("block", [Residual, PostNorm])
def test_statistics_and_freed_outputs(block: type[nn.Module]) -> None:
    plans = one_by_one(3)
    if block is not Residual:
        plans += [FREED["norms"]([3]), FREED["norms-and-more"]([3])]
    foretold(seeded(lambda: Wide(block(), block(), block())), plans)


class Sized(Block):
    """A block of some width inside."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, times * 8), nn.Linear(times * 8, 8)


class Twice(Wide):
    """Goes through its blocks two times."""

    def hidden(self) -> Tensor:
        hidden = super().hidden()
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


@pytest.mark.parametrize("accumulate", [1, 2])
def test_blocks_called_twice(accumulate: int) -> None:
    profile = foretold(seeded(lambda: Twice(Block(), Block())), one_by_one(2), accumulate)
    assert [profile.calls_of(block) for block in range(2)] == [[0, 2], [1, 3]]
    assert [profile.block_of(call) for call in range(4)] == [0, 1, 0, 1]


def test_one_block_in_two_places() -> None:
    block = seeded(Block)
    model = seeded(lambda: Wide(block, Block(), block))
    before = list(map(id, model.parameters()))
    foretold(model, one_by_one(3)[:2])
    # torch's own functional_call would leave stand-ins there
    assert list(map(id, model.parameters())) == before


def test_tied_weights() -> None:
    model = seeded(lambda: Wide(PostNorm(), PostNorm()))
    model.blocks[1].linear.weight = model.embed.weight  # type: ignore[union-attr]
    before = list(map(id, model.parameters()))
    profiled(model, model)
    assert list(map(id, model.parameters())) == before
    assert model.blocks[1].linear.weight is model.embed.weight  # type: ignore[union-attr]


def test_a_frozen_prefix() -> None:
    model = seeded(lambda: Wide(Block(), Block(), Block()))
    for part in (model.embed, model.blocks[0]):  # type: ignore[union-attr]
        part.requires_grad_(False)
    profile = foretold(model, one_by_one(3))
    assert profile.calls_of(0) == []


def test_blocks_of_several_sizes() -> None:
    profile = foretold(seeded(lambda: Wide(Sized(1), Sized(6), Sized(2))), [PLANS["uniform-2"]([3])])
    assert len(profile.capture.kinds) == 3


def test_keys_and_values_that_later_units_remember() -> None:
    """What a kept block puts into a cache lives on in the frames of those after it, though the model drops it."""
    case = MODELS["llama-sdpa"]
    module, data = seeded(case.build), case.batch()
    optimizer = SGD(module.parameters(), lr=0.1)
    keep_first = tiled((1, Keep()), (1, SaveOps()), (2, Full()))
    assert_foretold(module, lambda: case.loss(module, data), [keep_first([4])], optimizer, data, 2)
    profile = profiled(module, lambda: case.loss(module, data))
    kept, after = (profile.call_costs(build([4]))[0] for build in (PLANS["none"], keep_first))
    assert kept.cached_bytes - after.cached_bytes == after.inner_bytes - kept.inner_bytes > 0


# ---- the parts


def test_statics() -> None:
    model = seeded(stack)
    optimizer = AdamW(model.parameters())
    batch = {"x": rows(), "same": [rows()[:0]], "weight": model.head.weight.detach(), "name": "text"}
    statics = profiled(model, lambda: square_loss(model), optimizers=[optimizer], batch=batch, other_bytes=7).statics
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    assert statics.parameters_bytes == num_bytes
    assert statics.batch_bytes == rows().nbytes + rows().nbytes  # a view holds all of its memory; a weight is none
    assert statics.optimizer_bytes == 2 * num_bytes + 4 * len(list(model.parameters()))
    assert statics.other_bytes == SCALARS_BYTES + 7
    assert statics.num_bytes == sum(vars(statics).values())


def test_the_optimizers_step_may_set_the_peak() -> None:
    net = Wide(Sized(64), Sized(64))
    net.x = net.x[:1, :1].clone()
    profile = profiled(net, net, optimizers=[AdamW(net.parameters(), foreach=True)])
    plan = PLANS["none"]([2])
    assert profile.optimizer_bytes == profile.skeleton.gradient_bytes + profile.optimizer.transient_bytes
    assert profile.peak_bytes(plan) == profile.statics.num_bytes + profile.optimizer_bytes


def test_units_are_calls_that_are_made_together() -> None:
    profile = profiled(twice := seeded(lambda: Twice(Block(), Block(), Block())), twice)
    plan = RecomputePlan((Segment(0, 2, Full()), Segment(2, 3, Full())))
    assert profile.units(plan) == [(0, 1), (3, 4)]
    assert (
        profile.actions(RecomputePlan((Segment(0, 1, Keep()), Segment(1, 3, Full())))) == [Keep(), Full(), Full()] * 2
    )


def test_time_is_measured_once() -> None:
    model = seeded(stack)
    profile = profiled(model, lambda: square_loss(model))
    profile.time([Keep(), Full()])
    found = [profile.seconds(call, Full()) for call in range(4)]
    profile.time([Full(), NORMS])
    assert [profile.seconds(call, Full()) for call in range(4)] == found
    assert min(found) > 0
    assert profile.flops(0, Full()) > profile.flops(0, Keep())


class Growing(Stack):
    """Runs one block more each time."""

    depth = 0

    def hidden(self, x: Tensor) -> Tensor:
        type(self).depth += 1
        for block in self.blocks[: self.depth]:
            x = block(x)
        return x


def test_steps_that_differ_cannot_be_planned() -> None:
    model = seeded(lambda: Growing(Block() for _ in range(4)))
    with pytest.raises(ValueError, match=r"calls 1 blocks in one forward and 2 in the next.*give a plan"):
        profiled(model, lambda: square_loss(model))


def test_a_step_that_runs_backward_itself() -> None:
    """Manual optimization: gradients of the step before count to its end, for want of knowing when they are dropped."""
    model = seeded(lambda: Wide(Block(), Block()))

    def run() -> None:
        model().backward()

    found, due = (profiled(model, each) for each in (run, model))
    for plan in one_by_one(2):
        assert 0 <= found.peak_bytes(plan) - due.peak_bytes(plan) <= found.skeleton.gradient_bytes


def test_no_trace() -> None:
    model = Model()
    data = torch.randn(4, 8)
    optimizer = AdamW(model.parameters())
    model(data).sum().backward()
    optimizer.step()
    model.blocks[1].eval()
    before = state_of(model), optimizer.state_dict(), [p.data_ptr() for p in model.parameters()]
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    profile = profiled(model, lambda: model(data).sum(), optimizers=[optimizer], batch=data, accumulating=True)
    for plan in one_by_one(3):
        profile.peak_bytes(plan)
    profile.time([Keep(), Full()])
    profile.flops(0, Full())
    assert state_of(model) == before[0]
    torch.testing.assert_close(optimizer.state_dict(), before[1], rtol=0, atol=0)
    assert [parameter.data_ptr() for parameter in model.parameters()] == before[2]
    torch.testing.assert_close(
        [parameter.grad for parameter in model.parameters() if parameter.grad is not None], gradients, rtol=0, atol=0
    )
