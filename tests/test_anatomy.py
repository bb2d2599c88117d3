"""Blocks as people write them by hand or as other libraries have them, taken apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import WIDTH
from test_kinds import Adapted, Weighted, named, takes_megatron, takes_qkv
from torch import nn
from toys import Block as FunctionalMlp

from lightning_recompute.labels import available_labels, find_targets

FUNCTIONS = " (the functions it calls)"
NODES = "activation functions and gated products"


def module(kind: str = "Module", **children: nn.Module) -> nn.Module:
    """A module of that class name with those children, in that order."""
    made: nn.Module = named(kind)()
    for name, child in children.items():
        made.add_module(name, child)
    return made


def linear(size_in: int = WIDTH, size_out: int = WIDTH) -> nn.Linear:
    return nn.Linear(size_in, size_out)


def norm() -> nn.LayerNorm:
    return nn.LayerNorm(WIDTH)


def up() -> nn.Linear:
    return nn.Linear(WIDTH, 48)


def down() -> nn.Linear:
    return nn.Linear(48, WIDTH)


def linears(*names: str) -> dict[str, nn.Module]:
    return {name: linear() for name in names}


def mlp() -> nn.Module:
    return module("MLP", c_fc=up(), gelu=nn.GELU(), c_proj=down(), dropout=nn.Dropout())


def attention(kind: str = "CausalSelfAttention") -> nn.Module:
    return module(kind, c_attn=linear(WIDTH, 3 * WIDTH), c_proj=linear(), attn_dropout=nn.Dropout())


def feed_forward_net() -> nn.Sequential:
    return nn.Sequential(norm(), up(), nn.GELU(), nn.Dropout(), down(), nn.Dropout())


def expert() -> nn.Module:
    return module("Expert", w1=up(), w2=down(), w3=up())


def fused_experts() -> nn.Module:
    experts = named("MixtralExperts")()
    experts.gate_up_proj = nn.Parameter(torch.empty(4, 96, WIDTH))
    experts.down_proj = nn.Parameter(torch.empty(4, WIDTH, 48))
    return experts  # type: ignore[no-any-return]


def check(block: nn.Module, **expected: list[str]) -> None:
    """The targets of every label in `expected`; none at all under the other labels but norm and act."""
    found = {label: [*map(str, targets)] for label, targets in available_labels(block).items()}
    assert {label: found.get(label, []) for label in ("core_attn", "attn", "mlp", "moe", *expected)} == {
        "core_attn": [],
        "attn": [],
        "mlp": [],
        "moe": [],
        **expected,
    }


# --- attention and feed-forward of well-known code


def test_nano_gpt() -> None:
    block = module(ln_1=norm(), attn=attention(), ln_2=norm(), mlp=mlp())
    check(block, core_attn=["attn" + FUNCTIONS], attn=["attn"], mlp=["mlp"], norm=["ln_1", "ln_2"], act=[NODES])


def test_min_gpt_keeps_its_mlp_in_a_dict() -> None:
    """`m.c_proj(m.act(m.c_fc(x)))` in the block's forward: a chain of modules, not in the order of the dict."""
    parts = {"c_fc": up(), "c_proj": down(), "act": module("NewGELU"), "dropout": nn.Dropout()}
    block = module(ln_1=norm(), attn=attention(), ln_2=norm(), mlp=nn.ModuleDict(parts))
    check(block, core_attn=["attn" + FUNCTIONS], attn=["attn"], mlp=["mlp.c_fc + mlp.act + mlp.c_proj"])


def test_attention_of_several_heads_that_are_modules() -> None:
    heads = nn.ModuleList([module("Head", **linears("key", "query", "value")) for _ in range(2)])
    sa = module("MultiHeadAttention", heads=heads, proj=linear())
    feed_forward = module("FeedFoward", net=nn.Sequential(up(), nn.ReLU(), down(), nn.Dropout()))
    check(
        module(sa=sa, ffwd=feed_forward, ln1=norm(), ln2=norm()),
        core_attn=["sa.heads.0" + FUNCTIONS, "sa.heads.1" + FUNCTIONS],
        attn=["sa"],
        mlp=["ffwd"],
    )


def test_lucidrains() -> None:
    attn = module("Attention", norm=norm(), attend=nn.Softmax(-1), to_qkv=linear(), to_out=nn.Sequential(linear()))
    block = nn.ModuleList([attn, module("FeedForward", net=feed_forward_net())])
    check(
        module(layers=block),
        core_attn=["layers.0" + FUNCTIONS],
        attn=["layers.0"],
        mlp=["layers.1"],
        norm=["layers.0.norm", "layers.1.net.0"],
    )


def test_lucidrains_with_wrappers_and_its_own_core() -> None:
    attn = module("Attention", to_q=linear(), to_kv=linear(), attend=named("Attend", forward=takes_qkv)())
    attn.add_module("to_out", linear())
    fn = module("FeedForward", net=nn.Sequential(up(), module("GEGLU"), down()))
    block = module(
        attn=module("Residual", fn=module("PreNorm", norm=norm(), fn=attn)),
        ff=module("Residual", fn=module("PreNorm", norm=norm(), fn=fn)),
    )
    check(block, core_attn=["attn.fn.fn.attend"], attn=["attn.fn.fn"], mlp=["ff.fn.fn"], act=[NODES])


def test_annotated_transformer() -> None:
    attn = module("MultiHeadedAttention", linears=nn.ModuleList([linear() for _ in range(4)]), dropout=nn.Dropout())
    sublayer = nn.ModuleList([module("SublayerConnection", norm=norm(), dropout=nn.Dropout()) for _ in range(2)])
    block = module(self_attn=attn, feed_forward=module(w_1=up(), w_2=down()), sublayer=sublayer)
    check(block, core_attn=["self_attn" + FUNCTIONS], attn=["self_attn"], mlp=["feed_forward"])


def test_megatron_core() -> None:
    def parallel(kind: str, size_in: int, size_out: int) -> nn.Module:
        return named(kind, Weighted)(input_size=size_in, output_size=size_out)  # type: ignore[no-any-return]

    attn = module(
        "SelfAttention",
        core_attention=named("DotProductAttention", forward=takes_megatron)(),
        linear_proj=parallel("RowParallelLinear", WIDTH, WIDTH),
        linear_qkv=parallel("ColumnParallelLinear", WIDTH, 3 * WIDTH),
    )
    dense = module(
        "MLP",
        linear_fc1=parallel("ColumnParallelLinear", WIDTH, 48),
        linear_fc2=parallel("RowParallelLinear", 48, WIDTH),
    )
    block = module("TransformerLayer", input_layernorm=norm(), self_attention=attn, pre_mlp_layernorm=norm(), mlp=dense)
    check(
        block,
        core_attn=["self_attention.core_attention"],
        attn=["self_attention"],
        mlp=["mlp"],
        norm=["input_layernorm", "pre_mlp_layernorm"],
    )


def test_transformer_engine_fuses_norms_into_linears() -> None:
    attn = module(
        "MultiheadAttention",
        layernorm_qkv=named("LayerNormLinear", Weighted)(),
        core_attention=named("DotProductAttention", forward=takes_qkv)(),
        proj=named("Linear", Weighted)(),
    )
    dense = named("LayerNormMLP")()
    dense.fc1_weight, dense.fc2_weight = nn.Parameter(torch.empty(48, WIDTH)), nn.Parameter(torch.empty(WIDTH, 48))
    block = module("TransformerLayer", self_attention=attn, layernorm_mlp=dense)
    check(
        block,
        core_attn=["self_attention.core_attention"],
        attn=["self_attention"],
        mlp=["layernorm_mlp"],
        norm=[],
    )


@pytest.mark.parametrize("mlp_kind", ["MLP", "Sequential"])
def test_a_block_that_is_called_attention(mlp_kind: str) -> None:
    """CLIP's ResidualAttentionBlock."""
    dense = mlp() if mlp_kind == "MLP" else nn.Sequential(up(), module("QuickGELU"), down())
    block = module("ResidualAttentionBlock", attn=nn.MultiheadAttention(WIDTH, 4), ln_1=norm(), net=dense, ln_2=norm())
    check(block, core_attn=["attn" + FUNCTIONS], attn=["attn"], mlp=["net"], norm=["ln_1", "ln_2"])


def test_attention_with_a_small_mlp_inside() -> None:
    """Swin v2 makes position biases by one."""
    bias = module("BiasMlp", fc1=nn.Linear(2, 64), act=nn.ReLU(), fc2=nn.Linear(64, 4))
    attn = module("WindowAttention", cpb_mlp=bias, qkv=linear(), proj=linear())
    block = module(attn=attn, mlp=mlp())
    check(block, core_attn=["attn" + FUNCTIONS], attn=["attn"], mlp=["mlp"])


def test_gated_attention() -> None:
    attn = module("AfmoeAttention", **linears("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj"))
    check(module(self_attn=attn, mlp=mlp()), core_attn=["self_attn" + FUNCTIONS], attn=["self_attn"], mlp=["mlp"])


def test_projections_in_a_module_of_their_own() -> None:
    """The functions are called around them."""
    attn = module("Mha", qkv_proj=module(**linears("q", "k", "v")), out=linear())
    check(module(mix=attn), core_attn=["mix" + FUNCTIONS], attn=["mix"])


def test_what_only_has_a_name_like_attention() -> None:
    block = module(
        post_attention_norm=module("GatedNorm", norm=norm(), mlp=module("GateMLP", a=up(), b=down())),
        post_attn_ffn=mlp(),
        attention_dropout=nn.Dropout(),
        attn_out=linear(),
    )
    check(block, mlp=["post_attention_norm.mlp", "post_attn_ffn"])


def test_attention_without_softmax_under_such_a_name() -> None:
    mixer = module("GatedDeltaNet", in_proj_qkvz=linear(), conv1d=nn.Conv1d(4, 4, 3), out_proj=linear())
    check(module(linear_attn=mixer, mlp=mlp()), attn=["linear_attn"], mlp=["mlp"])


def test_a_state_space_mixer_is_no_feed_forward() -> None:
    mixer = module("MambaMixer", in_proj=linear(WIDTH, 96), conv1d=nn.Conv1d(48, 48, 4, groups=48), out_proj=down())
    check(module(mixer=mixer, norm=norm()))


# --- blocks that write things out


def test_a_block_that_projects_itself() -> None:
    """q, k and v in the block: its own forward calls attention, and there is no attention module."""
    flat = {**linears("q", "k", "v", "o"), "fc1": up(), "act": nn.GELU(), "fc2": down()}
    check(module(norm1=norm(), **flat), core_attn=["the block itself" + FUNCTIONS], mlp=["fc1 + act + fc2"])


def test_blocks_that_are_the_part_itself() -> None:
    check(attention(), core_attn=["the block itself" + FUNCTIONS], attn=["the block itself"])
    check(mlp(), mlp=["the block itself"], act=[NODES])
    check(nn.Sequential(up(), nn.GELU(), down()), mlp=["the block itself"])


def test_mlp_mixer() -> None:
    check(
        module("MixerBlock", norm1=norm(), mlp_tokens=mlp(), norm2=norm(), mlp_channels=mlp()),
        mlp=["mlp_tokens", "mlp_channels"],
        norm=["norm1", "norm2"],
    )


def test_convnext() -> None:
    flat = {"pwconv1": up(), "act": nn.GELU(), "pwconv2": down()}
    depthwise = nn.Conv2d(WIDTH, WIDTH, 7, groups=WIDTH)
    check(module(dwconv=depthwise, norm=norm(), **flat), mlp=["pwconv1 + act + pwconv2"])


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ({"fc1": up(), "fc2": down()}, "an activation between them that is no module of their own"),
        ({"fc1": up(), "act": nn.GELU(), "grn": nn.Identity(), "fc2": down()}, "may call grn between them"),
        ({"fc1": up(), "act1": nn.GELU(), "act2": nn.ReLU(), "fc2": down()}, "an activation between them"),
    ],
)
def test_flat_feed_forwards_that_are_no_chain_of_modules(parts: dict[str, nn.Module], why: str) -> None:
    block = module(self_attn=attention(), norm=norm(), **parts)
    assert "mlp" not in available_labels(block)
    targets, (note,) = find_targets(block, ["mlp"])
    assert targets == []
    assert why in note


def test_a_dropout_between_two_linears_belongs_to_the_chain() -> None:
    parts = {"linear1": up(), "dropout": nn.Dropout(), "linear2": down(), "dropout2": nn.Dropout(), "act": nn.GELU()}
    check(
        module(attn=attention(), **parts),
        core_attn=["attn" + FUNCTIONS],
        attn=["attn"],
        mlp=["linear1 + act + dropout + linear2"],
    )


def test_feed_forward_of_functions() -> None:
    """Nothing to call as a unit, but its activation is in the graph."""
    check(FunctionalMlp(), act=[NODES], norm=["norm"])


def test_a_narrowing_pair_is_no_feed_forward() -> None:
    adapter = module("Adapter", down=nn.Linear(WIDTH, 4), act=nn.GELU(), up=nn.Linear(4, WIDTH))
    squeeze = nn.Sequential(nn.Conv2d(WIDTH, 4, 1), nn.ReLU(), nn.Conv2d(4, WIDTH, 1), nn.Sigmoid())
    check(module(adapter=adapter, squeeze=squeeze, mlp=mlp()), mlp=["mlp"])


def test_pointwise_convolutions_are_a_feed_forward() -> None:
    dense = module(fc1=nn.Conv2d(WIDTH, 48, 1), act=nn.GELU(), fc2=nn.Conv2d(48, WIDTH, 1))
    check(module(token_mixer=nn.AvgPool2d(3), output=dense), mlp=["output"])


def test_adapters_inside_linears() -> None:
    """LoRA on the projections changes nothing."""

    def adapted() -> nn.Module:
        return named("Linear", Adapted)()  # type: ignore[no-any-return]

    attn = module("LlamaAttention", q_proj=adapted(), k_proj=linear(), v_proj=adapted(), o_proj=linear())
    check(module(self_attn=attn, mlp=mlp()), core_attn=["self_attn" + FUNCTIONS], attn=["self_attn"], mlp=["mlp"])


def test_parametrized_weights() -> None:
    """Spectral norm on a linear is no norm of the block."""
    block = module(attn=attention(), norm=norm(), mlp=mlp())
    torch.nn.utils.parametrizations.spectral_norm(block.get_submodule("mlp.c_fc"))
    torch.nn.utils.parametrizations.weight_norm(block.get_submodule("attn.c_proj"))
    check(block, core_attn=["attn" + FUNCTIONS], attn=["attn"], mlp=["mlp"], norm=["norm"])


def test_compiled_parts() -> None:
    block = module(attn=attention(), norm=norm(), mlp=mlp())
    for name in ("attn", "norm", "mlp"):
        setattr(block, name, torch.compile(getattr(block, name)))
    check(block, core_attn=["attn._orig_mod" + FUNCTIONS], attn=["attn"], mlp=["mlp"], norm=["norm"])


# --- mixtures of experts


MIXTURES: dict[str, dict[str, Any]] = {
    "list": {"gate": linear(WIDTH, 4), "experts": nn.ModuleList([expert() for _ in range(4)])},
    "fused": {"gate": module("TopKRouter", proj=linear(WIDTH, 4)), "experts": fused_experts()},
    "router": {"router": linear(WIDTH, 4), "experts": nn.ModuleDict({"expert_0": expert(), "expert_1": expert()})},
    "shared": {"gate": linear(WIDTH, 4), "experts": fused_experts(), "shared_experts": mlp()},
    "gated shared": {
        "gate": linear(),
        "experts": fused_experts(),
        "shared_expert_gate": linear(),
        "shared_expert": mlp(),
    },
    "parallel": {"router": module("TopKGating", layer=linear()), "input_linear": named("ParallelExperts", Weighted)()},
}


@pytest.mark.parametrize("kind", MIXTURES)
def test_mixtures_are_no_mlp(kind: str) -> None:
    block = module(self_attn=attention(), norm=norm(), mlp=module("SparseMoeBlock", **MIXTURES[kind]))
    check(block, core_attn=["self_attn" + FUNCTIONS], attn=["self_attn"], moe=["mlp"], act=[NODES])
    block = module(self_attn=attention(), norm=norm(), ffn=module("Mix", **MIXTURES[kind]))
    check(block, core_attn=["self_attn" + FUNCTIONS], attn=["self_attn"], moe=["ffn"], act=[NODES])


def test_a_dense_mlp_beside_a_mixture() -> None:
    block = module(attn=attention(), mlp=mlp(), moe=module("MoE", **MIXTURES["list"]))
    check(block, core_attn=["attn" + FUNCTIONS], attn=["attn"], mlp=["mlp"], moe=["moe"])


def test_router_and_experts_in_the_block_itself() -> None:
    """Gemma 4: the block routes, so the experts are the unit and the router's decision is kept."""
    block = module(attn=attention(), mlp=mlp(), **MIXTURES["fused"])
    check(block, core_attn=["attn" + FUNCTIONS], attn=["attn"], mlp=["mlp"], moe=["experts"])


def test_gates_without_experts_are_no_mixture() -> None:
    recurrent = named("RgLru")()
    recurrent.input_gate_weight = nn.Parameter(torch.empty(2, 8, 8))
    gated = module("MLP", gate=up(), up=up(), down=down())
    check(module(lru=recurrent, mlp=gated), mlp=["mlp"])


# --- activations


def test_activations_that_cannot_or_need_not_be_freed() -> None:
    block = module(fc=up(), silu=nn.SiLU(inplace=True), mish=nn.Mish(inplace=True), relu=nn.ReLU(inplace=True))
    targets, notes = find_targets(block, ["act"])
    assert [target.how for target in targets] == ["nodes"]
    assert [note.split(" works")[0] for note in notes] == ["act: silu (SiLU)", "act: mish (Mish)"]


def test_a_block_without_activation_has_no_such_label() -> None:
    assert "act" not in available_labels(module(attn=attention(), norm=norm()))
