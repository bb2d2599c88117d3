"""Run by two processes: bytes of layers, by the bench of the paper's formulas, and of a Hugging Face Llama's."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from distributed import local_rank
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.append(str(Path(__file__).parent.parent / "bench"))

from paper_layer import DTYPE, VARIANTS, StepBytes, count, count_step, divided

from lightning_recompute.groups import ParallelGroups
from lightning_recompute.paper_formulas import LayerShape

SIZES = (LayerShape(length=64, rows=2, hidden=32, heads=4), LayerShape(length=16, rows=3, hidden=48, heads=6))
WIDE = LayerShape(length=64, rows=4, hidden=64, heads=4)
"""Many rows: the gradients of weights are small beside hidden states."""
LLAMA = LayerShape(length=32, rows=2, hidden=64, heads=4)
ROUNDS = 4


def check_all(folder: Path) -> dict[str, Any]:
    """What each rank counted, by case."""
    gc.freeze()  # what the libraries hold need not be searched at every step
    dist.init_process_group("gloo", rank=local_rank())
    groups = ParallelGroups.build("cpu", tensor=2)
    found: dict[str, Any] = {"layers": {}, "transient": {}, "left": {}, "llama": {}, "llama tensors": {}}
    for name, variant in VARIANTS.items():
        for sizes in SIZES:
            layers = (1, 2) if sizes is SIZES[0] else (2, 3)
            steps = [count(variant, sizes, num_layers, groups) for num_layers in layers]
            found["layers"][f"{name} {SIZES.index(sizes)}"] = [step.held for step in steps]
            found["left"][f"{name} {SIZES.index(sizes)}"] = [step.left for step in steps]
    for name in ("tp", "tp_sp"):
        found["transient"][name] = count(VARIANTS[name], WIDE, 2, groups, times=ROUNDS).transient
        two, three = (llama(name, num_layers, groups) for num_layers in (2, 3))
        found["llama"][name] = three[0].held - two[0].held
        found["llama tensors"][name] = (
            dict(three[1] - two[1]),
            dict(two[1] - (three[1] - two[1]) - (three[1] - two[1])),
        )
    dist.destroy_process_group()
    return found


def llama(name: str, num_layers: int, groups: ParallelGroups) -> tuple[StepBytes, Counter[tuple[str, Any]]]:
    """Bytes of a step of a Llama with so many layers, and what it saves: number of tensors by dtype and shape."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=LLAMA.hidden,
            intermediate_size=160,
            num_hidden_layers=num_layers,
            num_attention_heads=LLAMA.heads,
            num_key_value_heads=2,
            max_position_embeddings=LLAMA.length,
        )
    ).to(DTYPE)
    ids = torch.randint(64, (LLAMA.rows, LLAMA.length))
    with divided(model, groups, VARIANTS[name]) as step:

        def loss() -> Tensor:
            with step():
                value: Tensor = model(ids, labels=ids).loss
                return value

        loss().backward()
        counted = count_step(loss, list(model.parameters()))
        weights = {local(p).untyped_storage()._cdata for p in model.parameters()}
        saved: dict[int, Tensor] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = local(tensor).untyped_storage()._cdata
            if storage not in weights:
                saved.setdefault(storage, local(tensor))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            result = loss()
        shapes = Counter((str(tensor.dtype), tuple(tensor.shape)) for tensor in saved.values())
        result.backward()
    return counted, shapes


def local(tensor: Tensor) -> Tensor:
    """The shard of a DTensor, else the tensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
