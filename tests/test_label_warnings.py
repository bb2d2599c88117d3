"""Warnings about labels that save nothing: their words and numbers, and that the first batch is not touched by them."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable, Sequence

import pytest
import torch
from models import MODELS, gpt, gpt_loss, llama, output_loss, padded_text, tokens
from parity import assert_same, seeded
from test_block_cost import Data
from test_capture import batch
from torch import Tensor, nn
from toys import stack

from lightning_recompute.blocks import find_blocks
from lightning_recompute.capture import capture_calls
from lightning_recompute.gpt import GPT
from lightning_recompute.label_warnings import FirstBatchCheck, warn_if_useless
from lightning_recompute.plan import Full, Keep, RecomputePlan, Segment, Selective
from lightning_recompute.policy import RecomputePolicy
from lightning_recompute.recompute import apply_recompute

logger = logging.getLogger("lightning_recompute.tests")


def selective(*modules: str, number: int = 4) -> RecomputePlan:
    return RecomputePlan((Segment(0, number, Selective(modules)),))


def wide() -> nn.Module:
    """Wide enough that the logarithms which fused attention keeps are less than 1 %."""
    return GPT(vocab_size=64, num_layers=4, num_heads=2, hidden_size=64, max_length=12, attention="sdpa")


def messages(module: nn.Module, plan: RecomputePlan, loss: Callable[[], Tensor]) -> list[str]:
    return warn_if_useless(module, plan, find_blocks(module), loss)


def test_core_attention_under_a_fused_kernel() -> None:
    module, ids = seeded(wide), {"ids": tokens()}
    (message,) = messages(module, selective("core_attn"), lambda: gpt_loss(module, ids))
    assert "selective recompute of 'core_attn' saves 0." in message
    assert "4 block(s) TransformerBlock hold for backward" in message
    assert "next to nothing: fused attention keeps no scores" in message
    for label in ("mlp", "attn", "act", "norm", "granularity=full"):
        assert f"{label} " in message.partition("Others would save: ")[2]
    assert messages(module, selective("norm", "act"), lambda: gpt_loss(module, ids)) == []


def test_the_plan_says_which_blocks_count() -> None:
    module, ids = seeded(wide), {"ids": tokens()}
    lists = find_blocks(module)
    capture = capture_calls(module, lambda: gpt_loss(module, ids), lists)
    mixed = RecomputePlan((Segment(0, 1, Full()), Segment(1, 3, Selective(("core_attn",))), Segment(3, 4, Keep())))
    (message,) = warn_if_useless(module, mixed, lists, capture)
    assert "2 block(s)" in message
    assert warn_if_useless(module, RecomputePlan((Segment(0, 4, Full()),)), lists, capture) == []


def test_eager_attention_is_worth_it() -> None:
    module, ids = seeded(lambda: gpt("eager", dropout=0.0)), {"ids": tokens()}
    assert messages(module, selective("core_attn"), lambda: gpt_loss(module, ids)) == []


def test_frozen_linears() -> None:
    module, text = seeded(lambda: llama("sdpa")), padded_text()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_("layernorm" in name)
    (message,) = messages(module, selective("act"), lambda: output_loss(module, text)) or ("",)
    # silu and the product keep their factors whether or not the linears are frozen
    assert message == ""
    bare = seeded(lambda: gpt("sdpa", dropout=0.0))
    for name, parameter in bare.named_parameters():
        parameter.requires_grad_("proj" not in name)
    ids = {"ids": tokens()}
    (message,) = messages(bare, selective("act"), lambda: gpt_loss(bare, ids))
    assert "saves 0.0 %" in message
    assert "nothing: frozen linears keep no input" in message


# ---- the first batch


def trained(module: nn.Module, loss: Callable[[], Tensor], plan: RecomputePlan, check: bool) -> list[object]:
    """Two steps, after a forward without gradients; all that they leave."""
    torch.manual_seed(1)
    results: list[object] = []
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with apply_recompute(module, plan) as handle:
        first = FirstBatchCheck(handle.plan, handle.block_lists, logger) if check else None
        with torch.no_grad():
            results.append(loss())
        for _ in range(2):
            optimizer.zero_grad()
            value = loss()
            value.backward()
            results += [value.detach(), [p.grad.clone() for p in module.parameters() if p.grad is not None]]
            optimizer.step()
        if first is not None:
            first.remove()
    results += [dict(module.state_dict()), torch.get_rng_state()]
    return results


@pytest.mark.parametrize(
    ("name", "modules"),
    [("gpt-sdpa", ("core_attn", "norm")), ("bert-eager", ("core_attn", "mlp")), ("data", ("norm",))],
)
def test_results_are_the_same_to_the_bit(name: str, modules: Sequence[str]) -> None:
    def build() -> nn.Module:
        return seeded(lambda: stack(4, Data)) if name == "data" else seeded(MODELS[name].build)

    data = batch() if name == "data" else MODELS[name].batch()

    def loss_of(module: nn.Module) -> Callable[[], Tensor]:
        return lambda: module(data).square().mean() if name == "data" else MODELS[name].loss(module, data)  # type: ignore

    plain, checked = build(), build()
    due = trained(plain, loss_of(plain), selective(*modules), check=False)
    found = trained(checked, loss_of(checked), selective(*modules), check=True)
    assert_same(found, due)
    assert not [part for part in checked.modules() if part._forward_pre_hooks or "forward" in vars(part)]


def test_it_warns_in_the_first_training_forward_and_once(caplog: pytest.LogCaptureFixture) -> None:
    module, ids = seeded(wide), {"ids": tokens()}
    with apply_recompute(module, selective("core_attn", "norm")) as handle, caplog.at_level(logging.INFO):
        FirstBatchCheck(handle.plan, handle.block_lists, logger)
        with torch.no_grad():
            gpt_loss(module, ids)
        assert not caplog.records
        for _ in range(3):
            gpt_loss(module, ids).backward()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "'core_attn' saves 0." in record.getMessage()
    assert "4 block(s)" in record.getMessage()


def test_it_waits_for_every_kind_of_block(caplog: pytest.LogCaptureFixture) -> None:
    module, ids = seeded(wide), {"ids": tokens()}
    module.blocks[2].mlp.requires_grad_(False)  # type: ignore[index, union-attr]
    with apply_recompute(module, selective("core_attn")) as handle:
        FirstBatchCheck(handle.plan, handle.block_lists, logger)
        gpt_loss(module, ids).backward()
    (record,) = caplog.records
    assert "4 block(s)" in record.getMessage()


def test_a_plan_without_labels_has_no_hooks() -> None:
    module = seeded(wide)
    FirstBatchCheck(RecomputePolicy().plan([4]), find_blocks(module), logger)
    assert not [part for part in module.modules() if part._forward_pre_hooks]


def test_removed_before_the_first_batch() -> None:
    module = seeded(wide)
    check = FirstBatchCheck(selective("core_attn"), find_blocks(module), logger)
    assert [part for part in module.modules() if part._forward_pre_hooks] == [module.blocks[0]]  # type: ignore[index]
    check.remove()
    check.remove()
    assert not [part for part in module.modules() if part._forward_pre_hooks]


def test_copies_of_the_model_have_no_check(caplog: pytest.LogCaptureFixture) -> None:
    module, ids = seeded(wide), {"ids": tokens()}
    check = FirstBatchCheck(selective("core_attn"), find_blocks(module), logger)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        gpt_loss(twin, ids).backward()
    assert not caplog.records
    assert check is not None


def test_what_cannot_be_measured_ends_no_training(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = seeded(lambda: stack(2, Data))
    monkeypatch.setattr("lightning_recompute.label_warnings._is_distributed", lambda: True)
    with apply_recompute(model, selective("norm", number=2)) as handle, caplog.at_level(logging.INFO):
        FirstBatchCheck(handle.plan, handle.block_lists, logger)
        model(batch()).sum().backward()
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert "what selective recompute saves on blocks.0 could not be measured" in record.getMessage()
    assert not [part for part in model.modules() if part._forward_pre_hooks]
