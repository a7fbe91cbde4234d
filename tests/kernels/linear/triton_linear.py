"""Cases of test_triton.py: products with relu(.)^2, quantisation, 8-bit layers; interpreted or on a CUDA device."""

import pytest
import torch
import torch.nn.functional as F
from on_device import DEVICE, poison_new_tensors

from quintic.kernels.linear import fp8_quantize, relu2
from quintic.kernels.linear.fp8 import fp8_linear
from quintic.kernels.linear.fp8_quantize import LARGEST, quantized_layouts
from quintic.kernels.linear.mlp import mlp_relu2
from quintic.kernels.linear.relu2 import QuantizedProduct, product_relu2
from quintic.kernels.products.choose_products import has_hopper_kernels

# The interpreter has no reliable bfloat16.
DTYPES = [torch.float16] if DEVICE == "cpu" else [torch.float16, torch.bfloat16]
HAS_FP8 = DEVICE == "cuda" and torch.cuda.get_device_capability() >= (8, 9)

# In the backward pass of the first test, whose thread has done nothing yet.
pytestmark = pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")

needs_fp8 = pytest.mark.skipif(not HAS_FP8, reason="8-bit products, and rounding to 8 bits, need a recent CUDA device")

# Rows, inner size, features: several tiles and ragged ones; rows that descriptors can address, and others.
SHAPES = [(1, 1, 1), (3, 40, 17), (130, 72, 264), (140, 70, 270), (259, 136, 520), (64, 33, 128)]
if DEVICE == "cuda":
    SHAPES += [(4096, 768, 3072), (2049, 200, 5000)]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    poison_new_tensors(monkeypatch)


def error(found, exact):
    return ((found.double() - exact).norm() / exact.norm().clamp_min(1e-30)).item()


def bits(x):
    return x.view(torch.uint8) if x.dtype in LARGEST else x


def operands(shape, dtype, transposed=False, spread=1.0):
    rows, inner, features = shape
    a = torch.randn(rows, inner).to(DEVICE, dtype)
    b = (torch.randn(features, inner) / inner**0.5 * spread).to(DEVICE, dtype)
    return a, b.mT.contiguous() if transposed else b


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("backward", [False, True])
def test_products_are_those_of_the_twin(shape, dtype, transposed, backward):
    a, b = operands(shape, dtype, transposed)
    b_rows = b.mT if transposed else b
    activation = torch.randn(shape[0], shape[2]).relu().to(DEVICE, dtype) if backward else None

    def after(pre):
        if backward:
            return 2 * activation.to(pre.dtype).sqrt() * pre
        return pre.relu().square()

    out = product_relu2(a, b, transposed=transposed, activation=activation)
    exact = after(a.double() @ b_rows.double().mT)
    assert error(out, exact) <= 2 * error(after(F.linear(a, b_rows)), exact) + 1e-6
    again = product_relu2(a, b, transposed=transposed, activation=activation)
    assert torch.equal(out, again)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_of_any_strides(dtype):
    a, b = operands((70, 48, 40), dtype)
    expected = product_relu2(a, b)
    wide = torch.randn(70, 100).to(DEVICE, dtype)
    wide[:, 3:51] = a
    assert torch.equal(product_relu2(a, b.mT, transposed=True), expected)
    for left in (a.mT.contiguous().mT, wide[:, 3:51]):
        for right in (b, b.mT.contiguous().mT):
            torch.testing.assert_close(product_relu2(left, right), expected)


TILINGS = ["_LARGE", "_SMALL", "_POINTERS"]


@pytest.mark.parametrize("tiling", TILINGS)
def test_every_tiling_gives_the_product(tiling, monkeypatch):
    values = getattr(relu2, tiling)
    monkeypatch.setattr(relu2, "has_hopper_kernels", lambda device: False)
    for name in TILINGS:
        monkeypatch.setattr(relu2, name, values)
    if tiling == "_POINTERS":
        monkeypatch.setattr(relu2, "_fits_descriptor", lambda tensor: False)
    a, b = operands((140, 136, 264), torch.float16)
    exact = F.linear(a.double(), b.double()).relu().square()
    assert error(product_relu2(a, b), exact) < 1e-3


@pytest.mark.skipif(not has_hopper_kernels(torch.device(DEVICE)), reason="needs a GPU of compute capability 9.0")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(70, 48, 40), (140, 136, 264), (1000, 768, 3072), (20_000, 200, 800)], ids=str)
def test_the_kernel_for_hopper_has_the_bits_of_the_others(shape, dtype, monkeypatch):
    a, b = operands(shape, dtype)
    activation = product_relu2(a, b)
    activation[0] = 0
    a[0] = float("inf")
    calls = [{}, {"activation": activation}, {"transposed": True}, {"transposed": True, "activation": activation}]

    def results():
        return [product_relu2(a, b.mT.contiguous() if "transposed" in each else b, **each) for each in calls]

    found = results()
    monkeypatch.setattr(relu2, "has_hopper_kernels", lambda device: False)
    for ours, theirs in zip(found, results(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def test_offsets_beyond_32_bits(monkeypatch):
    monkeypatch.setattr(relu2, "has_hopper_kernels", lambda device: False)
    for module in (fp8_quantize, relu2):
        monkeypatch.setattr(module, "needs_wide_offsets", lambda *strides: True)
    a, b = operands((140, 33, 135), torch.float16)
    exact = F.linear(a.double(), b.double()).relu().square()
    assert error(product_relu2(a, b), exact) < 1e-3
    x = representable((70, 140), torch.float8_e5m2).to(DEVICE)
    one = torch.tensor(0.125, device=DEVICE)
    found, expected = (quantized_layouts(x, one, torch.float8_e5m2, True, True, k) for k in ("triton", "torch"))
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(bits(ours), bits(theirs))


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # NumPy, which the interpreter computes with
def test_not_a_number_stays_and_relu_wins():
    a, b = operands((20, 16, 24), torch.float16)
    a[3, 5] = float("nan")
    out = product_relu2(a, b)
    assert out[3].isnan().all()
    assert not out[:3].isnan().any()
    zero = torch.zeros_like(out)
    for bad in (float("inf"), float("nan")):
        a[:, 0] = bad
        assert torch.equal(product_relu2(a, b, activation=zero), zero)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 40, 17), (200, 128, 264), (0, 8, 8)])
def test_gradients_are_those_of_the_twin(shape, dtype):
    x, up = operands(shape, dtype)
    down = (torch.randn(24, shape[2]) / max(shape[2], 1) ** 0.5).to(DEVICE, dtype)
    grad = torch.randn(shape[0], 24).to(DEVICE, dtype)

    def plain(x, up, down):
        return F.linear(F.linear(x, up).relu().square(), down)

    results = []
    for function, kind in [(mlp_relu2, dtype), (plain, dtype), (plain, torch.float64)]:
        leaves = [value.to(kind, copy=True).requires_grad_() for value in (x, up, down)]
        out = function(*leaves, kernels="triton") if function is mlp_relu2 else function(*leaves)
        out.backward(grad.to(kind))
        results.append([out, *(leaf.grad for leaf in leaves)])
    for found, theirs, exact in zip(*results, strict=True):
        assert error(found, exact) <= 2 * error(theirs, exact) + 1e-6


# ------------------------------------------------------------------------------------------------------------- 8 bits


def representable(shape, dtype):
    """Return random values of an 8-bit dtype times 2**-3: quantising these needs no rounding."""
    codes = torch.randint(0, 256, shape, dtype=torch.uint8).view(dtype).float()
    # The interpreter has no subnormal 8-bit floats.
    return torch.where(codes.isfinite() & (codes.abs() >= 2**-6), codes, 0.0) / 8


@pytest.mark.parametrize("dtype", LARGEST, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (1, 9000), (37, 50), (37, 52), (16, 16), (70, 144), (130, 260), (256, 128)])
@pytest.mark.parametrize("transposed", [False, True])
def test_quantising_moves_every_value_to_its_place(shape, dtype, transposed):
    x = representable(shape, dtype).to(DEVICE)
    x = x.mT.contiguous().mT if transposed else x
    scale = torch.tensor(0.125, device=DEVICE)
    expected = quantized_layouts(x, scale, dtype, True, True, "torch")
    found = quantized_layouts(x, scale, dtype, True, True, "triton")
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(bits(ours), bits(theirs))
    alone, _ = quantized_layouts(x, scale, dtype, True, False, "triton")
    assert torch.equal(bits(alone), bits(expected[0]))


@needs_fp8
@pytest.mark.parametrize("dtype", LARGEST, ids=str)
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16])
def test_quantising_rounds_as_the_twin_does(dtype, source):
    # All bfloat16: zeros of both signs, subnormals, ties, infinities, not-a-numbers.
    every = torch.arange(2**16, device=DEVICE).to(torch.int16).view(torch.bfloat16)
    every = every[: 2**16 // 240 * 240].reshape(240, -1).to(source)
    for factor in (1.0, 0.37, 2.0**-20, 3e9):
        scale = torch.tensor(factor, device=DEVICE)
        expected = quantized_layouts(every, scale, dtype, True, True, "torch")
        found = quantized_layouts(every, scale, dtype, True, True, "triton")
        nan = expected[0].float().isnan()
        for ours, theirs, bad in zip(found, expected, (nan, nan.mT), strict=True):
            assert torch.equal(ours.float().isnan(), theirs.float().isnan())
            assert torch.equal(bits(ours)[~bad], bits(theirs)[~bad])


@needs_fp8
@pytest.mark.parametrize("shape", [(1, 16, 16), (37, 48, 32), (300, 208, 528), (0, 16, 32), (4096, 768, 3072)])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_8_bit_layers_are_those_of_the_twin(shape, weight_dtype):
    x, weight = operands(shape, torch.bfloat16, transposed=True, spread=3.0)
    weight, grad = weight.to(weight_dtype), torch.randn(shape[0], shape[2], device=DEVICE)
    results = []
    for kernels in ("triton", "triton", "torch"):
        units = {"x_scale": 0.01, "weight_scale": 0.002, "grad_scale": 0.001}
        scales = {name: torch.tensor(unit, device=DEVICE) for name, unit in units.items()}
        leaves = [value.clone().requires_grad_() for value in (x, weight)]
        out = fp8_linear(*leaves, **scales, kernels=kernels)
        out.backward(grad.to(out.dtype))
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for found, again, expected in zip(*results, strict=True):
        assert found.dtype == expected.dtype
        assert torch.equal(found, again)
        # Hopper adds 8-bit products with about 14 bits forward.
        assert error(found, expected.double()) <= 3e-2


def product_in_8_bits(a, b, dtype, units=(1.0, 1.0, 1.0), activation=None):
    """Return the 16-bit result of 8-bit operands, and the 8-bit one."""
    kind = torch.float8_e4m3fn if activation is None else torch.float8_e5m2
    values = torch.empty(a.shape[0], b.shape[0], dtype=kind, device=DEVICE)
    a, b = a.to(DEVICE, kind), b.to(DEVICE, torch.float8_e4m3fn)
    scales = (torch.tensor(unit, device=DEVICE) for unit in units)
    quantized = QuantizedProduct(*scales, values)
    out = product_relu2(a, b, dtype=dtype, activation=activation, quantized=quantized)
    return out, values


def placed(rows, inner, features):
    """Return operands whose products are entries of the second, and the products: squares of them are e4m3 floats."""
    b = torch.tensor([-3.0, -1.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])[torch.randint(9, (features, inner))]
    chosen = torch.randint(inner, (rows,))
    return F.one_hot(chosen, inner).float(), b, b[:, chosen].mT


# As SHAPES, of multiples of 16, which 8-bit products need.
SHAPES_OF_8_BITS = [(1, 16, 16), (3, 48, 32), (130, 80, 272), (259, 144, 528)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES_OF_8_BITS, ids=str)
@pytest.mark.parametrize("tiling", [*TILINGS, "wide"])
@pytest.mark.parametrize("backward", [False, True])
def test_results_in_8_bits_are_in_their_places(shape, dtype, tiling, backward, monkeypatch):
    for name in TILINGS if tiling != "wide" else ():
        monkeypatch.setattr(relu2, name, getattr(relu2, tiling))
    if tiling in ("wide", "_POINTERS"):
        monkeypatch.setattr(relu2, "_fits_descriptor", lambda tensor: False)
    if tiling == "wide":
        monkeypatch.setattr(relu2, "needs_wide_offsets", lambda *strides: True)
    a, b, pre = placed(*shape)
    if backward:
        roots = torch.tensor([0.0, 1.0, 2.0, 4.0])[torch.randint(4, pre.shape)]
        activation, of_words = roots.square().to(DEVICE, dtype), 2.0**-12
        expected, most = 2 * roots * (2 * pre), 57344 * of_words
    else:
        activation, of_words = None, 0.25
        expected, most = (2 * pre).relu().square(), 448 * of_words
    out, values = product_in_8_bits(a, b, dtype, (0.5, 4.0, of_words), activation)
    assert out.dtype == dtype
    assert torch.equal(out.float().cpu(), expected)
    assert torch.equal(values.float().cpu(), expected.clamp(-most, most) / of_words)


@pytest.mark.parametrize("descriptors", [True, False])
def test_activations_in_8_bits_saturate_and_keep_not_a_number(descriptors, monkeypatch):
    if not descriptors:
        monkeypatch.setattr(relu2, "_fits_descriptor", lambda tensor: False)
    a, b = torch.zeros(20, 16), torch.ones(32, 16)
    a[3], a[7, 0] = 4.0, 32.0
    ones, nan = (1.0, 1.0, 1.0), float("nan")
    # The interpreter has no 8-bit not-a-number.
    for bad, units in [(0.0, ones), *([(nan, ones), (0.0, (1.0, nan, 1.0))] if HAS_FP8 else [])]:
        a[5] = bad
        expected = ((a @ b.mT) * units[1]).square()
        out, values = product_in_8_bits(a, b, torch.float16, units)
        torch.testing.assert_close(out.float().cpu(), expected, equal_nan=True, rtol=0, atol=0)
        torch.testing.assert_close(values.float().cpu(), expected.clamp(max=448), equal_nan=True, rtol=0, atol=0)


def mlp_operands(shape, dtype):
    """Return x with rows of RMS 1, up, and down as a view of what is stored (h, o)."""
    x, up = operands(shape, dtype, spread=0.5)
    down = (torch.randn(shape[2], shape[1]) / shape[2] ** 0.5).to(DEVICE, dtype)
    return F.rms_norm(x, (shape[1],)), up, down.mT


def run_mlp(function, inputs, grad, **options):
    leaves = [value.detach().clone(memory_format=torch.preserve_format).requires_grad_() for value in inputs]
    out = function(*leaves, **options)
    out.backward(grad.to(out.dtype))
    return [out.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_mlp_in_8_bits_is_close(dtype):
    # Also where the interpreter rounds to 8 bits in another way.
    x, up, down = mlp_operands((70, 64, 144), dtype)
    exact = F.linear(F.linear(x.double(), up.double()).relu().square(), down.double())
    found = mlp_relu2(x, up, down, fp8=True, kernels="triton")
    assert found.dtype == dtype
    assert error(found, exact) < (0.07 if HAS_FP8 else 0.25)
    zero = torch.zeros_like(down)
    assert not mlp_relu2(x, up, zero, fp8=True, kernels="triton").any()
    assert not mlp_relu2(x, torch.zeros_like(up), down, fp8=True, kernels="triton").any()
    grad = torch.randn(70, 64, device=DEVICE)
    found, rough = (
        run_mlp(mlp_relu2, (x, up, down), grad, fp8=True, fp8_backward=fp8_backward, kernels="triton")
        for fp8_backward in (False, True)
    )
    for ours, expected, most in zip(rough, found, (0.0, 0.12, 0.07, 0.0), strict=True):
        assert error(ours, expected.double()) <= most * (1 if HAS_FP8 else 3)


@needs_fp8
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(33, 128, 512), (1000, 256, 1024), (49152, 768, 3072)])
@pytest.mark.parametrize("fp8_backward", [False, True])
def test_an_mlp_in_8_bits_is_that_of_the_twin(shape, dtype, fp8_backward):
    inputs = mlp_operands(shape, dtype)
    grad = torch.randn(shape[0], shape[1], device=DEVICE)
    found, again, twin = (
        run_mlp(mlp_relu2, inputs, grad, fp8=True, fp8_backward=fp8_backward, kernels=kernels)
        for kernels in ("triton", "triton", "torch")
    )
    plain = run_mlp(mlp_relu2, inputs, grad)
    for ours, repeated, theirs, in_16_bits in zip(found, again, twin, plain, strict=True):
        assert ours.dtype == dtype
        assert torch.equal(ours, repeated)
        # Hopper adds 8-bit products with about 14 bits.
        assert error(ours, theirs.double()) <= 2e-2
        assert error(ours, in_16_bits.double()) <= (0.12 if fp8_backward else 7e-2)


@needs_fp8
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch's own, while it compiles
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_mlp_in_8_bits_compiles_as_one_graph(dtype):
    inputs = mlp_operands((1000, 256, 1024), dtype)
    grad = torch.randn(1000, 256, device=DEVICE)
    options = {"fp8": True, "fp8_backward": True}
    eager = run_mlp(mlp_relu2, inputs, grad, **options)
    for ours, theirs in zip(
        run_mlp(torch.compile(mlp_relu2, fullgraph=True), inputs, grad, **options), eager, strict=True
    ):
        assert error(ours, theirs.double()) <= 4e-3  # of the last bit of the activation's scale
