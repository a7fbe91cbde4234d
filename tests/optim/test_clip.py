"""Clipping on one device, against PyTorch's own and against float64 arithmetic done by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import quintic
from quintic import Muon, clip_grad_norm_

SHAPES = [(), (1,), (0,), (7,), (3, 0), (1, 5), (5, 4), (2, 3, 4)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def model_and_optimizer(**options):
    model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8, bias=False))
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    return model, Muon(quintic.param_groups(model), lr=0.1, **options)


def params_of(optimizer, *algorithms):
    return [p for group in optimizer.param_groups if group["algorithm"] in algorithms for p in group["params"]]


def vectors(*gradients):
    """AdamW parameters with these gradients, and their optimizer."""
    params = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = gradient
    return params, Muon([{"params": params, "algorithm": "adamw"}])


def snapshot(params):
    return [param.grad.clone() for param in params]


def all_equal(before, after):
    return all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 1e6])
@pytest.mark.parametrize("scope", ["adamw", "all"])
def test_equals_pytorch_over_the_parameters_in_scope(scope, max_norm):
    _, optimizer = model_and_optimizer()
    inside = params_of(optimizer, *(["adamw", "muon"] if scope == "all" else ["adamw"]))
    outside = params_of(optimizer, *([] if scope == "all" else ["muon"]))
    untouched = snapshot(outside)
    twins = [nn.Parameter(p.detach().clone()) for p in inside]
    for twin, param in zip(twins, inside, strict=True):
        twin.grad = param.grad.clone()
    norm = clip_grad_norm_(optimizer, max_norm, scope=scope)
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(twins, max_norm))
    for param, twin in zip(inside, twins, strict=True):
        torch.testing.assert_close(param.grad, twin.grad)
    assert all_equal(untouched, snapshot(outside))
    assert len(inside) > 2


def test_adamw_is_the_default_scope():
    _, optimizer = model_and_optimizer()
    for param in params_of(optimizer, "muon"):
        param.grad.fill_(1e9)
    expected = torch.nn.utils.get_total_norm(snapshot(params_of(optimizer, "adamw")))
    torch.testing.assert_close(clip_grad_norm_(optimizer, 1.0), expected)
    assert all(bool((param.grad == 1e9).all()) for param in params_of(optimizer, "muon"))


@given(
    st.lists(st.tuples(st.sampled_from(SHAPES), st.sampled_from(DTYPES), st.booleans()), min_size=1, max_size=6),
    st.sampled_from([1e-3, 0.7, 3.0, 1e3]),
    st.integers(0, 2**31),
)
def test_norm_and_gradients_are_those_of_float64(kinds, max_norm, seed):
    torch.manual_seed(seed)
    gradients = [torch.randn(shape).to(dtype) for shape, dtype, _ in kinds]
    params, optimizer = vectors(*gradients)
    for param, (_, _, is_there) in zip(params, kinds, strict=True):
        param.grad = param.grad if is_there else None
    wide = [None if param.grad is None else param.grad.to(torch.float64, copy=True) for param in params]
    expected = math.sqrt(math.fsum(v * v for w in wide if w is not None for v in w.flatten().tolist()))
    norm = clip_grad_norm_(optimizer, max_norm)
    assert (norm.shape, norm.dtype) == ((), torch.float32)
    assert norm.item() == pytest.approx(expected, rel=2.0**-23, abs=0)
    factor = min(1.0, max_norm / (expected + 1e-6))
    for param, before, (_, dtype, _) in zip(params, wide, kinds, strict=True):
        if before is None:
            assert param.grad is None
        else:
            # The factor is rounded to float32 (not for float64), the product to the gradient's dtype.
            eps = torch.finfo(dtype).eps + (2.0**-49 if dtype == torch.float64 else 2.0**-23)
            tiny = torch.finfo(dtype).smallest_normal * eps
            torch.testing.assert_close(param.grad.double(), before * factor, rtol=eps, atol=tiny)


def test_gradients_are_scaled_where_they_are():
    whole = torch.randn(6, 8)
    params, optimizer = vectors(whole[:, ::2], torch.randn(()).bfloat16())
    kept = [param.grad for param in params]
    before = snapshot(params)
    clip_grad_norm_(optimizer, 0.1)
    assert all(param.grad is gradient for param, gradient in zip(params, kept, strict=True))
    assert whole[:, ::2].data_ptr() == params[0].grad.data_ptr()
    assert not any(torch.equal(a, b) for a, b in zip(before, snapshot(params), strict=True))


def test_below_the_bound_no_bit_changes():
    model, optimizer = model_and_optimizer()
    before = snapshot(model.parameters())
    clip_grad_norm_(optimizer, 1e4, scope="all")
    assert all_equal(before, snapshot(model.parameters()))


def test_infinite_bound_only_measures():
    params, optimizer = vectors(torch.tensor([3.0, math.inf]), torch.tensor([4.0]))
    assert clip_grad_norm_(optimizer, math.inf).item() == math.inf
    assert params[1].grad.item() == 4.0
    assert params[0].grad.tolist() == [3.0, math.inf]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_low_precision_gradients_are_scaled_by_the_exact_factor(device):
    gradient = torch.randn(300, 200, device=device).bfloat16()
    params, optimizer = vectors(gradient)
    max_norm = 0.503 * gradient.double().norm().item()  # 0.503 rounded to bfloat16 is 0.2 % more
    clip_grad_norm_(optimizer, max_norm)
    assert params[0].grad.double().norm().item() == pytest.approx(max_norm, rel=5e-4)


@pytest.mark.parametrize("size", [1e-25, 1e25])
def test_squares_neither_vanish_nor_overflow(size):
    params, optimizer = vectors(torch.full((9,), size))
    torch.testing.assert_close(clip_grad_norm_(optimizer, 1.0).item(), 3 * size)
    torch.testing.assert_close(params[0].grad.norm(), torch.tensor(min(1.0, 3 * size)))


def test_without_gradients_the_norm_is_zero():
    model, optimizer = model_and_optimizer()
    optimizer.zero_grad()
    norm = clip_grad_norm_(optimizer, 1.0)
    assert (norm.item(), norm.dtype) == (0.0, torch.float32)
    assert all(param.grad is None for param in model.parameters())


def test_clipping_does_not_change_what_muon_does():
    models = []
    for clips in (False, True):
        torch.manual_seed(0)
        model, optimizer = model_and_optimizer()
        if clips:
            clip_grad_norm_(optimizer, 1e-9)
        optimizer.step()
        models.append((model, optimizer))
    (_, plain), (_, clipped) = models
    pairs = list(zip(params_of(plain, "muon"), params_of(clipped, "muon"), strict=True))
    assert pairs
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("scope", ["adamw", "all"])
def test_error_if_nonfinite_scales_nothing(bad, scope):
    model, optimizer = model_and_optimizer()
    params_of(optimizer, "adamw")[0].grad.view(-1)[0] = bad
    before = [gradient.nan_to_num() for gradient in snapshot(model.parameters())]
    with pytest.raises(RuntimeError, match=rf"scope '{scope}' is {bad}.*error_if_nonfinite"):
        clip_grad_norm_(optimizer, 1.0, scope=scope, error_if_nonfinite=True)
    assert all_equal(before, [gradient.nan_to_num() for gradient in snapshot(model.parameters())])


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_non_finite_gradient_is_still_found_by_step(bad):
    model, optimizer = model_and_optimizer(on_nonfinite="skip")
    params_of(optimizer, "adamw")[0].grad.view(-1)[0] = bad
    before = [param.detach().clone() for param in model.parameters()]
    assert not clip_grad_norm_(optimizer, 1.0).isfinite()
    optimizer.step()
    assert optimizer.last_step().skipped
    assert all_equal(before, [param.detach() for param in model.parameters()])


def test_gradients_that_still_add_up_are_left_alone():
    now, later = (nn.Parameter(torch.zeros(4)) for _ in range(2))
    groups = [
        {"params": [now], "algorithm": "adamw"},
        {"params": [later], "algorithm": "adamw", "step_every": 2},
    ]
    optimizer = Muon(groups)
    norms, sizes = [], []
    for _ in range(2):
        for param in (now, later):
            param.grad = torch.ones(4) + (param.grad if param.grad is not None else 0)
        norms.append(clip_grad_norm_(optimizer, 1.0).item())
        sizes.append(later.grad.norm().item())
        optimizer.step()
        optimizer.zero_grad()
    assert norms == pytest.approx([2.0, math.sqrt(4 + 16)])
    assert sizes == pytest.approx([2.0, 4 / math.sqrt(20)])


def test_works_with_scaler_and_scheduler():
    model, optimizer = model_and_optimizer()
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    optimizer.zero_grad()
    scaler.scale(model(torch.arange(4)).square().mean()).backward()
    scaler.unscale_(optimizer)
    expected = torch.nn.utils.get_total_norm([param.grad for param in params_of(optimizer, "adamw")])
    torch.testing.assert_close(clip_grad_norm_(optimizer, 1e-3), expected)
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_waits_for_the_device(dtype):
    # Reading a value of a meta tensor is an error.
    model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 16)).to("meta", dtype)
    optimizer = Muon(quintic.param_groups(model))
    for param in model.parameters():
        param.grad = torch.empty_like(param)
    assert clip_grad_norm_(optimizer, 1.0, scope="all").device.type == "meta"
    with pytest.raises(RuntimeError, match="meta"):
        clip_grad_norm_(optimizer, 1.0, error_if_nonfinite=True)


@pytest.mark.parametrize("max_norm", [0, 0.0, -1.0, math.nan, -math.inf, "a", None, [1.0], torch.ones(2)])
def test_max_norm_must_be_positive(max_norm):
    _, optimizer = model_and_optimizer()
    with pytest.raises(ValueError, match=r"max_norm must be a positive number, got .*math\.inf"):
        clip_grad_norm_(optimizer, max_norm)


def test_unknown_scope_is_an_error():
    _, optimizer = model_and_optimizer()
    with pytest.raises(ValueError, match="unknown scope 'muon'; choose 'adamw' or 'all'"):
        clip_grad_norm_(optimizer, 1.0, scope="muon")


@pytest.mark.parametrize("optimizer", [torch.optim.SGD([nn.Parameter(torch.zeros(2))]), [torch.zeros(2)]], ids=type)
def test_another_optimizer_is_an_error(optimizer):
    with pytest.raises(TypeError, match=rf"optimizer is a {type(optimizer).__name__}: clip_grad_norm_ needs a quintic"):
        clip_grad_norm_(optimizer, 1.0)


def test_sparse_gradients_are_an_error_with_the_name():
    embedding = nn.Embedding(5, 3, sparse=True)
    optimizer = Muon([{"params": [("tokens.weight", embedding.weight)], "algorithm": "adamw"}])
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ValueError, match=r"tokens\.weight: sparse gradients.*sparse=False"):
        clip_grad_norm_(optimizer, 1.0)


@pytest.mark.parametrize("comms", ["averaged", "replicated", "sharded"])
def test_one_rank_has_nothing_to_average(comms):
    torch.manual_seed(0)
    _, alone = model_and_optimizer()
    torch.manual_seed(0)
    _, optimizer = model_and_optimizer(comms=comms)
    assert torch.equal(clip_grad_norm_(optimizer, 0.1, scope="all"), clip_grad_norm_(alone, 0.1, scope="all"))
    params = params_of(optimizer, "adamw", "muon")
    assert all_equal(snapshot(params_of(alone, "adamw", "muon")), snapshot(params))
