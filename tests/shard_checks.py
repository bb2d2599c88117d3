"""Run by two processes (four for the layouts): unit inputs kept in parts, against the same on the device."""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import shard_models
import torch
import torch.distributed as dist
from distributed import error_of, settle_collectives
from ledger import Ledger
from models import MODELS
from parity import backward, seeded
from plans import PLANS, tiled
from selective_plans import SELECTIVE_PLANS
from shard_harness import Found, Gathers, noting_replays, same_steps, start
from shard_models import Odd, Parallel, Skipping, Slicing, on_shards
from torch import Tensor, nn

from lightning_recompute.cpualloc import AllocatorMeter, load
from lightning_recompute.placement import DevicePlacement
from lightning_recompute.plan import Full, Selective
from lightning_recompute.recompute import apply_recompute

NUM_BLOCKS = 6
DEEP = 24
FULL = tiled((1, Full()))((NUM_BLOCKS,))
PAIRS = tiled((2, Full()))((NUM_BLOCKS,))
SELECTED = (
    "core_attn+norm+act",
    "core_attn",
    "attn+norm",
    "mlp",
    "save-matmul-pairs",
    "save-full-core",
    "pair-then-attn",
)
# ---- parity


def check_plans(group: dist.ProcessGroup) -> Found:
    """Every plan of the lists; a step is a loss with its backward, gradients add up over the steps."""
    found: Found = {}
    for plan, build in PLANS.items():
        odd = build((NUM_BLOCKS,))
        found[f"odd {plan}"] = error_of(lambda odd=odd: same_steps(lambda: Odd(NUM_BLOCKS), Odd.step, odd, group))
    models = {"llama-eager": ("uniform-1", "pair-keep"), "t5-sdpa": ("uniform-2",), "gpt-sdpa": ("uniform-3",)}
    for model, plans in models.items():
        case = MODELS[model]
        torch.manual_seed(7)
        run = backward(case.loss, case.batch())
        for plan in plans:
            value = PLANS[plan](case.chunks)
            found[f"{model} {plan}"] = error_of(lambda: same_steps(case.build, run, value, group))  # noqa: B023
        for plan in SELECTED if model == "llama-eager" else SELECTED[:1]:
            value = SELECTIVE_PLANS[plan](case.chunks)
            found[f"{model} {plan}"] = error_of(lambda: same_steps(case.build, run, value, group))  # noqa: B023
    return found


def check_habits(group: dist.ProcessGroup) -> Found:
    """What people do with graphs, on one model that is recomputed throughout."""

    def retained(model: nn.Module) -> None:
        loss = Odd.loss(model)
        loss.backward(retain_graph=True)
        loss.backward()

    def accumulated(model: nn.Module) -> None:
        losses = [Odd.loss(model, seed) for seed in (1, 2, 3)]
        for loss in losses:
            loss.backward()

    def second_order(model: nn.Module) -> None:
        gradients = torch.autograd.grad(Odd.loss(model), list(model.parameters()), create_graph=True)
        torch.stack([gradient.square().sum() for gradient in gradients]).sum().backward()

    def dropped(model: nn.Module) -> None:
        Odd.loss(model)
        Odd.step(model)

    def stopped(model: nn.Module) -> None:
        handle = model.get_submodule("blocks.3").register_forward_pre_hook(_fail)
        with contextlib.suppress(KeyError):
            Odd.loss(model)
        handle.remove()
        Odd.step(model)

    def stopped_in_backward(model: nn.Module) -> None:
        handle = model.get_parameter("blocks.3.up.weight").register_hook(_fail)
        with contextlib.suppress(KeyError):
            Odd.loss(model).backward()
        handle.remove()
        Odd.step(model)

    def partial(model: nn.Module) -> None:
        Odd.loss(model).backward(inputs=[model.get_parameter("blocks.4.up.weight")])
        Odd.step(model)

    def under_bf16(model: nn.Module) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = Odd.loss(model)
        loss.backward()

    habits = (retained, accumulated, second_order, dropped, stopped, stopped_in_backward, partial, under_bf16)
    return {
        f"{habit.__name__} {name}": error_of(lambda: same_steps(lambda: Odd(NUM_BLOCKS), habit, plan, group))  # noqa: B023
        for habit in habits
        for name, plan in {"one": FULL, "pairs": PAIRS}.items()
    }


def _fail(*_: object) -> None:
    raise KeyError


# ---- collectives


def check_counts(group: dist.ProcessGroup) -> Found:
    """One gather for each unit and backward, the one of the unit before begun first; comparing once for each unit."""
    found: Found = {}
    for name, plan in {"one": FULL, "pairs": PAIRS}.items():
        module = seeded(lambda: Odd(NUM_BLOCKS))
        second = Gathers()
        with noting_replays(module, second.log), apply_recompute(module, on_shards(plan), tensor_group=group):
            first, third = Gathers(), Gathers()
            with first.counted():
                Odd.step(module)
            second.log.clear()
            with second.counted():
                loss = Odd.loss(module)
                forward = second.num
                loss.backward(retain_graph=True)
            order = second.log[:]
            with third.counted():
                loss.backward()
        found[name] = {
            "compared": [first.compared, second.compared],
            "forward": forward,
            "gathers": [first.num, second.num, third.num],
            "order": order,
        }
    # a module that is given several tensors which no other is given
    module = seeded(lambda: Slicing(4))
    for name, plan in {"several": tiled((1, Full()))((4,)), "several, pairs": tiled((2, Full()))((4,))}.items():
        with apply_recompute(module, on_shards(plan), tensor_group=group):
            Slicing.step(module)
            with (counted := Gathers()).counted():
                Slicing.step(module)
        found[name] = counted.num
        problem = error_of(lambda: same_steps(lambda: Slicing(4), Slicing.step, plan, group))  # noqa: B023
        found[f"{name} parity"] = problem
    return found


def check_uneven_garbage(group: dist.ProcessGroup) -> Found:
    """A graph that died on one rank and not on the other: the next backward would have gathered of it."""
    found: Found = {}
    for who in range(2):

        def habit(model: nn.Module, who: int = who) -> None:
            first = Skipping.loss(model, range(3))
            if group.rank() == who:
                circle: list[Any] = [first]
                circle.append(circle)
            del first
            Skipping.loss(model, range(3, NUM_BLOCKS)).backward()

        gc.disable()
        try:
            found[f"kept on {who}"] = error_of(lambda: same_steps(lambda: Skipping(NUM_BLOCKS), habit, FULL, group))
        finally:
            gc.enable()
            gc.collect()
    return found


# ---- what is the same on all ranks


class Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.seen: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append((record.levelname, record.getMessage()))


def check_tensor_parallel(group: dist.ProcessGroup) -> Found:
    """Heads over the ranks: queries, keys and values differ between them, hidden states do not."""
    found: Found = {}
    plans = {
        "full": Full(),
        "core_attn": Selective(),
        "attn": Selective(("attn",)),
        "norm": Selective(("norm",)),
        "norm+core_attn": Selective(("norm", "core_attn")),
        "attn+norm": Selective(("attn", "norm")),
    }
    logger = logging.getLogger("lightning_recompute")
    level = logger.level
    logger.setLevel(logging.INFO)
    for zero in (False, True):
        for name, action in plans.items():
            logger.addHandler(messages := Messages())
            plan = tiled((1, action))((4,))
            counts: list[int] = []
            problem = error_of(
                lambda: counts.append(same_steps(lambda: Parallel(4, group, zero), Parallel.train, plan, group, 4))  # noqa: B023
            )
            logger.removeHandler(messages)
            found[f"{name}{', zeros first' * zero}"] = {
                "problem": problem,
                "gathers": sum(counts),
                "messages": [entry for entry in messages.seen if "kept whole" in entry[1] or "keeps whole" in entry[1]],
            }
    logger.setLevel(level)
    return found


def check_divergence(group: dist.ProcessGroup) -> Found:
    """Inputs that come to differ: an error on all ranks, and right from the next step on."""
    module = seeded(lambda: Odd(NUM_BLOCKS))
    with apply_recompute(module, on_shards(FULL), tensor_group=group):
        Odd.step(module)
        error = error_of(lambda: Odd.loss(module, seed=group.rank()).backward())
        messages = [error]
        for _ in range(NUM_BLOCKS):  # block by block
            messages.append(error_of(lambda: Odd.loss(module, seed=group.rank()).backward()))
        module.zero_grad()
        torch.manual_seed(1)
        Odd.loss(module, seed=group.rank()).backward()
    other = seeded(lambda: Odd(NUM_BLOCKS))
    torch.manual_seed(1)
    Odd.loss(other, seed=group.rank()).backward()
    gradients = zip(module.parameters(), other.parameters(), strict=True)
    return {"errors": messages, "right after": all(torch.equal(a.grad, b.grad) for a, b in gradients)}


# ---- copies, writes, memory


def check_copies(group: dist.ProcessGroup) -> Found:
    """A copy recomputes with its inputs on the device, so that one rank may run it alone."""
    module = seeded(lambda: Odd(NUM_BLOCKS))
    found: Found = {}
    with apply_recompute(module, on_shards(FULL), tensor_group=group):
        torch.manual_seed(1)
        Odd.step(module)
        for name, copied in {"deepcopy": copy.deepcopy, "pickle": lambda m: pickle.loads(pickle.dumps(m))}.items():
            other = copied(module)
            other.zero_grad()
            placement = other.blocks[0].forward.args[1].settings.placement
            with (counted := Gathers()).counted():
                if group.rank() == 0:
                    torch.manual_seed(1)
                    Odd.step(other)
            found[name] = [isinstance(placement, DevicePlacement), counted.num, counted.compared]
            if group.rank() == 0:
                parameters = zip(other.parameters(), module.parameters(), strict=True)
                found[name].append(all(torch.equal(a.grad, b.grad) for a, b in parameters))
    return found


def check_writes(group: dist.ProcessGroup) -> Found:
    """The caller's tensor stays what it was; a write to it after the forward changes nothing."""
    module = seeded(lambda: Odd(NUM_BLOCKS))
    torch.manual_seed(1)
    Odd.step(module)
    due = [parameter.grad.clone() for parameter in module.parameters()]
    states: list[Tensor] = []
    with apply_recompute(module, on_shards(FULL), tensor_group=group):
        Odd.step(module)
        module.zero_grad()
        handles = [block.register_forward_pre_hook(lambda _, args: states.append(args[0])) for block in module.blocks]
        torch.manual_seed(1)
        loss = Odd.loss(module)
        shapes = [tuple(state.shape) for state in states]
        equal = torch.equal(module.embed(Odd.rows()), states[0])
        states[2].detach().zero_()
        loss.backward()
        for handle in handles:
            handle.remove()
    right = all(torch.equal(p.grad, g) for p, g in zip(module.parameters(), due, strict=True))
    return {"shapes": shapes, "equal": equal, "right": right}


def check_memory(group: dist.ProcessGroup) -> Found:
    """Bytes held between forward and backward, at the peak of backward and after it, of a second step."""
    library = load()
    assert library is not None
    deep = tiled((1, Full()))((DEEP,))
    found: Found = {}
    for name, plan in {"device": deep, "shard": on_shards(deep)}.items():
        module = seeded(lambda: Odd(DEEP, rows=shard_models.MANY))
        with apply_recompute(module, plan, tensor_group=group):
            for _ in range(2):
                Odd.step(module)
            meter = AllocatorMeter(library)
            loss = Odd.loss(module)
            held = meter.live_bytes
            meter.reset_peak()
            loss.backward()
            peak = meter.peak_bytes
            del loss
            after = meter.live_bytes
            Odd.loss(module)
            dropped = meter.live_bytes
            meter.close()
        found[name] = {"held": held, "peak": peak, "after": after, "dropped": dropped}
    return found


def check_leaks(group: dist.ProcessGroup) -> Found:
    """Live bytes after each of several steps, the collector off."""
    module = seeded(lambda: Odd(NUM_BLOCKS))
    found = {}
    for name, plan in {"one": FULL, "pairs": PAIRS}.items():
        with apply_recompute(module, on_shards(plan), tensor_group=group), Ledger(module) as ledger:
            gc.disable()
            live = []
            for _ in range(4):
                Odd.step(module)
                Odd.loss(module)
                module.zero_grad()
                live.append(ledger.live_bytes)
            gc.enable()
        found[name] = live
    return found


def check_all(folder: Path) -> Found:
    """What one rank found, by check."""
    group = start()
    settle_collectives()
    checks: Sequence[Callable[[dist.ProcessGroup], Found]] = (
        *(check_plans, check_habits, check_counts, check_uneven_garbage, check_tensor_parallel),
        *(check_divergence, check_copies, check_writes, check_memory, check_leaks, shard_models.check_tensors),
    )
    found = {check.__name__.removeprefix("check_"): check(group) for check in checks}
    alone = [dist.new_group([rank]) for rank in range(2)]
    plan = on_shards(FULL)
    found["alone"] = error_of(lambda: apply_recompute(Odd(NUM_BLOCKS), plan, tensor_group=alone[group.rank()]))
    found["not in it"] = error_of(lambda: apply_recompute(Odd(NUM_BLOCKS), plan, tensor_group=alone[1 - group.rank()]))
    dist.destroy_process_group()
    return found


def check_layouts(folder: Path) -> Found:
    """Case 55: four ranks, the tensor group of neighbours or of every other rank; other groups have other data."""
    start()
    found: Found = {}
    for name, members in {"neighbours": ((0, 1), (2, 3)), "strided": ((0, 2), (1, 3))}.items():
        groups = [dist.new_group(list(ranks)) for ranks in members]
        mine = next(index for index, ranks in enumerate(members) if dist.get_rank() in ranks)

        def run(model: nn.Module, seed: int = mine) -> None:
            Odd.loss(model, seed).backward()

        for kind, plan in {"one": FULL, "pairs": PAIRS}.items():
            found[f"{name} {kind}"] = error_of(lambda: same_steps(lambda: Odd(NUM_BLOCKS), run, plan, groups[mine]))  # noqa: B023
    dist.destroy_process_group()
    return found
