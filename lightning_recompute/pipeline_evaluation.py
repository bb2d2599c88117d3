"""Forward of a batch through the stages of a pipeline, without gradients: torch's own fails under zbv."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_recompute.division import Division
from lightning_recompute.stages import Stage
from lightning_recompute.step_form import StepForm

RunStage = Callable[[int, Tensor | None, int], Any]
"""Runs a chunk on the hidden state that it received and the number of a microbatch."""


def forward_only(
    stages: Mapping[int, Stage],
    run: RunStage,
    forms: Sequence[StepForm],
    division: Division,
    group: dist.ProcessGroup,
    device: torch.device,
) -> list[Any]:
    """Run all microbatches through this rank's stages, one stage after the other; collective over the pipeline.

    Args:
        stages: Of this rank, by chunk, in forward order.
        run: Runs one.
        forms: How the step calls the blocks on each microbatch.
        division: The blocks over stages.
        group: The ranks of the pipeline.
        device: Where results go.

    Returns:
        What the last stage returned for each microbatch, the same on all ranks.
    """
    here: dict[tuple[int, int], Tensor] = {}
    sent: list[tuple[Any, Tensor]] = []
    results: list[Any] = []
    for chunk, stage in stages.items():
        for microbatch, form in enumerate(forms):
            received = here.pop((chunk, microbatch), None)
            if chunk and received is None:
                hidden = form.blocks[stage.start].hidden
                received = torch.empty(hidden.shape, dtype=hidden.dtype, device=device)
                dist.recv(received, group=group, group_src=division.rank_of(chunk - 1))
            result = run(chunk, received, microbatch)
            if stage.is_last:
                results.append(result)
            elif (to := division.rank_of(chunk + 1)) == group.rank():
                here[chunk + 1, microbatch] = result
            else:
                result = result.contiguous()
                sent.append((dist.isend(result, group=group, group_dst=to), result))
    for work, _ in sent:
        work.wait()
    # on the way tensors are on no device that only one of the ranks has
    box = [tree_map_only(Tensor, Tensor.cpu, results)]
    dist.broadcast_object_list(box, group=group, group_src=division.last_rank)
    if group.rank() == division.last_rank:
        return results
    moved: list[Any] = tree_map_only(Tensor, lambda tensor: tensor.to(device), box[0])
    return moved
