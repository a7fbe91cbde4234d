"""The warning of a first step without gradients, where some ranks have some and others none."""

import warnings

import pytest
import torch
from harness import DEVICE, run
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import quintic

MATCH = "no parameter had a gradient in the first step, including 0.weight and 3 others"


def check_first_step(rank, world_size, layout, ranks_with):
    """Make two steps; return the warnings. On GPUs the answer of the others may be there at the second one only."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)).to(DEVICE)
    mesh = DeviceMesh(DEVICE, torch.arange(world_size))
    early = quintic.Muon(quintic.param_groups(model)) if layout == "fsdp2 too late" else None
    if layout.startswith("fsdp2"):
        for module in model:
            fully_shard(module, mesh=mesh)
    comms = "none" if layout.startswith("fsdp2") else layout
    optimizer = early or quintic.Muon(quintic.param_groups(model), comms=comms)
    if rank in ranks_with:
        for param in model.parameters():
            gradient = torch.ones(param.shape, device=DEVICE)
            if isinstance(param, DTensor):
                gradient = distribute_tensor(gradient, mesh, [Shard(0)], src_data_rank=None)
            param.grad = gradient
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            optimizer.step()
            if DEVICE == "cuda":
                torch.cuda.synchronize()
    return [str(warning.message) for warning in found if "gradient" in str(warning.message)]


@pytest.mark.parametrize("layout", ["averaged", "replicated", "sharded", "fsdp2"])
def test_all_ranks_must_lack_all_gradients(layout):
    assert run(check_first_step, 2, layout, [0], timeout=60) == [[], []]
    for found in run(check_first_step, 2, layout, [], timeout=60):
        assert len(found) == 1
        assert found[0].startswith(MATCH)


def test_a_model_that_was_sharded_after_its_optimizer_was_made():
    """`fully_shard` makes new parameters, and the optimizer has those of before, which get no gradients."""
    for found in run(check_first_step, 2, "fsdp2 too late", [0, 1], timeout=60):
        assert len(found) == 1
        assert found[0].startswith(MATCH)
        assert "this optimizer has the old ones: make it after that" in found[0]
