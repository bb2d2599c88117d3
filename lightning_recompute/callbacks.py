"""The callbacks, by the names that users import."""

from lightning_recompute.memory_report import MemoryReport
from lightning_recompute.recompute_callback import Recompute
from lightning_recompute.throughput_report import ThroughputReport

__all__ = ["MemoryReport", "Recompute", "ThroughputReport"]
