"""The data-parallel half of the strategy, and with it every private name of Lightning that we lean on.

Lightning keeps launchers, process groups, forward redirection and the strategy's own hooks behind an
underscore, and only documents them by its own strategies. They are used here (those of signals in
`signal_to_end`) and nowhere else, so that a release that moves one breaks this file and its test, not training.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, ClassVar, Literal, TypeVar, get_args

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.fabric.utilities.distributed import (
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.overrides.distributed import _sync_module_states, prepare_for_backward
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy, SingleDeviceStrategy
from lightning.pytorch.strategies.ddp import _DDPForwardRedirection
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core import rank_zero
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from lightning_recompute.materialize import move_values
from lightning_recompute.signal_to_end import SignalToEnd

StartMethod = Literal["popen", "spawn", "fork", "forkserver"]
Value = TypeVar("Value")

OTHER_LIGHTNING = "pytorch_lightning"


class ForwardRedirection(_DDPForwardRedirection):
    """Sends a step through the wrapper's forward, and leaves no `forward` behind on the module.

    Lightning's own parks the bound method in the module's `__dict__` for ever.
    """

    def __call__(
        self,
        wrapper_module: nn.Module,
        original_module: pl.LightningModule,
        method_name: str,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Call `original_module.<method_name>(*args, **kwargs)` by way of `wrapper_module.forward`."""
        before = {key: value for key, value in vars(original_module).items() if key == "forward"}
        try:
            return super().__call__(wrapper_module, original_module, method_name, *args, **kwargs)
        finally:
            vars(original_module).pop("forward", None)
            vars(original_module).update(before)


class ReplicatedStrategy(ParallelStrategy):
    """One copy of the module per process, gradients averaged by torch's DistributedDataParallel.

    On one device there is no process group, no launcher, no re-seeding and no wrapper: what Lightning's
    SingleDeviceStrategy does, to the bit.

    Args:
        find_unused_parameters: Whether DistributedDataParallel looks for parameters without a gradient.
        process_group_backend: Backend of torch.distributed; None: the device's usual one (nccl, gloo).
        timeout: How long a collective waits for the other processes; None: torch's own default.
        start_method: How the processes of a node are started.
        accelerator: As in Lightning's own strategies; the Trainer sets it.
        parallel_devices: Devices of this node, one per process; the Trainer sets them.
        cluster_environment: Who tells ranks and addresses; the Trainer sets it.
        checkpoint_io: How checkpoint files are written.
        precision_plugin: The precision; the Trainer sets it.

    Raises:
        ValueError: `start_method` is none of Lightning's.
    """

    registered_names: ClassVar[dict[str, StartMethod]] = {}
    """Names for `Trainer(strategy=...)`, each with the start method that it means."""

    def __init__(
        self,
        *,
        find_unused_parameters: bool,
        process_group_backend: str | None,
        timeout: timedelta | None,
        start_method: StartMethod,
        accelerator: Accelerator | None,
        parallel_devices: list[torch.device] | None,
        cluster_environment: ClusterEnvironment | None,
        checkpoint_io: CheckpointIO | None,
        precision_plugin: Precision | None,
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        if start_method not in get_args(StartMethod):
            raise ValueError(f"start_method={start_method!r}: one of {', '.join(get_args(StartMethod))} is due")
        self.find_unused_parameters = find_unused_parameters
        self.process_group_backend = process_group_backend
        self.timeout = timeout
        self.start_method = start_method
        self.num_nodes = 1
        self._forward_redirection = ForwardRedirection()
        self._synchronized_layers = False
        self._signal: SignalToEnd | None = None

    # ---- who we are -------------------------------------------------------------------------------------

    @property
    def accelerator(self) -> Accelerator | None:
        """The accelerator, set by the Trainer."""
        return self._accelerator

    @accelerator.setter
    def accelerator(self, accelerator: Accelerator) -> None:
        # the first thing a Trainer gives to its strategy, and the first sign of which Lightning it is from
        if any(cls.__module__.partition(".")[0] == OTHER_LIGHTNING for cls in type(accelerator).__mro__):
            raise TypeError(
                f"{type(self).__name__} works in the Trainer of `lightning.pytorch`, found the Trainer of "
                f"`{OTHER_LIGHTNING}`: they are two copies of one library and do not mix. Import Lightning by "
                "`import lightning.pytorch as pl` in place of `import pytorch_lightning as pl`, or keep the strategy "
                "you have and add the callback lightning_recompute.Recompute(...), which works with both"
            )
        self._accelerator = accelerator

    @property
    def num_processes(self) -> int:
        """Processes on this node, one a device."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def is_distributed(self) -> bool:
        """Whether samplers are split and `sync_dist` means anything; Lightning asks by this name."""
        return self.has_peers

    @property
    def has_peers(self) -> bool:
        """Whether there are other processes."""
        return self.world_size > 1

    # A process that trains alone is rank 0 on its first device, even when it is some rank of another world.
    @property
    def global_rank(self) -> int:
        """Rank among all processes."""
        return super().global_rank if self.has_peers else 0

    @property
    def local_rank(self) -> int:
        """Rank among the processes of this node."""
        return super().local_rank if self.has_peers else 0

    @property
    def node_rank(self) -> int:
        """Index of this node."""
        return super().node_rank if self.has_peers else 0

    @property
    def root_device(self) -> torch.device:
        """The device of this process."""
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """How Lightning's injected sampler splits the data."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def set_world_ranks(self) -> None:
        """Tell the cluster environment, and Lightning's rank-zero functions, who this process is."""
        if self.cluster_environment is None:
            return
        self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        if self.has_peers:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            # Lightning keeps the rank as an attribute of the decorator
            vars(rank_zero.rank_zero_only)["rank"] = self.global_rank

    # ---- processes --------------------------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self._launcher = None
        if self.num_nodes * self.num_processes == 1 and not self.has_peers:
            return
        if self.start_method == "popen":
            self._launcher = _SubprocessScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)
        else:
            self._launcher = _MultiProcessingLauncher(self, start_method=self.start_method)

    def setup_environment(self) -> None:
        """Set the device up and, with several processes, join them in a process group."""
        super().setup_environment()
        if not self.has_peers:
            return
        assert self.cluster_environment is not None
        # every process starts from the same weights and draws the same numbers, as under Lightning's DDP
        reset_seed()
        self.set_world_ranks()
        backend = self.process_group_backend or _get_default_process_group_backend_for_device(self.root_device)
        device = None if self.root_device.type == "cpu" else self.root_device
        _init_dist_connection(self.cluster_environment, backend, timeout=self.timeout, device_id=device)

    # ---- the module -------------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer) -> None:
        """Bring the module to its device, wrap it when several processes train it, make the optimizers."""
        assert self.accelerator is not None
        assert self.model is not None
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting and self.has_peers and SignalToEnd.is_due(trainer):
            self._signal = SignalToEnd(trainer, self.root_device)
        if fitting and self.has_peers and self._layer_sync:
            self.model = self._layer_sync.apply(self.model)
            self._synchronized_layers = True
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        self.divide_module(trainer)
        if fitting:
            self.prepare_module(trainer)
        if not self.spread_module() and self.has_peers:
            if fitting:
                self.model = self._setup_model(self.model)
            else:
                _sync_module_states(self.model)
        if fitting:
            # a second fit must not carry the first one's optimizers while it makes its own
            self._reset_optimizers_and_schedulers()
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if fitting:
            _optimizers_to_device(self.optimizers, self.root_device)

    def divide_module(self, trainer: pl.Trainer) -> None:
        """What is done first to a module that is on its device, for any kind of run."""

    def prepare_module(self, trainer: pl.Trainer) -> None:
        """What is done to a module that is about to be trained: on its device, not yet wrapped."""

    def spread_module(self) -> bool:
        """What is done in place of DistributedDataParallel; returns whether that is not needed."""
        return False

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        # torch's notes on CUDA semantics: build the wrapper on a side stream
        with nullcontext() if self.root_device.type == "cpu" else torch.Stream(self.root_device):
            return DistributedDataParallel(
                model, device_ids=self._device_ids(), find_unused_parameters=self.find_unused_parameters
            )

    def _device_ids(self) -> list[int] | None:
        return None if self.root_device.type == "cpu" else [self.root_device.index]

    def model_to_device(self) -> None:
        """Move the module to this process's device."""
        assert self.model is not None
        move_values(self.model, self.root_device)

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Arm the gradient reduction where the user calls backward (manual optimization)."""
        module = self.lightning_module
        if isinstance(self.model, DistributedDataParallel) and module and not module.automatic_optimization:
            prepare_for_backward(self.model, closure_loss)

    def teardown(self) -> None:
        """Unwrap the module, bring it back to the CPU and release what the run held."""
        self.model = self.lightning_module
        if self._signal is not None:
            self._signal.remove()
            self._signal = None
        if self._synchronized_layers:
            assert self._layer_sync is not None
            assert self.model is not None
            self._synchronized_layers = False
            self.model = self._layer_sync.revert(self.model)
        if self.has_peers:
            super().teardown()
        else:
            # a process that trains alone has set no environment up, and must not clean somebody else's
            super(ParallelStrategy, self).teardown()

    # ---- collectives ------------------------------------------------------------------------------------

    @property
    def _peers_listen(self) -> bool:
        # Callbacks reduce before the process group exists (EarlyStopping) and save a checkpoint after this
        # process alone failed (OnExceptionCheckpoint): nobody answers then, and asking would hang.
        if not (self.has_peers and dist.is_available() and dist.is_initialized()):
            return False
        trainer = self.lightning_module._trainer if self.lightning_module is not None else None
        return trainer is None or not trainer.interrupted

    def barrier(self, name: str | None = None) -> None:
        """Wait for all processes."""
        if self._peers_listen:
            dist.barrier(device_ids=self._device_ids() if dist.get_backend() == "nccl" else None)

    def broadcast(self, obj: Value, src: int = 0) -> Value:
        """Give every process the object of rank `src`."""
        if not self._peers_listen:
            return obj
        box = [obj]
        dist.broadcast_object_list(box, src)
        return box[0]

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: dist.ReduceOp | str | None = "mean") -> Any:
        """Reduce a tensor over the data-parallel processes, in place; anything else is returned as it is."""
        if isinstance(tensor, Tensor) and self._peers_listen:
            return _sync_ddp_if_available(tensor, group, reduce_op=reduce_op)
        return tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all (or any) of the processes of the whole world decided so."""
        if not self._peers_listen:
            return decision
        votes = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(votes)
        return int(votes) == self.world_size if all else int(votes) > 0

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Stack the tensors of all processes, (world_size, *shape); alone: the tensor itself."""
        return super().all_gather(tensor, group, sync_grads) if self._peers_listen else tensor

    @classmethod
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        """Enter our names in Lightning's registry; again is as good as once."""
        for name, start_method in cls.registered_names.items():
            strategy_registry.register(
                name, cls, f"{cls.__name__} with start_method={start_method!r}", True, start_method=start_method
            )


def accept_compiled_modules(strategy: type[ReplicatedStrategy]) -> None:
    """Let `strategy` train what torch.compile made of a LightningModule.

    Lightning allows that for a fixed list of classes by isinstance; this class is asked for nowhere else.
    """
    SingleDeviceStrategy.register(strategy)


def set_device_mesh(module: pl.LightningModule, mesh: DeviceMesh | None) -> None:
    """Let `module.device_mesh` give a mesh, as under Lightning's ModelParallelStrategy."""
    module._device_mesh = mesh


def is_compiled(module: pl.LightningModule) -> bool:
    """Whether the steps of a LightningModule run under torch.compile."""
    return module._compiler_ctx is not None


def meet_other_lightning(strategy: type[ReplicatedStrategy]) -> None:
    """Let the other Lightning's Trainer take `strategy` far enough to be told why it cannot use it.

    Without this its users read "invalid strategy name" and look for a typing error.
    """
    if other := sys.modules.get(f"{OTHER_LIGHTNING}.strategies"):
        other.Strategy.register(strategy)
        strategy.register_strategies(other.StrategyRegistry)
