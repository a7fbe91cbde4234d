import numpy as np
import pytest
import torch

from quintic import Experts, Flatten, Heads, Matrix, Rows, Split

CASES = [
    (Matrix(), (6, 4), lambda w: [[w]]),
    (Matrix(transposed=True), (6, 4), lambda w: [[w.T]]),
    (Heads(3), (6, 4), lambda w: [[w[0:2], w[2:4], w[4:6]]]),
    (Heads(2, transposed=True), (6, 4), lambda w: [[w[:, 0:2].T, w[:, 2:4].T]]),
    (Split((1, 2, 3)), (6, 4), lambda w: [[w[0:1]], [w[1:3]], [w[3:6]]]),
    (Split([2, 2], transposed=True), (6, 4), lambda w: [[w[:, 0:2].T], [w[:, 2:4].T]]),
    (Heads(2, dim=1), (3, 4), lambda w: [[w[:, 0:2], w[:, 2:4]]]),
    (Heads(3, transposed=True, dim=1), (6, 4), lambda w: [[w[0:2].T, w[2:4].T, w[4:6].T]]),
    # queries, keys and values of each of two heads
    (Split((2, 2, 2), groups=2), (12, 5), lambda w: [[w[[0, 1, 6, 7]]], [w[[2, 3, 8, 9]]], [w[[4, 5, 10, 11]]]]),
    # two key/value heads, each with two queries, a gate as wide, a key, a value
    (
        Split((4, 4, 2, 2), groups=2),
        (24, 3),
        lambda w: [[torch.cat([w[a : a + k], w[12 + a : 12 + a + k]])] for a, k in ((0, 4), (4, 4), (8, 2), (10, 2))],
    ),
    (Split((1, 1), groups=3), (6, 4), lambda w: [[w[0::2]], [w[1::2]]]),
    (Split((1, 1), groups=3, transposed=True), (4, 6), lambda w: [[w[:, 0::2].T], [w[:, 1::2].T]]),
    (Split((4, 2), heads=(2, 1)), (6, 4), lambda w: [[w[0:2], w[2:4]], [w[4:6]]]),
    (
        Split((4, 2), groups=2, heads=(4, 2)),
        (12, 3),
        lambda w: [[w[0:2], w[6:8]], [w[2:4], w[8:10]], [w[4:6], w[10:12]]],
    ),
    (Split((2, 2)), (3, 4, 5), lambda w: [list(w[:, :2]), list(w[:, 2:])]),
    (Split((2, 3), transposed=True), (2, 4, 5), lambda w: [[e[:, :2].T for e in w], [e[:, 2:].T for e in w]]),
    (Split((1, 1), groups=2), (3, 4, 5), lambda w: [list(w[:, 0::2]), list(w[:, 1::2])]),
    (Experts(), (3, 2, 5), lambda w: [list(w)]),
    (Experts(transposed=True), (3, 2, 5), lambda w: [[e.T for e in w]]),
    (Rows(2), (6, 4), lambda w: [[w[0:2], w[2:4], w[4:6]]]),
    (Rows(3, transposed=True), (6, 4), lambda w: [[w[0:3].T, w[3:6].T]]),
    (Flatten(), (6, 2, 3, 3), lambda w: [[w.reshape(6, 18)]]),
    (Flatten(), (6, 2, 3), lambda w: [[w.reshape(6, 6)]]),
    (Flatten(transposed=True), (6, 2, 3), lambda w: [[w.reshape(6, 6).T]]),
    (Flatten(groups=2), (6, 2, 3, 3), lambda w: [[w[:3].reshape(3, 18), w[3:].reshape(3, 18)]]),
    (Flatten(True, 3), (6, 2, 3), lambda w: [[e.reshape(2, 6).T for e in w.split(2)]]),
]

FILTERS = [case for case in CASES if isinstance(case[0], Flatten)]


def channels_last(tensor):
    """The same values with channels behind the kernel in memory, for any number of dimensions."""
    return tensor.movedim(1, -1).contiguous().movedim(-1, 1)


@pytest.mark.parametrize(("view", "shape", "matrices"), CASES, ids=[f"{case[0]}-{case[1]}" for case in CASES])
def test_batches_are_the_documented_matrices(view, shape, matrices):
    tensor = torch.randn(shape)
    batches = view.batches(tensor)
    expected = matrices(tensor)
    assert len(batches) == len(expected)
    for batch, parts in zip(batches, expected, strict=True):
        assert torch.equal(batch, torch.stack(parts))
    assert view.shapes(tensor.shape) == tuple(tuple(batch.shape) for batch in batches)


@pytest.mark.parametrize(("view", "shape", "matrices"), CASES, ids=[f"{case[0]}-{case[1]}" for case in CASES])
def test_blocks_share_memory_and_cover_every_entry_once(view, shape, matrices):
    tensor = torch.zeros(shape)
    for block in view.blocks(tensor):
        block.add_(1)
    assert torch.equal(tensor, torch.ones(shape))


@pytest.mark.parametrize(("view", "shape", "matrices"), CASES, ids=[f"{case[0]}-{case[1]}" for case in CASES])
def test_writing_batches_back_is_the_inverse_of_taking_them(view, shape, matrices):
    tensor, copy = torch.randn(shape), torch.zeros(shape)
    view.write_(copy, [batch.clone() for batch in view.batches(tensor)])
    assert torch.equal(copy, tensor)


@pytest.mark.parametrize(("view", "shape", "matrices"), FILTERS, ids=[f"{case[0]}-{case[1]}" for case in FILTERS])
def test_filters_in_channels_last_are_the_same_matrices(view, shape, matrices):
    tensor = channels_last(torch.randn(shape))
    for batch, parts in zip(view.batches(tensor), matrices(tensor), strict=True):
        assert torch.equal(batch, torch.stack(parts))
    written = torch.zeros_like(tensor)
    assert written.stride() == tensor.stride()
    view.write_(written, [batch.clone() for batch in view.batches(tensor)])
    assert torch.equal(written, tensor)
    for block in view.blocks(written):
        block.zero_()  # shares memory
    assert not written.any()


@pytest.mark.parametrize("groups", [1, 2])
def test_filters_are_what_a_convolution_multiplies_patches_by(groups):
    conv = torch.nn.Conv2d(4, 6, (2, 3), groups=groups, bias=False, dtype=torch.float64)
    x = torch.randn(2, 4, 5, 7, dtype=torch.float64)
    (batch,) = Flatten(groups=groups).batches(conv.weight)
    patches = torch.nn.functional.unfold(x, (2, 3)).unflatten(1, (groups, -1))
    torch.testing.assert_close(conv(x).flatten(2), (batch @ patches).flatten(1, 2))


@pytest.mark.parametrize("groups", [1, 2])
def test_filters_of_a_transposed_convolution_map_a_place_to_a_patch(groups):
    conv = torch.nn.ConvTranspose2d(4, 6, (2, 3), groups=groups, bias=False, dtype=torch.float64)
    x = torch.randn(2, 4, 5, 7, dtype=torch.float64)
    (batch,) = Flatten(True, groups).batches(conv.weight)
    patches = (batch @ x.flatten(2).unflatten(1, (groups, -1))).flatten(1, 2)
    torch.testing.assert_close(conv(x), torch.nn.functional.fold(patches, (6, 9), (2, 3)))


@pytest.mark.parametrize(
    ("view", "shape", "message"),
    [
        (Matrix(), (3, 4, 5), r"Matrix.*2-D.*\(3, 4, 5\)"),
        (Heads(4), (6, 4), r"Heads\(num_heads=4.*6 output features.*\(6, 4\)"),
        (Heads(0), (6, 4), "Heads"),
        (Heads(4, transposed=True), (4, 6), "6 output features"),
        (Split((2, 2)), (6, 4), "add up.*6 output features.*add up to 4"),
        (Split((7, -1)), (6, 4), "positive"),
        (Split(()), (6, 4), "Split"),
        (Split((2, 2), groups=2), (6, 4), "over all groups.*6 output features.*add up to 8"),
        (Split((2, 2)), (4,), "2-D"),
        (Split((4, 2), heads=(2, 1)), (2, 6, 4), "2-D parameters, got"),
        (Heads(3, dim=1), (6, 4), r"4 input features.*\(6, 4\)"),
        (Experts(), (6, 4), "3-D"),
        (Rows(4), (6, 4), r"Rows\(num_rows=4.*6 rows"),
        (Flatten(), (6, 4), "3 or more dimensions"),
        (Flatten(groups=4), (6, 4, 3), "does not divide the 6 channels"),
        (Flatten(groups=0), (6, 4, 3), "does not divide"),
    ],
)
def test_a_view_that_does_not_fit_says_so(view, shape, message):
    with pytest.raises(ValueError, match=message):
        view.batches(torch.empty(shape))


@pytest.mark.parametrize("arguments", [{"heads": (2,)}, {"heads": (3, 1)}, {"heads": (1, 1), "groups": 2}])
def test_heads_of_parts_must_divide_them(arguments):
    with pytest.raises(ValueError, match="heads needs"):
        Split((4, 2), **arguments)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Heads(24 / 4), r"Heads: num_heads=6\.0 must be an integer; divide sizes with // and not with /"),
        (lambda: Heads("4"), "Heads: num_heads='4' must be an integer"),
        (lambda: Split(8), r"Split: sizes=8 must be integers, such as \(64, 64\)"),
        (lambda: Split((24 / 3,) * 3), r"Split: sizes=\(8\.0, 8\.0, 8\.0\) must be integers"),
        (lambda: Split("ab"), "Split: sizes='ab' must be integers"),
        (lambda: Split((8, 8), groups=2.0), r"Split: groups=2\.0 must be an integer"),
        (lambda: Split((8, 8), heads=2), "Split: heads=2 must be integers"),
        (lambda: Split((8, 8), heads=(2.0, 1)), r"Split: heads=\(2\.0, 1\) must be integers"),
        (lambda: Rows(12 / 2), r"Rows: num_rows=6\.0 must be an integer"),
        (lambda: Flatten(groups="2"), "Flatten: groups='2' must be an integer"),
    ],
)
def test_numbers_of_a_view_are_integers(make, message):
    with pytest.raises(TypeError, match=f"^{message}"):
        make()


def test_numbers_of_a_view_may_be_of_numpy():
    one = Split(np.array([8, 16]), groups=np.int64(1), heads=np.array([2, 4]))
    assert repr(one) == repr(Split((8, 16), groups=1, heads=(2, 4)))
    assert repr((Heads(np.int32(3)), Rows(np.int64(2)))) == repr((Heads(3), Rows(2)))


def test_heads_of_parts_need_groups():
    with pytest.raises(ValueError, match="heads needs"):
        Split((4, 2), groups=0, heads=(1, 1))


def test_heads_have_two_dimensions_to_choose_from():
    with pytest.raises(ValueError, match="dim is 0"):
        Heads(2, dim=2)


def test_flatten_refuses_what_would_need_a_copy():
    with pytest.raises(ValueError, match="without a copy; make the parameter contiguous, or channels_last"):
        Flatten().batches(torch.empty(6, 3, 2, 3).permute(0, 2, 1, 3))


def test_equal_descriptions_compare_equal_and_hash_alike():
    assert Split([1, 2]) == Split((1, 2))
    assert len({Split([1, 2]), Split((1, 2)), Heads(2), Heads(2, transposed=True)}) == 3
