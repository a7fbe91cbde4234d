"""The forms of an orthogonalisation: the methods, the choice that "auto" makes, and the cost of each.

`resolve` turns a user's arguments into a `Form`: method, coefficients, restarts and dtype for one matrix shape, with
all choices made. `orthogonalize.py` computes it, and `optimizer.plan()` prints it. The standard and the Gram form are
the same polynomial of the same matrix, computed with different products.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, get_args

import torch

from quintic.kernels.dispatch import cpu_multiplies_bfloat16
from quintic.optim.polar.coefficients import (
    DEFAULT_STEPS,
    GRAM_AMPLIFICATION,
    SAFETY,
    Coefficients,
    Triple,
    checked_steps,
    gram_restarts,
)
from quintic.optim.polar.named_coefficients import WITHOUT_MARGIN, CoefficientsName, named_coefficients

__all__ = ["Form", "Method", "Polynomials", "check_orthogonalizer", "resolve"]

Method = Literal["polar_express", "newton_schulz", "gram", "auto", "svd"]
Polynomials = Triple | Sequence[Triple] | CoefficientsName
"""One triple for all steps, a list with one per step, or the name of a published list."""

# "auto" takes the Gram form only if it needs at most this fraction of the standard form's operations, because it starts
# more and smaller kernels; and only from this short side on, because its rounding errors exceed the standard form's by
# half and more on smaller matrices (benchmarks/gram_error.py), which gain little from it.
_GRAM_SHARE = 0.9
_GRAM_MIN_SIDE = 128

# The Gram form loses digits of small singular values, which matrices with one side at least this many times the other
# seldom have. So it may enlarge their rounding errors more before it restarts, which saves a seventh of the operations.
# With Polar Express in float16 the errors stay below the standard form's in bfloat16 (benchmarks/gram_error.py).
_GRAM_LONG = 2
_GRAM_LONG_AMPLIFICATION = 150.0

# Below this short side CPUs with bfloat16 instructions multiply float32 as fast (benchmarks/cpu_step.py).
_BFLOAT16_MIN_SIDE = 96

_DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}
_SVD_DTYPES = (torch.float32, torch.float64)


@dataclass(frozen=True)
class Form:
    """Everything that decides how matrices of one shape are computed; equal forms give equal bits."""

    method: Literal["polar_express", "newton_schulz", "gram", "svd"]
    compute_dtype: torch.dtype
    coefficients: Coefficients
    """One triple per step; empty for `"svd"`."""
    restarts: tuple[int, ...]
    """Steps before which `"gram"` computes its Gram matrix anew; empty for the others."""
    coefficients_name: str | None = field(default=None, compare=False)
    """The name by which the user gave the coefficients, for people to read."""

    def __str__(self) -> str:
        """Return the method, the dtype and the name of the coefficients: "gram fp16" or "gram fp16, cubic"."""
        named = "" if self.coefficients_name is None else f", {self.coefficients_name}"
        return f"{self.method} {_DTYPE_NAMES[self.compute_dtype]}{named}"

    @cached_property
    def entry_norm(self) -> float:
        """The Frobenius norm that matrices enter the polynomials with."""
        return 1.0 if self.method == "newton_schulz" else 1 / (1 + SAFETY)

    @cached_property
    def segments(self) -> list[tuple[int, int]]:
        """Half-open ranges (start, stop) of steps between products with the whole matrix; one step each if not gram."""
        steps = len(self.coefficients)
        return list(pairwise((0, *self.restarts, steps) if self.method == "gram" else range(steps + 1)))

    def flops(self, m: int, n: int) -> int:
        """Return the floating-point operations of one (m, n) matrix, a multiplication and an addition counted as two.

        With short side s and long side l, a segment of k steps has 4 s^2 l + (4 k - 3) 2 s^3: the standard form
        4 s^2 l + 2 s^3 per step. A cubic after the first step of a segment saves one product, 2 s^3. `"svd"` is an
        estimate (Golub and Van Loan, with both factors).
        """
        short, long = min(m, n), max(m, n)
        if self.method == "svd":
            return 8 * short * short * long + 20 * short**3
        cubics = sum(c == 0 for start, stop in self.segments for _, _, c in self.coefficients[start + 1 : stop])
        squares = sum(4 * (stop - start) - 3 for start, stop in self.segments) - cubics
        return 4 * short * short * long * len(self.segments) + 2 * short**3 * squares


def check_orthogonalizer(
    method: str,
    steps: int | None = None,
    *,
    coefficients: Polynomials | None = None,
    compute_dtype: torch.dtype | None = None,
) -> None:
    """Check the arguments of `orthogonalize`; a ValueError names the one that is wrong and the choices."""
    if method not in get_args(Method):
        raise ValueError(f"method={method!r}: choose one of {', '.join(map(repr, get_args(Method)))}")
    allowed = _SVD_DTYPES if method == "svd" else tuple(_DTYPE_NAMES)
    if compute_dtype is not None and compute_dtype not in allowed:
        raise ValueError(f"compute_dtype={compute_dtype}: {method!r} computes in {', '.join(map(str, allowed))}")
    if method == "svd":
        if coefficients is not None:
            raise ValueError("coefficients: 'svd' is exact and takes none")
        return
    if method == "newton_schulz" and isinstance(coefficients, str) and coefficients in WITHOUT_MARGIN:
        raise ValueError(
            f"coefficients={coefficients!r}: 'newton_schulz' starts from a norm of 1, and these polynomials need a "
            f"smaller one; choose 'auto', 'polar_express' or 'gram'"
        )
    _triples(method, steps, coefficients)


def resolve(
    method: str,
    m: int,
    n: int,
    *,
    steps: int | None = None,
    coefficients: Polynomials | None = None,
    compute_dtype: torch.dtype | None = None,
    device_type: str,
    dtype: torch.dtype = torch.float32,
) -> Form:
    """Return the form that `orthogonalize` runs for (m, n) matrices; arguments and errors as `check_orthogonalizer`.

    The size of the batch is no argument, so a matrix has the same form in every batch. The device type matters to
    `"auto"` only, the dtype of the matrices to `"svd"` only.
    """
    check_orthogonalizer(method, steps, coefficients=coefficients, compute_dtype=compute_dtype)
    if method == "svd":
        default = torch.float64 if dtype == torch.float64 else torch.float32
        return Form("svd", compute_dtype or default, (), ())
    triples = _triples(method, steps, coefficients)
    if method == "auto":
        form = _choose(m, n, triples, compute_dtype, device_type)
    elif method == "gram":
        form = _gram_form(m, n, triples, compute_dtype or torch.float16)
    elif method == "newton_schulz":
        form = Form("newton_schulz", compute_dtype or torch.bfloat16, triples, ())
    else:
        form = Form("polar_express", compute_dtype or torch.bfloat16, triples, ())
    return replace(form, coefficients_name=coefficients) if isinstance(coefficients, str) else form


def _choose(m: int, n: int, triples: Coefficients, compute_dtype: torch.dtype | None, device_type: str) -> Form:
    """Return the form that "auto" stands for: the standard or the Gram form, in the given or the fastest dtype."""
    dtype = compute_dtype or _fast_dtype(m, n, device_type)
    standard = Form("polar_express", dtype, triples, ())
    # The eight bits of bfloat16 are too few for the Gram form.
    if dtype == torch.bfloat16:
        return standard
    gram = _gram_form(m, n, triples, dtype)
    cheaper = gram.flops(m, n) <= _GRAM_SHARE * standard.flops(m, n)
    return gram if cheaper and min(m, n) >= _GRAM_MIN_SIDE else standard


def _fast_dtype(m: int, n: int, device_type: str) -> torch.dtype:
    """Return the dtype in which devices of a type multiply (m, n) matrices fastest."""
    # CUDA devices multiply float16 as fast as bfloat16 and eight times as exactly. "auto" takes it for the standard
    # form as well, so that the error hardly depends on the shape.
    if device_type == "cuda":
        return torch.float16
    is_slow = device_type == "cpu" and (min(m, n) < _BFLOAT16_MIN_SIDE or not cpu_multiplies_bfloat16())
    return torch.float32 if is_slow else torch.bfloat16


def _gram_form(m: int, n: int, triples: Coefficients, dtype: torch.dtype) -> Form:
    significant_bits = 1 - round(math.log2(torch.finfo(dtype).eps))
    is_long = max(m, n) >= _GRAM_LONG * min(m, n)
    # The higher limit needs at least float16's eleven bits (benchmarks/gram_error.py).
    amplification = _GRAM_LONG_AMPLIFICATION if is_long and significant_bits >= 11 else GRAM_AMPLIFICATION
    return Form("gram", dtype, triples, gram_restarts(triples, significant_bits, amplification))


def _triples(method: str, steps: int | None, coefficients: Polynomials | None) -> Coefficients:
    """Return one triple per step: the method's own, or a named or given list; a single triple is repeated."""
    if coefficients is None:
        coefficients = "muon" if method == "newton_schulz" else "polar_express"
    if isinstance(coefficients, str):
        return named_coefficients(coefficients, steps)
    try:
        rows: list[Any] = list(coefficients)
        is_single = len(rows) == 3 and all(isinstance(value, int | float) for value in rows)
        triples: Coefficients = tuple((float(a), float(b), float(c)) for a, b, c in ([rows] if is_single else rows))
    except (TypeError, ValueError):
        triples = ()
    if not triples or not all(math.isfinite(value) for triple in triples for value in triple):
        raise ValueError(
            f"coefficients={coefficients!r}: give one triple (a, b, c) of finite numbers, repeated for every step, or "
            f"a list with one triple per step"
        )
    return triples * checked_steps(DEFAULT_STEPS if steps is None else steps) if is_single else triples
