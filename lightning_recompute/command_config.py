"""What a config of `fit` says to the commands that look at a model or compare settings, and how it is changed for them.

A config is a nested mapping, as a yaml has it.
"""

from __future__ import annotations

import math
import pydoc
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch

from lightning_recompute.policy import RecomputePolicy
from lightning_recompute.recompute_callback import Recompute
from lightning_recompute.strategy import RecomputeStrategy

Config = Mapping[str, Any]
_WORDS = tuple(field.name for field in fields(RecomputePolicy))


def is_ours(entry: Any, kind: type) -> bool:
    """Whether an entry of a config names one of our classes, or one made of it.

    Args:
        entry: `{class_path: ..., init_args: ...}`, or anything else.
        kind: The class.
    """
    if not isinstance(entry, Mapping) or "class_path" not in entry:
        return False
    named = pydoc.locate(str(entry["class_path"]))
    return isinstance(named, type) and issubclass(named, kind)


def recompute_entry(trainer: Config) -> dict[str, Any]:
    """The entry of the strategy or callback that recomputes, as `{class_path: ..., init_args: ...}`; empty without.

    Args:
        trainer: The Trainer's part of the config.
    """
    strategy = trainer.get("strategy")
    if isinstance(strategy, str) and strategy.lower() in RecomputeStrategy.registered_names:
        start_method = RecomputeStrategy.registered_names[strategy.lower()]
        return {"class_path": _path(RecomputeStrategy), "init_args": {"start_method": start_method}}
    callbacks = trainer.get("callbacks") or []
    for entry in (strategy, *(callbacks if isinstance(callbacks, list) else [callbacks])):
        if is_ours(entry, RecomputeStrategy) or is_ours(entry, Recompute):
            return {"class_path": entry["class_path"], "init_args": dict(entry.get("init_args") or {})}
    return {}


def num_replicas(trainer: Config) -> int:
    """Processes that the Trainer would have; where that is found by Lightning, one for each CUDA device.

    Args:
        trainer: The Trainer's part of the config.
    """
    devices, num_nodes = trainer.get("devices"), trainer.get("num_nodes") or 1
    if isinstance(devices, str) and "," in devices:
        devices = [device for device in devices.split(",") if device.strip()]
    if isinstance(devices, list):
        return len(devices) * num_nodes
    try:
        number = int(devices)  # type: ignore[arg-type]
    except (TypeError, ValueError):  # auto
        number = -1
    if number >= 1:
        return number * num_nodes
    on_cpu = trainer.get("accelerator") == "cpu"
    return (1 if on_cpu else max(torch.cuda.device_count(), 1)) * num_nodes


_LAYOUT = (
    "tensor_parallel_size",
    "sequence_parallel",
    "tensor_parallel_plan",
    "pipeline_parallel_size",
    "virtual_pipeline_size",
    "num_microbatches",
    "schedule",
    "split",
    "data_parallel",
)


def planned_ranks(trainer: Config, given: Config) -> dict[str, Any]:
    """What `plan` takes from a config about the ranks of a run, and what is recomputed there.

    Args:
        trainer: The Trainer's part of the config.
        given: The arguments of the subcommand, which win; None where one is not given.

    Returns:
        The same with what the config says, `num_replicas` among it: what the other sizes leave of the processes.
    """
    entry = recompute_entry(trainer)
    arguments = entry.get("init_args", {})
    found = {name: arguments.get(name) if given.get(name) is None else given[name] for name in _LAYOUT}
    found["recompute"] = given.get("recompute")
    if found["recompute"] is None and entry and arguments.get("memory_budget") is None:
        found["recompute"] = {name: arguments[name] for name in (*_WORDS, "plan") if name in arguments}
    sizes = [found[name] or 1 for name in ("tensor_parallel_size", "pipeline_parallel_size")]
    if all(isinstance(size, int) for size in sizes):
        found["num_replicas"] = given.get("num_replicas") or max(num_replicas(trainer) // math.prod(sizes), 1)
    return found


def is_sharded(trainer: Config) -> bool:
    """Whether the Trainer's strategy spreads parameters over processes, which no forecast knows.

    Args:
        trainer: The Trainer's part of the config.
    """
    strategy = trainer.get("strategy")
    if is_ours(strategy, RecomputeStrategy):
        given = dict(strategy["init_args"] or {}) if strategy is not None and "init_args" in strategy else {}
        return bool(given.get("tensor_parallel_size", 1) != 1 or given.get("data_parallel", "replicate") != "replicate")
    name = str(strategy.get("class_path") if isinstance(strategy, Mapping) else strategy).lower()
    return any(word in name for word in ("fsdp", "deepspeed", "modelparallel"))


def _path(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


# ---- the fit of a setting

WITHOUT_EXTRAS: Config = {
    "logger": False,
    "fast_dev_run": False,
    "barebones": False,
    "profiler": None,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "limit_val_batches": 0,
    "val_check_interval": None,
    "max_epochs": -1,
    "min_epochs": None,
    "min_steps": None,
    "max_time": None,
}
"""Arguments of a Trainer that leave training alone: no validation, no files but those of the reports, no bars."""

_CHOICES = (*_WORDS, "memory_budget", "plan")


def config_of_setting(config: Config, choice: Config, *, steps: int, warmup_steps: int, folder: str) -> dict[str, Any]:
    """The config of a short fit under a setting, made from the user's.

    The user's strategy stays: one that recomputes is told the setting, beside any other is put our callback. Other
    callbacks are left out, as they may save, stop, validate or log.

    Args:
        config: The user's.
        choice: The setting, as arguments of `Recompute`.
        steps: Optimizer steps.
        warmup_steps: Batches before the speed counts.
        folder: For the reports.
    """
    former = dict(config["trainer"])
    entry = recompute_entry(former)
    others = {name: value for name, value in entry.get("init_args", {}).items() if name not in _CHOICES}
    # any FLOP/s will do: what is read is the ratio of MFU and HFU
    speed = {"warmup_steps": warmup_steps, "peak_flops": 1.0, "print_table": False}
    callbacks = [_report("MemoryReport", print_table=False), _report("ThroughputReport", **speed)]
    ours = {**others, **choice}
    if is_ours(entry, RecomputeStrategy):
        former["strategy"] = {"class_path": entry["class_path"], "init_args": ours}
    else:
        callbacks.append({"class_path": entry.get("class_path", _path(Recompute)), "init_args": ours})
    trainer = {**former, **WITHOUT_EXTRAS, "callbacks": callbacks, "max_steps": steps, "default_root_dir": folder}
    return {**config, "trainer": trainer}


def _report(name: str, **arguments: Any) -> dict[str, Any]:
    return {"class_path": f"lightning_recompute.{name}", "init_args": arguments}
