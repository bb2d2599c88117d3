"""Checkpoint folders and files through Lightning, and what is refused."""

from __future__ import annotations

import copy
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_strategy import FolderStrategy, Model, fit, same, trainer
from checkpoint_toys import build, differences, dumped, everything, train
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.tuner import Tuner
from torch import nn

from lightning_recompute.checkpoint_loading import (
    is_sharded_checkpoint,
    load_module_state,
    load_optimizer_states,
    load_sharded,
    read_checkpoint,
)
from lightning_recompute.saved_states import Saved, SavedStates
from lightning_recompute.sharded_checkpoint import save_sharded


@pytest.fixture(scope="module")
def due(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Three epochs without a break, in Lightning alone."""
    return fit(tmp_path_factory.mktemp("due"), 3)


def net(folder: Path) -> nn.Module:
    """A small module, saved in `folder / "a"`."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    save_sharded(folder / "a", {"state_dict": module.state_dict()})
    return module


# ---- through Lightning


@pytest.mark.parametrize("after_setup", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_run_goes_on_from_a_folder(tmp_path: Path, due: Model, asynchronous: bool, after_setup: bool) -> None:
    fit(tmp_path, 2, FolderStrategy(asynchronous))
    path = tmp_path / "epoch=1.ckpt"
    assert is_sharded_checkpoint(path)
    assert same(fit(tmp_path, 3, FolderStrategy(after_setup=after_setup), path), due)


def test_a_run_goes_on_from_an_ordinary_file(tmp_path: Path, due: Model) -> None:
    fit(tmp_path, 2)
    path = tmp_path / "epoch=1.ckpt"
    assert not is_sharded_checkpoint(path)
    assert same(fit(tmp_path, 3, FolderStrategy(after_setup=True), path), due)


def test_best_and_last_and_what_goes(tmp_path: Path, due: Model) -> None:
    def callback(link: Any = True) -> ModelCheckpoint:
        return ModelCheckpoint(tmp_path, filename="{epoch}", monitor="loss", save_last=link)

    fit(tmp_path, 2, FolderStrategy(asynchronous=True), callbacks=[callback()])
    assert sorted(os.listdir(tmp_path)) == ["epoch=1.ckpt", "last.ckpt"]
    assert same(fit(tmp_path, 3, FolderStrategy(), "last", callbacks=[callback("link")]), due)
    assert "last-v1.ckpt" not in os.listdir(tmp_path)
    assert is_sharded_checkpoint(tmp_path / "last.ckpt")


def test_a_checkpoint_of_weights_only(tmp_path: Path) -> None:
    callback = ModelCheckpoint(tmp_path, filename="w", save_weights_only=True)
    model = fit(tmp_path, 1, FolderStrategy(), callbacks=[callback])
    found = read_checkpoint(tmp_path / "w.ckpt")
    assert "optimizer_states" not in found
    again = Model()
    load_module_state(again, found["state_dict"])
    assert same(again, model)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_optimizers_without_state_resume(tmp_path: Path, momentum: float) -> None:
    due = fit(tmp_path / "due", 2, model=seeded(momentum))
    fit(tmp_path, 1, FolderStrategy(), model=seeded(momentum))
    again = fit(tmp_path, 2, FolderStrategy(), tmp_path / "epoch=0.ckpt", model=Model(momentum=momentum))
    assert same(again, due)


def seeded(momentum: float) -> Model:
    torch.manual_seed(1)
    return Model(momentum=momentum)


def test_lr_finder_restores(tmp_path: Path) -> None:
    model = Model()
    before = copy.deepcopy(model.state_dict())
    tuner = Tuner(trainer(tmp_path, 1, FolderStrategy()))
    finder = tuner.lr_find(model, num_training=5)
    assert finder is not None
    assert len(finder.results["lr"]) > 2
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert os.listdir(tmp_path) == []


def test_averaged_weights_resume(tmp_path: Path) -> None:
    def average() -> list[Any]:
        return [EMAWeightAveraging(decay=0.5), ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)]

    due = fit(tmp_path / "due", 3, callbacks=[EMAWeightAveraging(decay=0.5)])
    fit(tmp_path, 2, FolderStrategy(), callbacks=average())
    assert same(fit(tmp_path, 3, FolderStrategy(), tmp_path / "epoch=1.ckpt", callbacks=average()), due)


class Box:
    """No tensor, number or the like."""


class WithObject(Model):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["box"] = Box()


def test_weights_only_is_passed_on(tmp_path: Path) -> None:
    fit(tmp_path, 1, FolderStrategy(), model=WithObject())
    path = tmp_path / "epoch=0.ckpt"
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        fit(tmp_path, 2, FolderStrategy(), path, model=WithObject())
    fit(tmp_path, 2, FolderStrategy(), path, model=WithObject(), weights_only=False)
    assert isinstance(read_checkpoint(path, weights_only=False)["box"], Box)


def test_hooks_see_whole_tensors_and_may_change_them(tmp_path: Path) -> None:
    class Changed(Model):
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            state = checkpoint["state_dict"]
            assert state["hidden.weight"].shape == (4, 4)
            state["hidden.bias"] = state.pop("hidden.bias") + 1
            state["frozen"].zero_()

    model = fit(tmp_path, 1, FolderStrategy())
    changed = Changed()
    trainer(tmp_path, 1, FolderStrategy()).fit(changed, ckpt_path=tmp_path / "epoch=0.ckpt")
    assert torch.equal(changed.hidden.bias, model.hidden.bias + 1)
    assert changed.frozen.tolist() == [0.0] * 3
    assert torch.equal(changed.hidden.weight, model.hidden.weight)


def test_a_file_takes_the_name_of_a_folder(tmp_path: Path) -> None:
    path = tmp_path / "epoch=0.ckpt"
    fit(tmp_path, 1, FolderStrategy())
    run = trainer(tmp_path, 1, FolderStrategy(single=True))
    run.fit(Model())
    run.save_checkpoint(path)
    assert path.is_file()


# ---- keys and shapes


def test_keys_and_shapes_that_do_not_fit(tmp_path: Path) -> None:
    net(tmp_path)
    state = read_checkpoint(tmp_path / "a")["state_dict"]
    other = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4))
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight: .*\[3, 2\]\) from checkpoint.*\[4, 2\]"):
        load_module_state(other, state)
    larger = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: \"2.weight\""):
        load_module_state(larger, state)
    found = load_module_state(larger, state, strict=False)
    assert found.missing_keys == ["2.weight", "2.bias"]
    smaller = nn.Sequential(nn.Linear(2, 3))
    with pytest.raises(RuntimeError, match="Unexpected key"):
        load_module_state(smaller, state)
    assert "1.weight" in load_module_state(smaller, state, strict=False).unexpected_keys
    assert torch.equal(smaller[0].weight, state["0.weight"])


def test_optimizers_that_do_not_fit(tmp_path: Path) -> None:
    module, optimizers = build("one", 1)
    save_sharded(tmp_path / "a", dumped(module, optimizers))
    states = read_checkpoint(tmp_path / "a")["optimizer_states"]
    with pytest.raises(ValueError, match="the states of 4 optimizers, configure_optimizers made 1"):
        load_optimizer_states(module, optimizers[:1], states)
    with pytest.raises(ValueError, match="has 2 parameter groups, this one 1"):
        load_optimizer_states(module, [torch.optim.AdamW(module.parameters()), *optimizers[1:]], states)


def test_keys_that_a_group_has_got_since(tmp_path: Path) -> None:
    module, optimizers = build("one", 1)
    train(module, optimizers)
    save_sharded(tmp_path / "a", dumped(module, optimizers))
    due = everything(module, optimizers)
    for optimizer in optimizers:
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
        assert "initial_lr" in optimizer.param_groups[0]
    load_sharded(tmp_path / "a", module, optimizers)
    assert differences(everything(module, optimizers), due) == []


# ---- reading


def test_nothing_is_read_before_it_is_asked_for(tmp_path: Path) -> None:
    module = net(tmp_path)
    state = read_checkpoint(tmp_path / "a")["state_dict"]
    assert isinstance(state, SavedStates)
    assert len(state) == 7
    assert list(state) == list(module.state_dict())
    assert "0.bias" in state
    assert all(isinstance(value, Saved) for value in state.data.values())
    assert torch.equal(state["0.bias"], module[0].bias)  # type: ignore[index]
    assert [key for key, value in state.data.items() if not isinstance(value, Saved)] == ["0.bias"]
    twin, deep = state.copy(), copy.deepcopy(state)
    del state["0.bias"]
    assert "0.bias" in twin
    assert torch.equal(deep["0.weight"], module[0].weight)  # type: ignore[index]
    # the versions of the modules, which torch keeps beside the keys
    assert state._metadata["1"] == {"version": 2}
    assert dict(twin).keys() == {**twin}.keys() == twin.keys()


def test_a_file_is_mapped(tmp_path: Path) -> None:
    torch.save({"state_dict": {"x": torch.ones(10**6)}}, tmp_path / "file")
    checkpoint = read_checkpoint(tmp_path / "file")
    assert str(tmp_path / "file") in Path("/proc/self/maps").read_text()
    assert float(checkpoint["state_dict"]["x"].sum()) == 10**6
    torch.save({"epoch": 1}, tmp_path / "old", _use_new_zipfile_serialization=False)
    assert read_checkpoint(tmp_path / "old") == {"epoch": 1}


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no checkpoint at"):
        read_checkpoint(tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"is no checkpoint: a folder with the files meta\.pt"):
        read_checkpoint(tmp_path)
    net(tmp_path)
    other = torch.load(tmp_path / "a" / "meta.pt")
    del other["lightning_recompute"]
    torch.save(other, tmp_path / "a" / "meta.pt")
    with pytest.raises(ValueError, match="was not written by lightning-recompute"):
        read_checkpoint(tmp_path / "a")
    torch.save({"lightning_recompute": {"version": 9, "package": "7.0"}}, tmp_path / "a" / "meta.pt")
    with pytest.raises(ValueError, match=r"has form 9, written by lightning-recompute 7\.0"):
        read_checkpoint(tmp_path / "a")
    assert not is_sharded_checkpoint("s3://bucket/x")
    with pytest.raises(ValueError, match="s3://bucket/x"):
        read_checkpoint("s3://bucket/x")


@pytest.mark.parametrize(
    ("name", "half"),
    [("meta.pt", False), (".metadata", False), (".metadata", True), ("__0_0.distcp", False), ("__0_0.distcp", True)],
)
def test_half_a_checkpoint(tmp_path: Path, name: str, half: bool) -> None:
    net(tmp_path)
    part = tmp_path / "a" / name
    if half:
        part.write_bytes(part.read_bytes()[: part.stat().st_size // 2])
    else:
        part.unlink()
    assert is_sharded_checkpoint(tmp_path / "a")
    with pytest.raises(FileNotFoundError, match="is half a checkpoint"):
        read_checkpoint(tmp_path / "a")
