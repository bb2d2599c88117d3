"""Pipeline parallelism of an unmodified training step: a module whose blocks are divided over ranks.

The step runs once for each microbatch on each stage, and there does the stage's part: code before the blocks runs on
every stage (on placeholders, but for what it makes of the batch alone), code after them on the last one. Random numbers
that a step draws before its blocks are the same on all stages; those that blocks draw (dropout) are not those of one
process. What user code counts or prints before the blocks it does once a stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lightning_recompute.ambient import lasting_values, own_rng_states, rng_devices, set_own_rng_states
from lightning_recompute.blocks import BlockList
from lightning_recompute.division import Division
from lightning_recompute.groups import ParallelGroups
from lightning_recompute.handback import HandBack, SetAside, loss_with
from lightning_recompute.lazy_stage import SPLIT_BACKWARD, Chunk, LazyStage, make_schedule, plain_errors
from lightning_recompute.materialize import is_meta
from lightning_recompute.microbatches import Weight, num_rows, signature, split_batch, weights_of
from lightning_recompute.ownership import Ownership
from lightning_recompute.pipeline_settings import PipelineSettings, settled_schedule
from lightning_recompute.probe import Probe, Step, loss_of, only_list, probe_form, probe_step
from lightning_recompute.stages import Stage
from lightning_recompute.step_form import StepForm, TensorForm

_SEEDS = 2**62
_MAX_FORMS = 1024


@dataclass(frozen=True)
class Running:
    """What runs on this rank at the moment.

    Args:
        chunk: The stage of the pipeline.
        microbatch: Its number.
        weight: What it counts in the loss of its batch; all together 1.
        is_last: Whether the stage comes to the loss, so that what the user logs is to be recorded.
    """

    chunk: int
    microbatch: int
    weight: float
    is_last: bool


@dataclass
class _Work:
    """One step of the schedule."""

    step: Step
    microbatches: list[Any]
    weights: list[float]
    forms: list[StepForm]
    seed: int
    scale: float
    loss: Tensor | None = None


class PipelineModule:
    """A module whose blocks are divided over the pipeline ranks of this process's group.

    The order of calls: `divide` (then recompute is applied), `run` and `evaluate` for each batch, `remove`, and
    `make_whole` for a module as it was, trained.

    Args:
        module: The module, on its device, alike on all ranks of the pipeline.
        groups: The groups; the axis `pipeline` is this one's.
        settings: What the user said.

    Raises:
        ValueError: One rank, or a number of microbatches that the schedule cannot run.
    """

    def __init__(self, module: nn.Module, groups: ParallelGroups, settings: PipelineSettings) -> None:
        self.module = module
        self.settings = settings
        self.num_ranks = groups.size("pipeline")
        settings.check_ranks(self.num_ranks)
        self._group = groups.group("pipeline")
        self._rank = groups.rank("pipeline")
        kind = groups.mesh.device_type
        self._device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
        self.schedule, self.virtual = settled_schedule(settings.schedule, settings.virtual)
        self.division: Division
        self.ownership: Ownership
        self.block_list: BlockList
        self.running: Running | None = None
        """What runs, while a step of the user does."""
        self._probe: Probe
        self._stages: dict[int, Stage] = {}
        self._forms: dict[Any, StepForm] = {}
        self._schedules: dict[tuple[str, int], Callable[[], None]] = {}
        self._checked = False
        self._work: _Work

    # ---- dividing

    def divide(self, blocks: str | Sequence[str] | None, example: Any, step: Step) -> None:
        """Divide the module; collective. The step runs once, watched, on fake tensors where the model allows it.

        Args:
            blocks: Where the blocks are; None: found.
            example: A batch.
            step: Runs the training step on a microbatch, with all that surrounds it (precision).

        Raises:
            ValueError: The model or the step cannot be divided; see `probe_step`, `Division.of`.
        """
        if is_meta(self.module):
            raise ValueError(
                "a module on the meta device cannot be divided over pipeline stages: give it values first (to_empty "
                "and its own initialisation), or build it outside of torch.device('meta')"
            )
        self.block_list = only_list(self.module, blocks)
        self.division = Division.of(
            len(self.block_list), self.num_ranks, self.schedule, self.virtual, self.settings.split
        )
        microbatch = self._split(example)[0]
        self._probe = probe_step(self.module, self.block_list, step, microbatch)
        self._forms[self._form_key("train", microbatch)] = self._probe.form
        self.ownership = Ownership(self.module, self._probe.uses, self.division, self._group)
        for chunk in self.division.chunks_of(self._rank):
            start, stop = self.division.bounds[chunk]
            self._stages[chunk] = Stage(self.module, self.block_list, start, stop, self._device)

    @property
    def has_last(self) -> bool:
        """Whether this rank comes to the loss; the last one does not always (zbv)."""
        return self.division.last_rank == self._rank

    def _split(self, batch: Any) -> list[Any]:
        return split_batch(batch, self.settings.num_microbatches_of(num_rows(batch), self.num_ranks))

    def _form_key(self, kind: str, microbatch: Any) -> Any:
        return kind, self.module.training, signature(microbatch)

    def _form(self, kind: str, step: Step, microbatch: Any) -> StepForm:
        key = self._form_key(kind, microbatch)
        if key not in self._forms:
            if len(self._forms) == _MAX_FORMS:
                del self._forms[next(iter(self._forms))]
            self._forms[key] = probe_form(self.module, self.block_list, step, microbatch, self._probe.form)
        return self._forms[key]

    # ---- a training step

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
        """Forward and backward of all microbatches of a batch; collective over the pipeline.

        Args:
            step: Runs the training step on a microbatch and returns its loss, or a dict with it.
            batch: The same on all ranks of the pipeline; any structure that `split_batch` knows.
            weight: What a microbatch counts; None: the module's `microbatch_weight`, or else its rows.
            scale: What the gradient of the returned loss will be (a scaler's factor, 1 / accumulated batches), so
                that small gradients survive half precision. Another one is right as well.
            drop_gradients: The parameters' gradients are of a former step and about to be zeroed; they go now, so
                that there are never two sets.
            in_place: The parameters' gradients are of earlier batches of the same window; those of this one are
                added at once rather than by `backward`, so that there are never two sets. The loss has to come to a
                gradient of `scale` then.

        Returns:
            (), the weighted loss, the same on all ranks. Its `backward` adds the gradients to `.grad` of the
            parameters that this rank owns, those of tied parameters summed over their owners.

        Raises:
            ValueError: The step does something else than in the one that was watched. In the first step: it uses a
                value that only an earlier stage has.
        """
        microbatches = self._split(batch)
        counts = weights_of(microbatches, weight or getattr(self.module, "microbatch_weight", None))
        forms = [self._form("train", step, microbatch) for microbatch in microbatches]
        owned = self.ownership.parameters
        trained = [parameter for parameter in owned.values() if parameter.requires_grad]
        self._work = _Work(step, microbatches, counts, forms, self._agreed_seed(), scale)
        tied = {owned[name] for name in self.ownership.tied if name in owned}
        aside = SetAside([parameter for parameter in trained if not in_place or parameter in tied], drop_gradients)
        try:
            self._run_schedule(len(microbatches))
        except BaseException:
            self._schedules.clear()  # half done
            aside.restore()
            raise
        finally:
            loss = self._work.loss
            del self._work
        made = aside.restore()
        if not self._checked:
            self._check_first_step(loss)
        return loss_with(self._on_all_ranks(loss), HandBack(self._with_ties(made), scale, fixed=in_place))

    def _run_schedule(self, num_microbatches: int) -> None:
        name = self.schedule
        if name == "1f1b" and num_microbatches < self.num_ranks:
            name = "gpipe"
        if (name, num_microbatches) not in self._schedules:
            stages = [self._lazy_stage(chunk) for chunk in self._stages]
            self._schedules[name, num_microbatches] = make_schedule(name, stages, num_microbatches)
        devices = self._rng_devices()
        states = own_rng_states(devices)
        try:
            with plain_errors(), lasting_values(name in SPLIT_BACKWARD):
                self._schedules[name, num_microbatches]()
        finally:
            set_own_rng_states(devices, states)

    def _lazy_stage(self, chunk: int) -> LazyStage:
        stage = self._stages[chunk]

        def form_of(microbatch: int, received: bool) -> TensorForm:
            return self._work.forms[microbatch].blocks[stage.start if received else stage.stop].hidden

        def run(received: Tensor | None, microbatch: int) -> Tensor:
            return self._forward(chunk, received, microbatch)

        parameters = [parameter for parameter in self.ownership.parameters.values() if parameter.requires_grad]
        return LazyStage(
            Chunk(run, parameters, chunk == 0), chunk, self.division.num_chunks, self._device, self._group, form_of
        )

    def _forward(self, chunk: int, received: Tensor | None, microbatch: int) -> Tensor:
        work, stage = self._work, self._stages[chunk]
        if not self._checked and microbatch == 0:
            stage.digests = {}
        result = self._run_stage(chunk, received, microbatch, work)
        if not stage.is_last:
            hidden: Tensor = result
            if not hidden.requires_grad:  # a frozen stage: torch wants something to run backward through
                return hidden.detach().requires_grad_()
            # what is sent is contiguous, and what a split backward detaches no view
            return (
                hidden.contiguous() if not hidden.is_contiguous() else hidden.clone() if hidden._is_view() else hidden
            )
        loss = loss_of(result).reshape(())
        if not work.weights[microbatch]:
            # a mean over nothing is NaN, which a weight of 0 does not undo
            work.loss = torch.zeros_like(loss) if work.loss is None else work.loss
            return torch.zeros(1, dtype=loss.dtype, device=loss.device, requires_grad=True)
        weighted = loss.detach() * work.weights[microbatch]
        work.loss = weighted if work.loss is None else work.loss + weighted
        return (loss * (work.weights[microbatch] * work.scale)).reshape(1).clone()

    def _run_stage(self, chunk: int, received: Tensor | None, microbatch: int, work: _Work) -> Any:
        stage = self._stages[chunk]
        self.running = Running(chunk, microbatch, work.weights[microbatch], stage.is_last)
        # what a step draws before its blocks is the same on all stages, what blocks draw differs between stages
        torch.manual_seed(work.seed + microbatch)
        try:
            return stage.run(
                lambda: work.step(work.microbatches[microbatch]),
                received,
                work.forms[microbatch],
                (lambda: self._own_seed(work.seed + microbatch, chunk)) if chunk else None,
            )
        finally:
            self.running = None

    def _own_seed(self, seed: int, chunk: int) -> None:
        torch.manual_seed((seed + chunk * 0x9E3779B97F4A7C15) % 2**63)

    def _rng_devices(self) -> tuple[torch.device, ...]:
        return rng_devices([torch.empty(0, device=self._device)])

    def _agreed_seed(self) -> int:
        """Drawn by every rank, so that their streams stay side by side; the first one's counts."""
        seed = torch.randint(_SEEDS, (), dtype=torch.int64).to(self._device)
        dist.broadcast(seed, group=self._group, group_src=0)
        return int(seed)

    # ---- what ranks tell each other

    def _on_all_ranks(self, loss: Tensor | None) -> Tensor:
        value = torch.zeros((), dtype=torch.float64, device=self._device) if loss is None else loss.to(torch.float64)
        dist.broadcast(value, group=self._group, group_src=self.division.last_rank)
        return value.to(self._probe.loss.dtype)

    def _with_ties(self, made: dict[nn.Parameter, Tensor]) -> dict[nn.Parameter, Tensor]:
        mine = self.ownership.parameters
        sums = self.ownership.sum_tied({name: made.get(mine[name]) for name in self.ownership.tied if name in mine})
        return made | {mine[name]: gradient for name, gradient in sums.items()}

    def _check_first_step(self, loss: Tensor | None) -> None:
        """What the probe cannot see: values of other stages that come to the loss, or into what blocks are given."""
        digests = [pair for stage in self._stages.values() for pair in (stage.digests or {}).items()]
        found: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(found, (digests, loss is not None and bool(loss.isnan())), group=self._group)
        given: dict[int, set[str]] = {}
        for one, _ in found:
            for index, value in one:
                given.setdefault(index, set()).add(value)
        for index, values in given.items():
            if len(values) > 1:
                raise ValueError(
                    f"{self.block_list.names[index]} is given something beside the hidden state that differs between "
                    "pipeline stages: it is made from parameters or hidden states that only an earlier stage has. Let "
                    "the step make it from the batch"
                )
        if any(is_nan for _, is_nan in found):
            raise ValueError(
                "the first loss is NaN: behind the blocks the step uses a value that only an earlier pipeline stage "
                "has (the output of an embedding or of an earlier block, a parameter used in no other way), which is "
                "NaN on the last one; or the loss of the first batch is NaN without a pipeline too"
            )
        for stage in self._stages.values():
            stage.digests = None
        self._checked = True

    # ---- evaluation

    def evaluate(self, step: Step, batch: Any, *, kind: str = "validation", num_microbatches: int = 1) -> list[Any]:
        """Forward of a batch, without gradients; collective over the pipeline.

        Args:
            step: Runs the user's step on a microbatch.
            batch: The same on all ranks of the pipeline.
            kind: Names the step: steps of one kind call the blocks alike.
            num_microbatches: 1: the step sees whole batches as without a pipeline, and the ranks wait for each other.

        Returns:
            What the step returned for each microbatch, the same on all ranks.
        """
        microbatches = split_batch(batch, num_microbatches) if num_microbatches > 1 else [batch]
        counts = weights_of(microbatches)
        forms = [self._form(kind, step, microbatch) for microbatch in microbatches]
        work = _Work(step, microbatches, counts, forms, self._agreed_seed(), 1.0)
        devices = self._rng_devices()
        states = own_rng_states(devices)
        try:
            with torch.no_grad():
                results = self._forward_only(work)
        finally:
            set_own_rng_states(devices, states)
        # on the way tensors are on no device that only one of the ranks has
        box = [tree_map_only(Tensor, Tensor.cpu, results)]
        dist.broadcast_object_list(box, group=self._group, group_src=self.division.last_rank)
        return results if self.has_last else tree_map_only(Tensor, lambda tensor: tensor.to(self._device), box[0])

    def _forward_only(self, work: _Work) -> list[Any]:
        """All microbatches go through a stage before the next one of this rank starts."""
        here: dict[tuple[int, int], Tensor] = {}
        sent: list[tuple[Any, Tensor]] = []
        results: list[Any] = []
        rank_of = self.division.rank_of
        for chunk, stage in self._stages.items():
            for microbatch, form in enumerate(work.forms):
                received = here.pop((chunk, microbatch), None)
                if chunk and received is None:
                    hidden = form.blocks[stage.start].hidden
                    received = torch.empty(hidden.shape, dtype=hidden.dtype, device=self._device)
                    dist.recv(received, group=self._group, group_src=rank_of(chunk - 1))
                result = self._run_stage(chunk, received, microbatch, work)
                if stage.is_last:
                    results.append(result)
                elif rank_of(chunk + 1) == self._rank:
                    here[chunk + 1, microbatch] = result
                else:
                    result = result.contiguous()
                    sent.append((dist.isend(result, group=self._group, group_dst=rank_of(chunk + 1)), result))
        for work_sent, _ in sent:
            work_sent.wait()
        return results

    # ---- the end

    def remove(self) -> None:
        """Put all parameters' names back; values that this rank lacks are NaN. Not collective.

        A second call does nothing.
        """
        self._schedules.clear()
        self._stages.clear()
        self._forms.clear()
        if hasattr(self, "ownership"):
            self.ownership.remove()

    def make_whole(self) -> None:
        """After `remove`: give every rank all parameters and buffers; collective over the pipeline."""
        self.ownership.make_whole()
