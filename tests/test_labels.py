"""Labels on the models of the field: what answers to each, checked against what really runs in the block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from models import LENGTH, MODELS, ROWS, VOCABULARY, WIDTH, ModelCase, images, output_loss, padded_text, tokens
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from vit import VisionTransformer, vit_loss

from lightning_recompute.blocks import find_blocks
from lightning_recompute.labels import Target, available_labels, find_targets, unknown_label_message

NODES = "activation functions and gated products"


# --- further models


def qwen3(attention: str) -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        pad_token_id=0,
        attn_implementation=attention,
    )
    return Qwen3ForCausalLM(config)


def mixtral(attention: str) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        pad_token_id=0,
        attn_implementation=attention,
    )
    return MixtralForCausalLM(config)


def bart(attention: str, **options: Any) -> nn.Module:
    from transformers import BartConfig, BartForConditionalGeneration

    config = BartConfig(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_position_embeddings=LENGTH + 2,
        pad_token_id=0,
        attn_implementation=attention,
        **options,
    )
    return BartForConditionalGeneration(config)


def whisper(attention: str) -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        num_mel_bins=8,
        max_source_positions=6,
        max_target_positions=LENGTH,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        attn_implementation=attention,
    )
    return WhisperForConditionalGeneration(config)


def speech() -> dict[str, Tensor]:
    return {"input_features": torch.randn(ROWS, 8, 12), "labels": tokens()}


class Seq2Seq(nn.Module):
    """torch's own decoder layers, with a memory made of the same tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerDecoderLayer(WIDTH, 4, 48, batch_first=True, activation="gelu")
        self.decoder = nn.TransformerDecoder(layer, 2)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        output: Tensor = self.decoder(hidden, hidden.flip(1))
        return output


def seq2seq_loss(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = module(batch["input_ids"]).square().mean()
    return loss


def by_attention(build: Callable[[str], nn.Module], batch: Callable[[], Any]) -> dict[str, ModelCase]:
    return {
        f"{build.__name__}-{kind}": ModelCase(lambda kind=kind: build(kind).train(), batch, output_loss, (2,))
        for kind in ("eager", "sdpa")
    }


CASES = {
    **MODELS,
    **by_attention(qwen3, padded_text),
    **by_attention(mixtral, padded_text),
    **by_attention(bart, padded_text),
    **by_attention(whisper, speech),
    "timm-sdpa": ModelCase(lambda: VisionTransformer(qk_norm=True), images, vit_loss, (4,)),
    "timm-eager": ModelCase(lambda: VisionTransformer(fused_attn=False), images, vit_loss, (4,)),
    "decoder": ModelCase(Seq2Seq, padded_text, seq2seq_loss, (2,)),
}


def blocks_of(case: str) -> list[tuple[str, nn.Module]]:
    """The first block of each list of a model, with its name."""
    return [(found.names[0], found.blocks[0]) for found in find_blocks(CASES[case].build())]


# --- what answers to each label

FLAT = "fc1 + activation_fn + fc2"
LLAMA = {
    "core_attn": ["self_attn (the functions it calls)"],
    "attn": ["self_attn"],
    "mlp": ["mlp"],
    "norm": ["input_layernorm", "post_attention_layernorm"],
    "act": [NODES],
}
TIMM = {"core_attn": ["attn (the functions it calls)"], "attn": ["attn"], "mlp": ["mlp"], "act": [NODES]}
OURS = {**TIMM, "core_attn": ["attn.core_attn"], "norm": ["attn_norm", "mlp_norm"]}
BART = {
    "core_attn": ["self_attn (the functions it calls)"],
    "attn": ["self_attn"],
    "mlp": [FLAT],
    "norm": ["self_attn_layer_norm", "final_layer_norm"],
    "act": [NODES],
}
BART_DECODER = {
    **BART,
    "core_attn": ["self_attn (the functions it calls)", "encoder_attn (the functions it calls)"],
    "attn": ["self_attn", "encoder_attn"],
    "norm": ["self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm"],
}
EXPECTED: dict[str, list[dict[str, list[str]]]] = {
    "gpt-eager": [OURS],
    "gpt-rotary-gqa-swiglu": [OURS],
    "llama-eager": [LLAMA],
    "qwen3-eager": [{**LLAMA, "norm": ["self_attn.q_norm", "self_attn.k_norm", *LLAMA["norm"]]}],
    "mixtral-eager": [{**{key: LLAMA[key] for key in ("core_attn", "attn", "norm", "act")}, "moe": ["mlp"]}],
    "gpt2-eager": [{**TIMM, "norm": ["ln_1", "ln_2"], "act": ["mlp.act", NODES]}],
    "bert-eager": [
        {
            "core_attn": ["attention.self (the functions it calls)"],
            "attn": ["attention"],
            "mlp": ["intermediate + output"],
            "norm": ["attention.output.LayerNorm", "output.LayerNorm"],
            "act": [NODES],
        }
    ],
    "t5-eager": [
        {
            "core_attn": ["layer.0.SelfAttention (the functions it calls)"],
            "attn": ["layer.0.SelfAttention"],
            "mlp": ["layer.1.DenseReluDense"],
            "norm": ["layer.0.layer_norm", "layer.1.layer_norm"],
            "act": [NODES],
        },
        {
            "core_attn": [
                "layer.0.SelfAttention (the functions it calls)",
                "layer.1.EncDecAttention (the functions it calls)",
            ],
            "attn": ["layer.0.SelfAttention", "layer.1.EncDecAttention"],
            "mlp": ["layer.2.DenseReluDense"],
            "norm": ["layer.0.layer_norm", "layer.1.layer_norm", "layer.2.layer_norm"],
            "act": [NODES],
        },
    ],
    "vit-eager": [
        {
            "core_attn": ["attention (the functions it calls)"],
            "attn": ["attention"],
            "mlp": ["mlp"],
            "norm": ["layernorm_before", "layernorm_after"],
            "act": [NODES],
        }
    ],
    "bart-eager": [BART, BART_DECODER],
    "whisper-eager": [BART, BART_DECODER],
    "timm-sdpa": [{**TIMM, "norm": ["norm1", "attn.q_norm", "attn.k_norm", "norm2"]}],
    "timm-eager": [{**TIMM, "norm": ["norm1", "norm2"]}],
    "encoder-pre-norm": [
        {
            "core_attn": ["self_attn (the functions it calls)"],
            "attn": ["self_attn"],
            "mlp": ["_ff_block of the block itself"],
            "norm": ["norm1", "norm2"],
            "act": [NODES],
        }
    ],
    "decoder": [
        {
            "core_attn": ["self_attn (the functions it calls)", "multihead_attn (the functions it calls)"],
            "attn": ["self_attn", "multihead_attn"],
            "mlp": ["_ff_block of the block itself"],
            "norm": ["norm1", "norm2", "norm3"],
            "act": [NODES],
        }
    ],
}


@pytest.mark.parametrize("case", EXPECTED)
def test_what_answers_to_each_label(case: str) -> None:
    for (name, block), expected in zip(blocks_of(case), EXPECTED[case], strict=True):
        found = available_labels(block)
        assert {label: [*map(str, targets)] for label, targets in found.items()} == {
            label: expected[label] for label in ("core_attn", "attn", "mlp", "norm", "act", "moe") if label in expected
        }, name
        for label, targets in found.items():  # one label alone leaves nothing out
            assert find_targets(block, [label], name) == (targets, [])


def test_how_each_label_is_recomputed() -> None:
    ((_, block),) = blocks_of("gpt2-eager")
    found = available_labels(block)
    assert [(t.how, t.names) for t in found["act"]] == [("output", ("mlp.act",)), ("nodes", ("",))]
    assert {t.how for t in found["norm"]} == {"output"}
    assert {t.how for t in [*found["attn"], *found["mlp"]]} == {"unit"}
    assert found["core_attn"] == [Target("core_attn", ("attn",), how="tape")]
    ((_, ours),) = blocks_of("gpt-eager")
    assert available_labels(ours)["core_attn"] == [Target("core_attn", ("attn.core_attn",))]


# --- the same, by what runs


class Calls(TorchFunctionMode):
    """Which torch function is called inside which modules of a block; the innermost stands last."""

    def __init__(self, block: nn.Module) -> None:
        self.block = block
        self.stack: list[str] = []
        self.seen: list[tuple[str, tuple[str, ...]]] = []
        self.values: dict[str, tuple[Any, Any]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.stack:
            self.seen.append((getattr(func, "__name__", ""), tuple(self.stack)))
        return func(*args, **(kwargs or {}))

    @contextmanager
    def listening(self) -> Iterator[None]:
        handles = []
        for name, module in self.block.named_modules():
            handles.append(module.register_forward_pre_hook(lambda _m, _a, name=name: self.stack.append(name)))
            handles.append(module.register_forward_hook(lambda _m, a, y, name=name: self._leave(name, a, y)))
        with self:
            yield
        for handle in handles:
            handle.remove()

    def _leave(self, name: str, args: Any, output: Any) -> None:
        assert self.stack.pop() == name
        self.values[name] = (args[0] if args else None, output)

    def callers(self, *functions: str) -> set[str]:
        return {stack[-1] for name, stack in self.seen if name in functions}

    def stacks(self, *functions: str) -> list[tuple[str, ...]]:
        return [stack for name, stack in self.seen if name in functions]


def names_of(targets: list[Target]) -> set[str]:
    return {name for target in targets for name in target.names}


@pytest.mark.parametrize("case", CASES)
def test_labels_name_what_runs(case: str) -> None:
    """Attention, matrix products and norms of a block are called where its labels say, and nowhere else."""
    module = CASES[case].build()
    torch.manual_seed(5)
    batch = CASES[case].batch()
    for block_list in find_blocks(module):
        block = block_list.blocks[0]
        calls = Calls(block)
        with calls.listening():
            CASES[case].loss(module, batch)
        found = {label: available_labels(block).get(label, []) for label in ("core_attn", "attn", "mlp", "norm", "moe")}
        mixtures = names_of(found["moe"])

        attention = ("softmax", "scaled_dot_product_attention", "multi_head_attention_forward")
        callers = {stack[-1] for stack in calls.stacks(*attention) if not mixtures & {*stack}}
        assert callers == names_of(found["core_attn"])

        assert calls.callers("layer_norm", "rms_norm", "rsqrt") == names_of(found["norm"])

        whole = names_of(found["attn"]) | mixtures
        for target in found["mlp"]:
            whole |= {"linear1", "linear2"} if target.attribute == "_ff_block" else {*target.names}
        products = calls.stacks("linear", "addmm", "grouped_mm", "_grouped_mm", "multi_head_attention_forward")
        assert products
        assert all(whole & {*stack} for stack in products)
        assert all(any(name in stack for stack in products) for target in found["mlp"] for name in target.names[:1])


@pytest.mark.parametrize("case", ["bert-eager", "bart-eager", "whisper-sdpa"])
def test_modules_of_one_unit_are_called_one_right_after_the_other(case: str) -> None:
    module = CASES[case].build()
    torch.manual_seed(5)
    batch = CASES[case].batch()
    for block_list in find_blocks(module):
        block = block_list.blocks[0]
        calls = Calls(block)
        with calls.listening():
            CASES[case].loss(module, batch)
        (target,) = available_labels(block)["mlp"]
        assert len(target.names) > 1
        for name, following in zip(target.names, target.names[1:], strict=False):
            assert calls.values[following][0] is calls.values[name][1]


def test_a_dropout_function_inside_a_flat_feed_forward() -> None:
    """BART's activation dropout is a function between its modules: no unit, and the note says why."""
    (encoder, decoder) = find_blocks(bart("eager", activation_dropout=0.1))
    for block in (encoder.blocks[0], decoder.blocks[0]):
        assert "mlp" not in available_labels(block)
        targets, notes = find_targets(block, ["mlp", "norm"])
        assert {target.label for target in targets} == {"norm"}
        assert len(notes) == 1
        assert notes[0].startswith("mlp: fc1 and fc2 are no unit")
        assert "activation_dropout=0.1" in notes[0]
    blocks = dict(zip(encoder.names, encoder.blocks, strict=True))
    assert "activation_dropout=0.1" in unknown_label_message(["mlp"], blocks)
