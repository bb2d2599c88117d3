"""From which blocks the values in a step come, so that a value that would have to cross pipeline stages is known.

Between stages only the hidden state passes. What else a block makes (scores of a mixture's router, gathered hidden
states, an attribute that it sets) is not there on other stages, and a step that sums up what it finds would be wrong
without a word: the loss of a router over half of the blocks is a number like any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from lightning_recompute.division import Division
from lightning_recompute.ledger import plain_tensors

Crossing = tuple[int, int, bool]
"""Where a value was made, where it is used, and whether a block has it but does not return it."""

_FACTORIES = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like")


@dataclass(frozen=True)
class _Origin:
    """Where a value is at home, what went into it from further back, and where it was made.

    A hidden state is at home in the block that is given it, and the one before has made it.
    """

    segment: int
    crossings: frozenset[Crossing]
    made: int
    inner: bool = False


class Origins:
    """Follows values through a step's operators.

    A value counts as made where an operator is given a parameter or something that comes from one; values of the
    batch alone (masks, positions) every stage makes itself, and they are not followed.

    Args:
        parameters: The module's.
        buffers: The module's: they belong to it wherever they are written.

    Attributes:
        crossings: Of all that has come to a hidden state or to the loss in another way than by the hidden state: where
            it was made, and where it was used.
    """

    def __init__(self, parameters: Iterable[Tensor], buffers: Iterable[Tensor]) -> None:
        self._of: Mapping[Any, _Origin] = WeakIdKeyDictionary()
        self._parameters = WeakIdKeyDictionary({storage: True for one in parameters for storage in _storages(one)})
        self._buffers = WeakIdKeyDictionary({storage: True for one in buffers for storage in _storages(one)})
        self.crossings: set[Crossing] = set()
        self._inside = False

    def note(self, func: Any, given: Sequence[Any], args: Any, kwargs: Any, result: Any, segment: int) -> None:
        """An operator has run.

        Args:
            func: The operator.
            given: The leaves of its arguments.
            args: Its arguments.
            kwargs: Its keyword arguments.
            result: The leaves of what it returned.
            segment: Where: before the blocks, in or after which.
        """
        name = func.overloadpacket.__name__
        if name in _FACTORIES or name.startswith("new_"):
            return
        storages = [storage for leaf in given if isinstance(leaf, Tensor) for storage in _storages(leaf)]
        origins = [origin for storage in storages if (origin := self._of.get(storage)) is not None]
        of_parameters = any(storage in self._parameters for storage in storages)
        if not origins and not of_parameters:
            return
        if func.is_view and not origins:
            self._parameters.update({storage: True for leaf in result for storage in _storages(leaf)})
            return
        further = {(origin.made, segment, origin.inner) for origin in origins if origin.segment != segment}
        crossings = frozenset(further.union(*(origin.crossings for origin in origins)))
        found = _Origin(segment, crossings, segment, self._inside)
        writes = list(_written(func, args, kwargs))
        written = {id(storage) for tensor in writes for storage in _storages(tensor)}
        for tensor in (*result, *writes):
            for storage in _storages(tensor):
                of_module = storage in self._parameters or storage in self._buffers
                # a view is of the same origin as what it shows
                if not of_module and (id(storage) in written or storage not in self._of):
                    self._of[storage] = found  # type: ignore[index]

    def enter(self, hidden: Tensor, index: int) -> None:
        """The hidden state that a block is given: of the stage that runs it.

        Args:
            hidden: It.
            index: Of the block.
        """
        self._inside = True
        self.reach(hidden)
        for storage in _storages(hidden):
            former = self._of.get(storage)
            self._of[storage] = _Origin(  # type: ignore[index]
                index, frozenset(), former.made if former else index - 1, former is not None and former.inner
            )

    def leave(self, returned: Iterable[Any], gathered: bool) -> None:
        """What a block returns, after which code between blocks runs.

        Args:
            returned: The leaves of it.
            gathered: Whether a hook of the user may have kept it: such hooks run on the block's own stage only.
        """
        self._inside = False
        for leaf in returned:
            for storage in _storages(leaf):
                if (origin := self._of.get(storage)) is not None:
                    self._of[storage] = replace(origin, inner=gathered)  # type: ignore[index]

    def reach(self, tensor: Tensor) -> None:
        """Something that counts: a hidden state, the loss."""
        for storage in _storages(tensor):
            if (origin := self._of.get(storage)) is not None:
                self.crossings |= origin.crossings


def refuse_crossings(crossings: Iterable[Crossing], names: Sequence[str], division: Division) -> None:
    """Refuse a step that uses on a stage what was made on another.

    Args:
        crossings: See `Origins`.
        names: Of the blocks.
        division: The blocks over stages.

    Raises:
        ValueError: There is such a value.
    """
    for source, user, inner in sorted(crossings):
        elsewhere = division.chunk_with(source) != division.chunk_with(user)
        if elsewhere or (inner and source < len(names) - 1):
            where = ", on another pipeline stage" if elsewhere else ""
            raise ValueError(
                f"the step uses {_place(user, names)} a value that was made {_place(source, names)}{where}, and that "
                "is not the hidden state: a skip connection, gathered hidden states or router scores "
                "(output_router_logits=True), or what a block keeps as an attribute. Only the hidden state passes "
                "between stages: switch that off, or make the value where it is used"
            )


def _place(segment: int, names: Sequence[str]) -> str:
    if segment < 0:
        return "before the blocks"
    return f"in {names[segment]}" if segment < len(names) else "after the blocks"


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """What an operator writes in place."""
    if not func._schema.is_mutable:
        return
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def _storages(leaf: Any) -> list[torch.UntypedStorage]:
    return [part.untyped_storage() for part in plain_tensors(leaf)] if isinstance(leaf, Tensor) else []
