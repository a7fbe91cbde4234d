"""Measure what rounding costs the forms of orthogonalisation, against float64 evaluation of the same polynomials.

    python -m benchmarks.gram_error > benchmarks/results/DATE-gram-error.md

Prints Markdown. Five questions, one section each: how large is the error of each form, for spectra from flat to
singular (every shape, then more steps); where should the Gram form restart (the worst of thousands of small matrices,
for every place of at most two restarts); does the rule hold for other polynomials; is its limit the right one; why do
matrices enter with a norm of 128 instead of 1. Everything is seeded and runs on the CPU, in one thread, in ten minutes.
"""

import argparse
import dataclasses
import itertools
import math
import platform
import sys
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from benchmarks.common.results import print_table, recorded_command
from quintic.optim.polar import orthogonalize as module
from quintic.optim.polar.coefficients import (
    SAFETY,
    Coefficients,
    gram_restarts,
    newton_schulz_coefficients,
    polar_express_coefficients,
)
from quintic.optim.polar.forms import Form, resolve

# Rows of every table of errors: method, dtype.
FORMS = [
    ("standard", torch.bfloat16),
    ("gram", torch.bfloat16),
    ("standard", torch.float16),
    ("gram", torch.float16),
    ("standard", torch.float32),
    ("gram", torch.float32),
]
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
SHAPES = [(256, 256), (256, 512), (256, 1024), (512, 2048)]
FAMILIES = {"polar_express": polar_express_coefficients, "newton_schulz": newton_schulz_coefficients}

SPEEDRUN_TRIPLES = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
OTHER_LISTS: dict[str, Coefficients] = {
    "Polar Express, 5 steps": polar_express_coefficients(5),
    "Polar Express, 6 steps": polar_express_coefficients(6),
    "Polar Express, 7 steps": polar_express_coefficients(7),
    "Polar Express, 8 steps": polar_express_coefficients(8),
    "Polar Express, 8 steps, cushion 0": polar_express_coefficients(8, cushion=0.0),
    "Polar Express, 8 steps, cushion 0.1": polar_express_coefficients(8, cushion=0.1),
    "Polar Express, 8 steps, cushion 0.5, from 0.01": polar_express_coefficients(8, cushion=0.5, lower_bound=0.01),
    "Muon post, 5 steps": newton_schulz_coefficients(5),
    "Muon post, 8 steps": newton_schulz_coefficients(8),
    "speedrun's hand-tuned five": SPEEDRUN_TRIPLES,
    "cubic Newton-Schulz, 10 steps": ((1.5, -0.5, 0.0),) * 10,
}


def form_of(
    kind: str,
    dtype: torch.dtype,
    coefficients: Coefficients,
    restarts: tuple[int, ...] | None = None,
    shape: tuple[int, int] = (1, 1),
) -> Form:
    """Return the form for a shape whose matrices are all normalised alike, whatever the polynomials."""
    method = "gram" if kind == "gram" else "polar_express"
    form = resolve(method, *shape, coefficients=coefficients, compute_dtype=dtype, device_type="cpu")
    return form if restarts is None else dataclasses.replace(form, restarts=restarts)


def spectra(m: int, n: int) -> dict[str, Tensor]:
    """Return one (m, n) float64 matrix for each kind of gradient one can meet."""
    rng = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    u, v = torch.linalg.qr(normal(m, m))[0], torch.linalg.qr(normal(n, m))[0]
    zero_rows = normal(m, n)
    zero_rows[m // 4 : m // 2] = 0
    found = {"gaussian": normal(m, n)}
    for exponent in (0, 2, 4, 6):
        found[f"cond 1e{exponent}"] = (u * torch.logspace(0, -exponent, m, dtype=torch.float64)) @ v.T
    found["rank n/8"] = normal(m, m // 8) @ normal(m // 8, n)
    found["one dominant"] = normal(m, n) / math.sqrt(n) + 100 * normal(m, 1) @ normal(1, n) / math.sqrt(m * n)
    found["zero rows"] = zero_rows
    found["row scales"] = normal(m, n) * torch.exp(3 * normal(m, 1))
    return found


def small_batches() -> Iterator[tuple[str, Tensor]]:
    """Yield thousands of small matrices, where rounding errors are the largest and averaging cannot hide them."""
    rng = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=rng, dtype=torch.float64)

    for b, m, n in ((4000, 4, 8), (2000, 16, 32), (200, 64, 96)):
        u, v = torch.linalg.qr(normal(b, m, m))[0], torch.linalg.qr(normal(b, n, m))[0]
        levels = 10 ** (-4 * uniform(b, 3))
        levels[:, 0] = 1
        which = torch.randint(1, 3, (b, m), generator=rng)
        which[:, 0] = 0
        yield "levels", (u * levels.gather(1, which)[:, None]) @ v.mT
        yield "random", (u * 10 ** (-5 * uniform(b, 1, m))) @ v.mT
        parallel = normal(b, m, n) * 10 ** (-4 * uniform(b, 1, 1))
        parallel[:, : min(m, 6)] = normal(b, 1, n) + 10 ** (-4 * uniform(b, 1, 1)) * normal(b, min(m, 6), n)
        yield "parallel rows", parallel


class Exact:
    """The polynomials of a batch's singular values, in float64."""

    def __init__(self, x: Tensor, coefficients: Coefficients) -> None:
        self.u, s, self.vh = torch.linalg.svd(x, full_matrices=False)
        s = s / torch.linalg.vector_norm(s, dim=-1, keepdim=True) / (1 + SAFETY)
        for a, b, c in coefficients:
            s = a * s + b * s**3 + c * s**5
        self.s = s
        self.norm = torch.linalg.vector_norm(s, dim=-1)

    def errors(self, out: Tensor) -> tuple[Tensor, Tensor]:
        """Return, for each matrix, the relative Frobenius error and the largest error of a singular value."""
        rotated = self.u.mT @ out.double() @ self.vh.mT
        singular = (rotated.diagonal(dim1=-2, dim2=-1) - self.s).abs().amax(-1)
        difference = out.double() - (self.u * self.s.unsqueeze(-2)) @ self.vh
        return torch.linalg.vector_norm(difference, dim=(-2, -1)) / self.norm, singular


def number(value: float) -> str:
    """Return two digits, or what is not a number as such."""
    return f"{value:.1e}" if math.isfinite(value) else "diverges"


def error_tables(m: int, n: int, steps: int) -> None:
    """Print the errors of every form for one shape."""
    matrices = spectra(m, n)
    for family, generate in FAMILIES.items():
        coefficients = generate(steps)
        exact = {name: Exact(x, coefficients) for name, x in matrices.items()}
        rows = []
        for kind, dtype in FORMS:
            form = form_of(kind, dtype, coefficients, shape=(m, n))
            label = f"{kind} {NAMES[dtype]}" + (f", restarts {form.restarts}" if kind == "gram" else "")
            cells = [exact[name].errors(module.apply_form(x, form)) for name, x in matrices.items()]
            rows.append([label, *(f"{number(float(norm))} / {number(float(one))}" for norm, one in cells)])
        print(f"### {family}, {steps} steps, {m} x {n}\n")
        print_table(["form", *matrices], rows)


def worst(coefficients: Coefficients, forms: Mapping[str, Form]) -> list[list[str]]:
    """Return one row per form: the mean Frobenius error and the worst singular value, for each kind of small batch."""
    kinds: dict[str, list[list[tuple[float, float]]]] = {}
    for kind, x in small_batches():
        exact = Exact(x, coefficients)
        found = []
        for form in forms.values():
            norm, one = exact.errors(module.apply_form(x, form))
            found.append((float(norm.mean()), float(one.max())))
        kinds.setdefault(kind, []).append(found)
    rows = []
    for index, name in enumerate(forms):
        cells = [[found[index] for found in batches] for batches in kinds.values()]
        # max() would hide a NaN; sum() and sorting by "not finite" do not.
        rows.append(
            [name, *(f"{number(_max(mean for mean, _ in c))} / {number(_max(w for _, w in c))}" for c in cells)]
        )
    return rows


def _max(values: Iterator[float]) -> float:
    found = list(values)
    return max(found) if all(map(math.isfinite, found)) else math.inf


def restart_table() -> None:
    """Print what every placement of at most two restarts costs in operations and in exactness."""
    coefficients = polar_express_coefficients(5)
    for dtype in (torch.float16, torch.bfloat16):
        forms = {
            "standard bf16": form_of("standard", torch.bfloat16, coefficients),
            "standard fp16": form_of("standard", torch.float16, coefficients),
        }
        for count in range(3):
            for restarts in itertools.combinations(range(1, 5), count):
                form = form_of("gram", dtype, coefficients, restarts)
                share = form.flops(256, 1024) / forms["standard fp16"].flops(256, 1024)
                forms[f"gram {NAMES[dtype]} {restarts}, {share:.0%} of the operations"] = form
        print_table(["form", "levels", "random", "parallel rows"], worst(coefficients, forms))


def restart_spectra_table() -> None:
    """Print the errors of some placements for matrices of ordinary size."""
    coefficients = polar_express_coefficients(5)
    for m, n in ((256, 256), (256, 1024)):
        matrices = spectra(m, n)
        exact = {name: Exact(x, coefficients) for name, x in matrices.items()}
        rows = []
        for kind, dtype, restarts in [
            ("standard", torch.bfloat16, None),
            ("standard", torch.float16, None),
            *(("gram", torch.float16, restarts) for restarts in ((2,), (3,), (1, 3), (2, 4))),
        ]:
            form = form_of(kind, dtype, coefficients, restarts)
            label = f"{kind} {NAMES[dtype]}" + (f" {restarts}" if restarts else "")
            errors = [exact[name].errors(module.apply_form(x, form))[0] for name, x in matrices.items()]
            rows.append([label, *(number(float(error)) for error in errors)])
        print_table([f"Frobenius, {m} x {n}", *matrices], rows)


def limit_table() -> None:
    """Print what other limits of the amplification would place, cost and leave."""
    rows = []
    for name in ("Polar Express, 5 steps", "Polar Express, 8 steps", "Muon post, 5 steps", "Muon post, 8 steps"):
        coefficients = OTHER_LISTS[name]
        standard = form_of("standard", torch.float16, coefficients)
        forms = {"standard": standard}
        for limit in (30.0, 60.0, 120.0, 240.0, 480.0):
            form = form_of("gram", torch.float16, coefficients, gram_restarts(coefficients, 11, limit))
            share = form.flops(256, 1024) / standard.flops(256, 1024)
            forms[f"{limit:g}: {form.restarts}, {share:.0%} of the operations"] = form
        rows += [[name if index == 0 else "", *row] for index, row in enumerate(worst(coefficients, forms))]
    print_table(["polynomials", "limit: restarts", "levels", "random", "parallel rows"], rows)


def side_table() -> None:
    """Print how the two forms compare for Gaussian matrices of small and larger sides, in float16."""
    rng = torch.Generator().manual_seed(2)
    coefficients = polar_express_coefficients(5)
    rows = []
    for m in (16, 32, 64, 96, 128, 192, 256, 384):
        x = torch.randn(8, m, 4 * m, generator=rng, dtype=torch.float64)
        exact, cells = Exact(x, coefficients), []
        for kind in ("standard", "gram"):
            errors = exact.errors(module.apply_form(x, form_of(kind, torch.float16, coefficients)))[0]
            cells += [number(float(errors.mean())), number(float(errors.max()))]
        rows.append([f"{m} x {4 * m}", *cells])
    print_table(["shape", "standard, mean", "standard, largest", "gram, mean", "gram, largest"], rows)


def rule_table() -> None:
    """Print the rule's restarts and the errors they leave for many lists of polynomials."""
    rows = []
    for name, coefficients in OTHER_LISTS.items():
        for dtype, bits in ((torch.float16, 11), (torch.bfloat16, 8), (torch.float32, 24)):
            forms = {kind: form_of(kind, dtype, coefficients) for kind in ("standard", "gram")}
            standard, gram = worst(coefficients, forms)
            restarts = str(gram_restarts(coefficients, bits))
            rows += [[name, NAMES[dtype], "standard", *standard[1:]], ["", "", f"gram {restarts}", *gram[1:]]]
    print_table(["polynomials", "dtype", "form", "levels", "random", "parallel rows"], rows)


def norm_table() -> None:
    """Print the error in float16 for matrices that enter with a Frobenius norm of 1, and as they do."""
    rows = []
    for steps in (5, 8):
        coefficients = polar_express_coefficients(steps)
        for m, n in ((256, 1024), (512, 2048)):
            for name in ("gaussian", "row scales"):
                x = spectra(m, n)[name]
                exact, form = Exact(x, coefficients), form_of("standard", torch.float16, coefficients)
                cells = [number(float(exact.errors(module.apply_form(x, form))[0]))]
                before, module._ENTRY_NORM = module._ENTRY_NORM, 1.0
                cells.insert(0, number(float(exact.errors(module.apply_form(x, form))[0])))
                module._ENTRY_NORM = before
                bf16 = form_of("standard", torch.bfloat16, coefficients)
                cells.append(number(float(exact.errors(module.apply_form(x, bf16))[0])))
                rows.append([f"{name}, {m} x {n}, {steps} steps", *cells])
    print_table(["matrix", "fp16, norm 1", f"fp16, norm {module._ENTRY_NORM:g}", "bf16"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one shape, five steps")
    options = parser.parse_args()
    torch.set_num_threads(1)
    command = recorded_command("benchmarks.gram_error", sys.argv[1:], {})
    print("# Rounding errors of the forms of orthogonalisation\n")
    print(
        f"`{command}`; Python {platform.python_version()}, torch {torch.__version__}; 2-core CPU, one thread; seeded.\n"
    )
    print(
        "float16 products are computed as on a GPU: float16 operands, float32 sums, one rounding. The reference is the"
    )
    print("same polynomial of the singular values in float64, of the matrix before it is rounded. Where a cell has two")
    print("numbers: relative Frobenius error / largest error of a singular value.\n")
    print("## Errors by spectrum\n")
    for m, n in SHAPES[2:3] if options.quick else SHAPES:
        error_tables(m, n, 5)
    if not options.quick:
        print("## More steps\n")
        for steps in (6, 7, 8):
            error_tables(256, 1024, steps)
        print("## The side from which the Gram form is as exact\n")
        print("Relative Frobenius error of 8 Gaussian matrices, float16, Polar Express, 5 steps.\n")
        side_table()
    print("## Where to restart (Polar Express, 5 steps)\n")
    print("Worst of 6200 matrices of 4 x 8, 16 x 32 and 64 x 96 for each kind: the largest mean Frobenius error of a")
    print("shape / the largest error of a singular value. Operations for 256 x 1024.\n")
    restart_table()
    restart_spectra_table()
    if not options.quick:
        print("## The rule for other polynomials\n")
        print("The same matrices and numbers.\n")
        rule_table()
        print("## The limit\n")
        print("The same matrices and numbers, in float16, for other limits of the amplification than 60.\n")
        limit_table()
    print("## The norm that matrices enter with\n")
    print("Relative Frobenius error. `row scales`: rows of normal numbers, each times exp(3 z) with z normal.\n")
    norm_table()


if __name__ == "__main__":
    main()
