"""Optimizers of a whole module, while this rank has some of its parameters only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import LBFGS, Optimizer

from lightning_recompute.checkpoint_loading import laid_out_states
from lightning_recompute.optimizer_names import (
    NAMES,
    all_names,
    is_torchs,
    matched_to,
    named_state,
    names_in_groups,
)
from lightning_recompute.saved_states import Saved, with_unread

_OVER_ALL_PARAMETERS = (LBFGS,)


class StageOptimizers:
    """The optimizers that a user made of all parameters of a module.

    The order of calls: `hold` for states that are loaded before the parameters are divided; `divide`; `load` for
    states that are loaded while they are; `restore`. `state` at any time.

    Args:
        module: The whole module.
        optimizers: Torch's own, not Lightning's wrappers.

    Raises:
        ValueError: One whose step looks at all parameters together, or whose state dict has not torch's form.
    """

    def __init__(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        for optimizer in optimizers:
            kind = type(optimizer).__name__
            if isinstance(optimizer, _OVER_ALL_PARAMETERS):
                raise ValueError(
                    f"{kind} under pipeline_parallel_size > 1: its step looks at all parameters together, and each "
                    "rank has those of its stages; take another optimizer, or no pipeline"
                )
            if not is_torchs(optimizer.state_dict()):
                raise ValueError(
                    f"{kind} under pipeline_parallel_size > 1: its state_dict() has no 'state' and 'param_groups', "
                    "by which the ranks put their parameters' states together; take another optimizer, or no pipeline"
                )
        self._module = module
        self._optimizers = list(optimizers)
        self._aliases = all_names(module)
        self._held: list[dict[str, Any]] = []
        # while they are divided: of the whole, for each optimizer and group names and parameters
        self._groups: list[list[list[tuple[str, nn.Parameter]]]] = []
        self._owned: Mapping[str, nn.Parameter] = {}

    @property
    def holds(self) -> bool:
        """Whether states were loaded that the optimizers do not have yet."""
        return bool(self._held)

    def hold(self, states: Sequence[Mapping[str, Any]], *, strict: bool = True) -> None:
        """Load the options of the groups, and keep the states until it is known which of them are this rank's.

        Args:
            states: `checkpoint["optimizer_states"]`.
            strict: Refuse parameters that the saved optimizers did not have, and the other way round.

        Raises:
            ValueError: The numbers of optimizers, groups or (when strict) the parameters differ.
        """
        self._check_number(states)
        held = []
        for optimizer, state in zip(self._optimizers, states, strict=True):
            names = names_in_groups(optimizer, self._aliases)
            own = matched_to(state, names, type(optimizer).__name__, strict=strict)
            optimizer.load_state_dict({**own, "state": {}})
            held.append(_by_name(own["state"], [each[0] for group in names for each in group]))
        self._held = held

    def divide(self, owned: Mapping[str, nn.Parameter]) -> None:
        """Leave each optimizer the parameters that this rank has, with their states.

        Args:
            owned: By their names in the whole module, the parameters as they are now.
        """
        self._owned = owned
        held, self._held = self._held, []
        for index, optimizer in enumerate(self._optimizers):
            listed = names_in_groups(optimizer, self._aliases)
            former = [
                [(names[0], parameter) for names, parameter in zip(group, options["params"], strict=True)]
                for group, options in zip(listed, optimizer.param_groups, strict=True)
            ]
            names = {each: name for group in former for name, each in group}
            states: dict[Any, Any] = {names.get(key, key): value for key, value in optimizer.state.items()}
            # those that were exchanged (sharded) are let go of: their memory is that of whole parameters
            groups = [[(name, owned.get(name, each)) for name, each in group] for group in former]
            self._groups.append(groups)
            for options, group in zip(optimizer.param_groups, groups, strict=True):
                options["params"] = [each for name, each in group if self._is_here(name, each)]
            optimizer.state.clear()
            if states := held[index] if held else states:
                # options that were changed since the states were loaded stay
                self._give(optimizer, groups, states, optimizer.state_dict()["param_groups"])
        self._aliases = {owned.get(names[0], each): names for each, names in self._aliases.items()}

    def load(self, states: Sequence[Mapping[str, Any]], *, strict: bool = True) -> None:
        """Load states while the parameters are divided.

        Args:
            states: `checkpoint["optimizer_states"]` of the same module, of all its parameters.
            strict: Refuse parameters that the saved optimizers did not have, and the other way round.

        Raises:
            ValueError: See `hold`.
        """
        self._check_number(states)
        for optimizer, groups, state in zip(self._optimizers, self._groups, states, strict=True):
            names = [[self._aliases.get(each, [name]) for name, each in group] for group in groups]
            own = matched_to(state, names, type(optimizer).__name__, strict=strict)
            if [len(saved["params"]) for saved in own["param_groups"]] != [len(group) for group in groups]:
                raise ValueError(
                    f"the checkpoint's {type(optimizer).__name__} has other numbers of parameters in its groups; "
                    "configure_optimizers has to make the groups that were saved"
                )
            now = optimizer.state_dict()["param_groups"]
            options = [
                {**saved, "params": group["params"]} for saved, group in zip(own["param_groups"], now, strict=True)
            ]
            by_name = _by_name(own["state"], [name for group in groups for name, _ in group])
            self._give(optimizer, groups, by_name, options)

    def state(self, optimizer: Optimizer, *, with_held: bool) -> dict[str, Any]:
        """The state dict of an optimizer, numbered as that of all parameters, with their names beside it.

        Args:
            optimizer: One of these, or another one of the same module.
            with_held: Read states that nobody has taken yet. All ranks hold the same: one has to save them.

        Returns:
            See `named_state`. While the parameters are divided it has the states of this rank's only.

        Raises:
            ValueError: The optimizer was given others while they were divided.
        """
        index = next((index for index, each in enumerate(self._optimizers) if each is optimizer), None)
        if index is not None and self._groups:
            return self._state(optimizer, self._groups[index])
        made = named_state(optimizer, self._module)
        if index is not None and self._held:
            numbers = {name: number for number, name in enumerate(made[NAMES])}
            held = with_unread(self._held[index], Saved.read) if with_held else {}
            made["state"] = {numbers.get(name, name): state for name, state in held.items()}
        return made

    def before_writing(self, path: Path) -> None:
        """See that states which have not been read do not go with the folder they are in.

        Args:
            path: What is about to be replaced.
        """
        if not path.exists():
            return

        def read(saved: Saved) -> Any:
            folder = saved.reader.folder
            return saved.read() if folder.exists() and folder.samefile(path) else saved

        self._held = [with_unread(held, read) for held in self._held]

    def restore(self) -> None:
        """Give the optimizers all parameters again; of others than this rank's they have no state."""
        now = dict(self._module.named_parameters())
        for optimizer, groups in zip(self._optimizers, self._groups, strict=False):
            for options, group in zip(optimizer.param_groups, groups, strict=False):
                options["params"] = [now.get(name, each) for name, each in group]
            for name, parameter in self._owned.items():
                if parameter in optimizer.state and name in now and now[name] is not parameter:
                    optimizer.state[now[name]] = optimizer.state.pop(parameter)
        self._owned, self._groups = {}, []

    def _check_number(self, states: Sequence[Mapping[str, Any]]) -> None:
        if len(states) != len(self._optimizers):
            raise ValueError(
                f"the checkpoint has the states of {len(states)} optimizers, configure_optimizers made "
                f"{len(self._optimizers)}; make those that were saved, or load the weights only"
            )

    def _is_here(self, name: str, parameter: nn.Parameter) -> bool:
        """Whether this rank has a parameter of the whole; those that are none of the module's are on each."""
        return name in self._owned or parameter not in self._aliases

    def _give(
        self,
        optimizer: Optimizer,
        groups: Sequence[Sequence[tuple[str, nn.Parameter]]],
        states: Mapping[Any, Any],
        options: Sequence[Mapping[str, Any]],
    ) -> None:
        """Load what this rank has of states by name; others are not read."""
        names = {name for group in groups for name, _ in group}
        here = [name for group in groups for name, each in group if self._is_here(name, each)]
        own = {number: states[name] for number, name in enumerate(here) if name in states}
        own |= {key: state for key, state in states.items() if key not in names}
        laid_out = laid_out_states(own, optimizer)
        optimizer.load_state_dict({**optimizer.state_dict(), "state": laid_out, "param_groups": list(options)})

    def _state(self, optimizer: Optimizer, groups: Sequence[Sequence[tuple[str, nn.Parameter]]]) -> dict[str, Any]:
        names: list[str] = []
        here, ranges = [], []
        for group in groups:
            ranges.append(list(range(len(names), len(names) + len(group))))
            here.append([len(names) + place for place, pair in enumerate(group) if self._is_here(*pair)])
            names += [name for name, _ in group]
        own = optimizer.state_dict()
        if [len(options["params"]) for options in own["param_groups"]] != [len(numbers) for numbers in here]:
            raise ValueError(
                f"{type(optimizer).__name__} was given other parameters after the first batch, when they were divided "
                "over the pipeline stages: ranks that have different groups cannot save one checkpoint. Make all "
                "groups in configure_optimizers, or before the first batch"
            )
        numbers = [number for group in here for number in group]
        return {
            **own,
            "state": {numbers[key] if isinstance(key, int) else key: state for key, state in own["state"].items()},
            "param_groups": [
                {**options, "params": whole} for options, whole in zip(own["param_groups"], ranges, strict=True)
            ],
            NAMES: names,
        }


def _by_name(states: Mapping[Any, Any], names: Sequence[str]) -> dict[Any, Any]:
    return {names[key] if isinstance(key, int) and key < len(names) else key: state for key, state in states.items()}
