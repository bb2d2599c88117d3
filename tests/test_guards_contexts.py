"""What surrounds a forward and is gone, or another, when backward runs the block again."""

from __future__ import annotations

import contextlib
import contextvars
import gc
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from guards import assert_exact, each_kind, each_whole, plan_of
from ledger import Ledger
from parity import seeded
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations, parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from toys import WIDTH, Block, Stack, square_loss, stack

from lightning_recompute.recompute import apply_recompute

Context = Callable[[], contextlib.AbstractContextManager[Any]]


class Doubles(TorchFunctionMode):
    """Replaces a function, as libraries that patch attention or quantise do."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is F.gelu else result


class Rounds(TorchDispatchMode):
    """Replaces an operator's result, as simulated quantisation does."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return (result * 64).round() / 64 if func is torch.ops.aten.addmm.default else result


class Doubled(torch.autograd.Function):
    """An operation of a user's own with a saved tensor, whose precision follows autocast."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


class Precise(Block):
    """Has a part without autocast, and an autograd.Function."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            y = F.softmax(x.float() @ self.up.weight.float().T, -1)
        return x + self.down(Doubled.apply(F.gelu(self.up(self.norm(x))) + y))


class Attends(nn.Module):
    """Fused attention, whose kernel a context may choose."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q = self.up(self.norm(x)).view(1, 2, 4, 4)
        y = F.scaled_dot_product_attention(q, q.flip(2), q.flip(3), is_causal=True)
        return x + self.down(F.gelu(y.reshape(-1, WIDTH)))


depth: contextvars.ContextVar[float] = contextvars.ContextVar("depth", default=1.0)


class ReadsVariable(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x * depth.get())


@contextlib.contextmanager
def depth_of(value: float) -> Iterator[None]:
    token = depth.set(value)
    try:
        yield
    finally:
        depth.reset(token)


class Cached(Block):
    """Uses a parametrised weight twice: with torch's cache it is computed once."""

    def __init__(self) -> None:
        super().__init__()
        parametrizations.weight_norm(self.up)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x) + self.inner(x.tanh())


@contextlib.contextmanager
def other_kernels() -> Iterator[None]:
    torch.backends.mkldnn.enabled = False
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = True


class Convolves(Block):
    """Has an operator whose kernels differ in the last digits."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv1d(32, 32, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.mix(x.repeat(8, 2)).mean(1, keepdim=True)[:4].expand(4, WIDTH) * x)


CONTEXTS: dict[str, tuple[Callable[[], nn.Module], Context]] = {
    "autocast": (lambda: stack(4, Precise), lambda: torch.autocast("cpu", torch.bfloat16)),
    "autocast, half": (stack, lambda: torch.autocast("cpu", torch.float16)),
    "autocast without cache": (lambda: stack(4, Precise), lambda: torch.autocast("cpu", cache_enabled=False)),
    "function mode": (stack, Doubles),
    "dispatch mode": (stack, Rounds),
    "attention kernel": (lambda: stack(4, Attends), lambda: sdpa_kernel([SDPBackend.MATH])),
    "context variable": (lambda: stack(4, ReadsVariable), lambda: depth_of(3.0)),
    "parametrization cache": (lambda: stack(4, Cached), parametrize.cached),
    "kernels": (lambda: stack(4, Convolves), other_kernels),
    "default device": (stack, lambda: torch.device("cpu")),
}


def within(context: Context, *, backward_inside: bool = False) -> Callable[[nn.Module], Tensor]:
    def run(model: nn.Module) -> Tensor:
        with context():
            loss = square_loss(model)
            if backward_inside:
                loss.backward()
        if not backward_inside:
            loss.backward()
        return loss

    return run


@each_kind
@pytest.mark.parametrize("context", CONTEXTS)
def test_around_the_forward_only(context: str, kind: str) -> None:
    build, enter = CONTEXTS[context]
    assert_exact(build, within(enter), kind)


@each_whole
@pytest.mark.parametrize("context", CONTEXTS)
def test_around_backward_as_well(context: str, kind: str) -> None:
    build, enter = CONTEXTS[context]
    assert_exact(build, within(enter, backward_inside=True), kind)


@each_whole
@pytest.mark.parametrize("context", CONTEXTS)
def test_around_backward_only(context: str, kind: str) -> None:
    build, enter = CONTEXTS[context]
    if context == "dispatch mode":
        return  # it changes what backward itself computes

    def run(model: nn.Module) -> Tensor:
        loss = square_loss(model)
        with enter():
            loss.backward()
        return loss

    assert_exact(build, run, kind)


def test_autocast_around_the_model_is_seen_by_both_passes() -> None:
    seen: list[tuple[bool, torch.dtype]] = []

    class Sees(Block):
        def forward(self, x: Tensor) -> Tensor:
            seen.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
            with torch.autocast("cpu", enabled=False):
                seen.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
            return x + self.inner(x)

    model = seeded(lambda: stack(2, Sees))
    with apply_recompute(model, plan_of("full", 2)):
        within(lambda: torch.autocast("cpu", torch.float16))(model)
    assert seen == [(True, torch.float16), (False, torch.float16)] * 4


def test_modes_are_left_as_they_were_found() -> None:
    model = seeded(stack)
    with apply_recompute(model, plan_of("full")):
        with Doubles(), Rounds(), torch.autocast("cpu"):
            loss = square_loss(model)
        assert torch.overrides._get_current_function_mode_stack() == []
        loss.backward()
    assert torch.overrides._get_current_function_mode_stack() == []
    assert torch.utils._python_dispatch._get_current_dispatch_mode_stack() == []
    assert (parametrize._cache_enabled, parametrize._cache) == (0, {})


def test_torchs_own_modes_do_not_come_back() -> None:
    """A counter of FLOPs around the forward counts the forward."""

    def counted(model: nn.Module) -> int:
        with FlopCounterMode(display=False) as counter:
            loss = square_loss(model)
        before = counter.get_total_flops()
        loss.backward()
        assert counter.get_total_flops() == before
        return before

    model = seeded(stack)
    due = counted(model)
    with apply_recompute(model, plan_of("full")):
        assert counted(model) == due


# --- a context variable in which the model collects, as transformers does with hidden states

collected: contextvars.ContextVar[Any] = contextvars.ContextVar("collected", default=None)


class Collects(Stack):
    """Gives its blocks a place to put what they return, for the time of the forward."""

    class Puts(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = x + self.inner(x)
            collected.get()["hidden"].append(y)
            return y

    def __init__(self) -> None:
        super().__init__(Collects.Puts() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        token = collected.set({"hidden": []})
        try:
            y = self.head(self.hidden(x))
            hidden = collected.get()["hidden"]
            assert len(hidden) == 4
            return y + torch.stack(hidden).mean()
        finally:
            collected.reset(token)


@each_kind
def test_collected_in_a_context_variable(kind: str) -> None:
    assert_exact(Collects, lambda model: [within(contextlib.nullcontext)(model) for _ in range(2)], kind)


class Fades(Block):
    """Reads and writes an object that a context variable holds."""

    def forward(self, x: Tensor) -> Tensor:
        state = collected.get()
        y = x + self.inner(x * state.gain)
        state.gain *= 0.9
        state.last = y
        return y


@each_kind
def test_an_object_in_a_context_variable(kind: str) -> None:
    def run(model: nn.Module) -> list[Any]:
        state = SimpleNamespace(gain=1.0, last=None)
        token = collected.set(state)
        loss = square_loss(model)
        collected.reset(token)
        loss.backward()
        return [loss, state.gain]

    assert_exact(lambda: stack(4, Fades), run, kind)


@each_whole
def test_collecting_leaves_no_graph_behind(kind: str) -> None:
    """Nothing but the garbage collector of Python could free a circle, and not even that one through the graph."""
    model = seeded(Collects)
    gc.collect()
    gc.disable()
    try:
        with apply_recompute(model, plan_of(kind)), Ledger(model) as ledger:
            live = []
            for _ in range(3):
                square_loss(model)
                live.append(ledger.live_bytes)
    finally:
        gc.enable()
    assert live == [0, 0, 0]
