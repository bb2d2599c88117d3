"""Plans of tensor parallelism: where they come from, what they name, what is refused before anything changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import transformers
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel

from lightning_recompute.gpt import GPT
from lightning_recompute.tensor_plan import STYLES, check_sizes, find_plan

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def gpt(**options: Any) -> GPT:
    return GPT(**{"num_layers": 2, "hidden_size": 48, "num_heads": 6, "vocab_size": 64} | options)


class Wrapped(nn.Module):
    """A module that holds a model, as LightningModules do."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net


def test_our_gpt_has_a_plan_for_each_of_its_shapes() -> None:
    plain = find_plan(gpt(), None)
    assert plain["position_embedding"] == "replicate_split_output"
    assert plain["blocks.1.attn.k_proj"] == "colwise"
    assert "blocks.0.mlp.gate_proj" not in plain
    other = find_plan(gpt(positions="rotary", activation="swiglu"), None)
    assert other["blocks.0.mlp.gate_proj"] == "colwise"
    assert "position_embedding" not in other


def test_hugging_faces_plan_is_found_inside_of_a_module() -> None:
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))
    plan = find_plan(Wrapped(llama), None)
    assert plan["net.model.layers.1.self_attn.q_proj"] == "colwise"
    assert plan["net.model.layers.0.mlp.down_proj"] == "rowwise"
    assert plan["net.lm_head"] == "colwise_gather_output"
    # a model without a head
    base = find_plan(Wrapped(llama.model), None)
    assert base["net.layers.0.self_attn.o_proj"] == "rowwise"
    assert len(base) == len(plan) - 1


def test_the_argument_comes_first_then_the_method() -> None:
    model = gpt()
    assert find_plan(model, {"head": "colwise"}) == {"head": "colwise"}
    model.tensor_parallel_plan = lambda: {"head": "replicate"}  # type: ignore[method-assign]
    assert find_plan(model, None) == {"head": "replicate"}


def test_patterns_answer_to_whole_names_and_to_their_ends() -> None:
    model = Wrapped(gpt())
    plan = find_plan(model, {"blocks.*.mlp.up_proj": "colwise", "head": "colwise_rep"})
    assert plan == {
        "net.blocks.0.mlp.up_proj": "colwise",
        "net.blocks.1.mlp.up_proj": "colwise",
        "net.head": "colwise_gather_output",
    }


def test_torchs_own_styles_are_taken() -> None:
    style = ColwiseParallel()
    assert find_plan(gpt(), {"head": style}) == {"head": style}


@pytest.mark.parametrize(
    ("plan", "error", "told"),
    [
        ({"blocks.*.mlp.up": "colwise"}, ValueError, "no module answers to 'blocks.*.mlp.up'"),
        ({"head": "colwize"}, ValueError, "did you mean 'colwise'"),
        ({"head": "colwise", "*.head": "colwise", "hea*": "rowwise"}, ValueError, "no module answers"),
        ({"mlp.up_proj": "colwise", "blocks.*.mlp.up_proj": "rowwise"}, ValueError, "has two styles"),
        ({}, ValueError, "is empty"),
        (["head"], TypeError, "a mapping of name patterns"),
    ],
)
def test_plans_that_mean_nothing(plan: Any, error: type[Exception], told: str) -> None:
    with pytest.raises(error) as caught:
        find_plan(gpt(), plan)
    assert told in str(caught.value)


def test_a_model_without_a_plan_is_told_how_to_write_one() -> None:
    with pytest.raises(ValueError, match="does not say how it is divided") as caught:
        find_plan(Wrapped(transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4))), None)
    assert "def tensor_parallel_plan(self)" in str(caught.value)
    assert all(style in str(caught.value) for style in STYLES)


@pytest.mark.parametrize(
    ("options", "size", "told"),
    [
        ({}, 4, "blocks.0.attn.q_proj has 6 heads of 8, which tensor_parallel_size=4 does not divide"),
        ({"num_kv_heads": 3}, 2, "blocks.0.attn.k_proj has 3 heads of 8"),
        ({"vocab_size": 65}, 2, "token_embedding has 65 entries of the vocabulary"),
        ({"ffn_hidden_size": 1000}, 3, "blocks.0.mlp.up_proj has 1000 outputs"),
    ],
)
def test_sizes_that_do_not_divide(options: Mapping[str, Any], size: int, told: str) -> None:
    """Case 47: the module, the number and the sizes that would do."""
    model = gpt(**{"vocab_size": 48} | options)
    with pytest.raises(ValueError, match="sizes that do: 1") as caught:
        check_sizes(model, find_plan(model, None), size)
    assert told in str(caught.value)


def test_key_heads_of_hugging_faces() -> None:
    """Case 47: 8 heads, 2 key-value heads, 4 ranks."""
    config = transformers.LlamaConfig(**SMALL | {"num_attention_heads": 8})
    model = transformers.LlamaForCausalLM(config)
    with pytest.raises(ValueError, match=r"k_proj has 2 heads of 4.*sizes that do: 1, 2$"):
        check_sizes(model, find_plan(model, None), 4)


@pytest.mark.parametrize(
    ("module", "style"),
    [(nn.Conv1d(4, 4, 1), "colwise"), (nn.Linear(4, 4), "embedding_rowwise"), (nn.GELU(), "rowwise")],
)
def test_styles_that_do_not_fit_their_module(module: nn.Module, style: str) -> None:
    with pytest.raises(TypeError, match=type(module).__name__):
        check_sizes(Wrapped(module), {"net": style}, 2)


def test_a_latent_projection_needs_its_number() -> None:
    with pytest.raises(ValueError, match="Wrapped around it has no qk_rope_head_dim"):
        check_sizes(Wrapped(nn.Linear(4, 4)), {"net": "mla_kv_a_proj"}, 2)


def test_embeddings_that_cannot_be_divided() -> None:
    with pytest.raises(ValueError, match="max_norm and sparse"):
        check_sizes(Wrapped(nn.Embedding(4, 4, max_norm=1.0, sparse=True)), {"net": "embedding_rowwise"}, 2)
