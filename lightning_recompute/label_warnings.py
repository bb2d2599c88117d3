"""Saying so when a label of selective recompute saves nothing on a model, and what would save instead."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_recompute.blocks import BlockList, class_of
from lightning_recompute.capture import BlockCall, Capture, Run, capture_calls, module_key
from lightning_recompute.inspection import Costs, is_useless, percent, why_useless
from lightning_recompute.labels import available_labels, find_targets
from lightning_recompute.plan import Action, Full, Keep, RecomputePlan, Selective
from lightning_recompute.recompute_unit import needs_grad
from lightning_recompute.units import format_bytes

Calls = Sequence[tuple[BlockCall, int]]
"""Calls of blocks, each with the number of calls that are like it."""


def warn_if_useless(
    module: nn.Module, plan: RecomputePlan, block_lists: Sequence[BlockList], run: Run | Capture
) -> list[str]:
    """Find the labels and patterns of a plan that save less than 1 % of what their blocks hold on this model.

    Args:
        module: The model, in training mode.
        plan: Only its selective segments count.
        block_lists: The model's block lists, through which the plan's indices run on.
        run: Runs the training forward once, or what `capture_calls` made of it.

    Returns:
        A message for each such label, to be logged as a warning: how much it saves, why, and what others would save.
    """
    words = selective_words(plan, block_lists)
    if not words:
        return []
    capture = run if isinstance(run, Capture) else capture_calls(module, run, block_lists)
    costs = Costs()
    messages = []
    for word, names in words.items():
        counted = [(kind.call, sum(name in names for name in kind.names)) for kind in capture.kinds]
        messages += useless_message(word, [(call, count) for call, count in counted if count], costs)
    return messages


def selective_words(plan: RecomputePlan, block_lists: Sequence[BlockList]) -> dict[str, set[str]]:
    """The labels and patterns of a plan, each with the names of the blocks that are under it."""
    names = [name for block_list in block_lists for name in block_list.names]
    words: dict[str, set[str]] = {}
    for segment in plan.segments:
        if isinstance(segment.action, Selective):
            for word in segment.action.modules:
                words.setdefault(word, set()).update(names[segment.start : segment.stop])
    return words


def useless_message(word: str, calls: Calls, costs: Costs) -> list[str]:
    """The message about a label, or none if it saves something or no block has it.

    Args:
        word: The label or pattern.
        calls: Calls of the blocks that are under it.
        costs: Measures them.
    """
    calls = [(call, count) for call, count in calls if find_targets(call.module, (word,), call.name)[0]]
    if not _is_useless(word, calls, costs):
        return []
    # where it is of use in a few small blocks, the message is about the others
    calls = [entry for entry in calls if _is_useless(word, [entry], costs)]
    kept = _total(calls, Keep(), costs)
    saved = kept - _total(calls, Selective((word,)), costs)
    call, _ = calls[0]
    labels = dict.fromkeys(label for call, _ in calls for label in available_labels(call.module) if label != word)
    amounts = {label: kept - _total(calls, Selective((label,)), costs) for label in labels}
    others = [
        f"{label} {percent(amount, kept)}"
        for label, amount in sorted(amounts.items(), key=lambda entry: -entry[1])
        if not is_useless(amount, kept)
    ]
    whole = kept - _total(calls, Full(), costs)
    return [
        f"selective recompute of {word!r} saves {percent(max(saved, 0), kept)} of the {format_bytes(kept)} that "
        f"{sum(count for _, count in calls)} block(s) {class_of(call.module).__name__} hold for backward "
        f"({why_useless(call, word, costs.of(call, Keep()), saved)}). Others would save: "
        f"{', '.join([*others, 'granularity=full ' + percent(whole, kept)])}"
    ]


def _is_useless(word: str, calls: Calls, costs: Costs) -> bool:
    kept = _total(calls, Keep(), costs)
    return kept > 0 and is_useless(kept - _total(calls, Selective((word,)), costs), kept)


def _total(calls: Calls, action: Action, costs: Costs) -> int:
    total = 0
    for call, count in calls:
        words = getattr(action, "modules", None)
        has_it = words is None or find_targets(call.module, words, call.name)[0]
        cost = costs.of(call, action if has_it else Keep())
        total += count * cost.held_bytes + sum(cost.shared_bytes.values())
    return total


class FirstBatchCheck:
    """Looks at the first training forward and warns, once, of labels that save nothing; then it is gone.

    A hook on the first selective block of each kind catches the block's call when it is called with gradients on, and
    measures the block there and then, on fake tensors: results and random streams stay what they are without it. In a
    single process a block that cannot run on those runs on real ones, once for each label.

    Args:
        plan: The plan that is applied.
        block_lists: The model's block lists.
        logger: Told.
    """

    def __init__(self, plan: RecomputePlan, block_lists: Sequence[BlockList], logger: logging.Logger) -> None:
        self._words = selective_words(plan, block_lists)
        self._logger = logger
        self._costs = Costs(real=not _is_distributed())
        self._calls: list[tuple[BlockCall, dict[str, int]]] = []
        self._hooks: dict[str, RemovableHandle] = {}
        # the blocks of each kind: the first one's name, and for each word how many are under it
        self._kinds: dict[str, dict[str, int]] = {}
        covered = set().union(*self._words.values())
        first: dict[Any, str] = {}
        for block_list in block_lists:
            for block, name in zip(block_list.blocks, block_list.names, strict=True):
                if name not in covered:
                    continue
                key = module_key(block)
                if key not in first:
                    first[key] = name
                    self._kinds[name] = dict.fromkeys(self._words, 0)
                    hook = _Hook(self, name)
                    self._hooks[name] = block.register_forward_pre_hook(hook, with_kwargs=True)
                for word, names in self._words.items():
                    self._kinds[first[key]][word] += name in names

    def remove(self) -> None:
        """Take off the hooks that were not called yet; a second call does nothing."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        self._calls.clear()

    def meet(self, name: str, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A block is called; the first call with gradients counts.

        Args:
            name: Its name.
            block: The block.
            args: Positional arguments.
            kwargs: Keyword arguments.
        """
        if name not in self._hooks or not torch.is_grad_enabled() or not needs_grad(block, args, kwargs):
            return
        self._hooks.pop(name).remove()
        try:
            call = BlockCall(block, name, args, kwargs)
            self._calls.append((call, self._kinds[name]))
            for word, count in self._kinds[name].items():
                if count:
                    useless_message(word, [(call, count)], self._costs)  # measures what the messages will need
            call.release()
            messages = [] if self._hooks else self._messages()
        except Exception as error:  # a remark about memory must not end anybody's training
            self._logger.info("what selective recompute saves on %s could not be measured: %s", name, error)
            self.remove()
            return
        for message in messages:
            self._logger.warning("%s", message)

    def _messages(self) -> list[str]:
        messages = []
        for word in self._words:
            calls = [(call, counts[word]) for call, counts in self._calls if counts[word]]
            messages += useless_message(word, calls, self._costs)
        self.remove()
        return messages


class _Hook:
    """The forward pre-hook on a block; a copy of the block, or what was pickled, has one that does nothing."""

    def __init__(self, check: FirstBatchCheck | None, name: str) -> None:
        self._check = check
        self._name = name

    @torch.compiler.disable
    def __call__(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._check is not None:
            self._check.meet(self._name, block, args, kwargs)

    def __reduce__(self) -> tuple[type[_Hook], tuple[None, str]]:
        return _Hook, (None, self._name)


def _is_distributed() -> bool:
    # a forward of one process alone would wait for the others in a collective
    return (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and (torch.distributed.get_world_size() > 1)
    )
