"""The plan: which matrices are updated together, how, and what that costs. Frozen data, no arithmetic on weights.

A bucket is what one batched computation handles: for Muon, matrices of one shape, memory layout, dtype, device and
parameter group, as many as fit the workspace; for AdamW, all parameters of one dtype, device and group. The plan is
built once and again only when the groups change; `optimizer.plan()` returns it, and printing it gives a table.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from quintic.optim.comms.replicas import ReplicaChoice
from quintic.optim.plan.bucket import Bucket, Local
from quintic.optim.plan.offload_size import Offloaded, buffer_bytes
from quintic.optim.plan.schedule import Schedule, overlapping_bytes

__all__ = [
    "PLANNED_OPTIONS",
    "SMALL_BYTES",
    "Plan",
    "small_bytes",
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
    "state_dtype",
    "cautious",
    "decay_coupling",
    "scale_decay",
    "comms",
    "process_group",
    "replicas",
    "offload",
    "on_nonfinite",
    "tied_to",
)
"""Options of a group that the plan, or what ranks agree on, depends on: when one changes, both are made anew."""


SMALL_BYTES = 64 * 1024
"""Allowance for flags, scales and tables of a step on a CUDA device, where each takes 512 bytes at least."""


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
    choices: tuple[ReplicaChoice, ...] = ()
    """Who divides the work on parameters with several copies, where `replicas="auto"` had to choose."""
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
        stages = [bucket.stages for bucket in self.buckets if not isinstance(bucket, Local) and bucket.travels]
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
        lines += map(str, self.choices)
        if offloaded:
            lines.append(
                f"{sum(one.num_bytes for one in offloaded) / 2**20:.1f} MiB of state in host memory, loaded and stored "
                f"through {self.offload_buffer_bytes / 2**20:.1f} MiB of the temporary memory"
            )
        return "\n".join(lines)
