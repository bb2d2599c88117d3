"""Data parallelism around the stages of a pipeline: what a rank owns is replicated or sharded over the axis `data`.

Gradients are averaged once for each step of the optimizer, when those of all microbatches are there and handed back:
a bucketed all-reduce, or one reduce-scatter for each sharded unit. Nothing is averaged while the schedule runs, so its
order of actions is that of a pipeline alone, whichever it is.

Sharded, what a rank owns is whole while a schedule runs, gathered once a batch and not for each microbatch; so are its
gradients, until they are averaged. Between steps a rank has its part of the parameters, gradients and optimizer states.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_recompute.clipping import clip_norm
from lightning_recompute.data_parallel import DataParallel, Given, Replicated, Result
from lightning_recompute.groups import ParallelGroups
from lightning_recompute.ledger import allocated_bytes
from lightning_recompute.memory import Meter, open_meter
from lightning_recompute.microbatches import Weight
from lightning_recompute.pipeline import PipelineModule
from lightning_recompute.pipeline_settings import PipelineSettings
from lightning_recompute.pipeline_step import Alone
from lightning_recompute.probe import Step
from lightning_recompute.sharding import Sharded, shard
from lightning_recompute.stage_memory import SpreadBytes
from lightning_recompute.whole import make_whole


@contextlib.contextmanager
def _tried(parameters: Sequence[nn.Parameter], device: torch.device) -> Iterator[Meter]:
    """Within, parameters have no gradients but those that are tried, and bytes are counted."""
    former = [(parameter, parameter.grad) for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        with contextlib.closing(open_meter(device)) as meter, meter.watching():
            yield meter
    finally:
        for parameter, gradient in former:
            parameter.grad = gradient


def _give_zeros(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    found = []
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter, requires_grad=False)
            found.append(parameter.grad)
    return found


class ReplicatedStages(Replicated):
    """Every data rank holds what its place in the pipeline holds."""

    reduces_in_backward = False

    def measure(self, device: torch.device) -> SpreadBytes:
        """What averaging takes, tried with gradients of zeros; collective.

        Args:
            device: Where the parameters are.
        """
        parameters = list(self.module.parameters())
        with _tried(parameters, device) as meter:
            before = meter.live_bytes
            made = _give_zeros(parameters)
            self._reduction.prepare()
            meter.reset_peak()
            self.finish()
            return SpreadBytes(0, 0, allocated_bytes(made, device), 0, meter.peak_bytes - before)


class ShardedStages(Sharded):
    """Every data rank holds a part of each parameter that its place in the pipeline holds."""

    reduces_in_backward = False
    _num_gathered = 0

    def _enter_by_own_hooks(self) -> None:
        # torch's hooks would gather and reduce for each microbatch, and take one chunk's backward for the whole
        for state in self._states:
            state._pre_forward_hook_handle.remove()
            state._post_forward_hook_handle.remove()

    def run(self, step: Callable[Given, Result], *args: Given.args, **kwargs: Given.kwargs) -> Result:
        """Run all that a batch needs with whole parameters; see `DataParallel.run`. After an error in it: `reset`."""
        try:
            with self.gathered():
                return DataParallel.run(self, step, *args, **kwargs)
        except BaseException:
            self.reset()
            raise

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Within, the module has whole parameters; collective, but inside of another one."""
        units: list[Any] = [] if self._num_gathered else [state._modules[0] for state in self._states]
        self._num_gathered += 1
        try:
            for unit in units:
                unit.unshard()
            yield
        finally:
            self._num_gathered -= 1
            for unit in units:
                unit.reshard()

    def measure(self, device: torch.device) -> SpreadBytes:
        """What gathering and reducing take, tried with gradients of zeros; collective.

        Args:
            device: Where the parameters are.
        """
        shards = list(self.module.parameters())
        with _tried(shards, device) as meter, self.trying():
            before = meter.live_bytes
            with self.gathered():
                gathering = meter.peak_bytes - before
                whole = list(self.module.parameters())
                apart = set(shards) & set(whole)
                # now: gathered memory is let go of at the end
                whole_bytes = allocated_bytes([parameter for parameter in whole if parameter not in apart], device)
                _give_zeros(whole)
            meter.reset_peak()
            self.finish()
            reducing = meter.peak_bytes - before
            left = [parameter.grad for parameter in shards if parameter.grad is not None]
            shards_bytes = allocated_bytes([parameter for parameter in shards if parameter not in apart], device)
            return SpreadBytes(shards_bytes, whole_bytes, allocated_bytes(left, device), gathering, reducing)

    def before_backward(self, loss: Tensor) -> None:
        """Nothing is due: backward has run."""

    def finish(self) -> None:
        """Average what the batches of a window have left: a reduce-scatter for each unit; not under `no_sync`."""
        super().finish()
        if self._averaged.active:
            # what torch does at the end of a backward: reduces every unit that has not been, and waits
            self._root._root_post_backward_final_callback()


class SpreadPipeline(PipelineModule):
    """A pipeline, and others like it beside it for other data.

    The order of calls: `divide`, then recompute is applied, `spread`, optimizers are made; for each batch `run`,
    backward of its loss (under `no_sync` or not), `reduce_gradients`; at the end `remove`, `make_whole`.

    Args:
        module: The module, on its device, alike on all ranks of the pipeline.
        groups: The groups; the axes `pipeline` and `data` are this one's.
        settings: What the user said.

    Raises:
        ValueError: See `PipelineModule`.
    """

    def __init__(self, module: nn.Module, groups: ParallelGroups, settings: PipelineSettings) -> None:
        super().__init__(module, groups, settings)
        self._groups = groups
        self._data: ReplicatedStages | ShardedStages | None = None

    @property
    def data(self) -> DataParallel | None:
        """What replicates or shards what this rank owns; None where nothing does."""
        return self._data

    def spread(
        self,
        units: Sequence[Sequence[nn.Module]] = (),
        kind: Literal["replicate", "shard"] = "replicate",
        find_unused_parameters: bool = False,
    ) -> None:
        """Replicate or shard what this rank owns over `data`; collective.

        Args:
            units: Consecutive blocks that are gathered and reduced together; those of other ranks do not count.
            kind: Which.
            find_unused_parameters: Sharded: whether ranks may differ in which parameters of a unit get a gradient.

        Raises:
            ValueError: See `shard`.
        """
        assert self._data is None
        if self._groups.size("data") == 1:
            return
        self._schedules.clear()
        if kind == "replicate":
            self._data = ReplicatedStages(self.module, self._groups)
            return
        own = set(self.own_blocks)
        mine = [[block for block in unit if block in own and any(True for _ in block.parameters())] for unit in units]
        sharded = shard(
            self.module, self._groups, mine, find_unused_parameters=find_unused_parameters, kind=ShardedStages
        )
        assert isinstance(sharded, ShardedStages)
        self._data = sharded

    # ---- a step

    def run(
        self,
        step: Step,
        batch: Any,
        *,
        weight: Weight | None = None,
        scale: float = 1.0,
        drop_gradients: bool = False,
        in_place: bool = False,
    ) -> Tensor:
        """Forward and backward of all microbatches of a batch; see `PipelineModule.run`.

        Sharded, `backward` of the loss leaves gradients to `reduce_gradients` rather than in `grad`. After an error
        those of its window are lost.
        """
        options: dict[str, Any] = {"weight": weight, "scale": scale, "in_place": in_place}
        if self._data is None:
            return super().run(step, batch, drop_gradients=drop_gradients, **options)
        if drop_gradients:
            for parameter in self.ownership.parameters.values():
                if parameter.requires_grad:
                    parameter.grad = None
        return self._data.run(super().run, step, batch, drop_gradients=drop_gradients, **options)

    def reduce_gradients(self) -> None:
        """Average the gradients over `data`, after backward of the loss; collective, but under `no_sync`.

        Those of the batches that came before under `no_sync` are part of it. Gradients that are terms of a sum over
        `tensor` may be summed before or after it; sharded ones are summed by it.
        """
        if self._data is not None:
            self._data.finish()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within, `reduce_gradients` leaves each rank its own gradients, to be averaged with those of a later batch."""
        with contextlib.nullcontext() if self._data is None else self._data.no_sync():
            yield

    def spread_bytes(self) -> SpreadBytes | None:
        """What data parallelism makes of this rank's parameters and gradients; collective over `data`."""
        return None if self._data is None else self._data.measure(self.device)

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Within, what this rank owns is whole, where it is sharded; collective over `data`."""
        with self._data.gathered() if isinstance(self._data, ShardedStages) else contextlib.nullcontext():
            yield

    @contextlib.contextmanager
    def alone(self, step: Step, batch: Any) -> Iterator[Alone]:
        """The forwards of a training step, one by one; see `PipelineModule.alone`. Sharded, it is collective."""
        with self.gathered(), super().alone(step, batch) as found:
            yield found

    def evaluate(self, step: Step, batch: Any, *, kind: str = "validation", num_microbatches: int = 1) -> list[Any]:
        """Forward of a batch, without gradients; see `PipelineModule.evaluate`."""
        options: dict[str, Any] = {"kind": kind, "num_microbatches": num_microbatches}
        if self._data is None:
            return super().evaluate(step, batch, **options)
        with torch.no_grad():
            return self._data.run(super().evaluate, step, batch, **options)

    @torch.no_grad()
    def clip_norm(self, parameters: Sequence[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip gradients by their norm over all ranks, tied parameters counted once; see `clipping.clip_norm`.

        Args:
            parameters: Some of those that this rank owns.
            max_norm: The largest norm that is left alone.
            norm_type: The p of the p-norm.
        """
        elsewhere = [each for name, each in self.ownership.parameters.items() if not self.ownership.counts(name)]
        return clip_norm(
            parameters, max_norm, norm_type, group=self._groups.group("pipeline"), counted_elsewhere=elsewhere
        )

    # ---- the end

    def remove(self) -> None:
        """Take everything off the module; what was sharded stays so until `make_whole`. Not collective."""
        if self._data is not None:
            self._data.remove()
            self._data = None
        super().remove()

    def make_whole(self, optimizers: Sequence[Optimizer] = ()) -> None:
        """After `remove`: give every rank all parameters and buffers; collective.

        Args:
            optimizers: Of what this rank owns; their parameters and states follow. States of other ranks do not come.
        """
        make_whole(self.module, optimizers)
        super().make_whole()
