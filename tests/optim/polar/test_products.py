import contextlib

import pytest
import torch
from newer import needs_torch
from polar_factors import polar_factor

import quintic
from quintic.optim.polar import orthogonalize as module
from quintic.optim.polar.orthogonalize import ieee_matmul
from quintic.optim.polar.products import multiply
from quintic.versions import OneSetting, can_forbid_splits, float32_products

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
UNIT_ROUNDOFF = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-24, torch.float64: 2**-53}


@contextlib.contextmanager
def precision(name):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextlib.contextmanager
def switch(owner, name, value):
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


AMBIENTS = {
    "high": lambda: precision("high"),
    "medium": lambda: precision("medium"),
    "bf16 everywhere": lambda: switch(torch.backends, "fp32_precision", "bf16"),
    "autocast bfloat16": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast float16": lambda: torch.autocast("cpu", torch.float16),
    "float64 by default": lambda: switch_default_dtype(torch.float64),
    "inference": torch.inference_mode,
    "no grad": torch.no_grad,
}


@contextlib.contextmanager
def switch_default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# Before it there was one setting of how float32 is multiplied, for all devices.
NEEDS_SWITCHES = needs_torch("2.9", "a setting of the precision of each device")


@pytest.mark.parametrize(
    "ambient",
    [pytest.param(name, marks=NEEDS_SWITCHES) if name == "bf16 everywhere" else name for name in AMBIENTS],
)
@pytest.mark.parametrize("method", ["polar_express", "newton_schulz", "gram", "auto", "svd"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_global_setting_changes_a_bit(ambient, method, dtype):
    if method == "svd" and dtype in (torch.bfloat16, torch.float16):
        dtype = None
    x = torch.randn(2, 96, 160)
    expected = polar_factor(x, method, compute_dtype=dtype)
    with AMBIENTS[ambient]():
        out = polar_factor(x, method, compute_dtype=dtype)
    assert out.dtype == expected.dtype
    assert torch.equal(out, expected)


def test_without_the_guard_a_global_setting_would_matter():
    """Otherwise the test above tests nothing; only CPUs with bfloat16 instructions have the difference."""
    x = torch.randn(1, 256, 256)
    expected = torch.bmm(x, x)
    with precision("medium"):
        if torch.equal(torch.bmm(x, x), expected):
            pytest.skip("this CPU multiplies float32 in float32 whatever it is told")
        with ieee_matmul("cpu", torch.float32):
            assert torch.equal(torch.bmm(x, x), expected)


def states():
    """All that the guard may touch."""
    cuda = torch.backends.cuda.matmul
    return [
        float32_products("cuda").fp32_precision,
        float32_products("cpu").fp32_precision,
        cuda.allow_fp16_accumulation,
        torch._C._get_cublas_allow_fp16_reduced_precision_reduction(),
        torch._C._get_cublas_allow_bf16_reduced_precision_reduction(),
        torch.is_autocast_enabled("cpu"),
    ]


CUDA = torch.backends.cuda.matmul


@pytest.mark.parametrize(
    ("dtype", "name", "loose", "exact"),
    [
        pytest.param(torch.float32, "fp32_precision", "tf32", "ieee", marks=NEEDS_SWITCHES),
        (torch.float16, "allow_fp16_accumulation", True, False),
        (torch.float16, "allow_fp16_reduced_precision_reduction", True, False),
        (torch.bfloat16, "allow_bf16_reduced_precision_reduction", True, False),
    ],
)
@pytest.mark.parametrize("raises", [False, True])
def test_switches_of_cuda_are_off_inside_and_as_before_outside(dtype, name, loose, exact, raises):
    with switch(CUDA, name, loose):
        before = states()
        with contextlib.suppress(ZeroDivisionError), ieee_matmul("cuda", dtype):
            assert getattr(CUDA, name) == exact
            if raises:
                raise ZeroDivisionError
        assert states() == before


@pytest.mark.skipif(not can_forbid_splits(), reason=f"split sums cannot be forbidden in PyTorch {torch.__version__}")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_forbidden_split_of_sums_is_forbidden_again(dtype):
    name = f"allow_{'fp' if dtype == torch.float16 else 'bf'}16_reduced_precision_reduction"
    setattr(CUDA, name, (False, False))
    try:
        before = states()
        with ieee_matmul("cuda", dtype):
            assert getattr(CUDA, f"{name}_split_k")
        assert states() == before
    finally:
        setattr(CUDA, name, True)


@NEEDS_SWITCHES
def test_an_inherited_precision_stays_inherited():
    matmul = torch.backends.mkldnn.matmul
    with switch(matmul, "fp32_precision", "none"):
        with switch(torch.backends, "fp32_precision", "bf16"):
            with ieee_matmul("cpu", torch.float32):
                assert matmul.fp32_precision == "ieee"
            assert matmul.fp32_precision == "bf16"
        assert matmul.fp32_precision == "none"


def test_the_legacy_precision_is_readable_afterwards():
    with precision("medium"):
        with ieee_matmul("cpu", torch.float32), ieee_matmul("cuda", torch.float32):
            pass
        assert torch.get_float32_matmul_precision() == "medium"


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("name", ["highest", "high", "medium"])
def test_the_legacy_precision_is_full_inside(name, raises, device_type):
    with precision(name):
        with contextlib.suppress(ZeroDivisionError), ieee_matmul(device_type, torch.float32):
            assert float32_products(device_type).fp32_precision == "ieee"
            if raises:
                raise ZeroDivisionError
        assert torch.get_float32_matmul_precision() == name


@pytest.mark.parametrize("name", ["highest", "high", "medium"])
def test_one_setting_for_all_devices_serves_as_well(name, monkeypatch):
    """As PyTorch 2.8 has it; what it is read through is tried with later versions, too, which still have it."""
    setting = OneSetting()
    monkeypatch.setattr(module, "_FLOAT32_PRODUCTS", {"cpu": setting, "cuda": setting})
    with precision(name):
        for device_type in ("cpu", "cuda"):
            with ieee_matmul(device_type, torch.float32):
                assert torch.get_float32_matmul_precision() == "highest"
                assert setting.fp32_precision == "ieee"
            assert torch.get_float32_matmul_precision() == name


@pytest.mark.parametrize("method", ["polar_express", "gram"])
def test_torch_compile_gives_the_same(method):
    x = torch.randn(2, 24, 40)
    expected = quintic.orthogonalize(x, method)
    compiled = torch.compile(lambda x: quintic.orthogonalize(x, method) * 2, backend="eager")
    with precision("medium"):
        torch.testing.assert_close(compiled(x), expected * 2, rtol=0, atol=0)
    torch.compiler.reset()


def test_meta_tensors_have_shapes():
    out = polar_factor(torch.empty(2, 3, 5, device="meta"), "gram")
    assert out.shape == (2, 3, 5)


FACTORS = [(0.3, 0.7), (-1e-6, 1e-9), (0.0, 0.1), (2.0, 0.0), (0.0, 0.0), (0.5, 1.0)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [4, 64])
@pytest.mark.parametrize(("beta", "alpha"), FACTORS)
@pytest.mark.parametrize("diagonal", [0.0, 1.7])
def test_products_round_once(dtype, size, beta, alpha, diagonal):
    a, b, c = torch.randn(3, 2, size, size, dtype=torch.float64).to(dtype)
    before = a.clone(), b.clone(), c.clone()
    # Sums in float32 (or float64) are off by little more than their terms' rounding.
    slack = {torch.float64: 2**-50}.get(dtype, 2**-20) * size
    smallest = torch.finfo(dtype).smallest_normal * UNIT_ROUNDOFF[dtype] * 2  # the spacing of subnormal numbers
    unit = UNIT_ROUNDOFF[dtype] * 1.01
    identity = torch.eye(size, dtype=torch.float64)
    for addend in (c, None):
        factors = {"alpha": alpha, "beta": beta, "diagonal": diagonal}
        out = multiply(a, b, symmetric=diagonal != 0, c=addend, **factors)
        assert out.dtype == dtype
        exact, terms = alpha * (a.double() @ b.double()), abs(alpha) * (a.double().abs() @ b.double().abs())
        if addend is not None:
            exact, terms = exact + beta * c.double(), terms + abs(beta) * c.double().abs()
        expected, terms = exact + diagonal * identity, terms + abs(diagonal) * identity
        # On the diagonal the sum without it was rounded too.
        rounded = unit * (expected.abs() + (exact.abs() * identity if diagonal else 0))
        assert ((out.double() - expected).abs() <= rounded + slack * terms + smallest).all()
    assert all(torch.equal(old, new) for old, new in zip(before, (a, b, c), strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [2, 64])
def test_numbers_are_not_rounded_before_they_are_used(dtype, size):
    value = 1 + 2**-9 + 2**-12  # needs more digits than 16-bit types have
    identity = torch.eye(size, dtype=dtype).unsqueeze(0)
    a = torch.full((1, size, size), 256.0, dtype=dtype)
    expected = (a.double() + value * a.double()).to(dtype)
    assert torch.equal(multiply(a, identity, symmetric=False, alpha=value, c=a, beta=1.0), expected)
    assert torch.equal(multiply(a, identity, symmetric=False, c=a, beta=value), expected)
    diagonal = multiply(identity, -identity, symmetric=True, diagonal=value).double().diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(diagonal, torch.full((1, size), value - 1, dtype=torch.float64), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_a_product_that_counts_for_nothing_leaves_the_factor_of_the_addend(dtype, beta, monkeypatch):
    """PyTorch 2.13 forgets it in 16 bits where oneDNN multiplies, as on CPUs with bfloat16 instructions."""
    original = torch.baddbmm

    def forgetful(c, a, b, *, beta, alpha, out=None):
        return c.clone() if alpha == 0 and a.itemsize == 2 else original(c, a, b, beta=beta, alpha=alpha, out=out)

    monkeypatch.setattr(torch, "baddbmm", forgetful)
    a, c = torch.randn(2, 1, 48, 48).to(dtype)
    out = multiply(a, a, symmetric=False, alpha=0.0, c=c, beta=beta)
    assert torch.equal(out, (beta * c.float()).to(dtype))
    out = multiply(a, a, symmetric=True, alpha=0.0, c=c, beta=beta, diagonal=1.5)
    expected = beta * c.double() + 1.5 * torch.eye(48, dtype=torch.float64)
    torch.testing.assert_close(out.double(), expected, rtol=2 * UNIT_ROUNDOFF[dtype], atol=1e-7)


@pytest.mark.parametrize(
    "factors", [{}, {"diagonal": 2.0}, {"alpha": 0.3}, {"alpha": 0.3, "beta": 2.0, "diagonal": 0.7}]
)
def test_products_are_differentiable(factors):
    a, b, c = (tensor.requires_grad_() for tensor in torch.randn(3, 2, 3, 3, dtype=torch.float64))

    def compute(a, b, c):
        return multiply(a, b, symmetric=True, c=c if "beta" in factors else None, **factors)

    inputs = (a, b, c) if "beta" in factors else (a, b, c.detach())
    assert torch.autograd.gradcheck(compute, inputs)


def test_the_diagonal_of_bfloat16_results_is_rounded_once_on_cpus():
    x = torch.randn(3, 96, 130, dtype=torch.float64)
    gram = (x @ x.mT / x.square().sum((-2, -1), keepdim=True)).bfloat16()
    # The terms cancel, as in a step of Polar Express: every rounding before the last would show.
    out = multiply(gram, gram, symmetric=True, alpha=17.5, c=gram, beta=-25.3, diagonal=0.27)
    exact = 17.5 * gram.double() @ gram.double() - 25.3 * gram.double() + 0.27 * torch.eye(96, dtype=torch.float64)
    found, wanted = (each.diagonal(dim1=-2, dim2=-1).double() for each in (out, exact))
    assert ((found - wanted).abs() <= 2.0**-8 * wanted.abs() + 1e-6).all()
    assert relative_error(out, exact) < 3e-3


def relative_error(found, exact):
    return float((found.double() - exact).norm() / exact.norm())
