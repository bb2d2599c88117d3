"""Freed outputs: exact through views, casts and writes; nothing recognised that is not the output."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_recompute.memory import measure_step
from lightning_recompute.plan import RecomputePlan, Segment, Selective
from lightning_recompute.recompute import apply_recompute

WIDTH = 16
Middle = Callable[[Tensor], Tensor]


class Block(nn.Module):
    """Norm, something in between, linears that save what they read."""

    def __init__(self, middle: Middle) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)
        self.act = nn.GELU()
        self.middle = middle

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.middle(self.norm(x)))))


class Stack(nn.Module):
    def __init__(self, middle: Middle) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(middle) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def plan(*labels: str) -> RecomputePlan:
    return RecomputePlan((Segment(0, 3, Selective(labels)),))


def written_under_no_grad(y: Tensor) -> Tensor:
    with torch.no_grad():
        y.mul_(2.0)
    return y


def in_place(y: Tensor) -> Tensor:
    return F.relu(y, inplace=True)


def sliced_assignment(y: Tensor) -> Tensor:
    z = y.clone()
    z[:, 2:5] = 0.0
    return z


MIDDLES: dict[str, Middle] = {
    "nothing": lambda y: y,
    "transposed twice": lambda y: y.transpose(0, 1).transpose(0, 1),
    "square transposed": lambda y: y[:WIDTH].t()[:4] if y.shape[0] >= WIDTH else y.flip(0),
    "chunk": lambda y: torch.cat(y.chunk(2, -1)[::-1], -1),
    "slice": lambda y: F.pad(y[:, 3:], (0, 3)),
    "expanded": lambda y: y.unsqueeze(0).expand(2, -1, -1)[1],
    "written under no_grad": written_under_no_grad,
    "relu in place": in_place,
    "slice assigned": sliced_assignment,
    "detached half": lambda y: y + y.detach() * 0.5,
}


def step(model: nn.Module, precision: torch.dtype | None = None, repeat: int = 1) -> list[Tensor]:
    torch.manual_seed(1)
    x = torch.randn(4, WIDTH, requires_grad=True)
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=precision is not None):
        loss = model(x).float().square().sum()
    for left in reversed(range(repeat)):
        loss.backward(retain_graph=left > 0)
    return [loss.detach(), x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("labels", [("norm",), ("act",), ("norm", "act")], ids="+".join)
@pytest.mark.parametrize("precision", [None, torch.bfloat16], ids=["32", "bf16-mixed"])
@pytest.mark.parametrize("name", MIDDLES)
def test_exact(name: str, precision: torch.dtype | None, labels: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    model = Stack(MIDDLES[name])
    due = step(model, precision)
    with apply_recompute(model, plan(*labels)):
        for _ in range(2):
            assert all(map(torch.equal, due, step(model, precision)))


def test_retained_graph_and_double_backward() -> None:
    torch.manual_seed(0)
    model = Stack(MIDDLES["nothing"])
    due = step(model, repeat=2)

    def penalty() -> list[Tensor]:
        x = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH).requires_grad_()
        model.zero_grad()
        (gradient,) = torch.autograd.grad(model(x).tanh().sum(), x, create_graph=True)
        (gradient.norm() - 1).square().backward()
        return [x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    due_penalty = penalty()
    with apply_recompute(model, plan("norm", "act")):
        assert all(map(torch.equal, due, step(model, repeat=2)))
        assert all(map(torch.equal, due_penalty, penalty()))


def test_outputs_are_not_held() -> None:
    """Each label frees the tensor that the linear after it would keep."""
    torch.manual_seed(0)
    model, x = Stack(MIDDLES["nothing"]), torch.randn(64, WIDTH, requires_grad=True)

    def held(*labels: str) -> int:
        if not labels:
            return measure_step(lambda: model(x).sum()).held_bytes
        with apply_recompute(model, plan(*labels)):
            model(x).sum().backward()
            return measure_step(lambda: model(x).sum()).held_bytes

    output = 64 * WIDTH * 4
    statistics = 2 * 64 * 4
    assert held() - held("norm") == 3 * (output + statistics)
    assert held() - held("act") == 3 * output


def test_output_that_the_block_returns() -> None:
    class Ends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x + self.linear(x))

    torch.manual_seed(0)
    model = nn.Sequential(*(Ends() for _ in range(3)))
    due = step(model)
    with apply_recompute(model, plan("norm")):
        assert all(map(torch.equal, due, step(model)))


def test_frozen_linears_keep_nothing_to_free() -> None:
    torch.manual_seed(0)
    model = Stack(MIDDLES["nothing"])
    for block in model.blocks:
        block.up.requires_grad_(False)
        block.down.requires_grad_(False)
    due = step(model)
    with apply_recompute(model, plan("norm", "act")):
        assert all(map(torch.equal, due, step(model)))


def test_copies_run_on_their_own_weights() -> None:
    torch.manual_seed(0)
    model = Stack(MIDDLES["nothing"])
    model.blocks.apply(lambda part: part.__dict__.pop("middle", None))
    for block in model.blocks:
        block.middle = torch.abs  # a function that pickles
    with apply_recompute(model, plan("norm", "act")):
        step(model)
        twin = copy.deepcopy(model)
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=False)
        due = step(model)
        for other in (twin, loaded):
            assert all(map(torch.equal, due, step(other)))
            with torch.no_grad():
                for parameter in other.parameters():
                    parameter.zero_()
            assert step(other)[0] != due[0]
        assert all(map(torch.equal, due, step(model)))


def test_write_to_a_kept_tensor_raises_in_autograds_words() -> None:
    class Writes(Block):
        def forward(self, x: Tensor) -> Tensor:
            h = torch.sigmoid(self.up(self.norm(x)))
            y = x + self.down(h)
            with torch.no_grad():
                h.add_(1.0)
            return y

    model = nn.Sequential(*(Writes(MIDDLES["nothing"]) for _ in range(3)))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step(model)
    with (
        apply_recompute(model, plan("norm")),
        pytest.raises(RuntimeError, match="modified by an inplace operation"),
    ):
        step(model)
