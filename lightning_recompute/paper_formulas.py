"""Closed formulas for transformer layers: bytes that a layer keeps for backward, FLOPs, and the models of the papers.

Bytes: Korthikanti et al. 2022, "Reducing activation recomputation in large transformer models" (arXiv 2205.05198),
section 4 and table 2: 16-bit activations, dropout masks of one byte, an MLP four times as wide as the hidden state.
FLOPs: Narayanan et al. 2021 (arXiv 2104.04473), section 5.1. With b rows of s tokens, h wide, a heads, t ranks that
share a layer, sbh is the number of elements of a hidden state.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

Recompute = Literal["none", "selective", "full"]
"""`selective` is the attention core, as in the paper."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The sizes of a layer and of what runs through it.

    Args:
        heads: Attention heads a.
        hidden: Width h of the hidden state.
        length: Tokens s of a row.
        rows: Rows b of a microbatch.
        tensor: Ranks t that share the layer.
    """

    heads: int
    hidden: int
    length: int
    rows: int = 1
    tensor: int = 1

    @property
    def sbh(self) -> int:
        """Elements of a hidden state."""
        return self.length * self.rows * self.hidden

    @property
    def scores(self) -> Fraction:
        """What the attention core keeps, 5as²b bytes, over sbh."""
        return Fraction(5 * self.heads * self.length, self.hidden)

    @property
    def linear_flops(self) -> int:
        """FLOPs of a forward in the layer's matrices, all ranks together: 24 sbh²."""
        return 24 * self.sbh * self.hidden

    @property
    def core_flops(self) -> int:
        """FLOPs of a forward in the attention core, all ranks together: 4 bs²h."""
        return 4 * self.sbh * self.length


# bytes over sbh, section 4.1: what each part of a layer keeps beside the attention core
QKV_INPUT, QUERIES_AND_KEYS, VALUES, PROJECTION_INPUT, ATTENTION_MASK = 2, 4, 2, 2, 1
MLP_INPUT, ACTIVATION_INPUT, ACTIVATION_OUTPUT, MLP_MASK = 2, 8, 8, 1
NORM_INPUTS = 4
OUTSIDE_OF_CORE = 34
# of these tensor parallelism alone leaves whole on every rank: inputs of norms, QKV and MLP, and both masks
REPLICATED = 10


def per_sbh(
    scores: Fraction,
    tensor: int = 1,
    *,
    sequence_parallel: bool = False,
    recompute: Recompute = "none",
    distributed: bool = False,
) -> Fraction:
    """Bytes that a layer keeps on each rank, over sbh: table 2 of the paper.

    Args:
        scores: 5as/h.
        tensor: Ranks that share the layer.
        sequence_parallel: Whether hidden states are divided along the sequence between what is divided by the plan.
        recompute: What is computed again.
        distributed: Under full recompute: each rank keeps its part of the layer's input.
    """
    if recompute == "full":
        return Fraction(2, tensor if distributed or sequence_parallel else 1)
    core = scores / tensor if recompute == "none" else Fraction(0)
    replicated = Fraction(REPLICATED, tensor if sequence_parallel else 1)
    return replicated + Fraction(OUTSIDE_OF_CORE - REPLICATED, tensor) + core


def layer_bytes(
    shape: LayerShape, *, sequence_parallel: bool = False, recompute: Recompute = "none", distributed: bool = False
) -> int:
    """Bytes that a layer keeps for backward on each rank, for one microbatch.

    Args:
        shape: The layer.
        sequence_parallel: As for `per_sbh`.
        recompute: As for `per_sbh`.
        distributed: As for `per_sbh`.

    Raises:
        ValueError: The ranks do not divide the layer.
    """
    each = per_sbh(
        shape.scores,
        shape.tensor,
        sequence_parallel=sequence_parallel,
        recompute=recompute,
        distributed=distributed,
    )
    found = each * shape.sbh
    if found.denominator != 1:
        raise ValueError(f"{shape.tensor} ranks do not divide a layer of {shape}: {found} bytes each")
    return int(found)


@dataclass(frozen=True, slots=True)
class PaperModel:
    """A model as the paper trains it (table 3).

    Args:
        name: By its parameters.
        shape: A layer of it.
        num_layers: Layers L.
        pipeline: Pipeline stages p.
        chunks: Chunks m on each rank of the interleaved schedule.
        num_microbatches: Microbatches of a step: its batch over the rows of one (no data parallelism in the table).
        vocabulary: Tokens v.
    """

    name: str
    shape: LayerShape
    num_layers: int
    pipeline: int = 1
    chunks: int = 1
    num_microbatches: int = 1
    vocabulary: int = 51200

    @property
    def schedule(self) -> str:
        """The schedule of its pipeline."""
        return "interleaved-1f1b" if self.chunks > 1 else "1f1b"

    @property
    def interleave_factor(self) -> Fraction:
        """How much more the first rank keeps than under 1F1B: 1 + (p - 1)/(pm) (section 4.2.3); 1 without chunks."""
        if self.chunks == 1:
            return Fraction(1)
        return 1 + Fraction(self.pipeline - 1, self.pipeline * self.chunks)

    def first_stage_bytes(self, *, sequence_parallel: bool = False, recompute: Recompute = "none") -> Fraction:
        """Bytes that the layers of the first stage keep (equation 5): p microbatches of L/p layers, interleaved.

        Args:
            sequence_parallel: As for `per_sbh`.
            recompute: As for `per_sbh`.
        """
        each = layer_bytes(self.shape, sequence_parallel=sequence_parallel, recompute=recompute)
        return each * self.num_layers * self.interleave_factor


PAPER_MODELS = (
    PaperModel("22B", LayerShape(64, 6144, 2048, rows=4, tensor=8), 48),
    PaperModel("175B", LayerShape(96, 12288, 2048, tensor=8), 96, pipeline=8, chunks=3, num_microbatches=64),
    PaperModel("530B", LayerShape(128, 20480, 2048, tensor=8), 105, pipeline=35, chunks=3, num_microbatches=280),
    PaperModel("1T", LayerShape(160, 25600, 2048, tensor=8), 128, pipeline=64, num_microbatches=512),
)
"""Table 3 of the paper."""
