"""torch.compile below, inside and around recomputed blocks, whole and in part."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._functorch.config as functorch_config
from guards import held_bytes, plan_of
from parity import assert_same, observe, seeded
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.nn import functional as F
from toys import WIDTH, Attention, Block, square_loss, stack, step

from lightning_recompute.memory import measure_step
from lightning_recompute.plan import Full, Keep, RecomputePlan, SaveOps, Segment, Selective
from lightning_recompute.recompute import apply_recompute

BACKENDS = ["eager", "aot_eager"]
Compile = Callable[[nn.Module, str], nn.Module]


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def blocks_in_place(model: nn.Module, backend: str) -> nn.Module:
    for block in model.blocks:
        block.compile(backend=backend)
    return model


def block_objects(model: nn.Module, backend: str) -> nn.Module:
    model.blocks = nn.ModuleList(torch.compile(block, backend=backend) for block in model.blocks)
    return model


def parts_in_place(model: nn.Module, backend: str) -> nn.Module:
    for block in model.blocks:
        block.up.compile(backend=backend)
        block.norm.compile(backend=backend)
    return model


def whole_in_place(model: nn.Module, backend: str) -> nn.Module:
    model.compile(backend=backend)
    return model


WAYS: dict[str, Compile] = {f.__name__: f for f in (blocks_in_place, block_objects, parts_in_place, whole_in_place)}
NUM_BLOCKS = 2


def build(dropout: float = 0.0) -> nn.Module:
    return stack(NUM_BLOCKS, lambda: Block(dropout=dropout))


def steps(model: nn.Module) -> list[Tensor]:
    return [step(model) for _ in range(3)]


def compiled(way: str, backend: str, dropout: float = 0.0) -> nn.Module:
    return WAYS[way](seeded(lambda: build(dropout)), backend)


def outcome(model: nn.Module) -> Any:
    found = observe(model, steps)
    return found.result, list(found.gradients.values()), found.rng


@pytest.mark.parametrize("kind", ["full", pytest.param("pairs", marks=pytest.mark.long), "freed"])
@pytest.mark.parametrize("way", WAYS)
def test_the_same_as_compiled_without_recompute(way: str, kind: str) -> None:
    due = outcome(compiled(way, "aot_eager"))
    torch._dynamo.reset()
    model = compiled(way, "aot_eager")
    with apply_recompute(model, plan_of(kind, NUM_BLOCKS)):
        found = outcome(model)
    assert_same(found, due)
    assert_same(outcome(model)[0][0].shape, due[0][0].shape)  # and it still runs


@pytest.mark.parametrize("way", ["blocks_in_place", "block_objects"])
def test_the_same_as_eager_with_dropout(way: str) -> None:
    due = outcome(seeded(lambda: build(0.25)))
    model = compiled(way, "eager", dropout=0.25)
    with apply_recompute(model, plan_of("full", NUM_BLOCKS)):
        assert_same(outcome(model), due)


@pytest.mark.parametrize("way", ["blocks_in_place", "block_objects"])
def test_blocks_run_compiled_and_hooks_are_left_alone(way: str, caplog: pytest.LogCaptureFixture) -> None:
    """The forward and the replay are compiled once each, and nothing of ours is."""
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = seeded(build)
    for index, block in enumerate(model.blocks):
        if way == "blocks_in_place":
            block.compile(backend=backend)
        else:
            model.blocks[index] = torch.compile(block, backend=backend)
    with apply_recompute(model, plan_of("full", NUM_BLOCKS)), caplog.at_level(logging.WARNING):
        steps(model)
        num_graphs = len(graphs)
        steps(model)
    assert 1 <= num_graphs <= 2 * NUM_BLOCKS
    assert len(graphs) == num_graphs, "a later step compiles again"
    names = {node.name for graph in graphs for node in graph.graph.nodes}
    assert any("layer_norm" in name for name in names)
    assert "recompile_limit" not in caplog.text
    assert not any("lightning_recompute" in str(graph.code) for graph in graphs)


@pytest.mark.parametrize("kind", ["full", "pairs", "freed", "parts"])
@pytest.mark.parametrize("part", ["object", "function"])
def test_parts_of_a_block_run_compiled(part: str, kind: str) -> None:
    """The forward in which a block is seen for the first time is no reason to run its parts uncompiled."""
    counter = CompileCounter()
    model = seeded(build)
    for block in model.blocks:
        if part == "object":
            block.up = torch.compile(block.up, backend=counter)
        else:
            block.dropout.forward = torch.compile(lambda h: F.gelu(h) * 2, backend=counter)
    with apply_recompute(model, plan_of(kind, NUM_BLOCKS)):
        step(model)
        num_graphs = counter.frame_count
        steps(model)
    assert num_graphs > 0
    assert counter.frame_count == num_graphs, "a later step compiles again"


@pytest.mark.parametrize("way", ["blocks_in_place", "block_objects"])
def test_full_holds_the_inputs_only(way: str) -> None:
    def build_compiled() -> nn.Module:
        torch._dynamo.reset()
        return compiled(way, "aot_eager")

    keep = RecomputePlan((Segment(0, NUM_BLOCKS, Keep()),))
    assert held_bytes(build_compiled, plan_of("full", NUM_BLOCKS)) < 0.6 * held_bytes(build_compiled, keep)


def test_a_model_compiled_as_a_whole_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model = compiled("whole_in_place", "eager")
    with apply_recompute(model, plan_of("full", NUM_BLOCKS)):
        steps(model)
    assert "compiled as a whole" in caplog.text
    assert "block.compile()" in caplog.text


@pytest.mark.parametrize("way", ["blocks_in_place", "block_objects", "parts_in_place"])
def test_saved_operators_of_compiled_code_are_refused(way: str) -> None:
    model = compiled(way, "eager")
    with pytest.raises(ValueError, match=r"blocks\.0.* is compiled: SaveOps cannot see the operators of compiled code"):
        apply_recompute(model, plan_of("saved", NUM_BLOCKS))
    steps(model)


def test_saved_operators_inside_a_compiled_model() -> None:
    """Its blocks run outside of the compiled code, where their operators are seen."""
    due = outcome(compiled("whole_in_place", "aot_eager"))
    torch._dynamo.reset()
    model = compiled("whole_in_place", "aot_eager")
    with apply_recompute(model, plan_of("saved", NUM_BLOCKS)):
        assert_same(outcome(model), due)


class Attends(nn.Module):
    """Attention that is functions, a norm, and a graph break."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attn = Attention()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm(x))
        torch._dynamo.graph_break()
        return x + F.gelu(self.linear(x))


@pytest.mark.parametrize("labels", [("core_attn",), ("attn", "norm"), ("norm", "act")], ids="+".join)
@pytest.mark.parametrize("compiles", ["blocks", "nothing"])
def test_labels_on_compiled_blocks_with_a_graph_break(labels: tuple[str, ...], compiles: str) -> None:
    def made() -> nn.Module:
        model = seeded(lambda: stack(NUM_BLOCKS, Attends))
        return blocks_in_place(model, "aot_eager") if compiles == "blocks" else model

    due = outcome(made())
    torch._dynamo.reset()
    model = made()
    plan = RecomputePlan(tuple(Segment(i, i + 1, Selective(labels)) for i in range(NUM_BLOCKS)))
    with apply_recompute(model, plan):
        assert_same(outcome(model), due)
    torch._dynamo.reset()
    assert_same(outcome(made()), due)


def test_observers_inside_a_compiled_block() -> None:
    """Hooks of compiled code are told apart in its first call."""
    model, log = compiled("blocks_in_place", "eager"), []
    for block in model.blocks:
        block.up.register_forward_hook(lambda module, args, output: log.append(1))
    steps(model)
    once = len(log)
    log.clear()
    torch._dynamo.reset()
    with apply_recompute(model, plan_of("full", NUM_BLOCKS)):
        steps(model)
    assert len(log) == once


def test_a_compiled_function_inside_a_block() -> None:
    helper = torch.compile(lambda h: F.gelu(h) * 2, backend="aot_eager")

    class Helped(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(helper(self.up(self.norm(x))))

    due = outcome(seeded(lambda: stack(NUM_BLOCKS, Helped)))
    for plan in (plan_of("full", NUM_BLOCKS), plan_of("freed", NUM_BLOCKS)):
        torch._dynamo.reset()
        model = seeded(lambda: stack(NUM_BLOCKS, Helped))
        with apply_recompute(model, plan):
            assert_same(outcome(model), due)
    # a saved operator in it is out of sight, another one is not
    model = seeded(lambda: stack(NUM_BLOCKS, Helped))
    saved = RecomputePlan(tuple(Segment(i, i + 1, SaveOps(("addmm",))) for i in range(NUM_BLOCKS)))
    with apply_recompute(model, saved):
        assert_same(outcome(model), due)


def test_square_loss_is_finite() -> None:
    assert square_loss(seeded(build)).isfinite()


@pytest.mark.long
def test_torchs_min_cut_in_a_kept_block_adds_to_ours_in_another() -> None:
    """A kept block that is compiled is torch's to recompute: its partitioner saves there what ours saves here."""
    held: dict[tuple[float, str], int] = {}
    gradients: dict[tuple[float, str], list[Tensor]] = {}
    for budget in (1.0, 0.0):
        for name, action in (("kept", Keep()), ("full", Full())):
            torch._dynamo.reset()
            model = blocks_in_place(seeded(build), "aot_eager_decomp_partition")
            plan = RecomputePlan((Segment(0, 1, action), Segment(1, NUM_BLOCKS, Keep())))
            with functorch_config.patch(activation_memory_budget=budget), apply_recompute(model, plan):
                square_loss(model).backward()  # compiles
                model.zero_grad()
                held[budget, name] = measure_step(lambda model=model: square_loss(model)).held_bytes  # type: ignore[misc]
                gradients[budget, name] = [parameter.grad for parameter in model.parameters()]
    assert held[1.0, "full"] < held[1.0, "kept"]
    assert held[0.0, "full"] < held[1.0, "full"]
    assert held[0.0, "kept"] < held[1.0, "kept"]
    for found in gradients.values():
        torch.testing.assert_close(found, gradients[1.0, "kept"])
