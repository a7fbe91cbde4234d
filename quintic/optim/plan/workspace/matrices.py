"""Upper bounds of the bytes that the computation of matrices allocates, known before anything is computed.

The plan chooses the sizes of buckets by these. Tensors that grow with the matrices are counted; flags and tables come
on top (see `plan.SMALL_BYTES`), as do copies of gradients whose dtype or strides differ from their parameters'. The
bytes follow from

    stages of a rule    the stages themselves, which run once on tensors without memory (`counting.py`)
    polar step          its products, counted in the same way; on a CPU see `cpu_orthogonalize.py`
    momentum, weights   a number of tensors for each case of `momentum_` and `decay_and_step_` (`update.py`)

Directions belong to the caller, and are not counted unless they are copied.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from quintic.kernels.dispatch import Kernels
from quintic.kernels.products.choose_products import largest_queued_batch
from quintic.optim.groups.group import Group
from quintic.optim.numeric.bf16_state import StateDtype
from quintic.optim.numeric.int8_state import PIECE, PIECE_BYTES
from quintic.optim.plan.bucket import Units
from quintic.optim.plan.kinds import direction_dtype, update_dtype
from quintic.optim.plan.workspace.counting import Footprint, count_bytes
from quintic.optim.polar.cpu_orthogonalize import iterates_on_cpu, iteration_bytes
from quintic.optim.polar.forms import Form
from quintic.optim.polar.matrix_stages import MatrixState, apply_stages, constrained
from quintic.optim.polar.orthogonalize import apply_form
from quintic.optim.polar.products import ALIGNMENT
from quintic.optim.polar.program import products_of
from quintic.optim.rules.rule import UpdateRule
from quintic.optim.rules.stages import WEIGHT, MatrixStage, StageOptions, StateSpec, WeightStage, vector_shape
from quintic.optim.rules.update import CPU_PIECE

__all__ = [
    "WorkspaceSpec",
    "applied_bytes",
    "directions_bytes",
    "factor_bytes",
    "factors_of_pieces_bytes",
    "matrices_bytes",
    "matrices_footprint",
    "packing_bytes",
    "polar_footprint",
    "stages_footprint",
    "units_footprint",
    "width_of",
]


# Writing weights through factors of their own, or letting them drift, takes at most this many wide tensors:
# weights, updates and products, with the bits of masters and without; the weights before a step, and copies of state.
_STAGED_TENSORS = 8


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
    state_dtype: StateDtype = None
    """The group's option: plain PyTorch makes float32 copies of moments in bfloat16."""
    has_masters: bool = False
    cautious: bool = False
    scales_decay: bool = False

    @property
    def has_factors(self) -> bool:
        """Return whether the rule has more numbers than one for each matrix, to write updates with."""
        return any(shape != "matrix" for shape in self.rule.numbers)

    @property
    def sent_width(self) -> int:
        """Return the bytes for each entry of a matrix of the state and weights that go to owners beside directions."""
        return sum(spec.dtype_for(self.dtype, self.state_dtype).itemsize for spec in self.rule.sent_state)

    @property
    def state_width(self) -> int:
        """Return the bytes for each entry of a matrix of the state that owners send back beside updates."""
        return sum(spec.dtype_for(self.dtype, self.state_dtype).itemsize for spec in self.rule.matrix_state)

    def message_bytes(self, shapes: Sequence[tuple[int, int]]) -> int:
        """Return the bytes of the numbers and vectors that owners send for one unit with matrices of these (m, n)."""
        entries = [vector_shape(shape, m, n) for m, n in shapes for shape in self.rule.numbers]
        entries += [spec.vector_shape(m, n) for m, n in shapes for spec in self.rule.vector_state]
        return width_of(self.dtype) * sum(map(math.prod, entries))

    @classmethod
    def of_group(cls, group: Group, dtype: torch.dtype, device: torch.device, kernels: Kernels) -> "WorkspaceSpec":
        """Return the properties of a group's weights of a dtype on a device."""
        return cls(
            dtype,
            device,
            kernels,
            group.rule,
            state_dtype=group.state_dtype,
            has_masters=group.master is not None and dtype.itemsize < 4,
            cautious=bool(group.cautious),
            scales_decay=group.scale_decay and group.rule.orthogonalizes,
        )


def width_of(dtype: torch.dtype) -> int:
    """Return the bytes of an entry of momentum and arithmetic: of float32, or of float64 for float64 weights."""
    return max(4, dtype.itemsize)


# --------------------------------------------------------------------------------------------------- whole matrices


@lru_cache(maxsize=4096)
def polar_footprint(form: Form | None, batch: int, m: int, n: int, spec: WorkspaceSpec) -> Footprint:
    """Return the memory for the polar factors of (batch, m, n) contiguous directions; form None: a user's function."""
    size, direction = batch * m * n, direction_dtype(form, spec.dtype)
    # A user's function is assumed to need three tensors of this shape.
    if form is None:
        return Footprint(3 * direction.itemsize * size, direction.itemsize * size)
    item = form.compute_dtype.itemsize
    # An SVD has a normalised copy and several factors and work arrays.
    if form.method == "svd":
        work = torch.promote_types(direction, form.compute_dtype).itemsize
        return Footprint((work + 8 * item) * size, item * size)
    if spec.device.type == "cpu" and spec.kernels == "torch" and iterates_on_cpu(form, m, n):
        return Footprint(iteration_bytes(form, batch, m, n, direction), item * size)
    # A matrix needs as much as its transpose, except for the norms of its rows.
    tall = max(m, n), min(m, n)
    one, copies = _counted_footprint(form, *tall, direction, spec.kernels, spec.device.type), 0
    # Plain PyTorch has aligned copies of one matrix at a time, unless all matrices of a batch are aligned anyway, as
    # padded 16-bit ones are on GPUs. CPUs multiply in float32 at least.
    width = item if spec.device.type != "cpu" else max(item, 4)
    if batch > 1 and width > 2 and any(numel * width % ALIGNMENT for numel in (m * n, min(m, n) ** 2)):
        copies = width * (2 * m * n + min(m, n) ** 2)
    if spec.device.type == "cpu" and form.compute_dtype == torch.bfloat16:
        # oneDNN has padded copies of one matrix at a time.
        copies += 6 * -(-m // 64) * -(-n // 64) * 64**2 + 2**14
    most = Footprint(batch * one.peak + copies, item * size)
    # The largest batch that a kernel of this device computes as a queue, 0 for none.
    queued = 0
    if spec.kernels == "triton":
        queued = largest_queued_batch(m, n, form.compute_dtype, spec.device, worst_case=spec.worst_case)
    # With `worst_case` a larger batch counts like the largest queued one, if that needs more.
    count = batch if batch <= queued else queued if spec.worst_case else 0
    if not count:
        return most
    # From the first product on a queue has two (m, n) matrices, one for the result, and small ones and counters.
    pair, side = 2 * item * count * m * n, min(m, n)
    num_squares = products_of(tuple(form.segments), form.coefficients, 1.0).num_squares
    squares = item * num_squares * count * side**2 + 4 * count * -(-side // 128)
    return Footprint(max(most.peak, pair + squares), max(most.kept, pair))


@lru_cache(maxsize=1024)
def _counted_footprint(
    form: Form, m: int, n: int, direction: torch.dtype, kernels: Kernels, device_type: str
) -> Footprint:
    """Return the memory for the polar factor of one (m, n) matrix, computed product by product."""
    x = torch.empty((1, m, n), dtype=direction, device="meta")
    return count_bytes(lambda: apply_form(x, form, kernels), [x], device_type)


def matrices_footprint(
    form: Form | None, batch: int, m: int, n: int, spec: WorkspaceSpec, copied: int = 0
) -> Footprint:
    """Return the memory from (batch, m, n) contiguous directions to updates, their factors included in the peak.

    `copied` are the bytes of the copies of directions that the polar step makes.
    """
    polar = polar_footprint(form, batch, m, n, spec)
    before, after = (
        stages_footprint(stages, m, n, given, spec._replace(worst_case=False))
        for stages, given in (
            (spec.rule.before, direction_dtype(form, spec.dtype)),
            (spec.rule.after, update_dtype(form, spec.dtype)),
        )
    )
    rounds = batch * _rounds_bytes(m, n, form, spec)
    peak = max(batch * before.peak, batch * before.kept + copied + rounds + polar.peak, polar.kept + batch * after.peak)
    # Stages after the polar step return other matrices, or the ones that they were given.
    kept = batch * after.kept or polar.kept
    if spec.rule.constrain is not None:
        last = _constrain_footprint(spec.rule.constrain, m, n, update_dtype(form, spec.dtype), spec)
        # Factors of earlier stages are multiplied into the update.
        folded = 2 * batch * m * n * width_of(spec.dtype) * (spec.rule.factors is not None)
        peak = max(peak, kept + folded + batch * last.peak)
    return Footprint(peak, kept)


@lru_cache(maxsize=1024)
def _rounds_bytes(m: int, n: int, form: Form | None, spec: WorkspaceSpec) -> int:
    """Return the bytes that a `PolarStage` needs for one (m, n) matrix beside a round of the polar step."""
    stage = spec.rule.polar
    if stage is None or m * n == 0:
        return 0
    x = torch.empty((1, m, n), dtype=direction_dtype(form, spec.dtype), device="meta")
    result = update_dtype(form, spec.dtype)
    return count_bytes(lambda: stage.apply(x, lambda y: y.to(result, copy=True)), [x], spec.device.type).peak


@lru_cache(maxsize=1024)
def _constrain_footprint(stage: WeightStage, m: int, n: int, given: torch.dtype, spec: WorkspaceSpec) -> Footprint:
    """Return the memory that a stage which constrains weights needs for one (m, n) matrix."""
    if m * n == 0:
        return Footprint(0, 0)
    wide = torch.promote_types(spec.dtype, torch.float32)
    updates, weights = (torch.empty((1, m, n), dtype=dtype, device="meta") for dtype in (given, wide))
    scales, mask = torch.empty((1, 1, 1), dtype=wide, device="meta"), torch.empty(1, dtype=torch.int32, device="meta")
    state, operands = _state_of(stage.state, m, n, spec)
    state = replace(state, batches={**state.batches, WEIGHT: weights})
    return count_bytes(
        lambda: constrained(stage, updates, scales, state, StageOptions(kernels=spec.kernels), mask),
        [updates, weights, scales, mask, *operands],
        spec.device.type,
    )


def _state_of(specs: Sequence[StateSpec], m: int, n: int, spec: WorkspaceSpec) -> tuple[MatrixState, list[Tensor]]:
    """Return the state of one (m, n) matrix without memory, and its tensors."""

    def empty(*size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    dtypes = {one: one.dtype_for(spec.dtype, spec.state_dtype) for one in specs}
    batches = {one.name: empty(1, m, n, dtype=dtype) for one, dtype in dtypes.items() if one.shape == "param"}
    vectors = {one.name: [empty(1, *one.vector_shape(m, n), dtype=dtypes[one])] for one in specs if one.is_vector}
    # As kernels find vectors, by address; plain PyTorch reads these themselves.
    names = spec.rule.vectors_of_kernels if spec.kernels == "triton" else ()
    addresses = {name: empty(1, dtype=torch.int64) for name in names if name in vectors}
    operands = [*batches.values(), *(one for (one,) in vectors.values()), *addresses.values()]
    return MatrixState(batches, vectors, addresses), operands


@lru_cache(maxsize=1024)
def stages_footprint(
    stages: tuple[MatrixStage, ...], m: int, n: int, given: torch.dtype, spec: WorkspaceSpec
) -> Footprint:
    """Return the memory that some stages need for one (m, n) matrix; `kept` is the result's, 0 if it is not new."""
    if not stages or m * n == 0:  # steps leave out empty matrices
        return Footprint(0, 0)

    def empty(*size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    # One matrix and its state.
    wide = torch.promote_types(spec.dtype, torch.float32)
    matrices, scales, mask = empty(1, m, n, dtype=given), empty(1, 1, 1, dtype=wide), empty(1, dtype=torch.int32)
    state, operands = _state_of([one for stage in stages for one in stage.state], m, n, spec)
    if any(stage.reads_weights for stage in stages):
        weights = empty(1, m, n, dtype=wide)
        state, operands = replace(state, batches={**state.batches, WEIGHT: weights}), [*operands, weights]
    options = StageOptions(kernels=spec.kernels)
    return count_bytes(
        lambda: apply_stages(stages, matrices, scales, state, options, mask, defaultdict(nullcontext))[0],
        [matrices, scales, mask, *operands],
        spec.device.type,
    )


# --------------------------------------------------------------------------------------------------------------- units


def units_footprint(units: Units, count: int, spec: WorkspaceSpec) -> Footprint:
    """Return the memory for orthogonalising `count` units, beside their directions (`BucketStep._compute_units`)."""
    if count == 0:
        return Footprint(0, 0)
    numel = math.prod(units.shape)
    peak = kept = factors = copied = 0
    for (m, n), form, _ in units.kinds:
        # Plain PyTorch and products of 32 bits and more need matrices in row order, and no kernel takes gaps.
        is_wide = spec.kernels == "torch" or (form is not None and form.compute_dtype.itemsize != 2)
        has_copies = not units.is_plain or (units.is_transposed and is_wide)
        copied = count * m * n * direction_dtype(form, spec.dtype).itemsize * has_copies
        work = matrices_footprint(form, count, m, n, spec)
        peak = max(peak, kept + factors + copied + work.peak)
        kept += work.kept
        factors += factor_bytes(count, m, n, spec)
    if not units.is_plain:
        # The updates of all kinds as units.
        joined = count * numel * units.update_dtype(spec.dtype).itemsize
        peak, kept = max(peak, kept + factors + copied + joined), joined
    # The state of stages is copied from units to matrices and back, unless a unit is a matrix as it lies in memory.
    has_copies = units.is_transposed or not units.is_plain
    copies = has_copies * count * numel * (spec.sent_width + spec.state_width)
    return Footprint(peak + copies, kept)


def factor_bytes(count: int, m: int, n: int, spec: WorkspaceSpec) -> int:
    """Return the bytes of a rule's numbers for `count` matrices; 0 if these are only one or two for each matrix."""
    if not spec.has_factors:
        return 0
    return count * width_of(spec.dtype) * sum(math.prod(vector_shape(shape, m, n)) for shape in spec.rule.numbers)


def factors_of_pieces_bytes(units: Units, piece_shape: tuple[int, ...], count: int, spec: WorkspaceSpec) -> int:
    """Return the bytes that `transports.factors_of_pieces` allocates for `count` units."""
    # With `scale_decay` every entry has two factors, of the update and of the decay, made from vectors side by side.
    if spec.scales_decay:
        vectors = 2 * sum(factor_bytes(count, *kind.shape, spec) for kind in units.kinds)
        return vectors + factors_of_pieces_bytes(units, piece_shape, 2 * count, spec._replace(scales_decay=False))
    pieces = count * math.prod(piece_shape) * width_of(spec.dtype)
    each = max(1, len(spec.rule.numbers))
    if len(units.kinds) > 1 or (spec.has_factors and not units.is_plain):
        # Factors spread over whole units, then sliced to pieces.
        return each * (count * math.prod(units.shape) * width_of(spec.dtype) + pieces)
    return each * pieces if spec.has_factors and sum(length > 1 for length in piece_shape) > 2 else 0


# ---------------------------------------------------------------------------------------------------------- the passes


def directions_bytes(numel: int, direction: torch.dtype, spec: WorkspaceSpec, *, in_order: bool = True) -> int:
    """Return the bytes that computing the directions of `numel` entries allocates, the directions included.

    `in_order` says whether parameters lie in memory row by row: kernels write directions in the order of memory.
    """
    if spec.rule.gradient_stage is not None:
        # One member at a time: a widened gradient, the direction, and two copies of each state.
        stage = 2 + 2 * len(spec.rule.direction.state)
        return numel * (direction.itemsize * (1 if in_order else 2) + stage * width_of(spec.dtype))
    if spec.kernels == "triton":
        # Directions in another order are copied into row order.
        return numel * direction.itemsize * (1 if in_order else 2)
    # For the entries at a time: directions before rounding, and widened gradients and moments of less than float32.
    wide = 1 + (spec.dtype.itemsize < 4) + (spec.state_dtype is not None)
    return (
        numel * direction.itemsize + at_a_time(numel, spec) * wide * width_of(spec.dtype) + packing_bytes(numel, spec)
    )


def packing_bytes(numel: int, spec: WorkspaceSpec) -> int:
    """Return the bytes that reading or storing `numel` averages of 8 bits allocates without kernels, beside results."""
    return PIECE_BYTES * min(numel, PIECE) if spec.state_dtype == "int8" else 0


def applied_bytes(numel: int, spec: WorkspaceSpec) -> int:
    """Return the bytes for writing the weights; `numel` are the entries of the largest parameter or piece."""
    if spec.rule.constrain is not None or spec.rule.drift is not None:
        return numel * width_of(spec.dtype) * _STAGED_TENSORS + _applied_bytes(numel, spec)
    return _applied_bytes(numel, spec)


def _applied_bytes(numel: int, spec: WorkspaceSpec) -> int:
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
    held = numel * (direction.itemsize * (1 if in_order or spec.kernels == "torch" else 2) + spec.sent_width)
    applying = work.kept + factors + applied_bytes(largest, spec)
    return max(directions_bytes(numel, direction, spec, in_order=in_order), held + max(work.peak, applying))


def at_a_time(numel: int, spec: WorkspaceSpec) -> int:
    """Return the number of a tensor's entries that plain PyTorch works on at a time, see `update.in_pieces`."""
    return min(numel, CPU_PIECE) if spec.device.type == "cpu" else numel
