"""Cases of test_triton.py: spans of memory packed and unpacked, and means over ranks."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from on_device import DEVICE

from quintic.optim.layout.packing import MemorySpan, Packing, mean_of_ranks

# The interpreter has no reliable bfloat16.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * (DEVICE == "cuda")
LARGE = [(3, 2**21 + 5)] if DEVICE == "cuda" else []


def packings(spans):
    return [Packing(spans, kernels, torch.device(DEVICE)) for kernels in ("torch", "triton")]


@st.composite
def runs_of_tensors(draw):
    """Return the sizes of tensors, and spans of them with gaps between their places."""
    sizes = draw(st.lists(st.integers(0, 9000), min_size=1, max_size=5))
    spans, place = [], 0
    for tensor in draw(st.permutations(range(len(sizes)))):
        cuts = sorted(draw(st.lists(st.integers(0, sizes[tensor]), max_size=3)))
        for start, stop in pairwise(cuts):
            place += draw(st.integers(0, 20))
            spans.append(MemorySpan(tensor, start, stop, place))
            place += stop - start
    return sizes, spans, place


@settings(max_examples=60, deadline=None)
@given(runs_of_tensors(), st.data())
def test_runs_are_packed_and_unpacked_as_by_the_twin(found, data):
    sizes, spans, numel = found
    dtype, of_buffer = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from(DTYPES))
    tensors = [torch.randn(size).to(DEVICE, dtype) for size in sizes]
    missing = [None if data.draw(st.booleans()) else tensor for tensor in tensors]
    for given_tensors in (tensors, missing):
        buffers = []
        for packing in packings(spans):
            buffer = torch.full((numel,), 7.0, dtype=of_buffer, device=DEVICE)
            packing.pack(given_tensors, buffer)
            packing.pack(given_tensors, buffer)  # from the table that is there
            buffers.append(buffer)
        assert torch.equal(*buffers)
    filled = torch.randn(numel).to(DEVICE, of_buffer)
    unpacked = []
    for packing in packings(spans):
        targets = [tensor.clone() for tensor in tensors]
        packing.unpack(filled, targets)
        unpacked.append(targets)
    assert all(torch.equal(a, b) for a, b in zip(*unpacked, strict=True))


def test_large_runs_have_launches_of_their_own():
    size = 4096 * 2049 if DEVICE == "cuda" else 4096 * 3
    tensors = [torch.randn(size + 3, device=DEVICE), torch.randn(100, device=DEVICE)]
    spans = [MemorySpan(1, 0, 100, 0), MemorySpan(0, 3, size + 3, 101)]
    buffers = [torch.zeros(size + 101, device=DEVICE) for _ in range(2)]
    for packing, buffer in zip(packings(spans), buffers, strict=True):
        packing.pack(tensors, buffer)
    assert torch.equal(*buffers)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("ranks", "numel"), [(1, 5), (2, 1), (3, 4097), (7, 100), (8, 2048), (4, 0), *LARGE])
def test_means_are_those_of_the_twin(ranks, numel, dtype):
    received = torch.randn(ranks, numel).to(DEVICE, dtype)
    out = torch.full((numel + 1,), 9.0, dtype=dtype, device=DEVICE)
    mean = mean_of_ranks(received, "triton", out=out[:numel])
    # On the CPU: devices divide by a number as they multiply with its reciprocal.
    assert torch.equal(mean.cpu(), mean_of_ranks(received.cpu(), "torch"))
    assert torch.equal(out[:numel], mean)
    assert out[-1] == 9
    assert torch.equal(mean_of_ranks(received, "triton"), mean)
