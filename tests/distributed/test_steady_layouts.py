"""The calls into the library of a steady step where ranks share the work, see tests/steady_steps.py."""

import pytest
from harness import DEVICE, run
from steady_steps import model_of, steady_calls
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import quintic


def counted(rank, world_size):
    found = {}
    for layout in ("fsdp2", "sharded"):
        params = [param.detach().to(DEVICE) for param in model_of().parameters() if param.ndim == 2]
        if layout == "fsdp2":
            mesh = init_device_mesh(DEVICE, (world_size,))
            params = [distribute_tensor(param, mesh, [Shard(0)]) for param in params]
        params = [nn.Parameter(param) for param in params]
        groups = [{"params": params[1:]}, {"params": params[:1], "algorithm": "adamw"}]
        optimizer = quintic.Muon(groups, comms="sharded" if layout == "sharded" else "none")
        calls = steady_calls(optimizer, params)
        found[layout] = len(calls), calls.total(), calls.most_common()
    return found


@pytest.mark.skipif(DEVICE != "cpu", reason="counts the files of the plain passes")
def test_a_step_with_messages_goes_through_few_files():
    for found in run(counted, 2, timeout=60):
        for layout, (num_files, num_calls, calls) in found.items():
            assert num_files <= 18, (layout, calls)
            assert num_calls <= 205, (layout, calls)
