"""Cases of test_triton.py: momentum and moments in bfloat16, bit for bit those of plain PyTorch.

Sums in float32 are exact here, since gradients have few bits and coefficients are halves and quarters: whatever is
multiplied and added in one instruction, both sides round the same numbers. The interpreter cuts bfloat16 off where a
device rounds, so there the averages themselves have no more bits than bfloat16.
"""

import pytest
import torch
from on_device import DEVICE, assert_host_memory_changes_no_bit
from torch import nn

from quintic import Experts, Flatten, Heads, Matrix, Muon, Rows, Split

# The interpreter has no reliable bfloat16.
DTYPES = [torch.float32] if DEVICE == "cpu" else [torch.float32, torch.float16, torch.bfloat16]
LARGEST, COEFFICIENT, STEPS = (3, 0.5, 3) if DEVICE == "cpu" else (60, 0.75, 6)

VIEWS = [
    (Matrix(), (37, 21), "contiguous"),
    (Matrix(), (37, 21), "transposed"),
    (Matrix(), (64, 48), "contiguous"),
    (Matrix(), (100, 130), "contiguous"),  # several tiles
    (Matrix(), (1, 9), "contiguous"),
    (Heads(3), (36, 20), "contiguous"),
    (Heads(4, dim=1), (20, 36), "contiguous"),
    (Split((8, 16, 24)), (48, 40), "contiguous"),
    (Split((5, 3, 2), groups=4), (40, 23), "contiguous"),
    (Experts(transposed=True), (5, 20, 12), "contiguous"),
    (Rows(8), (32, 24), "contiguous"),
    (Flatten(), (12, 4, 3, 3), "contiguous"),
    (Flatten(), (12, 4, 3, 3), "channels_last"),
]


def twins(shape, dtype, memory="contiguous"):
    """Return two equal parameters in a layout of memory."""
    values = torch.randn(shape).to(DEVICE, dtype)
    if memory == "transposed":
        values = values.movedim(-1, 0).contiguous().movedim(0, -1)
    if memory == "channels_last":
        values = values.to(memory_format=torch.channels_last)
    return [nn.Parameter(values.clone(memory_format=torch.preserve_format)) for _ in range(2)]


def give(params):
    """Give both the same integers for a gradient."""
    gradient = torch.randint(-LARGEST, LARGEST + 1, params[0].shape).to(torch.float32)
    for param in params:
        param.grad = torch.empty_like(param).copy_(gradient)


def assert_same_state(params, optimizers, keys, step):
    first, second = (optimizer.state[param] for optimizer, param in zip(optimizers, params, strict=True))
    for key in keys:
        assert first[key].dtype == second[key].dtype == torch.bfloat16
        assert first[key].stride() == params[0].stride()
        assert torch.equal(first[key], second[key]), (key, step)
    return [first[key].clone() for key in keys]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(("view", "shape", "memory"), VIEWS, ids=str)
def test_momentum_is_that_of_the_twin(view, shape, memory, nesterov, dtype):
    params = twins(shape, dtype, memory)
    options = {"momentum": COEFFICIENT, "nesterov": nesterov, "normalize": "neuron", "compute_dtype": torch.float32}
    optimizers = [
        Muon([{"params": [param], "view": view}], lr=0.05, kernels=kernels, state_dtype="bf16", **options)
        for param, kernels in zip(params, ("triton", "torch"), strict=True)
    ]
    assert optimizers[0].plan().buckets[0].kernels == "triton"
    tolerance = 1e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    for step in range(STEPS):
        give(params)
        for optimizer in optimizers:
            optimizer.step()
        assert_same_state(params, optimizers, ["momentum_buffer"], step)
        # The directions are those before rounding on both sides: else weights would be bfloat16's rounding apart.
        torch.testing.assert_close(params[0], params[1], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("master", [None, "fp32"])
@pytest.mark.parametrize("shape", [(1,), (5000,), (3, 7), ()], ids=str)
def test_moments_are_those_of_the_twin(shape, master, dtype):
    params = twins(shape, dtype)
    options = {"betas": (COEFFICIENT, 0.5), "adamw_weight_decay": 0.1, "master": master}
    optimizers = [
        Muon([{"params": [param], "algorithm": "adamw"}], adamw_lr=0.01, kernels=kernels, state_dtype="bf16", **options)
        for param, kernels in zip(params, ("triton", "torch"), strict=True)
    ]
    tolerance = 2e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    for step in range(STEPS):
        give(params)
        for optimizer in optimizers:
            optimizer.step()
        assert_same_state(params, optimizers, ["exp_avg", "exp_avg_sq"], step)
        torch.testing.assert_close(params[0], params[1], rtol=tolerance, atol=tolerance)


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # NumPy, which the interpreter computes with
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_skipped_step_leaves_every_bit(bad):
    matrix, vector = nn.Parameter(torch.randn(20, 30, device=DEVICE)), nn.Parameter(torch.randn(9, device=DEVICE))
    groups = [{"params": [matrix]}, {"params": [vector], "algorithm": "adamw"}]
    options = {"on_nonfinite": "skip", "state_dtype": "bf16", "compute_dtype": torch.float32}
    optimizer = Muon(groups, kernels="triton", **options)
    for step in range(3):
        matrix.grad, vector.grad = torch.randn_like(matrix), torch.randn_like(vector)
        if step == 1:
            vector.grad[3] = bad
        tensors = [matrix, vector, *(t for p in (matrix, vector) for t in optimizer.state[p].values())]
        before = [tensor.detach().clone() for tensor in tensors]
        optimizer.step()
        unchanged = [torch.equal(old, new) for old, new in zip(before, tensors, strict=True)]
        assert all(unchanged) if step == 1 else not any(unchanged)


def test_state_in_host_memory_has_the_same_bits():
    assert_host_memory_changes_no_bit((36, 20), (36, 20), (300,), (5, 3), state_dtype="bf16")


def test_a_changed_option_changes_what_kernels_read():
    params = twins((8, 6), torch.float32)
    options = {"momentum": COEFFICIENT, "compute_dtype": torch.float32}
    optimizers = [
        Muon([param], lr=0.05, kernels=kernels, state_dtype="bf16", **options)
        for param, kernels in zip(params, ("triton", "torch"), strict=True)
    ]
    for state_dtype, dtype in (("bf16", torch.bfloat16), (None, torch.float32), ("bf16", torch.bfloat16)):
        give(params)
        for optimizer, param in zip(optimizers, params, strict=True):
            optimizer.param_groups[0]["state_dtype"] = state_dtype
            optimizer.step()
            assert optimizer.state[param]["momentum_buffer"].dtype == dtype
        torch.testing.assert_close(params[0], params[1], rtol=1e-5, atol=1e-5)
