"""One step of an unmodified module, watched: what it uses before, in and after which block, and how it calls these.

The step runs once on fake tensors, which takes no memory and no time to speak of. Where the model looks at values
(`.item()`) or runs what fake tensors cannot (a module that tensor parallelism has divided), it runs for real, and
keeps nothing for backward.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, keystr, tree_flatten, tree_flatten_with_path, tree_leaves

from lightning_recompute.blocks import BlockList, find_blocks
from lightning_recompute.frame import Frame
from lightning_recompute.lone_block import FAKE_LOGGER, silenced
from lightning_recompute.microbatches import map_tensors, num_rows
from lightning_recompute.origins import Crossing, Origins
from lightning_recompute.step_form import BlockForm, StepForm, TensorForm
from lightning_recompute.untouched import hook_owner, undone

logger = logging.getLogger(__name__)

Step = Callable[[Any], Any]
"""Runs the user's step on a (micro)batch."""

_NAMED = 6

BEFORE = -1
"""Stands for what runs before the first block, as the number of blocks does for what runs after the last."""


@dataclass(frozen=True)
class Probe:
    """What a step was seen to do.

    Args:
        form: How it calls the blocks.
        uses: For each parameter and buffer, by its first name, where it is used: `BEFORE`, indices of blocks, their
            number for after. Parameters of a block count as used by it.
        loss: The loss.
        crossings: What comes to the loss from a block by another way than the hidden state; see `Origins`.
    """

    form: StepForm
    uses: Mapping[str, frozenset[int]]
    loss: TensorForm
    crossings: frozenset[Crossing] = frozenset()


class _Left(BaseException):
    """Leaves the step where no more of it is asked for."""


def only_list(module: nn.Module, blocks: str | Sequence[str] | None = None) -> BlockList:
    """The one list of blocks that is divided over pipeline stages.

    Args:
        module: The module.
        blocks: As for `find_blocks`.

    Raises:
        ValueError: There is none, several, or a block stands in it several times.
    """
    lists = find_blocks(module, blocks)
    if len(lists) != 1:
        raise ValueError(
            f"pipeline stages need exactly one list of blocks, found {len(lists)}: {' and '.join(map(str, lists))}. "
            "Name the one that runs from first to last with blocks=; a model with two, as an encoder with a decoder, "
            "cannot be divided"
        )
    found = lists[0]
    if len({id(block) for block in found.blocks}) < len(found):
        raise ValueError(f"{found}: a block stands in the list several times, so stages cannot have one part each")
    return found


def loss_of(result: Any) -> Tensor:
    """The loss in what a step returned.

    Raises:
        ValueError: There is none, or not of one element.
    """
    loss = result.get("loss") if isinstance(result, Mapping) else result
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(
            f"the step returned {found} as its loss; a tensor of one element is due, or a dict with such a 'loss'. A "
            "pipeline cannot skip a microbatch (None)"
        )
    return loss


def probe_step(module: nn.Module, block_list: BlockList, step: Step, microbatch: Any) -> Probe:
    """Watch one whole step; nothing of it stays on the module.

    Args:
        module: The whole module, in the mode that is meant.
        block_list: Its blocks.
        step: The step.
        microbatch: What it is run on.

    Returns:
        What it did.

    Raises:
        ValueError: The blocks are not called one after the other, once each; one of them is given a further tensor
            that needs a gradient or comes from another block; the step returns no loss, or runs backward itself.
    """
    watched = _watched(module, block_list, step, microbatch, whole=True)
    assert watched.loss is not None
    crossings = frozenset(watched.origins.crossings)
    return Probe(watched.form(num_rows(microbatch)), watched.uses(), watched.loss, crossings)


def probe_form(module: nn.Module, block_list: BlockList, step: Step, microbatch: Any, known: StepForm) -> StepForm:
    """How a step calls the blocks on another microbatch; it runs on fake tensors, up to the last block.

    Args:
        module: The module; also one that is divided.
        block_list: Its blocks.
        step: The step.
        microbatch: What it is run on.
        known: The form on another microbatch, for a model that cannot run on fake tensors: rows may differ.
    """
    rows = num_rows(microbatch)
    try:
        return _watched(module, block_list, step, microbatch, whole=False).form(rows)
    except Exception as error:
        logger.debug("shapes by rows only, since the step does not run on fake tensors: %r", error)
        return known.with_rows(rows)


def _watched(module: nn.Module, block_list: BlockList, step: Step, microbatch: Any, *, whole: bool) -> _Watch:
    fake = _Watch(module, block_list)
    try:
        mode: Any = active_fake_mode() or FakeTensorMode(allow_non_fake_inputs=True)
        fake.run(step, map_tensors(mode.from_tensor, microbatch), mode, whole)
    except Exception as error:
        if not whole:
            raise
        logger.debug("the step runs for real to be watched, since it does not on fake tensors: %r", error)
    else:
        fake.check()
        return fake
    real = _Watch(module, block_list)
    real.run(step, microbatch, None, whole)
    real.check()
    return real


class _Uses(TorchDispatchMode):
    """Notes which of some tensors operators are given."""

    def __init__(self, watch: _Watch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = tree_leaves((args, kwargs))
        self._watch.note(leaves)
        result = func(*args, **(kwargs or {}))
        self._watch.origins.note(func, leaves, args, kwargs or {}, tree_leaves(result), self._watch.segment)
        return result


class _Watch:
    """A step under observation."""

    def __init__(self, module: nn.Module, block_list: BlockList) -> None:
        self._module = module
        self._list = block_list
        self._names = {id(tensor): name for name, tensor in [*module.named_parameters(), *module.named_buffers()]}
        self._used: defaultdict[str, set[int]] = defaultdict(set)
        self.segment = BEFORE
        self._order: list[int] = []
        self._calls: list[tuple[tuple[int, ...], TensorForm]] = []
        self._returns: list[tuple[TreeSpec, list[Any]]] = []
        self._mains: list[int | None] = []
        self._outputs: dict[int, tuple[weakref.ref[Tensor], int, int]] = {}
        self._faults: list[str] = []
        self.loss: TensorForm | None = None
        self.origins: Origins

    def run(self, step: Step, microbatch: Any, mode: FakeTensorMode | None, whole: bool) -> None:
        with undone(self._module, [self._list]) as stack:
            # the step writes copies of the buffers
            self._names |= {id(buffer): name for name, buffer in self._module.named_buffers()}
            self.origins = Origins(self._module.parameters(), self._module.buffers())
            for index, block in enumerate(self._list.blocks):
                before, after = functools.partial(self._before, index), functools.partial(self._after, index, whole)
                stack.callback(block.register_forward_pre_hook(before, prepend=True, with_kwargs=True).remove)
                stack.callback(block.register_forward_hook(after).remove)
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            # an open frame keeps no tensor that autograd saves, and this one only leaves when asked for one
            frame = Frame()
            frame.close_tape(frame.open_tape("probe", _leave, ()), ())
            stack.enter_context(frame.packing())
            stack.enter_context(torch.enable_grad())
            self._enter_modes(stack, mode, whole)
            try:
                loss = loss_of(step(microbatch))
            except _Left:
                if whole:
                    raise ValueError(
                        "the step runs backward itself: a pipeline runs forward and backward of its microbatches in "
                        "turns; return the loss instead (automatic optimization)"
                    ) from None
            else:
                self.origins.reach(loss)
                self.loss = TensorForm.of(loss)

    def _enter_modes(self, stack: ExitStack, mode: FakeTensorMode | None, whole: bool) -> None:
        if mode is not None:
            stack.enter_context(mode)
            stack.enter_context(silenced(FAKE_LOGGER))  # what fails on fake tensors is no error, see above
        if whole:  # of another microbatch only the form is asked for
            stack.enter_context(_Uses(self))

    def note(self, leaves: Sequence[Any]) -> None:
        for leaf in leaves:
            name = self._names.get(id(leaf))
            if name is not None:
                self._used[name].add(self.segment)

    @torch.compiler.disable
    def _before(self, index: int, _: nn.Module, args: Any, kwargs: Any) -> None:
        torch.clear_autocast_cache()  # a cast that is remembered would hide a further use of the parameter
        self.segment = index
        self._order.append(index)
        paths, leaves = zip(*_with_paths(args, kwargs), strict=True) if args or kwargs else ((), ())
        main = self._hidden(index, leaves)
        if main is None:
            self._faults.append(f"{self._list.names[index]} is given no floating-point tensor")
            return
        places = tuple(place for place, leaf in enumerate(leaves) if leaf is main)
        self._calls.append((places, TensorForm.of(main)))
        self.origins.enter(main, index)
        if index:
            self._mains.append(found[2] if (found := self._output(main)) and found[1] == index - 1 else None)
        for path, leaf in zip(paths, leaves, strict=True):
            if isinstance(leaf, Tensor) and leaf is not main and (leaf.requires_grad or self._output(leaf)):
                why = "comes from another block" if self._output(leaf) else "needs a gradient"
                self._faults.append(f"{self._list.names[index]} is given {path}, which {why}")

    @torch.compiler.disable
    def _after(self, index: int, whole: bool, block: nn.Module, args: Any, output: Any) -> None:
        leaves, spec = tree_flatten(output)
        owners = {hook_owner(hook) for hook in block._forward_hooks.values()}
        self.origins.leave(leaves, bool(owners - {"torch", "transformers", "lightning_recompute"}))
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                self._outputs[id(leaf)] = weakref.ref(leaf), index, place
        self._returns.append((spec, [_form(leaf) for leaf in leaves]))
        if index == len(self._list) - 1:
            torch.clear_autocast_cache()
            self.segment = len(self._list)
            if not whole:
                raise _Left

    def _hidden(self, index: int, leaves: Sequence[Any]) -> Tensor | None:
        """What the block before returned; through glue, the first that needs a gradient, or the first."""
        floating = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        before = [leaf for leaf in floating if (found := self._output(leaf)) and found[1] == index - 1]
        return next(iter([*before, *(leaf for leaf in floating if leaf.requires_grad), *floating]), None)

    def _output(self, leaf: Tensor) -> tuple[weakref.ref[Tensor], int, int] | None:
        found = self._outputs.get(id(leaf))
        return found if found is not None and found[0]() is leaf else None

    def check(self) -> None:
        names = self._list.names
        if self._order != list(range(len(names))):
            called = [names[index] for index in self._order]
            more = f" and so on, {len(called)} calls" if called[_NAMED:] else ""
            raise ValueError(
                f"{self._list}: a step called {called[:_NAMED] or 'none of these blocks'}{more}. Pipeline stages need "
                "each block called once in a step, one after the other, by `block(...)`; name other blocks with blocks="
            )
        if self._faults:
            raise ValueError(
                f"{self._faults[0]}{f' (and {len(self._faults) - 1} more)' if self._faults[1:] else ''}. Between "
                "pipeline stages only the hidden state passes with a gradient; everything else a block is given each "
                "stage has to make itself, from the batch"
            )

    def form(self, rows: int) -> StepForm:
        blocks = []
        for (places, hidden), (spec, leaves), main in zip(
            self._calls, self._returns, [*self._mains, None], strict=True
        ):
            floating = (i for i, leaf in enumerate(leaves) if isinstance(leaf, TensorForm) and leaf.is_floating_point)
            place = next(floating, -1) if main is None else main
            blocks.append(BlockForm(places, hidden, spec, tuple(leaves), place))
        return StepForm(tuple(blocks), rows)

    def uses(self) -> dict[str, frozenset[int]]:
        for index, block in enumerate(self._list.blocks):
            for tensor in [*block.parameters(), *block.buffers()]:
                self._used[self._names[id(tensor)]].add(index)
        return {name: frozenset(self._used[name]) for name in self._names.values()}


def _with_paths(args: Any, kwargs: Any) -> list[tuple[str, Any]]:
    """The leaves of a call's arguments, each with words for where it stands."""
    pairs, _ = tree_flatten_with_path((args, kwargs))
    num_positional = len(tree_leaves(args))
    kinds = ["argument"] * num_positional + ["keyword"] * (len(pairs) - num_positional)
    return [(f"{kind} {keystr(path[1:])}", leaf) for kind, (path, leaf) in zip(kinds, pairs, strict=True)]


def _form(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return TensorForm.of(leaf)
    return leaf if isinstance(leaf, int | float | str | None) else None


def _leave() -> None:
    raise _Left
