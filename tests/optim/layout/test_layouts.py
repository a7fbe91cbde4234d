"""Layouts without processes: cuts against `torch.chunk` done by hand, and the arithmetic of boxes."""

import itertools
import math
import pickle
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from quintic.optim.layout.layouts import (
    Layout,
    intersection,
    layout_of,
    local_tensor,
    mesh_layout,
    numel_of,
    relative,
    replicated_layout,
    size_of,
)

SIZES = st.one_of(st.integers(0, 4), st.integers(5, 40))


@st.composite
def cuttings(draw):
    """A shape, a mesh of shuffled ranks, which tensor dimension each mesh dimension cuts, and in which order."""
    shape = tuple(draw(st.lists(SIZES, min_size=1, max_size=3)))
    mesh_shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    ranks = draw(st.permutations(range(2 * math.prod(mesh_shape))))[: math.prod(mesh_shape)]
    dims = [draw(st.sampled_from([None, *range(len(shape))])) for _ in mesh_shape]
    order = draw(st.permutations(range(len(mesh_shape))))
    return shape, torch.tensor(ranks).view(mesh_shape), dims, order


def placements_of(mesh_shape, dims, order):
    """PyTorch's placements for cuts in this order: `_StridedShard` where a later mesh dimension has cut before."""
    placements = []
    for mesh_dim, dim in enumerate(dims):
        if dim is None:
            placements.append(Replicate())
            continue
        before = order[: order.index(mesh_dim)]
        parts = math.prod(mesh_shape[other] for other in before if dims[other] == dim and other > mesh_dim)
        placements.append(Shard(dim) if parts == 1 else _StridedShard(dim, split_factor=parts))
    return placements


def chunks(tensor, count, dim):
    pieces = list(torch.chunk(tensor, count, dim))
    return pieces + [tensor.narrow(dim, 0, 0)] * (count - len(pieces))


def cut_by_hand(tensor, mesh, dims, order):
    """The box of each rank when every mesh dimension in turn cuts with `torch.chunk`."""
    held = {}
    for coordinate in itertools.product(*map(range, mesh.shape)):
        piece = tensor
        for mesh_dim in order:
            if dims[mesh_dim] is not None:
                piece = chunks(piece, mesh.shape[mesh_dim], dims[mesh_dim])[coordinate[mesh_dim]]
        held[int(mesh[coordinate])] = piece
    return held


def numbered(shape):
    return torch.arange(math.prod(shape)).view(shape)


def slices_of(box):
    return tuple(slice(start, stop) for start, stop in box)


def assert_copies_tile(layout):
    counts = torch.zeros(layout.num_copies, *layout.shape)
    for box, copy in zip(layout.boxes, layout.copies, strict=True):
        counts[copy][slices_of(box)] += 1
    assert torch.equal(counts, torch.ones_like(counts))


@given(cuttings())
def test_boxes_are_what_chunk_after_chunk_leaves(cutting):
    shape, mesh, dims, order = cutting
    layout = mesh_layout(shape, mesh, placements_of(mesh.shape, dims, order))
    assert layout.shape == shape
    assert layout.ranks == tuple(mesh.flatten().tolist())
    for rank, piece in cut_by_hand(numbered(shape), mesh, dims, order).items():
        held = numbered(shape)[slices_of(layout.box_of(rank))]
        assert held.shape == piece.shape == size_of(layout.box_of(rank))
        assert torch.equal(held, piece)


@given(cuttings())
def test_boxes_of_each_copy_tile_the_tensor(cutting):
    shape, mesh, dims, order = cutting
    layout = mesh_layout(shape, mesh, placements_of(mesh.shape, dims, order))
    assert layout.num_copies == math.prod(size for size, dim in zip(mesh.shape, dims, strict=True) if dim is None)
    assert_copies_tile(layout)


@pytest.mark.parametrize(
    ("rows", "ranks", "starts"),
    [
        (18, 8, [0, 3, 6, 9, 12, 15, 18, 18]),
        (3, 4, [0, 1, 2, 3]),
        (1, 4, [0, 1, 1, 1]),
        (0, 3, [0, 0, 0]),
        (16, 4, [0, 4, 8, 12]),
        (5, 1, [0]),
    ],
)
def test_shard_gives_the_last_ranks_less_or_nothing(rows, ranks, starts):
    layout = mesh_layout((rows, 2), range(ranks), [Shard(0)])
    assert layout.boxes == tuple(((start, stop), (0, 2)) for start, stop in itertools.pairwise([*starts, rows]))
    assert layout.copies == (0,) * ranks


def test_rows_cut_by_tensor_parallel_and_then_by_fsdp_stay_contiguous():
    layout = mesh_layout((7, 2), [[0, 1], [2, 3], [4, 5]], [_StridedShard(0, split_factor=2), Shard(0)])
    # Tensor parallel: rows 0-3 and 4-6; FSDP cuts each of them in three.
    assert [box[0] for box in layout.boxes] == [(0, 2), (4, 5), (2, 4), (5, 6), (4, 4), (6, 7)]


def test_hybrid_sharding_has_a_copy_per_replica():
    layout = mesh_layout((5, 2), [[4, 6], [5, 7]], [Replicate(), Shard(0)])
    assert layout.copies == (0, 0, 1, 1)
    assert layout.box_of(6) == layout.box_of(7) == ((3, 5), (0, 2))
    assert not layout.is_replicated


def test_copies_are_counted_over_all_replicating_mesh_dimensions():
    layout = mesh_layout((4,), torch.arange(12).view(2, 3, 2), [Replicate(), Shard(0), Replicate()])
    assert layout.copies == (0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3)


@pytest.mark.parametrize("shape", [(), (3,), (0, 4), (2, 3, 4)])
def test_replicated_is_replicate_on_a_mesh(shape):
    layout = replicated_layout(shape, [3, 1, 2])
    assert layout == mesh_layout(shape, [3, 1, 2], [Replicate()])
    assert layout.is_replicated
    assert layout.num_copies == 3
    assert {size_of(box) for box in layout.boxes} == {shape}
    assert_copies_tile(layout)


def test_one_rank_is_replicated_however_it_is_called():
    assert mesh_layout((4, 2), [0], [Shard(0)]) == replicated_layout((4, 2), [0])


def test_equal_layouts_of_different_meshes_are_equal():
    flat = mesh_layout([6, 4], [0, 2], [Shard(0)])
    nested = mesh_layout(torch.Size([6, 4]), torch.tensor([[0, 2]]), [Replicate(), Shard(-2)])
    assert flat == nested
    assert len({flat, nested, mesh_layout((6, 4), [0, 1], [Shard(0)]), mesh_layout((6, 4), [0, 2], [Shard(1)])}) == 3
    assert pickle.loads(pickle.dumps(flat)) == flat


def test_split_factor_tells_layouts_apart():
    mesh = torch.arange(8).view(2, 2, 2)
    placements = [[_StridedShard(0, split_factor=parts), Shard(0), Shard(0)] for parts in (1, 2, 4)]
    first, second, third = (mesh_layout((8,), mesh, each) for each in placements)
    assert first == mesh_layout((8,), mesh, [Shard(0)] * 3)
    assert [layout.box_of(4) for layout in (first, second, third)] == [((4, 5),), ((2, 3),), ((1, 2),)]


def test_rank_that_takes_no_part_has_no_box():
    with pytest.raises(KeyError):
        mesh_layout((6, 4), [0, 2], [Shard(0)]).box_of(1)


@pytest.mark.parametrize(
    ("mesh", "placements", "message"),
    [
        ([0, 1], [Partial()], r"Partial.*no layout of a parameter"),
        ([0, 1], [object()], r"object.*no layout of a parameter"),
        ([0, 1], [Shard(2)], r"Shard\(dim=2\).*shape \(6, 4\)"),
        ([0, 1], [Shard(-3)], r"Shard\(dim=-3\).*shape \(6, 4\)"),
        ([0, 1], [Replicate(), Replicate()], "2 placements.*mesh of 1 dim"),
        ([0, 1], [_StridedShard(0, split_factor=2)], r"split_factor 2 .*possible are \[1\].*_StridedShard.*\(2,\)"),
        ([[0, 1], [2, 3]], [_StridedShard(0, split_factor=4), Shard(0)], r"split_factor 4 .*possible are \[1, 2\]"),
        ([[0, 1], [2, 3]], [_StridedShard(0, split_factor=2), Shard(1)], r"split_factor 2 .*dimension 0.*are \[1\]"),
        ([[0, 1], [2, 3]], [Shard(0), _StridedShard(0, split_factor=2)], r"split_factor 2 .*mesh dimension 1"),
    ],
)
def test_what_is_no_layout_says_so(mesh, placements, message):
    with pytest.raises(ValueError, match=message):
        mesh_layout((6, 4), mesh, placements)


class Interleaved(Shard):
    """A placement from elsewhere that cuts in its own way."""


def test_a_placement_derived_from_shard_is_not_taken_for_it():
    with pytest.raises(ValueError, match="no layout of a parameter"):
        mesh_layout((6, 4), [0, 1], [Interleaved(0)])


def test_the_default_device_does_not_matter():
    with torch.device("meta"):
        layout = mesh_layout((11, 4), [[0, 1], [2, 3]], [Replicate(), Shard(0)])
    assert layout.boxes == (((0, 6), (0, 4)), ((6, 11), (0, 4))) * 2


def test_a_scalar_can_only_be_replicated():
    with pytest.raises(ValueError, match="does not have"):
        mesh_layout((), [0, 1], [Shard(0)])


def test_hundreds_of_parameters_on_a_large_mesh_are_planned_in_seconds():
    mesh = torch.arange(1024).view(2, 64, 8)
    start = time.process_time()
    for rows in range(500):
        layout = mesh_layout((rows, 512), mesh, [Replicate(), _StridedShard(0, split_factor=8), Shard(0)])
        assert all(layout.box_of(rank) == box for rank, box in zip(layout.ranks, layout.boxes, strict=True))
    assert time.process_time() - start < 10


def test_plain_tensors_have_no_layout_and_are_their_own_local_tensor():
    for tensor in (torch.randn(2), torch.nn.Parameter(torch.randn(2))):
        assert layout_of("weight", tensor) is None
        assert local_tensor(tensor) is tensor


@st.composite
def boxes(draw, shape):
    return tuple(tuple(sorted([draw(st.integers(0, size)), draw(st.integers(0, size))])) for size in shape)


@st.composite
def pairs_of_boxes(draw):
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    return tuple(shape), draw(boxes(shape)), draw(boxes(shape))


def mask(shape, box):
    inside = torch.zeros(shape, dtype=torch.bool)
    inside[slices_of(box)] = True
    return inside


@given(pairs_of_boxes())
def test_intersection_is_what_both_boxes_hold(pair):
    shape, a, b = pair
    both = mask(shape, a) & mask(shape, b)
    common = intersection(a, b)
    assert common == intersection(b, a)
    assert (common is None) == (not both.any())
    if common is not None:
        assert torch.equal(mask(shape, common), both)
        assert numel_of(common) == both.sum()


@given(pairs_of_boxes())
def test_relative_selects_the_same_entries_from_a_piece(pair):
    shape, a, b = pair
    common = intersection(a, b)
    if common is not None:
        whole = numbered(shape)
        piece = whole[slices_of(a)]
        assert torch.equal(piece[relative(common, a)], whole[slices_of(common)])
        assert size_of(common) == whole[slices_of(common)].shape


def test_relative_refuses_a_box_that_sticks_out():
    with pytest.raises(ValueError, match="not inside"):
        relative(((1, 4), (0, 2)), ((2, 4), (0, 2)))
    with pytest.raises(ValueError, match="not inside"):
        relative(((2, 4),), ((0, 3),))


def test_layouts_cannot_be_changed():
    layout = replicated_layout((2,), [0])
    assert isinstance(layout, Layout)
    with pytest.raises(AttributeError):
        layout.shape = (3,)
