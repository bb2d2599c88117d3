"""The harness of the parity tests: the same training step without and with recompute, compared to the bit.

Nothing here allows a tolerance: loss, every gradient, every buffer, whatever the step returns and the RNG state
after it are compared with `torch.equal`. How often each block ran is counted too, so a recompute that
does nothing cannot pass.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from plans import num_calls
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lightning_recompute.blocks import find_blocks
from lightning_recompute.plan import RecomputePlan
from lightning_recompute.policy import RecomputePolicy
from lightning_recompute.recompute import apply_recompute

FULL = RecomputePolicy()
PAIRS = RecomputePolicy(num_layers=2)
PRECISIONS = ("32", "bf16-mixed")

Run = Callable[[nn.Module], object]


@dataclass(frozen=True)
class Outcome:
    """What a training step leaves: copies, so later steps cannot change them."""

    result: object
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    rng: Tensor


def autocast(precision: str) -> contextlib.AbstractContextManager[object]:
    """What Lightning enters around a step at this precision."""
    return torch.autocast("cpu", torch.bfloat16) if precision == "bf16-mixed" else contextlib.nullcontext()


def observe(module: nn.Module, run: Run, seed: int = 1) -> Outcome:
    """Run a step (with its backward) from a seed and copy what it leaves."""
    torch.manual_seed(seed)
    result = run(module)
    return Outcome(
        tree_map_only(Tensor, lambda t: t.detach().clone(), result),
        {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()},
        {name: b.clone() for name, b in module.named_buffers()},
        torch.get_rng_state(),
    )


def assert_same(found: object, due: object, where: str = "") -> None:
    """Compare two outcomes, or anything in them, to the bit; say what differs and by how much."""
    if isinstance(due, Tensor):
        assert isinstance(found, Tensor), f"{where}: {type(found).__name__}, due a tensor"
        assert (found.dtype, found.shape) == (due.dtype, due.shape), f"{where}: {found.dtype} {tuple(found.shape)}"
        if not torch.equal(found, due):
            raise AssertionError(f"{where} differs by up to {(found.double() - due.double()).abs().max().item():.3g}")
    elif isinstance(due, Outcome):
        assert isinstance(found, Outcome)
        for part in ("result", "gradients", "buffers", "rng"):
            assert_same(getattr(found, part), getattr(due, part), part)
    elif isinstance(due, dict):
        assert isinstance(found, dict)
        assert list(found) == list(due), f"{where}: names {list(found)}, due {list(due)}"
        for name in due:
            assert_same(found[name], due[name], f"{where}[{name}]")
    elif isinstance(due, (list, tuple)):
        assert type(found) is type(due), f"{where}: {type(found).__name__}, due {type(due).__name__}"
        assert len(found) == len(due), f"{where}: {len(found)} entries, due {len(due)}"
        for index, (one, other) in enumerate(zip(found, due, strict=True)):
            assert_same(one, other, f"{where}[{index}]")
    else:
        assert found == due, f"{where}: {found!r}, due {due!r}"


Count = Callable[[Iterable[nn.Module]], list[int]]


@contextlib.contextmanager
def counted_calls(blocks: Iterable[nn.Module]) -> Iterator[Count]:
    """Count how often blocks of the classes of `blocks` run their own forward, replays included.

    The count sits on the class, beneath whatever is patched on an instance later; what was bound on an instance
    before is not seen, so the context has to be entered before `apply_recompute`.

    Yields:
        A function that gives the number of calls of each block it is asked about.
    """
    calls: Counter[int] = Counter()
    seen: dict[int, nn.Module] = {}  # keeps the modules, so that no id is used twice

    def count(forward: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(forward)
        def counting(self: nn.Module, /, *args: object, **kwargs: object) -> object:
            calls[id(self)] += 1
            seen[id(self)] = self
            return forward(self, *args, **kwargs)

        return counting

    with pytest.MonkeyPatch.context() as patch:
        for cls in {type(block) for block in blocks}:
            patch.setattr(cls, "forward", count(cls.forward))
        yield lambda asked: [calls[id(block)] for block in asked]


def block_modules(module: nn.Module, blocks: str | Sequence[str] | None = None) -> list[nn.Module]:
    """All blocks of a model in the order of a plan's indices."""
    return [block for block_list in find_blocks(module, blocks) for block in block_list.blocks]


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    """A model with the weights of the tests' seed."""
    torch.manual_seed(0)
    return build()


def assert_parity(
    build: Callable[[], nn.Module],
    run: Run,
    what: RecomputePolicy | RecomputePlan = FULL,
    *,
    blocks: str | Sequence[str] | None = None,
    calls: Sequence[int] | None = None,
    num_steps: int = 1,
    prepare: Callable[[nn.Module], object] | None = None,
) -> nn.Module:
    """Run the same steps with and without recompute from the same weights and seed and compare all they leave.

    Args:
        build: Makes the model.
        run: One step with its backward; may return any tensors to compare.
        what: The policy or plan.
        blocks: Passed to `apply_recompute`.
        calls: Due number of forward calls of each block over all steps; None: what the plan says, once a step.
        num_steps: Steps; gradients add up, so a later step sees what an earlier one left behind.
        prepare: Changes the module after `apply_recompute` (before the steps, on both sides).

    Returns:
        The recomputed module, with recompute removed.
    """
    plain = seeded(build)
    if prepare is not None:
        prepare(plain)
    due = [observe(plain, run, seed=step) for step in range(num_steps)]
    with counted_calls(block_modules(plain, blocks)) as count:
        module = seeded(build)
        with apply_recompute(module, what, blocks=blocks) as handle:
            if prepare is not None:
                prepare(module)
            found = [observe(module, run, seed=step) for step in range(num_steps)]
        expected = [n * num_steps for n in num_calls(handle.plan)] if calls is None else list(calls)
        counted = count(block_modules(module, blocks))
        assert counted == expected, f"forward calls {counted}, due {expected}"
    assert_same(found, due, "step")
    return module


def never_silent(
    build: Callable[[], nn.Module],
    run: Run,
    what: RecomputePolicy | RecomputePlan,
    errors: type[BaseException] | tuple[type[BaseException], ...],
    *,
    blocks: str | Sequence[str] | None = None,
) -> BaseException | None:
    """Run a step that recompute may refuse: either it raises one of `errors`, or all it leaves is right.

    Returns:
        The error, or None when the step was exact.
    """
    due = observe(seeded(build), run)
    module = seeded(build)
    with apply_recompute(module, what, blocks=blocks):
        try:
            found = observe(module, run)
        except errors as error:
            return error
    assert_same(found, due)
    return None


def backward(loss: Callable[..., Tensor], *args: Any, precision: str = "32") -> Run:
    """A step that computes a loss of (module, *args) at a precision and runs its backward."""

    def run(module: nn.Module) -> Tensor:
        with autocast(precision):
            value = loss(module, *args)
        value.backward()
        return value

    return run
