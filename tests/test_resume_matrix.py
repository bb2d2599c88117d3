"""Checkpoints move between layouts: the next losses are those of the layout that saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from distributed import in_one, in_ranks
from resume_matrix import KINDS, LAYOUTS, NUM_STEPS, ORDER, is_tried, kind_of, resume, resume_rest, save

pytestmark = [pytest.mark.xdist_group("checkpoints"), pytest.mark.timeout(1200)]


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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where each layout has saved, after it trained as one process does."""
    folder = tmp_path_factory.mktemp("matrix")
    saved = in_all(save, folder)
    for name, losses in saved.items():
        assert losses == pytest.approx(saved[f"one, {name.partition(', ')[2]}"], rel=1e-9), name
    kept = {path.name: path.is_dir() for path in (folder / "kept").glob("*.ckpt")}
    assert kept == {f"{layout}, {kind}.ckpt": layout not in ("one", "dp2") for layout in ORDER for kind in KINDS}
    return folder


def test_saved_under_each_layout_and_resumed_under_others(folder: Path) -> None:
    assert_alike(
        in_all(resume, folder), {(source, target) for source in ORDER for target in ORDER if is_tried(source, target)}
    )


@pytest.mark.long
def test_saved_under_each_layout_and_resumed_under_each(folder: Path) -> None:
    assert_alike(
        in_all(resume_rest, folder),
        {(source, target) for source in ORDER for target in ORDER if not is_tried(source, target)},
    )


def assert_alike(resumed: dict[str, list[float]], pairs: set[tuple[str, str]]) -> None:
    """The next losses are those of one process."""
    for source, target in pairs:
        kind = kind_of(source, target)
        due = resumed[f"one, {kind} -> one"]
        assert len(due) == NUM_STEPS
        assert resumed[f"{source}, {kind} -> {target}"] == pytest.approx(due, rel=1e-9), (source, target, kind)
