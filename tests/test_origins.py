"""Values that would have to cross pipeline stages beside the hidden state, and values that need not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pipeline_models import LENGTH, TOYS, VOCABULARY, WIDTH, Pair, Toy, cross_entropy, made
from torch import Tensor, nn

from lightning_recompute.division import Division
from lightning_recompute.origins import refuse_crossings
from lightning_recompute.probe import BEFORE, only_list, probe_step

AFTER = 4
DUE = (3, AFTER)


def crossings(module: Any) -> set[tuple[int, int]]:
    """What crosses, but for the output of the last block."""
    found = probe_step(module, only_list(module), module.training_step, module.batch(3)).crossings
    return {(source, user) for source, user, _ in found} - {DUE}


class Auxiliary(Toy):
    """Sums up what blocks have left as an attribute, as for a mixture of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Leaving() for _ in range(4)])
        self.double()

    def training_step(self, batch: Any) -> Any:
        loss = super().training_step(batch)
        return loss + 0.1 * sum(block.left for block in self.blocks)


class Leaving(Pair):
    def __init__(self) -> None:
        super().__init__()
        self.left: Any = 0.0

    def forward(self, hidden: Tensor) -> Tensor:  # type: ignore[override]
        output: Tensor = self.inner(hidden)
        self.left = output.square().mean()
        return output


@pytest.mark.parametrize("name", [name for name in TOYS if name not in ("Extra", "Twice", "Nothing")])
def test_what_crosses_in_toys(name: str) -> None:
    module = made(name)
    last = len(only_list(module))
    found = crossings(module) - {(last - 1, last)}
    blocks = range(last)
    due = {
        "Skip": {(BEFORE, AFTER)},
        "Deep": {(0, AFTER)},
        "Hidden": {(BEFORE, index) for index in blocks},
    }
    assert found == due.get(name, set())


class Written(Toy):
    """Each block adds to a sum in place, through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: Any = None
        self.blocks = nn.ModuleList([Adding(self) for _ in range(4)])
        self.double()

    def training_step(self, batch: Any) -> Any:
        self.sums = torch.zeros(4, WIDTH, dtype=torch.float64)
        return super().training_step(batch) + self.sums.mean()


class Adding(Pair):
    def __init__(self, owner: Written) -> None:
        super().__init__()
        self.owner = [owner]

    def forward(self, hidden: Tensor) -> Tensor:  # type: ignore[override]
        output: Tensor = self.inner(hidden)
        self.owner[0].sums[1:3].add_(output.detach().mean((0, 1)))
        return output


def test_values_that_are_written_in_place() -> None:
    found = crossings(Written())
    assert (2, 3) in found


class Watching(Toy):
    """Looks at hidden states without a use in the loss; keeps a table that comes of sizes alone."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []
        self.blocks = nn.ModuleList([Positions() for _ in range(4)])
        self.double()

    def training_step(self, batch: Any) -> Any:
        Positions.table = None
        hidden = first = self.embedding(batch["input_ids"])
        for block in self.blocks:
            hidden = block(hidden)
        self.seen = [first.detach().norm() + 1]
        return cross_entropy(self.head(hidden), batch["labels"])


class Positions(Pair):
    table: Any = None

    def forward(self, hidden: Tensor) -> Tensor:  # type: ignore[override]
        if Positions.table is None:
            Positions.table = torch.arange(hidden.size(1))[:, None] * torch.ones_like(hidden[0])
        output: Tensor = self.inner(hidden + Positions.table)
        return output


def test_values_that_stages_make_themselves_or_only_look_at() -> None:
    assert crossings(Watching()) == set()
    Positions.table = None


class Near(Toy):
    """The fourth block is given what the second one was given, too."""

    def training_step(self, batch: Any) -> Any:
        hidden = self.embedding(batch["input_ids"])
        for index, block in enumerate(self.blocks):
            if index == 1:
                kept = hidden
            hidden = block(hidden if index != 3 else hidden + kept)
        return cross_entropy(self.head(hidden), batch["labels"])


def test_what_stays_on_a_stage_may_be_used() -> None:
    module = Near()
    found = crossings(module)
    assert found == {(0, 2)}  # between the third block and the fourth
    names = only_list(module).names
    due = {(0, 2, False)}
    refuse_crossings(due, names, Division.of(4, 2, "1f1b", 1, [3, 1]))
    refuse_crossings({(*DUE, True)}, names, Division.of(4, 2, "1f1b", 1))
    with pytest.raises(ValueError, match=r"uses in blocks.2 a value that was made in blocks.0, on another pipeline st"):
        refuse_crossings(due, names, Division.of(4, 2, "1f1b", 1))
    # what blocks of other stages do not return is missing where values are gathered
    with pytest.raises(ValueError, match=r"uses in blocks.2 a value that was made in blocks.0, and that is not"):
        refuse_crossings({(0, 2, True)}, names, Division.of(4, 2, "1f1b", 1, [3, 1]))


def test_what_blocks_return_and_what_they_keep() -> None:
    def of(module: Any) -> set[tuple[int, int, bool]]:
        return set(probe_step(module, only_list(module), module.training_step, module.batch(3)).crossings)

    assert of(made("Deep")) == {(0, AFTER, False), (*DUE, False)}
    assert of(Auxiliary()) == {(index, AFTER, True) for index in range(4)} | {(*DUE, False)}


def test_real_runs_are_followed_as_well() -> None:
    class Looking(Toy):
        def training_step(self, batch: Any) -> Any:
            assert batch["input_ids"].max().item() < VOCABULARY
            hidden = self.embedding(batch["input_ids"])
            states = []
            for block in self.blocks:
                hidden = block(hidden)
                states.append(hidden)
            return cross_entropy(self.head(states[1] + states[3]), batch["labels"])

    module = Looking()
    assert module.batch(2)["labels"].shape == (2, LENGTH)
    assert crossings(module) == {(1, AFTER)}


class Gathered(Toy):
    """Hooks of the user keep what blocks return."""

    def __init__(self) -> None:
        super().__init__()
        self.states: list[Tensor] = []
        for block in self.blocks:
            block.register_forward_hook(lambda _, args, output: self.states.append(output))

    def training_step(self, batch: Any) -> Any:
        self.states = []
        loss = super().training_step(batch)
        return loss + self.states[2].square().mean() + self.states[3].square().mean()


def test_what_hooks_of_the_user_gather() -> None:
    module = Gathered()
    found = probe_step(module, only_list(module), module.training_step, module.batch(3)).crossings
    assert found == {(2, AFTER, True), (*DUE, True)}
