"""Sizes and numbers of tiles, Gluon's names, and descriptors of matrices, for both kernels for Hopper.

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

# Rows and columns of a tile, and terms of a sum in one stage.
TILE = gl.constexpr(128)
BLOCK_K = gl.constexpr(64)
# As many as fit into shared memory beside the two results being written.
STAGES = gl.constexpr(5)
# Rows of tiles computed one after the other, so that the L2 cache still holds their operands.
GROUP = gl.constexpr(8)

tma_load, tma_store, reinterpret, group_barrier = gluon_names()

# How a block of one matrix of a batch lies in shared memory, for the copy engine and the tensor cores alike.
LAYOUT = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)


@gluon.jit
def triangle(number):
    """Row and column of one of the pairs with column <= row, counted row by row."""
    row = ((gl.sqrt(8.0 * number + 1.0) - 1.0) * 0.5).to(gl.int32)
    row = gl.where(row * (row + 1) // 2 > number, row - 1, row)
    row = gl.where((row + 1) * (row + 2) // 2 <= number, row + 1, row)
    return row, number - row * (row + 1) // 2


@gluon.jit
def rectangle(number, rows, columns):
    """Row and column of a tile: GROUP rows at a time, column by column."""
    width = GROUP * columns
    first = (number // width) * GROUP
    height = gl.minimum(rows - first, GROUP)
    return first + (number % width) % height, (number % width) // height


def blocks_of(tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Return (batch, m, n) matrices, rows contiguous, as the copy engine sees them: a block of one at a time.

    It checks nothing, which would take the host longer than everything else about a launch; `launch` lets it be checked
    when a kernel is compiled for it.
    """
    shape, (matrix, row, column) = tensor.shape, tensor.stride()
    if shape[0] == 1:  # may be any number then; the copy engine wants multiples of 16 bytes
        matrix = shape[1] * row
    descriptor = TensorDescriptor.__new__(TensorDescriptor)
    descriptor.base, descriptor.shape, descriptor.strides = tensor, shape, (matrix, row, column)
    descriptor.block_shape, descriptor.layout = [1, rows, columns], LAYOUT
    return descriptor


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors, each of which runs one program of these kernels at a time."""
    return torch.cuda.get_device_properties(device).multi_processor_count
