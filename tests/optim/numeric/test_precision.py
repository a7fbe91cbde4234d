"""Masters: what stands behind low-precision weights."""

import copy
import io

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from quintic import Heads, Muon
from quintic.optim.numeric.precision import full_precision, store_


def value_behind(weight, mantissa):
    """Assemble float32 from its halves by integer arithmetic: an independent reading of the layout."""
    high = weight.view(torch.int16).to(torch.int64) & 0xFFFF
    low = mantissa.to(torch.int64)
    bits = (high << 16) + low
    return torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32).view(torch.float32)


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=50))
def test_bfloat16_and_mantissa_hold_every_float32(values):
    value = torch.tensor(values, dtype=torch.float32)
    weight, mantissa = torch.empty(len(values), dtype=torch.bfloat16), torch.empty(len(values), dtype=torch.uint16)
    store_(weight, mantissa, value)
    assert torch.equal(full_precision(weight, mantissa).view(torch.int32), value.view(torch.int32))
    assert torch.equal(value_behind(weight, mantissa).view(torch.int32), value.view(torch.int32))


def test_nan_stays_nan():
    weight, mantissa = torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.uint16)
    store_(weight, mantissa, torch.tensor([float("nan")]))
    assert weight.isnan().all()
    assert full_precision(weight, mantissa).isnan().all()


def test_the_weight_is_the_upper_half_with_either_master():
    value = torch.randn(1000)
    weights = [torch.empty(1000, dtype=torch.bfloat16) for _ in range(2)]
    store_(weights[0], torch.empty(1000, dtype=torch.uint16), value)
    store_(weights[1], torch.empty(1000), value)
    assert torch.equal(*weights)
    assert ((weights[0].float() - value).abs() < value.abs() * 2**-7).all()
    assert (weights[0].float().abs() <= value.abs()).all()  # towards zero


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_weight_that_was_written_counts_instead_of_its_float32_master(dtype):
    value = torch.randn(1000)
    weight, master = torch.empty(1000, dtype=dtype), torch.empty(1000)
    store_(weight, master, value)
    assert torch.equal(full_precision(weight, master), value)
    weight[::3] += 1  # as a checkpoint loaded into the model would
    expected = value.clone()
    expected[::3] = weight[::3].float()
    assert torch.equal(full_precision(weight, master), expected)


OPTIONS = [
    {"algorithm": "muon"},
    {"algorithm": "muon", "view": Heads(3), "normalize": "neuron", "weight_decay": 0.3, "cautious": True},
    {"algorithm": "muon", "weight_decay": 0.3, "decay_coupling": "lr_squared", "nesterov": False},
    {"algorithm": "adamw"},
    {"algorithm": "adamw", "weight_decay": 0.3, "cautious": True},
]


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_mantissa_is_the_float32_master_bit_for_bit_over_a_thousand_steps(options):
    """The gradients depend on the weights, as in training: one bit of difference would grow."""
    torch.manual_seed(0)
    start = torch.randn(12, 8).bfloat16()
    params = [nn.Parameter(start.clone()), nn.Parameter(start.clone())]
    mantissa, master = (
        Muon(
            [{"params": [param], **options}],
            lr=1e-3,
            adamw_lr=1e-3,
            momentum=0.9,
            master=kind,
            compute_dtype=torch.float32,
        )
        for param, kind in zip(params, ("mantissa", "fp32"), strict=True)
    )
    for _ in range(1000):
        noise = torch.randn(12, 8)
        for param in params:
            param.grad = (param.detach() * 0.1 + noise).bfloat16()
        mantissa.step()
        master.step()
    assert torch.equal(*params)
    assert not torch.equal(params[0], start)
    state, twin = mantissa.state[params[0]], master.state[params[1]]
    assert state["mantissa"].dtype == torch.uint16
    assert torch.equal(value_behind(params[0].detach(), state["mantissa"]), twin["master"])


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_master_is_the_trajectory_of_float32_weights(options):
    start = torch.randn(12, 8).bfloat16()
    low, wide = nn.Parameter(start.clone()), nn.Parameter(start.float())
    optimizers = [
        Muon([{"params": [param], **options}], lr=1e-2, adamw_lr=1e-2, master="fp32") for param in (low, wide)
    ]
    for _ in range(50):
        low.grad = torch.randn(12, 8).bfloat16()
        wide.grad = low.grad.float()
        for optimizer in optimizers:
            optimizer.step()
    assert "master" not in optimizers[1].state[wide]  # float32 weights are their own
    # AdamW of float32 weights may be PyTorch's fused kernel, which rounds elsewhere.
    tolerance = 0.0 if options["algorithm"] == "muon" else 1e-6
    torch.testing.assert_close(optimizers[0].state[low]["master"], wide.detach(), rtol=tolerance, atol=tolerance)


def test_float16_weights_round_to_nearest():
    param = nn.Parameter(torch.randn(6, 4).half())
    optimizer = Muon([param], master="fp32")
    param.grad = torch.randn(6, 4).half()
    optimizer.step()
    assert torch.equal(param, optimizer.state[param]["master"].half())


@pytest.mark.parametrize("master", ["fp32", "mantissa"])
def test_weights_loaded_after_construction_count(master):
    """A stale copy would undo the loading of a checkpoint into the model at the next step."""
    param = nn.Parameter(torch.randn(6, 4).bfloat16())
    optimizer = Muon([param], lr=1e-3, master=master)
    param.data.copy_(torch.full((6, 4), 5.0))
    param.grad = torch.randn(6, 4).bfloat16()
    optimizer.step()
    assert ((param - 5).abs() < 0.1).all()


@pytest.mark.parametrize("master", ["fp32", "mantissa"])
def test_masters_are_saved_and_loaded_without_casts(master):
    param = nn.Parameter(torch.randn(6, 4).bfloat16())
    optimizer = Muon([param], master=master)
    twin_param = nn.Parameter(param.detach().clone())
    twin = Muon([twin_param], master=master)

    def step(optimizers):
        gradient = torch.randn(6, 4).bfloat16()
        for one in optimizers:
            one.param_groups[0]["params"][0].grad = gradient.clone()
            one.step()

    step([optimizer])
    buffer = io.BytesIO()
    torch.save([optimizer.state_dict(), param.detach()], buffer)
    buffer.seek(0)
    saved, weights = torch.load(buffer, weights_only=True)
    twin.load_state_dict(state_dict=saved)
    twin_param.data.copy_(weights)
    step([optimizer, twin])
    key = "master" if master == "fp32" else "mantissa"
    assert torch.equal(param, twin_param)
    assert torch.equal(optimizer.state[param][key], twin.state[twin_param][key])
    assert twin.state[twin_param][key].dtype == optimizer.state[param][key].dtype


def test_copies_have_masters_of_their_own():
    param = nn.Parameter(torch.randn(6, 4).bfloat16())
    optimizer = Muon([param], master="mantissa")
    copied = copy.deepcopy(optimizer)
    param.grad = torch.randn(6, 4).bfloat16()
    optimizer.step()
    assert not copied.state[copied.param_groups[0]["params"][0]]["mantissa"].any()


def test_mantissa_of_float16_is_refused():
    with pytest.raises(ValueError, match="w: master='mantissa' completes bfloat16"):
        Muon([("w", nn.Parameter(torch.randn(4, 4).half()))], master="mantissa")
