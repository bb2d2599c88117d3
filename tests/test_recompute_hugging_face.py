"""Hugging Face models as people train them: caches, generation, collected outputs, LayerDrop, shared layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import LENGTH, MODELS, VOCABULARY, WIDTH, Batch, output_loss, padded_text
from parity import FULL, PAIRS, assert_parity, block_modules, never_silent, observe, seeded
from plans import PLANS
from torch import Tensor, nn

from lightning_recompute.policy import RecomputePolicy
from lightning_recompute.recompute import RecomputeError, apply_recompute

UNITS = pytest.mark.parametrize("policy", [FULL, PAIRS], ids=["unit-1", "unit-2"])
CACHED = ["llama-eager", "gpt2-sdpa", "t5-eager"]


def batch_of(model: str) -> Batch:
    torch.manual_seed(7)
    return MODELS[model].batch()


def train(batch: Batch, **more: Any) -> Any:
    def run(module: nn.Module) -> Tensor:
        loss: Tensor = module(**batch, **more).loss
        loss.backward()
        return loss

    return run


@pytest.mark.parametrize("model", CACHED)
@pytest.mark.parametrize("how", ["config", "argument", "off"])
def test_training_with_and_without_a_cache(model: str, how: str) -> None:
    """`use_cache` left at its default, asked for, and off: the numbers of the same setting without recompute."""

    def build() -> nn.Module:
        module = MODELS[model].build()
        module.config.use_cache = how != "off"
        return module

    more = {"use_cache": True} if how == "argument" else {}
    for plan in ("uniform-1",) if how == "off" else ("uniform-2", "every-other", "keep-first"):
        module = assert_parity(build, train(batch_of(model), **more), PLANS[plan](MODELS[model].chunks))
        assert module.config.use_cache == (how != "off")


@UNITS
@pytest.mark.parametrize("model", CACHED)
def test_generation_between_and_after_training_uses_the_cache(model: str, policy: RecomputePolicy) -> None:
    batch = batch_of(model)

    def generate(module: nn.Module) -> Tensor:
        module.eval()
        prompt = {name: batch[name][:, :5] for name in ("input_ids", "attention_mask")}
        ids: Tensor = module.generate(**prompt, max_new_tokens=4, do_sample=False, pad_token_id=0)
        module.train()
        return ids

    def run(module: nn.Module) -> list[Tensor]:
        first = train(batch)(module)
        # after the prompt a decoder with a cache sees one position at a time
        lengths: list[int] = []
        last = block_modules(module)[-1]
        handle = last.register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
        ids = generate(module)
        handle.remove()
        assert lengths[1:] == [1] * 3
        return [first, ids, train(batch)(module)]

    due = observe(seeded(MODELS[model].build), run)
    module = seeded(MODELS[model].build)
    with apply_recompute(module, policy):
        found = observe(module, run)
    assert torch.equal(found.result[1], due.result[1])
    assert torch.equal(generate(module), generate(module))


@UNITS
@pytest.mark.parametrize("positional", [False, True])
def test_a_filled_cache_is_refused_or_right(policy: RecomputePolicy, positional: bool) -> None:
    """Continuing from keys and values of a prompt: a replay must not append to them once more."""
    from transformers import DynamicCache

    model = "gpt2-sdpa" if positional else "llama-eager"
    batch = batch_of(model)

    def run(module: nn.Module) -> Tensor:
        with torch.no_grad():
            module.eval()
            cache = module(batch["input_ids"][:, :4], use_cache=True, cache=DynamicCache()).cache
            module.train()
        loss: Tensor = module(
            input_ids=batch["input_ids"][:, 4:], labels=batch["labels"][:, 4:], cache=cache, use_cache=True
        ).loss
        loss.backward()
        return loss

    error = never_silent(MODELS[model].build, run, policy, RecomputeError)
    assert error is None or "use_cache=False" in str(error)


@UNITS
@pytest.mark.parametrize("model", ["llama-eager", "bert-eager", "t5-eager", "vit-eager"])
def test_collected_hidden_states_and_attentions(model: str, policy: RecomputePolicy) -> None:
    """The model gathers them in hooks inside its blocks; a replay must not gather them again."""

    def run(module: nn.Module) -> list[Tensor]:
        output = module(**batch_of(model), output_hidden_states=True, output_attentions=True)
        names = [name for name in output if "hidden_states" in name or "attentions" in name]
        assert names
        gathered = [tensor for name in names for tensor in output[name]]
        loss = output.loss + sum(tensor.float().square().mean() for tensor in gathered)
        loss.backward()
        return [loss, *gathered, *(tensor for name in names for tensor in output[name])]

    assert_parity(MODELS[model].build, run, policy)


# --- other architectures


def opt() -> nn.Module:
    from transformers import OPTConfig, OPTForCausalLM

    return OPTForCausalLM(
        OPTConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            ffn_dim=48,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=LENGTH,
            word_embed_proj_dim=WIDTH,
            layerdrop=0.4,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            use_cache=False,
        )
    ).train()


@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_layer_drop(num_layers: int) -> None:
    """OPT draws before each layer whether to run it."""

    def run(module: nn.Module) -> list[Tensor]:
        return [train(batch_of("gpt2-sdpa"))(module) for _ in range(6)]

    errors = () if num_layers == 1 else RecomputeError
    never_silent(opt, run, RecomputePolicy(num_layers=num_layers), errors)


def albert() -> nn.Module:
    from transformers import AlbertConfig, AlbertForMaskedLM

    return AlbertForMaskedLM(
        AlbertConfig(
            vocab_size=VOCABULARY,
            embedding_size=16,
            hidden_size=WIDTH,
            intermediate_size=48,
            num_hidden_layers=6,
            num_attention_heads=4,
            inner_group_num=2,
            max_position_embeddings=LENGTH,
            hidden_dropout_prob=0.1,
            attention_probs_dropout_prob=0.1,
        )
    ).train()


@UNITS
def test_layers_that_run_several_times(policy: RecomputePolicy) -> None:
    run = train(batch_of("bert-eager"))
    assert_parity(albert, run, policy, blocks="AlbertLayer", calls=[12, 12])
    assert_parity(albert, run, blocks="AlbertLayerGroup", calls=[12])


def captioner() -> nn.Module:
    from transformers import GPT2Config, VisionEncoderDecoderConfig, VisionEncoderDecoderModel, ViTConfig

    vit = ViTConfig(
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        image_size=16,
        patch_size=4,
        hidden_dropout_prob=0.1,
    )
    gpt2 = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=WIDTH,
        n_layer=6,
        n_head=4,
        bos_token_id=1,
        eos_token_id=2,
        is_decoder=True,
        add_cross_attention=True,
        use_cache=False,
    )
    model = VisionEncoderDecoderModel(VisionEncoderDecoderConfig.from_encoder_decoder_configs(vit, gpt2))
    model.config.decoder_start_token_id, model.config.pad_token_id = 1, 0
    return model.train()


@pytest.mark.parametrize("plan", ["uniform-2", "uniform-all", "block-some", "every-other"])
def test_a_vision_encoder_with_a_text_decoder(plan: str) -> None:
    torch.manual_seed(7)
    batch = {"pixel_values": torch.randn(3, 3, 16, 16), "labels": padded_text()["labels"]}
    assert_parity(captioner, lambda module: _loss_step(module, batch), PLANS[plan]([4, 6]))


def _loss_step(module: nn.Module, batch: Batch) -> Tensor:
    loss = output_loss(module, batch)
    loss.backward()
    return loss


def test_a_frozen_encoder_is_not_run_again() -> None:
    torch.manual_seed(7)
    batch = {"pixel_values": torch.randn(3, 3, 16, 16), "labels": padded_text()["labels"]}

    def build() -> nn.Module:
        model = captioner()
        model.get_submodule("encoder").requires_grad_(False)
        return model

    module = assert_parity(build, lambda module: _loss_step(module, batch), FULL, calls=[1] * 4 + [2] * 6)
    with apply_recompute(module, FULL) as handle:
        assert [(block_list.name, len(block_list)) for block_list in handle.block_lists] == [
            ("encoder.layers", 4),
            ("decoder.transformer.h", 6),
        ]
