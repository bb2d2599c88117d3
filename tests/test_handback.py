"""Gradients that are there before `backward` is called."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_recompute.handback import HandBack, SetAside, loss_with


def test_the_loss_gives_gradients_to_their_parameters() -> None:
    one, other = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))
    other.grad = torch.ones(3)
    gradient = torch.full((2,), 4.0)
    loss = loss_with(torch.tensor(3.5), HandBack({one: gradient, other: torch.ones(3)}, 2.0))
    assert loss.item() == 3.5
    assert loss.requires_grad
    assert one.grad is None
    (loss * 2).backward()
    # it is what was expected: the tensor itself, nothing multiplied
    assert one.grad is gradient
    assert one.grad.tolist() == [4.0, 4.0]
    assert other.grad.tolist() == [2.0, 2.0, 2.0]


def test_what_is_put_on_the_loss_scales() -> None:
    one = nn.Parameter(torch.zeros(2))
    (loss_with(torch.tensor(1.0), HandBack({one: torch.full((2,), 4.0)}, 4.0)) * 0.5).backward()
    assert one.grad is not None
    assert one.grad.tolist() == [0.5, 0.5]


def test_a_gradient_that_was_fixed() -> None:
    loss = loss_with(torch.tensor(1.0), HandBack({}, 2.0, fixed=True))
    with pytest.raises(RuntimeError, match=r"2\.0 was due"):
        loss.backward()
    (loss_with(torch.tensor(1.0), HandBack({}, 2.0, fixed=True)) * 2).backward()


def test_it_is_given_once() -> None:
    loss = loss_with(torch.tensor(1.0), HandBack({}, 1.0))
    loss.backward()
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()


def test_a_loss_that_is_dropped_gives_nothing() -> None:
    one = nn.Parameter(torch.zeros(2))
    del one.grad
    loss_with(torch.tensor(1.0), HandBack({one: torch.ones(2)}, 1.0))
    assert one.grad is None


@pytest.mark.parametrize("drop", [False, True])
def test_gradients_are_set_aside(drop: bool) -> None:
    one, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    former = one.grad = torch.full((2,), 3.0)
    aside = SetAside([one, other], drop)
    assert one.grad is None
    (one * 2).sum().backward()
    made = aside.restore()
    assert list(made) == [one]
    assert made[one].tolist() == [2.0, 2.0]
    assert one.grad is (None if drop else former)
    assert other.grad is None
