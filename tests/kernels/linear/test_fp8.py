"""Quantisation, delayed scaling and the 8-bit linear layer: twins and modules. Kernels: triton_linear.py."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from quintic.kernels.linear.fp8 import fp8_linear
from quintic.kernels.linear.fp8_quantize import quantized_layouts
from quintic.kernels.linear.fp8_scaling import DelayedScaling, Fp8Linear, update_fp8_scales

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}


def quantized(x, scale, dtype):
    """Return a matrix or a vector quantised by the twin."""
    rows, _, _ = quantized_layouts(torch.atleast_2d(x), scale, dtype, True, False, False, "torch")
    return rows.view(x.shape)


def finite_values(dtype):
    """Return all finite values of an 8-bit dtype that are not negative, in order."""
    values = torch.arange(128, dtype=torch.uint8).view(dtype).double()
    return values[values.isfinite()]


def nearest(value, dtype):
    """Return the nearest value of the dtype, the one with the even code in a tie; the largest beyond all."""
    values = finite_values(dtype)
    distance = (values - abs(value)).abs()
    closest = (distance == distance.min()).nonzero().flatten().tolist()
    code = next((code for code in closest if code % 2 == 0), closest[0])
    return math.copysign(values[code].item(), value)


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_the_nearest_value_is_taken(dtype):
    values = finite_values(dtype)
    assert values[-1] == LARGEST[dtype]
    middles = (values[1:] + values[:-1]) / 2
    x = torch.cat([values, middles, middles * (1 + 1e-6), middles * (1 - 1e-6), torch.tensor([1e9])])
    x = torch.cat([x, -x]).float()
    found = quantized(x, torch.tensor(1.0), dtype)
    assert found.float().tolist() == [nearest(value, dtype) for value in x.tolist()]


@settings(max_examples=50, deadline=None)
@given(
    st.sampled_from([E4M3, E5M2]),
    st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=8),
    st.sampled_from([0.25, 1.0, 8.0]),
)
def test_scales_divide(dtype, values, scale):
    found = quantized(torch.tensor(values), torch.tensor(scale), dtype).tolist()
    assert found == [nearest(value / scale, dtype) for value in values]


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_not_finite(dtype, source):
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0], dtype=source)
    found = quantized(x, torch.tensor(2.0), dtype).float()
    assert found[0].isnan()
    assert found[1:3].tolist() == [LARGEST[dtype], -LARGEST[dtype]]
    assert found[3] == 0


def test_shapes_and_orientations():
    scale = torch.tensor(0.1)
    for m, n in [(5, 7), (16, 3), (33, 1), (0, 4), (4, 0)]:
        x = torch.randn(m, n)
        rows, columns, amax = quantized_layouts(x, scale, E5M2, True, True, True, "torch")
        assert torch.equal(rows.float(), (x / scale).to(E5M2).float())
        assert columns.shape == (n, (m + 15) // 16 * 16)
        assert torch.equal(columns[:, :m].float(), rows.mT.float())
        assert not columns[:, m:].float().any()
        assert amax == (x.abs().max() if m * n else 0)
        alone, *others = quantized_layouts(x.mT.contiguous().mT, scale, E5M2, True, False, False, "torch")
        assert alone.is_contiguous()
        assert torch.equal(alone.float(), rows.float())
        assert [other.numel() for other in others] == [0, 0]


def test_errors_say_what_to_do():
    x, one = torch.randn(4, 16), torch.tensor(1.0)
    scales = {"x_scale": one, "weight_scale": one, "grad_scale": one}
    with pytest.raises(ValueError, match=r"x \(4, 16\) and weight \(32, 16\): need \(..., in\) and \(in, out\)"):
        fp8_linear(x, torch.randn(32, 16), **scales)
    with pytest.raises(ValueError, match=r"weight has shape \(16, 50\).*multiples of 16: pad it to \(16, 64\)"):
        fp8_linear(x, torch.randn(16, 50), **scales)
    with pytest.raises(ValueError, match=r"x is on 'cpu' and weight on 'meta'"):
        fp8_linear(x, torch.randn(16, 32, device="meta"), **scales)
    with pytest.raises(ValueError, match=r"kernels='triton': .*use kernels='auto'"):
        fp8_linear(x, torch.randn(16, 32), **scales, kernels="triton")
    with pytest.raises(ValueError, match=r"grad_amax is torch.int64"):
        fp8_linear(x, torch.randn(16, 32), **scales, grad_amax=torch.tensor(0))
    with pytest.raises(TypeError, match=r"weight is torch.int64"):
        fp8_linear(x, torch.ones(16, 32, dtype=torch.int64), **scales)
    with pytest.raises(TypeError, match=r"dtype=torch.bfloat16: choose"):
        DelayedScaling(torch.bfloat16)
    with pytest.raises(ValueError, match=r"history=0: need at least one"):
        DelayedScaling(E4M3, history=0)
    with pytest.raises(ValueError, match=r"weight has shape \(16, 50\)"):
        Fp8Linear(16, 50)


def dequantized(x, scale, dtype):
    return (x.float() / scale).to(dtype).double() * scale.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lead", [(37,), (2, 3), (), (0,)])
def test_products_of_dequantised_operands(dtype, lead):
    x = torch.randn(*lead, 48).to(dtype).requires_grad_()
    weight = torch.randn(48, 32, requires_grad=True)
    grad = torch.randn(*lead, 32).to(dtype)
    scales = [torch.tensor(value) for value in (0.01, 0.009, 1e-4)]
    amaxes = [torch.tensor(0.5) for _ in range(3)]
    named = zip(("x", "weight", "grad"), scales, amaxes, strict=True)
    options = {f"{name}_{key}": value for name, *both in named for key, value in zip(("scale", "amax"), both)}  # noqa: B905
    out = fp8_linear(x, weight, **options)
    out.backward(grad)
    exact = [
        dequantized(tensor.detach(), scale, kind)
        for tensor, scale, kind in zip((x, weight, grad), scales, (E4M3, E4M3, E5M2), strict=True)
    ]
    expected = [
        exact[0] @ exact[1],
        exact[2] @ exact[1].mT,
        exact[0].reshape(-1, 48).mT @ exact[2].reshape(-1, 32),
    ]
    for found, right, kind in zip((out, x.grad, weight.grad), expected, (dtype, dtype, torch.float32), strict=True):
        assert found.dtype == kind
        torch.testing.assert_close(found.double(), right, rtol=torch.finfo(kind).eps * 8, atol=1e-4)
    for amax, tensor in zip(amaxes, (x, weight, grad), strict=True):
        assert amax == max([0.5, *tensor.detach().abs().flatten().tolist()])


def test_the_weight_gradient_has_the_layout_of_the_weight():
    layer = Fp8Linear(16, 48)
    layer(torch.randn(5, 16)).sum().backward()
    assert layer.weight.grad.stride() == layer.weight.stride() == (48, 1)


@pytest.mark.parametrize("needs", [(True, False), (False, True), (False, False)])
def test_gradients_on_demand(needs):
    x, weight = torch.randn(5, 16, requires_grad=needs[0]), torch.randn(16, 32, requires_grad=needs[1])
    one = torch.tensor(1.0)
    out = fp8_linear(x, weight, x_scale=one, weight_scale=one, grad_scale=one)
    assert out.requires_grad == any(needs)
    if any(needs):
        out.sum().backward()
    assert [x.grad is not None, weight.grad is not None] == list(needs)
    with torch.no_grad():
        assert torch.equal(fp8_linear(x, weight, x_scale=one, weight_scale=one, grad_scale=one), out)


def test_a_scale_changed_before_the_backward_pass_is_an_error():
    layer = Fp8Linear(16, 32)
    out = layer(torch.randn(5, 16))
    update_fp8_scales(layer)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("margin", [0.0, 1.0])
def test_delayed_scaling_follows_its_formula(margin):
    scaling = DelayedScaling(E4M3, history=3, margin=margin)
    nan, inf = float("nan"), float("inf")
    observed = [0.0, 3.0, 5.0, 1.0, nan, inf, 0.0, 0.0, 2.0]
    peaks = [None, 3.0, 5.0, 5.0, 5.0, 1.0, 1.0, 1.0, 2.0]
    assert scaling.scale == 1
    for amax, peak in zip(observed, peaks, strict=True):
        scaling.amax.fill_(amax)
        scaling.update()
        assert scaling.amax == 0
        expected = 1.0 if peak is None else peak / 448 * 2**margin
        assert scaling.scale.item() == pytest.approx(expected, rel=1e-6)


def test_tiny_magnitudes_leave_the_scale_usable():
    scaling = DelayedScaling(E5M2)
    scaling.amax.fill_(1e-44)
    scaling.update()
    assert 0 < scaling.scale < 1e-20
    assert (1 / scaling.scale).isfinite()


def test_scalings_of_a_model_are_updated_as_if_alone():
    model = nn.Sequential(Fp8Linear(16, 32, history=2), nn.ReLU(), Fp8Linear(32, 16, margin=1.0), Fp8Linear(16, 16))
    alone = [scaling for scaling in model.modules() if isinstance(scaling, DelayedScaling)]
    assert len(alone) == 9
    twins = [DelayedScaling(s.dtype, history=len(s.amax_history), margin=s.margin) for s in alone]
    addresses = [buffer.data_ptr() for buffer in model.buffers()]
    for _ in range(3):
        model(torch.randn(4, 16)).square().sum().backward()
        for twin, scaling in zip(twins, alone, strict=True):
            twin.amax.copy_(scaling.amax)
            twin.update()
        update_fp8_scales(model)
        for twin, scaling in zip(twins, alone, strict=True):
            assert scaling.scale != 1
            assert torch.equal(twin.scale, scaling.scale)
            assert torch.equal(twin.amax_history, scaling.amax_history)
    assert addresses == [buffer.data_ptr() for buffer in model.buffers()]


def test_a_calibrated_layer_is_close_to_the_plain_product():
    layer = Fp8Linear(64, 96)
    x, grad = torch.randn(128, 64), torch.randn(128, 96) * 1e-6
    for _ in range(2):
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        out = layer(leaf)
        out.backward(grad)
        update_fp8_scales(layer)
    expected = [x @ layer.weight, grad @ layer.weight.mT, x.mT @ grad]
    for found, right, tolerance in zip((out, leaf.grad, layer.weight.grad), expected, (0.04, 0.1, 0.1), strict=True):
        assert (found - right).norm() <= tolerance * right.norm()


def test_modules_keep_scales_in_float32_and_in_checkpoints():
    layer = Fp8Linear(16, 32)
    layer(torch.randn(4, 16)).sum().backward()
    update_fp8_scales(layer)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    assert len(before) == 10
    layer.bfloat16()
    assert layer.weight.dtype == torch.bfloat16
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items() if "scaling" in name)
    assert layer(torch.randn(4, 16).bfloat16()).dtype == torch.bfloat16
    other = Fp8Linear(16, 32)
    other.load_state_dict(before)
    assert torch.equal(other.scaling.x.scale, layer.scaling.x.scale)
    assert "history=16" in repr(other)
    assert "out_features=32" in repr(other)
    empty = Fp8Linear(16, 32, device="meta").to_empty(device="cpu")
    for module in empty.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert empty.scaling.grad.scale == 1


def test_evaluation_collects_nothing():
    layer = Fp8Linear(16, 32).eval()
    layer(torch.randn(4, 16)).sum().backward()
    assert all(scaling.amax == 0 for scaling in layer.modules() if isinstance(scaling, DelayedScaling))


@pytest.mark.slow
def test_microbatches_collect_together_and_compile_as_one_graph():
    layer = Fp8Linear(16, 32)
    batches = [torch.randn(4, 16), 3 * torch.randn(2, 4, 16)]
    found = []
    for compiled, interleaved in [(False, True), (False, False), (True, False)]:
        run = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
        layer.zero_grad()
        for scaling in layer.scaling.children():
            scaling.reset_parameters()
        outputs = [run(batch) for batch in batches] if interleaved else []
        for index, batch in enumerate(batches):
            if not interleaved:
                outputs.append(run(batch))
            ((index + 1) * outputs[index].square().sum()).backward()
        outputs = [out.detach() for out in outputs]
        found.append([*outputs, layer.weight.grad, *(scaling.amax.clone() for scaling in layer.scaling.children())])
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])
    assert found[0][3] == batches[1].abs().max()
    assert found[0][4] == layer.weight.abs().max()
    # d(factor out^2) = 2 factor out
    assert found[0][5] == max(2 * outputs[0].abs().max(), 4 * outputs[1].abs().max())


def test_operators_are_registered_as_pytorch_wants_them():
    ops, one = torch.ops.quintic, torch.tensor(1.0)
    x, weight = torch.randn(5, 32, requires_grad=True), torch.randn(32, 16, requires_grad=True)
    # The fourth check adds up all outputs, which 8-bit floats do not do; compilation is tested above.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    for needs in [(True, True), (False, True)]:
        torch.library.opcheck(ops.fp8_linear, (x, weight, one, one, one, None, *needs, "auto"), test_utils=checks)
