import itertools
import pickle
from pathlib import Path

import lightning as L
import pytest
import torch
from distributed import in_ranks
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import RandomSampler, SequentialSampler

from lightning_recompute.data import TextDataModule


@pytest.fixture
def numbers(tmp_path):
    """A file of 500 numbers of 8 digits each, so that every window of 8 bytes names its place."""
    path = tmp_path / "numbers.txt"
    path.write_text("".join(f"{n:08d}" for n in range(500)))
    return path


def data_module(path, **options) -> TextDataModule:
    return TextDataModule(**{"path": path, "length": 7, "batch_size": 16, **options})


def contents(windows) -> list[int]:
    """The numbers in windows of the fixture; fails on a window that is cut in another place."""
    return [int(TextDataModule.decode(row)) for row in windows]


# -- text


def test_default_is_the_standard_library():
    data = TextDataModule(max_bytes=500_000)
    batch = next(iter(data.train_dataloader()))
    assert (batch.shape, batch.dtype) == ((16, 257), torch.int64)
    text = "".join(TextDataModule.decode(row) for row in data.splits["train"])
    assert "def " in text
    assert "import " in text
    assert 450_000 < len(text) < 500_000
    files = data._files()
    assert len(files) > 100
    assert not any({"site-packages", "test"} & set(file.parts) for file in files)


def test_a_folder_is_read_in_order_without_hidden_folders(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    for name, content in {
        "b/1.txt": "third",
        "a.txt": "first",
        "aa.txt": "second",
        "c.md": "no",
        ".git/x.txt": "no",
    }.items():
        (tmp_path / name).write_text(content)
    data = data_module(tmp_path, length=2)
    data.setup()
    text = data.splits["train"].windows.flatten()
    assert TextDataModule.decode(text) == "first\0second\0third\0"[:18]
    data = data_module(tmp_path, pattern="*", length=2, max_bytes=11)
    data.setup()
    assert TextDataModule.decode(data.splits["train"].windows.flatten()) == "first\0sec"  # three windows of three


def test_splits_share_one_byte_tensor(numbers):
    data = data_module(numbers)
    data.setup()
    windows = [split.windows for split in data.splits.values()]
    assert {w.data_ptr() for w in windows} == {windows[0].data_ptr()}
    assert windows[0].untyped_storage().nbytes() == numbers.stat().st_size


def test_text_and_tokens_round_trip():
    tokens = TextDataModule.encode("naïve")
    assert (tokens.shape, tokens.dtype) == ((1, 6), torch.int64)
    assert TextDataModule.decode(tokens[0]) == "naïve"
    assert TextDataModule.decode(tokens[0, :3]) == "na\ufffd"


# -- split


def test_windows_are_split_without_overlap_or_loss(numbers):
    data = data_module(numbers, val_fraction=0.1, test_fraction=0.2)
    data.setup()
    splits = {name: contents(split) for name, split in data.splits.items()}
    assert {name: len(found) for name, found in splits.items()} == {"train": 350, "val": 50, "test": 100}
    assert sorted(itertools.chain(*splits.values())) == list(range(500))
    assert splits["val"] != sorted(splits["val"])


def test_split_depends_on_the_seed_only(numbers):
    def held_out(**options) -> list[int]:
        data = data_module(numbers, **options)
        return contents(row for batch in data.val_dataloader() for row in batch)

    assert held_out() == held_out(batch_size=5) == held_out(max_train_samples=3)
    torch.manual_seed(123)
    assert held_out() == held_out()
    assert held_out(seed=1) != held_out()


def test_sample_limits(numbers):
    data = data_module(numbers, max_train_samples=20, max_eval_samples=5)
    data.setup()
    assert {name: len(split) for name, split in data.splits.items()} == {"train": 20, "val": 5, "test": 5}
    whole = data_module(numbers)
    whole.setup()
    assert set(contents(data.splits["val"])) < set(contents(whole.splits["val"]))
    assert [len(batch) for batch in data.train_dataloader()] == [16, 4]


# -- loading


def epochs(data: TextDataModule, *numbers: int) -> list[list[int]]:
    """The training windows of some epochs, in the order of a run in which Lightning tells the sampler its epoch."""
    loader, orders = data.train_dataloader(), []
    for epoch in numbers:
        loader.sampler.set_epoch(epoch)
        orders.append(contents(row for batch in loader for row in batch))
    return orders


def test_each_epoch_has_its_own_order_that_a_resumed_run_repeats(numbers):
    data = data_module(numbers)
    first, second, third = epochs(data, 0, 1, 2)
    assert sorted(first) == sorted(second)
    assert first != second != third
    assert epochs(data_module(numbers), 2) == [third]
    assert epochs(data_module(numbers, seed=9), 0) != [first]


def test_workers_give_the_same_batches(numbers):
    alone, helped = data_module(numbers), data_module(numbers, num_workers=2)
    for loader in ("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader"):
        pairs = zip(getattr(alone, loader)(), getattr(helped, loader)(), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)


def test_samplers_are_those_that_lightning_replaces_when_distributed(numbers):
    data = data_module(numbers)
    assert isinstance(data.train_dataloader().sampler, RandomSampler)
    assert isinstance(data.val_dataloader().sampler, SequentialSampler)


def test_pickles_before_and_after_setup(numbers):
    data = data_module(numbers)
    fresh = pickle.loads(pickle.dumps(data))
    data.setup()
    full = pickle.loads(pickle.dumps(data))
    for copy in (fresh, full):
        assert epochs(copy, 0) == epochs(data, 0)


class Seen(L.LightningModule):
    """Trains nothing and remembers the windows of each epoch."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.epochs: dict[int, list[int]] = {}

    def training_step(self, batch, batch_idx):
        self.epochs.setdefault(self.current_epoch, []).extend(contents(batch))
        return self.weight * 0

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(data, max_epochs, ckpt_path=None, **options) -> Seen:
    module = Seen()
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(**{"accelerator": "cpu", "devices": 1, "max_epochs": max_epochs, **quiet, **options})
    trainer.fit(module, data, ckpt_path=ckpt_path)
    return module


def test_resumed_run_sees_the_windows_of_an_uninterrupted_one(numbers, tmp_path):
    straight = fit(data_module(numbers), 3, enable_checkpointing=False).epochs
    assert len({tuple(order) for order in straight.values()}) == 3
    fit(data_module(numbers), 2, callbacks=[ModelCheckpoint(tmp_path, save_last=True)])
    torch.rand(10)
    resumed = fit(data_module(numbers), 3, tmp_path / "last.ckpt", enable_checkpointing=False).epochs
    assert resumed == {2: straight[2]}


def test_overfit_batches_repeat(numbers):
    seen = fit(data_module(numbers), 3, overfit_batches=2, enable_checkpointing=False).epochs
    assert len(seen[0]) == 32
    assert seen[0] == seen[1] == seen[2]


def two_epochs(folder: Path) -> dict[int, list[int]]:
    return fit(data_module(folder / "numbers.txt"), 2, devices=2, strategy="ddp", enable_checkpointing=False).epochs


@pytest.mark.xdist_group("two processes")
def test_two_processes_share_the_training_windows(numbers):
    one, other = in_ranks(two_epochs, numbers.parent)
    whole = sorted(fit(data_module(numbers), 1, enable_checkpointing=False).epochs[0])
    for epoch in (0, 1):
        assert sorted(one[epoch] + other[epoch]) == whole
    assert one[0] != one[1]


# -- errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 0}, "length=0: at least 1 is due"),
        ({"batch_size": 0}, "batch_size=0: at least 1"),
        ({"max_bytes": 0}, "max_bytes=0: at least 1"),
        ({"max_train_samples": 0}, "max_train_samples=0: at least 1"),
        ({"max_eval_samples": -1}, "max_eval_samples=-1: at least 1"),
        ({"num_workers": -1}, "num_workers=-1: at least 0"),
        ({"val_fraction": 0.0}, r"val_fraction=0.0, test_fraction=0.05: each must be above 0"),
        ({"val_fraction": 0.5, "test_fraction": 0.5}, "the two together below 1"),
    ],
)
def test_wrong_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        TextDataModule(**options)


def test_missing_and_short_texts_are_refused(tmp_path, numbers):
    def refused(message, **options):
        with pytest.raises(ValueError, match=message):
            data_module(**options).setup()

    empty = tmp_path / "empty"
    empty.mkdir()
    refused("found neither file nor folder at .*nowhere; set path", path=tmp_path / "nowhere")
    refused(r"no file in .*empty matches '\*.txt' \(found no file at all\); set path or pattern", path=empty)
    (empty / "a.md").write_text("text")
    (empty / "b.md").write_text("text")
    refused(r"matches '\*.txt' \(found 2 \*.md\)", path=empty)
    refused("found 10 bytes of text in .*empty, 1 windows of 8 bytes", path=empty, pattern="*.md")
    refused("found 4000 bytes of text in .*numbers.txt, 1 windows of 2001 bytes", path=numbers, length=2000)
    refused("found 15 bytes", path=numbers, max_bytes=15)
    (empty / "nothing.txt").touch()
    refused("found 0 bytes of text", path=empty / "nothing.txt")
    data_module(numbers, length=1000).setup()  # three windows are enough
