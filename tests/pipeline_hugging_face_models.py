"""Tiny Hugging Face models for pipelines, as a user's LightningModule holds them: double precision, no dropout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensor_hugging_face as few
import torch
import transformers as hf
from models import LENGTH, VOCABULARY, WIDTH
from torch import Tensor, nn

ROWS = 8
Batch = dict[str, Tensor]

SPECIAL: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": VOCABULARY}
ENCODER: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
DECODER = SPECIAL | ENCODER | {"max_position_embeddings": 32}
GROUPED = DECODER | {"num_key_value_heads": 2}
TEXT = SPECIAL | ENCODER | {"max_position_embeddings": 32}
PICTURE: dict[str, Any] = {"image_size": 16, "patch_size": 4, "num_labels": 5}
EXPERTS: dict[str, Any] = few.EXPERTS | {"experts_implementation": "eager"}
LATENT: dict[str, Any] = few.LATENT | {"first_k_dense_replace": 1, "experts_implementation": "eager"}


def causal(rows: int) -> Batch:
    """Rows of other lengths, padded at the end."""
    ids = torch.randint(3, VOCABULARY, (rows, LENGTH))
    mask = (torch.arange(LENGTH) < torch.randint(4, LENGTH + 1, (rows, 1))).long()
    ids = ids * mask
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def prompted(rows: int) -> Batch:
    """Nothing is padded; the first tokens are given."""
    ids = torch.randint(3, VOCABULARY, (rows, LENGTH))
    given = torch.arange(LENGTH) < torch.randint(1, 6, (rows, 1))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.masked_fill(given, -100)}


def padded_in_front(rows: int) -> Batch:
    """As for generation, with the positions that follow from it."""
    batch = {name: value.flip(1) for name, value in causal(rows).items()}
    return batch | {"position_ids": (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)}


def masked(rows: int) -> Batch:
    """Some tokens are to be guessed."""
    batch = causal(rows)
    labels = batch["labels"].masked_fill(torch.rand(rows, LENGTH) < 0.6, -100)
    labels[:, 0] = batch["input_ids"][:, 0]
    return batch | {"labels": labels}


def two_segments(rows: int) -> Batch:
    segments = (torch.arange(LENGTH) > torch.randint(2, 8, (rows, 1))).long()
    return masked(rows) | {"token_type_ids": segments}


def classes(rows: int) -> Batch:
    return causal(rows) | {"labels": torch.randint(3, (rows,))}


def spans(rows: int) -> Batch:
    batch = causal(rows)
    del batch["labels"]
    return batch | {"start_positions": torch.randint(4, (rows,)), "end_positions": torch.randint(4, (rows,))}


def images(rows: int, size: int = 16) -> Batch:
    pixels = torch.randn(rows, 3, size, size, dtype=torch.float64)
    return {"pixel_values": pixels, "labels": torch.randint(5, (rows,))}


def sounds(rows: int) -> Batch:
    mask = (torch.arange(400) < torch.randint(300, 401, (rows, 1))).long()
    values = torch.randn(rows, 400, dtype=torch.float64) * mask
    return {"input_values": values, "attention_mask": mask, "labels": torch.randint(5, (rows,))}


@dataclass(frozen=True)
class Case:
    """A model and what it is trained on.

    Args:
        build: The model; values follow the global seed.
        batch: A batch of so many rows; values follow the global seed.
        blocks: Where its blocks are, if they are not found.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    blocks: str | None = None


def model(
    name: str, sizes: dict[str, Any], head: str = "ForCausalLM", config: str = "", **options: Any
) -> Callable[[], nn.Module]:
    """Builds a model by the name of its architecture."""

    def build() -> nn.Module:
        made: nn.Module = getattr(hf, name + head)(getattr(hf, (config or name) + "Config")(**(sizes | options)))
        return made

    return build


CASES: dict[str, Case] = {
    "gpt2": Case(
        model(
            "GPT2",
            SPECIAL,
            "LMHeadModel",
            n_embd=WIDTH,
            n_layer=4,
            n_head=4,
            n_positions=32,
            resid_pdrop=0,
            embd_pdrop=0,
            attn_pdrop=0,
        ),
        padded_in_front,
    ),
    "gpt_neox": Case(model("GPTNeoX", DECODER), causal),
    "gptj": Case(
        model("GPTJ", SPECIAL, n_embd=WIDTH, n_layer=4, n_head=4, n_positions=32, rotary_dim=4, resid_pdrop=0),
        padded_in_front,
    ),
    "opt": Case(model("OPT", DECODER, ffn_dim=48, word_embed_proj_dim=16, dropout=0), causal),
    "bloom": Case(model("Bloom", SPECIAL, hidden_size=WIDTH, n_layer=4, n_head=4), causal),
    "llama": Case(model("Llama", GROUPED), padded_in_front),
    "mistral": Case(model("Mistral", GROUPED, sliding_window=4), causal),
    "qwen2": Case(model("Qwen2", GROUPED), causal),
    "qwen3": Case(model("Qwen3", GROUPED, head_dim=8, tie_word_embeddings=True), causal),
    "gemma2": Case(model("Gemma2", GROUPED, head_dim=8, sliding_window=4), prompted),
    "gemma3": Case(model("Gemma3", GROUPED, config="Gemma3Text", head_dim=8, sliding_window=4), prompted),
    "phi3": Case(model("Phi3", GROUPED), causal),
    "olmo2": Case(model("Olmo2", GROUPED), causal),
    "falcon": Case(model("Falcon", DECODER, alibi=True), causal),
    "stablelm": Case(model("StableLm", GROUPED), causal),
    "granite": Case(model("Granite", GROUPED, residual_multiplier=0.5, logits_scaling=2.0), causal),
    "mixtral": Case(model("Mixtral", GROUPED | EXPERTS), causal),
    "jamba": Case(
        model("Jamba", GROUPED | EXPERTS, attn_layer_period=2, attn_layer_offset=1, use_mamba_kernels=False),
        prompted,
        "model.model.layers",
    ),
    "deepseek_v2": Case(model("DeepseekV2", DECODER | LATENT), causal),
    "deepseek_v3": Case(model("DeepseekV3", DECODER | LATENT), causal),
    "bert": Case(model("Bert", TEXT, "ForMaskedLM"), two_segments),
    "roberta": Case(model("Roberta", TEXT, "ForSequenceClassification", num_labels=3), classes),
    "distilbert": Case(
        model("DistilBert", SPECIAL, "ForQuestionAnswering", dim=WIDTH, n_layers=4, n_heads=4, hidden_dim=48), spans
    ),
    "electra": Case(model("Electra", TEXT, "ForMaskedLM", embedding_size=16), two_segments),
    "vit": Case(model("ViT", ENCODER | PICTURE, "ForImageClassification"), images),
    "swin": Case(
        model(
            "Swin",
            {},
            "ForImageClassification",
            image_size=32,
            patch_size=2,
            embed_dim=8,
            depths=[1, 2, 1, 1],
            num_heads=[1, 2, 2, 4],
            window_size=2,
            num_labels=5,
        ),
        lambda rows: images(rows, 32),
        "model.swin.encoder.layers",
    ),
    "dinov2": Case(model("Dinov2", ENCODER | PICTURE, "ForImageClassification"), images),
    "wav2vec2": Case(
        model(
            "Wav2Vec2",
            ENCODER,
            "ForSequenceClassification",
            conv_dim=[8, 8],
            conv_kernel=[8, 4],
            conv_stride=[8, 4],
            num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=2,
            num_feat_extract_layers=2,
            num_labels=5,
            classifier_proj_size=16,
            apply_spec_augment=False,
            layerdrop=0.0,
            feat_extract_norm="layer",
        ),
        sounds,
    ),
}


LONGER: dict[str, Case] = {
    f"{name}-8": Case(model(kind, sizes, head, num_hidden_layers=8, **options), batch)
    for name, kind, sizes, head, options, batch in (
        ("llama", "Llama", GROUPED, "ForCausalLM", {}, padded_in_front),
        ("qwen3", "Qwen3", GROUPED, "ForCausalLM", {"head_dim": 8, "tie_word_embeddings": True}, causal),
        ("bert", "Bert", TEXT, "ForMaskedLM", {}, two_segments),
    )
}
SEVERAL: dict[str, Any] = {"d_model": WIDTH, "decoder_start_token_id": 0} | {
    f"{part}_{what}": number
    for part in ("encoder", "decoder")
    for what, number in (("layers", 4), ("attention_heads", 4), ("ffn_dim", 48))
}
REFUSED: dict[str, Case] = {
    "t5": Case(
        model("T5", SPECIAL, "ForConditionalGeneration", d_model=WIDTH, d_kv=8, d_ff=48, num_layers=4, num_heads=4),
        causal,
    ),
    "t5-encoder": Case(
        model("T5", SPECIAL, "ForTokenClassification", d_model=WIDTH, d_kv=8, d_ff=48, num_heads=4, num_labels=64),
        causal,
    ),
    "bart": Case(model("Bart", SPECIAL | SEVERAL, "ForConditionalGeneration"), causal),
    "whisper": Case(model("Whisper", SPECIAL | SEVERAL, "ForConditionalGeneration", num_mel_bins=8), causal),
    "albert": Case(model("Albert", TEXT, "ForMaskedLM", embedding_size=16), two_segments),
    "albert-layers": Case(
        model("Albert", TEXT, "ForMaskedLM", embedding_size=16, inner_group_num=2), two_segments, "AlbertLayer"
    ),
    "deberta": Case(
        model("DebertaV2", TEXT, "ForMaskedLM", relative_attention=True, pos_att_type=["p2c", "c2p"]), masked
    ),
    "mpnet": Case(model("MPNet", TEXT, "ForMaskedLM"), masked),
    "mixtral-routers": Case(model("Mixtral", GROUPED | EXPERTS, output_router_logits=True), causal),
}
