"""Gradients added to the rows that were looked up."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from quintic.kernels.lookup.rows import add_to_rows_, embedding_into_grad


@given(
    num_rows=st.integers(1, 9),
    count=st.integers(0, 40),
    width=st.integers(1, 5),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_sums_are_rounded_once(num_rows, count, width, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(num_rows, (count,), generator=generator)
    # Eighths, whose sums are exact in float32.
    table, grad = (
        (torch.randint(-64, 65, (size, width), generator=generator) / 8).to(dtype) for size in (num_rows, count)
    )
    expected = table.double().index_add(0, rows, grad.double()).to(dtype)
    add_to_rows_(table, rows, grad)
    assert torch.equal(table, expected)


def test_small_gradients_of_a_common_row_are_not_lost():
    table = torch.full((2, 3), 256.0, dtype=torch.bfloat16)  # to which bfloat16 cannot add 1 but once in a while
    add_to_rows_(table, torch.ones(512, dtype=torch.int64), torch.ones(512, 3, dtype=torch.bfloat16))
    assert table.tolist() == [[256.0] * 3, [768.0] * 3]


@pytest.mark.parametrize("shape", [(7,), (2, 5)])
def test_the_gradient_is_that_of_an_embedding(shape):
    table = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    twin = table.detach().clone().requires_grad_()
    for _ in range(2):  # the second is added to the first
        rows, weights = torch.randint(6, shape), torch.randn(*shape, 4, dtype=torch.float64)
        for weight, look_up in ((twin, F.embedding), (table, embedding_into_grad)):
            out = look_up(rows, weight)
            (out.square() * weights).sum().backward()
        assert torch.allclose(table.grad, twin.grad, rtol=1e-12, atol=1e-12)
    assert torch.equal(embedding_into_grad(rows, table), F.embedding(rows, table))


def test_nothing_is_added_where_no_gradient_is_wanted():
    table = torch.randn(6, 4, requires_grad=True)
    with torch.no_grad():
        embedding_into_grad(torch.arange(3), table)
    assert table.grad is None
