"""The transformer block of `GPT`: pre-norm, and every part that recompute can name is a module of its own.

Shapes: b batch, s sequence length, h hidden size, a query heads, k key-value heads, d = h/a head size, f MLP size.

Bytes that one block keeps for backward in 16 bit, with dropout, k = a and f = 4h (Korthikanti et al. 2022,
arXiv 2205.05198, equation 1: sbh(34 + 5as/h)), in units of sbh:

    norms        4          their two inputs
    attention   11          2 input of q, k and v; 4 q and k; 2 v; 2 input of o_proj; 1 dropout mask
    eager core   5as/h      2 softmax output; 2 its dropout; 1 mask  (none of it with sdpa: 4 bytes per row and head)
    mlp         19          2 input of up_proj; 8 input of the GELU; 8 its output; 1 dropout mask

What the paper leaves out: each LayerNorm keeps its mean and reciprocal deviation. The causal mask costs nothing here,
because it is added to the scores and an addition keeps no operand.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Activation = Literal["gelu", "swiglu"]
AttentionKernel = Literal["eager", "sdpa"]
Norm = Literal["layernorm", "rmsnorm"]


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """What a `TransformerBlock` is built from; the arguments of `GPT` with the same names explain them.

    Raises:
        ValueError: for a size below 1, heads that do not divide, an unknown word or a dropout outside [0, 1).
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    ffn_hidden_size: int
    activation: Activation = "gelu"
    norm: Norm = "layernorm"
    bias: bool = True
    dropout: float = 0.0
    attention_dropout: float = 0.0
    attention: AttentionKernel = "sdpa"

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_heads", "num_kv_heads", "ffn_hidden_size"):
            check_positive(name, getattr(self, name))
        check_word("activation", self.activation, get_args(Activation))
        check_word("norm", self.norm, get_args(Norm))
        check_word("attention", self.attention, get_args(AttentionKernel))
        for name in ("dropout", "attention_dropout"):
            if not 0 <= (rate := getattr(self, name)) < 1:
                raise ValueError(f"{name}={rate}: a dropout rate is at least 0 and below 1")
        check_divides("num_heads", self.num_heads, "hidden_size", self.hidden_size)
        check_divides("num_kv_heads", self.num_kv_heads, "num_heads", self.num_heads)

    @property
    def head_size(self) -> int:
        """Channels of one head, d = h/a."""
        return self.hidden_size // self.num_heads


class TransformerBlock(nn.Module):
    """Pre-norm attention and MLP, each with dropout on its way back to the residual stream.

    Args:
        config: sizes and choices of the block.
    """

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.attn_norm = make_norm(config)
        self.attn = Attention(config)
        self.mlp_norm = make_norm(config)
        self.mlp = MLP(config)
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Hidden states (b, s, h) in, (b, s, h) out; `rotary` as `rotary_tables` makes it, or None."""
        attended = x + self.dropout(self.attn(self.attn_norm(x), rotary))
        y: Tensor = attended + self.dropout(self.mlp(self.mlp_norm(attended)))
        return y


def tensor_parallel_plan(config: BlockConfig) -> dict[str, str]:
    """How tensor-parallel ranks share a block (Shoeybi et al. 2019, arXiv 1909.08053, section 3), by its own names."""
    inputs = {f"attn.{name}": "colwise" for name in ("q_proj", "k_proj", "v_proj")} | {"mlp.up_proj": "colwise"}
    gate = {"mlp.gate_proj": "colwise"} if config.activation == "swiglu" else {}
    return inputs | gate | {"attn.o_proj": "rowwise", "mlp.down_proj": "rowwise"}


class Attention(nn.Module):
    """Causal self-attention with separate q, k and v projections; fewer key-value than query heads make it grouped.

    Args:
        config: sizes and choices of the block.
    """

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.head_size = config.head_size
        kv_size = config.num_kv_heads * config.head_size
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=config.bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=config.bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=config.bias)
        self.core_attn = CoreAttention(config.attention, config.attention_dropout)
        self.o_proj = EndOfBranch(config.hidden_size, config.hidden_size, bias=config.bias)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Hidden states (b, s, h) in, (b, s, h) out."""
        # -1, not the number of heads: under tensor parallelism a rank sees only its own
        q = self.q_proj(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2)  # (b, a, s, d)
        k = self.k_proj(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2)  # (b, k, s, d)
        v = self.v_proj(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2)  # (b, k, s, d)
        if rotary is not None:
            q, k = rotate(q, *rotary), rotate(k, *rotary)
        attended = self.core_attn(q, k, v)  # (b, a, s, d)
        y: Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))  # (b, s, h)
        return y


class CoreAttention(nn.Module):
    """softmax(q kᵀ / √d) v under a causal mask: the part of attention without parameters.

    Args:
        kernel: `eager` keeps the (s, s) probabilities of every head, as the paper counts; `sdpa` is torch's fused
            kernel, which keeps one number per row and head. With dropout on a CPU torch's sdpa is not fused.
        dropout: rate at which probabilities are dropped.
    """

    def __init__(self, kernel: AttentionKernel = "sdpa", dropout: float = 0.0) -> None:
        super().__init__()
        self.kernel = kernel
        self.dropout = Dropout(dropout)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Queries (b, a, s, d), keys and values (b, k, s, d) in, (b, a, s, d) out; a is a multiple of k."""
        b, num_heads, s, d = q.shape
        num_kv_heads = k.shape[1]
        if self.kernel == "sdpa":
            rate = self.dropout.p if self.training else 0.0
            grouped = num_heads != num_kv_heads
            return F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True, enable_gqa=grouped)
        # The query heads that share a key head are stacked as its rows, so that keys and values are never repeated.
        q = (q / math.sqrt(d)).reshape(b, num_kv_heads, -1, d)  # (b, k, s·a/k, d)
        scores = (q @ k.transpose(-2, -1)).view(b, num_heads, s, s)
        scores = scores + torch.full((s, s), -torch.inf, dtype=scores.dtype, device=scores.device).triu(1)
        probabilities: Tensor = self.dropout(scores.softmax(-1))
        return (probabilities.view(b, num_kv_heads, -1, s) @ v).view(b, num_heads, s, d)

    def extra_repr(self) -> str:
        """The kernel, for `print(model)`."""
        return f"kernel={self.kernel!r}"


class MLP(nn.Module):
    """Two linears around a GELU, or SwiGLU with its third (Shazeer 2020, arXiv 2002.05202, equation 6).

    Args:
        config: sizes and choices of the block.
    """

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        h, f, gated = config.hidden_size, config.ffn_hidden_size, config.activation == "swiglu"
        self.gate_proj = nn.Linear(h, f, bias=config.bias) if gated else None
        self.up_proj = nn.Linear(h, f, bias=config.bias)
        self.act = SwiGLU() if gated else nn.GELU(approximate="tanh")
        self.down_proj = EndOfBranch(f, h, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states (b, s, h) in, (b, s, h) out."""
        up = self.up_proj(x)  # (b, s, f)
        inner = self.act(up) if self.gate_proj is None else self.act(self.gate_proj(x), up)
        y: Tensor = self.down_proj(inner)
        return y


class EndOfBranch(nn.Linear):
    """The linear that leads back to the residual stream: its weights start smaller (Radford et al. 2019, 2.3)."""


class SwiGLU(nn.Module):
    """silu(gate) · up, element by element."""

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        """Two tensors of one shape in, the same shape out."""
        return F.silu(gate) * up


class Dropout(nn.Dropout):
    """Dropout whose mask takes one byte an element on every device (`F.dropout` on a CPU keeps one as wide as x)."""

    def forward(self, x: Tensor) -> Tensor:
        """Any shape in, the same out; draws from the device's default generator."""
        return torch.native_dropout(x, self.p, train=True)[0] if self.training and self.p > 0 else x


def make_norm(config: BlockConfig) -> nn.Module:
    """The norm over h that `config.norm` names."""
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.hidden_size, eps=1e-5)  # its own default would be 0.008 in bfloat16
    return nn.LayerNorm(config.hidden_size, bias=config.bias)


def rotary_tables(length: int, head_size: int, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rotary positions (Su et al. 2021, arXiv 2104.09864, equation 34).

    Args:
        length: number of positions s.
        head_size: channels of a head d, even.
        device: where the tables are made.

    Returns:
        Two float32 tensors of shape (s, d): the angle of channel i is that of channel i + d/2. Float32 whatever the
        precision of the model, because 16 bit cannot tell far positions apart.
    """
    frequencies = 10000.0 ** (-torch.arange(0, head_size, 2, device=device, dtype=torch.float32) / head_size)
    angles = torch.arange(length, device=device)[:, None] * frequencies.repeat(2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair of channels (i, i + d/2) of x (..., s, d) by the angle of its position."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


def check_positive(name: str, number: int) -> None:
    """Raise ValueError unless `number` is at least 1."""
    if number < 1:
        raise ValueError(f"{name}={number}: at least 1 is due")


def check_word(name: str, word: str, allowed: tuple[str, ...]) -> None:
    """Raise ValueError unless `word` is one of `allowed`."""
    if word not in allowed:
        raise ValueError(f"{name}={word!r} is unknown; choose one of {', '.join(map(repr, allowed))}")


def check_divides(name: str, divisor: int, whole_name: str, whole: int) -> None:
    """Raise ValueError unless `divisor` divides `whole`; the message names the nearest that does."""
    if whole % divisor:
        nearest = min((n for n in range(1, whole + 1) if whole % n == 0), key=lambda n: abs(n - divisor))
        raise ValueError(f"{name}={divisor} does not divide {whole_name}={whole}; the nearest that does is {nearest}")
