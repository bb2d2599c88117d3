"""Which ranks share a layer, which share the data: the world as a mesh."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

AXES = ("pipeline", "data", "tensor")
"""Axes of the mesh, slowest first: tensor-parallel ranks are neighbours."""


def data_size(world_size: int, *, tensor: int = 1, pipeline: int = 1) -> int:
    """How many data-parallel groups of ranks a world has room for: what the other sizes leave of it.

    Args:
        world_size: Processes.
        tensor: Ranks that share each layer.
        pipeline: Pipeline stages.

    Returns:
        The size of the data-parallel axis.

    Raises:
        ValueError: The other sizes do not divide the world.
    """
    found, rest = divmod(world_size, tensor * pipeline)
    if rest or not found:
        product = tensor * pipeline
        near = sorted({product * max(1, found), product * (found + 1)})
        raise ValueError(
            f"tensor_parallel_size={tensor} x pipeline_parallel_size={pipeline} do not divide the {world_size} "
            f"process{'es' if world_size > 1 else ''} of this run; take {' or '.join(map(str, near))} (devices x "
            "num_nodes), or other sizes"
        )
    return found


@dataclass(frozen=True)
class ParallelGroups:
    """The groups of this process.

    Args:
        mesh: Over the whole world, with the axes `AXES`.
    """

    mesh: DeviceMesh

    @classmethod
    def build(cls, device_type: str, *, tensor: int = 1, pipeline: int = 1) -> ParallelGroups:
        """Divide the world; collective: every process calls it.

        Args:
            device_type: `cpu` or `cuda`.
            tensor: Ranks that share each layer.
            pipeline: Pipeline stages.

        Returns:
            The groups.

        Raises:
            ValueError: The sizes do not divide the world.
        """
        data = data_size(dist.get_world_size(), tensor=tensor, pipeline=pipeline)
        return cls(init_device_mesh(device_type, (pipeline, data, tensor), mesh_dim_names=AXES))

    def size(self, axis: str) -> int:
        """Ranks along an axis."""
        return self.mesh.size(AXES.index(axis))

    def rank(self, axis: str) -> int:
        """This process's place along an axis."""
        return self.mesh.get_local_rank(axis)

    def group(self, axis: str) -> dist.ProcessGroup:
        """The ranks that differ from this one in this axis only."""
        return self.mesh.get_group(axis)

    @property
    def tensor_mesh(self) -> DeviceMesh:
        """The ranks that share each layer with this one, one axis `tensor`."""
        return self.mesh["tensor"]

    @property
    def data_mesh(self) -> DeviceMesh:
        """The ranks that hold what this one holds, for other data; one axis `data`."""
        return self.mesh["data"]

    @property
    def is_alone(self) -> bool:
        """Whether there is one rank."""
        return math.prod(self.mesh.shape) == 1
