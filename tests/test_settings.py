"""Settings by name, and the rule of thumb."""

from __future__ import annotations

import pytest

from lightning_recompute.policy import RecomputePolicy
from lightning_recompute.settings import rule_of_thumb, setting, settings, usual_settings


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("none", RecomputePolicy(granularity=None)),
        ("selective core_attn", RecomputePolicy(granularity="selective")),
        ("selective norm+act", RecomputePolicy(granularity="selective", modules=["norm", "act"])),
        ("selective *.mlp.experts", RecomputePolicy(granularity="selective", modules=["*.mlp.experts"])),
        ("full uniform 2", RecomputePolicy(method="uniform", num_layers=2)),
        ("full  block 10", RecomputePolicy(method="block", num_layers=10)),
    ],
)
def test_names_are_read(name: str, policy: RecomputePolicy) -> None:
    assert setting(name).plan([12]) == policy.plan([12])


@pytest.mark.parametrize("name", ["", "ful", "full", "full block", "full block x", "full uniform -1", "none 1"])
def test_what_is_no_setting(name: str) -> None:
    with pytest.raises(ValueError, match="one of these forms is due: 'none', 'selective core_attn'"):
        settings(["none", name])


@pytest.mark.parametrize(
    ("name", "words"), [("selective norms", "did you mean 'norm'"), ("full block 0", "num_layers=0")]
)
def test_what_no_policy_allows(name: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        setting(name)


@pytest.mark.parametrize(
    ("num_blocks", "blocks"), [(1, []), (2, [1]), (3, [1, 2]), (4, [1, 2, 3]), (8, [2, 4, 6]), (96, [24, 48, 72])]
)
def test_the_usual_settings_are_possible(num_blocks: int, blocks: list[int]) -> None:
    names = usual_settings(num_blocks)
    assert names == ["none", "selective core_attn", "full uniform 1", *(f"full block {number}" for number in blocks)]
    for policy in settings(names).values():
        assert policy.plan([num_blocks]).num_blocks == num_blocks


@pytest.mark.parametrize(
    ("num_parameters", "first", "number"),
    [
        (9_999_999_999, "selective core_attn", 1),
        (10_000_000_000, "full block 1", 4),
        (99_999_999_999, "full block 1", 4),
        (100_000_000_000, "full uniform 1", 1),
    ],
)
def test_the_rule_of_thumb(num_parameters: int, first: str, number: int) -> None:
    rule = rule_of_thumb(num_parameters, 4)
    assert (rule.settings[0], len(rule.settings)) == (first, number)
    settings(rule.settings)
