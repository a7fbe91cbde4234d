"""What the reference says about the rounding of its own numbers (the steps are tested in test_verify.py)."""

import pytest
import torch

from quintic.optim.reference import shaken


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_shaken_direction_is_a_neighbour(dtype):
    direction = torch.randn(1, 61, 40).to(dtype)
    found = shaken(direction)
    assert found.dtype == dtype
    relative = (found.double() - direction.double()).abs() / direction.double().abs()
    assert relative.max() <= 1.5 * torch.finfo(dtype).eps
    share = float((found != direction).double().mean())
    assert share == pytest.approx(
        1 / 31 if dtype == torch.bfloat16 else 1, abs=0.01 if dtype == torch.bfloat16 else 0.4
    )
    # In rows, columns and all of small matrices entries are moved both ways.
    moves = (shaken(torch.ones(1, 8, 6)) - 1).sign()[0]
    assert all(1 <= int((line > 0).sum()) < len(line) for line in (*moves, *moves.T))
