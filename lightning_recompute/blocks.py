"""Finding a model's blocks: the repeated modules that hold most of its parameters."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

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
        return f"{self.name or 'the model itself'} ({_classes(self.blocks)})"


def find_blocks(module: nn.Module, blocks: str | Sequence[str] | None = None) -> list[BlockList]:
    """Find the block lists of a model.

    A list is a `ModuleList`, a `Sequential` or a `ModuleDict` with numbers as keys, whose members share a class;
    or a list of lists (attention and feed-forward of each layer), whose inner members then are the blocks. Without
    `blocks` the list with the most parameters is taken, and beside it every other list whose members have the same
    class or that holds at least a tenth as many parameters, of all or of those that are trained (encoder and
    decoder, the stages of a ResNet, a student beside its frozen teacher). A list inside the blocks of another is
    not taken, unless those outer members are only towers or stages around the real blocks: then the inner lists
    are. The experts of a mixture are never blocks.

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
    lists = list(_candidates(module))
    if not lists:
        raise ValueError(
            f"{class_of(module).__name__} has no list of blocks: no ModuleList, Sequential or numbered ModuleDict "
            "whose members share a class, have weights and a forward, and are more than single layers. Name the "
            f"blocks: blocks='path.of.the.list' or blocks='ClassName'. {_found(module)}"
        )
    taken = _largest(module, lists)
    _refuse_shared_blocks(taken, "in which order they run cannot be told; name one: blocks='path.of.the.list'")
    return taken


def class_of(block: nn.Module) -> type[nn.Module]:
    """The class of a block, seen through torch.compile, torch's CheckpointWrapper and FSDP2."""
    for wrapped in ("_orig_mod", "_checkpoint_wrapped_module"):
        inner = getattr(block, wrapped, None)
        if isinstance(inner, nn.Module):
            return class_of(inner)
    cls = type(block)
    # FSDP2 gives each block a class that it makes of its own and the block's
    return cls.__bases__[1] if cls.__bases__[0].__name__ == "FSDPModule" else cls


# ---- finding


def _largest(module: nn.Module, lists: Sequence[BlockList]) -> list[BlockList]:
    """The lists that hold a fair part of the parameters, and those of the same classes."""
    # a Sequential of one is a wrapper around something, a ModuleList of one is a list
    wrappers = {f.name for f in lists if len(f) == 1 and isinstance(module.get_submodule(f.name), nn.Sequential)}
    real = [found for found in lists if found.name not in wrappers] or lists
    sizes = [_num_parameters(found.blocks) for found in real]
    trained = [_num_parameters(found.blocks, trained=True) for found in real]
    large = [
        found
        for found, size, part in zip(real, sizes, trained, strict=True)
        if size >= SHARE_OF_LARGEST * max(sizes) or (part and part >= SHARE_OF_LARGEST * max(trained))
    ]
    # the first stages of a ResNet have few parameters and the largest activations
    classes = {class_of(found.blocks[0]) for found in large} - {nn.Sequential}
    return [found for found in lists if found in large or class_of(found.blocks[0]) in classes]


def _candidates(module: nn.Module, name: str = "", seen: set[int] | None = None) -> Iterator[BlockList]:
    """Outermost lists whose members share a class, walking the model in registration order."""
    seen = set() if seen is None else seen
    if id(module) in seen or name.endswith("experts"):
        return
    seen.add(id(module))
    candidate = _as_list(module, name)
    if candidate is not None and not _are_towers(candidate):
        yield candidate
        return
    for key, child in module.named_children():
        yield from _candidates(child, f"{name}.{key}" if name else key, seen)


def _members(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The members of a list-like module, repetitions too (`ModuleList([block] * 3)`); none for any other module."""
    numbered = isinstance(module, nn.ModuleDict) and all(key.isdecimal() for key in module)
    if isinstance(module, ParametrizationList) or not (numbered or isinstance(module, nn.ModuleList | nn.Sequential)):
        return []
    return _children(module)


def _children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(key, child) for key, child in module._modules.items() if child is not None]


def _as_list(module: nn.Module, name: str) -> BlockList | None:
    members = _members(module)
    if not members:
        return None
    if all(map(_is_container, (member for _, member in members))):
        inner = [_as_list(member, key) for key, member in members]
        if any(found and len(found) > 1 for found in inner) and all(found and _alike(found) for found in inner):
            return None  # each is a list of its own
        members = [(f"{key}.{sub}", part) for key, m in members for sub, part in _children(m) if _can_be_block(part)]
    elif len({class_of(member) for _, member in members}) > 1 or not _can_be_block(members[0][1]):
        return None
    if not _num_parameters([member for _, member in members]):
        return None
    return _list_of(name, members)


def _list_of(name: str, members: Sequence[tuple[str, nn.Module]]) -> BlockList:
    prefix = f"{name}." if name else ""
    return BlockList(name, tuple(m for _, m in members), tuple(prefix + key for key, _ in members))


def _is_container(module: nn.Module) -> bool:
    """Whether the module is never called itself: it has no forward (ModuleList, ModuleDict)."""
    return class_of(module).forward is nn.Module.forward and "forward" not in vars(module)


def _can_be_block(module: nn.Module) -> bool:
    # single layers of torch.nn (a list of Linear heads, of embeddings) are no blocks
    is_layer = class_of(module).__module__.startswith("torch.nn.") and not any(module.children())
    return not is_layer and not _is_container(module) and any(True for _ in module.parameters())


def _are_towers(outer: BlockList) -> bool:
    """Whether the members only hold lists of the real blocks (towers, stages of a Swin)."""
    num_inner = 0
    for member in outer.blocks:
        inner = [found for found in _candidates(member) if _are_blocks(found)]
        if _num_parameters([block for found in inner for block in found.blocks]) <= 0.5 * _num_parameters([member]):
            return False
        num_inner += sum(map(len, inner))
    return num_inner > len(outer)


def _are_blocks(inner: BlockList) -> bool:
    """Whether the members of a list inside something repeated are blocks themselves.

    Not so feed-forwards without norms (experts), a convolution with its norm (inside a residual block), attention
    and feed-forward in the same wrapper class.
    """
    has_norm = any("norm" in class_of(part).__name__.lower() for part in inner.blocks[0].modules())
    num_weights = sum(1 for p in inner.blocks[0].parameters() if is_lazy(p) or p.dim() > 1)
    return has_norm and num_weights > 1 and _alike(inner)


def _alike(found: BlockList) -> bool:
    """Whether the blocks have the same parameters; some may have more (the first of a ResNet's stage)."""
    names = [{name for name, _ in block.named_parameters()} for block in found.blocks]
    return min(names, key=len) == set.intersection(*names)


def _num_parameters(modules: Sequence[nn.Module], trained: bool = False) -> int:
    parameters = {id(p): p for module in modules for p in module.parameters() if p.requires_grad or not trained}
    return sum(1 if is_lazy(p) else p.numel() for p in parameters.values())


def _classes(modules: Sequence[nn.Module]) -> str:
    counts = Counter(class_of(module).__name__ for module in modules)
    return ", ".join(f"{count} x {name}" for name, count in counts.items())


def _found(module: nn.Module, limit: int = 8) -> str:
    parts = {name: part for name, part in module.named_modules() if _members(part)}
    found = [f"{name or 'the model itself'} ({_classes([m for _, m in _members(p)])})" for name, p in parts.items()]
    kind = "Lists"
    if not found:
        kind, found = "Children", [f"{name} ({class_of(child).__name__})" for name, child in module.named_children()]
    return f"{kind} found: {', '.join(found[:limit]) or 'none'}{', ...' if len(found) > limit else ''}"


# ---- by name


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
    return sorted(found, key=lambda block_list: order.get(id(block_list.blocks[0]), len(order)))


def _by_name(module: nn.Module, name: str) -> list[BlockList]:
    try:
        target = module.get_submodule(name)  # aliases and paths through torch.compile too
    except AttributeError:
        return _by_class(module, name)
    path = next((path for path, part in module.named_modules() if part is target), name)
    return _by_path(target, path, name)


def _by_path(target: nn.Module, path: str, name: str) -> list[BlockList]:
    members = _members(target) or (_children(target) if isinstance(target, nn.ModuleDict) else [])
    if not members:
        raise ValueError(
            f"blocks={name!r} is a single {class_of(target).__name__}: the path of a ModuleList, Sequential or "
            f"ModuleDict with members is due, or a class name. {_found(target)}"
        )
    if not any(_is_container(member) for _, member in members):
        return [_list_of(path, members)]
    if (as_list := _as_list(target, path)) is not None:
        return [as_list]
    if all(_is_container(member) for _, member in members):
        return [found for key, member in members for found in _by_path(member, f"{path}.{key}", name)]
    raise ValueError(
        f"blocks={name!r}: some members have no forward and are never called ({_classes([m for _, m in members])}); "
        "name the lists below it, or the class"
    )


def _by_class(module: nn.Module, name: str) -> list[BlockList]:
    modules = {path: part for path, part in module.named_modules() if not path.endswith("_orig_mod")}
    of_class = [(path, part) for path, part in modules.items() if path and _has_class_name(part, name)]
    if not of_class:
        known = [path for path, part in modules.items() if path and _members(part)]
        known += sorted(
            {
                class_of(part).__name__
                for path, part in modules.items()
                if path and any(part.children()) and not _is_container(part)
            }
        )
        raise ValueError(
            f"blocks={name!r} is neither a path nor a class in the model; "
            f"{nearest(name, known) if known else 'it has no lists'}"
        )
    if containers := [path for path, part in of_class if _is_container(part)]:
        raise ValueError(
            f"blocks={name!r}: {containers[0]} has no forward and is never called; name the class of its members, or "
            "the list by its dotted path"
        )
    for path, _ in of_class:
        for other, _ in of_class:
            if other.startswith(f"{path}."):
                raise ValueError(f"blocks={name!r}: {other} lies inside {path}; name the list by its dotted path")
    groups: dict[str, list[tuple[str, nn.Module]]] = {}
    for path, part in of_class:
        parent, _, key = path.rpartition(".")
        groups.setdefault(parent, []).append((key, part))
    return [_list_of(parent, group) for parent, group in groups.items()]


def _has_class_name(part: nn.Module, name: str) -> bool:
    return any(cls.__name__ == name for cls in inspect.getmro(class_of(part)) if issubclass(cls, nn.Module))


def _refuse_shared_blocks(lists: Sequence[BlockList], cure: str) -> None:
    for index, one in enumerate(lists):
        for other in lists[index + 1 :]:
            shared = {id(block) for block in one.blocks} & {id(block) for block in other.blocks}
            if shared:
                raise ValueError(f"the block lists {one} and {other} share {len(shared)} block(s): {cure}")
