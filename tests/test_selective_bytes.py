"""Selective recompute frees what the formulas of docs/labels.md say, to the byte of the counting allocator."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_recompute.memory import measure_step
from lightning_recompute.plan import Action, RecomputePlan, SaveOps, Segment, Selective
from lightning_recompute.recompute import apply_recompute
from lightning_recompute.transformer import BlockConfig, TransformerBlock

BATCH, LENGTH, WIDTH, HEADS, BLOCKS = 2, 64, 128, 4, 3
SBH = BATCH * LENGTH * WIDTH
RNG_STATE = 5056
NUMBERS = 8  # what a block under dropout holds beside tensors of the formula, in bytes
# mean and reciprocal deviation of each token, for two norms
STATISTICS = {torch.bfloat16: 2 * 2 * BATCH * LENGTH * 2, torch.float32: 2 * 2 * BATCH * LENGTH * 4}


class Stack(nn.Module):
    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TransformerBlock(config) for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def held(action: Action | None, dtype: torch.dtype = torch.bfloat16, *, mixed: bool = False, **config: object) -> int:
    """Bytes that a block's graph holds after forward, the block's input counted with it."""
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "num_heads": HEADS, "num_kv_heads": HEADS, "ffn_hidden_size": 4 * WIDTH}
    model = Stack(BlockConfig(**(sizes | config))).to(dtype)
    # its input is made inside of what is measured, as a model's embedding makes it
    source = torch.randn(BATCH, LENGTH, WIDTH, dtype=dtype, requires_grad=True)
    source.grad = torch.zeros_like(source)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            return model(source + 0).sum()

    def measured() -> int:
        loss().backward()  # the first step is the one that units learn from
        step = measure_step(loss, known=[source.grad, *(p.grad for p in model.parameters())])
        assert step.after_bytes == 0
        return step.held_bytes

    if action is None:
        total = measured()
    else:
        segments = tuple(Segment(index, index + 1, action) for index in range(BLOCKS))
        with apply_recompute(model, RecomputePlan(segments)):
            total = measured()
    scalar = source.element_size()  # the loss
    assert (total - scalar) % BLOCKS == 0
    return (total - scalar) // BLOCKS


DROPOUT = {"attention": "eager", "dropout": 0.1, "attention_dropout": 0.1}


def test_core_attention_leaves_34sbh() -> None:
    scores = 5 * HEADS * LENGTH**2 * BATCH
    kept = 34 * SBH + STATISTICS[torch.bfloat16] + NUMBERS
    assert held(None, **DROPOUT) == kept + scores
    assert held(Selective(("core_attn",)), **DROPOUT) == kept + RNG_STATE


@pytest.mark.parametrize("config", [DROPOUT, {"attention": "sdpa"}], ids=["eager", "sdpa"])
def test_norms_and_activations_free_their_outputs(config: dict[str, object]) -> None:
    none = held(None, **config)
    statistics = STATISTICS[torch.bfloat16]
    assert none - held(Selective(("norm",)), **config) == 4 * SBH + statistics
    assert none - held(Selective(("act",)), **config) == 8 * SBH
    assert none - held(Selective(("norm", "act")), **config) == 12 * SBH + statistics


def test_mixed_precision_frees_a_cast_for_each_linear() -> None:
    none = held(None, torch.float32, mixed=True)
    assert none - held(Selective(("norm",)), torch.float32, mixed=True) == 8 * SBH + STATISTICS[torch.float32]
    assert none - held(Selective(("act",)), torch.float32, mixed=True) == 8 * SBH


def test_swiglu_frees_the_product_and_its_activated_factor() -> None:
    width = 320
    config = {"activation": "swiglu", "ffn_hidden_size": width}
    freed = held(None, **config) - held(Selective(("act",)), **config)
    assert freed == 2 * (2 * BATCH * LENGTH * width)


def test_rms_norm_keeps_its_input_only() -> None:
    layer = held(Selective(("norm",)), norm="layernorm")
    assert held(Selective(("norm",)), norm="rmsnorm") == layer


def test_fused_attention_keeps_no_scores() -> None:
    none = held(None, attention="sdpa")
    logsumexp = BATCH * HEADS * LENGTH * 4
    assert none - held(Selective(("core_attn",)), attention="sdpa") == logsumexp
    assert logsumexp < 0.01 * none


def test_saved_products_are_what_is_held() -> None:
    """Outputs of q, k, v, the attention's projection and the first linear of the MLP, and the block's input."""
    # sdpa's output is computed again from q, k and v; the last linear's output is needed by nobody's backward
    products = 2 * SBH * (3 + 1 + 4 + 1)
    assert held(SaveOps(("matmul",)), attention="sdpa") == 2 * SBH + products
