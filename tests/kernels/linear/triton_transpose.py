"""Cases of test_triton.py: the transposing kernel gives its twin's bits, in the interpreter or on a CUDA device."""

import pytest
import torch
from on_device import DEVICE

from quintic.kernels.linear.transpose import transpose_add_, transpose_copy_

# The interpreter has no reliable bfloat16, and no float8 on older versions.
SUMMED = [torch.float32, torch.float16] if DEVICE == "cpu" else [torch.float32, torch.float16, torch.bfloat16]
CONVERTED = SUMMED if DEVICE == "cpu" else [*SUMMED, torch.float8_e4m3fn, torch.float8_e5m2]
# Moved as they are: no arithmetic.
MOVED = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
]
SHAPES = [(1, 1), (1, 70), (70, 1), (64, 64), (65, 63), (200, 33), (31, 300), (0, 5), (128, 256)]


def made(shape, dtype, layout="rows"):
    """Return a tensor on the device with poisoned memory around and in it where the layout leaves gaps."""
    m, n = shape
    if layout == "columns":
        return made((n, m), dtype).T
    values = torch.randn(m, n) * 3
    if layout == "rows":
        return values.to(DEVICE).to(dtype)
    wide = torch.full((m, n + 7), float("nan"))
    wide[:, 3 : n + 3] = values
    return wide.to(DEVICE).to(dtype)[:, 3 : n + 3]


def bits(x):
    """The bytes of a tensor; not-a-numbers of any sign are one."""
    x = x.contiguous()
    if x.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        return x.view(torch.uint8).masked_fill(x.float().isnan(), 127)
    return x.view(torch.uint8)


def assert_like_the_twin(function, out, x):
    expected, again = (torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device=DEVICE) for _ in range(2))
    for copy in (expected, again):
        copy.copy_(out)
    before = bits(x).clone()
    function(expected, x, kernels="torch")
    for found in (out, again):
        function(found, x, kernels="triton")
        assert torch.equal(bits(found), bits(expected))
    assert torch.equal(bits(x), before)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", MOVED, ids=str)
def test_copies_of_one_dtype(shape, dtype):
    out = torch.full((shape[1], shape[0]), 255, dtype=torch.uint8, device=DEVICE)
    out = torch.stack([out] * dtype.itemsize, dim=-1).view(dtype).squeeze(-1)  # NaN
    assert_like_the_twin(transpose_copy_, out, made(shape, dtype))


@pytest.mark.parametrize("shape", [(65, 63), (130, 200)], ids=str)
@pytest.mark.parametrize("dtype", CONVERTED, ids=str)
@pytest.mark.parametrize("out_dtype", CONVERTED, ids=str)
def test_copies_that_convert(shape, dtype, out_dtype):
    x = made(shape, dtype)
    out = torch.full(shape[::-1], float("nan"), device=DEVICE).to(out_dtype)
    assert_like_the_twin(transpose_copy_, out, x)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", SUMMED, ids=str)
@pytest.mark.parametrize("out_dtype", SUMMED, ids=str)
def test_sums_are_those_of_the_twin(shape, dtype, out_dtype):
    assert_like_the_twin(transpose_add_, made(shape[::-1], out_dtype), made(shape, dtype))


@pytest.mark.parametrize("function", [transpose_copy_, transpose_add_])
@pytest.mark.parametrize(("layout", "out_layout"), [("slice", "rows"), ("rows", "slice"), ("columns", "columns")])
def test_layouts_do_not_matter(function, layout, out_layout):
    out = made((67, 130), torch.float32, out_layout)
    neighbours = torch.as_strided(out, (out.numel(),), (1,), out.storage_offset())
    before = neighbours.clone()
    assert_like_the_twin(function, out, made((130, 67), torch.float16, layout))
    if out_layout == "slice":
        gaps = before.isnan()
        assert gaps.any()
        assert torch.equal(neighbours.isnan(), gaps)


@pytest.mark.parametrize("function", [transpose_copy_, transpose_add_])
def test_what_kernels_leave_to_the_twin(function):
    out, x = made((5, 6), torch.float32, "columns"), made((6, 5), torch.float32)
    with pytest.raises(
        ValueError, match=r"kernels='triton': out has strides \(1, 5\) and x \(5, 1\): the kernel needs"
    ):
        function(out, x, kernels="triton")
    function(out, x)
    out, x = made((5, 6), torch.float64), made((6, 5), torch.float32)
    with pytest.raises(ValueError, match=r"kernels='triton': out is torch.float64, which has no kernel"):
        function(out, x, kernels="triton")
    function(out, x)


@pytest.mark.skipif(DEVICE == "cpu", reason="float8 is the device's")
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("given", SUMMED, ids=str)
def test_what_float8_cannot_hold(dtype, given):
    x = (torch.randn(100, 70, device=DEVICE) * 30_000).to(given)
    x[3, 3:6] = torch.tensor([float("inf"), float("-inf"), float("nan")])
    x[4] *= 1e-6  # subnormal, and nothing
    assert_like_the_twin(transpose_copy_, torch.zeros(70, 100, device=DEVICE).to(dtype), x)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs 9 GB and a fast device")
def test_more_entries_than_32_bits_count():
    row, column = (torch.arange(size, device=DEVICE).to(torch.uint8) for size in (2**15 + 1, 2**16))
    x = row[:, None] * 7 + column  # modulo 256
    out = torch.full((2**16, 2**15 + 1), 1, dtype=torch.uint8, device=DEVICE)
    transpose_copy_(out.view(torch.float8_e5m2), x.view(torch.float8_e5m2), kernels="triton")
    assert torch.equal(out.T, x)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_captured_in_a_graph():
    x, out = torch.randn(100, 200, device=DEVICE), torch.zeros(200, 100, device=DEVICE)
    transpose_copy_(out, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        transpose_copy_(out, x)
        transpose_add_(out, x)
    x.normal_()
    graph.replay()
    assert torch.equal(out, 2 * x.T)
