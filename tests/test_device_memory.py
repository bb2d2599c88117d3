"""Budgets in words, fractions of the device, and what a process may use of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_recompute import device_memory
from lightning_recompute.device_memory import budget_bytes, device_bytes
from lightning_recompute.units import GIB


@pytest.fixture
def _device_of_1000_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_memory, "device_bytes", lambda device: 1000)


@pytest.mark.usefixtures("_device_of_1000_bytes")
@pytest.mark.parametrize(
    ("budget", "due"),
    [
        ("22GiB", 22 * GIB),
        ("1.5 GB", 1_500_000_000),
        (4096, 4096),
        ("4096", 4096),
        ("4_096", 4096),
        (1, 1),
        ("1", 1),
        (9007199254740993, 9007199254740993),
        ("9007199254740993", 9007199254740993),  # a float would lose the last bit
        (0.9, 900),
        (" 0.9 ", 900),
        (1.0, 1000),
        ("1.0", 1000),
        ("5e-1", 500),
        (2.5e9, 2_500_000_000),
        ("2.5e9", 2_500_000_000),
    ],
)
def test_budgets_are_read(budget: str | float, due: int) -> None:
    assert budget_bytes(budget, "cpu") == due
    assert isinstance(budget_bytes(budget, "cpu"), int)


@pytest.mark.usefixtures("_device_of_1000_bytes")
def test_a_fraction_is_shared_by_the_processes_of_a_device() -> None:
    assert budget_bytes(0.9, "cpu", num_processes=3) == 300
    assert budget_bytes("1KiB", "cpu", num_processes=3) == 1024


@pytest.mark.parametrize(
    ("budget", "error", "words"),
    [
        ("22 gigs", ValueError, "memory_budget='22 gigs'.*a number and a unit is due.*or a fraction"),
        ("", ValueError, "memory_budget=''"),
        (0, ValueError, "memory_budget=0: more than 0 is due"),
        ("0GiB", ValueError, "memory_budget='0GiB': more than 0 is due"),
        (-0.5, ValueError, "more than 0 is due"),
        (float("nan"), ValueError, "more than 0 is due"),
        ("inf", ValueError, "memory_budget='inf': more than 0 is due"),
        (22.5, ValueError, "memory_budget=22.5: neither a fraction.*nor a whole number of bytes.*'22.5GiB'"),
        ("22.5", ValueError, "memory_budget='22.5': neither"),
        (True, TypeError, "memory_budget=True: a size"),
        (None, TypeError, "memory_budget=None"),
        ([1], TypeError, r"memory_budget=\[1\]"),
    ],
)
def test_what_is_refused(budget: str | float, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        budget_bytes(budget, "cpu")


# ---- what a process may use


def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, membership: str, limits: dict[str, str]) -> None:
    """Control groups in a folder of their own."""
    (tmp_path / "membership").write_text(membership)
    for file, limit in limits.items():
        path = tmp_path / "cgroup" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{limit}\n")
    monkeypatch.setattr(device_memory, "_MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(device_memory, "_CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(device_memory.os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1000}.__getitem__)


MACHINE = 4096 * 1000


@pytest.mark.parametrize(
    ("membership", "limits", "due"),
    [
        # version 2, in a container that sees its own group as the root
        ("0::/\n", {"memory.max": "1000"}, 1000),
        ("0::/\n", {"memory.max": "max"}, MACHINE),
        # version 2, a service inside a slice: the narrower of the two
        ("0::/a.slice/b.service\n", {"a.slice/memory.max": "700", "a.slice/b.service/memory.max": "max"}, 700),
        ("0::/a.slice/b.service\n", {"a.slice/memory.max": "700", "a.slice/b.service/memory.max": "600"}, 600),
        # version 1, in its own group, under a path from outside, and without a limit (a number near 2**63)
        ("4:memory:/job\n0::/\n", {"memory/job/memory.limit_in_bytes": "500"}, 500),
        ("4:cpu,memory:/docker/123\n", {"memory/memory.limit_in_bytes": "400"}, 400),
        ("4:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712"}, MACHINE),
        # both versions at once
        ("4:pids:/\n0::/job\n", {"unified/job/memory.max": "300"}, 300),
        ("4:pids:/x\n", {"memory.max": "1"}, MACHINE),
        ("", {}, MACHINE),
    ],
)
def test_limits_of_a_process(
    membership: str, limits: dict[str, str], due: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group(tmp_path, monkeypatch, membership, limits)
    assert device_bytes("cpu") == due
    assert budget_bytes(0.5, torch.device("cpu")) == due // 2


def test_without_control_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group(tmp_path, monkeypatch, "", {})
    (tmp_path / "membership").unlink()
    assert device_bytes("cpu") == MACHINE


def test_unknown_sizes_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group(tmp_path, monkeypatch, "", {})

    def sysconf(name: str) -> int:
        raise ValueError("unrecognized configuration name")

    monkeypatch.setattr(device_memory.os, "sysconf", sysconf)
    with pytest.raises(ValueError, match=r"memory of device 'cpu' is not known here.*'22GiB'"):
        budget_bytes(0.9, "cpu")
    assert budget_bytes("1KiB", "cpu") == 1024


def test_this_machine() -> None:
    assert 2**26 < device_bytes("cpu") < 2**60


def test_the_size_of_a_cuda_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1, 80 * GIB))
    assert device_bytes("cuda:1") == 80 * GIB
    assert budget_bytes(0.5, "cuda") == 40 * GIB


@pytest.mark.gpu
def test_a_real_cuda_device() -> None:
    assert device_bytes("cuda") == torch.cuda.get_device_properties(0).total_memory
