import pytest
import torch

import quintic
from quintic.optim.polar.coefficients import newton_schulz_coefficients, polar_express_coefficients
from quintic.optim.polar.forms import check_orthogonalizer, resolve
from quintic.optim.polar.program import products_of

CUBIC = (1.5, -0.5, 0.0)


@pytest.mark.parametrize(
    ("shape", "device_type", "compute_dtype", "expected"),
    [
        ((768, 768), "cuda", None, "polar_express fp16"),
        ((768, 1024), "cuda", None, "polar_express fp16"),
        ((768, 3072), "cuda", None, "gram fp16"),
        ((3072, 768), "cuda", None, "gram fp16"),
        ((768, 2048), "cuda", None, "gram fp16"),
        ((64, 4096), "cuda", None, "polar_express fp16"),  # small: nothing to gain
        ((768, 3072), "cuda", torch.bfloat16, "polar_express bf16"),  # eight bits are too few
        ((768, 3072), "cuda", torch.float32, "gram fp32"),
        ((768, 3072), "cuda", torch.float64, "gram fp64"),
        ((768, 3072), "cpu", None, "polar_express bf16"),
        ((768, 3072), "cpu", torch.float16, "gram fp16"),
        ((768, 768), "cpu", torch.float32, "polar_express fp32"),
        ((768, 3072), "mps", None, "polar_express bf16"),
        ((0, 3072), "cuda", None, "polar_express fp16"),
    ],
)
def test_what_auto_stands_for(shape, device_type, compute_dtype, expected):
    assert str(resolve("auto", *shape, device_type=device_type, compute_dtype=compute_dtype)) == expected


@pytest.mark.parametrize(
    ("method", "dtype", "expected"),
    [
        ("polar_express", torch.float32, "polar_express bf16"),
        ("newton_schulz", torch.float64, "newton_schulz bf16"),
        ("gram", torch.bfloat16, "gram fp16"),
        ("svd", torch.bfloat16, "svd fp32"),
        ("svd", torch.float64, "svd fp64"),
    ],
)
@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_defaults_of_the_other_methods(method, dtype, expected, device_type):
    assert str(resolve(method, 4, 999, device_type=device_type, dtype=dtype)) == expected


@pytest.mark.parametrize("method", ["polar_express", "newton_schulz", "gram", "auto"])
def test_resolving_what_was_resolved_changes_nothing(method):
    """The optimizer keeps a form and calls with its method and dtype."""
    first = resolve(method, 128, 512, device_type="cuda")
    again = resolve(first.method, 128, 512, compute_dtype=first.compute_dtype, device_type="cpu")
    assert first == again
    assert hash(first) == hash(again)


def test_coefficients_override_the_methods_own():
    assert resolve("newton_schulz", 4, 4, device_type="cpu").coefficients == newton_schulz_coefficients(5)
    assert resolve("auto", 4, 4, steps=7, device_type="cpu").coefficients == polar_express_coefficients(7)
    assert resolve("gram", 4, 4, steps=3, coefficients=CUBIC, device_type="cpu").coefficients == (CUBIC,) * 3
    assert resolve("gram", 4, 4, steps=3, coefficients=[list(CUBIC)], device_type="cpu").coefficients == (CUBIC,)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "qr"}, "method='qr': choose one of 'polar_express', 'newton_schulz', 'gram', 'auto', 'svd'"),
        ({"method": "polar_express", "steps": 0}, "steps=0"),
        ({"method": "newton_schulz", "steps": -1}, "steps=-1"),
        ({"method": "polar_express", "steps": 2.5}, "steps=2.5: orthogonalisation needs a whole number of steps"),
        ({"method": "gram", "steps": "5", "coefficients": CUBIC}, "steps='5'"),
        ({"method": "gram", "steps": 0, "coefficients": CUBIC}, "steps=0"),
        ({"method": "gram", "coefficients": []}, r"coefficients=\[\]: give one triple"),
        ({"method": "gram", "coefficients": [(1.0, 2.0)]}, "one triple per step"),
        ({"method": "gram", "coefficients": (1.0, 2.0)}, "one triple per step"),
        ({"method": "gram", "coefficients": [(1.0, float("nan"), 0.0)]}, "finite numbers"),
        ({"method": "gram", "coefficients": (1.0, float("inf"), 0.0)}, "finite numbers"),
        ({"method": "gram", "coefficients": ["abc"]}, "finite numbers"),
        ({"method": "gram", "coefficients": 3}, "coefficients=3: give one triple"),
        ({"method": "gram", "coefficients": torch.tensor(3.0)}, "coefficients=.*give one triple"),
        ({"method": "svd", "coefficients": CUBIC}, "'svd' is exact"),
        ({"method": "svd", "compute_dtype": torch.bfloat16}, r"computes in torch\.float32, torch\.float64"),
        ({"method": "auto", "compute_dtype": torch.int32}, r"compute_dtype=torch\.int32: 'auto' computes in"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        check_orthogonalizer(**arguments)
    with pytest.raises(ValueError, match=message):
        quintic.orthogonalize(torch.ones(2, 2), **arguments)


def test_svd_ignores_steps():
    check_orthogonalizer("svd", 0)


@pytest.mark.parametrize("method", ["polar_express", "gram"])
@pytest.mark.parametrize("shape", [(8, 20), (20, 8), (16, 16)])
def test_flops_of_cubics_are_those_of_their_products(method, shape):
    form = resolve(method, *shape, coefficients="cubic", device_type="cuda")
    short, long = min(shape), max(shape)
    sizes = {"gram": short * short * long, "square": short**3, "apply": short * short * long}
    products = products_of(tuple(form.segments), form.coefficients, 1.0).products
    assert form.flops(*shape) == sum(2 * sizes[product.kind] for product in products)


@pytest.mark.parametrize("method", ["polar_express", "gram"])
@pytest.mark.parametrize("shape", [(8, 20), (20, 8), (16, 16)])
@pytest.mark.parametrize("steps", [1, 5, 8])
def test_flops_are_those_of_the_products_that_run(method, shape, steps, monkeypatch):
    counted = []

    def counting(original):
        def count(*tensors, **factors):
            a, b = tensors[-2:]
            counted.append(2 * a.shape[-2] * a.shape[-1] * b.shape[-1])
            return original(*tensors, **factors)

        return count

    for name in ("bmm", "baddbmm"):
        monkeypatch.setattr(torch, name, counting(getattr(torch, name)))
    quintic.orthogonalize(torch.randn(shape), method, steps)
    assert sum(counted) == flops(*shape, method, steps)


def flops(m, n, method="polar_express", steps=5):
    return resolve(method, m, n, steps=steps, device_type="cuda").flops(m, n)


def test_flops_of_known_shapes():
    assert flops(768, 3072) == flops(3072, 768)
    assert flops(2, 3, steps=1) == 4 * 2 * 2 * 3 + 2 * 2**3
    # Five steps in two segments (2 + 3) for matrices twice as long as short and longer, else in three (2 + 2 + 1).
    assert flops(10, 40, method="gram") == 2 * 4 * 10 * 10 * 40 + (5 + 9) * 2 * 10**3
    assert flops(10, 19, method="gram") == 3 * 4 * 10 * 10 * 19 + (5 + 5 + 1) * 2 * 10**3
    assert flops(512, 2048, method="auto") < 0.8 * flops(512, 2048)


@pytest.mark.parametrize(
    ("m", "n", "dtype", "restarts"),
    [
        (512, 512, torch.float16, (2, 4)),
        (512, 1023, torch.float16, (2, 4)),
        (512, 1024, torch.float16, (2,)),
        (1024, 512, torch.float32, (2,)),
        (512, 2048, torch.bfloat16, (1, 2, 3, 4)),
    ],
    ids=str,
)
def test_long_matrices_restart_less_often_in_dtypes_with_enough_digits(m, n, dtype, restarts):
    assert resolve("gram", m, n, compute_dtype=dtype, device_type="cuda").restarts == restarts
