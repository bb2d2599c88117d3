"""Stages of an unmodified step, run one after the other in one process."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pipeline_checks import state_of
from pipeline_models import Toy, cross_entropy, made
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_recompute.division import Division
from lightning_recompute.memory import open_meter
from lightning_recompute.ownership import Ownership, placeholder
from lightning_recompute.probe import Probe, loss_of, only_list, probe_form, probe_step
from lightning_recompute.stages import Stage, StageDone, digest, shell
from lightning_recompute.whole import replace_parameters

CPU = torch.device("cpu")


def staged(module: Any, batch: Any, *lengths: int) -> tuple[list[Stage], Probe]:
    blocks = only_list(module)
    probe = probe_step(module, blocks, module.training_step, batch)
    bounds = Division(lengths, len(lengths)).bounds
    return [Stage(module, blocks, start, stop, CPU) for start, stop in bounds], probe


def chained(module: Any, batch: Any, *lengths: int) -> tuple[Any, list[Tensor]]:
    """Forward of all stages and backward through them, and the hidden states between."""
    stages, probe = staged(module, batch, *lengths)
    sent: list[Tensor] = []
    received: list[Tensor] = []
    result: Any = None
    for stage in stages:
        given = received[-1] if received else None
        result = stage.run(lambda: module.training_step(batch), given, probe.form)
        if not stage.is_last:
            sent.append(result)
            received.append(result.detach().requires_grad_())
    loss_of(result).backward()
    for output, leaf in zip(reversed(sent), reversed(received), strict=True):
        output.backward(leaf.grad)
    return result, sent


@pytest.mark.parametrize("name", ["Toy", "Shapes", "Masked", "gpt-tied", "llama-sdpa", "encoder-post-norm"])
@pytest.mark.parametrize("lengths", [(2, 2), (1, 2, 1)])
def test_stages_one_after_the_other_are_the_step(name: str, lengths: tuple[int, ...]) -> None:
    plain, module = made(name), made(name)
    batch = plain.batch(3)
    due = plain.training_step(batch)
    due.backward()
    clean = state_of(module)
    loss, _ = chained(module, batch, *lengths)
    assert torch.equal(loss, due)
    for (key, one), other in zip(plain.named_parameters(), module.parameters(), strict=True):
        assert torch.allclose(one.grad, other.grad, rtol=0, atol=1e-14), key
    assert state_of(module) == clean


def test_a_hook_behind_a_block_runs_on_its_own_stage() -> None:
    module = made("Toy")
    seen: list[bool] = []
    module.blocks[1].register_forward_hook(lambda *given: seen.append(bool(given[2].isnan().any())))
    module.blocks[2].register_forward_pre_hook(lambda *given: seen.append(bool(given[1][0].isnan().any())))
    batch = module.batch(2)
    stages, probe = staged(module, batch, 2, 2)
    hidden = stages[0].run(lambda: module.training_step(batch), None, probe.form)
    assert seen[-1:] == [False]
    del seen[:]
    stages[1].run(lambda: module.training_step(batch), hidden, probe.form)
    assert seen == [False], "hooks of blocks of other stages are not called, those of the first block see what came"


def test_a_shell_looks_like_its_block() -> None:
    block = made("Toy").blocks[0]
    block.register_forward_hook(lambda *given: None)
    block.gradient_checkpointing = True
    found = shell(block, lambda *args: "run")
    assert type(found) is type(block)
    assert found.self_attn is block.self_attn
    assert found(1) == "run"
    assert not found._forward_hooks
    assert len(block._forward_hooks) == 1
    assert found.gradient_checkpointing is False
    assert block.gradient_checkpointing is True


def test_a_shell_keeps_hooks_of_the_models_library() -> None:
    def gather(*given: Any) -> None:
        seen.append(given[2])

    seen: list[Any] = []
    gather.__module__ = "transformers.utils.output_capturing"
    block = made("Toy").blocks[0]
    block.register_forward_hook(gather)
    block.register_forward_hook(lambda *given: seen.append("user"))
    assert shell(block, lambda *args: "run", gathering=True)(1) == "run"
    assert seen == ["run"]


def test_hooks_that_a_step_registers_stay_with_the_blocks() -> None:
    class Registering(Toy):
        registered = False

        def training_step(self, batch: Any) -> Any:
            if not self.registered:
                for block in self.blocks:
                    block.register_forward_hook(lambda block, args, output: None)
                self.registered = True
            return super().training_step(batch)

    module = Registering()
    batch = module.batch(2)
    stages, probe = staged(module, batch, 2, 2)
    assert [len(block._forward_hooks) for block in module.blocks] == [0] * 4
    for _ in range(2):
        stages[0].run(lambda: module.training_step(batch), None, probe.form)
        assert [len(block._forward_hooks) for block in module.blocks] == [1, 1, 1, 1]


def test_errors_leave_nothing_behind() -> None:
    module = made("Toy")
    batch = module.batch(2)
    clean = state_of(module)
    stages, probe = staged(module, batch, 2, 2)

    def failing() -> None:
        module.training_step({**batch, "input_ids": batch["input_ids"] + 1000})

    for stage in stages:
        with pytest.raises(IndexError):
            stage.run(failing, None, probe.form)
        assert state_of(module) == clean
    copy.deepcopy(module)


class Catching(Toy):
    """Catches every exception, as some users' steps do."""

    def training_step(self, batch: Any) -> Any:
        try:
            return super().training_step(batch)
        except Exception:
            return torch.zeros(())


def test_no_except_of_the_users_stops_a_stage() -> None:
    module = Catching()
    batch = module.batch(2)
    stages, probe = staged(module, batch, 2, 2)
    assert not issubclass(StageDone, Exception)
    assert stages[0].run(lambda: module.training_step(batch), None, probe.form).shape == (2, 12, 32)


class Wayward(Toy):
    """Does in a later step what it did not in the first."""

    way = ""

    def training_step(self, batch: Any) -> Any:
        hidden = self.embedding(batch["input_ids"])
        blocks = list(self.blocks)
        blocks = {"short": blocks[:1], "twice": blocks + blocks}.get(self.way, blocks)
        for block in blocks:
            if self.way.startswith("checkpoint"):
                hidden = checkpoint(block, hidden, use_reentrant=self.way == "checkpoint reentrant")
            else:
                hidden = block(src=hidden) if self.way == "keyword" else block(hidden)
            if self.way == "longer":
                hidden = torch.cat((hidden, hidden), 1)
        return cross_entropy(self.head(hidden), batch["labels"])


@pytest.mark.parametrize(
    ("way", "stage", "words"),
    [
        ("short", 0, "did not come to blocks.2"),
        ("short", 1, "did not come to blocks.2"),
        ("twice", 1, "called blocks.2 a second time"),
        ("longer", 0, "is given a hidden state of"),
        ("checkpoint", 0, "runs inside torch.utils.checkpoint"),
        ("checkpoint", 1, "runs inside torch.utils.checkpoint"),
        ("checkpoint reentrant", 0, "runs inside torch.utils.checkpoint"),
        ("checkpoint reentrant", 1, "runs inside torch.utils.checkpoint"),
    ],
)
def test_steps_that_do_otherwise_later(way: str, stage: int, words: str) -> None:
    module = Wayward()
    batch = module.batch(2)
    clean = state_of(module)
    stages, probe = staged(module, batch, 2, 2)
    module.way = way
    hidden = torch.zeros(2, 12, 32, dtype=torch.float64) if stage else None
    with pytest.raises(ValueError, match=words):
        stages[stage].run(lambda: module.training_step(batch), hidden, probe.form)
    del module.way
    assert state_of(module) == clean


def test_digests_are_of_all_but_the_hidden_state() -> None:
    module = made("Masked")
    batch = module.batch(2)
    stages, probe = staged(module, batch, 2, 2)
    for stage in stages:
        stage.digests = {}
    hidden = stages[0].run(lambda: module.training_step(batch), None, probe.form)
    stages[1].run(lambda: module.training_step(batch), hidden + 1, probe.form)
    assert stages[0].digests is not None
    assert stages[1].digests is not None
    assert set(stages[0].digests) == {0, 2}
    assert stages[1].digests == {2: stages[0].digests[2]}


def test_what_a_digest_tells_apart() -> None:
    mask = torch.tensor([[True, False]])
    same = [mask, None, 2, "a", torch.tensor(1.5, dtype=torch.bfloat16)]
    assert digest(same) == digest([each.clone() if isinstance(each, Tensor) else each for each in same])
    for other in ([~mask, *same[1:]], [mask.int(), *same[1:]], [mask, 1, *same[2:]], same[:-1]):
        assert digest(other) != digest(same)


# ---- ownership


@pytest.fixture
def alone() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_what_a_rank_does_not_own_is_nan_and_without_memory(alone: dist.ProcessGroup) -> None:
    module = made("Toy")
    before = dict(module.named_parameters())
    clean = state_of(module)
    probe = probe_step(module, only_list(module), module.training_step, module.batch(2))
    ownership = Ownership(module, probe.uses, Division((2, 2), 2), alone)
    assert ownership.owners["embedding.weight"] == (0,)
    assert ownership.owners["head.bias"] == (1,)
    assert set(ownership.parameters) == {
        name for name in before if name.startswith(("embedding", "blocks.0", "blocks.1"))
    }
    assert set(dict(module.named_parameters())) == set(ownership.parameters)
    assert module.head.weight.isnan().all()
    assert module.head.weight.shape == (64, 32)
    assert before["head.weight"].untyped_storage().nbytes() == 8
    assert not ownership.counts("head.bias")
    assert ownership.counts("embedding.weight")
    ownership.remove()
    assert state_of(module) == clean
    assert [p is before[name] for name, p in module.named_parameters()] == [True] * len(before)
    assert module.head.weight.isnan().all()


def test_a_divided_module_is_watched_without_its_other_parameters(alone: dist.ProcessGroup) -> None:
    module = made("Toy")
    module.head = nn.Linear(32, 100_000).double()
    blocks = only_list(module)
    probe = probe_step(module, blocks, module.training_step, module.batch(2))
    ownership = Ownership(module, probe.uses, Division((2, 2), 2), alone)
    meter = open_meter()
    before = meter.live_bytes
    meter.reset_peak()
    form = probe_form(module, blocks, module.training_step, module.batch(3), probe.form)
    assert form.rows == 3
    assert form.blocks[0].hidden.shape == (3, 12, 32)
    assert meter.peak_bytes - before < 1_000_000  # the head has 25.6 MB
    meter.close()
    ownership.remove()


def test_modules_that_keep_lists_of_their_parameters(alone: dist.ProcessGroup) -> None:
    module = nn.Module()
    module.rnn, module.lists = nn.LSTM(3, 4), nn.ParameterList([torch.ones(2), torch.ones(3)])
    module.frozen = nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False)
    order = [name for name, _ in module.named_parameters()]
    uses = {name: frozenset({4}) for name in order} | {"lists.1": frozenset({0})}
    ownership = Ownership(module, uses, Division((2, 2), 2), alone)
    assert list(ownership.parameters) == ["lists.1"]
    assert all(weight.isnan().all() for weight in module.rnn._flat_weights)
    assert module.lists[0].isnan().all()
    assert module.frozen.tolist() == [0, 0]
    ownership.remove()
    assert [name for name, _ in module.named_parameters()] == order
    assert all(isinstance(weight, nn.Parameter) for weight in module.rnn._flat_weights)


def test_parameters_that_others_exchange_are_found(alone: dist.ProcessGroup) -> None:
    module = made("gpt-tied")
    uses = {name: frozenset({0}) for name, _ in [*module.named_parameters(), *module.named_buffers()]}
    ownership = Ownership(module, uses, Division((2, 2), 2), alone)
    former = ownership.parameters
    replaced = replace_parameters(module, lambda name, parameter: nn.Parameter(parameter.detach().clone()))
    assert ownership.parameters == {name: replaced[parameter] for name, parameter in former.items()}
    ownership.remove()


def test_lazy_modules_are_refused(alone: dist.ProcessGroup) -> None:
    module = nn.LazyLinear(3)
    uses = {name: frozenset({0}) for name, _ in module.named_parameters()}
    with pytest.raises(ValueError, match="weight has no shape yet"):
        Ownership(module, uses, Division((2, 2), 2), alone)


def test_placeholders() -> None:
    found = placeholder(nn.Parameter(torch.ones(1000, 1000, dtype=torch.bfloat16)))
    assert found.shape == (1000, 1000)
    assert found.dtype == torch.bfloat16
    assert found.untyped_storage().nbytes() == 2
    assert not found.requires_grad
