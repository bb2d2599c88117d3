"""What is looked at in the first step of a pipeline, because watching a step on fake tensors cannot see values."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightning_recompute.stages import Stage


def check_first_values(
    stages: Collection[Stage], loss: Tensor | None, names: Sequence[str], group: dist.ProcessGroup
) -> None:
    """Refuse values of other stages that come to the loss, or into what blocks are given; collective.

    Args:
        stages: Of this rank, with their digests.
        loss: (), of the step, on the rank that comes to it.
        names: Of all blocks.
        group: The ranks of the pipeline.

    Raises:
        ValueError: On all ranks: there are some.
    """
    digests = [pair for stage in stages for pair in (stage.digests or {}).items()]
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, (digests, loss is not None and bool(loss.isnan())), group=group)
    given: dict[int, set[str]] = {}
    for one, _ in found:
        for index, value in one:
            given.setdefault(index, set()).add(value)
    for index, values in given.items():
        if len(values) > 1:
            raise ValueError(
                f"{names[index]} is given something beside the hidden state that differs between pipeline stages: it "
                "is made from parameters or hidden states that only an earlier stage has. Let the step make it from "
                "the batch"
            )
    if any(is_nan for _, is_nan in found):
        raise ValueError(
            "the first loss is NaN: behind the blocks the step uses a value that only an earlier pipeline stage "
            "has (the output of an embedding or of an earlier block, a parameter used in no other way), which is "
            "NaN on the last one; or the loss of the first batch is NaN without a pipeline too"
        )
    for stage in stages:
        stage.digests = None
