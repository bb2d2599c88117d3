"""What each label of selective recompute means on a model: which modules, how many bytes, how much time.

The figures are those of a run: of the model's blocks with the calls of one real forward, each kind of block measured
alone by `block_cost`. Labels are measured one by one; they are not additive, since one may hold what another frees.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import nn

from lightning_recompute.block_cost import BlockCost, measure_bytes
from lightning_recompute.block_time import measure_seconds
from lightning_recompute.blocks import BlockList, class_of, find_blocks
from lightning_recompute.capture import BlockCall, CallKind, Capture, Run, capture_calls
from lightning_recompute.kinds import is_matrix
from lightning_recompute.labels import available_labels, find_targets, unknown_label_message
from lightning_recompute.plan import Action, Full, Keep, Selective
from lightning_recompute.policy import LABELS, is_pattern, nearest
from lightning_recompute.units import format_bytes, format_seconds

FULL = "full"
"""Stands among the labels for recompute of whole blocks."""

USELESS_SHARE = 0.01
"""A label that saves less than this part of what the blocks hold is useless."""


@dataclass(frozen=True)
class Row:
    """One label on blocks that are alike. Bytes and seconds are of one call of one block where nothing else is said.

    Attributes:
        block_list: The list (or lists) that the blocks stand in.
        kind: Class of the blocks.
        blocks: Their names.
        num_calls: How often blocks of this kind run in one forward.
        label: The label, several joined by `+`, a pattern, or `full`.
        modules: The modules that answer to it, as text.
        kept_bytes: What a block holds between forward and backward without recompute, its input included.
        held_bytes: What it holds with the label.
        saved_bytes: The difference.
        saved_peak_bytes: By how much the peak of forward and backward of the block alone is lower.
        total_saved_bytes: What the label saves in all these blocks together.
        total_saved_peak_bytes: By how much it lowers the peak of all blocks of the model, run forward and backward.
        seconds: What forward and backward of a block take longer, None if it was not measured.
        kept_seconds: What they take without recompute.
        note: What is remarkable.
    """

    block_list: str
    kind: str
    blocks: tuple[str, ...]
    num_calls: int
    label: str
    modules: str
    kept_bytes: int
    held_bytes: int
    saved_peak_bytes: int
    total_saved_bytes: int
    total_saved_peak_bytes: int
    seconds: float | None
    kept_seconds: float | None
    note: str

    @property
    def saved_bytes(self) -> int:
        """What the label saves of a block between forward and backward."""
        return self.kept_bytes - self.held_bytes


@dataclass(frozen=True)
class Inspection:
    """What each label saves and costs on one model and batch.

    Attributes:
        rows: Kinds of blocks in the order in which they are called, and in each the labels.
        kept_bytes: What all blocks hold between forward and backward without recompute.
    """

    rows: tuple[Row, ...]
    kept_bytes: int

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels there are rows for."""
        return tuple(dict.fromkeys(row.label for row in self.rows))

    def saved_bytes(self, label: str) -> int:
        """What a label saves in all blocks together.

        Raises:
            ValueError: There is no row for it.
        """
        if label not in self.labels:
            raise ValueError(f"{label!r} was not inspected; {nearest(label, self.labels)}")
        return sum(row.total_saved_bytes for row in self.rows if row.label == label)

    def best_alternative(self, label: str) -> str | None:
        """The other label that saves most in all blocks together; None if no other saves anything.

        Recompute of whole blocks (`full`) is none.
        """
        others = [other for other in self.labels if other not in (label, FULL) and self.saved_bytes(other) > 0]
        return max(others, key=self.saved_bytes, default=None)

    def to_table(self) -> Table:
        """The rows as a rich table, a section for each kind of block."""
        num_calls = sum({row.blocks: row.num_calls for row in self.rows}.values())
        table = Table(
            title="Labels of selective recompute",
            caption=f"Without recompute {num_calls} blocks hold {format_bytes(self.kept_bytes)} between forward and "
            "backward. Labels do not add up.",
            box=SIMPLE_HEAD,
            title_justify="left",
            caption_justify="left",
        )
        table.add_column("label", no_wrap=True)
        table.add_column("modules", overflow="fold")
        for column in ("held", "saved", "at peak", "saved in all", "at peak", "time"):
            table.add_column(column, justify="right", no_wrap=True)
        if any(row.note for row in self.rows):
            table.add_column("note", overflow="fold")
        for kind, rows in itertools.groupby(self.rows, key=lambda row: (row.num_calls, row.kind, row.blocks)):
            table.add_section()
            for index, row in enumerate(rows):
                if index == 0:
                    time = "" if row.kept_seconds is None else format_seconds(row.kept_seconds)
                    where = f"{kind[0]} x {kind[1]}: {_span(row.blocks)}"
                    table.add_row("none", escape(where), format_bytes(row.kept_bytes), "", "", "", "", time)
                table.add_row(
                    escape(row.label),
                    escape(row.modules),
                    format_bytes(row.held_bytes),
                    f"{format_bytes(row.saved_bytes)} ({percent(row.saved_bytes, row.kept_bytes)})",
                    format_bytes(row.saved_peak_bytes),
                    format_bytes(row.total_saved_bytes),
                    format_bytes(row.total_saved_peak_bytes),
                    _more(row.seconds, row.kept_seconds),
                    *([escape(row.note)] if row.note else []),
                )
        return table

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=160, color_system=None, force_jupyter=False)
        console.print(self.to_table())
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue().rstrip()


def _span(blocks: Sequence[str]) -> str:
    return blocks[0] if len(blocks) == 1 else f"{blocks[0]} .. {blocks[-1]}"


def percent(part: int, whole: int) -> str:
    """A part of a whole in print; of nothing it is 0 %."""
    return f"{100 * part / whole:.1f} %" if whole else "0.0 %"


def _more(seconds: float | None, kept: float | None) -> str:
    if seconds is None or kept is None:
        return ""
    sign = "-" if seconds < 0 else "+"
    share = f" ({sign}{100 * abs(seconds) / kept:.0f} %)" if kept > 0 else ""
    return f"{sign}{format_seconds(abs(seconds))}{share}"


# ---- measuring


class Costs:
    """Costs of blocks in bytes, each measured once.

    Args:
        real: Whether a block may run on real tensors; see `measure_bytes`.
        exact: Whether it runs on those at once; see `measure_bytes`.
        whole: Surrounds what is done with a block, so that it has its whole parameters.
    """

    def __init__(
        self,
        *,
        real: bool = True,
        exact: bool = False,
        whole: Callable[[nn.Module], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._real = real
        self.exact = exact
        self.whole = whole
        self._known: dict[tuple[int, Action], tuple[BlockCall, BlockCost]] = {}

    def of(self, call: BlockCall, action: Action) -> BlockCost:
        """The cost of a call under an action."""
        key = (id(call), action)
        if key not in self._known:
            with self.whole(call.module):
                self._known[key] = call, measure_bytes(call, action, real=self._real, exact=self.exact)
        return self._known[key][1]


def inspect_blocks(
    module: nn.Module,
    run: Run,
    *,
    blocks: str | Sequence[str] | None = None,
    labels: Sequence[str] | None = None,
    seconds: bool = True,
) -> Inspection:
    """Measure what each label of selective recompute saves and costs on a model.

    The module is afterwards what it was, and so are the random streams.

    Args:
        module: The model in training mode, on its device; a plan that is applied to it is left out of account.
        run: Runs its training forward once: a function without arguments, or (args, kwargs) of the model.
        blocks: Where the blocks are; see `find_blocks`.
        labels: Labels or name patterns, several joined by `+` to be measured together, or `full`. None: every label
            that the blocks have, and `full`.
        seconds: Also measure time, by running each kind of block some times forward and backward on its device.

    Raises:
        ValueError: Blocks cannot be found or are not called, or a label is unknown or matches nothing.
    """
    lists = find_blocks(module, blocks)
    capture = capture_calls(module, run, lists)
    words = _checked(labels, capture.kinds) if labels is not None else None
    costs = Costs()
    targets = [dict(_targets(kind.call, words)) for kind in capture.kinds]
    kept = [costs.of(kind.call, Keep()) for kind in capture.kinds]
    times = [
        measure_seconds(kind.call, [Keep(), *map(_action, found)]) if seconds and found else []
        for kind, found in zip(capture.kinds, targets, strict=True)
    ]
    rows: list[tuple[int, int, Row]] = []
    order = list(dict.fromkeys(label for found in targets for label in found))
    for position, label in enumerate(order):
        under = list(kept)
        for index, kind in enumerate(capture.kinds):
            if label not in targets[index]:
                continue
            before, under[index] = list(under), costs.of(kind.call, _action(label))
            time = times[index][1 + list(targets[index]).index(label)] - times[index][0] if times[index] else None
            rows.append(
                (
                    index,
                    position,
                    Row(
                        ", ".join(_lists_with(kind.names, lists)),
                        class_of(kind.call.module).__name__,
                        tuple(dict.fromkeys(kind.names)),
                        len(kind.names),
                        label,
                        targets[index][label],
                        _held(kept[index]),
                        _held(under[index]),
                        kept[index].peak_bytes - under[index].peak_bytes,
                        total_held_bytes(capture, before) - total_held_bytes(capture, under),
                        total_peak_bytes(capture, before) - total_peak_bytes(capture, under),
                        time,
                        times[index][0] if times[index] else None,
                        _note(kind.call, label, kept[index], under[index]),
                    ),
                )
            )
    rows.sort(key=lambda entry: entry[:2])
    return Inspection(tuple(row for _, _, row in rows), total_held_bytes(capture, kept))


def total_held_bytes(capture: Capture, costs: Sequence[BlockCost]) -> int:
    """What all blocks hold together between forward and backward.

    Args:
        capture: How they are called.
        costs: What a call of each kind costs.

    Returns:
        The sum, with what several hold counted once.
    """
    return _held_before(capture, costs, len(capture.order))


def total_peak_bytes(capture: Capture, costs: Sequence[BlockCost]) -> int:
    """The largest number of bytes while all blocks run forward and then backward.

    For each call: what the calls before it hold, its own peak, and the gradients of the blocks after it, where none
    were there before the step.
    """
    peak = 0
    later: dict[str, int] = {}
    for position, (index, name) in reversed(list(enumerate(zip(capture.order, capture.names, strict=True)))):
        phases = costs[index].phases
        freed = _freed_by_chain(capture, costs, position)
        own = costs[index].peak_bytes - freed
        if phases.chained.again_bytes:  # an input that was freed is there in forward, and made again in backward
            own = max(own + phases.chained.again_bytes, freed + phases.forward_bytes)
        later.pop(name, None)
        peak = max(peak, _held_before(capture, costs, position) + own + sum(later.values()))
        later[name] = costs[index].gradient_bytes
    return peak


def _held_before(capture: Capture, costs: Sequence[BlockCost], stop: int) -> int:
    held = 0
    shared: dict[int, int] = {}
    for position, index in enumerate(capture.order[:stop]):
        held += costs[index].held_bytes - _freed_by_chain(capture, costs, position)
        shared |= costs[index].shared_bytes
    return held + sum(shared.values())


def _freed_by_chain(capture: Capture, costs: Sequence[BlockCost], position: int) -> int:
    cost = costs[capture.order[position]]
    return cost.held_bytes - cost.chained_bytes if position in capture.chained else 0


def _held(cost: BlockCost) -> int:
    return cost.held_bytes + sum(cost.shared_bytes.values())


def _action(label: str) -> Action:
    return Full() if label == FULL else Selective(tuple(label.split("+")))


def _lists_with(names: Iterable[str], lists: Sequence[BlockList]) -> list[str]:
    wanted = set(names)
    return [found.name for found in lists if wanted & set(found.names)]


# ---- labels and words


def _targets(call: BlockCall, labels: Sequence[str] | None) -> Iterable[tuple[str, str]]:
    """Each label that a block has, with the modules that answer to it."""
    if labels is None:
        for label, targets in available_labels(call.module).items():
            yield label, ", ".join(map(str, targets))
    for label in labels if labels is not None else (FULL,):
        if label == FULL:
            yield FULL, f"all of {class_of(call.module).__name__}"
        elif targets := find_targets(call.module, label.split("+"), call.name)[0]:
            yield label, ", ".join(map(str, targets))


def _checked(labels: Sequence[str], kinds: Sequence[CallKind]) -> list[str]:
    if isinstance(labels, str) or not labels:
        raise ValueError(f"labels={labels!r}: a list of labels or name patterns is due, or None for all")
    found = list(dict.fromkeys(labels))
    blocks = {kind.call.name: kind.call.module for kind in kinds}
    for word in [word for label in found if label != FULL for word in label.split("+")]:
        if word not in LABELS and not is_pattern(word):
            raise ValueError(f"labels: unknown label {word!r}; {nearest(word, (*LABELS, FULL))}")
        if not any(find_targets(block, (word,), name)[0] for name, block in blocks.items()):
            raise ValueError(unknown_label_message((word,), blocks))
    return found


def _note(call: BlockCall, label: str, kept: BlockCost, under: BlockCost) -> str:
    found = [] if label == FULL else list(find_targets(call.module, label.split("+"), call.name)[1])
    if is_useless(_held(kept) - _held(under), _held(kept)):
        found.insert(0, why_useless(call, label, kept, _held(kept) - _held(under)))
    if not under.is_fake:
        found.append("measured on real tensors")
    return "; ".join(found)


def is_useless(saved_bytes: int, kept_bytes: int) -> bool:
    """Whether a label saves less than 1 % of what blocks hold without it."""
    return saved_bytes < USELESS_SHARE * kept_bytes


def why_useless(call: BlockCall, label: str, kept: BlockCost, saved_bytes: int) -> str:
    """Why a label saves nothing on a block, as far as it can be told.

    Args:
        call: A call of the block.
        label: The label.
        kept: What the call costs without recompute.
        saved_bytes: What the label saves on it, negative if it holds more.
    """
    matrices = [parameter for parameter in call.module.parameters() if is_matrix(parameter)]
    amount = "nothing" if saved_bytes <= 0 else "next to nothing"
    if label == "core_attn" and kept.fused_attention:
        reason = "fused attention keeps no scores"
    elif any(not parameter.requires_grad for parameter in matrices):
        reason = "frozen linears keep no input"
    elif label == "act":
        reason = "backward of these activations needs their output"
    else:
        reason = "what it would free is needed by others as well"
    more = f", and to recompute it holds {format_bytes(-saved_bytes)} more" if saved_bytes < 0 else ""
    return f"{amount}: {reason}{more}"
