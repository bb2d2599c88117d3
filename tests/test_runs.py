"""Commands in processes of their own: success, reasons of failures, time limits, and nothing left running."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from lightning_recompute import runs
from lightning_recompute.runs import run_command


@pytest.fixture(autouse=True)
def _any_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arguments are a script."""
    monkeypatch.setattr(runs, "_PROGRAM", ("-c",))


def test_success(tmp_path: Path) -> None:
    log = tmp_path / "new" / "log.txt"
    assert (
        run_command(["import sys; print('said'); print(sys.argv[1:], file=sys.stderr)", "a b"], log, seconds=60) is None
    )
    assert sorted(log.read_text().splitlines()) == ["['a b']", "said"]


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("raise KeyError('of the batch')", "KeyError: 'of the batch'"),
        ("import sys; print('error: found 1; 2 is due', file=sys.stderr); sys.exit(2)", "found 1; 2 is due"),
        (
            "class Gone(MemoryError): pass\nclass OutOfMemoryError(Gone): pass\nraise OutOfMemoryError('CUDA.\\nmore')",
            "OutOfMemoryError: CUDA.",
        ),
        ("print('one'); print('  two '); print(); raise SystemExit(3)", "two"),
        ("raise SystemExit(3)", "exit code 3"),
        ("import os; os.kill(os.getpid(), 9)", "ended by SIGKILL: most often the system ran out of memory"),
        ("import os; os.kill(os.getpid(), 15)", "ended by SIGTERM"),
        # of a chain the last
        ("try:\n    1 / 0\nexcept Exception as error:\n    raise RuntimeError('so') from error", "RuntimeError: so"),
    ],
)
def test_reasons_of_failures(script: str, reason: str, tmp_path: Path) -> None:
    failure = run_command([script], tmp_path / "log.txt", seconds=60)
    assert failure is not None
    assert failure.reason == reason
    assert failure.log == tmp_path / "log.txt"


def test_whatever_was_started_ends_with_the_time(tmp_path: Path) -> None:
    script = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(100)\n"
    )
    failure = run_command([script], tmp_path / "log.txt", seconds=3)
    assert failure is not None
    assert failure.reason == "not done within 3 s"
    child = int((tmp_path / "log.txt").read_text())
    for _ in range(100):
        if not _runs(child):
            return
        time.sleep(0.05)
    raise AssertionError("a process that the command had started goes on")


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    # nobody may be there to take its exit code
    state = Path(f"/proc/{process}/stat")
    return not (state.exists() and state.read_text().rpartition(")")[2].split()[0] == "Z")
