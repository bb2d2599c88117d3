"""One fit's recompute: what was asked for, applied to the module, said once, and taken off again.

The strategy and the callback mean the same by the same words because both hold one of these.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.cloud_io import get_filesystem
from torch import nn
from torch.distributed import ProcessGroup

from lightning_recompute.blocks import find_blocks
from lightning_recompute.budgeting import Budget
from lightning_recompute.device_memory import device_name
from lightning_recompute.division import OwnStages
from lightning_recompute.errors import BudgetError
from lightning_recompute.forecast import Forecast
from lightning_recompute.label_warnings import FirstBatchCheck
from lightning_recompute.plan import Full, RecomputePlan, SaveOps
from lightning_recompute.plan_words import describe, describe_stages, summary
from lightning_recompute.policy import RecomputePolicy
from lightning_recompute.recompute import RecomputeHandle, apply_recompute
from lightning_recompute.stage_forecast import PipelineForecast
from lightning_recompute.version import __version__

PLAN_FILE = "plan.yaml"


class RecomputeSession:
    """Applies a policy or plan to one module after the other, and takes it off again.

    A copy, or what was pickled, is a session that has not begun.

    Args:
        policy: What the six words say.
        plan: An explicit plan, or the path of one; the words are then to be left at their defaults.
        blocks: Where the blocks are; None: found.
        check: Compare each block's first replay with its forward.
        memory_budget: Let the first batch decide: the fastest plan that keeps this budget; see `budget_bytes`.

    Raises:
        ValueError: Two of plan, memory_budget, and words that differ from their defaults; or the budget is none.
        TypeError: `plan` is neither plan nor path.
        FileNotFoundError: There is no file at the path.
    """

    def __init__(
        self,
        policy: RecomputePolicy,
        plan: str | Path | RecomputePlan | None,
        blocks: str | Sequence[str] | None,
        check: bool = False,
        memory_budget: str | int | float | None = None,
    ) -> None:
        self.budget = None if memory_budget is None else _sole_budget(memory_budget, plan, policy)
        self.what = policy if plan is None else _explicit(plan, policy)
        self.blocks = blocks
        self.check = check
        self.source = Path(plan) if isinstance(plan, str | Path) else None
        self.tensor_group: ProcessGroup | None = None
        """The ranks over which unit inputs can be distributed, set before a fit begins."""
        self._stages: OwnStages | None = None
        self._handle: RecomputeHandle | None = None
        self._plan: RecomputePlan | None = None
        self._first_batch: FirstBatchCheck | None = None

    @property
    def _where(self) -> str | Sequence[str] | None:
        """Where the blocks are; of a divided module, where not every block has weights, as was found before."""
        return self.blocks if self._stages is None else self._stages.blocks

    @property
    def handle(self) -> RecomputeHandle | None:
        """What is applied now."""
        return self._handle

    @property
    def active_plan(self) -> RecomputePlan | None:
        """What is recomputed where; None before it has begun, after its end, and when nothing is recomputed."""
        return self._plan if self._handle is not None else None

    @property
    def forecast(self) -> Forecast | PipelineForecast | None:
        """What the plan that a budget led to will need; None without one, and before the first batch."""
        return self.budget.forecast if self.budget is not None else None

    def begin(
        self,
        module: nn.Module,
        trainer: pl.Trainer,
        device: torch.device,
        logger: logging.Logger,
        stages: OwnStages | None = None,
    ) -> None:
        """Patch a module's blocks, say so in a line for each block list, and write `plan.yaml` beside the logs.

        Args:
            module: The module, on its device.
            trainer: Whose fit begins; of either Lightning.
            device: Where the module is.
            logger: Told on rank 0, once.
            stages: This process's, where blocks are divided over pipeline stages.

        Raises:
            ValueError: What `apply_recompute` refuses.
        """
        self.end()
        self._stages = stages
        if self.budget is not None:
            find_blocks(module, self._where)  # before the first batch, which the plan waits for
            return
        if isinstance(self.what, RecomputePolicy) and self.what.granularity is None:
            logger.info("granularity=None: nothing is recomputed")
            return
        self._apply(self.what, module, trainer, device, logger)

    def before_batch(
        self, module: pl.LightningModule, trainer: pl.Trainer, batch: Any, batch_idx: int, logger: logging.Logger
    ) -> bool:
        """Under a memory budget: plan for the first batch, and again for every batch that is larger.

        Args:
            module: The module, on its device.
            trainer: Whose fit it is.
            batch: The batch that is about to be trained on.
            batch_idx: Its number.
            logger: Told on rank 0.

        Returns:
            Whether a plan was made.

        Raises:
            BudgetError: No plan keeps the budget.
            ValueError: The module's step cannot be measured.
        """
        if self.budget is None:
            return False
        self.budget.after_step(logger)
        if not self.budget.is_due(trainer, batch):
            return False
        self._take_off()
        forecast = self.budget.plan(trainer, module, batch, batch_idx, self.blocks)
        self._apply(forecast.plan, module, trainer, trainer.strategy.root_device, logger)
        if trainer.is_global_zero:
            logger.info("%s", summary(forecast))
        self.budget.watch(trainer, module)
        return True

    def tighten(
        self, module: pl.LightningModule, trainer: pl.Trainer, step: tuple[Any, int], logger: logging.Logger
    ) -> bool:
        """After memory ran out: a plan that needs less, from now on.

        Args:
            module: The module.
            trainer: Whose fit it is, in one process.
            step: The batch that was trained on, and its number.
            logger: Told.

        Returns:
            Whether there is one.
        """
        lengths = [len(found) for found in find_blocks(module, self._where)]
        plan = self.active_plan or RecomputePolicy(granularity=None).plan(lengths)
        budget = self.budget or Budget(1.0)
        self._take_off()
        device = trainer.strategy.root_device
        try:
            tighter = budget.plan(trainer, module, *step, self.blocks, below=plan).plan
            self.budget = budget
        except BudgetError as error:
            logger.warning("memory ran out, and no plan needs less: %s", error)
            tighter = plan
        except Exception as error:  # there may be no room for measuring, either
            logger.warning("memory ran out, and a plan could not be measured: %s", error)
            tighter = RecomputePolicy().plan(lengths)
        if tighter != plan:
            logger.warning("memory ran out: the step is tried again under a tighter plan")
        self._apply(tighter, module, trainer, device, logger)
        if self.forecast is not None and tighter != plan:
            logger.info("%s", summary(self.forecast))
        return tighter != plan

    def _apply(
        self,
        what: RecomputePolicy | RecomputePlan,
        module: nn.Module,
        trainer: pl.Trainer,
        device: torch.device,
        logger: logging.Logger,
    ) -> None:
        own = what
        if (stages := self._stages) is not None:
            what = what.plan(stages.division.lengths) if isinstance(what, RecomputePolicy) else what
            own = stages.division.part_of(what, stages.rank)
        self._handle = apply_recompute(
            module, own, blocks=self._where, check=self.check, tensor_group=self.tensor_group
        )
        self._plan = what if isinstance(what, RecomputePlan) else self._handle.plan
        # asks the other processes for the folder, so all of them go through it
        folder = trainer.log_dir
        if trainer.is_global_zero:
            lists = self._handle.block_lists
            words = (
                describe(self._plan, lists)
                if stages is None
                else describe_stages(self._plan, lists[0], stages.division)
            )
            logger.info("%s", words)
            if self.budget is None:
                # says with the first batch when a label saves nothing on this model
                self._first_batch = FirstBatchCheck(self._handle.plan, self._handle.block_lists, logger)
            # fast_dev_run (set on the Trainer by name) means to leave no files
            if folder is not None and not getattr(trainer, "fast_dev_run", False):
                self._write_plan(self._plan, self._handle, folder, trainer, device)

    def units(self, module: nn.Module) -> list[list[nn.Module]]:
        """The module's blocks, those together that are recomputed as one unit."""
        blocks = [block for found in find_blocks(module, self._where) for block in found.blocks]
        if self.active_plan is None:
            return [[block] for block in blocks]
        return [
            unit
            for segment in self.active_plan.segments
            for unit in (
                [blocks[segment.start : segment.stop]]
                if isinstance(segment.action, Full | SaveOps)
                else [[block] for block in blocks[segment.start : segment.stop]]
            )
        ]

    def end(self) -> None:
        """Put the module's own forwards back; does nothing when there is none of ours."""
        self._take_off()
        self._stages = None
        if self.budget is not None:
            self.budget.begin_again()

    def _take_off(self) -> None:
        first_batch, self._first_batch = self._first_batch, None
        if first_batch is not None:
            first_batch.remove()
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.remove()

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {
            "_handle": None,
            "_plan": None,
            "_first_batch": None,
            "tensor_group": None,
            "_stages": None,
        }

    def _write_plan(
        self, plan: RecomputePlan, handle: RecomputeHandle, folder: str, trainer: pl.Trainer, device: torch.device
    ) -> None:
        record = {
            "lightning_recompute": __version__,
            "lightning": version("lightning"),
            "torch": str(torch.__version__),
            "python": ".".join(map(str, sys.version_info[:3])),
            "device": device_name(device),
            "processes": trainer.world_size,
            "precision": trainer.precision,
            "seed": torch.initial_seed(),
            "block_lists": {block_list.name: len(block_list) for block_list in handle.block_lists},
        }
        if self.forecast is not None:
            record["memory_budget_bytes"] = self.forecast.budget_bytes
            record["predicted_peak_bytes"] = self.forecast.peak_bytes
        filesystem = get_filesystem(folder)
        if "file" not in filesystem.protocol:
            with tempfile.TemporaryDirectory() as local:
                path = plan.save(Path(local) / PLAN_FILE, record)
                filesystem.put(str(path), f"{folder.rstrip('/')}/{PLAN_FILE}")
            return
        target = Path(folder) / PLAN_FILE
        # without a logger the folder is the working directory, where a user's own plan may lie
        if self.source is not None and target.exists() and target.samefile(self.source):
            return
        plan.save(target, record)


def _explicit(plan: str | Path | RecomputePlan, policy: RecomputePolicy) -> RecomputePlan:
    if words := policy.words():
        raise ValueError(
            f"plan and {_given(words)}: a plan says it all. Leave out {' and '.join(words)}, or leave out plan"
        )
    if isinstance(plan, RecomputePlan):
        return plan
    if not isinstance(plan, str | os.PathLike):
        raise TypeError(f"plan={plan!r}: a RecomputePlan, or the path of one, is due")
    return RecomputePlan.load(plan)


def _sole_budget(
    memory_budget: str | int | float, plan: str | Path | RecomputePlan | None, policy: RecomputePolicy
) -> Budget:
    budget = Budget(memory_budget)
    if plan is not None:
        raise ValueError(f"memory_budget={memory_budget!r} and plan={plan!r}: a budget makes the plan. Leave one out")
    if words := policy.words():
        raise ValueError(
            f"memory_budget={memory_budget!r} and {_given(words)}: a budget chooses what is recomputed. Leave out one "
            "or the other"
        )
    return budget


def _given(words: dict[str, object]) -> str:
    return ", ".join(f"{word}={value!r}" for word, value in words.items())
