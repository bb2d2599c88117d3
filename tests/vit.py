"""A vision transformer built the way timm builds its own: fused qkv, LayerScale, DropPath, a `grad_checkpointing` flag.

Small and written anew, so that tests have the structure and the attribute names without the library.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class DropPath(nn.Module):
    """Drops the residual branch of whole samples and scales the others up (stochastic depth)."""

    def __init__(self, drop_prob: float = 0.0) -> None:
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x: Tensor) -> Tensor:
        if self.drop_prob == 0.0 or not self.training:
            return x
        keep = 1.0 - self.drop_prob
        mask = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(keep)
        return x * mask.div_(keep)


class LayerScale(nn.Module):
    """A learned factor for each channel of a residual branch."""

    def __init__(self, dim: int, init_values: float = 1e-5) -> None:
        super().__init__()
        self.gamma = nn.Parameter(init_values * torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class Mlp(nn.Module):
    def __init__(self, dim: int, hidden: int, drop: float = 0.0) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.act = nn.GELU()
        self.drop1 = nn.Dropout(drop)
        self.norm = nn.Identity()
        self.fc2 = nn.Linear(hidden, dim)
        self.drop2 = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop1(self.act(self.fc1(x)))
        y: Tensor = self.drop2(self.fc2(self.norm(x)))
        return y


class Attention(nn.Module):
    """Self-attention over one fused projection; `fused_attn` chooses torch's kernel or the formula written out."""

    def __init__(
        self, dim: int, num_heads: int, qk_norm: bool = False, drop: float = 0.0, fused_attn: bool = True
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.scale = self.head_dim**-0.5
        self.fused_attn = fused_attn
        self.qkv = nn.Linear(dim, dim * 3)
        self.q_norm = nn.LayerNorm(self.head_dim) if qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(self.head_dim) if qk_norm else nn.Identity()
        self.attn_drop = nn.Dropout(drop)
        self.norm = nn.Identity()
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, dim = x.shape
        qkv = self.qkv(x).reshape(rows, length, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)  # (rows, heads, length, head_dim) each
        q, k = self.q_norm(q), self.k_norm(k)
        if self.fused_attn:
            x = F.scaled_dot_product_attention(q, k, v, dropout_p=self.attn_drop.p if self.training else 0.0)
        else:
            weights = (q * self.scale @ k.transpose(-2, -1)).softmax(dim=-1)
            x = self.attn_drop(weights) @ v
        x = self.norm(x.transpose(1, 2).reshape(rows, length, dim))
        y: Tensor = self.proj_drop(self.proj(x))
        return y


class Block(nn.Module):
    def __init__(
        self,
        dim: int,
        num_heads: int,
        mlp_ratio: float = 4.0,
        qk_norm: bool = False,
        drop: float = 0.0,
        init_values: float | None = None,
        drop_path: float = 0.0,
        fused_attn: bool = True,
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = Attention(dim, num_heads, qk_norm, drop, fused_attn)
        self.ls1 = nn.Identity() if init_values is None else LayerScale(dim, init_values)
        self.drop_path1 = DropPath(drop_path) if drop_path > 0.0 else nn.Identity()
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = Mlp(dim, int(dim * mlp_ratio), drop)
        self.ls2 = nn.Identity() if init_values is None else LayerScale(dim, init_values)
        self.drop_path2 = DropPath(drop_path) if drop_path > 0.0 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x))))
        y: Tensor = x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))
        return y


class PatchEmbed(nn.Module):
    def __init__(self, img_size: int, patch_size: int, in_chans: int, dim: int) -> None:
        super().__init__()
        self.num_patches = (img_size // patch_size) ** 2
        self.proj = nn.Conv2d(in_chans, dim, kernel_size=patch_size, stride=patch_size)

    def forward(self, x: Tensor) -> Tensor:
        tokens: Tensor = self.proj(x).flatten(2).transpose(1, 2)  # (rows, patches, dim)
        return tokens


class VisionTransformer(nn.Module):
    """Classifier of images (rows, in_chans, img_size, img_size).

    Args:
        drop_path_rate: Rate at the last block; it grows linearly from 0 at the first, as stochastic depth does.
        init_values: Start of LayerScale; None leaves it out.
    """

    def __init__(
        self,
        img_size: int = 16,
        patch_size: int = 4,
        in_chans: int = 3,
        num_classes: int = 5,
        embed_dim: int = 32,
        depth: int = 4,
        num_heads: int = 4,
        mlp_ratio: float = 4.0,
        qk_norm: bool = False,
        drop_rate: float = 0.1,
        drop_path_rate: float = 0.2,
        init_values: float | None = 0.1,
        fused_attn: bool = True,
    ) -> None:
        super().__init__()
        self.grad_checkpointing = False
        self.patch_embed = PatchEmbed(img_size, patch_size, in_chans, embed_dim)
        self.cls_token = nn.Parameter(torch.randn(1, 1, embed_dim) * 0.02)
        self.pos_embed = nn.Parameter(torch.randn(1, 1 + self.patch_embed.num_patches, embed_dim) * 0.02)
        self.pos_drop = nn.Dropout(drop_rate)
        rates = torch.linspace(0, drop_path_rate, depth).tolist()
        self.blocks = nn.Sequential(
            *(
                Block(embed_dim, num_heads, mlp_ratio, qk_norm, drop_rate, init_values, rate, fused_attn)
                for rate in rates
            )
        )
        self.norm = nn.LayerNorm(embed_dim, eps=1e-6)
        self.head = nn.Linear(embed_dim, num_classes)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Have the model recompute its blocks itself, by torch's checkpoint."""
        self.grad_checkpointing = enable

    def forward_features(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x)
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1)
        x = self.pos_drop(x + self.pos_embed)
        if self.grad_checkpointing:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
        else:
            x = self.blocks(x)
        features: Tensor = self.norm(x)
        return features

    def forward_head(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(x[:, 0])
        return logits

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))


def vit_loss(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The loss on a batch of `pixel_values` and `labels`."""
    return F.cross_entropy(module(batch["pixel_values"]).float(), batch["labels"])
