"""Views: which matrices a parameter is made of.

Muon orthogonalises matrices; a parameter often stores several of them in one tensor (the heads of an attention
projection, a fused QKV, a stack of experts). A view offers three forms of them:

    blocks    (b, g, r, n): b matrices of g groups of r rows, m = g r, and n columns. Blocks share the parameter's
              memory, so that writing to a block writes to the parameter. g > 1 only if the rows of several matrices are
              interleaved. Filters in channels_last have columns in two dimensions, (b, g, r, c, k) with n = c k.
    batches   (b, m, n), for computing; copies if a block's rows or columns cannot be merged without one
    units     the smallest boxes of the tensor that hold whole matrices; they can be owned by different ranks

There is one block or batch per kind of matrix, that is per shape and place in the tensor. Views know nothing of
optimizers, devices or ranks.

`transposed=True` means that the tensor stores each matrix as (in_features, out_features) and not as PyTorch's
(out_features, in_features), for example GPT-2's Conv1D: blocks are then transposed, so that m counts outputs and n
inputs, as the learning-rate scale expects.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from quintic.optim.numeric.numbers import settle_integer, settle_integers

__all__ = ["Experts", "Flatten", "Heads", "Matrix", "Rows", "Split", "Unit", "View", "is_plain", "is_transposed"]


@dataclass(frozen=True)
class Unit:
    """A box of a tensor that holds whole matrices and so can be orthogonalised without the rest of the tensor.

    Args:
        box: (start, stop) for each dimension of the tensor.
        view: view of the box as a tensor with all its dimensions; each of its blocks holds one matrix.
        matrices: the places of these matrices in the view of the whole tensor: for each block of `view`, the number of
            the whole tensor's block and the index of the matrix in it.
    """

    box: tuple[tuple[int, int], ...]
    view: "View"
    matrices: tuple[tuple[int, int], ...]


class View(ABC):
    """A description of the matrices inside a tensor; equal descriptions compare equal."""

    @abstractmethod
    def blocks(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return one `(b, g, r, n)` or `(b, g, r, c, k)` view of `tensor` per kind of matrix.

        Raises:
            ValueError: the view does not fit the shape of `tensor`.
        """

    def batches(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return one `(b, m, n)` tensor per kind of matrix, without a copy if possible. Errors as `blocks`."""
        # Columns first, (b, g, r, c, k) -> (b, g, r, n), then rows -> (b, m, n).
        return tuple(block.flatten(3).flatten(1, 2) for block in self.blocks(tensor))

    def write_(self, tensor: Tensor, batches: Sequence[Tensor]) -> None:
        """Write `(b, m, n)` batches, in the order of `batches`, into `tensor`: the inverse of `batches`."""
        # Each batch in its block's shape: rows split into (g, r), and columns into (c, k) if the block has both.
        for block, batch in zip(self.blocks(tensor), batches, strict=True):
            block.copy_(batch.unflatten(1, block.shape[1:3]).unflatten(3, block.shape[3:]))

    def shapes(self, shape: Sequence[int]) -> tuple[tuple[int, int, int], ...]:
        """Return the `(b, m, n)` shapes for a tensor of `shape`, without touching data."""
        # A meta tensor is contiguous, so that blocks are (b, g, r, n).
        blocks = self.blocks(torch.empty(tuple(shape), device="meta"))
        return tuple((b, g * r, n) for b, g, r, n in (block.shape for block in blocks))

    def units(self, shape: Sequence[int]) -> tuple[Unit, ...]:
        """Return the smallest boxes of a tensor of `shape` that hold whole matrices; they tile the tensor."""
        # This default has one unit, the whole tensor, which is right only if every block is one matrix.
        counts = [b for b, _, _ in self.shapes(shape)]
        if any(count != 1 for count in counts):
            raise NotImplementedError(f"{type(self).__name__}.units must say which boxes hold its several matrices")
        whole = tuple((0, size) for size in shape)
        return (Unit(whole, self, tuple((block, 0) for block in range(len(counts)))),)


@dataclass(frozen=True)
class Matrix(View):
    """The whole 2-D tensor is one matrix."""

    transposed: bool = False

    def blocks(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return the tensor as (1, 1, m, n)."""
        _check_ndim(self, tensor, 2)
        return (_oriented(tensor, self.transposed)[None, None],)


@dataclass(frozen=True)
class Heads(View):
    """`num_heads` equal blocks of features, one matrix each: Muon per attention head.

    Args:
        num_heads: blocks; query, key and value projections have theirs along the output features.
        transposed: the tensor is (in_features, out_features).
        dim: 0 for blocks of output features, 1 for blocks of input features (attention's output projection).
    """

    num_heads: int
    transposed: bool = False
    dim: int = 0

    def __post_init__(self) -> None:
        """Check the number and the dimension."""
        settle_integer(self, "num_heads")
        if self.dim not in (0, 1):
            raise ValueError(f"{self}: dim is 0 (output features) or 1 (input features)")

    def blocks(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return the heads as (num_heads, 1, m / num_heads, n), or (num_heads, 1, m, n / num_heads) for dim 1."""
        _check_ndim(self, tensor, 2)
        matrix = _oriented(tensor, self.transposed)  # (m, n)
        if self.num_heads < 1 or matrix.shape[self.dim] % self.num_heads:
            raise ValueError(
                f"{self} does not divide the {matrix.shape[self.dim]} {('output', 'input')[self.dim]} features of "
                f"shape {tuple(tensor.shape)}; use Split or a number of heads that divides them"
            )
        # (num_heads, m / num_heads, n), or (num_heads, m, n / num_heads).
        head_size = matrix.shape[self.dim] // self.num_heads
        heads = matrix.unflatten(self.dim, (self.num_heads, head_size)).movedim(self.dim, 0)
        return (heads.unsqueeze(1),)

    def units(self, shape: Sequence[int]) -> tuple[Unit, ...]:
        """Return one unit per head."""
        ((num_heads, _, _),) = self.shapes(shape)
        # The dimension of the tensor as it is stored.
        dim = 1 - self.dim if self.transposed else self.dim
        return _slabs(shape, dim, num_heads, Matrix(self.transposed))


@dataclass(frozen=True)
class Split(View):
    """Several matrices stored side by side along the output features: fused QKV, fused gate and up.

    | layout of the output features             | view                                                              |
    |-------------------------------------------|-------------------------------------------------------------------|
    | all queries, all keys, all values         | `Split((h d, kv d, kv d))`                                        |
    | per head: query, key, value               | `Split((d, d, d), groups=h)`                                      |
    | per key/value head: its queries, key, value | `Split((h / kv d, d, d), groups=kv)`                            |
    | as before, with an output gate per query  | `Split((h / kv d, h / kv d, d, d), groups=kv)`                    |
    | gate and up alternating feature by feature | `Split((1, 1), groups=features)`                                 |

    A 3-D tensor is a stack of experts, each split alike.

    Args:
        sizes: output features of each part within one group.
        transposed: the tensor is (..., in_features, out_features).
        groups: how many times the pattern of parts repeats; the rows of one part, from all groups, are one matrix.
        heads: for each part, into how many matrices it is divided further (Muon per head); None for one each.
        names: the name of each part, which only QK-clip reads: `("query", "value", "key")`; None if unknown. Views
            that differ only in names are equal.
    """

    sizes: tuple[int, ...]
    transposed: bool = False
    groups: int = 1
    heads: tuple[int, ...] | None = None
    names: tuple[str, ...] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Accept any sequence of sizes, so that `Split([256, 256])` is hashable too."""
        settle_integer(self, "groups")
        settle_integers(self, "sizes")
        if self.names is not None:
            object.__setattr__(self, "names", tuple(self.names))
            if len(self.names) != len(self.sizes) or any(self.names.count(name) > 1 for name in ("query", "key")):
                raise ValueError(
                    f"{self}: names={self.names!r} must be one name for each part, with at most one 'query' and 'key'"
                )
        if self.heads is None:
            return
        # Heads must divide a part's features, and every group must hold whole heads.
        settle_integers(self, "heads")
        if (
            self.groups < 1
            or len(self.heads) != len(self.sizes)
            or any(
                heads < 1 or heads % self.groups or (size * self.groups) % heads
                for heads, size in zip(self.heads, self.sizes, strict=True)
            )
        ):
            raise ValueError(f"{self}: heads needs, per part, a multiple of groups that divides the part's features")

    def blocks(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return one (1, groups, size, n) block per part, or per head of a group if `heads` is set."""
        if tensor.ndim not in (2, 3) or (tensor.ndim == 3 and self.heads is not None):
            need = "2-D parameters" if self.heads is not None else "2-D parameters and 3-D stacks of experts"
            raise ValueError(f"{self} is for {need}, got shape {tuple(tensor.shape)}")
        # (experts, output features, input features), with one expert for a 2-D tensor.
        features = _oriented(tensor, self.transposed)
        features = features if tensor.ndim == 3 else features.unsqueeze(0)
        rows, total = features.shape[1], sum(self.sizes) * self.groups
        if not self.sizes or min(self.sizes) < 1 or self.groups < 1 or total != rows:
            raise ValueError(
                f"{self}: the sizes must be positive and add up, over all groups, to the {rows} output features "
                f"of shape {tuple(tensor.shape)}, they add up to {total}"
            )
        # Each part is (experts, groups, size, n): one matrix per expert, its rows from all groups.
        parts = features.unflatten(1, (self.groups, sum(self.sizes))).split(list(self.sizes), dim=2)
        if self.heads is None:
            return tuple(parts)
        # With heads each part is divided further: with one group into one block of (heads, 1, rows, n); with more into
        # a block (groups, 1, rows, n) for each head of a group.
        blocks: list[Tensor] = []
        for part, heads in zip(parts, self.heads, strict=True):
            by_head = part.squeeze(0).unflatten(1, (heads // self.groups, -1))  # (groups, heads of a group, rows, n)
            if self.groups == 1:
                blocks.append(by_head.movedim(1, 0))
            else:
                blocks += [by_head[:, index : index + 1] for index in range(heads // self.groups)]
        return tuple(blocks)

    def units(self, shape: Sequence[int]) -> tuple[Unit, ...]:
        """Return one unit per part, or per head if `heads` is set.

        The parts of several groups are interleaved, their unit is the whole tensor; of a stack, one expert.
        """
        num_blocks = len(self.shapes(shape))
        # A stack: one expert holds a matrix of each block.
        if len(shape) == 3:
            return tuple(
                Unit(_slab(shape, 0, expert, expert + 1), self, tuple((block, expert) for block in range(num_blocks)))
                for expert in range(shape[0])
            )
        # Interleaved: no smaller box than the tensor holds a whole matrix.
        if self.groups > 1 and self.heads is None:
            return super().units(shape)
        # Walk along the output features: group by group, part by part, head by head.
        heads_per_group = [heads // self.groups for heads in self.heads or (1,) * len(self.sizes)]
        dim, start = 1 if self.transposed else 0, 0
        units: list[Unit] = []
        for group in range(self.groups):
            first_block = 0  # of the current part, if every head of a group is a block
            for part, (size, heads) in enumerate(zip(self.sizes, heads_per_group, strict=True)):
                for head in range(heads):
                    # The (block, index) of this head, as `blocks` orders them for one group or several.
                    place = (part, head) if self.groups == 1 else (first_block + head, group)
                    stop = start + size // heads
                    units.append(Unit(_slab(shape, dim, start, stop), Matrix(self.transposed), (place,)))
                    start = stop
                first_block += heads
        return tuple(units)


@dataclass(frozen=True)
class Experts(View):
    """A 3-D stack (experts, m, n), one matrix per expert."""

    transposed: bool = False

    def blocks(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return the stack as (experts, 1, m, n)."""
        _check_ndim(self, tensor, 3)
        return (_oriented(tensor, self.transposed).unsqueeze(1),)

    def units(self, shape: Sequence[int]) -> tuple[Unit, ...]:
        """Return one unit per expert."""
        # A unit is a stack of one expert, (1, m, n), and so has the same view.
        ((num_experts, _, _),) = self.shapes(shape)
        return _slabs(shape, 0, num_experts, self)


@dataclass(frozen=True)
class Rows(View):
    """A bank of matrices stacked along the rows of a 2-D tensor: every `num_rows` rows are one matrix."""

    num_rows: int
    transposed: bool = False

    def __post_init__(self) -> None:
        """Check the number."""
        settle_integer(self, "num_rows")

    def blocks(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return the bank as (rows / num_rows, 1, num_rows, columns)."""
        _check_ndim(self, tensor, 2)
        if self.num_rows < 1 or tensor.shape[0] % self.num_rows:
            raise ValueError(f"{self} does not divide the {tensor.shape[0]} rows of shape {tuple(tensor.shape)}")
        # (matrices, num_rows, columns); `num_rows` counts rows as they are stored, transposed or not.
        bank = tensor.unflatten(0, (tensor.shape[0] // self.num_rows, self.num_rows))
        return (_oriented(bank, self.transposed).unsqueeze(1),)

    def units(self, shape: Sequence[int]) -> tuple[Unit, ...]:
        """Return one unit per `num_rows` rows."""
        ((count, _, _),) = self.shapes(shape)
        return _slabs(shape, 0, count, Matrix(self.transposed))


@dataclass(frozen=True)
class Flatten(View):
    """A convolution (out_channels, in_channels / groups, *kernel) as matrices (out_channels / groups, the rest).

    The columns of a matrix are in the order (in_channels, *kernel) for any memory format: `channels_last` gives the
    same matrices. Transposed convolutions, (in_channels, out_channels / groups, *kernel), are `transposed`: their
    matrices are (the rest, in_channels / groups).

    Args:
        transposed: the matrices are the transposes of the flattened tensor.
        groups: the convolution's groups; each is a matrix, since groups share no features.
    """

    transposed: bool = False
    groups: int = 1

    def __post_init__(self) -> None:
        """Check the number."""
        settle_integer(self, "groups")

    def blocks(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return the filters as (groups, 1, m, n), in channels_last as (groups, 1, m, channels, kernel).

        Transposed filters in channels_last are (groups, channels, kernel, n): groups of rows.
        """
        if tensor.ndim < 3:
            raise ValueError(f"{self} is for convolutions (3 or more dimensions), got shape {tuple(tensor.shape)}")
        # Both kinds of convolution keep their groups along the first dimension.
        if self.groups < 1 or tensor.shape[0] % self.groups:
            raise ValueError(
                f"{self} does not divide the {tensor.shape[0]} channels in front of shape {tuple(tensor.shape)}"
            )
        # (groups, channels in front of a group, the other channels, *kernel)
        grouped = tensor.unflatten(0, (self.groups, tensor.shape[0] // self.groups))
        columns = tensor.shape[1:].numel()
        # A contiguous tensor: its columns are one dimension, without a copy.
        try:
            flat = grouped.view(*grouped.shape[:2], columns)
            # (groups, m, n) -> (groups, 1, m, n)
            return (_oriented(flat, self.transposed).unsqueeze(1),)
        except RuntimeError:
            pass
        # channels_last: only the kernel's dimensions merge, (groups, channels in front, the other channels, kernel).
        try:
            filters = grouped.view(*grouped.shape[:3], columns // max(1, tensor.shape[1]))
        except RuntimeError as error:
            raise ValueError(
                f"{self}: a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} cannot be flattened "
                f"without a copy; make the parameter contiguous, or channels_last"
            ) from error
        return (filters.permute(0, 2, 3, 1) if self.transposed else filters.unsqueeze(1),)

    def units(self, shape: Sequence[int]) -> tuple[Unit, ...]:
        """Return one unit per group."""
        # Groups lie one after the other along the first dimension; each is a convolution without groups.
        ((count, _, _),) = self.shapes(shape)
        return _slabs(shape, 0, count, Flatten(self.transposed))


def _check_ndim(view: View, tensor: Tensor, ndim: int) -> None:
    if tensor.ndim != ndim:
        raise ValueError(f"{view} is for {ndim}-D parameters, got shape {tuple(tensor.shape)}")


def _oriented(tensor: Tensor, transposed: bool) -> Tensor:
    return tensor.mT if transposed else tensor


def _slab(shape: Sequence[int], dim: int, start: int, stop: int) -> tuple[tuple[int, int], ...]:
    return tuple((start, stop) if index == dim else (0, size) for index, size in enumerate(shape))


def _slabs(shape: Sequence[int], dim: int, count: int, view: View) -> tuple[Unit, ...]:
    """Return `count` equal units along `dim`, which hold the matrices of the only block in order."""
    # A tensor without entries may have no matrices.
    thickness = shape[dim] // max(count, 1)
    return tuple(
        Unit(_slab(shape, dim, index * thickness, (index + 1) * thickness), view, ((0, index),))
        for index in range(count)
    )


@lru_cache(maxsize=256)
def is_plain(view: View, unit_shape: tuple[int, ...]) -> bool:
    """Return whether a unit of `unit_shape` holds one matrix or its transpose, without groups of rows."""
    blocks = view.blocks(torch.empty(unit_shape, device="meta"))
    # One block (b, g, r, n) with b = g = 1.
    return len(blocks) == 1 and blocks[0].shape[:2] == (1, 1)


def is_transposed(view: View) -> bool:
    """Return whether a view's tensor stores matrices as (in_features, out_features)."""
    return bool(getattr(view, "transposed", False))
