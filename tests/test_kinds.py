"""What single modules are taken for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.pytorch_utils import Conv1D

from lightning_recompute.kinds import (
    is_activation,
    is_core,
    is_norm,
    is_one_node,
    keeps_its_output,
    linear_sizes,
    roles_in,
)
from lightning_recompute.transformer import CoreAttention, SwiGLU


def named(name: str, *bases: type, **attributes: Any) -> Any:
    """A class of that name, as another library has it."""
    return type(name, bases or (nn.Module,), attributes)


class Weighted(nn.Module):
    """A module that owns a matrix from 4 to 6 channels under some name."""

    def __init__(self, **sizes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(6, 4))
        for name, size in sizes.items():
            setattr(self, name, size)


class Adapted(nn.Module):
    """A linear with adapters beside it, as PEFT builds them."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(4, 6)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(4, 2)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, 6)})
        self.in_features, self.out_features = 4, 6


@pytest.mark.parametrize(
    ("module", "sizes"),
    [
        (nn.Linear(4, 6), (4, 6)),
        (Conv1D(6, 4), (4, 6)),
        (nn.Conv2d(4, 6, 1), (4, 6)),
        (nn.LazyLinear(6), (0, 6)),
        (named("ColumnParallelLinear", Weighted)(input_size=4, output_size=6), (4, 6)),
        (named("Linear4bit", Weighted)(in_features=4, out_features=6), (4, 6)),
        (named("LayerNormLinear", Weighted)(in_features=4, out_features=6), (4, 6)),
        (named("QuantLinear", Weighted)(), (0, 0)),
        (named("Linear", Adapted)(), (4, 6)),
        (nn.Conv2d(4, 6, 3), None),
        (nn.Conv1d(4, 4, 1, groups=4), (4, 4)),
        (nn.LayerNorm(4), None),
        (nn.Sequential(nn.Linear(4, 6)), None),
        (named("LinearAttention", Weighted)(), None),
        (named("LinearActivation")(), None),
        (nn.Bilinear(2, 3, 4), (0, 4)),
    ],
)
def test_linear_layers_and_their_sizes(module: nn.Module, sizes: tuple[int, int] | None) -> None:
    assert linear_sizes(module) == sizes


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.LayerNorm(4), True),
        (nn.LayerNorm((2, 4)), True),
        (nn.RMSNorm(4), True),
        (nn.GroupNorm(2, 4), True),
        (nn.BatchNorm1d(4), True),
        (torch.compile(nn.LayerNorm(4)), True),
        (named("T5LayerNorm")(), True),
        (named("RMS")(), True),
        (named("Normalize")(), True),
        (named("NormalNoise")(), False),
        (named("Transforms")(), False),
        (named("PreNorm", nn.Sequential)(nn.LayerNorm(4), nn.Linear(4, 4)), False),
        (named("LayerNormLinear", Weighted)(), False),
        (named("LayerNormMLP", Weighted)(), False),
        (nn.Identity(), False),
        (nn.Linear(4, 4), False),
    ],
)
def test_norms(module: nn.Module, expected: bool) -> None:
    assert is_norm(module) == expected


ONE_NODE = {"gelu", "gelu_pytorch_tanh", "silu", "swish"}
OUTPUT_ONLY = {"linear", "relu", "sigmoid", "tanh"}


@pytest.mark.parametrize("name", sorted(ACT2FN))
def test_every_activation_of_hugging_face(name: str) -> None:
    activation = ACT2FN[name]
    assert is_activation(activation)
    assert is_one_node(activation) == (name in ONE_NODE)
    assert keeps_its_output(activation) == (name in OUTPUT_ONLY)


@pytest.mark.parametrize("name", sorted(set(ACT2FN) - OUTPUT_ONLY))
def test_activations_that_are_one_node_are_one(name: str) -> None:
    """Those said to be one node of the graph are, and those said to be freed by their module keep more than that."""
    x = torch.randn(2, 3, 8, requires_grad=True)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = ACT2FN[name](x)
    if is_one_node(ACT2FN[name]):
        assert y.grad_fn.name() in ("GeluBackward0", "SiluBackward0")
    assert not all(tensor is y for tensor in kept)


@pytest.mark.parametrize(
    ("module", "activation", "one_node", "output_only"),
    [
        (nn.GELU(), True, True, False),
        (torch.compile(nn.GELU()), True, True, False),
        (torch.compile(nn.Tanh()), True, False, True),
        (nn.SiLU(), True, True, False),
        (nn.ReLU(), True, False, True),
        (nn.Mish(), True, False, False),
        (nn.ReLU6(), True, False, False),
        (nn.PReLU(), True, False, False),
        (nn.GLU(), True, False, False),
        (SwiGLU(), True, True, False),
        (named("QuickGELU")(), True, False, False),
        (named("SnakeBeta")(), True, False, False),
        (named("ConvAct")(), True, False, False),
        (nn.Softmax(-1), False, False, False),
        (nn.LogSoftmax(-1), False, False, False),
        (nn.MultiheadAttention(4, 2), False, False, False),
        (named("SwiGLU", Weighted)(), False, True, False),  # a whole feed-forward of that name
        (named("Interaction")(), False, False, False),
        (nn.Dropout(), False, False, False),
    ],
)
def test_activations(module: nn.Module, activation: bool, one_node: bool, output_only: bool) -> None:
    assert is_activation(module) == activation
    assert is_one_node(module) == one_node
    assert keeps_its_output(module) == output_only


def takes_qkv(self: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    return q


def takes_megatron(self: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor) -> Tensor:
    return query


def takes_torchtitan(self: nn.Module, xq: Tensor, xk: Tensor, xv: Tensor) -> Tensor:
    return xq


def takes_any_three(self: nn.Module, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return a


def takes_packed(self: nn.Module, qkv: Tensor, causal: bool = False) -> Tensor:
    return qkv


def takes_two(self: nn.Module, q: Tensor, k: Tensor, positions: Tensor | None = None) -> Tensor:
    return q


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (CoreAttention(), True),
        (named("Attend", forward=takes_qkv)(), True),
        (named("Kernel", forward=takes_qkv)(), True),
        (named("DotProductAttention", forward=takes_megatron)(), True),
        (named("Wrapper", forward=takes_torchtitan)(), True),
        (named("ScaledDotProduct", forward=takes_any_three)(), True),
        (named("FlashSelfAttention", forward=takes_packed)(), True),
        (named("Mixer", forward=takes_any_three)(), False),
        (named("Splitter", forward=takes_packed)(), False),
        (named("RotaryEmbedding", forward=takes_two)(), False),
        (named("RotaryAttention", forward=takes_qkv)(), False),
        (named("QKNorm", forward=takes_qkv)(), False),
        (named("Attention", Weighted, forward=takes_qkv)(), False),
        (nn.MultiheadAttention(4, 2), False),
        (nn.Softmax(-1), False),
        (torch.jit.script(nn.Tanh()), False),
    ],
)
def test_core_attention_modules(module: nn.Module, expected: bool) -> None:
    assert is_core(module) == expected


@pytest.mark.parametrize(
    ("roles", "keys"),
    [
        ("qkv", ["qkv", "c_attn", "Wqkv", "qkv_proj", "to_qkv", "query_key_value", "linear_qkv", "W_pack", "attn_qkv"]),
        ("q", ["q", "q_proj", "query", "to_q", "wq", "w_qs", "q_lin", "query_proj", "q_a_proj", "toQ", "linear_q"]),
        ("k", ["k", "k_proj", "key", "to_k", "wk", "w_ks", "key_net"]),
        ("v", ["v", "v_proj", "value", "to_v", "wv", "w_vs", "v_head"]),
        ("kv", ["kv", "to_kv", "kv_b_proj", "kv_a_proj_with_mqa", "Wkv"]),
        ("qk", ["qk_proj"]),
        ("", ["o_proj", "out_proj", "c_proj", "proj", "in_proj_qkvz", "fc1", "w1", "w", "vision", "keyboard", "dense"]),
    ],
)
def test_names_of_projections(roles: str, keys: list[str]) -> None:
    for key in keys:
        assert roles_in(key) == set(roles), key
