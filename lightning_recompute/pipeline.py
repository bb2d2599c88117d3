"""Pipeline parallelism of an unmodified training step: a module whose blocks are divided over ranks.

The step runs once for each microbatch on each stage, and there does the stage's part: code before the blocks runs on
every stage (on placeholders, but for what it makes of the batch alone), code after them on the last one. Random numbers
that a step draws before its blocks are the same on all stages; those that blocks draw (dropout) are not those of one
process. What user code counts or prints before the blocks it does once a stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_recompute.ambient import lasting_values, own_rng_states, rng_devices, set_own_rng_states
from lightning_recompute.blocks import BlockList
from lightning_recompute.division import Division
from lightning_recompute.first_values import check_first_values
from lightning_recompute.groups import ParallelGroups
from lightning_recompute.handback import HandBack, SetAside, loss_with
from lightning_recompute.lazy_stage import Chunk, LazyStage, make_schedule, plain_errors
from lightning_recompute.materialize import is_meta
from lightning_recompute.microbatches import Weight, num_rows, signature, split_batch, weights_of
from lightning_recompute.origins import refuse_crossings
from lightning_recompute.ownership import Ownership
from lightning_recompute.pipeline_evaluation import forward_only
from lightning_recompute.pipeline_settings import PipelineSettings, settled_schedule
from lightning_recompute.pipeline_step import Alone, Running, Work
from lightning_recompute.probe import Probe, Step, loss_of, only_list, probe_form, probe_step
from lightning_recompute.schedule_actions import SPLITTING
from lightning_recompute.stage_memory import SpreadBytes
from lightning_recompute.stages import Stage
from lightning_recompute.step_form import StepForm, TensorForm

_SEEDS = 2**62
_MAX_FORMS = 1024


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

    stage_type = LazyStage

    def __init__(self, module: nn.Module, groups: ParallelGroups, settings: PipelineSettings) -> None:
        self.module = module
        self.settings = settings
        self.num_ranks = groups.size("pipeline")
        settings.check_ranks(self.num_ranks)
        self._group = groups.group("pipeline")
        self.rank = groups.rank("pipeline")
        kind = groups.mesh.device_type
        self.device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
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
        self._work: Work

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
        refuse_crossings(self._probe.crossings, self.block_list.names, self.division)
        self._forms[self._form_key("train", microbatch)] = self._probe.form
        self.ownership = Ownership(self.module, self._probe.uses, self.division, self._group)
        for chunk in self.division.chunks_of(self.rank):
            start, stop = self.division.bounds[chunk]
            self._stages[chunk] = Stage(self.module, self.block_list, start, stop, self.device)

    @property
    def has_last(self) -> bool:
        """Whether this rank comes to the loss; the last one does not always (zbv)."""
        return self.division.last_rank == self.rank

    @property
    def own_blocks(self) -> list[nn.Module]:
        """The blocks that run on this rank, in forward order."""
        bounds = [self.division.bounds[chunk] for chunk in self.division.chunks_of(self.rank)]
        return [block for start, stop in bounds for block in self.block_list.blocks[start:stop]]

    @property
    def loss_form(self) -> TensorForm:
        """The loss that the step was seen to give."""
        return self._probe.loss

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
        owned = self.ownership.parameters
        trained = [parameter for parameter in owned.values() if parameter.requires_grad]
        self._work = self._work_of(step, batch, weight, self._agreed_seed(), scale)
        tied = {owned[name] for name in self.ownership.tied if name in owned}
        aside = SetAside([parameter for parameter in trained if not in_place or parameter in tied], drop_gradients)
        try:
            self._run_schedule(len(self._work.microbatches))
        except BaseException:
            self._schedules.clear()  # half done
            aside.restore()
            raise
        finally:
            loss = self._work.loss
            del self._work
        made = aside.restore()
        if not self._checked:
            check_first_values(self._stages.values(), loss, self.block_list.names, self._group)
            self._checked = True
        return loss_with(self._on_all_ranks(loss), HandBack(self._with_ties(made), scale, fixed=in_place))

    def _work_of(self, step: Step, batch: Any, weight: Weight | None, seed: int, scale: float) -> Work:
        microbatches = self._split(batch)
        counts = weights_of(microbatches, weight or getattr(self.module, "microbatch_weight", None))
        forms = [self._form("train", step, microbatch) for microbatch in microbatches]
        return Work(step, microbatches, counts, forms, seed, scale)

    @contextmanager
    def alone(self, step: Step, batch: Any) -> Iterator[Alone]:
        """The forwards of a training step, to be run one by one; not collective.

        Args:
            step: As for `run`.
            batch: As for `run`.
        """
        former, self._checked = self._checked, True
        self._work = self._work_of(step, batch, None, 0, 1.0)
        try:
            yield Alone(self._forward, tuple(self._work.microbatches), tuple(self._work.forms))
        finally:
            self._checked = former
            del self._work

    def spread_bytes(self) -> SpreadBytes | None:
        """What data parallelism makes of this rank's parameters and gradients; None: there is none."""
        return None

    def gathered(self) -> AbstractContextManager[None]:
        """Within, what this rank owns is whole, where it is sharded."""
        return nullcontext()

    def schedule_of(self, num_microbatches: int) -> str:
        """The schedule that runs so many microbatches.

        Args:
            num_microbatches: Of a step.
        """
        return "gpipe" if self.schedule == "1f1b" and num_microbatches < self.num_ranks else self.schedule

    def lazy_stages(self) -> list[LazyStage]:
        """The chunks of this rank as torch runs them, in forward order."""
        return [self._lazy_stage(chunk) for chunk in self._stages]

    def _run_schedule(self, num_microbatches: int) -> None:
        name = self.schedule_of(num_microbatches)
        if (name, num_microbatches) not in self._schedules:
            self._schedules[name, num_microbatches] = make_schedule(name, self.lazy_stages(), num_microbatches)
        devices = self._rng_devices()
        states = own_rng_states(devices)
        try:
            with plain_errors(), lasting_values(name in SPLITTING):
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
        return self.stage_type(
            Chunk(run, parameters, chunk == 0), chunk, self.division.num_chunks, self.device, self._group, form_of
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

    def _run_stage(self, chunk: int, received: Tensor | None, microbatch: int, work: Work) -> Any:
        stage = self._stages[chunk]
        self.running = Running(chunk, microbatch, work.weights[microbatch], stage.is_last, chunk > 0)
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
        if self.running is not None:
            self.running = replace(self.running, is_before=False)
        torch.manual_seed((seed + chunk * 0x9E3779B97F4A7C15) % 2**63)

    def _rng_devices(self) -> tuple[torch.device, ...]:
        return rng_devices([torch.empty(0, device=self.device)])

    def _agreed_seed(self) -> int:
        """Drawn by every rank, so that their streams stay side by side; the first one's counts."""
        seed = torch.randint(_SEEDS, (), dtype=torch.int64).to(self.device)
        dist.broadcast(seed, group=self._group, group_src=0)
        return int(seed)

    # ---- what ranks tell each other

    def _on_all_ranks(self, loss: Tensor | None) -> Tensor:
        value = torch.zeros((), dtype=torch.float64, device=self.device) if loss is None else loss.to(torch.float64)
        dist.broadcast(value, group=self._group, group_src=self.division.last_rank)
        return value.to(self._probe.loss.dtype)

    def _with_ties(self, made: dict[nn.Parameter, Tensor]) -> dict[nn.Parameter, Tensor]:
        mine = self.ownership.parameters
        sums = self.ownership.sum_tied({name: made.get(mine[name]) for name in self.ownership.tied if name in mine})
        return made | {mine[name]: gradient for name, gradient in sums.items()}

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
        work = Work(step, microbatches, counts, forms, self._agreed_seed(), 1.0)
        devices = self._rng_devices()
        states = own_rng_states(devices)
        try:
            with torch.no_grad():
                return forward_only(
                    self._stages,
                    lambda chunk, received, number: self._run_stage(chunk, received, number, work),
                    forms,
                    self.division,
                    self._group,
                    self.device,
                )
        finally:
            set_own_rng_states(devices, states)

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
