"""What each rank of a pipeline does in one step, action by action: which chunk, which microbatch, in which order.

`schedules.py` counts what is alive and needs only forwards and ends of backwards; a clock needs all of it: which
microbatch an action is of, and, where backward is split in two, its part for inputs, which the stage before waits for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from lightning_recompute.schedules import in_flight

Kind = Literal["forward", "backward", "input", "weight"]
"""`input` and `weight` are the two parts of a backward that is split."""

SPLITTING = ("interleaved-zero-bubble", "zbv-zero-bubble")
"""Schedules that split backward in two."""


class Action(NamedTuple):
    """One thing that a rank does without a pause.

    Args:
        kind: Forward, whole backward, or a part of one.
        chunk: Chunk of this rank, from 0 in forward order.
        microbatch: From 0.
    """

    kind: Kind
    chunk: int
    microbatch: int


def rank_actions(schedule: str, num_stages: int, num_microbatches: int, virtual: int = 1) -> tuple[list[Action], ...]:
    """The actions of every rank in order, as `torch.distributed.pipelining` runs them.

    Args:
        schedule: One of `schedules.SCHEDULES`.
        num_stages: Ranks of the pipeline.
        num_microbatches: Microbatches of one step.
        virtual: Chunks on each rank where the schedule is interleaved; 2 (or 1, not given) for zbv.

    Returns:
        A list for each rank.

    Raises:
        TypeError: A count is no int.
        ValueError: The schedule is unknown, a count is below 1, or the schedule cannot run them.
    """
    in_flight(schedule, num_stages, num_microbatches, virtual)  # refuses what cannot run
    return tuple(
        _numbered(_kinds(schedule, num_stages, num_microbatches, virtual, rank), num_microbatches)
        for rank in range(num_stages)
    )


def num_chunks(schedule: str, virtual: int) -> int:
    """Chunks of the model on each rank.

    Args:
        schedule: One of `schedules.SCHEDULES`.
        virtual: As the user gave it.
    """
    return 2 if schedule == "zbv-zero-bubble" else virtual


def place(schedule: str, num_stages: int, chunk: int, rank: int) -> int:
    """Which part of the model, in forward order, a chunk of a rank is.

    Args:
        schedule: One of `schedules.SCHEDULES`. Under zbv the second chunks go back up the ranks, else round again.
        num_stages: Ranks of the pipeline.
        chunk: Chunk of the rank.
        rank: The rank.
    """
    if schedule == "zbv-zero-bubble" and chunk == 1:
        return 2 * num_stages - 1 - rank
    return chunk * num_stages + rank


_Step = tuple[Kind, int]


def _kinds(schedule: str, num_stages: int, num_microbatches: int, virtual: int, rank: int) -> Iterator[_Step]:
    if schedule == "gpipe":
        return _one_chunk(num_microbatches, num_microbatches)
    if schedule == "1f1b":
        return _one_chunk(min(num_stages - rank, num_microbatches), num_microbatches)
    if schedule == "zbv-zero-bubble":
        return _v_shaped(num_stages, max(2 * num_stages - 1, num_microbatches), rank)
    return _interleaved(num_stages, num_microbatches, virtual, rank, split=schedule in SPLITTING)


def _numbered(steps: Iterable[_Step], num_microbatches: int) -> list[Action]:
    """Each kind of action takes the microbatches of a chunk in turn; those that are not there fall away."""
    seen: dict[_Step, int] = {}
    actions = []
    for step in steps:
        microbatch = seen.get(step, 0)
        seen[step] = microbatch + 1
        if microbatch < num_microbatches:
            actions.append(Action(*step, microbatch))
    return actions


def _one_chunk(depth: int, num_microbatches: int) -> Iterator[_Step]:
    forward, backward = _step("forward"), _step("backward")
    yield from [forward] * depth
    yield from [backward, forward] * (num_microbatches - depth)
    yield from [backward] * depth


def _interleaved(num_stages: int, num_microbatches: int, virtual: int, rank: int, split: bool) -> Iterator[_Step]:
    per_round = num_microbatches // max(1, num_microbatches // num_stages)
    total = num_microbatches * virtual
    warmup = min((virtual - 1) * per_round + (1 if split else 2) * (num_stages - 1 - rank), total)
    backwards = [_step("input" if split else "backward", virtual - 1 - n // per_round % virtual) for n in range(total)]
    # the part for weights is put off by as many microbatches as there are ranks before
    weights = iter([_step("weight", chunk) for _, chunk in backwards] if split else ())
    for number in range(warmup + total):
        if number < total:
            yield _step("forward", number // per_round % virtual)
        if number >= warmup:
            yield backwards[number - warmup]
            if number - warmup >= rank:
                yield from _next(weights)
    yield from weights


def _v_shaped(num_stages: int, num_microbatches: int, rank: int) -> Iterator[_Step]:
    """ZBV (arXiv 2401.10241, section 6), for at least 2P - 1 microbatches."""
    first, second = ([_step("forward", chunk)] for chunk in (0, 1))
    first_back, second_back = ([_step("input", chunk), _step("weight", chunk)] for chunk in (0, 1))
    num_warmup = 2 * num_stages - 1 - rank
    yield from first * (num_warmup - rank)
    yield from (second + first) * rank
    yield from (second + second_back) * (num_stages - rank)
    yield from (first + first_back + second + second_back) * (num_microbatches - num_warmup)
    yield from (first_back + second + second_back) * (num_stages - 1 - rank)
    yield from (first_back[:1] + second_back[:1]) * rank
    yield from first_back * (num_stages - rank)
    yield from second_back[1:] * rank + first_back[1:] * rank


def _step(kind: Kind, chunk: int = 0) -> _Step:
    return kind, chunk


def _next(steps: Iterator[_Step]) -> Sequence[_Step]:
    following = next(steps, None)
    return () if following is None else (following,)
