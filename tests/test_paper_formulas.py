"""The paper's formulas give the figures that the paper prints, and the schedules its factors."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_recompute.cost import in_flight
from lightning_recompute.paper_formulas import (
    ACTIVATION_INPUT,
    ACTIVATION_OUTPUT,
    ATTENTION_MASK,
    MLP_INPUT,
    MLP_MASK,
    NORM_INPUTS,
    OUTSIDE_OF_CORE,
    PAPER_MODELS,
    PROJECTION_INPUT,
    QKV_INPUT,
    QUERIES_AND_KEYS,
    REPLICATED,
    VALUES,
    LayerShape,
    PaperModel,
    layer_bytes,
    per_sbh,
)
from lightning_recompute.units import GIB

MODELS = {model.name: model for model in PAPER_MODELS}
# tensor parallelism, and beside it sequence parallelism, selective, both, full
FIRST_STAGE_GIB = {
    "22B": (59.2, 39.6, 29.2, 9.56, 4.50),
    "175B": (66.8, 41.4, 37.8, 12.35, 5.81),
    "530B": (114.0, 66.5, 70.6, 23.08, 10.86),
    "1T": (131.2, 76.6, 81.2, 26.56, 12.50),
}


@pytest.mark.parametrize("name", MODELS)
def test_first_stages(name: str) -> None:
    model = MODELS[name]
    found = (
        model.first_stage_bytes(),
        model.first_stage_bytes(sequence_parallel=True),
        model.first_stage_bytes(recompute="selective"),
        model.first_stage_bytes(sequence_parallel=True, recompute="selective"),
        model.first_stage_bytes(recompute="full"),
    )
    assert [float(one) / GIB for one in found] == pytest.approx(FIRST_STAGE_GIB[name], rel=2e-3)


@pytest.mark.parametrize(("name", "factor"), [("22B", 1.0), ("175B", 1.292), ("530B", 1.324), ("1T", 1.0)])
def test_the_order_of_the_schedule_gives_the_interleave_factor(name: str, factor: float) -> None:
    model = MODELS[name]
    alive = in_flight(model.schedule, model.pipeline, model.num_microbatches, model.chunks)[0]
    assert alive / (model.chunks * model.pipeline) == pytest.approx(factor, abs=5e-4)
    assert alive == model.interleave_factor * model.chunks * model.pipeline


def test_the_parts_of_a_layer_are_all_of_it() -> None:
    attention = QKV_INPUT + QUERIES_AND_KEYS + VALUES + PROJECTION_INPUT + ATTENTION_MASK
    mlp = MLP_INPUT + ACTIVATION_INPUT + ACTIVATION_OUTPUT + MLP_MASK
    assert (attention, mlp) == (11, 19)
    assert attention + mlp + NORM_INPUTS == OUTSIDE_OF_CORE
    assert NORM_INPUTS + QKV_INPUT + MLP_INPUT + ATTENTION_MASK + MLP_MASK == REPLICATED


def test_what_the_paper_says_of_selective_recompute() -> None:
    # section 5: 5as/h is 80 for GPT-3 and 64 for MT-NLG; 70 % and 65 % of the activations
    scores = [MODELS[name].shape.scores for name in ("175B", "530B")]
    assert scores == [80, 64]
    saved = [float(one / (OUTSIDE_OF_CORE + one)) for one in scores]
    assert saved == pytest.approx([0.70, 0.65], abs=5e-3)
    # 2.7 % and 1.6 % more FLOPs (its appendix A), where the core's backward is counted again beside its forward
    for name, share in (("175B", 0.027), ("530B", 0.016)):
        shape = MODELS[name].shape
        again = shape.core_flops / (shape.linear_flops + shape.core_flops)
        assert again == pytest.approx(share, abs=6e-4)


def test_a_fifth_of_the_memory() -> None:
    # the abstract: 5x
    for name in ("530B", "1T"):
        scores = MODELS[name].shape.scores
        both = per_sbh(scores, 8, sequence_parallel=True, recompute="selective")
        assert float(per_sbh(scores, 8) / both) == pytest.approx(5, rel=0.02)


def test_variants_of_a_layer() -> None:
    shape = LayerShape(4, 64, 32, rows=2, tensor=2)
    assert shape.sbh == 4096
    assert shape.scores == 10
    assert layer_bytes(replace(shape, tensor=1)) == 44 * 4096
    assert layer_bytes(shape) == (10 + 12 + 5) * 4096
    assert layer_bytes(shape, sequence_parallel=True) == 22 * 4096
    assert layer_bytes(shape, recompute="selective") == 22 * 4096
    assert layer_bytes(shape, sequence_parallel=True, recompute="selective") == 17 * 4096
    assert layer_bytes(shape, recompute="full") == 2 * 4096
    assert layer_bytes(shape, recompute="full", distributed=True) == 4096
    with pytest.raises(ValueError, match="3 ranks do not divide a layer"):
        layer_bytes(replace(shape, tensor=3))


def test_a_pipeline_without_chunks_keeps_all_layers_once() -> None:
    model = PaperModel("toy", LayerShape(4, 64, 32), 8, pipeline=4, num_microbatches=8)
    assert model.first_stage_bytes() == 8 * layer_bytes(model.shape)
