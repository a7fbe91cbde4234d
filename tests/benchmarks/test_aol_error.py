"""The comparison of scalings before orthogonalisation: the scalings, the errors, and both commands on a tiny model."""

import functools
import math
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_runs import write_text_folder

import quintic
from benchmarks import aol_error

SCALINGS = [
    aol_error.frobenius,
    aol_error.aol,
    functools.partial(aol_error.aol, long_side=True),
    aol_error.schatten4,
    aol_error.spectral,
]


def matrix(m: int, n: int, seed: int, decay: float) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    rows = torch.exp(decay * torch.randn(m, 1, generator=rng, dtype=torch.float64))
    return torch.randn(m, n, generator=rng, dtype=torch.float64) * rows


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 1000), st.floats(0, 5), st.integers(-200, 200))
def test_no_scaling_leaves_a_singular_value_above_one(m, n, seed, decay, exponent):
    x = matrix(m, n, seed, decay) * 2.0**exponent
    for scale in SCALINGS:
        largest = torch.linalg.matrix_norm(scale(x), 2).item()
        assert largest <= 1 + 1e-12
        assert largest >= 1 / math.sqrt(max(m, n)) - 1e-12


@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (4, 4)])
def test_aol_divides_by_roots_of_the_sums_of_the_gram_matrix(shape):
    x = matrix(*shape, seed=0, decay=1.0)
    rows = x if shape[0] <= shape[1] else x.T
    sums = [sum(abs(float(rows[i] @ other)) for other in rows) for i in range(len(rows))]
    expected = torch.stack([row / math.sqrt(total) for row, total in zip(rows, sums, strict=True)])
    torch.testing.assert_close(aol_error.aol(x), expected if shape[0] <= shape[1] else expected.T)
    # Of the long side: columns of a wide matrix, not its rows.
    ratio = aol_error.aol(x, long_side=True) / x
    spread_along = (ratio - ratio.mean(0 if shape[0] <= shape[1] else 1, keepdim=True)).abs().max()
    assert (spread_along < 1e-12) == (shape[0] != shape[1])


def test_zero_rows_and_zero_matrices_stay_zero():
    x = matrix(4, 6, seed=1, decay=0.0)
    x[2] = 0
    for scale in SCALINGS:
        assert scale(x).isfinite().all()
        assert (scale(x)[2] == 0).all()
        assert (scale(torch.zeros(3, 5)) == 0).all()


@pytest.mark.parametrize("shape", [(32, 48), (48, 32), (24, 24)])
def test_five_steps_are_those_of_the_library(shape):
    x = matrix(*shape, seed=2, decay=0.5)
    found = aol_error.VARIANTS["five"].orthogonalize(x[None], aol_error.VARIANTS["five"].form(*shape, "cpu", x.dtype))
    torch.testing.assert_close(found[0], quintic.orthogonalize(x, "auto", compute_dtype=x.dtype), rtol=0, atol=1e-12)


def test_errors_are_those_of_the_polynomials():
    torch.manual_seed(0)
    u, v = torch.linalg.qr(torch.randn(6, 6).double())[0], torch.linalg.qr(torch.randn(9, 6).double())[0]
    s = torch.tensor([1.0, 0.5, 0.1, 0.05, 0.01, 2e-4], dtype=torch.float64)
    errors = aol_error.errors_of((u * s) @ v.T)
    s = s / s.norm() / (1 + aol_error.SAFETY)
    for a, b, c in aol_error.FIVE:
        s = a * s + b * s**3 + c * s**5
    five = errors["five"]
    assert five.distance == pytest.approx((s - 1).norm().item() / math.sqrt(6))
    assert five.singular == pytest.approx((s[:5] - 1).abs().max().item())
    assert five.cosine == pytest.approx(s.sum().item() / s.norm().item() / math.sqrt(6))
    assert five.orthogonality == pytest.approx((s**2 - 1).norm().item() / math.sqrt(6))
    assert five.bias == pytest.approx(0, abs=1e-9)
    assert 0 < abs(five.fp16 - five.distance) < 0.05
    assert 0 < abs(five.bf16 - five.distance) < 0.3
    assert errors["aol-five"].bias > 0.01


def test_scaled_rows_have_another_polar_factor_unless_they_are_orthogonal():
    u = torch.linalg.qr(matrix(4, 4, seed=3, decay=0.0))[0]
    sizes = torch.tensor([[4.0], [2.0], [1.0], [0.5]], dtype=torch.float64)
    assert aol_error.errors_of(sizes * u)["aol-four"].bias == pytest.approx(0, abs=1e-12)
    x = sizes * u @ (torch.eye(4) + 0.5 * torch.ones(4, 4)).double()

    def factor(a: torch.Tensor) -> torch.Tensor:  # (a a^T)^(-1/2) a
        values, vectors = torch.linalg.eigh(a @ a.T)
        return (vectors / values.sqrt()) @ vectors.T @ a

    expected = (factor(aol_error.aol(x)) - factor(x)).norm().item() / 2
    assert aol_error.errors_of(x)["aol-four"].bias == pytest.approx(expected)
    assert expected > 0.02


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("aol")
    text = write_text_folder(folder / "text")
    return (
        f"--data {text} --data-dir {folder / 'data'} --vocab-size 300 --val-frac 0.15 --depth 1 --head-dim 32 "
        "--seq-len 32 --steps 3 --batch-tokens 128 --rows 4 --eval-tokens 128 --device cpu --dtype float32"
    )


def rows_of(text: str, title: str) -> dict[str, list[str]]:
    section = text.partition(f"## {title}")[2].partition("\n## ")[0]
    lines = [line.strip("|").split(" | ") for line in section.splitlines() if line.startswith("|")]
    assert len({len(line) for line in lines}) == 1
    return {line[0].strip(): [cell.strip() for cell in line[1:]] for line in lines[2:]}


def test_the_page_of_errors(tiny, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["aol_error.py", "--side", "16", "--base", tiny])
    aol_error.main()
    text = capsys.readouterr().out
    labels = [variant.label for variant in aol_error.VARIANTS.values()]
    overall = rows_of(text, "Directions")
    assert list(overall) == labels
    assert "nan" not in text
    assert overall[labels[0]][3] == "0.000 (0.000 to 0.000)"
    assert overall["AOL, 5 steps"][3] != "0.000 (0.000 to 0.000)"
    assert list(rows_of(text, "Distance"))[1:] == labels
    assert "64 x 256, step 3 (1)" in text
    made_up = rows_of(text, "Made-up")
    assert list(made_up) == labels
    assert made_up[labels[0]][1] == "0.093 / 0.000"


@pytest.mark.slow
def test_the_page_of_losses(tiny, monkeypatch, capsys):
    monkeypatch.setattr(aol_error, "TRAINED", ("five", "aol-last-four"))
    monkeypatch.setattr(sys, "argv", ["aol_error.py", "--loss", "--seeds", "1", "2", "--base", tiny])
    aol_error.main()
    rows = rows_of(capsys.readouterr().out, "Validation loss, 2 seeds")
    assert list(rows) == [aol_error.VARIANTS[name].label for name in ("five", "aol-last-four")]
    five, other = rows.values()
    assert five[2] == "0.000 (0.000 to 0.000)"
    assert other[1] != five[1]
    assert all(3 < float(row[1].split()[0]) < 6 for row in rows.values())
