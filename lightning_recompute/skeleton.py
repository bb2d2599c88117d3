"""What a model's step holds outside of its blocks.

One step, forward and backward, is run for real with the blocks' graphs left out: a block runs without gradients, and
in backward hands on gradients of zeros. What remains is all that no plan changes: embeddings, what stands between
blocks, the head and the loss. With the cost of each block under each action (`block_cost`) it makes the memory of a
whole step under any plan (`timeline`).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from lightning_recompute.blocks import BlockList
from lightning_recompute.calls import Args, FreshCopy, Kwargs
from lightning_recompute.capture import plain_storage, slotted, tensors_in
from lightning_recompute.ledger import Ledger, allocated_bytes, plain_tensors
from lightning_recompute.lone_block import with_stand_ins
from lightning_recompute.memory import open_meter
from lightning_recompute.patch import Patch
from lightning_recompute.recompute_unit import is_cache, needs_grad
from lightning_recompute.stragglers import Stragglers
from lightning_recompute.timeline import Moment, MomentKind, Passage, Skeleton
from lightning_recompute.tried_step import LONE_STEP, TriedStep
from lightning_recompute.untouched import distinct_blocks, undone


class _Account(Ledger):
    """A ledger that knows which of the tensors that go in and out of blocks are alive at a peak.

    Args:
        device: The device.
        fake: Whether fake tensors count.
        asks: Count what the device's allocator says, where it can be asked: that sees the buffers of collectives, and
            parameters whose memory comes and goes.
    """

    def __init__(self, device: torch.device, *, fake: bool, asks: bool = False) -> None:
        super().__init__(device, fake=fake)
        meter = open_meter(device) if asks else None
        self._meter = meter if meter is not None and meter.continuous else None
        self._before = self._meter.live_bytes if self._meter is not None else 0
        self._seen_peak = 0
        self._stragglers = Stragglers(asks and device.type == "cpu")
        self.sizes: list[int] = []
        self.alive: set[int] = set()
        self.alive_at_peak: frozenset[int] = frozenset()
        self._numbers: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}

    def number_of(self, tensor: Tensor) -> int:
        """The number of the memory behind a tensor; what was there before the step takes none."""
        storage = plain_storage(tensor)
        reference, number = self._numbers.get(storage._cdata, (None, -1))
        if reference is None or reference() is not storage:
            number = len(self.sizes)
            self._numbers[storage._cdata] = weakref.ref(storage), number
            entry = self._entries.get(storage._cdata)
            self.sizes.append(entry.num_bytes if entry is not None else 0)
            self.alive.add(number)
        return number

    @property
    def live_bytes(self) -> int:
        """Bytes alive now."""
        return super().live_bytes if self._meter is None else self._meter.live_bytes - self._before

    @property
    def peak_bytes(self) -> int:
        """The largest `live_bytes` since the last `reset_peak`."""
        return super().peak_bytes if self._meter is None else self._meter.peak_bytes - self._before

    def reset_peak(self) -> None:
        """Start a new peak at what is live now."""
        super().reset_peak()
        if self._meter is not None:
            self._meter.reset_peak()
            self._seen_peak = self.peak_bytes
            self.alive_at_peak = frozenset(self.alive)

    def close(self) -> None:
        """Forget all storages."""
        super().close()
        if self._meter is not None:
            self._meter.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator and note what is new."""
        self._stragglers.before(func)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self._meter is not None and (peak := self.peak_bytes) > self._seen_peak:
            self._seen_peak = peak
            self.alive_at_peak = frozenset(self.alive)
        return result

    def _forget(self, key: int) -> None:
        self.alive.discard(self._numbers.get(key, (None, -1))[1])
        super()._forget(key)

    def _set_peak(self) -> None:
        super()._set_peak()
        if self._meter is None:
            self.alive_at_peak = frozenset(self.alive)


class _Recorder:
    """Notes what happens in a step, in the order in which it happens."""

    def __init__(self, account: _Account, tried: TriedStep) -> None:
        self.account = account
        self.tried = tried
        self.is_on = True
        self.moments: list[Moment] = []
        self.middle: Moment | None = None
        self.passages: list[Passage] = []
        self.in_backward = False

    def between(self) -> None:
        """What stands between blocks ends here."""
        if not self.is_on:
            return
        account = self.account
        self.moments.append(Moment("between", -1, account.peak_bytes, account.alive_at_peak, self.in_backward))

    def turn(self) -> None:
        """Forward is over, backward begins."""
        self.between()
        self.in_backward = True
        account = self.account
        account.reset_peak()
        self.middle = Moment("between", -1, account.live_bytes, frozenset(account.alive), True)

    def enter(self, call: int, *, backward: bool) -> None:
        """A block's forward or backward begins."""
        if not self.is_on:
            return
        self.between()
        kind: MomentKind = "backward" if backward else "forward"
        account = self.account
        self.moments.append(Moment(kind, call, account.live_bytes, frozenset(account.alive), self.in_backward))

    def leave(self) -> None:
        """It is over; what it needed for itself does not count."""
        self.account.reset_peak()

    def begin(self, *, is_noted: bool) -> None:
        """A step begins."""
        self.passages.clear()
        self.is_on, self.in_backward = is_noted, False

    def call(self, name: str, module: nn.Module, original: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        """Run a block's forward without its graph."""
        # what a block puts into a cache is among what it holds
        args, kwargs = tree_map(lambda leaf: FreshCopy(leaf).take() if is_cache(leaf) else leaf, (args, kwargs))
        given = slotted(args, kwargs)[0]
        number = len(self.passages)
        numbers = tuple(map(self.account.number_of, given))
        self.enter(number, backward=False)
        self.passages.append(Passage(name, numbers, ()))
        box: list[Any] = []

        def run() -> list[Tensor]:
            # a weight that the cache keeps cast would be the block's, and have no gradient
            with _without_autocast_cache():
                leaves, spec = tree_flatten(original(*args, **kwargs))
            box.extend((leaves, spec))
            return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

        anchor = torch.empty(0, requires_grad=True)
        apply: Any = _Shell.apply  # it carries no types
        # their gradients come by autograd, so that what waits for them is told
        trained = [p for p in module.parameters() if p.requires_grad] if self.tried.averages else []
        inputs = [*(tensor for tensor in given if tensor.requires_grad), *trained]
        made = apply(self, number, module, run, anchor, *inputs)
        leaves, spec = box
        box.clear()
        tensors = iter(made)
        result = tree_unflatten([next(tensors) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)
        del leaves, made, tensors
        self.passages[number] = Passage(name, numbers, tuple(map(self.account.number_of, tensors_in(result))))
        self.leave()
        return result


@contextlib.contextmanager
def _without_autocast_cache() -> Any:
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


SHELL = "_Shell"
"""How the names of nodes begin that stand for blocks in the graph."""


class _Shell(torch.autograd.Function):
    """A block in the graph without what is inside."""

    @staticmethod
    def forward(
        ctx: Any,
        recorder: _Recorder,
        number: int,
        module: nn.Module,
        run: Callable[[], list[Tensor]],
        anchor: Tensor,
        *given: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.recorder, ctx.number, ctx.module = recorder, number, module
        ctx.likes = [
            tensor.detach() if isinstance(tensor, nn.Parameter) else torch.empty_like(tensor, device="meta")
            for tensor in given
        ]
        ctx.devices = [tensor.device for tensor in given]
        return tuple(run())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.recorder.enter(ctx.number, backward=True)
        made = [torch.zeros_like(like, device=device) for like, device in zip(ctx.likes, ctx.devices, strict=True)]
        if ctx.recorder.tried.gathers:
            for parameter in ctx.module.parameters():
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        ctx.recorder.leave()
        return None, None, None, None, None, *made


@torch.compiler.disable
def shelled_forward(original: Callable[..., Any], recorder: _Recorder, name: str, /, *args: Any, **kwargs: Any) -> Any:
    """The patched forward of a block whose graph is left out."""
    module: nn.Module = original.__self__  # type: ignore[attr-defined]  # a bound method, or an Original
    if not torch.is_grad_enabled() or not needs_grad(module, args, kwargs):
        return original(*args, **kwargs)
    return recorder.call(name, module, original, args, kwargs)


def run_skeleton(
    module: nn.Module,
    run: Callable[[], object],
    block_lists: Sequence[BlockList],
    *,
    accumulating: bool = False,
    tried: TriedStep = LONE_STEP,
    reduces: bool = True,
) -> Skeleton:
    """Run one step of a model with its blocks' graphs left out.

    The module is afterwards what it was, and so are the random streams: the step runs on stand-ins for its parameters,
    and no optimizer takes part. Sharded parameters take part themselves, and blocks give them gradients of zeros, so
    that these are reduced as in training.

    Args:
        module: The model, in the mode that is meant (usually training), on its device.
        run: Runs its training forward once and returns its loss: a tensor, a mapping with "loss", or an object with
            `.loss`; of anything else all outputs are taken. If it runs backward itself (manual optimization) it may
            return None.
        block_lists: Where its blocks are.
        accumulating: Whether parameters have gradients already when backward begins.
        tried: How a step is run.
        reduces: Whether the step is the last before the optimizer's, where that makes a difference.

    Raises:
        ValueError: What `run` returns does not depend on a trainable parameter.
    """
    stand_ins: dict[Tensor, nn.Parameter] = {p: nn.Parameter(p.detach(), p.requires_grad) for p in module.parameters()}
    device = next((parameter.device for parameter in stand_ins), torch.device("cpu"))

    def give_gradients() -> None:
        for parameter in stand_ins.values() if accumulating else ():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None

    if not (tried.gathers or tried.averages):  # else they are among what is counted
        give_gradients()

    def step(is_noted: bool) -> None:
        recorder.begin(is_noted=is_noted)
        account.reset_peak()
        outcome = tried.forward(run)
        loss = _loss_of(outcome)
        recorder.turn()
        if loss:
            for tensor in loss:
                tried.before_backward(tensor)
            with torch.autocast("cpu", enabled=False), torch.autocast(device.type, enabled=False):
                torch.autograd.backward(loss, [torch.ones_like(tensor) for tensor in loss])
            tried.after_backward()
        recorder.between()

    def steps() -> None:
        for parameter in module.parameters() if tried.gathers else ():
            parameter.grad = None  # `undone` puts it back
        if tried.averages:
            give_gradients()
        if accumulating and tried.gathers:
            with tried.without_reduction():
                step(is_noted=False)
        with contextlib.nullcontext() if reduces else tried.without_reduction():
            step(is_noted=True)

    with undone(module, block_lists) as stack:
        # a divided parameter wraps what this rank has of it
        parts = (part for parameter in module.parameters() for part in plain_tensors(parameter))
        is_fake = any(isinstance(part, FakeTensor) for part in parts)
        account = stack.enter_context(contextlib.closing(_Account(device, fake=is_fake, asks=tried.communicates)))
        recorder = _Recorder(account, tried)
        for block, name in distinct_blocks(block_lists):
            stack.callback(Patch(block, shelled_forward, recorder, name).remove)
        with tried.trying(stand_ins.values()), account, torch.enable_grad():
            if tried.gathers:
                steps()
            else:
                with_stand_ins(module, stand_ins, steps)
        sizes = tuple(account.sizes)
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    gradient_bytes = allocated_bytes(trainable, device)
    has_gradients = tried.gathers or tried.averages
    return Skeleton(
        tuple(recorder.moments), tuple(recorder.passages), sizes, gradient_bytes, has_gradients, recorder.middle
    )


def _loss_of(outcome: object) -> list[Tensor]:
    """Where backward begins."""
    if isinstance(outcome, Mapping) and isinstance(outcome.get("loss"), Tensor):
        found = [outcome["loss"]]
    elif isinstance(getattr(outcome, "loss", None), Tensor):
        found = [outcome.loss]  # type: ignore[attr-defined]
    else:
        found = [leaf for leaf in tree_leaves(outcome) if isinstance(leaf, Tensor)]
    loss = [tensor for tensor in found if tensor.requires_grad]
    if found and not loss:
        raise ValueError("the step's loss does not depend on any trainable parameter, so backward needs no memory")
    return loss
