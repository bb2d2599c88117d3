"""Naming block lists by path and by class."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from block_models import (
    Attention,
    Block,
    D,
    OtherBlock,
    Plain,
    Residual,
    Tower,
    blocks,
    chain,
    head,
    model,
    twice,
)
from lightning import LightningModule
from messages import containing
from torch import nn

from lightning_recompute.blocks import find_blocks


def found(module: nn.Module, names: str | list[str] | None = None) -> list[str]:
    return [str(block_list) for block_list in find_blocks(module, names)]


# ---- named


def everything() -> nn.Module:
    return model(
        decoder=Tower(blocks(2, OtherBlock)),
        encoder=Tower(blocks(3)),
        experts=blocks(4, Plain),
        heads=nn.ModuleDict({"a": head(), "b": head()}),
        last=Block(),
    )


@pytest.mark.parametrize(
    ("names", "due"),
    [
        ("encoder.blocks", ["encoder.blocks (3 x Block)"]),
        (["encoder.blocks"], ["encoder.blocks (3 x Block)"]),
        (("decoder.blocks", "encoder.blocks"), ["decoder.blocks (2 x OtherBlock)", "encoder.blocks (3 x Block)"]),
        # as they stand in the model
        (["encoder.blocks", "decoder.blocks"], ["decoder.blocks (2 x OtherBlock)", "encoder.blocks (3 x Block)"]),
        ("OtherBlock", ["decoder.blocks (2 x OtherBlock)"]),
        # a class means its subclasses too
        ("Block", ["decoder.blocks (2 x OtherBlock)", "encoder.blocks (3 x Block)", "the model itself (1 x Block)"]),
        (["encoder.blocks", "OtherBlock"], ["decoder.blocks (2 x OtherBlock)", "encoder.blocks (3 x Block)"]),
        ("experts", ["experts (4 x Plain)"]),
        ("heads", ["heads (2 x PreNorm)"]),
        ("PreNorm", ["heads (2 x PreNorm)"]),
    ],
)
def test_named(names: Any, due: list[str]) -> None:
    assert found(everything(), names) == due


def test_names_of_blocks_found_by_class() -> None:
    assert find_blocks(everything(), "PreNorm")[0].names == ("heads.a", "heads.b")
    assert find_blocks(everything(), "Block")[2].names == ("last",)


def test_mixed_classes_can_be_named() -> None:
    module = model(net=nn.Sequential(nn.Linear(3, D), Block(), Block()), layers=nn.ModuleList([Block(), Plain()]))
    assert found(module, "layers") == ["layers (1 x Block, 1 x Plain)"]
    assert find_blocks(module, ["net", "layers"])[0].names == ("net.0", "net.1", "net.2")


def test_the_model_itself_can_be_named() -> None:
    assert found(chain(2), "") == ["the model itself (2 x Block)"]


def test_an_alias_is_a_path() -> None:
    assert found(twice(blocks()), "shortcut") == ["model.blocks (3 x Block)"]


def test_a_property_is_a_path() -> None:
    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model(blocks=blocks(4))

        @property
        def layers(self) -> nn.Module:
            return self.model.blocks

    assert found(Module(), "layers") == ["model.blocks (4 x Block)"]


def test_paths_and_classes_through_compile() -> None:
    module = model(net=torch.compile(model(blocks=nn.ModuleList([torch.compile(Block()), Block()]))))  # type: ignore
    for name in ("net.blocks", "net._orig_mod.blocks", "Block"):
        assert found(module, name) == ["net._orig_mod.blocks (2 x Block)"]
        assert find_blocks(module, name)[0].blocks == tuple(module.net.blocks)


def test_a_list_of_lists_by_path() -> None:
    layers = nn.ModuleList(nn.ModuleList([Attention(), Plain()]) for _ in range(2))
    assert found(model(layers=layers), "layers") == ["layers (2 x Attention, 2 x Plain)"]
    assert found(model(towers=nn.ModuleList([blocks(3), blocks(2)])), "towers") == [
        "towers.0 (3 x Block)",
        "towers.1 (2 x Block)",
    ]


def test_a_block_several_times_by_path_and_by_class() -> None:
    module = model(layers=nn.ModuleList([Block()] * 4))
    assert found(module, "layers") == ["layers (4 x Block)"]
    assert found(module, "Block") == ["layers (1 x Block)"]


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ("blok", ["'blok'", "neither a path nor a class", "did you mean 'Block'?"]),
        ("encoder.block", ["'encoder.block'", "did you mean 'encoder.blocks'?"]),
        ("encodr.blocks", ["'encodr.blocks'", "did you mean 'encoder.blocks'?"]),
        ("GPT2Block", ["'GPT2Block'", "Block"]),
        ("zzz", ["'zzz'", "known: ", "encoder.blocks", "OtherBlock"]),
        (["encoder.blocks", "zzz"], ["'zzz'"]),
        ([], ["blocks=[]", "leave it out"]),
        (["encoder.blocks", "encoder.blocks"], ["share 3 block(s)", "name each block once"]),
        (["encoder.blocks", "Block"], ["share 3 block(s)", "name each block once"]),
        ("encoder", ["'encoder' is a single Tower", "blocks (3 x Block)"]),
        ("encoder.blocks.0", ["'encoder.blocks.0' is a single Block", "ModuleList"]),
        ("encoder.blocks.0.up", ["is a single Linear", "ModuleList"]),
        ("", ["blocks=''", "single Module", "encoder.blocks (3 x Block)"]),
        ("ModuleList", ["'ModuleList'", "never called"]),
        ("Tower", ["'Tower'", "decoder has no forward"]),
    ],
)
def test_names_that_cannot_be(names: Any, words: list[str]) -> None:
    with pytest.raises(ValueError, match=containing(*words)):
        find_blocks(everything(), names)


def test_a_class_inside_itself() -> None:
    with pytest.raises(
        ValueError, match=containing("'Called'", "blocks.0.layer.0 lies inside blocks.0", "dotted path")
    ):
        find_blocks(model(blocks=blocks(2, Residual)), "Called")


def test_a_list_with_members_that_are_never_called() -> None:
    with pytest.raises(ValueError, match=containing("'mixed'", "1 x ModuleList", "never called")):
        find_blocks(model(mixed=nn.ModuleList([Block(), blocks(2)])), "mixed")


@pytest.mark.parametrize("names", [3, {"encoder.blocks"}, b"encoder.blocks", ["encoder.blocks", 1], [None], Block])
def test_names_are_strings(names: Any) -> None:
    with pytest.raises(TypeError, match=containing("blocks=", "dotted path or class name")):
        find_blocks(everything(), names)
