"""Where the entries of a matrix lie in the memory of its parameter: sizes and strides, and offsets for kernels.

Import this module only where Triton is installed (see `dispatch.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import triton
import triton.language as tl

__all__ = ["MatrixLayout", "matrix_offsets"]


@dataclass(frozen=True, slots=True)
class MatrixLayout:
    """Sizes and strides, in elements, of each matrix of a bucket in the memory of its parameter.

    A matrix has groups * rows rows and `columns` columns. Row r lies at (r // rows) * group_stride + (r % rows) *
    row_stride. Columns may come from two dimensions of the parameter, as in the filters of a convolution: column c lies
    at (c // kernel) * column_stride + (c % kernel) * kernel_stride. Otherwise `kernel` is 1.

    Kernels go through the entries in the order of memory ("physical"): if a matrix is stored by columns, rows and
    columns change their roles.
    """

    groups: int
    rows: int
    columns: int
    group_stride: int
    row_stride: int
    column_stride: int
    kernel: int = 1
    kernel_stride: int = 0

    @classmethod
    def of(cls, shape: Sequence[int], strides: Sequence[int]) -> "MatrixLayout":
        """Return the layout for a tensor of shape (groups, rows, columns) or (groups, rows, columns, kernel)."""
        (groups, rows, columns, *kernel), (group_stride, row_stride, column_stride, *kernel_stride) = shape, strides
        # The two dimensions of columns are one for the matrix: columns * kernel of them.
        within = (kernel[0], kernel_stride[0]) if kernel else (1, 0)
        return cls(groups, rows, columns * within[0], group_stride, row_stride, column_stride, *within)

    @property
    def transposed(self) -> bool:
        """Return whether the matrix is stored by columns, so that memory holds its transpose."""
        return self.groups == 1 and self.kernel == 1 and self.row_stride == 1 and self.column_stride != 1

    @property
    def numel(self) -> int:
        """Return the number of entries of one matrix."""
        return self.groups * self.rows * self.columns

    def physical(self) -> tuple[int, int, int, int, int, int, int, int]:
        """Return sizes and strides in the order of memory, as arguments of the kernels.

        They are (rows, columns, rows of a group, group stride, row stride, column stride, kernel, kernel stride).
        """
        kernel = self.kernel, self.kernel_stride
        if self.transposed:
            return self.columns, self.rows, self.columns, 0, self.column_stride, self.row_stride, *kernel
        rows = self.groups * self.rows
        return rows, self.columns, self.rows, self.group_stride, self.row_stride, self.column_stride, *kernel

    @property
    def contiguous(self) -> bool:
        """Return whether entry e of a matrix, in the order of memory, lies at offset e."""
        rows, columns, rows_of_group, group_stride, row_stride, column_stride, kernel, _ = self.physical()
        # Groups matter if there is more than one and the next does not begin right behind the last.
        grouped = rows_of_group != rows and group_stride != rows_of_group * columns
        if grouped or kernel > 1:
            return False
        # Strides of dimensions of size 1 are arbitrary.
        return (row_stride == columns or rows == 1) and (column_stride == 1 or columns == 1)


@triton.jit
def matrix_offsets(
    element,
    columns,
    rows_of_group,
    group_stride,
    row_stride,
    column_stride,
    kernel,
    kernel_stride,
    CONTIGUOUS: tl.constexpr,
    GROUPED: tl.constexpr,
    FILTERS: tl.constexpr,
):
    """Return the int64 offsets of entries of a matrix, counted in the order of memory, in its parameter.

    The arguments after `element` are those of `MatrixLayout.physical()`. int64, because the parameter may have 2^31
    entries or more although the matrix has not.
    """
    if CONTIGUOUS:
        offsets = element.to(tl.int64)
    else:
        row = element // columns
        column = element % columns
        # FILTERS (kernel > 1) and GROUPED (groups > 1) are constants, so that most matrices pay for no divisions.
        if FILTERS:
            offsets = (column // kernel).to(tl.int64) * column_stride + (column % kernel).to(tl.int64) * kernel_stride
        else:
            offsets = column.to(tl.int64) * column_stride
        if GROUPED:
            offsets += (row // rows_of_group).to(tl.int64) * group_stride
            row = row % rows_of_group
        offsets += row.to(tl.int64) * row_stride
    return offsets
