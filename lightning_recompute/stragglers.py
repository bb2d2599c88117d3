"""Threads that carry out collectives on the CPU hold their buffers a little longer than the collective takes.

How long is a matter of chance. A measurement waits for them, so that it comes out the same each time.
"""

from __future__ import annotations

import time
from typing import Any

_COLLECTIVES = ("_c10d_functional", "c10d")
_SECONDS = 0.001


class Stragglers:
    """To be told of every operator before it runs.

    Args:
        are_waited_for: Whether there are such threads.
    """

    def __init__(self, are_waited_for: bool) -> None:
        self._are_waited_for = are_waited_for
        self._is_due = False

    def before(self, func: Any) -> None:
        """Before the first operator after a collective: wait."""
        is_collective = func.namespace in _COLLECTIVES
        if self._is_due and not is_collective:
            time.sleep(_SECONDS)
        self._is_due = is_collective and self._are_waited_for
