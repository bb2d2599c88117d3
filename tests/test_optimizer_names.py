"""Optimizer states by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer

from lightning_recompute.optimizer_names import NAMES, by_name, by_number, matched, named_state, without_names


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.second = nn.Linear(2, 2, bias=False)
        self.tied = nn.Linear(2, 2, bias=False)
        self.tied.weight = self.second.weight


def stepped(optimizer: Optimizer) -> Optimizer:
    for group in optimizer.param_groups:
        for index, parameter in enumerate(group["params"]):
            parameter.grad = torch.full_like(parameter, index + 1.0)
    optimizer.step()
    return optimizer


def momenta(optimizer: Optimizer, net: nn.Module) -> dict[str, Any]:
    return {name: optimizer.state[value].get("momentum_buffer") for name, value in net.named_parameters()}


def test_a_state_has_names_and_is_torchs_otherwise() -> None:
    net = Net()
    optimizer = stepped(SGD(net.parameters(), lr=0.1, momentum=0.9))
    state = named_state(optimizer, net)
    assert state[NAMES] == ["first.weight", "first.bias", "second.weight"]
    assert without_names(state).keys() == optimizer.state_dict().keys()
    named = by_name(state)
    assert set(named["state"]) == set(state[NAMES]) == set(named["param_groups"][0]["params"])
    assert by_number(named) == state
    assert by_number(without_names(state)) == without_names(state)
    SGD(net.parameters(), lr=0.1, momentum=0.9).load_state_dict(state)


def test_parameters_in_another_order_and_groups_in_another() -> None:
    net, other = Net(), Net()
    groups = [{"params": [net.first.weight, net.second.weight], "lr": 0.5}, {"params": [net.first.bias]}]
    saved = named_state(stepped(SGD(groups, lr=0.1, momentum=0.9)), net)
    due = {"first.weight": 1.0, "second.weight": 2.0, "first.bias": 1.0}
    # a tied parameter under its other name
    saved[NAMES][1] = "tied.weight"
    groups = [{"params": [other.first.bias]}, {"params": [other.second.weight, other.first.weight]}]
    optimizer = SGD(groups, lr=0.0, momentum=0.9)
    optimizer.load_state_dict(matched(saved, optimizer, other))
    assert {name: float(value.mean()) for name, value in momenta(optimizer, other).items()} == due
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.5]


def test_an_ordinary_state_goes_by_number() -> None:
    net = Net()
    state = stepped(SGD(net.parameters(), lr=0.1, momentum=0.9)).state_dict()
    optimizer = SGD(Net().parameters(), lr=0.0)
    assert matched(state, optimizer, net) == state


def test_parameters_that_are_not_the_modules_go_by_number() -> None:
    net, extra = Net(), nn.Parameter(torch.ones(3))
    saved = named_state(stepped(SGD([extra, *net.parameters()], lr=0.1, momentum=0.9)), net)
    other, another = Net(), nn.Parameter(torch.zeros(3))
    optimizer = SGD([another, *reversed(list(other.parameters()))], lr=0.1, momentum=0.9)
    optimizer.load_state_dict(matched(saved, optimizer, other))
    assert optimizer.state[another]["momentum_buffer"].tolist() == [1.0] * 3
    assert float(optimizer.state[other.second.weight]["momentum_buffer"].mean()) == 4.0


def test_other_parameters_are_refused_by_name_or_start_anew() -> None:
    net = Net()
    saved = named_state(stepped(SGD(net.first.parameters(), lr=0.1, momentum=0.9)), net)
    optimizer = SGD([net.first.weight, net.second.weight], lr=0.2, momentum=0.9)
    with pytest.raises(ValueError, match=r"not saved: second\.weight; saved and not here: first\.bias"):
        matched(saved, optimizer, net)
    optimizer.load_state_dict(matched(saved, optimizer, net, strict=False))
    assert net.first.weight in optimizer.state
    assert net.second.weight not in optimizer.state
    assert optimizer.param_groups[0]["lr"] == 0.1
    stepped(optimizer)


def test_another_number_of_groups_is_refused() -> None:
    net = Net()
    saved = named_state(SGD(net.parameters(), lr=0.1), net)
    optimizer = SGD([{"params": net.first.parameters()}, {"params": net.second.parameters()}], lr=0.1)
    with pytest.raises(ValueError, match="has 1 parameter groups, this one 2"):
        matched(saved, optimizer, net)


def test_stateless_never_stepped_and_foreign_optimizers() -> None:
    net = Net()
    for optimizer in (stepped(SGD(net.parameters(), lr=0.1)), Adam(net.parameters())):
        state = by_name(named_state(optimizer, net))
        assert not any(state["state"].values())
        optimizer.load_state_dict(matched(by_number(state), optimizer, net))

    class Foreign(SGD):
        def state_dict(self) -> dict[str, Any]:
            return {"mine": 3}

    foreign = Foreign(net.parameters(), lr=0.1)
    assert by_number(by_name(named_state(foreign, net))) == {"mine": 3}
    assert matched({"mine": 3}, foreign, net) == {"mine": 3}


def test_what_belongs_to_no_parameter_stays() -> None:
    net = Net()
    optimizer = SGD(net.parameters(), lr=0.1)
    state = named_state(optimizer, net)
    state["state"]["shared"] = {"count": 3}
    assert matched(by_number(by_name(state)), optimizer, net)["state"]["shared"] == {"count": 3}
