"""A model as one rank of a run that does not take place has it, and as it was afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_recompute.fake_groups import fake_groups
from lightning_recompute.gpt import GPT
from lightning_recompute.rank_view import RankStep, tensor_rank, untied


def gpt() -> GPT:
    torch.manual_seed(1)
    return GPT(num_layers=2, num_heads=4, hidden_size=32, max_length=16, vocab_size=64, tied_head=True)


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_rank_has_its_share_and_leaves_the_whole(sequence_parallel: bool) -> None:
    model = gpt()
    before, parameters = state(model), dict(model.named_parameters())
    forwards = [name for part in model.modules() for name in vars(part) if name == "forward"]
    with fake_groups(tensor=4) as groups, tensor_rank(model, groups, sequence_parallel=sequence_parallel) as handle:
        weight = model.blocks[0].get_parameter("mlp.up_proj.weight").data
        assert isinstance(weight, DTensor)
        assert weight.to_local().shape == (32, 32)
        step = RankStep(handle)
        loss = step.forward(lambda: model(torch.zeros(2, 16, dtype=torch.long)).sum())
        loss.backward()
        step.after_backward()
        assert all(isinstance(parameter.grad, DTensor) for parameter in model.parameters())
    assert dict(model.named_parameters()) == parameters
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [name for part in model.modules() for name in vars(part) if name == "forward"] == forwards


def test_what_cannot_be_divided_leaves_the_whole() -> None:
    model = gpt()
    parameters = dict(model.named_parameters())
    with (
        fake_groups(tensor=3) as groups,
        pytest.raises(ValueError, match="does not divide"),
        tensor_rank(model, groups),
    ):
        pass
    assert dict(model.named_parameters()) == parameters


def test_ties_are_undone_for_a_while() -> None:
    model = gpt()
    tied = model.token_embedding.weight
    with untied(model):
        assert model.token_embedding.weight is tied
        assert model.head.weight is not tied
        assert model.head.weight.data_ptr() == tied.data_ptr()
        model(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
        assert model.head.weight.grad is not None
        assert tied.grad is not None
        assert not torch.equal(model.head.weight.grad, tied.grad)
    assert model.head.weight is tied
