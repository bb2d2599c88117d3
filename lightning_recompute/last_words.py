"""What a rank that fails tells the others, so that each of them ends with the reason.

The peers of a rank that fails wait in a collective until its process is gone, and learn no more than that.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.5
_WAIT_SECONDS = 4.0
_MOST = 2000
_numbers: WeakKeyDictionary[Any, Iterator[int]] = WeakKeyDictionary()


class LastWords:
    """Listens, in a thread of its own, for a rank that fails; over the store where the processes met.

    Every rank makes one at the same place of its program. What a rank says first is what all hear.

    Args:
        world: The process group of all ranks.
    """

    def __init__(self, world: dist.ProcessGroup) -> None:
        self._rank = dist.get_rank(world)
        self._size = dist.get_world_size(world)
        store: Any = dist.distributed_c10d._get_default_store()
        number = next(_numbers.setdefault(world, itertools.count()))
        # a connection of its own: others wait for their answers on the first
        self._store = dist.distributed_c10d.PrefixStore(f"lightning_recompute/last_words/{number}", store.clone())
        self._heard: str | None = None
        self._answered = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="last words", daemon=True)
        self._thread.start()

    def say(self, exception: BaseException) -> None:
        """Tell the others why this rank ends, and give them some seconds to hear it.

        Args:
            exception: What it met.
        """
        text = f"rank {self._rank} failed: {type(exception).__name__}: {exception}"[:_MOST]
        self.stop()
        try:
            if not self._store.check(["text"]):
                self._store.set("text", text)
            self._answer()
            deadline = time.monotonic() + _WAIT_SECONDS
            while self._store.add("answers", 0) < self._size and time.monotonic() < deadline:
                time.sleep(0.05)
        except Exception as error:  # the process with the store is gone
            logger.debug("the reason could not be told to the others: %s", error)

    def heard(self) -> str | None:
        """What another rank has said, waited for a moment: a connection may close before its words are read.

        Returns:
            Rank, type and text of its error; None: nobody said anything.
        """
        self.stop()
        deadline = time.monotonic() + _WAIT_SECONDS
        while self._heard is None and time.monotonic() < deadline and self._ask():
            time.sleep(0.05)
        return self._heard

    def stop(self) -> None:
        """Listen no more; a second call does nothing."""
        self._over.set()
        self._thread.join(_WAIT_SECONDS)

    def _listen(self) -> None:
        while not self._over.wait(_POLL_SECONDS) and self._ask():
            if self._heard is not None:
                logger.error("%s; this rank ends as soon as it needs that one", self._heard)
                return

    def _ask(self) -> bool:
        """Look whether somebody said something; False: nobody can any more."""
        try:
            if self._store.check(["text"]):
                self._heard = self._store.get("text").decode(errors="replace")
                self._answer()
        except Exception as error:
            logger.debug("the others cannot be heard any more: %s", error)
            return False
        return True

    def _answer(self) -> None:
        if not self._answered:
            self._answered = True
            self._store.add("answers", 1)


def is_of_a_connection(exception: BaseException) -> bool:
    """Whether an error says only that another process is gone, or does not answer.

    Args:
        exception: What a rank met.
    """
    if isinstance(exception, dist.DistError):
        return True
    text = str(exception)
    marks = ("onnection closed by peer", "onnection reset by peer", "gloo", "NCCL", "Broken pipe", "Timed out waiting")
    return isinstance(exception, RuntimeError | OSError) and any(mark in text for mark in marks)
