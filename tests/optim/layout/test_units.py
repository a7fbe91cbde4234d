"""Units: the boxes of a tensor whose matrices can be orthogonalised apart from each other."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quintic.optim.layout.views import Experts, Flatten, Heads, Matrix, Rows, Split, Unit, View

SMALL = st.integers(1, 4)


@st.composite
def splits(draw):
    groups, sizes = draw(SMALL), draw(st.lists(SMALL, min_size=1, max_size=3))
    heads = None
    if draw(st.booleans()):
        # Per part: heads of one group, each of as many features as its size says.
        heads_of_group = [draw(SMALL) for _ in sizes]
        sizes = [size * heads for size, heads in zip(sizes, heads_of_group, strict=True)]
        heads = tuple(count * groups for count in heads_of_group)
    transposed = draw(st.booleans())
    features, others = groups * sum(sizes), draw(st.integers(0, 4))
    shape = (others, features) if transposed else (features, others)
    if heads is None and draw(st.booleans()):
        shape = (draw(st.integers(0, 3)), *shape)
    return Split(sizes, transposed, groups, heads), shape


@st.composite
def views_and_shapes(draw):
    kind = draw(st.sampled_from([Matrix, Heads, Split, Experts, Rows, Flatten]))
    transposed = draw(st.booleans())
    m, n, count = draw(st.integers(0, 4)), draw(st.integers(0, 4)), draw(SMALL)
    if kind is Matrix:
        return Matrix(transposed), (m, n)
    if kind is Heads:
        dim = draw(st.integers(0, 1))
        shape = (m * count, n) if (dim == 0) != transposed else (n, m * count)
        return Heads(count, transposed, dim), shape
    if kind is Split:
        return draw(splits())
    if kind is Experts:
        return Experts(transposed), (draw(st.integers(0, 4)), m, n)
    if kind is Rows:
        return Rows(count, transposed), (m * count, n)
    kernel = draw(st.lists(st.integers(1, 3), min_size=1, max_size=2))
    return Flatten(transposed, count), (m * count, n, *kernel)


def part(tensor, box):
    return tensor[tuple(slice(start, stop) for start, stop in box)]


def strides(tensor):
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


@given(views_and_shapes())
def test_units_tile_the_tensor(case):
    view, shape = case
    counts = torch.zeros(shape)
    for unit in view.units(shape):
        assert len(unit.box) == len(shape)
        part(counts, unit.box).add_(1)
    assert torch.equal(counts, torch.ones(shape))


@given(views_and_shapes())
def test_units_hold_the_matrices_of_the_whole_view_in_place(case):
    view, shape = case
    tensor = torch.randn(shape)
    whole = view.blocks(tensor)
    found = []
    for unit in view.units(shape):
        blocks = unit.view.blocks(part(tensor, unit.box))
        for matrix, (block, index) in zip(blocks, unit.matrices, strict=True):
            expected = whole[block][index : index + 1]
            # The same entries of the same memory, seen the same way: hence the same bits.
            assert matrix.shape == expected.shape
            assert matrix.shape[0] == 1
            assert torch.equal(matrix, expected)
            if matrix.numel():
                assert matrix.data_ptr() == expected.data_ptr()
                assert strides(matrix) == strides(expected)
        found += unit.matrices
    assert sorted(found) == [(block, index) for block, tensors in enumerate(whole) for index in range(len(tensors))]


@given(views_and_shapes())
def test_a_unit_cut_out_of_the_tensor_has_the_same_matrices(case):
    view, shape = case
    tensor = torch.randn(shape)
    batches = view.batches(tensor)
    for unit in view.units(shape):
        copy = part(tensor, unit.box).contiguous()
        assert unit.view.shapes(copy.shape) == tuple((1, *batches[block].shape[1:]) for block, _ in unit.matrices)
        for matrix, (block, index) in zip(unit.view.batches(copy), unit.matrices, strict=True):
            assert torch.equal(matrix[0], batches[block][index])


@pytest.mark.parametrize(
    ("view", "shape", "units"),
    [
        (Matrix(), (6, 4), [Unit(((0, 6), (0, 4)), Matrix(), ((0, 0),))]),
        (Flatten(True), (6, 2, 3), [Unit(((0, 6), (0, 2), (0, 3)), Flatten(True), ((0, 0),))]),
        (
            Flatten(True, 2),
            (6, 2, 3),
            [Unit(((3 * i, 3 * i + 3), (0, 2), (0, 3)), Flatten(True), ((0, i),)) for i in range(2)],
        ),
        (Experts(), (2, 3, 4), [Unit(((e, e + 1), (0, 3), (0, 4)), Experts(), ((0, e),)) for e in range(2)]),
        (Rows(3), (6, 4), [Unit(((3 * i, 3 * i + 3), (0, 4)), Matrix(), ((0, i),)) for i in range(2)]),
        (Heads(2), (6, 4), [Unit(((3 * i, 3 * i + 3), (0, 4)), Matrix(), ((0, i),)) for i in range(2)]),
        (Heads(2, True), (4, 6), [Unit(((0, 4), (3 * i, 3 * i + 3)), Matrix(True), ((0, i),)) for i in range(2)]),
        (Heads(2, dim=1), (4, 6), [Unit(((0, 4), (3 * i, 3 * i + 3)), Matrix(), ((0, i),)) for i in range(2)]),
        (Heads(2, True, 1), (6, 4), [Unit(((3 * i, 3 * i + 3), (0, 4)), Matrix(True), ((0, i),)) for i in range(2)]),
        (
            Split((4, 2), transposed=True),
            (5, 6),
            [Unit(((0, 5), (0, 4)), Matrix(True), ((0, 0),)), Unit(((0, 5), (4, 6)), Matrix(True), ((1, 0),))],
        ),
        (
            Split((4, 2), heads=(2, 1)),
            (6, 5),
            [
                Unit(((0, 2), (0, 5)), Matrix(), ((0, 0),)),
                Unit(((2, 4), (0, 5)), Matrix(), ((0, 1),)),
                Unit(((4, 6), (0, 5)), Matrix(), ((1, 0),)),
            ],
        ),
        (
            Split((1, 1), groups=3),
            (6, 5),
            [Unit(((0, 6), (0, 5)), Split((1, 1), groups=3), ((0, 0), (1, 0)))],
        ),
        # Heads within groups are not interleaved: each is a range of rows.
        (
            Split((2, 1), groups=2, heads=(4, 2)),
            (6, 5),
            [
                Unit(((row, row + 1), (0, 5)), Matrix(), ((block, group),))
                for row, (group, block) in enumerate([(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)])
            ],
        ),
        (
            Split((2, 1)),
            (2, 3, 4),
            [Unit(((e, e + 1), (0, 3), (0, 4)), Split((2, 1)), ((0, e), (1, e))) for e in range(2)],
        ),
    ],
    ids=str,
)
def test_units_are_the_documented_boxes(view, shape, units):
    assert view.units(shape) == tuple(units)
    assert len(set(view.units(shape))) == len(units)


@pytest.mark.parametrize(
    ("view", "shape"),
    [
        (Matrix(), (2, 3, 4)),
        (Heads(4), (6, 4)),
        (Split((2, 2)), (6, 4)),
        (Split((4, 2), heads=(2, 1)), (2, 6, 4)),
        (Experts(), (6, 4)),
        (Rows(4), (6, 4)),
        (Flatten(), (6, 4)),
    ],
    ids=str,
)
def test_a_view_that_does_not_fit_has_no_units(view, shape):
    with pytest.raises(ValueError, match=type(view).__name__):
        view.units(shape)


class Bank(View):
    """A view from outside: `count` matrices of one tensor, or one."""

    def __init__(self, count):
        self.count = count

    def blocks(self, tensor):
        return (tensor.unflatten(0, (self.count, -1)).unsqueeze(1),)


def test_a_view_from_outside_is_one_unit_or_must_say_which():
    view = Bank(1)
    assert view.units((4, 2)) == (Unit(((0, 4), (0, 2)), view, ((0, 0),)),)
    with pytest.raises(NotImplementedError, match=r"Bank\.units"):
        Bank(2).units((4, 2))
