"""Plans offloaded state: the entries that are loaded at a time, and the sizes of buffers on the device.

A bucket's state is loaded into one buffer while another bucket computes in a second and a third is stored back. A
bucket of matrices is small enough to be loaded as a whole; one of AdamW parameters is divided into pieces. Only numbers
here; `step/offload/` moves the state.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import torch

from quintic.optim.groups.group import Group
from quintic.optim.rules.rule import MASTER_SPECS

__all__ = [
    "DIRECTIONS",
    "OFFLOAD_BYTES",
    "POOL_BUFFERS",
    "WEIGHTS",
    "MemberEntries",
    "Offloaded",
    "adamw_pieces",
    "buffer_bytes",
    "buffers",
    "offloaded_bytes",
    "offloaded_entries",
]

OFFLOAD_BYTES = 128 * 2**20
"""The most state that is loaded at a time, except for a single larger matrix: small in comparison with the memory that
offload saves, and large enough that a copy's fixed cost does not matter."""

POOL_BUFFERS = 3
"""The number of buffers that loads take in turn: one is loaded, one used and one stored."""


DIRECTIONS, WEIGHTS = range(2)
"""The two passes of a bucket that need state: one computes directions, or makes AdamW's whole update, and the other
writes weights. Each has buffers of its own."""

MemberEntries: TypeAlias = tuple[int, slice | None]
"""A member of a bucket by its position, and the range of its memory that is meant; None for all of it."""

# AdamW's ranges begin at multiples of this many entries, so that kernels find them aligned.
_MULTIPLE = 64


class Offloaded(NamedTuple):
    """The offloaded state of a bucket, in bytes, and the pieces that it is computed in."""

    num_bytes: int
    """Loaded and stored in a step."""
    # The bytes on the device at a time differ between passes, and are fewer than all with several pieces.
    directions: int
    """On the device at a time while directions are computed; with AdamW, during its whole update."""
    weights: int
    """On the device at a time while weights are written: masters, and state that stages on whole matrices advanced."""
    pieces: tuple[tuple[MemberEntries, ...], ...]
    """The entries that are loaded at a time. Matrices are one piece; none where this rank has no members."""

    @property
    def num_loads(self) -> int:
        """Return the number of times that at most `directions` bytes are loaded."""
        return len(self.pieces)


def adamw_pieces(
    group: Group, dtype: torch.dtype, numels: Sequence[int], *, has_gaps: bool
) -> Iterator[tuple[MemberEntries, ...]]:
    """Yield the pieces of a bucket of AdamW parameters, each small enough to be loaded at a time.

    Args:
        group: the bucket's group, with `offload=True`.
        dtype: of the weights.
        numels: the number of entries of each member on this rank.
        has_gaps: whether the members have gaps in memory; then none is divided, however large it is.
    """
    entries = offloaded_entries(group, dtype)
    assert entries is not None
    limit = max(entries // _MULTIPLE, 1) * _MULTIPLE
    piece: list[MemberEntries] = []
    free = limit
    for number, numel in enumerate(numels):
        # Whole, in this piece or the next.
        if numel <= limit or has_gaps:
            if numel > free and piece:
                yield tuple(piece)
                piece, free = [], limit
            piece.append((number, None))
            free = max(0, free - numel) // _MULTIPLE * _MULTIPLE
            continue
        # In ranges that fill up this piece and further ones.
        start = 0
        while start < numel:
            if not free:
                yield tuple(piece)
                piece, free = [], limit
            stop = min(start + free, numel)
            piece.append((number, slice(start, stop)))
            free = (free - (stop - start)) // _MULTIPLE * _MULTIPLE
            start = stop
    if piece:
        yield tuple(piece)


def offloaded_bytes(group: Group, dtype: torch.dtype) -> int:
    """Return the bytes of buffers that one loaded entry of a parameter needs in all passes; 0 without offload."""
    if not group.offload:
        return 0
    # State of the parameter's shape; smaller state stays on the device. A master needs a 16-bit weight.
    specs = [spec for spec in group.rule.state if spec.shape == "param"]
    # Loaded in one pass, for the stages on whole matrices, and stored in the other.
    specs += group.rule.matrix_state
    if dtype.itemsize < 4 and group.master is not None:
        # Loaded twice, if stages on whole matrices read weights.
        specs += [MASTER_SPECS[group.master]] * (1 + group.rule.reads_weights)
    # Averages of 8 bits count as float32, as they are for some parameters.
    state_dtype = None if group.state_dtype == "int8" else group.state_dtype
    return sum(spec.dtype_for(dtype, state_dtype).itemsize for spec in specs)


def offloaded_entries(group: Group, dtype: torch.dtype) -> int | None:
    """Return the largest number of entries that a bucket may have with offload; None without offload."""
    per_entry = offloaded_bytes(group, dtype)
    if not per_entry:
        return None
    # One load must not exceed `OFFLOAD_BYTES`, nor all buffers the workspace.
    budget = group.max_workspace_bytes
    return max(1, min(OFFLOAD_BYTES, OFFLOAD_BYTES if budget is None else budget // POOL_BUFFERS) // per_entry)


def buffers(offloaded: Sequence[Offloaded], of_pass: int) -> tuple[int, int]:
    """Return the number of one device's buffers for a pass, and the bytes of each; `offloaded` are its buckets."""
    sizes = [one.directions if of_pass == DIRECTIONS else one.weights for one in offloaded]
    # No more buffers than loads; each must hold the largest one.
    number = sum(one.num_loads for one, size in zip(offloaded, sizes, strict=True) if size)
    return min(number, POOL_BUFFERS), max(sizes, default=0)


def buffer_bytes(offloaded: Sequence[Offloaded]) -> int:
    """Return the bytes of all buffers on one device, which has the buckets `offloaded`."""
    return sum(number * size for number, size in (buffers(offloaded, of_pass) for of_pass in (DIRECTIONS, WEIGHTS)))
