"""Collectives with gradients, the divided cross-entropy and the gathered linear, on two ranks and on one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from collectives_checks import check_all
from distributed import in_ranks

from lightning_recompute.vocabulary import cross_entropy, full_precision, whole

pytestmark = pytest.mark.xdist_group("tensor parallel")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return in_ranks(check_all, tmp_path_factory.mktemp("collectives"))


@pytest.mark.parametrize(("check", "due"), [("shapes", 13), ("losses", 12), ("linears", 6)])
def test_values_gradients_and_what_is_sent(found: list[dict[str, Any]], check: str, due: int) -> None:
    for rank in found:
        assert len(rank[check]) == due
        assert [name for name, fits in rank[check].items() if not fits] == []


def test_one_rank_has_torchs_cross_entropy() -> None:
    logits, targets = torch.randn(2, 3, 5, dtype=torch.bfloat16), torch.randint(5, (2, 3))
    loss = cross_entropy(logits, targets)
    assert torch.equal(loss, F.cross_entropy(logits.float().flatten(0, 1), targets.flatten()))
    assert whole(logits) is logits
    assert full_precision(logits.double()).dtype == torch.float64
