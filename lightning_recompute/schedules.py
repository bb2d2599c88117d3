"""The order of forwards and backwards of each pipeline schedule, and how many microbatches it keeps alive.

The orders are those that `torch.distributed.pipelining` runs (Megatron's for 1F1B and interleaved 1F1B). A rank with
several virtual stages holds chunks of the model; what is counted there are chunk-microbatches: one microbatch's
activations of one chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, get_args

Event = tuple[bool, int]
"""A forward (True), or the end of what a forward left alive (False), of one microbatch of a chunk of this rank."""

Schedule = Literal["gpipe", "1f1b", "interleaved-1f1b", "interleaved-zero-bubble", "zbv-zero-bubble"]
SCHEDULES: tuple[str, ...] = get_args(Schedule)
_INTERLEAVED = ("interleaved-1f1b", "interleaved-zero-bubble")


def in_flight(schedule: str, num_stages: int, num_microbatches: int, virtual: int = 1) -> tuple[int, ...]:
    """Microbatches alive at most, on each rank, when a backward starts; its own is counted.

    Where backward is split into one for inputs and one for weights (the zero-bubble schedules) a microbatch counts
    until its second part is done. That is an upper bound: the first part frees some of its activations.

    Args:
        schedule: `gpipe`, `1f1b`, `interleaved-1f1b`, `interleaved-zero-bubble` or `zbv-zero-bubble`: the one that
            runs. Who runs gpipe for want of microbatches has to ask for `gpipe`.
        num_stages: Ranks of the pipeline.
        num_microbatches: Microbatches of one step.
        virtual: Chunks of the model on each rank, where the schedule is interleaved; 2 (or 1, not given) for zbv.

    Returns:
        For each rank the number of microbatches, or of chunk-microbatches where a rank has several chunks.

    Raises:
        TypeError: A count is no int.
        ValueError: The schedule is unknown, a count is below 1, or the schedule cannot run them.
    """
    vectors = live_vectors(schedule, num_stages, num_microbatches, virtual)
    return tuple(max(map(sum, of_rank)) for of_rank in vectors)


# a second for a hundred chunks; typed, so that True is refused where 1 is not
@functools.lru_cache(maxsize=None, typed=True)
def live_vectors(
    schedule: str, num_stages: int, num_microbatches: int, virtual: int = 1
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Microbatches of each chunk that are alive together: where chunks differ in bytes, their sum does not suffice.

    Args:
        schedule: As for `in_flight`.
        num_stages: As for `in_flight`.
        num_microbatches: As for `in_flight`.
        virtual: As for `in_flight`.

    Returns:
        For each rank the vectors (an entry a chunk, in forward order) that no other vector of the rank covers.

    Raises:
        TypeError: As for `in_flight`.
        ValueError: As for `in_flight`.
    """
    _check(schedule, num_stages, num_microbatches, virtual)
    if schedule == "zbv-zero-bubble":
        virtual = 2
    return tuple(
        greatest(_alive(rank_order(schedule, num_stages, num_microbatches, virtual, rank), virtual))
        for rank in range(num_stages)
    )


def rank_order(schedule: str, num_stages: int, num_microbatches: int, virtual: int, rank: int) -> Iterator[Event]:
    """What a rank does in one step, in order.

    Args:
        schedule: As for `in_flight`.
        num_stages: Ranks of the pipeline.
        num_microbatches: Microbatches of one step.
        virtual: Chunks on each rank.
        rank: The rank, from 0.

    Yields:
        Events: whether a forward or the end of a backward, and the chunk of this rank, from 0 in forward order.
    """
    if schedule == "gpipe":
        return _one_chunk(num_microbatches, num_microbatches)
    if schedule == "1f1b":
        return _one_chunk(min(num_stages - rank, num_microbatches), num_microbatches)
    if schedule == "zbv-zero-bubble":
        return _v_shaped(num_stages, num_microbatches, rank)
    return _interleaved(num_stages, num_microbatches, virtual, rank, split=schedule == "interleaved-zero-bubble")


def _one_chunk(depth: int, num_microbatches: int) -> Iterator[Event]:
    yield from [(True, 0)] * depth
    yield from [(False, 0), (True, 0)] * (num_microbatches - depth)
    yield from [(False, 0)] * depth


def _interleaved(num_stages: int, num_microbatches: int, virtual: int, rank: int, split: bool) -> Iterator[Event]:
    """Rounds of microbatches go through the chunks in turn; backward goes through them the other way round."""
    per_round = num_microbatches // _num_rounds(num_stages, num_microbatches)
    total = num_microbatches * virtual
    # a split backward is shorter, so that each rank's first one comes after fewer forwards
    ahead = (1 if split else 2) * (num_stages - 1 - rank)
    warmup = min((virtual - 1) * per_round + ahead, total)
    # under a split backward the weights' part, which frees the activations, is put off by a number of microbatches
    delay = rank if split else 0
    freed = 0
    for step in range(warmup + total):
        if step < total:
            yield True, step // per_round % virtual
        if step - warmup >= delay:
            yield False, _backward_chunk(freed, per_round, virtual)
            freed += 1
    for late in range(freed, total):
        yield False, _backward_chunk(late, per_round, virtual)


def _backward_chunk(step: int, per_round: int, virtual: int) -> int:
    return virtual - 1 - step // per_round % virtual


def _v_shaped(num_stages: int, num_microbatches: int, rank: int) -> Iterator[Event]:
    """ZBV: the first chunks run down the ranks, the second ones up again (arXiv 2401.10241, section 6).

    The order is made for at least 2P - 1 microbatches; those beyond the ones there are fall away.
    """
    num_full = max(2 * num_stages - 1, num_microbatches)
    started, freed = [0, 0], [0, 0]
    for forward, chunk in _full_v(num_stages, num_full, rank):
        counts = started if forward else freed
        if counts[chunk] < num_microbatches:
            yield forward, chunk
        counts[chunk] += 1


def _full_v(num_stages: int, num_microbatches: int, rank: int) -> Iterator[Event]:
    num_warmup = 2 * num_stages - 1 - rank
    yield from [(True, 0)] * (num_warmup - rank)
    yield from [(True, 1), (True, 0)] * rank
    yield from [(True, 1), (False, 1)] * (num_stages - rank)
    yield from [(True, 0), (False, 0), (True, 1), (False, 1)] * (num_microbatches - num_warmup)
    yield from [(False, 0), (True, 1), (False, 1)] * (num_stages - 1 - rank)
    # the weights' parts of the last backwards, which free the activations
    yield from [(False, 0)] * (num_stages - rank) + [(False, 1)] * rank + [(False, 0)] * rank


def _alive(events: Iterator[Event], num_chunks: int) -> Iterator[tuple[int, ...]]:
    """How many microbatches of each chunk are alive at each event; one that ends counts still."""
    alive = [0] * num_chunks
    for forward, chunk in events:
        alive[chunk] += forward
        yield tuple(alive)
        alive[chunk] -= not forward
    assert not any(alive), f"microbatches {alive} are never freed"


def greatest(vectors: Iterable[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Those vectors that no other one covers, the largest first.

    Args:
        vectors: Of one length.
    """
    distinct = sorted(set(vectors), reverse=True)
    return tuple(one for one in distinct if not any(covers(other, one) for other in distinct if other != one))


def covers(one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether a vector is as large as another in every entry."""
    return all(left >= right for left, right in zip(one, other, strict=True))


def _num_rounds(num_stages: int, num_microbatches: int) -> int:
    return max(1, num_microbatches // num_stages)


def _check(schedule: str, num_stages: int, num_microbatches: int, virtual: int) -> None:
    if schedule not in SCHEDULES:
        raise ValueError(f"unknown schedule {schedule!r}; one of {', '.join(SCHEDULES)} is due")
    counts = {"num_stages": num_stages, "num_microbatches": num_microbatches, "virtual": virtual}
    for name, count in counts.items():
        if not isinstance(count, int) or isinstance(count, bool):
            raise TypeError(f"{name}={count!r}: an int is due")
        if count < 1:
            raise ValueError(f"{name}={count}: at least 1 is due")
    if virtual > 1 and schedule in ("gpipe", "1f1b"):
        raise ValueError(
            f"schedule {schedule!r} has one chunk a rank, found virtual={virtual}; interleaved-1f1b has more"
        )
    if virtual > 2 and schedule == "zbv-zero-bubble":
        raise ValueError(f"schedule 'zbv-zero-bubble' has two chunks a rank, found virtual={virtual}")
    rounds = _num_rounds(num_stages, num_microbatches)
    if schedule in _INTERLEAVED and num_microbatches % rounds:
        raise ValueError(
            f"schedule {schedule!r}: {num_microbatches} microbatches do not fall into {rounds} equal rounds over "
            f"{num_stages} stages; a multiple of {num_stages} does"
        )
