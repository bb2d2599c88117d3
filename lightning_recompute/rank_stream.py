"""Random numbers under tensor parallelism: alike on all ranks where they do the same work, apart where they share it.

Dropout on what every rank has alike needs the same mask everywhere; dropout on a rank's own heads, or on its own part
of a sequence, a mask of its own. Both draw from torch's default generator, whose state is exchanged when the
computation goes from one kind of work to the other (Megatron-LM's named random states).
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from lightning_recompute import ambient
from lightning_recompute.ambient import RngStates

_SEED_STEP = 2718
# which of both kinds the default generators draw, in the form of a state; told apart by identity, as is safe even
# where tensors are fake
_SHARED, _APART = torch.tensor(False), torch.tensor(True)


class RankStream:
    """This rank's own random numbers beside the ones it shares.

    While it is attached (`ambient.attach`), a replay restores both.

    Args:
        group: The tensor-parallel ranks.
        device: Where they compute.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._devices = ambient.rng_devices([torch.empty(0, device=device)])
        share_states(group, self._devices)
        shared = ambient.own_rng_states(self._devices)
        # a seed that follows from the shared state, so that it is another one after another `seed_everything`
        seed = int(torch.randint(2**48, ()).item()) + _SEED_STEP * (group.rank() + 1)
        ambient.set_own_rng_states(self._devices, shared)
        self.apart = False
        """Whether the default generators draw this rank's own numbers now."""
        with torch.random.fork_rng(self._devices, device_type=device.type if self._devices else "cuda"):
            torch.manual_seed(seed)
            self._parked = ambient.own_rng_states(self._devices)

    def switch(self, apart: bool) -> bool:
        """Go on with the rank's own numbers, or with the shared ones.

        Args:
            apart: Which.

        Returns:
            What it was.
        """
        before = self.apart
        if before != apart:
            self.apart = apart
            now = ambient.own_rng_states(self._devices)
            ambient.set_own_rng_states(self._devices, self._parked)
            self._parked = now
        return before

    def read(self) -> RngStates:
        """What a replay has to restore beside the default generators."""
        return (_APART if self.apart else _SHARED, *self._parked)

    def write(self, states: RngStates) -> None:
        """Restore what `read` gave."""
        self.apart = states[0] is _APART
        self._parked = tuple(states[1:])


def share_states(group: dist.ProcessGroup, devices: tuple[torch.device, ...]) -> None:
    """Let every rank of a group draw the numbers of its first from now on; collective.

    Args:
        group: The group.
        devices: Of the generators beside the CPU's; see `ambient.rng_devices`.
    """
    first = dist.get_global_rank(group, 0)
    for state in (states := ambient.own_rng_states(devices)):
        on_device = state.to(devices[0]) if devices else state
        dist.broadcast(on_device, first, group=group)
        state.copy_(on_device)
    ambient.set_own_rng_states(devices, states)


def share_all_states(group: dist.ProcessGroup, device: torch.device) -> None:
    """Let every rank of a group draw the numbers of its first, Python's and NumPy's too; collective.

    Args:
        group: The group.
        device: Where its ranks compute.
    """
    share_states(group, ambient.rng_devices([torch.empty(0, device=device)]))
    box = [ambient.host_rng()]
    dist.broadcast_object_list(box, group=group, group_src=0)
    ambient.set_host_rng(box[0])
