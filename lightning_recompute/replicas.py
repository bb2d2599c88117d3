"""Which inputs of a block are the same on all ranks of a group, to the bit: so that one rank need not keep them all."""

from __future__ import annotations

import functools
import logging
import random
import re
import weakref
import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lightning_recompute.ambient import version_of
from lightning_recompute.discard import is_freed

logger = logging.getLogger(__name__)

MIN_PART_ELEMENTS = 8
"""A tensor with fewer elements than this for each rank is kept whole."""

MAX_TRIES = 8
"""How often an input whose elements are all one number is compared before it is kept whole for good: that all ranks
have the same zeros at the first step says nothing about the next."""

_FREED = "it is freed anyway"
_COLUMNS = 1021  # prime, so that rows of a tensor do not fall on one another


@functools.cache
def _weights(device: torch.device) -> Tensor:
    draw = random.Random(0)
    return torch.tensor([draw.getrandbits(63) | 1 for _ in range(_COLUMNS)], device=device)


def digest(elements: Tensor) -> Tensor:
    """64 bits that depend on every bit of a tensor and on its place; one pass over the memory, no copy of it.

    Args:
        elements: (n,), contiguous, of a dtype of at most 8 bytes.

    Returns:
        An int64 scalar on the same device. Sums of integers: it is the same on every device and in every order.
    """
    if elements.storage_offset() * elements.element_size() % 8:
        elements = elements.clone()
    per_word = 8 // elements.element_size()
    num_words = elements.numel() // per_word
    words, tail = elements[: num_words * per_word].view(torch.int64), elements[num_words * per_word :]
    num_rows = num_words // _COLUMNS
    sums = words[: num_rows * _COLUMNS].view(num_rows, _COLUMNS).sum(0)
    rest = words[num_rows * _COLUMNS :]
    sums[: rest.numel()] += rest
    if tail.numel():
        padded = tail.new_zeros(per_word)
        padded[: tail.numel()] = tail
        sums[-1:] += padded.view(torch.int64)
    return (sums * _weights(elements.device)).sum()


def is_constant(elements: Tensor) -> bool:
    """Whether all 8-byte words of a tensor are one, as in zeros: its digest then says little about the next one."""
    per_word = 8 // elements.element_size()
    num_words = elements.numel() // per_word
    words = elements[: num_words * per_word].clone().view(torch.int64)
    return num_words == 0 or bool((words == words[0]).all())


def is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill a stretch of memory without gap or overlap, in whatever order."""
    due = 1
    dimensions = zip(tensor.stride(), tensor.size(), strict=True)
    for stride, length in sorted((stride, length) for stride, length in dimensions if length > 1):
        if stride != due:
            return False
        due *= length
    return not (tensor.is_conj() or tensor.is_neg())


def flat(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor in the order of memory, without a copy."""
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def agreed(values: Sequence[int], group: dist.ProcessGroup, device: torch.device) -> list[bool]:
    """Which numbers are the same on all ranks; a collective, and every rank learns the same.

    Args:
        values: int64, as many on every rank.
        group: The ranks.
        device: Where the group takes tensors.
    """
    # the largest v and the largest ~v, which is that of the smallest v
    extremes = torch.tensor([[value, ~value] for value in values], device=device)
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
    return [largest == ~smallest for largest, smallest in extremes.tolist()]


class Verdict:
    """Whether an input is kept in parts.

    Attributes:
        shards: None until it was compared.
        why: Why it is kept whole, where that is worth telling.
        tries: How often it was compared and could have been the same by chance.
    """

    def __init__(self) -> None:
        self.shards: bool | None = None
        self.why = ""
        self.tries = 0

    def keep_whole(self, why: str) -> None:
        """Decide."""
        self.shards, self.why = False, why


class Replicas:
    """Finds inputs that are the same on all ranks of a group. Fake tensors, which have no values, count as that.

    Args:
        group: The ranks. Each calls `judge` for the same blocks in the same order.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        # cpu:gloo,cuda:nccl
        self._device_types = {entry.partition(":")[0] for entry in dist.get_backend_config(group).split(",")}
        # inputs compared lately: their memory, a number in the order of comparing, the verdict
        self._met: dict[Any, tuple[weakref.ref[Any], int, Verdict]] = {}
        self._num_met = 0
        self._told: set[str] = set()

    def can_shard(self, tensor: Tensor) -> bool:
        """Whether a tensor can be kept in parts if it is the same on all ranks. Looks at no values."""
        return (
            self._may_shard(tensor)
            and not isinstance(tensor._base, nn.Parameter)
            and tensor.numel() >= MIN_PART_ELEMENTS * self._group.size()
            and is_dense(tensor)
        )

    def _may_shard(self, tensor: Tensor) -> bool:
        """What the ranks' program fixes: they must agree whether they compare at all."""
        on_group = tensor.device.type in self._device_types and tensor.layout is torch.strided
        return type(tensor) in (Tensor, FakeTensor) and on_group and tensor.is_floating_point()

    def judge(self, tensors: Sequence[Tensor], name: str, known: dict[Any, Any], is_first: bool) -> Sequence[Verdict]:
        """Which inputs are kept in parts; a collective as long as one of them is not decided.

        Args:
            tensors: The inputs of a call.
            name: The block or module.
            known: The verdicts on earlier calls; filled.
            is_first: Whether nothing of the unit is kept in parts so far.

        Returns:
            A verdict for each.
        """
        signature = tuple((tensor.dtype, tensor.dim(), tensor.device.type, type(tensor)) for tensor in tensors)
        verdicts: list[Verdict] | None = known.get(signature)
        if verdicts is None:
            verdicts = known[signature] = [Verdict() for _ in tensors]
            for tensor, verdict in zip(tensors, verdicts, strict=True):
                if not self._may_shard(tensor):
                    verdict.keep_whole("")
        undecided = [pair for pair in zip(tensors, verdicts, strict=True) if pair[1].shards is None]
        if undecided:
            self._compare(undecided)
            if all(verdict.shards is not None for verdict in verdicts):
                self._tell(name, tensors, verdicts, is_first)
        return verdicts

    def _compare(self, undecided: Sequence[tuple[Tensor, Verdict]]) -> None:
        reasons = [self._reason(tensor) for tensor, _ in undecided]
        met = [
            None if reason else self._meet(tensor, verdict)
            for (tensor, verdict), reason in zip(undecided, reasons, strict=True)
        ]
        # what is kept whole on one rank must be on all, so reasons are compared as the numbers are
        has_values = not isinstance(undecided[0][0], FakeTensor)
        same = [True] * len(undecided)
        if has_values:
            facts = [
                _number(reason, found and found[0])
                if reason or found
                else int(digest(flat(tensor))) ^ _number(_layout(tensor))
                for (tensor, _), reason, found in zip(undecided, reasons, met, strict=True)
            ]
            same = agreed(facts, self._group, undecided[0][0].device)
        for index, (tensor, verdict) in enumerate(undecided):
            found = met[index]
            if not same[index]:
                verdict.keep_whole("it differs between ranks")
            elif reasons[index]:
                verdict.keep_whole(reasons[index])
            elif found is not None:
                verdict.keep_whole("several units are given it")
                found[1].keep_whole("several units are given it")
            elif not has_values or not is_constant(flat(tensor)):
                verdict.shards = True
            else:
                verdict.tries += 1
                if verdict.tries == MAX_TRIES:
                    verdict.keep_whole("its elements are all one number")

    def _reason(self, tensor: Tensor) -> str:
        if isinstance(tensor._base, nn.Parameter):
            return "it is a view of a parameter"
        if not self.can_shard(tensor):
            return "it is small" if is_dense(tensor) else "it is a view with gaps"
        return _FREED if is_freed(tensor) else ""

    def _meet(self, tensor: Tensor, verdict: Verdict) -> tuple[int, Verdict] | None:
        """Number and verdict of another input that was the same memory in the same state."""
        storage = tensor.untyped_storage()
        key = storage._cdata, tensor.storage_offset(), version_of(tensor), *_layout(tensor)
        self._met = {other: entry for other, entry in self._met.items() if entry[0]() is not None}
        if key in self._met:
            return self._met[key][1:]
        self._num_met += 1
        self._met[key] = weakref.ref(storage), self._num_met, verdict
        return None

    def _tell(self, name: str, tensors: Sequence[Tensor], verdicts: Sequence[Verdict], is_first: bool) -> None:
        kind = re.sub(r"\d+", "*", name)
        whole = [
            f"{position} of shape {tuple(tensor.shape)} ({verdict.why})"
            for position, (tensor, verdict) in enumerate(zip(tensors, verdicts, strict=True))
            if verdict.why
        ]
        if not whole or kind in self._told or self._group.rank():
            return
        self._told.add(kind)
        saves = any(verdict.shards for verdict in verdicts) or all(verdict.why == _FREED for verdict in verdicts)
        if is_first and not saves:
            logger.warning(
                "%s: distribute_saved_activations saves nothing here: all inputs, %d bytes a call, are kept whole: %s. "
                "Leave it out for these units",
                kind,
                sum(tensor.numel() * tensor.element_size() for tensor in tensors),
                ", ".join(whole),
            )
        else:
            logger.info("%s: inputs that every rank keeps whole: %s", kind, ", ".join(whole))


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tuple(tensor.size()), tensor.stride()


def _number(*facts: Any) -> int:
    return zlib.crc32(repr(facts).encode())
