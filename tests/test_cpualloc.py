"""The counting allocator: windows, threads, and how it is built, kept and given up."""

from __future__ import annotations

import functools
import gc
import os
import re
import tempfile
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch

from lightning_recompute import cpualloc
from lightning_recompute.ledger import Ledger
from lightning_recompute.memory import open_meter

FLOAT = 4


def allocator_meter() -> cpualloc.AllocatorMeter:
    library = cpualloc.load()
    assert library is not None, "these tests need a C++ compiler"
    return cpualloc.AllocatorMeter(library)


def test_windows_do_not_disturb_each_other_and_see_every_thread() -> None:
    with closing(allocator_meter()) as outer:
        kept = [torch.ones(1000)]
        outer.reset_peak()
        with closing(allocator_meter()) as inner:
            assert inner.live_bytes == 0
            thread = threading.Thread(target=lambda: kept.append(torch.ones(500)))
            thread.start()
            thread.join()
            del kept[0]
            inner.reset_peak()
            assert (inner.live_bytes, inner.peak_bytes) == (2000, 2000)
        assert (outer.live_bytes, outer.peak_bytes) == (2000, 6000)
        del kept[:]
        assert outer.live_bytes == 0
    outer.close()


def test_meters_that_are_dropped_are_closed_and_too_many_are_refused() -> None:
    for _ in range(50):
        allocator_meter()
    meters: list[cpualloc.AllocatorMeter] = []
    with pytest.raises(OSError, match="too many memory meters"):
        meters.extend(allocator_meter() for _ in range(50))
    assert meters
    meters.clear()
    gc.collect()  # the error holds the frame that holds one
    allocator_meter().close()


def test_counting_is_exact_when_threads_allocate_at_once() -> None:
    def work() -> None:
        for size in range(1, 400):
            held = [torch.empty(size), torch.empty(size)]
            held.pop()

    with closing(allocator_meter()) as meter:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert meter.live_bytes == 0
        assert 2 * 399 * FLOAT <= meter.peak_bytes <= 4 * 2 * 400 * FLOAT


def test_several_build_at_once_and_nobody_sees_half_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "compiler"
    # writes its output (the word after -o) in two halves, and tells that it ran
    script = (
        'echo >> "$0.runs"; while [ "$1" != -o ]; do shift; done; printf half > "$2"; sleep 0.5; printf half >> "$2"'
    )
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(cpualloc.build().read_text())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == ["halfhalf"] * 2
    assert [path.name for path in (tmp_path / "lightning_recompute").iterdir()] == [cpualloc.build().name]
    assert len(Path(f"{compiler}.runs").read_text()) == 2  # and the third call found it there


@pytest.mark.parametrize(("compiler", "message"), [("", "no C.. compiler found"), ("false", "false .* failed")])
def test_without_a_working_compiler_operators_are_watched(
    compiler: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", compiler)
    if not compiler:
        monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(cpualloc, "load", functools.cache(cpualloc.load.__wrapped__))
    for _ in range(2):
        assert isinstance(open_meter("cpu"), Ledger)
    assert len(caplog.records) == 1
    assert re.search(message, caplog.text)
    assert list((tmp_path / "lightning_recompute").iterdir()) == []


def test_an_allocator_put_over_ours_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    library = cpualloc.load()

    class Deaf:
        """The library, as if torch allocated elsewhere."""

        def __getattr__(self, name: str) -> Callable[..., int]:
            return {"window_counts": lambda *_: 0}.get(name) or getattr(library, name)

    monkeypatch.setattr(cpualloc, "load", Deaf)
    with pytest.raises(OSError, match="another CPU allocator"):
        cpualloc.AllocatorMeter(cpualloc.load())
    assert isinstance(open_meter("cpu"), Ledger)


def test_the_cache_is_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert cpualloc.cache_folder() == tmp_path / "cache" / "lightning_recompute"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    fallback = cpualloc.cache_folder()
    assert fallback == tmp_path / f"lightning_recompute-{os.getuid()}"
    # code is loaded from there: a folder that somebody else put there is not used
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    fallback.rename(tmp_path / "lightning_recompute-4711")
    assert cpualloc.cache_folder() not in (fallback, tmp_path / "lightning_recompute-4711")
