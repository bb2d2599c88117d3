"""What RecomputeStrategy refuses, when, in which words, and what an error leaves behind: nothing."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from jsonargparse import ArgumentParser
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.memory import is_oom_error
from lightning_modules import NUM_BLOCKS, Net, assert_unpatched, fit, loader, samples, trainer
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from lightning_recompute.plan import Full, Keep, RecomputePlan, Segment
from lightning_recompute.strategy import RecomputeStrategy

PLAN = RecomputePlan((Segment(0, NUM_BLOCKS, Full()),))


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


# ---- arguments ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"granularity": "fulll"}, "granularity='fulll'.*'full'"),
        ({"method": "block", "granularity": "selective"}, "method='block' with granularity='selective'"),
        ({"num_layers": 0}, "num_layers=0"),
        ({"distribute_saved_activations": True}, "distribute_saved_activations=True with tensor_parallel_size=1"),
        ({"start_method": "thread"}, "start_method='thread': one of popen, spawn, fork, forkserver is due"),
        ({"plan": PLAN, "granularity": None}, "plan and granularity=None: .* Leave out granularity, or leave out plan"),
        ({"plan": PLAN, "method": "block", "num_layers": 2}, "Leave out method and num_layers, or leave out plan"),
        ({"plan": PLAN, "granularity": "selective", "modules": ["mlp"]}, "Leave out granularity and modules"),
        ({"plan": PLAN, "offload_saved_activations": True}, "Leave out offload_saved_activations"),
    ],
    ids=str,
)
def test_refused_when_made(words: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RecomputeStrategy(**words)


def test_a_plan_is_a_plan_or_the_path_of_one(tmp_path: Path) -> None:
    # words at their defaults count as not given: the command line passes and saves every one
    assert RecomputeStrategy(plan=PLAN, granularity="full", method=None).plan is PLAN
    path = PLAN.save(tmp_path / "my.yaml")
    run = fit(RecomputeStrategy(plan=str(path)))
    assert run.trainer.strategy.plan == str(path)
    with pytest.raises(TypeError, match="plan=3: a RecomputePlan, or the path of one, is due"):
        RecomputeStrategy(plan=3)  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError):
        RecomputeStrategy(plan="absent.yaml")


class NoBlocks(Net):
    def __init__(self) -> None:
        super().__init__()
        del self.blocks


@pytest.mark.parametrize(
    ("words", "module", "message"),
    [
        ({"num_layers": 4}, Net, r"num_layers=4, but the largest list or stage has 3"),
        ({"plan": RecomputePlan((Segment(0, 4, Keep()),))}, Net, r"the plan covers 4 blocks, the model has 3"),
        ({"plan": RecomputePlan((Segment(0, 3, Full(inputs="shard")),))}, Net, "tensor-parallel group"),
        ({"blocks": "layers"}, Net, "blocks='layers' is neither a path nor a class"),
        ({"offload_saved_activations": True}, Net, "offload_saved_activations"),
        ({}, NoBlocks, "no list of blocks.*blocks='path.of.the.list'"),
    ],
    ids=str,
)
def test_refused_when_fitting_begins(words: dict[str, Any], module: type[Net], message: str) -> None:
    """What depends on the model or the device, before the first step and with nothing left on the module."""
    made = module()
    run = trainer(RecomputeStrategy(**words))
    with pytest.raises(ValueError, match=message):
        run.fit(made, loader())
    assert run.global_step == 0
    assert_unpatched(made)
    # evaluation needs no blocks
    if module is Net:
        assert trainer(RecomputeStrategy(**words)).validate(made, loader(), verbose=False)


def test_nothing_is_recomputed_in_a_module_without_blocks_when_nothing_is_asked_for() -> None:
    class Plain(NoBlocks):
        def forward(self, hidden: Tensor) -> Tensor:
            return self.head(self.embed(hidden))

    assert fit(RecomputeStrategy(granularity=None), Plain, val=None).losses


# ---- command line ------------------------------------------------------------------------------------------


def strategy_from_yaml(init_args: str, folder: Path) -> RecomputeStrategy:
    """What LightningCLI makes of a config file."""
    text = f"trainer:\n  accelerator: cpu\n  devices: 1\n  strategy:\n    class_path: {RecomputeStrategy.__module__}."
    text += f"RecomputeStrategy\n    init_args: {init_args}\n"
    (folder / "config.yaml").write_text(text)
    cli = LightningCLI(Net, args=["--config", str(folder / "config.yaml")], run=False, save_config_callback=None)
    assert isinstance(cli.trainer.strategy, RecomputeStrategy)
    return cli.trainer.strategy


def test_yaml_and_names_make_strategies(tmp_path: Path) -> None:
    """Arguments come through typed, and stay on the object as they were given."""
    made = strategy_from_yaml("{method: block, num_layers: 2, blocks: [blocks], timeout: '0:10:00'}", tmp_path)
    assert (made.granularity, made.method, made.num_layers, made.blocks) == ("full", "block", 2, ["blocks"])
    assert made.timeout is not None
    assert made.timeout.total_seconds() == 600
    path = str(PLAN.save(tmp_path / "plan.yaml"))
    assert strategy_from_yaml(f"{{plan: {path}}}", tmp_path).plan == path
    for name in ("recompute", "RecomputeStrategy"):
        cli = LightningCLI(
            Net,
            args=["--trainer.accelerator=cpu", "--trainer.devices=1", f"--trainer.strategy={name}"],
            run=False,
            save_config_callback=None,
        )
        assert isinstance(cli.trainer.strategy, RecomputeStrategy)


@pytest.mark.parametrize(
    ("init_args", "words"),
    [
        ("{granularity: ful}", ["granularity", "full", "selective"]),
        ("{num_layerz: 2}", ["num_layerz", "not accepted"]),
        ("{num_layers: 2.5}", ["num_layers", "2.5"]),
        ("{memory_budgit: 22GiB}", ["memory_budgit", "not accepted"]),
    ],
)
def test_typos_in_yaml_are_named(
    init_args: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        strategy_from_yaml(init_args, tmp_path)
    assert left.value.code
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert [word for word in words if word not in said] == []


def test_wrong_combinations_in_yaml_are_the_cause_that_is_shown(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"method='block' with granularity='selective'.* set granularity='full'"):
        strategy_from_yaml("{method: block, granularity: selective}", tmp_path)


def test_help_explains_every_argument(capsys: pytest.CaptureFixture[str]) -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(Strategy, "strategy")
    with pytest.raises(SystemExit):
        parser.parse_args([f"--strategy.help={RecomputeStrategy.__module__}.RecomputeStrategy"])
    lines = capsys.readouterr().out.splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith("  --strategy.") and ".help " not in line]
    assert len(starts) == len(inspect.signature(RecomputeStrategy).parameters)
    for start, stop in zip(starts, [*starts[1:], len(lines)], strict=True):
        text = " ".join(lines[start + 1 : stop]).partition("(type:")[0].split()
        assert len(text) > 4, lines[start]


# ---- while training ----------------------------------------------------------------------------------------


class Breaks(Net):
    """Raises at one place of the second step."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.broken = True

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.where == "block" and batch_idx == 1 and self.broken:
            self.blocks[1].up.register_forward_pre_hook(self.fail)
        if self.where == "step" and batch_idx == 1 and self.broken:
            self.fail()
        loss = super().training_step(batch, batch_idx)
        if self.where == "backward" and batch_idx == 1 and self.broken:
            loss.register_hook(self.fail)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.where == "validation" and self.losses and self.broken:
            self.fail()

    def fail(self, *_: Any) -> None:
        raise ArithmeticError("the user's own mistake")


@pytest.mark.parametrize("where", ["step", "block", "backward", "validation"])
@pytest.mark.parametrize("words", [{}, {"num_layers": 2}], ids=["one by one", "pairs"])
def test_an_exception_leaves_the_module_as_it_was(where: str, words: dict[str, Any]) -> None:
    """Shows 8: teardown ran, nothing is patched, and the same module and trainer settings train well afterwards."""
    module = Breaks(where)
    run = trainer(RecomputeStrategy(**words))
    with pytest.raises(ArithmeticError, match=r"^the user's own mistake$"):
        run.fit(module, loader(), loader())
    assert run.interrupted
    assert run.strategy.active_plan is None
    module.blocks[1].up._forward_pre_hooks.clear()
    assert_unpatched(module)
    module.broken = False
    again = copy.deepcopy(module)
    pickle.dumps(module)
    runs = []
    for strategy, part in ((RecomputeStrategy(**words), module), ("auto", again)):
        part.losses.clear()
        runs.append(fit(strategy, lambda part=part: part))
    runs[0].assert_equals(runs[1])


def test_a_checkpoint_written_on_an_exception_can_be_resumed(tmp_path: Path) -> None:
    """T18."""

    class Stopping(pl.callbacks.OnExceptionCheckpoint):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == 4:
                raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fit(RecomputeStrategy(), callbacks=[Stopping(tmp_path)], enable_checkpointing=True)
    assert fit(RecomputeStrategy(), ckpt_path=str(tmp_path / "on_exception.ckpt")).trainer.global_step > 4


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ({}, "every block is being recomputed"),
        ({"method": "block", "num_layers": 1}, "granularity='full' with method='uniform'"),
        ({"granularity": None}, "no block was being recomputed"),
    ],
)
def test_out_of_memory_keeps_its_text_and_gains_advice(words: dict[str, Any], advice: str) -> None:
    """T26: Lightning recognises out-of-memory errors by one string argument."""

    class OutOfMemory(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            super().training_step(batch, batch_idx)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    with pytest.raises(torch.OutOfMemoryError) as caught:
        fit(RecomputeStrategy(**words), OutOfMemory)
    assert is_oom_error(caught.value)
    assert str(caught.value).startswith("CUDA out of memory. Tried to allocate 2.00 GiB.\nRecomputeStrategy: ")
    assert advice in str(caught.value)


def test_batch_size_finder_survives_out_of_memory() -> None:
    """T26: an error in the middle of a unit is a result for the finder; the fit after it is whole."""

    class Limited(Net):
        def __init__(self) -> None:
            super().__init__(dropout=0.0)
            self.batch_size = 2
            self.blocks[2].norm.register_forward_pre_hook(self.limit)

        def limit(self, _: nn.Module, args: tuple[Tensor]) -> None:
            if len(args[0]) > 4:
                raise RuntimeError("CUDA out of memory.")

        def train_dataloader(self) -> Any:
            return DataLoader(samples(), self.batch_size)

    finder = pl.callbacks.BatchSizeFinder(max_trials=3)
    run = fit(RecomputeStrategy(num_layers=3), Limited, train=lambda: None, callbacks=[finder])
    assert run.module.batch_size == 4
    assert len(run.losses) >= 2 * 3


def test_errors_with_other_arguments_pass_untouched() -> None:
    for error in (RuntimeError(3), KeyError(), ValueError("text", 2)):
        before = error.args
        trainer(RecomputeStrategy()).strategy.on_exception(error)
        assert error.args == before


# ---- sharded modules ---------------------------------------------------------------------------------------


@pytest.fixture
def world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("world_of_one")
def test_sharded_modules_are_sent_to_the_callback() -> None:
    class Sharded(Net):
        def configure_model(self) -> None:
            fully_shard(self.blocks[1], mesh=dist.init_device_mesh("cpu", (1,)))

    with pytest.raises(ValueError, match=r"blocks\.1 is sharded by FSDPBlock.*callback lightning_recompute\.Recompute"):
        fit(RecomputeStrategy(), Sharded)
