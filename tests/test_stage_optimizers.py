"""Optimizers of a whole module while a rank has some of its parameters: what is loaded, held, saved and given back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adam, Optimizer

from lightning_recompute.checkpoint_loading import read_checkpoint
from lightning_recompute.optimizer_names import NAMES, named_state, without_names
from lightning_recompute.saved_states import Saved
from lightning_recompute.sharded_checkpoint import save_sharded
from lightning_recompute.stage_optimizers import StageOptimizers


class Net(nn.Sequential):
    """Three layers, the first and the last one tied."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        super().__init__(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3, bias=False))
        self[2].weight = self[0].weight
        self.extra = nn.Parameter(torch.zeros(2))


def adam(net: Net) -> Adam:
    """Matrices in reverse order, then the rest."""
    matrices = [p for p in net.parameters() if p.dim() > 1][::-1]
    return Adam([{"params": matrices, "lr": 0.1}, {"params": [p for p in net.parameters() if p.dim() < 2]}], lr=0.2)


def stepped(optimizer: Optimizer) -> Optimizer:
    for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        parameter.grad = torch.full_like(parameter, 1.0 + number)
    optimizer.step()
    return optimizer


def owned(net: Net, second: bool) -> dict[str, nn.Parameter]:
    """What the first or the second of two stages has: the tied weight is on both."""
    there = ("0.weight", "1.weight", "1.bias") if second else ("0.weight", "0.bias", "extra")
    return {name: parameter for name, parameter in net.named_parameters() if name in there}


def by_name(net: Net, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
    return {name: dict(optimizer.state[p]) for name, p in net.named_parameters() if p in optimizer.state}


def same(found: dict[str, dict[str, Any]], due: dict[str, dict[str, Any]]) -> bool:
    return found.keys() == due.keys() and all(
        torch.equal(found[name][key], value) for name, state in due.items() for key, value in state.items()
    )


@pytest.mark.parametrize("second", [False, True])
def test_each_stage_takes_its_part_of_what_was_loaded(second: bool) -> None:
    saved = Net()
    optimizer = stepped(adam(saved))
    due = by_name(saved, optimizer)
    net = Net(1)
    loading = adam(net)
    stages = StageOptimizers(net, [loading])
    for state in (named_state(optimizer, saved), optimizer.state_dict()):
        stages.hold([state])
        assert stages.holds
        assert not loading.state
    here = owned(net, second)
    stages.divide(here)
    assert not stages.holds
    assert same(by_name(net, loading), {name: due[name] for name in here})
    assert [len(group["params"]) for group in loading.param_groups] == ([2, 1] if second else [1, 2])
    stages.restore()
    assert [[id(p) for p in group["params"]] for group in loading.param_groups] == [
        [id(p) for p in group["params"]] for group in adam(net).param_groups
    ]
    assert same(by_name(net, loading), {name: due[name] for name in here})


def test_two_stages_save_one_state_of_the_whole() -> None:
    saved = Net()
    due = named_state(stepped(adam(saved)), saved)
    found: dict[Any, Any] = {}
    for second in (False, True):
        net = Net(1)
        optimizer = adam(net)
        stages = StageOptimizers(net, [optimizer])
        stages.hold([due])
        stages.divide(owned(net, second))
        state = stages.state(optimizer, with_held=True)
        assert state[NAMES] == due[NAMES]
        assert state["param_groups"] == due["param_groups"]
        found |= state["state"]
        stages.restore()
        assert stages.state(optimizer, with_held=True)["state"].keys() == state["state"].keys()
    assert same(found, due["state"])


def test_options_that_were_changed_before_the_first_batch_stay() -> None:
    saved = Net()
    state = named_state(stepped(adam(saved)), saved)
    net = Net(1)
    optimizer = adam(net)
    stages = StageOptimizers(net, [optimizer])
    optimizer.param_groups[0]["lr"] = 5.0
    stages.hold([state])
    assert optimizer.param_groups[0]["lr"] == 0.1
    optimizer.param_groups[0]["lr"] = 7.0
    stages.divide(owned(net, True))
    assert optimizer.param_groups[0]["lr"] == 7.0
    stages.load([state])
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert len(by_name(net, optimizer)) == 3


def test_parameters_that_come_late() -> None:
    net = Net()
    optimizer = SGD(net[1].parameters(), 0.1, momentum=0.9)
    stages = StageOptimizers(net, [optimizer])
    stages.hold([named_state(stepped(optimizer), net)])
    own = nn.Parameter(torch.zeros(1))  # of no module
    optimizer.add_param_group({"params": [net[0].weight, own]})
    stages.divide(owned(net, False))
    assert [len(group["params"]) for group in optimizer.param_groups] == [0, 2]
    assert len(stages.state(optimizer, with_held=True)["param_groups"][0]["params"]) == 2
    optimizer.add_param_group({"params": [net.extra]})
    with pytest.raises(ValueError, match="SGD was given other parameters after the first batch"):
        stages.state(optimizer, with_held=True)


def test_states_that_wait_are_saved_by_one(tmp_path: Path) -> None:
    """From a folder they are read only then, and stay what they were."""
    saved = Net()
    due = named_state(stepped(adam(saved)), saved)
    save_sharded(tmp_path / "a", {"state_dict": saved.state_dict(), "optimizer_states": [due]})
    net = Net(1)
    optimizer = adam(net)
    stages = StageOptimizers(net, [optimizer])
    held = read_checkpoint(tmp_path / "a")["optimizer_states"]
    stages.hold(held)
    assert stages.state(optimizer, with_held=False)["state"] == {}
    assert all(isinstance(value, Saved) for state in held[0]["state"].values() for value in state.data.values())
    assert same(stages.state(optimizer, with_held=True)["state"], due["state"])
    other = adam(net)
    assert stages.state(other, with_held=True)["state"] == {}


def test_states_that_wait_survive_their_folder(tmp_path: Path) -> None:
    saved = Net()
    due = named_state(stepped(adam(saved)), saved)
    for name in ("a", "b"):
        save_sharded(tmp_path / name, {"state_dict": saved.state_dict(), "optimizer_states": [due]})
    net = Net(1)
    optimizer = adam(net)
    stages = StageOptimizers(net, [optimizer])
    stages.hold(read_checkpoint(tmp_path / "a")["optimizer_states"])
    stages.before_writing(tmp_path / "b")
    stages.before_writing(tmp_path / "c")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    stages.before_writing(tmp_path / "link")
    (tmp_path / "a" / ".metadata").unlink()
    for part in (tmp_path / "a").glob("*.distcp"):
        part.unlink()
    stages.divide(owned(net, True))
    assert len(by_name(net, optimizer)) == 3


def test_what_does_not_fit_is_refused() -> None:
    net = Net()
    optimizer = adam(net)
    stages = StageOptimizers(net, [optimizer])
    state = named_state(stepped(adam(net)), net)
    with pytest.raises(ValueError, match="the states of 2 optimizers, configure_optimizers made 1"):
        stages.hold([state, state])
    less = named_state(stepped(SGD([{"params": net[1].parameters()}, {"params": [net.extra]}], 0.1)), net)
    with pytest.raises(ValueError, match=r"not saved: 0\.weight, 0\.bias; saved and not here: none"):
        stages.hold([less])
    stages.hold([less], strict=False)
    stages.divide(owned(net, True))
    with pytest.raises(ValueError, match=r"not saved: 0\.weight, 0\.bias"):
        stages.load([less])
    stages.load([less], strict=False)
    numbered = without_names(less)
    with pytest.raises(ValueError, match="other numbers of parameters in its groups"):
        stages.load([numbered])


def test_optimizers_that_cannot_be_divided() -> None:
    class Other(SGD):
        def state_dict(self) -> dict[str, Any]:
            return {"mine": 1}

    net = Net()
    with pytest.raises(ValueError, match="LBFGS under pipeline_parallel_size > 1: its step looks at all parameters"):
        StageOptimizers(net, [LBFGS(net.parameters())])
    with pytest.raises(ValueError, match=r"Other under pipeline_parallel_size > 1: its state_dict\(\) has no 'state'"):
        StageOptimizers(net, [Other(net.parameters(), 0.1)])
