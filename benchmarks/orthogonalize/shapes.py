"""Shapes with their floors and limits, and the polynomials that results are measured against."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

STEPS = 5

# What a bf16 product of 8192 x 8192 matrices was seen to reach on an H200: floors at this rate compare across runs.
NOMINAL_TFLOPS = 790.0

# Quintic shall take no more than this share of the time of the fastest other library.
PEER_LIMIT = 0.85

# Stands for a contestant in the rows of the ceiling.
CEILING = "ceiling"

Triples = Sequence[tuple[float, float, float]]


@dataclass(frozen=True, order=True)
class Shape:
    """`batch` matrices of m x n; written as in "40x768x3072"."""

    batch: int
    m: int
    n: int

    @classmethod
    def parse(cls, text: str) -> "Shape":
        """Return the shape that `text` names.

        Raises:
            ValueError: not three positive numbers with an x between them.
        """
        try:
            batch, m, n = (int(part) for part in text.split("x"))
        except ValueError:
            raise ValueError(f"shape {text!r}: write BATCHxMxN, as in 40x768x3072") from None
        if min(batch, m, n) < 1:
            raise ValueError(f"shape {text!r}: every number must be at least 1")
        return cls(batch, m, n)

    def __str__(self) -> str:
        return f"{self.batch}x{self.m}x{self.n}"

    @property
    def square(self) -> bool:
        """Return whether the Gram form has nothing to gain."""
        return self.m == self.n


def floor_flops(shape: Shape, steps: int = STEPS) -> int:
    """Return the fewest floating-point operations known for `steps` quintic polynomials of every matrix of `shape`.

    A symmetric product counts half. With short side s and long side l, k steps from one Gram matrix cost s^2 l for the
    Gram matrix, 2 s^2 l for the product with the whole matrix and (4 k - 3) s^3 between them: the square of R, and from
    the second step on the product Q and two for R. The standard form is k = 1 at every step, the Gram form k = `steps`,
    with one restart in two parts.
    """
    short, long = sorted((shape.m, shape.n))

    def cost(parts: Sequence[int]) -> int:
        return sum(3 * short * short * long + (4 * k - 3) * short**3 for k in parts)

    forms = [[1] * steps, [steps], *([k, steps - k] for k in range(1, steps))]
    return shape.batch * min(cost(parts) for parts in forms)


def floor_ms(shape: Shape, tflops: float) -> float:
    """Return the milliseconds that `floor_flops` take at a rate of `tflops` TFLOP/s."""
    return floor_flops(shape) / tflops / 1e9


# Each with the largest multiple of the floor that Quintic is meant to take.
LIMITS = {
    Shape(40, 768, 768): 1.8,
    Shape(24, 768, 3072): 2.3,
    Shape(3, 768, 3072): 3.2,
    Shape(5, 768, 768): 2.6,
    Shape(1, 2048, 2048): 1.7,
    Shape(1, 2048, 6144): 1.9,
    Shape(28, 2048, 2048): 1.35,
    Shape(1, 4096, 4096): 1.25,
    Shape(1, 4096, 14336): 1.6,
    Shape(64, 1408, 2048): 1.6,
    Shape(1, 7168, 7168): 1.2,
}


@dataclass(frozen=True)
class Polynomials:
    """A contestant's polynomials: odd quintics of a matrix whose Frobenius norm was divided by 1 + `safety`."""

    triples: Triples
    safety: float = 0.0

    def apply(self, x: Any) -> Any:
        """Return the polynomials of `x`, (batch, m, n), as the Muon post writes them, in the dtype of `x`.

        In float64 this is the reference of contestants.
        """
        x = x / (x.norm(dim=(-2, -1), keepdim=True) * (1 + self.safety) + 1e-7)
        transposed = x.shape[-2] > x.shape[-1]
        if transposed:
            x = x.mT
        for a, b, c in self.triples:
            gram = x @ x.mT
            x = a * x + (b * gram + c * (gram @ gram)) @ x
        return x.mT if transposed else x
