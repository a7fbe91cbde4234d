"""The walk of a steady step where ranks share the work, see tests/steady_steps.py."""

import pytest
from harness import DEVICE, run
from steady_steps import model_of, steady_walk
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import quintic

# Calls, files and changes of file, at most.
LIMITS = {"fsdp2": (138, 19, 86), "sharded": (148, 17, 101)}


def walks(rank, world_size):
    found = {}
    for layout in LIMITS:
        params = [param.detach().to(DEVICE) for param in model_of().parameters() if param.ndim == 2]
        if layout == "fsdp2":
            mesh = init_device_mesh(DEVICE, (world_size,))
            params = [distribute_tensor(param, mesh, [Shard(0)]) for param in params]
        params = [nn.Parameter(param) for param in params]
        groups = [{"params": params[1:]}, {"params": params[:1], "algorithm": "adamw"}]
        optimizer = quintic.Muon(groups, comms="sharded" if layout == "sharded" else "none")
        walk = steady_walk(optimizer, params)
        found[layout] = walk.counts, str(walk)
    return found


@pytest.mark.skipif(DEVICE != "cpu", reason="counts the files of the plain passes")
def test_a_step_with_messages_is_a_short_walk():
    for found in run(walks, 2, timeout=60):
        for layout, (counts, walk) in found.items():
            limits = zip(counts, LIMITS[layout], strict=True)
            assert all(count <= limit for count, limit in limits), f"{layout}: {counts}\n{walk}"
