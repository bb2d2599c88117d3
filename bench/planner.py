"""How long the planner takes: the 96 layers of GPT-3 175B over 16 and over 64 stages, and whole chains on one stage.

Options and their bytes are those of the paper's formulae (arXiv 2205.05198, b 1, s 2048, h 12288, 8-way tensor
parallel), eight a layer, from keep to full. Gradients pile up during backward, as they do. Times are of all stages,
the slowest of the budgets tried.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence

from common import report
from rich.table import Table

from lightning_recompute.cost import Option, StageCosts, extra_seconds, in_flight, peak_bytes
from lightning_recompute.planner import smallest_peak, solve

NUM_LAYERS = 96
NUM_MICROBATCHES = 128
SHARES = (0.1, 0.25, 0.4, 0.6, 0.8)
"""Budgets: parts of the way from the smallest peak to that of keeping everything."""

UNIT = 2048 * 12288 // 8  # sbh / t
GRADIENTS = 12 * 12288**2 * 2 // 8
# held units, extra forwards of a layer, transient units: 34 + 5as/h, and what each set of modules saves
LAYER = (
    (114, 0.0, 6),
    (34, 0.035, 86),
    (26, 0.12, 94),
    (22, 0.16, 98),
    (15, 0.5, 105),
    (11, 0.55, 109),
    (3, 0.97, 117),
    (2, 1.0, 118),
)
FORWARD_SECONDS = 0.01


def layer_options(bytes_factor: float, time_factors: Sequence[float]) -> list[Option]:
    return [
        Option(
            held_bytes=int(held * UNIT * bytes_factor),
            extra_seconds=seconds * FORWARD_SECONDS * factor,
            transient_bytes=int(transient * UNIT * bytes_factor),
            forward_bytes=int((held + 8) * UNIT * bytes_factor),
        )
        for (held, seconds, transient), factor in zip(LAYER, time_factors, strict=True)
    ]


def identical(num_layers: int, source: random.Random) -> list[list[Option]]:
    return [layer_options(1.0, [1.0] * len(LAYER)) for _ in range(num_layers)]


def different(num_layers: int, source: random.Random) -> list[list[Option]]:
    return [
        layer_options(1 + 0.3 * source.random(), [1 + 0.3 * source.random() for _ in LAYER]) for _ in range(num_layers)
    ]


def in_step(num_layers: int, source: random.Random) -> list[list[Option]]:
    """Layers of different size, with time and bytes in step: the hard case, since all save at the same rate."""
    factors = [1 + 0.3 * source.random() for _ in range(num_layers)]
    return [layer_options(factor, [factor] * len(LAYER)) for factor in factors]


def grouped(num_layers: int, source: random.Random) -> list[list[Option]]:
    """Different layers, and up to 4 of them recomputed as one unit, which holds one input."""
    layers = different(num_layers, source)
    for start in range(num_layers):
        for size in range(2, min(4, num_layers - start) + 1):
            group = [layers[unit] for unit in range(start, start + size)]
            layers[start].append(
                Option(
                    held_bytes=2 * UNIT,
                    extra_seconds=sum(options[len(LAYER) - 1].extra_seconds for options in group),
                    transient_bytes=sum(options[0].held_bytes for options in group),
                    forward_bytes=10 * UNIT,
                    num_units=size,
                )
            )
    return layers


KINDS = {"identical": identical, "different": different, "in step": in_step, "different, groups to 4": grouped}


def stage_costs(layers: Sequence[Sequence[Option]], num_in_flight: int, is_last: bool) -> StageCosts:
    num_layers = len(layers)
    return StageCosts(
        options=tuple(map(tuple, layers)),
        static_bytes=9 * GRADIENTS * num_layers,
        head_bytes=4 * 2048 * 51200 * 4 // 8 if is_last else 0,
        gradient_bytes=tuple(GRADIENTS * (num_layers - unit) for unit in range(num_layers)),
        entry_bytes=2 * UNIT,
        in_flight=num_in_flight,
    )


def pipeline(kind: str, num_stages: int, num_layers: int = NUM_LAYERS) -> list[StageCosts]:
    layers = KINDS[kind]
    source = random.Random(0)
    alive = in_flight("1f1b", num_stages, NUM_MICROBATCHES)
    bounds = [num_layers * stage // num_stages for stage in range(num_stages + 1)]
    return [
        stage_costs(layers(stop - start, source), alive[stage], stage == num_stages - 1)
        for stage, (start, stop) in enumerate(itertools.pairwise(bounds))
    ]


def budget_of(stage: StageCosts, share: float) -> int:
    least, most = peak_bytes(stage, smallest_peak(stage)), peak_bytes(stage, [0] * stage.num_units)
    return least + int(share * (most - least))


def time_of_all(stages: Sequence[StageCosts]) -> tuple[float, float]:
    """Seconds for all stages at the slowest budget, and the slowest single stage."""
    totals, slowest = [], 0.0
    for share in SHARES:
        total = 0.0
        for stage in stages:
            budget = budget_of(stage, share)
            start = time.process_time()
            choices = solve(stage, budget)
            seconds = time.process_time() - start
            assert peak_bytes(stage, choices) <= budget
            assert extra_seconds(stage, choices) >= 0
            total, slowest = total + seconds, max(slowest, seconds)
        totals.append(total)
    return max(totals), slowest


def main() -> None:
    table = Table("stages", "layers", "kind", "all stages, s", "slowest stage, s", title="Planner, 8 options a layer")
    figures: dict[str, float] = {}
    for num_stages in (16, 64, 4, 1):
        name = f"seconds_{NUM_LAYERS}x{num_stages}"
        for kind in KINDS:
            total, slowest = time_of_all(pipeline(kind, num_stages))
            table.add_row(str(num_stages), str(NUM_LAYERS), kind, f"{total:.3f}", f"{slowest:.3f}")
            figures[name] = round(max(figures.get(name, 0.0), total), 3)
            figures[f"{name}_{kind.replace(', ', '_').replace(' ', '_')}"] = round(total, 3)
    notes = [
        f"1F1B, {NUM_MICROBATCHES} microbatches. CPU seconds of this process, the slowest of budgets at "
        f"{', '.join(f'{share:.0%}' for share in SHARES)} of the way from the smallest peak to keeping everything.",
    ]
    report("planner", [table], figures, notes)


if __name__ == "__main__":
    main()
