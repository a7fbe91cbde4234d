"""Tile sizes, numbering of tiles, and tensor descriptors, for both Hopper kernels: `hopper.py` and `hopper_program.py`.

Import this module only where Triton is installed.
"""

import functools

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._layouts import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quintic.versions import gluon_names

__all__ = [
    "BLOCK_K",
    "STAGES",
    "TILE",
    "blocks_of",
    "group_barrier",
    "multiprocessors",
    "rectangle",
    "reinterpret",
    "tma_load",
    "tma_store",
    "triangle",
]

# Rows and columns of a tile of the result, and terms of a sum that one stage of the ring holds.
TILE = gl.constexpr(128)
BLOCK_K = gl.constexpr(64)
# As many stages as fit into shared memory beside the two results being written: 5 of 32 KiB and 2 of 32 KiB, of the
# 227 KiB that a program may have.
STAGES = gl.constexpr(5)
# Rows of tiles that are computed column by column, so that the L2 cache still holds their operands.
GROUP = gl.constexpr(8)

# Names that differ between versions of Triton.

tma_load, tma_store, reinterpret, group_barrier = gluon_names()

# Layout of a block (1, rows, columns) in shared memory, which both the copy engine and the tensor cores understand.
# Swizzled by 128 bytes, the widest pattern, against bank conflicts.
LAYOUT = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)


@gluon.jit
def triangle(number):
    """Return (row, column) of the tile with this number, among tiles with column <= row counted row by row."""
    # Inverts number = row (row + 1) / 2 + column. The root may be off by one, which the next two lines mend.
    row = ((gl.sqrt(8.0 * number + 1.0) - 1.0) * 0.5).to(gl.int32)
    row = gl.where(row * (row + 1) // 2 > number, row - 1, row)
    row = gl.where((row + 1) * (row + 2) // 2 <= number, row + 1, row)
    return row, number - row * (row + 1) // 2


@gluon.jit
def rectangle(number, rows, columns):
    """Return (row, column) of the tile with this number: GROUP rows at a time, and these column by column."""
    # `width` tiles per group of rows; the last group may have fewer than GROUP rows.
    width = GROUP * columns
    first = (number // width) * GROUP
    height = gl.minimum(rows - first, GROUP)
    return first + (number % width) % height, (number % width) // height


def blocks_of(tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Return a tensor descriptor of (batch, m, n) matrices with contiguous rows, in blocks (1, rows, columns).

    The checks of `TensorDescriptor` are skipped, since they would take longer than the rest of a launch; `launch` runs
    them when a kernel is compiled for the descriptor.
    """
    shape, (matrix, row, column) = tensor.shape, tensor.stride()
    if shape[0] == 1:
        # The stride of a batch of one is arbitrary, but the copy engine needs a multiple of 16 bytes.
        matrix = shape[1] * row
    descriptor = TensorDescriptor.__new__(TensorDescriptor)
    descriptor.base, descriptor.shape, descriptor.strides = tensor, shape, (matrix, row, column)
    descriptor.block_shape, descriptor.layout = [1, rows, columns], LAYOUT
    return descriptor


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a device; each runs one program of these kernels at a time."""
    return torch.cuda.get_device_properties(device).multi_processor_count
