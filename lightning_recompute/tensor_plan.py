"""Which module of a model is divided over tensor-parallel ranks, and how: found, read and checked before anything is.

A plan maps patterns of module names to styles. It comes from, in this order: the argument, the model's method
`tensor_parallel_plan`, or the plans that Hugging Face models carry.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from lightning_recompute.policy import nearest

logger = logging.getLogger(__name__)

STYLES: dict[str, str] = {
    "colwise": "a linear whose outputs are divided: each rank makes its own",
    "rowwise": "a linear whose inputs are divided: the ranks' outputs are summed",
    "colwise_gather_output": "a linear whose outputs are divided and put together again",
    "rowwise_split_input": "a linear that every rank gives its share of the whole input",
    "embedding_rowwise": "an embedding whose rows are divided",
    "embedding_rowwise_split": "the same; under sequence_parallel each rank gets its part of the sequence from here on",
    "colwise_vocabulary": "the head: a linear whose outputs stay divided, as a DTensor, for a loss that can use them",
    "replicate": "whole on every rank",
    "replicate_split_output": "whole on every rank; under sequence_parallel each takes its part of the output",
    "sequence_parallel": "whole on every rank; under sequence_parallel it works on the rank's part of the sequence",
    "replicated_with_grad_allreduce": "whole on every rank, works on the rank's own heads: gradients are summed",
    "mla_kv_a_proj": "whole on every rank; the rank's own heads read the rotary part of its outputs",
    "dropout": "draws for the rank's part of the sequence under sequence_parallel",
}
"""Every style with what it means."""
ALIASES = {"colwise_rep": "colwise_gather_output", "rowwise_rep": "rowwise_split_input"}
# styles of Hugging Face's for experts, which here every rank has whole
_EXPERTS = ("moe_tp_experts", "packed_colwise", "packed_rowwise", "grouped_gemm")

Plan = Mapping[str, Any]
"""Pattern of a module's name -> a name of `STYLES`, or a ParallelStyle of torch."""

_HEAD_SIZES = ("head_dim", "head_size", "attention_head_size", "dim_head", "d_head", "key_value_proj_dim")
_EXAMPLE = """
    def tensor_parallel_plan(self):
        return {
            "blocks.*.attn.q_proj": "colwise",  # also k_proj, v_proj
            "blocks.*.attn.o_proj": "rowwise",
            "blocks.*.mlp.up_proj": "colwise",
            "blocks.*.mlp.down_proj": "rowwise",
        }"""


def find_plan(module: nn.Module, given: Plan | None) -> dict[str, Any]:
    """The style of each module that is divided.

    Args:
        module: The model, e.g. a LightningModule.
        given: The plan that the user gave; None: the model's own.

    Returns:
        Name of a module -> style.

    Raises:
        ValueError: There is no plan, a pattern answers to no module, a style is unknown, or patterns disagree.
        TypeError: A plan is no mapping of strings.
    """
    if given is not None:
        return _resolve(module, given, "tensor_parallel_plan")
    own = getattr(module, "tensor_parallel_plan", None)
    if callable(own):
        return _resolve(module, own(), f"{type(module).__name__}.tensor_parallel_plan()")
    found: dict[str, Any] = {}
    covered: set[nn.Module] = set()
    for prefix, part in module.named_modules():
        if part not in covered and (plan := _carried(part)):
            covered |= set(part.modules())
            found |= _resolve(part, plan, f"the plan of {type(part).__name__}", prefix, strict=False)
    if not found:
        raise ValueError(
            f"{type(module).__name__} does not say how it is divided over tensor-parallel ranks. Give it a method that "
            f"names its linears (or the same mapping as RecomputeStrategy(tensor_parallel_plan=...)), e.g.{_EXAMPLE}\n"
            f"Styles: {', '.join(STYLES)}"
        )
    return found


def _carried(module: nn.Module) -> dict[str, Any]:
    """The plan that a Hugging Face model carries, by names relative to it."""
    plan = getattr(module, "_tp_plan", None)
    config = getattr(module, "config", None)
    if isinstance(plan, Mapping) and plan:
        return dict(plan)
    base = getattr(config, "base_model_tp_plan", None)
    # a model without a head: its plan is the config's
    is_base = getattr(module, "base_model", None) is module
    return dict(base) if isinstance(base, Mapping) and is_base else {}


def _resolve(module: nn.Module, plan: Any, source: str, prefix: str = "", strict: bool = True) -> dict[str, Any]:
    if not isinstance(plan, Mapping) or not all(isinstance(pattern, str) for pattern in plan):
        raise TypeError(f"{source}: a mapping of name patterns to styles is due, found {plan!r}")
    if not plan:
        raise ValueError(f"{source} is empty: it names no module to divide. For example{_EXAMPLE}")
    names = [name for name, _ in module.named_modules() if name]
    found: dict[str, Any] = {}
    experts: list[str] = []
    for pattern, style in plan.items():
        style = ALIASES.get(style, style) if isinstance(style, str) else style
        if style in _EXPERTS and not strict:
            experts.append(pattern)
            continue
        if style not in STYLES and not isinstance(style, ParallelStyle):
            raise ValueError(
                f"{source}: {pattern!r} has the unknown style {style!r}; {nearest(str(style), list(STYLES))}. Styles: "
                f"{', '.join(STYLES)}"
            )
        wanted = _expression(pattern)
        matching = [name for name in names if wanted.fullmatch(name)]
        if not matching:  # a carried plan may name what this size of the model has not
            if strict:
                raise ValueError(f"{source}: no module answers to {pattern!r}; {nearest(pattern, names)}")
            continue
        around = f"{prefix}." if prefix else ""
        divided = {around + inner: how for name in matching for inner, how in _inner(module, name, style)}
        for path, style in divided.items():
            if found.setdefault(path, style) != style:
                raise ValueError(f"{source}: {path} has two styles, {found[path]!r} and {style!r}; name one")
    if experts:
        logger.warning("%s: every tensor-parallel rank has all of the experts (%s)", source, ", ".join(experts))
    return found


def _inner(module: nn.Module, name: str, style: Any) -> Iterator[tuple[str, Any]]:
    """The style of a module, or of the linears inside of an adapter around one (LoRA, as in Hugging Face's PEFT)."""
    part = module.get_submodule(name)
    if not isinstance(getattr(part, "base_layer", None), nn.Module) or not isinstance(style, str):
        yield name, style
        return
    is_rowwise = style.startswith("rowwise")
    styles = {"base_layer": style, "lora_A": style if is_rowwise else "replicate"}
    styles["lora_B"] = "sequence_parallel" if is_rowwise else style
    for inner, how in styles.items():
        held = getattr(part, inner, None)
        children = [f".{child}" for child, _ in held.named_children()] if isinstance(held, nn.ModuleDict) else [""]
        yield from ((f"{name}.{inner}{child}", how) for child in children if isinstance(held, nn.Module))


def _expression(pattern: str) -> re.Pattern[str]:
    """What a name that answers to a pattern, or whose end does, matches; a star stands for one part of it."""
    parts = ("[^.]+" if part == "*" else re.escape(part) for part in pattern.split("."))
    return re.compile(r"(?:.+\.)?" + r"\.".join(parts))


# ---- sizes


def check_sizes(module: nn.Module, styles: Mapping[str, Any], size: int) -> None:
    """Refuse what cannot be divided, before anything is.

    Args:
        module: The model.
        styles: What `find_plan` found.
        size: Tensor-parallel ranks.

    Raises:
        ValueError: A number of heads, rows, inputs or outputs that the ranks do not divide.
        TypeError: A module that its style does not fit.
    """
    for name, style in styles.items():
        part = module.get_submodule(name)
        if not isinstance(style, str):
            continue
        if style == "mla_kv_a_proj":
            shared_outputs(module, name)
        elif style.startswith("embedding"):
            _check_embedding(name, part, size)
        elif style.startswith(("colwise", "rowwise")):
            weight = part._parameters.get("weight")
            if not (hasattr(part, "in_features") and hasattr(part, "out_features") and getattr(weight, "ndim", 0) == 2):
                raise TypeError(
                    f"{name} is a {type(part).__name__}; the style {style!r} is for linears with in_features, "
                    "out_features and a weight (out, in) of their own"
                )
            if style.startswith("colwise"):
                what = "entries of the vocabulary" if style == "colwise_vocabulary" else "outputs"
                _check(name, part.out_features, what, size)
            else:
                _check(name, part.in_features, "inputs", size)
            if style == "colwise":
                _check_heads(module, name, part, size)


def _check_embedding(name: str, part: nn.Module, size: int) -> None:
    if not isinstance(part, nn.Embedding):
        raise TypeError(f"{name} is a {type(part).__name__}; the style 'embedding_rowwise' is for nn.Embedding")
    odd = [word for word in ("max_norm", "scale_grad_by_freq", "sparse") if getattr(part, word)]
    if odd:
        raise ValueError(f"{name} is an embedding with {' and '.join(odd)}, which a divided one cannot have")
    _check(name, part.num_embeddings, "entries of the vocabulary", size)


def shared_outputs(module: nn.Module, name: str) -> int:
    """How many of a latent projection's last outputs all heads read (multi-head latent attention).

    Raises:
        ValueError: Neither the module around it nor its config has a `qk_rope_head_dim`.
    """
    parent = module.get_submodule(name.rpartition(".")[0])
    for owner in (parent, getattr(parent, "config", None)):
        if isinstance(found := getattr(owner, "qk_rope_head_dim", None), int):
            return found
    raise ValueError(
        f"{name} has the style 'mla_kv_a_proj', and {type(parent).__name__} around it has no qk_rope_head_dim: give it "
        "that attribute, the number of outputs that all heads share"
    )


def _check_heads(module: nn.Module, name: str, part: Any, size: int) -> None:
    parent = module.get_submodule(name.rpartition(".")[0])
    head_size = next(
        (found for word in _HEAD_SIZES if isinstance(found := getattr(parent, word, None), int) and found > 0), None
    )
    if head_size is not None and part.out_features % head_size == 0:
        _check(name, part.out_features // head_size, f"heads of {head_size}", size)


def _check(name: str, number: Any, what: str, size: int) -> None:
    if number % size:
        fitting = [str(divisor) for divisor in range(1, number + 1) if number % divisor == 0]
        near = [divisor for divisor in fitting if int(divisor) <= 4 * size]
        raise ValueError(
            f"{name} has {number} {what}, which tensor_parallel_size={size} does not divide; sizes that do: "
            f"{', '.join(near)}"
        )
