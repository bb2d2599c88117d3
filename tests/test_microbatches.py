"""Batches of any structure as microbatches."""

from __future__ import annotations

from collections import UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_recompute.microbatches import map_tensors, num_rows, signature, split_batch, weights_of

Pair = namedtuple("Pair", "one other")


@dataclass(frozen=True)
class Record:
    ids: Tensor
    name: str


def rows(count: int) -> Tensor:
    return torch.arange(count)[:, None]


def test_rows_are_split_as_evenly_as_it_goes() -> None:
    assert [len(part) for part in split_batch(rows(7), 4)] == [2, 2, 2, 1]
    assert torch.equal(torch.cat(split_batch(rows(7), 4)), rows(7))
    batch = rows(3)
    assert split_batch(batch, 1)[0].data_ptr() == batch.data_ptr()


def test_what_is_split_in_a_batch() -> None:
    batch: dict[str, Any] = {
        "ids": rows(4),
        "texts": ["a", "b", "c", "d"],
        "pair": Pair(rows(4), [rows(4), 3]),
        "positions": torch.arange(7),
        "scale": torch.tensor(2.0),
        "record": Record(rows(4), "r"),
        "size": torch.Size((4, 1)),
        "none": None,
    }
    first, second = split_batch(batch, 2)
    assert second["ids"].tolist() == [[2], [3]]
    assert second["texts"] == ["c", "d"]
    assert isinstance(second["pair"], Pair)
    assert second["pair"].other[0].tolist() == [[2], [3]]
    assert second["pair"].other[1] == 3
    assert second["positions"] is batch["positions"]
    assert second["scale"] is batch["scale"]
    assert second["record"].ids.tolist() == [[2], [3]]
    assert second["record"].name == "r"
    assert second["size"] == (4, 1)
    assert list(first) == list(batch)
    assert batch["ids"].shape == (4, 1)


def test_other_mappings_keep_their_class() -> None:
    batch: UserDict[str, Tensor] = UserDict({"ids": rows(4)})
    parts = split_batch(batch, 2)
    assert all(isinstance(part, UserDict) and len(part["ids"]) == 2 for part in parts)
    assert len(batch["ids"]) == 4


def test_a_list_of_tensors_is_a_structure() -> None:
    # two rows, a list of two
    one, other = split_batch([rows(2), rows(2) + 5], 2)
    assert [part.tolist() for part in other] == [[[1]], [[6]]]
    assert len(one) == 2


def test_the_rows_that_most_tensors_have() -> None:
    assert num_rows([torch.zeros(5, 2), torch.zeros(3), torch.zeros(3, 1)]) == 3
    assert num_rows((torch.zeros(()), torch.zeros(6))) == 6
    for empty in ({"a": 1}, torch.zeros(()), None, "text"):
        with pytest.raises(ValueError, match="without a tensor that has rows"):
            num_rows(empty)


@pytest.mark.parametrize("number", [0, 4])
def test_more_microbatches_than_rows(number: int) -> None:
    with pytest.raises(ValueError, match=r"1\.\.3 is due"):
        split_batch(rows(3), number)


def test_what_microbatches_count() -> None:
    parts = split_batch(rows(4), 3)
    assert weights_of(parts) == [0.5, 0.25, 0.25]
    assert weights_of(parts, lambda part: torch.tensor(float(part.sum()))) == [1 / 6, 2 / 6, 3 / 6]
    assert weights_of(parts, lambda part: int(part.sum() == 3)) == [0.0, 0.0, 1.0]


@pytest.mark.parametrize("number", [0.0, -1.0, float("nan"), float("inf")])
def test_weights_that_mean_nothing(number: float) -> None:
    with pytest.raises(ValueError, match="microbatch_weight gave"):
        weights_of(split_batch(rows(2), 2), lambda part: number)


def test_signatures_tell_shapes_apart() -> None:
    batch = {"ids": rows(4), "n": 3, "record": Record(rows(2), "r")}
    same = {"ids": rows(4) + 1, "n": 3, "record": Record(rows(2), "r")}
    assert signature(batch) == signature(same)
    assert hash(signature(batch)) == hash(signature(same))
    for other in (
        {**batch, "ids": rows(5)},
        {**batch, "ids": rows(4).float()},
        {**batch, "n": 4},
        {**batch, "record": Record(rows(2), "s")},
        {**batch, "more": None},
        [batch],
    ):
        assert signature(other) != signature(batch)


def test_tensors_are_exchanged_where_they_stand() -> None:
    batch = {"ids": rows(2), "pair": (rows(2), "word")}
    found = map_tensors(lambda tensor: tensor.sum().item(), batch)
    assert found == {"ids": 1, "pair": (1, "word")}
