"""Modules with a `training_step` in double precision, for pipelines: from tests/models.py without dropout, and toys."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import torch
from models import LENGTH, MODELS, VOCABULARY, WIDTH, Batch, gpt
from torch import Tensor, nn
from torch.nn import functional as F

ROWS = 8

OURS = {
    "gpt-tied": replace(MODELS["gpt-sdpa"], build=lambda: gpt("sdpa", tied_head=True)),
}


def without_dropout(module: nn.Module) -> nn.Module:
    """The module in train mode and double precision, every dropout at 0."""
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        for name, value in vars(part).items():
            if "dropout" in name and isinstance(value, float):
                setattr(part, name, 0.0)
    return module.double().train()


def many_rows(batch: Callable[[], Batch], rows: int) -> Batch:
    """As many rows as wanted of several batches."""
    parts: list[Batch] = []
    while sum(len(next(iter(part.values()))) for part in parts) < rows:
        parts.append(batch())
    return {key: torch.cat([part[key] for part in parts])[:rows] for key in parts[0]}


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


class Task(nn.Module):
    """One of tests/models.py, as a user's module holds it."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.case = OURS.get(name) or MODELS[name]
        self.model = without_dropout(self.case.build())

    def batch(self, rows: int = ROWS) -> Batch:
        batch = many_rows(self.case.batch, rows)
        return {key: value.double() if value.is_floating_point() else value for key, value in batch.items()}

    def training_step(self, batch: Batch) -> Tensor:
        if "ids" in batch:
            return cross_entropy(self.model(batch["ids"][:, :-1]), batch["ids"][:, 1:])
        if "pixel_values" in batch:
            return cross_entropy(self.model(batch["pixel_values"]).logits, batch["labels"])
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        if "Encoder" in type(self.model).__name__:
            return cross_entropy(self.model(inputs["input_ids"], inputs["attention_mask"]), batch["labels"])
        return cross_entropy(self.model(**inputs).logits, batch["labels"])


def hidden_block(width: int = WIDTH) -> nn.Module:
    return nn.TransformerEncoderLayer(width, 4, 48, dropout=0.0, batch_first=True, norm_first=True)


class Toy(nn.Module):
    """Token ids, blocks, a head; what subclasses do otherwise they say."""

    num_blocks = 4

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([hidden_block() for _ in range(self.num_blocks)])
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.double().train()

    def batch(self, rows: int = ROWS) -> Batch:
        ids = torch.randint(1, VOCABULARY, (rows, LENGTH))
        return {"input_ids": ids, "labels": torch.randint(VOCABULARY, (rows, LENGTH))}

    def training_step(self, batch: Batch) -> Any:
        hidden = self.embedding(batch["input_ids"])
        for block in self.blocks:
            hidden = block(hidden)
        return cross_entropy(self.head(hidden), batch["labels"])


class ClassToken(Toy):
    """nn.TransformerEncoder behind a class token of the user's own; the loss is in a dict, with a penalty."""

    def __init__(self) -> None:
        super().__init__()
        del self.blocks
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 48, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 5, enable_nested_tensor=False)
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.double().train()

    def batch(self, rows: int = ROWS) -> Batch:
        return super().batch(rows) | {"labels": torch.randint(VOCABULARY, (rows,))}

    def training_step(self, batch: Batch) -> Any:
        hidden = self.embedding(batch["input_ids"])
        hidden = self.encoder(torch.cat((self.token.expand(len(hidden), -1, -1), hidden), 1))
        penalty = self.token.square().mean() + self.head.weight.square().mean()
        return {"loss": cross_entropy(self.head(hidden[:, 0]), batch["labels"]) + 0.1 * penalty, "size": len(hidden)}


class Shapes(Toy):
    """Glue between blocks changes the length of the sequence; a norm in it has parameters; blocks return tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Pair() for _ in range(4)])
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(3)])
        self.double().train()

    def batch(self, rows: int = ROWS) -> Batch:
        return super().batch(rows) | {"labels": torch.randint(VOCABULARY, (rows,))}

    def training_step(self, batch: Batch) -> Any:
        hidden = self.embedding(batch["input_ids"])
        for index, block in enumerate(self.blocks):
            hidden, length = block(hidden)
            assert length == hidden.size(1)
            if index < 3:
                hidden = self.norms[index](hidden)
            if index == 1:
                hidden += hidden.flip(1)
                hidden = hidden[:, ::2]
        return cross_entropy(self.head(hidden.mean(1)), batch["labels"])


class Pair(nn.Module):
    """A block that returns its output and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = hidden_block()

    def forward(self, hidden: Tensor) -> tuple[Tensor, int]:
        return self.inner(hidden), hidden.size(1)


class Shared(Toy):
    """One norm in all blocks and behind them, so that every stage owns it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH).double()
        for block in self.blocks:
            block.norm1 = self.norm  # type: ignore[assignment]

    def training_step(self, batch: Batch) -> Any:
        hidden = self.embedding(batch["input_ids"])
        for block in self.blocks:
            hidden = block(hidden)
        return cross_entropy(self.head(self.norm(hidden)), batch["labels"])


class Statistics(Toy):
    """Running statistics of norms before the blocks, in them and behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.behind = nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(VOCABULARY)
        self.blocks = nn.ModuleList([Normed() for _ in range(4)])
        self.double().train()

    def training_step(self, batch: Batch) -> Any:
        hidden = self.before(self.embedding(batch["input_ids"]).flatten(0, 1)).unflatten(0, (-1, LENGTH))
        for block in self.blocks:
            hidden = block(hidden)
        return cross_entropy(self.behind(self.head(hidden).flatten(0, 1)), batch["labels"].flatten())


class Normed(Pair):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:  # type: ignore[override]
        output: Tensor = self.norm(self.inner(hidden).flatten(0, 1)).unflatten(0, hidden.shape[:2])
        return output


class Frozen(Toy):
    """Embedding and the first blocks are frozen."""

    def __init__(self) -> None:
        super().__init__()
        for part in (self.embedding, self.blocks[0], self.blocks[1], self.blocks[2]):
            part.requires_grad_(False)


class Unused(Toy):
    """A pooler that the step does not use, as BERT has."""

    def __init__(self) -> None:
        super().__init__()
        self.pooler = nn.Linear(WIDTH, WIDTH).double()


class Data(Toy):
    """Looks at values, so that it cannot run on fake tensors."""

    def training_step(self, batch: Batch) -> Any:
        assert batch["input_ids"].max().item() < VOCABULARY
        return super().training_step(batch)


class Noise(Toy):
    """Draws random numbers before the blocks (which tokens are masked) and uses them behind."""

    def training_step(self, batch: Batch) -> Any:
        masked = torch.rand(batch["input_ids"].shape) < 0.5
        hidden = self.embedding(batch["input_ids"].masked_fill(masked, 0))
        for block in self.blocks:
            hidden = block(hidden)
        return cross_entropy(self.head(hidden), batch["labels"].masked_fill(~masked, -100))


class Masked(Toy):
    """Blocks are given a mask that is made of the batch."""

    def training_step(self, batch: Batch) -> Any:
        padding = batch["input_ids"] < 5
        padding[:, 0] = False
        hidden = self.embedding(batch["input_ids"])
        for block in self.blocks:
            hidden = block(hidden, src_key_padding_mask=padding)
        return cross_entropy(self.head(hidden), batch["labels"])


class Counted(Toy):
    """Blocks count their forwards, and how many of these backward has still to come to."""

    num_blocks = 8

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Counting() for _ in range(self.num_blocks)])
        self.double().train()


class Counting(Pair):
    # of the class, where a replay does not put them back
    alive: ClassVar[weakref.WeakSet[Any]] = weakref.WeakSet()
    calls: ClassVar[Counter[int]] = Counter()
    most = 0
    made = 0

    def __init__(self) -> None:
        super().__init__()
        self.number = Counting.made = Counting.made + 1

    def forward(self, hidden: Tensor) -> Tensor:  # type: ignore[override]
        Counting.calls[self.number] += 1
        marked: Tensor = _Alive.apply(hidden)  # type: ignore[no-untyped-call]
        Counting.most = max(Counting.most, len(Counting.alive))
        output: Tensor = self.inner(marked)
        return output


class Mark:
    """Lives as long as a node of the graph."""


class _Alive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        ctx.mark = Mark()
        Counting.alive.add(ctx.mark)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


# ---- what is refused


class Skip(Toy):
    """Uses the embeddings behind the blocks."""

    def training_step(self, batch: Batch) -> Any:
        hidden = first = self.embedding(batch["input_ids"])
        for block in self.blocks:
            hidden = block(hidden)
        return cross_entropy(self.head(hidden + first), batch["labels"])


class Deep(Toy):
    """Uses the output of an early block in the loss."""

    def training_step(self, batch: Batch) -> Any:
        hidden = self.embedding(batch["input_ids"])
        outputs = []
        for block in self.blocks:
            hidden = block(hidden)
            outputs.append(hidden)
        return cross_entropy(self.head(outputs[0] + outputs[-1]), batch["labels"])


class Hidden(Toy):
    """Blocks are given a mask that is made of embeddings."""

    def training_step(self, batch: Batch) -> Any:
        hidden = self.embedding(batch["input_ids"])
        padding = hidden.detach().sum(-1) > 4
        padding[:, 0] = False
        for block in self.blocks:
            hidden = block(hidden, src_key_padding_mask=padding)
        return cross_entropy(self.head(hidden), batch["labels"])


class Number(Toy):
    """Uses the size of the embeddings behind the blocks, as a number."""

    def training_step(self, batch: Batch) -> Any:
        size = self.embedding(batch["input_ids"]).square().mean().item()
        return super().training_step(batch) * size


class NumberMask(Toy):
    """Blocks are given a mask that is made of how many embeddings are large."""

    def training_step(self, batch: Batch) -> Any:
        hidden = self.embedding(batch["input_ids"])
        num_large = int((hidden.detach().sum(-1) > 0).sum())
        padding = torch.arange(LENGTH).expand(len(hidden), -1) > (8 if num_large else 4)
        for block in self.blocks:
            hidden = block(hidden, src_key_padding_mask=padding)
        return cross_entropy(self.head(hidden), batch["labels"])


class Extra(Toy):
    """Each block is given the embeddings as well."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Added() for _ in range(4)])
        self.double()

    def training_step(self, batch: Batch) -> Any:
        hidden = first = self.embedding(batch["input_ids"])
        for block in self.blocks:
            hidden = block(hidden, extra=first)
        return cross_entropy(self.head(hidden), batch["labels"])


class Added(Pair):
    def forward(self, hidden: Tensor, extra: Tensor) -> Tensor:  # type: ignore[override]
        return self.inner(hidden + extra)


class Twice(Toy):
    """Runs the blocks twice in a step."""

    def training_step(self, batch: Batch) -> Any:
        return super().training_step(batch) + super().training_step(batch)


class Nothing(Toy):
    """Returns no loss."""

    def training_step(self, batch: Batch) -> Any:
        super().training_step(batch)


TOYS: dict[str, Callable[[], Toy]] = {
    cls.__name__: cls
    for cls in (Toy, ClassToken, Shapes, Frozen, Unused, Data, Noise, Masked, Counted, Shared, Statistics)
} | {cls.__name__: cls for cls in (Skip, Deep, Hidden, Number, NumberMask, Extra, Twice, Nothing)}


def made(name: str, seed: int = 0) -> Any:
    """A module by name, always with the same values for a seed."""
    torch.manual_seed(seed)
    return TOYS[name]() if name in TOYS else Task(name)
