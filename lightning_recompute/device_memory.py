"""How much memory a device has for a process, and what a budget in words means there."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from lightning_recompute.units import parse_bytes

DEFAULT_FRACTION = 0.9
"""The budget where none is given, as a fraction of the device: the rest is for contexts and fragments."""

_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_WHOLE = re.compile(r"[+-]?\d[\d_]*")


def budget_bytes(budget: str | int | float, device: torch.device | str, *, num_processes: int = 1) -> int:
    """A memory budget as bytes, for each process.

    Args:
        budget: A size (`"22GiB"`), a number of bytes (an int, or a whole float above 1), or a fraction of the device
            (a float above 0 and at most 1). A string that is a number is read as that number.
        device: The device that a fraction is of.
        num_processes: Processes that share the device: a fraction is of what each of them has.

    Raises:
        ValueError: The budget is no size, not above 0, or a float that is neither a fraction nor whole; or the size of
            the device is not known.
        TypeError: The budget is neither a string nor a number.
    """
    number = _number(budget) if isinstance(budget, str) else budget
    if isinstance(number, bool) or not isinstance(number, str | int | float):
        raise TypeError(
            f"memory_budget={budget!r}: a size such as '22GiB', a number of bytes, or a fraction of the device such as "
            "0.9 is due"
        )
    if isinstance(number, str):
        try:
            number = parse_bytes(number)
        except ValueError as error:
            raise ValueError(f"memory_budget={budget!r}: {error}, or a fraction of the device such as 0.9") from error
    if not (math.isfinite(number) and number > 0):
        raise ValueError(
            f"memory_budget={budget!r}: more than 0 is due, a size such as '22GiB' or a fraction of the device such as "
            "0.9; leave it out where there is no budget"
        )
    if isinstance(number, int):
        return number
    if number <= 1:
        return int(number * device_bytes(device) / num_processes)
    if not number.is_integer():
        raise ValueError(
            f"memory_budget={budget!r}: neither a fraction of the device (above 0 and at most 1) nor a whole number of "
            f"bytes; for a size name its unit: '{number:g}GiB'"
        )
    return int(number)


def device_bytes(device: torch.device | str) -> int:
    """Memory that a process may use on a device.

    Of a CPU: the limit of the process's control group (version 2 or 1, with the groups around it), or the machine's
    memory, whichever is less. Of others: what the device has, used by others or not.

    Args:
        device: The device; of a type without an index the current one.

    Raises:
        ValueError: It is not known.
    """
    device = torch.device(device)
    if device.type == "cpu":
        sizes = [*_group_limits(_MEMBERSHIP, _CGROUPS), *_machine_bytes()]
        if sizes:
            return min(sizes)
    elif device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    elif device.type == "mps":
        return int(torch.mps.recommended_max_memory())
    elif hasattr(torch.get_device_module(device), "mem_get_info"):
        return int(torch.get_device_module(device).mem_get_info(device)[1])
    raise ValueError(
        f"the memory of device {str(device)!r} is not known here, so no fraction of it either: give memory_budget as "
        "a size, for example '22GiB'"
    )


def device_name(device: torch.device) -> str:
    """A device in words: `cpu`, `cuda:0 (NVIDIA H100 80GB HBM3)`."""
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)


def _number(text: str) -> int | float | str:
    """The number that a string is, else the string."""
    text = text.strip()
    if _WHOLE.fullmatch(text):
        return int(text)
    try:
        return float(text)
    except ValueError:
        return text


def _machine_bytes() -> Iterator[int]:
    try:
        yield os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not on this system
        return


def _group_limits(membership: Path, cgroups: Path) -> Iterator[int]:
    """The limits of a process's control group and of those around it, where there are any.

    Args:
        membership: The file of lines `number:controllers:path`; version 2 names no controllers.
        cgroups: Where the control groups are mounted.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", maxsplit=2)
        if not controllers:
            roots, name = [cgroups, cgroups / "unified"], "memory.max"
        elif "memory" in controllers.split(","):
            roots, name = [cgroups / "memory"], "memory.limit_in_bytes"
        else:
            continue
        # a container may see its own group as the root, under a path of the machine outside
        group = Path(path.lstrip("/"))
        for root in roots:
            for folder in (root / group, *(root / parent for parent in group.parents)):
                yield from _limit(folder / name)


def _limit(file: Path) -> Iterator[int]:
    try:
        text = file.read_text().strip()
    except OSError:
        return
    if text.isdecimal():  # else "max"
        yield int(text)
