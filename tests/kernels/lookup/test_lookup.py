"""Lookups in ragged tables, by plain PyTorch: against a loop over positions in float64, and compiled."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quintic.kernels.lookup.lookup import lookup, obstacle_to_lookup, plan_lookup


def offsets_of(rows_per_token):
    return torch.tensor([0, *rows_per_token]).cumsum(0).int()


def by_definition(x, keys, values, offsets, tokens):
    """One position after the other, differentiable, in the dtype of `x`."""
    found = []
    for state, token in zip(x.flatten(0, -2), tokens.flatten().tolist(), strict=True):
        rows = slice(int(offsets[token]), int(offsets[token + 1]))
        weights = (keys[rows] * state).sum(1).exp()
        found.append((weights[:, None] * values[rows]).sum(0) / weights.sum())
    return torch.stack(found).view(x.shape)


def problem(rows_per_token, tokens, width, tied, dtype=torch.float64):
    num_rows = sum(rows_per_token)
    made = [torch.randn(*tokens.shape, width), *(torch.randn(num_rows, width) for _ in range(1 if tied else 2))]
    return [tensor.to(dtype).requires_grad_() for tensor in made]


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=7),
    st.integers(1, 150),
    st.integers(1, 5),
    st.booleans(),
    st.integers(0, 10**6),
)
def test_values_and_gradients_are_those_of_the_definition(rows_per_token, positions, width, tied, seed):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(len(rows_per_token), (positions,), generator=generator)
    offsets = offsets_of(rows_per_token)
    tensors = problem(rows_per_token, tokens, width, tied)
    values = None if tied else tensors[2]
    out = lookup(*tensors[:2], values, offsets, plan_lookup(tokens, offsets, int(offsets[-1])))
    exact = by_definition(tensors[0], tensors[1], tensors[-1], offsets, tokens)
    torch.testing.assert_close(out, exact, rtol=1e-10, atol=1e-12)
    grad = torch.randn(out.shape, generator=generator, dtype=out.dtype)
    for found, expected in zip(
        torch.autograd.grad(out, tensors, grad), torch.autograd.grad(exact, tensors, grad), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


def test_the_plan_by_hand():
    plan = plan_lookup(torch.tensor([[2, 0, 2], [1, 0, 2]]), offsets_of([1, 3, 2, 1]), 7)
    assert plan.order.tolist() == [1, 4, 3, 0, 2, 5]
    assert plan.tokens.tolist() == [0, 0, 1, 2, 2, 2]
    assert plan.starts.tolist() == [0, 2, 3, 6, 6]
    assert plan.owners.tolist() == [0, 1, 1, 1, 2, 2, 3]


def test_large_scores_do_not_overflow():
    tokens, offsets = torch.zeros(3, dtype=torch.int64), offsets_of([4])
    keys = torch.tensor([[300.0], [-300.0], [299.0], [0.0]])
    out = lookup(torch.ones(3, 1), keys, None, offsets, plan_lookup(tokens, offsets, 4))
    expected = (300 + 299 * torch.tensor(-1.0).exp()) / (1 + torch.tensor(-1.0).exp())
    torch.testing.assert_close(out, expected.expand(3, 1))


def test_no_positions_give_no_gradient():
    offsets = offsets_of([2, 3])
    x, keys = torch.randn(0, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    out = lookup(x, keys, None, offsets, plan_lookup(torch.empty(0, dtype=torch.int64), offsets, 5))
    out.sum().backward()
    assert out.shape == (0, 4)
    assert torch.equal(keys.grad, torch.zeros(5, 4))


def test_bfloat16_states_read_float32_tables():
    tokens = torch.randint(5, (90,))
    offsets = offsets_of([3, 1, 7, 2, 20])
    plan = plan_lookup(tokens, offsets, 33)
    x, keys = problem([3, 1, 7, 2, 20], tokens, 8, True, torch.float32)
    low = x.detach().bfloat16().requires_grad_()
    out = lookup(low, keys, None, offsets, plan)
    out.float().sum().backward()
    assert (out.dtype, low.grad.dtype, keys.grad.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    exact = by_definition(low.detach().float(), keys.detach(), keys.detach(), offsets, tokens)
    torch.testing.assert_close(out.float(), exact, rtol=0.03, atol=0.03)


def test_compiled_it_is_one_graph_with_the_same_values():
    tokens = torch.randint(4, (2, 30))
    offsets = offsets_of([2, 1, 4, 3])
    tensors = problem([2, 1, 4, 3], tokens, 4, False, torch.float32)

    def read(x, keys, values, tokens):
        return lookup(x, keys, values, offsets, plan_lookup(tokens, offsets, 10)).square()

    expected = read(*tensors, tokens)
    out = torch.compile(read, backend="aot_eager", fullgraph=True)(*tensors, tokens)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    found, wanted = (torch.autograd.grad(each.sum(), tensors) for each in (out, expected))
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("tied", [True, False])
def test_the_operator_is_one(tied):
    tokens, offsets = torch.randint(4, (9,)), offsets_of([2, 1, 4, 3])
    x, keys, *values = problem([2, 1, 4, 3], tokens, 4, tied, torch.float32)
    plan = plan_lookup(tokens, offsets, 10)
    torch.library.opcheck(
        torch.ops.quintic.lookup.default, (x, keys, values[0] if values else None, offsets, *plan, "torch")
    )


def test_what_does_not_fit_is_said():
    tokens, offsets = torch.tensor([0, 1]), offsets_of([2, 3])
    plan = plan_lookup(tokens, offsets, 5)
    x, keys = torch.randn(2, 4), torch.randn(5, 4)
    for wrong in ((x[:1], keys, None), (x, keys[:4], None), (x, keys[:, :3], None), (x, keys, keys[:2])):
        with pytest.raises(ValueError, match=r"the plan is for 2 positions and tables of \(5, "):
            lookup(*wrong, offsets, plan)
    with pytest.raises(ValueError, match="kernels='triton'"):
        lookup(x, keys, None, offsets, plan, kernels="triton")
    assert obstacle_to_lookup(x.to("meta"), keys) == "x is on 'meta', Triton needs a CUDA device"
