"""Finding blocks in models as people write them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from block_models import (
    Attention,
    Block,
    Called,
    D,
    Experts,
    Plain,
    PreNorm,
    Residual,
    Tower,
    blocks,
    chain,
    head,
    low_rank,
    model,
    twice,
    with_parts,
)
from lightning import LightningModule
from messages import containing
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_recompute.blocks import BlockList, class_of, find_blocks


def found(module: nn.Module) -> list[str]:
    return [str(block_list) for block_list in find_blocks(module)]


# ---- found without being named

CASES: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "embedding, blocks, head": (
        lambda: model(embed=nn.Embedding(90, D), blocks=blocks(), head=nn.Linear(D, 90)),
        ["blocks (3 x Block)"],
    ),
    "one block": (lambda: model(blocks=blocks(1)), ["blocks (1 x Block)"]),
    "one block beside small heads": (
        lambda: model(blocks=blocks(1), heads=blocks(2, lambda: nn.Sequential(nn.Linear(D, 2)))),
        ["blocks (1 x Block)"],
    ),
    "the model itself": (chain, ["the model itself (3 x Block)"]),
    "a Sequential": (lambda: model(body=chain(4), head=nn.Linear(D, 2)), ["body (4 x Block)"]),
    "a numbered ModuleDict": (
        lambda: model(layers=nn.ModuleDict({str(index): Block() for index in range(3)})),
        ["layers (3 x Block)"],
    ),
    "Sequentials as blocks": (
        lambda: model(layers=blocks(3, lambda: nn.Sequential(nn.Linear(D, D), nn.ReLU()))),
        ["layers (3 x Sequential)"],
    ),
    "modules of torch.nn that have children": (
        lambda: model(layers=blocks(3, lambda: nn.TransformerEncoderLayer(D, 2, 16))),
        ["layers (3 x TransformerEncoderLayer)"],
    ),
    "one block several times": (lambda: model(layers=nn.ModuleList([Block()] * 4)), ["layers (4 x Block)"]),
    "linear heads, larger than the blocks": (
        lambda: model(heads=blocks(4, lambda: nn.Linear(D, 999)), blocks=blocks()),
        ["blocks (3 x Block)"],
    ),
    "embeddings, larger than the blocks": (
        lambda: model(tables=blocks(4, lambda: nn.Embedding(999, D)), blocks=blocks()),
        ["blocks (3 x Block)"],
    ),
    "two lists of one class": (lambda: model(a=blocks(2), b=blocks(9)), ["a (2 x Block)", "b (9 x Block)"]),
    "two lists of two classes": (
        lambda: model(encoder=blocks(4), decoder=blocks(6, Plain)),
        ["encoder (4 x Block)", "decoder (6 x Plain)"],
    ),
    "a small list of another class": (
        lambda: model(blocks=blocks(9), heads=blocks(2, head)),
        ["blocks (9 x Block)"],
    ),
    "a decoder of one block": (
        lambda: model(encoder=blocks(6), decoder=blocks(1, Plain)),
        ["encoder (6 x Block)", "decoder (1 x Plain)"],
    ),
    "a wrapped head is no list": (
        lambda: model(blocks=blocks(2), head=nn.Sequential(Plain())),
        ["blocks (2 x Block)"],
    ),
    "towers by name": (
        lambda: model(towers=nn.ModuleDict({"image": Tower(blocks(3)), "text": Tower(blocks(4, Plain))})),
        ["towers.image.blocks (3 x Block)", "towers.text.blocks (4 x Plain)"],
    ),
    "towers in a list": (
        lambda: model(towers=nn.ModuleList([Tower(blocks(3)), Tower(blocks(2))])),
        ["towers.0.blocks (3 x Block)", "towers.1.blocks (2 x Block)"],
    ),
    "towers that are lists": (
        lambda: model(towers=nn.ModuleList([blocks(3), blocks(2)])),
        ["towers.0 (3 x Block)", "towers.1 (2 x Block)"],
    ),
    "stages that are Sequentials": (
        lambda: model(stages=chain(2, chain)),
        ["stages.0 (3 x Block)", "stages.1 (3 x Block)"],
    ),
    "attention and feed-forward of each layer in a list": (
        lambda: model(layers=nn.ModuleList(nn.ModuleList([Attention(), Plain()]) for _ in range(3))),
        ["layers (3 x Attention, 3 x Plain)"],
    ),
    "the same in a dict of each layer": (
        lambda: model(layers=nn.ModuleList(nn.ModuleDict({"a": Attention(), "f": Plain()}) for _ in range(2))),
        ["layers (2 x Attention, 2 x Plain)"],
    ),
    "the same in one wrapper class": (
        lambda: model(layers=nn.ModuleList(nn.ModuleList([PreNorm(Attention()), PreNorm(Plain())]) for _ in "123")),
        ["layers (6 x PreNorm)"],
    ),
    "layers of a list each, with what is no block between": (
        lambda: model(
            layers=nn.ModuleList(nn.ModuleList([nn.LayerNorm(D), Plain(), nn.Identity(), blocks(2)]) for _ in range(2))
        ),
        ["layers (2 x Plain)"],
    ),
    "sublayers inside a block": (
        lambda: model(
            blocks=blocks(
                3, lambda: with_parts(Block(), sublayers=nn.ModuleList([PreNorm(Attention()), PreNorm(Plain())]))
            )
        ),
        ["blocks (3 x Block)"],
    ),
    "experts": (lambda: model(blocks=blocks(3, lambda: Experts(Plain))), ["blocks (3 x Experts)"]),
    "experts with norms": (lambda: model(blocks=blocks(3, lambda: Experts(Block))), ["blocks (3 x Experts)"]),
    "one block with experts": (lambda: model(blocks=blocks(1, lambda: Experts(Block))), ["blocks (1 x Experts)"]),
    "convolutions inside residual blocks": (
        lambda: model(stages=nn.ModuleList(chain(2, Residual) for _ in range(2))),
        ["stages.0 (2 x Residual)", "stages.1 (2 x Residual)"],
    ),
    "down and up with blocks at each step": (
        lambda: model(
            downs=blocks(2, lambda: with_parts(Called(), blocks=blocks(2), down=nn.Linear(D, 4))),
            ups=blocks(2, lambda: with_parts(Called(), blocks=blocks(2), up=nn.Linear(4, D))),
        ),
        [f"{part}.{index}.blocks (2 x Block)" for part in ("downs", "ups") for index in (0, 1)],
    ),
    "student and teacher": (
        lambda: model(student=Tower(blocks(3)), teacher=Tower(blocks(3)).requires_grad_(False)),
        ["student.blocks (3 x Block)", "teacher.blocks (3 x Block)"],
    ),
    "a trained student beside a far larger frozen teacher": (
        lambda: model(student=Tower(blocks(2, Plain)), teacher=Tower(blocks(60)).requires_grad_(False)),
        ["student.blocks (2 x Plain)", "teacher.blocks (60 x Block)"],
    ),
    "a small trained list beside a large trained one": (
        lambda: model(small=Tower(blocks(2, Plain)), large=Tower(blocks(60))),
        ["large.blocks (60 x Block)"],
    ),
    "the same list under two names": (lambda: twice(blocks()), ["model.blocks (3 x Block)"]),
    "reparametrized layers": (
        lambda: model(blocks=low_rank(blocks()), head=low_rank(nn.Linear(D, 2))),
        ["blocks (3 x Block)"],
    ),
    "compiled blocks": (
        lambda: model(blocks=nn.ModuleList([torch.compile(Block()), Block(), torch.compile(Block())])),  # type: ignore[list-item]
        ["blocks (3 x Block)"],
    ),
    "a compiled model": (
        lambda: model(net=torch.compile(model(blocks=blocks()))),  # type: ignore[arg-type]
        ["net._orig_mod.blocks (3 x Block)"],
    ),
    "lazy layers": (
        lambda: model(blocks=blocks(3, lambda: nn.Sequential(nn.LazyLinear(D), nn.ReLU()))),
        ["blocks (3 x Sequential)"],
    ),
}


@pytest.mark.parametrize(("build", "due"), CASES.values(), ids=CASES)
def test_found(build: Callable[[], nn.Module], due: list[str]) -> None:
    module = build()
    assert found(module) == due
    reachable = dict(module.named_modules(remove_duplicate=False))
    for block_list in find_blocks(module):
        assert [reachable[name] for name in block_list.names] == list(block_list.blocks)


def test_what_a_list_holds() -> None:
    module = model(body=model(blocks=blocks(2)))
    [block_list] = find_blocks(module)
    assert isinstance(block_list, BlockList)
    assert block_list.name == "body.blocks"
    assert block_list.names == ("body.blocks.0", "body.blocks.1")
    assert block_list.blocks == tuple(module.body.blocks)
    assert len(block_list) == 2


def test_blocks_of_the_model_itself_have_its_keys_as_names() -> None:
    assert find_blocks(chain(2))[0].names == ("0", "1")


def test_a_lightning_module_around_a_model() -> None:
    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model(embed=nn.Embedding(9, D), blocks=blocks(4))
            self.loss = nn.CrossEntropyLoss()

    assert found(Module()) == ["model.blocks (4 x Block)"]


def test_children_that_are_none() -> None:
    module = model(blocks=blocks(2))
    module.register_module("decoder", None)
    module.blocks.register_module("2", None)
    assert found(module) == ["blocks (2 x Block)"]


def test_finding_changes_nothing() -> None:
    module = model(blocks=blocks(2))
    before = {name: dict(vars(part)) for name, part in module.named_modules()}
    find_blocks(module)
    assert {name: dict(vars(part)) for name, part in module.named_modules()} == before


def test_class_seen_through_compile() -> None:
    assert class_of(torch.compile(Block())) is Block  # type: ignore[arg-type]
    assert class_of(Block()) is Block
    sharded = Block()
    sharded.__class__ = type("FSDPBlock", (FSDPModule, Block), {})  # as torch's FSDP2 does it
    assert class_of(sharded) is Block


# ---- nothing to be found

NONE: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "no children": (nn.Identity, ["Identity", "Children found: none"]),
    "an mlp": (lambda: model(a=nn.Linear(3, 3), b=nn.Linear(3, 3)), ["Children found: a (Linear), b (Linear)"]),
    "a mixed Sequential": (
        lambda: model(net=nn.Sequential(nn.Linear(3, D), Block(), Block())),
        ["net (1 x Linear, 2 x Block)"],
    ),
    "two classes in turn": (
        lambda: model(layers=nn.ModuleList([Block(), Plain(), Block(), Plain()])),
        ["layers (2 x Block, 2 x Plain)"],
    ),
    "dense blocks and experts in turn": (
        lambda: model(layers=nn.ModuleList([Block(), Experts(Block), Block(), Experts(Block)])),
        ["layers (2 x Block, 2 x Experts)"],
    ),
    "only single layers": (lambda: model(layers=blocks(3, lambda: nn.Linear(D, D))), ["layers (3 x Linear)"]),
    "recurrent layers": (lambda: model(layers=blocks(2, lambda: nn.GRU(D, D))), ["layers (2 x GRU)"]),
    "no weights": (lambda: model(acts=blocks(3, lambda: nn.Sequential(nn.ReLU()))), ["acts (3 x Sequential)"]),
    "never called": (
        lambda: model(parts=blocks(3, lambda: model(a=nn.Linear(3, 3)))),
        ["parts (3 x Module)", "a forward"],
    ),
    "many lists": (
        lambda: model(**{f"list{index}": blocks(2, lambda: nn.Linear(D, D)) for index in range(20)}),
        ["list0 (2 x Linear)", ", ..."],
    ),
}


@pytest.mark.parametrize(("build", "words"), NONE.values(), ids=NONE)
def test_none_found_lists_what_there_is(build: Callable[[], nn.Module], words: list[str]) -> None:
    cure = ["blocks='path.of.the.list'", "blocks='ClassName'"]
    with pytest.raises(ValueError, match=containing("no list of blocks", *cure, *words)) as error:
        find_blocks(build())
    assert len(str(error.value)) < 700


def test_lists_that_share_blocks() -> None:
    shared = Block()
    module = model(encoder=nn.ModuleList([Block(), shared]), decoder=nn.ModuleList([shared, Block(), Block()]))
    words = ["encoder (2 x Block)", "decoder (3 x Block)", "share 1 block(s)", "blocks='path.of.the.list'"]
    with pytest.raises(ValueError, match=containing(*words)):
        find_blocks(module)
    assert [block_list.name for block_list in find_blocks(module, "decoder")] == ["decoder"]
