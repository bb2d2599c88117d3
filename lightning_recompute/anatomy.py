"""A block taken apart: which of its modules are attention, feed-forward, mixture of experts, norm or activation.

A part is recognised by what it holds: projections to query, key and value; linears that widen and narrow again; a
router beside experts. Class and attribute names, of which the field has many, decide where structure does not.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from lightning_recompute.kinds import (
    ALL_ROLES,
    class_name,
    is_activation,
    is_container,
    is_core,
    is_matrix,
    is_norm,
    linear_sizes,
    roles_in,
)

_WRAPPER = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)(?:\.|$)")
_ATTENTION = re.compile(r"attention|attn", re.IGNORECASE)
_FEED_FORWARD = re.compile(
    r"(?i:mlp|ffn|feed_?for?ward|ffwd|gated_?linear_?unit|dense\w+dense)|(?<![a-zA-Z])ff(?![a-z])|FF(?![a-z])"
)
# beside an attention or feed-forward, and named after it
_NEITHER = re.compile(r"hyper_?connection", re.IGNORECASE)
_FLAT = re.compile(r"^(?:c_fc|(?:fc|lin|linear|ffn)_?[12]|ffn|ffn_output|(?:up|down|gate_up)_proj)$")
_MIXTURE = re.compile(r"(?:MoE|Moe|MOE)(?:Block|Layer|MLP|FFN)?$|MixtureOfExperts")
_EXPERT = re.compile(r"expert", re.IGNORECASE)
_ROUTER = re.compile(r"router|gating|(?:^|_)gate(?:s|_net|_network|_linear|_weight)?$|^wg$|gate$", re.IGNORECASE)


@dataclass(frozen=True)
class FeedForward:
    """A dense feed-forward: one module, one method of a module, or modules called one right after the other.

    Args:
        names: Dotted names in the block.
        method: What runs it.
    """

    names: tuple[str, ...]
    method: str = "forward"


class Anatomy:
    """The modules of a block by name, and which of them are what.

    Names are dotted paths in the block, "" for the block itself. A module that stands in the block several times is
    seen once, under its first name. Quadratic at worst in the number of modules; nothing is run.

    Args:
        block: The block.
    """

    def __init__(self, block: nn.Module) -> None:
        # what torch.nn.utils.parametrize keeps beside a weight has names like _SpectralNorm, but is no layer
        self.modules = {name: m for name, m in block.named_modules() if "parametrizations" not in name.split(".")}
        self._children: dict[str, list[str]] = {name: [] for name in self.modules}
        self._linears: dict[str, tuple[int, int]] = {}
        self._own_matrices = dict.fromkeys(self.modules, 0)
        self._matrices = dict.fromkeys(self.modules, 0)  # weight matrices at or below
        for name, module in self.modules.items():
            if name:
                self._children[name.rpartition(".")[0]].append(name)
            if self._is_in_linear(name):
                continue
            if (sizes := linear_sizes(module)) is not None:
                self._linears[name] = sizes
                self._own_matrices[name] = 1
            elif isinstance(module, nn.modules.conv._ConvNd):  # its weight may be parametrised
                self._own_matrices[name] = 1
            elif not is_norm(module):
                self._own_matrices[name] = sum(map(is_matrix, module.parameters(recurse=False)))
            for outer in _upwards(name):
                self._matrices[outer] += self._own_matrices[name]
        self.attentions = self._find_attentions("")
        """Outermost attention modules, with the wrappers that are named after them."""
        self.mixtures = self._find_mixtures("")
        """Mixtures of experts."""
        self.feed_forwards: list[FeedForward] = []
        """Dense feed-forwards."""
        self.obstacles: list[str] = []
        """Why a feed-forward that the block's own forward writes out is none of them."""
        self._find_feed_forwards("")

    def _is_in_linear(self, name: str) -> bool:
        return any(outer in self._linears for outer in _upwards(name))

    def _is_activation(self, name: str) -> bool:
        return is_activation(self.modules[name]) and not self._is_in_linear(name)

    @property
    def norms(self) -> list[str]:
        """Leaf normalisation modules."""
        return _outermost(name for name, module in self.modules.items() if is_norm(module))

    @property
    def activations(self) -> list[str]:
        """Outermost modules that are activations: no matrices, and a class of torch.nn's or with such a name."""
        return _outermost(filter(self._is_activation, self.modules))

    @property
    def activation_sites(self) -> list[str]:
        """Modules in which activations run, be they modules or functions; the block itself if it may call them."""
        parts = [name for feed_forward in self.feed_forwards for name in self.parts(feed_forward)]
        flat = self._flat_parts("")
        sites = [*self.activations, *parts, *self.mixtures, *(flat if len(flat) > 1 else [])]
        return sites or ([""] if self._matrices[""] > sum(map(self._num_known, self.attentions)) else [])

    def _num_known(self, attention: str) -> int:
        """How many matrices are an attention's; of a block that is one itself those for q, k, v and the output."""
        children = [child for child in self._children[attention] if roles_in(key_of(child))]
        return self._matrices[attention] if attention else 1 + sum(self._matrices[child] for child in children)

    def parts(self, feed_forward: FeedForward) -> Sequence[str]:
        """The outermost modules that run in a feed-forward."""
        if feed_forward.method == "forward":
            return feed_forward.names
        flat = self._flat_parts(feed_forward.names[0])
        return [*flat, *self._between(feed_forward.names[0], flat)]

    def callables(self, name: str) -> list[str]:
        """The module itself; for a container, which is never called, its outermost members that are."""
        if not is_container(self.modules[name]):
            return [name]
        return [found for child in self._children[name] for found in self.callables(child)]

    def smallest(self, name: str) -> str:
        """The smallest module with all matrices of `name`, or one around it that adds no parameter."""
        path = [name]
        while not self._own_matrices[path[-1]]:
            holders = [child for child in self._children[path[-1]] if self._matrices[child]]
            if len(holders) != 1 or holders[0] in self._linears:
                break
            path += holders
        while len(path) > 1:
            inner, outer = self.modules[path[-1]], self.modules[path[-2]]
            if not is_container(inner) and len([*inner.parameters()]) < len([*outer.parameters()]):
                break
            path.pop()
        return path[-1]

    # attention

    def _roles(self, name: str) -> set[str]:
        """Which of q, k and v a module's own projections make."""
        keys = [key_of(child) for child in self._children[name] if self._matrices[child]]
        keys += [key for key, parameter in self.modules[name].named_parameters(recurse=False) if is_matrix(parameter)]
        return {role for key in keys for role in roles_in(key)}

    def _is_attention(self, name: str) -> bool:
        module, key, kind = self.modules[name], key_of(name), class_name(self.modules[name])
        if isinstance(module, nn.MultiheadAttention):
            return True
        if is_container(module) or self._is_in_linear(name) or _NEITHER.search(f"{key} {kind}"):
            return False
        by_class = _ATTENTION.search(kind) and self._matrices[name]
        # `post_attention_ffn` and `post_attention_norm` are none
        by_key = _ATTENTION.search(key) and self._matrices[name] > 1
        other = _FEED_FORWARD.search(f"{key} {kind}") or "norm" in key
        return bool(by_class or (by_key and not other)) or self._roles(name) == ALL_ROLES

    def _find_attentions(self, name: str) -> list[str]:
        inner = [found for child in self._children[name] for found in self._find_attentions(child)]
        if not self._is_attention(name):
            return inner
        # one that holds a feed-forward as well is a whole block (CLIP's ResidualAttentionBlock)
        beside = [part for part in self.modules if part != name and is_within(part, name) and not is_among(part, inner)]
        is_block = any(child in self._linears and _FLAT.search(key_of(child)) for child in self._children[name])
        for part in beside:
            named, widens = self._is_named_feed_forward(part), self._widens_and_narrows(part)
            # without an attention of its own it may hold a small MLP for position biases
            is_block |= (named or widens or self._is_mixture(part)) if inner else (named and widens)
        return inner if is_block else [name]

    def cores(self) -> tuple[list[str], list[str]]:
        """Core attention: modules that are it, and modules whose own forward calls it as functions."""
        modules = _outermost(name for name, module in self.modules.items() if is_core(module))
        own = [
            name
            for name, module in self.modules.items()
            if isinstance(module, nn.MultiheadAttention)
            or (self._roles(name) == ALL_ROLES and not roles_in(key_of(name)))  # not what only projects
        ]
        for outer in self.attentions:
            if not any(is_within(name, outer) for name in own):  # q, k and v under names of their own
                own += [
                    name
                    for name, module in self.modules.items()
                    if is_within(name, outer) and self._matrices[name] > 1 and _ATTENTION.search(class_name(module))
                ]
        # the innermost, and none around a core that is a module
        return modules, [n for n in own if not any(is_within(part, n) and part != n for part in [*own, *modules])]

    # mixtures of experts

    def _experts(self, name: str) -> list[str]:
        return [
            child
            for child in self._children[name]
            if self._matrices[child]
            and "gate" not in key_of(child)
            and _EXPERT.search(f"{key_of(child)} {class_name(self.modules[child])}")
        ]

    def _is_mixture(self, name: str) -> bool:
        module = self.modules[name]
        own = {key: parameter.ndim for key, parameter in module.named_parameters(recurse=False)}
        names = [*(key for key in own if own[key] == 2), *map(key_of, self._children[name])]
        names += [class_name(self.modules[child]) for child in self._children[name]]
        has_router = any(map(_ROUTER.search, names)) or _MIXTURE.search(class_name(module))
        return bool(has_router) and (bool(self._experts(name)) or 3 in own.values())

    def _find_mixtures(self, name: str) -> list[str]:
        if name in self.attentions:
            return []
        if not self._is_mixture(name):
            return [found for child in self._children[name] for found in self._find_mixtures(child)]
        if any(is_within(attention, name) for attention in self.attentions):  # router and experts lie in the block
            return [found for expert in self._experts(name) for found in self.callables(expert)]
        return [name]

    # dense feed-forwards

    def _is_named_feed_forward(self, name: str) -> bool:
        words = f"{key_of(name)} {class_name(self.modules[name])}"
        return self._matrices[name] > 1 and bool(_FEED_FORWARD.search(words)) and not _NEITHER.search(words)

    def _widens_and_narrows(self, name: str) -> bool:
        """Whether all matrices are linears, of which one goes from d to f or 2f (gated), and one back.

        f is more than d; in a Sequential, which can only be a chain, it may be the same.
        """
        sizes = [self._linears[part] for part in self._linears if is_within(part, name)]
        least = 0 if isinstance(self.modules[name], nn.Sequential) else 1
        return len(sizes) == self._matrices[name] and any(
            first[0] == last[1] <= last[0] - least and first[1] in (last[0], 2 * last[0])
            for first, last in itertools.combinations(sizes, 2)
        )

    def _find_feed_forwards(self, name: str) -> None:
        module, taken = self.modules[name], [*self.attentions, *self.mixtures]
        if is_among(name, taken):
            return
        alone = not any(is_within(part, name) for part in taken)
        if name and alone and not is_container(module) and self._is_named_feed_forward(name):
            self.feed_forwards.append(FeedForward((self.smallest(name),)))
            return
        num_before = len(self.feed_forwards)
        for child in self._children[name]:
            self._find_feed_forwards(child)
        if len(self.feed_forwards) > num_before:
            return
        known = name or self._is_named_feed_forward(name) or isinstance(module, nn.Sequential)
        if not alone or not known or is_container(module):
            self._find_flat_feed_forward(name)
        elif self._widens_and_narrows(name):
            self.feed_forwards.append(FeedForward((self.smallest(name),)))

    def _find_flat_feed_forward(self, name: str) -> None:
        """Feed-forwards written out in the module's own forward: torch's `_ff_block`, or chains of modules."""
        flat = self._flat_parts(name)
        if len(flat) == 2 and callable(getattr(type(self.modules[name]), "_ff_block", None)):
            self.feed_forwards.append(FeedForward((name,), "_ff_block"))
            return
        pairs: list[tuple[str, str]] = []
        for first, last in itertools.pairwise(flat):
            (d, f), back = self._sizes(first), self._sizes(last)
            widens = d < f or (d == f and _FLAT.search(key_of(first)))
            if widens and back == (f, d) and not any(first in pair for pair in pairs):
                pairs.append((first, last))
        for pair in pairs:
            between = self._between(name, pair)
            if obstacle := self._obstacle(name, pair, between, len(pairs)):
                self.obstacles.append(f"{' and '.join(pair)} are no unit: the forward around them {obstacle}")
            else:
                self.feed_forwards.append(FeedForward((pair[0], *between, pair[1])))

    def _flat_parts(self, name: str) -> list[str]:
        """Children with one linear and no other matrix each that are part of no attention or mixture."""
        taken = [*self.attentions, *self.mixtures]
        flat = [child for child in self._children[name] if self._matrices[child] == 1 and not is_among(child, taken)]
        return [child for child in flat if any(is_within(linear, child) for linear in self._linears)]

    def _sizes(self, part: str) -> tuple[int, int]:
        return next(sizes for linear, sizes in self._linears.items() if is_within(linear, part))

    def _between(self, name: str, flat: Sequence[str]) -> list[str]:
        """The activation and the dropouts that run between two flat parts of a module."""
        if flat[0] not in self._linears:  # BERT's `intermediate` has its activation inside
            return []
        children = self._children[name]
        dropouts = children[children.index(flat[0]) : children.index(flat[1])]
        return [
            *(child for child in children if self._is_activation(child)),
            *(child for child in dropouts if isinstance(self.modules[child], nn.Dropout)),
        ]

    def _obstacle(self, name: str, flat: Sequence[str], between: Sequence[str], num_pairs: int) -> str:
        children = self._children[name]
        others = [c for c in children[children.index(flat[0]) + 1 : children.index(flat[1])] if c not in between]
        rate = getattr(self.modules[name], "activation_dropout", 0.0)
        if others:
            return f"may call {', '.join(others)} between them"
        if isinstance(rate, float) and rate > 0:
            return f"calls a dropout function between them (activation_dropout={rate})"
        if flat[0] in self._linears and (num_pairs > 1 or sum(map(self._is_activation, between)) != 1):
            return "calls an activation between them that is no module of their own"
        return ""


# --- names


def is_within(name: str, outer: str) -> bool:
    """Whether a name is another or lies below it."""
    return not outer or name == outer or name.startswith(f"{outer}.")


def is_among(name: str, outers: Iterable[str]) -> bool:
    """Whether a name is one of others or lies below one."""
    return any(is_within(name, outer) for outer in outers)


def _outermost(names: Iterable[str]) -> list[str]:
    """Those names, given outer ones first, that lie below no other."""
    found: list[str] = []
    for name in names:
        if not is_among(name, found):
            found.append(name)
    return found


def plain_name(name: str) -> str:
    """A name without what torch.compile and other wrappers put into it."""
    return _WRAPPER.sub("", name).rstrip(".")


def key_of(name: str) -> str:
    """The last part of a name."""
    return plain_name(name).rpartition(".")[2]


def _upwards(name: str) -> Iterator[str]:
    """The name and those of all modules around it, the block's own last."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield name
