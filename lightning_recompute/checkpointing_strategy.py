"""Lightning's strategy with checkpoints as folders: what to write, and how to load what was written otherwise."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import lightning.pytorch as pl
from lightning.fabric.plugins import TorchCheckpointIO
from torch import nn
from torch.optim import Optimizer

from lightning_recompute.checkpoint_loading import (
    is_sharded_checkpoint,
    load_module_state,
    load_optimizer_states,
    read_checkpoint,
)
from lightning_recompute.folders import remove, set_aside
from lightning_recompute.lightning_private import ReplicatedStrategy
from lightning_recompute.optimizer_names import NAMES, named_state
from lightning_recompute.saved_states import SavedStates
from lightning_recompute.sharded_checkpoint import ShardedSaver, is_remote, local_path

CheckpointFormat = Literal["auto", "single", "sharded"]

logger = logging.getLogger(__name__)


class CheckpointingStrategy(ReplicatedStrategy):
    """Saves a file where every process has the whole module, and a folder where each has a part.

    Either loads under any layout. Where a folder cannot be used (`load_from_checkpoint`, other strategies):
    `lightning-recompute consolidate CHECKPOINT_DIR FILE`.

    Args:
        checkpoint_format: `single`: always a file; `sharded`: always a folder; `auto`: what fits.
        async_checkpoint: Folders are written while training goes on. The next save, and the end of the fit, wait for
            the one before; an error of it is raised there.
        options: What `ReplicatedStrategy` takes.

    Raises:
        ValueError: A combination that would mean nothing.
    """

    def __init__(
        self, *, checkpoint_format: CheckpointFormat = "auto", async_checkpoint: bool = False, **options: Any
    ) -> None:
        super().__init__(**options)
        if checkpoint_format not in get_args(CheckpointFormat):
            raise ValueError(
                f"checkpoint_format={checkpoint_format!r}: one of {', '.join(get_args(CheckpointFormat))} is due"
            )
        self.checkpoint_format = checkpoint_format
        self.async_checkpoint = async_checkpoint
        self._saver: ShardedSaver | None = None
        # weights for a module that has no memory yet
        self._pending: tuple[Mapping[str, Any], bool] | None = None
        self._runs = False

    @property
    def is_grouped(self) -> bool:
        """Whether each process has only a part of the module while it runs."""
        return False

    @property
    def saves_folders(self) -> bool:
        """Whether a checkpoint is a folder."""
        return self.checkpoint_format == "sharded" or (self.checkpoint_format == "auto" and self.is_grouped)

    def setup_environment(self) -> None:
        """Meet the other processes; say what a checkpoint could not be."""
        if self.async_checkpoint and not self.saves_folders:
            raise ValueError(
                "async_checkpoint=True: only folders are written while training goes on, and this run saves files; add "
                "checkpoint_format='sharded', or leave it out"
            )
        if self.saves_folders and not self._writes_as_usual:
            raise ValueError(
                f"{type(self.checkpoint_io).__name__} writes files, and this run saves folders, as each process has a "
                "part of the module; leave it out (async_checkpoint=True saves in the background), or take "
                "checkpoint_format='single'"
            )
        super().setup_environment()

    def setup(self, trainer: pl.Trainer) -> None:
        """Prepare the module; one that has got its memory only there takes its weights from the checkpoint."""
        super().setup(trainer)
        self._runs = True
        if self._pending is not None:
            (state, strict), self._pending = self._pending, None
            load_module_state(self._module, state, strict=strict)

    @property
    def _writes_as_usual(self) -> bool:
        """Whether no `CheckpointIO` of the user's writes the files."""
        return self._checkpoint_io is None or type(self._checkpoint_io) is TorchCheckpointIO

    @property
    def _module(self) -> pl.LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    # ---- saving

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state of an optimizer, in a folder by the names of its parameters."""
        if not self.saves_folders:
            return super().optimizer_state(optimizer)
        return named_state(getattr(optimizer, "_optimizer", optimizer), self._module)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Save a checkpoint; every process calls it.

        Args:
            checkpoint: Lightning's dump.
            filepath: Where to.
            storage_options: For a `CheckpointIO` that takes them.

        Raises:
            ValueError: A folder is due and cannot be saved there.
        """
        if self.is_grouped and not self._peers_listen:
            # one rank alone has failed, or all have; the others' parts cannot be asked for
            logger.warning("no checkpoint is saved at %s: after an error the other ranks' parts are missing", filepath)
            return
        if self.saves_folders:
            if storage_options is not None:
                raise ValueError("storage_options are for a CheckpointIO; a checkpoint folder takes none")
            self._saver = self._saver or ShardedSaver(self.timeout)
            self._saver.save(filepath, checkpoint, asynchronous=self.async_checkpoint and self._runs)
            return
        whole = self._gathered(checkpoint) if self.is_grouped else checkpoint
        if not self.is_global_zero:
            return
        assert whole is not None
        if is_remote(filepath):
            super().save_checkpoint(whole, filepath, storage_options)
            return
        with set_aside(local_path(filepath)):
            super().save_checkpoint(whole, filepath, storage_options)

    def _gathered(self, checkpoint: dict[str, Any]) -> dict[str, Any] | None:
        self._saver = self._saver or ShardedSaver(self.timeout)
        return self._saver.gather(checkpoint)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove a checkpoint, once what is being saved in its place is there."""
        if not self.is_global_zero:
            return
        if self._saver is not None and self.saves_folders and not is_remote(filepath):
            self._saver.remove(filepath)
        elif not is_remote(filepath) and local_path(filepath).is_dir():
            remove(local_path(filepath))
        else:
            super().remove_checkpoint(filepath)

    # ---- loading

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a file or a folder, of a run with any layout.

        Args:
            checkpoint_path: The file or folder.
            weights_only: As for `torch.load`.

        Returns:
            Lightning's dump. Tensors of a folder are read when they are asked for, whole.
        """
        if self._saver is not None:
            self._saver.wait()
        mapped = self.is_grouped and self._writes_as_usual and Path(checkpoint_path).is_file()
        if mapped or is_sharded_checkpoint(checkpoint_path):
            return read_checkpoint(checkpoint_path, weights_only=weights_only)
        return super().load_checkpoint(checkpoint_path, weights_only=weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights, each process its part; into a module on the meta device when it has got memory."""
        state = checkpoint["state_dict"]
        if _has_no_memory(self._module):
            self._pending = (state, strict)
        elif self.is_grouped or isinstance(state, SavedStates):
            load_module_state(self._module, state, strict=strict)
        else:
            super().load_model_state_dict(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the states of the optimizers, each process its part."""
        states = checkpoint["optimizer_states"]
        if not self.is_grouped and not any(NAMES in state for state in states):
            super().load_optimizer_state_dict(checkpoint)
            return
        load_optimizer_states(self._module, self.optimizers, states, strict=self._module.strict_loading)

    # ---- the end

    def on_train_end(self) -> None:
        """Wait for the checkpoint that is being saved; what it met is raised here."""
        super().on_train_end()
        if self._saver is not None:
            self._saver.wait()

    def teardown(self) -> None:
        """Finish saving, then take everything off the module."""
        saver, self._saver, self._pending, self._runs = self._saver, None, None, False
        if saver is not None:
            try:
                saver.close()
            except Exception as error:
                if self._peers_listen or not self.has_peers:
                    raise
                logger.warning("the checkpoint that was being saved is lost: %s", error)
        super().teardown()


def _has_no_memory(module: nn.Module) -> bool:
    return any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))
