"""The matrix products of an orthogonalisation as a list, which `orthogonalize.py` runs with any implementation of them.

For x of shape (batch, m, n) and `side` = min(m, n), one segment of steps (see `Form.segments`) with coefficients
(a, b, c) at each step computes

    g = x x^T                          gram      (batch, side, side), on the short side of x
    p = a I + b g + c g g              square
    q = p, or q p                      square    the polynomials so far; all of them commute
    g = p (g p)                        square    two products; x x^T as it would be after this step
    x = q x                            apply     (batch, m, n), after the last step; x q for tall x

A cubic, c = 0, needs no p after the first step of a segment: q = a q + b q g, and g = a h + b g h with h = a g + b g g.
Every (side, side) result is symmetric up to rounding. `square` must multiply a by b and not by b^T although they are
nearly equal: with transposes in between, the asymmetry would grow from product to product, and the errors with it.
Entries of x may be scaled up (see `_ENTRY_NORM`): g then carries the square of the scale, and the products that read it
divide it out.

kernels/products/choose_products.py decides which kernels multiply.
"""

import functools
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from quintic.kernels.products.choose_products import ProductKernels
from quintic.optim.polar.coefficients import Coefficients
from quintic.optim.polar.products import Multiply, multiply
from quintic.optim.rules.device import upload

__all__ = ["Product", "Program", "multiplier", "products_of", "run_products", "run_queue"]


class Product(NamedTuple):
    """out = alpha a b + beta c + diagonal I, rounded once; a, b, c are indices of matrices.

    Matrix 0 is x; product k of the list makes matrix k + 1.
    """

    kind: Literal["gram", "square", "apply"]
    a: int
    b: int
    """gram: a and b are x, and b is transposed. apply: a is (side, side), b is x; the product is b a for tall x."""
    alpha: float
    c: int | None = None
    beta: float = 0.0
    diagonal: float = 0.0


class Program(NamedTuple):
    """The products in order, and for each matrix its last use and its place in memory."""

    products: tuple[Product, ...]
    last_uses: tuple[int, ...]
    """For each matrix the index of the product that reads it last; for the result the number of products."""
    slots: tuple[int, ...]
    """For each matrix its buffer: 0 or 1 of the (m, n) ones, 0 to num_squares - 1 of the (side, side) ones."""
    num_squares: int
    """How many (side, side) buffers there are."""


@functools.lru_cache(maxsize=64)
def products_of(segments: tuple[tuple[int, int], ...], coefficients: Coefficients, norm: float) -> Program:
    """Return the products of a form for an x whose entries are multiplied by `norm`; the result's entries are not."""
    products: list[Product] = []

    def add(product: Product) -> int:
        products.append(product)
        return len(products)

    x, scale = 0, norm
    for start, stop in segments:
        g = add(Product("gram", x, x, 1.0))
        excess = scale**2  # the factor that g is too large by
        q: int | None = None
        for step in range(start, stop):
            a, b, c = coefficients[step]
            if c == 0 and q is not None:
                q = add(Product("square", q, g, b, q, a))
                if step + 1 < stop:
                    half = add(Product("square", g, g, b, g, a))
                    g = add(Product("square", g, half, b, half, a))
                continue
            p = add(Product("square", g, g, c / excess**2, g, b / excess, a))
            q = p if q is None else add(Product("square", q, p, 1.0))
            # The next step's g; the last step of a segment needs none.
            if step + 1 < stop:
                half = add(Product("square", g, p, 1.0 / excess))
                g = add(Product("square", p, half, 1.0))
            excess = 1.0
        assert q is not None
        x = add(Product("apply", q, x, 1.0 / scale))
        scale = 1.0
    return _placed(tuple(products))


def _placed(products: tuple[Product, ...]) -> Program:
    """Give every matrix a buffer that no running product still reads.

    The GPU kernel that runs the whole list starts a product as soon as the product before it has finished the rows that
    are needed. A row of a gram or square product needs all rows of the product before it, a row of an `apply` only one.
    So a product may overlap the one before it, and the two before it if the last was an `apply`.
    """
    last_uses = [len(products)] * (len(products) + 1)
    for number, product in enumerate(products):
        for matrix in (product.a, product.b, product.c):
            if matrix is not None:
                last_uses[matrix] = number
    slots = [0]  # x
    whole = 0
    free_after: list[int] = []  # for each place of a small matrix, the product after which it is free
    for number, product in enumerate(products):
        # x alternates between the two (m, n) buffers.
        if product.kind == "apply":
            whole = 1 - whole
            slots.append(whole)
            continue
        # A (side, side) result takes the first buffer whose last reader is surely over, or a new one.
        overlap = 2 if number and products[number - 1].kind == "apply" else 1
        free = [place for place, last in enumerate(free_after) if last < number - overlap]
        place = free[0] if free else len(free_after)
        if not free:
            free_after.append(0)
        free_after[place] = last_uses[number + 1]
        slots.append(place)
    return Program(products, tuple(last_uses), tuple(slots), len(free_after))


def multiplier(kernels: ProductKernels | None) -> Multiply:
    """Return the function that computes one product with these kernels, None for plain PyTorch."""
    if kernels == "hopper":
        from quintic.kernels.products.hopper import hopper_multiply

        return hopper_multiply
    return _multiply_symmetric if kernels == "symmetric" else multiply


def _multiply_symmetric(
    a: Tensor, b: Tensor, *, symmetric: bool, dtype: torch.dtype | None = None, **terms: Any
) -> Tensor:
    from quintic.kernels.products.symmetric import symmetric_multiply

    return symmetric_multiply(a, b, **terms) if symmetric else multiply(a, b, symmetric=False, dtype=dtype, **terms)


def run_products(program: Program, x: list[Tensor], multiply: Multiply, dtype: torch.dtype | None = None) -> Tensor:
    """Return a program's result, (batch, m, n), in `dtype` or that of x, computed product by product.

    `x` is a list of one tensor, (batch, m, n), normalised and contiguous; it is removed and freed after its last use.
    """
    matrices: dict[int, Tensor] = {0: x.pop()}
    wide = matrices[0].shape[-2] <= matrices[0].shape[-1]
    for number, product in enumerate(program.products):
        a, b = matrices[product.a], matrices[product.b]
        c = None if product.c is None else matrices[product.c]
        # Orient the operands: q x or x q; g p; x x^T or x^T x.
        if product.kind == "apply":
            left, right = (a, b) if wide else (b, a)
        else:
            left, right = (a, b) if product.kind == "square" else (a, b.mT) if wide else (a.mT, b)
        terms = {"alpha": product.alpha, "c": c, "beta": product.beta, "diagonal": product.diagonal}
        is_last = number + 1 == len(program.products)
        symmetric = product.kind != "apply"
        matrices[number + 1] = multiply(left, right, symmetric=symmetric, dtype=dtype if is_last else None, **terms)
        # Free every matrix that no later product reads.
        del a, b, c, left, right, terms
        for matrix in [matrix for matrix in matrices if program.last_uses[matrix] == number]:
            del matrices[matrix]
    return matrices[len(program.products)]


def run_queue(program: Program, pair: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the result of a program, (batch, m, n), computed in one launch on a Hopper GPU.

    `pair` is (2, batch, m, n) contiguous, with the normalised matrices in [0], and is overwritten. The result is a view
    of one half of it, unless `dtype` has another width.
    """
    from quintic.kernels.products.hopper_program import run_program

    _, batch, m, n = pair.shape
    side = min(m, n)
    squares = pair.new_empty((program.num_squares, batch, side, side))
    table, scalars = _tables(program, m, n, pair.device)
    result = pair[program.slots[-1]]
    # The kernel writes either 16-bit dtype, whichever the products have; a wider one is cast afterwards.
    if dtype in (torch.bfloat16, torch.float16):
        result = result.view(dtype)
    run_program(pair, squares, result, table, scalars)
    return result if dtype is None else result.to(dtype)


@functools.lru_cache(maxsize=256)
def _tables(program: Program, m: int, n: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return a program as the kernel reads it, on its device; uploaded once per program and shape."""
    from quintic.kernels.products.hopper_program import APPLY, GRAM, SQUARE, Step, steps_table

    kinds = {"gram": GRAM.value, "square": SQUARE.value, "apply": APPLY.value}
    slots = program.slots
    steps = [
        Step(kinds[kind], slots[a], slots[b], None if c is None else slots[c], slots[number + 1], alpha, beta, diagonal)
        for number, (kind, a, b, alpha, c, beta, diagonal) in enumerate(program.products)
    ]
    table, scalars = steps_table(steps, m, n)
    return upload(table, device), upload(scalars, device)
