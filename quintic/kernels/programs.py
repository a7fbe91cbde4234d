"""Assigns the programs of one launch to the tiles of many tensors of different sizes.

The host makes two tables, with the tensor and the tile of each program. A kernel looks its program up in them and finds
the tensor through a third table, of addresses: it is launched once for all tensors instead of once for each.

Import this module only where Triton is installed (see `dispatch.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["TRITON_DTYPE", "TilePrograms", "divide_tiles", "pointers_at", "tile_of"]

TRITON_DTYPE = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.int8: tl.int8,
    torch.uint8: tl.uint8,
}

# Tensors with more tiles than this get a launch each: for that many programs, looking into the tables takes longer than
# a launch.
_MAX_TABLE_TILES = 2048


@dataclass(frozen=True, slots=True)
class TilePrograms:
    """Which tensor and tile each program of a launch works on."""

    large: tuple[tuple[int, int], ...]
    """(index of the tensor, number of its tiles) of each large tensor, which gets a launch of its own."""
    tensor_of_program: Tensor
    """(p,) int32: index of each program's tensor, in the launch of all small tensors."""
    tile_of_program: Tensor
    """(p,) int32: index of each program's tile within that tensor."""

    def launches(self) -> list[tuple[int, int]]:
        """Return (index of the tensor, number of programs) of each launch; index -1 stands for all small tensors."""
        small = self.tensor_of_program.shape[0]
        return [*self.large, *([(-1, small)] if small else [])]


def divide_tiles(numels: Sequence[int], block: int) -> TilePrograms:
    """Return the programs for tensors with these numbers of entries; the tables are on the CPU.

    Args:
        numels: number of entries of each tensor.
        block: number of entries of a tile.
    """
    tiles = [-(-numel // block) for numel in numels]
    large = tuple((index, count) for index, count in enumerate(tiles) if count > _MAX_TABLE_TILES)
    # Large tensors have no programs in the launch of the small ones.
    small = torch.tensor([0 if count > _MAX_TABLE_TILES else count for count in tiles], dtype=torch.int64, device="cpu")
    tensors = torch.repeat_interleave(torch.arange(len(tiles), device="cpu"), small)
    # The first program of each program's tensor: what remains of a program's number is the tile within the tensor.
    first_program = (small.cumsum(0) - small)[tensors]
    return TilePrograms(large, tensors.int(), (torch.arange(len(tensors), device="cpu") - first_program).int())


@triton.jit
def tile_of(tensor_of_program, tile_of_program, only_tensor, ONE_TENSOR: tl.constexpr):
    """Return the indices of this program's tensor and tile, the latter as int64: tile * block may exceed 2^31."""
    # With ONE_TENSOR all programs work on tensor `only_tensor`, and the tables are not read.
    if ONE_TENSOR:
        tensor = only_tensor
        tile = tl.program_id(0)
    else:
        tensor = tl.load(tensor_of_program + tl.program_id(0))
        tile = tl.load(tile_of_program + tl.program_id(0))
    return tensor, tile.to(tl.int64)


@triton.jit
def pointers_at(base, offsets, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """Return pointers to the entries `offsets` of the tensor of dtype `dtype` at the int64 address `base`."""
    pointers = base.to(tl.pointer_type(dtype)) + offsets
    if ALIGNED:
        # The compiler knows nothing about an address from a table. Without this promise, that 16 entries in a row begin
        # at a multiple of 16 bytes, it would load every entry separately.
        pointers = tl.max_contiguous(tl.multiple_of(pointers, 16), 16)
    return pointers
