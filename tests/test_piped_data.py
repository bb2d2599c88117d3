"""Fits of pipelines side by side: the weights and losses of one process that is given all rows."""

from __future__ import annotations

from typing import Any

import pytest
from distributed import in_ranks
from piped_data_checks import FITS, check_fits

pytestmark = pytest.mark.xdist_group("piped data")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return in_ranks(check_fits, tmp_path_factory.mktemp("ranks"), num_processes=4)


@pytest.mark.parametrize("name", FITS)
def test_a_fit_is_that_of_one_process(ranks: list[dict[str, Any]], name: str) -> None:
    for rank in ranks:
        for figure in ("weights", "losses", "val_loss"):
            assert rank[name][figure] < 1e-12, figure
        assert rank[name]["is_tied"]
