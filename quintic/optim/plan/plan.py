"""The plan: the buckets of a step, their schedule and their costs. Frozen data, no arithmetic on weights.

A bucket is one batched computation: for Muon, matrices of one shape, memory layout, dtype, device and parameter group,
as many as fit the workspace; for AdamW, all parameters of one dtype, device and group. The plan is built once, and
again only when the groups change; `optimizer.plan()` returns it, and printing it gives a table.
"""

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch

from quintic.optim.plan.bucket import Bucket
from quintic.optim.plan.offload_size import Offloaded, buffer_bytes
from quintic.optim.plan.replicas import ReplicaChoice
from quintic.optim.plan.schedule import Schedule, overlapping_bytes
from quintic.tables import aligned, output_width, with_name

__all__ = ["SMALL_BYTES", "Plan", "bytes_beyond_gradients", "small_bytes"]

_INDENT = "    "

# With less room than this for names, a bucket gets a second line.
_ROOM_FOR_NAME = 28

SMALL_BYTES = 64 * 1024
"""Allowance for flags, scales and tables of a step on a CUDA device, where each takes at least 512 bytes."""


def small_bytes(devices: Iterable[torch.device]) -> int:
    """Return the allowance for flags and tables if one of the devices is a CUDA device, else 0."""
    return SMALL_BYTES if any(device.type == "cuda" for device in devices) else 0


def bytes_beyond_gradients(buckets: Iterable[Bucket]) -> int:
    """Return the most bytes that a step with `release_gradients=True` needs beside weights, state and all gradients.

    All are the gradients of every parameter, whether they are there or not.

    Args:
        buckets: all buckets of a step; none sends messages.
    """
    # They run in this order. A gradient is freed with the last bucket that reads it.
    ordered = sorted(buckets, key=attrgetter("workspace_bytes"))
    last = {(bucket.group, name): number for number, bucket in enumerate(ordered) for name in bucket.names}
    freed: list[Counter[torch.device]] = [Counter() for _ in ordered]
    for bucket in ordered:
        when = max(last[bucket.group, name] for name in bucket.names)
        freed[when][bucket.device] += bucket.numel * bucket.dtype.itemsize
    most, free = 0, Counter[torch.device]()
    for bucket, after in zip(ordered, freed, strict=True):
        most = max(most, bucket.workspace_bytes - free[bucket.device])
        free += after
    return most


@dataclass(frozen=True, slots=True)
class Plan:
    """All buckets of one rank, their schedule and costs."""

    # First the buckets with collectives, then the others; both are computed in this order.
    buckets: tuple[Bucket, ...]
    balance: float = 1.0
    """Floating-point operations of the busiest rank over the mean, where ranks divide the work."""
    schedule: Schedule = (None,)
    """The order in which the buckets with collectives are started, computed and finished, see `schedule.py`."""
    choices: tuple[ReplicaChoice, ...] = ()
    """How ranks divide the work on parameters with several copies, if `replicas="auto"` had to choose."""
    averaging_bytes: int = 0
    """Temporary memory for averaging gradients with `comms="replicated"`, before the buckets run."""
    cut_state_bytes: int = 0
    """Temporary memory, during the whole step, for state of 8 bits whose groups lie on several ranks."""
    release_gradients: bool = False
    """Whether every step frees all gradients, as the optimizer's option of this name says."""

    def __iter__(self) -> Iterator[Bucket]:
        """Iterate over the buckets."""
        return iter(self.buckets)

    @property
    def flops(self) -> int:
        """Return the floating-point operations of all orthogonalisations of one step."""
        return sum(bucket.flops for bucket in self.buckets)

    @property
    def peak_workspace_bytes(self) -> int:
        """Return an upper bound of the temporary bytes of a step on this rank, see `overlapping_bytes`.

        With `release_gradients`, and no messages, these are the bytes beyond weights, state and a gradient of every
        parameter, if nothing else refers to the gradients, as DDP's `gradient_as_bucket_view=True` does.
        """
        # Averaging is over before the first bucket starts, so the larger of the two counts.
        # Buckets with collectives overlap as the schedule says; the others run one at a time.
        memory = [bucket.phase_bytes for bucket in self.buckets if bucket.needs_comm]
        local_bytes = max((bucket.workspace_bytes for bucket in self.buckets if not bucket.needs_comm), default=0)
        if self._reuses_gradients:
            local_bytes = bytes_beyond_gradients(self.buckets)
        peak = overlapping_bytes(memory, self.schedule, local_bytes)
        small = small_bytes(bucket.device for bucket in self.buckets)
        return max(peak + self.offload_buffer_bytes, self.averaging_bytes) + self.cut_state_bytes + small

    @property
    def _reuses_gradients(self) -> bool:
        # Wrappers of distributed training keep buffers with gradients, so that nothing is promised beside messages.
        return self.release_gradients and not any(bucket.needs_comm for bucket in self.buckets)

    @property
    def offload_buffer_bytes(self) -> int:
        """Return the bytes of the buffers on this rank's devices through which offloaded state passes."""
        # Each device has buffers of its own, which its buckets share.
        of_devices: dict[torch.device, list[Offloaded]] = {}
        for bucket in self.buckets:
            if bucket.offloaded is not None:
                of_devices.setdefault(bucket.device, []).append(bucket.offloaded)
        return sum(map(buffer_bytes, of_devices.values()))

    def to_table(self, *, width: int | None = None) -> str:
        """Return the plan as text, with one line per bucket, or two where one would be too long.

        Args:
            width: columns of text; None for the terminal's width, or 160 if the output is not a terminal. Names that
                are too long are shortened in the middle.
        """
        if width is None:
            width = output_width()
        # Below the table: work and memory, choices about copies, offloaded state.
        beyond = " beyond the gradients, which it frees" if self._reuses_gradients else ""
        notes = [
            f"one step: {self.flops / 1e9:.2f} GFLOP of orthogonalisation, "
            f"at most {self.peak_workspace_bytes / 2**20:.1f} MiB of temporary memory{beyond}",
            *map(str, self.choices),
        ]
        if any(bucket.needs_comm and bucket.shape is not None for bucket in self.buckets):
            notes.insert(0, "counts and GFLOP of this rank's matrices; other ranks orthogonalise the others")
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
    """Return a heading and the buckets as lines of at most `width` columns of text, but never below about 70."""
    # Three blocks of cells per row, each aligned by itself: method and matrices, costs, name of the first parameter.
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
    # One line per bucket if that leaves room for names, else method and name above the costs.
    one_line = [f"{left} {right}  " for left, right in zip(what, costs, strict=True)]
    if len(one_line[0]) + min(needed, _ROOM_FOR_NAME) <= width:
        return [with_name(line, *name, width) for line, name in zip(one_line, names, strict=True)]
    lines = []
    for left, right, name in zip(what, costs, names, strict=True):
        lines += [with_name(f"{left}  ", *name, width), f"{_INDENT}{right.rstrip()}"]
    return lines


def _wrapped(lines: Sequence[str], width: int) -> list[str]:
    """Return lines of text wrapped to `width` columns; continuations are indented."""
    wrapper = textwrap.TextWrapper(max(width, 40), subsequent_indent=_INDENT, break_long_words=False)
    return [part for line in lines for part in wrapper.wrap(line)]


def _cells(bucket: Bucket, has_host: bool) -> tuple[list[str], list[str], str, str]:
    """Return the cells of one bucket: method and matrices, costs, its first parameter, and how many more it has."""
    # Matrices as "12 x 768x768"; AdamW has none.
    matrices = "-"
    if bucket.shape is not None:
        matrices = f"{bucket.num_matrices} x {bucket.shape[0]}x{bucket.shape[1]}"
    dtype = str(bucket.dtype).removeprefix("torch.")
    costs = [f"{bucket.numel:,}", dtype, str(bucket.device), bucket.kernels, f"{bucket.flops / 1e9:.2f}"]
    costs.append(f"{bucket.workspace_bytes / 2**20:.1f}")
    if has_host:
        costs.append("-" if bucket.offloaded is None else f"{bucket.offloaded.num_bytes / 2**20:.1f}")
    others = f" (+{bucket.num_pieces - 1})" if bucket.num_pieces > 1 else ""
    return [bucket.method, matrices], costs, bucket.name, others
