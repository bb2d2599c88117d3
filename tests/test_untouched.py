"""A run that is only tried leaves random streams, buffers, attributes, gradients and the model's own flags."""

from __future__ import annotations

import functools
import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_recompute.blocks import find_blocks
from lightning_recompute.untouched import distinct_blocks, hook_owner, preserved_rng, undone


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.gradient_checkpointing = True
        self.seen: list[int] = []
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(self.seen))
        self.last = x
        return dropped(self.norm(self.linear(x)))


def dropped(x: Tensor) -> Tensor:
    random.random()
    np.random.rand()
    return nn.functional.dropout(x, 0.5)


def streams() -> tuple[object, ...]:
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_of_a_run_stays(fails: bool) -> None:
    model = nn.Sequential(*(Block() for _ in range(3)))
    lists = find_blocks(model)
    x = torch.randn(5, 4)
    model[0].linear.weight.grad = former = torch.ones(4, 4)
    buffers = {name: (id(buffer), buffer.clone()) for name, buffer in model.named_buffers()}
    before = streams()

    def run() -> None:
        with undone(model, lists):
            assert not any(block.gradient_checkpointing for block in model)
            model(x).sum().backward()
            model[1].linear.weight.requires_grad_(False)
            model.eval()
            if fails:
                raise KeyError("stopped")

    if fails:
        with pytest.raises(KeyError, match="stopped"):
            run()
    else:
        run()
    assert streams() == before
    assert all(block.gradient_checkpointing and block.training for block in model)
    assert all(block.seen == [] and block.last is None for block in model)
    assert model[1].linear.weight.requires_grad
    assert model[0].linear.weight.grad is former
    assert all(parameter.grad is None for name, parameter in model.named_parameters() if name != "0.linear.weight")
    for name, buffer in model.named_buffers():
        assert buffers[name][0] == id(buffer)
        assert torch.equal(buffers[name][1], buffer)


def test_a_stream_goes_on_where_it_was() -> None:
    torch.manual_seed(3)
    due = torch.rand(2)
    torch.manual_seed(3)
    with preserved_rng([]):
        torch.rand(7)
    assert torch.equal(torch.rand(2), due)


def test_a_block_that_is_shared_comes_once() -> None:
    block = Block()
    model = nn.Sequential(block, Block(), block)
    assert [name for _, name in distinct_blocks(find_blocks(model))] == ["2", "1"]


def test_hooks_of_a_run_do_not_stay() -> None:
    class Registering(nn.Sequential):
        """Registers hooks once, as transformers does."""

        registered = False

        def forward(self, x: Tensor) -> Tensor:
            if not self.registered:
                for block in self:
                    block.register_forward_hook(lambda *given: calls.append(1))
                self.registered = True
            output: Tensor = super().forward(x)
            return output

    calls: list[int] = []
    model = Registering(*(Block() for _ in range(3)))
    own = model[0].register_forward_hook(lambda *given: None)
    with undone(model, find_blocks(model)):
        model(torch.randn(5, 4))
    assert not model.registered
    calls.clear()
    model(torch.randn(5, 4))
    assert len(calls) == 3
    assert len(model[0]._forward_hooks) == 2
    own.remove()
    assert len(model[0]._forward_hooks) == 1


def test_whose_a_hook_is() -> None:
    assert hook_owner(functools.partial(torch.nn.functional.relu, inplace=True)) == "torch"
    assert hook_owner(lambda *given: None) == __name__.partition(".")[0]
    assert hook_owner(print) == "builtins"
