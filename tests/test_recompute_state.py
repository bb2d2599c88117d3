"""State that a forward reads or changes: statistics, buffers, counters, flags, and what others change meanwhile."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from parity import FULL, PAIRS, assert_parity, assert_same, never_silent, observe, seeded
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from toys import WIDTH, Block, Stack, rows, square_loss, stack, step

from lightning_recompute.policy import RecomputePolicy
from lightning_recompute.recompute import RecomputeError, apply_recompute, is_recomputing

UNITS = pytest.mark.parametrize("policy", [FULL, PAIRS], ids=["unit-1", "unit-2"])

# --- normalisations with statistics


class Residual(nn.Module):
    """linear - BatchNorm - ReLU, added to its input; `first` puts the normalisation before the linear."""

    def __init__(self, norm: Callable[[], nn.Module], first: bool) -> None:
        super().__init__()
        linear = nn.Linear(WIDTH, WIDTH)
        self.path = nn.Sequential(norm(), linear, nn.ReLU()) if first else nn.Sequential(linear, norm(), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.path(x)
        return y


NORMS: dict[str, Callable[[], nn.Module]] = {
    "running": lambda: nn.BatchNorm1d(WIDTH),
    "cumulative": lambda: nn.BatchNorm1d(WIDTH, momentum=None),
    "without statistics": lambda: nn.BatchNorm1d(WIDTH, track_running_stats=False),
    "frozen": lambda: nn.BatchNorm1d(WIDTH).eval(),
}


@UNITS
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("norm", NORMS)
def test_statistics_advance_once_a_step(policy: RecomputePolicy, norm: str, first: bool) -> None:
    def run(model: nn.Module) -> list[Tensor]:
        loss = step(model)
        no_backward = square_loss(model)  # advances the statistics too
        with torch.no_grad():
            no_grad = square_loss(model)
        return [loss, no_backward, no_grad]

    def build() -> nn.Module:
        return stack(4, lambda: Residual(NORMS[norm], first))

    module = assert_parity(build, run, policy, num_steps=3, calls=[12] * 4)
    counts = [buffer.item() for name, buffer in module.named_buffers() if name.endswith("num_batches_tracked")]
    assert counts == ([9] * 4 if norm in ("running", "cumulative") else [0] * 4 if norm == "frozen" else [])


class Images(Stack):
    """Convolutions on a picture, with the instance statistics that nn.InstanceNorm2d can keep."""

    def __init__(self) -> None:
        super().__init__(
            nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.InstanceNorm2d(2, track_running_stats=True), nn.GELU())
            for _ in range(4)
        )

    def hidden(self, x: Tensor) -> Tensor:
        x = self.embed(x).view(2, 2, 2, 4).repeat(1, 1, 2, 1)
        for block in self.blocks:
            x = x + block(x)
        return x.mean(2).flatten(2).reshape(-1, WIDTH)


def test_instance_statistics() -> None:
    assert_parity(Images, step, FULL, num_steps=2)


# --- buffers and attributes that a block changes itself


class Counts(Block):
    """Keeps state in every way a module can: buffers written and rebound, numbers, tensors, a dict's entry."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(WIDTH))
        self.register_buffer("rebound", torch.ones(WIDTH))
        self.register_buffer("appears", None)
        self.num_calls = 0
        self.scale = torch.tensor(1.0)

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        y = self.inner(x) * self.average.add(1).clone() * self.rebound * self.scale / self.num_calls
        if self.appears is not None:
            y = y + self.appears
        with torch.no_grad():
            self.average.mul_(0.9).add_(0.1 * y.mean(0))
            self.rebound = self.rebound * 1.5
            self.scale = self.scale + 0.5
            self.appears = x.detach().mean(0)
            self.made_in_forward = self.num_calls
        return x + y


@UNITS
def test_state_advances_once_a_step(policy: RecomputePolicy) -> None:
    def run(model: nn.Module) -> list[object]:
        loss = step(model)
        return [loss, *((b.num_calls, b.scale, b.made_in_forward) for b in model.blocks)]

    assert_parity(lambda: stack(4, Counts), run, policy, num_steps=3)


@UNITS
def test_state_of_two_forwards_before_backward(policy: RecomputePolicy) -> None:
    def run(model: nn.Module) -> list[object]:
        one, other = square_loss(model), square_loss(model)
        one.backward()
        other.backward()
        return [one, other, *((block.num_calls, block.scale) for block in model.blocks)]

    assert_parity(lambda: stack(4, Counts), run, policy, calls=[8] * 4, num_steps=2)


@UNITS
@pytest.mark.parametrize("kind", ["spectral_norm", "weight_norm", "cached weight_norm"])
def test_parametrizations(policy: RecomputePolicy, kind: str) -> None:
    """spectral_norm writes its vectors at every forward in train mode."""

    class Parametrized(Block):
        def __init__(self) -> None:
            super().__init__()
            getattr(parametrizations, kind.split()[-1])(self.up)

        def forward(self, x: Tensor) -> Tensor:
            if kind.startswith("cached"):
                with parametrize.cached():
                    return x + self.inner(x) * self.up.weight.mean()
            return x + self.inner(x)

    assert_parity(lambda: stack(4, Parametrized), step, policy, num_steps=3)


@UNITS
def test_a_buffer_first_written_late_is_never_silently_wrong(policy: RecomputePolicy) -> None:
    class Late(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("level", torch.ones(()))
            self.num_calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.num_calls += 1
            y = self.inner(x) * self.level.clone()
            if self.num_calls > 2:
                self.level.mul_(2)
            return x + y

    def run(model: nn.Module) -> list[Tensor]:
        return [step(model) for _ in range(5)]

    never_silent(lambda: stack(4, Late), run, policy, RecomputeError)


@UNITS
def test_is_recomputing_guards_what_must_run_once(policy: RecomputePolicy) -> None:
    seen: list[float] = []

    class Logs(Block):
        def forward(self, x: Tensor) -> Tensor:
            if not is_recomputing():
                seen.append(x.mean().item())
            return x + self.inner(x)

    due = observe(seeded(lambda: stack(4, Logs)), step)
    once = list(seen)
    seen.clear()
    with apply_recompute(model := seeded(lambda: stack(4, Logs)), policy):
        assert_same(observe(model, step), due)
    assert seen == once
    assert len(once) == 4


# --- what others change between forward and backward


def set_mode(model: nn.Module) -> None:
    model.eval()


def drop_more(model: nn.Module) -> None:
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.9


def write_parameter(model: nn.Module) -> None:
    with torch.no_grad():
        model.get_parameter("blocks.1.up.weight").add_(1)


def write_unsaved_parameter(model: nn.Module) -> None:
    """Autograd does not keep a bias, so without recompute this goes unnoticed and is right."""
    with torch.no_grad():
        model.get_parameter("blocks.1.up.bias").add_(1)


def optimize(model: nn.Module) -> None:
    """An optimizer step before backward; of the blocks only, so that theirs is the error."""
    parameters = list(model.get_submodule("blocks").parameters())
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    torch.optim.AdamW(parameters, 0.1).step()
    model.zero_grad()


def load(model: nn.Module) -> None:
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})


def replace_parameter(model: nn.Module) -> None:
    block = model.get_submodule("blocks.1.up")
    block.weight = nn.Parameter(torch.zeros_like(block.weight))


def freeze(model: nn.Module) -> None:
    model.get_submodule("blocks.1").requires_grad_(False)


def write_buffer(model: nn.Module) -> None:
    model.get_buffer("blocks.1.level").fill_(3)


def replace_buffer(model: nn.Module) -> None:
    model.get_submodule("blocks.1").level = torch.full((), 3.0)


class Levelled(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("level", torch.full((), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x * self.level)


MEANWHILE = [write_parameter, write_unsaved_parameter, optimize, load, replace_parameter, write_buffer, replace_buffer]


@UNITS
@pytest.mark.parametrize("change", [*MEANWHILE, set_mode, drop_more, freeze], ids=lambda f: f.__name__)
def test_what_changes_between_forward_and_backward_is_never_silently_wrong(
    policy: RecomputePolicy, change: Callable[[nn.Module], None]
) -> None:
    """Right numbers or an error; where autograd itself refuses, an error."""

    def run(model: nn.Module) -> Tensor:
        loss = square_loss(model)
        change(model)
        loss.backward()
        return loss

    def build() -> nn.Module:
        return stack(4, Levelled)

    try:
        run(seeded(build))
    except RuntimeError:
        with apply_recompute(model := seeded(build), policy), pytest.raises(RuntimeError):
            run(model)
    else:
        never_silent(build, run, policy, RecomputeError)


@UNITS
@pytest.mark.parametrize("change", [write_parameter, write_unsaved_parameter, optimize], ids=lambda f: f.__name__)
def test_the_error_for_changed_parameters_names_block_parameter_and_cure(
    policy: RecomputePolicy, change: Callable[[nn.Module], None]
) -> None:
    model = stack()
    with apply_recompute(model, policy):
        loss = square_loss(model)
        change(model)
        with pytest.raises(RecomputeError, match=r"blocks\.\d.*up\.\w+.*optimizer step"):
            loss.backward()
        model.zero_grad()
        assert_same(observe(model, step), observe(_plain_like(model), step))


def _plain_like(model: nn.Module) -> nn.Module:
    twin = stack()
    twin.load_state_dict(model.state_dict())
    return twin


@UNITS
def test_modes_toggled_between_forward_and_backward(policy: RecomputePolicy) -> None:
    def run(model: nn.Module) -> list[Tensor]:
        loss = square_loss(model)
        model.eval()
        with torch.no_grad():
            validation = square_loss(model)
        loss.backward()
        assert not any(part.training for part in model.modules())
        model.train()
        return [loss, validation]

    assert_parity(stack, run, policy, calls=[3] * 4)


def test_the_input_is_checked_by_its_version() -> None:
    model = stack(4)
    x = rows()
    with apply_recompute(model, FULL):
        y = model.blocks[0](x)
        x.add_(1)
        with pytest.raises(RuntimeError, match=r"in place|inplace"):
            y.sum().backward()
