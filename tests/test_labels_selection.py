"""Choosing parts of a block: patterns, labels inside labels, words that match nothing."""

from __future__ import annotations

import functools

import pytest
import torch
from models import bert, gpt, gpt2, llama
from test_labels import mixtral, qwen3
from torch import nn
from vit import VisionTransformer

from lightning_recompute.blocks import find_blocks
from lightning_recompute.labels import Target, find_targets, unknown_label_message

MODELS = {
    "gpt": lambda: gpt("eager"),
    "llama": lambda: llama("eager"),
    "qwen3": lambda: qwen3("eager"),
    "gpt2": lambda: gpt2("eager"),
    "bert": lambda: bert("eager"),
    "mixtral": lambda: mixtral("eager"),
    "timm": lambda: VisionTransformer(qk_norm=True),
}


@functools.cache
def blocks(model: str) -> dict[str, nn.Module]:
    """Name in the model to block. Nothing here changes them."""
    (found,) = find_blocks(MODELS[model]())
    return dict(zip(found.names, found.blocks, strict=True))


def select(model: str, *modules: str) -> tuple[list[Target], list[str]]:
    name, block = next(iter(blocks(model).items()))
    return find_targets(block, modules, name)


def names(targets: list[Target]) -> list[tuple[str, ...]]:
    return [target.names for target in targets]


# --- patterns


@pytest.mark.parametrize(
    ("model", "pattern", "expected"),
    [
        ("llama", "*.mlp", ["mlp"]),
        ("llama", "*mlp*", ["mlp"]),  # the outermost only
        ("llama", "mlp.*", ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "mlp.act_fn"]),
        ("llama", "*.up_proj", ["mlp.up_proj"]),
        ("llama", "model.layers.0.self_attn", ["self_attn"]),
        ("llama", "model.layers.*.mlp.up_proj", ["mlp.up_proj"]),
        ("llama", "self_attn.[qk]_proj", ["self_attn.q_proj", "self_attn.k_proj"]),
        ("llama", "input_layernor?", ["input_layernorm"]),
        ("llama", "*.MLP", []),  # names are case-sensitive
        ("llama", "model.layers.1.mlp", []),  # another block
        ("mixtral", "*.mlp.experts", ["mlp.experts"]),
        ("timm", "*ls?", ["ls1", "ls2"]),
    ],
)
def test_patterns_match_names_in_the_block_and_in_the_model(model: str, pattern: str, expected: list[str]) -> None:
    targets, notes = select(model, pattern)
    assert targets == [Target(pattern, (name,)) for name in expected]
    assert notes == []


def test_a_prefix_may_end_in_a_dot() -> None:
    block = blocks("llama")["model.layers.0"]
    assert names(find_targets(block, ["model.layers.0.mlp"], "model.layers.0.")[0]) == [("mlp",)]
    assert find_targets(block, ["model.layers.0.mlp"])[0] == []
    assert names(find_targets(block, ["ml?"])[0]) == [("mlp",)]


@pytest.mark.parametrize("pattern", ["*", "model.*", "model.layers.0", "*layers*"])
def test_a_pattern_for_blocks_says_nothing_about_their_parts(pattern: str) -> None:
    """A name of the block's own is in every name below it; only what the pattern says about the inside counts."""
    targets, _ = select("llama", pattern)
    inside = ["self_attn", "mlp", "input_layernorm", "post_attention_layernorm"]
    assert names(targets) == ([(name,) for name in inside] if pattern == "*" else [])


def test_a_pattern_in_a_model_whose_lists_have_such_a_name() -> None:
    block = blocks("llama")["model.layers.0"]
    targets, _ = find_targets(block, ["*attn*"], "model.attn_layers.0")
    assert names(targets) == [("self_attn",)]


class Listed(nn.Module):
    """A block with its parts in lists."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([nn.Linear(4, 4), nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Tanh()})])
        self.attention = nn.MultiheadAttention(4, 2)


def test_containers_are_never_called_so_their_members_are_taken() -> None:
    targets, notes = find_targets(Listed(), ["branch*"])
    assert names(targets) == [("branches.0",), ("branches.1.a",), ("branches.1.b",)]
    assert notes == ["branch*: branches only holds modules; its 3 members are taken one by one"]


def test_modules_whose_owner_only_reads_their_weights() -> None:
    targets, notes = find_targets(Listed(), ["*.out_proj"])
    assert targets == []
    assert len(notes) == 1
    assert "nn.MultiheadAttention reads its weights" in notes[0]


def test_a_compiled_block_is_matched_by_its_plain_names() -> None:
    block = torch.compile(nn.TransformerEncoderLayer(8, 2))
    assert isinstance(block, nn.Module)
    targets, _ = find_targets(block, ["norm?", "layers.0.linear1"], "layers.0")
    assert names(targets) == [("_orig_mod.norm1",), ("_orig_mod.norm2",), ("_orig_mod.linear1",)]


# --- activations that are no module of their own


def inline(*linears: str, **parts: nn.Module) -> nn.Module:
    """A block whose forward calls all functions itself."""
    block = nn.Module()
    for name in linears:
        block.add_module(name, nn.Linear(4, 4))
    for name, part in parts.items():
        block.add_module(name, part)
    return block


@pytest.mark.parametrize(
    ("block", "offered"),
    [
        (inline("linear", norm=nn.LayerNorm(4)), True),
        (inline("linear", attention=nn.MultiheadAttention(4, 2)), True),
        (inline("q", "k", "v", "o", "up", "down"), True),
        (inline("q", "k", "v", "o"), False),
        (inline(attention=nn.MultiheadAttention(4, 2), norm=nn.LayerNorm(4)), False),
        (inline(norm=nn.LayerNorm(4)), False),
    ],
)
def test_functions_are_looked_for_where_a_matrix_is_no_attentions(block: nn.Module, offered: bool) -> None:
    targets, notes = find_targets(block, ["act"])
    assert targets == ([Target("act", ("",), how="nodes")] if offered else [])
    assert notes == []


def test_a_unit_that_is_no_whole_block_leaves_functions_outside() -> None:
    block = inline("linear", "q", "k", "v", "o", "down")
    assert names(find_targets(block, ["*linear", "act"])[0]) == [("linear",), ("",)]
    targets, notes = find_targets(block, ["attn", "act"])
    assert targets == [Target("attn", ("",))]
    assert notes == ["act lies inside attn: recomputed with it"]


# --- one inside the other


@pytest.mark.parametrize(
    ("model", "modules", "kept", "notes"),
    [
        ("gpt", ("attn", "core_attn"), ["attn"], ["core_attn lies inside attn: recomputed with it"]),
        ("gpt", ("core_attn", "attn"), ["attn"], ["core_attn lies inside attn: recomputed with it"]),
        ("llama", ("core_attn", "attn"), ["self_attn"], ["core_attn lies inside attn: recomputed with it"]),
        ("llama", ("mlp", "act"), ["mlp"], ["act lies inside mlp: recomputed with it"]),
        ("gpt2", ("act", "mlp"), ["mlp"], ["act lies inside mlp: recomputed with it"]),
        ("mixtral", ("act", "moe"), ["mlp"], ["act lies inside moe: recomputed with it"]),
        (
            "qwen3",
            ("norm", "attn"),
            ["input_layernorm", "post_attention_layernorm", "self_attn"],
            ["norm (self_attn.q_norm, self_attn.k_norm) lies inside attn: recomputed with it"],
        ),
        (
            "bert",
            ("mlp", "norm"),
            ["intermediate + output", "attention.output.LayerNorm"],
            ["norm (output.LayerNorm) lies inside mlp: recomputed with it"],
        ),
        (
            "bert",
            ("attn", "mlp", "norm"),
            ["attention", "intermediate + output"],
            [
                "norm (attention.output.LayerNorm) lies inside attn: recomputed with it",
                "norm (output.LayerNorm) lies inside mlp: recomputed with it",
            ],
        ),
        ("bert", ("mlp", "*output.dense"), ["intermediate + output", "attention.output.dense"], None),
        ("llama", ("mlp", "*.up_proj"), ["mlp"], ["*.up_proj lies inside mlp: recomputed with it"]),
        ("llama", ("attn", "*.self_attn"), ["self_attn"], ["*.self_attn lies inside attn: recomputed with it"]),
        ("llama", ("*.self_attn", "attn"), ["self_attn"], ["attn lies inside *.self_attn: recomputed with it"]),
        ("llama", ("norm", "core_attn"), ["input_layernorm", "post_attention_layernorm", "self_attn"], []),
        ("timm", ("attn", "act"), ["attn", "activation functions and gated products"], []),
    ],
)
def test_nested_targets_resolve_to_the_outermost(
    model: str, modules: tuple[str, ...], kept: list[str], notes: list[str] | None
) -> None:
    targets, said = select(model, *modules)
    assert sorted(str(target).removesuffix(" (the functions it calls)") for target in targets) == sorted(kept)
    assert said == (["*output.dense (output.dense) lies inside mlp: recomputed with it"] if notes is None else notes)


def test_the_order_of_the_words_does_not_change_what_is_kept() -> None:
    words = ["core_attn", "attn", "mlp", "norm", "act", "*.q_proj", "*_norm"]
    forwards, backwards = select("qwen3", *words)[0], select("qwen3", *reversed(words))[0]
    assert set(forwards) == set(backwards)


def test_a_method_of_the_block_contains_the_modules_it_runs() -> None:
    block = nn.TransformerEncoderLayer(8, 2, activation=nn.GELU())
    targets, notes = find_targets(block, ["mlp", "linear*", "act", "norm", "core_attn"])
    assert targets[0] == Target("mlp", ("",), "_ff_block")
    assert names(targets[1:]) == [("norm1",), ("norm2",), ("self_attn",)]
    assert notes == ["linear* lies inside mlp: recomputed with it", "act lies inside mlp: recomputed with it"]


class Shared(nn.Module):
    """A block that uses one norm and one activation twice."""

    def __init__(self) -> None:
        super().__init__()
        norm, act = nn.LayerNorm(4), nn.Mish()
        self.norm1, self.norm2 = norm, norm
        self.act1, self.act2 = act, act
        self.mlp = nn.Sequential(nn.Linear(4, 8), act, nn.Linear(8, 4))


def test_shared_modules_appear_once() -> None:
    targets, _ = find_targets(Shared(), ["norm", "act"])
    assert names(targets) == [("norm1",), ("act1",), ("",)]


# --- words that match nothing


def test_an_unknown_word_is_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown label 'atn'.*did you mean 'attn'"):
        select("llama", "atn")


def test_a_label_that_no_block_has_lists_what_there_is() -> None:
    message = unknown_label_message(["moe"], blocks("llama"))
    assert message.splitlines() == [
        "modules: nothing in the 4 block(s) (LlamaDecoderLayer) answers to 'moe'",
        "these blocks have:",
        "  core_attn: self_attn (the functions it calls)",
        "  attn: self_attn",
        "  mlp: mlp",
        "  norm: input_layernorm, post_attention_layernorm",
        "  act: activation functions and gated products",
        "  moe: nothing",
    ]


@pytest.mark.parametrize(
    ("pattern", "nearest"),
    [
        ("*.mpl", "mlp"),
        ("*.mlp.up_porj", "mlp.up_proj"),
        ("layers.0.self_attention", "self_attn"),
        ("model.layers.*.mlp.gate", "mlp.gate_proj"),
    ],
)
def test_a_pattern_that_matches_nothing_names_the_nearest(pattern: str, nearest: str) -> None:
    assert select("llama", pattern)[0] == []
    lines = unknown_label_message([pattern], blocks("llama")).splitlines()
    (line,) = [line for line in lines if line.startswith(f"names nearest to {pattern!r}: ")]
    assert nearest in line.partition(": ")[2].split(", ")


def test_a_pattern_that_names_whole_blocks_is_told_what_to_set() -> None:
    message = unknown_label_message(["model.layers.*"], blocks("llama"))
    assert "'model.layers.*' names whole blocks (model.layers.0, model.layers.1, " in message
    assert "granularity='full'" in message


def test_a_pattern_nothing_like_any_name_lists_names() -> None:
    message = unknown_label_message(["*zzzzzz*"], blocks("llama"))
    assert "names nearest to '*zzzzzz*': self_attn, self_attn.q_proj, " in message
