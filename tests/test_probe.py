"""A step under observation: what it uses where, how it calls its blocks, and that nothing of that stays."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from pipeline_models import Toy, cross_entropy, made
from torch import Tensor, nn
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_recompute.probe import BEFORE, Probe, loss_of, only_list, probe_form, probe_step
from lightning_recompute.step_form import TensorForm

AFTER = 4


def probed(name: str, rows: int = 3) -> tuple[Any, Probe]:
    module = made(name)
    return module, probe_step(module, only_list(module), module.training_step, module.batch(rows))


def test_where_parameters_are_used() -> None:
    module, probe = probed("Toy")
    assert probe.uses["embedding.weight"] == {BEFORE}
    assert probe.uses["blocks.2.norm1.weight"] == {2}
    assert probe.uses["head.bias"] == {AFTER}
    assert set(probe.uses) == {name for name, _ in module.named_parameters()}


def test_uses_that_are_not_in_one_place() -> None:
    _, tied = probed("gpt-tied")
    assert tied.uses["model.token_embedding.weight"] == {BEFORE, AFTER}
    _, token = probed("ClassToken")
    assert token.uses["token"] == {BEFORE, 5}
    _, shared = probed("Shared")
    assert shared.uses["blocks.0.norm1.weight"] == {0, 1, 2, 3, AFTER}
    _, statistics = probed("Statistics")
    assert statistics.uses["before.running_mean"] == {BEFORE}
    assert statistics.uses["behind.running_var"] == {AFTER}
    assert statistics.uses["behind.num_batches_tracked"] == {AFTER}
    assert statistics.uses["blocks.1.norm.running_mean"] == {1}
    _, unused = probed("Unused")
    assert unused.uses["pooler.weight"] == frozenset()
    _, glue = probed("Shapes")
    assert glue.uses["norms.1.weight"] == {1}


def test_a_cast_that_autocast_remembers_hides_no_use() -> None:
    module = made("Shared").float()

    def step(batch: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            hidden = module.embedding(batch["input_ids"])
            for block in module.blocks:
                hidden = block(module.head(hidden)[..., :32])
            return cross_entropy(module.head(hidden).float(), batch["labels"])

    probe = probe_step(module, only_list(module), step, module.batch(2))
    # between two blocks counts as in the first of them
    assert probe.uses["head.weight"] == {BEFORE, 0, 1, 2, AFTER}


def test_forms() -> None:
    _, probe = probed("Shapes")
    lengths = [block.hidden.shape for block in probe.form.blocks]
    assert lengths == [(3, 12, 32), (3, 12, 32), (3, 6, 32), (3, 6, 32)]
    assert probe.form.blocks[0].hidden.dtype == torch.float64
    assert probe.form.blocks[0].returned == (TensorForm((3, 12, 32), torch.float64), 12)
    assert probe.form.rows == 3
    assert probe.loss == TensorForm((), torch.float64)
    assert probe.form.blocks[0].places == (0,)


def test_poison_has_the_form() -> None:
    _, probe = probed("Shapes")
    hidden, length = probe.form.blocks[0].poison(torch.device("cpu"))
    assert hidden.isnan().all()
    assert length == 12
    hidden += 1  # it can be written
    whole = TensorForm((4, 5), torch.float32).poison(torch.device("cpu"), own=False)
    assert whole.untyped_storage().nbytes() == 4
    numbers = TensorForm((2,), torch.int64).poison(torch.device("cpu"), own=True)
    assert numbers.tolist() == [0, 0]


def test_other_rows_and_lengths() -> None:
    module, probe = probed("Shapes")
    batch = {"input_ids": torch.ones(2, 8, dtype=torch.long), "labels": torch.ones(2, dtype=torch.long)}
    form = probe_form(module, only_list(module), module.training_step, batch, probe.form)
    assert [block.hidden.shape for block in form.blocks] == [(2, 8, 32), (2, 8, 32), (2, 4, 32), (2, 4, 32)]


def test_models_that_look_at_values_run_for_real() -> None:
    module, probe = probed("Data")
    assert probe.uses["embedding.weight"] == {BEFORE}
    form = probe_form(module, only_list(module), module.training_step, module.batch(5), probe.form)
    assert form.rows == 5
    assert form.blocks[2].hidden.shape == (5, 12, 32)
    assert form.blocks[2].returned == (TensorForm((5, 12, 32), torch.float64),)


def test_what_fake_tensors_cannot_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    class Picky(Toy):
        def training_step(self, batch: Any) -> Any:
            if active_fake_mode() is not None:
                torch.mm(torch.empty(2, 3), torch.empty(2, 3))
            return super().training_step(batch)

    module, log = Picky(), logging.getLogger(FakeTensorMode.__module__)
    log.addHandler(caplog.handler)  # torch's loggers hand nothing on
    try:
        assert probe_step(module, only_list(module), module.training_step, module.batch(3)).loss is not None
        assert caplog.records == []
        with FakeTensorMode(), pytest.raises(RuntimeError):
            torch.mm(torch.empty(2, 3), torch.empty(2, 3))
        assert len(caplog.records) == 1, "torch says so elsewhere"
    finally:
        log.removeHandler(caplog.handler)


def test_nothing_stays() -> None:
    class Writing(Toy):
        def __init__(self, real: bool) -> None:
            super().__init__()
            self.real = real
            self.norm = nn.BatchNorm1d(12).double()
            self.seen: list[Tensor] = []

        def training_step(self, batch: Any) -> Any:
            self.last = self.norm(torch.randn(3, 12, 4).double())
            if self.real:
                self.last.sum().item()
            self.seen.append(self.last)
            return super().training_step(batch)

    for real in (False, True):
        module = Writing(real)
        batch = module.batch(3)
        before = {key: value.clone() for key, value in module.state_dict().items()}
        random, names = torch.get_rng_state(), set(vars(module))
        probe_step(module, only_list(module), module.training_step, batch)
        assert torch.equal(torch.get_rng_state(), random)
        assert set(vars(module)) == names
        assert module.seen == []
        assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())
        assert all(parameter.grad is None for parameter in module.parameters())
        assert not any(part._forward_pre_hooks or part._forward_hooks for part in module.modules())


class Backward(Toy):
    def training_step(self, batch: Any) -> Any:
        loss = super().training_step(batch)
        loss.backward()
        return loss


class Backwards(Toy):
    def training_step(self, batch: Any) -> Any:
        hidden = self.embedding(batch["input_ids"])
        for block in reversed(self.blocks):
            hidden = block(hidden)
        return cross_entropy(self.head(hidden), batch["labels"])


class Direct(Toy):
    def training_step(self, batch: Any) -> Any:
        hidden = self.embedding(batch["input_ids"])
        for block in self.blocks:
            hidden = block.forward(hidden)
        return cross_entropy(self.head(hidden), batch["labels"])


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (Backward, "runs backward itself"),
        (Backwards, "one after the other"),
        (Direct, "called none of these blocks"),
    ],
)
def test_steps_that_cannot_be_divided(build: type[Toy], words: str) -> None:
    module = build()
    with pytest.raises(ValueError, match=words):
        probe_step(module, only_list(module), module.training_step, module.batch(2))
    assert all(parameter.grad is None for parameter in module.parameters())


def test_errors_of_the_step_are_its_own() -> None:
    module = made("Toy")
    with pytest.raises(KeyError, match="labels"):
        probe_step(module, only_list(module), module.training_step, {"input_ids": module.batch(2)["input_ids"]})


def test_one_list_of_blocks() -> None:
    module = made("Toy")
    block = module.blocks[0]
    module.blocks = nn.ModuleList([block, block])
    with pytest.raises(ValueError, match="stands in the list several times"):
        only_list(module)
    with pytest.raises(ValueError, match="exactly one list of blocks, found 2"):
        only_list(made("t5-sdpa"))


def test_what_a_loss_is() -> None:
    loss = torch.zeros(1)
    assert loss_of(loss) is loss
    assert loss_of({"loss": loss, "size": 3}) is loss
    for wrong in (None, {}, {"loss": None}, torch.zeros(2), 1.0):
        with pytest.raises(ValueError, match="one element is due"):
            loss_of(wrong)
