"""Hugging Face models under tensor and sequence parallelism, unmodified: the numbers of one process."""

from __future__ import annotations

from typing import Any

import pytest
from distributed import in_ranks
from tensor_hugging_face import MODELS, SINGLE, check_all

pytestmark = pytest.mark.xdist_group("tensor parallel")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return in_ranks(check_all, tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("name", MODELS)
def test_equal_to_one_process(found: list[dict[str, Any]], name: str) -> None:
    tolerance = 2e-6 if name in SINGLE else 1e-12
    for rank in found:
        ours = {case: off for case, off in rank["parity"].items() if case.startswith(f"{name} |")}
        assert len(ours) == 4
        assert {case: off for case, off in ours.items() if not off <= tolerance} == {}


def test_generation_is_not_divided_along_the_sequence(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["generated"] == {"sequence=False": True, "sequence=True": True}
