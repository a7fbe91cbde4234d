"""Cases of test_triton.py: norms of rows, columns and matrices by the kernel, interpreted or on a CUDA device."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from on_device import DEVICE, poison_new_tensors

from quintic.kernels.update import square_sums
from quintic.optim.numeric.sums import frobenius_norms, norms

# The interpreter has no reliable bfloat16.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * (DEVICE == "cuda")

# One entry, whole blocks, ragged ones, several segments, one row, one column.
SHAPES = [(1, 1, 1), (2, 64, 128), (3, 65, 63), (2, 300, 129), (1, 1, 2300), (1, 700, 1)]
if DEVICE == "cuda":
    SHAPES += [(40, 768, 768), (2, 50304, 768), (1, 7168, 7168), (1, 1, 100_001)]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    poison_new_tensors(monkeypatch)


def made(shape, dtype=torch.float32):
    return torch.randn(shape).to(DEVICE, dtype)


@pytest.mark.parametrize("dim", [-1, -2])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [(shape, dtype) for shape in SHAPES for dtype in DTYPES if dtype == torch.float32 or shape == (3, 65, 63)],
    ids=str,
)
def test_norms_are_those_of_the_definition(shape, dtype, dim):
    x = made(shape, dtype)
    before, exact = x.clone(), x.double().square().sum(dim, keepdim=True).sqrt()
    found = norms(x, dim, kernels="triton")
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=0)
    torch.testing.assert_close(norms(x.float(), dim), found, rtol=2e-6, atol=0)
    whole = frobenius_norms(x, kernels="triton")
    torch.testing.assert_close(whole.double(), x.double().norm(dim=(1, 2), keepdim=True), rtol=1e-6, atol=0)
    assert torch.equal(x, before)


# Every size that is one, or a multiple of 16, or neither compiles the kernel anew.
@settings(max_examples=20)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 150), st.integers(1, 300)),
    dim=st.sampled_from([-1, -2]),
    dtype=st.sampled_from([DTYPES[0], DTYPES[-1]]),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_matrix_has_the_same_bits_in_any_batch_and_layout(shape, dim, dtype, seed):
    torch.manual_seed(seed)
    x = made(shape, dtype)
    found = norms(x, dim, kernels="triton")
    together = torch.cat([made((2, *shape[1:]), dtype), x]).flip(0)
    assert torch.equal(norms(together, dim, kernels="triton").flip(0)[2:], found)
    for number in range(shape[0]):
        one = slice(number, number + 1)
        for stored in (x[one], x[one].mT.contiguous().mT, x.repeat_interleave(2, 2)[one, :, ::2]):
            assert torch.equal(norms(stored, dim, kernels="triton"), found[one])


@pytest.mark.parametrize(("programs", "shape"), [(1, (2, 110, 1030)), (10**6, (1, 110, 1030))])
def test_segments_of_any_length(shape, programs, monkeypatch):
    monkeypatch.setattr(square_sums, "_PROGRAMS", programs)
    x = made(shape)
    for dim in (-1, -2):
        exact = x.double().square().sum(dim, keepdim=True).sqrt()
        torch.testing.assert_close(norms(x, dim, kernels="triton").double(), exact, rtol=1e-6, atol=0)


def test_dimensions_count_from_either_end_and_others_are_errors():
    x = made((2, 5, 5))
    for first, second in ((-1, 2), (-2, 1)):
        assert torch.equal(norms(x, first, kernels="triton"), norms(x, second, kernels="triton"))
    for other, dim in ((x, 0), (x[0], -1), (x[None], -1)):
        with pytest.raises(ValueError, match=r"along dimension -?\d: kernels take matrices \(b, m, n\)"):
            norms(other, dim, kernels="triton")
    wide = x.double()
    assert torch.equal(norms(wide, -1, kernels="triton"), norms(wide, -1))
    assert norms(x, -1, torch.float64, kernels="triton").dtype == torch.float64


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # NumPy, which the interpreter computes with
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_not_a_number_stays_in_its_row(bad):
    x = made((3, 40, 90))
    clean = norms(x, -1, kernels="triton")
    x[1, 17, 21] = bad
    found = norms(x, -1, kernels="triton")
    assert (~found.isfinite()).nonzero().tolist() == [[1, 17, 0]]
    found[1, 17] = clean[1, 17]
    assert torch.equal(found, clean)


@pytest.mark.parametrize("shape", [(0, 5, 3), (2, 0, 4), (2, 4, 0), (2, 0, 0)], ids=str)
@pytest.mark.parametrize("dim", [-1, -2])
def test_matrices_without_entries_have_norms_of_zero(shape, dim):
    x = torch.zeros(shape, device=DEVICE)
    assert torch.equal(norms(x, dim, kernels="triton"), norms(x, dim))
    assert torch.equal(frobenius_norms(x, kernels="triton"), torch.zeros(shape[0], 1, 1, device=DEVICE))
