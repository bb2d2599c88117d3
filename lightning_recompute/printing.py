"""Tables and lines on the terminal, for the commands."""

from __future__ import annotations

from rich.console import Console

WIDTH = 200
"""Of what is printed into a log file, which has no edge."""


def wide_console(width: int = WIDTH) -> Console:
    """A console for tables.

    Args:
        width: Least number of columns where the output is no terminal.
    """
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, width)
    return console
