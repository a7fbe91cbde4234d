"""Ways to lay out `models.Awkward` over a mesh, each as a user of PyTorch would write it."""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

__all__ = [
    "data_parallel",
    "expert_and_data_parallel",
    "last_dimension",
    "plain",
    "replicated",
    "tensor_and_data_parallel",
    "tensor_parallel",
]


def plain(model: nn.Module, mesh: DeviceMesh) -> None:
    """Leave every parameter whole on every rank."""


def replicated(model: nn.Module, mesh: DeviceMesh) -> None:
    """Make every parameter a DTensor that every rank has a copy of."""
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            copies = distribute_tensor(param.detach(), mesh, [Replicate()] * mesh.ndim)
            module.register_parameter(name, nn.Parameter(copies))


def data_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """FSDP2 on the first dimension; HSDP where the mesh has two. Layers of the stack are units of their own."""
    for layer in getattr(model, "stack", []):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def last_dimension(model: nn.Module, mesh: DeviceMesh) -> None:
    """FSDP2 on the last dimension, where the number of ranks divides it (elsewhere PyTorch refuses)."""

    def place(param: nn.Parameter) -> Shard | None:
        return Shard(param.ndim - 1) if param.ndim > 1 and param.shape[-1] % mesh.size() == 0 else None

    fully_shard(model, mesh=mesh, shard_placement_fn=place)


def tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Column- and row-wise layers; what the plan leaves out stays a plain tensor on every rank."""
    columns, rows = ColwiseParallel, RowwiseParallel
    styles: dict[str, ParallelStyle] = {
        "embedding": rows(),
        "mlp.0": columns(),
        "mlp.1": rows(),
        "mlp.4": columns(),
        "mlp.5": rows(),
        "norm": SequenceParallel(),
        "attention.qkv": columns(),
        "attention.out": rows(),
        "gated": columns(),
        "stack.0": columns(),
        "stack.1": rows(),
    }
    parallelize_module(model, mesh, styles)


def tensor_and_data_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """FSDP2 on the mesh's first axis, tensor parallelism on its second: rows of column-wise layers are cut twice."""
    tensor_parallel(model, mesh[_axis(mesh, 1)])
    data_parallel(model, mesh[_axis(mesh, 0)])


def expert_and_data_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Experts divided over the mesh's last axis (nothing else is done to them), FSDP2 over all ranks for the rest."""
    experts = model.get_submodule("experts")
    along = mesh if mesh.ndim == 1 else mesh[_axis(mesh, mesh.ndim - 1)]
    placements: list[Placement] = [Shard(0)]
    for name, param in list(experts.named_parameters()):
        experts.register_parameter(name, nn.Parameter(distribute_tensor(param.detach(), along, placements)))
    everyone = DeviceMesh(mesh.device_type, torch.arange(mesh.size()))
    fully_shard(model, mesh=everyone, ignored_params=set(experts.parameters()))


def _axis(mesh: DeviceMesh, number: int) -> str:
    assert mesh.mesh_dim_names is not None
    return mesh.mesh_dim_names[number]
