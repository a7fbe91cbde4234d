"""The orthogonalisation benchmark: its floor, what it compares with what, and that it survives other libraries."""

import argparse
import json
import subprocess
import sys

import pytest
import torch

from benchmarks.common import results
from benchmarks.orthogonalize import __main__ as bench
from benchmarks.orthogonalize import contestants, measure, page, shapes
from benchmarks.orthogonalize.contestants import CONTESTANTS
from benchmarks.orthogonalize.shapes import Polynomials, Shape

# -------------------------------------------------------------------------------- shapes and floors


@pytest.mark.parametrize(("m", "n", "steps"), [(8, 8, 1), (8, 8, 5), (8, 40, 2), (8, 9, 5), (8, 800, 5)])
def test_the_floor_is_the_cheapest_form_product_by_product(m, n, steps):
    half, small, full = m * m * n, m**3, 2 * m * m * n  # X X^T; a symmetric product of small ones; the product with X
    standard = steps * (half + small + full)
    forms = [standard]
    for restart in (None, *range(1, steps)):
        starts = {0, restart} - {None}
        cost = 0
        for step in range(steps):
            if step in starts:
                cost += half + small  # R, and its polynomial: Q
            else:
                cost += 2 * small + small + small  # R anew from the last polynomial; its polynomial; Q
            if step + 1 in starts or step + 1 == steps:
                cost += full
        forms.append(cost)
    assert shapes.floor_flops(Shape(1, m, n), steps) == min(forms)
    assert shapes.floor_flops(Shape(3, n, m), steps) == 3 * min(forms)


@pytest.mark.parametrize("text", ["768x768", "axbxc", "1x2x3x4", "", "2x0x4", "2x-3x4"])
def test_a_shape_that_is_none_is_named(text):
    with pytest.raises(ValueError, match=f"shape '{text}': "):
        Shape.parse(text)
    assert str(Shape.parse("2x3x4")) == "2x3x4"


# -------------------------------------------------------------------------------- what is compared


@pytest.mark.parametrize(("m", "n"), [(6, 6), (5, 9), (9, 5)])
@pytest.mark.parametrize("safety", [0.0, 0.02])
def test_the_reference_is_the_polynomial_of_the_singular_values(m, n, safety):
    polynomials = Polynomials(((3.0, -4.0, 2.0), (2.0, -1.5, 0.5)), safety)
    x = torch.randn(2, m, n, dtype=torch.float64)
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    s = s / (torch.linalg.vector_norm(s, dim=-1, keepdim=True) * (1 + safety))
    for a, b, c in polynomials.triples:
        s = a * s + b * s**3 + c * s**5
    torch.testing.assert_close(polynomials.apply(x), (u * s.unsqueeze(-2)) @ vh, rtol=0, atol=1e-6)


OURS = [one.name for one in CONTESTANTS if one.family == "quintic" or one.name == "eager"]


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("shape", [Shape(3, 32, 48), Shape(2, 40, 24)], ids=str)
def test_contestants_compute_what_they_are_measured_against(name, shape):
    contestant = contestants.of(name)
    x = measure.make_inputs(shape, "cpu", 1)[0]
    out = contestant.make(shape, x)(x)
    assert out.dtype == torch.bfloat16
    error = measure.References().error(out, x, shape, contestant.polynomials())
    # bf16 has eight bits, and the polynomials' slopes multiply them; "auto" is bf16 on a CPU.
    exacter = "fp16" in name or "fp32" in name
    assert error < (0.01 if exacter else 0.06), error


def test_the_error_is_that_of_the_worse_of_the_first_and_the_last_matrix():
    shape, polynomials = Shape(3, 4, 6), Polynomials(((1.5, -0.5, 0.0),))
    x = measure.make_inputs(shape, "cpu", 1)[0]
    exact = polynomials.apply(x.double())
    references = measure.References()
    assert references.error(exact, x, shape, polynomials) == 0
    wrong = exact.clone()
    wrong[1] = 7  # not looked at
    wrong[2] *= 1.25
    assert references.error(wrong, x, shape, polynomials) == pytest.approx(0.25)


SCRIPT = """
import nothing_that_exists
polar_express_coeffs = [(1, 2, 3)]

@torch.compile(dynamic=False, fullgraph=True)
def polar_express(grad_chunk, momentum_buffer, momentum_t, split_baddbmm=False):
    momentum_buffer.lerp_(grad_chunk, 1 - momentum_t)
    g = grad_chunk.lerp_(momentum_buffer, momentum_t)

    X = g.bfloat16()
    for a, b, c in polar_express_coeffs:
        X = (a + b + c) * X
    return -X if split_baddbmm else X

train()
"""


def test_the_speedruns_function_is_taken_out_of_its_script_without_momentum():
    names = {"torch": argparse.Namespace(compile=lambda **options: lambda function: function)}
    exec(compile(contestants.without_momentum(SCRIPT), "train_gpt.py", "exec"), names)
    x = torch.ones(2, 2)
    assert torch.equal(names["polar_express"](x), 6 * x.bfloat16())
    assert torch.equal(names["polar_express"](x, split_baddbmm=True), -6 * x.bfloat16())
    assert torch.equal(x, torch.ones(2, 2))


# -------------------------------------------------------------------------------- tables


def row(name: str, milliseconds: float = 1.0, **changes: object) -> dict[str, object]:
    times = {"median": milliseconds, "p10": milliseconds - 0.1, "p90": milliseconds + 0.1, "least": 0.1, "n": 9}
    idle = {**times, "median": 2 * milliseconds}
    values = {
        "contestant": name, "shape": "1x2048x2048", "device": "cuda", "device_ms": times, "idle_ms": idle,
        "host_ms": idle, "error_frobenius": 0.01, "finite": True, "repeatable": True, "first_s": 1.25,
        "device_name": "NVIDIA H200", "versions": {"python": "3.12.3"},
    }  # fmt: skip
    return {**values, **changes}


def ceiling(tflops: float) -> dict[str, object]:
    return {"contestant": "ceiling", "shape": "quintic", "device": "cuda", "tflops": tflops}


SHAPE = Shape(1, 2048, 2048)


def test_the_fastest_other_is_the_fastest_whose_result_is_right():
    rows = [
        row("quintic", 0.4),
        row("quintic-polar-express-bf16", 0.2),  # no peer
        row("eager", 0.1, finite=False),
        row("compiled", 0.1, error_frobenius=0.3),
        row("speedrun", 0.1, error_frobenius=None),
        {"contestant": "gram-ns-cute", "shape": str(SHAPE), "device": "cuda", "error": "not importable"},
        row("dion-newton-schulz", 0.5),
        row("gram-ns-compiled", 0.6),
        row("gram-ns-replayed", 0.05, shape="1x4096x4096"),
    ]
    summary = page.Summary(rows)
    assert summary.best_peer(SHAPE)["contestant"] == "dion-newton-schulz"
    assert summary.ratio(SHAPE) == pytest.approx(0.8)
    assert page.Summary(rows[:1]).ratio(SHAPE) is None


def test_floors_are_at_the_rate_that_was_measured_in_the_run():
    summary = page.Summary([row("quintic", 0.4), ceiling(700.0), ceiling(720.0), ceiling(800.0)])
    measured, nominal = summary.multiples(SHAPE)
    assert nominal == pytest.approx(0.4 / 0.2175, rel=1e-3)
    assert measured == pytest.approx(nominal * 720 / 790)
    assert page.Summary([row("quintic", 0.4)]).multiples(SHAPE) == (None, pytest.approx(nominal))


def test_percentiles_are_interpolated():
    found = results.percentiles([float(value) for value in range(11)])
    assert found == {"median": 5.0, "p10": 1.0, "p90": 9.0, "least": 0.0, "n": 11}
    assert results.percentiles([3.0]) == {"median": 3.0, "p10": 3.0, "p90": 3.0, "least": 3.0, "n": 1}


# -------------------------------------------------------------------------------- processes


@pytest.mark.slow
def test_a_run_on_a_cpu(tmp_path):
    command = [
        sys.executable, "-m", "benchmarks.orthogonalize", "--out", str(tmp_path), "--device", "cpu",
        "--shapes", "2x16x24", "1x24x16", "--contestants", "quintic", "speedrun", "eager", "--seconds", "0.02",
        "--commit", "abc", "--targets",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "orthogonalize.json").read_text())
    assert result["commit"] == "abc"
    rows = {bench.key(row)[:2]: row for row in result["rows"]}
    for shape in ("2x16x24", "1x24x16"):
        for name in ("quintic", "quintic-polar-express-bf16", "eager"):
            found = rows[name, shape]
            assert found["finite"]
            assert found["repeatable"]
            assert 0 < found["error_frobenius"] < page.LARGEST_ERROR
            assert 0 < found["idle_ms"]["p10"] <= found["idle_ms"]["median"] <= found["idle_ms"]["p90"]
        assert rows["speedrun", shape]["error"].startswith("not importable: No module named 'triton_kernels'")
    text = (tmp_path / "orthogonalize.md").read_text()
    assert "at commit abc" in text
    assert str(tmp_path) not in text
