"""Forward hooks inside a recomputed block: those that look on run once, those that change something are replayed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from guards import assert_exact, each_kind, each_whole, plan_of
from parity import seeded
from torch import Tensor, nn
from torch.nn.utils import spectral_norm, weight_norm
from toys import WIDTH, Block, rows, square_loss, stack, step

from lightning_recompute.recompute import apply_recompute, is_recomputing

Hook = Callable[..., Any]


class Log:
    """What hooks saw, in the order of their calls."""

    def __init__(self) -> None:
        self.entries: list[Any] = []
        self.sums: list[Tensor] = []


def look(log: Log) -> Hook:
    return lambda module, args, output: log.entries.append((type(module).__name__, output.detach().sum()))


def look_before(log: Log) -> Hook:
    return lambda module, args: log.entries.append(args[0].detach().sum())


def compute(log: Log) -> Hook:
    """Statistics with a graph: what they save is none of the replay's."""

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        log.entries.append(((output @ output.T).softmax(-1).std() + output.exp().norm()).detach())

    return hook


def regularise(log: Log) -> Hook:
    """Its result goes into the loss."""
    return lambda module, args, output: log.sums.append(output.square().mean() + output.exp().mean())


def sort(log: Log) -> Hook:
    """Uses an operator whose outputs are kept for the replay."""

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        log.entries.append(output.topk(1).values.sum().detach())
        log.entries.append((output.detach() @ output.detach().T).sum())

    return hook


def count_on_module(log: Log) -> Hook:
    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        module.seen = getattr(module, "seen", 0) + 1
        module.names = [*getattr(module, "names", []), "call"]

    return hook


OBSERVERS: dict[str, Callable[[Log], Hook]] = {
    f.__name__: f for f in (look, compute, regularise, sort, count_on_module)
}


def scale(log: Log) -> Hook:
    return lambda module, args, output: output * 1.5


def scale_in_place(log: Log) -> Hook:
    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        output.mul_(1.5)

    return hook


def noise(log: Log) -> Hook:
    return lambda module, args, output: output + 0.1 * torch.randn_like(output)


def scale_from_third_call(log: Log) -> Hook:
    """An observer that becomes none."""

    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        return output * 1.5 if switched_on else None

    return hook


switched_on: list[int] = []
CHANGING: dict[str, Callable[[Log], Hook]] = {
    f.__name__: f for f in (scale, scale_in_place, noise, scale_from_third_call)
}


def with_hooks(make: Callable[[Log], Hook], *, before: bool = False, remove: bool = False) -> Callable[..., Any]:
    """Three steps with hooks on two modules inside of each block and on the block."""

    def run(model: nn.Module) -> list[Any]:
        log, losses = Log(), []
        switched_on.clear()
        handles: list[Any] = []

        def register() -> None:
            for block in model.blocks:
                for part in (block.up, block.norm, block):
                    method = part.register_forward_pre_hook if before else part.register_forward_hook
                    handles.append(method(make(log)))

        register()
        for index in range(3):
            switched_on.extend([1] if index == 2 else [])
            log.sums.clear()
            loss = square_loss(model)
            loss = loss + sum(log.sums)
            if remove:
                while handles:
                    handles.pop().remove()
            loss.backward()
            losses.append(loss)
            if remove:
                register()
        for handle in handles:
            handle.remove()
        return [losses, log.entries, [getattr(block.up, "seen", 0) for block in model.blocks]]

    return run


@each_kind
@pytest.mark.parametrize("hook", OBSERVERS)
def test_observers_run_once(hook: str, kind: str) -> None:
    assert_exact(stack, with_hooks(OBSERVERS[hook]), kind)


@each_kind
def test_a_hook_that_draws(kind: str) -> None:
    """It looks on, but what is drawn after it depends on it: it runs again, and the numbers are right."""

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        seen.append((output.detach() @ torch.randn(output.shape[-1])).sum())

    seen: list[Tensor] = []

    def run(model: nn.Module) -> list[Any]:
        handles = [part.register_forward_hook(hook) for block in model.blocks for part in (block.up, block.norm)]
        seen.clear()
        losses = [step(model), step(model)]
        for handle in handles:
            handle.remove()
        return [losses, seen[:8]]

    assert_exact(stack, run, kind)


def looking(function: Callable[[Tensor], object]) -> Hook:
    """A hook that returns None."""

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        function(output)

    return hook


NOBODYS = torch.Generator()
SOURCES: dict[str, Callable[[Any], object]] = {
    "Python": lambda block: random.random(),
    "NumPy": lambda block: np.random.rand(),
    "module": lambda block: torch.rand(1, generator=block.generator),
    "nobody": lambda block: torch.rand(1, generator=NOBODYS),
}


class Draws(Block):
    """Draws from a source of its own after its `up`."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)
        self.source = source

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return x + y * float(SOURCES[self.source](self))


@each_kind
@pytest.mark.parametrize("source", SOURCES)
def test_a_hook_that_draws_from_another_source(source: str, kind: str) -> None:
    def run(model: nn.Module) -> list[Any]:
        random.seed(0)
        np.random.seed(0)
        NOBODYS.manual_seed(0)
        for block in model.blocks:
            block.up.register_forward_hook(looking(lambda output, block=block: SOURCES[source](block)))
        return [step(model), step(model), random.random(), np.random.rand(), NOBODYS.get_state()]

    assert_exact(lambda: stack(4, lambda: Draws(source)), run, kind)


class Listens(Block):
    """Reads what a hook on its `up` has written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.gain: Any = 1.0
        self.gains: list[float] = []
        self.register_buffer("level", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.inner(x)
        return y * self.gain * sum(self.gains, 1.0) * self.level


WRITERS: dict[str, Callable[[Any, Tensor], object]] = {
    "attribute": lambda block, output: setattr(block, "gain", float(output.detach().mean())),
    "tensor": lambda block, output: setattr(block, "gain", output.mean()),
    "buffer": lambda block, output: block.level.copy_(output.detach().mean()),
    "list": lambda block, output: block.gains.append(float(output.detach().mean())),
}


@each_kind
@pytest.mark.parametrize("writer", WRITERS)
def test_a_hook_that_writes_to_another_module(writer: str, kind: str) -> None:
    def run(model: nn.Module) -> list[Tensor]:
        for block in model.blocks:
            block.up.register_forward_hook(looking(lambda output, block=block: WRITERS[writer](block, output)))
        return [step(model), step(model)]

    assert_exact(lambda: stack(4, Listens), run, kind)


@each_kind
def test_observers_of_inputs_run_once(kind: str) -> None:
    assert_exact(stack, with_hooks(look_before, before=True), kind)


@each_kind
@pytest.mark.parametrize("hook", CHANGING)
def test_hooks_that_change_the_output(hook: str, kind: str) -> None:
    # between the blocks of a unit a hook is glue, which is refused: see test_a_hook_on_a_block_inside_a_unit
    run = with_hooks(CHANGING[hook]) if "pairs" not in kind else inner_only(CHANGING[hook])
    assert_exact(stack, run, kind)


def inner_only(make: Callable[[Log], Hook]) -> Callable[[nn.Module], Any]:
    def run(model: nn.Module) -> list[Tensor]:
        switched_on.clear()
        handles = [part.register_forward_hook(make(Log())) for b in model.blocks for part in (b.up, b.norm, b.dropout)]
        losses = [step(model), step(model)]
        switched_on.append(1)
        losses.append(step(model))
        for handle in handles:
            handle.remove()
        return losses

    return run


@each_whole
@pytest.mark.parametrize("hook", ["look", "regularise"])
def test_observers_removed_between_forward_and_backward(hook: str, kind: str) -> None:
    assert_exact(stack, with_hooks(OBSERVERS[hook], remove=True), kind)


@pytest.mark.parametrize("kind", ["full", "freed", "parts", "saved"])
def test_changing_hooks_removed_between_forward_and_backward(kind: str) -> None:
    assert_exact(stack, with_hooks(scale, remove=True), kind)


@each_kind
def test_hooks_with_keywords(kind: str) -> None:
    class Keyword(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.inner(x) + self.gate(x, gain=torch.tensor(0.5))

        def __init__(self) -> None:
            super().__init__()
            self.gate = Gate()

    def run(model: nn.Module) -> list[Any]:
        log: list[Any] = []

        def double(module: nn.Module, args: Any, kwargs: dict[str, Tensor]) -> Any:
            return args, {"gain": kwargs["gain"] * 2}

        def see(module: nn.Module, args: Any, kwargs: dict[str, Tensor], output: Tensor) -> None:
            log.append(kwargs["gain"].item())

        handles = [b.gate.register_forward_pre_hook(double, with_kwargs=True) for b in model.blocks]
        handles += [b.gate.register_forward_hook(see, with_kwargs=True) for b in model.blocks]
        losses = [step(model) for _ in range(2)]
        for handle in handles:
            handle.remove()
        return [losses, log]

    assert_exact(lambda: stack(4, Keyword), run, kind)


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, *, gain: Tensor) -> Tensor:
        return torch.tanh(x * self.weight) * gain


@each_kind
@pytest.mark.parametrize("norm", [weight_norm, spectral_norm], ids=lambda f: f.__name__)
def test_normalised_weights_of_the_old_kind(norm: Callable[..., nn.Module], kind: str) -> None:
    """They are forward pre-hooks that set the weight; spectral_norm also writes its vectors in every call."""

    class Normed(Block):
        def __init__(self) -> None:
            super().__init__()
            norm(self.up)
            norm(self.down)

    assert_exact(lambda: stack(4, Normed), lambda model: [step(model) for _ in range(3)], kind)


@each_kind
def test_backward_hooks_fire_once(kind: str) -> None:
    def run(model: nn.Module) -> list[Any]:
        log: list[Any] = []
        handles = [
            block.up.register_full_backward_hook(lambda module, gin, gout: log.append(gout[0].sum()))
            for block in model.blocks
        ]
        losses = [step(model) for _ in range(2)]
        for handle in handles:
            handle.remove()
        return [losses, log]

    assert_exact(stack, run, kind)


def test_a_hook_on_a_block_inside_a_unit() -> None:
    """Between the blocks of a unit a hook that changes the hidden state is refused, one that looks on is fine."""
    model = seeded(stack)
    handle = model.blocks[0].register_forward_hook(scale(Log()))
    with apply_recompute(model, plan_of("pairs")), pytest.raises(RuntimeError, match=r"blocks\.0 -> blocks\.1.*a hook"):
        step(model)
    handle.remove()


def test_a_hook_that_raises_leaves_nothing() -> None:
    def fails(module: nn.Module, args: Any, output: Tensor) -> None:
        raise KeyError("hook")

    def run(model: nn.Module) -> Tensor:
        handle = model.blocks[2].up.register_forward_hook(fails)
        with pytest.raises(KeyError, match="hook"):
            step(model)
        handle.remove()
        assert len(model.blocks[2].up._forward_hooks) == 0
        torch.manual_seed(1)
        return step(model)

    for kind in ("full", "pairs", "freed", "saved"):
        assert_exact(stack, run, kind)


def test_a_hook_can_ask_whether_it_is_a_replay() -> None:
    asked: list[bool] = []

    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        asked.append(is_recomputing())
        return output * 2

    model = seeded(stack)
    for block in model.blocks:
        block.up.register_forward_hook(hook)
    with apply_recompute(model, plan_of("full")):
        model(rows()).sum().backward()
    assert asked == [False] * 4 + [True] * 4
