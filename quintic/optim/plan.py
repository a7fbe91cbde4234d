"""The plan: which parameters are updated together, and what that costs. Frozen data, no arithmetic on weights.

A bucket is what one batched computation handles: for Muon, all matrices of one shape, dtype, device and parameter
group; for AdamW, all parameters of one dtype, device and group. The plan is built once and again only when the groups
change; `optimizer.plan()` returns it, and printing it gives a table.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from quintic.optim.orthogonalize import orthogonalization_flops

__all__ = ["Bucket", "Member", "Plan", "build_plan"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """One batch of matrices of one parameter (AdamW: the whole parameter)."""

    name: str
    index: int
    """Position of the parameter in its group."""
    batch: int
    """Which of the view's batches; 0 unless the view has several matrix shapes."""
    num_matrices: int


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
    numel: int
    flops: int
    """Floating-point operations of orthogonalisation (matrix products only); 0 for AdamW."""
    workspace_bytes: int
    """Temporary memory this bucket's batched computation needs."""

    @property
    def num_matrices(self) -> int:
        """Return how many matrices the batched computation has."""
        return sum(member.num_matrices for member in self.members)


@dataclass(frozen=True, slots=True)
class Plan:
    """All buckets in the order in which they run."""

    buckets: tuple[Bucket, ...]

    def __iter__(self) -> Iterator[Bucket]:
        """Iterate over the buckets."""
        return iter(self.buckets)

    @property
    def flops(self) -> int:
        """Return the floating-point operations of all orthogonalisations of one step."""
        return sum(bucket.flops for bucket in self.buckets)

    @property
    def peak_workspace_bytes(self) -> int:
        """Return the temporary memory of the largest bucket; buckets run one after the other."""
        return max((bucket.workspace_bytes for bucket in self.buckets), default=0)

    def __str__(self) -> str:
        """Return the plan as a table with one line per bucket."""
        lines = [
            f"{'rule':7} {'matrices':>16} {'parameters':>12} {'dtype':9} {'device':7} {'GFLOP':>9} "
            f"{'work MiB':>9}  first parameter"
        ]
        for bucket in self.buckets:
            matrices = "-"
            if bucket.shape is not None:
                matrices = f"{bucket.num_matrices} x {bucket.shape[0]}x{bucket.shape[1]}"
            others = f" (+{len(bucket.members) - 1})" if len(bucket.members) > 1 else ""
            lines.append(
                f"{bucket.algorithm:7} {matrices:>16} {bucket.numel:>12,} "
                f"{str(bucket.dtype).removeprefix('torch.'):9} {bucket.device!s:7} {bucket.flops / 1e9:>9.2f} "
                f"{bucket.workspace_bytes / 2**20:>9.1f}  {bucket.members[0].name}{others}"
            )
        lines.append(
            f"one step: {self.flops / 1e9:.2f} GFLOP of orthogonalisation, "
            f"at most {self.peak_workspace_bytes / 2**20:.1f} MiB of temporary memory"
        )
        return "\n".join(lines)


def build_plan(param_groups: Sequence[Mapping[str, Any]]) -> Plan:
    """Return the plan for validated parameter groups (see `Muon.add_param_group`)."""
    buckets: list[Bucket] = []
    for group_index, group in enumerate(param_groups):
        build = _muon_buckets if group["algorithm"] == "muon" else _adamw_buckets
        buckets += build(group_index, group)
    return Plan(tuple(buckets))


def _adamw_buckets(group_index: int, group: Mapping[str, Any]) -> list[Bucket]:
    members: dict[tuple[torch.dtype, torch.device], list[Member]] = {}
    for index, (name, param) in enumerate(zip(group["param_names"], group["params"], strict=True)):
        member = Member(name=name, index=index, batch=0, num_matrices=0)
        members.setdefault((param.dtype, param.device), []).append(member)
    return [
        Bucket(
            algorithm="adamw",
            group=group_index,
            members=tuple(found),
            shape=None,
            dtype=dtype,
            device=device,
            numel=sum(group["params"][member.index].numel() for member in found),
            flops=0,
            workspace_bytes=0,
        )
        for (dtype, device), found in members.items()
    ]


def _muon_buckets(group_index: int, group: Mapping[str, Any]) -> list[Bucket]:
    members: dict[tuple[int, int, torch.dtype, torch.device], list[Member]] = {}
    for index, (name, param) in enumerate(zip(group["param_names"], group["params"], strict=True)):
        for batch, (count, m, n) in enumerate(group["view"].shapes(param.shape)):
            member = Member(name=name, index=index, batch=batch, num_matrices=count)
            members.setdefault((m, n, param.dtype, param.device), []).append(member)
    buckets = []
    for (m, n, dtype, device), found in members.items():
        per_matrix = _workspace_bytes(m, n)
        for chunk in _chunks(found, per_matrix, group["max_workspace_bytes"]):
            count = sum(member.num_matrices for member in chunk)
            buckets.append(
                Bucket(
                    algorithm="muon",
                    group=group_index,
                    members=tuple(chunk),
                    shape=(m, n),
                    dtype=dtype,
                    device=device,
                    numel=count * m * n,
                    flops=count * orthogonalization_flops(m, n),
                    workspace_bytes=count * per_matrix,
                )
            )
    return buckets


def _workspace_bytes(m: int, n: int) -> int:
    # float32 direction and update, two low-precision operands, two Gram-sized products: an upper bound in plain
    # PyTorch, where normalisation makes one more float32 copy before the first product.
    return m * n * (4 + 4 + 4 + 2 + 2) + 2 * 2 * min(m, n) ** 2


def _chunks(members: Sequence[Member], per_matrix: int, budget: int | None) -> Iterator[list[Member]]:
    """Split members so that no chunk's workspace exceeds the budget (a single member always fits)."""
    chunk: list[Member] = []
    used = 0
    for member in members:
        need = member.num_matrices * per_matrix
        if chunk and budget is not None and used + need > budget:
            yield chunk
            chunk, used = [], 0
        chunk.append(member)
        used += need
    if chunk:
        yield chunk
