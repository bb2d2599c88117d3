"""Which parts of a block answer to which label of selective recompute.

The labels follow Megatron-LM's `--recompute-modules` (core_attn, mlp, moe; layernorm and moe_act are `norm` and `act`
here), with `attn` beside them; `anatomy.py` finds the parts by structure. `attn` and `mlp` are the smallest module
with all matrices of the part: T5's `SelfAttention` without the norm and the residual around it, but the whole
`attention` of BERT, whose output projection is a module of its own.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from lightning_recompute.anatomy import Anatomy, FeedForward, is_among, plain_name
from lightning_recompute.kinds import class_name, is_container, is_one_node, keeps_its_output
from lightning_recompute.policy import LABELS, is_pattern, nearest

How = Literal["unit", "output", "tape", "nodes"]


@dataclass(frozen=True)
class Target:
    """One part of a block that a label or pattern names.

    Args:
        label: The label, or the pattern as it was given.
        names: Dotted names in the block ("" is the block itself); several are modules called one right after the
            other that form one unit (BERT's `intermediate` and `output`).
        attribute: The method that runs the part.
        how: `unit`: the inside is recomputed. `output`: the output too, which the next module would save. `tape`: of
            the module's own forward only the function calls from the scores to the weighted values. `nodes`: the
            single-op activations and gated products that the graph of the block is found to have.
    """

    label: str
    names: tuple[str, ...]
    attribute: str = "forward"
    how: How = "unit"

    def __str__(self) -> str:
        if self.how == "nodes":
            return "activation functions and gated products"
        what = " + ".join(name or "the block itself" for name in self.names)
        if self.how == "tape":
            return f"{what} (the functions it calls)"
        return what if self.attribute == "forward" else f"{self.attribute} of {what}"


def find_targets(block: nn.Module, modules: Sequence[str], prefix: str = "") -> tuple[list[Target], list[str]]:
    """The parts of one block that labels and name patterns name.

    Args:
        block: The block.
        modules: Labels and patterns. A pattern (as in `fnmatch`: `*` spans dots) is compared with names in the block
            (`mlp.experts`) and in the model (`model.layers.0.mlp.experts`); the outermost matches are taken, never
            the block itself.
        prefix: Name of the block in the model.

    Returns:
        The targets, none of which lies in a unit of another, and notes: one for each kind of target left out because
        another contains it, and one for each thing that a word could not reach. That a word matches nothing is not
        told here, since other blocks may have it: see `unknown_label_message`.

    Raises:
        ValueError: A word is neither label nor pattern.
    """
    anatomy = Anatomy(block)
    found: list[Target] = []
    notes: list[str] = []
    for word in modules:
        if word in LABELS:
            targets, remarks = _labelled(anatomy, word)
        elif is_pattern(word):
            targets, remarks = _matching(anatomy, word, prefix.rstrip("."))
        else:
            raise ValueError(f"modules: unknown label {word!r}; {nearest(word, LABELS)}")
        found += targets
        notes += remarks
    kept, dropped = _outermost(anatomy, found)
    for (inner, outer), targets in dropped.items():
        is_part = len(targets) < sum(target.label == inner for target in found)
        which = f" ({', '.join(map(str, targets))})" if is_part else ""
        notes.append(f"{inner}{which} lies inside {outer}: recomputed with it")
    return kept, notes


def available_labels(block: nn.Module) -> dict[str, list[Target]]:
    """Every label that a block has, with its targets.

    Args:
        block: The block.

    Returns:
        Label to targets in the order of `LABELS`, without the labels that nothing answers to. Targets of different
        labels may contain each other.
    """
    anatomy = Anatomy(block)
    return {label: targets for label in LABELS if (targets := _labelled(anatomy, label)[0])}


def unknown_label_message(modules: Sequence[str], blocks: Mapping[str, nn.Module]) -> str:
    """What to tell the user whose labels or patterns match nothing in any block.

    Args:
        modules: The words that match nothing.
        blocks: Name in the model to block, for all blocks that were searched.

    Returns:
        The words and why, the names nearest to a pattern, and what the blocks have under each label.
    """
    anatomies = {name: Anatomy(block) for name, block in blocks.items()}
    classes = ", ".join(sorted({class_name(block) for block in blocks.values()}))
    lines = [f"modules: nothing in the {len(blocks)} block(s) ({classes}) answers to {', '.join(map(repr, modules))}"]
    for word in modules:
        reached = [
            _labelled(anatomy, word) if word in LABELS else _matching(anatomy, word, prefix)
            for prefix, anatomy in anatomies.items()
        ]
        lines += dict.fromkeys(remark for _, remarks in reached for remark in remarks)
        if word not in LABELS:
            lines.append(_nearest_names(word, anatomies))
    lines.append("these blocks have:")
    for label in LABELS:
        targets = [str(target) for anatomy in anatomies.values() for target in _labelled(anatomy, label)[0]]
        lines.append(f"  {label}: {_listed(targets) or 'nothing'}")
    return "\n".join(lines)


def _nearest_names(pattern: str, anatomies: Mapping[str, Anatomy]) -> str:
    if whole := [name for name in anatomies if name and fnmatch.fnmatchcase(name, pattern)]:
        return f"{pattern!r} names whole blocks ({_listed(whole)}): granularity='full' recomputes those"
    names = {}
    for prefix, anatomy in anatomies.items():
        for name in filter(None, map(plain_name, anatomy.modules)):
            names[name] = names[f"{prefix}.{name}"] = name
    close = difflib.get_close_matches(pattern.strip("*?."), names, n=6, cutoff=0.5)
    return f"names nearest to {pattern!r}: {_listed(names[name] for name in close) or _listed(names.values())}"


def _listed(names: Iterable[str], most: int = 6) -> str:
    """Names without repetition, at most six of them."""
    found = list(dict.fromkeys(names))
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return ", ".join(found[:most]) + more


def _labelled(anatomy: Anatomy, label: str) -> tuple[list[Target], list[str]]:
    """The targets of a label in the order of their names, and what the label cannot reach."""
    if label == "core_attn":
        modules, callers = anatomy.cores()
        order = list(anatomy.modules)
        found = [Target(label, (name,)) for name in modules]
        found += [Target(label, (name,), how="tape") for name in callers]
        return sorted(found, key=lambda target: order.index(target.names[0])), []
    if label == "attn":
        # wrappers that share one attention between them lead to the same module
        return [Target(label, (name,)) for name in dict.fromkeys(map(anatomy.smallest, anatomy.attentions))], []
    if label == "mlp":
        return [Target(label, part.names, part.method) for part in anatomy.feed_forwards], [
            f"mlp: {obstacle}; 'act' frees the activation, granularity='full' all of it"
            for obstacle in anatomy.obstacles
        ]
    if label == "norm":
        return [Target(label, (name,), how="output") for name in anatomy.norms], []
    if label == "moe":
        return [Target(label, (name,)) for name in anatomy.mixtures], []
    assert label == "act", label
    freed, remarks = [], []
    for name in anatomy.activations:
        activation = anatomy.modules[name]
        if keeps_its_output(activation):
            continue
        if getattr(activation, "inplace", False):
            kind = class_name(activation)
            remarks.append(f"act: {name} ({kind}) works in place, so its output cannot be freed; set inplace=False")
        elif not is_one_node(activation):
            freed.append(Target(label, (name,), how="output"))
    nodes = [Target(label, ("",), how="nodes")] if anatomy.activation_sites else []
    return freed + nodes, remarks


def _matching(anatomy: Anatomy, pattern: str, prefix: str) -> tuple[list[Target], list[str]]:
    """The outermost modules whose names match a pattern, and what they cannot be."""
    # a pattern that matches the block's own name matches every name below it: that says nothing about the parts
    in_model = prefix and not fnmatch.fnmatchcase(prefix, pattern)
    found: list[str] = []
    containers: list[str] = []
    remarks: list[str] = []
    for name, module in anatomy.modules.items():
        plain = plain_name(name)
        fits = fnmatch.fnmatchcase(plain, pattern) or (in_model and fnmatch.fnmatchcase(f"{prefix}.{plain}", pattern))
        if not plain or not fits or is_among(name, [*found, *containers]):
            continue
        if isinstance(anatomy.modules[name.rpartition(".")[0]], nn.MultiheadAttention):
            remarks.append(
                f"{pattern}: {plain} is never called, nn.MultiheadAttention reads its weights; name the whole"
            )
        elif is_container(module):
            members = anatomy.callables(name)
            remarks.append(f"{pattern}: {plain} only holds modules; its {len(members)} members are taken one by one")
            found += members
            containers.append(name)
        else:
            found.append(name)
    return [Target(pattern, (name,)) for name in found], remarks


def _outermost(anatomy: Anatomy, targets: Sequence[Target]) -> tuple[list[Target], dict[tuple[str, str], list[Target]]]:
    """The targets that no unit among them contains, and the others by (their label, the container's)."""

    def parts(target: Target) -> Sequence[str]:
        if target.how == "nodes":
            return anatomy.activation_sites
        return anatomy.parts(FeedForward(target.names, target.attribute))

    # the output of a module with its inside is more than the inside alone
    order = sorted(range(len(targets)), key=lambda index: targets[index].how != "output")
    whole = [index for index in order if targets[index].how in ("unit", "output")]
    units = [index for index in whole if targets[index].how == "unit"]
    in_units = [name for index in units for name in parts(targets[index])]
    kept: list[Target] = []
    dropped: dict[tuple[str, str], list[Target]] = {}
    for index, target in enumerate(targets):
        own = parts(target)
        if target.how == "nodes":  # several units together may hold all activations
            inside = _all_among(own, in_units)
            containers = [other for other in units if inside and is_among(own[0], parts(targets[other]))]
        else:
            containers = [other for other in whole if other != index and _all_among(own, parts(targets[other]))]
        if index in whole:  # of two that contain each other the first in order stays
            later = whole[whole.index(index) :]
            containers = [o for o in containers if o not in later or not _all_among(parts(targets[o]), own)]
        if containers:
            dropped.setdefault((target.label, targets[containers[0]].label), []).append(target)
        else:
            kept.append(target)
    return kept, dropped


def _all_among(names: Sequence[str], outers: Sequence[str]) -> bool:
    return all(is_among(name, outers) for name in names)
