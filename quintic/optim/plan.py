"""The plan: which matrices are updated together, how, and what that costs. Frozen data, no arithmetic on weights.

A bucket is what one batched computation handles: for Muon, matrices of one shape, memory layout, dtype, device and
parameter group, as many as fit the workspace; for AdamW, all parameters of one dtype, device and group. The plan is
built once and again only when the groups change; `optimizer.plan()` returns it, and printing it gives a table.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from quintic.kernels.dispatch import Kernels
from quintic.optim.forms import Form, resolve
from quintic.optim.offload_size import Offloaded, buffer_bytes
from quintic.optim.schedule import Schedule
from quintic.optim.views import View

if TYPE_CHECKING:
    from quintic.optim.sharded import Sharding
    from quintic.optim.travel import Travel

__all__ = [
    "ADAMW_BYTES",
    "PLANNED_OPTIONS",
    "SMALL_BYTES",
    "Bucket",
    "Kind",
    "Member",
    "Plan",
    "Stages",
    "adamw_entries",
    "block_of",
    "direction_dtype",
    "form_of",
    "overlapping_bytes",
    "small_bytes",
    "update_dtype",
]

PLANNED_OPTIONS = (
    "orthogonalizer",
    "orthogonalizer_steps",
    "coefficients",
    "compute_dtype",
    "kernels",
    "normalize",
    "max_workspace_bytes",
    "algorithm",
    "view",
    "master",
    "comms",
    "process_group",
    "transport",
    "offload",
    "on_nonfinite",
)
"""Options of a group that the plan, or what ranks agree on, depends on: when one changes, both are made anew."""

ADAMW_BYTES = 7 * 8
"""Temporary bytes per entry of the plain AdamW update, which keeps up to seven float64 tensors at a time."""

SMALL_BYTES = 64 * 1024
"""Allowance for flags, scales and tables of a step on a CUDA device, where each takes 512 bytes at least."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """Consecutive matrices of one parameter, or a piece of one matrix (AdamW: the whole parameter)."""

    name: str
    index: int
    """Position of the parameter in its group."""
    block: int = 0
    """Which of the view's blocks; 0 unless the view has several kinds of matrices."""
    start: int = 0
    """First matrix of the block that belongs to the bucket."""
    num_matrices: int = 0
    first_matrix: int = 0
    """Position of the first matrix among all matrices of the parameter."""
    piece: tuple[slice, ...] | None = None
    """Where the parameter's matrices are orthogonalised by another rank, or lie on several: the part of this rank's
    tensor that belongs to the matrix; then `block` and `start` mean nothing."""


class Kind(NamedTuple):
    """Matrices of one shape, and how they are orthogonalised."""

    shape: tuple[int, int]
    form: Form | None


class Stages(NamedTuple):
    """Bytes that a bucket with collectives holds on this rank, by stage; neighbours overlap."""

    gathering: int
    """Once it has started, until its gather is over."""
    computing: int
    """Then, until its updates are there."""
    updates: int
    """What goes from there into the last stage."""
    scattering: int
    """From then until it is finished."""
    starting: int = 0
    """While it starts, if that is more than what it has then."""
    finishing: int = 0
    """While it is finished, if that is more than what it had."""

    @property
    def working(self) -> int:
        """Return the most from when it is worked on until its last stage has begun."""
        return max(self.gathering, self.computing, self.updates + self.scattering)

    @property
    def most(self) -> int:
        """Return the most at any time."""
        return max(self.starting, self.working, self.finishing)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """What one batched computation updates."""

    algorithm: str
    group: int
    """Position of the parameter group in `optimizer.param_groups`."""
    members: tuple[Member, ...]
    shape: tuple[int, int] | None
    """(m, n) of every matrix; None for AdamW."""
    dtype: torch.dtype
    device: torch.device
    kernels: Kernels
    """Implementation of the element-wise passes."""
    form: Form | None
    """How the matrices are orthogonalised; None for AdamW and for a user's function."""
    numel: int
    flops: int
    """Floating-point operations of orthogonalisation (matrix products only); 0 for AdamW."""
    workspace_bytes: int
    """Upper bound of the temporary memory this bucket's batched computation needs."""
    travel: "Travel | None" = None
    """How its matrices come together, where they lie on several ranks; `members` are then this rank's pieces."""
    stages: "Stages | None" = None
    """Temporary memory by stage, where the bucket is stepped with collectives under way."""
    shared_stages: "Stages | None" = None
    """The same of the rank that needs most: all ranks must agree about what is under way at a time."""
    sharding: "Sharding | None" = None
    """Who owns which part, where state is divided among ranks; `members` are then this rank's parts."""
    offloaded: Offloaded | None = None
    """Which of its state is in host memory, with `offload=True`."""

    @property
    def num_matrices(self) -> int:
        """Return how many matrices the batched computation has on this rank."""
        if self.travel is not None:
            return self.travel.exchange.num_owned * len(self.travel.kinds)
        return sum(member.num_matrices for member in self.members)

    @property
    def travels(self) -> bool:
        """Return whether stepping it needs collectives, which all ranks run in the same order."""
        return self.sharding is not None or (self.travel is not None and not self.travel.exchange.is_local)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the global ranks among which it is divided; none where this rank is alone with it."""
        if self.sharding is not None:
            return self.sharding.ranks
        return self.travel.exchange.ranks if self.travel is not None else ()

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all parameters that ranks have a part of in it."""
        parts = self.sharding.parts if self.sharding is not None else self.members
        return tuple(part.name for part in (self.travel.units if self.travel is not None else parts))

    @property
    def name(self) -> str:
        """Return the name of the first parameter."""
        return self.travel.units[0].name if self.travel is not None else self.members[0].name

    @property
    def num_parts(self) -> int:
        """Return how many parts of parameters the bucket has."""
        return len(self.travel.units) if self.travel is not None else len(self.members)

    @property
    def method(self) -> str:
        """Return how this bucket is updated, in one word or two."""
        if self.algorithm == "adamw":
            return "adamw" if self.sharding is None or self.sharding.rows is None else "adamw, sparse"
        return str(self.form) if self.form is not None else "function"


def overlapping_bytes(stages: Sequence[Stages], schedule: Schedule, alone: int) -> int:
    """Return the most temporary memory at a time.

    Buckets run one after the other, but for those with collectives: of these some are gathered and some scattered
    meanwhile.

    Args:
        stages: of the buckets with collectives, in the order in which they are worked on.
        schedule: in which order their parts are run.
        alone: what each of the other buckets needs at most.
    """
    parts = [0] * len(stages)
    peak = held = 0
    for number in schedule:
        if number is None:
            peak = max(peak, held + alone)
            continue
        stage = stages[number]
        if parts[number] == 0:
            peak = max(peak, held + stage.starting)
            held += stage.gathering
        elif parts[number] == 1:
            held -= stage.gathering
            peak = max(peak, held + stage.working)
            held += stage.scattering
        else:
            held -= stage.scattering
            peak = max(peak, held + stage.finishing)
        parts[number] += 1
        peak = max(peak, held)
    return peak


def small_bytes(devices: Iterable[torch.device]) -> int:
    """Return what flags and tables take of temporary memory on devices."""
    return SMALL_BYTES if any(device.type == "cuda" for device in devices) else 0


@dataclass(frozen=True, slots=True)
class Plan:
    """All buckets: those with collectives in the order in which they are worked on, and the others in theirs."""

    buckets: tuple[Bucket, ...]
    balance: float = 1.0
    """Floating-point operations of the busiest rank over the mean, where ranks divide the work."""
    schedule: Schedule = (None,)
    """In which order the parts of the buckets with collectives are run."""
    averaging_bytes: int = 0
    """Temporary memory of averaging gradients with `comms="replicated"`, before the buckets run."""
    kept_bytes: int = 0
    """Memory that is kept between steps besides, from the second one on: what other ranks write messages to with
    `transport="copy_engines"`. The first step receives them in temporary memory."""

    def __iter__(self) -> Iterator[Bucket]:
        """Iterate over the buckets."""
        return iter(self.buckets)

    @property
    def flops(self) -> int:
        """Return the floating-point operations of all orthogonalisations of one step."""
        return sum(bucket.flops for bucket in self.buckets)

    @property
    def peak_workspace_bytes(self) -> int:
        """Return the most temporary memory of a step on this rank, see `overlapping_bytes`."""
        stages = [bucket.stages or Stages(0, 0, 0, 0) for bucket in self.buckets if bucket.travels]
        alone = max((bucket.workspace_bytes for bucket in self.buckets if not bucket.travels), default=0)
        peak = overlapping_bytes(stages, self.schedule, alone)
        small = small_bytes(bucket.device for bucket in self.buckets)
        return max(peak + self.offload_buffer_bytes, self.averaging_bytes) + small

    @property
    def offload_buffer_bytes(self) -> int:
        """Return the bytes on this rank's devices that state from host memory takes turns in."""
        of_devices: dict[torch.device, list[Offloaded]] = {}
        for bucket in self.buckets:
            if bucket.offloaded is not None:
                of_devices.setdefault(bucket.device, []).append(bucket.offloaded)
        return sum(map(buffer_bytes, of_devices.values()))

    def __str__(self) -> str:
        """Return the plan as a table with one line per bucket."""
        offloaded = [bucket.offloaded for bucket in self.buckets if bucket.offloaded is not None]
        host = f"{'host MiB':>9} " if offloaded else ""
        lines = [
            f"{'method':18} {'matrices':>16} {'parameters':>14} {'dtype':9} {'device':7} {'kernels':7} {'GFLOP':>9} "
            f"{'work MiB':>9} {host} first parameter"
        ]
        for bucket in self.buckets:
            matrices = "-"
            if bucket.shape is not None:
                matrices = f"{bucket.num_matrices} x {bucket.shape[0]}x{bucket.shape[1]}"
            others = f" (+{bucket.num_parts - 1})" if bucket.num_parts > 1 else ""
            if offloaded:
                host = "        - " if bucket.offloaded is None else f"{bucket.offloaded.num_bytes / 2**20:>9.1f} "
            lines.append(
                f"{bucket.method:18} {matrices:>16} {bucket.numel:>14,} "
                f"{str(bucket.dtype).removeprefix('torch.'):9} {bucket.device!s:7} {bucket.kernels:7} "
                f"{bucket.flops / 1e9:>9.2f} {bucket.workspace_bytes / 2**20:>9.1f} {host} {bucket.name}{others}"
            )
        lines.append(
            f"one step: {self.flops / 1e9:.2f} GFLOP of orthogonalisation, "
            f"at most {self.peak_workspace_bytes / 2**20:.1f} MiB of temporary memory"
        )
        if self.kept_bytes:
            lines.append(f"{self.kept_bytes / 2**20:.1f} MiB for messages besides, kept between steps")
        if offloaded:
            lines.append(
                f"{sum(one.num_bytes for one in offloaded) / 2**20:.1f} MiB of state in host memory, loaded and stored "
                f"through {self.offload_buffer_bytes / 2**20:.1f} MiB of the temporary memory"
            )
        return "\n".join(lines)


def form_of(group: Mapping[str, Any], m: int, n: int, dtype: torch.dtype, device: torch.device) -> Form | None:
    """Return how a group's (m, n) matrices of a dtype are orthogonalised; None by a function of the user's."""
    if callable(group["orthogonalizer"]):
        return None
    return resolve(
        group["orthogonalizer"],
        m,
        n,
        steps=group["orthogonalizer_steps"],
        coefficients=group["coefficients"],
        compute_dtype=group["compute_dtype"],
        device_type=device.type,
        dtype=dtype,
    )


def adamw_entries(max_workspace_bytes: int | None) -> int | None:
    """Return how many entries the plain AdamW update may work on at a time, None for any number."""
    return None if max_workspace_bytes is None else max(1, max_workspace_bytes // ADAMW_BYTES)


def direction_dtype(form: Form | None, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that update directions are rounded to before they are orthogonalised.

    bfloat16 for 16-bit products: its range holds directions of any size, which are normalised only afterwards. Every
    layout rounds here, so that every layout orthogonalises the same bits.
    """
    if form is not None and form.compute_dtype in (torch.bfloat16, torch.float16):
        return torch.bfloat16
    return torch.float64 if dtype == torch.float64 else torch.float32


def update_dtype(form: Form | None, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of orthogonalised updates, in which they travel; a user's function gives that of directions."""
    return direction_dtype(form, dtype) if form is None else form.compute_dtype


def block_of(tensor: Tensor, member: Member, view: View) -> Tensor:
    """Return the member's matrices as a block of the view, or its piece of one as (1, 1, m, n) or (1, g, r, n).

    Either shares memory with a parameter's tensor.
    """
    if member.piece is None:
        return view.blocks(tensor)[member.block][member.start : member.start + member.num_matrices]
    piece = tensor[member.piece]
    return piece[None, None] if piece.ndim == 2 else piece.view(*piece.shape[:2], piece.shape[2:].numel())[None]
