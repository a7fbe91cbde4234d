"""Cases of test_triton.py: means over ranks of rows of which each rank sent only some."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from on_device import DEVICE

from quintic.kernels.update.row_means import mean_of_rows_
from quintic.optim.layout.packing import mean_of_ranks
from quintic.optim.plan.row_sharding import mean_of_rows, places_of, rows_to_send, touched_rows

# The interpreter has no reliable bfloat16.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * (DEVICE == "cuda")
BITS = {2: torch.int16, 4: torch.int32}


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 4),
    st.integers(1, 70),
    st.sampled_from([1, 3, 64, 100, 1030]),
    st.sampled_from(DTYPES),
    st.sampled_from([0.0, 0.1, 0.5, 1.0]),
)
def test_means_of_rows_are_those_of_the_twin_and_of_whole_gradients(num_ranks, num_rows, row_size, dtype, density):
    check(num_ranks, num_rows, row_size, dtype, density)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_large_tables_are_averaged(dtype):
    check(8, 31440, 768, dtype, 0.1)
    # More than 2^31 entries.
    places = torch.full((1, 2**21 + 2**18), -1, dtype=torch.int32, device=DEVICE)
    places[0, -1] = 0
    received = torch.ones(1, 1024, dtype=dtype, device=DEVICE)
    mean = mean_of_rows(received, places, "triton")
    assert bool((mean[-1] == 1).all())
    assert not mean[:-1].any()


def check(num_ranks, num_rows, row_size, dtype, density):
    gradients = torch.randn(num_ranks, num_rows, row_size)
    gradients[torch.rand(gradients.shape) < 0.3] = -0.0
    gradients[torch.rand(num_ranks, num_rows) >= density] = 0.0
    gradients = gradients.to(DEVICE, dtype)
    marks = torch.stack([touched_rows(gradient) for gradient in gradients]).to(torch.uint8)
    counts = marks.sum(1).tolist()
    rows = [rows_to_send(of_rank, count) for of_rank, count in zip(marks, counts, strict=True)]
    received = torch.cat([gradient[index] for gradient, index in zip(gradients, rows, strict=True)])
    places = places_of(marks)
    out = torch.full((num_rows + 1, row_size), 9.0, dtype=dtype, device=DEVICE)
    mean_of_rows_(received, places, out[:num_rows])
    # On the CPU: devices divide by a number as they multiply with its reciprocal.
    expected = mean_of_ranks(gradients.cpu().view(num_ranks, -1), "torch").view(num_rows, row_size)
    bits = BITS[dtype.itemsize]
    assert torch.equal(out[:num_rows].cpu().view(bits), expected.view(bits))
    assert torch.equal(mean_of_rows(received.cpu(), places.cpu(), "torch").view(bits), expected.view(bits))
    assert bool((out[-1] == 9).all())
