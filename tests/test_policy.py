"""Megatron's words: exactly its units, and every value or combination that would mean nothing is refused."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from messages import containing

from lightning_recompute.plan import Action, Full, Keep, RecomputePlan, Selective
from lightning_recompute.policy import LABELS, RecomputePolicy, is_pattern, nearest


def megatron(method: str, num_layers: int, chunk: int) -> list[tuple[int, int, bool]]:
    """Units of one chunk as (start, stop, recomputed): the loops of `megatron/core/recompute.py`, written out."""
    if method == "block":
        return [(index, index + 1, index < num_layers) for index in range(chunk)]
    units, index = [], 0
    while index < chunk:
        units.append((index, min(index + num_layers, chunk), True))
        index += num_layers
    return units


def units(plan: RecomputePlan) -> list[tuple[int, int, bool]]:
    """The same of a plan; kept blocks one by one, as nothing groups them."""
    found = []
    for segment in plan.segments:
        if isinstance(segment.action, Keep):
            found += [(index, index + 1, False) for index in range(segment.start, segment.stop)]
        else:
            found.append((segment.start, segment.stop, True))
    return found


def sizes(plan: RecomputePlan) -> list[int]:
    return [segment.stop - segment.start for segment in plan.segments]


# ---- what the words mean


@pytest.mark.parametrize("method", ["uniform", "block"])
@pytest.mark.parametrize("chunk", range(1, 13))
def test_the_units_are_megatrons(method: str, chunk: int) -> None:
    for num_layers in range(1, chunk + 1):
        plan = RecomputePolicy(method=method, num_layers=num_layers).plan([chunk])  # type: ignore[arg-type]
        assert units(plan) == megatron(method, num_layers, chunk)


@settings(max_examples=150)
@given(
    method=st.sampled_from(["uniform", "block"]),
    chunks=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    share=st.floats(0, 1),
)
def test_each_chunk_is_megatrons_whatever_the_others_are(method: str, chunks: list[int], share: float) -> None:
    num_layers = 1 + round(share * (max(chunks) - 1))
    plan = RecomputePolicy(method=method, num_layers=num_layers).plan(chunks)  # type: ignore[arg-type]
    due = []
    for start, chunk in zip(itertools.accumulate([0, *chunks]), chunks, strict=False):
        due += [(start + a, start + b, run) for a, b, run in megatron(method, num_layers, chunk)]
    assert units(plan) == due
    assert plan.num_blocks == sum(chunks)


def test_numbers_of_megatron() -> None:
    # layer calls per step measured in Megatron with 8 layers: block 3 -> 2,2,2,1,1,1,1,1
    block = RecomputePolicy(method="block", num_layers=3).plan([8])
    assert [1 + isinstance(s.action, Full) for s in block.segments for _ in range(s.stop - s.start)] == [2] * 3 + [
        1
    ] * 5
    assert sizes(RecomputePolicy(num_layers=3).plan([8])) == [3, 3, 2]
    # layers that do not divide: an IndexError in Megatron-LM#1807
    assert sizes(RecomputePolicy(num_layers=7).plan([24])) == [7, 7, 7, 3]
    # ten layers on four stages
    assert sizes(RecomputePolicy(num_layers=2).plan([3, 3, 2, 2])) == [2, 1, 2, 1, 2, 2]
    stages = RecomputePolicy(method="block", num_layers=3).plan([3, 3, 2, 2])
    assert units(stages) == [(index, index + 1, True) for index in range(10)]


def test_block_keeps_the_last_blocks_of_each_chunk() -> None:
    plan = RecomputePolicy(method="block", num_layers=2).plan([4, 1, 3])
    assert [segment.start for segment in plan.segments if isinstance(segment.action, Full)] == [0, 1, 4, 5, 6]
    assert [(s.start, s.stop) for s in plan.segments if isinstance(s.action, Keep)] == [(2, 4), (7, 8)]


@pytest.mark.parametrize(
    ("policy", "same"),
    [
        (RecomputePolicy(), RecomputePolicy(granularity="full", method="uniform", num_layers=1)),
        (RecomputePolicy(method="uniform"), RecomputePolicy(method="uniform", num_layers=1)),
        (RecomputePolicy(num_layers=2), RecomputePolicy(method="uniform", num_layers=2)),
        (RecomputePolicy(method="block"), RecomputePolicy(method="block", num_layers=5)),
        (
            RecomputePolicy(granularity="selective"),
            RecomputePolicy(granularity="selective", modules=["core_attn"]),
        ),
    ],
)
def test_what_a_word_left_out_means(policy: RecomputePolicy, same: RecomputePolicy) -> None:
    for chunks in ([5], [5, 3], [2, 5, 1]):
        assert policy.plan(chunks) == same.plan(chunks)


def test_block_of_everything_is_uniform_of_one() -> None:
    assert RecomputePolicy(method="block").plan([4, 2]) == RecomputePolicy().plan([4, 2])


def test_no_recompute_keeps_every_block() -> None:
    plan = RecomputePolicy(granularity=None).plan([4, 2])
    assert {type(segment.action) for segment in plan.segments} == {Keep}
    assert plan.num_blocks == 6


def test_selective_reaches_every_block() -> None:
    plan = RecomputePolicy(granularity="selective", modules=["norm", "*.experts"]).plan([4, 2])
    assert {segment.action for segment in plan.segments} == {Selective(("norm", "*.experts"))}
    assert plan.num_blocks == 6


@pytest.mark.parametrize(
    ("policy", "place"),
    [
        (RecomputePolicy(), "device"),
        (RecomputePolicy(distribute_saved_activations=True), "shard"),
        (RecomputePolicy(offload_saved_activations=True), "host"),
        (RecomputePolicy(granularity="selective", offload_saved_activations=True), "host"),
        (RecomputePolicy(method="block", num_layers=1, distribute_saved_activations=True), "shard"),
    ],
)
def test_where_unit_inputs_live(policy: RecomputePolicy, place: str) -> None:
    actions: list[Action] = [segment.action for segment in policy.plan([3]).segments]
    assert {action.inputs for action in actions if not isinstance(action, Keep)} == {place}
    assert policy.inputs == place


@settings(max_examples=100)
@given(
    policy=st.one_of(
        st.builds(RecomputePolicy, granularity=st.none()),
        st.builds(
            RecomputePolicy,
            method=st.sampled_from([None, "uniform", "block"]),
            num_layers=st.one_of(st.none(), st.integers(1, 4)),
            offload_saved_activations=st.booleans(),
        ),
        st.builds(
            RecomputePolicy,
            granularity=st.just("selective"),
            modules=st.one_of(st.none(), st.lists(st.sampled_from(LABELS), min_size=1, unique=True)),
        ),
    ),
    chunks=st.lists(st.integers(1, 9), min_size=1, max_size=5).filter(lambda chunks: max(chunks) >= 4),
)
def test_units_tile_and_never_span_two_chunks(policy: RecomputePolicy, chunks: list[int]) -> None:
    plan = policy.plan(chunks)
    covered = [index for segment in plan.segments for index in range(segment.start, segment.stop)]
    assert covered == list(range(sum(chunks)))
    borders = set(itertools.accumulate(chunks))
    assert not any(border in range(s.start + 1, s.stop) for s in plan.segments for border in borders)
    assert policy.plan(tuple(chunks)) == plan


def test_applying_a_policy_changes_nothing_about_it() -> None:
    policy = RecomputePolicy(num_layers=2)
    first = policy.plan([5])
    policy.plan([2, 9])
    assert policy.plan([5]) == first


def test_policies_are_values() -> None:
    policy = RecomputePolicy(granularity="selective", modules=["norm", "act"])
    assert policy == RecomputePolicy(granularity="selective", modules=("norm", "act"))
    assert hash(policy) == hash(copy.deepcopy(policy))
    assert pickle.loads(pickle.dumps(policy)) == policy
    with pytest.raises(AttributeError):
        policy.num_layers = 3  # type: ignore[misc]


def test_a_list_given_as_modules_stays_the_callers() -> None:
    modules = ["norm"]
    policy = RecomputePolicy(granularity="selective", modules=modules)
    modules.append("act")
    assert policy.modules == ("norm",)


# ---- what is refused


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"granularity": "ful"}, ["granularity='ful'", "'full', 'selective' or None", "did you mean 'full'?"]),
        ({"granularity": "Full"}, ["granularity='Full'", "did you mean 'full'?"]),
        ({"granularity": "none"}, ["granularity='none'", "or None"]),
        ({"granularity": ""}, ["granularity=''", "'full', 'selective'"]),
        ({"granularity": 1}, ["granularity=1", "'full', 'selective'"]),
        ({"granularity": True}, ["granularity=True", "'full', 'selective'"]),
        ({"granularity": ["full"]}, ["granularity=['full']", "'full', 'selective'"]),
        ({"method": "unifrom"}, ["method='unifrom'", "'uniform', 'block' or None", "did you mean 'uniform'?"]),
        ({"method": "blocks", "num_layers": 2}, ["method='blocks'", "did you mean 'block'?"]),
        ({"num_layers": 0}, ["num_layers=0", "1 up to the number of blocks", "granularity=None"]),
        ({"num_layers": -1, "method": "block"}, ["num_layers=-1", "1 up to the number of blocks"]),
        ({"granularity": "selective", "method": "uniform"}, ["method='uniform'", "'selective'", "granularity='full'"]),
        ({"granularity": "selective", "method": "block"}, ["method='block'", "'selective'", "leave it out"]),
        ({"granularity": "selective", "num_layers": 2}, ["num_layers=2", "'selective'", "granularity='full'"]),
        ({"granularity": None, "method": "uniform"}, ["method='uniform'", "granularity=None", "leave it out"]),
        ({"granularity": None, "num_layers": 1}, ["num_layers=1", "granularity=None", "leave it out"]),
        ({"modules": ["core_attn"]}, ["modules=['core_attn']", "granularity='full'", "granularity='selective'"]),
        ({"granularity": None, "modules": ["mlp"]}, ["modules=['mlp']", "granularity=None", "leave it out"]),
        ({"granularity": None, "distribute_saved_activations": True}, ["distribute_saved_activations", "None"]),
        ({"granularity": None, "offload_saved_activations": True}, ["offload_saved_activations", "None"]),
        (
            {"distribute_saved_activations": True, "offload_saved_activations": True},
            ["distribute_saved_activations", "offload_saved_activations", "one"],
        ),
        ({"granularity": "selective", "modules": []}, ["modules=[]", "granularity=None"]),
        ({"granularity": "selective", "modules": ["core_atn"]}, ["'core_atn'", "did you mean 'core_attn'?", "'*.mlp'"]),
        ({"granularity": "selective", "modules": ["layernorm"]}, ["'layernorm'", "did you mean 'norm'?"]),
        ({"granularity": "selective", "modules": ["mlp", "zzz"]}, ["'zzz'", "known: ", *LABELS]),
        ({"granularity": "selective", "modules": [""]}, ["''", *LABELS]),
        ({"granularity": "selective", "modules": ["mlp", "mlp"]}, ["['mlp']", "more than once"]),
    ],
)
def test_refused_values(words: dict[str, object], message: list[str]) -> None:
    with pytest.raises(ValueError, match=containing(*message)):
        RecomputePolicy(**words)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"num_layers": 2.0}, ["num_layers=2.0", "int"]),
        ({"num_layers": 2.5}, ["num_layers=2.5", "int"]),
        ({"num_layers": "2"}, ["num_layers='2'", "int"]),
        ({"num_layers": True}, ["num_layers=True", "int"]),
        ({"granularity": "selective", "modules": "mlp"}, ["modules='mlp'", "a list", "['core_attn']"]),
        ({"granularity": "selective", "modules": {"mlp"}}, ["modules={'mlp'}", "a list"]),
        ({"granularity": "selective", "modules": 3}, ["modules=3", "a list"]),
        ({"granularity": "selective", "modules": ["mlp", 3]}, ["strings", "found 3"]),
        ({"granularity": "selective", "modules": [None]}, ["strings", "found None"]),
        ({"distribute_saved_activations": "yes"}, ["distribute_saved_activations='yes'", "True or False"]),
        ({"offload_saved_activations": 1}, ["offload_saved_activations=1", "True or False"]),
        ({"offload_saved_activations": None}, ["offload_saved_activations=None", "True or False"]),
    ],
)
def test_refused_types(words: dict[str, object], message: list[str]) -> None:
    with pytest.raises(TypeError, match=containing(*message)):
        RecomputePolicy(**words)  # type: ignore[arg-type]


@pytest.mark.parametrize("words", [{"num_layer": 2}, {"recompute_num_layers": 2}, {"uniform": True}])
def test_unknown_words(words: dict[str, object]) -> None:
    with pytest.raises(TypeError, match=next(iter(words))):
        RecomputePolicy(**words)  # type: ignore[arg-type]


def test_words_are_given_by_name() -> None:
    with pytest.raises(TypeError, match="positional"):
        RecomputePolicy("full")  # type: ignore[misc]


@pytest.mark.parametrize("method", ["uniform", "block"])
def test_num_layers_beyond_the_largest_chunk(method: str) -> None:
    policy = RecomputePolicy(method=method, num_layers=5)  # type: ignore[arg-type]
    assert policy.plan([5, 1]).num_blocks == 6
    with pytest.raises(ValueError, match=containing("num_layers=5", "4 block(s)", "1..4 is due")):
        policy.plan([4, 3])


@pytest.mark.parametrize("chunks", [[], [0], [3, 0], [3, -1]])
def test_chunks_without_blocks(chunks: list[int]) -> None:
    with pytest.raises(ValueError, match=containing(chunks, "at least one block")):
        RecomputePolicy().plan(chunks)


# ---- words


@pytest.mark.parametrize("pattern", ["*.mlp", "decoder.mlp", "mlp?", "*", "layers.[02].mlp"])
def test_patterns_are_taken_as_they_are(pattern: str) -> None:
    assert is_pattern(pattern)
    assert RecomputePolicy(granularity="selective", modules=[pattern]).modules == (pattern,)


def test_labels_are_no_patterns() -> None:
    assert not any(map(is_pattern, LABELS))
    assert RecomputePolicy(granularity="selective", modules=LABELS).modules == LABELS


def test_nearest() -> None:
    assert nearest("uniforn", ["uniform", "block"]) == "did you mean 'uniform'?"
    assert nearest("xyz", ["uniform", "block"]) == "known: uniform, block."
    many = nearest("xyz", [f"layers.{index}" for index in range(1000)])
    assert len(many) < 200
    assert many.endswith("...")
