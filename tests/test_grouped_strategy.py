"""RecomputeStrategy over groups of ranks under Lightning: the numbers, metrics and habits of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import in_one, in_ranks
from grouped_checks import FITS, LAYOUTS, alone, check_all, fits_of
from grouped_modules import trainer_of

from lightning_recompute.strategy import RecomputeStrategy

pytestmark = pytest.mark.xdist_group("grouped strategy")

Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def due(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    result: dict[str, Any] = in_one(alone, tmp_path_factory.mktemp("alone"))
    return result


@pytest.fixture(scope="module", params=[2, 4])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    return in_ranks(check_all, tmp_path_factory.mktemp("ranks"), limit=400, num_processes=request.param)


def layouts_with(name: str, world: int) -> list[str]:
    return [layout for layout in LAYOUTS[world] if name in fits_of(layout, world)]


def assert_close(ours: dict[str, torch.Tensor], due: dict[str, torch.Tensor], tolerance: float) -> None:
    assert ours.keys() == due.keys()
    for name, value in due.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=tolerance, msg=lambda text, name=name: name + text)


@pytest.mark.parametrize("name", FITS)
def test_a_fit_equals_one_process(found: Found, due: dict[str, Any], name: str) -> None:
    """Losses' norm, clipping by one global norm, weights, epoch metrics of `self.log` and torchmetrics."""
    # Adam and 16 bit make much of the last bits
    tolerance = {"bf16-mixed": 5e-3, "16-mixed": 2e-3, "clip": 1e-9, "manual": 1e-9}.get(name, 1e-12)
    expected = due[name]
    assert layouts_with(name, len(found))
    for rank in found:
        for layout in layouts_with(name, len(found)):
            fit = rank["fits"][f"{layout} | {name}"]
            assert fit["steps"] == expected["steps"]
            assert_close(fit["weights"], expected["weights"], tolerance)
            assert fit["metrics"].keys() == expected["metrics"].keys()
            assert fit["metrics"] == pytest.approx(expected["metrics"], rel=max(100 * tolerance, 1e-6))
            assert fit["norms"] == pytest.approx(expected["norms"], rel=max(tolerance, 1e-6))


def test_a_module_built_on_the_meta_device(found: Found, due: dict[str, Any]) -> None:
    """The same values in any layout, ties kept, never whole on a rank; a validation goes on with them."""
    for rank in found:
        for layout in LAYOUTS[len(found)]:
            ours = rank["meta"][layout]
            assert_close(ours["weights"], due["meta"]["weights"], 1e-6)
            assert ours["tied"]
            assert ours["same"]
            assert ours["kinds"] == ["DTensor"]


def test_all_ranks_see_the_same(found: Found) -> None:
    """Decisions are of the whole world (T4); evaluation and a second fit run as in one process."""
    first = found[0]["habits"]
    for rank in found:
        habits = rank["habits"]
        assert habits["decisions"][:4] == [True, True, False, False]
        assert habits["epochs"] == 3  # the first, and two without an improvement by 10
        assert habits["tested"] == pytest.approx(first["tested"])
        assert habits["validated"]["val_loss"] == pytest.approx(habits["tested"])
        assert habits["validated"]["val_mean"] == pytest.approx(habits["tested"])
        assert habits["again"] == 5
        assert habits["mesh"]
    # ranks that share each layer predict the same rows
    assert torch.equal(found[0]["habits"]["predicted"], found[1]["habits"]["predicted"])


@pytest.mark.parametrize("found", [2], indirect=True)
def test_errors_of_the_first_step(found: Found) -> None:
    for rank in found:
        refusals = rank["refusals"]
        for name in ("BatchSizeFinder", "EMAWeightAveraging", "StochasticWeightAveraging"):
            assert refusals[name].startswith(f"{name} does not work while the module's parameters are distributed")
        assert refusals["norm"].startswith("ValueError: blocks.0.attn.q_proj.1.norm.weight is alike on all")
        assert "replicated_with_grad_allreduce" in refusals["norm"]
        assert "were given different batches" in refusals["batch"]
        assert "use_distributed_sampler" in refusals["batch"]
        assert refusals["breaks"].startswith("ArithmeticError: the user's own mistake")
        assert [refusals[f"{name} left"] for name in ("norm", "batch", "breaks")] == [[], [], []]


@pytest.mark.parametrize(
    ("options", "devices", "told"),
    [
        ({"tensor_parallel_size": 2}, 3, "do not divide the 3 processes of this run; take 2 or 4"),
        ({"tensor_parallel_size": 2}, 1, "do not divide the 1 process of this run; take 2"),
        ({"tensor_parallel_size": 2, "start_method": "spawn"}, 2, "start_method='spawn' brings back the weights"),
        ({"data_parallel": "shard", "start_method": "fork"}, 2, "take start_method='popen'"),
    ],
)
def test_worlds_that_cannot_be_grouped(options: dict[str, Any], devices: int, told: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=told):
        trainer_of(tmp_path, RecomputeStrategy(**options), devices=devices)


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"sequence_parallel": True}, ValueError, "tensor_parallel_size=1 is one"),
        ({"tensor_parallel_plan": {"head": "colwise"}}, ValueError, "or leave tensor_parallel_plan out"),
        ({"tensor_parallel_size": 0}, ValueError, "at least 1 is due"),
        ({"tensor_parallel_size": "2"}, TypeError, "an int is due"),
        ({"data_parallel": "sharded"}, ValueError, "'replicate' or 'shard' is due"),
        ({"distribute_saved_activations": True}, ValueError, "and there is one"),
        (
            {"distribute_saved_activations": True, "tensor_parallel_size": 2, "sequence_parallel": True},
            ValueError,
            "each rank keeps its part of a unit's inputs already",
        ),
    ],
)
def test_options_that_mean_nothing(options: dict[str, Any], error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        RecomputeStrategy(**options)
