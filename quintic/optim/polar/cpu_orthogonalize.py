"""Orthogonalisation on CPUs: the polynomials of a `Form`, computed for caches and for the libraries' products.

They are those of `program.py`, but no product has a diagonal: the parts of p = a I + s are kept apart, because
bfloat16 would round the large entries of p's diagonal with every product. Of a segment of steps is computed

    g = x x^T
    s = b g + c g g                               so that p = a I + s
    A, q = a A, s q + (a q + A s)                 so that A I + q is the product of the polynomials so far
    h = g s + a g, then g = s h + a h             what x x^T would be after this step
    x = A x + q x                                 after the last step; or A x + x q, where x is tall

Small matrices are multiplied together: calling the libraries takes longer than their products. The last bit may then
follow from how many there are, so that a batch is compared once with its matrices alone, and is not computed together
where they differ. Large matrices are computed one after the other, in the same memory, which stays in the caches; of
their symmetric products only blocks up to the diagonal.
"""

import functools
import math
import threading
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from quintic.optim.polar.forms import Form
from quintic.optim.polar.products import SMALL_PRODUCT

__all__ = ["iterate_on_cpu", "iterates_on_cpu", "iteration_bytes"]

# From this short side on a matrix fills the cores by itself (2 cores, benchmarks/cpu_step.py).
_ALONE_SIDE = 512

# Rows of a symmetric product in one call, at least, if its sums are long: with fewer, calls take more than they save.
_BLOCK_ROWS = 256

# The small matrices of `_iterate`.
_NUM_SMALL = 5

# Bytes of memory that a thread keeps for the next call, at most.
_MAX_KEPT = 2**26

# Bytes between whose multiples matrices start, as new tensors do.
_LINE = 64

# Frobenius norms for which no square of an entry that counts leaves float32's range.
_MIN_NORM, _MAX_NORM = 1e-15, 1e15


def iterates_on_cpu(form: Form, m: int, n: int) -> bool:
    """Return whether `iterate_on_cpu` takes (m, n) matrices.

    PyTorch's float16 products are slow here, and those of the smallest bfloat16 matrices are computed in another way
    when there are many: `products.multiply` takes them in float32.
    """
    if form.method == "svd" or form.compute_dtype == torch.float16:
        return False
    return form.compute_dtype != torch.bfloat16 or min(m, n) ** 3 > SMALL_PRODUCT


def iterate_on_cpu(x: Tensor, form: Form, norm: float, dtype: torch.dtype | None = None) -> Tensor:
    """Return the form's polynomials of `x`, (batch, m, n) not empty, scaled to a Frobenius norm; without autograd.

    The result is a new contiguous tensor, of the products' dtype unless another is given. A matrix has the bits that it
    has alone.
    """
    x = x.contiguous()  # sums over rows of another order in memory end in other bits
    batch, m, n = x.shape
    result = x.new_empty(x.shape, dtype=dtype or form.compute_dtype)
    together = 1
    if batch > 1 and min(m, n) < _ALONE_SIDE and _is_the_same_alone(batch, m, n, form, torch.get_num_threads()):
        together = batch
    memory = _Buffers.of(together, m, n, form.compute_dtype)
    for part, target in zip(x.split(together), result.split(together), strict=True):
        _iterate(part, form, norm, memory, target)
    return result


def iteration_bytes(form: Form, batch: int, m: int, n: int, direction: torch.dtype) -> int:
    """Return an upper bound of what `iterate_on_cpu` allocates, its result included, for directions of a dtype."""
    dtype, together = form.compute_dtype, batch if min(m, n) < _ALONE_SIDE else 1
    memory = together * (2 * m * n + _NUM_SMALL * min(m, n) ** 2)
    if dtype == torch.bfloat16:
        # oneDNN copies matrices whose sides are no multiples of 8, and a little of others (seen with two threads).
        aligned = m % 8 == 0 == n % 8
        memory += 2**15 if aligned else 2**14 + 2 * (m + 63) * (n + 63) + (min(m, n) + 63) ** 2
    lines = _LINE * (2 + _NUM_SMALL)
    running = lines + dtype.itemsize * memory + _scaling_bytes(direction, dtype, together, m, n)
    comparing = lines + dtype.itemsize * (memory + (batch + 1) * m * n) + _scaling_bytes(dtype, dtype, together, m, n)
    return dtype.itemsize * batch * m * n + (max(running, comparing) if together > 1 else running)


def _scaling_bytes(direction: torch.dtype, dtype: torch.dtype, batch: int, m: int, n: int) -> int:
    """Return the bytes that `_normalize` allocates: it computes norms, and casts to another dtype, in a wide one."""
    wide = torch.promote_types(torch.promote_types(direction, dtype), torch.float32)
    widened = batch if wide != direction else 1 if wide != dtype else 0
    return wide.itemsize * (widened * m * n + batch * (m + 4)) + 64


@functools.lru_cache(maxsize=1024)
def _is_the_same_alone(batch: int, m: int, n: int, form: Form, threads: int) -> bool:
    """Return whether so many matrices have the bits that each has alone, on this machine."""
    generator = torch.Generator("cpu")
    together = torch.empty((batch, m, n), dtype=form.compute_dtype, device="cpu")
    for number, matrix in enumerate(together):
        matrix.normal_(generator=generator.manual_seed(number))
    _iterate(together, form, 1.0, _Buffers.of(batch, m, n, form.compute_dtype), together)
    memory, alone = _Buffers.of(1, m, n, form.compute_dtype), torch.empty_like(together[:1])
    for number, expected in enumerate(together.split(1)):
        _iterate(alone.normal_(generator=generator.manual_seed(number)), form, 1.0, memory, alone)
        if not torch.equal(alone, expected):
            return False
    return True


class _Kept(threading.local):
    """Memory of a thread that the next call uses again: new memory costs as much as some of the products."""

    buffer: Tensor | None = None


_KEPT = _Kept()


class _Buffers(NamedTuple):
    """Memory that one batch after the other writes to: two whole ones, (batch, m, n), and small ones."""

    whole: list[Tensor]
    small: list[Tensor]

    @classmethod
    def of(cls, batch: int, m: int, n: int, dtype: torch.dtype) -> "_Buffers":
        side = min(m, n)
        shapes = [(batch, m, n)] * 2 + [(batch, side, side)] * _NUM_SMALL
        sizes = [-(-math.prod(shape) * dtype.itemsize // _LINE) * _LINE for shape in shapes]
        buffer = _KEPT.buffer
        if buffer is None or buffer.numel() < sum(sizes):
            _KEPT.buffer = None  # before there is more
            buffer = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu")
            if sum(sizes) <= _MAX_KEPT:
                _KEPT.buffer = buffer
        parts = buffer[: sum(sizes)].split(sizes)
        tensors = [
            part[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for part, shape in zip(parts, shapes, strict=True)
        ]
        return cls(tensors[:2], tensors[2:])


def _iterate(x: Tensor, form: Form, norm: float, memory: _Buffers, out: Tensor) -> None:
    """Write the polynomials of `x` to `out`, which may be `x`, all at once."""
    current, other = memory.whole
    g, h, s, q, spare = memory.small
    _normalize(x, norm, current)
    wide = x.shape[-2] <= x.shape[-1]
    is_large = g.shape[-1] >= _ALONE_SIDE
    gram, add_symmetric = (_gram, _add_symmetric) if is_large else (torch.bmm, torch.baddbmm)
    for start, stop in form.segments:
        left, right = (current, current.mT) if wide else (current.mT, current)
        gram(left, right, out=g)
        identity = 1.0
        for step in range(start, stop):
            a, b, c = form.coefficients[step]
            if c == 0:  # PyTorch 2.13 would forget b, in bfloat16
                torch.mul(g, b, out=s)
            else:
                add_symmetric(g, g, g, beta=b, alpha=c, out=s)
            if step + 1 < stop:
                add_symmetric(g, g, s, beta=a, out=h)
                add_symmetric(h, s, h, beta=a, out=g)
            if step == start:
                q, s = s, q
            else:
                torch.mul(q, a, out=h).add_(s, alpha=identity)
                add_symmetric(h, s, q, out=spare)
                q, spare = spare, q
            identity *= a
        left, right = (q, current) if wide else (current, q)
        torch.baddbmm(current, left, right, beta=identity, out=other)
        current, other = other, current
    # Not by the last product: the libraries' bits depend on the address that they write to.
    out.copy_(current)


def _normalize(x: Tensor, norm: float, out: Tensor) -> None:
    """Write the matrices of `x`, each scaled to a Frobenius norm, to `out`; zero stays zero, a NaN spreads over all."""
    work = torch.promote_types(torch.promote_types(x.dtype, out.dtype), torch.float32)
    sizes = _norms(x, work)
    # A NaN becomes one of its matrix here, too.
    is_usual = min(sizes) > _MIN_NORM and max(sizes) < _MAX_NORM
    if len(x) > 1 and x.dtype == out.dtype == work and is_usual:
        # The same in one call, for many.
        factors = torch.tensor([norm / size for size in sizes], dtype=work, device="cpu")
        torch.mul(x, factors.view(-1, 1, 1), out=out)
        return
    for matrix, size, target in zip(x, sizes, out, strict=True):
        if _MIN_NORM < size < _MAX_NORM:
            _scale(matrix, norm / size, target)
            continue
        peak = float(torch.linalg.vector_norm(matrix, math.inf, dtype=work))
        if peak == 0 or not math.isfinite(peak):
            target.fill_(peak * 0.0)  # NaN for a NaN and for an infinity
            continue
        # Powers of two, which change no bit; in two parts, as one may leave the range of numbers.
        exponent = -math.frexp(peak)[1]
        small = torch.promote_types(matrix.dtype, target.dtype) != target.dtype
        near_one = (matrix.clone() if small else target.copy_(matrix)).mul_(2.0 ** (exponent // 2))
        near_one.mul_(2.0 ** (exponent - exponent // 2))
        (size,) = _norms(near_one[None], work)
        _scale(near_one, norm / size, target)


def _norms(x: Tensor, dtype: torch.dtype) -> list[float]:
    # Two sums, over each row and then over the rows, so that they are divided in the same way in every batch.
    of_rows = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=dtype)
    norms: list[float] = torch.linalg.vector_norm(of_rows, dim=-2).flatten().tolist()
    return norms


def _scale(matrix: Tensor, factor: float, out: Tensor) -> None:
    """Write factor times a matrix to `out`, rounded once to its dtype."""
    if torch.promote_types(matrix.dtype, out.dtype) == matrix.dtype:
        torch.mul(matrix, factor, out=out)
    else:
        out.copy_(matrix).mul_(factor)


def _gram(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    """Write a b, one large symmetric matrix, to `out`."""
    for rows, columns, above in _symmetric_blocks(out, a.shape[-1]):
        torch.mm(a[0, rows], b[0, :, columns], out=out[0, rows, columns])
        out[0, above, rows].copy_(out[0, rows, above].mT)


def _add_symmetric(c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1.0, alpha: float = 1.0, out: Tensor) -> None:
    """Write alpha a b + beta c, one large symmetric matrix, rounded once, to `out`, which is none of them."""
    for rows, columns, above in _symmetric_blocks(out, a.shape[-1]):
        block = out[0, rows, columns]
        torch.addmm(c[0, rows, columns], a[0, rows], b[0, :, columns], beta=beta, alpha=alpha, out=block)
        out[0, above, rows].copy_(out[0, rows, above].mT)


def _symmetric_blocks(out: Tensor, terms: int) -> Iterator[tuple[slice, slice, slice]]:
    """Yield rows and columns of blocks up to the diagonal, and the columns of each that are mirrored above it."""
    side = out.shape[-1]
    rows = _BLOCK_ROWS if terms >= 2 * side else 2 * _BLOCK_ROWS
    starts = [*range(0, max(1, side - rows + 1), rows), side]  # the last block takes what is left
    for start, stop in pairwise(starts):
        yield slice(start, stop), slice(stop), slice(start)
