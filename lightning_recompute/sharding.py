"""A module sharded over the mesh axis `data`: torch's FSDP2, which leaves nothing behind.

Parameters are kept, reduced and updated in their own dtype, whatever the precision: autocast casts weights for matrix
products only, so gathering them in bf16 would round the weights of norms and embeddings as well and change the
numbers; under the true precisions they have the dtype of the computation already.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from lightning_recompute.data_parallel import DataParallel, Given, Result
from lightning_recompute.groups import ParallelGroups
from lightning_recompute.reduction import GradientReduction
from lightning_recompute.shard_choice import carry_over_all, parameters_apart

Prepare = Callable[[Sequence[nn.Module]], Mapping[nn.Parameter, nn.Parameter]]


class Sharded(DataParallel):
    """Every data rank holds a part of each parameter; see `shard`."""

    def __init__(
        self,
        module: nn.Module,
        groups: ParallelGroups,
        units: Sequence[Sequence[nn.Module]],
        reshard_after_forward: bool | None,
        find_unused_parameters: bool,
        prepare: Prepare | None,
    ) -> None:
        super().__init__(module, groups)
        self._depth = 0
        self._handles: list[RemovableHandle] = []
        self._states: list[Any] = []
        self._classes: list[tuple[nn.Module, type[nn.Module]]] = []
        self._added: list[tuple[nn.Module, set[str]]] = []
        # lists: a metric's hash changes with its state
        before = [(part, type(part), set(vars(part))) for part in module.modules()]
        former = dict(module.named_parameters(remove_duplicate=False))
        whole, of_root = parameters_apart(module, units)
        self._averaged = GradientReduction((), self._group)
        options: dict[str, Any] = {
            "mesh": groups.data_mesh,
            "reshard_after_forward": reshard_after_forward,
            "mp_policy": MixedPrecisionPolicy(cast_forward_inputs=False),
        }
        try:
            for blocks in (*units, [module]):
                if prepare is not None:
                    new = prepare(blocks)
                    whole, of_root = ({new.get(p, p) for p in apart} for apart in (whole, of_root))
                apart = whole if blocks[0] is module else whole | of_root
                fully_shard(blocks[0] if len(blocks) == 1 else list(blocks), ignored_params=apart, **options)
            averaged = [p for p in module.parameters() if p in whole]
            self._averaged = GradientReduction(averaged, self._group, self.reduces_in_backward)
            self._root: Any = module._get_fsdp_state()  # type: ignore[operator]
            self._root._lazy_init()
        except BaseException:
            self._remember(before)
            self.remove()
            raise
        self._remember(before)
        carry_over_all(former, dict(module.named_parameters(remove_duplicate=False)))
        if find_unused_parameters:
            module.set_reduce_scatter_unused_params(True)  # type: ignore[operator]
        for state in self._states:
            # the whole parameters are made once and for all: not under inference_mode, in a validation step
            state._modules[0].unshard()
            state._modules[0].reshard()
        self._enter_by_own_hooks()

    def _remember(self, before: Sequence[tuple[nn.Module, type[nn.Module], set[str]]]) -> None:
        """Note what FSDP2 has changed."""
        self._classes = [(part, cls) for part, cls, _ in before if type(part) is not cls]
        self._added = [(part, set(vars(part)) - keys) for part, _, keys in before]
        self._states = list(dict.fromkeys(part._get_fsdp_state() for part, _ in self._classes))  # type: ignore[operator]

    @property
    def _reduction(self) -> GradientReduction:
        return self._averaged

    # ---- forward ----------------------------------------------------------------------------------------

    # Torch's hooks take the module's own forward for the whole step. Here it is a part of one, if it is called at all,
    # and after a backward in the middle of a step (manual optimization) the step needs the parameters again.

    def _enter_by_own_hooks(self) -> None:
        self._root._pre_forward_hook_handle.remove()
        self._root._post_forward_hook_handle.remove()
        self._handles = [
            self.module.register_forward_pre_hook(lambda module, args: self._enter(), prepend=True),
            self.module.register_forward_hook(lambda module, args, output: self._leave(output), always_call=True),
        ]
        for part in _owners(self._root):
            if part is not self.module:
                self._handles.append(part.register_forward_pre_hook(lambda module, args: self._again(), prepend=True))

    def _enter(self) -> None:
        self._depth += 1
        self._again()

    def _again(self) -> None:
        if self._depth and self._root._training_state.name == "IDLE":
            self._root._pre_forward(self.module, (), {})

    def _leave(self, output: Any) -> Any:
        self._depth -= 1
        if self._depth or self._root._training_state.name != "FORWARD":
            return output
        output = self._root._post_forward(self.module, (), output)
        if not torch.is_grad_enabled() or not any(
            isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(output)
        ):
            # no backward will: between steps a module shows its sharded parameters
            self.module.reshard()  # type: ignore[operator]
        return output

    def run(self, step: Callable[Given, Result], *args: Given.args, **kwargs: Given.kwargs) -> Result:
        """Run a method of the module that takes a batch; see `DataParallel.run`. After an error in it: `reset`."""
        self._enter()
        try:
            result = super().run(step, *args, **kwargs)
        except BaseException:
            self.reset()
            raise
        left: Result = self._leave(result)
        return left

    # ---- backward ---------------------------------------------------------------------------------------

    def before_backward(self, loss: Tensor) -> None:
        """Before each backward: gather again what was freed by an earlier one of the same step."""
        if loss.requires_grad:
            loss.register_hook(self._root._pre_backward)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward within leaves each rank the gradients of the whole parameters, without communication of them."""
        module: Any = self.module
        former = self._averaged.active
        with super().no_sync():
            module.set_requires_gradient_sync(False)
            try:
                yield
            finally:
                module.set_requires_gradient_sync(former)

    # ---- steps that are only tried ----------------------------------------------------------------------

    @contextlib.contextmanager
    def trying(self) -> Iterator[None]:
        """Within, steps and their backwards leave no gradients but in `grad` of the module's parameters."""
        gathered = [each for each in _managed(self._states) if hasattr(each, "_unsharded_param")]
        former = [(each, each.unsharded_accumulated_grad, each.unsharded_param.grad) for each in gathered]
        self.reset()
        try:
            yield
        finally:
            self.reset()
            for each, accumulated, gradient in former:
                each.unsharded_accumulated_grad = accumulated
                each.unsharded_param.grad = gradient

    @contextlib.contextmanager
    def whole(self, block: nn.Module) -> Iterator[None]:
        """Within, a unit has its parameters whole, and those that it shares with the root; collective."""
        units: list[Any] = [
            state._modules[0] for state in self._states if state is self._root or block in state._modules
        ]
        for unit in units:
            unit.unshard()
        try:
            yield
        finally:
            for unit in units:
                unit.reshard()

    # ---- the end ----------------------------------------------------------------------------------------

    def reset(self) -> None:
        """After an error in a step or backward: forget it. Gradients of that accumulation window are lost."""
        self._depth = 0
        self._averaged.prepare()
        if isinstance(self.module, FSDPModule):
            self.module.reset_iter_state()
        for parameter in _managed(self._states):
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter.unsharded_param.grad = None

    def remove(self) -> None:
        """Take everything off the module, also after an error; the parameters stay sharded (see `make_whole`)."""
        self.reset()
        self._averaged.remove()
        while self._handles:
            self._handles.pop().remove()
        for state in self._states:
            state._pre_forward_hook_handle.remove()
            state._post_forward_hook_handle.remove()
            for group in state._fsdp_param_groups:
                for handle in (
                    *group._module_to_pre_save_state_dict_hook_handle.values(),
                    *group._module_to_pre_load_state_dict_hook_handle.values(),
                    *(parameter._post_load_hook_handle for parameter in group.fsdp_params),
                ):
                    handle.remove()
            for part in state._modules:
                _module_state_mapping.pop(part, None)
        self._states.clear()
        for part, cls in self._classes:
            part.__class__ = cls
        for part, keys in self._added:
            for key in keys:
                vars(part).pop(key, None)
        self._classes.clear()
        self._added.clear()


def shard(
    module: nn.Module,
    groups: ParallelGroups,
    units: Sequence[Sequence[nn.Module]],
    *,
    reshard_after_forward: bool | None = None,
    find_unused_parameters: bool = False,
    prepare: Prepare | None = None,
    kind: type[Sharded] = Sharded,
) -> Sharded:
    """Shard the parameters, gradients and optimizer states of a module over `data`; collective.

    The parameters of each unit are gathered before its forward and again before its backward, once for both its
    replay and its backward; what is in no unit is gathered once a step. A parameter that units share, a scalar,
    and one whose dtype is not the unit's, are kept whole, and their gradients averaged.

    Args:
        module: The module, on its device. Parameters may be DTensors on `tensor`; they end on `data` and `tensor`.
        groups: The groups.
        units: Consecutive blocks that are gathered together; those that recompute takes as one unit have to be. A block
            that stands in several of them belongs to the first.
        reshard_after_forward: Whether units are freed after forward. None: as torch does, units are, and what is in
            no unit stays until backward, because that begins with it.
        find_unused_parameters: Whether ranks may differ in which parameters of a unit get a gradient; one that has none
            on any rank then gets zeros.
        prepare: Called with the blocks of each unit, and at last with the module, before they are sharded: gives values
            to what is on the meta device. Returns, for each parameter that it has exchanged so far, the new one.
        kind: What runs the steps.

    Returns:
        What runs the module's steps and removes itself.

    Raises:
        ValueError: A torch whose FSDP2 cannot forget a failed step.
    """
    if not hasattr(FSDPModule, "reset_iter_state"):
        raise ValueError(
            f"data_parallel='shard' needs torch 2.13 or later, found {torch.__version__}; upgrade torch, or take "
            "data_parallel='replicate'"
        )
    seen: set[nn.Module] = set()
    once: list[list[nn.Module]] = []
    for unit in units:
        blocks = [block for block in dict.fromkeys(unit) if block not in seen]
        seen |= set(blocks)
        if blocks:
            once.append(blocks)
    return kind(module, groups, once, reshard_after_forward, find_unused_parameters, prepare)


def _managed(states: Sequence[Any]) -> Iterator[Any]:
    for state in states:
        for group in state._fsdp_param_groups:
            yield from group.fsdp_params


def _owners(state: Any) -> list[nn.Module]:
    """Modules that have a parameter of a state's group."""
    found: list[nn.Module] = []
    for parameter in _managed([state]):
        info = parameter._module_info
        found += [part for part in (info.module, *info.shared_modules) if part not in found]
    return found
