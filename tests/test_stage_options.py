"""What may be done to the blocks of a stage: actions that are worth while, their bytes, and what choices mean."""

from __future__ import annotations

import planned
import pytest
import torch
from parity import seeded
from planned import NUM_BLOCKS, PRICES, profile
from toys import Block, square_loss, stack

from lightning_recompute.block_cost import BlockCost
from lightning_recompute.blocks import find_blocks
from lightning_recompute.capture import BlockCall
from lightning_recompute.cost import extra_seconds, peak_bytes
from lightning_recompute.plan import Action, Full, Keep, RecomputePlan, SaveOps, Segment, Selective
from lightning_recompute.profiling import profile_step
from lightning_recompute.stage_options import LEAST_SHARE, Prices, StageOptions, candidates, stage_options


def options() -> StageOptions:
    found = planned.unlimited().candidates
    return stage_options(profile(), found, 0, NUM_BLOCKS, static_bytes=profile().statics.num_bytes)


def test_prices_turn_counts_into_seconds() -> None:
    assert Prices(flops_per_second=100, bytes_per_second=10).seconds(250, 5) == 3.0


def test_candidates_are_what_nothing_beats() -> None:
    (found,) = candidates(profile(), PRICES)
    assert (found[0].action, found[0].seconds) == (Keep(), 0.0)
    actions = [candidate.action for candidate in found]
    assert len(set(actions)) == len(actions)
    assert Full() in actions
    assert any(isinstance(action, Selective) for action in actions)
    # of two labels one of which covers the other only one is named
    for action in actions:
        if isinstance(action, Selective):
            assert not {"act", "mlp"} <= set(action.modules)
            assert not {"core_attn", "attn"} <= set(action.modules)
    full = next(candidate for candidate in found if candidate.action == Full())
    assert all(0.0 <= candidate.seconds <= full.seconds for candidate in found)


def test_the_same_prices_give_the_same_candidates() -> None:
    assert candidates(profile(), PRICES) == candidates(profile(), PRICES)


def test_timed_candidates_never_cost_much_less_than_their_work() -> None:
    model = seeded(lambda: stack(2))
    timed = profile_step(model, lambda: square_loss(model), find_blocks(model))
    (found,) = candidates(timed)
    rate = timed.seconds(0, Keep()) / timed.flops(0, Keep())
    for candidate in found:
        extra = timed.flops(0, candidate.action) - timed.flops(0, Keep())
        assert candidate.seconds >= LEAST_SHARE * rate * extra


def test_options_and_their_actions_stand_side_by_side() -> None:
    found = options()
    assert found.stage.num_units == NUM_BLOCKS
    for block in range(NUM_BLOCKS):
        pairs = list(zip(found.stage.options[block], found.actions[block], strict=True))
        groups = [option.num_units for option, _ in pairs if option.num_units > 1]
        assert groups == [size for size in (2, 3, 4, 8) if block + size <= NUM_BLOCKS]
        assert all(action == Full() for option, action in pairs if option.num_units > 1)
        assert all(isinstance(action, Keep | Full | Selective | SaveOps) for _, action in pairs)


def test_rows_add_up_to_the_peak_of_everything_kept() -> None:
    found = options()
    # what two blocks hold between them is asked of each, so rows may say more, here they do not
    assert peak_bytes(found.stage, [0] * NUM_BLOCKS) == pytest.approx(planned.most(), rel=0.01)
    assert extra_seconds(found.stage, [0] * NUM_BLOCKS) == 0.0


@pytest.mark.parametrize("action", [Full(), Selective(("norm",))])
def test_rows_of_one_action_everywhere(action: Full | Selective) -> None:
    found = options()
    choices = [actions.index(action) for actions in found.actions]
    plan = RecomputePlan(tuple(found.segments(choices)))
    assert peak_bytes(found.stage, choices) == pytest.approx(profile().peak_bytes(plan), rel=0.05)


def test_what_choices_mean() -> None:
    found = options()
    full = [actions.index(Full()) for actions in found.actions]
    pair = next(index for index, option in enumerate(found.stage.options[1]) if option.num_units == 2)
    segments = list(found.segments([full[0], pair, None, 0]))
    assert segments == [Segment(0, 1, Full()), Segment(1, 3, Full()), Segment(3, 4, Keep())]
    # units are one by one; what is no unit is one run
    assert list(found.segments(full)) == [Segment(block, block + 1, Full()) for block in range(NUM_BLOCKS)]
    assert list(found.segments([0] * NUM_BLOCKS)) == [Segment(0, NUM_BLOCKS, Keep())]


def test_blocks_that_cannot_be_one_unit_are_none() -> None:
    glued = seeded(lambda: stack(3, Block, lambda index, hidden: hidden * 2))
    other = profile_step(glued, lambda: square_loss(glued), find_blocks(glued))
    found = stage_options(other, candidates(other, PRICES), 0, 3, static_bytes=0)
    assert {option.num_units for each in found.stage.options for option in each} == {1}


def test_a_part_of_the_blocks_is_a_stage() -> None:
    found = stage_options(profile(), planned.unlimited().candidates, 1, 3, static_bytes=0, in_flight=2)
    assert (found.start, found.stage.num_units, found.stage.in_flight) == (1, 2, 2)
    assert found.stage.head_bytes == 0  # the head is on another
    assert list(found.segments([0, 0])) == [Segment(1, 3, Keep())]


def test_a_frozen_block_has_one_option() -> None:
    model = seeded(lambda: stack(3))
    for part in (model.embed, model.blocks[0]):
        part.requires_grad_(False)
    other = profile_step(model, lambda: square_loss(model), find_blocks(model))
    found = stage_options(other, candidates(other, PRICES), 0, 3, static_bytes=0)
    assert found.actions[0] == (Keep(),)
    assert (found.stage.options[0][0].held_bytes, found.stage.options[0][0].extra_seconds) == (0, 0.0)


def test_inputs_in_host_memory_are_tried_on_cuda_only(monkeypatch: pytest.MonkeyPatch) -> None:
    found = profile()
    on_host = Full(inputs="host")
    tried: list[Action] = []
    known: dict[Action, BlockCost] = {}
    measure = found.costs.of

    def of(call: BlockCall, action: Action) -> BlockCost:
        tried.append(action)
        if action == on_host:
            raise RuntimeError("no room to pin")
        if call.device.type == "cpu":
            known[action] = measure(call, action)
        elif action not in known:
            raise ValueError("refused before")
        return known[action]

    monkeypatch.setattr(found.costs, "of", of)
    assert candidates(found, PRICES)
    assert on_host not in tried
    monkeypatch.setattr(found.kind_of(0), "device", torch.device("cuda"))
    (left,) = candidates(found, PRICES)
    assert on_host in tried
    assert on_host not in [candidate.action for candidate in left]  # what cannot be measured is left out
