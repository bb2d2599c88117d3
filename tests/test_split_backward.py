"""What waits between the two parts of a backward."""

from __future__ import annotations

import pytest

from lightning_recompute.cost import Option, StageCosts, live_vectors
from lightning_recompute.schedule_actions import rank_actions
from lightning_recompute.split_backward import waiting_shares, with_waiting


@pytest.mark.parametrize(
    ("schedule", "num_stages", "num_microbatches", "virtual"),
    [
        ("zbv-zero-bubble", 2, 4, 2),
        ("zbv-zero-bubble", 4, 12, 2),
        ("interleaved-zero-bubble", 2, 4, 2),
        ("interleaved-zero-bubble", 4, 16, 3),
    ],
)
def test_shares_bound_what_waits_at_any_time(
    schedule: str, num_stages: int, num_microbatches: int, virtual: int
) -> None:
    shares = waiting_shares(schedule, num_stages, num_microbatches, virtual)
    vectors = live_vectors(schedule, num_stages, num_microbatches, virtual)
    orders = rank_actions(schedule, num_stages, num_microbatches, virtual)
    for share, of_rank, order in zip(shares, vectors, orders, strict=True):
        alive, waiting = [0] * len(share), [0] * len(share)
        assert any(share)
        for action in order:
            alive[action.chunk] += action.kind == "forward"
            waiting[action.chunk] += action.kind == "input"
            assert any(
                all(many >= number for many, number in zip(vector, alive, strict=True))
                and all(part * many >= number - 1e-9 for part, many, number in zip(share, vector, waiting, strict=True))
                for vector in of_rank
            )
            done = action.kind == "weight"
            alive[action.chunk] -= done
            waiting[action.chunk] -= done


def test_nothing_waits_where_backward_has_one_part() -> None:
    assert waiting_shares("1f1b", 3, 6, 1) == ((0.0,),) * 3
    assert waiting_shares("interleaved-1f1b", 2, 4, 2) == ((0.0, 0.0),) * 2


def test_options_hold_more_by_what_waits() -> None:
    keep, full, both = Option(10, 0.0), Option(2, 1.0, transient_bytes=8), Option(3, 2.0, num_units=2)
    costs = StageCosts(((keep, full, both), (keep, full)), gradient_bytes=(1, 2))
    found = with_waiting(costs, (12, 14), 0.5)
    assert [option.held_bytes for option in found.options[0]] == [11, 7, 3 + 12]
    assert [option.held_bytes for option in found.options[1]] == [12, 8]
    assert found.gradient_bytes == (1 + 14, 2)
    assert with_waiting(costs, (0, 0), 0.0) == costs
