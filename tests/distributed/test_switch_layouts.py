"""A group that goes over from Muon to AdamW in mid-run, where ranks hold pieces of weights or of state."""

import pytest
import torch
from harness import DEVICE, run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import quintic


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10, bias=False), nn.Linear(10, 6, bias=False)).to(DEVICE)


def gradients(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in ((10, 6), (6, 10))]


def steps(layout, world_size):
    """Three steps of Muon, three of AdamW; whole weights and moments at the end."""
    model = model_of()
    if layout == "fsdp2":
        mesh = init_device_mesh(DEVICE, (world_size,))
        fully_shard(model, mesh=mesh)
    comms = {"fsdp2": "none", "one": "none"}.get(layout, layout)
    optimizer = quintic.Muon([{"params": list(model.named_parameters())}], lr=0.05, comms=comms)
    for seed in range(6):
        if seed == 3:
            optimizer.param_groups[0].update(algorithm="adamw", lr=0.01, weight_decay=0.1)
        for param, gradient in zip(model.parameters(), gradients(seed), strict=True):
            gradient = gradient.to(DEVICE)
            if layout == "fsdp2":
                from torch.distributed.tensor import distribute_tensor

                gradient = distribute_tensor(gradient, mesh, param.placements)
            param.grad = gradient
        optimizer.step()
    saved = optimizer.state_dict()["state"]

    def whole(value):
        return value.full_tensor() if hasattr(value, "full_tensor") else value

    weights = [whole(param.detach()) for param in model.parameters()]
    return weights, [{key: whole(value) for key, value in saved[place].items()} for place in range(2)]


def switch_in(rank, world_size, layout):
    weights, states = steps("one", world_size)
    found, moments = steps(layout, world_size)
    for weight, other in zip(weights, found, strict=True):
        torch.testing.assert_close(weight, other, rtol=1e-6, atol=1e-7)
    for state, other in zip(states, moments, strict=True):
        assert state.keys() == other.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert float(state["step"]) == float(other["step"]) == 3
        for key, value in state.items():
            torch.testing.assert_close(value.cpu(), other[key].cpu(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("layout", ["fsdp2", "averaged", "replicated", "sharded"])
def test_the_switch_has_the_numbers_of_one_device(layout):
    run(switch_in, 2, layout)
