"""A small GPT measured whole, as one rank of a run that does not take place has it, on fake tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from lightning_recompute.fake_groups import fake_groups
from lightning_recompute.fake_model import on_fake_tensors
from lightning_recompute.gpt import GPT
from lightning_recompute.measured_model import MeasuredModel, measure_model
from lightning_recompute.paper_formulas import LayerShape
from lightning_recompute.pipeline_layout import Layout
from lightning_recompute.policy import RecomputePolicy
from lightning_recompute.rank_view import RankStep, tensor_rank
from lightning_recompute.stage_options import Prices
from lightning_recompute.staged_model import StagedModel, stage_model

BLOCKS, HEADS, HIDDEN, LENGTH, VOCABULARY, TENSOR = 8, 8, 256, 256, 512, 4
SHAPE = LayerShape(HEADS, HIDDEN, LENGTH, rows=2, tensor=TENSOR)
NONE = RecomputePolicy(granularity=None)


def gpt() -> GPT:
    model = GPT(
        num_layers=BLOCKS,
        num_heads=HEADS,
        hidden_size=HIDDEN,
        max_length=LENGTH,
        vocab_size=VOCABULARY,
        tied_head=True,
        dropout=0.1,
        attention="eager",
        decay_steps=10,
    )
    model.log = lambda *args, **options: None  # type: ignore[method-assign]
    return model


with torch.device("meta"):  # before anything is fake
    SIZES = {name: 2 * parameter.numel() for name, parameter in gpt().named_parameters()}
"""Bytes of each parameter in 16 bit."""
OF_BLOCK = sum(size for name, size in SIZES.items() if name.startswith("blocks.0."))
"""Those of a block."""


@contextlib.contextmanager
def measured_on(tensor: int, sequence: bool, searches: bool) -> Iterator[MeasuredModel]:
    with contextlib.ExitStack() as stack:
        groups = stack.enter_context(fake_groups(tensor=tensor)) if tensor > 1 else None
        model = stack.enter_context(on_fake_tensors(gpt, dtype=torch.bfloat16))
        whole = dict(model.named_parameters())
        divided = None
        if groups is not None:
            divided = stack.enter_context(tensor_rank(model, groups, sequence_parallel=sequence))
        yield measure_model(
            model,
            lambda batch: model.training_step(batch, 0),
            torch.zeros(2, LENGTH + 1, dtype=torch.long),
            whole=whole,
            optimizers=[torch.optim.AdamW(list(whole.values()))],
            prices=Prices(),
            exact=False,
            tried=RankStep(divided),
            searches=searches,
        )


def staged(measured: MeasuredModel, number: int = 8, **options: Any) -> StagedModel:
    """Over the ranks of a layout, with so many microbatches."""
    layout = Layout(**options)
    return stage_model(measured, layout, layout.division(BLOCKS), number, sizes=(2, 4))
