"""Measure the named sets of coefficients: where they bring singular values, and what rounding adds.

    python -m benchmarks.coefficients

Prints the Markdown table of docs/explanation/orthogonalization.md. Ranges are in float64, for singular values that are
divided by 1.02, as every method but "newton_schulz" does. Errors are the largest of a singular value, against float64,
over 12,000 matrices of 4 x 8 whose singular values lie at random places. Seeded; one minute on a CPU.
"""

import argparse
import itertools
from typing import get_args

import torch

from benchmarks.common.results import print_table
from benchmarks.gram_error import Exact, form_of, number, small_batches
from quintic.optim.polar import orthogonalize as module
from quintic.optim.polar.coefficients import SAFETY, Coefficients, gram_restarts
from quintic.optim.polar.named_coefficients import CoefficientsName, named_coefficients

HEADER = [
    "`coefficients=`",
    "steps",
    "[0.001, 1] ends in",
    "[0.01, 1] ends in",
    "1.02 ends at",
    "Gram restarts, fp16",
    "error in bf16",
    "in fp16",
    "Gram, fp16",
]
FORMS = (("standard", torch.bfloat16), ("standard", torch.float16), ("gram", torch.float16))


def image(s: torch.Tensor, coefficients: Coefficients) -> torch.Tensor:
    """Return where the composed polynomials bring singular values."""
    for a, b, c in coefficients:
        s = a * s + b * s**3 + c * s**5
    return s


def ends(lowest: float, coefficients: Coefficients) -> str:
    """Return the least and the largest image of [lowest, 1], as in "0.85 to 1.14"."""
    found = image(torch.logspace(0, torch.tensor(lowest).log10().item(), 400_001).double() / (1 + SAFETY), coefficients)
    return f"{found.min():.2f} to {found.max():.2f}"


def largest_errors(coefficients: Coefficients) -> list[str]:
    """Return for each of `FORMS` the largest error of a singular value among small matrices."""
    largest = torch.zeros(len(FORMS), dtype=torch.float64)
    # The first three batches are the smallest matrices, where errors average least.
    for _, x in itertools.islice(small_batches(), 3):
        exact = Exact(x, coefficients)
        found = [exact.errors(module.apply_form(x, form_of(*form, coefficients)))[1].max() for form in FORMS]
        largest = torch.maximum(largest, torch.stack(found))  # which keeps a NaN
    return [number(float(value)) for value in largest]


def row_of(name: CoefficientsName) -> list[str]:
    """Return the row of one set."""
    coefficients = named_coefficients(name)
    # Without the division: singular values above one are those of matrices whose norm is rounded.
    above = f"{image(torch.tensor(1 + SAFETY).double(), coefficients):.2f}"
    restarts = ", ".join(map(str, gram_restarts(coefficients, 11)))
    ranges = [ends(lowest, coefficients) for lowest in (1e-3, 1e-2)]
    return [f'`"{name}"`', str(len(coefficients)), *ranges, above, restarts, *largest_errors(coefficients)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    print_table(HEADER, [row_of(name) for name in get_args(CoefficientsName)])


if __name__ == "__main__":
    main()
