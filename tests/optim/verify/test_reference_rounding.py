"""The reference's bounds for the rounding of its own numbers (the steps are tested in test_reference_step.py)."""

import itertools

import pytest
import torch

from quintic.optim.verify.matrix_step import perturbed

PATTERNS = [0, 1, 2]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_shaken_direction_is_a_neighbour(dtype, pattern):
    direction = torch.randn(1, 61, 40).to(dtype)
    found = perturbed(direction, direction.abs(), pattern)
    assert found.dtype == dtype
    relative = (found.double() - direction.double()).abs() / direction.double().abs()
    assert relative.max() <= 1.5 * torch.finfo(dtype).eps
    share = float((found != direction).double().mean())
    assert share == pytest.approx(
        1 / 31 if dtype == torch.bfloat16 else 1, abs=0.01 if dtype == torch.bfloat16 else 0.4
    )


@pytest.mark.parametrize("pattern", PATTERNS)
def test_in_rows_columns_and_all_of_small_matrices_entries_are_moved_both_ways(pattern):
    ones = torch.ones(1, 8, 6)
    moves = (perturbed(ones, ones, pattern) - 1).sign()[0]
    assert all(1 <= int((line > 0).sum()) < len(line) for line in (*moves, *moves.T))


def test_what_cancels_is_moved_by_a_rounding_of_its_terms():
    first = torch.randn(40, 30)
    second = -first * (1 + 1e-3 * torch.rand(40, 30))
    moved = (perturbed(first + second, first.abs() + second.abs()).double() - (first + second).double()).abs()
    expected = torch.finfo(torch.float32).eps * (first.abs() + second.abs()).double()
    torch.testing.assert_close(moved, expected, rtol=1e-2, atol=0.0)


def test_patterns_differ():
    ones = torch.ones(1, 30, 20)
    found = [perturbed(ones, ones, pattern) for pattern in PATTERNS]
    assert all((a != b).any() for a, b in itertools.pairwise(found))
