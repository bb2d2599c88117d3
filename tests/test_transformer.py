import dataclasses

import pytest
import torch
from torch import Tensor, nn

from lightning_recompute.transformer import (
    Attention,
    BlockConfig,
    CoreAttention,
    Dropout,
    TransformerBlock,
    rotary_tables,
    rotate,
)

B, S, H, A = 2, 64, 128, 4


def config(**changes: object) -> BlockConfig:
    plain = BlockConfig(hidden_size=H, num_heads=A, num_kv_heads=A, ffn_hidden_size=4 * H)
    return dataclasses.replace(plain, **changes)


def saved_tensors(block: nn.Module, x: Tensor) -> list[Tensor]:
    """One tensor for each storage that a forward keeps for backward, weights left out."""
    weights = {p.untyped_storage()._cdata for p in block.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(t: Tensor) -> Tensor:
        if t.untyped_storage()._cdata not in weights:
            kept[t.untyped_storage()._cdata] = t.detach()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        block(x)
    return list(kept.values())


def saved_bytes(b: int, s: int, h: int, config: BlockConfig) -> int:
    torch.manual_seed(0)
    block = TransformerBlock(config).bfloat16()
    x = torch.randn(b, s, h, dtype=torch.bfloat16, requires_grad=True)
    layer_norm_statistics = 2 * 2 * b * s * 2  # mean and reciprocal deviation of two norms, 2 bytes each on a CPU
    return sum(t.untyped_storage().nbytes() for t in saved_tensors(block, x)) - layer_norm_statistics


@pytest.mark.parametrize(("b", "s", "h", "a"), [(2, 64, 128, 4), (1, 128, 64, 2), (3, 32, 96, 6), (1, 48, 64, 1)])
def test_eager_block_keeps_what_the_paper_counts(b, s, h, a):
    dropout = config(
        hidden_size=h, num_heads=a, num_kv_heads=a, ffn_hidden_size=4 * h, dropout=0.1, attention_dropout=0.1
    )
    assert saved_bytes(b, s, h, dataclasses.replace(dropout, attention="eager")) == 34 * s * b * h + 5 * a * s * s * b


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_block_keeps_each_key_and_value_head_once(attention, num_kv_heads):
    attention_dropout = 0.1 if attention == "eager" else 0.0
    core = 5 * A * S * S * B if attention == "eager" else 4 * A * S * B  # sdpa: the logsumexp of each row, float32
    found = saved_bytes(
        B,
        S,
        H,
        config(num_kv_heads=num_kv_heads, dropout=0.1, attention_dropout=attention_dropout, attention=attention),
    )
    assert found == S * B * H * (30 + 4 * num_kv_heads // A) + core


def test_swiglu_block_keeps_four_inner_tensors():
    gelu, swiglu = (saved_bytes(B, S, H, config(activation=name)) for name in ("gelu", "swiglu"))
    assert swiglu - gelu == 2 * (2 * S * B * 4 * H)  # gate, its silu, up, product; GELU's two


def test_dropout_masks_take_a_byte_an_element():
    kept = saved_tensors(TransformerBlock(config(dropout=0.5)), torch.randn(B, S, H))
    masks = [t for t in kept if t.dtype == torch.bool]
    assert [t.untyped_storage().nbytes() for t in masks] == 2 * [B * S * H]


def test_dropout_draws_from_the_default_generator_and_only_when_it_drops():
    x, dropout = torch.randn(8, 1000), Dropout(0.25)
    torch.manual_seed(7)
    dropped = dropout(x)
    torch.manual_seed(7)
    assert torch.equal(dropped, torch.native_dropout(x, 0.25, True)[0])
    assert dropped.eq(0).float().mean() == pytest.approx(0.25, abs=0.03)
    assert torch.allclose(dropped[dropped != 0], x[dropped != 0] / 0.75)
    state = torch.get_rng_state()
    assert Dropout(0.0)(x) is x
    assert dropout.eval()(x) is x
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_eager_and_sdpa_agree(num_kv_heads):
    torch.manual_seed(0)
    shapes = ((B, A, S, 8), (B, num_kv_heads, S, 8), (B, num_kv_heads, S, 8))
    qkv = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    eager, sdpa = CoreAttention("eager")(*qkv), CoreAttention("sdpa")(*qkv)
    torch.testing.assert_close(eager, sdpa)
    upstream = torch.randn_like(eager)
    torch.testing.assert_close(torch.autograd.grad(eager, qkv, upstream), torch.autograd.grad(sdpa, qkv, upstream))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_grouped_query_attention_is_plain_attention_with_repeated_heads(attention):
    torch.manual_seed(0)
    grouped = Attention(config(num_kv_heads=2, attention=attention))
    plain = Attention(config(attention=attention))
    repeated = {}
    for name, weight in grouped.state_dict().items():
        if name.startswith(("k_proj", "v_proj")):
            weight = weight.unflatten(0, (2, -1)).repeat_interleave(2, dim=0).flatten(0, 1)
        repeated[name] = weight
    plain.load_state_dict(repeated)
    x = torch.randn(B, S, H)
    torch.testing.assert_close(grouped(x), plain(x))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_sees_no_later_token(attention):
    torch.manual_seed(0)
    attention = Attention(config(attention=attention))
    x = torch.randn(B, S, H)
    changed = torch.cat((x[:, :40], torch.randn(B, S - 40, H)), dim=1)
    before, after = attention(x), attention(changed)
    torch.testing.assert_close(before[:, :40], after[:, :40])
    assert not torch.allclose(before[:, 40:], after[:, 40:])


def test_attention_dropout_is_off_in_evaluation():
    torch.manual_seed(0)
    qkv = [torch.randn(B, A, S, 8) for _ in range(3)]
    for kernel in ("eager", "sdpa"):
        core = CoreAttention(kernel, dropout=0.5)
        assert not torch.allclose(core(*qkv), core(*qkv))
        assert torch.equal(core.eval()(*qkv), CoreAttention(kernel)(*qkv))


def test_rotary_scores_depend_on_the_distance_only():
    torch.manual_seed(0)
    q, k = torch.randn(16), torch.randn(16)
    tables = rotary_tables(100, 16)
    scores = rotate(q.expand(100, 16), *tables) @ rotate(k.expand(100, 16), *tables).T  # one q and k at every position
    for distance in (0, 1, 7, 60):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-4, rtol=0)
    assert scores.diagonal().mean() == pytest.approx((q @ k).item(), abs=1e-4)
    assert not torch.isclose(scores[7, 0], scores[0, 0])


def test_rotary_keeps_the_dtype_and_its_precision():
    x = torch.randn(1, 1, 300, 16)
    tables = rotary_tables(300, 16)
    low = rotate(x.bfloat16(), *tables)
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.float(), rotate(x, *tables), atol=0.05, rtol=0.02)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 5}, "num_heads=5 does not divide hidden_size=128; the nearest that does is 4"),
        ({"num_kv_heads": 3}, "num_kv_heads=3 does not divide num_heads=4"),
        ({"num_kv_heads": 8}, "num_kv_heads=8 does not divide num_heads=4; the nearest that does is 4"),
        ({"hidden_size": 0}, "hidden_size=0: at least 1"),
        ({"dropout": 1.0}, "dropout=1.0: a dropout rate"),
        ({"attention_dropout": -0.1}, "attention_dropout=-0.1"),
        ({"activation": "relu"}, "activation='relu' is unknown; choose one of 'gelu', 'swiglu'"),
        ({"attention": "flash"}, "choose one of 'eager', 'sdpa'"),
        ({"norm": "batchnorm"}, "choose one of 'layernorm', 'rmsnorm'"),
    ],
)
def test_wrong_configs_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        config(**changes)
