"""What a single module is: a linear layer, a norm, an activation, the core of attention; read off without running it.

Classes and attributes have many names in the field, so what a module holds and how it is called decide where they can.
"""

from __future__ import annotations

import inspect
import re

from torch import nn

_NORM = re.compile(r"(?i:norm(?!al(?!i)))|RMS|Rms")
_NOT_NORM = re.compile(r"linear|mlp|attention|attn|conv|embed", re.IGNORECASE)
_CORE = re.compile(r"attention|attn|attend|dot_?product|sdpa", re.IGNORECASE)
_NOT_CORE = re.compile(r"norm|rot|rope|embed", re.IGNORECASE)
_LINEAR = re.compile(r"(?:linear|lora)(?!.*(?:att|act|mlp|unit))", re.IGNORECASE)
_ACTIVATION = re.compile(
    r"(?i:gelu|silu|swish|relu|mish|elu$|glu$|sigmoid|tanh|softplus|snake|activation)|(?:^|[a-z_])Act(?:$|[A-Z])"
)
_ONE_NODE = re.compile(r"^(?:GELUActivation|GELUTanh|SiLUActivation)$|(?i:swiglu|geglu|reglu)$")
_ROLES = re.compile(r"(q(?:s|uery|ueries)?)?(k(?:s|ey|eys)?)?(v(?:s|alues?)?)?")
_FUSED = ("c_attn", "w_pack", "att_proj")  # GPT-2, Baichuan, OLMo: q, k and v in one matrix
ALL_ROLES = frozenset("qkv")
"""Query, key and value."""


def uncompiled(module: nn.Module) -> nn.Module:
    """The module itself, or the one that torch.compile put a module around."""
    inner = getattr(module, "_orig_mod", module)
    return inner if isinstance(inner, nn.Module) else module


def class_name(module: nn.Module) -> str:
    """The name of a module's class, seen through torch.compile."""
    return type(uncompiled(module)).__name__


def is_container(module: nn.Module) -> bool:
    """Whether a module only holds others and is never called."""
    return isinstance(module, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict)


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a normalisation, of any library, that holds no other module with parameters."""
    kind = class_name(module)
    leaf = not any(True for child in uncompiled(module).children() for _ in child.parameters())
    return leaf and _NORM.search(kind) is not None and _NOT_NORM.search(kind) is None


def is_matrix(parameter: nn.Parameter) -> bool:
    """Whether a parameter has two or more dimensions, or none yet."""
    return nn.parameter.is_lazy(parameter) or parameter.ndim >= 2


def linear_sizes(module: nn.Module) -> tuple[int, int] | None:
    """Input and output size of a linear layer, (0, 0) where it does not tell; None for any other module.

    Linear layers are nn.Linear and its quantised, parallel and LoRA kinds, GPT-2's Conv1D, pointwise convolutions.
    """
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return (module.in_channels, module.out_channels) if set(module.kernel_size) == {1} else None
    has_matrix = any(map(is_matrix, module.parameters(recurse=False)))
    if has_matrix and class_name(module) == "Conv1D":
        size_in, size_out = module.get_parameter("weight").shape
        return size_in, size_out
    has_adapter = any(re.search("lora|base_layer", key) for key, _ in module.named_children())
    is_linear = _LINEAR.search(class_name(module)) is not None and (has_matrix or has_adapter)
    if not isinstance(module, nn.Linear) and not is_linear:
        return None
    found = [getattr(module, word, 0) for word in ("in_features", "input_size", "out_features", "output_size")]
    sizes = [size if isinstance(size, int) else 0 for size in found]
    return sizes[0] or sizes[1], sizes[2] or sizes[3]


def is_activation(module: nn.Module) -> bool:
    """Whether a module's class is torch.nn's activation or is named like one; softmax is none."""
    if is_norm(module) or any(map(is_matrix, module.parameters())):
        return False
    kind = class_name(module)
    of_torch = type(uncompiled(module)).__module__ == "torch.nn.modules.activation" and "oftm" not in kind
    return of_torch or _ACTIVATION.search(kind) is not None


def is_one_node(activation: nn.Module) -> bool:
    """Whether an activation is one node of the graph, or a product of such nodes (SwiGLU)."""
    activation = uncompiled(activation)
    if isinstance(activation, nn.GELU | nn.SiLU):
        return True
    # Hugging Face's have a switch that writes the formula out
    return bool(_ONE_NODE.search(class_name(activation))) and not inspect.ismethod(getattr(activation, "act", None))


def keeps_its_output(activation: nn.Module) -> bool:
    """Whether backward needs an activation's output and nothing else, so that freeing the output would save nothing."""
    activation = uncompiled(activation)
    return isinstance(activation, nn.ReLU | nn.Sigmoid | nn.Tanh) or class_name(activation) == "LinearActivation"


def is_core(module: nn.Module) -> bool:
    """Whether a module is attention without projections: no parameters, and called with q, k and v."""
    kind = class_name(module)
    if any(True for _ in module.parameters()) or _NOT_CORE.search(kind):
        return False
    # the class's forward, since the instance's may be patched; a scripted module has none
    forward = inspect.getattr_static(type(uncompiled(module)), "forward")
    if not inspect.isfunction(forward):
        return False
    parameters = inspect.signature(forward).parameters.values()
    words = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][1:]
    names = [word.name.lower().removeprefix("x") for word in words]
    num_required = sum(word.default is word.empty for word in words)
    packed = bool(names) and names[0] == "qkv"
    by_names = [name[:1] for name in names[:3]] == ["q", "k", "v"]
    return by_names or (_CORE.search(kind) is not None and (num_required >= 3 or packed))


def roles_in(key: str) -> set[str]:
    """Which of q, k and v a name names: all three of Wqkv, two of kv_b_proj, one of to_q, query and wq."""
    if key.lower() in _FUSED:
        return set(ALL_ROLES)
    roles: set[str] = set()
    for token in re.split(r"[^a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", key).lower()):
        if match := _ROLES.fullmatch(token[1:] if len(token) > 1 and token[0] == "w" else token):
            roles |= {role for role, found in zip("qkv", match.groups(), strict=True) if found}
    return roles
