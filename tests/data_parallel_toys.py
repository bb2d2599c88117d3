"""Models of the data-parallel tests, and the same steps in one process to compare with. No dropout, doubles."""

from __future__ import annotations

import copy
import os
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from toys import WIDTH, Block, Stack

from lightning_recompute.data_parallel import DataParallel
from lightning_recompute.groups import ParallelGroups

ROWS = 4
"""Rows of a rank's batch."""


def join_world(tensor: int = 1) -> ParallelGroups:
    """The groups of the processes that `in_ranks` started."""
    rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=size)
    return ParallelGroups.build("cpu", tensor=tensor)


class Net(Stack):
    """embed - blocks - head with a step; every part is called from the step itself."""

    def __init__(self, num_blocks: int = 4, block: Callable[[], nn.Module] | None = None) -> None:
        super().__init__((block or (lambda: Block(dropout=0.0)))() for _ in range(num_blocks))
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))

    def training_step(self, batch: Tensor, index: int = 0) -> Tensor:
        loss: Tensor = (self.head(self.hidden(batch)) * self.scale - 0.3).square().mean()
        return loss

    def validation_step(self, batch: Tensor) -> Tensor:
        return self.training_step(batch)


class ByForward(Net):
    """The step calls the module itself, twice."""

    def training_step(self, batch: Tensor, index: int = 0) -> Tensor:
        loss: Tensor = (self(batch) * self.scale - self(batch[:2]).mean()).square().mean()
        return loss


class Tied(Net):
    """The head's weight is the embedding's, and a parameter of the module itself is used in the step."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight
        self.offset = nn.Parameter(torch.full((WIDTH,), 0.1))

    def training_step(self, batch: Tensor, index: int = 0) -> Tensor:
        return super().training_step(batch) + (self.offset - 1).square().mean()


class Shared(Net):
    """One block twice."""

    def __init__(self) -> None:
        super().__init__(3)
        self.blocks.append(self.blocks[0])


class Gated(Block):
    """Scaled by one number."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.gate = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * self.inner(x)


class Nested(Net):
    """The blocks are inside a part of a part, one shares a bias with the head; scalars; parts that nobody uses."""

    def __init__(self) -> None:
        super().__init__(block=Gated)
        self.body = nn.Module()
        self.body.inner = nn.Module()
        self.body.inner.layers = self.blocks
        del self.blocks
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.spare = nn.Linear(WIDTH, WIDTH)
        self.body.inner.layers[2].spare = nn.Linear(WIDTH, WIDTH)
        self.head.bias = self.body.inner.layers[0].norm.bias

    def hidden(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.body.inner.layers:
            x = block(x)
        return x * self.temperature


class Crossed(Net):
    """Two blocks share a weight, and one has a weight that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].up.weight = self.blocks[1].up.weight
        self.blocks[3].down.weight = nn.Parameter(self.blocks[3].down.weight.detach().t().contiguous().t())


class Frozen(Net):
    """Embedding, first block and all norms frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(False)
        self.blocks[0].requires_grad_(False)
        for block in self.blocks:
            block.norm.requires_grad_(False)


class Dtypes(Net):
    """A gain in another dtype than the rest of its block, where the rest is trained as well."""

    def to(self, dtype: torch.dtype) -> Dtypes:  # type: ignore[override]
        super().to(dtype)
        self.blocks[1].gain = nn.Parameter(torch.full((WIDTH,), 1.5, dtype=torch.float32))
        self.blocks[1].register_forward_hook(lambda block, args, output: output * block.gain)
        return self


class Norms(Net):
    """Batch norms, whose statistics follow the data."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.norm = nn.BatchNorm1d(WIDTH)


class Manual(Tied):
    """Four backwards in a step, one of parts that are called from the step, one over two forwards."""

    parallel: DataParallel | None = None
    size = 1

    def training_step(self, batch: Tensor, index: int = 0) -> Any:
        first = Net.training_step(self, batch)
        other = self(batch[:2]).mean()
        self.manual_backward(first)
        self.manual_backward(other * 2)
        self.manual_backward((self(batch) * 2).square().mean())
        self.manual_backward(self.head(self.embed(batch)).square().mean())

    def manual_backward(self, loss: Tensor) -> None:
        if self.parallel is None:
            (loss / self.size).backward()
            return
        self.parallel.before_backward(loss)
        loss.backward()
        self.parallel.finish()


class Differs(Net):
    """One rank leaves out a block, and all leave out another."""

    skips = False

    def hidden(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for index, block in enumerate(self.blocks):
            if index != 3 and not (index == 2 and self.skips):
                x = block(x)
        return x


class PerRank(Net):
    """Ranks differ in which parts of a block they use; the parts of a last one nobody does."""

    rank = 0

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.spare = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
            block.register_forward_hook(self.used)

    def used(self, block: Any, args: Any, output: Tensor) -> Tensor:
        return output + block.spare[self.rank](args[0])


class AsForward(nn.Module):
    """A module whose forward is another's step, as torch's DistributedDataParallel needs it."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net = net

    def forward(self, batch: Tensor) -> Tensor:
        return self.net.training_step(batch)


class Stop(Exception):
    pass


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, where: str) -> Tensor:
        if where == "forward":
            raise Stop
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise Stop


def made(build: Callable[[], nn.Module], dtype: torch.dtype = torch.float64, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return build().to(dtype)


def batches(num_steps: int, num_ranks: int, dtype: torch.dtype = torch.float64) -> list[list[Tensor]]:
    """For every step the batch of each rank."""
    generator = torch.Generator().manual_seed(7)
    data = torch.randn(num_steps, num_ranks, ROWS, WIDTH, generator=generator, dtype=dtype)
    return [list(step) for step in data]


def full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else full(p.grad) for name, p in module.named_parameters()}


def step(parallel: DataParallel, batch: Tensor, share: float = 1.0) -> Tensor:
    """Forward and backward as the strategy does them."""
    module: Any = parallel.module
    loss: Tensor = parallel.run(module.training_step, batch) * share
    parallel.before_backward(loss)
    loss.backward()
    parallel.finish()
    return loss.detach()


def reference(module: Any, steps: Sequence[Sequence[Tensor]]) -> list[dict[str, Tensor | None]]:
    """Gradients of the joined batches in one process; nothing is updated, gradients add up."""
    module, found = copy.deepcopy(module), []
    for ranks in steps:
        (sum(module.training_step(batch) for batch in ranks) / len(ranks)).backward()
        found.append(gradients(module))
    return found


def difference(found: dict[str, Tensor | None], due: dict[str, Tensor | None]) -> float:
    """The largest difference as a part of the largest gradient; inf where one has a gradient and the other none."""
    assert list(found) == list(due), (list(found), list(due))
    largest = max(value.abs().max().item() for value in due.values() if value is not None)
    worst = 0.0
    for name, value in due.items():
        other = found[name]
        if (value is None) != (other is None):
            return float("inf")
        if value is not None and other is not None:
            assert value.shape == other.shape, name
            worst = max(worst, (value - other).abs().max().item() / largest)
    return worst


def looks(module: nn.Module) -> list[Any]:
    """Everything of a module that sharding might change: classes, attributes, hooks, names, flags of parameters."""
    modules = [
        (
            name,
            type(part),
            sorted((key, sorted(value) if isinstance(value, dict) else 0) for key, value in vars(part).items()),
        )
        for name, part in module.named_modules()
    ]
    parameters = [
        (name, type(p.data), sorted(vars(p)), p.requires_grad, p.dtype, p.shape)
        for name, p in module.named_parameters(remove_duplicate=False)
    ]
    return [*modules, *parameters]


class Collectives(TorchDispatchMode):
    """Counts collectives by name while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.__name__:
            self.counts[func.__name__.partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))
