"""State that `comms="sharded"` divides: saved whole, loaded in parts, on any number of ranks."""

import pytest
import torch
from harness import DEVICE, run
from torch import nn
from trajectories import fused_adamw_tolerance

import quintic

SHAPES = {"wide": (6, 10), "tall": (9, 4), "bank": (8, 5), "table": (3000, 2), "bias": (7,)}


def model(dtype):
    torch.manual_seed(0)
    params = {name: nn.Parameter(torch.randn(shape).to(DEVICE, dtype)) for name, shape in SHAPES.items()}
    params["turned"] = nn.Parameter(torch.randn(5, 3).to(DEVICE, dtype).T)
    return params


def optimizer_of(params, comms, master):
    def group(names, **options):
        return {"params": [(name, params[name]) for name in names], **options}

    return quintic.Muon(
        [
            group(["wide", "tall", "turned"]),
            group(["bank"], view=quintic.Rows(2)),
            group(["table", "bias"], algorithm="adamw"),
        ],
        lr=0.1,
        adamw_lr=0.1,
        normalize="neuron",
        weight_decay=0.1,
        adamw_weight_decay=0.1,
        compute_dtype=torch.float32,
        comms=comms,
        master=master,
    )


def regrouped(params, comms):
    """The same in other groups, which divide ownership otherwise."""
    groups = [
        {"params": [(name, params[name])], "algorithm": "adamw" if name in ("table", "bias") else "muon"}
        for name in reversed(params)
    ]
    for group in groups:
        if group["params"][0][0] == "bank":
            group["view"] = quintic.Rows(2)
    return quintic.Muon(groups, lr=0.5, normalize="neuron", comms=comms)


def take_steps(optimizer, params, first, last):
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        for param in params.values():
            # The same on every rank: their mean is one device's gradient, to the last bit.
            param.grad = torch.randn(param.shape, generator=generator).to(param)
        optimizer.step()


def saved_by(rank, world_size, dtype, master, comms):
    params = model(dtype)
    optimizer = optimizer_of(params, comms, master)
    keys = [sorted(optimizer.state[param]) for param in params.values()]
    take_steps(optimizer, params, 0, 3)
    sizes = {
        name: optimizer.state[param].get("momentum_buffer", torch.empty(0)).numel() for name, param in params.items()
    }
    return {n: p.detach() for n, p in params.items()}, optimizer.state_dict(), sizes, keys


def continued(rank, world_size, dtype, master, comms, weights, state_dict):
    params = model(dtype)
    optimizer = optimizer_of(params, comms, master)
    with torch.no_grad():
        for name, param in params.items():
            param.copy_(weights[name])
    optimizer.load_state_dict(state_dict)
    take_steps(optimizer, params, 3, 5)
    return {n: p.detach() for n, p in params.items()}


@pytest.mark.parametrize(
    ("dtype", "master"),
    [pytest.param(torch.float32, None, marks=pytest.mark.slow), (torch.bfloat16, "mantissa")],
    ids=str,
)
def test_saved_on_some_ranks_and_continued_on_others(dtype, master):
    params = model(dtype)
    alone = optimizer_of(params, "none", master)
    take_steps(alone, params, 0, 5)
    expected = {name: param.detach().cpu() for name, param in params.items()}
    results = run(saved_by, 4, dtype, master, "sharded")
    weights, state_dict, _, keys = results[0]
    # Every rank has a part of the momentum, nobody all of it, and all have the same keys.
    assert sum(sizes["bank"] for _, _, sizes, _ in results) == 8 * 5
    assert max(sum(sizes.values()) for _, _, sizes, _ in results) < sum(
        params[n].numel() for n in ("wide", "tall", "bank")
    )
    assert all(other == keys for _, _, _, other in results)
    for _, other, _, _ in results:
        for key, tensors in state_dict["state"].items():
            for name, value in tensors.items():
                assert torch.equal(other["state"][key][name], value)
    for ranks, comms in ((1, "none"), (2, "sharded"), (2, "replicated")):
        for found in run(continued, ranks, dtype, master, comms, weights, state_dict):
            for name, value in expected.items():
                is_fused = name in ("table", "bias") and dtype == torch.float32
                rtol, atol = fused_adamw_tolerance(5, lr=0.1) if is_fused else (0.0, 0.0)
                assert torch.allclose(found[name], value, rtol=rtol, atol=atol), (comms, name)


def loaded_regrouped(rank, world_size, state_dict):
    optimizer = regrouped(model(torch.float32), "sharded")
    optimizer.load_state_dict(state_dict)
    saved = optimizer.state_dict()
    keys = {name: key for g in saved["param_groups"] for name, key in zip(g["param_names"], g["params"], strict=True)}
    options = {g["param_names"][0]: (g["lr"], g["weight_decay"]) for g in saved["param_groups"]}
    return {name: saved["state"][key] for name, key in keys.items()}, options


def test_sharded_state_finds_its_owner_in_other_groups():
    _, state_dict, _, _ = run(saved_by, 2, torch.float32, None, "sharded")[0]
    keys = {n: key for g in state_dict["param_groups"] for n, key in zip(g["param_names"], g["params"], strict=True)}
    for states, options in run(loaded_regrouped, 2, state_dict):
        assert options == dict.fromkeys(keys, (0.1, 0.1))
        for name, key in keys.items():
            assert states[name].keys() == state_dict["state"][key].keys()
            for what, value in state_dict["state"][key].items():
                assert torch.equal(states[name][what], value), (name, what)
