"""The matrix products of an orthogonalisation, as a list: what `orthogonalize.py` runs, with whatever multiplies.

For a segment of steps (see `Form.segments`), with coefficients (a, b, c) at each step:

    g = x x^T                          gram      on the short side of x
    p = a I + b g + c g g              square
    q = p, or q p                      square    the polynomials so far, all of which commute
    g = p (g p)                        square    twice; what x x^T would be after this step
    x = q x                            apply     after the last step; or x q, where x is tall

Every small result is symmetric up to rounding. Where it is not to the bit, `a b` must be that, and not `a b^T`: with
transposes in between the differences grow from product to product, and so do the errors. Entries of x may be scaled up
(see `_ENTRY_NORM`): g then carries the square of the scale, and the products that read it divide it out.

Which kernels multiply is decided in kernels/dispatch.py.
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
    """out = alpha a b + beta c + diagonal I, rounded once. Matrix 0 is x; every product makes the next one."""

    kind: Literal["gram", "square", "apply"]
    a: int
    b: int
    """gram: a and b are x, and b is transposed. apply: a is small, b is x; the product is b a where x is tall."""
    alpha: float
    c: int | None = None
    beta: float = 0.0
    diagonal: float = 0.0


class Program(NamedTuple):
    """The products in order, and what follows from them about memory."""

    products: tuple[Product, ...]
    last_uses: tuple[int, ...]
    """For each matrix the number of the product that reads it last; the result's is the number of products."""
    slots: tuple[int, ...]
    """For each matrix a place in memory: 0 or 1 for whole ones, 0 to num_squares - 1 for small ones."""
    num_squares: int


@functools.lru_cache(maxsize=64)
def products_of(segments: tuple[tuple[int, int], ...], coefficients: Coefficients, norm: float) -> Program:
    """Return the products of a form. The entries of x come multiplied with a norm, those of the result do not."""
    products: list[Product] = []

    def add(product: Product) -> int:
        products.append(product)
        return len(products)

    x, scale = 0, norm
    for start, stop in segments:
        g = add(Product("gram", x, x, 1.0))
        square = scale**2
        q: int | None = None
        for step in range(start, stop):
            a, b, c = coefficients[step]
            p = add(Product("square", g, g, c / square**2, g, b / square, a))
            q = p if q is None else add(Product("square", q, p, 1.0))
            if step + 1 < stop:
                half = add(Product("square", g, p, 1.0 / square))
                g = add(Product("square", p, half, 1.0))
            square = 1.0
        assert q is not None
        x = add(Product("apply", q, x, 1.0 / scale))
        scale = 1.0
    return _placed(tuple(products))


def _placed(products: tuple[Product, ...]) -> Program:
    """Give every matrix a place that no product reads any more, not even a product that may still be running.

    On a GPU a product begins with rows that the one before has finished. A row of a small product has read all rows of
    the products before it, a row of an `apply` only a row: at most two products run before their forerunners are over.
    """
    last_uses = [len(products)] * (len(products) + 1)
    for number, product in enumerate(products):
        for matrix in (product.a, product.b, product.c):
            if matrix is not None:
                last_uses[matrix] = number
    slots = [0]
    whole = 0
    free_after: list[int] = []  # for each place of a small matrix, the product after which it is free
    for number, product in enumerate(products):
        if product.kind == "apply":
            whole = 1 - whole
            slots.append(whole)
            continue
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

    `x` has one tensor, normalised and contiguous, which is taken out of the list and freed as soon as it is not needed.
    """
    matrices: dict[int, Tensor] = {0: x.pop()}
    wide = matrices[0].shape[-2] <= matrices[0].shape[-1]
    for number, product in enumerate(program.products):
        a, b = matrices[product.a], matrices[product.b]
        c = None if product.c is None else matrices[product.c]
        if product.kind == "apply":
            left, right = (a, b) if wide else (b, a)
        else:
            left, right = (a, b) if product.kind == "square" else (a, b.mT) if wide else (a.mT, b)
        terms = {"alpha": product.alpha, "c": c, "beta": product.beta, "diagonal": product.diagonal}
        is_last = number + 1 == len(program.products)
        symmetric = product.kind != "apply"
        matrices[number + 1] = multiply(left, right, symmetric=symmetric, dtype=dtype if is_last else None, **terms)
        del a, b, c, left, right, terms
        for matrix in [matrix for matrix in matrices if program.last_uses[matrix] == number]:
            del matrices[matrix]
    return matrices[len(program.products)]


def run_queue(program: Program, pair: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the result of a program, (batch, m, n), computed in one launch on a Hopper GPU.

    The pair is (2, batch, m, n) contiguous, with the normalised matrices in [0], and is overwritten. A result with as
    many bits is one half of the pair.
    """
    from quintic.kernels.products.hopper_program import run_program

    _, batch, m, n = pair.shape
    side = min(m, n)
    squares = pair.new_empty((program.num_squares, batch, side, side))
    table, scalars = _tables(program, m, n, pair.device)
    result = pair[program.slots[-1]]
    if dtype in (torch.bfloat16, torch.float16):
        result = result.view(dtype)
    run_program(pair, squares, result, table, scalars)
    return result if dtype is None else result.to(dtype)


@functools.lru_cache(maxsize=256)
def _tables(program: Program, m: int, n: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return a program as the kernel reads it, on its device: uploaded once, and never changed."""
    from quintic.kernels.products.hopper_program import APPLY, GRAM, SQUARE, Step, steps_table

    kinds = {"gram": GRAM.value, "square": SQUARE.value, "apply": APPLY.value}
    slots = program.slots
    steps = [
        Step(kinds[kind], slots[a], slots[b], None if c is None else slots[c], slots[number + 1], alpha, beta, diagonal)
        for number, (kind, a, b, alpha, c, beta, diagonal) in enumerate(program.products)
    ]
    table, scalars = steps_table(steps, m, n)
    return upload(table, device), upload(scalars, device)
