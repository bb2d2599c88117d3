"""Hugging Face models, unmodified, as pipelines: loss and gradients of one process with the same microbatches."""

from __future__ import annotations

from typing import Any

import pytest
from distributed import in_ranks
from pipeline_checks import SCHEDULES
from pipeline_hugging_face_checks import (
    ARCHITECTURES,
    FOUR,
    PLANNED,
    RAGGED,
    REFUSALS,
    USERS,
    check_four,
    check_product,
    check_two,
)
from pipeline_hugging_face_models import CASES

pytestmark = pytest.mark.xdist_group("pipeline hugging face")

EXACT = 1e-12
Ranks = list[dict[str, Any]]
# all ranks have what the loss reaches
WHOLE = ("Penalty",)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return in_ranks(check_two, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return in_ranks(check_four, tmp_path_factory.mktemp("four"), num_processes=4)


def check_parity(ranks: Ranks, case: str) -> None:
    """Gradients, loss, evaluation and norm; each rank has a part; nothing stays, and the user's class is its own."""
    for found in ranks:
        off = {figure: found[figure] for figure in ("gradients", "loss", "evaluation", "norm")}
        assert max(off.values()) < EXACT, (case, off)
        assert found["classes"] == 1, case
        assert found["clean"], case
        assert found["whole"], case
    numbers = [found["numel"] for found in ranks]
    total = ranks[0]["total"]
    assert sum(numbers) >= total, case
    assert min(numbers) < total, case
    assert max(numbers) < total or case.split()[1] in WHOLE, case


def test_what_is_covered() -> None:
    """Every architecture has a schedule, every schedule three architectures, every kind of plan two schedules."""
    pairs = {(schedule, name) for name, schedule in ARCHITECTURES.items()}
    pairs |= {pair for of_plan in PLANNED.values() for pair in of_plan}
    assert {name for _, name in pairs} == set(CASES)
    assert len(CASES) >= 18
    for schedule in SCHEDULES:
        assert len([name for one, name in pairs if one == schedule]) >= 3
    for plan, of_plan in PLANNED.items():
        assert len({schedule for schedule, _ in of_plan}) == 2, plan


def test_architectures(two: Ranks) -> None:
    for name in ARCHITECTURES:
        check_parity([rank["parity"][f"{name} {ARCHITECTURES[name]}"] for rank in two], f"{name} {ARCHITECTURES[name]}")


def test_plans(two: Ranks) -> None:
    for plan, pairs in PLANNED.items():
        for schedule, name in pairs:
            case = f"{name} {schedule} {plan}"
            check_parity([rank["parity"][case] for rank in two], case)


def test_what_users_do(two: Ranks) -> None:
    for name, schedule in USERS.items():
        case = f"{name} {schedule}"
        check_parity([rank["parity"][case] for rank in two], case)


def test_longer_pipelines(four: Ranks) -> None:
    assert {schedule for schedule, _ in FOUR.values()} == set(SCHEDULES)
    for name in FOUR:
        check_parity([rank[name] for rank in four], f"{name} {FOUR[name][0]}")


def test_blocks_run_twice_under_full_recompute(two: Ranks) -> None:
    for rank in two:
        for schedule in SCHEDULES:
            found = rank["forwards"][schedule]
            assert found["gradients"] < EXACT, schedule
            assert found["calls"] == found["due"], schedule
    assert len(two[0]["forwards"]["zbv"]["calls"]) == 4


def test_rows_of_other_lengths(two: Ranks) -> None:
    for rank in two:
        for schedule in RAGGED:
            found = rank["ragged"][schedule]
            assert max(found["Tokens"], found["User"]) < EXACT, schedule
            assert found["Tokens, whole"] < 1e-6, schedule
            # a mean over rows is another one than a mean over tokens
            assert found["User, whole"] > 1e-3, schedule


LISTS = "exactly one list of blocks, found 2"
OWN = "needs a gradient"
ELSEWHERE = ", on another pipeline stage, and that is not the hidden state"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("t5", f"{LISTS}: model.encoder.block (4 x T5Block) and model.decoder.block"),
        ("bart", LISTS),
        ("whisper", LISTS),
        ("t5-encoder", "model.transformer.encoder.block.1 is given argument [2], which comes from another block"),
        ("albert", "1 blocks for 2 pipeline stages"),
        (
            "albert-layers",
            "albert_layers.1'] and so on, 8 calls. Pipeline stages need each block called once in a step",
        ),
        ("deberta", f"model.deberta.encoder.layer.0 is given keyword ['rel_embeddings'], which {OWN}"),
        ("mpnet", f"model.mpnet.encoder.layer.0 is given argument [2], which {OWN}"),
        ("mixtral-routers", f"after the blocks a value that was made in model.model.layers.0{ELSEWHERE}"),
        ("llama Skipping", f"after the blocks a value that was made before the blocks{ELSEWHERE}"),
        ("qwen3 Gathering", f"after the blocks a value that was made in model.model.layers.1{ELSEWHERE}"),
        ("vit Gathering", f"after the blocks a value that was made in model.vit.layers.1{ELSEWHERE}"),
        ("llama Smooth", "the step runs backward itself"),
        ("gpt2 TeacherFirst", f"after the blocks a value that was made before the blocks{ELSEWHERE}"),
    ],
)
def test_refusals(two: Ranks, name: str, words: str) -> None:
    assert set(two[0]["refused"]) == set(REFUSALS)
    for rank in two:
        assert words in rank["refused"][name]["message"]
        assert rank["refused"][name]["clean"]


@pytest.mark.long
def test_everything_with_everything(tmp_path_factory: pytest.TempPathFactory) -> None:
    ranks = in_ranks(check_product, tmp_path_factory.mktemp("product"), limit=900)
    assert len(ranks[0]) > 200
    for case in ranks[0]:
        check_parity([rank[case] for rank in ranks], case)
