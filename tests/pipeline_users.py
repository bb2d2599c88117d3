"""LightningModules around Hugging Face models, as users write them, for pipelines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytorch_lightning as pl
import torch
import transformers as hf
from pipeline_hugging_face_models import CASES, LONGER, REFUSED, ROWS, Case
from torch import Tensor, nn
from torch.nn import functional as F


class User(pl.LightningModule):
    """What a user writes.

    Args:
        case: What it trains.
    """

    seen: ClassVar[set[tuple[type, type, Any]]] = set()
    """Of each step that ran: the class of the module, of its model, the step."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.model = case.build()
        for part in self.modules():
            for name, value in vars(part).items():
                if isinstance(value, float) and "drop" in name:
                    setattr(part, name, 0.0)
            if isinstance(part, nn.Dropout):
                part.p = 0.0
        self.double().train()

    @property
    def blocks(self) -> str | None:
        """Where the blocks are; None: found."""
        return self.case.blocks

    def batch(self, rows: int = ROWS) -> Any:
        """A batch, by the global seed."""
        return self.case.batch(rows)

    def note(self) -> None:
        User.seen.add((type(self), type(self.model), type(self).training_step))

    def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
        self.note()
        return self.model(**batch).loss


# ---- what is trained


class LowRank(nn.Module):
    """A frozen layer beside a trained one of rank 2, as adapters have it."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        width_out, width_in = base.weight.shape
        self.down = nn.Linear(int(width_in), 2, bias=False)
        self.up = nn.Linear(2, int(width_out), bias=False)
        self.double()

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.base(hidden) + self.up(self.down(hidden))
        return output


class Adapted(User):
    """Adapters in a frozen model."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.requires_grad_(False)
        for part in list(self.model.modules()):
            for name in ("q_proj", "v_proj"):
                if hasattr(part, name):
                    setattr(part, name, LowRank(getattr(part, name)))


class AdaptedBehind(Adapted):
    """Adapters in the last block only."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        for layer in self.model.model.layers[:3]:
            layer.requires_grad_(False)


class FrozenFront(User):
    """The embeddings and half of the blocks are frozen."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.model.model.embed_tokens.requires_grad_(False)
        self.model.model.layers[:2].requires_grad_(False)


class FrozenBehind(User):
    """The blocks behind the first one and the head are frozen."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.model.model.layers[1:].requires_grad_(False)
        self.model.model.norm.requires_grad_(False)
        self.model.lm_head.requires_grad_(False)


class OnlyHead(User):
    """A probe on a frozen model."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.requires_grad_(False)
        self.model.lm_head.requires_grad_(True)


# ---- what comes in and out


class Dictionary(User):
    """The step returns more than its loss."""

    def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
        self.note()
        output = self.model(**batch)
        return {"loss": output.loss, "logits": output.logits.detach(), "size": len(output.logits)}


class Encoded(User):
    """Batches as a tokenizer makes them."""

    def batch(self, rows: int = ROWS) -> Any:
        return hf.BatchEncoding(super().batch(rows))


class Tupled(User):
    """Batches as a TensorDataset makes them, with names."""

    def batch(self, rows: int = ROWS) -> Any:
        return tuple(super().batch(rows).values()), [f"row {index}" for index in range(rows)], 0.5

    def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
        self.note()
        (ids, mask, labels), names, factor = batch
        assert len(names) == len(ids)
        return factor * self.model(ids, attention_mask=mask, labels=labels).loss


@dataclass
class Texts:
    """A batch of a user's own."""

    ids: Tensor
    mask: Tensor
    target: dict[str, Tensor]
    task: str = "text"


class Structured(User):
    """Batches of a user's own class; the loss is the user's own, in the model's precision."""

    def batch(self, rows: int = ROWS) -> Any:
        batch = super().batch(rows)
        return Texts(batch["input_ids"], batch["attention_mask"], {"labels": batch["labels"]})

    def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
        self.note()
        logits = self.model(input_ids=batch.ids, attention_mask=batch.mask).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch.target["labels"][:, 1:].flatten())


class Tokens(User):
    """Microbatches count by their target tokens."""

    def microbatch_weight(self, batch: Any) -> int:
        return int((batch["labels"][:, 1:] != -100).sum())


# ---- what else is in the loss


class Penalty(User):
    """A penalty on all weights beside the loss."""

    def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
        return super().training_step(batch) + 0.01 * sum(p.square().sum() for p in self.parameters())


class Teacher(User):
    """A frozen model beside the one that is trained."""

    first = False

    @property
    def blocks(self) -> str | None:
        return "model.transformer.h"

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.teacher = case.build().double().requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
        self.note()
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        due = self.taught(inputs) if self.first else None
        output = self.model(**batch)
        due = self.taught(inputs) if due is None else due
        return output.loss + (output.logits - due).square().mean()

    @torch.no_grad()
    def taught(self, inputs: Any) -> Tensor:
        logits: Tensor = self.teacher(**inputs).logits
        return logits


class TeacherFirst(Teacher):
    """It runs before the blocks."""

    first = True


class Skipping(User):
    """Adds the embeddings to what the head is given."""

    def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
        self.note()
        embedded = self.model.get_input_embeddings()(batch["input_ids"])
        hidden = self.model.model(inputs_embeds=embedded, attention_mask=batch["attention_mask"]).last_hidden_state
        logits = self.model.lm_head(hidden + embedded)
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


class Gathering(User):
    """Uses hidden states that the model gathers."""

    which = 2

    def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
        self.note()
        output = self.model(**batch, output_hidden_states=True)
        return output.loss + output.hidden_states[self.which].square().mean()


class GatheringLate(Gathering):
    """One that the last stage has."""

    which = 3


class Smooth(User):
    """Penalises the gradient of the loss by what the blocks are given."""

    def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
        self.note()
        embedded = self.model.get_input_embeddings()(batch["input_ids"])
        loss = self.model(inputs_embeds=embedded, labels=batch["labels"]).loss
        (gradient,) = torch.autograd.grad(loss, embedded, create_graph=True)
        return loss + gradient.square().sum()


KINDS: dict[str, type[User]] = {
    cls.__name__: cls
    for cls in (
        *(User, Adapted, AdaptedBehind, FrozenFront, FrozenBehind, OnlyHead),
        *(Dictionary, Encoded, Tupled, Structured, Tokens),
        *(Penalty, Teacher, TeacherFirst, Skipping, Gathering, GatheringLate, Smooth),
    )
}


def made(name: str, seed: int = 0) -> User:
    """A module by the name of its case and its kind, always with the same values for a seed."""
    case, _, kind = name.partition(" ")
    torch.manual_seed(seed)
    return KINDS[kind or "User"]((CASES | LONGER | REFUSED)[case])
