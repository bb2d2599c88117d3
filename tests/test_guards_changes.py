"""What somebody changes between forward and backward: the replay does not see it, or says so."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from guards import assert_exact, each_kind, each_whole, refusal
from parity import seeded
from torch import Tensor, nn
from toys import WIDTH, Block, rows, square_loss, stack

from lightning_recompute.errors import RecomputeError
from lightning_recompute.plan import Full, RecomputePlan, Segment
from lightning_recompute.recompute import apply_recompute

Change = Callable[[nn.Module], object]


class Level:
    """An object that blocks share, as models pass conditions around."""

    def __init__(self) -> None:
        self.value = 2.0
        self.history: list[float] = []


class Stateful(Block):
    """Reads everything that a module can hold."""

    def __init__(self, shared: Level) -> None:
        super().__init__()
        self.register_buffer("level", torch.full((), 2.0))
        self.scale = torch.full((), 1.5)
        self.factor = 0.5
        self.options = {"gain": 1.25, "nested": {"shift": 0.25}}
        self.gains = [1.5]
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.level * self.scale * self.factor * self.options["gain"] * self.gains[0] * self.shared.value
        return x + self.inner(y + self.options["nested"]["shift"])


def build() -> nn.Module:
    shared = Level()
    return stack(4, lambda: Stateful(shared))


def at(name: str) -> Callable[[nn.Module], nn.Module]:
    return lambda model: model.get_submodule(name)


def between(change: Change) -> Callable[[nn.Module], Tensor]:
    def run(model: nn.Module) -> Tensor:
        loss = square_loss(model)
        change(model)
        loss.backward()
        return loss

    return run


def set_in_module(name: str, value: object) -> Change:
    path, _, attribute = name.rpartition(".")
    return lambda model: setattr(model.get_submodule(path), attribute, value)


def write(name: str) -> Change:
    def change(model: nn.Module) -> None:
        with torch.no_grad():
            model.get_parameter(name).add_(1)

    return change


def replace(name: str) -> Change:
    path, _, attribute = name.rpartition(".")

    def change(model: nn.Module) -> None:
        part = model.get_submodule(path)
        setattr(part, attribute, nn.Parameter(torch.full_like(getattr(part, attribute), 0.3)))

    return change


def load_assigned(model: nn.Module) -> None:
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()}, assign=True)


def hooked(model: nn.Module) -> None:
    model.get_submodule("blocks.1.up").register_forward_hook(lambda module, args, output: output * 2)
    model.get_submodule("blocks.2.norm").register_forward_pre_hook(lambda module, args: (args[0] + 1,))


# nothing here is seen by autograd: without recompute the step is right, and so it is with it
UNSEEN: dict[str, Change] = {
    "attribute": set_in_module("blocks.1.factor", 3.0),
    "tensor attribute replaced": set_in_module("blocks.1.scale", torch.zeros(())),
    "buffer replaced": set_in_module("blocks.1.level", torch.zeros(())),
    "attribute deleted": lambda model: delattr(model.get_submodule("blocks.2"), "factor"),
    "dict entry": lambda model: at("blocks.1")(model).options.update(gain=9.0),
    "nested dict entry": lambda model: at("blocks.1")(model).options["nested"].update(shift=9.0),
    "list entry": lambda model: at("blocks.2")(model).gains.__setitem__(0, 7.0),
    "list emptied": lambda model: at("blocks.2")(model).gains.clear(),
    "shared object": lambda model: setattr(at("blocks.0")(model).shared, "value", 0.0),
    "dropout rate": set_in_module("blocks.1.dropout.p", 0.9),
    "evaluation mode": lambda model: model.eval(),
    "weight replaced": replace("blocks.1.up.weight"),
    "bias replaced": replace("blocks.1.down.bias"),
    "norm's weight replaced": replace("blocks.1.norm.weight"),
    "state loaded by assignment": load_assigned,
    "module replaced": set_in_module("blocks.1.norm", nn.LayerNorm(WIDTH, elementwise_affine=False)),
    "module added": lambda model: model.get_submodule("blocks.1").add_module("extra", nn.Linear(2, 2)),
    "hooks added": hooked,
}


@each_kind
@pytest.mark.parametrize("what", UNSEEN)
def test_the_replay_does_not_see(what: str, kind: str) -> None:
    assert_exact(build, between(UNSEEN[what]), kind)


# autograd sees the first two; the rest it does not need, a replay may
SEEN: dict[str, Change] = {
    "weight written": write("blocks.1.up.weight"),
    "buffer written": lambda model: model.get_buffer("blocks.1.level").fill_(3),
    "bias written": write("blocks.1.up.bias"),
    "tensor attribute written": lambda model: at("blocks.1")(model).scale.fill_(3),
    "frozen": lambda model: model.get_submodule("blocks.1").requires_grad_(False),
    "weight thawed": lambda model: model.get_submodule("blocks.1").requires_grad_(True),
}


@each_kind
@pytest.mark.parametrize("what", SEEN)
def test_writes_are_never_silently_wrong(what: str, kind: str) -> None:
    refusal(build, between(SEEN[what]), kind)


@each_whole
@pytest.mark.parametrize("name", ["blocks.1.up.bias", "blocks.1.down.weight", "blocks.1.norm.bias"])
def test_the_error_for_a_parameter_names_block_parameter_and_cure(name: str, kind: str) -> None:
    message = refusal(stack, between(write(name)), kind)
    assert message is not None
    for word in ("blocks.", name.removeprefix("blocks.1."), "before the optimizer step"):
        assert word in message


@each_whole
def test_the_error_for_a_buffer_names_it(kind: str) -> None:
    class Table(Block):
        """Its table is added, which autograd keeps nothing for."""

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.inner(x + self.table)

    run = between(lambda model: model.get_buffer("blocks.2.table").mul_(2))
    message = refusal(lambda: stack(4, Table), run, kind)
    assert message is not None
    assert "blocks.2" in message
    assert "table was changed in place between forward and backward" in message


def test_weights_of_a_functional_call_are_those_of_its_forward() -> None:
    """The module's own weights are back when backward starts, and are no business of the replay."""

    def run(model: nn.Module) -> list[Tensor]:
        weights = {name: (2 * p.detach()).requires_grad_() for name, p in model.named_parameters()}
        loss = torch.func.functional_call(model, weights, (rows(),)).square().mean()
        return [loss, *torch.autograd.grad(loss, list(weights.values()))]

    for kind in ("full", "pairs", "freed", "parts"):
        assert_exact(stack, run, kind)


# --- inputs


class Takes(nn.Module):
    """A block given a second tensor in one of several ways."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor, extra: object = None, *, named: Tensor | None = None) -> Tensor:
        if isinstance(extra, dict):
            extra = extra["deep"][0]
        other = named if extra is None else extra
        return x + self.block.inner(x + other)  # an addition: autograd keeps neither


class Given(nn.Module):
    def __init__(self, how: str, change: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Takes() for _ in range(4))
        self.how = how
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        extra = torch.ones_like(x)
        for block in self.blocks:
            if self.how == "positional":
                x = block(x, extra)
            elif self.how == "keyword":
                x = block(x, named=extra)
            else:
                x = block(x, {"deep": [extra]})
        self.change(extra)
        return x


@pytest.mark.parametrize("kind", ["full", "pairs", "saved", "saved pairs"])
@pytest.mark.parametrize("how", ["positional", "keyword", "nested"])
def test_inputs_written_after_the_call(how: str, kind: str) -> None:
    def run(model: nn.Module) -> Tensor:
        loss = square_loss(model)
        loss.backward()
        return loss

    message = refusal(lambda: Given(how, lambda extra: extra.mul_(2)), run, kind)
    assert message is not None
    assert "an input was changed in place" in message
    assert "write to a copy" in message
    assert_exact(lambda: Given(how, lambda extra: extra + 1), run, kind)


@pytest.mark.parametrize("kind", ["full", "saved"])
def test_the_hidden_state_written_after_the_call(kind: str) -> None:
    """The caller adds to what one block was given; the block's first operation keeps nothing of it."""

    class Shifts(Block):
        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x + 1)

    def run(model: nn.Module) -> Tensor:
        x = model.embed(rows())
        y = model.blocks[0](x)
        x += 1
        loss = (x * model.blocks[1](y)).sum()
        loss.backward()
        return loss

    message = refusal(lambda: stack(4, Shifts), run, kind)
    assert message is None or "an input was changed in place" in message


def test_a_refused_step_leaves_the_next_one_right() -> None:
    model, twin = seeded(stack), seeded(stack)
    plan = RecomputePlan((Segment(0, 2, Full()), Segment(2, 4, Full())))
    torch.manual_seed(3)
    square_loss(twin).backward()
    with apply_recompute(model, plan):
        loss = square_loss(model)
        write("blocks.0.up.bias")(model)
        with pytest.raises(RecomputeError):
            loss.backward()
        with torch.no_grad():
            model.get_parameter("blocks.0.up.bias").sub_(1)
        model.zero_grad()
        model.load_state_dict(twin.state_dict())
        torch.manual_seed(3)
        square_loss(model).backward()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
