"""mlp_relu2: the plain twin against float64, errors, compilation. Kernels: triton_linear.py."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quintic.kernels.linear.mlp import mlp_relu2


def gradients(function, inputs, grad):
    """Return the value and the gradients of a function for fresh leaves."""
    leaves = [value.detach().clone().requires_grad_() for value in inputs]
    out = function(*leaves)
    out.backward(grad.to(out.dtype))
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def plain(x, up, down):
    return F.linear(F.linear(x, up).relu().square(), down)


@settings(max_examples=40, deadline=None)
@given(
    st.tuples(*[st.integers(1, 40)] * 4),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.integers(0, 2**31),
)
@example((29, 1, 1, 3), torch.float16, 13245)  # a weight so small that squares vanish
def test_values_and_gradients_against_float64(shape, dtype, seed):
    torch.manual_seed(seed)
    rows, inner, features, outer = shape
    inputs = [torch.randn(rows, inner), torch.randn(features, inner) / inner**0.5, torch.randn(outer, features)]
    inputs = [value.to(dtype) for value in inputs]
    grad = torch.randn(rows, outer).to(dtype)
    exact = gradients(plain, [value.double() for value in inputs], grad)
    expected = gradients(plain, inputs, grad)
    found = gradients(mlp_relu2, inputs, grad)
    magnitudes = gradients(plain, [value.double().abs() for value in inputs], grad.abs())
    numbers = torch.finfo(dtype)
    # The backward pass has squares alone: those of smaller values are zero.
    lost = 2 * (numbers.smallest_normal * numbers.eps) ** 0.5 * (grad.double() @ inputs[2].double()).norm()
    largest = max(1.0, *(value.double().norm().item() for value in inputs))
    for ours, theirs, right, magnitude in zip(found, expected, exact, magnitudes, strict=True):
        assert ours.dtype == dtype
        # Twice PyTorch's error, as a whole tensor; where terms cancel, tiny tensors may have been lucky there.
        rounding = 2 * numbers.eps * magnitude.norm()
        assert (ours.double() - right).norm() <= 2 * (theirs.double() - right).norm() + rounding + lost * largest


def test_gradients_are_those_of_the_formula():
    leaves = [torch.randn(size, dtype=torch.float64, requires_grad=True) for size in [(3, 5), (7, 5), (4, 7)]]
    assert torch.autograd.gradcheck(mlp_relu2, leaves)


def test_only_what_requires_a_gradient_gets_one():
    values = [torch.randn(6, 5), torch.randn(8, 5), torch.randn(4, 8)]
    everything = [value.clone().requires_grad_() for value in values]
    mlp_relu2(*everything).sum().backward()
    for chosen in range(len(values)):
        leaves = [value.clone().requires_grad_(index == chosen) for index, value in enumerate(values)]
        mlp_relu2(*leaves).sum().backward()
        for index, leaf in enumerate(leaves):
            assert (leaf.grad is None) == (index != chosen)
        torch.testing.assert_close(leaves[chosen].grad, everything[chosen].grad)
    assert not mlp_relu2(*values).requires_grad


def test_shapes_and_strides():
    weights = [torch.randn(5, 8).mT, torch.randn(8, 4).mT]
    x = torch.randn(5, 3, 2).permute(2, 1, 0)
    torch.testing.assert_close(mlp_relu2(x, *weights), plain(x, *weights))
    assert mlp_relu2(x[0, 0], *weights).shape == (4,)
    for shape in [(0, 5), (3, 0, 5)]:
        leaves, empty = [each.clone().requires_grad_() for each in weights], torch.randn(shape, requires_grad=True)
        out = mlp_relu2(empty, *leaves)
        out.sum().backward()
        assert out.shape == (*shape[:-1], 4)
        assert empty.grad.shape == shape
        assert not any(leaf.grad.any() for leaf in leaves)
    # An expanded gradient, as sum() gives it, has strides of zero.
    leaves = [value.clone().requires_grad_() for value in (x, *weights)]
    mlp_relu2(*leaves).sum().backward()
    expected = gradients(plain, [x, *weights], torch.ones(2, 3, 4))
    torch.testing.assert_close([leaf.grad for leaf in leaves], expected[1:])


def test_nothing_comes_back_where_relu_is_zero():
    x = torch.tensor([[1.0, 0.0]], requires_grad=True)
    up = torch.tensor([[-1.0, 0.0], [0.0, 1.0], [2.0, 0.0]])
    # The gradient of the activation is (inf, nan, 1).
    down = torch.tensor([[float("inf"), float("nan"), 1.0]])
    mlp_relu2(x, up, down).backward(torch.ones(1, 1))
    assert x.grad.tolist() == [[8.0, 0.0]]
    bad = mlp_relu2(torch.tensor([[float("nan"), 0.0]]), up, torch.ones(1, 3))
    assert bad.isnan().all()


def test_the_pre_activation_is_not_kept():
    leaves = [torch.randn(shape, requires_grad=True) for shape in [(6, 5), (8, 5), (4, 8)]]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda t: t):
        mlp_relu2(*leaves)
    (activation,) = [tensor for tensor in kept if tensor.data_ptr() not in {leaf.data_ptr() for leaf in leaves}]
    assert len(kept) == 4
    torch.testing.assert_close(activation, F.linear(*leaves[:2]).relu().square())


def test_errors_say_what_to_do():
    x, up, down = torch.randn(3, 16), torch.randn(32, 16), torch.randn(8, 32)
    with pytest.raises(ValueError, match=r"x \(3, 16\) and up \(16, 32\): need \(..., d\) and \(h, d\)"):
        mlp_relu2(x, up.mT, down)
    with pytest.raises(ValueError, match=r"up \(32, 16\) and down \(32, 16\): need \(h, d\) and \(o, h\)"):
        mlp_relu2(x, up, up)
    with pytest.raises(TypeError, match=r"x is torch.float32 and up torch.bfloat16; cast"):
        mlp_relu2(x, up.bfloat16(), down)
    with pytest.raises(TypeError, match=r"x is torch.float32 and down torch.float64; cast"):
        mlp_relu2(x, up, down.double())
    with pytest.raises(TypeError, match=r"x is torch.int64; need bfloat16"):
        mlp_relu2(x.long(), up.long(), down.long())
    for name, weights in [("up", (up.to("meta"), down)), ("down", (up, down.to("meta")))]:
        with pytest.raises(ValueError, match=f"x is on 'cpu' and {name} on 'meta'; move"):
            mlp_relu2(x, *weights)
    with pytest.raises(ValueError, match=r"kernels='triton': .*use kernels='auto'"):
        mlp_relu2(x, up, down, kernels="triton")
    with pytest.raises(ValueError, match=r"kernels='fast'"):
        mlp_relu2(x, up, down, kernels="fast")


def test_compiles_as_one_graph():
    inputs = [torch.randn(2, 5, 16), torch.randn(32, 16), torch.randn(8, 32)]
    grad = torch.randn(2, 5, 8)
    compiled = torch.compile(lambda x, *weights: mlp_relu2(x * 2, *weights), fullgraph=True, backend="aot_eager")
    expected = gradients(lambda x, *weights: plain(x * 2, *weights), inputs, grad)
    torch.testing.assert_close(gradients(compiled, inputs, grad), expected)


def test_operators_are_registered_as_pytorch_wants_them():
    ops = torch.ops.quintic
    leaves = [torch.randn(shape, requires_grad=True) for shape in [(3, 5), (7, 5), (2, 7)]]
    torch.library.opcheck(ops.mlp_relu2, (*leaves, "auto"))
    tensors = [torch.rand(shape) for shape in [(3, 2), (3, 7), (3, 5), (7, 5), (2, 7)]]
    for needed in ([True, True, True], [True, False, False], [False, False, True]):
        torch.library.opcheck(ops.mlp_relu2_backward, (*tensors, needed, "auto"))
