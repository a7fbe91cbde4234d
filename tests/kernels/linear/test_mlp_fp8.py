"""mlp_relu2 with products in 8 bits: the plain twin against float64. Kernels: triton_linear.py."""

import pytest
import torch
import torch.nn.functional as F

from quintic.kernels.linear.mlp import mlp_relu2

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def inputs_of(*lead, dtype=torch.float32, d=80, h=144, o=48):
    """Return x with rows of RMS 1, up, and down, which is stored (h, o)."""
    x = F.rms_norm(torch.randn(*lead, d), (d,))
    up, stored = torch.randn(h, d) / (2 * d**0.5), torch.randn(h, o) / h**0.5
    return x.to(dtype), up.to(dtype), stored.to(dtype).mT


def exact(x, up, down):
    return (x.double() @ up.double().mT).relu().square() @ down.double().mT


def error(found, right):
    return ((found.double() - right.double()).norm() / right.double().norm()).item()


def quantized(x, unit, dtype=torch.float8_e4m3fn):
    """Return a float64 tensor rounded to 8-bit floats in this unit, as float64."""
    # Quotients in float32, as `quantized_layouts` promises: entries of 16 bits often lie in the middle.
    unit = torch.as_tensor(unit, dtype=torch.float32)
    largest = torch.finfo(dtype).max
    return (x.float() * unit.reciprocal()).clamp(-largest, largest).to(dtype).double() * unit.double()


def oracle(x, up, down):
    """Return the output and the activation in float64, with the quantisation that the docstring describes."""
    x, up, down = (each.double() for each in (x, up, down))
    d = x.shape[-1]
    x8 = quantized(x, d**0.5 / 448)
    up8, down8 = (quantized(weight, weight.abs().max() / 448) for weight in (up, down))
    activation = (x8 @ up8.mT).relu().square()
    bound = d * max((row @ row).item() for row in up)
    return quantized(activation, bound / 448) @ down8.mT, activation


def saved_activation(x, up, down, **options):
    """Return the output, and the matrix saved for the backward pass that is none of the inputs."""
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        out = mlp_relu2(x, up, down, fp8=True, **options)
    inputs = {tensor.data_ptr() for tensor in (x, up, down)}
    (activation,) = [tensor for tensor in kept if tensor.ndim and tensor.data_ptr() not in inputs]
    return out, activation


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lead", [(37,), (2, 5), ()])
def test_values_are_those_of_the_quantised_operands(dtype, lead):
    x, up, down = inputs_of(*lead, dtype=dtype)
    out, activation = saved_activation(x, up.requires_grad_(), down)
    expected, expected_activation = oracle(x, up.detach(), down)
    assert out.dtype == activation.dtype == dtype
    rounding = torch.finfo(dtype).eps
    assert error(activation.view(expected_activation.shape), expected_activation) < rounding + 1e-5
    assert error(out, expected) < rounding + 1e-3  # sums that end near the middle of two 8-bit floats
    # And these are 8 bits of the right range: roundings of 2.6 % on average, 6 % at most; a row alone may be unlucky.
    assert not lead or 0.01 < error(out, exact(x, up.detach(), down)) < 0.08


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_backward_pass_is_that_of_16_bits(dtype):
    leaves = [value.detach().requires_grad_() for value in inputs_of(19, dtype=dtype)]
    out, activation = saved_activation(*leaves)
    grad = torch.randn_like(out)
    out.backward(grad)
    plain = [value.detach() for value in leaves]
    found = torch.ops.quintic.mlp_relu2_backward(grad, activation, *plain, [True] * 3, "auto")
    for leaf, expected in zip(leaves, found, strict=True):
        assert torch.equal(leaf.grad, expected)
    x, up, down = (value.double() for value in plain)
    before = 2 * activation.double().sqrt() * (grad.double() @ down)
    formulas = [before @ up, before.mT @ x, grad.double().mT @ activation.double()]
    for leaf, expected in zip(leaves, formulas, strict=True):
        assert error(leaf.grad, expected) < 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spread", [1e-3, 1.0])
def test_the_backward_pass_in_8_bits_is_that_of_the_quantised_operands(spread, dtype):
    leaves = [value.detach().requires_grad_() for value in inputs_of(61, dtype=dtype)]
    out, activation = saved_activation(*leaves, fp8_backward=True)
    grad = (spread * torch.randn_like(out)).to(dtype)
    out.backward(grad)
    x, up, down = (leaf.detach().double() for leaf in leaves)
    e5m2, unit = torch.float8_e5m2, grad.abs().max().double() / 57344
    up8, down8 = (quantized(weight, weight.abs().max() / 448) for weight in (up, down))
    before = 2 * activation.double().sqrt() * (quantized(grad, unit, e5m2) @ down8)
    longest = max(row.norm().item() for row in up)
    of_before = unit * 2 * x.shape[1] ** 0.5 * longest * down.shape[0] * down.abs().max()
    formulas = [
        quantized(before, of_before, e5m2) @ up8,
        before.mT @ x,
        grad.double().mT @ activation.double(),
    ]
    rounding = torch.finfo(dtype).eps
    for leaf, expected, most in zip(leaves, formulas, (2e-3, 1e-5, 1e-5), strict=True):
        assert leaf.grad.dtype == dtype
        assert error(leaf.grad, expected) < most + 2 * rounding
    # Two bits of mantissa err by 5 % on average, twice; and the gradient of `down` knows nothing of them.
    right = [before @ up for before in [2 * activation.double().sqrt() * (grad.double() @ down)]]
    assert 0.02 < error(leaves[0].grad, right[0]) < 0.12


def test_only_the_gradients_that_are_needed_are_made():
    inputs = [value.detach() for value in inputs_of(9)]
    grad = torch.randn(9, 48)
    expected = [leaf.requires_grad_() for leaf in (value.clone() for value in inputs)]
    mlp_relu2(*expected, fp8=True, fp8_backward=True).backward(grad)
    for which in range(3):
        leaves = [value.clone().requires_grad_(place == which) for place, value in enumerate(inputs)]
        mlp_relu2(*leaves, fp8=True, fp8_backward=True).backward(grad)
        assert torch.equal(leaves[which].grad, expected[which].grad)


def test_no_gradient_before_relu_is_too_large():
    # Cauchy and Schwarz agree twice: x points along the longest row of up, the gradient along a column of down.
    x, up, down = inputs_of(4)
    row = up.norm(dim=1).argmax()
    x[1] = up[row] / up[row].norm() * x.shape[1] ** 0.5
    down = down.abs().max() * torch.randn_like(down).sign()
    leaves = [value.detach().clone().requires_grad_() for value in (x, up, down)]
    grad = torch.zeros(4, 48)
    grad[1] = down[:, row].sign()
    mlp_relu2(*leaves, fp8=True, fp8_backward=True).backward(grad)
    activation = (x.double() @ up.double().mT).relu().square()
    before = 2 * activation.sqrt() * (grad.double() @ down.double())
    assert error(leaves[0].grad[1], (before @ up.double())[1]) < 0.2


def test_gradients_that_are_not_finite_stay_so():
    for bad in (float("inf"), float("nan")):
        leaves = [value.detach().requires_grad_() for value in inputs_of(5)]
        grad = torch.randn(5, 48)
        grad[2, 3] = bad
        mlp_relu2(*leaves, fp8=True, fp8_backward=True).backward(grad)
        assert not any(leaf.grad.isfinite().all() for leaf in leaves)


@pytest.mark.parametrize("fp8_backward", [False, True])
@pytest.mark.parametrize("which", range(3))
def test_zeros_stay_zeros(which, fp8_backward):
    leaves = [value.detach() for value in inputs_of(5, dtype=torch.float16)]
    leaves[which] = torch.zeros_like(leaves[which])
    leaves = [leaf.requires_grad_() for leaf in leaves]
    out = mlp_relu2(*leaves, fp8=True, fp8_backward=fp8_backward)
    out.backward(torch.zeros_like(out), retain_graph=True)
    assert not any(leaf.grad.any() for leaf in leaves)
    out.sum().backward()
    assert not out.any()
    assert all(leaf.grad.isfinite().all() for leaf in leaves)


def test_the_largest_activation_of_a_normed_row_fits():
    # Cauchy and Schwarz agree where x points along a row of up.
    x, up, down = inputs_of(8)
    row = up.norm(dim=1).argmax()
    x[3] = up[row] / up[row].norm() * x.shape[1] ** 0.5
    down = torch.zeros_like(down)
    down[:, row] = 1.0
    assert error(mlp_relu2(x, up, down, fp8=True)[3], exact(x, up, down)[3]) < 0.15


def test_what_is_too_large_saturates():
    x, up, down = inputs_of(8)
    d = x.shape[1]
    for large in (1e4, float("inf")):
        x[2, 7], at_the_bound = large, x.clone()
        at_the_bound[2, 7] = d**0.5
        assert torch.equal(mlp_relu2(x, up, down, fp8=True), mlp_relu2(at_the_bound, up, down, fp8=True))
    x[4] = d**0.5 * up[0].sign()  # a root mean square of sqrt(d)
    out = mlp_relu2(x, up, down, fp8=True)
    expected, activation = oracle(x, up, down)
    assert activation[4, 0] > 2 * d * up.square().sum(1).max()
    assert error(out, expected) < 1e-3


def test_not_a_number_stays_in_its_row():
    x, up, down = inputs_of(6, dtype=torch.float16)
    x[2, 5] = float("nan")
    out = mlp_relu2(x, up, down, fp8=True)
    assert out.isnan().any(dim=1).tolist() == [row == 2 for row in range(6)]
    assert out[2].isnan().all()
    x[2, 5], up[3, 0] = 0.0, float("nan")
    assert mlp_relu2(x, up, down, fp8=True).isnan().all()


def test_strides_do_not_matter():
    x, up, down = inputs_of(33, dtype=torch.bfloat16)
    expected = mlp_relu2(x, up, down.contiguous(), fp8=True)
    sliced = torch.zeros(33, 96, dtype=torch.bfloat16)
    sliced[:, 5:85] = x
    grad = torch.randn(33, 48, dtype=torch.bfloat16)
    grads = []
    for variant in (x, x.mT.contiguous().mT, sliced[:, 5:85]):
        for one in (grad, grad.mT.contiguous().mT):
            leaf = variant.detach().requires_grad_()
            out = mlp_relu2(leaf, up.mT.contiguous().mT, down, fp8=True, fp8_backward=True)
            assert torch.equal(out, expected)
            out.backward(one)
            grads.append(leaf.grad)
            assert torch.equal(grads[-1], grads[0])


def test_empty_inputs_give_empty_results():
    x, up, down = inputs_of(3, 0)
    leaves = [value.detach().requires_grad_() for value in (x, up, down)]
    out = mlp_relu2(*leaves, fp8=True, fp8_backward=True)
    out.sum().backward()
    assert out.shape == (3, 0, 48)
    assert not any(leaf.grad.any() for leaf in leaves)
    leaves = [torch.randn(size).requires_grad_() for size in ((3, 16), (0, 16), (32, 0))]
    out = mlp_relu2(*leaves, fp8=True, fp8_backward=True)
    out.sum().backward()
    assert torch.equal(out, out.new_zeros(3, 32))
    assert not leaves[0].grad.any()


def test_errors_say_what_to_do():
    x, up, down = torch.randn(3, 16), torch.randn(32, 16), torch.randn(48, 32)
    with pytest.raises(ValueError, match=r"up has shape \(32, 20\); 8-bit products .* 16: pad it to \(32, 32\)"):
        mlp_relu2(torch.randn(3, 20), torch.randn(32, 20), down, fp8=True)
    with pytest.raises(ValueError, match=r"down has shape \(8, 32\); 8-bit products .* 16: pad it to \(16, 32\)"):
        mlp_relu2(x, up, torch.randn(8, 32), fp8=True)
    with pytest.raises(ValueError, match=r"fp8_backward=True without fp8=True"):
        mlp_relu2(x, up, down, fp8_backward=True)
    with pytest.raises(TypeError, match=r"x is torch.float64; need float32, bfloat16 or float16"):
        mlp_relu2(x.double(), up.double(), down.double(), fp8=True)
    with pytest.raises(ValueError, match=r"kernels='triton': .*use kernels='auto'"):
        mlp_relu2(x.half(), up.half(), down.half(), fp8=True, kernels="triton")


def test_compiles_as_one_graph():
    inputs = [value.detach() for value in inputs_of(2, 5)]
    results = []
    for run in (mlp_relu2, torch.compile(mlp_relu2, fullgraph=True, backend="aot_eager")):
        leaves = [value.clone().requires_grad_() for value in inputs]
        out = run(*leaves, fp8=True, fp8_backward=True)
        out.square().sum().backward()
        results.append([out, *(leaf.grad for leaf in leaves)])
    torch.testing.assert_close(results[1], results[0])


def test_the_operator_is_registered_as_pytorch_wants_it():
    leaves = [value.detach().requires_grad_() for value in inputs_of(3)]
    scales = [torch.tensor(value) for value in (0.02, 0.01, 0.05, 0.01)]
    torch.library.opcheck(torch.ops.quintic.mlp_relu2, (*leaves, "auto", True, *scales))
    grad, activation = torch.randn(3, 48), torch.rand(3, 144)
    for needed in ([True, True, True], [False, True, False], [True, False, False]):
        tensors = grad, activation, *(leaf.detach() for leaf in leaves)
        torch.library.opcheck(torch.ops.quintic.mlp_relu2_backward, (*tensors, needed, "auto", *scales))
