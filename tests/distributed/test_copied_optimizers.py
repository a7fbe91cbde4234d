"""Copies of optimizers whose ranks share work or state: they go on as the original does, with its process groups."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from harness import DEVICE, run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import quintic


def take_steps(params, optimizer, first, last):
    for step in range(first, last):
        for index, param in enumerate(params):
            generator = torch.Generator().manual_seed(100 * step + index)
            gradient = torch.randn(param.shape, generator=generator).to(DEVICE)
            if hasattr(param, "device_mesh"):
                gradient = distribute_tensor(gradient, param.device_mesh, param.placements, src_data_rank=None)
            param.grad = gradient
        optimizer.step()


def copies(rank, world_size):
    """Whether the copy is as the original, by layout, and whether it has the same process group."""
    mesh, found = init_device_mesh(DEVICE, (world_size,)), {}
    for comms in ("averaged", "replicated", "sharded", "rows"):
        torch.manual_seed(0)
        weights = [torch.randn(shape).to(DEVICE) for shape in ((6, 4), (4, 6), (8, 3))]
        if comms == "rows":
            weights = [distribute_tensor(weight, mesh, [Shard(0)]) for weight in weights]
        params = list(map(nn.Parameter, weights))
        options = {} if comms == "rows" else {"comms": comms, "process_group": dist.new_group()}
        optimizer = quintic.Muon(params, lr=0.1, normalize="neuron", qk_clip=quintic.QKClip(), **options)
        take_steps(params, optimizer, 0, 2)
        twins, twin = copy.deepcopy((params, optimizer))
        take_steps(params, optimizer, 2, 4)
        take_steps(twins, twin, 2, 4)
        locals_of = [[getattr(param, "_local_tensor", param) for param in both] for both in (params, twins)]
        groups = [each.param_groups[0]["process_group"] for each in (optimizer, twin)]
        found[comms] = all(map(torch.equal, *locals_of)), groups[0] is groups[1], twin is not optimizer
    return found


def pickled(rank, world_size):
    """A process group is of its process: without a word of whose it was torch refused it."""
    param = nn.Parameter(torch.ones(4, 3, device=DEVICE))
    optimizer = quintic.Muon([param], comms="averaged", process_group=dist.new_group())
    take_steps([param], optimizer, 0, 1)
    with pytest.raises(TypeError, match=r"Muon with a process_group cannot be pickled: save optimizer\.state_dict"):
        pickle.dumps(optimizer)
    for options in (optimizer.defaults, *optimizer.param_groups):
        options["process_group"] = None
    (group,) = pickle.loads(pickle.dumps(optimizer)).param_groups
    assert torch.equal(group["params"][0], param)


def test_optimizers_with_a_process_group_are_not_pickled():
    run(pickled, 2, timeout=30)


def test_copies_of_optimizers_have_the_same_process_groups():
    expected = dict.fromkeys(("averaged", "replicated", "sharded", "rows"), (True, True, True))
    assert run(copies, 2) == [expected] * 2
