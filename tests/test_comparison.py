"""check=True: the first replay of each block is compared with its forward, and a difference names block and module."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from guards import KINDS, each_kind, each_whole, plan_of
from parity import assert_same, observe, seeded
from torch import Tensor, nn
from torch.nn import functional as F
from toys import WIDTH, Attention, Block, square_loss, stack, step

from lightning_recompute.comparison import Comparison, described, saved_otherwise
from lightning_recompute.errors import RecomputeError
from lightning_recompute.plan import RecomputePlan, Segment, Selective
from lightning_recompute.recompute import apply_recompute

drawn = [0]


def unknown_source() -> float:
    """Numbers from where no replay can take them back."""
    drawn[0] += 1
    return 1.0 + 1e-3 * drawn[0]


class Noisy(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * unknown_source())


class NoisyNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.full_like(x, unknown_source())


def with_noise(where: str, block: int = 2, since: int = 1) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = stack()
        target = model.blocks[block]
        if where == "norm":
            target.norm = NoisyNorm(WIDTH)
        elif where == "up":
            target.up = Noisy(WIDTH, 2 * WIDTH)
        else:
            target.inner = lambda x, inner=target.inner: inner(x * unknown_source())
        return model

    return build


@each_whole
@pytest.mark.parametrize(("where", "module"), [("up", "up"), ("norm", "norm"), ("block", "")])
def test_a_difference_names_block_and_module(where: str, module: str, kind: str) -> None:
    model = seeded(with_noise(where))
    with apply_recompute(model, plan_of(kind), check=True):
        loss = square_loss(model)
        with pytest.raises(RecomputeError) as caught:
            loss.backward()
    message = str(caught.value)
    name = module or ("norm" if where == "block" else "the block itself")  # the norm saves what it is given
    for words in ("blocks.2: a value saved in", name, "float32", "differs in the replay by up to", "is_recomputing()"):
        assert words in message


def test_a_freed_output_is_compared() -> None:
    model = seeded(with_noise("norm"))
    with apply_recompute(model, plan_of("freed"), check=True):
        loss = square_loss(model)
        with pytest.raises(RecomputeError, match=r"blocks\.2\.norm: a value saved in the block itself.*differs"):
            loss.backward()


def test_a_tape_is_compared() -> None:
    class Host(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = Attention()

        def forward(self, x: Tensor) -> Tensor:
            return x + self.attn(x)

    model = seeded(lambda: stack(2, Host))
    plan = RecomputePlan(tuple(Segment(i, i + 1, Selective(("core_attn",))) for i in range(2)))
    with apply_recompute(model, plan, check=True):
        step(model)  # the same: nothing to say


def test_without_check_it_goes_unseen() -> None:
    """The reason for the switch: the shapes are right and the numbers are not."""
    plain, model = seeded(with_noise("up")), seeded(with_noise("up"))
    drawn[0] = 0
    due = observe(plain, step)
    drawn[0] = 0
    with apply_recompute(model, plan_of("full")):
        found = observe(model, step)
    with pytest.raises(AssertionError, match="differs by up to"):
        assert_same(found, due)


@each_kind
def test_an_honest_model_passes(kind: str) -> None:
    due = observe(seeded(stack), lambda model: [step(model) for _ in range(3)])
    model = seeded(stack)
    with apply_recompute(model, plan_of(kind), check=True):
        found = observe(model, lambda model: [step(model) for _ in range(3)])
    assert_same(found, due)


def test_values_that_are_no_numbers_are_the_same() -> None:
    class Divides(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.inner(x / torch.zeros(WIDTH)) * torch.tensor(float("nan"))

    model = seeded(lambda: stack(4, Divides))
    with apply_recompute(model, plan_of("full"), check=True):
        step(model)


def test_only_the_first_replay_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []
    check = Comparison.check

    def counted(self: Comparison, name: str, index: int, replayed: Tensor) -> None:
        compared.append(len(self._values))
        check(self, name, index, replayed)

    monkeypatch.setattr(Comparison, "check", counted)
    model = seeded(stack)
    with apply_recompute(model, plan_of("full"), check=True):
        square_loss(model)  # no replay: nothing has been compared yet
        compared.clear()
        step(model)
        assert max(compared) > 0
        compared.clear()
        step(model)
        assert max(compared) == 0
        model.blocks[1].norm = NoisyNorm(WIDTH)
        step(model)


def test_a_shape_or_number_of_tensors_that_differs_is_seen_without_check() -> None:
    class Grows(Block):
        def forward(self, x: Tensor) -> Tensor:
            wide = self.up(self.norm(x))[:, : 4 + int(10 * (unknown_source() - 1) * 100) % 8]
            return x + F.gelu(wide).mean()

    class Repeats(Block):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(drawn[0] % 3):
                x = torch.tanh(x)
            drawn[0] += 1
            return x + self.inner(x)

    for kind in ("full", "pairs", "saved"):
        for block in (Grows, Repeats):
            drawn[0] = 0
            model = seeded(lambda block=block: stack(4, block))
            with apply_recompute(model, plan_of(kind)):
                loss = square_loss(model)
                with pytest.raises(
                    RecomputeError, match=r"blocks\.\d: .*(the replay saved|where the forward).*counters"
                ):
                    loss.backward()


def test_every_kind_takes_the_switch() -> None:
    for kind in KINDS:
        with apply_recompute(stack(), plan_of(kind), check=True) as handle:
            assert handle.plan == plan_of(kind)


def test_words() -> None:
    assert described(torch.Size((2, 3)), torch.bfloat16) == "(2, 3) bfloat16"
    assert saved_otherwise("h.1", 3, 5).startswith("h.1: up to its end the replay saved 3 tensors, the forward 5. ")
