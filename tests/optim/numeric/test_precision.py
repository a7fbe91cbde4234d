"""Masters: what stands behind low-precision weights."""

import copy
import io

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from quintic import Heads, Muon
from quintic.optim.numeric.precision import full_precision, store_
from quintic.optim.state.state import master_key


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


# -- 24 bits -----------------------------------------------------------------------------------------------------------


def as_integers_say(patterns):
    values = np.asarray(patterns, dtype=np.uint32).view(np.float32)
    return oracle.rounded_to_24_bits(values).view(np.uint32).tolist()


def stored(patterns):
    """Store values in a weight and a byte; return the patterns of the value behind them, and the two tensors."""
    value = torch.from_numpy(np.asarray(patterns, dtype=np.uint32).view(np.float32).copy())
    weight, byte = torch.zeros(len(value), dtype=torch.bfloat16), torch.zeros(len(value), dtype=torch.uint8)
    store_(weight, byte, value)
    return full_precision(weight, byte).numpy().view(np.uint32).tolist(), weight, byte


SPECIAL = [
    *(0, 0x7F, 0x80, 0x81, 0x17F, 0x180, 0x181, 0x280),  # zeros, subnormals, ties to either side
    *(0x007FFF7F, 0x007FFF80, 0x007FFFFF, 0x00800000),  # the largest subnormals round to the smallest normal number
    *(0x3F7FFF80, 0x3F80FF80, 0x3FFFFFFF, 0x3F80FF7F),  # carries into the weight and into its exponent
    *(0x7F7FFF7F, 0x7F7FFF80, 0x7F7FFFFF),  # the largest numbers, which round to infinity
    0x7F800000,
    *(0x7F800001, 0x7F8000FF, 0x7F80FFFF, 0x7FBFFFFF, 0x7FC00000, 0x7FFFFF80, 0x7FFFFFFF),  # every kind of NaN
]


@pytest.mark.parametrize("sign", [0, 0x80000000])
def test_special_values_round_to_24_bits_as_integers_say(sign):
    patterns = [sign | bits for bits in SPECIAL]
    assert stored(patterns)[0] == as_integers_say(patterns)
    found = dict(zip(SPECIAL, stored(patterns)[0], strict=True))
    assert found[0x80] == sign  # a tie to zero, which keeps its sign
    assert found[0x180] == found[0x280] == sign | 0x200
    assert found[0x3FFFFFFF] == sign | 0x40000000
    assert found[0x7F7FFF7F] == sign | 0x7F7FFF00
    assert found[0x7F7FFF80] == found[0x7F800000] == sign | 0x7F800000


@given(st.lists(st.one_of(st.integers(0, 2**32 - 1), st.integers(0, 2**24 - 1).map(lambda n: n << 8 | 0x80))))
def test_any_value_rounds_to_24_bits_as_integers_say(patterns):
    found, weight, byte = stored(patterns)
    assert found == as_integers_say(patterns)
    # The two hold the upper and the next bits, and stay as they are when they are stored again.
    whole = (weight.view(torch.int16).to(torch.int64) & 0xFFFF) << 16 | byte.to(torch.int64) << 8
    assert whole.tolist() == found
    assert stored(found)[0] == found


def test_every_nan_stays_nan_in_the_weight_and_behind_it():
    """A NaN whose payload is in the low bits would be an infinite weight, one of all ones would become zero."""
    mantissas = np.unique(np.concatenate([2 ** np.arange(23), 2**23 - 2 ** np.arange(23), np.arange(1, 2**23, 997)]))
    found, weight, _ = stored(np.concatenate([0x7F800000 + mantissas, 0xFF800000 + mantissas]))
    assert weight.isnan().all()
    assert set(found) == {0x7FC00000}


@given(st.lists(st.floats(2.0**-100, 2.0**100, width=32), min_size=1))
def test_a_step_below_half_a_last_place_is_lost_and_one_above_it_is_not(values):
    """The docs' rule: a weight's 24 bits are lost below 2^-17 of it, and never above 2^-16."""
    weight, byte = torch.zeros(len(values), dtype=torch.bfloat16), torch.zeros(len(values), dtype=torch.uint8)
    store_(weight, byte, torch.tensor(values, dtype=torch.float32))
    before = full_precision(weight, byte)
    for factor, is_lost in ((1 + 2.0**-17 - 2.0**-23, True), (1 + 2.0**-16 + 2.0**-20, False)):
        store_(weight, byte, before * factor)
        after = full_precision(weight, byte)
        assert bool((after == before).all()) is is_lost
        assert is_lost or not (after == before).any()
        store_(weight, byte, before)


# -- both --------------------------------------------------------------------------------------------------------------


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


def rounded(value):
    return torch.from_numpy(oracle.rounded_to_24_bits(value.numpy()))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_bytes_are_float32_masters_that_are_rounded_after_every_step(options):
    start = torch.randn(12, 8).bfloat16()
    low, whole = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    rates = {"lr": 1e-3, "adamw_lr": 1e-3, "momentum": 0.9, "compute_dtype": torch.float32}
    optimizer, other = (
        Muon([{"params": [param], **options}], master=master, **rates)
        for param, master in ((low, "8bit"), (whole, "fp32"))
    )
    has_rounded = False
    for _ in range(50):
        low.grad = (low.detach() * 0.1 + torch.randn(12, 8)).bfloat16()
        whole.grad = low.grad.clone()
        optimizer.step()
        other.step()
        master = other.state[whole]["master"]
        has_rounded |= not torch.equal(rounded(master), master)
        store_(whole.data, master, rounded(master))
        assert torch.equal(low, whole)
        byte = optimizer.state[low]["mantissa_byte"]
        assert byte.dtype == torch.uint8
        assert torch.equal(full_precision(low.detach(), byte), master)
    assert has_rounded


@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
def test_the_trajectory_is_that_of_float64_weights_rounded_after_every_step(algorithm):
    """Where a float32 sum rounds to the other neighbour the two differ in a last place from then on."""
    generator = np.random.default_rng(0)
    start = torch.from_numpy(generator.standard_normal((12, 8)).astype(np.float32)).bfloat16()
    param = nn.Parameter(start.clone())
    rates = {"lr": 0.02, "adamw_lr": 0.02, "weight_decay": 0.1, "adamw_weight_decay": 0.1, "betas": (0.9, 0.95)}
    options = {"master": "8bit", "orthogonalizer": "polar_express", "compute_dtype": torch.float32}
    optimizer = Muon([{"params": [param], "algorithm": algorithm}], **rates, **options)
    twin = (oracle.MuonMatrix if algorithm == "muon" else oracle.AdamWTensor)(start.float().numpy())
    given = {"lr": 0.02, "wd": 0.1, **({} if algorithm == "muon" else {"betas": (0.9, 0.95), "eps": 1e-8})}
    for _ in range(100):
        gradient = torch.from_numpy(generator.standard_normal((12, 8)).astype(np.float32)).bfloat16()
        param.grad = gradient
        optimizer.step()
        twin.w = oracle.rounded_to_24_bits(twin.step(gradient.double().numpy(), **given)).astype(np.float64)
        value = full_precision(param.detach(), optimizer.state[param]["mantissa_byte"]).double().numpy()
        # In last places of numbers of this size.
        apart = np.abs(value - twin.w) / 2.0 ** (np.floor(np.log2(np.abs(value).clip(2.0**-3))) - 15)
        assert apart.max() < 4
    assert np.median(apart) == 0


def test_float16_weights_round_to_nearest():
    param = nn.Parameter(torch.randn(6, 4).half())
    optimizer = Muon([param], master="fp32")
    param.grad = torch.randn(6, 4).half()
    optimizer.step()
    assert torch.equal(param, optimizer.state[param]["master"].half())


@pytest.mark.parametrize("master", ["fp32", "mantissa", "8bit"])
def test_weights_loaded_after_construction_count(master):
    """A stale copy would undo the loading of a checkpoint into the model at the next step."""
    param = nn.Parameter(torch.randn(6, 4).bfloat16())
    optimizer = Muon([param], lr=1e-3, master=master)
    param.data.copy_(torch.full((6, 4), 5.0))
    param.grad = torch.randn(6, 4).bfloat16()
    optimizer.step()
    assert ((param - 5).abs() < 0.1).all()


@pytest.mark.parametrize("master", ["fp32", "mantissa", "8bit"])
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
    key = master_key(optimizer.state[param])
    assert torch.equal(param, twin_param)
    assert torch.equal(optimizer.state[param][key], twin.state[twin_param][key])
    assert twin.state[twin_param][key].dtype == optimizer.state[param][key].dtype


@pytest.mark.parametrize(("master", "key"), [("mantissa", "mantissa"), ("8bit", "mantissa_byte")])
def test_copies_have_masters_of_their_own(master, key):
    param = nn.Parameter(torch.randn(6, 4).bfloat16())
    optimizer = Muon([param], master=master)
    copied = copy.deepcopy(optimizer)
    param.grad = torch.randn(6, 4).bfloat16()
    optimizer.step()
    assert not copied.state[copied.param_groups[0]["params"][0]][key].any()


@pytest.mark.parametrize("master", ["mantissa", "8bit"])
def test_mantissa_of_float16_is_refused(master):
    with pytest.raises(ValueError, match=f"w: master='{master}' completes bfloat16"):
        Muon([("w", nn.Parameter(torch.randn(4, 4).half()))], master=master)
