"""Runs steps with unit inputs in parts and on the device, and counts collectives."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist
from distributed import local_rank
from parity import assert_same, observe, seeded
from shard_models import OddBlock, on_shards
from torch import Tensor, nn

from lightning_recompute import shard_placement
from lightning_recompute.ambient import is_recomputing
from lightning_recompute.plan import RecomputePlan
from lightning_recompute.recompute import apply_recompute

Found = dict[str, Any]


def start() -> dist.ProcessGroup:
    """All processes as one group."""
    dist.init_process_group("gloo", rank=local_rank())
    world = dist.group.WORLD
    assert world is not None
    return world


class Gathers:
    """Counts collectives, and notes the order in which gathers are begun and waited for."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.compared = 0

    @property
    def num(self) -> int:
        return sum(entry.startswith("begin") for entry in self.log)

    def gather(self, output: Tensor, part: Tensor, group: dist.ProcessGroup) -> Any:
        number, log = self.num, self.log
        log.append(f"begin {number}")
        work = self._gather(output, part, group)

        class Waited:
            def wait(self) -> None:
                if f"wait {number}" not in log:
                    log.append(f"wait {number}")
                work.wait()

        return Waited()

    def all_reduce(self, *args: Any, **options: Any) -> Any:
        self.compared += 1
        return self._all_reduce(*args, **options)

    @contextlib.contextmanager
    def counted(self) -> Iterator[Gathers]:
        self._gather, self._all_reduce = shard_placement.all_gather, dist.all_reduce
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shard_placement, "all_gather", self.gather)
            patch.setattr(dist, "all_reduce", self.all_reduce)
            yield self


@contextlib.contextmanager
def noting_replays(model: Any, log: list[str]) -> Iterator[None]:
    """Note which block is replayed; entered before recompute is applied."""
    places = {block: index for index, block in enumerate(model.blocks)}
    forward = OddBlock.forward

    def noting(self: OddBlock, *args: Any, **kwargs: Any) -> Tensor:
        if is_recomputing():
            log.append(f"replay {places[self]}")
        return forward(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OddBlock, "forward", noting)
        yield


def same_steps(
    build: Callable[[], nn.Module],
    run: Callable[[nn.Module], object],
    plan: RecomputePlan,
    group: dist.ProcessGroup,
    num_steps: int = 2,
) -> int:
    """Compare steps with unit inputs in parts with those on the device, to the bit; returns how many gathers ran."""
    outcomes = []
    gathers = Gathers()
    for what in (plan, on_shards(plan)):
        module = seeded(build)
        with apply_recompute(module, what, tensor_group=group), gathers.counted():
            outcomes.append([observe(module, run, seed=step) for step in range(num_steps)])
    assert_same(outcomes[1], outcomes[0], "step")
    return gathers.num
