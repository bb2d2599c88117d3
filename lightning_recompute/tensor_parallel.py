"""Tensor parallelism for an unmodified model: its parameters become DTensors, its modules' forwards are patched.

Column- and row-parallel linears, vocabulary-parallel embeddings and heads as in Megatron-LM; with sequence
parallelism the hidden states between them are divided along the sequence (Korthikanti et al. 2022, arXiv 2205.05198).
Nothing is wrapped: names, classes, state-dict keys and ties stay as they were.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from lightning_recompute import ambient
from lightning_recompute import tensor_styles as forwards
from lightning_recompute.blocks import BlockList, find_blocks
from lightning_recompute.labels import find_targets
from lightning_recompute.patch import Patch
from lightning_recompute.rank_stream import RankStream
from lightning_recompute.tensor_plan import Plan, check_sizes, find_plan, shared_outputs
from lightning_recompute.tensor_styles import TensorRegion
from lightning_recompute.whole import replace_parameters

_BEGINS = "embedding_rowwise_split"
_WHOLE = (None, "replicate", "sequence_parallel", "replicated_with_grad_allreduce")


class TensorParallel:
    """A model that is divided over tensor-parallel ranks; `remove` takes the patches off.

    Args:
        module: The model.
        region: What its modules share.
        patches: The patched forwards.
        unnamed: Modules whose parameters every rank has whole and uses from outside of their forwards as well.
    """

    def __init__(
        self, module: nn.Module, region: TensorRegion, patches: Sequence[Patch], unnamed: Sequence[nn.Module]
    ) -> None:
        self.module = module
        self.region = region
        self._patches = list(patches)
        self._unnamed = list(unnamed)
        ambient.attach(region.stream)
        self._is_attached = True

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """While this is entered, a step of the model runs, which may use parameters outside of their modules."""
        shadowed = [(part, forwards.shadow(part, partial=False)) for part in self._unnamed]
        try:
            yield
        finally:
            for part, names in shadowed:
                forwards.unshadow(part, names)
            self.region.stream.switch(apart=False)
            self.region.end()

    def sum_gradients(self) -> None:
        """Sum the gradients of which each rank has a part; to be called once before they are used."""
        pending: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in self.module.parameters():
            if isinstance(parameter.grad, DTensor) and any(map(Placement.is_partial, parameter.grad.placements)):
                pending.setdefault(parameter.grad.dtype, []).append(parameter)
        for parameters in pending.values():
            parts = [parameter.grad.to_local() for parameter in parameters]  # type: ignore[union-attr]  # DTensors
            joined = torch.cat([part.reshape(-1) for part in parts])
            torch.distributed.all_reduce(joined, group=self.region.group)
            for parameter, total in zip(parameters, joined.split([part.numel() for part in parts]), strict=True):
                value: Any = parameter.data
                parameter.grad = DTensor.from_local(
                    total.view(parameter.shape), value.device_mesh, value.placements, run_check=False
                )

    def check_gradients(self) -> None:
        """Refuse gradients that should be alike on all ranks and are not.

        Raises:
            ValueError: There are some, or some that are alike where each rank should have made a part.
        """
        named = [
            (name, gradient, place)
            for name, parameter in self.module.named_parameters()
            if isinstance(gradient := parameter.grad, DTensor)
            and ((place := _place(gradient)).is_replicate() or place.is_partial())
        ]
        if not named:
            return
        local = [gradient.to_local().double() for _, gradient, _ in named]
        found = torch.stack([torch.stack((value.sum(), value.abs().sum())) for value in local])
        everyone = [torch.empty_like(found) for _ in range(self.region.group.size())]
        torch.distributed.all_gather(everyone, found, group=self.region.group)
        ranks = torch.stack(everyone)  # (t, n, 2)
        spread = (ranks.amax(0) - ranks.amin(0)).amax(-1)
        scale = ranks[..., 1].amax(0)
        for index, (name, _, place) in enumerate(named):
            if place.is_replicate() and spread[index] > 1e-2 * scale[index]:
                raise ValueError(
                    f"{name} is alike on all tensor-parallel ranks, and its gradients are not: it works on what each "
                    "rank has of its own (heads, a part of the sequence). Give its module the style "
                    "'replicated_with_grad_allreduce' in the tensor-parallel plan"
                )
            if place.is_partial() and scale[index] > 0 and spread[index] == 0:
                raise ValueError(
                    f"{name} should get a part of its gradient on each tensor-parallel rank, and got the same on all: "
                    "it works on whole sequences. Give its module the style 'replicate' in the tensor-parallel plan"
                )

    def remove(self) -> None:
        """Put the forwards back; the parameters stay DTensors (see `make_whole`). A second call does nothing."""
        if self._is_attached:
            self.region.stream.switch(apart=False)
            ambient.detach(self.region.stream)
            self._is_attached = False
        while self._patches:
            self._patches.pop().remove()


def apply_tensor_parallel(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    plan: Plan | None = None,
    sequence_parallel: bool = False,
    blocks: str | Sequence[str] | None = None,
) -> TensorParallel:
    """Divide a model over the ranks of a mesh; collective.

    Args:
        module: The model, alike on all ranks (the first rank's values win), on its device or on the meta device.
        mesh: One axis.
        plan: Pattern of a module's name -> style; None: the model's own.
        sequence_parallel: Divide hidden states along the sequence between what is divided by the plan.
        blocks: Where the blocks are (sequence parallelism only); None: found.

    Returns:
        The handle.

    Raises:
        ValueError: No plan, or one that does not fit the model or the number of ranks. The model is unchanged.
        TypeError: A style that does not fit its module.
    """
    styles = find_plan(module, plan)
    check_sizes(module, styles, mesh.size())
    styles = _with_ties(module, styles)
    lists = find_blocks(module, blocks) if sequence_parallel else _blocks_if_any(module, blocks)
    first = next(module.parameters())
    device = torch.device(mesh.device_type) if first.is_meta else first.device
    region = TensorRegion(mesh, RankStream(mesh.get_group(), device), sequence_parallel)
    _distribute(module, mesh, styles)
    patches: list[Patch] = []
    try:
        patches += _patches(module, region, styles, lists)
    except BaseException:
        while patches:
            patches.pop().remove()
        raise
    inside = {part for found in lists for block in found.blocks for part in block.modules()}
    unnamed = [
        part
        for name, part in module.named_modules()
        if styles.get(name) in (None, "replicate", "dropout") and part not in inside
    ]
    return TensorParallel(module, region, patches, unnamed)


def _place(gradient: DTensor) -> Placement:
    """Where a gradient is along the axis `tensor`, the last of any mesh that has it."""
    return gradient.placements[-1] if "tensor" in (gradient.device_mesh.mesh_dim_names or ()) else Replicate()


def _blocks_if_any(module: nn.Module, blocks: str | Sequence[str] | None) -> list[BlockList]:
    try:
        return find_blocks(module, blocks)
    except ValueError:
        if blocks is not None:
            raise
        return []


def _with_ties(module: nn.Module, styles: dict[str, Any]) -> dict[str, Any]:
    """The styles, with one for an embedding whose weight is that of a divided head, or the other way round."""
    found = dict(styles)
    owners: dict[nn.Parameter, list[str]] = {}
    for name, part in module.named_modules():
        weight = part._parameters.get("weight")
        if weight is not None:
            owners.setdefault(weight, []).append(name)
    for names in owners.values():
        divided = [name for name in names if str(found.get(name, "")).startswith(("colwise", "embedding"))]
        for name in set(names) - set(found) if divided else ():
            part = module.get_submodule(name)
            if isinstance(part, nn.Embedding):
                found[name] = "embedding_rowwise"
            elif hasattr(part, "out_features"):
                found[name] = "colwise_gather_output"
            else:
                raise ValueError(
                    f"{name} shares its weight with {divided[0]}, which the tensor-parallel plan divides; name it in "
                    "the plan as well"
                )
    return found


def placements(style: Any, name: str) -> Placement:
    """Where a parameter of a module with a style is."""
    if isinstance(style, str):
        if style.startswith(("colwise", "embedding")):
            return Shard(0)
        if style.startswith("rowwise") and name == "weight":
            return Shard(1)
    return Replicate()


def _distribute(module: nn.Module, mesh: DeviceMesh, styles: dict[str, Any]) -> None:
    due: dict[nn.Parameter, tuple[Placement, str]] = {}
    foreign: set[nn.Parameter] = set()
    for path, part in module.named_modules():
        style = styles.get(path)
        for name, parameter in part._parameters.items():
            if parameter is None:
                continue
            if isinstance(style, ParallelStyle):
                foreign.add(parameter)
                continue
            where = placements(style, name)
            before, other = due.setdefault(parameter, (where, path))
            if before != where:
                raise ValueError(
                    f"{path} and {other} share a parameter that the tensor-parallel plan divides in two ways ({where} "
                    f"and {before}); give both styles that agree"
                )

    def convert(name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if parameter in foreign or isinstance(parameter, DTensor):
            return None
        whole = distribute_tensor(parameter.detach(), mesh, [due[parameter][0]])
        return nn.Parameter(whole, requires_grad=parameter.requires_grad)

    replace_parameters(module, convert)
    for path, style in styles.items():
        if isinstance(style, ParallelStyle):
            parallelize_module(module.get_submodule(path), mesh, style)


def _patches(
    module: nn.Module, region: TensorRegion, styles: dict[str, Any], lists: Sequence[BlockList]
) -> Iterator[Patch]:
    blocks = {block for found in lists for block in found.blocks}
    inside = {part for block in blocks for part in block.modules()}
    names = {part: name for name, part in reversed(list(module.named_modules()))}
    parents = dict.fromkeys(
        module.get_submodule(name.rpartition(".")[0])
        for name, style in styles.items()
        if style in ("colwise", "colwise_gather_output") and module.get_submodule(name) in inside
    )
    # the outermost of them is given the sequence (an adapter around a linear is a parent inside of attention)
    within = {part for parent in parents for part in parent.modules() if part is not parent and parent not in blocks}
    parents = dict.fromkeys(parent for parent in parents if parent not in within)
    undivided = _undivided(blocks, parents) if region.sequence else []
    given_whole = {part for parent in (*parents, *undivided) if parent not in blocks for part in parent.modules()}
    for part, name in names.items():
        style = styles.get(name)
        joins = part in inside and part not in given_whole
        if style in ("colwise", "colwise_gather_output"):
            output = "local" if style == "colwise" else "whole"
            yield Patch(part, forwards.colwise_forward, region, output, joins)
        elif style == "colwise_vocabulary":
            yield Patch(part, forwards.colwise_forward, region, "dtensor", True)
        elif isinstance(style, str) and style.startswith("rowwise"):
            yield Patch(part, forwards.rowwise_forward, region, style == "rowwise_split_input")
        elif isinstance(style, str) and style.startswith("embedding"):
            yield Patch(part, forwards.embedding_forward, region, style == _BEGINS)
        elif style == "replicate_split_output":
            yield Patch(part, forwards.splitting_forward, region)
        elif style == "dropout":
            yield Patch(part, forwards.apart_forward, region)
        elif style == "mla_kv_a_proj":
            yield Patch(part, forwards.latent_forward, region, shared_outputs(module, name))
        elif style in _WHOLE and part is not module and (part._parameters or _is_torchs(part)):
            is_share = style == "replicated_with_grad_allreduce" or (
                region.sequence and (style == "sequence_parallel" or (style is None and joins))
            )
            yield Patch(part, forwards.whole_forward, is_share, _is_torchs(part))
    begins = any(style == _BEGINS for style in styles.values())
    for found in lists:
        for index, block in enumerate(found.blocks if region.sequence else ()):
            is_first, is_last = index == 0, index + 1 == len(found.blocks)
            yield Patch(block, forwards.block_forward, region, is_first and not begins, is_last and not begins)
    for part in undivided:
        yield Patch(part, forwards.undivided_forward, region)
    for parent in parents:
        if parent is not module and not (region.sequence and parent in blocks):
            yield Patch(parent, forwards.parent_forward, region, parent not in blocks)


def _undivided(blocks: Iterable[nn.Module], parents: Iterable[nn.Module]) -> list[nn.Module]:
    """Attention of blocks of which the plan divides nothing."""
    divided = set(parents)
    found = []
    for block in blocks:
        for target in find_targets(block, ("attn",))[0]:
            for name in target.names:
                part = block.get_submodule(name)
                if part is not block and block not in divided and divided.isdisjoint(part.modules()):
                    found.append(part)
    return list(dict.fromkeys(found))


def _is_torchs(part: nn.Module) -> bool:
    """Whether it is one of torch's own modules that use their children's parameters without calling them."""
    return isinstance(part, nn.MultiheadAttention | nn.TransformerEncoderLayer | nn.TransformerDecoderLayer)
