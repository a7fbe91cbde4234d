"""Cases of test_triton.py: momentum and moments of 8 bits, bit for bit those of plain PyTorch.

As in triton_narrow_state.py, sums in float32 are exact here, so both sides store the same numbers.
"""

import pytest
import torch
from on_device import DEVICE, assert_host_memory_changes_no_bit
from torch import nn
from triton_narrow_state import COEFFICIENT, DTYPES, STEPS, give, twins

from quintic import Experts, Heads, Matrix, Muon, Rows, Split

# More than one tile, rows of one group, views that cut along rows and columns, and matrices stored by columns.
VIEWS = [
    (Matrix(), (37, 24)),
    (Matrix(), (100, 136)),
    (Matrix(), (3, 8)),
    (Matrix(transposed=True), (21, 40)),
    (Heads(3), (36, 16)),
    (Heads(4, dim=1), (20, 32)),
    (Split((8, 16, 24)), (48, 40)),
    (Split((8, 16, 24), transposed=True), (20, 48)),
    (Split((5, 3, 2), groups=4), (40, 24)),
    (Experts(transposed=True), (5, 20, 16)),
    (Rows(8), (32, 24)),
]


def assert_same_bytes(params, optimizers, dtypes):
    first, second = (optimizer.state[param] for optimizer, param in zip(optimizers, params, strict=True))
    for key, dtype in dtypes.items():
        assert first[key].dtype == second[key].dtype == dtype
        assert first[key].any()
        assert torch.equal(first[key], second[key]), key


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(("view", "shape"), VIEWS, ids=str)
def test_momentum_is_that_of_the_twin(view, shape, nesterov, dtype):
    params = twins(shape, dtype)
    options = {"momentum": COEFFICIENT, "nesterov": nesterov, "normalize": "neuron", "compute_dtype": torch.float32}
    optimizers = [
        Muon([{"params": [param], "view": view}], lr=0.05, kernels=kernels, state_dtype="int8", **options)
        for param, kernels in zip(params, ("triton", "torch"), strict=True)
    ]
    assert optimizers[0].plan().buckets[0].kernels == "triton"
    tolerance = 1e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    for _ in range(STEPS):
        give(params)
        for optimizer in optimizers:
            optimizer.step()
        assert_same_bytes(params, optimizers, {"momentum_buffer": torch.int8})
        torch.testing.assert_close(params[0], params[1], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("master", [None, "fp32"])
@pytest.mark.parametrize("shape", [(1, 8), (40, 128), (3, 5, 16)], ids=str)
def test_moments_are_those_of_the_twin(shape, master, dtype):
    params = twins(shape, dtype)
    options = {"betas": (COEFFICIENT, 0.5), "adamw_weight_decay": 0.1, "master": master}
    optimizers = [
        Muon([{"params": [param], "algorithm": "adamw"}], adamw_lr=0.01, kernels=kernels, state_dtype="int8", **options)
        for param, kernels in zip(params, ("triton", "torch"), strict=True)
    ]
    tolerance = 2e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    for _ in range(STEPS):
        give(params)
        for optimizer in optimizers:
            optimizer.step()
        assert_same_bytes(params, optimizers, {"exp_avg": torch.int8, "exp_avg_sq": torch.uint8})
        torch.testing.assert_close(params[0], params[1], rtol=tolerance, atol=tolerance)


# Of NumPy, which the interpreter computes with.
@pytest.mark.filterwarnings("ignore:(invalid value|divide by zero) encountered")
@pytest.mark.parametrize("policy", ["skip", "propagate"])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_bad_gradient_spoils_its_group_or_nothing(bad, policy):
    found = []
    for kernels in ("triton", "torch"):
        torch.manual_seed(0)
        matrix, table = (nn.Parameter(torch.randn(20, 24, device=DEVICE)) for _ in range(2))
        groups = [{"params": [matrix]}, {"params": [table], "algorithm": "adamw"}]
        options = {"on_nonfinite": policy, "state_dtype": "int8", "compute_dtype": torch.float32}
        optimizer = Muon(groups, kernels=kernels, **options)
        for param in (matrix, table):
            param.grad = torch.randn(param.shape).to(DEVICE)
        table.grad[3, 10] = bad
        before = [t.detach().clone() for p in (matrix, table) for t in (p, *optimizer.state[p].values())]
        optimizer.step()
        after = [t.detach() for p in (matrix, table) for t in (p, *optimizer.state[p].values())]
        is_same = [torch.equal(old, new) for old, new in zip(before, after, strict=True)]
        assert all(is_same) if policy == "skip" else not any(is_same)
        if policy == "propagate":
            # The exponent of this group, in its lowest bits, has all eight.
            assert (optimizer.state[table]["exp_avg_sq"][3, 8:16] == 1).all()
            assert (optimizer.state[table]["exp_avg"][3, 8:16] == 1).all()
        found.append([optimizer.state[table]["exp_avg"].cpu(), optimizer.state[matrix]["momentum_buffer"].cpu()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_matrices_and_vectors_of_adamw_are_in_buckets_of_their_own():
    table, vector = nn.Parameter(torch.randn(20, 24, device=DEVICE)), nn.Parameter(torch.randn(24, device=DEVICE))
    odd = nn.Parameter(torch.randn(20, 23, device=DEVICE))
    optimizer = Muon([{"params": [table, vector, odd], "algorithm": "adamw"}], kernels="triton", state_dtype="int8")
    for param in (table, vector, odd):
        param.grad = torch.randn_like(param)
    optimizer.step()
    assert [[member.index for member in bucket.members] for bucket in optimizer.plan().buckets] == [[0], [1, 2]]
    assert [optimizer.state[p]["exp_avg"].dtype for p in (table, vector, odd)] == [torch.int8, *[torch.float32] * 2]


def test_state_in_host_memory_has_the_same_bits():
    assert_host_memory_changes_no_bit((36, 24), (36, 24), (300, 8), (5, 3), state_dtype="int8")


def test_a_changed_option_changes_what_kernels_read():
    params = twins((8, 16), torch.float32)
    options = {"momentum": COEFFICIENT, "compute_dtype": torch.float32}
    optimizers = [
        Muon([param], lr=0.05, kernels=kernels, state_dtype="int8", **options)
        for param, kernels in zip(params, ("triton", "torch"), strict=True)
    ]
    dtypes = {"int8": torch.int8, None: torch.float32, "bf16": torch.bfloat16}
    for state_dtype in ("int8", None, "int8", "bf16", "int8"):
        give(params)
        for optimizer, param in zip(optimizers, params, strict=True):
            optimizer.param_groups[0]["state_dtype"] = state_dtype
            optimizer.step()
            assert optimizer.state[param]["momentum_buffer"].dtype == dtypes[state_dtype]
        torch.testing.assert_close(params[0], params[1], rtol=1e-5, atol=1e-5)
