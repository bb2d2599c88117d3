"""Which blocks run on which pipeline stage, and which stage on which rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from lightning_recompute.plan import Keep, RecomputePlan, Segment

Split = Literal["count", "balanced"] | Sequence[int]
"""How blocks are divided over chunks: as evenly as it goes; by measured time and memory, which is to be made numbers of
before; or the number of blocks of each chunk in forward order."""


@dataclass(frozen=True)
class Division:
    """The blocks of a model over the chunks of a pipeline.

    Args:
        lengths: Blocks of each chunk, in forward order; at least one in each.
        num_ranks: Ranks of the pipeline; they divide the number of chunks.
        v_shaped: Chunks run down the ranks and up again; otherwise in rounds.
    """

    lengths: tuple[int, ...]
    num_ranks: int
    v_shaped: bool = False

    @classmethod
    def of(cls, num_blocks: int, num_ranks: int, schedule: str, virtual: int, split: Split = "count") -> Division:
        """Divide blocks.

        Args:
            num_blocks: How many there are.
            num_ranks: Ranks of the pipeline.
            schedule: The schedule that runs; see `settled_schedule`.
            virtual: Chunks on each rank.
            split: `count`: alike, as Megatron does; where that does not come out, the first chunks have one more. Or
                the number of blocks of each chunk.

        Returns:
            The division.

        Raises:
            ValueError: Fewer blocks than chunks, or a list that does not fit.
            TypeError: `split` is neither.
        """
        num_chunks = num_ranks * virtual
        if isinstance(split, str):
            if split != "count":
                raise ValueError(f"split={split!r}: 'count' or a list of {num_chunks} numbers of blocks is due")
            if num_blocks < num_chunks:
                raise ValueError(
                    f"{num_blocks} blocks for {num_chunks} pipeline stages (pipeline_parallel_size={num_ranks} x "
                    f"{virtual} on each rank): at least one block for each is due; take fewer stages"
                )
            least, rest = divmod(num_blocks, num_chunks)
            lengths = tuple(least + (chunk < rest) for chunk in range(num_chunks))
        else:
            lengths = _listed(split, num_blocks, num_chunks)
        return cls(lengths, num_ranks, schedule == "zbv-zero-bubble")

    @property
    def num_chunks(self) -> int:
        """Stages of the pipeline, those of all ranks together."""
        return len(self.lengths)

    @property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """For each chunk its first block and the one after its last."""
        stops = list(accumulate(self.lengths))
        return tuple(zip([0, *stops[:-1]], stops, strict=True))

    def rank_of(self, chunk: int) -> int:
        """The rank of the pipeline on which a chunk runs."""
        turn, place = divmod(chunk, self.num_ranks)
        return self.num_ranks - 1 - place if self.v_shaped and turn % 2 else place

    def chunks_of(self, rank: int) -> tuple[int, ...]:
        """The chunks of a rank, in forward order."""
        return tuple(chunk for chunk in range(self.num_chunks) if self.rank_of(chunk) == rank)

    def chunk_with(self, block: int) -> int:
        """The chunk that runs a block; before the first block it is the first, after the last the last."""
        stops = accumulate(self.lengths)
        return next((chunk for chunk, stop in enumerate(stops) if block < stop), self.num_chunks - 1)

    def part_of(self, plan: RecomputePlan, rank: int) -> RecomputePlan:
        """What a rank has to do of a plan for the whole model.

        Args:
            plan: Of all blocks.
            rank: Of the pipeline.

        Returns:
            A plan of all blocks that keeps everything of other ranks; units end where chunks do.

        Raises:
            ValueError: The plan is for another number of blocks.
        """
        if plan.num_blocks != sum(self.lengths):
            raise ValueError(f"the plan covers {plan.num_blocks} blocks, the stages have {sum(self.lengths)}")
        segments = []
        for chunk, (first, last) in enumerate(self.bounds):
            for segment in plan.segments:
                start, stop = max(first, segment.start), min(last, segment.stop)
                if start < stop:
                    action = segment.action if self.rank_of(chunk) == rank else Keep()
                    segments.append(Segment(start, stop, action))
        return RecomputePlan(tuple(segments))

    @property
    def last_rank(self) -> int:
        """The rank that comes to the loss."""
        return self.rank_of(self.num_chunks - 1)


@dataclass(frozen=True)
class OwnStages:
    """The stages of this process.

    Args:
        division: Of the blocks over all stages.
        rank: This one's, of the pipeline.
        blocks: The name of the block list.
    """

    division: Division
    rank: int
    blocks: str


def _listed(split: Sequence[int], num_blocks: int, num_chunks: int) -> tuple[int, ...]:
    if not isinstance(split, Sequence) or not all(isinstance(n, int) and not isinstance(n, bool) for n in split):
        raise TypeError(f"split={split!r}: 'count' or a list of {num_chunks} numbers of blocks is due")
    if len(split) != num_chunks:
        raise ValueError(f"split={list(split)} has {len(split)} entries; one for each of {num_chunks} stages is due")
    if min(split) < 1:
        raise ValueError(f"split={list(split)}: at least one block for each stage is due")
    if sum(split) != num_blocks:
        raise ValueError(f"split={list(split)} adds up to {sum(split)} blocks; the model has {num_blocks}")
    return tuple(split)
