"""Running one stage of an unmodified step: it is cut at the input of the stage's first block and of the next one's.

While a stage runs, shells stand for the blocks of other stages: they have the blocks' attributes for the model's own
code and return NaN in the structure that the blocks return. The first block is given the hidden state that came from
the stage before; where the next stage's first block would run, the hidden state is caught, with all that runs between
two blocks done, and the step is left. Between runs nothing is on the module.
"""

from __future__ import annotations

import functools
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import active_fake_mode
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from lightning_recompute.blocks import BlockList
from lightning_recompute.prior_recompute import inside_torch_checkpoint
from lightning_recompute.step_form import StepForm, TensorForm
from lightning_recompute.untouched import HOOKS, hook_owner

_FORWARD_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_FLAGS = ("_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called")
IN_ORDER = (
    "Pipeline stages need every block called once in each step, in order: what calls the model more often, such as "
    "text generation, belongs after the fit (trainer.validate, trainer.predict), where each rank has the whole module"
)
"""What is due of a step."""

_OWN_RECOMPUTE = ("gradient_checkpointing", "grad_checkpointing")


class StageDone(BaseException):
    """Leaves the user's step behind a stage; no `except Exception` there stops it."""


class Stage:
    """Consecutive blocks, with what runs before or after the blocks if they are the first or the last.

    Args:
        module: The module.
        block_list: All its blocks.
        start: The first block of the stage.
        stop: The one after its last.
        device: Where the module is.
    """

    def __init__(self, module: nn.Module, block_list: BlockList, start: int, stop: int, device: torch.device) -> None:
        self._names = block_list.names
        self._blocks = block_list.blocks
        self._device = device
        self.start, self.stop = start, stop
        self._places = []
        for name in block_list.names:
            parent, _, key = name.rpartition(".")
            self._places.append((module.get_submodule(parent), key))
        inside = {id(part) for block in block_list.blocks for part in block.modules()}
        outside = [part for part in module.modules() if id(part) not in inside]
        self._buffers = [(part, name) for part in outside if start for name in part._buffers]
        self._formers: list[tuple[nn.Module, str, Tensor, Tensor]] = []
        self._has_run = False
        self._form: StepForm
        self._received: Tensor | None = None
        self._hidden: Tensor | None = None
        self._entered = self._has_grad = False
        self._at_entry: Callable[[], None] | None = None
        self.digests: dict[int, str] | None = None
        """If not None: to be filled with a digest of what blocks at the cuts are given beside the hidden state."""

    @property
    def is_last(self) -> bool:
        """Whether the step goes on to its loss."""
        return self.stop == len(self._blocks)

    def run(
        self,
        step: Callable[[], Any],
        received: Tensor | None,
        form: StepForm,
        at_entry: Callable[[], None] | None = None,
    ) -> Any:
        """Run the step's part.

        Args:
            step: The user's step with its microbatch.
            received: The hidden state that the first block is given; None on the first stage.
            form: How the step calls the blocks.
            at_entry: Called when the first block is about to run.

        Returns:
            The hidden state for the next stage, (rows, ...) as `form` says; on the last stage what the step returns.

        Raises:
            ValueError: The step does not call the blocks as `form` says.
        """
        self._form, self._received, self._at_entry = form, received, at_entry
        self._entered = False
        self._has_grad = torch.is_grad_enabled()
        with ExitStack() as stack:
            stack.callback(self._forget)
            if not self.is_last or self.start:
                self._put_shells(stack)
            self._formers = [
                (part, name, buffer, buffer.clone())
                for part, name in self._buffers
                if (buffer := part._buffers[name]) is not None
            ]
            first = self._blocks[self.start]
            stack.callback(first.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True).remove)
            try:
                result = step()
            except StageDone:
                assert self._hidden is not None
                return self._hidden
            if not self.is_last:
                self._refuse(f"did not come to {self._names[self.stop]}")
            if not self._entered:
                self._refuse(f"did not come to {self._names[self.start]}")
            return result

    def _put_shells(self, stack: ExitStack) -> None:
        for index, (parent, key) in enumerate(self._places):
            if not self.start <= index < self.stop:
                block = parent._modules[key]
                assert block is not None
                stack.callback(parent._modules.__setitem__, key, block)
                leaves = index == self.stop
                forward = self._leave if leaves else functools.partial(self._pass, index)
                # where the stage is left hooks before the block run on the next one, and those after it do not run
                parent._modules[key] = found = shell(block, forward, gathering=not leaves)
                stack.callback(_hand_over, found, block, {*found._forward_hooks, *found._forward_pre_hooks})

    def _forget(self) -> None:
        self._received = self._hidden = self._at_entry = None
        self._formers.clear()

    def _restore_buffers(self) -> None:
        """What the step has written before its blocks is the first stage's to write, which may be on this rank too."""
        if active_fake_mode() is not None:  # nothing has values
            self._formers.clear()
        written = []
        for part, name, buffer, former in self._formers:
            if part._buffers[name] is not buffer or not torch.equal(buffer, former):
                written.append((part, name))
                part._buffers[name] = buffer
                buffer.data.copy_(former)  # graphs that have saved it do not look at its values
        self._formers.clear()
        if not self._has_run:  # what is not written in the first step is not looked after in others
            self._buffers, self._has_run = written, True

    def _pass(self, index: int, /, *args: Any, **kwargs: Any) -> Any:
        """What stands for the forward of another stage's block."""
        return self._form.blocks[index].poison(self._device)

    @torch.compiler.disable
    def _enter(self, _: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Before the first block: give it the hidden state."""
        if self._entered:
            self._refuse(f"called {self._names[self.start]} a second time")
        self._entered = True
        self._refuse_checkpoint(self.start)
        self._restore_buffers()
        leaves, spec = tree_flatten((args, kwargs))
        self._digest(self.start, leaves)
        if self._at_entry is not None:
            self._at_entry()
        if self._received is None:
            return None
        for place in self._form.blocks[self.start].places:
            self._check_place(leaves, place, self.start)
            leaves[place] = self._received
        changed: tuple[Any, Any] = tree_unflatten(leaves, spec)
        self._received = None
        return changed

    @torch.compiler.disable
    def _leave(self, *args: Any, **kwargs: Any) -> Any:
        """What stands for the forward of the next stage's first block: catch the hidden state and leave."""
        if not self._entered:
            self._refuse(f"did not come to {self._names[self.start]}")
        self._refuse_checkpoint(self.stop)
        leaves = tree_leaves((args, kwargs))
        self._digest(self.stop, leaves)
        form = self._form.blocks[self.stop]
        hidden = self._check_place(leaves, form.places[0], self.stop)
        if isinstance(hidden, DTensor):
            raise ValueError(
                f"{self._names[self.stop]} is given a DTensor as its hidden state; between pipeline stages an ordinary "
                "tensor is due, e.g. by a tensor_parallel_plan that replicates the outputs of blocks"
            )
        if TensorForm.of(hidden) != form.hidden:
            raise ValueError(
                f"{self._names[self.stop]} is given a hidden state of {TensorForm.of(hidden)}, and the next stage "
                f"waits for {form.hidden}, which a step with such a microbatch was seen to give"
            )
        self._hidden = hidden
        raise StageDone

    def _check_place(self, leaves: Sequence[Any], place: int, index: int) -> Tensor:
        leaf = leaves[place] if place < len(leaves) else None
        if not isinstance(leaf, Tensor):
            self._refuse(f"calls {self._names[index]} with other arguments than in the step that was watched")
        assert isinstance(leaf, Tensor)
        return leaf

    def _refuse_checkpoint(self, index: int) -> None:
        if inside_torch_checkpoint() or (self._has_grad and not torch.is_grad_enabled()):
            raise ValueError(
                f"{self._names[index]} runs inside torch.utils.checkpoint, called by the model itself, or under "
                "no_grad(), where a stage cannot be cut; switch that off (gradient_checkpointing_disable()) and take "
                "granularity='full', or freeze parameters by requires_grad_(False)"
            )

    def _refuse(self, what: str) -> None:
        names = dict.fromkeys((self._names[self.start], self._names[self.stop - 1]))
        raise ValueError(f"a step on {' to '.join(names)} {what}. {IN_ORDER}")

    def _digest(self, index: int, leaves: Sequence[Any]) -> None:
        if self.digests is not None and index not in self.digests:
            places = self._form.blocks[index].places
            self.digests[index] = digest(leaf for place, leaf in enumerate(leaves) if place not in places)


def shell(block: nn.Module, forward: Callable[..., Any], *, gathering: bool = False) -> nn.Module:
    """A module that looks like a block and runs something else; it shares all the block has but its hooks.

    Args:
        block: The block.
        forward: What runs.
        gathering: Whether it keeps hooks of a model's own library (transformers), which gather what blocks return:
            every block is to have its place there.
    """
    found = object.__new__(type(block))
    attributes = dict(vars(block))
    attributes |= {name: OrderedDict() for name in HOOKS}
    attributes |= {name: False for name in _OWN_RECOMPUTE if name in attributes}
    attributes |= {"_compiled_call_impl": None, "forward": forward}
    vars(found).update(attributes)
    if gathering:
        _share_hooks(block, found, lambda key, hook: hook_owner(hook) == "transformers")
    return found


def _hand_over(found: nn.Module, block: nn.Module, known: set[int]) -> None:
    """What the step has registered on a shell belongs to the block: transformers does so once, in the first forward."""
    _share_hooks(found, block, lambda key, hook: key not in known)


def _share_hooks(one: nn.Module, other: nn.Module, which: Callable[[int, Any], bool]) -> None:
    hooks = [(kind, key, hook) for kind in _FORWARD_HOOKS for key, hook in vars(one)[kind].items() if which(key, hook)]
    for kind, key, hook in hooks:
        vars(other)[kind][key] = hook
        for flag in _FLAGS:
            if key in vars(one)[flag]:
                vars(other)[flag][key] = vars(one)[flag][key]


def digest(leaves: Any) -> str:
    """Equal for equal tensors, numbers and words; other objects do not count.

    Args:
        leaves: The leaves of a call's arguments.
    """
    found = hashlib.sha256()
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            found.update(repr(TensorForm.of(leaf)).encode())
            values = leaf.detach()
            values = values.to_local() if isinstance(values, DTensor) else values
            found.update(values.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes())
        elif isinstance(leaf, int | float | str | None):
            found.update(repr(leaf).encode())
    return found.hexdigest()
