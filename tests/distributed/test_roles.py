"""Roles from a forward pass are the same on models that DDP, FSDP2 or tensor parallelism lay out over ranks."""

import pytest
import torch
from harness import DEVICE, run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import quintic


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(32, 128), nn.Linear(64, 32)

    def forward(self, x):
        one, two = self.a(x).chunk(2, -1)
        return self.b(one.sigmoid() * two)


def model():
    return nn.Sequential(nn.Embedding(9, 32), Gated(), nn.Linear(32, 7)).to(DEVICE)


def ddp(net, mesh):
    return nn.parallel.DistributedDataParallel(net)


def fsdp(net, mesh):
    fully_shard(net[1], mesh=mesh)
    return fully_shard(net, mesh=mesh)


def tensor_parallel(net, mesh):
    return parallelize_module(net, mesh, {"1.a": ColwiseParallel(), "1.b": RowwiseParallel()})


LAYOUTS = {"ddp": ddp, "fsdp": fsdp, "tensor_parallel": tensor_parallel}


def traced(rank, world_size, layout):
    """Roles before and after the layout, and the groups of both ways to use them."""
    ids = torch.zeros(2, 5, dtype=torch.long, device=DEVICE)
    net = model()
    before = quintic.trace(net, ids)
    net = LAYOUTS[layout](net, init_device_mesh(DEVICE, (world_size,)))
    ways = [{"roles": before}] if layout == "tensor_parallel" else [{"roles": before}, {"example": ids}]
    found = []
    for way in ways:
        groups = quintic.param_groups(net, **way)
        optimizer = quintic.Muon(groups, lr=0.01)
        if layout != "tensor_parallel":  # whose split of a column-wise layer is another one on each rank
            net(ids).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append({name: (g["algorithm"], g["view"]) for g in groups for name in g["param_names"]})
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_roles_do_not_depend_on_the_layout(layout):
    expected = {
        "0.weight": ("adamw", quintic.Matrix()),
        "1.a.weight": ("muon", quintic.Split((64, 64))),
        "1.b.weight": ("muon", quintic.Matrix()),
        "2.weight": ("adamw", quintic.Matrix()),
    }
    for ways in run(traced, 2, layout):
        for found in ways:
            assert {name: found[name] for name in expected} == expected
