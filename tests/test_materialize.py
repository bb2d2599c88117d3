"""Modules on the meta device get values: the same for any order and layout, and none is forgotten."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from lightning_recompute.gpt import GPT
from lightning_recompute.materialize import Materializer, is_meta, move_values

CPU = torch.device("cpu")


def on_meta(make: Any) -> Any:
    with torch.device("meta"):
        return make()


def gpt() -> GPT:
    return GPT(num_layers=2, hidden_size=16, num_heads=2, max_length=8, vocab_size=32, tied_head=True)


def test_values_do_not_depend_on_the_order() -> None:
    first, second = on_meta(gpt), on_meta(gpt)
    assert is_meta(first)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    Materializer(first, CPU, seed=3)(first.modules())
    assert torch.equal(torch.get_rng_state(), before), "the default generator is left alone"
    make = Materializer(second, CPU, seed=3)
    for part in reversed(list(second.modules())):
        make([part])
    assert not is_meta(first)
    assert not is_meta(second)
    for (name, ours), (_, theirs) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    assert second.head.weight is second.token_embedding.weight
    other = on_meta(gpt)
    Materializer(other, CPU, seed=4)(other.modules())
    assert not torch.equal(other.head.weight, first.head.weight)
    # as GPT starts them
    assert float(first.blocks[0].attn.q_proj.weight.detach().std()) == pytest.approx(0.02, rel=0.2)
    assert float(first.blocks[0].mlp.down_proj.weight.detach().std()) == pytest.approx(0.01, rel=0.2)
    assert torch.equal(first.final_norm.weight, torch.ones(16))


def test_hugging_faces_own_initialization_is_used() -> None:
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    model = on_meta(lambda: transformers.LlamaForCausalLM(config))
    Materializer(model, CPU, seed=0)(model.modules())
    assert not is_meta(model)
    due = transformers.LlamaForCausalLM(config)
    assert torch.equal(model.model.rotary_emb.inv_freq, due.model.rotary_emb.inv_freq)
    assert float(model.lm_head.weight.detach().std()) == pytest.approx(0.02, rel=0.2)


class Forgets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.ones(2))


def test_what_nothing_sets_is_named() -> None:
    model = on_meta(Forgets)
    with pytest.raises(ValueError, match=r"the LightningModule \(Forgets\) was built on the meta device.*scale starts"):
        Materializer(model, CPU, seed=0)(model.modules())
    assert model.scale.is_meta, "it is as it was"


def test_what_has_values_stays() -> None:
    model = nn.Sequential(nn.Linear(2, 2), on_meta(lambda: nn.Linear(2, 2, bias=False)), nn.BatchNorm1d(2))
    weight = model[0].weight
    move_values(model, CPU)
    made = Materializer(model, CPU, seed=0)(model.modules())
    assert model[0].weight is weight
    assert len(made) == 1
    assert not is_meta(model)


def test_frozen_stays_frozen() -> None:
    model = on_meta(lambda: nn.Linear(2, 2).requires_grad_(False))
    Materializer(model, CPU, seed=0)([model])
    assert not model.weight.requires_grad
