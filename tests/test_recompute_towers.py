"""Where the blocks are: two towers, towers in a dict, blocks called past their owner, no blocks at all."""

from __future__ import annotations

import pytest
import torch
from parity import FULL, assert_parity
from torch import Tensor, nn
from toys import WIDTH, Block, Stack, rows, stack, step

from lightning_recompute.plan import Full, RecomputePlan, Segment
from lightning_recompute.policy import RecomputePolicy
from lightning_recompute.recompute import apply_recompute


class TextBlock(nn.Module):
    """Another class of block, which reads what the other tower made."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return x + self.dropout(self.mix(torch.cat([self.norm(x), memory], -1)).tanh())


class TwoTowers(nn.Module):
    """Encoder of four blocks, decoder of six of another class."""

    def __init__(self) -> None:
        super().__init__()
        self.vision = stack(4)
        self.text = nn.ModuleList(TextBlock() for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        memory = self.vision(x)
        for block in self.text:
            x = block(x, memory)
        return x


@pytest.mark.parametrize(
    ("policy", "sizes"),
    [
        (RecomputePolicy(), [1] * 10),
        (RecomputePolicy(num_layers=3), [3, 1, 3, 3]),
        (RecomputePolicy(num_layers=6), [4, 6]),
        (RecomputePolicy(method="block", num_layers=5), [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]),
        (RecomputePolicy(method="block", num_layers=2), [1, 1, 2, 1, 1, 4]),
    ],
    ids=["uniform-1", "uniform-3", "uniform-6", "block-5", "block-2"],
)
def test_method_and_num_layers_count_in_each_tower(policy: RecomputePolicy, sizes: list[int]) -> None:
    with apply_recompute(TwoTowers(), policy) as handle:
        assert [(block_list.name, len(block_list)) for block_list in handle.block_lists] == [
            ("vision.blocks", 4),
            ("text", 6),
        ]
        assert [s.stop - s.start for s in handle.plan.segments] == sizes
        assert "vision.blocks" in str(handle)
        assert "text" in str(handle)
    assert_parity(TwoTowers, step, policy)


def test_a_unit_over_two_towers_is_refused() -> None:
    plan = RecomputePlan((Segment(0, 3, Full()), Segment(3, 10, Full())))
    with pytest.raises(ValueError, match=r"blocks 3\.\.9.*text\.0"):
        apply_recompute(TwoTowers(), plan)


def test_one_tower_by_its_path_or_class() -> None:
    assert_parity(TwoTowers, step, blocks="text", calls=[2] * 6)
    assert_parity(TwoTowers, step, blocks="vision.blocks", calls=[2] * 4)
    assert_parity(TwoTowers, step, blocks="TextBlock", calls=[2] * 6)
    assert_parity(TwoTowers, step, blocks=["text", "vision.blocks"])


class Plain(nn.Module):
    """Layers that share no class."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.second = TextBlock()
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.second(self.first(x), x))
        return y


def test_a_model_without_a_list_of_blocks() -> None:
    with pytest.raises(ValueError, match=r"Plain has no list of blocks.*blocks="):
        apply_recompute(Plain(), FULL)
    with pytest.raises(ValueError, match="nowhere"):
        apply_recompute(Plain(), FULL, blocks="nowhere")
    assert_parity(Plain, step, blocks=["Block", "TextBlock"], calls=[2, 2])


class Vit(nn.Module):
    """Its forward is not the one that is called: users reach into `blocks`."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))

    def forward_features(self, x: Tensor) -> Tensor:
        raise AssertionError("not used")


class ReachesIn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vit = Vit()
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.vit.blocks(self.vit.patch(x)))
        return y


@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_blocks_in_a_sequential_that_is_called_directly(num_layers: int) -> None:
    assert_parity(ReachesIn, step, RecomputePolicy(num_layers=num_layers))


class DictOfTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleDict({"image": stack(2), "audio": stack(3)})

    def forward(self, x: Tensor) -> Tensor:
        return sum((tower(x) for tower in self.towers.values()), torch.zeros(()))


@pytest.mark.parametrize("num_layers", [1, 2])
def test_towers_in_a_dict(num_layers: int) -> None:
    assert_parity(DictOfTowers, step, RecomputePolicy(num_layers=num_layers), calls=[2] * 5)


@pytest.mark.parametrize("num_layers", [1, 3])
def test_a_frozen_tower_is_not_run_again_and_gives_its_gradient_free_output(num_layers: int) -> None:
    def build() -> nn.Module:
        model = TwoTowers()
        model.vision.requires_grad_(False)
        return model

    assert_parity(build, step, RecomputePolicy(num_layers=num_layers), calls=[1] * 4 + [2] * 6)


def test_blocks_in_a_sequential_that_is_the_model() -> None:
    def run(model: nn.Module) -> Tensor:
        loss: Tensor = model(rows()).square().mean()
        loss.backward()
        return loss

    assert_parity(lambda: nn.Sequential(*(Block() for _ in range(4))), run, RecomputePolicy(num_layers=2))


def test_a_stack_inside_a_stack_is_one_level() -> None:
    """Blocks that hold further lists of their own class of parts are recomputed as wholes."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(WIDTH, 16 * WIDTH)
            self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16 * WIDTH, WIDTH), nn.GELU()) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return x + sum(expert(self.gate(x)) for expert in self.experts)

    assert_parity(lambda: Stack(Outer() for _ in range(3)), step, calls=[2] * 3)
