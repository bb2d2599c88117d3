"""A model over the ranks of a layout, from one measurement of it whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from measured import BLOCKS, HIDDEN, LENGTH, NONE, OF_BLOCK, SIZES, VOCABULARY, measured_on, staged

from lightning_recompute.measured_model import MeasuredModel
from lightning_recompute.pipeline_forecast import WORDS, LayoutForecast, forecast_ranks
from lightning_recompute.pipeline_layout import Layout
from lightning_recompute.plan import Full, Keep, RecomputePlan, Segment, Selective
from lightning_recompute.policy import RecomputePolicy
from lightning_recompute.schedules import SCHEDULES
from lightning_recompute.stage_plans import with_choices
from lightning_recompute.staged_model import CATEGORIES

pytestmark = pytest.mark.xdist_group("forecasts")


@pytest.fixture(scope="module")
def alone() -> Iterator[MeasuredModel]:
    """On a rank that shares no layer."""
    with measured_on(1, False, searches=False) as found:
        yield found


# ---- what parts are made of


def test_parameters_are_where_they_are_used(alone: MeasuredModel) -> None:
    table = SIZES["token_embedding.weight"]
    block, first = OF_BLOCK, table + SIZES["position_embedding.weight"]
    last = table + SIZES["final_norm.weight"] + SIZES["final_norm.bias"]
    statics = staged(alone, pipeline=4).statics
    assert [each.parameters_bytes for each in statics] == [2 * block + first, 2 * block, 2 * block, 2 * block + last]
    assert [each.gradients_bytes for each in statics] == [each.parameters_bytes for each in statics]
    for each in statics:
        # two moments, and a step for each parameter
        assert 2 * each.parameters_bytes < each.optimizer_bytes < 2 * each.parameters_bytes + 4 * 200
    # under zbv the first rank has both ends, and a tied parameter once
    both = staged(alone, pipeline=2, schedule="zbv-zero-bubble").statics
    assert [each.parameters_bytes for each in both] == [4 * block + first + last - table, 4 * block]


def test_data_parallel_ranks_share_what_they_hold(alone: MeasuredModel) -> None:
    one, copies, shards = (
        staged(alone, pipeline=2, **options).statics[0]
        for options in ({}, {"data": 4}, {"data": 4, "data_parallel": "shard"})
    )
    assert copies.parameters_bytes == one.parameters_bytes
    assert one.other_bytes < copies.other_bytes <= one.other_bytes + 2 * 4 * 2**20
    # whole while the schedule runs, beside the own part; the optimizer's state in parts
    assert shards.parameters_bytes == one.parameters_bytes + -(-one.parameters_bytes // 4)
    assert shards.optimizer_bytes == -(-one.optimizer_bytes // 4)
    # without a pipeline FSDP gathers block by block
    fsdp = staged(alone, 1, data=4, data_parallel="shard")
    whole = staged(alone, 1).statics[0]
    assert fsdp.statics[0].num_bytes < 0.6 * whole.num_bytes
    assert fsdp.parts[0].costs.gradients_at(1) > staged(alone, 1).parts[0].costs.gradients_at(1)


def test_embedding_and_head_stand_at_the_ends(alone: MeasuredModel) -> None:
    parts = staged(alone, pipeline=4).parts
    entry, leave = parts[0].costs.options[0][0], parts[-1].costs.options[-1][0]
    rows = 2 * LENGTH
    assert rows * HIDDEN <= entry.held_bytes <= rows * HIDDEN + 3 * rows * 8  # a dropout mask, indices
    assert leave.held_bytes >= rows * VOCABULARY * 2  # logits
    hidden = 2 * rows * HIDDEN
    assert [part.costs.options[-1][0].held_bytes for part in parts[:-1]] == [hidden] * 3  # what was sent
    assert [part.costs.options[0][0].held_bytes for part in parts[1:]] == [0] * 3
    # the head's matrix, forward
    assert alone.ends[1].forward == pytest.approx(2 * rows * HIDDEN * VOCABULARY / 4e14)
    assert alone.ends[0].forward == 0
    assert parts[-1].seconds.forward - parts[1].seconds.forward == pytest.approx(alone.ends[1].forward)


# ---- plans


POLICIES = [
    NONE,
    RecomputePolicy(),
    RecomputePolicy(num_layers=2),
    RecomputePolicy(method="block", num_layers=1),
    RecomputePolicy(method="block", num_layers=1, distribute_saved_activations=True),
]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_peaks_are_made_of_their_parts(alone: MeasuredModel, schedule: str, policy: RecomputePolicy) -> None:
    """For every schedule; and a plan means the same there and back."""
    virtual = 2 if schedule.startswith("interleaved") else 1
    tensor = 2 if policy.distribute_saved_activations else 1  # measured on one, which does not matter here
    model = staged(alone, pipeline=2, virtual=virtual, schedule=schedule, tensor=tensor)
    plan = policy.plan(model.division.lengths)
    choices = model.choices_of(plan)
    assert model.plan_of(choices) == plan or policy is NONE
    found = model.with_choices(choices, "x")
    for rank in range(2):
        moment, parts = model.breakdown(found, rank)
        assert moment
        assert tuple(parts) == CATEGORIES
        assert min(parts.values()) >= 0
        assert sum(parts.values()) == found.ranks[rank].peak_bytes


def test_gradients_grow_where_all_microbatches_are_alive(alone: MeasuredModel) -> None:
    """Before the first backward there are none."""
    model = staged(alone, 4, pipeline=2, schedule="gpipe")
    found = with_choices(model.pipeline, model.choices_of(NONE.plan([4, 4])), "none")
    _, parts = model.breakdown(found, 0)
    assert parts["gradients"] < model.statics[0].gradients_bytes
    steady = staged(alone, 8, pipeline=2)
    found = with_choices(steady.pipeline, steady.choices_of(NONE.plan([4, 4])), "none")
    assert steady.breakdown(found, 0)[1]["gradients"] == steady.statics[0].gradients_bytes


def test_a_backward_in_two_parts_holds_more(alone: MeasuredModel) -> None:
    options: Mapping[str, Any] = {"pipeline": 2, "virtual": 2}
    whole, split = (
        staged(alone, 4, schedule=schedule, **options) for schedule in ("interleaved-1f1b", "interleaved-zero-bubble")
    )
    held = [min(option.held_bytes for option in model.parts[1].costs.options[1]) for model in (whole, split)]
    assert held[1] > held[0]
    assert split.parts[0].costs.options == whole.parts[0].costs.options  # the first has no inputs


# ---- what is answered


def test_words_are_forecast_as_they_are(alone: MeasuredModel) -> None:
    words = RecomputePolicy(method="block", num_layers=3, distribute_saved_activations=True)
    view = forecast_ranks(alone, Layout(pipeline=4), 8, words=words, names=["none"])
    assert view.chosen.name == WORDS
    assert view.plan == RecomputePlan(tuple(Segment(index, index + 1, Full()) for index in range(BLOCKS)))
    assert [rank.actions for rank in view.ranks] == ["full x2"] * 4
    assert view.worst is max(view.ranks, key=lambda rank: rank.peak_bytes)
    assert (view.budget_bytes, view.best, view.refusal) == (None, None, None)
    assert [one.name for one in view.beside] == ["none"]
    assert view.beside[0].seconds < view.chosen.step.seconds
    # what a layout cannot have is said
    assert view.notices[0].endswith("the largest stage (chunk) has 2 block(s); 2 is taken")
    assert "distribute_saved_activations=True is left out" in view.notices[1]


def test_a_plan_is_forecast_as_it_is(alone: MeasuredModel) -> None:
    plan = RecomputePlan((Segment(0, 3, Selective(("mlp",))), Segment(3, 5, Full()), Segment(5, BLOCKS, Keep())))
    view = forecast_ranks(alone, Layout(pipeline=2), 8, words=plan, names=["none"])
    # units end where stages do
    assert [rank.actions for rank in view.ranks] == ["selective mlp x3, full", "full, keep x3"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "neither a budget nor words"),
        ({"words": RecomputePolicy(granularity="selective", modules=["moe"])}, "moe"),
        ({"words": NONE, "names": ["full"]}, "settings: found 'full'"),
    ],
)
def test_what_is_refused(alone: MeasuredModel, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        forecast_ranks(alone, Layout(pipeline=2), 8, **options)


def test_more_stages_than_blocks(alone: MeasuredModel) -> None:
    with pytest.raises(ValueError, match="at least one block for each is due"):
        forecast_ranks(alone, Layout(pipeline=BLOCKS + 1), 16, words=NONE)


@settings(max_examples=20, deadline=None)
@given(number=st.integers(1, 12), pipeline=st.integers(2, 4))
def test_any_number_of_microbatches(alone: MeasuredModel, number: int, pipeline: int) -> None:
    """The earlier a stage, the more it needs, up to what its ends hold."""
    view: LayoutForecast = forecast_ranks(alone, Layout(pipeline=pipeline), number, words=NONE, names=[])
    assert [rank.in_flight for rank in view.ranks] == [
        min(pipeline - rank, number) if number >= pipeline else number for rank in range(pipeline)
    ]
    assert view.chosen.step.bubble_fraction < 1
