"""A block that runs alone, with the call that its model made and on stand-ins for its parameters.

Nothing of it stays: the user's parameters get no gradient, random streams, buffers, attributes and patches are
afterwards what they were.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from lightning_recompute.capture import BlockCall, recorded_forward, tensors_in
from lightning_recompute.discard import freeing_forward, recognising_forward
from lightning_recompute.patch import Original
from lightning_recompute.plan import Action, Keep, RecomputePlan, Segment
from lightning_recompute.recompute import apply_recompute
from lightning_recompute.recompute import logger as engine_logger
from lightning_recompute.recompute_unit import is_cache, recomputed_forward
from lightning_recompute.tape import taped_forward
from lightning_recompute.untouched import preserved_rng

_PATCHES = (recorded_forward, recomputed_forward, freeing_forward, recognising_forward, taped_forward)
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")

FAKE_LOGGER = logging.getLogger(fake_tensor.__name__)
"""Tells of every kernel that cannot run on fake tensors, with a traceback."""


@contextlib.contextmanager
def alone(call: BlockCall, action: Action, fake: FakeTensorMode | None) -> Iterator[LoneBlock]:
    """A block that can be run by itself under an action.

    Args:
        call: The block's call.
        action: What is recomputed; a plan that is applied to its model is left out of account.
        fake: Run on fake tensors of this mode. None: on real ones.
    """
    module = call.module
    with contextlib.ExitStack() as stack:
        # neither shall somebody's counter see this, nor a mode that is around the model
        stack.enter_context(_disable_current_modes())
        stack.enter_context(preserved_rng([*module.parameters(), *call.tensors]))
        observers = call.observers if call.observers is not None else call.state.hooks
        stack.enter_context(call.state.restored(module, frozenset(observers)))
        _take_off_patches(module)
        for kind in _HOOKS:  # the call's arguments are as the block's own hooks left them
            vars(module)[kind] = type(vars(module)[kind])()
        stack.enter_context(_applied(module, call.name, action))
        yield LoneBlock(call, fake)


def _take_off_patches(module: nn.Module) -> None:
    for part in module.modules():
        for name, value in list(vars(part).items()):
            if not (isinstance(value, functools.partial) and value.func in _PATCHES):
                continue
            former: Any = value
            while isinstance(former, functools.partial) and former.func in _PATCHES:
                original = former.args[0]
                former = original.forward if isinstance(original, Original) else None
            if former is None:  # the class's own
                delattr(part, name)
            else:
                setattr(part, name, former)


@contextlib.contextmanager
def _applied(block: nn.Module, name: str, action: Action) -> Iterator[None]:
    """The block under an action; its name, to which patterns may refer, is what it is in its model."""
    if isinstance(action, Keep):
        yield
        return
    parent, _, key = name.rpartition(".")
    root: nn.Module = nn.ModuleDict({key: block})
    for part in reversed(parent.split(".") if parent else []):
        outer = nn.Module()
        outer.add_module(part, root)
        root = outer
    with silenced(engine_logger):  # what it has to say is said when a plan is applied to the model
        handle = apply_recompute(root, RecomputePlan((Segment(0, 1, action),)), blocks=parent)
    with handle:
        yield


@contextlib.contextmanager
def silenced(logger: logging.Logger) -> Iterator[None]:
    """Drop what a logger is told."""
    logger.addFilter(_nothing)
    try:
        yield
    finally:
        logger.removeFilter(_nothing)


def _nothing(record: logging.LogRecord) -> bool:
    return False


def is_compiled(module: nn.Module) -> bool:
    """Whether a module or a part of it is compiled, so that it can neither run on fake tensors nor be watched."""
    parts = module.modules()
    return any(getattr(part, "_compiled_call_impl", None) is not None or hasattr(part, "_orig_mod") for part in parts)


class _Stage(nn.Module):
    """Runs a function while its block, any module, has other parameters and buffers."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, function: Callable[[], Any]) -> Any:
        """Run the function."""
        return function()


def with_stand_ins(module: nn.Module, stand_ins: Mapping[Tensor, Tensor], function: Callable[[], Any]) -> Any:
    """Call a function while a module has other tensors in the places of its parameters and buffers.

    Args:
        module: The module; afterwards it has its own again.
        stand_ins: What stands in for each; a tensor that is not among them stays.
        function: What is called.
    """
    places: dict[str, Tensor] = {}
    # each module once: of one in two places, torch would put the stand-ins back (hence no `tie_weights`)
    for prefix, part in module.named_modules(prefix="block"):
        for name, value in (*part._parameters.items(), *part._buffers.items()):
            if value is not None and value in stand_ins:
                places[f"{prefix}.{name}"] = stand_ins[value]
    return torch.func.functional_call(_Stage(module), places, (function,), tie_weights=False)


class _Made(torch.autograd.Function):
    """Makes an input as another block would make it: a fresh tensor that is no leaf."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor) -> Tensor:
        return _fresh(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        return None, None


class _End(torch.autograd.Function):
    """Makes the gradients of tensors as later blocks would: nobody else holds them, unless that is said."""

    @staticmethod
    def forward(ctx: Any, held: list[Tensor] | None, *tensors: Tensor) -> Tensor:
        ctx.held = held
        ctx.likes = [torch.empty_like(tensor, device="meta") for tensor in tensors]
        ctx.device = tensors[0].device
        return torch.zeros((), device=ctx.device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        made = tuple(torch.ones_like(like, device=ctx.device) for like in ctx.likes)
        if ctx.held is not None:
            ctx.held.extend(made)
        return None, *made


def _fresh(tensor: Tensor) -> Tensor:
    """A copy that takes no more memory than the tensor: what is expanded stays so."""
    narrow = tensor
    for dim, stride in enumerate(tensor.stride() if tensor.layout == torch.strided else ()):
        if stride == 0 and tensor.shape[dim] > 1:
            narrow = narrow.narrow(dim, 0, 1)
    copy = narrow.clone()
    return copy if narrow is tensor else copy.expand(tensor.shape)


class LoneBlock:
    """Runs a call of a block again and again, on stand-ins for its parameters; made by `alone`.

    Args:
        call: The call.
        fake: Run on fake tensors of this mode.

    Attributes:
        call: The call.
    """

    def __init__(self, call: BlockCall, fake: FakeTensorMode | None) -> None:
        self.call = call
        self._fake = fake
        self._values = [self._detached(tensor) for tensor in call.tensors]
        self._parameters: dict[Tensor, Tensor] = {
            parameter: nn.Parameter(self._detached(parameter), parameter.requires_grad)
            for parameter in call.module.parameters()
        }
        buffers = call.module.buffers() if fake is not None else ()  # real ones are copies already
        self._buffers = {buffer: self._detached(buffer) for buffer in buffers}

    @property
    def is_fake(self) -> bool:
        """Whether it runs on fake tensors."""
        return self._fake is not None

    def _detached(self, tensor: Tensor) -> Tensor:
        return tensor.detach() if self._fake is None else self._fake.from_tensor(tensor.detach())

    def within(self, function: Callable[[], Any]) -> Any:
        """Call a function while the block has its stand-ins; `given`, `forward` and `backward` are for inside."""
        for parameter in self._parameters.values():
            parameter.grad = None
        with self._fake or contextlib.nullcontext():
            return with_stand_ins(self.call.module, {**self._parameters, **self._buffers}, function)

    def given(self, position: int) -> Tensor:
        """A fresh tensor in place of one of the call's; what was there before the step is given as it is."""
        value = self._values[position]
        if self.call.needs_grad[position]:
            apply: Any = _Made.apply  # it carries no types
            made: Tensor = apply(torch.empty(0, requires_grad=True), value)
            return made
        return value.detach() if position in self.call.free else _fresh(value)

    def forward(self, given: list[Tensor] | None = None, clearing: Callable[[], object] = lambda: None) -> list[Tensor]:
        """Run forward.

        Args:
            given: Tensors in place of the call's; the list is emptied. None: fresh ones.
            clearing: Called twice at the end: when caches are still filled, autocast's of cast weights and one of keys
                and values; and when only autocast's is.

        Returns:
            The tensors in its output.
        """
        given = given or [self.given(index) for index in range(len(self._values))]
        args, kwargs = self.call.arguments(given)
        given.clear()
        # inside somebody's autocast its cache of cast weights would outlive this forward
        torch.clear_autocast_cache()
        # around the model's own autocast, at whose end the cache would be cleared
        with torch.enable_grad(), torch.autocast(self.call.device.type, enabled=False):
            result = self.call.surroundings.run(self.call.module, args, kwargs)
            filled = [leaf for leaf in tree_leaves((args, kwargs)) if is_cache(leaf)]
            del args, kwargs
            clearing()
            del filled
            clearing()
        torch.clear_autocast_cache()
        return tensors_in(result)

    def end(self, made: Sequence[Tensor], held: list[Tensor] | None = None) -> Tensor:
        """A scalar to run backward from. It keeps the graph of what was made, not the tensors.

        Args:
            made: What forward returned.
            held: Is to hold the gradients of those, which otherwise nobody but autograd does.
        """
        apply: Any = _End.apply  # it carries no types
        end: Tensor = apply(held, *(tensor for tensor in made if tensor.grad_fn is not None))
        return end

    def backward(self, end: Tensor) -> None:
        """Run backward as it is run in training: without autocast."""
        with torch.autocast("cpu", enabled=False), torch.autocast(self.call.device.type, enabled=False):
            torch.autograd.backward(end)

    def step(self, mode: AbstractContextManager[object] | None = None) -> None:
        """Run forward and backward, inside a dispatch mode if one is given."""

        def run() -> None:
            with mode or contextlib.nullcontext():
                self.backward(self.end(self.forward()))

        self.within(run)
