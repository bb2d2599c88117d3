"""What two ranks do for test_collectives.py: collectives, the divided cross-entropy and the gathered linear."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from group_cases import join_processes
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_recompute import collectives
from lightning_recompute.gathered_linear import Parts, gathered_linear
from lightning_recompute.vocabulary import cross_entropy, whole

Mode: Any = TorchDispatchMode  # torch's modes carry no types


class Counting(Mode):
    """Counts collectives by name."""

    def __init__(self) -> None:
        Mode.__init__(self)
        self.found: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, _, name = func.name().partition("::")
        if space == "_c10d_functional" and name != "wait_tensor":
            self.found[name] = self.found.get(name, 0) + 1
        return func(*args, **kwargs or {})


def shapes(group: dist.ProcessGroup) -> dict[str, Any]:
    """Values and gradients of each pair, for a tensor that every rank can make."""
    rank, size = group.rank(), group.size()
    everyone = torch.arange(size * 2 * 4 * 3, dtype=torch.float64).view(size, 2, 4, 3).sin()
    mine = everyone[rank].clone()
    found: dict[str, Any] = {}

    def check(name: str, function: Callable[[Tensor], Tensor], x: Tensor, due: Tensor, gradient: Tensor) -> None:
        """`gradient`: of x, for an output gradient of the output's own values times (rank + 1)."""
        x = x.clone().requires_grad_()
        y = function(x)
        (found_gradient,) = torch.autograd.grad(y, x, y.detach() * (rank + 1), create_graph=True)
        found[name] = bool(torch.equal(y, due) and torch.allclose(found_gradient, gradient, rtol=1e-14, atol=0))

    total = everyone.sum(0)
    weights = torch.arange(1, size + 1, dtype=torch.float64)
    check("enter", lambda x: collectives.enter(x, group), total, total, total * weights.sum())
    check("sum", lambda x: collectives.sum_parts(x, group), mine, total, total * (rank + 1))
    for dim in (0, 1, -1):
        parts = list(everyone)
        joined = torch.cat(parts, dim)
        check(f"join {dim}", lambda x, d=dim: collectives.join(x, d, group), mine, joined, mine * (rank + 1))
        entered = mine * weights.sum()
        check(f"enter joined {dim}", lambda x, d=dim: collectives.enter_joined(x, d, group), mine, joined, entered)
    for dim in (0, 1):
        piece = total.chunk(size, dim)[rank]
        back = torch.cat([part * weight for part, weight in zip(total.chunk(size, dim), weights, strict=True)], dim)
        check(f"split {dim}", lambda x, d=dim: collectives.split(x, d, group), total, piece, back)
        check(f"sum and split {dim}", lambda x, d=dim: collectives.sum_and_split(x, d, group), mine, piece, back)
    try:
        collectives.split(torch.zeros(2, 5, 3), -2, group)
    except ValueError as error:
        found["refused"] = "cannot be divided over 2 tensor-parallel ranks along its dimension 1 of 5" in str(error)
    return found


def losses(group: dist.ProcessGroup) -> dict[str, Any]:
    """The divided cross-entropy beside torch's."""
    found: dict[str, Any] = {}
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        generator = torch.Generator().manual_seed(0)
        logits = (10 * torch.randn(3, 5, 8, generator=generator, dtype=torch.float64)).to(dtype)
        targets = torch.randint(8, (3, 5), generator=generator)
        alone = logits.clone().requires_grad_()
        due = F.cross_entropy(alone.to(torch.promote_types(dtype, torch.float32)).flatten(0, 1), targets.flatten())
        due.backward()
        local = logits.chunk(2, -1)[group.rank()].clone().requires_grad_()
        divided = DTensor.from_local(local, mesh, [Shard(2)], run_check=False)
        loss = cross_entropy(divided, targets)
        loss.backward()
        assert alone.grad is not None
        assert local.grad is not None
        gradient = alone.grad.chunk(2, -1)[group.rank()]
        tolerance = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
        found[f"loss {dtype}"] = abs(float(loss - due)) <= tolerance * float(due)
        found[f"gradient {dtype}"] = bool(torch.allclose(local.grad, gradient, rtol=tolerance, atol=tolerance))
        found[f"dtype {dtype}"] = loss.dtype == due.dtype and local.grad.dtype == dtype
        found[f"whole {dtype}"] = torch.equal(whole(divided), logits)
    return found


def linears(group: dist.ProcessGroup) -> dict[str, Any]:
    """Two linears that read one sequence: gradients of plain ones, one gather for both in backward."""
    generator = torch.Generator().manual_seed(0)
    sequence = torch.randn(2, 6, 4, generator=generator, dtype=torch.float64)
    weights = [torch.randn(3, 4, generator=generator, dtype=torch.float64) for _ in range(2)]
    bias = torch.randn(3, generator=generator, dtype=torch.float64)

    def run(x: Tensor, ws: list[Tensor], b: Tensor, parts: Parts | None) -> Tensor:
        if parts is None:
            return F.linear(x, ws[0], b) * F.linear(x, ws[1]).tanh()
        return gathered_linear(x, parts, ws[0], b) * gathered_linear(x, parts, ws[1], None).tanh()

    def leaves() -> tuple[Tensor, list[Tensor], Tensor]:
        return sequence.clone().requires_grad_(), [w.clone().requires_grad_() for w in weights], bias.clone()

    x, ws, b = leaves()
    due = torch.autograd.grad(run(x, ws, b.requires_grad_(), None).sum(), [x, *ws, b])
    x, ws, b = leaves()
    part = x.chunk(2, 1)[group.rank()].detach().clone().requires_grad_()
    entered = collectives.enter_joined(part, 1, group)
    loss = run(entered, ws, b.requires_grad_(), Parts(part, 1, group)).sum()
    with Counting() as counting:
        gradients = torch.autograd.grad(loss, [part, *ws, b], retain_graph=True)
    again = torch.autograd.grad(loss, [part, *ws, b])
    found: dict[str, Any] = {
        "gathers": counting.found == {"all_gather_into_tensor": 1, "reduce_scatter_tensor": 1},
        "again": all(map(torch.equal, gradients, again)),
        # both ranks do the same here, and their gradients are summed
        "input": torch.allclose(gradients[0], 2 * due[0].chunk(2, 1)[group.rank()], rtol=1e-13),
    }
    found["weights"] = all(torch.allclose(a, b, rtol=1e-13) for a, b in zip(gradients[1:], due[1:], strict=True))
    # a frozen weight keeps nothing, and asks for nothing
    entered = collectives.enter_joined(part, 1, group)
    y = gathered_linear(entered, Parts(part, 1, group), weights[0], None)
    with Counting() as counting:
        y.sum().backward()
    found["frozen"] = counting.found == {"reduce_scatter_tensor": 1}
    with torch.autocast("cpu", torch.bfloat16):
        single = part.detach().float().requires_grad_()
        entered = collectives.enter_joined(single, 1, group)
        low = gathered_linear(entered, Parts(single, 1, group), weights[0].float(), bias.float())
        due_low = F.linear(sequence.float(), weights[0].float(), bias.float())
    found["autocast"] = low.dtype == due_low.dtype == torch.bfloat16 and torch.equal(low, due_low)
    return found


def check_all(folder: Path) -> dict[str, Any]:
    join_processes()
    group = dist.group.WORLD
    assert group is not None
    return {"shapes": shapes(group), "losses": losses(group), "linears": linears(group)}
