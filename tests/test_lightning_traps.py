"""What Lightning asks of a strategy and does not say; the T-numbers are those of our list of traps."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry
from lightning_modules import (
    Block,
    Fit,
    Net,
    SeedSteps,
    fit,
    loader,
    trainer,
)
from torch import Tensor, nn

from lightning_recompute.plan import Full, RecomputePlan, Segment
from lightning_recompute.strategy import RecomputeStrategy


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


# ---- one device is Lightning's default ---------------------------------------------------------------------


def test_one_device_is_neither_distributed_nor_seeded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """T1, T2, T3: no injected sampler, no second seeding, no process group, no launcher, rank 0 in any surroundings."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "7")
    train = loader()
    rng: list[Tensor] = []

    class Look(pl.Callback):
        def setup(self, *_: Any, **__: Any) -> None:
            rng.append(torch.get_rng_state())

    pl.seed_everything(5, verbose=False)
    torch.rand(3)
    rng.append(torch.get_rng_state())
    run = trainer(RecomputeStrategy(), callbacks=[Look()])
    run.fit(Net(), train)
    strategy = run.strategy
    assert isinstance(strategy, RecomputeStrategy)
    assert strategy.is_distributed is False
    assert run.train_dataloader is train
    assert strategy.launcher is None
    assert not dist.is_initialized()
    assert (strategy.global_rank, strategy.local_rank, strategy.world_size, strategy.is_global_zero) == (0, 0, 1, True)
    assert strategy.root_device == torch.device("cpu")
    assert os.environ["WORLD_SIZE"] == "7"
    # between the two looks: the module's weights only
    torch.set_rng_state(rng[0])
    Net()
    assert torch.equal(torch.get_rng_state(), rng[1])


def test_collectives_are_identities_before_the_group_exists() -> None:
    """T5: callbacks reduce before setup_environment, even where two devices are to come."""
    for devices in (1, 2):
        strategy = trainer(RecomputeStrategy(), devices=devices).strategy
        assert isinstance(strategy, RecomputeStrategy)
        value = torch.tensor(3.0)
        assert strategy.reduce(value) is value
        assert strategy.broadcast(value) is value
        assert strategy.all_gather(value) is value
        assert strategy.reduce_boolean_decision(False) is False
        assert strategy.reduce_boolean_decision(True, all=False) is True
        strategy.barrier("anything")
        assert strategy.num_processes == devices
        assert strategy.is_distributed is (devices == 2)
        assert strategy.distributed_sampler_kwargs == {"num_replicas": devices, "rank": 0}


def test_names_are_registered_once_and_again() -> None:
    """Importing registers; what Lightning's registry holds under our names does not stop that."""
    for name in ("recompute", "recompute_spawn", "recompute_fork", "recomputestrategy"):
        made = trainer(name, devices=2).strategy
        assert isinstance(made, RecomputeStrategy)
        assert made.start_method == {"recompute_spawn": "spawn", "recompute_fork": "fork"}.get(name, "popen")
    before = dict(StrategyRegistry)
    RecomputeStrategy.register_strategies(StrategyRegistry)
    assert dict(StrategyRegistry) == before


# ---- checkpoints -------------------------------------------------------------------------------------------


class Marked(Net):
    """Puts an object in its checkpoint that only a full unpickling reads."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mark"] = Block()


def test_resume_under_another_policy_and_without_us(tmp_path: Path) -> None:
    """Shows 6: equal losses to the bit from an epoch border on; an ordinary file for Lightning and for torch."""

    def saved(strategy: Any, folder: Path) -> Fit:
        saver = pl.callbacks.ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
        options: dict[str, Any] = {"enable_checkpointing": True, "callbacks": [SeedSteps(), saver]}
        return fit(strategy, train=loader, max_epochs=4, **options)

    def resumed(strategy: Any, path: str) -> Fit:
        return fit(strategy, seed=99, train=loader, ckpt_path=path, max_epochs=4, callbacks=[SeedSteps()])

    whole, path = saved(RecomputeStrategy(), tmp_path), str(tmp_path / "epoch=1.ckpt")
    saved("auto", tmp_path / "plain")
    plain_path = str(tmp_path / "plain/epoch=1.ckpt")
    plan = RecomputePlan((Segment(0, 2, Full()), Segment(2, 3, Full())))
    for strategy, start in (
        (RecomputeStrategy(method="block", num_layers=1), path),
        (RecomputeStrategy(plan=plan), path),
        ("auto", path),
        (RecomputeStrategy(), plain_path),
    ):
        rest = resumed(strategy, start)
        assert rest.losses == whole.losses[len(whole.losses) // 2 :]
        assert all(torch.equal(value, whole.weights[name]) for name, value in rest.weights.items())

    state = torch.load(path, weights_only=True)
    plain = torch.load(plain_path, weights_only=True)
    assert state.keys() == plain.keys()
    assert list(state["state_dict"]) == list(Net().state_dict())
    Net().load_state_dict(state["state_dict"])
    assert torch.equal(Net.load_from_checkpoint(path).head.weight, state["state_dict"]["head.weight"])
    whole.trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    assert "optimizer_states" not in torch.load(tmp_path / "weights.ckpt", weights_only=True)


def test_checkpoints_with_objects_resume_before_on_fit_start(tmp_path: Path) -> None:
    """T10, T11: `weights_only=False` reaches the file, and on_fit_start sees the restored weights."""

    class Look(pl.Callback):
        def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            self.seen = pl_module.head.weight.clone()

    first = fit(RecomputeStrategy(), Marked)
    first.trainer.save_checkpoint(tmp_path / "marked.ckpt")
    look, module = Look(), Marked()
    run = trainer(RecomputeStrategy(), max_epochs=3, callbacks=[look])
    assert run.strategy.restore_checkpoint_after_setup is False
    run.fit(module, loader(), ckpt_path=tmp_path / "marked.ckpt", weights_only=False)
    assert torch.equal(look.seen, first.weights["head.weight"])


def test_best_and_last_checkpoints_are_found(tmp_path: Path) -> None:
    saver = pl.callbacks.ModelCheckpoint(tmp_path, monitor="val_loss", save_last=True)
    run = fit(RecomputeStrategy(), enable_checkpointing=True, callbacks=[saver], max_epochs=3)
    for path in ("best", "last"):
        assert run.trainer.validate(run.module, loader(), ckpt_path=path, verbose=False)
        assert run.trainer.test(run.module, loader(), ckpt_path=path, verbose=False)


# ---- compile -----------------------------------------------------------------------------------------------


class Silent(Net):
    """Logs nothing (T13)."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.losses.append(outputs["loss"].item())


def whole_compiled() -> Any:
    return torch.compile(Silent(), backend="eager")


def blocks_compiled_in_place() -> Net:
    module = Silent()
    for block in module.blocks:
        block.compile(backend="eager")
    return module


def blocks_replaced_by_compiled() -> Net:
    module = Silent()
    for index, block in enumerate(module.blocks):
        module.blocks[index] = torch.compile(block, backend="eager")
    return module


@pytest.mark.parametrize(
    "make",
    [whole_compiled, blocks_compiled_in_place, pytest.param(blocks_replaced_by_compiled, marks=pytest.mark.long)],
)
def test_compiled_modules_train_with_equal_losses(make: Callable[[], Any]) -> None:
    """T12: whole LightningModule and single blocks."""
    fits = []
    for strategy in ("auto", RecomputeStrategy()):
        torch._dynamo.reset()
        fits.append(fit(strategy, make, val=None))
    fits[1].assert_equals(fits[0])
    assert isinstance(fits[1].trainer.strategy, SingleDeviceStrategy)


def test_the_crash_of_log_in_a_compiled_module_comes_with_a_hint() -> None:
    """T13: Lightning 2.6.6 on torch 2.13 fails there under any strategy; a pair that does not is as good."""
    outcomes = []
    for strategy in ("auto", RecomputeStrategy()):
        torch._dynamo.reset()
        try:
            outcomes.append(fit(strategy, lambda: torch.compile(Net(), backend="eager"), val=None).losses)
        except Exception as error:
            outcomes.append(str(error))
    theirs, ours = outcomes
    if isinstance(theirs, str):
        assert "under any strategy" not in theirs
        assert "in log\n" in ours
        assert "under any strategy. Compile the model inside it" in ours
    else:
        assert ours == theirs


# ---- precision and state --------------------------------------------------------------------------------------


def test_fused_optimizers_and_clipping_stay_lightnings_matter() -> None:
    """T30: the same outcome as under the default, whatever that is in this release."""

    class Fused(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 0.01, fused=True)

    def outcome(strategy: Any, precision: str) -> Fit | str:
        try:
            return fit(strategy, Fused, precision=precision, gradient_clip_val=0.1)
        except RuntimeError as error:
            return str(error)

    for precision in ("32-true", "bf16-mixed"):
        ours, theirs = outcome(RecomputeStrategy(), precision), outcome("auto", precision)
        if isinstance(theirs, str):
            assert ours == theirs
        else:
            assert isinstance(ours, Fit)
            ours.assert_equals(theirs)


def test_batch_norm_statistics_move_once_a_step() -> None:
    """T29."""

    def module() -> Net:
        return Net(norm=nn.BatchNorm1d)

    ours, theirs = (fit(strategy, module) for strategy in (RecomputeStrategy(), "auto"))
    ours.assert_equals(theirs)
    assert ours.weights["blocks.0.norm.num_batches_tracked"] == len(ours.losses)


# ---- other people's modules and trainers -------------------------------------------------------------------


@pytest.fixture
def world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("world_of_one")
def test_somebody_elses_process_group_is_left_alone() -> None:
    """One device within a user's own world behaves as Lightning's default there: no collective."""
    ours, theirs = fit(RecomputeStrategy()), fit("auto")
    ours.assert_equals(theirs)


def test_the_other_lightnings_trainer_says_how_to_import() -> None:
    """T25: two copies of one library; ours is no strategy for the other one, and says so."""
    import pytorch_lightning

    for strategy in (RecomputeStrategy(), "recompute"):
        RecomputeStrategy()
        with pytest.raises(TypeError, match=r"`import lightning\.pytorch as pl` in place of .*Recompute\(\.\.\.\)"):
            pytorch_lightning.Trainer(strategy=strategy, accelerator="cpu", devices=1, logger=False)
