"""Which blocks run where."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_recompute.division import Division
from lightning_recompute.plan import Full, Keep, RecomputePlan, Segment
from lightning_recompute.policy import RecomputePolicy


def test_blocks_are_divided_by_count() -> None:
    assert Division.of(8, 4, "1f1b", 1).lengths == (2, 2, 2, 2)
    assert Division.of(7, 2, "1f1b", 1).lengths == (4, 3)
    assert Division.of(7, 2, "interleaved-1f1b", 2).lengths == (2, 2, 2, 1)
    assert Division.of(7, 2, "1f1b", 1).bounds == ((0, 4), (4, 7))
    assert Division.of(5, 2, "1f1b", 1, [1, 4]).bounds == ((0, 1), (1, 5))


def test_chunks_go_round_or_down_and_up() -> None:
    rounds = Division.of(8, 2, "interleaved-1f1b", 2)
    assert [rounds.rank_of(chunk) for chunk in range(4)] == [0, 1, 0, 1]
    assert rounds.chunks_of(0) == (0, 2)
    assert rounds.last_rank == 1
    v = Division.of(8, 2, "zbv-zero-bubble", 2)
    assert [v.rank_of(chunk) for chunk in range(4)] == [0, 1, 1, 0]
    assert v.chunks_of(0) == (0, 3)
    assert v.last_rank == 0


def test_the_chunk_of_a_block() -> None:
    division = Division.of(5, 2, "1f1b", 1)
    assert [division.chunk_with(block) for block in range(-1, 6)] == [0, 0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    ("split", "error", "words"),
    [
        ("balanced", ValueError, "'count' or a list of 2"),
        ([5], ValueError, "1 entries"),
        ([5, 0], ValueError, "at least one block"),
        ([2, 2], ValueError, "adds up to 4 blocks; the model has 5"),
        ([2.5, 2.5], TypeError, "numbers of blocks"),
        (2, TypeError, "numbers of blocks"),
    ],
)
def test_lists_that_do_not_fit(split: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Division.of(5, 2, "1f1b", 1, split)


def test_more_stages_than_blocks() -> None:
    with pytest.raises(ValueError, match="3 blocks for 4 pipeline stages"):
        Division.of(3, 2, "interleaved-1f1b", 2)


def test_words_count_over_the_blocks_of_each_chunk() -> None:
    division = Division.of(7, 2, "interleaved-1f1b", 2)
    block = RecomputePolicy(method="block", num_layers=1).plan(division.lengths)
    assert [s.start for s in block.segments if s.action == Full()] == [0, 2, 4, 6]
    # units end where chunks do, and the last one of a chunk may be shorter
    uniform = RecomputePolicy(num_layers=2).plan(division.lengths)
    assert [(s.start, s.stop) for s in uniform.segments] == [(0, 2), (2, 4), (4, 6), (6, 7)]
    assert [s.start for s in division.part_of(uniform, 1).segments if s.action == Full()] == [2, 6]
    with pytest.raises(ValueError, match="the largest list or stage has 2"):
        RecomputePolicy(num_layers=3).plan(division.lengths)


def test_a_rank_keeps_what_is_not_its_own() -> None:
    division = Division.of(6, 2, "1f1b", 1)
    plan = RecomputePlan((Segment(0, 2, Full()), Segment(2, 4, Full()), Segment(4, 6, Keep())))
    mine = (Segment(0, 2, Full()), Segment(2, 3, Full()), Segment(3, 4, Keep()), Segment(4, 6, Keep()))
    assert division.part_of(plan, 0).segments == mine
    assert [segment.action for segment in division.part_of(plan, 1).segments] == [Keep(), Keep(), Full(), Keep()]
    with pytest.raises(ValueError, match="covers 2 blocks, the stages have 6"):
        division.part_of(RecomputePlan((Segment(0, 2, Full()),)), 0)
