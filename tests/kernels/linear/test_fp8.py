"""Quantisation and the 8-bit linear layer: the twins. Kernels: triton_linear.py."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quintic.kernels.linear.fp8 import fp8_linear
from quintic.kernels.linear.fp8_quantize import quantized_layouts, unit_of

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}


def quantized(x, scale, dtype):
    """Return a matrix or a vector quantised by the twin."""
    rows, _ = quantized_layouts(torch.atleast_2d(x), scale, dtype, True, False, "torch")
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
        rows, columns = quantized_layouts(x, scale, E5M2, True, True, "torch")
        assert torch.equal(rows.float(), (x / scale).to(E5M2).float())
        assert columns.shape == (n, (m + 15) // 16 * 16)
        assert torch.equal(columns[:, :m].float(), rows.mT.float())
        assert not columns[:, m:].float().any()
        alone, unwanted = quantized_layouts(x.mT.contiguous().mT, scale, E5M2, True, False, "torch")
        assert alone.is_contiguous()
        assert torch.equal(alone.float(), rows.float())
        assert unwanted.numel() == 0


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
    with pytest.raises(
        ValueError, match=r"grad_scale is torch.int64 of shape \(\) on 'cpu'; need a \(\) float32 tensor"
    ):
        fp8_linear(x, torch.randn(16, 32), **scales | {"grad_scale": torch.tensor(1)})
    with pytest.raises(ValueError, match=r"weight_scale is torch.float32 of shape \(1,\)"):
        fp8_linear(x, torch.randn(16, 32), **scales | {"weight_scale": torch.ones(1)})
    with pytest.raises(TypeError, match=r"weight is torch.int64"):
        fp8_linear(x, torch.ones(16, 32, dtype=torch.int64), **scales)


def dequantized(x, scale, dtype):
    return (x.float() / scale).to(dtype).double() * scale.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lead", [(37,), (2, 3), (), (0,)])
def test_products_of_dequantised_operands(dtype, lead):
    x = torch.randn(*lead, 48).to(dtype).requires_grad_()
    weight = torch.randn(48, 32, requires_grad=True)
    grad = torch.randn(*lead, 32).to(dtype)
    scales = [torch.tensor(value) for value in (0.01, 0.009, 1e-4)]
    out = fp8_linear(x, weight, x_scale=scales[0], weight_scale=scales[1], grad_scale=scales[2])
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


def scales_of(x, weight):
    """Return scales that use the whole range of e4m3; that of the gradient comes from the gradient."""
    return {"x_scale": unit_of(x, E4M3), "weight_scale": unit_of(weight, E4M3), "grad_scale": None}


def test_the_weight_gradient_has_the_layout_of_the_weight():
    x, weight = torch.randn(5, 16), torch.randn(16, 48, requires_grad=True)
    fp8_linear(x, weight, **scales_of(x, weight)).sum().backward()
    assert weight.grad.stride() == weight.stride() == (48, 1)


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


@pytest.mark.parametrize("changed", ["x_scale", "weight_scale", "grad_scale"])
def test_a_scale_changed_before_the_backward_pass_is_an_error(changed):
    x, weight = torch.randn(5, 16), torch.randn(16, 32, requires_grad=True)
    scales = scales_of(x, weight) | {"grad_scale": torch.tensor(0.01)}
    out = fp8_linear(x, weight, **scales)
    scales[changed].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_the_unit_of_a_tensor_uses_the_whole_range(dtype):
    assert unit_of(torch.tensor([[-3.0, 2.0]]), dtype).item() == pytest.approx(3 / LARGEST[dtype], rel=1e-6)
    assert unit_of(torch.tensor([1.0, float("nan")]), dtype).isnan()
    for tiny in (0.0, 1e-44):
        unit = unit_of(torch.tensor([tiny]), dtype)
        assert 0 < unit < 1e-20
        assert (1 / unit).isfinite()


def test_the_layer_is_close_to_the_plain_product():
    x, weight = torch.randn(128, 64, requires_grad=True), torch.randn(64, 96, requires_grad=True)
    grad = torch.randn(128, 96) * 1e-6
    out = fp8_linear(x, weight, **scales_of(x, weight))
    out.backward(grad)
    expected = [x @ weight, grad @ weight.mT, x.mT @ grad]
    for found, right, tolerance in zip((out, x.grad, weight.grad), expected, (0.04, 0.1, 0.1), strict=True):
        assert (found - right).norm() <= tolerance * right.norm()


@pytest.mark.slow
@pytest.mark.parametrize("grad_scale", [None, torch.tensor(0.1)], ids=["found", "given"])
def test_the_layer_compiles_as_one_graph(grad_scale):
    x, weight = torch.randn(2, 4, 16), torch.randn(16, 32, requires_grad=True)
    scales = scales_of(x, weight) | {"grad_scale": grad_scale}
    results = []
    for run in (fp8_linear, torch.compile(fp8_linear, fullgraph=True, backend="aot_eager")):
        out = run(x, weight, **scales)
        results.append([out.detach(), *torch.autograd.grad(out.square().sum(), weight)])
    for compiled, eager in zip(*results, strict=True):
        assert torch.equal(compiled, eager)


def test_operators_are_registered_as_pytorch_wants_them():
    ops, one = torch.ops.quintic, torch.tensor(1.0)
    x, weight = torch.randn(5, 32, requires_grad=True), torch.randn(32, 16, requires_grad=True)
    # The fourth check adds up all outputs, which 8-bit floats do not do; compilation is tested above.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    for needs in [(True, True), (False, True)]:
        torch.library.opcheck(ops.fp8_linear, (x, weight, one, one, one, *needs, "auto"), test_utils=checks)
