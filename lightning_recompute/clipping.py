"""Clipping gradients that are spread over ranks: one norm over all of them, the same on every rank.

Torch's own functions refuse DTensors of different meshes in one list, and DTensors beside ordinary tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_recompute.reduction import local_part

_HALVES = (torch.float16, torch.bfloat16)


@torch.no_grad()
def clip_norm(
    parameters: Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    group: dist.ProcessGroup | None = None,
    counted_elsewhere: Collection[Tensor] = (),
) -> Tensor:
    """Scale gradients down so that their norm together is at most `max_norm`; collective.

    What several ranks hold alike counts once, and so does a parameter that is listed several times. Gradients in
    half precision are summed in float32.

    Args:
        parameters: Ordinary ones, alike on every rank, and DTensors on any meshes; in the same order on the ranks of
            each mesh.
        max_norm: The largest norm that is left alone.
        norm_type: The p of the p-norm; `inf` for the largest absolute value.
        group: Ranks that hold other parameters of the module, as pipeline stages do; None: none.
        counted_elsewhere: Those of the parameters that another rank of `group` passes as well, and counts: they are
            scaled here, and are no part of this rank's norm.

    Returns:
        The norm before clipping, (); the same on all ranks.

    Raises:
        ValueError: A `norm_type` that is not above 0.
    """
    if not norm_type > 0:
        raise ValueError(f"found norm_type={norm_type}; a number above 0 or inf is due")
    parameters = _unique(parameters)
    gradients = _gradients(parameters)
    elsewhere = set(counted_elsewhere)
    total = _norm(_gradients(each for each in parameters if each not in elsewhere), norm_type)
    if group is not None:
        # in float64: stages may differ in their dtypes, and have no parameters
        device = local_part(parameters[0]).device if parameters else _device_of(group)
        total = _over(total.to(device, torch.float64), group, norm_type)
    # the same constant as torch's clip_grad_norm_
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for parts in _alike(map(local_part, gradients)):
        torch._foreach_mul_(parts, factor.to(parts[0].device))
    return total


@torch.no_grad()
def clip_value(parameters: Iterable[Tensor], clip_value: float) -> None:
    """Cut every element of the gradients to [-clip_value, clip_value]; no communication.

    Args:
        parameters: Ordinary ones and DTensors on any meshes.
        clip_value: The largest absolute value that is left.
    """
    for parts in _alike(map(local_part, _gradients(parameters))):
        torch._foreach_clamp_min_(parts, -clip_value)
        torch._foreach_clamp_max_(parts, clip_value)


class OverflowAgreement:
    """Has a gradient scaler skip a step on every rank when any rank overflowed; `remove` undoes it.

    Torch's scaler looks at the placement of one gradient only, and refuses DTensors of several meshes in one list.

    Args:
        scaler: The scaler; from here on `unscale_` is collective.
        group: The ranks that step together; None: all.
    """

    def __init__(self, scaler: torch.amp.GradScaler, group: dist.ProcessGroup | None = None) -> None:
        assert "_unscale_grads_" not in vars(scaler), "this scaler has been changed already"
        self._scaler = scaler
        vars(scaler)["_unscale_grads_"] = functools.partial(_unscale, scaler._unscale_grads_, group)

    def remove(self) -> None:
        """Give the scaler its own way back; a second call does nothing."""
        vars(self._scaler).pop("_unscale_grads_", None)


class _Parts:
    """Stands for an optimizer: what this rank holds of its parameters' gradients."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        parts = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    part = local_part(parameter.detach()).detach()
                    part.grad = local_part(parameter.grad)
                    parts.append(part)
        self.param_groups = [{"params": parts}]


def _unscale(
    unscale: Callable[..., dict[torch.device, Tensor]],
    group: dist.ProcessGroup | None,
    optimizer: torch.optim.Optimizer,
    inv_scale: Tensor,
    found_inf: Tensor,
    allow_fp16: bool,
) -> dict[torch.device, Tensor]:
    found = unscale(_Parts(optimizer), inv_scale, found_inf, allow_fp16)
    # of every rank, also of one without gradients
    anywhere = torch.stack([found_inf, *(flag.to(found_inf.device) for flag in found.values())]).amax(0)
    dist.all_reduce(anywhere, dist.ReduceOp.MAX, group=group)
    return {device: anywhere.to(device) for device in found}


def _unique(parameters: Iterable[Tensor]) -> list[Tensor]:
    return list(dict.fromkeys([parameters] if isinstance(parameters, Tensor) else parameters))


def _gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    found = [parameter.grad for parameter in _unique(parameters) if parameter.grad is not None]
    for gradient in found:
        assert not isinstance(gradient, DTensor) or not any(place.is_partial() for place in gradient.placements), (
            "gradients that are terms of a sum are to be summed before they are clipped"
        )
    return found


def _norm(gradients: Sequence[Tensor], norm_type: float) -> Tensor:
    """The norm over all ranks: those of the parts that lie on the same ranks are joined before they are sent."""
    placed: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
    for gradient in gradients:
        placed.setdefault(_groups(gradient), []).append(local_part(gradient))
    norms = []
    for groups, parts in placed.items():
        each: list[Tensor] = []
        for alike in _alike(parts):
            dtype = torch.float32 if alike[0].dtype in _HALVES else None
            each += torch._foreach_norm(alike, norm_type, dtype=dtype)
        norm = _joined(each, norm_type)
        for group in groups:
            norm = _over(norm, group, norm_type)
        norms.append(norm)
    return _joined(norms, norm_type) if norms else torch.tensor(0.0)


def _over(norm: Tensor, group: dist.ProcessGroup, norm_type: float) -> Tensor:
    """Gathered and joined as the parts of a rank are: the same sum on every rank, and no power overflows."""
    everyone = [torch.empty_like(norm) for _ in range(group.size())]
    dist.all_gather(everyone, norm, group=group)
    return _joined(everyone, norm_type)


def _device_of(group: dist.ProcessGroup) -> torch.device:
    on_gpu = torch.cuda.is_available() and "nccl" in dist.get_backend(group)
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def _joined(norms: Sequence[Tensor], norm_type: float) -> Tensor:
    """The norm of everything from the norms of parts, in the widest of their dtypes."""
    dtype = max((norm.dtype for norm in norms), key=lambda dtype: torch.finfo(dtype).bits)
    joined: Tensor = torch.linalg.vector_norm(
        torch.stack([norm.to(norms[0].device, dtype) for norm in norms]), norm_type
    )
    return joined


def _groups(gradient: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Over which groups of ranks a gradient is spread."""
    if not isinstance(gradient, DTensor):
        return ()
    mesh = gradient.device_mesh
    # torch's strided shards say that they are no shards
    spread = [axis for axis, place in enumerate(gradient.placements) if not place.is_replicate()]
    return tuple(mesh.get_group(axis) for axis in spread)


def _alike(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Tensors by device and dtype."""
    found: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(found.values())
