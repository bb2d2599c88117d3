"""What one block holds for backward under an action of a plan.

Bytes come from a run on fake tensors, which takes no memory and no device; where a kernel cannot run on those, from a
run on real ones.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._pytree import tree_leaves

from lightning_recompute.capture import BlockCall, plain_storage
from lightning_recompute.labels import find_targets
from lightning_recompute.ledger import Ledger, Meter, Mode, allocated, allocated_bytes
from lightning_recompute.lone_block import FAKE_LOGGER, LoneBlock, alone, is_compiled, silenced
from lightning_recompute.memory import open_meter
from lightning_recompute.plan import Action, Keep, Selective
from lightning_recompute.save_ops import GROUPS
from lightning_recompute.stragglers import Stragglers

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Chained:
    """What is different about a call whose input the block before has freed.

    Attributes:
        inner_bytes: What its graph holds, as in `Phases`.
        given: Positions of the tensors it is given and holds.
        again_bytes: What the input that is made again adds to the most in backward.
    """

    inner_bytes: int
    given: frozenset[int]
    again_bytes: int


@dataclass(frozen=True)
class Phases:
    """What one call of a block takes in each phase of a step, to be put together with the rest of its model.

    Attributes:
        inner_bytes: What its graph holds between forward and backward, without any tensor that it is given or returns.
        given: Positions of the tensors it is given and holds; of those that were there before the step none.
        chained: The same if what it is given was made by a block that is treated alike and frees it.
        made: Indices of the tensors it returns and holds itself.
        cached_bytes: What is alive besides until the end of the model's forward: casts of weights in autocast's cache,
            keys and values in a cache that no graph holds.
        appended_bytes: Those keys and values.
        forward_bytes: The most in its forward, above what is there when it begins, its inputs included.
        backward_bytes: The most in its backward, above what is there when it begins: what it holds, and the gradients
            of what it returned. Gradients of its parameters are made on the way.
        accumulating_bytes: The same where its parameters have gradients already.
    """

    inner_bytes: int
    given: frozenset[int]
    chained: Chained
    made: frozenset[int]
    cached_bytes: int
    appended_bytes: int
    forward_bytes: int
    backward_bytes: int
    accumulating_bytes: int


@dataclass(frozen=True)
class BlockCost:
    """What one call of a block costs.

    Attributes:
        held_bytes: What its graph holds between forward and backward: not parameters, nor what was there before the
            step, nor arguments that other blocks are given too (`shared_bytes`); but its input.
        chained_bytes: What it holds beside the block before, if its input is what that block returned. It is less
            than `held_bytes` if the block before holds that anyway (as a ReLU at its end does), or if neither holds
            it (the output of a norm that is freed).
        peak_bytes: The largest number of bytes while the block alone runs forward and backward, from its inputs and
            without what `held_bytes` leaves out; the gradients of its parameters are among them.
        gradient_bytes: Bytes of those gradients.
        shared_bytes: Bytes of tensors that it holds and that other blocks are given too, by `BlockCall.shared`.
        fused_attention: Whether a fused kernel of attention ran.
        is_fake: Whether the run was on fake tensors.
        phases: The same by phases of a step.
    """

    held_bytes: int
    chained_bytes: int
    peak_bytes: int
    gradient_bytes: int
    shared_bytes: Mapping[int, int]
    fused_attention: bool
    is_fake: bool
    phases: Phases


def measure_bytes(call: BlockCall, action: Action, *, real: bool = True, exact: bool = False) -> BlockCost:
    """Measure the bytes of a block under an action.

    Args:
        call: The block's call.
        action: What is recomputed.
        real: Whether the block may run on real tensors where it cannot on fake ones. That takes the memory and time
            of some forwards and backwards of the block.
        exact: Run on real tensors at once, and count what the device's allocator says where it can be asked: that
            sees what kernels allocate for themselves, which no operator returns. Needs `real`.

    Raises:
        ValueError: The action cannot be applied to the block.
        RuntimeError: The block cannot run on fake tensors, and not `real`; the cause tells why.
    """
    compiled = is_compiled(call.module)
    assert real or not exact
    if not compiled and not exact:
        try:
            fake = FakeTensorMode(allow_non_fake_inputs=True)
            with silenced(FAKE_LOGGER), alone(call, action, fake) as block:
                return _measured(block, action, Ledger(call.device, fake=True))
        except Exception as error:  # whatever a kernel says of fake tensors; a real run repeats an error of the block
            if not real:
                raise RuntimeError(f"{call.name} cannot run on fake tensors: {error}") from error
            logger.debug("%s is measured on real tensors: %s", call.name, error)
    elif not real:
        raise RuntimeError(f"{call.name} is compiled and cannot run on fake tensors")
    # in compiled code a ledger sees no memory, the allocator does
    meter = open_meter(call.device, reset=exact) if compiled or exact else Ledger(call.device, fake=False)
    with contextlib.closing(meter), alone(call, action, None) as block:
        return _measured(block, action, meter)


def _frees_outputs(call: BlockCall, action: Action) -> bool:
    """Whether a block's output may be freed where the next block would hold it."""
    targets = find_targets(call.module, action.modules, call.name)[0] if isinstance(action, Selective) else []
    return any(target.how in ("output", "nodes") for target in targets)


# ---- counting


@dataclass
class _Held:
    """What one forward holds: all in all; what of it is its input or its output; what others hold as well."""

    num_bytes: int
    input_bytes: int
    output_bytes: int
    shared_bytes: dict[int, int]
    given: frozenset[int]
    made: frozenset[int]
    inner_bytes: int
    cached_bytes: int
    appended_bytes: int
    forward_bytes: int
    peak_bytes: int = 0
    backward_bytes: int = 0


def _measured(block: LoneBlock, action: Action, meter: Meter) -> BlockCost:
    call = block.call
    kernels = _Kernels(call.device)

    def run() -> tuple[_Held, _Held, _Held]:
        with kernels:
            if not isinstance(action, Keep):
                block.forward()  # the first run under a patch learns about the block, and copies its inputs to do so
            if not isinstance(meter, Ledger):
                gc.collect()  # what is left of earlier runs would be freed inside
            first = _count(block, meter, {})
            again = _count(block, meter, {})
            following = again
            if call.chain and _frees_outputs(call, action):
                following = _count(block, meter, _chain(call, block.forward()))
            return first, again, following

    held, again, following = block.within(run)
    if following is again:
        chained_bytes = held.num_bytes - min(held.output_bytes, held.input_bytes)
    else:  # an output that the block before holds itself is among its own bytes
        chained_bytes = following.num_bytes + (0 if held.output_bytes else following.input_bytes)
    phases = Phases(
        held.inner_bytes,
        held.given,
        Chained(following.inner_bytes, following.given, max(following.backward_bytes - again.backward_bytes, 0)),
        held.made,
        held.cached_bytes,
        held.appended_bytes,
        held.forward_bytes,
        held.backward_bytes,
        again.backward_bytes,
    )
    return BlockCost(
        held.num_bytes,
        chained_bytes,
        held.peak_bytes,
        allocated_bytes((p for p in call.module.parameters() if p.requires_grad), call.device),
        held.shared_bytes,
        kernels.fused_attention,
        block.is_fake,
        phases,
    )


def _chain(call: BlockCall, made: Sequence[Tensor]) -> dict[int, Tensor]:
    """What a block made, in the places where the next one is given it."""
    return {
        position: made[index]
        for position, index in call.chain.items()
        if position not in call.shared and made[index].shape == call.tensors[position].shape
    }


def _count(block: LoneBlock, meter: Meter, chain: dict[int, Tensor]) -> _Held:
    """Count one forward and its backward.

    Args:
        block: The block.
        meter: Counts.
        chain: Inputs that a forward before has made, by position; they are not counted. The dictionary is emptied.

    Returns:
        Bytes from before the inputs were made; `input_bytes` are those of `chain`, if there are any.
    """
    call = block.call
    positions = range(len(call.tensors))
    given = {position: block.given(position) for position in call.shared} | chain
    own = [position for position in positions if position not in given and position not in call.free]
    earlier = {position: given[position] for position in given.keys() - call.free}
    meter.count(earlier.values())  # an allocator has counted them
    earlier_bytes = allocated_bytes(earlier.values(), call.device)
    before = meter.live_bytes
    given |= {position: block.given(position) for position in positions if position not in given}
    meter.count(given[position] for position in own)
    start = meter.live_bytes
    alive = {position: _alive(given[position]) for position in positions if position not in call.free}
    addresses = {plain_storage(tensor)._cdata for tensor in given.values()}
    inputs = [alive[position] for position in chain or own if position in alive]
    still = [alive[position] for position in earlier]
    earlier.clear()
    # where the backward of a chained forward goes on into the one before
    passed: list[int] = []
    for position in chain:
        chain[position].register_hook(lambda gradient: passed.append(meter.peak_bytes))
    shared = {call.shared[position]: alive[position] for position in call.shared.keys() - call.free}
    chain.clear()
    with meter.watching(), _young_objects():
        meter.reset_peak()
        filled: list[int] = []
        made = block.forward([given.pop(position) for position in positions], lambda: filled.append(meter.live_bytes))
        cached, appended = filled[0] - meter.live_bytes, filled[0] - filled[1]
        forward_peak = meter.peak_bytes
        meter.count(_random_states())
        new = {index: tensor for index, tensor in enumerate(made) if plain_storage(tensor)._cdata not in addresses}
        kept = {index: _alive(tensor) for index, tensor in new.items()}
        held_gradients: list[Tensor] = []
        end = block.end(made, held_gradients if call.holds_gradients else None)
        gradients = sum(tensor.nbytes for tensor in made if tensor.grad_fn is not None)
        del made, new
        returned = {call.returned[index]: kept[index] for index in kept.keys() & call.returned.keys()}
        num_bytes = meter.live_bytes - before - allocated_bytes([end], call.device)
        num_bytes += earlier_bytes - sum(ask() for ask in still)
        held = _Held(
            num_bytes - sum(ask() for ask in returned.values()),
            sum(ask() for ask in inputs),
            sum(ask() for index, ask in kept.items() if index not in call.returned),
            {number: ask() for number, ask in (shared | returned).items() if ask()},
            frozenset(position for position, ask in alive.items() if ask()),
            frozenset(index for index, ask in kept.items() if ask()),
            num_bytes - sum(alive[position]() for position in own) - sum(ask() for ask in kept.values()),
            cached,
            appended,
            forward_peak - start,
        )
        level = meter.live_bytes + gradients
        meter.reset_peak()
        block.backward(end)
        backward_peak = max(passed) if passed else meter.peak_bytes
        held.backward_bytes = backward_peak - level
        held.peak_bytes = max(forward_peak, backward_peak) - before
    return held


@contextlib.contextmanager
def _young_objects() -> Iterator[None]:
    """While this is entered, Python's youngest generation is what was made since."""
    enabled = gc.isenabled()
    gc.collect(0)
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _random_states() -> list[Tensor]:
    """States of the CPU's random numbers that young frames keep: no operator made them, so no ledger has seen them."""
    num_bytes = torch.get_rng_state().numel()
    young = (found for found in gc.get_objects(generation=0) if type(found) is Tensor)
    return [found for found in young if found.dtype == torch.uint8 and found.shape == (num_bytes,)]


def _alive(tensor: Tensor) -> Callable[[], int]:
    """Asks how many bytes of a tensor are alive."""
    reference = weakref.ref(plain_storage(tensor))

    def ask() -> int:
        storage = reference()
        return 0 if storage is None else allocated(storage)

    return ask


class _Kernels(Mode):
    """What is to be known of operators besides their memory.

    On fake tensors nothing is drawn and no values are compared. Here the random streams move on as they would, so that
    a frame keeps a random state where it will; and tensors count as equal: whether a forward writes to a buffer is
    known from versions.
    """

    def __init__(self, device: torch.device) -> None:
        Mode.__init__(self)
        self.fused_attention = False
        self._stragglers = Stragglers(device.type == "cpu")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.equal.default and any(isinstance(tensor, FakeTensor) for tensor in args):
            return True
        self._stragglers.before(func)
        result = func(*args, **kwargs)
        space, _, name = func.name().partition("::")
        self.fused_attention |= GROUPS["attention"](space, name)
        if torch.Tag.nondeterministic_seeded in func.tags and _draws(func, args, kwargs):
            for tensor in tree_leaves(result)[:1]:
                if isinstance(tensor, FakeTensor):
                    with unset_fake_temporarily():
                        torch.rand(1, device=tensor.device)
        return result


def _draws(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a kernel that may draw does: not at a rate of zero, in evaluation, or from a generator of its own."""
    arguments = func._schema.arguments
    given = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    given |= {**dict(zip((argument.name for argument in arguments), args, strict=False)), **kwargs}
    rate = given.get("dropout_p", given.get("p") if "dropout" in func.name() else 1.0)
    is_training = given.get("train") is not False and given.get("training") is not False
    return rate != 0.0 and is_training and given.get("generator") is None
