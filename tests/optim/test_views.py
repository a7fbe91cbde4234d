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
    (Experts(), (3, 2, 5), lambda w: [list(w)]),
    (Experts(transposed=True), (3, 2, 5), lambda w: [[e.T for e in w]]),
    (Rows(2), (6, 4), lambda w: [[w[0:2], w[2:4], w[4:6]]]),
    (Rows(3, transposed=True), (6, 4), lambda w: [[w[0:3].T, w[3:6].T]]),
    (Flatten(), (6, 2, 3, 3), lambda w: [[w.reshape(6, 18)]]),
    (Flatten(), (6, 2, 3), lambda w: [[w.reshape(6, 6)]]),
    (Flatten(transposed=True), (6, 2, 3), lambda w: [[w.reshape(6, 6).T]]),
]


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
def test_batches_share_memory_and_cover_every_entry_once(view, shape, matrices):
    tensor = torch.zeros(shape)
    for batch in view.batches(tensor):
        batch.add_(1)
    assert torch.equal(tensor, torch.ones(shape))


@pytest.mark.parametrize(
    ("view", "shape", "message"),
    [
        (Matrix(), (3, 4, 5), r"Matrix.*2-D.*\(3, 4, 5\)"),
        (Heads(4), (6, 4), r"Heads\(num_heads=4.*6 output features.*\(6, 4\)"),
        (Heads(0), (6, 4), "Heads"),
        (Heads(4, transposed=True), (4, 6), "6 output features"),
        (Split((2, 2)), (6, 4), "add up to the 6 output features.*add up to 4"),
        (Split((7, -1)), (6, 4), "positive"),
        (Split(()), (6, 4), "Split"),
        (Experts(), (6, 4), "3-D"),
        (Rows(4), (6, 4), r"Rows\(num_rows=4.*6 rows"),
        (Flatten(), (6, 4), "3 or more dimensions"),
    ],
)
def test_a_view_that_does_not_fit_says_so(view, shape, message):
    with pytest.raises(ValueError, match=message):
        view.batches(torch.empty(shape))


def test_flatten_refuses_what_would_need_a_copy():
    with pytest.raises(ValueError, match="without a copy"):
        Flatten().batches(torch.empty(6, 2, 3, 3).permute(0, 2, 1, 3))


def test_equal_descriptions_compare_equal_and_hash_alike():
    assert Split([1, 2]) == Split((1, 2))
    assert len({Split([1, 2]), Split((1, 2)), Heads(2), Heads(2, transposed=True)}) == 3
