"""Backward in all the ways it is called: twice, twice differentiated, in parts, for some inputs, from a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from parity import FULL, PAIRS, assert_parity, never_silent, seeded
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from toys import Block, Stack, rows, square_loss, stack, step

from lightning_recompute.policy import RecomputePolicy
from lightning_recompute.recompute import RecomputeError, apply_recompute, is_recomputing

UNITS = pytest.mark.parametrize(
    "policy", [RecomputePolicy(num_layers=n) for n in (1, 2, 3)], ids=lambda policy: f"unit-{policy.num_layers}"
)

LAST_UNIT = {1: 1, 2: 2, 3: 1}
"""Unit size -> number of blocks in the last unit of four blocks."""


@UNITS
def test_autograd_grad(policy: RecomputePolicy) -> None:
    def run(model: nn.Module) -> tuple[Tensor, ...]:
        return torch.autograd.grad(square_loss(model), list(model.parameters()))

    assert_parity(stack, run, policy)


@UNITS
@pytest.mark.parametrize("wanted", ["blocks.0.up.weight", "blocks.3.down.bias", "embed.weight", "head.weight"])
def test_backward_for_some_inputs(policy: RecomputePolicy, wanted: str) -> None:
    """Only the units on the way are replayed."""

    def run(model: nn.Module) -> Tensor:
        loss = square_loss(model)
        loss.backward(inputs=[model.get_parameter(wanted)])
        return loss

    last = [1] * (4 - LAST_UNIT[policy.num_layers]) + [2] * LAST_UNIT[policy.num_layers]
    calls = {"head.weight": [1] * 4, "blocks.3.down.bias": last}.get(wanted, [2] * 4)
    module = assert_parity(stack, run, policy, calls=calls)
    assert [name for name, p in module.named_parameters() if p.grad is not None] == [wanted]


@UNITS
def test_backward_twice_over_a_retained_graph(policy: RecomputePolicy) -> None:
    def run(model: nn.Module) -> Tensor:
        loss = square_loss(model)
        loss.backward(retain_graph=True)
        loss.backward()
        return loss

    assert_parity(stack, run, policy, calls=[3] * 4)


@UNITS
def test_a_graph_that_was_not_retained_is_refused_as_without_recompute(policy: RecomputePolicy) -> None:
    model = stack()
    with apply_recompute(model, policy):
        loss = square_loss(model)
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()
        step(model)


@UNITS
def test_two_heads_each_with_its_own_backward(policy: RecomputePolicy) -> None:
    class TwoHeads(Stack):
        def __init__(self) -> None:
            super().__init__(Block() for _ in range(4))
            self.other = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            hidden = self.hidden(x)
            return self.head(hidden), self.other(hidden)

    def run(model: nn.Module) -> tuple[Tensor, Tensor]:
        one, other = model(rows())
        one.square().mean().backward(retain_graph=True)
        other.square().mean().backward()
        return one, other

    assert_parity(TwoHeads, run, policy, calls=[3] * 4)


@UNITS
def test_a_head_that_leaves_in_the_middle_of_a_unit(policy: RecomputePolicy) -> None:
    """Deep supervision: the loss also reads the output of an inner block."""

    class Middle(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x, total = self.embed(x), torch.zeros(())
            for block in self.blocks:
                x = block(x)
                total = total + self.head(x).square().mean()
            return total

    def run(model: nn.Module) -> Tensor:
        loss: Tensor = model(rows())
        loss.backward()
        return loss

    assert_parity(lambda: Middle(Block() for _ in range(4)), run, policy)


@UNITS
def test_double_backward_of_a_gradient_penalty(policy: RecomputePolicy) -> None:
    def run(model: nn.Module) -> tuple[Tensor, Tensor]:
        x = rows(requires_grad=True)
        y = model(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        loss = y.mean() + (slope.norm(dim=1) - 1).square().mean()
        loss.backward()
        assert x.grad is not None
        return loss, x.grad

    assert_parity(stack, run, policy, calls=[3] * 4)


@UNITS
@pytest.mark.parametrize("weights_first", [False, True])
def test_backward_split_by_block(policy: RecomputePolicy, weights_first: bool) -> None:
    """One call of autograd.grad for each block, for its input and its weights."""

    class Traced(Stack):
        def forward(self, x: Tensor) -> list[Tensor]:
            hidden = [self.embed(x)]
            for block in self.blocks:
                hidden.append(block(hidden[-1]))
            return [*hidden, self.head(hidden[-1])]

    def run(model: nn.Module) -> list[Tensor]:
        *hidden, y = model(rows())
        grads = list(torch.autograd.grad(y.square().mean(), [hidden[-1], *model.head.parameters()]))
        flowing, found = grads[0], grads[1:]
        for index in reversed(range(4)):
            block = model.get_submodule(f"blocks.{index}")
            wanted = [hidden[index], *block.parameters()]
            flowing, *weights = torch.autograd.grad(hidden[index + 1], wanted, flowing)
            found += [flowing, *weights]
        return found

    def run_inputs_then_weights(model: nn.Module) -> list[Tensor]:
        # as a zero-bubble schedule: the way back through all blocks first, the weights later
        *hidden, y = model(rows())
        (flowing,) = torch.autograd.grad(y.square().mean(), [hidden[-1]], retain_graph=True)
        later, found = [], []
        for index in reversed(range(4)):
            later.append((index, flowing))
            (flowing,) = torch.autograd.grad(hidden[index + 1], [hidden[index]], flowing, retain_graph=True)
            found.append(flowing)
        for index, gradient in later:
            parameters = list(model.get_submodule(f"blocks.{index}").parameters())
            found += torch.autograd.grad(hidden[index + 1], parameters, gradient, retain_graph=True)
        return found

    # how often a unit is replayed is the schedule's business (a later issue); the values are what counts here
    never_silent(
        lambda: Traced(Block() for _ in range(4)), run_inputs_then_weights if weights_first else run, policy, ()
    )


@UNITS
def test_the_model_called_twice_before_backward(policy: RecomputePolicy) -> None:
    def run(model: nn.Module) -> Tensor:
        one, other = model(rows()), model(rows().flip(0))
        loss: Tensor = (one - other).square().mean()
        loss.backward()
        return loss

    assert_parity(stack, run, policy, calls=[4] * 4)


@UNITS
def test_forwards_whose_backwards_come_in_the_same_order(policy: RecomputePolicy) -> None:
    """Microbatches of a pipeline: the oldest graph is used first, a new forward runs in between."""

    def run(model: nn.Module) -> list[Tensor]:
        waiting, losses = [], []
        for microbatch in range(4):
            waiting.append(model(rows() + microbatch).square().mean())
            if len(waiting) == 2:
                losses.append(waiting.pop(0))
                losses[-1].backward()
        waiting[0].backward()
        return losses

    assert_parity(stack, run, policy, calls=[8] * 4)


class Shared(Stack):
    """ALBERT: one block stands for all layers."""

    def __init__(self, as_list: bool) -> None:
        block = Block()
        super().__init__([block] * 3 if as_list else [block, Block()])
        self.rounds = 1 if as_list else 3

    def hidden(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for _ in range(self.rounds):
            for block in self.blocks:
                x = block(x)
        return x


def test_one_block_that_stands_for_all_layers() -> None:
    assert_parity(lambda: Shared(as_list=True), step, calls=[6] * 3)
    # a unit tells its blocks apart by the module
    with pytest.raises(ValueError, match=r"blocks\.1 is the same module as blocks\.0.*num_layers=1"):
        apply_recompute(Shared(as_list=True), PAIRS)


@pytest.mark.parametrize("policy", [FULL, PAIRS], ids=["single", "pairs"])
def test_a_group_of_blocks_that_runs_several_times(policy: RecomputePolicy) -> None:
    assert_parity(lambda: Shared(as_list=False), step, policy, calls=[6] * 2)


@pytest.mark.parametrize(
    ("kind", "policy"),
    [("tied", FULL), ("tied", PAIRS), ("unused", FULL), ("unused", PAIRS), ("shared", FULL)],
    ids=lambda value: value if isinstance(value, str) else f"unit-{value.num_layers or 1}",
)
def test_hooks_of_every_parameter_fire_once(policy: RecomputePolicy, kind: str) -> None:
    """What DistributedDataParallel relies on; more than one firing is its "marked ready twice"."""

    def build() -> nn.Module:
        model = Shared(as_list=True) if kind == "shared" else stack(3)
        if kind == "tied":
            model.head.weight = model.embed.weight
        if kind == "unused":
            model.extra = nn.Linear(8, 8)
        return model

    def run(model: nn.Module) -> dict[str, int]:
        fired = dict.fromkeys((name for name, _ in model.named_parameters()), 0)

        def hook(name: str) -> Callable[[Tensor], None]:
            def count(_: Tensor) -> None:
                fired[name] += 1

            return count

        handles = [p.register_post_accumulate_grad_hook(hook(name)) for name, p in model.named_parameters()]
        step(model)
        for handle in handles:
            handle.remove()
        assert set(fired.values()) == ({0, 1} if kind == "unused" else {1})
        return fired

    assert_parity(build, run, policy, calls=[6] * 3 if kind == "shared" else None)


@UNITS
@pytest.mark.parametrize(
    "surround", ["thread", "no_grad", "autocast", "anomaly", "deterministic"], ids=lambda value: str(value)
)
def test_backward_from_elsewhere(policy: RecomputePolicy, surround: str) -> None:
    def backward(loss: Tensor) -> None:
        if surround == "thread":
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()
        elif surround == "no_grad":
            with torch.no_grad():
                loss.backward()
        elif surround == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                loss.backward()
        elif surround == "anomaly":
            with torch.autograd.set_detect_anomaly(True):
                loss.backward()
        else:
            torch.use_deterministic_algorithms(True)
            try:
                loss.backward()
            finally:
                torch.use_deterministic_algorithms(False)

    def run(model: nn.Module) -> Tensor:
        loss = square_loss(model)
        backward(loss)
        assert model.embed.weight.grad is not None
        return loss

    assert_parity(stack, run, policy)


@UNITS
@pytest.mark.parametrize("kind", ["save_on_cpu", "torch checkpoint", "torch checkpoint, reentrant"])
def test_other_peoples_hooks_around_the_blocks(policy: RecomputePolicy, kind: str) -> None:
    def run(model: nn.Module) -> Tensor:
        x = rows(requires_grad=True)
        if kind == "save_on_cpu":
            with torch.autograd.graph.save_on_cpu():
                y = model(x)
        else:
            y = checkpoint(model, x, use_reentrant=kind.endswith("reentrant"))
        loss: Tensor = y.square().mean()
        loss.backward()
        return loss

    assert_parity(stack, run, policy, calls=[2] * 4)  # one level: torch's checkpoint around a block wins


def test_outer_hooks_see_the_inputs_of_the_units_and_nothing_else_of_the_blocks() -> None:
    seen: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor.detach())
        return tensor.detach()

    model = stack()
    inputs: list[Tensor] = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, args: inputs.append(args[0].detach()))
    for num_layers in (1, 2, 4):
        seen.clear()
        inputs.clear()
        with apply_recompute(model, RecomputePolicy(num_layers=num_layers)):
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                hidden = model.hidden(rows())
            found = [tensor.data_ptr() for tensor in seen]
            assert [found.count(x.data_ptr()) for x in inputs] == [int(i % num_layers == 0) for i in range(4)]
            inside = [tensor for tensor in seen if tensor.shape[-1] == 16]
            assert inside == []
            hidden.sum().backward()


@UNITS
@pytest.mark.parametrize("transform", ["grad", "vjp", "jvp"])
def test_torch_func_transforms_are_right_or_refused(policy: RecomputePolicy, transform: str) -> None:
    def run(model: nn.Module) -> object:
        if transform == "grad":
            return torch.func.grad(lambda x: model(x).square().mean())(rows())
        if transform == "vjp":
            y, pull = torch.func.vjp(model, rows())
            return [y, *pull(torch.ones_like(y))]
        return list(torch.func.jvp(model, (rows(),), (torch.ones(4, 8),)))

    error = never_silent(stack, run, policy, RecomputeError)
    assert error is None or "torch.func" in str(error)


@UNITS
def test_is_recomputing_is_true_in_replays_only(policy: RecomputePolicy) -> None:
    told: list[bool] = []

    class Asking(Block):
        def forward(self, x: Tensor) -> Tensor:
            told.append(is_recomputing())
            return super().forward(x)

    model = seeded(lambda: stack(4, Asking))
    with apply_recompute(model, policy):
        loss = square_loss(model)
        assert told == [False] * 4
        loss.backward(retain_graph=True)
        assert told == [False] * 4 + [True] * 4
        model.embed.weight.register_hook(lambda _: told.append(is_recomputing()))
        told.clear()
        loss.backward()
        assert told == [True] * 4 + [False]
        with torch.no_grad():
            model(rows())
        assert told[5:] == [False] * 4
        assert not is_recomputing()


@UNITS
def test_is_recomputing_ends_with_an_exception_in_a_replay(policy: RecomputePolicy) -> None:
    class FailsInReplay(Block):
        def forward(self, x: Tensor) -> Tensor:
            if is_recomputing():
                raise KeyError("in replay")
            return super().forward(x)

    model = seeded(lambda: stack(4, FailsInReplay))
    with apply_recompute(model, policy):
        torch.manual_seed(0)
        loss = square_loss(model)
        state = torch.get_rng_state()
        with pytest.raises(KeyError, match="in replay"):
            loss.backward()
        assert not is_recomputing()
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.is_grad_enabled()
