"""Scripts that know nothing of a pipeline: attributes that steps change, data that is divided without a seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from distributed import in_one, in_ranks
from piped_users import check_all

pytestmark = pytest.mark.xdist_group("piped users")


@pytest.fixture(scope="module")
def due(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    result: dict[str, Any] = in_one(check_all, tmp_path_factory.mktemp("alone"))
    return result


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def found(ranks: Path) -> list[dict[str, Any]]:
    return in_ranks(check_all, ranks)


@pytest.mark.parametrize("name", ["kept", "zbv"])
def test_what_a_step_keeps_behind_the_blocks_is_on_every_rank(
    found: list[dict[str, Any]], due: dict[str, Any], name: str
) -> None:
    """Lists of outputs, counters, arrays and dicts, as hooks at the end of an epoch read them."""
    for rank in found:
        assert _flat(rank[name]["kept"]) == pytest.approx(_flat(due["kept"]["kept"]), rel=1e-6)
        assert rank[name]["metrics"] == pytest.approx(due["kept"]["metrics"], rel=1e-6)
    assert len(due["kept"]["kept"]) == 5, "sanity validation; two epochs of training and validation"


def test_what_would_slow_each_step_down_is_not_sent_but_said(found: list[dict[str, Any]], ranks: Path) -> None:
    assert [rank["large"] for rank in found] == [1, 200_000]
    said = [path.read_text().count("training_step gives the module's 'large' more") for path in _outputs(ranks)]
    assert said == [0, 1]


def test_data_that_is_divided_without_a_seed(found: list[dict[str, Any]]) -> None:
    """Ranks that were never seeded alike draw the same split in `setup`, and see the same batches."""
    first, second = (rank["unseeded"] for rank in found)
    assert first == second
    assert first != sorted(first)


def test_validation_that_calls_the_model_again_is_refused_before_the_training(found: list[dict[str, Any]]) -> None:
    for rank in found:
        said, num_steps = rank["generates"]
        assert said.startswith("ValueError: validation_step called blocks.0 a second time")
        assert "belongs after the fit" in said
        assert num_steps == 0


def _outputs(folder: Path) -> list[Path]:
    return [folder / f"{rank}.txt" for rank in range(2)]


def _flat(tree: Any) -> list[float]:
    if isinstance(tree, dict):
        return [leaf for value in tree.values() for leaf in _flat(value)]
    return [leaf for value in tree for leaf in _flat(value)] if isinstance(tree, list | tuple) else [tree]
