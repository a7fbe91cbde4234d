"""`state_dtype="bf16"`: what is rounded and what is not, which averages it holds, and how values change their dtype."""

import copy
import pickle

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from newer import torch_muon
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import quintic
from quintic.interchange import export_torch_state, import_state, import_torch_state
from quintic.optim.numeric.bf16_state import MAX_BF16_BETA, moment_dtype_of
from quintic.optim.rules.update import adamw_, momentum_
from quintic.optim.step import torch_backend

AVERAGES = ("momentum_buffer", "exp_avg", "exp_avg_sq")
ORTHOGONALIZE = {"orthogonalizer": "polar_express", "compute_dtype": torch.float32}


def bfloat16(values):
    """Round to the nearest bfloat16, ties to even, by the bits of float32; float64 of the same shape."""
    bits = np.asarray(values, dtype=np.float32).view(np.uint32)
    odd = (bits >> 16) & 1
    return ((bits + 0x7FFF + odd) & 0xFFFF0000).astype(np.uint32).view(np.float32).astype(np.float64)


def assert_rounded(found, exact):
    """Entries are the nearest bfloat16 of what float64 has; next to a tie float32 may take the other one."""
    found = found.double().numpy()
    assert (np.abs(found - exact) <= 2.0**-8 * np.abs(exact) * 1.0001 + 1e-6).all()
    assert (found == bfloat16(exact)).mean() > 0.99


def params_of(dtype=torch.float32):
    torch.manual_seed(0)
    shapes = {"matrix": (6, 5), "wide": (3, 8), "row": (1, 7), "nothing": (0, 4), "table": (9, 4), "scalar": ()}
    return {name: nn.Parameter(torch.randn(shape).to(dtype)) for name, shape in shapes.items()}


def optimizer_of(params, **options):
    names = list(params)
    groups = [
        {"params": [(name, params[name]) for name in names[:4]]},
        {"params": [(name, params[name]) for name in names[4:]], "algorithm": "adamw"},
    ]
    return quintic.Muon(groups, lr=0.05, adamw_lr=0.01, **{**ORTHOGONALIZE, **options})


def give(params, seed):
    generator = torch.Generator().manual_seed(seed)
    for param in params.values():
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


def stepped(dtype=torch.float32, steps=3, **options):
    params = params_of(dtype)
    optimizer = optimizer_of(params, **options)
    for step in range(steps):
        give(params, step)
        optimizer.step()
    return params, optimizer


def averages(params, optimizer):
    return {
        (name, key): optimizer.state[p][key]
        for name, p in params.items()
        for key in AVERAGES
        if key in optimizer.state[p]
    }


# -- what is rounded ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("gradient_dtype", [torch.float32, torch.bfloat16])
def test_directions_are_made_before_the_momentum_is_rounded(nesterov, gradient_dtype):
    momentum, expected, mu = torch.zeros(40, 50, dtype=torch.bfloat16), np.zeros((40, 50)), 0.9
    for _ in range(6):
        gradient = torch.randn(40, 50).to(gradient_dtype)
        (direction,) = momentum_([momentum], [gradient], mu=mu, nesterov=nesterov)
        g = gradient.double().numpy()
        average = expected + (1 - mu) * (g - expected)
        look_ahead = (1 - mu) * g + mu * average if nesterov else average
        assert direction.dtype == torch.float32
        np.testing.assert_allclose(direction.numpy(), look_ahead, rtol=1e-5, atol=1e-6)
        assert momentum.dtype == torch.bfloat16
        assert_rounded(momentum, average)
        expected = momentum.double().numpy()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adamw_steps_before_its_moments_are_rounded(dtype):
    weight, master = torch.randn(40, 50).to(dtype), None if dtype == torch.float32 else torch.zeros(40, 50)
    if master is not None:
        master.copy_(weight)
    moments = [torch.zeros(40, 50, dtype=torch.bfloat16) for _ in range(2)]
    mean, mean_square, step = np.zeros((40, 50)), np.zeros((40, 50)), torch.zeros(())
    options = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.3, "cautious": False}
    w = (weight if master is None else master).double().numpy().copy()
    for count in range(1, 6):
        gradient = torch.randn(40, 50).to(dtype)
        adamw_(weight, master, gradient, *moments, step, **options)
        g = gradient.double().numpy()
        mean = mean + 0.1 * (g - mean)
        mean_square = mean_square + 0.05 * (g * g - mean_square)
        w -= 0.01 * (0.3 * w + (mean / (1 - 0.9**count)) / (np.sqrt(mean_square / (1 - 0.95**count)) + 1e-8))
        np.testing.assert_allclose((weight if master is None else master).numpy(), w, rtol=1e-5, atol=1e-6)
        for moment, exact in zip(moments, (mean, mean_square), strict=True):
            assert_rounded(moment, exact)
        mean, mean_square = (moment.double().numpy() for moment in moments)


@given(st.integers(0, 2**32 - 1), st.sampled_from([1e-30, 1.0, 1e30]))
def test_state_is_rounded_to_the_nearest_with_ties_to_even(seed, scale):
    generator = torch.Generator().manual_seed(seed)
    # Of few bits, so that float32 is exact and many averages lie half-way between two bfloat16 numbers.
    gradients = [
        torch.randint(-512, 513, (300,), generator=generator).float().mul_(2.0 ** int(np.log2(scale))) for _ in range(3)
    ]
    momentum, expected = torch.zeros(300, dtype=torch.bfloat16), np.zeros(300)
    for gradient in gradients:
        momentum_([momentum], [gradient], mu=0.5, nesterov=True)
        expected = bfloat16(expected + 0.5 * (gradient.double().numpy() - expected))
        assert np.array_equal(momentum.double().numpy(), expected)


@pytest.mark.parametrize("master", [None, "mantissa"])
@pytest.mark.parametrize("options", [{}, {"cautious": True, "weight_decay": 0.1, "adamw_weight_decay": 0.1}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_first_step_is_that_of_float32_state(dtype, options, master):
    """It reads zeros and moves the weights before anything is rounded."""
    wide, _ = stepped(dtype, steps=1, master=master, **options)
    # PyTorch's fused kernel steps the float32 ones, and rounds some last bits otherwise.
    tolerance = {"rtol": 1e-5, "atol": 1e-7} if dtype == torch.float32 else {"rtol": 0, "atol": 0}
    narrow, optimizer = stepped(dtype, steps=1, state_dtype="bf16", master=master, **options)
    for name, param in narrow.items():
        torch.testing.assert_close(param, wide[name], **tolerance)
    assert {value.dtype for value in averages(narrow, optimizer).values()} == {torch.bfloat16}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moments_are_not_left_to_the_fused_kernel(dtype, monkeypatch):
    """It rounds last bits by where an entry lies, and bfloat16 makes whole steps of them."""
    monkeypatch.setattr(torch_backend, "torch_adamw", None)
    stepped(dtype, state_dtype="bf16")
    if dtype == torch.float32:
        with pytest.raises(TypeError, match="not callable"):
            stepped(dtype)


def test_the_default_keeps_float32():
    params, optimizer = stepped()
    twin_params, twin = stepped(state_dtype=None)
    assert {value.dtype for value in averages(params, optimizer).values()} == {torch.float32}
    assert all(torch.equal(param, twin_params[name]) for name, param in params.items())
    assert all(
        torch.equal(value, averages(twin_params, twin)[key]) for key, value in averages(params, optimizer).items()
    )


def test_training_ends_where_float32_state_ends():
    torch.manual_seed(0)
    inputs, targets = torch.randn(256, 16), torch.randn(256, 4)
    losses = {}
    for state_dtype in (None, "bf16"):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))
        optimizer = quintic.Muon(quintic.param_groups(model), lr=0.02, state_dtype=state_dtype, **ORTHOGONALIZE)
        for step in range(200):
            for group in optimizer.param_groups:
                group["lr"] = (0.02 if group["algorithm"] == "muon" else 3e-4) * (1 - step / 200)
            optimizer.zero_grad()
            loss = (model(inputs) - targets).square().mean()
            loss.backward()
            optimizer.step()
        losses[state_dtype] = float(loss.detach())
    assert losses["bf16"] == pytest.approx(losses[None], rel=0.02)
    assert losses["bf16"] < 0.5


@pytest.mark.parametrize("state_dtype", [None, "bf16"])
def test_float64_weights_keep_float64_state(state_dtype):
    params, optimizer = stepped(torch.float64, state_dtype=state_dtype)
    assert {value.dtype for value in averages(params, optimizer).values()} == {torch.float64}


def test_which_dtype():
    dtypes = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
    assert [moment_dtype_of(dtype, None).itemsize for dtype in dtypes] == [4, 4, 4, 8]
    assert [moment_dtype_of(dtype, "bf16").itemsize for dtype in dtypes] == [2, 2, 2, 8]


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("master", [None, "fp32", "mantissa", "8bit"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_momentum_and_moments_take_half_the_bytes(dtype, master):
    sizes = []
    for state_dtype in (None, "bf16"):
        params, optimizer = stepped(dtype, steps=1, state_dtype=state_dtype, master=master, normalize="neuron")
        own = sum(value.nbytes for value in averages(params, optimizer).values())
        every = sum(value.nbytes for state in optimizer.state.values() for value in state.values())
        sizes.append((own, every - own))
    (wide, others), (narrow, same) = sizes
    assert narrow * 2 == wide == 4 * (30 + 24 + 7 + 0 + 2 * 36 + 2)
    assert others == same


def test_host_memory_is_half_as_much():
    found = []
    for state_dtype in (None, "bf16"):
        params = params_of()
        plan = optimizer_of(params, offload=True, state_dtype=state_dtype).plan()
        found.append(sum(bucket.offloaded.num_bytes for bucket in plan))
    assert found[1] * 2 == found[0] == 4 * (30 + 24 + 7 + 0 + 2 * 36 + 2)


def test_twice_as_many_entries_are_brought_from_the_host_at_a_time():
    loads = []
    for state_dtype in (None, "bf16"):
        groups = [{"params": [nn.Parameter(torch.ones(900))], "algorithm": "adamw"}]
        optimizer = quintic.Muon(groups, offload=True, max_workspace_bytes=3 * 4000, state_dtype=state_dtype)
        [bucket] = optimizer.plan()
        loads.append(bucket.offloaded.num_loads)
    # Of 8 bytes each 448 fit (a multiple of 64), of 4 bytes 960.
    assert loads == [3, 1]


def test_the_explanation_tells_of_half_the_state():
    model = nn.Sequential(nn.Linear(32, 64, bias=False), nn.LayerNorm(64))
    rows = [quintic.explain(model, state_dtype=state_dtype).rows for state_dtype in (None, "bf16")]
    wide, narrow = (sum(row.state_bytes for row in found) for found in rows)
    counts = 2 * 4  # of AdamW's steps
    assert (narrow - counts) * 2 == wide - counts == 4 * (32 * 64 + 2 * 2 * 64)


def test_offloaded_state_gives_the_same_bits():
    params, optimizer = stepped(state_dtype="bf16", normalize="neuron")
    twin_params, twin = stepped(state_dtype="bf16", normalize="neuron", offload=True, max_workspace_bytes=600)
    assert all(torch.equal(param, twin_params[name]) for name, param in params.items())
    assert all(
        torch.equal(value, averages(twin_params, twin)[key]) for key, value in averages(params, optimizer).items()
    )


# -- which averages ----------------------------------------------------------------------------------------------------


def test_no_allowed_average_stands_still():
    """Zeros shrink every bfloat16 number as fast as they should, to 3 %, from all mantissas on."""
    start = (torch.arange(128) + 128).to(torch.bfloat16)
    for mu in (0.5, 0.9, 0.95, 0.97, MAX_BF16_BETA):
        momentum, count = start.clone(), round(1 / (1 - mu))
        for _ in range(count):
            momentum_([momentum], [torch.zeros(128)], mu=mu, nesterov=False)
        torch.testing.assert_close(momentum.float() / start.float(), torch.full((128,), mu**count), rtol=0.03, atol=0)


@pytest.mark.parametrize(
    ("algorithm", "option", "message"),
    [
        ("muon", {"momentum": 0.99}, r"parameter group 0 \(p\): momentum=0\.99 with state_dtype='bf16': above 0\.98"),
        ("muon", {"momentum": torch.tensor(0.999)}, r"momentum=tensor\(0\.9990\) with state_dtype"),
        (
            "adamw",
            {"betas": (0.9, 0.999)},
            r"betas=\(0\.9, 0\.999\) with state_dtype='bf16'.*lower betas, or set state_",
        ),
        ("adamw", {"betas": (0.99, 0.9)}, r"betas=\(0\.99, 0\.9\) with state_dtype='bf16'"),
    ],
)
def test_averages_too_slow_for_bfloat16_are_refused(algorithm, option, message):
    group = {"params": [("p", nn.Parameter(torch.ones(4, 4)))], "algorithm": algorithm}
    with pytest.raises(ValueError, match=message):
        quintic.Muon([group], state_dtype="bf16", **option)
    quintic.Muon([group], **option)
    other = {"adamw": "muon", "muon": "adamw"}[algorithm]
    quintic.Muon([{**group, "algorithm": other}], state_dtype="bf16", **option)
    quintic.Muon([group], state_dtype="bf16", momentum=MAX_BF16_BETA, betas=(MAX_BF16_BETA, MAX_BF16_BETA))


def test_a_schedule_may_not_raise_an_average_beyond_the_limit():
    params, optimizer = stepped(state_dtype="bf16")
    before = {name: param.detach().clone() for name, param in params.items()}
    for group, key, value in ((0, "momentum", 0.995), (1, "betas", (0.9, 0.999))):
        good = optimizer.param_groups[group][key]
        optimizer.param_groups[group][key] = value
        with pytest.raises(ValueError, match=f"parameter group {group}.*{key}=.*above 0.98"):
            optimizer.step()
        optimizer.param_groups[group][key] = good
    assert all(torch.equal(param, before[name]) for name, param in params.items())
    optimizer.param_groups[0]["momentum"] = 0.97
    optimizer.step()


def test_other_dtypes_are_refused():
    with pytest.raises(ValueError, match="state_dtype='fp8' must be None or 'bf16'"):
        quintic.Muon([nn.Parameter(torch.ones(2, 2))], state_dtype="fp8")


# -- from one dtype to the other ---------------------------------------------------------------------------------------


def assert_converted(params, found, source):
    """State is the source's, rounded or widened, and nothing else."""
    assert found.keys() == source.keys()
    for key, value in found.items():
        assert torch.equal(value, source[key].to(value.dtype)), key


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize(("before", "after"), [(None, "bf16"), ("bf16", None)])
def test_a_changed_option_converts_state(before, after, offload):
    params, optimizer = stepped(state_dtype=before, master="fp32", normalize="neuron", offload=offload)
    source = {key: value.clone() for key, value in averages(params, optimizer).items()}
    for group in optimizer.param_groups:
        group["state_dtype"] = after
    optimizer.plan()
    found = averages(params, optimizer)
    assert {value.dtype for value in found.values()} == {torch.bfloat16 if after else torch.float32}
    assert_converted(params, found, source)
    give(params, 9)
    optimizer.step()


def test_groups_may_differ_and_be_added():
    params = params_of()
    optimizer = quintic.Muon([{"params": [("matrix", params["matrix"])], "state_dtype": "bf16"}], **ORTHOGONALIZE)
    optimizer.add_param_group({"params": [("wide", params["wide"])]})
    optimizer.add_param_group({"params": [("table", params["table"])], "algorithm": "adamw", "state_dtype": "bf16"})
    dtypes = [
        found.dtype for name in ("matrix", "wide", "table") for found in [*optimizer.state[params[name]].values()]
    ]
    assert dtypes == [torch.bfloat16, torch.float32, torch.float32, torch.bfloat16, torch.bfloat16]
    bad = {"params": [("row", params["row"])], "algorithm": "adamw", "betas": (0.9, 0.999), "state_dtype": "bf16"}
    with pytest.raises(ValueError, match="betas"):
        optimizer.add_param_group(bad)
    assert len(optimizer.param_groups) == 3


def through_state_dict(optimizer, twin, params, twin_params):
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def through_torch(optimizer, twin, params, twin_params):
    model, twin_model = (nn.ParameterDict(found) for found in (params, twin_params))
    set_optimizer_state_dict(twin_model, twin, get_optimizer_state_dict(model, optimizer))


def through_dcp(tmp_path):
    def load(optimizer, twin, params, twin_params):
        dcp.save(optimizer.state_dict(), checkpoint_id=tmp_path, no_dist=True)
        found = twin.state_dict()
        dcp.load(found, checkpoint_id=tmp_path, no_dist=True)
        twin.load_state_dict(found)

    return load


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("way", ["state_dict", "torch", "dcp"])
@pytest.mark.parametrize("own", [None, "bf16"])
@pytest.mark.parametrize("saved", [None, "bf16"])
def test_loaded_state_takes_the_dtype_of_the_option_that_is_set(saved, own, way, tmp_path):
    params, optimizer = stepped(torch.bfloat16, state_dtype=saved, master="mantissa")
    twin_params = params_of(torch.bfloat16)
    twin = optimizer_of(twin_params, state_dtype=own, master="mantissa")
    load = {"state_dict": through_state_dict, "torch": through_torch, "dcp": through_dcp(tmp_path)}[way]
    load(optimizer, twin, params, twin_params)
    assert [group["state_dtype"] for group in twin.param_groups] == [own, own]
    found = averages(twin_params, twin)
    assert {value.dtype for value in found.values()} == {torch.bfloat16 if own else torch.float32}
    assert_converted(twin_params, found, averages(params, optimizer))


def test_saved_betas_that_bfloat16_cannot_hold_are_refused():
    _, optimizer = stepped(betas=(0.9, 0.999))
    twin_params, twin = stepped(state_dtype="bf16")
    before = {key: value.clone() for key, value in averages(twin_params, twin).items()}
    with pytest.raises(
        ValueError, match=r"the saved options do not fit:.*betas=\(0\.9, 0\.999\) with state_dtype='bf16'"
    ):
        twin.load_state_dict(optimizer.state_dict())
    assert_converted(twin_params, averages(twin_params, twin), before)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda found: pickle.loads(pickle.dumps(found))])
def test_copies_keep_the_dtype_and_go_on_alike(copied):
    params, optimizer = stepped(state_dtype="bf16")
    params_copy, twin = copied((params, optimizer))
    assert {value.dtype for value in averages(params_copy, twin).values()} == {torch.bfloat16}
    for found, one in ((params, optimizer), (params_copy, twin)):
        give(found, 7)
        one.step()
    assert all(torch.equal(param, params_copy[name]) for name, param in params.items())
    assert_converted(params, averages(params, optimizer), averages(params_copy, twin))


def test_state_goes_to_pytorch_and_back():
    params, optimizer = stepped(state_dtype="bf16")
    exported = export_torch_state(optimizer)
    muon = torch_muon()([(name, params[name]) for name in ("matrix", "wide", "row", "nothing")])
    muon.load_state_dict(exported["muon"])
    assert torch.equal(
        muon.state[params["matrix"]]["momentum_buffer"], optimizer.state[params["matrix"]]["momentum_buffer"]
    )
    twin = optimizer_of(params_of(), state_dtype="bf16")
    import_torch_state(twin, *exported.values())
    twin_params = dict(zip(params, (p for group in twin.param_groups for p in group["params"]), strict=True))
    assert_converted(params, averages(twin_params, twin), averages(params, optimizer))


def test_imported_momentum_of_another_scale_is_rounded_once():
    param = nn.Parameter(torch.randn(40, 50))
    optimizer = quintic.Muon([("weight", param)], state_dtype="bf16", momentum=0.95)
    saved = torch.randn(40, 50)
    state = {"state": {0: {"momentum_buffer": saved}}, "param_groups": [{"params": [0], "momentum": 0.95}]}
    import_state(optimizer, state, source="keller_jordan_2024", names=["weight"])
    expected = bfloat16((saved * torch.tensor(1 - 0.95)).double().numpy())
    assert np.array_equal(optimizer.state[param]["momentum_buffer"].double().numpy(), expected)


# -- verify ------------------------------------------------------------------------------------------------------------


def test_verify_finds_a_right_step_right_and_rounding_twice_wrong(monkeypatch):
    params, optimizer = stepped(state_dtype="bf16", normalize="neuron")
    model = nn.ParameterDict(params)
    give(params, 5)
    assert quintic.verify(model, optimizer).ok, str(quintic.verify(model, optimizer))

    def stale(momenta, gradients, **options):
        found = momentum_(momenta, gradients, **options)
        for momentum in momenta:
            momentum.mul_(1 + 2.0**-6)  # two or three numbers on
        return found

    monkeypatch.setattr(torch_backend, "momentum_", stale)
    report = quintic.verify(model, optimizer)
    assert not report.ok
    assert "momentum_buffer" in str(report)
