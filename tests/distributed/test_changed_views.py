"""State loaded into other views with `strict=False`, where ranks share it: the numbers of one device."""

import warnings

import pytest
import torch
from harness import DEVICE, run
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import quintic

# The view of one weight of two, and the algorithm of another, after the state was saved.
RULES = (
    quintic.Rule("0.weight", "muon", quintic.Split((2, 2, 2), groups=2)),
    quintic.Rule("2.weight", "adamw", options={"lr": 0.01}),
)
SHAPES = ((8, 12), (12, 12), (12, 7))


def take_steps(model, optimizer, first, last):
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        for param in model.parameters():
            gradient = torch.randn(param.shape, generator=generator).to(DEVICE)
            if isinstance(param, DTensor):
                gradient = distribute_tensor(gradient, param.device_mesh, param.placements, src_data_rank=None)
            param.grad = gradient
        optimizer.step()


def whole(tensor):
    return (tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()).cpu().clone()


def go_on(rank, world_size, layout, normalize):
    """Train, load the state into an optimizer with other rules, train; return the warning, whole weights and state."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(n, m, bias=False) for n, m in SHAPES)).to(DEVICE)
    if layout == "fsdp2":
        mesh = DeviceMesh(DEVICE, torch.arange(world_size))
        for module in model:
            fully_shard(module, mesh=mesh)
    # AdamW with cautious decay is computed alike in every layout.
    options = {
        "lr": 0.05,
        "compute_dtype": torch.float32,
        "normalize": normalize,
        "cautious": True,
        "weight_decay": 0.1,
    }
    options["comms"] = "none" if layout in ("one", "fsdp2") else layout
    old = quintic.Muon(quintic.param_groups(model), **options)
    take_steps(model, old, 0, 2)
    new = quintic.Muon(quintic.param_groups(model, rules=RULES), **options)
    take_steps(model, new, 2, 3)  # its state is not zero, and what begins anew must become so
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        new.load_state_dict(old.state_dict(), strict=False)
    state = new.state_dict()["state"]
    loaded = [{key: whole(value) for key, value in sorted(values.items())} for _, values in sorted(state.items())]
    take_steps(model, new, 3, 5)
    return [str(warning.message) for warning in seen], [whole(param) for param in model.parameters()], loaded


@pytest.mark.parametrize("normalize", [None, "neuron", "element"])
@pytest.mark.parametrize("layout", ["averaged", "sharded", "fsdp2"])
def test_other_views_begin_with_the_same_state_in_every_layout(layout, normalize):
    [(messages, weights, state)] = run(go_on, 1, "one", normalize, timeout=60)
    assert len(messages) == 1
    assert "0.weight: view=Matrix" in messages[0]
    assert "2.weight: algorithm=muon" in messages[0]
    # The last one is AdamW's now, and begins anew.
    assert "step" in state[-1]
    assert not any(value.any() for value in state[-1].values())
    for found_messages, found, found_state in run(go_on, 2, layout, normalize, timeout=60):
        assert found_messages == messages
        for one, other in zip(state, found_state, strict=True):
            assert one.keys() == other.keys()
            assert all(torch.equal(value, other[key]) for key, value in one.items())
        assert all(map(torch.equal, weights, found))
