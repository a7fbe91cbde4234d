"""Division of a launch's programs among tensors of different sizes, which they find by address.

Import this module only where Triton is installed (see `dispatch.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["TRITON_DTYPE", "TilePrograms", "divide_tiles", "pointers_at", "tile_of"]

TRITON_DTYPE = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

# Tensors with more programs than this are launched alone: a look into the tables costs more than a launch.
_ALONE_PROGRAMS = 2048


@dataclass(frozen=True, slots=True)
class TilePrograms:
    """The tensor and the tile of each program."""

    alone: tuple[tuple[int, int], ...]
    """(number, programs) of each large tensor: one launch each."""
    tensor_of_program: Tensor
    """(p,) int32: number of each program's tensor among the small ones."""
    tile_of_program: Tensor
    """(p,) int32: number of its tile in that tensor."""

    def launches(self) -> list[tuple[int, int]]:
        """Return (number of a tensor, its programs) for each launch; number -1 launches all small tensors together."""
        together = self.tensor_of_program.shape[0]
        return [*self.alone, *([(-1, together)] if together else [])]


def divide_tiles(numels: Sequence[int], block: int) -> TilePrograms:
    """Return the division for tensors of so many entries, on the CPU.

    Args:
        numels: entries of each tensor.
        block: entries of a tile.
    """
    tiles = [-(-numel // block) for numel in numels]
    alone = tuple((number, count) for number, count in enumerate(tiles) if count > _ALONE_PROGRAMS)
    small = torch.tensor([0 if count > _ALONE_PROGRAMS else count for count in tiles], dtype=torch.int64, device="cpu")
    tensors = torch.repeat_interleave(torch.arange(len(tiles), device="cpu"), small)
    first_program = (small.cumsum(0) - small)[tensors]
    return TilePrograms(alone, tensors.int(), (torch.arange(len(tensors), device="cpu") - first_program).int())


@triton.jit
def tile_of(tensor_of_program, tile_of_program, only_tensor, ALONE: tl.constexpr):
    """Return the tensor and the tile of a program, the latter as int64: a tile's start may lie beyond 2^31."""
    if ALONE:
        tensor = only_tensor
        tile = tl.program_id(0)
    else:
        tensor = tl.load(tensor_of_program + tl.program_id(0))
        tile = tl.load(tile_of_program + tl.program_id(0))
    return tensor, tile.to(tl.int64)


@triton.jit
def pointers_at(base, offsets, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """Return pointers to entries `offsets` of the tensor at address `base`."""
    pointers = base.to(tl.pointer_type(dtype)) + offsets
    if ALIGNED:
        # Addresses from a table carry no alignment: without the hint every entry would be a load of its own.
        pointers = tl.max_contiguous(tl.multiple_of(pointers, 16), 16)
    return pointers
