"""Which parameters FSDP2 can shard, and what of the user's on them it would drop."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from lightning_recompute.reduction import local_part
from lightning_recompute.whole import carry_over

logger = logging.getLogger(__name__)


def parameters_apart(
    module: nn.Module, units: Sequence[Sequence[nn.Module]]
) -> tuple[set[nn.Parameter], set[nn.Parameter]]:
    """Parameters that are not gathered with the unit they stand in.

    Args:
        module: The module.
        units: Its blocks that are gathered together; what is in none of them is the root's.

    Returns:
        Those that cannot be sharded: shared by units, scalars, not contiguous, or trained in another dtype than most of
        their unit. And those of units that what is outside of all units uses as well: they belong to the root.
    """
    root = len(units)
    unit_of = {block: index for index, blocks in enumerate(units) for block in blocks}
    users: dict[nn.Parameter, set[int]] = {}
    seen: set[tuple[nn.Module, int]] = set()

    def visit(part: nn.Module, around: int) -> None:
        """A module stands in as many units as there are ways to it."""
        place = unit_of.get(part, around)
        if (part, place) in seen:
            return
        seen.add((part, place))
        for parameter in part._parameters.values():
            if parameter is not None:
                users.setdefault(parameter, set()).add(place)
        for child in part.children():
            visit(child, place)

    visit(module, root)
    of_root = {parameter for parameter, found in users.items() if root in found}
    whole: set[nn.Parameter] = set()
    trained: dict[int, list[nn.Parameter]] = {}
    for parameter, found in users.items():
        shared = len(found) > 1 and root not in found
        if shared or not parameter.ndim or not local_part(parameter.detach()).is_contiguous():
            whole.add(parameter)
        elif parameter.requires_grad:
            trained.setdefault(root if root in found else min(found), []).append(parameter)
    for parameters in trained.values():
        sizes: Counter[torch.dtype] = Counter()
        for parameter in parameters:
            sizes[parameter.dtype] += parameter.numel()
        (most, _), *_ = sizes.most_common(1)
        whole |= {parameter for parameter in parameters if parameter.dtype != most}
    return whole, of_root


def carry_over_all(former: Mapping[str, nn.Parameter], new: Mapping[str, nn.Parameter]) -> None:
    """Give sharded parameters what the user set on the ones they stand for; say what does not work on them.

    Args:
        former: By name.
        new: By the same names.
    """
    changed = {former[name]: parameter for name, parameter in new.items() if parameter is not former[name]}
    for before, after in changed.items():
        carry_over(before, after)
    if num_hooked := sum(bool(parameter._backward_hooks) for parameter in changed):
        logger.warning(
            "%d parameters have a hook on their gradient (register_hook), which does not run with "
            "data_parallel='shard'; use register_post_accumulate_grad_hook, which sees the averaged gradient",
            num_hooked,
        )
