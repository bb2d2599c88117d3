"""What each rank of a pipeline holds of a module: the parameters that its stages use, and nothing of the others.

A parameter that a rank does not need leaves a placeholder of its shape, filled with NaN and without memory, so that
the module's own code still finds it and a value of another stage shows where it is used. Names stay what they are in
the whole module.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_recompute.division import Division
from lightning_recompute.probe import BEFORE
from lightning_recompute.reduction import local_part, set_local_part
from lightning_recompute.step_form import TensorForm


class Ownership:
    """The parameters of a module divided over the ranks of a pipeline; `remove` puts all names back.

    Args:
        module: The whole module, alike on all ranks.
        uses: Where each parameter and buffer is used, by its first name; see `Probe`.
        division: The blocks over stages. What is used before them belongs to the first stage, what after them to the
            last, and what was not seen used to both.
        group: The ranks of the pipeline.

    Raises:
        ValueError: A parameter has no shape yet (a lazy module).

    Attributes:
        owners: For each parameter and buffer, by its first name, the ranks of the pipeline that use it, the one of
            its first stage first.
        tied: Names of parameters with several owners.
        users: For each parameter and buffer the stages that were seen to use it.
    """

    def __init__(
        self, module: nn.Module, uses: Mapping[str, frozenset[int]], division: Division, group: dist.ProcessGroup
    ) -> None:
        self._module = module
        self._group = group
        self._rank = group.rank()
        ends = frozenset((BEFORE, sum(division.lengths)))
        chunks = {name: sorted({division.chunk_with(use) for use in used or ends}) for name, used in uses.items()}
        self.users = {name: frozenset(chunks[name] if used else ()) for name, used in uses.items()}
        self.owners = {name: tuple(dict.fromkeys(map(division.rank_of, of))) for name, of in chunks.items()}
        everything = dict(module.named_parameters())
        if lazy := [name for name, parameter in everything.items() if is_lazy(parameter)]:
            raise ValueError(f"{lazy[0]} has no shape yet: run a lazy module once before it is divided over stages")
        self.tied = [name for name in everything if len(self.owners[name]) > 1]
        names = {id(parameter): name for name, parameter in everything.items()}
        places: dict[str, tuple[nn.Module, str]] = {}
        for part in module.modules():
            for key, parameter in part._parameters.items():
                if parameter is not None:
                    places.setdefault(names[id(parameter)], (part, key))
        self._places = {name: places[name] for name in everything if self._rank in self.owners[name]}
        with torch.no_grad():
            for name in self.tied:
                if self._rank in self.owners[name]:
                    self._give_from_first(local_part(everything[name].detach()), self.owners[name])
        # for each module the former order of its parameters, and those that have left it
        self._taken: list[tuple[nn.Module, list[str], dict[str, nn.Parameter]]] = []
        self._drop({id(p): p for name, p in everything.items() if name not in self._places})

    def _drop(self, dropped: Mapping[int, nn.Parameter]) -> None:
        placeholders = {identity: placeholder(parameter) for identity, parameter in dropped.items()}
        for part in self._module.modules():
            order = list(part._parameters)
            taken = {key: p for key, p in part._parameters.items() if p is not None and id(p) in dropped}
            if taken:
                self._taken.append((part, order, taken))
            for key, parameter in taken.items():
                del part._parameters[key]
                setattr(part, key, placeholders[id(parameter)])
        for identity, parameter in dropped.items():
            parameter.grad = None
            set_local_part(parameter, placeholders[identity])

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """What this rank owns, by the first name in the whole module; also where others have exchanged parameters."""
        found = {name: part._parameters[key] for name, (part, key) in self._places.items()}
        return {name: parameter for name, parameter in found.items() if parameter is not None}

    def counts(self, name: str) -> bool:
        """Whether this rank is the one that counts a parameter, e.g. in a norm over all ranks.

        Args:
            name: Its first name in the whole module.
        """
        return self.owners[name][0] == self._rank

    # ---- tied parameters

    def sum_tied(self, gradients: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        """Sum the gradients of tied parameters over their owners, bitwise the same on each; collective.

        Args:
            gradients: Of this rank's tied parameters, by name; what it lacks counts as 0.

        Returns:
            The sums, of this rank's; nothing for those that no rank has a gradient of.
        """
        if not self.tied:
            return {}
        parameters = self.parameters
        device = next(iter(parameters.values())).device
        present = torch.tensor(
            [gradients.get(name) is not None for name in self.tied], dtype=torch.int32, device=device
        )
        dist.all_reduce(present, dist.ReduceOp.MAX, group=self._group)
        sums = {}
        for name, any_has in zip(self.tied, present.tolist(), strict=True):
            if not any_has or self._rank not in self.owners[name]:
                continue
            mine = gradients.get(name)
            gradient = torch.zeros_like(parameters[name], requires_grad=False) if mine is None else mine.detach()
            self._sum_over(local_part(gradient), self.owners[name])
            sums[name] = gradient
        return sums

    def _sum_over(self, tensor: Tensor, owners: Sequence[int]) -> None:
        """The first owner adds in the order of stages, so that all have the same bits."""
        first, *others = owners
        buffer = tensor if tensor.is_contiguous() else tensor.contiguous()
        if self._rank == first:
            for other in others:
                received = torch.empty_like(buffer)
                dist.recv(received, group=self._group, group_src=other)
                buffer += received
        else:
            dist.send(buffer, group=self._group, group_dst=first)
        self._give_from_first(buffer, owners)
        if buffer is not tensor:
            tensor.copy_(buffer)

    def _give_from_first(self, tensor: Tensor, owners: Sequence[int]) -> None:
        first, *others = owners
        buffer = tensor if tensor.is_contiguous() else tensor.contiguous()
        if self._rank == first:
            for other in others:
                dist.send(buffer, group=self._group, group_dst=other)
            return
        dist.recv(buffer, group=self._group, group_src=first)
        if buffer is not tensor:
            tensor.copy_(buffer)

    # ---- the end

    def remove(self) -> None:
        """Put the parameters back that have left, the same objects, their values NaN; not collective.

        A second call does nothing.
        """
        while self._taken:
            part, order, taken = self._taken.pop()
            now = dict(part._parameters)
            for key, parameter in taken.items():
                vars(part).pop(key, None)
                setattr(part, key, parameter)
            known = taken | now
            part._parameters.clear()
            part._parameters.update({key: known[key] for key in itertools.chain(order, now) if key in known})

    @torch.no_grad()
    def make_whole(self) -> None:
        """After `remove`: give every rank the values of all parameters and buffers; collective."""
        for name, tensor in _named(self._module):
            if name not in self.owners:
                continue
            if isinstance(tensor, nn.Parameter) and self._rank not in self.owners[name]:
                part = local_part(tensor.data)
                set_local_part(tensor, torch.empty(part.shape, dtype=part.dtype, device=part.device))
            part = local_part(tensor.detach())
            values = part.contiguous()
            dist.broadcast(values, group=self._group, group_src=self.owners[name][0])
            if values is not part and self._rank != self.owners[name][0]:
                part.copy_(values)


def placeholder(parameter: nn.Parameter) -> Tensor:
    """A tensor without memory of a parameter's shape and dtype: NaN, or 0 where there is no NaN.

    Of a DTensor it has the shape of this rank's part: that is what a divided module's own code sees.
    """
    part = local_part(parameter.detach())
    return TensorForm.of(part).poison(part.device, own=False)


def _named(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    kinds: tuple[Iterable[tuple[str, Tensor]], ...] = (module.named_parameters(), module.named_buffers())
    return itertools.chain(*kinds)
