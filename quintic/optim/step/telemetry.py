"""Reports of steps: counts of the last step, and sampled measurements of every matrix.

The measurements come from Gram matrices alone (traces of G and G^2), so that they cost two small products per matrix
on the steps that are sampled and wait for nothing; numbers reach the host when the user asks for them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from quintic.optim.layout.pieces import Piece
from quintic.optim.plan.bucket import Bucket

__all__ = ["Counts", "MatrixTelemetry", "Measured", "StepReport", "collected", "measure", "report_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """A report of the last call of `step()`.

    Where `comms` averages gradients or shards state, this rank does not know which gradients all others lack: the
    counts then include matrices and parameters that stayed as they were because no rank had a gradient.
    """

    matrices: Mapping[str, int] = field(default_factory=dict)
    """How many matrices this rank orthogonalised, by method."""
    adamw_parameters: int = 0
    """How many parameters AdamW updated."""
    without_gradient: int = 0
    """Parameters whose gradient was None: left as they were."""
    waiting: int = 0
    """Parameters whose group steps every k-th time, and not this time."""
    qk_layers: int = 0
    """Attention layers whose logits were given to QK-clip."""
    skipped: bool = False
    """Whether non-finite gradients made the step leave everything as it was."""
    skipped_steps: int = 0
    """How many steps were skipped since construction."""

    @property
    def num_matrices(self) -> int:
        """Return the number of matrices that were orthogonalised."""
        return sum(self.matrices.values())

    def __str__(self) -> str:
        """Return one line."""
        methods = ", ".join(f"{count} by {method}" for method, count in self.matrices.items())
        # Only counts that are not zero are mentioned, after matrices and AdamW's parameters.
        matrices = "matrix" if self.num_matrices == 1 else "matrices"
        parts = [f"{self.num_matrices} {matrices} orthogonalised" + (f" ({methods})" if methods else "")]
        parts.append(f"{self.adamw_parameters} {'parameter' if self.adamw_parameters == 1 else 'parameters'} by AdamW")
        for number, what in (
            (self.without_gradient, "without gradient"),
            (self.waiting, "waiting for their turn"),
            (self.qk_layers, f"attention {'layer' if self.qk_layers == 1 else 'layers'} watched by QK-clip"),
        ):
            if number:
                parts.append(f"{number} {what}")
        steps = "step" if self.skipped_steps == 1 else "steps"
        parts.append(f"{self.skipped_steps} {steps} skipped" + (", this one too" if self.skipped else ""))
        return "; ".join(parts)


class Counts(NamedTuple):
    """The matrices and parameters of one bucket that a step steps."""

    bucket: Bucket
    num_members: int
    num_matrices: int
    # Positions in their group of parameters without a gradient.
    missing: tuple[int, ...]


def report_of(buckets: Iterable[Counts]) -> StepReport:
    """Return the report of a step, given its buckets."""
    matrices: dict[str, int] = {}
    num_adamw = 0
    missing: set[tuple[int, int]] = set()
    for bucket, num_members, num_matrices, without in buckets:
        # A parameter can have members in several buckets.
        missing.update((bucket.group, index) for index in without)
        if not bucket.rule.orthogonalizes:
            num_adamw += num_members
        elif num_matrices:
            matrices[bucket.method] = matrices.get(bucket.method, 0) + num_matrices
    return StepReport(matrices=matrices, adamw_parameters=num_adamw, without_gradient=len(missing))


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixTelemetry:
    """Measurements of one matrix on the last sampled step."""

    update_rms: float
    """Root mean square of the applied update over the learning rate: scale, multiplier and neuron factors included."""
    mean_squared_sigma: float
    """Mean of the squared singular values after orthogonalisation: 1 for an exact polar factor of full rank."""
    sigma_spread: float
    """Standard deviation of these squared singular values: 0 for an exact polar factor."""
    effective_rank: float
    """(tr G)^2 / tr(G^2) of the direction's Gram matrix G before orthogonalisation: between 1 and the short side."""


Measured: TypeAlias = tuple[Sequence[Piece], Tensor, Tensor | None]
"""Measurements of the matrices of one shape in a bucket, on their device: pieces with these matrices; the results of
`measure`; () or (matrices,) int32, 0 for matrices that the step left as they were, None if it stepped all."""


def collected(measured: Mapping[int, Mapping[int, Measured]]) -> dict[str, list[MatrixTelemetry]]:
    """Return the measurements of all buckets by parameter, in the order of its matrices; waits for the device."""
    by_name: dict[str, dict[int, MatrixTelemetry]] = {}
    for members, values, step_mask in chain.from_iterable(kinds.values() for kinds in measured.values()):
        # One row of values, and one flag, for each matrix: the members' matrices follow each other.
        flags = repeat(1) if step_mask is None else iter(step_mask.expand(len(values)).tolist())
        rows = iter(values.tolist())
        for member in members:
            for number in member.matrices:
                rms, mean, spread, rank = next(rows)
                # A matrix that was not stepped is consumed like the others, to keep rows and flags aligned.
                if next(flags):
                    by_name.setdefault(member.name, {})[number] = MatrixTelemetry(
                        update_rms=rms, mean_squared_sigma=mean, sigma_spread=spread, effective_rank=rank
                    )
    return {name: [matrices[number] for number in sorted(matrices)] for name, matrices in by_name.items()}


def measure(directions: Tensor, polars: Tensor, updates: Tensor, factors: Tensor) -> Tensor:
    """Return the fields of `MatrixTelemetry` for each matrix of a bucket, (b, 4) float32 on the device.

    Directions, of any scale, their polar factors, and updates are (b, m, n), factors (b, m or 1, n or 1), as in
    `BucketStep.compute_update`.
    """
    rows = []
    # One matrix at a time, because sampling must not need more memory than the step itself.
    for direction, polar, update, factor in zip(directions, polars, updates, factors, strict=True):
        wide = update.float()  # (m, n)
        rms = torch.linalg.vector_norm(wide * factor.float()) / wide.numel() ** 0.5
        first, second = _moments(polar.float())
        # Directions may be so small or large that fourth powers of their entries leave float32's range.
        peak = direction.abs().amax().float()
        scaled = direction.float() / torch.where(peak > 0, peak, torch.ones_like(peak))
        trace, square = _moments(scaled)
        short = min(wide.shape)
        # `_moments` are means over the short side: (s t)^2 / (s q) = s t^2 / q.
        rank = short * trace.square() / torch.where(square > 0, square, torch.ones_like(square))
        # Rounding may make the variance of an exact polar factor slightly negative.
        spread = (second - first.square()).clamp_min(0).sqrt()
        rows.append(torch.stack([rms, first, spread, rank]))
    return torch.stack(rows)


def _moments(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return tr(G) / s and tr(G^2) / s of the Gram matrix on the short side s: means of sigma^2 and sigma^4."""
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT
    gram = wide @ wide.mT  # (s, s)
    short = gram.shape[0]
    return gram.diagonal().sum() / short, gram.square().sum() / short
