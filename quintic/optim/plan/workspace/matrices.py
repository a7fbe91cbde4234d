"""Upper bounds of the bytes that the computation of matrices allocates, known before anything is computed.

The plan chooses the sizes of buckets by these. Each function follows the code that it bounds, tensor by tensor. Tensors
that grow with the matrices are counted; flags and tables come on top (see `plan.SMALL_BYTES`), as do copies of
gradients whose dtype or strides differ from their parameters'. The products of an orthogonalisation (`program.py`) need

    one by one   operands that are still read, and the result: a matrix is freed after the product that reads it last
    on a CPU     see `cpu_orthogonalize.py`
    queue        two (m, n) matrices and `Program.num_squares` (side, side) ones from the first product to the last; the
                 result is one of the two, and keeps the memory of both

Directions belong to the caller, and are not counted unless they are copied.
"""

import math
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from quintic.kernels.dispatch import Kernels
from quintic.kernels.products.choose_products import queued_matrices
from quintic.optim.groups.group import Group
from quintic.optim.layout.views import View, is_plain
from quintic.optim.plan.bucket import Units
from quintic.optim.plan.kinds import direction_dtype, update_dtype
from quintic.optim.polar.cpu_orthogonalize import iterates_on_cpu, iteration_bytes
from quintic.optim.polar.forms import Form
from quintic.optim.polar.products import ALIGNMENT, SMALL_PRODUCT, padded_side
from quintic.optim.polar.program import Product, Program, products_of
from quintic.optim.rules.rule import UpdateRule
from quintic.optim.rules.update import CPU_PIECE

__all__ = [
    "Footprint",
    "WorkspaceSpec",
    "applied_bytes",
    "directions_bytes",
    "factor_bytes",
    "factors_of_pieces_bytes",
    "matrices_bytes",
    "neuron_bytes",
    "polar_work",
    "stages_work",
    "units_work",
    "width_of",
]


class Footprint(NamedTuple):
    """Bytes that a computation allocates, its operands not counted."""

    peak: int
    """The most at one time."""
    kept: int
    """The bytes that its result keeps alive afterwards."""


class WorkspaceSpec(NamedTuple):
    """The properties that bounds depend on, except for shapes and numbers of matrices."""

    dtype: torch.dtype
    """The dtype of the weights."""
    device: torch.device
    """May be a device that this machine does not have."""
    kernels: Kernels
    rule: UpdateRule
    worst_case: bool = False
    """Bound the worst case over all devices of this type and over smaller batches, so that all ranks compute the same
    number, which grows with the batch size."""
    narrow: bool = False
    """Whether moments are in bfloat16, so that plain PyTorch makes float32 copies of them."""
    has_masters: bool = False
    cautious: bool = False
    scales_decay: bool = False

    @property
    def normalizes(self) -> bool:
        """Return whether the rule normalises neurons, as NorMuon does."""
        return self.rule.neuron_state is not None

    @property
    def state_width(self) -> int:
        """Return the bytes for each entry of a matrix of the state that its stages need whole, beside directions."""
        state_dtype: Literal["bf16"] | None = "bf16" if self.narrow else None
        return sum(spec.dtype_for(self.dtype, state_dtype).itemsize for spec in self.rule.matrix_state)

    @classmethod
    def of_group(cls, group: Group, dtype: torch.dtype, device: torch.device, kernels: Kernels) -> "WorkspaceSpec":
        """Return the properties of a group's weights of a dtype on a device."""
        return cls(
            dtype,
            device,
            kernels,
            group.rule,
            narrow=group.state_dtype is not None,
            has_masters=group.master is not None and dtype.itemsize < 4,
            cautious=bool(group.cautious),
            scales_decay=group.scale_decay and group.rule.orthogonalizes,
        )


def width_of(dtype: torch.dtype) -> int:
    """Return the bytes of an entry of momentum and arithmetic: of float32, or of float64 for float64 weights."""
    return max(4, dtype.itemsize)


# --------------------------------------------------------------------------------------------------- orthogonalisation


@lru_cache(maxsize=4096)
def polar_work(form: Form | None, batch: int, m: int, n: int, spec: WorkspaceSpec) -> Footprint:
    """Return the memory for the polar factors of (batch, m, n) contiguous directions; None is a user's function."""
    size = batch * m * n
    # A user's function is assumed to need three tensors of this shape.
    if form is None:
        width = direction_dtype(form, spec.dtype).itemsize
        return Footprint(3 * width * size, width * size)
    item = form.compute_dtype.itemsize
    # An SVD has a normalised copy and several factors and work arrays.
    if form.method == "svd":
        work = torch.promote_types(direction_dtype(form, spec.dtype), form.compute_dtype).itemsize
        return Footprint((work + 8 * item) * size, item * size)
    if spec.device.type == "cpu" and spec.kernels == "torch" and iterates_on_cpu(form, m, n):
        return Footprint(iteration_bytes(form, batch, m, n, direction_dtype(form, spec.dtype)), item * size)
    rows, columns = (padded_side(side, form.compute_dtype, spec.device) for side in (m, n))
    if (rows, columns) != (m, n):
        # Padded directions beside the computation of the padded matrices, then the result without padding beside it.
        padded = polar_work(form, batch, rows, columns, spec)
        directions = direction_dtype(form, spec.dtype).itemsize * batch * rows * columns
        return Footprint(directions + max(padded.peak, padded.kept + item * size), item * size)
    one_by_one = max(_normalisation(form, batch, m, n, spec), _one_by_one(form, batch, m, n, spec))
    # The largest batch that a kernel of this device computes as a queue, 0 for none.
    queued = (
        0
        if spec.kernels == "torch"
        else queued_matrices(m, n, form.compute_dtype, spec.device, worst_case=spec.worst_case)
    )
    if batch > queued and not (spec.worst_case and queued):
        return Footprint(one_by_one, item * size)
    # With `worst_case` a larger batch counts like the largest queued one, if that needs more.
    count = min(batch, queued)
    pair, square = 2 * item * count * m * n, item * count * min(m, n) ** 2
    counters = 4 * count * -(-min(m, n) // 128)
    squares = _program(form).num_squares * square + counters
    queue = pair + max(squares, _scratch(form, count, m, n, spec))
    return Footprint(max(one_by_one, queue), max(item * size, pair))


def _program(form: Form) -> Program:
    # The norm of the entries does not change which products there are.
    return products_of(tuple(form.segments), form.coefficients, 1.0)


def _uses_kernel(form: Form, m: int, n: int, spec: WorkspaceSpec) -> bool:
    """Return whether Triton's kernel normalises the directions, see `kernels.normalize.can_normalize`."""
    is_double = torch.float64 in (direction_dtype(form, spec.dtype), form.compute_dtype)
    return spec.kernels == "triton" and not is_double and m * n < 2**31


def _scratch(form: Form, batch: int, m: int, n: int, spec: WorkspaceSpec) -> int:
    """Return the bytes that normalisation allocates beside its result."""
    if _uses_kernel(form, m, n, spec):
        from quintic.kernels.products.normalize import scratch_bytes

        return batch * scratch_bytes(m, n)
    return _normalisation(form, batch, m, n, spec)


def _normalisation(form: Form, batch: int, m: int, n: int, spec: WorkspaceSpec) -> int:
    """Return the bytes that normalisation allocates, its result included."""
    item, work = form.compute_dtype.itemsize, _work_dtype(form, spec).itemsize
    if _uses_kernel(form, m, n, spec):
        return batch * m * n * item + _scratch(form, batch, m, n, spec)
    # CPUs widen operands before they divide; GPUs square entries before they add them.
    widens = spec.device.type != "cpu" or direction_dtype(form, spec.dtype).itemsize < work
    result = 0 if item == work else item
    return batch * (m * n * max(work if widens else 0, result) + (m * n + m + 4) * work)


def _work_dtype(form: Form, spec: WorkspaceSpec) -> torch.dtype:
    wide = torch.float64 if form.compute_dtype == torch.float64 else torch.float32
    return torch.promote_types(direction_dtype(form, spec.dtype), wide)


def _one_by_one(form: Form, batch: int, m: int, n: int, spec: WorkspaceSpec) -> int:
    """Return the most bytes that `run_products` holds at a time, the normalised matrices included."""
    # Follow the program: add each result and the memory of its product, free the matrices that were read last.
    program, item = _program(form), form.compute_dtype.itemsize
    whole, square = m * n, min(m, n) ** 2
    entries = {0: whole}
    live = peak = item * batch * whole
    for number, product in enumerate(program.products):
        entries[number + 1] = whole if product.kind == "apply" else square
        live += item * batch * entries[number + 1]
        peak = max(peak, live + _besides(product, form.compute_dtype, batch, m, n, spec))
        for matrix in [matrix for matrix in entries if program.last_uses[matrix] == number]:
            live -= item * batch * entries.pop(matrix)
    return peak


def _besides(product: Product, dtype: torch.dtype, batch: int, m: int, n: int, spec: WorkspaceSpec) -> int:
    """Return the bytes that `products.multiply` allocates beside its result."""
    # Entries of the operands and the result of one matrix.
    whole, side, item = m * n, min(m, n), dtype.itemsize
    left, right = {
        "gram": (whole, whole),
        "square": (side**2, side**2),
        "apply": (side**2, whole),
    }[product.kind]
    out = whole if product.kind == "apply" else side**2
    # The diagonal, which is computed separately, and the scalar that stands in for a missing addend.
    diagonal = 16 * batch * side * (product.diagonal != 0) + 8
    if item == 2 and spec.device.type != "cpu":
        return diagonal
    multiplications = side * side * (side if product.kind == "square" else max(m, n))
    if dtype == torch.float16 or (item == 2 and (product.alpha == 0 or multiplications <= SMALL_PRODUCT)):
        # Operands and result widened to float32.
        addend = 0 if product.c is None else out
        widened, item = 4 * batch * (left + right + addend + out), 4
    else:
        widened = 0
    # Aligned copies of one matrix at a time, unless all matrices of a batch are aligned anyway.
    aligned = all(numel * item % ALIGNMENT == 0 for numel in (left, right, out))
    copies = 0 if batch == 1 or aligned else item * (left + right + out)
    if item == 2:
        # oneDNN's copies, one matrix at a time, with padding and some KiB; then the diagonal, in float32.
        short, long = (-(-length // 64) * 64 for length in sorted((m, n)))
        padded = item * (3 * short**2 if product.kind == "square" else 2 * short * long + short**2)
        copies = max(copies + padded + 2**14, 12 * batch * left if product.diagonal else 0)
    return widened + copies + diagonal


# --------------------------------------------------------------------------------------------------------------- units


def units_work(units: Units, count: int, spec: WorkspaceSpec) -> Footprint:
    """Return the memory for orthogonalising `count` units, beside their directions (`BucketStep._compute_units`)."""
    if count == 0:
        return Footprint(0, 0)
    numel = math.prod(units.shape)
    peak = kept = factors = copied = 0
    for ((m, n), form), order in zip(units.kinds, _orders(units.view, units.shape), strict=True):
        gapless = order != "gaps" and (count == 1 or m * n == numel)
        if spec.kernels == "torch":
            copies = not gapless or order == "columns"
        else:
            is_wide = form is not None and form.compute_dtype.itemsize != 2
            copies = not gapless or (order == "columns" and is_wide)
        copied = count * m * n * direction_dtype(form, spec.dtype).itemsize if copies else 0
        work = stages_work(form, count, m, n, spec)
        peak = max(peak, kept + factors + copied + work.peak)
        kept += work.kept
        factors += factor_bytes(count, m, n, spec)
    if not is_plain(units.view, units.shape):
        # The updates of all kinds as units.
        joined = count * numel * units.update_dtype(spec.dtype).itemsize
        peak, kept = max(peak, kept + factors + copied + joined), joined
    # State that stages need: kind by kind, and then as units again, where matrices are no units as they lie.
    has_copies = units.is_transposed or not is_plain(units.view, units.shape)
    return Footprint(peak + 2 * has_copies * count * numel * spec.state_width, kept)


def stages_work(form: Form | None, batch: int, m: int, n: int, spec: WorkspaceSpec, copied: int = 0) -> Footprint:
    """Return the memory that `matrix_stages.py` needs for (batch, m, n) contiguous directions, factors included.

    The polar step has copies of `copied` bytes of the directions.
    """
    size, work = batch * m * n, polar_work(form, batch, m, n, spec)
    # Stages before the polar step make other directions; those after it work in the dtype of arithmetic.
    before = size * direction_dtype(form, spec.dtype).itemsize if spec.rule.before else 0
    after = size * spec.rule.temporaries * width_of(spec.dtype)
    return Footprint(
        max(before + copied + work.peak, work.kept + max(after, neuron_bytes(form, batch, m, n, spec))), work.kept
    )


def factor_bytes(count: int, m: int, n: int, spec: WorkspaceSpec) -> int:
    """Return the bytes of NorMuon's factors, one per neuron; 0 for other rules, which have one number per matrix."""
    return count * max(m, n) * width_of(spec.dtype) if spec.normalizes else 0


def factors_of_pieces_bytes(units: Units, piece_shape: tuple[int, ...], count: int, spec: WorkspaceSpec) -> int:
    """Return the bytes that `transports.factors_of_pieces` allocates for `count` units."""
    # With `scale_decay` every entry has two factors, of the update and of the decay, made from vectors side by side.
    if spec.scales_decay:
        vectors = 2 * sum(factor_bytes(count, *kind.shape, spec) for kind in units.kinds)
        return vectors + factors_of_pieces_bytes(units, piece_shape, 2 * count, spec._replace(scales_decay=False))
    pieces = count * math.prod(piece_shape) * width_of(spec.dtype)
    if len(units.kinds) > 1 or (spec.normalizes and not is_plain(units.view, units.shape)):
        # Factors spread over whole units, then sliced to pieces.
        return count * math.prod(units.shape) * width_of(spec.dtype) + pieces
    return pieces if spec.normalizes and sum(length > 1 for length in piece_shape) > 2 else 0


def neuron_bytes(form: Form | None, count: int, m: int, n: int, spec: WorkspaceSpec) -> int:
    """Return the bytes that NorMuon's normalisation of (count, m, n) updates allocates, its factors included."""
    if not spec.normalizes:
        return 0
    if spec.kernels == "triton":
        from quintic.kernels.update.neuron import neuron_bytes as per_matrix

        return count * per_matrix(m, n)
    width, item = width_of(spec.dtype), update_dtype(form, spec.dtype).itemsize
    # CPUs widen 16-bit entries before they sum them; GPUs square entries into a new tensor first.
    widens = item < width or spec.device.type == "cuda"
    return 10 * factor_bytes(count, m, n, spec) + (count * m * n * width if widens else 0)


@lru_cache(maxsize=256)
def _orders(view: View, unit_shape: tuple[int, ...]) -> tuple[str, ...]:
    """Return "rows", "columns" or "gaps" for each matrix of a unit: which of them are consecutive in memory."""

    def order(matrix: Tensor) -> str:
        if matrix.is_contiguous():
            return "rows"
        return "columns" if matrix.shape[0] == 1 and matrix[0].mT.is_contiguous() else "gaps"

    return tuple(order(matrix) for block in view.blocks(torch.empty(unit_shape, device="meta")) for matrix in block)


# ---------------------------------------------------------------------------------------------------------- the passes


def directions_bytes(numel: int, direction: torch.dtype, spec: WorkspaceSpec, *, in_order: bool = True) -> int:
    """Return the bytes that computing the directions of `numel` entries allocates, the directions included.

    `in_order` says whether parameters lie in memory row by row: kernels write directions in the order of memory.
    """
    if spec.kernels == "triton":
        # Directions in another order are copied into row order.
        return numel * direction.itemsize * (1 if in_order else 2)
    # For the entries at a time: directions before rounding, and widened gradients and moments of less than float32.
    wide = 1 + (spec.dtype.itemsize < 4) + spec.narrow
    return numel * direction.itemsize + at_a_time(numel, spec) * wide * width_of(spec.dtype)


def applied_bytes(numel: int, spec: WorkspaceSpec) -> int:
    """Return the bytes for writing the weights; `numel` are the entries of the largest parameter or piece."""
    if spec.kernels == "triton":
        return 0
    if spec.has_masters:
        # The step, and the tensors that complete weights to float32 (`precision.py`) or make the mask.
        tensors = 5 + spec.scales_decay
    elif spec.cautious or spec.scales_decay:
        # The step, and the tensors that make the mask; weights of less than float32 are widened.
        tensors = 4 + (spec.dtype.itemsize < 4) + spec.scales_decay
    else:
        # The step; the widened weight, before and after it.
        tensors = 1 + 2 * (spec.dtype.itemsize < 4)
    return at_a_time(numel, spec) * (width_of(spec.dtype) * tensors + spec.cautious) + 64


def matrices_bytes(
    numel: int,
    largest: int,
    direction: torch.dtype,
    work: Footprint,
    factors: int,
    spec: WorkspaceSpec,
    *,
    in_order: bool,
) -> int:
    """Return the bytes that a step of whole matrices allocates, given their gradients: directions, updates, weights.

    Args:
        numel: the entries of all matrices.
        largest: the entries of the largest parameter or piece.
        direction: the dtype of directions.
        work: the memory from directions to updates.
        factors: the bytes of the factors of updates and decay.
        spec: the properties of the group.
        in_order: as for `directions_bytes`.
    """
    # Two moments: computing directions; then directions beside the updates, or beside the weights that they change.
    held = numel * (direction.itemsize * (1 if in_order or spec.kernels == "torch" else 2) + spec.state_width)
    applying = work.kept + factors + applied_bytes(largest, spec)
    return max(directions_bytes(numel, direction, spec, in_order=in_order), held + max(work.peak, applying))


def at_a_time(numel: int, spec: WorkspaceSpec) -> int:
    """Return the number of a tensor's entries that plain PyTorch works on at a time, see `update.in_pieces`."""
    return min(numel, CPU_PIECE) if spec.device.type == "cpu" else numel
