"""Activation recomputation for any PyTorch Lightning project: less memory, the same numbers to the bit."""

from lightning_recompute.ambient import is_recomputing
from lightning_recompute.blocks import BlockList, find_blocks
from lightning_recompute.callbacks import MemoryReport, Recompute, ThroughputReport
from lightning_recompute.data import TextDataModule
from lightning_recompute.errors import BudgetError, RecomputeError
from lightning_recompute.forecast import Forecast, ParallelSizes, StageForecast
from lightning_recompute.gpt import GPT
from lightning_recompute.plan import Full, Keep, RecomputePlan, SaveOps, Segment, Selective
from lightning_recompute.planning import plan_recompute
from lightning_recompute.policy import RecomputePolicy
from lightning_recompute.recompute import RecomputeHandle, apply_recompute
from lightning_recompute.strategy import RecomputeStrategy
from lightning_recompute.version import __version__

__all__ = [
    "GPT",
    "BlockList",
    "BudgetError",
    "Forecast",
    "Full",
    "Keep",
    "MemoryReport",
    "ParallelSizes",
    "Recompute",
    "RecomputeError",
    "RecomputeHandle",
    "RecomputePlan",
    "RecomputePolicy",
    "RecomputeStrategy",
    "SaveOps",
    "Segment",
    "Selective",
    "StageForecast",
    "TextDataModule",
    "ThroughputReport",
    "__version__",
    "apply_recompute",
    "find_blocks",
    "is_recomputing",
    "plan_recompute",
]
