"""Logs each plan that is built: `logging.getLogger("quintic")` at level DEBUG."""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence

from quintic.optim.groups.group import Group
from quintic.optim.plan.bucket import Bucket, Gathered, Sharded
from quintic.optim.plan.plan import Plan

__all__ = ["log_plan"]

_logger = logging.getLogger("quintic")


def log_plan(plan: Plan, groups: Sequence[Group], rank: int) -> None:
    """Log the algorithm and view of each parameter, then the work and the owners of each bucket."""
    # The lines of a large model are many; do not make them for nothing.
    if not _logger.isEnabledFor(logging.DEBUG):
        return
    # Parameters, the plan as a whole, then bucket by bucket.
    for group in groups:
        how = f"{group.algorithm}, {group.view}" if group.rule.orthogonalizes else group.algorithm
        for name, param in zip(group.param_names, group.params, strict=True):
            _logger.debug("%s %s: %s, parameter group %d", name, tuple(param.shape), how, group.number)
    _logger.debug(
        "plan of rank %d: %d buckets, %.3f GFLOP of orthogonalisation a step, balance %.2f (busiest rank over the "
        "mean), at most %.1f MiB of temporary memory",
        rank,
        len(plan.buckets),
        plan.flops / 1e9,
        plan.balance,
        plan.peak_workspace_bytes / 2**20,
    )
    for number, bucket in enumerate(plan):
        # As "3x1024x4096,": this rank's matrices of the bucket.
        matrices = "" if bucket.shape is None else f" {bucket.num_matrices}x{bucket.shape[0]}x{bucket.shape[1]},"
        _logger.debug(
            "bucket %d: %s,%s %d entries, %.3f GFLOP on this rank",
            number,
            bucket.method,
            matrices,
            bucket.numel,
            bucket.flops / 1e9,
        )
        # Every rank logs all owners, so that the logs of ranks can be compared.
        for owner, names in _owners_of(bucket, rank):
            counted = [name if count == 1 else f"{name} ({count} shards)" for name, count in Counter(names).items()]
            _logger.debug("bucket %d: rank %d owns %s", number, owner, ", ".join(counted) or "nothing")


def _owners_of(bucket: Bucket, rank: int) -> Iterator[tuple[int, Sequence[str]]]:
    """Yield each rank of a bucket with the names of its shards or units; a name may occur several times."""
    # Units and shards are in the order of their owners.
    if isinstance(bucket, Sharded):
        for owner, places in zip(bucket.ranks, bucket.of_owners, strict=True):
            yield owner, [shard.name for shard in bucket.shards[places]]
    elif isinstance(bucket, Gathered):
        units = iter(bucket.units.all)
        for owner, count in zip(bucket.ranks, bucket.exchange.counts, strict=True):
            yield owner, [next(units).name for _ in range(count)]
    else:
        yield rank, bucket.names
