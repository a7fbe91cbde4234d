"""The plan: which matrices are updated together, how, and what that costs. Frozen data, no arithmetic on weights.

A bucket is what one batched computation handles: for Muon, matrices of one shape, memory layout, dtype, device and
parameter group, as many as fit the workspace; for AdamW, all parameters of one dtype, device and group. The plan is
built once and again only when the groups change; `optimizer.plan()` returns it, and printing it gives a table.
"""

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from quintic.optim.plan.bucket import Bucket, Local
from quintic.optim.plan.offload_size import Offloaded, buffer_bytes
from quintic.optim.plan.replicas import ReplicaChoice
from quintic.optim.plan.schedule import Schedule, overlapping_bytes
from quintic.tables import aligned, output_width, with_name

__all__ = ["SMALL_BYTES", "Plan", "small_bytes"]

_INDENT = "    "

# A name shorter than this tells too little; then a bucket gets a second line.
_ROOM_FOR_NAME = 28

SMALL_BYTES = 64 * 1024
"""Allowance for flags, scales and tables of a step on a CUDA device, where each takes 512 bytes at least."""


def small_bytes(devices: Iterable[torch.device]) -> int:
    """Return the temporary bytes of flags and tables on devices."""
    return SMALL_BYTES if any(device.type == "cuda" for device in devices) else 0


@dataclass(frozen=True, slots=True)
class Plan:
    """All buckets: those with collectives in the order in which they are worked on, and the others in theirs."""

    buckets: tuple[Bucket, ...]
    balance: float = 1.0
    """Floating-point operations of the busiest rank over the mean, where ranks divide the work."""
    schedule: Schedule = (None,)
    """In which order the parts of the buckets with collectives are run."""
    choices: tuple[ReplicaChoice, ...] = ()
    """The ranks that divide the work on parameters with several copies, where `replicas="auto"` had to choose."""
    averaging_bytes: int = 0
    """Temporary memory of averaging gradients with `comms="replicated"`, before the buckets run."""

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
        stages = [bucket.stages for bucket in self.buckets if not isinstance(bucket, Local) and bucket.needs_comm]
        local_bytes = max((bucket.workspace_bytes for bucket in self.buckets if not bucket.needs_comm), default=0)
        peak = overlapping_bytes(stages, self.schedule, local_bytes)
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

    def to_table(self, *, width: int | None = None) -> str:
        """Return the plan as text, with one line per bucket, or two where one would be too long.

        Args:
            width: columns of text; None for the terminal's width, or 160 where the output is no terminal. Names that
                are too long are shortened in the middle.
        """
        if width is None:
            width = output_width()
        notes = [
            f"one step: {self.flops / 1e9:.2f} GFLOP of orthogonalisation, "
            f"at most {self.peak_workspace_bytes / 2**20:.1f} MiB of temporary memory",
            *map(str, self.choices),
        ]
        offloaded = [bucket.offloaded for bucket in self.buckets if bucket.offloaded is not None]
        if offloaded:
            notes.append(
                f"{sum(one.num_bytes for one in offloaded) / 2**20:.1f} MiB of state in host memory, loaded and stored "
                f"through {self.offload_buffer_bytes / 2**20:.1f} MiB of the temporary memory"
            )
        return "\n".join([*_bucket_lines(self.buckets, width), *_wrapped(notes, width)])

    def __str__(self) -> str:
        """Return the plan as a table that fits the terminal."""
        return self.to_table()


def _bucket_lines(buckets: Sequence[Bucket], width: int) -> list[str]:
    """Return a heading and the buckets as text of at most `width` columns, or of some 70 where that is less."""
    has_host = any(bucket.offloaded is not None for bucket in buckets)
    heading = (
        ["method", "matrices"],
        ["parameters", "dtype", "device", "kernels", "GFLOP", "work MiB", *(["host MiB"] if has_host else [])],
        "first parameter",
        "",
    )
    rows = [heading, *(_cells(bucket, has_host) for bucket in buckets)]
    what = aligned([row[0] for row in rows], [18, -16], gap=" ")
    costs = aligned([row[1] for row in rows], [-14, 9, 7, 7, -9, -9, -9], gap=" ")
    names = [(name, more) for _, _, name, more in rows]
    needed = max(len(name + more) for name, more in names)
    one_line = [f"{left} {right}  " for left, right in zip(what, costs, strict=True)]
    if len(one_line[0]) + min(needed, _ROOM_FOR_NAME) <= width:
        return [with_name(line, *name, width) for line, name in zip(one_line, names, strict=True)]
    lines = []
    for left, right, name in zip(what, costs, names, strict=True):
        lines += [with_name(f"{left}  ", *name, width), f"{_INDENT}{right.rstrip()}"]
    return lines


def _wrapped(lines: Sequence[str], width: int) -> list[str]:
    """Return lines of text, those longer than `width` continued on indented ones."""
    wrapper = textwrap.TextWrapper(max(width, 40), subsequent_indent=_INDENT, break_long_words=False)
    return [part for line in lines for part in wrapper.wrap(line)]


def _cells(bucket: Bucket, has_host: bool) -> tuple[list[str], list[str], str, str]:
    """Return the work, its cost, the first parameter, and the number of those that follow it."""
    matrices = "-"
    if bucket.shape is not None:
        matrices = f"{bucket.num_matrices} x {bucket.shape[0]}x{bucket.shape[1]}"
    dtype = str(bucket.dtype).removeprefix("torch.")
    costs = [f"{bucket.numel:,}", dtype, str(bucket.device), bucket.kernels, f"{bucket.flops / 1e9:.2f}"]
    costs.append(f"{bucket.workspace_bytes / 2**20:.1f}")
    if has_host:
        costs.append("-" if bucket.offloaded is None else f"{bucket.offloaded.num_bytes / 2**20:.1f}")
    others = f" (+{bucket.num_parts - 1})" if bucket.num_parts > 1 else ""
    return [bucket.method, matrices], costs, bucket.name, others
