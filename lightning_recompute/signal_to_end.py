"""SIGTERM in a fit of several processes, without the broadcast inside of a signal handler in which they would hang."""

from __future__ import annotations

import logging
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException

logger = logging.getLogger(__name__)


class SignalToEnd:
    """SIGTERM in a fit of several processes: noted when it comes, agreed on between batches, the end of all.

    Lightning's own handler broadcasts at once, in the middle of whatever runs: where a peer waits inside of a step for
    this process, both wait until the timeout. While a process validates, its next batch is the last, as in Lightning.

    Args:
        trainer: Whose fit it is; it has not registered its handlers yet.
        device: Where collectives run.
    """

    def __init__(self, trainer: pl.Trainer, device: torch.device) -> None:
        self._trainer = trainer
        self._device = device
        self._is_noted = False
        self._connector: Any = trainer._signal_connector
        self._loop: Any = trainer.fit_loop
        self._former_end = self._loop.on_advance_end
        object.__setattr__(self._connector, "_sigterm_notifier_fn", self._note)
        object.__setattr__(self._loop.epoch_loop, "_broadcast_sigterm_tensor", self._before_batch)
        object.__setattr__(self._loop, "on_advance_end", self._end_of_epoch)

    @staticmethod
    def is_due(trainer: pl.Trainer) -> bool:
        """Whether this Lightning's processes tell each other of signals."""
        return hasattr(trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor")

    def remove(self) -> None:
        """Give the Trainer its own methods back; a second call does nothing."""
        vars(self._connector).pop("_sigterm_notifier_fn", None)
        vars(self._loop.epoch_loop).pop("_broadcast_sigterm_tensor", None)
        vars(self._loop).pop("on_advance_end", None)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        logger.info("[rank %d] received SIGTERM", self._trainer.global_rank)
        launcher = self._trainer.strategy.launcher
        if not self._is_noted and launcher is not None:
            launcher.kill(signum)
        self._is_noted = True
        if not self._trainer.training:
            self._connector.received_sigterm = True

    def _agree(self) -> None:
        noted = torch.tensor(int(self._is_noted or self._connector.received_sigterm), device=self._device)
        dist.all_reduce(noted, dist.ReduceOp.MAX)
        self._connector.received_sigterm = bool(noted)

    def _before_batch(self) -> None:
        self._agree()
        if self._connector.received_sigterm:
            raise SIGTERMException

    def _end_of_epoch(self) -> None:
        self._agree()
        self._former_end()
