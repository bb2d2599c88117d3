"""The command line for any LightningModule: `lightning-recompute COMMAND --config FILE`.

Commands are Lightning's (fit, validate, test, predict) and inspect, plan and compare; consolidate takes no config.

A mistake in the user's arguments ends in one message and exit code 2; anything else keeps its traceback.
"""

from __future__ import annotations

import argparse
import dis
import json
import logging
import os
import re
import sys
import traceback
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NoReturn

import lightning.pytorch as pl
import torch
from jsonargparse import DefaultHelpFormatter, Namespace, set_parsing_settings
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.strategies import StrategyRegistry
from lightning_utilities.core.rank_zero import rank_zero_only
from omegaconf.errors import OmegaConfBaseException

# Imported for their names on the command line: `--model GPT`, `--trainer.callbacks+=MemoryReport`.
from lightning_recompute.callbacks import MemoryReport, ThroughputReport
from lightning_recompute.cli_messages import explain
from lightning_recompute.command_config import is_ours, is_sharded, planned_ranks, recompute_entry
from lightning_recompute.compare_command import compare
from lightning_recompute.consolidate import SUBCOMMAND as CONSOLIDATE
from lightning_recompute.consolidate import run as consolidate
from lightning_recompute.data import TextDataModule
from lightning_recompute.first_step import ON_ONE_DEVICE
from lightning_recompute.gpt import GPT
from lightning_recompute.inspect_command import SUBCOMMAND as INSPECT
from lightning_recompute.inspect_command import InspectingTrainer
from lightning_recompute.plan_command import SUBCOMMAND as PLAN
from lightning_recompute.plan_command import PlanningTrainer, is_too_large
from lightning_recompute.policy import nearest
from lightning_recompute.recompute_callback import Recompute
from lightning_recompute.strategy import RecomputeStrategy
from lightning_recompute.version import __version__

PROGRAM = "lightning-recompute"
USAGE_ERROR = 2

DESCRIPTION = "Train any LightningModule with activation recomputation: less memory, the same numbers to the bit."
EPILOG = """The arguments of a class:
  {program} fit --trainer.strategy.help RecomputeStrategy
  {program} fit --trainer.callbacks.help {callback}   (also {callbacks})
  {program} fit --model.help {model}
  {program} fit --data.help {data}
One file of a checkpoint folder:
  {program} consolidate --help   (CHECKPOINT_DIR FILE)"""

# The subcommands that look at the first step of a fit, and the one that runs others.
LOOKING = {**INSPECT, **PLAN}
COMPARE = "compare"

# A mistake in the user's arguments travels through these packages only. With a module of the user's own in between,
# the place matters, and the traceback stays.
_OURS = __name__.partition(".")[0]
_PASSED_THROUGH = {_OURS, "lightning", "torch", *sys.stdlib_module_names}

# Advertisements, and the absence of hardware that nobody asked for.
_NO_NEWS = ("💡 Tip", "TPU available: False", "Loading `train_dataloader` to estimate")


class HelpFormatter(argparse.RawDescriptionHelpFormatter, DefaultHelpFormatter):
    """Leaves the lines of description and epilog as they are."""


class Parser(LightningArgumentParser):
    """A parser that says in one message what is wrong, without the usage of a hundred options around it."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print the message and leave with exit code 2; a parser of a class inside raises, for the outer one."""
        if not self.exit_on_error:
            super().error(message, ex)
        parser = getattr(ex, "subcommand_parser", None) or self
        options = [action.dest for action in parser._actions]
        if getattr(rank_zero_only, "rank", 0) == 0:
            print(f"error: {explain(message, options)}", file=sys.stderr)
        sys.exit(USAGE_ERROR)


class CommandTrainer(InspectingTrainer, PlanningTrainer):
    """Lightning's Trainer with our commands: the subcommands of LightningCLI are methods of its Trainer."""

    compare = staticmethod(compare)


class ValidationLine(pl.Callback):
    """Prints, after each validation in fit, the metrics of the progress bar in a line: a bar leaves none in a log."""

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Print the line."""
        if trainer.sanity_checking or trainer.state.fn != "fit" or not trainer.is_global_zero:
            return
        metrics = [f"{name} {float(value):.4g}" for name, value in trainer.progress_bar_metrics.items()]
        if metrics:
            line = f"Epoch {trainer.current_epoch}, step {trainer.global_step}: {', '.join(metrics)}"
            (trainer.progress_bar_callback or trainer).print(line)


class RecomputeCLI(LightningCLI):
    """LightningCLI with OmegaConf interpolation (`${model.init_args.max_length}`, overrides included).

    Args:
        args: The command line, without the program's name. None: the process's own.
    """

    def __init__(self, args: ArgsType = None) -> None:
        # an interpolation is written from the top of the file; the parser resolves it below the subcommand
        set_parsing_settings(omegaconf_absolute_to_relative_paths=True)
        epilog = EPILOG.format(
            program=PROGRAM,
            callback=MemoryReport.__name__,
            callbacks=", ".join(callback.__name__ for callback in (ThroughputReport, Recompute)),
            model=GPT.__name__,
            data=TextDataModule.__name__,
        )
        common = {"formatter_class": HelpFormatter, "epilog": epilog}
        super().__init__(
            trainer_class=CommandTrainer,
            parser_class=Parser,
            parser_kwargs={
                "prog": PROGRAM,
                "description": DESCRIPTION,
                "version": __version__,
                "parser_mode": "omegaconf+",
                **common,
                **{subcommand: dict(common) for subcommand in self.subcommands()},
            },
            trainer_defaults={"callbacks": [ValidationLine()]},
            # a second run in the same folder replaces the first one's config, as its reports do
            save_config_kwargs={"overwrite": True},
            args=args,
        )

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Lightning's own and ours, with what each does not take from the command line."""
        return {**LightningCLI.subcommands(), **LOOKING, COMPARE: {"config"}}

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse, and say which interpolation has no target."""
        try:
            super().parse_arguments(parser, args)
        except OmegaConfBaseException as error:
            # keys as the user's file has them
            below = re.compile(rf"\b({'|'.join(self.subcommands())})\.")
            key, text = (below.sub("", part, count=1) for part in (str(error.full_key), str(error).splitlines()[0]))
            parser.error(f"{key}: {text}")

    def before_instantiate_classes(self) -> None:
        """Refuse a strategy that is no name; Lightning would only call it invalid."""
        trainer = self.config[self.config["subcommand"]]["trainer"]
        if not isinstance(trainer, Namespace):
            self.parser.error(f"trainer: found {trainer!r}; a mapping of the Trainer's arguments is due")
        if self.config["subcommand"] in LOOKING:
            self._look_on_one_device(trainer)
        strategy = trainer.get("strategy")
        names = ["auto", *StrategyRegistry.available_strategies()]
        if not isinstance(strategy, str) or strategy.lower() in names:
            return
        if "." in strategy:
            self.parser.error(
                f"trainer.strategy: found {strategy!r}, a class path as a plain string; this form is due:\n"
                f"  strategy:\n    class_path: {strategy}\n    init_args: {{}}\n"
                f"or one of the names: {', '.join(RecomputeStrategy.registered_names)}"
            )
        self.parser.error(f"trainer.strategy: there is no strategy named {strategy!r}; {nearest(strategy, names)}")

    def _look_on_one_device(self, trainer: Namespace) -> None:
        """Leave out what a look at the first step does not need, once what it says about recompute is known."""
        arguments = self.config[self.config["subcommand"]]
        given = trainer.as_dict()
        of_config = recompute_entry(given).get("init_args", {})
        for name in ("memory_budget", "blocks"):
            if name in arguments and arguments[name] is None:
                arguments[name] = of_config.get(name)
        is_plan = self.config["subcommand"] in PLAN
        if is_plan:
            for name, value in planned_ranks(given, {name: arguments[name] for name in vars(arguments)}).items():
                arguments[name] = value
        if is_sharded(given) and not (is_plan and is_ours(given.get("strategy"), RecomputeStrategy)):
            logging.getLogger(__name__).warning(
                "the strategy spreads the model over processes; here it is looked at as a whole, on one device. What a "
                "rank needs is measured in a fit: RecomputeStrategy(memory_budget=...)"
            )
        for name, value in ON_ONE_DEVICE.items():
            trainer[name] = value

    def instantiate_classes(self) -> None:
        """Make model, data and Trainer, and say what their constructors refused."""
        if self.config["subcommand"] == COMPARE:  # each setting makes its own, in a process of its own
            self.config_init, self.model, self.datamodule = self.config, None, None
            self.trainer = CommandTrainer  # type: ignore[assignment]  # asked for its command only
            return
        # a model that is too large to build has no memory; what is made of it has none either
        arguments = self.config[self.config["subcommand"]]
        is_fake = arguments.get("fake", False)
        if is_fake is None:
            is_fake = is_too_large(arguments.get("model"))
        try:
            with torch.device("meta") if is_fake else nullcontext():
                super().instantiate_classes()
        except (ValueError, TypeError, OSError, MisconfigurationException) as error:
            cause: BaseException = error
            while cause.__cause__ is not None:
                cause = cause.__cause__
            if not _is_refusal(cause):
                raise
            self.parser.error(str(error))

    def compare(self, **arguments: Any) -> None:
        """Run `compare` with the whole config, which it hands on to other processes."""
        text = self._parser(COMPARE).dump(self.config[COMPARE], skip_none=False, format="json")
        own = {name: value for name, value in arguments.items() if name != "model"}
        compare({name: value for name, value in json.loads(text).items() if name not in own}, **own)


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line and leave with its exit code: 0, 2 for a mistake in the arguments, 1 for other failures.

    Args:
        args: The command line, without the program's name. None: the process's own.
    """
    if args is not None:
        # processes started for further devices run the same command again
        sys.argv = [__file__, *args]
    if os.getcwd() not in sys.path:
        # modules of the user's project are found where the command is given, as under `python -m`
        sys.path.insert(0, os.getcwd())
    _tidy_the_output()
    try:
        if sys.argv[1:2] == [CONSOLIDATE]:
            print(consolidate(sys.argv[2:], PROGRAM))
        else:
            RecomputeCLI()
    except (ValueError, TypeError, OSError, MisconfigurationException) as error:
        frames = list(traceback.walk_tb(error.__traceback__))
        modules = [str(frame.f_globals.get("__name__")) for frame, _ in frames[1:]]
        if not _is_refusal(error) or {module.partition(".")[0] for module in modules} - _PASSED_THROUGH:
            raise
        # before the first batch every process of a node refuses the same
        in_loop = any(module.startswith("lightning.pytorch.loops") for module in modules)
        if os.environ.get("LOCAL_RANK", "0") == "0" or in_loop:
            print(f"error: {error}", file=sys.stderr)
        sys.exit(USAGE_ERROR)


def _is_refusal(error: BaseException) -> bool:
    """Whether an error was raised by a `raise` statement, with words for the user, and not by Python itself."""
    position = error.__traceback__
    while position is not None and position.tb_next is not None:
        position = position.tb_next
    if position is None or not isinstance(error, ValueError | TypeError | OSError | MisconfigurationException):
        return False
    return position.tb_frame.f_code.co_code[position.tb_lasti] == dis.opmap["RAISE_VARARGS"]


def _tidy_the_output() -> None:
    """Let the package's own log lines be read, and leave out what tells the user nothing."""
    logger = logging.getLogger(_OURS)
    logger.setLevel(logging.INFO)
    if not logger.handlers:
        logger.addHandler(logging.StreamHandler())
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_is_news)
    # between two releases of Lightning and torch; nothing that a user could change
    warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")


def _is_news(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_NO_NEWS)


if __name__ == "__main__":
    main()
