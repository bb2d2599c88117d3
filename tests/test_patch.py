"""A patched forward changes nothing else of the module, and goes without a trace."""

from __future__ import annotations

import copy
import io
import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from lightning_recompute.patch import Patch

X = torch.ones(2, 4)
calls: list[str] = []


@torch.compiler.disable
def traced(original: Callable[..., Any], tag: str, /, *args: Any, **kwargs: Any) -> Any:
    calls.append(tag)
    return original(*args, **kwargs)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        y: Tensor = self.linear(x) * scale
        return y


class Child(Block):
    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return super().forward(x, scale=scale) + 1


def doubled(x: Tensor) -> Tensor:
    """A forward that somebody put on an instance, as wrappers do."""
    return 2 * x


@pytest.fixture(autouse=True)
def no_calls() -> None:
    calls.clear()


@pytest.fixture
def block() -> Block:
    return Block()


def zeroed(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    return module


def test_every_call_goes_through_the_function(block: Block) -> None:
    due = block(X, scale=3.0)
    Patch(block, traced, "a")
    assert torch.equal(block(X, scale=3.0), due)
    assert torch.equal(block.forward(X, scale=3.0), due)
    assert calls == ["a", "a"]


def test_nothing_else_changes(block: Block) -> None:
    outer = nn.ModuleDict({"block": block})
    modules, keys = dict(outer.named_modules()), list(outer.state_dict())
    parameters = {name: id(parameter) for name, parameter in outer.named_parameters()}
    attributes = set(vars(block))
    Patch(block, traced, "a")
    assert dict(outer.named_modules()) == modules
    assert list(outer.state_dict()) == keys
    assert {name: id(parameter) for name, parameter in outer.named_parameters()} == parameters
    assert set(vars(block)) - attributes == {"forward"}
    assert type(block) is Block
    assert repr(block) == repr(Block())


def test_only_the_instance_is_patched(block: Block) -> None:
    Patch(block, traced, "a")
    Block()(X)
    assert calls == []


def test_hooks_stay_outside(block: Block) -> None:
    block.register_forward_pre_hook(lambda *_: calls.append("pre"))
    Patch(block, traced, "a")
    block.register_forward_hook(lambda *_: calls.append("post"))
    block(X)
    assert calls == ["pre", "a", "post"]


def test_super_works_below_the_patch() -> None:
    child = Child()
    due = child(X)
    Patch(child, traced, "a")
    assert torch.equal(child(X), due)
    assert calls == ["a"]


def test_to_and_half_keep_the_patch(block: Block) -> None:
    Patch(block, traced, "a")
    assert block.double()(X.double()).dtype is torch.float64
    assert calls == ["a"]


# ---- removal


def test_removal_leaves_no_trace(block: Block) -> None:
    before = dict(vars(block))
    patch = Patch(block, traced, "a")
    patch.remove()
    assert vars(block) == before
    assert "forward" not in vars(block)
    block(X)
    assert calls == []


def test_removal_restores_a_forward_that_was_on_the_instance(block: Block) -> None:
    block.forward = doubled  # type: ignore[method-assign,assignment]
    patch = Patch(block, traced, "a")
    assert torch.equal(block(X), 2 * X)
    patch.remove()
    assert vars(block)["forward"] is doubled
    assert torch.equal(block(X), 2 * X)
    assert calls == ["a"]


def test_patches_on_top_of_each_other(block: Block) -> None:
    inner = Patch(block, traced, "inner")
    outer = Patch(block, traced, "outer")
    block(X)
    assert calls == ["outer", "inner"]
    outer.remove()
    inner.remove()
    assert "forward" not in vars(block)


def test_under_a_later_patch_only_ours_is_switched_off(block: Block, caplog: pytest.LogCaptureFixture) -> None:
    patch = Patch(block, traced, "ours")
    ours = block.forward

    def theirs(x: Tensor) -> Tensor:
        calls.append("theirs")
        y: Tensor = ours(x)
        return y

    block.forward = theirs  # type: ignore[method-assign,assignment]
    due = block(X)
    assert calls == ["theirs", "ours"]
    calls.clear()
    with caplog.at_level(logging.WARNING):
        patch.remove()
    assert "Block was replaced after recompute was applied" in caplog.text
    assert vars(block)["forward"] is theirs
    assert torch.equal(block(X), due)
    assert calls == ["theirs"]


# ---- copies


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "torch.save": lambda module: _saved(module),
}


def _saved(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.parametrize("whole", [False, True], ids=["block", "model"])
@pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES)
def test_a_copy_runs_on_its_own_weights(duplicate: Callable[[nn.Module], nn.Module], whole: bool, block: Block) -> None:
    module = nn.Sequential(block) if whole else block
    Patch(block, traced, "a")
    due = module(X)
    twin = zeroed(duplicate(module))
    calls.clear()
    assert torch.equal(twin(X), torch.zeros(2, 4))
    assert torch.equal(module(X), due)
    assert calls == ["a", "a"]


def test_a_copy_keeps_its_patch_when_the_first_loses_it(block: Block) -> None:
    patch = Patch(block, traced, "a")
    twin = zeroed(copy.deepcopy(block))
    patch.remove()
    assert torch.equal(twin(X), torch.zeros(2, 4))
    assert calls == ["a"]


def test_a_copy_of_a_forward_on_the_instance(block: Block) -> None:
    block.forward = doubled  # type: ignore[method-assign,assignment]
    Patch(block, traced, "a")
    for duplicate in COPIES.values():
        twin = duplicate(block)
        assert vars(twin)["forward"].args[0].__self__ is twin
        assert torch.equal(twin(X), 2 * X)


# ---- torch.compile


def wrapped(block: nn.Module, backend: Any) -> nn.Module:
    return torch.compile(block, backend=backend, options=None)  # type: ignore[return-value]


def in_place(block: nn.Module, backend: Any) -> nn.Module:
    block.compile(backend=backend)
    return block


@pytest.mark.parametrize("compiled", [wrapped, in_place])
def test_the_forward_is_compiled_inside(compiled: Callable[[nn.Module, Any], nn.Module], block: Block) -> None:
    counter = CompileCounter()
    due = block(X)
    module = compiled(block, counter)
    module(X)
    assert counter.frame_count == 1
    before = dict(vars(module))
    patch = Patch(module, traced, "a")
    for _ in range(3):
        assert torch.equal(module(X), due)
    assert calls == ["a"] * 3
    patch.remove()
    assert vars(module) == before
    assert torch.equal(module(X), due)
    assert calls == ["a"] * 3


@pytest.mark.parametrize("compiled", [wrapped, in_place])
def test_the_users_backend_and_options_are_kept(compiled: Callable[[nn.Module, Any], nn.Module], block: Block) -> None:
    counter = CompileCounter()
    module = compiled(block, counter)
    Patch(module, traced, "a")
    module(X)
    assert counter.frame_count == 1


@pytest.mark.parametrize("compiled", [wrapped, in_place])
@pytest.mark.parametrize("duplicate", list(COPIES.values())[:2], ids=list(COPIES)[:2])
def test_a_copy_of_a_compiled_block_runs_on_its_own_weights(
    compiled: Callable[[nn.Module, Any], nn.Module],
    duplicate: Callable[[nn.Module], nn.Module],
    block: Block,
) -> None:
    module = compiled(block, "eager")
    Patch(module, traced, "a")
    due = module(X)
    twin = zeroed(duplicate(module))
    assert torch.equal(twin(X), torch.zeros(2, 4))
    assert torch.equal(module(X), due)
