"""The text of a plan: one line per bucket where the terminal is wide enough, else two."""

import textwrap
from collections.abc import Sequence

from quintic.optim.groups.names import shortened
from quintic.optim.plan.bucket import Bucket

__all__ = ["bucket_lines", "wrapped"]

_INDENT = "    "

# A name shorter than this tells too little; then a bucket gets a second line.
_ROOM_FOR_NAME = 28


def bucket_lines(buckets: Sequence[Bucket], width: int) -> list[str]:
    """Return a heading and the buckets as text of at most `width` columns, or of some 70 where that is less."""
    has_host = any(bucket.offloaded is not None for bucket in buckets)
    heading = (
        ["method", "matrices"],
        ["parameters", "dtype", "device", "kernels", "GFLOP", "work MiB", *(["host MiB"] if has_host else [])],
        "first parameter",
        "",
    )
    rows = [heading, *(_cells(bucket, has_host) for bucket in buckets)]
    what = _aligned([row[0] for row in rows], [18, -16])
    costs = _aligned([row[1] for row in rows], [-14, 9, 7, 7, -9, -9, -9])
    names = [(name, more) for _, _, name, more in rows]
    needed = max(len(name + more) for name, more in names)
    one_line = [f"{left} {right}  " for left, right in zip(what, costs, strict=True)]
    if len(one_line[0]) + min(needed, _ROOM_FOR_NAME) <= width:
        return [_with_name(line, *name, width) for line, name in zip(one_line, names, strict=True)]
    lines = []
    for left, right, name in zip(what, costs, names, strict=True):
        lines += [_with_name(f"{left}  ", *name, width), f"{_INDENT}{right.rstrip()}"]
    return lines


def wrapped(lines: Sequence[str], width: int) -> list[str]:
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


def _aligned(rows: Sequence[Sequence[str]], least: Sequence[int]) -> list[str]:
    """Return rows in columns of at least these sizes; those of negative sizes are aligned to the right."""
    columns = []
    for cells, size in zip(zip(*rows, strict=True), least, strict=False):
        longest = max(abs(size), *map(len, cells))
        columns.append([cell.rjust(longest) if size < 0 else cell.ljust(longest) for cell in cells])
    return [" ".join(row) for row in zip(*columns, strict=True)]


def _with_name(line: str, name: str, more: str, width: int) -> str:
    return f"{line}{shortened(name, max(12, width - len(line) - len(more)))}{more}"
