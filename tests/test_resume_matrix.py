"""Checkpoints move between layouts: the next losses are those of the layout that saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from distributed import in_one, in_ranks
from resume_matrix import KINDS, LAYOUTS, NUM_STEPS, kind_of, resume, save

pytestmark = pytest.mark.xdist_group("checkpoints")


def in_all(function: Any, folder: Path) -> dict[str, list[float]]:
    """What a function gives in one, two and four processes, which all ranks agree on."""
    found: dict[str, list[float]] = {}
    for world in LAYOUTS:
        own = folder / f"{function.__name__}-{world}"
        own.mkdir()
        ranks = [in_one(function, own, 300)] if world == 1 else in_ranks(function, own, 300, world)
        assert all(rank == ranks[0] for rank in ranks)
        found |= ranks[0]
    return found


def test_saved_under_each_layout_and_resumed_under_each(tmp_path: Path) -> None:
    saved = in_all(save, tmp_path)
    for name, losses in saved.items():
        assert losses == pytest.approx(saved[f"one, {name.partition(', ')[2]}"], rel=1e-9), name
    kept = {path.name: path.is_dir() for path in (tmp_path / "kept").glob("*.ckpt")}
    assert kept == {
        f"{layout}, {kind}.ckpt": layout not in ("one", "dp2")
        for layouts in LAYOUTS.values()
        for layout in layouts
        for kind in KINDS
    }
    resumed = in_all(resume, tmp_path)
    layouts = [layout for group in LAYOUTS.values() for layout in group]
    for source in layouts:
        for target in layouts:
            kind = kind_of(source, target)
            due = resumed[f"one, {kind} -> one"]
            assert len(due) == NUM_STEPS
            assert resumed[f"{source}, {kind} -> {target}"] == pytest.approx(due, rel=1e-9), (source, target, kind)
