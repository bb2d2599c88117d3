"""Exchanging the parameters of a module: for distributed ones, and back for ordinary ones.

Names, ties, `requires_grad`, hooks on a parameter and whatever else the user set on it stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

Convert = Callable[[str, nn.Parameter], nn.Parameter | None]

_OF_TORCH = {"_is_param", "_fsdp_orig_uid"}
"""What torch itself sets on a parameter that is a DTensor, or that is sharded."""


def replace_parameters(module: nn.Module, convert: Convert) -> dict[nn.Parameter, nn.Parameter]:
    """Exchange the parameters of a module, each once, wherever it is used.

    What was set on the parameter object, its hooks (the handles of which still remove them) and `requires_grad` are
    carried over; `grad` is not: it is the converter's to set. References that the user keeps elsewhere, in a list or
    an optimizer, are to the former parameters.

    Args:
        module: The module.
        convert: Called with the first name and the parameter; returns the new one, or None to leave it.

    Returns:
        For each former parameter that was exchanged the new one.
    """
    results: dict[nn.Parameter, nn.Parameter | None] = {}
    for prefix, part in module.named_modules():
        for name, parameter in list(part._parameters.items()):
            if parameter is None:
                continue
            if parameter not in results:
                new = convert(f"{prefix}.{name}" if prefix else name, parameter)
                results[parameter] = None if new is parameter else new
                if new is not None and new is not parameter:
                    carry_over(parameter, new)
            if (new := results[parameter]) is not None:
                _set_parameter(part, name, new)
    return {former: new for former, new in results.items() if new is not None}


def make_whole(
    module: nn.Module, optimizers: Iterable[Optimizer] = (), device: torch.device | None = None
) -> dict[nn.Parameter, nn.Parameter]:
    """Turn a module with distributed parameters into an ordinary one; collective.

    Every DTensor among its parameters, their gradients, its buffers and the optimizers' states becomes an ordinary
    tensor of the full value. Parameters that are ordinary already stay the same objects.

    Args:
        module: The module; all ranks of the meshes of its tensors call this.
        optimizers: Torch's own, not Lightning's wrappers; their groups and states follow to the new parameters.
        device: Where the full values of parameters and buffers go, one after the other; None: they stay on the
            device. States of optimizers stay on theirs.

    Returns:
        For each former parameter that was exchanged the new one.
    """

    def convert(name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if not isinstance(parameter.data, DTensor):
            return None
        new = nn.Parameter(_full(parameter.detach(), device), requires_grad=False)
        if parameter.grad is not None:
            new.grad = _full(parameter.grad, device)
        return new

    with torch.no_grad():
        replaced = replace_parameters(module, convert)
        full_buffers: dict[Tensor, Tensor] = {}
        for part in module.modules():
            for name, buffer in part._buffers.items():
                if isinstance(buffer, DTensor):
                    if buffer not in full_buffers:
                        full_buffers[buffer] = _full(buffer, device)
                    part._buffers[name] = full_buffers[buffer]
        for optimizer in optimizers:
            _make_optimizer_whole(optimizer, replaced, convert)
    return replaced


def _make_optimizer_whole(optimizer: Optimizer, replaced: dict[nn.Parameter, nn.Parameter], convert: Convert) -> None:
    for group in optimizer.param_groups:
        for index, parameter in enumerate(group["params"]):
            if parameter not in replaced and (new := convert("", parameter)) is not None:
                # the user's own, in the optimizer and not in the module
                carry_over(parameter, new)
                replaced[parameter] = new
            # in place: LBFGS holds on to the list
            group["params"][index] = replaced.get(parameter, parameter)
    states: dict[Any, Any] = dict(optimizer.state)
    optimizer.state.clear()
    for parameter, state in states.items():
        optimizer.state[replaced.get(parameter, parameter)] = tree_map_only(DTensor, _full, state)


def _full(tensor: Tensor, device: torch.device | None = None) -> Tensor:
    assert isinstance(tensor, DTensor)
    assert not any(placement.is_partial() for placement in tensor.placements), "a tensor of terms that are to be summed"
    whole: Tensor = tensor.full_tensor()
    return whole if device is None else whole.to(device)


def carry_over(former: nn.Parameter, new: nn.Parameter) -> None:
    """Give a parameter what the user set on the one it stands for: attributes, `requires_grad` and hooks."""
    vars(new).update({name: value for name, value in vars(former).items() if name not in _OF_TORCH})
    new.requires_grad_(former.requires_grad)
    # the dictionaries themselves, so that the user's handles still remove hooks
    if former._backward_hooks:
        new._backward_hooks = former._backward_hooks
    if former._post_accumulate_grad_hooks:
        new._post_accumulate_grad_hooks = former._post_accumulate_grad_hooks


def _set_parameter(part: nn.Module, name: str, parameter: nn.Parameter) -> None:
    # nn.RNN and its kind keep lists of their parameters up to date in __setattr__
    if type(part).__setattr__ is nn.Module.__setattr__:
        part._parameters[name] = parameter
    else:
        setattr(part, name, parameter)
