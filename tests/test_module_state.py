"""A module's state on its own: seen, settled, put back for a while; and its hooks watched."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_recompute.module_state import ModuleState, watch_hooks

NOBODY: frozenset[int] = frozenset()


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("level", torch.ones(2))
        self.number = 1
        self.items = [1]
        self.table = torch.zeros(2)
        self.generator = torch.Generator().manual_seed(1)


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Part(), Part()
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x)
        return y


def spelled(module: nn.Module) -> list[Any]:
    """Everything that a replay could leave behind, tensors and containers by identity and content."""
    found: list[Any] = []
    for part in module.modules():
        for name, value in sorted(vars(part).items()):
            found.append((name, id(value), str(value) if isinstance(value, int | list | dict | bool) else ""))
        for members in (part._parameters, part._buffers, part._modules):
            found += [(name, id(value)) for name, value in members.items()]
        found += [
            tensor.tolist() for tensor in (*part._parameters.values(), *part._buffers.values()) if tensor is not None
        ]
    return found


def test_nothing_of_a_replay_is_left() -> None:
    module = Whole()
    state = ModuleState(module, None)
    statistics = {(3, "running_mean"), (3, "running_var"), (3, "num_batches_tracked")}
    assert state.settle(module, compare_values=True) == statistics  # of norms it is taken for granted
    before = spelled(module)
    with state.restored(module, NOBODY):
        part = module.first
        part.number = 5
        part.items = [2]
        part.level = torch.zeros(1)
        part.added = object()
        part.register_buffer("further", torch.zeros(1))
        part.extra = nn.Linear(1, 1)
        del part.table
        module.eval()
        module.norm.running_mean.add_(1)
    assert spelled(module) == before


def test_a_known_write_is_put_back_by_value() -> None:
    module = Part()
    state = ModuleState(module, None)
    module.level.add_(1)
    written = state.settle(module, compare_values=True)
    assert written == {(0, "level")}
    module.level.add_(1)
    with state.restored(module, NOBODY):
        assert module.level.tolist() == [1.0, 1.0]
        module.level.add_(5)
    assert module.level.tolist() == [3.0, 3.0]
    with state.restored(module, NOBODY):  # as often as one likes
        assert module.level.tolist() == [1.0, 1.0]
    assert state.written_since() is None


def test_an_unknown_write_is_told() -> None:
    module = Part()
    state = ModuleState(module, frozenset())
    module.level.add_(1)
    with pytest.raises(LookupError, match="level"):
        state.settle(module, compare_values=False)


def test_a_write_after_the_forward_is_told_by_its_path() -> None:
    module = Whole()
    state = ModuleState(module, frozenset())
    state.settle(module, compare_values=False)
    assert state.written_since() is None
    module.second.table.add_(1)
    assert state.written_since() == "second.table"
    module = Part()
    state = ModuleState(module, frozenset())
    state.settle(module, compare_values=False)
    module.level.zero_()
    assert state.written_since() == "level"


def test_a_write_that_no_version_counter_shows() -> None:
    module = Part()
    state = ModuleState(module, None)
    module.level.data.add_(1)
    assert state.settle(module, compare_values=True) == {(0, "level")}
    # of norms it is taken for granted
    norm = nn.BatchNorm1d(2)
    assert ModuleState(norm, frozenset()).settle(norm, compare_values=False)


def test_a_buffer_that_parts_share_is_one_in_the_replay() -> None:
    module = Whole()
    module.second.level = module.first.level
    state = ModuleState(module, None)
    module.first.level.add_(1)
    state.settle(module, compare_values=True)
    with state.restored(module, NOBODY):
        module.first.level.add_(1)
        assert module.second.level.tolist() == [2.0, 2.0]
    assert module.second.level is module.first.level


def test_containers_are_copies_only_where_they_changed() -> None:
    module = Whole()
    module.second.items = module.first.items
    state = ModuleState(module, None)
    state.settle(module, compare_values=True)
    with state.restored(module, NOBODY):
        assert module.first.items is module.second.items  # untouched: the object itself
    module.first.items.append(2)
    with state.restored(module, NOBODY):
        assert module.first.items == [1]
        assert module.first.items is module.second.items
        module.first.items.append(3)
    assert module.first.items == [1, 2]
    state = ModuleState(module, None)
    module.first.items.append(4)
    state.settle(module, compare_values=True)
    module.first.items.pop()
    with state.restored(module, NOBODY):  # as before the forward, and a copy: the replay will append again
        assert module.first.items == [1, 2]
        module.first.items.append(4)
    assert module.first.items == [1, 2]


def test_streams_go_back_and_forth() -> None:
    module = Part()
    other = torch.Generator().manual_seed(9)
    state = ModuleState(module, None, [other])
    due = [torch.rand(1, generator=g).item() for g in (module.generator, other)]
    state.settle(module, compare_values=True)
    later = [module.generator.get_state(), other.get_state()]
    with state.restored(module, NOBODY):
        assert [torch.rand(1, generator=g).item() for g in (module.generator, other)] == due
        torch.rand(5, generator=other)
    assert torch.equal(module.generator.get_state(), later[0])
    assert torch.equal(other.get_state(), later[1])


def test_parameters_of_the_forward_unless_their_memory_is_gone() -> None:
    module = Part()
    forward = module.weight
    state = ModuleState(module, None)
    state.settle(module, compare_values=True)
    module.weight = nn.Parameter(torch.zeros(2))
    now = module.weight
    with state.restored(module, NOBODY):
        assert module.weight is forward
    assert module.weight is now
    forward.untyped_storage().resize_(0)  # as FSDP frees what it gathered
    with state.restored(module, NOBODY):
        assert module.weight is now


def test_an_error_puts_everything_back() -> None:
    def fail() -> None:
        module.first.number = 7
        raise KeyError("number")

    module = Whole()
    state = ModuleState(module, None)
    state.settle(module, compare_values=True)
    before = spelled(module)
    with pytest.raises(KeyError, match="number"), state.restored(module, NOBODY):
        fail()
    assert spelled(module) == before


# --- hooks


def test_observers_are_told_apart() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    looks = module[0].register_forward_hook(lambda m, args, output: None)
    looks_before = module[1].register_forward_pre_hook(lambda m, args: None)
    scales = module[0].register_forward_hook(lambda m, args, output: output * 2)
    writes = module[1].register_forward_hook(lambda m, args, output: (output.mul_(2), None)[1])
    counts = module[1].register_forward_hook(lambda m, args, output: setattr(m, "seen", 1))
    draws = module[1].register_forward_hook(lambda m, args, output: (torch.rand(1), None)[1])
    own = module.register_forward_hook(lambda m, args, output: None)
    observers: set[int] = set()
    former = [dict(part._forward_hooks) for part in module.modules()]
    with torch.no_grad(), watch_hooks(module, observers):
        module(torch.ones(1, 2))
    assert observers == {looks.id, looks_before.id}
    assert [dict(part._forward_hooks) for part in module.modules()] == former
    assert not {scales.id, writes.id, counts.id, draws.id, own.id} & observers


def test_hooks_run_in_what_keeps() -> None:
    entered: list[str] = []

    @contextlib.contextmanager
    def keeping() -> Iterator[None]:
        entered.append("in")
        yield
        entered.append("out")

    module = nn.Sequential(nn.Linear(2, 2))
    module[0].register_forward_hook(lambda m, args, output: entered.append("look"))
    module[0].register_forward_hook(lambda m, args, output: entered.append("change") or output * 2)
    observers: set[int] = set()
    state = ModuleState(module, None)
    with watch_hooks(module, observers, keeping):
        module(torch.ones(1, 2))
    assert entered == ["in", "look", "out", "in", "change", "out"]
    state.settle(module, compare_values=True)
    entered.clear()
    with state.restored(module, frozenset(observers), keeping):
        module(torch.ones(1, 2))
    assert entered == ["in", "change", "out"]


def test_hooks_of_the_forward_and_no_others() -> None:
    module, calls = nn.Sequential(nn.Linear(2, 2)), []
    there = module[0].register_forward_hook(lambda *_: calls.append("there"))
    state = ModuleState(module, None)
    state.settle(module, compare_values=True)
    assert state.hooks == {there.id}
    there.remove()
    later = module[0].register_forward_hook(lambda *_: calls.append("later"))
    with state.restored(module, NOBODY):
        module(torch.ones(1, 2))
    assert calls == ["there"]
    assert list(module[0]._forward_hooks) == [later.id]
    assert ModuleState(nn.Linear(2, 2), None).hooks == set()


def test_a_tensor_without_memory_of_its_own_is_not_cloned() -> None:
    module = Part()
    module.placeholder = torch.zeros(()).expand(1000, 1000)
    clones: list[torch.Size] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.clone.default:
                clones.append(args[0].shape)
            return func(*args, **(kwargs or {}))

    with Watch():
        state = ModuleState(module, None)
        state.settle(module, compare_values=True)
        with state.restored(module, NOBODY):
            assert module.placeholder.shape == (1000, 1000)
    assert module.placeholder.shape not in clones
    assert module.level.shape in clones
