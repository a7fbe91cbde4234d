"""Pieces of parameters, which a bucket steps, sends or orthogonalises, and how to find them in a tensor."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from quintic.optim.layout.layouts import Box
from quintic.optim.layout.views import Unit, View

__all__ = ["Piece", "block_of", "positions_in", "take_matrices"]


@dataclass(frozen=True, slots=True)
class Piece:
    """Some of one parameter, or all of it: consecutive matrices of one kind, or a box of a tensor."""

    # The name of the parameter.
    name: str
    # Position of the parameter in its group.
    index: int
    # The matrices that lie in it, whole or in part, as positions among all matrices of the parameter; the numbering
    # goes on from block to block of the view. () for AdamW.
    matrices: tuple[int, ...] = ()
    # Its box, in this rank's local tensors for `Bucket.members` and in the whole parameter for `Units`; () for all of
    # the tensor. None if the piece is a list of whole matrices, which the view finds.
    box: Box | None = ()

    @property
    def batch_size(self) -> int:
        """Return how many rows of a batch (b, m, n), and flags of a step's mask, the piece takes; a box takes one."""
        return len(self.matrices) if self.box is None else 1


def positions_in(view: View, shape: Sequence[int], units: Sequence[Unit]) -> list[tuple[int, ...]]:
    """Return for each unit of a tensor of `shape` the positions of its matrices among all of the tensor."""
    # The first position of each block, which has b matrices.
    first = list(accumulate((b for b, _, _ in view.shapes(shape)), initial=0))
    return [tuple(first[block] + matrix for block, matrix in unit.matrices) for unit in units]


def block_of(tensor: Tensor, piece: Piece, view: View) -> Tensor:
    """Return a piece's matrices, (b, m, n) or (b, g, r, n), or its box, (1, 1, m, n) or (1, g, r, n).

    The result shares memory with the tensor, which is like the parameter: its weight, gradient or state.
    """
    if piece.box is None:
        return take_matrices(view.blocks(tensor), piece.matrices)
    box = tensor[tuple(slice(start, stop) for start, stop in piece.box)]
    # Behind the groups g and the rows r all dimensions are columns.
    return box[None, None] if box.ndim == 2 else box.view(*box.shape[:2], box.shape[2:].numel())[None]


def take_matrices(blocks: Sequence[Tensor], matrices: Sequence[int]) -> Tensor:
    """Return consecutive matrices of one block, given all blocks of a view or values by matrix like them, (b, ...)."""
    first = matrices[0]
    for block in blocks:
        if first < len(block):
            return block[first : first + len(matrices)]
        first -= len(block)
    raise IndexError(f"matrix {matrices[0]} of a tensor that has only {matrices[0] - first}")
