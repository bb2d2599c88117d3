"""The callback Recompute: the numbers of no recompute under any strategy, and nothing left on the module."""

from __future__ import annotations

import copy
import logging
import pickle
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from distributed import in_one, in_ranks
from distributed_callback import spawned, strategies
from lightning.pytorch import callbacks as cb
from lightning_modules import NUM_BLOCKS, Block, Net, assert_unpatched, calls, fit, loader, trainer
from torch import Tensor, nn

from lightning_recompute.plan import Full, Keep, RecomputePlan, Segment
from lightning_recompute.recompute_callback import Recompute
from lightning_recompute.strategy import RecomputeStrategy

NUM_STEPS = 6
PLAN = RecomputePlan((Segment(0, 2, Full()), Segment(2, 3, Keep())))


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    calls.clear()


@pytest.mark.parametrize(
    ("words", "replays"),
    [
        ({}, NUM_BLOCKS),
        ({"num_layers": 2}, NUM_BLOCKS),
        ({"method": "block", "num_layers": 1}, 1),
        ({"plan": PLAN}, 2),
        ({"blocks": "Block"}, NUM_BLOCKS),
        ({"granularity": None}, 0),
    ],
    ids=str,
)
def test_numbers_of_no_recompute(words: dict[str, Any], replays: int) -> None:
    options = {"accumulate_grad_batches": 2, "precision": "bf16-mixed"} if words.get("num_layers") else {}
    plain = fit("auto", **options)
    assert calls["train"] == NUM_STEPS * NUM_BLOCKS
    calls.clear()
    ours = fit("auto", callbacks=[Recompute(**words)], **options)
    ours.assert_equals(plain)
    assert calls["train"] == NUM_STEPS * (NUM_BLOCKS + replays)
    assert_unpatched(ours.module)


def test_evaluation_is_not_recomputed() -> None:
    """Case 29: once for each batch, also of a module left in eval mode by somebody."""
    run = trainer("auto", callbacks=[Recompute()])
    module = Net()
    run.validate(module, loader(), verbose=False)
    run.test(module, loader(), verbose=False)
    run.predict(module, loader())
    assert calls["val"] == calls["test"] == NUM_STEPS // 2 * NUM_BLOCKS
    assert_unpatched(module)


class EvalMode(Net):
    def on_train_start(self) -> None:
        self.blocks.eval()


def test_a_module_in_eval_mode_that_is_trained_is_recomputed() -> None:
    ours = fit("auto", EvalMode, callbacks=[Recompute()])
    assert calls["train"] == 2 * NUM_STEPS * NUM_BLOCKS
    ours.assert_equals(fit("auto", EvalMode))


class Probe(cb.Callback):
    """Notes the plan at each hook that a fit passes."""

    def __init__(self, recompute: Recompute) -> None:
        self.recompute = recompute
        self.during: RecomputePlan | None = None

    def on_train_batch_end(self, trainer: Any, pl_module: Net, *_: Any) -> None:
        self.during = self.recompute.active_plan
        # what is kept of a running callback, or made of it, is one that has not begun
        for copied in (copy.deepcopy(self.recompute), pickle.loads(pickle.dumps(self.recompute))):
            assert copied.active_plan is None
        assert self.during is not None


def test_two_fits_with_one_callback_and_one_trainer() -> None:
    recompute = Recompute(num_layers=2)
    probe = Probe(recompute)
    run, modules = trainer("auto", max_epochs=1, callbacks=[probe, recompute]), [Net(), Net(5)]
    for module in modules:
        calls.clear()
        run.fit_loop.epoch_progress.reset()
        run.fit(module, loader())
        assert calls["train"] == NUM_STEPS * len(module.blocks)
        assert probe.during.num_blocks == len(module.blocks)
        assert recompute.active_plan is None
        assert_unpatched(module)


def test_says_the_plan_once_and_writes_it_beside_the_logs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="lightning_recompute"):
        run = fit("auto", callbacks=[Recompute(plan=PLAN)], logger=pl.loggers.CSVLogger(tmp_path / "logs"))
    said = [record.message for record in caplog.records if record.name.startswith("lightning_recompute")]
    assert said == ["Recompute: blocks (3 x Block): blocks 0-1 full, units of 2; block 2 kept"]
    assert RecomputePlan.load(Path(run.trainer.logger.log_dir) / "plan.yaml") == PLAN


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        ({"granularity": "ful"}, ValueError, "granularity='ful'.*'full'"),
        ({"granularity": "selective", "method": "block"}, ValueError, "method='block'.*leave it out"),
        ({"granularity": "full", "modules": ["mlp"]}, ValueError, "modules=.*granularity='selective'"),
        ({"num_layers": 0}, ValueError, "num_layers=0: 1 up to"),
        ({"plan": PLAN, "num_layers": 2}, ValueError, "plan and num_layers=2"),
        ({"plan": 3}, TypeError, "plan=3"),
        ({"plan": "nowhere.yaml"}, FileNotFoundError, "nowhere.yaml"),
        ({"distribute_saved_activations": True}, ValueError, "distribute_saved_activations=True.*Leave it out"),
    ],
    ids=str,
)
def test_refused_when_made(words: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Recompute(**words)


@pytest.mark.parametrize("word", ["granularity", "modules", "plan", "blocks"])
def test_arguments_are_given_by_name(word: str) -> None:
    with pytest.raises(TypeError, match="positional"):
        Recompute(word)  # type: ignore[misc]


class NoBlocks(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()


@pytest.mark.parametrize(
    ("words", "module", "message"),
    [
        ({"num_layers": 4}, Net, "num_layers=4, but .* 3 block"),
        ({"plan": RecomputePlan((Segment(0, 4, Full()),))}, Net, "the plan covers 4 blocks, the model has 3"),
        ({"blocks": "block"}, Net, "did you mean 'blocks'"),
        ({"offload_saved_activations": True}, Net, "offload_saved_activations"),
        ({}, NoBlocks, "no list of blocks"),
    ],
    ids=str,
)
def test_refused_when_fitting_begins(words: dict[str, Any], module: type[Net], message: str) -> None:
    built = module()
    with pytest.raises(ValueError, match=message):
        fit("auto", lambda: built, callbacks=[Recompute(**words)])
    assert_unpatched(built)


@pytest.mark.parametrize(
    "strategy", [RecomputeStrategy(), "recompute", RecomputeStrategy(granularity=None)], ids=["full", "by name", "none"]
)
def test_together_with_the_strategy_one_error_says_which_to_drop(strategy: Any) -> None:
    built = Net()
    with pytest.raises(ValueError, match=r"RecomputeStrategy and the callback Recompute.*leave the callback out"):
        fit(strategy, lambda: built, callbacks=[Recompute()])
    assert_unpatched(built)


def test_two_of_them_in_one_trainer_are_refused() -> None:
    built = Net()
    with pytest.raises(ValueError, match="two Recompute callbacks"):
        fit("auto", lambda: built, callbacks=[Recompute(), Recompute(granularity=None)])
    assert_unpatched(built)


class Breaks(cb.Callback):
    """Raises in one hook; some hooks are a module's, too."""

    def __init__(self, hook: str, error: type[BaseException] = ArithmeticError) -> None:
        self.error = error
        setattr(self, hook, self.fail)

    def fail(self, *_: Any, **__: Any) -> None:
        raise self.error("somebody's mistake")


HOOKS = (
    "on_fit_start",
    "on_sanity_check_start",
    "on_train_start",
    "on_train_batch_start",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_validation_batch_start",
    "on_train_epoch_end",
    "on_train_end",
    "on_fit_end",
    "teardown",
)


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("first", [True, False])
def test_an_exception_anywhere_leaves_the_module_as_it_was(hook: str, first: bool) -> None:
    built, recompute = Net(), Recompute()
    callbacks = [Breaks(hook), recompute] if first else [recompute, Breaks(hook)]
    with pytest.raises(ArithmeticError):
        fit("auto", lambda: built, callbacks=callbacks)
    assert_unpatched(built)
    assert recompute.active_plan is None
    # and the same callback trains the same module afterwards
    calls.clear()
    fit("auto", lambda: built, callbacks=[recompute])
    assert calls["train"] == 2 * NUM_STEPS * NUM_BLOCKS


def test_a_callback_that_fails_while_cleaning_up_keeps_nothing_on_the_module() -> None:
    """Lightning stops at the first callback that raises in on_exception."""
    broken = Breaks("on_train_batch_start")
    broken.on_exception = broken.fail  # type: ignore[method-assign]
    built = Net()
    with pytest.raises(ArithmeticError):
        fit("auto", lambda: built, callbacks=[broken, Recompute()])
    assert_unpatched(built)


class RaisesInside(Net):
    """Fails within a block of a unit, in forward or in its replay."""

    def __init__(self, call: int, error: type[BaseException]) -> None:
        super().__init__()
        self.error, self.due = error, call
        self.blocks[1].register_forward_hook(self.count)

    def count(self, *_: Any) -> None:
        self.due -= 1
        if self.due == 0:
            raise self.error("inside a block")


@pytest.mark.parametrize("call", [1, 2], ids=["forward", "replay"])
@pytest.mark.parametrize("error", [ArithmeticError, KeyboardInterrupt])
def test_an_exception_within_a_unit(call: int, error: type[BaseException]) -> None:
    built = RaisesInside(call, error)
    # Lightning ends the process in an orderly way on Ctrl-C
    with pytest.raises(SystemExit if error is KeyboardInterrupt else error):
        fit("auto", lambda: built, callbacks=[Recompute(num_layers=2)])
    assert not [name for name, part in built.named_modules() if "forward" in vars(part)]
    built.due = -1
    fit("auto", lambda: built, callbacks=[Recompute(num_layers=2)])


@pytest.mark.parametrize("position", [0, 1])
def test_a_search_for_the_batch_size_meets_the_module_as_it_will_be_trained(position: int) -> None:
    """Lightning puts the finder in front of all callbacks; its steps run when fitting begins."""

    class WithLoader(Net):
        def __init__(self, batch_size: int = 2) -> None:
            super().__init__()
            self.batch_size = batch_size

        def train_dataloader(self) -> Any:
            return loader(batch_size=self.batch_size)

        def val_dataloader(self) -> Any:
            return loader()

    counted = []
    for recompute in ([], [Recompute()]):
        calls.clear()
        run = trainer("auto", max_epochs=1, callbacks=recompute)
        built = WithLoader()
        if position:
            pl.tuner.Tuner(run).scale_batch_size(built, mode="power", max_trials=2, steps_per_trial=1, init_val=2)
        else:
            finder = cb.BatchSizeFinder("power", max_trials=2, steps_per_trial=1, init_val=2)
            trainer("auto", max_epochs=1, callbacks=[*recompute, finder]).fit(built)
        counted.append(calls["train"])
        assert_unpatched(built)
    assert counted[1] == 2 * counted[0] > 0


@pytest.mark.long
@pytest.mark.parametrize("whole", [True, False])
def test_compiled_modules(whole: bool) -> None:
    """T12: what torch.compile made of the LightningModule, or of each block."""

    class Silent(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.loss(batch)  # self.log does not compile (T13)

    def build() -> Any:
        module = Silent()
        if whole:
            return torch.compile(module, backend="eager")
        for block in module.blocks:
            block.compile(backend="eager")
        return module

    found = []
    for recompute in ([], [Recompute()]):
        pl.seed_everything(1, verbose=False)
        built = build()
        trainer("auto", callbacks=recompute, limit_val_batches=0).fit(built, loader())
        module = getattr(built, "_orig_mod", built)
        found.append(module.state_dict())
        assert not [name for name, part in module.blocks.named_modules() if "forward" in vars(part)]
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_the_trainer_of_pytorch_lightning_takes_it_in_a_list() -> None:
    """T25: the two Lightnings are two copies of one library."""
    import pytorch_lightning as other

    class Other(other.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            hidden = batch[0]
            for block in self.blocks:
                hidden = block(hidden)
            return hidden.square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    found = []
    for recompute in ([], [Recompute()]):
        calls.clear()
        other.seed_everything(1, verbose=False)
        built = Other()
        other.Trainer(
            accelerator="cpu",
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=recompute,
        ).fit(built, loader())
        found.append((built.state_dict(), calls["train"]))
        assert not [name for name, part in built.blocks.named_modules() if "forward" in vars(part)]
    assert all(torch.equal(value, found[1][0][name]) for name, value in found[0][0].items())
    assert found[1][1] == 2 * found[0][1] > 0


# ---- other strategies, two processes


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What both ranks found under each of Lightning's strategies, with and without the callback."""
    return in_ranks(strategies, tmp_path_factory.mktemp("callback"))


@pytest.mark.xdist_group("two processes")
@pytest.mark.parametrize("name", ["ddp", "fsdp", "fully_shard"])
def test_lightnings_distributed_strategies(ranks: list[dict[str, Any]], name: str) -> None:
    for rank in ranks:
        plain, ours = rank[name, False], rank[name, True]
        assert ours["losses"] == plain["losses"]
        assert ours["calls"] == 2 * plain["calls"] > 0
        assert ours["patched"] == 0
        assert all(torch.equal(value, ours["weights"][key]) for key, value in plain["weights"].items())
    assert ranks[0][name, True]["losses"] != ranks[1][name, True]["losses"]


@pytest.mark.xdist_group("two processes")
def test_units_of_several_blocks_that_fsdp_shards_one_by_one_are_refused(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["pairs"].startswith("blocks.0 and blocks.1 are one unit, but FSDP shards each")


@pytest.mark.xdist_group("two processes")
def test_spawned_processes(ranks: list[dict[str, Any]], tmp_path: Path) -> None:
    """The callback travels to the processes; only the weights come back."""
    plain, ours = ranks[0]["ddp", False], in_one(spawned, tmp_path)
    assert all(torch.equal(value, ours["weights"][key]) for key, value in plain["weights"].items())
    assert ours["calls"] == 2 * plain["calls"] > 0
