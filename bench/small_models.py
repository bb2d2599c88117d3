"""Small models with random weights, by name, each with a batch and a loss: what truth.py trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_recompute.gpt import GPT

VOCABULARY, WIDTH, LENGTH, ROWS, NUM_LAYERS, NUM_HEADS = 512, 128, 128, 2, 6, 4

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Model:
    """What it takes to train a model.

    Attributes:
        build: Makes the module.
        batch: Makes a batch.
        loss: The loss of a module on a batch.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]


def text() -> Batch:
    """Token ids, which are the labels as well."""
    ids = torch.randint(1, VOCABULARY, (ROWS, LENGTH))
    return {"input_ids": ids, "labels": ids.clone()}


def padded_text() -> Batch:
    """The same with a mask of padding."""
    mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
    mask[0, LENGTH // 2 :] = 0
    return {**text(), "attention_mask": mask}


def images() -> Batch:
    """Pixels and classes."""
    return {"pixel_values": torch.randn(2 * ROWS, 3, 64, 64), "labels": torch.randint(10, (2 * ROWS,))}


def own_loss(module: nn.Module, batch: Batch) -> Tensor:
    """What a Hugging Face model computes itself."""
    loss: Tensor = module(**batch).loss
    return loss


def gpt_loss(module: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy of the logits."""
    return F.cross_entropy(module(batch["input_ids"]).flatten(0, 1).float(), batch["labels"].flatten())


def _gpt(attention: str) -> nn.Module:
    return GPT(
        vocab_size=VOCABULARY,
        num_layers=NUM_LAYERS,
        num_heads=NUM_HEADS,
        hidden_size=WIDTH,
        max_length=LENGTH,
        dropout=0.1,
        attention=attention,  # type: ignore[arg-type]  # a literal of the table below
    )


def _llama() -> nn.Module:
    return hf.LlamaForCausalLM(
        hf.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=3 * WIDTH,
            num_hidden_layers=NUM_LAYERS,
            num_attention_heads=NUM_HEADS,
            num_key_value_heads=NUM_HEADS // 2,
            max_position_embeddings=LENGTH,
        )
    )


def _gpt2() -> nn.Module:
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=NUM_LAYERS, n_head=NUM_HEADS, n_positions=LENGTH)
    )


def _bert() -> nn.Module:
    return hf.BertForMaskedLM(
        hf.BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            num_hidden_layers=NUM_LAYERS,
            num_attention_heads=NUM_HEADS,
            intermediate_size=4 * WIDTH,
            max_position_embeddings=LENGTH,
        )
    )


def _vit() -> nn.Module:
    return hf.ViTForImageClassification(
        hf.ViTConfig(
            hidden_size=WIDTH,
            num_hidden_layers=NUM_LAYERS,
            num_attention_heads=NUM_HEADS,
            intermediate_size=4 * WIDTH,
            image_size=64,
            patch_size=8,
            num_labels=10,
        )
    )


def _mixtral() -> nn.Module:
    return hf.MixtralForCausalLM(
        hf.MixtralConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=2 * WIDTH,
            num_hidden_layers=4,
            num_attention_heads=NUM_HEADS,
            num_key_value_heads=NUM_HEADS // 2,
            num_local_experts=4,
            max_position_embeddings=LENGTH,
        )
    )


MODELS = {
    "gpt-eager": Model(lambda: _gpt("eager"), text, gpt_loss),
    "gpt-sdpa": Model(lambda: _gpt("sdpa"), text, gpt_loss),
    "llama": Model(_llama, text, own_loss),
    "gpt2": Model(_gpt2, text, own_loss),
    "bert": Model(_bert, padded_text, own_loss),
    "vit": Model(_vit, images, own_loss),
    "mixtral": Model(_mixtral, text, own_loss),
}
