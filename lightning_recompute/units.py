"""Bytes and seconds in words. Inside the package bytes are ints and seconds floats; units appear only in print."""

from __future__ import annotations

import math
import re

KIB = 1024
MIB = 1024**2
GIB = 1024**3

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL = ("KB", "MB", "GB", "TB", "PB")
_BYTES_PER_UNIT = {
    "": 1,
    **{unit.lower(): 1024**power for power, unit in enumerate(_BINARY)},
    **{unit.lower(): 1000**power for power, unit in enumerate(_DECIMAL, start=1)},
}
_SIZE = re.compile(r"(?P<number>[+-]?(\d+(_\d+)*\.?\d*|\.\d+)(e[+-]?\d+)?)\s*(?P<unit>[a-z]*)", re.IGNORECASE)


def parse_bytes(size: str | int | float) -> int:
    """Read a size.

    Args:
        size: A number of bytes, or a string of a number and a unit: `B`, `KiB`, `MiB`, `GiB`, `TiB`, `PiB` (powers
            of 1024) or `KB`, `MB`, `GB`, `TB`, `PB` (powers of 1000), in either case, with or without a space
            (`"22GiB"`, `"1.5 gb"`). Without a unit the number is bytes.

    Returns:
        The size in bytes, rounded down to a whole byte.

    Raises:
        TypeError: `size` is neither a string nor a number.
        ValueError: The string is not a size, or the size is negative or not finite.
    """
    if isinstance(size, bool) or not isinstance(size, (str, int, float)):
        raise TypeError(f"found {size!r} as a size in bytes; a number or a string such as '22GiB' is due")
    if isinstance(size, str):
        match = _SIZE.fullmatch(size.strip())
        factor = _BYTES_PER_UNIT.get(match["unit"].lower()) if match else None
        if match is None or factor is None:
            raise ValueError(
                f"found {size!r} as a size; a number and a unit is due, one of {', '.join((*_BINARY, *_DECIMAL))} "
                "(GiB is 1024**3 bytes, GB 1000**3), for example '22GiB'"
            )
        # a whole number stays one: floats are exact only up to 2**53
        number: int | float = int(match["number"]) if re.fullmatch(r"[+-]?[\d_]+", match["number"]) else 0
        number = number or float(match["number"])
    else:
        number, factor = size, 1
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"found {size!r} as a size in bytes; a finite number of at least 0 is due")
    return int(number * factor)


def binary_unit(num_bytes: int | float) -> tuple[str, int]:
    """The largest binary unit that is not above a number of bytes, and its size: `("MiB", 1048576)`."""
    power = 0
    # 1023.999 would print as 1024.00
    while abs(num_bytes) / 1024**power >= 1023.995 and power < len(_BINARY) - 1:
        power += 1
    return _BINARY[power], 1024**power


def format_bytes(num_bytes: int | float) -> str:
    """A number of bytes in the largest binary unit that leaves at least 1: `512 B`, `1.50 GiB`, `-2.00 KiB`."""
    unit, size = binary_unit(num_bytes)
    return f"{num_bytes:.0f} B" if size == 1 else f"{num_bytes / size:.2f} {unit}"


def format_seconds(seconds: float) -> str:
    """A duration in three figures: `12.3 us`, `4.56 ms`, `7.89 s`, `2:03:04`."""
    if seconds >= 600:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
    for factor, unit in ((1, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{_three_figures(seconds * factor)} {unit}"
    return f"{_three_figures(seconds * 1e6)} us"


def format_count(number: float) -> str:
    """A count in three figures with a decimal prefix: `999`, `1.23 k`, `45.6 M`, `7.89 T`."""
    power = 0
    prefixes = ("", "k", "M", "G", "T", "P", "E")
    while abs(number) >= 999.5 and power < len(prefixes) - 1:
        number, power = number / 1000, power + 1
    return f"{_three_figures(number)} {prefixes[power]}".rstrip()


def _three_figures(number: float) -> str:
    decimals = 0 if abs(number) >= 99.95 else 1 if abs(number) >= 9.995 else 2
    text = f"{number:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text and float(text) == int(number) == number else text
