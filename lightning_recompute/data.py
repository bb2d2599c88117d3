"""Byte-level text for language models: windows over real files, split and shuffled by seed.

The vocabulary is the 256 byte values, so nothing has to be downloaded or trained; byte 0 stands between files.
"""

from __future__ import annotations

import fnmatch
import os
import sys
import sysconfig
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler

# Inside the folder of the standard library, but not the library itself.
NOT_STDLIB = {"site-packages", "dist-packages", "test"}


class TextDataModule(LightningDataModule):
    """Windows of bytes over text files as batches for a language model.

    The text is cut into windows of `length` + 1 bytes that do not overlap. The seed decides which windows are for
    training, validation and test, whatever the machine, the number of processes and the batch size. A batch is an
    int64 tensor (batch_size, length + 1), from which `GPT` takes its inputs and, one byte on, its targets.

    Args:
        path: a text file, or a folder whose files are read in the order of their names, with its subfolders. None: the
            sources of Python's own standard library, as found on this machine.
        pattern: which files of a folder to read, as in a shell. None: `*.py` for the standard library, else `*.txt`.
        length: input tokens of a window, s; at most the model's max_length.
        batch_size: windows in a batch, per process.
        val_fraction: share of the windows kept for validation, above 0.
        test_fraction: share of the windows kept for test and predict, above 0.
        max_bytes: read no more than this many bytes of text. None: all.
        max_train_samples: use no more than this many training windows, the same in each epoch. None: all. (For short
            epochs over changing windows there is the Trainer's limit_train_batches.)
        max_eval_samples: the same for validation, and for test.
        num_workers: processes that load batches; 0 loads in the training process, which is mostly fastest here.
        seed: decides the split and, with the epoch's number, the order of training windows.

    Raises:
        ValueError: a number out of its range; at setup: no such path, no matching file, or too little text.
    """

    def __init__(
        self,
        *,
        path: str | os.PathLike[str] | None = None,
        pattern: str | None = None,
        length: int = 256,
        batch_size: int = 16,
        val_fraction: float = 0.05,
        test_fraction: float = 0.05,
        max_bytes: int | None = None,
        max_train_samples: int | None = None,
        max_eval_samples: int | None = None,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        for name, number, least in (
            ("length", length, 1),
            ("batch_size", batch_size, 1),
            ("max_bytes", max_bytes, 1),
            ("max_train_samples", max_train_samples, 1),
            ("max_eval_samples", max_eval_samples, 1),
            ("num_workers", num_workers, 0),
        ):
            if number is not None and number < least:
                raise ValueError(f"{name}={number}: at least {least} is due")
        if not (val_fraction > 0 and test_fraction > 0 and val_fraction + test_fraction < 1):
            raise ValueError(f"{val_fraction=}, {test_fraction=}: each must be above 0, and the two together below 1")
        self.path = None if path is None else Path(path).expanduser()
        self.pattern = pattern or ("*.py" if path is None else "*.txt")
        self.length, self.batch_size = length, batch_size
        self.val_fraction, self.test_fraction = val_fraction, test_fraction
        self.max_bytes = max_bytes
        self.max_train_samples, self.max_eval_samples = max_train_samples, max_eval_samples
        self.num_workers, self.seed = num_workers, seed
        self.splits: dict[str, TextWindows] = {}

    def setup(self, stage: str | None = None) -> None:
        """Read and split the text; a second call does nothing.

        Raises:
            ValueError: no such path, no matching file, or less text than three windows.
        """
        if self.splits:
            return
        text, size = self._read(), self.length + 1
        num_windows = len(text) // size
        num_val, num_test = (max(1, round(num_windows * f)) for f in (self.val_fraction, self.test_fraction))
        num_held_out = num_val + num_test
        if num_windows <= num_held_out:
            raise ValueError(
                f"found {len(text)} bytes of text in {self.path or 'the standard library'}, {num_windows} windows of "
                f"{size} bytes; one each for training ({num_val} go to validation, {num_test} to test) is the least: "
                "give more text, a smaller length, or raise max_bytes"
            )
        windows = text[: num_windows * size].view(num_windows, size)
        order = torch.randperm(num_windows, generator=torch.Generator().manual_seed(self.seed))
        self.splits = {
            "train": TextWindows(windows, order[num_held_out:][: self.max_train_samples]),
            "val": TextWindows(windows, order[:num_val][: self.max_eval_samples]),
            "test": TextWindows(windows, order[num_val:num_held_out][: self.max_eval_samples]),
        }

    def _read(self) -> Tensor:
        """The text as one uint8 tensor; a single file is mapped, not read."""
        if self.path is not None and self.path.is_file():
            num_bytes = min(self.path.stat().st_size, self.max_bytes or sys.maxsize)
            if num_bytes == 0:
                return torch.empty(0, dtype=torch.uint8)
            return torch.from_file(str(self.path), size=num_bytes, dtype=torch.uint8)
        text, limit = bytearray(), self.max_bytes
        for file in self._files():
            with file.open("rb") as source:
                text += source.read(-1 if limit is None else limit - len(text)) + b"\0"
            if limit is not None and len(text) >= limit:
                del text[limit:]
                break
        return torch.frombuffer(text, dtype=torch.uint8)  # never empty: a byte 0 follows each file

    def _files(self) -> list[Path]:
        folder = self.path or Path(sysconfig.get_path("stdlib"))
        if not folder.is_dir():
            raise ValueError(f"found neither file nor folder at {folder}; set path to a text file or a folder of them")
        found = sorted(walk(folder, skip=NOT_STDLIB if self.path is None else frozenset()))
        files = [file for file in found if fnmatch.fnmatch(file.name, self.pattern)]
        if not files:
            kinds = Counter(f"*{file.suffix}" for file in found).most_common(5)
            there = ", ".join(f"{number} {kind}" for kind, number in kinds) or "no file at all"
            raise ValueError(f"no file in {folder} matches {self.pattern!r} (found {there}); set path or pattern")
        return files

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Training windows, shuffled anew in each epoch."""
        return self._loader("train")

    def val_dataloader(self) -> DataLoader[Tensor]:
        """Validation windows, in one order."""
        return self._loader("val")

    def test_dataloader(self) -> DataLoader[Tensor]:
        """Test windows, in one order."""
        return self._loader("test")

    def predict_dataloader(self) -> DataLoader[Tensor]:
        """The test windows."""
        return self._loader("test")

    def _loader(self, split: str) -> DataLoader[Tensor]:
        self.setup()
        data = self.splits[split]
        return DataLoader(
            data,
            batch_size=self.batch_size,
            sampler=EpochShuffle(data, self.seed) if split == "train" else None,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
        )

    @staticmethod
    def encode(text: str) -> Tensor:
        """Text as token ids (1, bytes), the prompt that `GPT.generate` takes."""
        return torch.tensor([list(text.encode())], dtype=torch.long)

    @staticmethod
    def decode(tokens: Tensor) -> str:
        """Token ids (bytes,) as text; what is no UTF-8 becomes a replacement character."""
        return bytes(tokens.tolist()).decode(errors="replace")


class TextWindows(Dataset[Tensor]):
    """Some of the windows of a text, as a map-style dataset (what distributed samplers need).

    Args:
        windows: all windows, uint8 (n, length + 1); shared with the other splits, never copied.
        indices: which of them belong here, (m,).
    """

    def __init__(self, windows: Tensor, indices: Tensor) -> None:
        self.windows, self.indices = windows, indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Tensor:
        """One window, int64 (length + 1,)."""
        return self.windows[self.indices[index]].long()


class EpochShuffle(RandomSampler):
    """Shuffle by seed and epoch, so that a resumed run sees the windows in the order of an uninterrupted one.

    Lightning calls `set_epoch` before each epoch. With several processes it puts its DistributedSampler in the place
    of this sampler, which does the same with the seed of `seed_everything`.

    Args:
        data: the dataset to shuffle.
        seed: added to the epoch's number.
    """

    def __init__(self, data: TextWindows, seed: int) -> None:
        super().__init__(data, generator=torch.Generator().manual_seed(seed))
        self.seed = seed

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the coming epoch."""
        self.generator.manual_seed(self.seed + epoch)


def walk(folder: Path, skip: Collection[str]) -> Iterator[Path]:
    """Every file below a folder, without hidden folders and those whose name is in `skip`."""
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in skip and not name.startswith(".")]
        yield from (path for path in (Path(root, name) for name in names) if path.is_file())
