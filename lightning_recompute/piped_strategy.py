"""Lightning's strategy over pipeline stages: an unmodified training_step in Lightning's own order of hooks.

The module stays whole until the first training batch, which shows what each stage needs: a sanity validation before
runs on every rank as a whole. From then on a rank has the parameters of its stages, until the end of the fit.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer

from lightning_recompute.agreement import ALONE, Agreement
from lightning_recompute.balanced_split import balanced_settings
from lightning_recompute.blocks import BlockList
from lightning_recompute.budgeting import accumulates, optimizers_of, step_of
from lightning_recompute.division import Division
from lightning_recompute.grouped_strategy import GroupedStrategy, parameters_of
from lightning_recompute.last_words import LastWords, is_of_a_connection
from lightning_recompute.parallel import ParallelSettings
from lightning_recompute.piped_fit import PipedFit, loss_gradient
from lightning_recompute.pipeline_settings import PipelineSettings, settled_schedule
from lightning_recompute.probe import Step, only_list
from lightning_recompute.sharded_checkpoint import is_remote, local_path
from lightning_recompute.stage_budget import StageBudget
from lightning_recompute.stage_memory import Window
from lightning_recompute.stage_optimizers import StageOptimizers
from lightning_recompute.stages import IN_ORDER
from lightning_recompute.tried_step import LONE_STEP, TriedStep


class PipedStrategy(GroupedStrategy):
    """Ranks that have consecutive blocks of the module each, and hand hidden states on.

    Without a pipeline it is what it inherits from.

    Args:
        settings: The groups.
        pipeline_settings: What the user said of the pipeline; None: there is none.
        options: What `GroupedStrategy` takes.

    Raises:
        ValueError: Options that do not go together.
    """

    def __init__(
        self, settings: ParallelSettings, pipeline_settings: PipelineSettings | None = None, **options: Any
    ) -> None:
        super().__init__(settings, **options)
        assert (pipeline_settings is None) == (settings.pipeline == 1)
        self.pipeline_settings = pipeline_settings
        if pipeline_settings is not None:
            pipeline_settings.check_ranks(settings.pipeline)
        self._piped: PipedFit | None = None
        self._stage_optimizers: StageOptimizers | None = None
        self._batch_idx = 0
        self._last_words: LastWords | None = None

    @property
    def is_piped(self) -> bool:
        """Whether the module is about to be divided over stages, or is."""
        return self.pipeline_settings is not None and self.has_peers

    @property
    def piped(self) -> PipedFit | None:
        """The module as stages; None before the first training batch, and after the fit."""
        return self._piped

    @property
    def repeats_work(self) -> bool:
        """Whether what runs at the moment another stage does as well, for the model; reports ask by this name."""
        running = None if self._piped is None else self._piped.pipeline.running
        return running is not None and running.is_before

    # ---- the module

    def setup(self, trainer: pl.Trainer) -> None:
        """Prepare the module; from here on a rank that fails tells the others why."""
        if self.is_piped and trainer.state.fn == TrainerFn.FITTING:
            assert dist.group.WORLD is not None
            self._last_words = LastWords(dist.group.WORLD)
        super().setup(trainer)

    def divide_module(self, trainer: pl.Trainer) -> None:
        """Divide the module over the tensor-parallel ranks; refuse what cannot be divided over stages."""
        super().divide_module(trainer)
        if not self.is_piped or trainer.state.fn != TrainerFn.FITTING:
            return
        module = self._module
        if not module.automatic_optimization:
            raise ValueError(
                "manual optimization under pipeline_parallel_size > 1: the step would run its own backward, and a "
                "pipeline runs forward and backward of its microbatches in turns. Return the loss from training_step "
                "(automatic_optimization=True), or leave pipeline_parallel_size out"
            )
        for callback in vars(trainer)["callbacks"]:
            if isinstance(callback, BaseFinetuning):
                raise ValueError(
                    f"{type(callback).__name__} gives the optimizer further parameters in the course of a fit; under "
                    "pipeline_parallel_size > 1 each rank has those of its stages only: freeze parameters before the "
                    "fit (requires_grad_(False)) and give the optimizer the others, or leave the pipeline out"
                )
        settings = self.pipeline_settings
        assert settings is not None
        schedule, virtual = settled_schedule(settings.schedule, settings.virtual)
        num_blocks = len(only_list(module, self.block_names))
        split = "count" if settings.split == "balanced" else settings.split
        Division.of(num_blocks, self.settings.pipeline, schedule, virtual, split)

    def spread_module(self) -> bool:
        """Replicate or shard the module over the data-parallel ranks; stages later, when they are known."""
        return True if self.is_piped else super().spread_module()

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        """Make the optimizers, of all parameters so far."""
        super().setup_optimizers(trainer)
        if self.is_piped:
            self._stage_optimizers = StageOptimizers(self._module, self.optimizers)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Divide the module over the stages, with the first batch of a fit."""
        super().on_train_batch_start(batch, batch_idx)
        self._batch_idx = batch_idx
        if self.is_piped and self._piped is None:
            self._divide(batch, batch_idx)

    def _divide(self, batch: Any, batch_idx: int) -> None:
        assert self.pipeline_settings is not None
        assert self._groups is not None
        settings, step = self.pipeline_settings, self._step_of(batch_idx)
        if settings.split == "balanced":
            settings = balanced_settings(
                self._module,
                step,
                batch,
                settings,
                self._groups,
                data_parallel=self.settings.data,
                blocks=self.block_names,
                optimizers=optimizers_of(self._module.trainer),
                budget_bytes=self.rank_budget_bytes(),
                tried=self._tried_stage(),
            )
        piped = PipedFit(self._module, self._groups, settings)
        self._piped = piped  # what fails from here on is undone by teardown
        piped.divide(self.block_names, batch, step)
        self.prepare_stages(piped)
        if self.data_parallel_size > 1:
            piped.pipeline.spread(self.units_of_blocks(), self.settings.data, self.find_unused_parameters)
        assert self._stage_optimizers is not None
        piped.take_optimizers(self._stage_optimizers)
        if self.data_parallel_size > 1 and self.settings.data == "shard":
            gc.collect()  # whole parameters that were replaced: fake tensors of the probe hold them in cycles

    def prepare_stages(self, piped: PipedFit) -> None:
        """What is done to a module whose stages are known, before it is replicated or sharded.

        Args:
            piped: The module.
        """

    def stage_budget(self, batch: Any, batch_idx: int) -> StageBudget | None:
        """What plans the stages, each by itself; None where there are none.

        Args:
            batch: A batch of the training.
            batch_idx: Its number.
        """
        if self._piped is None:
            return None
        module, trainer = self._module, self._module.trainer
        groups = self._piped.groups
        shared = [groups.group(axis) for axis in ("data", "tensor") if groups.size(axis) > 1]
        return StageBudget(
            self._piped.pipeline,
            self._step_of(batch_idx),
            batch,
            optimizers=optimizers_of(trainer),
            window=Window(
                accumulating=accumulates(trainer, module),
                keeps_former=not self._zeroes_as_usual(),
                in_place=type(module).backward is pl.LightningModule.backward,
            ),
            tried=self._tried_stage(),
            agreement=Agreement(self.root_device, *shared) if shared else ALONE,
        )

    def rank_budget_bytes(self) -> int | None:
        """What the peak of each rank may be; None where the user gave no budget."""
        return None

    def _tried_stage(self) -> TriedStep:
        return self.tried_step(has_middle=False) if self.settings.tensor > 1 else LONE_STEP

    def _step_of(self, batch_idx: int) -> Step:
        """The training step on a microbatch, outside of training."""
        module, trainer = self._module, self._module.trainer
        return lambda microbatch: self._run(step_of(trainer, module, microbatch, batch_idx))

    # ---- steps

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the training step on each microbatch, forward and backward; the gradients wait for `backward`."""
        run = super().training_step
        if self._piped is None:
            return run(*args, **kwargs)
        batch, *others = args
        begins = self._batch_idx % self._module.trainer.accumulate_grad_batches == 0
        return self._piped.train(
            lambda microbatch: run(microbatch, *others, **kwargs),
            batch,
            scale=self._loss_gradient(),
            drop_gradients=begins and self._zeroes_as_usual(),
            in_place=not begins and type(self._module).backward is pl.LightningModule.backward,
        )

    def _loss_gradient(self) -> float:
        assert self._piped is not None
        num_batches = self._module.trainer.accumulate_grad_batches
        scaler = getattr(self.precision_plugin, "scaler", None)
        return loss_gradient(self._piped.pipeline.loss_form, self.root_device, num_batches, scaler)

    def _zeroes_as_usual(self) -> bool:
        """Whether nobody sees the last step's gradients once more, before they are zeroed."""
        if type(self._module).optimizer_zero_grad is not pl.LightningModule.optimizer_zero_grad:
            return False
        listeners = [self._module, *vars(self._module.trainer)["callbacks"]]
        own = __name__.partition(".")[0]
        return all(
            type(each).on_before_zero_grad in (pl.LightningModule.on_before_zero_grad, pl.Callback.on_before_zero_grad)
            or type(each).__module__.partition(".")[0] == own
            for each in listeners
        )

    def reduce_gradients(self) -> None:
        """Reduce the gradients over the groups, after a backward."""
        assert self._parallel is not None
        if self._piped is not None and self._parallel.syncs:
            # first: sharded ones are summed over `tensor` by it, and looked at after it
            self._piped.pipeline.reduce_gradients()
        super().reduce_gradients()

    def clip_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """One norm over all stages.

        Args:
            optimizer: Whose gradients are clipped.
            clip_val: The largest norm that is left alone.
        """
        if self._piped is None:
            super().clip_by_norm(optimizer, clip_val)
            return
        self._piped.pipeline.clip_norm(parameters_of(optimizer), clip_val)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a validation step, through all stages."""
        return self._evaluated("validation", super().validation_step, args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a test step, through all stages."""
        return self._evaluated("test", super().test_step, args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a predict step, through all stages."""
        return self._evaluated("predict", super().predict_step, args, kwargs)

    def _evaluated(self, kind: str, run: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if self._piped is None:
            if self.is_piped and self._module.trainer.sanity_checking:  # before a training that would be in vain
                with _each_called_once(only_list(self._module, self.block_names), kind):
                    return run(*args, **kwargs)
            return run(*args, **kwargs)
        batch, *others = args
        return self._piped.evaluate(lambda whole: run(whole, *others, **kwargs), batch, kind)

    # ---- checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The state of this rank's part of the module, by the names of the whole."""
        state = super().lightning_module_state_dict()
        return state if self._piped is None else self._piped.own_state(state)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state of an optimizer: this rank's part, by the numbers and names of the whole."""
        if self._stage_optimizers is None:
            return super().optimizer_state(optimizer)
        own = getattr(optimizer, "_optimizer", optimizer)
        return self._stage_optimizers.state(own, with_held=self.is_global_zero)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Save a checkpoint; see `CheckpointingStrategy`."""
        if self._stage_optimizers is not None and not is_remote(filepath):
            self._stage_optimizers.before_writing(local_path(filepath))
        if self._piped is not None and "state_dict" in checkpoint:
            checkpoint = {**checkpoint, "state_dict": self._piped.in_order(checkpoint["state_dict"])}
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights, each process its part."""
        if self._piped is None:
            super().load_model_state_dict(checkpoint, strict)
        else:
            self._piped.load_state(checkpoint["state_dict"], strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the states of the optimizers, each process its part, when that is known."""
        states = checkpoint["optimizer_states"]
        if self._piped is not None:
            self._piped.load_optimizers(states, strict=self._module.strict_loading)
        elif self.is_piped:
            assert self._stage_optimizers is not None
            self._stage_optimizers.hold(states, strict=self._module.strict_loading)
        else:
            super().load_optimizer_state_dict(checkpoint)

    # ---- the end

    def on_exception(self, exception: BaseException) -> None:
        """Tell the other ranks what this one met; of one that only lost another say what that one met."""
        super().on_exception(exception)
        words, self._last_words = self._last_words, None
        if words is None:
            return
        if not is_of_a_connection(exception):
            words.say(exception)
        elif (heard := words.heard()) is not None and exception.args:
            exception.args = (f"{exception.args[0]}\n{heard}", *exception.args[1:])

    def teardown(self) -> None:
        """Take the stages off the module and make it whole again."""
        piped, self._piped = self._piped, None
        if self._stage_optimizers is not None and not self._stage_optimizers.holds:  # a fit without a batch still does
            self._stage_optimizers = None
        if piped is not None:
            piped.remove()
            if self._peers_listen:
                piped.make_whole()
        words, self._last_words = self._last_words, None
        if words is not None:
            words.stop()
        super().teardown()


@contextlib.contextmanager
def _each_called_once(block_list: BlockList, kind: str) -> Iterator[None]:
    """Within, refuse a step that stages could not run: one that calls a block again."""
    called: set[int] = set()

    def note(index: int, *_: Any) -> None:
        if index in called:
            raise ValueError(f"{kind}_step called {block_list.names[index]} a second time. {IN_ORDER}")
        called.add(index)

    with contextlib.ExitStack() as stack:
        for index, block in enumerate(block_list.blocks):
            stack.callback(block.register_forward_pre_hook(functools.partial(note, index)).remove)
        yield
