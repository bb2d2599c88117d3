"""Exact bytes of CPU tensors: builds and loads the counting allocator of `cpualloc.cpp` on first use.

torch itself counts memory on accelerators only.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_recompute.ledger import Meter, storages

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_suffix(".cpp")
COMPILERS = ("g++", "c++", "clang++")
COMPILE_SECONDS = 300


def cache_folder() -> Path:
    """Where the compiled allocator is kept: the user's cache folder, else one of their own in the temporary folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    preferred = Path(base) / "lightning_recompute"
    # code is loaded from there, so in a folder that everybody may write to the owner is checked
    fallback = Path(tempfile.gettempdir()) / f"lightning_recompute-{os.getuid()}"
    for folder in (preferred, fallback):
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            continue
        if folder.stat().st_uid == os.getuid() and os.access(folder, os.W_OK):
            return folder
    return Path(tempfile.mkdtemp(prefix="lightning_recompute-"))


def build() -> Path:
    """Compile the allocator for the torch of this process, unless the cache has it.

    Several processes may do so at once: each writes a file of its own and renames it.

    Returns:
        The shared library.

    Raises:
        OSError: There is no compiler, or it failed; the message says why.
    """
    torch_folder = Path(torch.__file__).parent
    source = SOURCE.read_text(encoding="utf-8")
    flags = [
        "-O2",
        "-std=c++20",
        "-shared",
        "-fPIC",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
    ]
    key = hashlib.sha256(repr((source, flags, torch.__version__, torch.version.git_version)).encode()).hexdigest()[:16]
    library = cache_folder() / f"cpualloc-{torch.__version__}-{key}.so"
    if library.exists():
        return library
    compiler = os.environ.get("CXX") or next(filter(shutil.which, COMPILERS), None)
    if compiler is None:
        raise OSError(f"no C++ compiler found (looked for {', '.join(COMPILERS)} and the variable CXX)")
    descriptor, temporary = tempfile.mkstemp(dir=library.parent, prefix=f".{library.name}.")
    os.close(descriptor)
    try:
        # libc10 is in the process already; the name of the file is enough to find it again
        command = [*compiler.split(), *flags, f"-I{torch_folder / 'include'}", str(SOURCE), "-o", temporary]
        command += [f"-L{torch_folder / 'lib'}", "-lc10"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False)
        if done.returncode != 0:
            raise OSError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
        os.replace(temporary, library)
    except subprocess.TimeoutExpired as error:
        raise OSError(f"the C++ compiler took more than {COMPILE_SECONDS} s") from error
    finally:
        Path(temporary).unlink(missing_ok=True)
    return library


@functools.cache
def load() -> ctypes.CDLL | None:
    """Load the allocator and make it torch's, for the rest of the process; None where that is not possible.

    It costs 64 bytes a tensor and no measurable time. Tensors that exist already stay as they are.
    """
    if sys.platform != "linux":
        return None
    try:
        library = ctypes.CDLL(str(build()))
    except OSError as error:
        logger.warning("CPU memory is counted by watching operators, not by the allocator: %s", error)
        return None
    for name in ("live", "marked", "peak", "peak_marked"):
        getattr(library, f"window_{name}").restype = ctypes.c_int64
    library.window_adjust.argtypes = [ctypes.c_int, ctypes.c_int64]
    for name in ("counts", "at_peak"):
        getattr(library, f"window_{name}").argtypes = [ctypes.c_int, ctypes.c_void_p]
    if not library.install():
        logger.warning("CPU memory is counted by watching operators: another CPU allocator is in place")
        return None
    return library


Older = dict[int, tuple[int, "weakref.finalize[Any, torch.UntypedStorage]"]]
"""Bytes of counted storages that are not from the window, and what takes them off when they die."""


class AllocatorMeter(Meter):
    """Counts every CPU tensor allocated since the meter was made, and those given to `count`.

    Bytes are those asked for, exact and from every thread. Not seen: scratch inside MKL and oneDNN, numpy's and
    Python's own memory, and shared memory (batches from worker processes) unless given to `count`.

    Args:
        library: What `load` returned.

    Raises:
        OSError: Another CPU allocator was put over ours, or too many meters are open.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__(torch.device("cpu"))
        self._library = library
        self._window: int = library.window_open()
        if self._window < 0:
            raise OSError("too many memory meters are open at once")
        self._older: Older = {}
        self._close = weakref.finalize(self, _close_window, library, self._window, self._older)
        probe = torch.empty(1)
        if not library.window_counts(self._window, probe.untyped_storage()._cdata):
            self._close()
            raise OSError("another CPU allocator was installed over the counting one")

    @property
    def live_bytes(self) -> int:
        """Bytes allocated now."""
        return int(self._library.window_live(self._window))

    @property
    def peak_bytes(self) -> int:
        """The largest `live_bytes` since the last `reset_peak`."""
        return int(self._library.window_peak(self._window))

    def reset_peak(self) -> None:
        """Start a new peak at what is live now."""
        self._library.window_reset_peak(self._window)

    def count(self, tensors: Iterable[Tensor]) -> list[int]:
        """Count tensors that were there before the meter, for as long as they live."""
        added = []
        for key, storage in storages(tensors, self.device).items():
            # a storage that was resized since may have come to the window
            size = 0 if self._library.window_counts(self._window, key) else storage.nbytes()
            if key in self._older:
                before, finalizer = self._older[key]
            elif size > 0:
                before = 0
                finalizer = weakref.finalize(storage, _forget, self._library, self._window, self._older, key)
                finalizer.atexit = False
                added.append(key)
            else:
                continue
            self._older[key] = size, finalizer
            self._library.window_adjust(self._window, size - before)
        return added

    def discount(self, added: Iterable[int]) -> None:
        """Count no longer what `count` added."""
        for key in added:
            if key in self._older:
                self._older[key][1]()

    def bytes_at_peak(self, tensors: Iterable[Tensor]) -> int:
        """Bytes of those tensors that existed when the peak was reached, each storage once."""
        found = storages(tensors, self.device).items()
        return sum(s.nbytes() for key, s in found if self._library.window_at_peak(self._window, key))

    def begin_forward(self) -> None:
        """What is allocated from now on belongs to a forward pass."""
        self._library.mark(1)

    def end_forward(self) -> None:
        """The forward pass is over."""
        self._library.mark(0)

    @property
    def forward_bytes(self) -> int:
        """Live bytes that a forward pass allocated."""
        return int(self._library.window_marked(self._window))

    @property
    def forward_bytes_at_peak(self) -> int:
        """What `forward_bytes` was when the peak was reached."""
        return int(self._library.window_peak_marked(self._window))

    def close(self) -> None:
        """Stop counting. Closing twice is as good as once."""
        self._close()


def _forget(library: ctypes.CDLL, window: int, older: Older, key: int) -> None:
    size, _ = older.pop(key)
    library.window_adjust(window, -size)


def _close_window(library: ctypes.CDLL, window: int, older: Older) -> None:
    for _, finalizer in older.values():
        finalizer.detach()
    older.clear()
    library.mark(0)
    library.window_close(window)
