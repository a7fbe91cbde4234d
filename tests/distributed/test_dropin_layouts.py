"""Drop-ins on several ranks: dion's mesh or process group, and KellerJordan/Muon's division among all ranks."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from harness import DEVICE, run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from quintic.integrations import dion, keller_jordan

SHAPES = [(24, 16), (16, 40), (16, 16), (9,)]


def drawn(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(DEVICE) for shape in SHAPES]


def model_of():
    model = nn.Module()
    for index, value in enumerate(drawn(0)):
        model.register_parameter(f"weight{index}", nn.Parameter(value))
    return model


def dion_of(name, params, mesh):
    params = list(params)
    groups = [{"params": params[:3]}, {"params": params[3:], "algorithm": "adamw"}]
    return getattr(dion, name)(groups, mesh, nesterov=True, weight_decay=0.1)


def keller_jordan_of(name, params, mesh):
    params = list(params)
    groups = [{"params": params[:3], "use_muon": True}, {"params": params[3:], "use_muon": False}]
    return getattr(keller_jordan, name)(groups)


def trained(model, optimizer):
    for seed in range(1, 4):
        for param, gradient in zip(model.parameters(), drawn(seed), strict=True):
            if isinstance(param, DTensor):
                gradient = dist.tensor.distribute_tensor(gradient, param.device_mesh, param.placements)
            param.grad = gradient
        optimizer.step()
    params = [param.full_tensor() if isinstance(param, DTensor) else param for param in model.parameters()]
    return [param.detach().cpu() for param in params]


def on_ranks(rank, world_size, make, name, layout):
    mesh = init_device_mesh(DEVICE, (world_size,))
    model = model_of()
    if layout == "fsdp":
        fully_shard(model, mesh=mesh)
    optimizer = make(name, model.parameters(), mesh.get_group() if layout == "group" else mesh)
    assert {group["comms"] for group in optimizer.param_groups} == {"none" if layout == "fsdp" else "averaged"}
    values = trained(model, optimizer)
    twin = copy.deepcopy(optimizer)  # with its process group
    assert [group["process_group"] for group in twin.param_groups] == [
        group["process_group"] for group in optimizer.param_groups
    ]
    if make is dion_of:
        with pytest.raises(TypeError, match="process_group cannot be pickled"):
            pickle.dumps(optimizer)
    return values


@pytest.mark.parametrize(
    ("make", "name", "layout"),
    [
        (dion_of, "Muon", "fsdp"),
        (dion_of, "NorMuon", "fsdp"),
        (dion_of, "Muon", "mesh"),
        (dion_of, "NorMuon", "group"),
        (keller_jordan_of, "MuonWithAuxAdam", "ddp"),
    ],
)
def test_ranks_make_the_updates_of_one(make, name, layout):
    model = model_of()
    expected = trained(model, make(name, model.parameters(), None))
    for values in run(on_ranks, 2, make, name, layout):
        for value, one in zip(values, expected, strict=True):
            assert torch.equal(value, one)


def square(rank, world_size):
    mesh = init_device_mesh(DEVICE, (2, 1), mesh_dim_names=("replicate", "shard"))
    with pytest.raises(ValueError, match="distributed_mesh has 2 dimensions: give the one whose ranks"):
        dion_of("Muon", model_of().parameters(), mesh)


def test_a_mesh_of_two_dimensions_is_refused():
    run(square, 2)
