"""How one module works under tensor parallelism: its forward, patched, on this rank's share of its parameters.

Parameters are DTensors, so that norms, clipping, optimizers and checkpoints see the whole; computation is on plain
local tensors. While a module's forward runs, its parameters' local tensors stand in the module's `__dict__`, where
Python finds them before the parameters: the module's own code runs unchanged, on any class.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.utils._pytree import tree_map

from lightning_recompute.collectives import (
    enter,
    enter_joined,
    join,
    split,
    sum_and_split,
    sum_parts,
)
from lightning_recompute.gathered_linear import Parts, gathered_linear
from lightning_recompute.rank_stream import RankStream

SEQUENCE = -2
"""The sequence dimension of hidden states (..., s, h)."""
_ENTERED, _PARTS = "_lightning_recompute_entered", "_lightning_recompute_parts"

Forward = Callable[..., Any]


class TensorRegion:
    """What all modules that share their work over one group of ranks have in common.

    Args:
        mesh: One axis, over the ranks.
        stream: This rank's random numbers.
        sequence: Whether hidden states between the shared parts are divided along the sequence.
    """

    def __init__(self, mesh: DeviceMesh, stream: RankStream, sequence: bool) -> None:
        self.mesh = mesh
        self.group = mesh.get_group()
        self.stream = stream
        self.sequence = sequence
        self.in_parts = sequence
        """Whether they are now: not while a sequence that cannot be divided is evaluated (text generation)."""

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorRegion:
        return self  # a copy of a module works with the same ranks

    def __reduce__(self) -> Any:
        raise TypeError(
            "a module that is tensor-parallel cannot be pickled while it is: its parameters are in several processes; "
            "save a checkpoint, or pickle it after the fit"
        )

    def begin(self, x: Tensor) -> None:
        """Decide whether a sequence is divided; an error in training if it cannot be."""
        self.in_parts = self.sequence and (torch.is_grad_enabled() or x.shape[SEQUENCE] % self.group.size() == 0)

    def end(self) -> None:
        """What was decided for one sequence ends."""
        self.in_parts = self.sequence

    def leave(self, y: Tensor) -> Tensor:
        """Sum what each rank made: whole, or this rank's part of the sequence."""
        return sum_and_split(y, SEQUENCE, self.group) if self.in_parts else sum_parts(y, self.group)


# ---- parameters


def own_names(module: nn.Module) -> list[str]:
    """Names of a module's own parameters that are DTensors and not shadowed."""
    return [
        name
        for name, value in module._parameters.items()
        if value is not None and isinstance(value.data, DTensor) and name not in vars(module)
    ]


def shadow(module: nn.Module, partial: bool, hidden: Sequence[str] = ()) -> list[str]:
    """Let local tensors stand before a module's parameters.

    Args:
        module: The module.
        partial: Whether each rank computes a part of the gradient of what it has alike with the others.
        hidden: Parameters before which None stands.

    Returns:
        The names, to be given to `unshadow`.
    """
    names = own_names(module)
    for name in names:
        vars(module)[name] = None if name in hidden else _local(module._parameters[name], partial)
    return names


def _local(parameter: Any, partial: bool) -> Tensor:
    alike = not any(placement.is_shard() for placement in parameter.placements)
    local: Tensor = parameter.to_local(grad_placements=[Partial()] if partial and alike else None)
    return local


def unshadow(module: nn.Module, names: Sequence[str]) -> None:
    """End what `shadow` began."""
    for name in names:
        vars(module).pop(name, None)


def _run(original: Forward, partial: bool, args: Any, kwargs: Any, deep: bool = False) -> Any:
    module: nn.Module = original.__self__  # type: ignore[attr-defined]  # a bound method, or an Original
    parts = [part for part in module.modules() if part is module or not _is_divided(part)] if deep else [module]
    shadowed = [(part, shadow(part, partial)) for part in parts]
    try:
        return original(*args, **kwargs)
    finally:
        for part, names in shadowed:
            unshadow(part, names)


def _is_divided(module: nn.Module) -> bool:
    function = getattr(vars(module).get("forward"), "func", None)
    return function in (colwise_forward, rowwise_forward, embedding_forward)


# ---- arguments


def _is_hidden(value: Any, ndim: int) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.ndim >= ndim


def first_hidden(args: tuple[Any, ...], kwargs: dict[str, Any], ndim: int = 1) -> Tensor | None:
    """The first floating-point tensor of a call, by position and then by keyword."""
    return next((value for value in (*args, *kwargs.values()) if _is_hidden(value, ndim)), None)


def _exchange(args: Any, kwargs: Any, old: Tensor, new: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call with a tensor in place of another, wherever that stands."""
    args = tuple(new if value is old else value for value in args)
    return args, {key: new if value is old else value for key, value in kwargs.items()}


def _entered(x: Tensor, region: TensorRegion) -> Tensor:
    """An input that all ranks have, for work with weights of their own; once for all linears that read it."""
    if not torch.is_grad_enabled() or not x.requires_grad:
        return x
    version = x._version
    found: tuple[Callable[[], Tensor | None], int] | None = getattr(x, _ENTERED, None)
    if found is not None and found[1] == version and (known := found[0]()) is not None:
        return known
    parts: Parts | None = getattr(x, _PARTS, None)
    entered = enter(x, region.group) if parts is None else enter_joined(parts.part, SEQUENCE, region.group, x)
    if parts is not None:
        setattr(entered, _PARTS, parts)
    # a leaf is held by the graph of what it entered as, and would hold that in turn: for ever
    setattr(x, _ENTERED, (weakref.ref(entered) if x.is_leaf else lambda: entered, version))
    return entered


def _joined(x: Tensor, region: TensorRegion) -> Tensor:
    """The whole sequence of which `x` is this rank's part; what reads it may keep the part."""
    whole = join(x, SEQUENCE, region.group)
    setattr(whole, _PARTS, Parts(x, SEQUENCE, region.group))
    return whole


# ---- patched forwards


@torch.compiler.disable
def whole_forward(original: Forward, partial: bool, deep: bool, /, *args: Any, **kwargs: Any) -> Any:
    """Of a module that every rank has whole.

    Args:
        original: Its forward.
        partial: Whether it works on this rank's share (of the heads, of the sequence), so that the gradients of its
            parameters have to be summed over the ranks.
        deep: Whether it uses its children's parameters itself.
        args: Of the call.
        kwargs: Of the call.
    """
    return _run(original, partial, args, kwargs, deep)


@torch.compiler.disable
def colwise_forward(
    original: Forward, region: TensorRegion, output: str, joins: bool, /, *args: Any, **kwargs: Any
) -> Any:
    """Of a linear whose outputs are divided over the ranks.

    Args:
        original: Its forward.
        region: The ranks.
        output: `local`, this rank's outputs; `whole`, all of them; `dtensor`, a DTensor with this rank's outputs.
        joins: Whether its input is a part of the sequence under sequence parallelism.
        args: Of the call.
        kwargs: Of the call.
    """
    module: Any = original.__self__  # type: ignore[attr-defined]  # a bound method
    x = first_hidden(args, kwargs)
    assert x is not None, "a linear is given a tensor"
    given = _joined(x, region) if joins and region.in_parts else x
    entered = _entered(given, region)
    names = shadow(module, False)
    try:
        parts: Parts | None = getattr(entered, _PARTS, None)
        if parts is not None and type(module).forward is nn.Linear.forward and torch.is_grad_enabled():
            y = gathered_linear(entered, parts, module.weight, module.bias)
        else:
            args, kwargs = _exchange(args, kwargs, x, entered)
            y = original(*args, **kwargs)
    finally:
        unshadow(module, names)
    if output == "whole":
        return join(y, -1, region.group)
    if output == "dtensor":
        region.stream.switch(apart=False)
        region.end()
        return DTensor.from_local(y, region.mesh, [Shard(y.ndim - 1)], run_check=False)
    region.stream.switch(apart=True)
    return y


@torch.compiler.disable
def rowwise_forward(original: Forward, region: TensorRegion, splits: bool, /, *args: Any, **kwargs: Any) -> Any:
    """Of a linear whose inputs are divided over the ranks.

    Args:
        original: Its forward.
        region: The ranks.
        splits: Whether each rank is given all inputs and takes its share.
        args: Of the call.
        kwargs: Of the call.
    """
    module: Any = original.__self__  # type: ignore[attr-defined]  # a bound method
    region.stream.switch(apart=region.in_parts)
    if splits:
        x = first_hidden(args, kwargs)
        assert x is not None, "a linear is given a tensor"
        args, kwargs = _exchange(args, kwargs, x, split(x, -1, region.group))
    bias = module._parameters.get("bias")
    names = shadow(module, False, hidden=("bias",))  # the bias is added once, after the sum
    try:
        y = region.leave(original(*args, **kwargs))
    finally:
        unshadow(module, names)
    return y if bias is None else y + _local(bias, region.in_parts)


@torch.compiler.disable
def embedding_forward(original: Forward, region: TensorRegion, begins: bool, /, *args: Any, **kwargs: Any) -> Any:
    """Of an embedding whose rows are divided over the ranks.

    Args:
        original: Its forward.
        region: The ranks.
        begins: Whether its output is divided along the sequence under sequence parallelism.
        args: Of the call: ids of any shape.
        kwargs: Of the call.
    """
    module: Any = original.__self__  # type: ignore[attr-defined]  # a bound method
    ids: Tensor = args[0] if args else next(iter(kwargs.values()))
    padding = module.padding_idx
    names = shadow(module, False)
    try:
        num_rows = len(module.weight)
        first = region.group.rank() * num_rows
        elsewhere = (ids < first) | (ids >= first + num_rows)
        if padding is not None:
            module.padding_idx = padding - first if first <= padding < first + num_rows else None
        args, kwargs = _exchange(args, kwargs, ids, (ids - first).masked_fill(elsewhere, 0))
        y: Tensor = original(*args, **kwargs)
    finally:
        module.padding_idx = padding
        unshadow(module, names)
    y = y.masked_fill(elsewhere.unsqueeze(-1), 0)
    if begins:
        region.begin(y)
        return region.leave(y)
    return sum_parts(y, region.group)


@torch.compiler.disable
def splitting_forward(original: Forward, region: TensorRegion, /, *args: Any, **kwargs: Any) -> Any:
    """Of a module that every rank has whole and of whose output it takes its part of the sequence."""
    y = _run(original, False, args, kwargs)
    return split(y, SEQUENCE, region.group) if region.in_parts else y


@torch.compiler.disable
def apart_forward(original: Forward, region: TensorRegion, /, *args: Any, **kwargs: Any) -> Any:
    """Of a module that draws random numbers for this rank's part of the sequence."""
    before = region.stream.switch(apart=region.in_parts)
    try:
        return original(*args, **kwargs)
    finally:
        region.stream.switch(before)


@torch.compiler.disable
def parent_forward(original: Forward, region: TensorRegion, joins: bool, /, *args: Any, **kwargs: Any) -> Any:
    """Of a module in which the ranks share the work: attention, an MLP.

    Args:
        original: Its forward.
        region: The ranks.
        joins: Whether it is given this rank's part of the sequence under sequence parallelism, and needs the whole.
        args: Of the call.
        kwargs: Of the call.
    """
    before = region.stream.switch(apart=False)
    try:
        if joins and region.in_parts and (x := first_hidden(args, kwargs, ndim=2)) is not None:
            args, kwargs = _exchange(args, kwargs, x, _joined(x, region))
        return original(*args, **kwargs)
    finally:
        region.stream.switch(before)


@torch.compiler.disable
def undivided_forward(original: Forward, region: TensorRegion, /, *args: Any, **kwargs: Any) -> Any:
    """Of attention that every rank does alike, and that needs the whole sequence under sequence parallelism."""
    if not region.in_parts or (x := first_hidden(args, kwargs, ndim=2)) is None:
        return original(*args, **kwargs)
    args, kwargs = _exchange(args, kwargs, x, join(x, SEQUENCE, region.group))
    before = region.stream.switch(apart=False)
    try:
        result = original(*args, **kwargs)
    finally:
        region.stream.switch(before)
    if (y := _first_output(result)) is None:
        return result
    part = split(y, SEQUENCE, region.group)
    return tree_map(lambda leaf: part if leaf is y else leaf, result)


@torch.compiler.disable
def latent_forward(original: Forward, region: TensorRegion, shared: int, /, *args: Any, **kwargs: Any) -> Any:
    """Of a linear that every rank has whole, whose last `shared` outputs are read by each rank's own heads."""
    y = _run(original, False, args, kwargs)
    own = y.shape[-1] - shared
    return torch.cat((y[..., :own], enter(y[..., own:], region.group)), dim=-1)


@torch.compiler.disable
def block_forward(
    original: Forward, region: TensorRegion, splits: bool, joins: bool, /, *args: Any, **kwargs: Any
) -> Any:
    """Of a block under sequence parallelism.

    Args:
        original: Its forward.
        region: The ranks.
        splits: Whether it is the first that is given hidden states; from here on each rank has its part.
        joins: Whether it is the last; what it returns is whole again.
        args: Of the call.
        kwargs: Of the call.
    """
    x = first_hidden(args, kwargs, ndim=2)
    if splits and x is not None:
        region.begin(x)
        if region.in_parts:
            args, kwargs = _exchange(args, kwargs, x, split(x, SEQUENCE, region.group))
    before = region.stream.switch(apart=region.in_parts)
    try:
        result = original(*args, **kwargs)
    finally:
        region.stream.switch(before)
    if joins:
        if region.in_parts and (y := _first_output(result)) is not None:
            whole = join(y, SEQUENCE, region.group)
            result = tree_map(lambda leaf: whole if leaf is y else leaf, result)
        region.end()
    return result


def _first_output(result: Any) -> Tensor | None:
    found: list[Tensor] = []
    tree_map(lambda leaf: found.append(leaf) if _is_hidden(leaf, 2) else None, result)
    return found[0] if found else None
