"""Pipelines of two and four processes: the same gradients as one process, each rank with its share."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from distributed import in_ranks
from pipeline_checks import PAIRS, SCHEDULES
from pipeline_four_checks import FEW, MODELS, check_four
from pipeline_two_checks import RECOMPUTED, check_error, check_two

from lightning_recompute.cost import in_flight
from lightning_recompute.pipeline_settings import settled_schedule

pytestmark = pytest.mark.xdist_group("pipeline")

EXACT = 1e-12
Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return in_ranks(check_two, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return in_ranks(check_four, tmp_path_factory.mktemp("four"), num_processes=4)


def check_parity(cases: list[dict[str, Any]], case: str) -> None:
    """Gradients, losses, evaluation; names, shares and the end."""
    for found in cases:
        for figure in ("gradients", "loss", "evaluation", "norm"):
            assert found[figure] < EXACT, (case, figure, found[figure])
        assert found["names"] == [], case
        assert found["bytes"] == found["own_bytes"], case
        assert found["clean"], case
        assert found["whole"], case
        assert found["numel"] < found["total"], case
    if not cases[0]["tied"]:
        assert sum(found["numel"] for found in cases) == cases[0]["total"], case


def test_gradients_are_those_of_one_process(two: Ranks) -> None:
    assert set(two[0]["parity"]) == {f"{schedule} {name}" for schedule, names in PAIRS.items() for name in names}
    assert all(len(names) >= 3 for names in PAIRS.values())
    for case in two[0]["parity"]:
        check_parity([rank["parity"][case] for rank in two], case)


def test_longer_pipelines(four: Ranks) -> None:
    assert set(four[0]["parity"]) == set(MODELS)
    for case in four[0]["parity"]:
        check_parity([rank["parity"][case] for rank in four], case)
    check_parity([rank["split"] for rank in four], "split")
    assert four[3]["split"]["numel"] > four[3]["split"]["total"] / 2
    for rank in four:
        for schedule in SCHEDULES:
            assert rank["alive"][schedule]["gradients"] < EXACT, schedule


def test_fewer_microbatches_than_ranks(four: Ranks) -> None:
    for schedule in FEW:
        check_parity([rank["few"][schedule] for rank in four], schedule)


def test_pipelines_side_by_side_do_not_mix(four: Ranks) -> None:
    for schedule in four[0]["side by side"]:
        for ranks in ((0, 2), (1, 3)):
            check_parity([four[rank]["side by side"][schedule] for rank in ranks], schedule)


def test_stages_of_layers_that_ranks_share(four: Ranks) -> None:
    for rank in four:
        assert set(rank["beside tensor"]) == {"1f1b False", "zbv True"}
        for case, found in rank["beside tensor"].items():
            assert found["worst"] < EXACT, case
            assert found["whole"], case


def test_as_much_is_alive_as_the_planner_counts(four: Ranks) -> None:
    for name, settings in SCHEDULES.items():
        schedule, virtual = settled_schedule(settings.schedule, settings.virtual)
        due = in_flight(schedule, 4, 8, virtual)
        assert tuple(rank["alive"][name]["chunks"] for rank in four) == due, name
    assert [rank["alive"]["1f1b"]["chunks"] for rank in four] == [4, 3, 2, 1]


def test_tied_parameters_are_known_as_one(two: Ranks, four: Ranks) -> None:
    assert two[0]["parity"]["1f1b gpt-tied"]["tied"] == ["model.token_embedding.weight"]
    assert two[0]["parity"]["1f1b gpt2-eager"]["tied"] == ["model.transformer.wte.weight"]
    # both its uses are on the first rank
    assert two[0]["parity"]["zbv gpt-tied"]["tied"] == []
    assert two[0]["parity"]["interleaved-zb ClassToken"]["tied"] == ["token"]
    assert four[0]["parity"]["Shared"]["tied"] == ["blocks.0.norm1.weight", "blocks.0.norm1.bias"]


def test_units_recompute_once(two: Ranks) -> None:
    assert set(two[0]["recompute"]) == {
        f"{schedule} {plan}" for schedule, plans in RECOMPUTED.items() for plan in plans
    }
    for rank in two:
        for case, found in rank["recompute"].items():
            assert found["gradients"] < EXACT, case
            assert found["calls"] == found["due"], case
    # a block's forward runs for each microbatch, and once more for its backward
    assert two[0]["recompute"]["zbv uniform-1"]["calls"] == [8, 8, 0, 0, 0, 0, 8, 8]


def test_freed_outputs_are_made_again_once(two: Ranks) -> None:
    for rank in two:
        for case, found in rank["freed"].items():
            assert found["gradients"] < EXACT, case
            assert set(found["norms"]) == {8}, case


def test_memory_does_not_grow_with_microbatches(two: Ranks) -> None:
    hidden = 16 * 12 * 32 * 8
    for rank in two:
        for schedule in ("1f1b", "interleaved", "zbv"):
            few, many = (rank["memory"][f"{schedule} {number}"] for number in (6, 12))
            assert abs(many["peak"] - few["peak"]) < hidden / 4, schedule
            assert many["peak"] > 8 * hidden
            # a list of numbers stays, no buffer
            assert max(many["left 0"], many["left 1"]) < 1000, schedule


def test_batches_of_other_sizes(two: Ranks) -> None:
    for rank in two:
        for schedule, found in rank["uneven"].items():
            assert len(found) == 8
            for case, worst in found.items():
                assert worst < EXACT, (schedule, case)


def test_stages_draw_the_same_numbers(two: Ranks) -> None:
    for rank in two:
        assert max(rank["noise"].values()) < EXACT


def test_gradients_are_handed_back_by_the_loss(two: Ranks) -> None:
    for rank in two:
        found = rank["handed back"]
        assert found["before"], "the parameter had a gradient before the loss was backpropagated"
        assert found["kept"], "gradients of the batch before changed"
        assert found["dropped"]
        assert max(found["added"], found["scaled"]) < EXACT
        assert found["shape"] == []
        assert "a second time" in found["twice"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Skip", "uses after the blocks a value that was made"),
        ("Deep", "uses after the blocks a value that was made"),
        ("Hidden", "uses in blocks.2 a value that was made before the blocks"),
        ("Number", "the first loss is NaN"),
        ("NumberMask", "blocks.2 is given something beside the hidden state that differs"),
        ("Extra", "blocks.1 is given keyword ['extra'], which needs a gradient"),
        ("Twice", "called once in a step"),
        ("Nothing", "returned NoneType as its loss"),
        ("meta", "a module on the meta device cannot be divided"),
        ("t5-sdpa", "exactly one list of blocks, found 2: model.encoder.block"),
    ],
)
def test_refusals(two: Ranks, name: str, words: str) -> None:
    for rank in two:
        assert words in rank["refused"][name]["message"]
        assert rank["refused"][name]["clean"]


def test_an_error_of_one_rank_ends_all(tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(AssertionError, match="a mistake of the user") as caught:
        in_ranks(check_error, tmp_path, limit=60)
    assert time.monotonic() - start < 50
    assert str(caught.value).startswith("0 alive")
    assert "KeyError: 'a mistake of the user'" in str(caught.value)
    assert "Full Schedule" not in str(caught.value)
    assert "failed to run" not in str(caught.value)
