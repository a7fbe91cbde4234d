"""Orthogonalisation on CPUs: the polynomials of a `Form`, arranged for caches and for the libraries' products.

The polynomials are the same as in `program.py`, but multiples of the identity are kept as numbers: p = a I + s is
stored as (a, s), because bfloat16 would round the large diagonal entries of p in every product. With x of shape
(batch, m, n), side = min(m, n) and all other tensors (batch, side, side), one segment of steps computes

    g = x x^T                                     (x^T x for tall x)
    s = b g + c g g                               so that p = a I + s
    A, q = a A, s q + (a q + A s)                 so that A I + q is the product of the polynomials so far
    h = g s + a g, then g = s h + a h             g is x x^T as it would be after this step
    x = A x + q x                                 after the last step; A x + x q for tall x

Small matrices are multiplied as a batch, because a library call costs more than their product. The last bit can then
depend on the batch size, so a batch of each size is compared once with its matrices computed singly, and is split into
single matrices if a bit differs. Large matrices are computed one after the other in the same memory, which stays in
the caches; of their symmetric products only the tiles up to the diagonal are computed, and mirrored.
"""

import functools
import math
import threading
from collections.abc import Iterator
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import Tensor

from quintic.optim.polar.forms import Form
from quintic.optim.polar.products import SMALL_PRODUCT

__all__ = ["iterate_on_cpu", "iterates_on_cpu", "iteration_bytes"]

# From this short side on a single matrix keeps all cores busy (2 cores, benchmarks/cpu_step.py).
_SINGLE_SIDE = 512

# Rows per call of a symmetric product with long sums: with fewer rows the calls cost more than the symmetry saves.
_BLOCK_ROWS = 256

# The number of (side, side) buffers of `_iterate_in_buffers`: g, h, s, q and a spare one.
_NUM_SMALL = 5

# The most bytes of memory that a thread keeps for its next call.
_MAX_KEPT = 2**26

# Buffers start at multiples of this many bytes, as new tensors do; the libraries' results depend on the alignment.
_LINE = 64

# Between these Frobenius norms the squares of all entries that matter to the sum are within float32's range.
_MIN_NORM, _MAX_NORM = 1e-15, 1e15


def iterates_on_cpu(form: Form, m: int, n: int) -> bool:
    """Return whether `iterate_on_cpu` computes (m, n) matrices in this form.

    It leaves float16 to `products.multiply`, since PyTorch's float16 products are slow on CPUs, and the smallest
    bfloat16 matrices, since PyTorch multiplies those differently in larger batches.
    """
    if form.method == "svd" or form.compute_dtype == torch.float16:
        return False
    return form.compute_dtype != torch.bfloat16 or min(m, n) ** 3 > SMALL_PRODUCT


def iterate_on_cpu(x: Tensor, form: Form, norm: float, dtype: torch.dtype | None = None) -> Tensor:
    """Return the form's polynomials of each matrix of `x` after scaling it to a Frobenius norm; without autograd.

    Args:
        x: (batch, m, n), not empty; not modified.
        form: the method, its coefficients and the dtype of its products.
        norm: the Frobenius norm that matrices enter the polynomials with.
        dtype: of the result; None for the products' dtype.

    Returns:
        (batch, m, n), new and contiguous. The bits of a matrix do not depend on the batch that it is in.
    """
    x = x.contiguous()  # sums over rows in another memory order would end in other bits
    batch, m, n = x.shape
    result = x.new_empty(x.shape, dtype=dtype or form.compute_dtype)
    # Small matrices go through the products as one batch, if that changes no bit of them; others one by one.
    together = 1
    if batch > 1 and min(m, n) < _SINGLE_SIDE and _batch_keeps_bits(batch, m, n, form, torch.get_num_threads()):
        together = batch
    memory = _buffers(together, m, n, form.compute_dtype)
    for part, target in zip(x.split(together), result.split(together), strict=True):
        _iterate_in_buffers(part, form, norm, memory, target)
    return result


def iteration_bytes(form: Form, batch: int, m: int, n: int, direction: torch.dtype) -> int:
    """Return an upper bound of the bytes that `iterate_on_cpu` allocates, its result included, for input of a dtype."""
    dtype, together = form.compute_dtype, batch if min(m, n) < _SINGLE_SIDE else 1
    # Entries of the buffers: two (m, n) and `_NUM_SMALL` (side, side) for each matrix computed at once.
    memory = together * (2 * m * n + _NUM_SMALL * min(m, n) ** 2)
    if dtype == torch.bfloat16:
        # oneDNN copies matrices whose sides are no multiples of 8, and a little of others (seen with two threads).
        aligned = m % 8 == 0 == n % 8
        memory += 2**15 if aligned else 2**14 + 2 * (m + 63) * (n + 63) + (min(m, n) + 63) ** 2
    # The most of either phase: computing the batch, or comparing it with single matrices (`_batch_keeps_bits`).
    lines = _LINE * (2 + _NUM_SMALL)
    running = lines + dtype.itemsize * memory + _scaling_bytes(direction, dtype, together, m, n)
    comparing = lines + dtype.itemsize * (memory + (batch + 1) * m * n) + _scaling_bytes(dtype, dtype, together, m, n)
    return dtype.itemsize * batch * m * n + (max(running, comparing) if together > 1 else running)


def _scaling_bytes(direction: torch.dtype, dtype: torch.dtype, batch: int, m: int, n: int) -> int:
    """Return the bytes that `_normalize` allocates for widened copies of the matrices and for their norms."""
    wide = torch.promote_types(torch.promote_types(direction, dtype), torch.float32)
    widened = batch if wide != direction else 1 if wide != dtype else 0
    return wide.itemsize * (widened * m * n + batch * (m + 4)) + 64


@functools.lru_cache(maxsize=1024)
def _batch_keeps_bits(batch: int, m: int, n: int, form: Form, threads: int) -> bool:
    """Return whether a batch gives each matrix the same bits as a batch of one does, on this machine.

    Tried once per batch size, shape, form and number of threads, with random matrices.
    """
    generator = torch.Generator("cpu")
    together = torch.empty((batch, m, n), dtype=form.compute_dtype, device="cpu")
    for number, matrix in enumerate(together):
        matrix.normal_(generator=generator.manual_seed(number))
    _iterate_in_buffers(together, form, 1.0, _buffers(batch, m, n, form.compute_dtype), together)
    memory, single = _buffers(1, m, n, form.compute_dtype), torch.empty_like(together[:1])
    for number, expected in enumerate(together.split(1)):
        _iterate_in_buffers(single.normal_(generator=generator.manual_seed(number)), form, 1.0, memory, single)
        if not torch.equal(single, expected):
            return False
    return True


# Scratch memory, `buffer`, that a thread keeps between calls: allocating it anew costs as much as some of the products.
_KEPT = threading.local()

_Buffers: TypeAlias = tuple[list[Tensor], list[Tensor]]


def _buffers(batch: int, m: int, n: int, dtype: torch.dtype) -> _Buffers:
    """Return two buffers (batch, m, n) and `_NUM_SMALL` of (batch, side, side): views of one allocation.

    All batches of a call write to them, one batch after the other.
    """
    side = min(m, n)
    whole, small = (batch, m, n), (batch, side, side)
    shapes = [whole] * 2 + [small] * _NUM_SMALL
    lines = -(-math.prod(whole) * dtype.itemsize // _LINE), -(-math.prod(small) * dtype.itemsize // _LINE)
    sizes = [lines[0] * _LINE] * 2 + [lines[1] * _LINE] * _NUM_SMALL
    buffer: Tensor | None = getattr(_KEPT, "buffer", None)
    if buffer is None or buffer.numel() < sum(sizes):
        _KEPT.buffer = None  # free the old memory before allocating the new
        buffer = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu")
        if sum(sizes) <= _MAX_KEPT:
            _KEPT.buffer = buffer
    tensors: list[Tensor] = []
    for span, shape in zip(buffer[: sum(sizes)].split(sizes), shapes, strict=True):
        tensors.append(span[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape))
    return tensors[:2], tensors[2:]


def _iterate_in_buffers(x: Tensor, form: Form, norm: float, memory: _Buffers, out: Tensor) -> None:
    """Write the polynomials of `x`, (batch, m, n), to `out`, which may be `x`; the formulas are the module's."""
    # (batch, m, n): x, and the place of the next x. The others are (batch, side, side).
    (current, other), (g, h, s, q, spare) = memory
    _normalize(x, norm, current)
    wide = x.shape[-2] <= x.shape[-1]
    is_large = g.shape[-1] >= _SINGLE_SIDE
    gram, add_symmetric = (_gram, _add_symmetric) if is_large else (torch.bmm, torch.baddbmm)
    for start, stop in form.segments:
        # Short side first: (side, long) times (long, side).
        left, right = (current, current.mT) if wide else (current.mT, current)
        gram(left, right, out=g)
        identity = 1.0  # A of the module's formulas: the multiple of I in the product of polynomials
        for step in range(start, stop):
            a, b, c = form.coefficients[step]
            # s = b g + c g g
            if c == 0:  # in bfloat16, PyTorch 2.13 ignores beta where alpha is 0
                torch.mul(g, b, out=s)
            else:
                add_symmetric(g, g, g, beta=b, alpha=c, out=s)
            # The next step's g; the last step of a segment needs none.
            if step + 1 < stop:
                add_symmetric(g, g, s, beta=a, out=h)
                add_symmetric(h, s, h, beta=a, out=g)
            # q = s, or s q + (a q + A s)
            if step == start:
                q, s = s, q
            else:
                torch.mul(q, a, out=h).add_(s, alpha=identity)
                add_symmetric(h, s, q, out=spare)
                q, spare = spare, q
            identity *= a
        # x = A x + q x, of shape (batch, m, n)
        left, right = (q, current) if wide else (current, q)
        torch.baddbmm(current, left, right, beta=identity, out=other)
        current, other = other, current
    # The last product must not write to `out` itself: the libraries' bits depend on the address that they write to.
    out.copy_(current)


def _normalize(x: Tensor, norm: float, out: Tensor) -> None:
    """Write the matrices of `x`, (batch, m, n), each scaled to the Frobenius norm `norm`, to `out`.

    A zero matrix stays zero; a matrix with a NaN or an infinity becomes NaN in all entries.
    """
    work = torch.promote_types(torch.promote_types(x.dtype, out.dtype), torch.float32)
    sizes = _norms(x, work)
    # A NaN in `sizes` may escape `min` and `max`; its factor is NaN, too, which then fills its matrix.
    is_usual = min(sizes) > _MIN_NORM and max(sizes) < _MAX_NORM
    if len(x) > 1 and x.dtype == out.dtype == work and is_usual:
        # One call for all matrices, with the bits of `_scale`.
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
        # A tiny or huge matrix: first bring its largest entry near one by a power of two, which rounds nothing. Two
        # multiplications, since the power itself may be outside the dtype's range.
        exponent = -math.frexp(peak)[1]
        small = torch.promote_types(matrix.dtype, target.dtype) != target.dtype
        near_one = (matrix.clone() if small else target.copy_(matrix)).mul_(2.0 ** (exponent // 2))
        near_one.mul_(2.0 ** (exponent - exponent // 2))
        (size,) = _norms(near_one[None], work)
        _scale(near_one, norm / size, target)


def _norms(x: Tensor, dtype: torch.dtype) -> list[float]:
    # Norms of rows first, (batch, m, 1), then of these: PyTorch then orders the sums in the same way in every batch.
    of_rows = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=dtype)
    norms: list[float] = torch.linalg.vector_norm(of_rows, dim=-2).flatten().tolist()
    return norms


def _scale(matrix: Tensor, factor: float, out: Tensor) -> None:
    """Write `factor` times a matrix to `out`, computed in the wider of the two dtypes and rounded once."""
    if torch.promote_types(matrix.dtype, out.dtype) == matrix.dtype:
        torch.mul(matrix, factor, out=out)
    else:
        out.copy_(matrix).mul_(factor)


def _gram(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    """Write a b, (1, side, side) and symmetric, to `out`, tile by tile."""
    for rows, columns, above in _symmetric_blocks(out, a.shape[-1]):
        torch.mm(a[0, rows], b[0, :, columns], out=out[0, rows, columns])
        out[0, above, rows].copy_(out[0, rows, above].mT)


def _add_symmetric(c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1.0, alpha: float = 1.0, out: Tensor) -> None:
    """Write alpha a b + beta c, (1, side, side) and symmetric, rounded once, to `out`, which overlaps no operand."""
    for rows, columns, above in _symmetric_blocks(out, a.shape[-1]):
        block = out[0, rows, columns]
        torch.addmm(c[0, rows, columns], a[0, rows], b[0, :, columns], beta=beta, alpha=alpha, out=block)
        out[0, above, rows].copy_(out[0, rows, above].mT)


def _symmetric_blocks(out: Tensor, terms: int) -> Iterator[tuple[slice, slice, slice]]:
    """Yield (rows, columns, mirrored columns) of the tiles on and below the diagonal of `out`.

    The entries [rows, mirrored columns], which are left of the diagonal, are the transpose of those above it.
    """
    side = out.shape[-1]
    rows = _BLOCK_ROWS if terms >= 2 * side else 2 * _BLOCK_ROWS
    starts = [*range(0, max(1, side - rows + 1), rows), side]  # the last tile has the remaining rows
    for start, stop in pairwise(starts):
        yield slice(start, stop), slice(stop), slice(start)
