"""Stages for the tests of costs and planner: random ones, realistic ones, and all their choices one by one."""

from __future__ import annotations

import random
from collections.abc import Iterator

from hypothesis import strategies as st

from lightning_recompute.cost import Option, StageCosts, extra_seconds, peak_bytes

Choices = tuple[int | None, ...]


def all_choices(stage: StageCosts, unit: int = 0) -> Iterator[Choices]:
    """Every way through a stage."""
    if unit == stage.num_units:
        yield ()
        return
    for index, option in enumerate(stage.options[unit]):
        for rest in all_choices(stage, unit + option.num_units):
            yield (index, *[None] * (option.num_units - 1), *rest)


def all_points(stage: StageCosts) -> list[tuple[int, float]]:
    """Peak and seconds of every way through a stage."""
    return [(peak_bytes(stage, choices), extra_seconds(stage, choices)) for choices in all_choices(stage)]


@st.composite
def stages(draw: st.DrawFn, max_units: int = 4, max_options: int = 3) -> StageCosts:
    """Small stages with groups, up to 4 microbatches in flight, and rows that vary with the position."""
    num_units = draw(st.integers(1, max_units))
    # few distinct bytes make ties, many make none
    sizes = st.integers(0, draw(st.sampled_from([3, 50, 10**10])))
    # eighths add up without rounding, so that ties are ties
    seconds = st.integers(-1, 40).map(lambda eighths: eighths / 8)

    def option(left: int) -> st.SearchStrategy[Option]:
        return st.builds(Option, sizes, seconds, sizes, sizes, st.integers(1, min(3, left)))

    per_unit = st.one_of(sizes, st.tuples(*[sizes] * num_units))
    return StageCosts(
        options=tuple(
            tuple(draw(st.lists(option(num_units - unit), min_size=1, max_size=max_options)))
            for unit in range(num_units)
        ),
        static_bytes=draw(sizes),
        head_bytes=draw(sizes),
        gradient_bytes=draw(per_unit),
        entry_bytes=draw(per_unit),
        floor_bytes=draw(sizes),
        in_flight=draw(st.integers(1, 4)),
    )


# held, extra seconds, transient: a transformer layer from keep to full, in units of its input
LAYER = ((114, 0.0, 6), (34, 0.035, 86), (26, 0.12, 94), (22, 0.16, 98), (15, 0.5, 105), (3, 0.97, 117), (2, 1.0, 118))
INPUT_BYTES = 1_000_003


def layers(num_units: int, *, in_flight: int = 1, spread: float = 0.0, gradient_units: int = 3) -> StageCosts:
    """A stage of transformer layers whose gradients pile up in backward, alike or up to `spread` larger."""
    source = random.Random(0)
    factors = [1 + spread * source.random() for _ in range(num_units)]
    return StageCosts(
        options=tuple(
            tuple(
                Option(
                    held_bytes=int(held * INPUT_BYTES * factor),
                    extra_seconds=seconds * (1 + spread * source.random()),
                    transient_bytes=int(transient * INPUT_BYTES * factor),
                    forward_bytes=int((held + 8) * INPUT_BYTES * factor),
                )
                for held, seconds, transient in LAYER
            )
            for factor in factors
        ),
        static_bytes=500 * INPUT_BYTES,
        head_bytes=60 * INPUT_BYTES,
        gradient_bytes=tuple(gradient_units * INPUT_BYTES * (num_units - unit) for unit in range(num_units)),
        entry_bytes=2 * INPUT_BYTES,
        in_flight=in_flight,
    )


def between(stage: StageCosts, lean: Choices, share: float) -> int:
    """A budget on the way from the peak of some choices to that of keeping everything."""
    least, most = peak_bytes(stage, lean), peak_bytes(stage, [0] * stage.num_units)
    return least + int(share * (most - least))
