"""Inspection: its figures are what a run then measures, and the formulas of the docs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from models import MODELS, ModelCase, gpt, gpt_loss, tokens
from parity import autocast, seeded
from torch import Tensor, nn
from vit import VisionTransformer, vit_loss

from lightning_recompute.blocks import find_blocks
from lightning_recompute.gpt import GPT
from lightning_recompute.inspection import FULL, Inspection, inspect_blocks
from lightning_recompute.memory import StepMemory, measure_step
from lightning_recompute.plan import Action, Full, Keep, RecomputePlan, Segment, Selective
from lightning_recompute.recompute import apply_recompute

RNG_BYTES = 5056
"""A state of the CPU's random numbers."""


def images() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(3, 3, 16, 16), "labels": torch.randint(5, (3,))}


CASES = {"timm-vit": ModelCase(lambda: VisionTransformer(depth=3, drop_rate=0.0), images, vit_loss, (3,))}
PEAK_IN_BLOCKS = ("timm-vit",)
"""Where neither a head nor weights that autocast has cast make the peak."""


def one_by_one(module: nn.Module, action: Action) -> RecomputePlan:
    number = sum(map(len, find_blocks(module)))
    return RecomputePlan(tuple(Segment(index, index + 1, action) for index in range(number)))


def measured(module: nn.Module, loss: Callable[[], Tensor], action: Action) -> StepMemory:
    """The second step of a model under an action: the first one learns about the blocks."""
    with apply_recompute(module, one_by_one(module, action)):
        loss().backward()
        module.zero_grad()
        found = measure_step(loss)
        module.zero_grad()
    return found


@pytest.mark.parametrize(
    ("name", "precision", "labels"),
    [
        ("gpt-eager", "32", None),
        ("gpt-sdpa", "bf16-mixed", ["core_attn", "norm", "act"]),
        ("llama-eager", "32", ["core_attn", "norm", "act"]),
        ("bert-sdpa", "bf16-mixed", ["attn", "norm", "act"]),
        ("vit-eager", "32", ["core_attn", "mlp", "norm"]),
        ("timm-vit", "32", ["mlp", "norm", FULL]),
        *(
            pytest.param(name, precision, None, marks=pytest.mark.long)
            for name in ("gpt-sdpa", "llama-sdpa", "gpt2-sdpa", "bert-eager", "vit-sdpa", "t5-eager", "timm-vit")
            for precision in ("32", "bf16-mixed")
        ),
    ],
)
def test_figures_are_what_a_run_then_measures(name: str, precision: str, labels: list[str] | None) -> None:
    case = CASES.get(name) or MODELS[name]
    module, batch = seeded(case.build), case.batch()

    def loss() -> Tensor:
        with autocast(precision):
            return case.loss(module, batch)

    inspection = inspect_blocks(module, loss, labels=labels, seconds=False)
    assert set(inspection.labels) >= set(labels or ("attn", "mlp", "norm", FULL))
    kept = measured(module, loss, Keep())
    for label in inspection.labels:
        under = measured(module, loss, Full() if label == FULL else Selective((label,)))
        due = kept.held_bytes - under.held_bytes
        assert abs(inspection.saved_bytes(label) - due) <= 0.01 * abs(due), label
        if name not in PEAK_IN_BLOCKS or precision != "32":
            continue
        peak = sum(row.total_saved_peak_bytes for row in inspection.rows if row.label == label)
        due = kept.peak_bytes - under.peak_bytes
        assert abs(peak - due) <= 0.01 * abs(due), label


# ---- formulas: s sequence, b rows, h width, a heads, f MLP width

S, B, H, A, F = 16, 2, 32, 4, 128


def block_bytes(options: dict[str, object], labels: list[str], mixed: bool = False) -> dict[str, int]:
    """What each label saves of a block of our GPT in bf16, or bf16-mixed."""
    module = GPT(vocab_size=64, num_layers=2, num_heads=A, hidden_size=H, max_length=S, **options)  # type: ignore[arg-type]
    module = module if mixed else module.to(torch.bfloat16)
    ids = torch.randint(64, (B, S))

    def run() -> object:
        with autocast("bf16-mixed" if mixed else "32"):
            return module(ids)

    inspection = inspect_blocks(module, run, labels=labels, seconds=False)
    return {row.label: row.saved_bytes for row in inspection.rows}


def test_bytes_of_a_gpt_block_in_bf16() -> None:
    eager = block_bytes({"attention": "eager", "dropout": 0.1}, ["core_attn", "norm", "act", "norm+act"])
    # softmax, its dropout, the mask; a dropout in a replay needs the random state of its forward
    assert eager["core_attn"] == 5 * A * S * S * B - RNG_BYTES
    statistics = (
        2
        * 2
        * S
        * B
        * torch.ops.aten.native_layer_norm(torch.empty(1, H, dtype=torch.bfloat16), [H], None, None, 1e-5)[
            1
        ].element_size()
    )
    assert eager["norm"] == 4 * S * B * H + statistics
    assert eager["act"] == 8 * S * B * H
    assert eager["norm+act"] == eager["norm"] + eager["act"]
    fused = block_bytes({"attention": "sdpa", "dropout": 0.0}, ["core_attn", "norm", "act"])
    assert fused["core_attn"] == 4 * A * S * B  # the logarithms of the sums in fp32
    assert (fused["norm"], fused["act"]) == (eager["norm"], eager["act"])


def test_bytes_of_a_gpt_block_in_bf16_mixed() -> None:
    found = block_bytes({"attention": "sdpa"}, ["norm", "act"], mixed=True)
    # a bf16 copy for each of q, k, v and the MLP's input; LayerNorm itself keeps fp32 statistics
    assert found["norm"] == 2 * S * B * H * 4 + 2 * 2 * S * B * 4
    assert found["act"] == 8 * S * B * H


def test_bytes_of_swiglu_in_bf16() -> None:
    options = {"activation": "swiglu", "norm": "rmsnorm", "ffn_hidden_size": F}
    found = block_bytes(options, ["act"])
    # the product, and silu(gate) as a factor of it
    assert found["act"] == 2 * 2 * S * B * F


# ---- rows and words


@pytest.fixture
def model() -> nn.Module:
    return seeded(lambda: gpt("sdpa", dropout=0.0))


def inspected(module: nn.Module, **options: object) -> Inspection:
    batch = {"ids": tokens()}
    return inspect_blocks(module, lambda: gpt_loss(module, batch), **options)  # type: ignore[arg-type]


def test_rows_say_what_and_where(model: nn.Module) -> None:
    inspection = inspected(model)
    row = inspection.rows[0]
    assert (row.block_list, row.kind, row.num_calls) == ("blocks", "TransformerBlock", 4)
    assert row.blocks == ("blocks.0", "blocks.1", "blocks.2", "blocks.3")
    assert [row.label for row in inspection.rows] == ["core_attn", "attn", "mlp", "norm", "act", FULL]
    assert [row.modules for row in inspection.rows][:4] == ["attn.core_attn", "attn", "mlp", "attn_norm, mlp_norm"]
    assert all(row.kept_bytes * 4 == inspection.kept_bytes for row in inspection.rows)
    assert all(row.saved_bytes * 4 == row.total_saved_bytes for row in inspection.rows)
    assert all(row.seconds is not None and (row.kept_seconds or 0) > 0 for row in inspection.rows)
    assert row.note.startswith("next to nothing: fused attention keeps no scores") or row.saved_bytes * 100 > (
        row.kept_bytes
    )
    text = str(inspection)
    for part in ("core_attn", "attn_norm, mlp_norm", "4 x TransformerBlock", "Without recompute 4 blocks hold"):
        assert part in text


def test_the_best_alternative(model: nn.Module) -> None:
    inspection = inspected(model, labels=["core_attn", "mlp", "norm"], seconds=False)
    best = inspection.best_alternative("core_attn")
    assert best == max((label for label in inspection.labels if label != FULL), key=inspection.saved_bytes)
    assert best is not None
    assert inspection.best_alternative(best) not in (None, best, FULL)
    assert inspected(model, labels=["norm", FULL], seconds=False).best_alternative("norm") is None
    with pytest.raises(ValueError, match="'moe' was not inspected"):
        inspection.saved_bytes("moe")


def test_patterns_and_several_labels_together(model: nn.Module) -> None:
    inspection = inspected(model, labels=["*.mlp", "blocks.*.attn", "norm+act", "norm", "act"], seconds=False)
    saved = {row.label: row.saved_bytes for row in inspection.rows}
    assert saved["*.mlp"] > 0
    assert saved["blocks.*.attn"] > 0
    assert saved["norm+act"] == saved["norm"] + saved["act"]


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (["norms"], "unknown label 'norms'; did you mean 'norm'"),
        (["moe"], "answers to 'moe'"),
        ([], "a list of labels"),
    ],
)
def test_words_that_mean_nothing_are_refused(model: nn.Module, labels: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        inspected(model, labels=labels)


def test_calls_are_counted_not_blocks() -> None:
    """Two views of a batch go through the same blocks in one step."""

    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = VisionTransformer(depth=2, drop_rate=0.0, drop_path_rate=0.0)

        def forward(self, one: Tensor, other: Tensor) -> Tensor:
            return (self.net(one) * self.net(other)).sum()

    module, (one, other) = Views(), torch.randn(2, 3, 3, 16, 16)
    inspection = inspect_blocks(module, ((one, other), {}), labels=["mlp"], seconds=False)
    due = measured(module, lambda: module(one, other), Keep()).held_bytes
    due -= measured(module, lambda: module(one, other), Selective(("mlp",))).held_bytes
    assert inspection.rows[0].num_calls == 4
    assert inspection.rows[0].blocks == ("net.blocks.0", "net.blocks.1")
    assert inspection.saved_bytes("mlp") == due


def test_why_a_label_saves_nothing() -> None:
    module = seeded(lambda: gpt("sdpa", dropout=0.0, bias=False))
    for name, parameter in module.named_parameters():
        parameter.requires_grad_("proj" not in name)
    rows = {row.label: row for row in inspected(module, labels=["act"], seconds=False).rows}
    assert rows["act"].saved_bytes == 0
    assert rows["act"].note == "nothing: frozen linears keep no input"
    relu = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 16, 0.0), 2, enable_nested_tensor=False)
    act = inspect_blocks(relu, ((torch.randn(3, 2, 16),), {}), labels=["act"], seconds=False).rows[0]
    assert act.note == "nothing: backward of these activations needs their output"
