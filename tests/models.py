"""Tiny models by name, as users have them: our GPT, Hugging Face architectures, nn.TransformerEncoder.

Each comes with a batch maker and a loss. Dropout is on in train mode and, where the architecture takes one, a
padding mask is used. Hugging Face models are built in code from random weights; nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 64
WIDTH = 32
LENGTH = 12
ROWS = 3

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class ModelCase:
    """A model to train one step.

    Args:
        build: The module in train mode; weights follow the global seed.
        batch: A batch; values follow the global seed.
        loss: The scalar loss of a module on a batch.
        chunks: Number of blocks in each block list, in forward order.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    chunks: tuple[int, ...]


def tokens() -> Tensor:
    """(ROWS, LENGTH) token ids; 0 is left to padding."""
    return torch.randint(1, VOCABULARY, (ROWS, LENGTH))


def padding_mask() -> Tensor:
    """(ROWS, LENGTH), 1 for a token and 0 for padding at the end; every row has another length."""
    lengths = torch.tensor([LENGTH, LENGTH - 3, LENGTH - 5])
    return (torch.arange(LENGTH) < lengths[:, None]).long()


def padded_text(labelled: str = "all") -> Batch:
    """Token ids, their padding mask and labels that leave out the padding (and, for "some", most tokens)."""
    ids, mask = tokens(), padding_mask()
    keep = mask.bool() if labelled == "all" else mask.bool() & (torch.rand(ROWS, LENGTH) < 0.3)
    keep[:, 0] = True
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": torch.where(keep, ids, -100)}


def output_loss(module: nn.Module, batch: Batch) -> Tensor:
    """The loss a Hugging Face model computes itself when it is given labels."""
    loss = module(**batch).loss
    assert isinstance(loss, Tensor)
    return loss


# --- our GPT


def gpt(attention: Literal["eager", "sdpa"], dropout: float = 0.1, **options: Any) -> nn.Module:
    from lightning_recompute.gpt import GPT

    return GPT(
        vocab_size=VOCABULARY,
        num_layers=4,
        num_heads=4,
        hidden_size=WIDTH,
        max_length=LENGTH,
        dropout=dropout,
        attention=attention,
        **options,
    )


def gpt_loss(module: nn.Module, batch: Batch) -> Tensor:
    logits = module(batch["ids"][:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), batch["ids"][:, 1:].flatten())


# --- Hugging Face


def llama(attention: str) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=48,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            attention_dropout=0.1,
            pad_token_id=0,
            attn_implementation=attention,
        )
    )


def gpt2(attention: str) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=LENGTH,
            n_embd=WIDTH,
            n_layer=4,
            n_head=4,
            bos_token_id=1,
            eos_token_id=2,
            attn_implementation=attention,
        )
    )


def bert(attention: str) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=48,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=LENGTH,
            attn_implementation=attention,
        )
    )


def t5(attention: str) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY,
            d_model=WIDTH,
            d_kv=8,
            d_ff=48,
            num_layers=4,
            num_decoder_layers=3,
            num_heads=4,
            decoder_start_token_id=0,
            pad_token_id=0,
            attn_implementation=attention,
        )
    )


def vit(attention: str) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=WIDTH,
            intermediate_size=48,
            num_hidden_layers=4,
            num_attention_heads=4,
            image_size=16,
            patch_size=4,
            num_labels=5,
            hidden_dropout_prob=0.1,
            attention_probs_dropout_prob=0.1,
            attn_implementation=attention,
        )
    )


def images() -> Batch:
    return {"pixel_values": torch.randn(ROWS, 3, 16, 16), "labels": torch.randint(5, (ROWS,))}


# --- torch's own encoder


class Encoder(nn.Module):
    """Token classifier on nn.TransformerEncoder."""

    def __init__(self, *, norm_first: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 48, dropout=0.1, batch_first=True, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        hidden = self.encoder(self.embedding(ids), src_key_padding_mask=mask == 0)
        logits: Tensor = self.head(hidden)
        return logits


def encoder_loss(module: nn.Module, batch: Batch) -> Tensor:
    logits = module(batch["input_ids"], batch["attention_mask"])
    return F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten())


def _hugging_face(build: Callable[[str], nn.Module], batch: Callable[[], Batch], *chunks: int) -> dict[str, ModelCase]:
    return {
        f"{build.__name__}-{attention}": ModelCase(
            lambda attention=attention: build(attention).train(), batch, output_loss, chunks
        )
        for attention in ("eager", "sdpa")
    }


def _gpt(build: Callable[[], nn.Module]) -> ModelCase:
    return ModelCase(build, lambda: {"ids": tokens()}, gpt_loss, (4,))


MODELS: dict[str, ModelCase] = {
    "gpt-eager": _gpt(lambda: gpt("eager")),
    "gpt-sdpa": _gpt(lambda: gpt("sdpa")),
    "gpt-rotary-gqa-swiglu": _gpt(
        lambda: gpt("sdpa", positions="rotary", activation="swiglu", norm="rmsnorm", num_kv_heads=2, tied_head=False)
    ),
    **_hugging_face(llama, padded_text, 4),
    **_hugging_face(gpt2, padded_text, 4),
    **_hugging_face(bert, lambda: padded_text("some"), 4),
    **_hugging_face(t5, padded_text, 4, 3),
    **_hugging_face(vit, images, 4),
    "encoder-pre-norm": ModelCase(lambda: Encoder(norm_first=True), padded_text, encoder_loss, (4,)),
    "encoder-post-norm": ModelCase(lambda: Encoder(norm_first=False), padded_text, encoder_loss, (4,)),
}
