"""What surrounds a forward is there again in its replay, and as it was afterwards."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from lightning_recompute.ambient import (
    Surroundings,
    is_recomputing,
    lasting_values,
    rng_devices,
    rng_states,
    same_rng,
    set_rng_states,
    values_last,
    version_of,
)
from lightning_recompute.policy import RecomputePolicy
from lightning_recompute.recompute import apply_recompute

variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)


def surroundings() -> Surroundings:
    return Surroundings(("cpu",))


class Leave(BaseException):
    pass


# ---- random numbers


def test_the_states_bring_back_the_same_numbers() -> None:
    states = rng_states(())
    drawn = torch.rand(3)
    assert not same_rng(states, rng_states(()))
    set_rng_states((), states)
    assert same_rng(states, rng_states(()))
    assert torch.equal(torch.rand(3), drawn)


def test_a_reading_does_not_change_when_numbers_are_drawn() -> None:
    states = rng_states(())
    copy = tuple(state.clone() for state in states)
    torch.rand(1000)
    assert same_rng(states, copy)


def test_nothing_drawn_is_the_same_and_another_seed_is_not() -> None:
    states = rng_states(())
    torch.zeros(3) + 1
    assert same_rng(states, rng_states(()))
    torch.manual_seed(123)
    assert not same_rng(states, rng_states(()))
    assert not same_rng(states, ())


def test_the_cpu_and_meta_have_no_generator_of_their_own() -> None:
    assert rng_devices([torch.zeros(2), torch.zeros(2, device="meta")]) == ()
    assert rng_devices([]) == ()


# ---- is_recomputing


def test_only_a_replay_is_one() -> None:
    assert is_recomputing() is False
    assert surroundings().run(is_recomputing, (), {}) is True
    assert is_recomputing() is False


def test_arguments_and_result_pass_through() -> None:
    run = surroundings().run
    assert run(lambda *args, **kwargs: (args, kwargs), (1, [2]), {"three": 3}) == ((1, [2]), {"three": 3})


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, Leave])
def test_an_error_ends_the_replay(error: type[BaseException]) -> None:
    def fail() -> None:
        assert is_recomputing()
        raise error

    with pytest.raises(error):
        surroundings().run(fail, (), {})
    assert not is_recomputing()


def test_a_forward_made_in_a_replay_is_part_of_it() -> None:
    outer, seen = surroundings(), []

    def run() -> None:
        seen.append(is_recomputing())
        surroundings().run(lambda: seen.append(is_recomputing()), (), {})
        seen.append(is_recomputing())

    outer.run(run, (), {})
    assert seen == [True, True, True]


def test_the_same_surroundings_inside_themselves() -> None:
    same = surroundings()
    assert same.run(lambda: same.run(is_recomputing, (), {}), (), {})


def test_a_replay_in_another_thread() -> None:
    """Autograd runs the backward of each device in a thread of its own."""
    found: list[tuple[int, bool]] = []
    token = variable.set(5)
    captured = surroundings()
    variable.reset(token)

    def run() -> None:
        found.append((captured.run(variable.get, (), {}), is_recomputing()))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [(5, False)] * 2


# ---- context variables


def test_context_variables_are_those_of_the_forward() -> None:
    token = variable.set(1)
    captured = surroundings()
    variable.reset(token)
    assert captured.run(variable.get, (), {}) == 1
    assert variable.get() == 0


def test_what_a_replay_sets_is_seen_neither_outside_nor_in_the_next() -> None:
    captured = surroundings()

    def count() -> int:
        variable.set(variable.get() + 1)
        return variable.get()

    assert [captured.run(count, (), {}) for _ in range(3)] == [1, 1, 1]
    assert variable.get() == 0


# ---- autocast, switches, modes


def autocast_now() -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")


def autocast(dtype: torch.dtype | None) -> AbstractContextManager[object]:
    return nullcontext() if dtype is None else torch.autocast("cpu", dtype)


@pytest.mark.parametrize("forward", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backward", [None, torch.bfloat16, torch.float16])
def test_autocast(forward: torch.dtype | None, backward: torch.dtype | None) -> None:
    weight = torch.ones(2, 2)

    def product() -> tuple[tuple[bool, torch.dtype], torch.dtype]:
        return autocast_now(), (weight @ weight).dtype

    with autocast(forward):
        captured, due = surroundings(), product()
    with autocast(backward):
        before = autocast_now()
        assert captured.run(product, (), {}) == due
        assert autocast_now() == before
    assert not autocast_now()[0]


def test_autocast_switched_off_inside() -> None:
    with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
        captured = surroundings()
    with torch.autocast("cpu", torch.bfloat16):
        assert captured.run(autocast_now, (), {})[0] is False


SWITCHES: dict[str, tuple[Callable[[], Any], Callable[[], Any], Any]] = {
    "default dtype": (torch.get_default_dtype, lambda: torch.set_default_dtype(torch.float64), torch.float64),
    "matmul precision": (
        torch.get_float32_matmul_precision,
        lambda: torch.set_float32_matmul_precision("medium"),
        "medium",
    ),
    "math sdp": (
        torch.backends.cuda.math_sdp_enabled,
        lambda: torch.backends.cuda.enable_math_sdp(False),
        False,
    ),
    "flash sdp": (
        torch.backends.cuda.flash_sdp_enabled,
        lambda: torch.backends.cuda.enable_flash_sdp(False),
        False,
    ),
}


@pytest.fixture
def switches_as_they_were() -> Any:
    dtype, precision = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    math, flash = torch.backends.cuda.math_sdp_enabled(), torch.backends.cuda.flash_sdp_enabled()
    yield
    torch.set_default_dtype(dtype)
    torch.set_float32_matmul_precision(precision)
    torch.backends.cuda.enable_math_sdp(math)
    torch.backends.cuda.enable_flash_sdp(flash)


@pytest.mark.usefixtures("switches_as_they_were")
@pytest.mark.parametrize(("read", "write", "value"), SWITCHES.values(), ids=SWITCHES)
@pytest.mark.parametrize("error", [None, Leave])
def test_switches(
    read: Callable[[], Any], write: Callable[[], Any], value: Any, error: type[BaseException] | None
) -> None:
    usual, captured, seen = read(), surroundings(), []

    def replay() -> None:
        seen.append(read())
        if error is not None:
            raise error

    write()
    assert read() == value != usual
    with pytest.raises(error) if error is not None else nullcontext():
        captured.run(replay, (), {})
    assert seen == [usual]
    assert read() == value


def test_the_attention_kernel_chosen_around_a_forward() -> None:
    with sdpa_kernel(SDPBackend.MATH):
        captured = surroundings()
    assert torch.backends.cuda.flash_sdp_enabled()
    assert captured.run(torch.backends.cuda.flash_sdp_enabled, (), {}) is False
    assert torch.backends.cuda.flash_sdp_enabled()


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return 2 * result if func is torch.relu else result


def test_a_function_mode_around_the_forward_only() -> None:
    with Doubling():
        captured = surroundings()
    x = torch.ones(1)
    assert captured.run(torch.relu, (x,), {}).item() == 2
    assert torch.relu(x).item() == 1


def test_a_function_mode_that_is_still_active_acts_once() -> None:
    with Doubling():
        assert surroundings().run(torch.relu, (torch.ones(1),), {}).item() == 2


def test_a_default_device_around_the_forward_only() -> None:
    with torch.device("meta"):
        captured = surroundings()
    assert captured.run(torch.zeros, (1,), {}).device.type == "meta"
    assert torch.zeros(1).device.type == "cpu"


# ---- versions


def test_versions() -> None:
    tensor = torch.zeros(2)
    before = version_of(tensor)
    tensor.add_(1)
    assert version_of(tensor) == before + 1
    assert version_of(tensor[:1]) == before + 1
    assert version_of(None) == 0
    with torch.inference_mode():
        assert version_of(torch.zeros(2)) == 0


# ---- how long replayed values live


@pytest.mark.parametrize(("last", "due"), [(False, 4), (True, 2)])
def test_values_that_last_serve_several_backward_calls(last: bool, due: int) -> None:
    """As where a pipeline's backward runs in parts: for the inputs, then for some weights, then for others."""
    calls: list[int] = []

    class Block(torch.nn.Sequential):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            result: torch.Tensor = super().forward(hidden)
            return result

    block = Block(torch.nn.Linear(3, 3), torch.nn.Tanh(), torch.nn.Linear(3, 3))
    model = torch.nn.ModuleList([block])
    hidden = torch.randn(2, 3, requires_grad=True)
    with apply_recompute(model, RecomputePolicy()), lasting_values(last):
        output = block(hidden).sum()
    due_gradients = torch.autograd.grad(block[2](block[1](block[0](hidden))).sum(), [hidden, *block.parameters()])
    del calls[1:]
    parts = ([hidden], list(block[2].parameters()), list(block[0].parameters()))
    found = [gradient for part in parts for gradient in torch.autograd.grad(output, part, retain_graph=True)]
    assert len(calls) == due
    assert torch.equal(found[0], due_gradients[0])
    assert all(torch.equal(one, other) for one, other in zip(found[3:], due_gradients[1:3], strict=True))
    assert all(torch.equal(one, other) for one, other in zip(found[1:3], due_gradients[3:], strict=True))


def test_values_last_only_within() -> None:
    assert not values_last()
    with lasting_values():
        assert values_last()
        with lasting_values(False):
            assert values_last()
    assert not values_last()
