"""Models that recompute themselves: one level only, said who wins, flags back afterwards."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint
from vit import VisionTransformer, vit_loss

from lightning_recompute.policy import RecomputePolicy
from lightning_recompute.recompute import apply_recompute

FORWARDS: list[int] = []


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(8, 8), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        FORWARDS.append(1)
        return x + self.dropout(torch.tanh(self.linear(x)))


class Model(nn.Module):
    """Four blocks, which the model itself may call through torch's checkpoint."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def step(model: nn.Module) -> list[Tensor]:
    torch.manual_seed(1)
    FORWARDS.clear()
    x = torch.randn(3, 8, requires_grad=True)
    model.zero_grad()
    model(x).square().sum().backward()
    return [x.grad, *(p.grad.clone() for p in model.parameters()), torch.get_rng_state()]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("granularity", ["full", "selective"])
def test_torchs_checkpoint_in_the_model_wins(
    reentrant: bool, granularity: str, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model = Model(reentrant)
    due = step(model)
    modules = ["*.linear"] if granularity == "selective" else None
    with apply_recompute(model, RecomputePolicy(granularity=granularity, modules=modules)):
        found = step(model)
    assert len(FORWARDS) == 8
    assert all(map(torch.equal, due, found))
    if not reentrant:
        assert "runs inside torch.utils.checkpoint, called by the model itself: that one wins" in caplog.text


def test_wrapped_blocks_are_recomputed_once(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = Model()
    due = step(model)
    model.blocks[1], model.blocks[2] = checkpoint_wrapper(model.blocks[1]), checkpoint_wrapper(model.blocks[2])
    with apply_recompute(model, RecomputePolicy()):
        found = step(model)
        assert len(FORWARDS) == 8
    assert all(map(torch.equal, due, found))
    assert "2 block(s) from blocks.1 on are wrapped in torch's CheckpointWrapper" in caplog.text
    step(model)
    assert len(FORWARDS) == 6  # the user's own wrappers work again


def test_hugging_faces_flag_is_switched_over_and_back(caplog: pytest.LogCaptureFixture) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, num_key_value_heads=2, **sizes)).train()
    model.gradient_checkpointing_enable()
    ids = torch.randint(32, (2, 6))
    calls: list[int] = []
    model.model.layers[0].mlp.down_proj.register_forward_pre_hook(lambda *_: calls.append(1) or (_[1]))
    with caplog.at_level(logging.WARNING), apply_recompute(model, RecomputePolicy()):
        assert not model.is_gradient_checkpointing
        model(input_ids=ids, labels=ids).loss.backward()
        assert len(calls) == 2
    assert model.is_gradient_checkpointing
    assert "gradient_checkpointing=True" in caplog.text


def test_timms_flag_is_switched_over_and_back() -> None:
    torch.manual_seed(0)
    model = VisionTransformer().train()
    batch = {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([0, 1])}

    def gradients() -> list[Tensor]:
        torch.manual_seed(1)
        model.zero_grad()
        vit_loss(model, batch).backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    due = gradients()
    model.set_grad_checkpointing(True)
    with apply_recompute(model, RecomputePolicy()):
        assert not model.grad_checkpointing
        assert all(map(torch.equal, due, gradients()))
    assert model.grad_checkpointing
