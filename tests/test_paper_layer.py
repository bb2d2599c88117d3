"""Bytes of a layer under tensor and sequence parallelism: the formulas of the paper, to the byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from distributed import in_ranks
from paper_layer_checks import LLAMA, SIZES, VARIANTS, WIDE, check_all

pytestmark = pytest.mark.xdist_group("paper layer")

Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return in_ranks(check_all, tmp_path_factory.mktemp("layers"))


@pytest.mark.parametrize("sizes", SIZES, ids=["second layer", "third layer"])
@pytest.mark.parametrize("name", VARIANTS)
def test_a_layer_keeps_what_the_paper_says(found: Found, name: str, sizes: Any) -> None:
    variant = VARIANTS[name]
    due = variant.due(sizes) + sum(variant.extras(sizes).values())
    for rank in found:
        fewer, more = rank["layers"][f"{name} {SIZES.index(sizes)}"]
        assert more - fewer == due


def test_the_formulas_themselves() -> None:
    """T17: the paper's table for its 175B model at t = 8, where 5as/h is 80."""
    shares = {name: float(variant.per_sbh(SIZES[0].scores * 0 + 80, 8)) for name, variant in VARIANTS.items()}
    baseline = shares.pop("tp")
    assert shares.pop("none") == 114
    percent = {name: round(100 * share / baseline, 1) for name, share in shares.items()}
    due = {"tp_sp": 62.0, "tp_selective": 56.5, "tp_sp_selective": 18.5, "full": 8.7, "full_distributed": 1.1}
    assert percent == due


def test_nothing_outlives_backward(found: Found) -> None:
    """But the parked state of the random numbers, which was there before and has been exchanged."""
    for rank in found:
        for name, steps in rank["left"].items():
            parked = torch.get_rng_state().nbytes if VARIANTS[name.split()[0]].tensor else 0
            assert steps == [parked] * 2


def test_backward_gathers_one_input_at_a_time(found: Found) -> None:
    """Beside what backward takes without sequence parallelism: one whole input (2 sbh), put together again."""
    for rank in found:
        assert rank["transient"]["tp_sp"] <= rank["transient"]["tp"] + 2 * WIDE.sbh


def test_every_hidden_state_of_a_llamas_layer_is_kept_as_a_part(found: Found) -> None:
    whole, part = (LLAMA.rows, LLAMA.length, LLAMA.hidden), (LLAMA.rows, LLAMA.length // 2, LLAMA.hidden)
    rows = (LLAMA.rows * LLAMA.length, LLAMA.hidden)  # as a linear flattens them
    row, half = (*whole[:2], 1), (*part[:2], 1)
    for rank in found:
        without, _ = rank["llama tensors"]["tp"]
        within, outside = rank["llama tensors"]["tp_sp"]
        assert without.pop(("torch.float32", whole)) == within.pop(("torch.float32", part)) == 2  # inputs of norms
        assert without.pop(("torch.float32", row)) == within.pop(("torch.float32", half)) == 2  # and their deviations
        # outputs of norms, and inputs of the linears that read them
        of_norms = without.pop(("torch.bfloat16", whole)) + without.pop(("torch.bfloat16", rows))
        assert of_norms == within.pop(("torch.bfloat16", part)) == 4
        assert within == without  # what each rank has of heads and of the MLP is its own share
        # the last block's output is put together: the final norm and the head work on whole sequences
        assert outside[("torch.float32", whole)] == outside[("torch.bfloat16", whole)] == 1


def test_a_llamas_layer_in_bytes(found: Found) -> None:
    saved = 4 * 2 * LLAMA.sbh + 2 * 4 * LLAMA.sbh + 2 * 4 * LLAMA.rows * LLAMA.length
    for rank in found:
        assert rank["llama"]["tp"] - rank["llama"]["tp_sp"] == saved // 2
