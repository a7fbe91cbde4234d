"""linear_relu2 and mlp_relu2: the plain twins against float64, errors, compilation. Kernels: triton_linear.py."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quintic.kernels.linear.fp8 import Fp8LinearScales
from quintic.kernels.linear.linear import linear_relu2, mlp_relu2


def relative(found, exact):
    return ((found.double() - exact).norm() / exact.norm().clamp_min(1e-30)).item()


def gradients(function, inputs, grad):
    """Return the value and the gradients of a function for fresh leaves."""
    leaves = [value.detach().clone().requires_grad_() for value in inputs]
    out = function(*leaves)
    out.backward(grad.to(out.dtype))
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def plain(x, weight):
    return F.linear(x, weight).relu().square()


def plain_mlp(x, up, down):
    return F.linear(plain(x, up), down)


def sizes(count):
    return st.tuples(*[st.integers(1, 40)] * count)


@settings(max_examples=20, deadline=None)
@given(sizes(3), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), st.integers(0, 2**31))
@example((29, 1, 1), torch.float16, 13245)  # a weight so small that squares vanish
def test_values_and_gradients_against_float64(shape, dtype, seed):
    torch.manual_seed(seed)
    rows, inner, features = shape
    inputs = [torch.randn(rows, inner).to(dtype), (torch.randn(features, inner) / inner**0.5).to(dtype)]
    grad = torch.randn(rows, features).to(dtype)
    exact = gradients(plain, [value.double() for value in inputs], grad)
    expected = gradients(plain, inputs, grad)
    found = gradients(linear_relu2, inputs, grad)
    numbers = torch.finfo(dtype)
    # The backward pass has squares alone: those of smaller values are zero.
    lost = 2 * (numbers.smallest_normal * numbers.eps) ** 0.5 * grad.double().norm()
    largest = max(1.0, *(value.double().norm().item() for value in inputs))
    for ours, theirs, right in zip(found, expected, exact, strict=True):
        assert ours.dtype == dtype
        # Twice PyTorch's error, as a whole tensor; tiny tensors may have been lucky there.
        vanished = lost * largest / right.norm().clamp_min(1e-30)
        assert relative(ours, right) <= 2 * relative(theirs, right) + numbers.eps + vanished


@settings(max_examples=20, deadline=None)
@given(sizes(4), st.sampled_from([torch.float32, torch.bfloat16]), st.integers(0, 2**31))
def test_mlp_against_float64(shape, dtype, seed):
    torch.manual_seed(seed)
    rows, inner, features, outer = shape
    inputs = [torch.randn(rows, inner), torch.randn(features, inner) / inner**0.5, torch.randn(outer, features)]
    inputs = [value.to(dtype) for value in inputs]
    grad = torch.randn(rows, outer).to(dtype)
    exact = gradients(plain_mlp, [value.double() for value in inputs], grad)
    expected = gradients(plain_mlp, inputs, grad)
    found = gradients(mlp_relu2, inputs, grad)
    for ours, theirs, right in zip(found, expected, exact, strict=True):
        assert relative(ours, right) <= 2 * relative(theirs, right) + torch.finfo(dtype).eps


def test_gradients_are_those_of_the_formula():
    leaves = [torch.randn(size, dtype=torch.float64, requires_grad=True) for size in [(3, 5), (7, 5), (4, 7)]]
    assert torch.autograd.gradcheck(linear_relu2, leaves[:2])
    assert torch.autograd.gradcheck(mlp_relu2, leaves)


@pytest.mark.parametrize("function", [linear_relu2, mlp_relu2])
def test_only_what_requires_a_gradient_gets_one(function):
    values = [torch.randn(6, 5), torch.randn(8, 5), torch.randn(4, 8)][: 2 if function is linear_relu2 else 3]
    everything = [value.clone().requires_grad_() for value in values]
    function(*everything).sum().backward()
    for chosen in range(len(values)):
        leaves = [value.clone().requires_grad_(index == chosen) for index, value in enumerate(values)]
        function(*leaves).sum().backward()
        for index, leaf in enumerate(leaves):
            assert (leaf.grad is None) == (index != chosen)
        torch.testing.assert_close(leaves[chosen].grad, everything[chosen].grad)
    assert not function(*values).requires_grad


def test_shapes_and_strides():
    weight = torch.randn(5, 8).mT
    x = torch.randn(5, 3, 2).permute(2, 1, 0)
    torch.testing.assert_close(linear_relu2(x, weight), plain(x, weight))
    assert linear_relu2(x[0, 0], weight).shape == (8,)
    for shape in [(0, 5), (3, 0, 5)]:
        leaf, empty = weight.clone().requires_grad_(), torch.randn(shape, requires_grad=True)
        out = linear_relu2(empty, leaf)
        out.sum().backward()
        assert out.shape == (*shape[:-1], 8)
        assert empty.grad.shape == shape
        assert torch.equal(leaf.grad, torch.zeros_like(leaf))
    # An expanded gradient, as sum() gives it, has strides of zero.
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    linear_relu2(*leaves).sum().backward()
    expected = gradients(plain, [x, weight], torch.ones(2, 3, 8))
    torch.testing.assert_close([leaf.grad for leaf in leaves], expected[1:])


def test_nothing_comes_back_where_relu_is_zero():
    x = torch.tensor([[1.0, 0.0]], requires_grad=True)
    weight = torch.tensor([[-1.0, 0.0], [0.0, 1.0], [2.0, 0.0]])
    linear_relu2(x, weight).backward(torch.tensor([[float("inf"), float("nan"), 1.0]]))
    assert x.grad.tolist() == [[8.0, 0.0]]
    bad = linear_relu2(torch.tensor([[float("nan"), 0.0]]), weight)
    assert bad.isnan().all()


def test_the_pre_activation_is_not_kept():
    x, weight = torch.randn(6, 5, requires_grad=True), torch.randn(8, 5, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda t: t):
        out = linear_relu2(x, weight)
    assert sorted(tensor.data_ptr() for tensor in kept) == sorted(t.data_ptr() for t in (out, x, weight))


def test_errors_say_what_to_do():
    x, weight = torch.randn(3, 16), torch.randn(32, 16)
    with pytest.raises(ValueError, match=r"x \(3, 16\) and weight \(16, 32\): need \(..., d\) and \(h, d\)"):
        linear_relu2(x, weight.mT)
    with pytest.raises(TypeError, match=r"x is torch.float32 and weight torch.bfloat16; cast"):
        linear_relu2(x, weight.bfloat16())
    with pytest.raises(TypeError, match=r"x is torch.int64; need bfloat16"):
        linear_relu2(x.long(), weight.long())
    with pytest.raises(ValueError, match=r"x is on 'cpu' and weight on 'meta'"):
        linear_relu2(x, weight.to("meta"))
    with pytest.raises(ValueError, match=r"kernels='triton': .*use kernels='auto'"):
        linear_relu2(x, weight, kernels="triton")
    with pytest.raises(ValueError, match=r"kernels='fast'"):
        linear_relu2(x, weight, kernels="fast")
    with pytest.raises(ValueError, match=r"up \(32, 16\) and down \(32, 16\): need \(h, d\) and \(o, h\)"):
        mlp_relu2(x, weight, weight)
    with pytest.raises(TypeError, match=r"down is torch.float64"):
        mlp_relu2(x, weight, weight.mT.double())
    one = torch.tensor(1.0)
    with pytest.raises(ValueError, match=r"weight has shape \(30, 16\).*pad it to \(32, 16\)"):
        linear_relu2(x, weight[:30], fp8=Fp8LinearScales(one, one, one))
    with pytest.raises(ValueError, match=r"weight_scale is torch.float64 of shape \(\) on 'cpu'; need"):
        linear_relu2(x, weight, fp8=Fp8LinearScales(one, one.double(), one))
    with pytest.raises(TypeError, match=r"weight is torch.float64; need float32"):
        linear_relu2(x, weight.double(), fp8=Fp8LinearScales(one, one, one))


def fp8_scales(x, weight, grad):
    """Scales that use the range of the formats."""
    largest = [(x, 448), (weight, 448), (grad, 57344)]
    return Fp8LinearScales(*(tensor.abs().max().float() / top for tensor, top in largest))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_8_bit_products_against_dequantised_operands(dtype):
    x, weight = torch.randn(37, 48).to(dtype), (torch.randn(32, 48) / 7)
    grad = torch.randn(37, 32).to(dtype)
    pre = x.double() @ weight.double().mT
    scales = fp8_scales(x, weight, 2 * pre.relu() * grad)
    amaxes = [torch.zeros(()) for _ in range(3)]
    scales = Fp8LinearScales(*scales[:3], *amaxes)

    def rounded(tensor, scale, target):
        return (tensor.float() / scale).to(target).double() * scale.double()

    x_exact = rounded(x, scales.x_scale, torch.float8_e4m3fn)
    weight_exact = rounded(weight, scales.weight_scale, torch.float8_e4m3fn)
    s = (x_exact @ weight_exact.mT).relu().square()
    found = gradients(lambda x, weight: linear_relu2(x, weight, fp8=scales), [x, weight], grad)
    eps = torch.finfo(dtype).eps
    assert relative(found[0], s) <= 2 * eps
    before = 2 * found[0].double().sqrt() * grad.double()
    grad_pre = rounded(before, scales.grad_scale, torch.float8_e5m2)
    assert relative(found[1], grad_pre @ weight_exact) <= 2 * eps
    assert relative(found[2], grad_pre.mT @ x_exact) <= 1e-5
    assert found[2].dtype == torch.float32
    # And 8 bits are no more than 8 bits away from the plain product.
    assert relative(found[0], pre.relu().square()) < 0.06
    for amax, tensor in zip(amaxes, (x, weight, before), strict=True):
        torch.testing.assert_close(amax, tensor.abs().max().float())


@pytest.mark.parametrize("needs", [(True, False), (False, True), (False, False)])
def test_8_bit_gradients_on_demand(needs):
    x, weight = torch.randn(5, 16, requires_grad=needs[0]), torch.randn(32, 16, requires_grad=needs[1])
    scales = fp8_scales(x.detach(), weight.detach(), torch.ones(1))
    out = linear_relu2(x, weight, fp8=scales)
    assert out.requires_grad == any(needs)
    if any(needs):
        out.sum().backward()
    assert [x.grad is not None, weight.grad is not None] == list(needs)


@pytest.mark.parametrize("fp8", [False, True])
def test_compiles_as_one_graph(fp8):
    x, weight = torch.randn(2, 5, 16), torch.randn(32, 16)
    scales = fp8_scales(x, weight, torch.ones(1))._replace(grad_amax=torch.zeros(())) if fp8 else None
    grad = torch.randn(2, 5, 32)

    def function(x, weight):
        return linear_relu2(x * 2, weight, fp8=scales)

    expected = gradients(function, [x, weight], grad)
    amax = scales.grad_amax.clone() if fp8 else None
    if fp8:
        scales.grad_amax.zero_()
    found = gradients(torch.compile(function, fullgraph=True, backend="aot_eager"), [x, weight], grad)
    torch.testing.assert_close(found, expected)
    if fp8:
        assert torch.equal(scales.grad_amax, amax)


def test_mlp_compiles_as_one_graph():
    inputs = [torch.randn(2, 5, 16), torch.randn(32, 16), torch.randn(8, 32)]
    grad = torch.randn(2, 5, 8)
    compiled = torch.compile(mlp_relu2, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(gradients(compiled, inputs, grad), gradients(plain_mlp, inputs, grad))


def test_operators_are_registered_as_pytorch_wants_them():
    def leaf(*shape):
        return torch.randn(shape, requires_grad=True)

    ops, one = torch.ops.quintic, torch.tensor(1.0)
    torch.library.opcheck(ops.linear_relu2, (leaf(3, 5), leaf(7, 5), "auto"))
    torch.library.opcheck(ops.mlp_relu2, (leaf(3, 5), leaf(7, 5), leaf(2, 7), "auto"))
    tensors = [torch.rand(shape) for shape in [(3, 7), (3, 7), (3, 5), (7, 5)]]
    torch.library.opcheck(ops.linear_relu2_backward, (*tensors, True, False, "auto"))
    torch.library.opcheck(
        ops.mlp_relu2_backward, (torch.randn(3, 2), *tensors[1:], torch.rand(2, 7), [True] * 3, "auto")
    )
    # The fourth check adds up all outputs, which 8-bit floats do not do; compilation is tested above.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    arguments = (leaf(3, 16), leaf(32, 16), one, one, one, None, True, True, "auto")
    torch.library.opcheck(ops.fp8_linear_relu2, arguments, test_utils=checks)
