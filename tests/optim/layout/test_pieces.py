"""Pieces are found in tensors: matrices by their numbers through all blocks of a view, and boxes."""

import pytest
import torch

from quintic import Experts, Heads, Split
from quintic.optim.layout.pieces import Piece, block_of, positions_in, take_matrices

STACK = Split((2, 3))  # of 4 experts, each with two matrices: 8 in two blocks


@pytest.mark.parametrize(
    ("view", "shape", "positions"),
    [
        (Heads(3), (6, 5), [(0,), (1,), (2,)]),
        (Split((4, 2)), (6, 5), [(0,), (1,)]),
        (Split((1, 1), groups=3), (6, 5), [(0, 1)]),
        (STACK, (4, 5, 6), [(0, 4), (1, 5), (2, 6), (3, 7)]),
    ],
)
def test_matrices_are_numbered_through_all_blocks(view, shape, positions):
    assert positions_in(view, shape, view.units(shape)) == positions


@pytest.mark.parametrize(
    ("matrices", "expected"), [((1, 2), (slice(1, 3), slice(0, 2))), ((6,), (slice(2, 3), slice(2, 5)))]
)
def test_matrices_of_a_piece_are_views_of_the_tensor(matrices, expected):
    tensor = torch.randn(4, 5, 6)
    block = block_of(tensor, Piece("weight", 0, matrices, box=None), STACK)
    assert torch.equal(block.flatten(1, 2), tensor[expected])
    block.zero_()
    assert not tensor[expected].any()


@pytest.mark.parametrize(("box", "rows"), [((), slice(None)), (((2, 4), (0, 6)), slice(2, 4))])
def test_a_box_is_one_matrix_of_a_batch_whatever_the_view(box, rows):
    tensor = torch.randn(5, 6)
    piece = Piece("weight", 0, (0, 1), box)
    assert piece.batch_size == 1
    assert torch.equal(block_of(tensor, piece, Split((3, 2))), tensor[rows][None, None])


def test_a_matrix_that_is_not_there_is_an_error():
    with pytest.raises(IndexError, match="matrix 3 of a tensor that has only 3"):
        take_matrices(Experts().blocks(torch.randn(3, 4, 5)), (3,))
