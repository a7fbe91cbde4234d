"""State comes out of a save as it is in the optimizer, to the last bit: also -0 and the payload of a NaN."""

import pytest
import torch
from harness import DEVICE, run
from newer import needs_torch
from torch import nn

import quintic
from quintic.interchange import export_torch_state, import_torch_state

# -0, +0, infinity, the smallest subnormal, and NaNs of both signs with payloads.
ODD_BITS = {
    torch.float32: [-0x80000000, 0, 0x7F800000, 1, 0x7FC01234, -0x3FEDCC],
    torch.float64: [-0x8000000000000000, 0, 0x7FF0000000000000, 1, 0x7FF8000000001234, -0x7FFFFFFFEDCC],
    torch.bfloat16: [-0x8000, 0, 0x7F80, 1, 0x7FC1, -0x3E],
}
INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64, torch.bfloat16: torch.int16}


def odd_values(numel, dtype):
    """Entries of all these bits, in turn."""
    bits = torch.tensor(ODD_BITS[dtype], dtype=INTEGERS[dtype])
    return bits.repeat(-(-numel // len(bits)))[:numel].view(dtype).to(DEVICE)


def bits_of(tensor):
    return tensor.contiguous().view(INTEGERS[tensor.dtype]).cpu() if tensor.dtype in INTEGERS else tensor.cpu()


def model(dtype=torch.float32):
    torch.manual_seed(0)
    shapes = {"bank": (10, 6), "wide": (6, 10), "table": (3000, 2), "bias": (7,)}
    return {name: nn.Parameter(torch.randn(shape).to(DEVICE, dtype)) for name, shape in shapes.items()}


def optimizer_of(params, **options):
    return quintic.Muon(
        [
            {"params": [("bank", params["bank"])], "view": quintic.Rows(2)},
            {"params": [("wide", params["wide"])]},
            {"params": [(name, params[name]) for name in ("table", "bias")], "algorithm": "adamw"},
        ],
        **options,
    )


def saved(rank, world_size, dtype):
    params = model(dtype)
    narrow = {"state_dtype": "bf16"} if dtype == torch.bfloat16 else {}
    optimizer = optimizer_of(params, comms="sharded", normalize="neuron", **narrow)
    whole = optimizer.state_dict()
    expected = {}
    for key, tensors in whole["state"].items():
        for name, value in tensors.items():
            if name != "step":
                value.copy_(odd_values(value.numel(), value.dtype).view(value.shape))
                expected[key, name] = bits_of(value)
    optimizer.load_state_dict(whole)
    # What other ranks have, nobody but these may add to.
    found = optimizer.state_dict()["state"]
    return expected, {(key, name): bits_of(found[key][name]) for key, name in expected}


@pytest.mark.parametrize("dtype", ODD_BITS, ids=str)
def test_sharded_state_is_saved_to_the_bit(dtype):
    for expected, found in run(saved, 2, dtype):
        assert {name for _, name in expected} == {"momentum_buffer", "second_momentum_buffer", "exp_avg", "exp_avg_sq"}
        for place, bits in expected.items():
            assert torch.equal(found[place], bits), place


def saved_by_experts(rank, world_size):
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh(DEVICE, (world_size,))
    weight = nn.Parameter(distribute_tensor(torch.ones(4, 6, 5, device=DEVICE), mesh, [Shard(0)]))
    optimizer = quintic.Muon([{"params": [("experts", weight)], "view": quintic.Experts()}], normalize="neuron")
    buffer = optimizer.state[weight]["second_momentum_buffer"]
    odd = odd_values(buffer.numel(), buffer.dtype)
    mine = torch.arange(buffer.numel(), device=DEVICE) // (buffer.numel() // world_size) == rank
    buffer.copy_(torch.where(mine, odd, 1.0))
    return bits_of(odd), bits_of(optimizer.state_dict()["state"][0]["second_momentum_buffer"])


def test_second_moments_of_experts_are_saved_to_the_bit():
    for expected, found in run(saved_by_experts, 2):
        assert torch.equal(found, expected)


def saved_by_copies(rank, world_size, replicas):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh(DEVICE, (2, 2))
    torch.manual_seed(0)
    whole, gradient = torch.randn(2, 4, 6, 5, device=DEVICE).unbind()
    cut, cut_gradient = (distribute_tensor(one, mesh, [Replicate(), Shard(0)]).clone() for one in (whole, gradient))
    found = []
    for value, value_gradient in ((whole, gradient), (cut, cut_gradient)):
        weight = nn.Parameter(value)
        group = {"params": [("experts", weight)], "view": quintic.Experts()}
        optimizer = quintic.Muon([group], normalize="neuron", replicas=replicas)
        weight.grad = value_gradient
        optimizer.step()
        found.append(bits_of(optimizer.state_dict()["state"][0]["second_momentum_buffer"]))
    return found


@pytest.mark.parametrize("replicas", ["repeat", "divide"])
def test_second_moments_of_experts_with_copies_are_those_of_one_device(replicas):
    for expected, found in run(saved_by_copies, 4, replicas):
        assert expected.count_nonzero() == expected.numel()
        assert torch.equal(found, expected)


# -- to and from PyTorch's optimizers ----------------------------------------------------------------------------------


def take_steps(optimizer, params, count=2):
    for step in range(count):
        generator = torch.Generator().manual_seed(step)
        for param in params.values():
            param.grad = torch.randn(param.shape, generator=generator).to(param)
        optimizer.step()


def exported(rank, world_size, comms):
    params = model()
    optimizer = optimizer_of(params, comms=comms)
    take_steps(optimizer, params)
    found = export_torch_state(optimizer)
    # PyTorch's own optimizers take it.
    muon = torch.optim.Muon([{"params": [params["bank"]]}, {"params": [params["wide"]]}])
    adamw = torch.optim.AdamW([params["table"], params["bias"]])
    muon.load_state_dict(found["muon"])
    adamw.load_state_dict(found["adamw"])
    for torch_optimizer, names in ((muon, ("bank", "wide")), (adamw, ("table", "bias"))):
        for name in names:
            assert {tensor.shape for key, tensor in torch_optimizer.state[params[name]].items() if key != "step"} == {
                params[name].shape
            }
    # And so does another one of ours, which then saves the same.
    twin = optimizer_of(model(), comms=comms)
    assert import_torch_state(twin, found["adamw"], found["muon"]) == ["bank", "wide", "table", "bias"]
    again = twin.state_dict()["state"]
    for key, tensors in optimizer.state_dict()["state"].items():
        for name, value in tensors.items():
            assert torch.equal(again[key][name], value), (key, name)
    return found


@needs_torch("2.9", "torch.optim.Muon")
@pytest.mark.parametrize("comms", ["sharded", "replicated"])
def test_sharded_state_is_exported_whole(comms):
    [alone] = run(exported, 1, "none")
    for found in run(exported, 2, comms):
        for algorithm in ("muon", "adamw"):
            assert found[algorithm]["param_groups"] == alone[algorithm]["param_groups"]
            for key, tensors in alone[algorithm]["state"].items():
                for name, value in tensors.items():
                    assert torch.allclose(found[algorithm]["state"][key][name], value, atol=1e-6), (key, name)


# -- telemetry ---------------------------------------------------------------------------------------------------------


def measured(rank, world_size, comms):
    params = model()
    optimizer = optimizer_of(params, comms=comms, telemetry_every=1)
    names = []
    for absent in (None, "bank", "wide"):
        for name, param in params.items():
            param.grad = None if name == absent else torch.randn_like(param)
        optimizer.step()
        names.append(set(optimizer.telemetry()))
    return names


@pytest.mark.parametrize("comms", ["averaged", "sharded"])
def test_parameters_that_nobody_stepped_are_not_measured(comms):
    results = run(measured, 2, comms)
    everything, without_bank, without_wide = (set.union(*names) for names in zip(*results, strict=True))
    assert everything == {"bank", "wide"}
    assert without_bank == {"wide"}
    assert without_wide == {"bank"}
