"""Sizes of groups that go together, and those that do not."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_recompute.pipeline_layout import Layout, counts


def test_words_of_a_layout() -> None:
    layout = Layout(tensor=8, sequence=True, pipeline=4, virtual=2, data=2, data_parallel="shard")
    assert layout.settled == ("interleaved-1f1b", 2)
    assert str(layout) == "tensor 8 with sequences x pipeline 4 x data 2 (shard), interleaved-1f1b, 2 chunks a stage"
    assert layout.is_divided
    assert layout.shards == 2
    assert str(Layout()) == "tensor 1 x pipeline 1 x data 1"
    assert not Layout(data=4).is_divided


def test_microbatches_are_those_of_the_run() -> None:
    assert Layout(pipeline=4).num_microbatches_of(100) == 16
    assert Layout(pipeline=4).num_microbatches_of(5) == 5
    assert Layout(pipeline=4, num_microbatches=8).num_microbatches_of(100) == 8
    assert Layout(tensor=2).num_microbatches_of(100) == 1
    # with too few of them 1F1B runs as gpipe
    assert (Layout(pipeline=4).runs(4), Layout(pipeline=4).runs(3)) == ("1f1b", "gpipe")


def test_blocks_over_stages() -> None:
    assert Layout(pipeline=3).division(8).lengths == (3, 3, 2)
    assert Layout(pipeline=2, split=[1, 7]).division(8).lengths == (1, 7)
    balanced = Layout(pipeline=2, split="balanced")
    assert balanced.division(8).lengths == (4, 4)
    assert balanced.division(8, (3, 5)).lengths == (3, 5)
    assert Layout(pipeline=2, schedule="zbv-zero-bubble").division(8).lengths == (2, 2, 2, 2)
    assert counts((3, 3)) == "3 blocks each"
    assert counts((3, 2)) == "3, 2 blocks"


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"tensor": 0}, ValueError, "tensor_parallel_size=0: at least 1 is due"),
        ({"pipeline": True}, TypeError, "pipeline_parallel_size=True: an int is due"),
        ({"sequence": True}, ValueError, "tensor_parallel_size=1 is one"),
        ({"virtual": 2}, ValueError, "virtual_pipeline_size=2 with pipeline_parallel_size=1"),
        ({"pipeline": 2, "schedule": "gpipe", "virtual": 2}, ValueError, "1 chunk on each rank"),
        ({"pipeline": 2, "schedule": "1f2b"}, ValueError, "schedule='1f2b'"),
        ({"pipeline": 2, "virtual": 2, "split": "balanced"}, ValueError, "take 'count', or list the blocks"),
        ({"pipeline": 4, "virtual": 2, "num_microbatches": 9}, ValueError, "do not fall into equal rounds"),
        ({"data_parallel": "share"}, ValueError, "'replicate' or 'shard' is due"),
    ],
)
def test_what_does_not_go_together(options: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        Layout(**options)
