"""Two processes (or more) on this machine, each with a hard time limit.

Importing Lightning takes longer than most of what is tested, so `in_ranks` forks its processes from one server
that has done it; `start` runs a script as a user would, through its launcher.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

NUM_PROCESSES = 2
LIMIT_SECONDS = 150
NAP_SECONDS = 0.0001
HERE = Path(__file__).parent
_STATS: dict[str, int] = {}  # by thread: where the system says what it does
PRELOADED = ["lightning_modules", "lightning_recompute.strategy"]


def free_port() -> int:
    """A port of the loopback interface that nobody listens on."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def local_rank() -> int:
    """Rank before, while and after Lightning's launcher has set it."""
    return int(os.environ.get("LOCAL_RANK", 0))


@functools.cache
def world_size() -> int:
    """Processes of this group; read at once, since Lightning takes it out of the environment at the end of a fit."""
    return int(os.environ.get("WORLD_SIZE", 1))


def in_ranks(
    function: Callable[[Path], Any], folder: Path, limit: float = LIMIT_SECONDS, num_processes: int = NUM_PROCESSES
) -> list[Any]:
    """Call `function(folder)` in processes that a Trainer with as many devices takes for its own.

    Args:
        function: Top-level function of a module in this folder. It runs in `folder`.
        folder: Where each rank leaves its result and its output.
        limit: Seconds until the processes are killed and the test fails.
        num_processes: How many.

    Returns:
        What each rank returned: tensors, numbers, strings, and lists and dicts of them.
    """
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(num_processes)}
    ranks = [world | {"LOCAL_RANK": str(rank), "NODE_RANK": "0"} for rank in range(num_processes)]
    _in_processes(function, folder, ranks, limit)
    return [torch.load(folder / f"{rank}.pt") for rank in range(num_processes)]


def in_one(function: Callable[[Path], Any], folder: Path, limit: float = LIMIT_SECONDS) -> Any:
    """Call `function(folder)` in one process that may launch others; see `in_ranks`."""
    _in_processes(function, folder, [{}], limit)
    return torch.load(folder / "0.pt")


def _in_processes(
    function: Callable[[Path], Any], folder: Path, environments: list[dict[str, str]], limit: float
) -> None:
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(PRELOADED)
    processes = [
        server.Process(target=_child, args=(function, folder, index, environment))
        for index, environment in enumerate(environments)
    ]
    deadline = time.monotonic() + limit
    for process in processes:
        process.start()
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    late = [process for process in processes if process.is_alive()]
    for process in late:
        process.kill()
        process.join()
    if late or any(process.exitcode for process in processes):
        output = "\n".join(path.read_text()[-6000:] for path in sorted(folder.glob("*.txt")))
        codes = [process.exitcode for process in processes]
        raise AssertionError(f"{len(late)} alive after {limit} s, exit codes {codes}:\n{output}")


def _child(function: Callable[[Path], Any], folder: Path, index: int, environment: dict[str, str]) -> None:
    for seed in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # of tests that ran before the server of processes started
        os.environ.pop(seed, None)
    os.environ.update(environment, GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    os.chdir(folder)
    with open(f"{index}.txt", "w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    torch.set_num_threads(1)
    try:
        torch.save(function(folder), f"{index}.pt")
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def settle_collectives() -> None:
    """From here on, in this process: a collective that was waited for has let go of its buffers.

    A thread of gloo may hold them for a moment after it has said that it is done: for how long is a matter of chance,
    and of the load of the machine, so that measured peaks were, too. Here a wait ends when these threads sleep. Two
    times in some hundred runs a rank without it crashed in native code, near `full_tensor` of what had been sharded.
    """
    if hasattr(dist.Work.wait, "__wrapped__"):
        return
    kernel = torch.ops._c10d_functional.wait_tensor.default._op_dk

    def wait_tensor(tensor: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = kernel(torch._C.DispatchKey.CompositeExplicitAutograd, tensor)
        _let_gloo_sleep()
        return found

    wait = dist.Work.wait

    @functools.wraps(wait)
    def wait_work(*args: Any, **kwargs: Any) -> bool:
        found = wait(*args, **kwargs)
        _let_gloo_sleep()
        return found

    dist.Work.wait = wait_work  # type: ignore[method-assign]
    _library().impl("wait_tensor", wait_tensor, "CPU")


def _let_gloo_sleep() -> None:
    """Nap until no thread of gloo runs or waits for a core, seen twice: one that waits for the GIL sleeps, too."""
    asleep = 0
    while asleep < 2:
        time.sleep(NAP_SECONDS)
        asleep = 0 if any(_is_busy_gloo(task) for task in os.listdir("/proc/self/task")) else asleep + 1


def _is_busy_gloo(task: str) -> bool:
    """Whether a thread of this process is gloo's and has something to do: its files stay open, for speed."""
    try:
        if task not in _STATS:
            _STATS[task] = os.open(f"/proc/self/task/{task}/stat", os.O_RDONLY)
        name, rest = os.pread(_STATS[task], 200, 0).split(b"(", 1)[1].rsplit(b")", 1)
    except (FileNotFoundError, ProcessLookupError):  # it has just ended
        if task in _STATS:
            os.close(_STATS.pop(task))
        return False
    return name.startswith(b"pt_gloo") and rest.split()[0] == b"R"


@functools.cache
def _library() -> torch.library.Library:
    """Lives as long as the process, and what is registered with it."""
    return torch.library.Library("_c10d_functional", "IMPL")


def agreed(value: float) -> float:
    """The largest over all processes."""
    found = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def error_of(call: Callable[[], Any], otherwise: str = "") -> str:
    """What is wrong with a call; the rank goes on, so that its peers are not left alone in a collective.

    Args:
        call: The call.
        otherwise: The answer where nothing is.

    Returns:
        Type and text of its error.
    """
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return otherwise


@dataclass
class Outcome:
    """How a script ended.

    Args:
        returncode: Exit code of the process that was started (rank 0, or torchrun).
        output: stdout and stderr of all processes.
    """

    returncode: int
    output: str


def start(script: str, *args: object, torchrun: bool = False) -> subprocess.Popen[str]:
    """Start a script of this folder in a process group of its own."""
    left = ("LOCAL_RANK", "NODE_RANK", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PL_GLOBAL_SEED", "PYTEST_")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(left)}
    command = [sys.executable]
    if torchrun:
        command += ["-m", "torch.distributed.run", f"--nproc-per-node={NUM_PROCESSES}", "--master-addr=127.0.0.1"]
        command += [f"--master-port={free_port()}"]
    return subprocess.Popen(
        [*command, str(HERE / script), *map(str, args)],
        env=environment | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def wait_for_training(folder: Path) -> list[int]:
    """Wait until both processes of a script that waits to be ended are training; returns their numbers."""
    deadline = time.monotonic() + LIMIT_SECONDS
    marks = [folder / f"training-{rank}" for rank in range(NUM_PROCESSES)]
    while not all(mark.exists() and mark.read_text() for mark in marks):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return [int(mark.read_text()) for mark in marks]


def finish(process: subprocess.Popen[str], limit: float = LIMIT_SECONDS) -> Outcome:
    """Wait for a started script and all its children; kill its process group and fail when they outlive the limit."""
    try:
        # every child holds the pipe: this returns when the last one has ended
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"processes still alive after {limit} s:\n{output[-8000:]}") from None
    return Outcome(process.returncode, output)
