"""Checkpoint folders: every layout loads what every layout saved, to the bit; a crash leaves the older one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_layouts import load_all, names_are_left_out, save_all
from checkpoint_toys import EVERY, LAYOUTS
from distributed import in_ranks

pytestmark = pytest.mark.xdist_group("sharded_checkpoint")

Found = dict[str, list[str]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Where values differ, by the layouts that saved and loaded."""
    folder = tmp_path_factory.mktemp("layouts")

    def run(function: Callable[[Path], Any], size: int) -> Found:
        place = folder / f"{function.__name__}{size}"
        place.mkdir()
        if size == 1:
            return function(place)  # type: ignore[no-any-return]
        first, *others = in_ranks(function, place, 60, num_processes=size)
        assert all(other == first for other in others)
        return first  # type: ignore[no-any-return]

    for size in LAYOUTS:
        run(save_all, size)
    assert all(names_are_left_out(folder / "x", layout) for layout in EVERY)
    results: Found = {}
    for size in LAYOUTS:
        results |= run(load_all, size)
    return results


@pytest.mark.parametrize("loading", EVERY)
@pytest.mark.parametrize("saved", EVERY)
def test_every_layout_loads_what_every_layout_saved(found: Found, saved: str, loading: str) -> None:
    assert found[f"{saved}.ckpt -> {loading}"] == []


@pytest.mark.parametrize("loading", EVERY)
def test_every_layout_loads_an_ordinary_file(found: Found, loading: str) -> None:
    for saved in EVERY:
        assert found[f"{saved}.file -> {loading}"] == []
