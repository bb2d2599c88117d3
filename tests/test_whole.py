"""Parameters exchanged, and modules whole again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from distributed import in_ranks
from torch import nn
from whole_checks import check_all

from lightning_recompute.whole import replace_parameters

pytestmark = pytest.mark.xdist_group("whole")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return in_ranks(check_all, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("what", ["values", "gradients", "buffers", "ties", "ordinary stays", "states", "groups"])
def test_a_module_becomes_whole(ranks: list[dict[str, Any]], what: str) -> None:
    assert [rank["odd"][what] for rank in ranks] == [True, True]


def test_what_the_user_set_stays(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert all(rank["odd"]["flags"])
        assert rank["odd"]["attributes"] == [[], ["tag"], [], []]
        assert rank["odd"]["own"] == [0.0, 1.0, 2.0]
        # the tie once, the ordinary one not, and the one of the optimizer alone
        assert rank["odd"]["num replaced"] == 4


def test_values_go_to_another_device(ranks: list[dict[str, Any]]) -> None:
    assert [rank["device"] for rank in ranks] == [["meta", "meta", "cpu"]] * 2


def test_terms_of_a_sum_are_refused(ranks: list[dict[str, Any]]) -> None:
    assert all("to be summed" in rank["partial"] for rank in ranks)


def copied(name: str, parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(parameter.detach().clone())


def tied() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 3), nn.LSTM(3, 3), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    return model


def test_each_parameter_is_exchanged_once() -> None:
    model, names = tied(), []
    former = dict(model.named_parameters())

    def convert(name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        names.append(name)
        return None if name == "2.bias" else copied(name, parameter)

    replaced = replace_parameters(model, convert)
    assert names == list(former)
    assert model[2].weight is model[0].weight
    assert model[2].bias is former["2.bias"]
    new = dict(model.named_parameters())
    assert list(new) == names
    assert {id(one): id(other) for one, other in replaced.items()} == {
        id(former[name]): id(new[name]) for name in names if name != "2.bias"
    }


def test_lists_that_a_module_keeps_follow() -> None:
    model = tied()
    replace_parameters(model, copied)
    assert model[1]._flat_weights[0] is model[1].weight_ih_l0


def test_what_is_set_on_a_parameter_is_carried_over() -> None:
    model, seen = tied(), []
    weight, bias = model[0].weight, model[0].bias
    weight.no_decay = True
    bias.requires_grad_(False)
    handles = [
        weight.register_hook(lambda gradient: seen.append("hook")),
        weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter)),
    ]
    replace_parameters(model, copied)
    assert model[0].weight.no_decay
    assert not model[0].bias.requires_grad
    model[0](torch.ones(1, 3)).sum().backward()
    assert len(seen) == 2
    assert seen[0] == "hook"
    assert seen[1] is model[0].weight
    for handle in handles:
        handle.remove()
    model[0](torch.ones(1, 3)).sum().backward()
    assert len(seen) == 2
