"""The benches of the paper's models and of plans for every stage: their parts on small sizes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

sys.path.append(str(Path(__file__).parent.parent / "bench"))

import stages
from paper_models import TECHNIQUES, held_by_layers, ranks

from lightning_recompute.paper_formulas import LayerShape, layer_bytes
from lightning_recompute.planner import solve
from lightning_recompute.stage_split import even_bounds

SHAPE = LayerShape(heads=8, hidden=512, length=256, tensor=4)


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    assert not dist.is_initialized()
    with ranks(SHAPE.tensor) as found:
        yield found


@pytest.mark.parametrize("name", TECHNIQUES)
def test_layers_on_tensors_without_memory_hold_what_the_paper_says(name: str, mesh: DeviceMesh) -> None:
    technique = TECHNIQUES[name]
    due = layer_bytes(SHAPE, sequence_parallel=technique.sequence_parallel, recompute=technique.recompute)
    first, second = held_by_layers(SHAPE, technique, mesh, num_layers=2, num_forwards=2)
    assert second == 2 * first
    # means and deviations of two norms, and beside a replay the states of two generators
    norms = 2 * 2 * 2 * SHAPE.length // (SHAPE.tensor if technique.sequence_parallel else 1)
    states = 0 if technique.recompute == "none" else 2 * 5056
    assert 2 * due <= first <= 2 * (due + norms + states + 16)


def test_options_of_a_block_are_the_papers() -> None:
    _, choices = stages.gpt3(range(2, 4))
    held = {name: option.held_bytes for name, option in zip(choices.names, choices.options, strict=True)}
    assert held["none"] == layer_bytes(stages.SHAPE, sequence_parallel=True)
    assert held["selective core_attn"] == layer_bytes(stages.SHAPE, sequence_parallel=True, recompute="selective")
    for name in ("full 1", "full 2", "full 3"):
        assert held[name] == layer_bytes(stages.SHAPE, sequence_parallel=True, recompute="full")
    # what is left beside every label: the inputs of norms, and both masks
    assert held["selective norm+mlp+attn"] == 6 * stages.UNIT
    assert [option.num_units for option in choices.options[-2:]] == [2, 3]


def test_seconds_of_a_block() -> None:
    # of the paper's model FLOPs in matrices alone, and not far above
    matrices = stages.matrix_seconds(stages.SHAPE.linear_flops + stages.SHAPE.core_flops)
    assert matrices < stages.FORWARD < 1.25 * matrices
    # recompute of the core costs some per cent, of all a third
    assert 0.02 < stages.SECONDS["core_attn"] / (3 * stages.FORWARD) < 0.04


def test_single_settings_are_what_words_can_say() -> None:
    model, choices = stages.gpt3(range(2, 13))
    pipeline = model.pipeline(even_bounds(96, 8), 64)
    found = {name: stages.single_settings(pipeline, choices, words) for name, words in stages.WORDS.items()}
    assert len(found["paper"]) == 1 + 12 + 12 + 1
    assert found["paper"].keys() < found["Megatron"].keys() < found["ours"].keys()
    assert "selective core_attn+norm+mlp" in found["Megatron"]
    budget = stages.budget_of(pipeline, 1.0)
    assert solve(replace(pipeline.parts[0], in_flight=8), budget) == (0,) * 12
    assert solve(replace(pipeline.parts[0], in_flight=8), budget - 1) != (0,) * 12
