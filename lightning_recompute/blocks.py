"""Finding a model's blocks: the repeated modules that hold most of its parameters."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from lightning_recompute.policy import nearest

SHARE_OF_LARGEST = 0.1
"""A further list of another class counts when it holds at least this part of the largest list's parameters."""


@dataclass(frozen=True)
class BlockList:
    """Blocks that run one after the other.

    Args:
        name: Dotted path of the list in the model ("" when the list is the model itself).
        blocks: The modules, in forward order.
        names: The dotted path of each.
    """

    name: str
    blocks: tuple[nn.Module, ...]
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.blocks)

    def __str__(self) -> str:
        return f"{self.name or 'the model itself'} ({len(self)} x {class_of(self.blocks[0]).__name__})"


def find_blocks(module: nn.Module, blocks: str | Sequence[str] | None = None) -> list[BlockList]:
    """Find the block lists of a model.

    A list is a `ModuleList`, a `Sequential` or a `ModuleDict` with numbers as keys, whose members share a
    class. Without `blocks` the list with the most parameters is taken, and beside it every other list whose
    members have the same class or that holds at least a tenth as many parameters (encoder and decoder, the
    stages of a ResNet). A list inside the blocks of another is not taken, unless those outer members are only
    towers or stages around the real blocks: then the inner lists are.

    Args:
        module: The model, e.g. a LightningModule.
        blocks: Dotted paths of block lists, or class names of blocks. None: found.

    Returns:
        One entry for each list, in the order in which the model registers them.

    Raises:
        ValueError: There are no blocks, two lists share some blocks, or a name in `blocks` is unknown or
            ambiguous. The message lists what was found and the argument to set.
        TypeError: `blocks` is no string or sequence of strings.
    """
    if blocks is not None:
        return _named_blocks(module, blocks)
    found = list(_candidates(module))
    lists = [candidate for candidate in found if len(candidate) > 1] or found
    if not lists:
        raise ValueError(
            f"{type(module).__name__} has no list of blocks: no ModuleList, Sequential or numbered ModuleDict whose "
            "members share a class. Name the blocks: blocks='path.of.the.list' or blocks='ClassName'. "
            f"Children found: {', '.join(f'{n} ({type(m).__name__})' for n, m in module.named_children()) or 'none'}"
        )
    sizes = {candidate.name: _num_parameters(candidate.blocks) for candidate in lists}
    main = max(lists, key=lambda candidate: sizes[candidate.name])
    taken = [
        candidate
        for candidate in lists
        if class_of(candidate.blocks[0]) is class_of(main.blocks[0])
        or sizes[candidate.name] >= SHARE_OF_LARGEST * sizes[main.name]
    ]
    _refuse_shared_blocks(taken, "in which order they run cannot be told; name one: blocks='path.of.the.list'")
    return taken


def class_of(block: nn.Module) -> type[nn.Module]:
    """The class of a block, seen through torch.compile."""
    inner = getattr(block, "_orig_mod", block)
    return type(inner if isinstance(inner, nn.Module) else block)


def _members(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The members of a list-like module, repetitions too (`ModuleList([block] * 3)`); none for any other module."""
    numbered = isinstance(module, nn.ModuleDict) and all(key.isdecimal() for key in module)
    if not numbered and not isinstance(module, nn.ModuleList | nn.Sequential):
        return []
    return [(key, child) for key, child in module._modules.items() if child is not None]


def _candidates(module: nn.Module, name: str = "", seen: set[int] | None = None) -> Iterator[BlockList]:
    """Outermost lists whose members share a class, walking the model in registration order."""
    seen = set() if seen is None else seen
    if id(module) in seen:
        return
    seen.add(id(module))
    candidate = _as_list(module, name)
    if candidate is not None and not _are_towers(candidate):
        yield candidate
        return
    for key, child in module.named_children():
        yield from _candidates(child, f"{name}.{key}" if name else key, seen)


def _as_list(module: nn.Module, name: str) -> BlockList | None:
    members = _members(module)
    if not members or len({class_of(member) for _, member in members}) > 1:
        return None
    first = members[0][1]
    # single layers of torch.nn (a list of Linear heads, of embeddings) are no blocks, and containers have no forward
    is_layer = class_of(first).__module__.startswith("torch.nn.") and not any(first.children())
    is_container = isinstance(first, nn.ModuleList | nn.ModuleDict)
    if is_layer or is_container or not _num_parameters([member for _, member in members]):
        return None
    prefix = f"{name}." if name else ""
    return BlockList(name, tuple(m for _, m in members), tuple(prefix + key for key, _ in members))


def _are_towers(outer: BlockList) -> bool:
    """Whether the members only hold lists of the real blocks (towers, stages of a Swin).

    The experts of a mixture are a list inside a block too, but have neither attention nor norms.
    """
    for member in outer.blocks:
        inner = [found for child in member.children() for found in _candidates(child)]
        held = sum(_num_parameters(found.blocks) for found in inner if _looks_like_block(found.blocks[0]))
        if held <= 0.5 * _num_parameters([member]):
            return False
    return True


def _looks_like_block(module: nn.Module) -> bool:
    return any("norm" in class_of(part).__name__.lower() for part in module.modules())


def _num_parameters(modules: Sequence[nn.Module]) -> int:
    return sum({id(p): p.numel() for module in modules for p in module.parameters()}.values())


def _named_blocks(module: nn.Module, blocks: str | Sequence[str]) -> list[BlockList]:
    wanted = [blocks] if isinstance(blocks, str) else list(blocks) if isinstance(blocks, Sequence) else blocks
    if not isinstance(wanted, list) or not all(isinstance(name, str) for name in wanted):
        raise TypeError(f"blocks={blocks!r}: a dotted path or class name, or a list of them, is due")
    if not wanted:
        raise ValueError("blocks=[] names no block list; leave it out to have the blocks found")
    found = [block_list for name in wanted for block_list in _by_name(module, name)]
    _refuse_shared_blocks(found, "name each block once")
    # as they stand in the model, so that indices follow the forward order whatever the order of the names
    order = {id(part): index for index, part in enumerate(module.modules())}
    return sorted(found, key=lambda block_list: order[id(block_list.blocks[0])])


def _by_name(module: nn.Module, name: str) -> list[BlockList]:
    modules = dict(module.named_modules())
    if name in modules:
        target = modules[name]
        members = _members(target)
        if isinstance(target, nn.ModuleDict) and not members:
            members = list(target.items())
        if not members:
            raise ValueError(
                f"blocks={name!r} is a {type(target).__name__} without members: the path of a ModuleList, "
                f"Sequential or ModuleDict is due{_hint(target, name)}"
            )
        return [BlockList(name, tuple(m for _, m in members), tuple(f"{name}.{key}" for key, _ in members))]
    of_class = [(path, part) for path, part in modules.items() if path and _has_class_name(part, name)]
    if not of_class:
        known = [path for path, part in modules.items() if path and _members(part)]
        known += sorted({class_of(part).__name__ for part in modules.values() if any(part.children())})
        raise ValueError(f"blocks={name!r} is neither a path nor a class in the model; {nearest(name, known)}")
    for path, _ in of_class:
        for other, _ in of_class:
            if other.startswith(f"{path}."):
                raise ValueError(f"blocks={name!r}: {other} lies inside {path}; name the list by its dotted path")
    groups: dict[str, list[tuple[str, nn.Module]]] = {}
    for path, part in of_class:
        groups.setdefault(path.rpartition(".")[0], []).append((path, part))
    return [
        BlockList(parent, tuple(part for _, part in group), tuple(path for path, _ in group))
        for parent, group in groups.items()
    ]


def _has_class_name(part: nn.Module, name: str) -> bool:
    return any(cls.__name__ == name for cls in inspect.getmro(class_of(part)) if issubclass(cls, nn.Module))


def _hint(target: nn.Module, name: str) -> str:
    lists = [f"{name}.{path}" for path, part in target.named_modules() if path and _members(part)]
    return f"; below it: {', '.join(lists[:5])}" if lists else ""


def _refuse_shared_blocks(lists: Sequence[BlockList], cure: str) -> None:
    for index, one in enumerate(lists):
        for other in lists[index + 1 :]:
            shared = {id(block) for block in one.blocks} & {id(block) for block in other.blocks}
            if shared:
                raise ValueError(f"the block lists {one} and {other} share {len(shared)} block(s): {cure}")
