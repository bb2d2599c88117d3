"""A LightningModule as stages of a pipeline for one fit: its steps and its log, its optimizers and its state."""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_recompute.checkpoint_loading import load_module_state
from lightning_recompute.division import OwnStages
from lightning_recompute.groups import ParallelGroups
from lightning_recompute.only_tried import only_tried
from lightning_recompute.pipeline_data import SpreadPipeline
from lightning_recompute.pipeline_settings import PipelineSettings
from lightning_recompute.probe import Step
from lightning_recompute.saved_states import SavedStates, absent
from lightning_recompute.stage_optimizers import StageOptimizers
from lightning_recompute.step_form import TensorForm
from lightning_recompute.step_log import StepLog

EXTRA_STATE = "_extra_state"  # what torch calls an object of a module in its state dict

logger = logging.getLogger(__name__)


class PipedFit:
    """The module of a fit from its first training batch on.

    Args:
        module: The LightningModule, whole, on its device.
        groups: The groups.
        settings: What the user said of the pipeline.
    """

    def __init__(self, module: nn.Module, groups: ParallelGroups, settings: PipelineSettings) -> None:
        self.module = module
        self.groups = groups
        self.pipeline = SpreadPipeline(module, groups, settings)
        self._log = StepLog(module, self.pipeline, groups.group("pipeline"))
        self._keys = list(module.state_dict())
        self._elsewhere: set[str] = set()
        self._dropped_outputs: set[str] = set()
        self._optimizers: StageOptimizers | None = None

    @property
    def own_stages(self) -> OwnStages:
        """This process's stages."""
        return OwnStages(self.pipeline.division, self.pipeline.rank, self.pipeline.block_list.name)

    def divide(self, blocks: str | Sequence[str] | None, batch: Any, step: Step) -> None:
        """Divide the module; collective.

        Args:
            blocks: Where the blocks are; None: found.
            batch: The first batch.
            step: Runs the training step on a microbatch.

        Raises:
            ValueError: The model or the step cannot be divided.
        """
        with only_tried(self.module):
            self.pipeline.divide(blocks, batch, step)
        self._elsewhere = self._keys_elsewhere()

    def take_optimizers(self, optimizers: StageOptimizers) -> None:
        """Leave optimizers what this rank has, when nothing exchanges parameters any more."""
        self._optimizers = optimizers
        optimizers.divide(self.pipeline.ownership.parameters)

    # ---- steps

    def train(self, step: Step, batch: Any, *, scale: float, drop_gradients: bool, in_place: bool) -> Tensor:
        """Forward and backward of a batch; what the step logs is logged once, the same on every rank.

        Args:
            step: Runs the training step on a microbatch.
            batch: The batch.
            scale: See `PipelineModule.run`.
            drop_gradients: See there.
            in_place: See there.

        Returns:
            (), the loss.
        """

        def noting(microbatch: Any) -> Any:
            result = step(microbatch)
            if isinstance(result, Mapping):
                self._note_dropped([key for key in result if key != "loss"])
            return result

        with self._log.listening():
            loss = self.pipeline.run(noting, batch, scale=scale, drop_gradients=drop_gradients, in_place=in_place)
        self._log.repeat(is_training=True)
        return loss

    def evaluate(self, step: Step, batch: Any, kind: str) -> Any:
        """Run another step of the user's on a whole batch.

        Args:
            step: Runs it.
            batch: The batch.
            kind: Its name.

        Returns:
            What it returned on the stage with the loss.
        """
        with self._log.listening():
            (result,) = self.pipeline.evaluate(step, batch, kind=kind)
        self._log.repeat()
        return result

    def _note_dropped(self, keys: Sequence[str]) -> None:
        if new := [key for key in keys if key not in self._dropped_outputs]:
            self._dropped_outputs.update(new)
            logger.warning(
                "training_step returns %s beside the loss: under a pipeline it runs on microbatches, and hooks "
                "(on_train_batch_end) get the loss only",
                ", ".join(map(repr, new)),
            )

    # ---- what this rank counts and saves

    def own_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """A module's state dict without buffers and objects that another rank writes."""
        made = copy.copy(state)
        for key in self._elsewhere & state.keys():
            del made[key]
        return made

    def in_order(self, state: dict[str, Any]) -> dict[str, Any]:
        """A state dict of this rank's with `absent()` for the others' keys, in the order of the whole module."""
        made = copy.copy(state)
        made.clear()
        for key in self._keys:
            if key in state:
                made[key] = state[key]
            elif key in self._elsewhere:
                made[key] = absent()
        made.update({key: value for key, value in state.items() if key not in made})
        return made

    def _keys_elsewhere(self) -> set[str]:
        """Of the whole module's state: parameters that this rank has not, buffers and objects of others' stages."""
        ownership, module = self.pipeline.ownership, self.module
        elsewhere = set(self._keys) - module.state_dict().keys()
        firsts = {id(buffer): name for name, buffer in module.named_buffers()}
        for name, buffer in module.named_buffers(remove_duplicate=False):
            first = firsts[id(buffer)]
            if first in ownership.owners and not ownership.counts(first):
                elsewhere.add(name)
        here = {id(block) for block in self.pipeline.own_blocks}
        block_list = self.pipeline.block_list
        for name, block in zip(block_list.names, block_list.blocks, strict=True):
            if id(block) not in here:
                elsewhere |= {key for key in self._keys if key.startswith(f"{name}.") and key.endswith(EXTRA_STATE)}
        return elsewhere & set(self._keys)

    def load_state(self, state: Mapping[str, Any], *, strict: bool) -> None:
        """Load this rank's part of a state of the whole module.

        Raises:
            RuntimeError: Keys of the whole are missing or unexpected, when strict; or shapes differ.
        """
        if strict and (keys := set(state)) != (due := set(self._keys)):
            raise RuntimeError(
                f"Missing key(s) in state_dict: {sorted(due - keys)}. Unexpected key(s): {sorted(keys - due)}"
            )
        values = state.data if isinstance(state, SavedStates) else state
        own: Any = OrderedDict((name, values[name]) for name in self.module.state_dict() if name in values)
        if (versions := getattr(state, "_metadata", None)) is not None:
            vars(own)["_metadata"] = versions
        load_module_state(self.module, own, strict=strict)

    def load_optimizers(self, states: Sequence[Mapping[str, Any]], *, strict: bool = True) -> None:
        """Load this rank's part of optimizers' states; see `StageOptimizers.load`."""
        assert self._optimizers is not None
        self._optimizers.load(states, strict=strict)

    # ---- the end

    def remove(self) -> None:
        """Take the stages off the module; values of other ranks are NaN. Not collective."""
        self.pipeline.remove()

    def make_whole(self) -> None:
        """After `remove`: give every rank the whole module, and optimizers their parameters; collective."""
        self.pipeline.make_whole()
        if any(key.endswith(EXTRA_STATE) for key in self._keys):
            self._share_objects()
        if self._optimizers is not None:
            self._optimizers.restore()

    def _share_objects(self) -> None:
        """Give every rank the objects that blocks of others keep in their state; collective over the pipeline."""
        state = self.module.state_dict()
        inside = [f"{name}." for name in self.pipeline.block_list.names]
        keys = [key for key in self._keys if key.endswith(EXTRA_STATE) and key.startswith(tuple(inside))]
        own = {key: state[key] for key in keys if key not in self._elsewhere}
        every: list[Any] = [None] * self.groups.size("pipeline")
        dist.all_gather_object(every, own, self.groups.group("pipeline"))
        for key, value in (pair for theirs in every for pair in theirs.items() if pair[0] in self._elsewhere):
            self.module.get_submodule(key.removesuffix(f".{EXTRA_STATE}")).set_extra_state(value)


def loss_gradient(loss: TensorForm, device: torch.device, num_batches: int, scaler: Any | None) -> float:
    """What Lightning and a gradient scaler will make the gradient of a loss, to the bit.

    Args:
        loss: The form of the loss.
        device: Where it is.
        num_batches: Batches that are accumulated; the loss is divided by it.
        scaler: The scaler; None: there is none.
    """
    with torch.enable_grad():
        one = torch.ones((), dtype=loss.dtype, device=device, requires_grad=True)
        divided = one / num_batches
        (gradient,) = torch.autograd.grad(divided if scaler is None else scaler.scale(divided), one)
    return float(gradient)
