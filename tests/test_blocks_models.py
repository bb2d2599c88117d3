"""Finding the blocks of models from transformers and torch, and that those are the blocks the forward calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from messages import containing
from torch import nn

from lightning_recompute.blocks import find_blocks

WORDS = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
KV = {**WORDS, **SIZES, "num_key_value_heads": 2}
IMAGES = {"image_size": 16, "patch_size": 4}
TEXT_TOWER = {**WORDS, **SIZES, "max_position_embeddings": 16}
IMAGE_TOWER = {**SIZES, **IMAGES, "num_hidden_layers": 4}
STAGES = {"hidden_sizes": [8, 16, 24, 32], "depths": [2, 1, 3, 2]}
SWIN = {
    "image_size": 32,
    "patch_size": 2,
    "window_size": 4,
    "embed_dim": 16,
    "depths": [2, 1, 3],
    "num_heads": [2, 4, 4],
}


def seq2seq(encoder: int, decoder: int) -> dict[str, Any]:
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "decoder_start_token_id": 1}
    sizes = {"d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 16}
    return {**WORDS, **heads, **sizes, "encoder_layers": encoder, "decoder_layers": decoder}


def of(architecture: str, options: dict[str, Any], **more: Any) -> Callable[..., nn.Module]:
    """Builds `<family>For<Task>` from `<family>Config`, by default without memory for its weights."""
    family = architecture.partition("For")[0].removesuffix("Model").removesuffix("LMHead").removesuffix("MT")

    def build(device: str = "meta") -> nn.Module:
        config = getattr(transformers, f"{family}Config")(**{**options, **more})
        with torch.device(device):
            module: nn.Module = getattr(transformers, architecture)(config)
        return module

    return build


def pair(architecture: str, first: Any, second: Any) -> Callable[..., nn.Module]:
    config = getattr(transformers, architecture.removesuffix("Model") + "Config")
    return lambda: getattr(transformers, architecture)(config.from_encoder_decoder_configs(first, second))


def gpt2_config() -> transformers.GPT2Config:
    return transformers.GPT2Config(**WORDS, n_embd=32, n_layer=5, n_head=4, n_positions=16)


MODELS: dict[str, tuple[Callable[..., nn.Module], list[str]]] = {
    "llama": (of("LlamaForCausalLM", KV), ["model.layers (3 x LlamaDecoderLayer)"]),
    "gpt2": (of("GPT2LMHeadModel", gpt2_config().to_dict()), ["transformer.h (5 x GPT2Block)"]),
    "bert": (of("BertForMaskedLM", {**WORDS, **SIZES}), ["bert.encoder.layer (3 x BertLayer)"]),
    "vit": (of("ViTForImageClassification", {**SIZES, **IMAGES}), ["vit.layers (3 x ViTLayer)"]),
    "mixtral": (of("MixtralForCausalLM", KV, num_local_experts=4), ["model.layers (3 x MixtralDecoderLayer)"]),
    "qwen2-moe": (
        of("Qwen2MoeForCausalLM", KV, num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=16),
        ["model.layers (3 x Qwen2MoeDecoderLayer)"],
    ),
    "switch": (
        of(
            "SwitchTransformersForConditionalGeneration",
            WORDS,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_heads=4,
            num_experts=4,
            num_layers=4,
            num_decoder_layers=2,
            num_sparse_encoder_layers=2,
            num_sparse_decoder_layers=1,
        ),
        ["encoder.block (4 x SwitchTransformersBlock)", "decoder.block (2 x SwitchTransformersBlock)"],
    ),
    "mamba": (
        of("MambaForCausalLM", WORDS, hidden_size=32, num_hidden_layers=3, state_size=4),
        ["backbone.layers (3 x MambaBlock)"],
    ),
    "t5": (
        of("T5ForConditionalGeneration", WORDS, d_model=32, d_kv=8, d_ff=48, num_layers=4, num_decoder_layers=3),
        ["encoder.block (4 x T5Block)", "decoder.block (3 x T5Block)"],
    ),
    "bart": (
        of("BartForConditionalGeneration", seq2seq(2, 5)),
        ["model.encoder.layers (2 x BartEncoderLayer)", "model.decoder.layers (5 x BartDecoderLayer)"],
    ),
    # a deep encoder and a shallow decoder
    "marian": (
        of("MarianMTModel", seq2seq(6, 1)),
        ["model.encoder.layers (6 x MarianEncoderLayer)", "model.decoder.layers (1 x MarianDecoderLayer)"],
    ),
    "whisper": (
        of(
            "WhisperForConditionalGeneration",
            seq2seq(2, 3),
            num_mel_bins=8,
            max_source_positions=16,
            max_target_positions=16,
        ),
        ["model.encoder.layers (2 x WhisperEncoderLayer)", "model.decoder.layers (3 x WhisperDecoderLayer)"],
    ),
    "bert and gpt2": (
        pair("EncoderDecoderModel", transformers.BertConfig(**WORDS, **SIZES), gpt2_config()),
        ["encoder.encoder.layer (3 x BertLayer)", "decoder.transformer.h (5 x GPT2Block)"],
    ),
    "vit and gpt2": (
        pair("VisionEncoderDecoderModel", transformers.ViTConfig(**SIZES, **IMAGES), gpt2_config()),
        ["encoder.layers (3 x ViTLayer)", "decoder.transformer.h (5 x GPT2Block)"],
    ),
    "clip": (
        of("CLIPModel", {"text_config": TEXT_TOWER, "vision_config": IMAGE_TOWER}),
        ["text_model.encoder.layers (3 x CLIPEncoderLayer)", "vision_model.encoder.layers (4 x CLIPEncoderLayer)"],
    ),
    # one layer called several times, and groups of layers
    "albert": (
        of("AlbertForMaskedLM", {**WORDS, **SIZES}, embedding_size=16),
        ["albert.encoder.albert_layer_groups (1 x AlbertLayerGroup)"],
    ),
    "swin": (
        of("SwinForImageClassification", SWIN),
        [f"swin.encoder.layers.{i}.blocks ({depth} x SwinLayer)" for i, depth in enumerate([2, 1, 3])],
    ),
    "convnext": (
        of("ConvNextForImageClassification", STAGES),
        [f"convnext.encoder.stages.{i}.layers ({depth} x ConvNextLayer)" for i, depth in enumerate([2, 1, 3, 2])],
    ),
    # the residual blocks, not the convolutions in them; the early stages have few parameters and the most activations
    "resnet-bottleneck": (
        of("ResNetForImageClassification", STAGES),
        [f"resnet.encoder.stages.{i}.layers ({depth} x ResNetBottleNeckLayer)" for i, depth in enumerate([2, 1, 3, 2])],
    ),
    "resnet-basic": (
        of("ResNetForImageClassification", STAGES, layer_type="basic"),
        [f"resnet.encoder.stages.{i}.layers ({depth} x ResNetBasicLayer)" for i, depth in enumerate([2, 1, 3, 2])],
    ),
    "torch encoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 3),
        ["layers (3 x TransformerEncoderLayer)"],
    ),
    "torch transformer": (
        lambda: nn.Transformer(16, 2, 2, 3, 32, batch_first=True),
        ["encoder.layers (2 x TransformerEncoderLayer)", "decoder.layers (3 x TransformerDecoderLayer)"],
    ),
    "torch encoders in a list": (
        lambda: nn.ModuleList(
            nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), depth) for depth in (2, 3)
        ),
        ["0.layers (2 x TransformerEncoderLayer)", "1.layers (3 x TransformerEncoderLayer)"],
    ),
}


@pytest.mark.parametrize(("build", "due"), MODELS.values(), ids=MODELS)
def test_found(build: Callable[..., nn.Module], due: list[str]) -> None:
    module = build()
    assert [str(block_list) for block_list in find_blocks(module)] == due
    for name in {type(block).__name__ for block_list in find_blocks(module) for block in block_list.blocks}:
        assert any(name in str(block_list) for block_list in find_blocks(module, name))


def test_layers_of_two_classes_in_turn_are_named_by_the_user() -> None:
    options = {"num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4}
    module = of("JambaForCausalLM", {**KV, "num_hidden_layers": 4}, **options)()
    kinds = "model.layers (2 x JambaMambaDecoderLayer, 2 x JambaAttentionDecoderLayer)"
    with pytest.raises(ValueError, match=containing("no list of blocks", kinds, "blocks='path.of.the.list'")):
        find_blocks(module)
    assert [str(block_list) for block_list in find_blocks(module, "model.layers")] == [kinds]


@pytest.mark.parametrize("name", ["llama", "albert", "swin", "whisper", "resnet-basic"])
def test_those_are_the_blocks_that_run(name: str) -> None:
    """Each block found is called in forward, one after the other as listed."""
    module = MODELS[name][0]("cpu").eval()
    blocks = [block for block_list in find_blocks(module) for block in block_list.blocks]
    calls: list[nn.Module] = []
    for block in blocks:
        block.register_forward_pre_hook(lambda block, args: calls.append(block))
    inputs: dict[str, dict[str, Any]] = {
        "swin": {"pixel_values": torch.zeros(1, 3, 32, 32)},
        "resnet-basic": {"pixel_values": torch.zeros(1, 3, 32, 32)},
        "whisper": {"input_features": torch.zeros(1, 8, 32), "decoder_input_ids": torch.ones(1, 4, dtype=torch.long)},
    }
    with torch.no_grad():
        module(**inputs.get(name, {"input_ids": torch.ones(1, 4, dtype=torch.long)}))
    assert list(dict.fromkeys(calls)) == blocks
