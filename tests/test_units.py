"""Bytes, seconds and counts in words and back."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_recompute import units
from lightning_recompute.units import binary_unit, format_bytes, format_count, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("size", "due"),
    [
        ("22GiB", 22 * 1024**3),
        (" 22 gib ", 22 * 1024**3),
        ("1.5 GB", 1_500_000_000),
        ("0.5KiB", 512),
        (".5KiB", 512),
        ("2e3 MB", 2_000_000_000),
        ("1_000", 1000),
        ("512 B", 512),
        ("512", 512),
        ("0", 0),
        ("9007199254740993B", 9007199254740993),  # a float would lose the last bit
        ("3PiB", 3 * 1024**5),
        (17, 17),
        (17.9, 17),
    ],
)
def test_sizes_are_read(size: str | float, due: int) -> None:
    assert parse_bytes(size) == due
    assert isinstance(parse_bytes(size), int)


@pytest.mark.parametrize(
    "size", ["", "GiB", "22G", "22 gigs", "1.2.3GiB", "22GiB/s", "-1GiB", "inf", "nan", "1e999", -1]
)
def test_what_is_no_size_is_refused(size: str | int) -> None:
    with pytest.raises(ValueError, match=r"found .*is due"):
        parse_bytes(size)


@pytest.mark.parametrize("size", [None, True, [22], b"22GiB"])
def test_what_is_neither_string_nor_number_is_refused(size: object) -> None:
    with pytest.raises(TypeError, match=r"found .*'22GiB' is due"):
        parse_bytes(size)  # type: ignore[arg-type]  # the error is the point


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (22 * 1024**3, "22.00 GiB"),
        (1024**2 - 1, "1.00 MiB"),  # not 1024.00 KiB
        (-2048, "-2.00 KiB"),
        (5000 * 1024**5, "5000.00 PiB"),
    ],
)
def test_bytes_in_print(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


@given(st.integers(min_value=0, max_value=2**60))
def test_what_is_printed_reads_back_within_half_a_hundredth(num_bytes: int) -> None:
    unit, size = binary_unit(num_bytes)
    assert abs(parse_bytes(format_bytes(num_bytes)) - num_bytes) <= 0.00501 * size + 1
    assert format_bytes(num_bytes).endswith(unit)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 us"),
        (1.234e-5, "12.3 us"),
        (0.00456, "4.56 ms"),
        (0.1, "100 ms"),
        (1.0, "1 s"),
        (7.891, "7.89 s"),
        (599.9, "600 s"),
        (7384.2, "2:03:04"),
    ],
)
def test_seconds_in_print(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (3.95, "3.95"),
        (999, "999"),
        (999.6, "1.00 k"),
        (1234, "1.23 k"),
        (45_600_000, "45.6 M"),
        (9.895e14, "990 T"),
    ],
)
def test_counts_in_print(number: float, text: str) -> None:
    assert format_count(number) == text


def test_units_imports_neither_torch_nor_lightning() -> None:
    tree = ast.parse(Path(units.__file__).read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported == {"__future__", "math", "re"}
