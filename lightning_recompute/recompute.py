"""Applying a plan to a model: its blocks keep less in forward and compute it again in backward.

A unit is one or several consecutive blocks of an unmodified model, or a module inside a block; nothing is
wrapped, so that names, classes, state dict, deepcopy and pickle of the model stay as they were.

Stated limits: `parameter.data = ...` between forward and backward is not seen (plain autograd does not see it
either), and the transforms of `torch.func` are refused. Python's and NumPy's random numbers are restored for
blocks that draw them on their first call, a private `torch.Generator` where it is an attribute of a module of the
block; `check=True` tells of any other. Hooks for all modules (`register_module_forward_hook`) run in a replay as well;
what a block does to Python's globals, to closures or to files it does twice, unless it asks `is_recomputing()`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo import OptimizedModule
from torch.nn.parameter import is_lazy

from lightning_recompute.ambient import is_recomputing
from lightning_recompute.blocks import BlockList, find_blocks
from lightning_recompute.discard import freeing_forward, recognising_forward
from lightning_recompute.errors import RecomputeError
from lightning_recompute.labels import find_targets, unknown_label_message
from lightning_recompute.patch import Patch
from lightning_recompute.placement import DevicePlacement, HostPlacement, Placement
from lightning_recompute.plan import Full, Keep, RecomputePlan, SaveOps, Segment, Selective
from lightning_recompute.policy import RecomputePolicy
from lightning_recompute.prior_recompute import Flag, stand_in_for
from lightning_recompute.recompute_unit import Unit, UnitSettings, recomputed_forward
from lightning_recompute.save_ops import DECISIONS, OpSet
from lightning_recompute.shard_placement import ShardPlacement
from lightning_recompute.side_effects import quiet_in_replay
from lightning_recompute.tape import taped_forward

__all__ = ["RecomputeError", "RecomputeHandle", "apply_recompute", "is_recomputing"]

logger = logging.getLogger(__name__)
_PATCHES = {"unit": recomputed_forward, "output": freeing_forward, "tape": taped_forward}


class RecomputeHandle:
    """A plan applied to a model; a context manager that removes it on leaving.

    Args:
        plan: What was applied.
        block_lists: Where.
        patches: The patched forwards.
    """

    def __init__(self, plan: RecomputePlan, block_lists: Sequence[BlockList], patches: Sequence[Patch | Flag]) -> None:
        self.plan = plan
        self.block_lists = tuple(block_lists)
        self._patches = list(patches)

    def remove(self) -> None:
        """Put the model's forwards back as they were; a second call does nothing."""
        while self._patches:
            self._patches.pop().remove()

    def __enter__(self) -> RecomputeHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.remove()

    def __str__(self) -> str:
        lists = " and ".join(map(str, self.block_lists))
        return f"{lists}\n{self.plan}"


def apply_recompute(
    module: nn.Module,
    what: RecomputePolicy | RecomputePlan,
    *,
    blocks: str | Sequence[str] | None = None,
    check: bool = False,
    tensor_group: dist.ProcessGroup | None = None,
) -> RecomputeHandle:
    """Recompute a model's blocks as a policy or plan says, until the handle is removed.

    Args:
        module: The model; its own forward, parameters and names are not touched.
        what: A policy in Megatron's words, or an explicit plan.
        blocks: Dotted paths of block lists or class names of blocks. None: found by `find_blocks`.
        check: Debugging: compare every value of the first replay of each block with the forward's, which needs
            the memory that recompute would save.
        tensor_group: The tensor-parallel ranks of this process, over which unit inputs are kept where the plan says
            `shard`. All of them run the same forwards and backwards in the same order.

    Returns:
        The handle: `.plan`, `.block_lists`, `.remove()`; also a context manager.

    Raises:
        ValueError: No blocks, a plan for another number of blocks, a unit that spans two lists, a label or
            pattern that nothing answers to, an action or placement that this model or device cannot have, or a
            model that is recomputed already.
        TypeError: `what` is neither policy nor plan.
    """
    lists = find_blocks(module, blocks)
    lengths = [len(block_list) for block_list in lists]
    if isinstance(what, RecomputePolicy):
        plan = what.plan(lengths)
    elif isinstance(what, RecomputePlan):
        plan = what
    else:
        raise TypeError(f"a RecomputePolicy or a RecomputePlan is due, found {type(what).__name__}")
    if plan.num_blocks != sum(lengths):
        raise ValueError(
            f"the plan covers {plan.num_blocks} blocks, the model has {sum(lengths)}: "
            f"{' and '.join(map(str, lists))}. Make the plan for this model, or name other blocks with blocks="
        )
    modules = [block for block_list in lists for block in block_list.blocks]
    names = [name for block_list in lists for name in block_list.names]
    _check(plan, lengths, modules, names, tensor_group)
    # each knows all units, since it brings the inputs of one unit back while another is replayed
    placements: dict[str, Placement] = {"device": DevicePlacement(), "host": HostPlacement()}
    if tensor_group is not None and any(map(_is_sharded, plan.segments)):
        placements["shard"] = ShardPlacement(tensor_group)
    patches: list[Patch | Flag] = []
    covered = [
        index
        for segment in plan.segments
        if not isinstance(segment.action, Keep)
        for index in range(segment.start, segment.stop)
    ]
    if covered and (around := _compiled_around(module, modules[covered[0]])) is not None:
        logger.warning(
            "%s is compiled as a whole: its recomputed blocks run outside of the compiled code. To have both, compile "
            "each block instead: block.compile()",
            around,
        )
    try:
        patches += stand_in_for(module, [modules[index] for index in covered], [names[index] for index in covered])
        patches += quiet_in_replay(module)
        for segment in plan.segments:
            patches += _patches(segment, modules, names, placements, check)
    except BaseException:
        RecomputeHandle(plan, lists, patches).remove()
        raise
    return RecomputeHandle(plan, lists, patches)


def _patches(
    segment: Segment,
    modules: Sequence[nn.Module],
    names: Sequence[str],
    placements: Mapping[str, Placement],
    check: bool,
) -> Iterator[Patch]:
    action = segment.action
    if isinstance(action, Keep):
        return
    ops = OpSet(action.ops, optional=DECISIONS) if isinstance(action, SaveOps) else None
    settings = UnitSettings(placements[action.inputs], ops, check)
    # a block that stands in the list several times is patched once
    indices = [index for index in range(segment.start, segment.stop) if not is_patched(modules[index])]
    if isinstance(action, Selective):
        for index in dict.fromkeys(indices):
            if not is_patched(modules[index]):
                yield from _selective_patches(modules[index], names[index], action, settings)
        return
    unit = Unit([names[index] for index in indices], settings)
    for position, index in enumerate(indices):
        yield Patch(modules[index], recomputed_forward, unit, position)


def _selective_patches(block: nn.Module, name: str, action: Selective, settings: UnitSettings) -> Iterator[Patch]:
    targets, notes = find_targets(block, action.modules, name)
    for note in notes:
        logger.info("%s: %s", name, note)
    for target in targets:
        if target.how == "nodes":
            continue
        parts = [block.get_submodule(inner) for inner in target.names]
        if any(_is_ours(vars(part).get(target.attribute)) for part in parts):
            continue  # blocks that share a norm or an activation
        unit = Unit([".".join(filter(None, (name, inner))) for inner in target.names], settings)
        for position, part in enumerate(parts):
            yield Patch(part, _PATCHES[target.how], unit, position, attribute=target.attribute)
    freed = {target.how for target in targets} & {"output", "nodes"}
    if freed:
        yield Patch(block, recognising_forward, "nodes" in freed)


def _check(
    plan: RecomputePlan,
    lengths: Sequence[int],
    modules: Sequence[nn.Module],
    names: Sequence[str],
    tensor_group: dist.ProcessGroup | None,
) -> None:
    """Refuse what cannot be applied, before anything is."""
    borders = {sum(lengths[:index]) for index in range(1, len(lengths))}
    seen: dict[int, tuple[str, Segment]] = {}
    for segment in plan.segments:
        where = f"the plan's segment of {segment}"
        if not isinstance(segment.action, Keep):
            _check_placement(segment.action, where, modules[segment.start], tensor_group)
        if isinstance(segment.action, Full | SaveOps) and (
            crossed := sorted(border for border in borders if segment.start < border < segment.stop)
        ):
            raise ValueError(
                f"{where} spans two block lists: block {crossed[0]} ({names[crossed[0]]}) begins another; "
                "end the unit there"
            )
        for index in range(segment.start, segment.stop):
            block, name = modules[index], names[index]
            if any(is_patched(part) for part in block.modules()):
                raise ValueError(f"{name} is recomputed already; call remove() of the handle that does it first")
            if any(is_lazy(parameter) for parameter in block.parameters()):
                raise ValueError(
                    f"{name} has lazy parameters without a shape; run one forward before recompute is applied"
                )
            other_name, other = seen.setdefault(id(block), (name, segment))
            if other_name != name and (other.action != segment.action or _is_group(other) or _is_group(segment)):
                raise ValueError(
                    f"{name} is the same module as {other_name}: a block that stands in the list several times needs "
                    "one action everywhere and units of one block (num_layers=1)"
                )
            if isinstance(segment.action, SaveOps) and any(map(_is_compiled, block.modules())):
                raise ValueError(
                    f"{name} is compiled: SaveOps cannot see the operators of compiled code; use Full() for this "
                    "block, or do not compile it"
                )
    searched: dict[str, dict[str, nn.Module]] = {}
    for segment in plan.segments:
        for word in getattr(segment.action, "modules", ()):
            found = {names[index]: modules[index] for index in range(segment.start, segment.stop)}
            searched.setdefault(word, {}).update(found)
    for word, blocks in searched.items():
        if not any(find_targets(block, (word,), name)[0] for name, block in blocks.items()):
            raise ValueError(unknown_label_message((word,), blocks))


def _is_compiled(part: nn.Module) -> bool:
    return isinstance(part, OptimizedModule) or getattr(part, "_compiled_call_impl", None) is not None


def _compiled_around(module: nn.Module, block: nn.Module) -> str | None:
    """The compiled module that a block is a part of, if there is one."""
    for name, part in module.named_modules():
        if _is_compiled(part) and any(inner is block for inner in list(part.modules())[1:]):
            inner = getattr(part, "_orig_mod", part)
            return None if inner is block else name or "the model"
    return None


def _is_group(segment: Segment) -> bool:
    return isinstance(segment.action, Full | SaveOps) and segment.stop - segment.start > 1


def _is_sharded(segment: Segment) -> bool:
    return not isinstance(segment.action, Keep) and segment.action.inputs == "shard"


def _check_placement(
    action: Full | Selective | SaveOps, where: str, block: nn.Module, tensor_group: dist.ProcessGroup | None
) -> None:
    ranks = tensor_group.size() if isinstance(tensor_group, dist.ProcessGroup) else 0
    if action.inputs == "shard" and ranks < 2:
        found = "that has one rank" if ranks else f"this process is in none (tensor_group={tensor_group})"
        raise ValueError(
            f"{where}: distribute_saved_activations keeps unit inputs as shards over the tensor-parallel group, "
            f"and {found}; leave it out, or give a group of two ranks or more (tensor_parallel_size)"
        )
    device = next((parameter.device for parameter in block.parameters()), torch.device("cpu"))
    if action.inputs == "host" and device.type != "cuda":
        raise ValueError(
            f"{where}: offload_saved_activations moves unit inputs from a CUDA device to host memory, the model is on "
            f"{device.type}; leave it out"
        )


def is_patched(module: nn.Module) -> bool:
    """Whether the module is recomputed now, or a part of it is freed."""
    return any(map(_is_ours, vars(module).values()))


def _is_ours(value: object) -> bool:
    own = (recomputed_forward, freeing_forward, taped_forward, recognising_forward)
    return isinstance(value, functools.partial) and value.func in own
