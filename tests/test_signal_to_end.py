"""SIGTERM in a fit of several processes: all end between the same two batches, whichever is told and when."""

from __future__ import annotations

from typing import Any

import pytest
from distributed import in_ranks
from signal_checks import CASES, check_all

pytestmark = pytest.mark.xdist_group("signals")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return in_ranks(check_all, tmp_path_factory.mktemp("signals"), limit=60)


@pytest.mark.parametrize("name", CASES)
def test_all_end_before_the_next_batch(ranks: list[dict[str, Any]], name: str) -> None:
    """In the last batch of an epoch, too; callbacks hear of it, and nothing is left."""
    *_, batch = CASES[name]
    for rank in ranks:
        found = rank[name]
        assert found["raised"] == "SIGTERMException"
        assert found["ends"] == [f"SIGTERMException after {batch + 1}"]
        assert found["left"] == found["on the module"] == []
        assert found["handler"]
