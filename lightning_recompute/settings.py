"""Megatron's settings by name, as the commands take and print them, and the rule of thumb that chooses among them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lightning_recompute.policy import RecomputePolicy

NONE = RecomputePolicy(granularity=None)
FORMS = "'none', 'selective core_attn', 'selective norm+act', 'full uniform 1', 'full block 4'"
"""How settings are written."""


def setting(name: str) -> RecomputePolicy:
    """The setting of a name.

    Args:
        name: `none`; `selective` and labels or patterns joined by +; `full uniform` or `full block` and num_layers.

    Raises:
        ValueError: There is no such setting.
    """
    match name.split():
        case ["none"]:
            return NONE
        case ["selective", modules]:
            return RecomputePolicy(granularity="selective", modules=modules.split("+"))
        case ["full", "uniform", number] if number.isdecimal():
            return RecomputePolicy(method="uniform", num_layers=int(number))
        case ["full", "block", number] if number.isdecimal():
            return RecomputePolicy(method="block", num_layers=int(number))
    raise ValueError(f"settings: found {name!r}; one of these forms is due: {FORMS}")


def settings(names: Iterable[str]) -> dict[str, RecomputePolicy]:
    """Settings by their names.

    Args:
        names: See `setting`.

    Raises:
        ValueError: One of them is none.
    """
    return {name: setting(name) for name in names}


def usual_settings(num_blocks: int) -> list[str]:
    """Names of the settings that practice knows: nothing, core attention, all blocks, a part of the blocks.

    Args:
        num_blocks: Blocks of the model's longest list.
    """
    parts = dict.fromkeys(num_blocks * quarters // 4 for quarters in (1, 2, 3))
    return ["none", "selective core_attn", "full uniform 1", *(f"full block {number}" for number in parts if number)]


@dataclass(frozen=True)
class Rule:
    """What practice recommends for a size of model.

    Args:
        sizes: For which number of parameters, in words.
        words: The recommendation.
        settings: The settings that it leaves to choose from, least recompute first.
    """

    sizes: str
    words: str
    settings: tuple[str, ...]


def rule_of_thumb(num_parameters: int, num_blocks: int) -> Rule:
    """What practice recommends, whatever the device.

    A habit, not a law: `plan` prints it beside what a model really needs.

    Args:
        num_parameters: Of the model.
        num_blocks: Blocks of its longest list.
    """
    if num_parameters < 10e9:
        return Rule("below 10 B", "selective, Megatron's --recompute-activations", ("selective core_attn",))
    if num_parameters < 100e9:
        blocks = tuple(f"full block {number}" for number in range(1, num_blocks + 1))
        return Rule("10 to 100 B", "full, block, as few blocks as fit", blocks)
    return Rule(
        "above 100 B",
        "full, uniform, 1, with saved activations distributed over tensor-parallel ranks",
        ("full uniform 1",),
    )
