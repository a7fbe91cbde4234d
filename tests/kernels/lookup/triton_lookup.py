"""Cases of test_triton.py: lookups by their kernels, in Triton's interpreter or on a CUDA device."""

import pytest
import torch
from on_device import DEVICE, DTYPES, poison_new_tensors

from quintic.kernels.lookup.lookup import lookup, plan_lookup

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}

# Tokens, most rows of one, positions, width: one tile and several, ragged ones, tokens of many tiles of rows.
SIZES = [(1, 1, 1, 1), (7, 5, 40, 20), (3, 90, 100, 33), (200, 3, 37, 16), (2, 40, 70, 260)]
if DEVICE == "cuda":
    SIZES += [(4096, 60, 16384, 768), (500, 512, 5000, 1280)]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    poison_new_tensors(monkeypatch)


def make(sizes, tied):
    vocab, most, positions, width = sizes
    rows_per_token = torch.randint(1, most + 1, (vocab,))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), rows_per_token.cumsum(0)]).int()
    # Some tokens often and most of them rarely or never, as in text.
    tokens = (torch.rand(positions) ** 3 * vocab).long().to(DEVICE)
    num_rows = int(offsets[-1])
    offsets = offsets.to(DEVICE)
    tables = [torch.randn(num_rows, width) * width**-0.5 for _ in range(1 if tied else 2)]
    return offsets, plan_lookup(tokens, offsets, num_rows), torch.randn(positions, width), tables


def results(kernels, offsets, plan, x, tables, grad, dtype, table_dtype):
    x = x.to(DEVICE, dtype).requires_grad_()
    tables = [table.to(DEVICE, table_dtype).requires_grad_() for table in tables]
    out = lookup(x, tables[0], tables[1] if len(tables) > 1 else None, offsets, plan, kernels=kernels)
    return [out.detach(), *torch.autograd.grad(out, [x, *tables], grad.to(DEVICE, dtype))]


def error(found, exact):
    return float((found.double() - exact.double()).norm() / exact.double().norm().clamp_min(1e-30))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_they_agree_with_the_twin(sizes, tied, dtype):
    made = make(sizes, tied)
    grad = torch.randn(made[2].shape)
    found = results("triton", *made, grad, dtype, torch.float32)
    # The twin's inputs are what the kernel sees: rounded to the dtype of the products.
    offsets, plan, x, tables = made
    rounded = [tensor.to(dtype).double() for tensor in (x, *tables, grad)]
    exact = results("torch", offsets, plan, rounded[0], rounded[1:-1], rounded[-1], torch.float64, torch.float64)
    for ours, theirs in zip(found, exact, strict=True):
        assert torch.isfinite(ours).all()
        # A single row has the weight 1 and so no gradient of its score: nothing to be relative to.
        if float(theirs.norm()) > 1e-6:
            assert error(ours, theirs) < TOLERANCE[dtype]
        else:
            assert float(ours.abs().max()) < TOLERANCE[dtype]
    again = results("triton", *made, grad, dtype, torch.float32)
    assert all(torch.equal(first, second) for first, second in zip(found, again, strict=True))


def test_rows_of_absent_tokens_have_no_gradient():
    offsets = torch.arange(0, 41, 4, dtype=torch.int32, device=DEVICE)
    plan = plan_lookup(torch.tensor([3, 7, 3], device=DEVICE), offsets, 40)
    x, keys = (torch.randn(size, 16, device=DEVICE, requires_grad=True) for size in (3, 40))
    lookup(x, keys, None, offsets, plan, kernels="triton").sum().backward()
    touched = keys.grad.abs().sum(1) > 0
    assert touched.nonzero().flatten().tolist() == [*range(12, 16), *range(28, 32)]


def test_no_positions_give_no_gradient():
    offsets = torch.tensor([0, 2, 5], dtype=torch.int32, device=DEVICE)
    plan = plan_lookup(torch.empty(0, dtype=torch.int64, device=DEVICE), offsets, 5)
    x = torch.randn(0, 16, device=DEVICE, requires_grad=True)
    keys = torch.randn(5, 16, device=DEVICE, requires_grad=True)
    lookup(x, keys, None, offsets, plan, kernels="triton").sum().backward()
    assert torch.equal(keys.grad, torch.zeros_like(keys))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter has no device to wait for")
def test_nothing_waits_for_the_device():
    offsets = torch.arange(0, 401, 4, dtype=torch.int32, device=DEVICE)
    tokens = torch.randint(100, (500,), device=DEVICE)
    x, keys = (torch.randn(size, 64, device=DEVICE, requires_grad=True) for size in (500, 400))
    for mode in ("default", "error"):  # the first time kernels are compiled and loaded
        torch.cuda.set_sync_debug_mode(mode)
        try:
            lookup(x, keys, None, offsets, plan_lookup(tokens, offsets, 400)).sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
