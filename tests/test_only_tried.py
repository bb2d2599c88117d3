"""A step that is only tried: nothing is logged, nobody steps, and the module is afterwards what it was."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_recompute.only_tried import only_tried


class Manual(pl.LightningModule):
    def __init__(self, num_optimizers: int) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.linear = nn.Linear(2, 1)
        self.made = [torch.optim.SGD(self.parameters(), 1.0) for _ in range(num_optimizers)]

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        return self.made if len(self.made) > 1 else self.made[0]

    def lr_schedulers(self) -> Any:
        return None

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        loss = self.linear(batch).sum()
        self.log("loss", loss)  # without a Trainer it would complain
        self.log_dict({"other": loss})
        found = self.optimizers()
        for optimizer in found if isinstance(found, list) else [found]:
            optimizer.zero_grad()
            assert optimizer.param_groups[0]["lr"] == 1.0
        self.manual_backward(loss)  # without a Trainer there is no strategy to do it
        for optimizer in found if isinstance(found, list) else [found]:
            optimizer.step()
        assert self.lr_schedulers() is None


@pytest.mark.parametrize("num_optimizers", [1, 2])
def test_nobody_steps_and_nobody_hears_of_it(num_optimizers: int) -> None:
    module = Manual(num_optimizers)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    attributes = set(vars(module))
    with only_tried(module):
        module.training_step(torch.ones(3, 2), 0)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert module.linear.weight.grad is not None  # whoever tries a step gives it stand-ins
    assert set(vars(module)) == attributes


def test_taken_back_after_an_error() -> None:
    module = Manual(1)
    with pytest.raises(KeyError, match="stopped"), only_tried(module):
        raise KeyError("stopped")
    assert "log" not in vars(module)
    assert module.optimizers() is module.made[0]


def test_any_other_module_needs_nothing() -> None:
    module = nn.Linear(2, 2)
    attributes = set(vars(module))
    with only_tried(module):
        assert set(vars(module)) == attributes
