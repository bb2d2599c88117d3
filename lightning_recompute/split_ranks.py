"""What the ranks of a pipeline take whose backward runs in two parts, action by action, from one measurement.

Which microbatches wait for their second part, and when, does not go into one number for all of them: so a rank's real
actions are gone through, as `stage_memory` does it. Searches for plans take the closed formula, an upper bound.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_recompute.cost import extra_seconds, segments
from lightning_recompute.division import Division
from lightning_recompute.errors import BudgetError
from lightning_recompute.lazy_stage import with_transfers
from lightning_recompute.ledger import allocated_bytes
from lightning_recompute.measured_model import MeasuredModel
from lightning_recompute.pipeline_costs import Part, RankStatics, Surroundings, gradients_of_units
from lightning_recompute.planner import smallest_peak
from lightning_recompute.rank_solver import PartChoices, RankSolver
from lightning_recompute.schedule_actions import place, rank_actions
from lightning_recompute.stage_memory import (
    KIND_WORDS,
    KINDS,
    ChunkMemory,
    Kind,
    RankAction,
    RankGradients,
    SplitMemory,
    StageLevel,
    highest,
    stage_levels,
)
from lightning_recompute.stage_plans import PipelineCosts
from lightning_recompute.units import format_bytes

_STEPS = 8
"""Searches for a rank's plan, each of them halving what is left to try."""


@dataclass(frozen=True)
class SplitRanks:
    """The ranks of a pipeline whose backward runs in two parts.

    Attributes:
        measured: The model.
        around: Its surroundings.
        division: Its blocks over ranks.
        parts: Of each chunk, in forward order, as if nothing waited.
        actions: Of each rank, transfers included.
        gradients: Of each rank.
        statics: Of each rank.
        names: The trained parameters of each chunk.
        sizes: Bytes of each trained parameter.
    """

    measured: MeasuredModel
    around: Surroundings
    division: Division
    parts: tuple[Part, ...]
    actions: tuple[tuple[RankAction, ...], ...]
    gradients: tuple[RankGradients, ...]
    statics: tuple[RankStatics, ...]
    names: tuple[frozenset[str], ...]
    sizes: Mapping[str, int]

    def highest(self, rank: int, choices: Sequence[PartChoices]) -> StageLevel:
        """The moment of a rank's peak, but for the optimizer's step, without statics.

        Args:
            rank: The rank.
            choices: For each of its chunks, in forward order.
        """
        chunks = self.division.chunks_of(rank)
        memories = {chunk: self._chunk(chunk, chosen) for chunk, chosen in zip(chunks, choices, strict=True)}
        levels = stage_levels("", self.actions[rank], lambda chunk, _: memories[chunk], self.gradients[rank])
        return highest(levels)

    def peak_bytes(self, rank: int, choices: Sequence[PartChoices]) -> int:
        """The peak of a rank's step, statics included.

        Args:
            rank: The rank.
            choices: For each of its chunks, in forward order.
        """
        statics = self.statics[rank]
        running = statics.num_bytes - statics.gradients_bytes + self.highest(rank, choices).num_bytes
        return max(running, statics.step_bytes, statics.num_bytes)

    def breakdown(self, rank: int, choices: Sequence[PartChoices]) -> tuple[str, dict[str, int]]:
        """When a rank's peak is, in words, and what it consists of; see `StagedModel.breakdown`.

        Args:
            rank: The rank.
            choices: For each of its chunks, in forward order.
        """
        level, statics = self.highest(rank, choices), self.statics[rank]
        found = {
            "parameters": statics.parameters_bytes,
            "gradients": level.gradient_bytes,
            "optimizer": statics.optimizer_bytes,
            "other": statics.other_bytes,
            "activations": level.waiting_bytes,
            "running": level.running_bytes,
            "outside": level.passing_bytes,
        }
        peak = self.peak_bytes(rank, choices)
        if sum(found.values()) < peak:
            found |= {"gradients": statics.gradients_bytes, "activations": 0, "outside": 0}
            return "optimizer step", found | {"running": peak - statics.num_bytes}
        if level.action is None:
            return "transfers", found
        part, names = self.parts[level.action.chunk], self.measured.profile.names
        blocks = names[part.start] + (f" to {names[part.stop - 1]}" if part.num_blocks > 1 else "")
        return f"{KIND_WORDS[level.action.kind]} of {blocks}", found

    def plan(self, pipeline: PipelineCosts, rank: int, budget_bytes: int) -> list[PartChoices]:
        """The fastest choices found for a rank within a budget.

        Args:
            pipeline: Costs by the closed formula, and the schedule.
            rank: The rank.
            budget_bytes: What its peak may be.

        Raises:
            BudgetError: None was found.
        """
        peak = functools.cache(lambda choices: self.peak_bytes(rank, choices))  # of all actions each time
        vectors, numbers = pipeline.alive()[rank], pipeline.parts_of(rank)
        bounds, parts = [pipeline.parts[number] for number in numbers], [self.parts[number].costs for number in numbers]
        most = [max(max(column), 1) for column in zip(*vectors, strict=True)]
        tried = [
            [smallest_peak(replace(part, in_flight=number)) for part, number in zip(costs, most, strict=True)]
            for costs in (bounds, parts)
        ]
        with contextlib.suppress(BudgetError):
            tried.append(RankSolver(bounds, vectors).solve(budget_bytes))
        # as if nothing waited, within less and less until what waits has room
        solver, low, high = RankSolver(parts, vectors), 0, budget_bytes
        room = high
        for _ in range(_STEPS):
            try:
                tried.append(solver.solve(room))
                fits = peak(tuple(tried[-1])) <= budget_bytes
            except BudgetError:
                fits = True  # more is due in any case
            low, high = (room, high) if fits else (low, room)
            if low == high:
                break
            room = (low + high) // 2
        peaks = [peak(tuple(choices)) for choices in tried]
        fitting = [choices for choices, peak in zip(tried, peaks, strict=True) if peak <= budget_bytes]
        if not fitting:
            least = min(peaks)
            raise BudgetError(
                f"stage {rank} ({max(map(sum, vectors))} chunk-microbatches in flight): no choice of recompute found "
                f"that keeps {format_bytes(budget_bytes)} ({budget_bytes} bytes): the smallest peak found is "
                f"{format_bytes(least)} ({least} bytes)",
                least,
            )
        return min(fitting, key=lambda choices: sum(map(extra_seconds, parts, choices)))

    def _chunk(self, chunk: int, chosen: PartChoices) -> ChunkMemory:
        part, around = self.parts[chunk], self.around
        start, stop = part.start, part.stop
        is_first, is_last = chunk == 0, chunk == len(self.parts) - 1
        received, sent = 0 if is_first else around.given[start], 0 if is_last else around.returned[stop - 1]
        chain = [(start + unit - 1, option) for unit, option in segments(part.costs, chosen)[1:-1]]
        blocks = {
            each: self.measured.split_block(each, part.options[block - start][chosen[block - start + 1] or 0][0])
            for block, option in chain
            for each in range(block, block + option.num_units)
        }
        entry = around.embedding_held if is_first else 0
        held = entry + sum(option.held_bytes for _, option in chain)
        # what comes after the blocks: what its forward leaves, and its backward, in one part and after that for inputs
        left = around.head_held if is_last else sent
        end = left + (around.head_backward if is_last else sent)
        head = self.measured.split_head
        during, between = (left + head.during_bytes, left + head.between_bytes) if is_last else (end, end)
        cached = sum(around.cached[start:stop])
        forward = [received + around.embedding_forward, held + cached + (around.head_forward if is_last else sent)]
        # backward where gradients are there, and where it makes the first ones
        made = gradients_of_units(self.measured, self.names[chunk], start, stop)
        backward = [(held + end, held + left + around.head_first if is_last else held + end)]
        inputs = [held + left + head.input_bytes if is_last else held + end]
        if is_first:
            first = entry + around.embedding_first + sum(made[1:])
            backward.append((entry + around.embedding_backward + 2 * sent, first + 2 * sent))
        if not is_last:  # the gradient that was received is in `end`
            last = blocks[stop - 1]
            blocks[stop - 1] = replace(
                last,
                during_bytes=last.during_bytes - last.captured_bytes,
                between_bytes=last.between_bytes - last.captured_bytes,
            )
        before = entry
        for block, option in chain:
            those = range(block, block + option.num_units)
            forward.append(before + option.forward_bytes + around.forward[block] + sum(around.cached[start:block]))
            kept = before
            for each in those:
                after = sum(blocks[later].during_bytes for later in range(each + 1, stop)) + during
                if is_last or each < stop - 1:
                    after += around.returned[each]  # its gradient
                inputs.append(kept + blocks[each].input_bytes + after)
                kept += blocks[each].kept_bytes
            before += option.held_bytes
            running = before + option.transient_bytes + around.backward[those[-1]] + 2 * sent
            backward.append((running, running + sum(made[block - start + 1 :])))
        between += received + sum(each.between_bytes for each in blocks.values())
        split = [*blocks.values(), *([head] if is_last else [])]
        ends = made[0] + (0 if is_last else made[-1])
        fresh = max(each.weight_bytes for each in split) + max(ends - 2 * sent, 0)
        fresh += sum(max(each.left_bytes, 0) for each in split)
        return ChunkMemory(
            received,
            sent,
            forward_bytes=max(forward),
            waiting_bytes=held + left,
            backward_bytes=max(first for _, first in backward),
            accumulating_bytes=max(again for again, _ in backward),
            split=SplitMemory(max(inputs), between, between + fresh, between + max(each.again_bytes for each in split)),
        )


def split_ranks(
    measured: MeasuredModel,
    around: Surroundings,
    division: Division,
    parts: Sequence[Part],
    pipeline: PipelineCosts,
    statics: Sequence[RankStatics],
) -> SplitRanks:
    """Prepare to go through the steps of ranks.

    Args:
        measured: The model.
        around: Its surroundings.
        division: Its blocks over ranks.
        parts: Of each chunk, as if nothing waited.
        pipeline: Says the schedule.
        statics: Of each rank.
    """
    schedule, num_stages = pipeline.schedule, pipeline.num_stages
    orders = rank_actions(schedule, num_stages, pipeline.num_microbatches, pipeline.virtual)
    named = [
        [(KINDS[kind].value, place(schedule, num_stages, chunk, rank), number) for kind, chunk, number in order]
        for rank, order in enumerate(orders)
    ]
    actions = [
        tuple(RankAction(Kind(kind), chunk, number) for kind, chunk, number in of_rank)
        for of_rank in with_transfers(named, [division.rank_of(chunk) for chunk in range(len(parts))])
    ]
    names = [
        frozenset(
            name
            for name in measured.trained
            if any(division.chunk_with(use) == chunk for use in measured.probe.uses[name])
        )
        for chunk in range(len(parts))
    ]
    device = next(iter(measured.parameters.values())).device
    sizes = {name: allocated_bytes([measured.parameters[name]], device) for name in measured.trained}
    made = [sum(sizes[name] for name in of_part) for of_part in names]
    gradients = [
        RankGradients({chunk: made[chunk] for chunk in division.chunks_of(rank)}, each.gradients_bytes)
        for rank, each in enumerate(statics)
    ]
    return SplitRanks(
        measured,
        around,
        division,
        tuple(parts),
        tuple(actions),
        tuple(gradients),
        tuple(statics),
        tuple(names),
        sizes,
    )
