"""Transposing copy and sum against an independent loop; the kernels are in triton_transpose.py."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quintic.kernels.linear.transpose import transpose_add_, transpose_copy_

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]
LAYOUTS = ["rows", "columns", "slice", "steps"]


def laid_out(values, layout):
    """Return a tensor of these values whose memory is ordered in this way."""
    m, n = values.shape
    if layout == "rows":
        return values.clone()
    if layout == "columns":
        return values.T.contiguous().T
    if layout == "slice":
        return torch.cat([values, values], 1)[:, :n]
    padded = torch.zeros(m, 2 * n, dtype=values.dtype)
    padded[:, ::2] = values
    return padded[:, ::2]


def entries(x):
    """Return the entries as Python numbers, row by row."""
    return [[comparable(float(entry)) for entry in row] for row in x.double()]


def comparable(value):
    """Return a number; for every not-a-number the same object, which lists take as equal."""
    return math.nan if math.isnan(value) else value


def rounded(value, dtype):
    """Round a number to nearest; what is too large for float8 becomes its largest."""
    if dtype in FLOAT8:
        largest = torch.finfo(dtype).max
        value = math.copysign(min(abs(value), largest), value) if not math.isnan(value) else value
    return comparable(float(torch.tensor(value, dtype=torch.float64).to(dtype)))


sizes = st.integers(0, 9)


@given(
    m=sizes,
    n=sizes,
    dtype=st.sampled_from(FLOATS + FLOAT8),
    out_dtype=st.sampled_from(FLOATS + FLOAT8),
    layout=st.sampled_from(LAYOUTS),
    out_layout=st.sampled_from(LAYOUTS),
    scale=st.sampled_from([1.0, 1000.0]),
)
def test_a_copy_is_the_transpose_rounded(m, n, dtype, out_dtype, layout, out_layout, scale):
    x = laid_out((torch.randn(m, n) * scale).to(dtype), layout)
    out = laid_out(torch.full((n, m), math.nan).to(out_dtype), out_layout)
    before = entries(x)
    assert transpose_copy_(out, x) is None
    assert entries(out) == [[rounded(before[j][i], out_dtype) for j in range(m)] for i in range(n)]


@given(
    m=sizes,
    n=sizes,
    dtype=st.sampled_from(FLOATS),
    out_dtype=st.sampled_from(FLOATS),
    layout=st.sampled_from(LAYOUTS),
    out_layout=st.sampled_from(LAYOUTS),
)
def test_a_sum_is_exact_but_for_its_rounding(m, n, dtype, out_dtype, layout, out_layout):
    x = laid_out(torch.randn(m, n).to(dtype), layout)
    out = laid_out(torch.randn(n, m).to(out_dtype), out_layout)
    exact = out.double() + x.double().T
    transpose_add_(out, x)
    eps = torch.finfo(out_dtype).eps
    # One rounding of the result, after one in float32 where that is what sums are made in.
    assert ((out.double() - exact).abs() <= (0.5 * eps + 1.2e-7 * (out_dtype != torch.float64)) * exact.abs()).all()


def test_a_sum_is_rounded_once():
    # 1 + 2^-9 is not a bfloat16; both terms in bfloat16 first would lose it, and the small terms of both.
    out = torch.full((1, 1), 1.0, dtype=torch.bfloat16)
    transpose_add_(out, torch.full((1, 1), 2.0**-8 + 2.0**-10))
    assert float(out) == 1 + 2.0**-7


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_what_float8_cannot_hold(dtype):
    x = torch.tensor([[math.inf, -math.inf, math.nan, 1e9, -1e9]])
    out = torch.zeros(5, 1).to(dtype)
    transpose_copy_(out, x)
    largest = torch.finfo(dtype).max
    torch.testing.assert_close(
        out.float(), torch.tensor([[largest, -largest, math.nan, largest, -largest]]).T, equal_nan=True
    )
    # A copy without conversion keeps what it is given.
    special = torch.tensor([[0x7F, 0xFF, 0x00, 0x80]], dtype=torch.uint8).view(dtype)
    same = torch.zeros(4, 1).to(dtype)
    transpose_copy_(same, special)
    assert torch.equal(same.view(torch.uint8), special.view(torch.uint8).T)


def test_parameters_under_no_grad():
    head, embedding = torch.nn.Parameter(torch.zeros(3, 5)), torch.nn.Parameter(torch.randn(5, 3))
    with torch.no_grad():
        transpose_copy_(head, embedding)
        transpose_add_(head, embedding)
    assert torch.equal(head, 2 * embedding.T)
    assert head.requires_grad


def test_the_version_counter_tells_autograd():
    out, x = torch.zeros(3, 5), torch.randn(5, 3)
    leaf = torch.ones(3, 5, requires_grad=True)
    product = leaf * out
    transpose_copy_(out, x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


BUFFER = torch.zeros(64)


@pytest.mark.parametrize(
    ("out", "x", "message"),
    [
        (torch.zeros(2, 3), torch.zeros(2, 3), r"out \(2, 3\) and x \(2, 3\): need \(n, m\) and \(m, n\)"),
        (torch.zeros(6), torch.zeros(6), r"need \(n, m\) and \(m, n\)"),
        (torch.zeros(2, 3, dtype=torch.int32), torch.zeros(3, 2), "out has dtype torch.int32: need a floating-point"),
        (torch.zeros(2, 3), torch.zeros(3, 2, dtype=torch.bool), "x has dtype torch.bool: need a floating-point"),
        (torch.zeros(2, 3, device="meta"), torch.zeros(3, 2), "out is on meta and x on cpu: move one of them"),
        (torch.zeros(2, 1).expand(2, 3), torch.zeros(3, 2), r"out of shape \(2, 3\) has strides \(1, 0\), .* share"),
        (BUFFER.as_strided((3, 3), (2, 1)), torch.zeros(3, 3), "share memory"),
        (BUFFER.view(8, 8), BUFFER.view(8, 8), r"out and x lie within the same memory: give x.clone\(\)"),
        (BUFFER[:12].view(3, 4), BUFFER[11:23].view(4, 3), "out and x lie within the same memory"),
        (torch.zeros(2, 3, requires_grad=True), torch.zeros(3, 2), r"out requires grad.*torch.no_grad\(\)"),
        (torch.zeros(2, 3), torch.zeros(3, 2, requires_grad=True), r"x requires grad.*torch.no_grad\(\)"),
    ],
)
@pytest.mark.parametrize("function", [transpose_copy_, transpose_add_])
def test_what_is_refused(function, out, x, message):
    with pytest.raises(ValueError, match=message):
        function(out, x)


def test_neighbours_in_one_buffer_are_no_overlap():
    x, out = BUFFER.clone()[:24].split(12)
    x.copy_(torch.arange(12.0))
    transpose_copy_(out.view(3, 4), x.view(4, 3))
    assert torch.equal(out.view(3, 4), x.view(4, 3).T)
    # Strides that only skip: rows of 3 in steps of 5, columns one by one.
    columns = torch.zeros(20).as_strided((3, 4), (1, 5))
    transpose_copy_(columns, x.view(4, 3))
    assert torch.equal(columns, x.view(4, 3).T)


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_sums_in_float8_are_refused(dtype):
    with pytest.raises(ValueError, match=f"x has dtype {dtype}: sums need 16 bits or more"):
        transpose_add_(torch.zeros(2, 3), torch.zeros(3, 2).to(dtype))
    with pytest.raises(ValueError, match=f"out has dtype {dtype}: sums need 16 bits or more"):
        transpose_add_(torch.zeros(2, 3).to(dtype), torch.zeros(3, 2))


@pytest.mark.parametrize("function", [transpose_copy_, transpose_add_])
def test_kernels_are_chosen_as_elsewhere(function):
    out, x = torch.zeros(2, 3), torch.randn(3, 2)
    with pytest.raises(ValueError, match="kernels='triton': out is on 'cpu', Triton needs a CUDA device; use"):
        function(out, x, kernels="triton")
    with pytest.raises(ValueError, match="kernels='fast': choose 'auto', 'torch' or 'triton'"):
        function(out, x, kernels="fast")
    function(out, x, kernels="torch")
    assert torch.equal(out, x.T)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_both_compile_as_one_graph(backend):
    def tie(head, embedding, gradient):
        transpose_copy_(head, embedding * 2)
        transpose_add_(head, gradient)
        return head + 1

    head, embedding, gradient = torch.zeros(3, 5), torch.randn(5, 3), torch.randn(5, 3)
    found = torch.compile(tie, fullgraph=True, backend=backend)(head, embedding, gradient)
    torch.testing.assert_close(head, (2 * embedding + gradient).T)
    torch.testing.assert_close(found, head + 1)


@pytest.mark.parametrize("name", ["transpose_copy_", "transpose_add_"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_operations_say_the_truth_about_themselves(name, dtype):
    operation = getattr(torch.ops.quintic, name).default
    torch.library.opcheck(operation, (torch.zeros(4, 3, dtype=dtype), torch.randn(3, 4)))
