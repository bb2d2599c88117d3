"""Commands of this package in fresh processes, with a time limit and what they said when they failed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# the line of a traceback that names the error, or our own message
_ERROR = re.compile(r"^(error: |[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit)\b).*$", re.MULTILINE)
_MANY = 2000
_PROGRAM = ("-m", "lightning_recompute.cli")


@dataclass(frozen=True)
class Failure:
    """Why a command did not succeed.

    Attributes:
        reason: In one line.
        log: The file with all that it said.
    """

    reason: str
    log: Path


def run_command(arguments: Sequence[str], log: Path, *, seconds: float) -> Failure | None:
    """Run a command of this package in a fresh process, and end it with all it started when its time is over.

    Args:
        arguments: The command line, without the program's name.
        log: File for all that it says.
        seconds: The time limit.

    Returns:
        None where it succeeded.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, *_PROGRAM, *arguments]
    with open(log, "w", encoding="utf-8") as file:
        # a session of its own: processes that it starts for further devices end with it
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return Failure(f"not done within {seconds:g} s", log)
        finally:
            _end(process)
    return None if code == 0 else Failure(_reason(code, log.read_text(encoding="utf-8", errors="replace")), log)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and whatever it has started."""
    try:
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    except (ProcessLookupError, PermissionError):  # all of them are gone
        pass
    process.wait()


def _reason(code: int, said: str) -> str:
    """The last error in what a process said, else its last line, else how it ended."""
    if code < 0:
        name = signal.Signals(-code).name
        most_often = ": most often the system ran out of memory" if name == "SIGKILL" else ""
        return f"ended by {name}{most_often}"
    errors = [match[0].removeprefix("error: ") for match in _ERROR.finditer(said)]
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return (errors or lines or [f"exit code {code}"])[-1][:_MANY]
