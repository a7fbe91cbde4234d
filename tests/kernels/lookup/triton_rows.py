"""Cases of test_triton.py: gradients added to rows, in Triton's interpreter or on a CUDA device."""

import pytest
import torch
from on_device import DEVICE, DTYPES

from quintic.kernels.lookup.rows import add_to_rows_

# Rows, positions, width: one row of many positions, nearly all once, more columns than a program takes.
SIZES = [(1, 1, 1), (1, 40, 7), (50, 30, 48), (5, 64, 33), (9, 20, 1500)]
if DEVICE == "cuda":
    SIZES += [(50304, 49152, 768), (250000, 16384, 768), (3, 20000, 768)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_sums_are_those_of_float64_rounded_once(sizes, dtype):
    num_rows, count, width = sizes
    rows = (torch.rand(count) ** 3 * num_rows).long().to(DEVICE)
    table = torch.randn(num_rows, width).to(DEVICE, dtype)
    grad = torch.randn(count, width).to(DEVICE, dtype)
    exact = table.double().index_add(0, rows, grad.double())
    size = table.double().abs().index_add(0, rows, grad.double().abs())
    found = []
    for _ in range(2):
        found.append(table.clone())
        add_to_rows_(found[-1], rows, grad, kernels="triton")
    assert torch.equal(*found)
    # Half a unit in the last place of the result, and a float32 sum's error.
    bound = torch.finfo(dtype).eps * exact.abs() + torch.finfo(torch.float32).eps * (count**0.5 + 2) * size
    assert ((found[0].double() - exact).abs() <= bound).all()
    untouched = torch.ones(num_rows, dtype=torch.bool, device=DEVICE).index_fill(0, rows, False)
    assert torch.equal(found[0][untouched], table[untouched])
