"""Cases of test_triton.py: run in a process of their own, in Triton's interpreter or on a CUDA device.

Every case steps two optimizers over the same parameters, one with the kernels and one with their plain twin.
"""

import math
import time

import pytest
import torch
import triton
import triton.language as tl
from on_device import DEVICE, DTYPES
from oracle import rounded_to_24_bits
from torch import nn

from quintic import Experts, Flatten, Heads, Matrix, Muon, Rows, Split
from quintic.kernels.products import normalize
from quintic.kernels.products.normalize import can_normalize, normalize_matrices
from quintic.kernels.products.symmetric import can_multiply, symmetric_multiply
from quintic.kernels.update import adamw, matrix_update
from quintic.kernels.update.matrix_layout import MatrixLayout
from quintic.kernels.update.weights import MASTER, load_full_precision, store_weight
from quintic.optim.layout.pieces import Piece
from quintic.optim.numeric.precision import full_precision, store_
from quintic.optim.polar.forms import resolve
from quintic.optim.polar.orthogonalize import apply_form
from quintic.optim.rules.device import DeviceHyperparameters
from quintic.optim.step import bucket_step
from quintic.optim.step.operands import BucketCache, Operands
from quintic.optim.step.torch_backend import TorchBackend
from quintic.optim.step.triton_backend import TritonBackend

VIEWS = [
    (Matrix(), (37, 21)),
    (Matrix(), (64, 48)),
    (Matrix(transposed=True), (21, 37)),
    (Heads(3), (36, 20)),
    (Heads(4, dim=1), (20, 36)),
    (Heads(2, transposed=True), (15, 26)),
    (Heads(2, transposed=True, dim=1), (26, 15)),
    (Split((8, 16, 24)), (48, 40)),
    (Split((5, 3, 2), groups=4), (40, 23)),
    (Split((1, 1), groups=7, transposed=True), (9, 14)),
    (Split((6, 6)), (3, 12, 10)),
    (Split((6, 6), transposed=True), (3, 10, 12)),
    (Experts(), (5, 12, 20)),
    (Experts(transposed=True), (5, 20, 12)),
    (Rows(8), (32, 24)),
    (Rows(8, transposed=True), (32, 24)),
    (Flatten(), (12, 4, 3, 3)),
    (Flatten(groups=2), (12, 4, 3, 3)),
    (Flatten(True), (12, 4, 3, 3)),
    (Matrix(), (1, 9)),
    (Matrix(), (9, 1)),
    (Matrix(), (1, 1)),
    (Matrix(), (100, 130)),  # several tiles
]

# What every view meets: nothing, and all that makes another pass of it.
OPTIONS = [
    {},
    {"normalize": "neuron", "weight_decay": 0.1, "adamw_weight_decay": 0.1, "cautious": True, "on_nonfinite": "skip"},
]

# What changes an update without asking where its matrix lies.
MORE_OPTIONS = [
    {"nesterov": False, "weight_decay": 0.3, "adamw_weight_decay": 0.3},
    {"weight_decay": 0.3, "adamw_weight_decay": 0.3, "cautious": True},
    {"weight_decay": 3.0, "adamw_weight_decay": 3.0, "decay_coupling": "lr_squared", "normalize": "neuron"},
    {"weight_decay": 0.3, "scale_decay": True, "adjust_lr": "match_rms_adamw", "cautious": "strict"},
    {"weight_decay": 3.0, "scale_decay": True, "normalize": "neuron", "decay_coupling": "lr_squared"},
    # A stage without a kernel between the kernels of momentum and weights.
    {"normalize": "element", "weight_decay": 0.3, "on_nonfinite": "skip"},
]


def pair(view, shape, dtype, memory="contiguous", **options):
    """Return two parameters with equal values, and an optimizer for each: kernels and twin."""
    params = []
    values = torch.randn(shape)
    for _ in range(2):
        data = values.to(DEVICE, dtype)
        if memory == "transposed":
            data = data.movedim(-1, 0).contiguous().movedim(0, -1)
        if memory == "channels_last":
            data = data.to(memory_format=torch.channels_last)
        params.append(nn.Parameter(data.clone(memory_format=torch.preserve_format)))
    optimizers = [
        Muon([{"params": [param], "view": view}], lr=0.05, momentum=0.8, kernels=kernels, **options)
        for param, kernels in zip(params, ("triton", "torch"), strict=True)
    ]
    assert optimizers[0].plan().buckets[0].kernels == "triton"
    return params, optimizers


def give_gradients(params, scale=1.0):
    gradient = torch.randn(params[0].shape) * scale
    for param in params:
        # With the parameter's strides, as autograd gives it.
        param.grad = torch.empty_like(param).copy_(gradient)


def assert_alike(params, optimizers, tolerance):
    # Both orthogonalise the same directions; what differs is rounding in the passes around it.
    torch.testing.assert_close(params[0], params[1], rtol=tolerance, atol=tolerance)
    first, second = (optimizer.state[param] for optimizer, param in zip(optimizers, params, strict=True))
    for key in first:
        if first[key].dtype != torch.uint16:
            torch.testing.assert_close(first[key], second[key], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("view", "shape", "options"),
    [
        *((view, shape, options) for view, shape in VIEWS for options in OPTIONS),
        *((view, shape, options) for view, shape in (VIEWS[0], VIEWS[4], VIEWS[-1]) for options in MORE_OPTIONS),
    ],
    ids=str,
)
def test_matrices_step_as_their_twins(view, shape, options):
    params, optimizers = pair(view, shape, torch.float32, compute_dtype=torch.float32, **options)
    for _ in range(2):
        give_gradients(params)
        before = params[0].grad.clone()
        for optimizer in optimizers:
            with torch.device("meta"):  # tables and constants must not go where the user wants new tensors
                optimizer.step()
        assert torch.equal(params[0].grad, before)
        assert_alike(params, optimizers, 1e-5)


@pytest.mark.parametrize(("view", "shape"), VIEWS, ids=str)
def test_memory_formats_do_not_matter(view, shape):
    memory = "channels_last" if isinstance(view, Flatten) else "transposed"
    params, optimizers = pair(view, shape, torch.float32, memory, compute_dtype=torch.float32, cautious=True)
    for _ in range(2):
        give_gradients(params)
        for optimizer in optimizers:
            optimizer.step()
        assert_alike(params, optimizers, 1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("master", [None, "fp32"])
@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
def test_every_dtype_steps_with_and_without_masters(dtype, master, algorithm):
    params, optimizers = [], []
    values = torch.randn(33, 50)
    for kernels in ("triton", "torch"):
        param = nn.Parameter(values.to(DEVICE, dtype))
        options = {
            "lr": 0.01,
            "adamw_lr": 0.01,
            "weight_decay": 0.1,
            "adamw_weight_decay": 0.1,
            "cautious": True,
            "master": master,
        }
        group = {"params": [param], "algorithm": algorithm}
        params.append(param)
        optimizers.append(Muon([group], kernels=kernels, compute_dtype=torch.float32, **options))
    for _ in range(4):
        give_gradients(params)
        for optimizer in optimizers:
            optimizer.step()
        tolerance = 1e-5 if dtype == torch.float32 else torch.finfo(dtype).eps
        torch.testing.assert_close(params[0], params[1], rtol=2 * tolerance, atol=2 * tolerance)
        if master is not None and dtype != torch.float32:
            first, second = (o.state[p]["master"] for o, p in zip(optimizers, params, strict=True))
            torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"algorithm": "muon", "weight_decay": 0.3, "cautious": True, "normalize": "neuron"},
        {"algorithm": "muon", "view": Heads(4, dim=1)},
        {"algorithm": "adamw", "weight_decay": 0.3},
        {"algorithm": "adamw", "weight_decay": 0.3, "cautious": True},
    ],
    ids=str,
)
def test_mantissa_is_the_float32_master_bit_for_bit(options):
    start = torch.randn(36, 64).bfloat16()
    dtypes = (torch.bfloat16, torch.bfloat16, torch.float32)
    params = [nn.Parameter(start.to(DEVICE, dtype, copy=True)) for dtype in dtypes]
    rates = {"lr": 1e-2, "adamw_lr": 1e-2, "compute_dtype": torch.float32}
    optimizers = [
        Muon([{"params": [p], **options}], master=master, kernels="triton", **rates)
        for p, master in zip(params, ("mantissa", "fp32", None), strict=True)
    ]
    for _ in range(10 if DEVICE == "cpu" else 40):
        gradient = torch.randn(36, 64).bfloat16().to(DEVICE)
        for param, optimizer in zip(params, optimizers, strict=True):
            param.grad = gradient.to(param.dtype)
            optimizer.step()
    low, master, wide = params
    assert torch.equal(low, master)
    value = full_precision(low.detach(), optimizers[0].state[low]["mantissa"])
    assert torch.equal(value, optimizers[1].state[master]["master"])
    assert torch.equal(value, wide)


@pytest.mark.parametrize(
    "options",
    [
        {"algorithm": "muon", "weight_decay": 0.3, "cautious": True, "normalize": "neuron"},
        {"algorithm": "muon", "view": Heads(4, dim=1)},
        {"algorithm": "adamw", "weight_decay": 0.3, "cautious": "strict"},
    ],
    ids=str,
)
def test_bytes_are_float32_weights_that_are_rounded_after_every_step(options):
    start = torch.randn(36, 64).bfloat16()
    low, wide = (nn.Parameter(start.to(DEVICE, dtype, copy=True)) for dtype in (torch.bfloat16, torch.float32))
    rates = {"lr": 1e-3, "adamw_lr": 1e-3, "compute_dtype": torch.float32}
    optimizer, other = (
        Muon([{"params": [param], **options}], master=master, kernels="triton", **rates)
        for param, master in ((low, "8bit"), (wide, None))
    )
    for _ in range(5 if DEVICE == "cpu" else 40):
        low.grad = torch.randn(36, 64).bfloat16().to(DEVICE)
        wide.grad = low.grad.float()
        optimizer.step()
        other.step()
        rounded = torch.from_numpy(rounded_to_24_bits(wide.detach().cpu().numpy())).to(DEVICE)
        assert not torch.equal(rounded, wide)
        wide.data.copy_(rounded)
        assert torch.equal(full_precision(low.detach(), optimizer.state[low]["mantissa_byte"]), wide)


@triton.jit
def _store_kernel(values, weights, masters, found, numel, BLOCK: tl.constexpr, MASTER: tl.constexpr):
    """Store values in weights and masters, and what is loaded from these in `found`."""
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = element < numel
    store_weight(weights + element, masters + element, tl.load(values + element, mask=mask), mask, MASTER)
    weight = tl.load(weights + element, mask=mask)
    tl.store(found + element, load_full_precision(weight, masters + element, mask, MASTER), mask=mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint16, torch.uint8], ids=str)
def test_any_value_is_stored_as_without_kernels(dtype):
    special = [0, 0x80, 0x180, 0x7FFF80, 0x3F80FF80, 0x3FFFFFFF, 0x7F7FFF7F, 0x7F7FFF80, 0x7F800000]
    special += [0x7F800001, 0x7F80FFFF, 0x7FBFFFFF, 0x7FC00000, 0x7FFFFF80, 0x7FFFFFFF]
    if dtype != torch.uint8:
        special = special[:-6]  # a NaN loses its payload
    drawn = torch.randint(0, 0x7F800000, (2000,), dtype=torch.int32)
    bits = torch.cat([torch.tensor(special, dtype=torch.int32), drawn, drawn & ~0xFF | 0x80])
    values = torch.cat([bits, bits | -(2**31)]).view(torch.float32).to(DEVICE)
    twin, low = torch.zeros_like(values, dtype=torch.bfloat16), torch.zeros_like(values, dtype=dtype)
    store_(twin, low, values.clone())  # which it rounds
    weights, masters, found = torch.zeros_like(twin), torch.zeros_like(low), torch.zeros_like(values)
    numel = len(values)
    _store_kernel[(triton.cdiv(numel, 512),)](values, weights, masters, found, numel, BLOCK=512, MASTER=MASTER[dtype])
    assert torch.equal(weights.view(torch.int16), twin.view(torch.int16))
    assert torch.equal(masters.view(torch.uint8), low.view(torch.uint8))
    assert torch.equal(found.view(torch.int32), full_precision(twin, low).view(torch.int32))


@pytest.mark.parametrize("shape", [(1,), (5000,), (3, 7), (), (0,), (4, 0)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.3, "adamw_weight_decay": 0.3, "cautious": True},
        {"adamw_weight_decay": 0.3, "cautious": "strict"},
        {"on_nonfinite": "skip"},
    ],
    ids=str,
)
def test_adamw_steps_as_its_twin(shape, options):
    params, optimizers = [], []
    values = [torch.randn(shape), torch.randn(70, 80)]
    for kernels in ("triton", "torch"):
        found = [nn.Parameter(value.to(DEVICE, copy=True)) for value in values]
        params.append(found)
        groups = [{"params": found, "algorithm": "adamw"}]
        optimizers.append(Muon(groups, adamw_lr=0.01, kernels=kernels, betas=(0.8, 0.999), **options))
    for step in range(5):
        gradients = [torch.randn(value.shape) for value in values]
        gradients[1][:30] = 0.0
        if step == 2:
            gradients[0] = None  # the other one steps alone
        for found in params:
            for param, gradient in zip(found, gradients, strict=True):
                param.grad = None if gradient is None else gradient.to(DEVICE)
        for optimizer in optimizers:
            optimizer.step()
        for first, second in zip(*params, strict=True):
            torch.testing.assert_close(first, second, rtol=2e-5, atol=2e-6)
            assert torch.equal(optimizers[0].state[first]["step"], optimizers[1].state[second]["step"])


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # NumPy, which the interpreter computes with
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("options", [{}, {"normalize": "neuron"}, {"master": "fp32"}], ids=str)
def test_a_step_with_non_finite_gradients_leaves_every_bit(bad, options):
    dtype = torch.float16 if "master" in options else torch.float32
    matrix, vector = nn.Parameter(torch.randn(20, 30).to(DEVICE, dtype)), nn.Parameter(torch.randn(9).to(DEVICE, dtype))
    groups = [{"params": [matrix]}, {"params": [vector], "algorithm": "adamw"}]
    optimizer = Muon(
        groups,
        kernels="triton",
        on_nonfinite="skip",
        weight_decay=0.1,
        adamw_weight_decay=0.1,
        compute_dtype=torch.float32,
        **options,
    )
    for step in range(4):
        matrix.grad, vector.grad = torch.randn_like(matrix), torch.randn_like(vector)
        if step in (1, 2):
            (matrix if step == 1 else vector).grad.view(-1)[3] = bad
        tensors = [matrix, vector, *(t for p in (matrix, vector) for t in optimizer.state[p].values())]
        before = [tensor.detach().clone() for tensor in tensors]
        optimizer.step()
        unchanged = [torch.equal(old, new) for old, new in zip(before, tensors, strict=True)]
        assert all(unchanged) if step in (1, 2) else not any(unchanged)
        assert optimizer.last_step().skipped == (step in (1, 2))
    assert optimizer.last_step().skipped_steps == 2


def test_many_parameters_of_one_shape_and_chunks():
    values = [torch.randn(6, 40, 24), *(torch.randn(40, 24) for _ in range(5))]
    params = [[nn.Parameter(value.to(DEVICE, copy=True)) for value in values] for _ in range(2)]
    optimizers = []
    for found, kernels in zip(params, ("triton", "torch"), strict=True):
        groups = [
            {"params": found[:1], "view": Experts(), "lr_multipliers": [1, 2, 1, 3, 1, 0.5], "scale_decay": True},
            {"params": found[1:]},
        ]
        optimizers.append(
            Muon(groups, 0.05, weight_decay=1, kernels=kernels, max_workspace_bytes=40_000, compute_dtype=torch.float32)
        )
    assert len(optimizers[0].plan().buckets) > 3
    for step in range(3):
        gradients = [torch.randn(value.shape) for value in values]
        for found in params:
            for index, (param, gradient) in enumerate(zip(found, gradients, strict=True)):
                param.grad = None if (step, index) == (1, 2) else gradient.to(DEVICE)
        for optimizer in optimizers:
            optimizer.step()
        for first, second in zip(*params, strict=True):
            torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-5)


def test_hyperparameters_are_read_anew_every_step():
    params, optimizers = pair(Matrix(), (16, 24), torch.float32, compute_dtype=torch.float32, weight_decay=0.1)
    for step in range(4):
        for optimizer in optimizers:
            optimizer.param_groups[0].update(lr=0.1 / (step + 1), momentum=0.5 + 0.1 * step, weight_decay=0.1 * step)
        give_gradients(params)
        for optimizer in optimizers:
            optimizer.step()
        assert_alike(params, optimizers, 1e-5)


@pytest.mark.parametrize("live", [False, True])
def test_schedulers_reach_the_kernels(live):
    """One rate for both algorithms, a tensor on the device too, and a cycled momentum."""
    values = [torch.randn(16, 24), torch.randn(50)]
    params = [[nn.Parameter(value.to(DEVICE, copy=True)) for value in values] for _ in range(2)]
    runs = []
    for (matrix, vector), kernels in zip(params, ("triton", "torch"), strict=True):
        groups = [{"params": [matrix]}, {"params": [vector], "algorithm": "adamw"}]
        optimizer = Muon(groups, adamw_lr_ratio=0.05, kernels=kernels, compute_dtype=torch.float32)
        runs.append((optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=5)))
    for _ in range(4):
        gradients = [torch.randn(value.shape) for value in values]
        for found, (optimizer, scheduler) in zip(params, runs, strict=True):
            for param, gradient in zip(found, gradients, strict=True):
                param.grad = gradient.to(DEVICE)
            for group in optimizer.param_groups:
                if live and not isinstance(group["lr"], torch.Tensor):
                    group["lr"] = torch.tensor(group["lr"], device=DEVICE)
            optimizer.step()
            scheduler.step()
        for first, second in zip(*params, strict=True):
            torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-5)
    assert not any(
        torch.allclose(param.cpu(), value, atol=1e-3) for param, value in zip(params[0], values, strict=True)
    )


def test_a_layout_of_memory_in_order_is_recognised():
    assert MatrixLayout(1, 6, 4, 24, 4, 1).contiguous
    assert MatrixLayout(1, 6, 4, 24, 1, 6).contiguous
    assert MatrixLayout(1, 6, 4, 24, 1, 6).transposed
    assert not MatrixLayout(1, 6, 4, 24, 8, 1).contiguous
    assert not MatrixLayout(3, 2, 4, 24, 4, 1).contiguous
    assert MatrixLayout(3, 2, 4, 8, 4, 1).contiguous


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("shape", [(3, 5, 7), (1, 1, 1), (2, 170, 190), (4, 1, 3000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("scale", [1e-35, 1.0, 1e35])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("combined", [False, True])
def test_normalisation_is_that_of_the_twin(shape, dtype, scale, transposed, combined, monkeypatch):
    monkeypatch.setattr(normalize, "_MAX_TILES", 0 if combined else 1024)
    x = torch.randn(shape) * scale
    x[0, 0, 0] = 0
    if shape[0] > 2:
        x[1] = 0
        x[2, 0, 0] = float("nan")
    x = x.to(DEVICE)
    x = x.mT.contiguous().mT if transposed else x
    before = x.clone()
    assert can_normalize(x, dtype)
    out = normalize_matrices(x, 128.0, dtype)
    assert torch.equal(x.nan_to_num(5), before.nan_to_num(5))
    exact = x.double()
    norms = exact.flatten(1).norm(dim=1).view(-1, 1, 1)
    expected = 128 * exact / norms.masked_fill(norms == 0, 1)
    torch.testing.assert_close(out.double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-6, equal_nan=True)
    assert out.stride() == x.stride()


def test_normalisation_does_not_depend_on_the_batch():
    x = torch.randn(5, 190, 110).to(DEVICE)
    together = normalize_matrices(x, 1.0, torch.float16)
    for matrix, expected in zip(x, together, strict=True):
        assert torch.equal(normalize_matrices(matrix.unsqueeze(0), 1.0, torch.float16)[0], expected)


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != torch.float32], ids=str)
@pytest.mark.parametrize(
    ("count", "side", "inner"),
    [(2, 256, 384), (1, 300, 200), (3, 130, 70), (2, 128, 64), (3, 16, 200), (2, 40, 80), (2, 3, 5)],
)
def test_symmetric_products_are_those_of_the_twin(dtype, count, side, inner):
    x = (torch.randn(count, side, inner) / inner**0.5).to(DEVICE, dtype)
    tolerance = torch.finfo(dtype).eps
    exact = x.double() @ x.double().mT
    column_major = x.mT.contiguous().mT
    for left, right in ((x, x.mT), (column_major, column_major.mT)):
        gram = symmetric_multiply(left, right)
        torch.testing.assert_close(gram.double(), exact, rtol=tolerance, atol=tolerance)
    identity = torch.eye(side, dtype=torch.float64, device=DEVICE)
    for beta, diagonal in ((0.0, 1.5), (2.5, -3.0)):
        c = gram if beta else None
        added = symmetric_multiply(gram, gram, alpha=-0.5, c=c, beta=beta, diagonal=diagonal)
        exact = beta * gram.double() - 0.5 * gram.double() @ gram.double() + diagonal * identity
        torch.testing.assert_close(added.double(), exact, rtol=tolerance, atol=2 * tolerance)
        # Tiles beside the diagonal are mirrored; within one, a sum may be made in another order.
        torch.testing.assert_close(added, added.mT, rtol=2 * tolerance, atol=2 * tolerance)
    assert torch.equal(symmetric_multiply(x[:1], x[:1].mT)[0], symmetric_multiply(x, x.mT)[0])


@pytest.mark.parametrize("orthogonalizer", ["auto", "gram", "svd"])
def test_products_of_a_dtype_without_kernels(orthogonalizer):
    """The kernels were insisted on for the float64 operands of float32 weights, and refused them."""
    options = {"orthogonalizer": orthogonalizer, "compute_dtype": torch.float64}
    params, optimizers = pair(Matrix(), (300, 280), torch.float32, **options)
    give_gradients(params)
    for optimizer in optimizers:
        optimizer.step()
    assert_alike(params, optimizers, 1e-5)


def test_symmetric_products_where_the_kernel_pays():
    assert can_multiply(torch.Size((1, 256, 300)), torch.float16)
    assert can_multiply(torch.Size((1, 300, 256)), torch.bfloat16)
    assert not can_multiply(torch.Size((1, 255, 300)), torch.float16)
    assert can_multiply(torch.Size((1, 16, 4096)), torch.float16)  # elsewhere the bits would depend on the batch
    assert not can_multiply(torch.Size((1, 256, 300)), torch.float32)


@pytest.mark.parametrize("shape", [(1, 300, 500), (1, 500, 300), (2, 256, 256)])
@pytest.mark.parametrize("method", ["polar_express", "gram"])
def test_polynomials_with_the_kernels_are_those_without(shape, method):
    x = torch.randn(shape).to(DEVICE)
    form = resolve(method, *shape[1:], device_type="cuda", compute_dtype=torch.float16)
    found, expected = (apply_form(x, form, kernels).double() for kernels in ("triton", "torch"))
    # Rounding of 16 bits in two orders; the Gram form of a square matrix feels it most
    # (docs/explanation/orthogonalization.md).
    assert (found - expected).norm() < 1e-2 * expected.norm()


def test_the_python_part_of_a_step_is_short_for_500_parameters(monkeypatch):
    """Python's time per parameter and step, without the launches: under 2 ms (0.5 measured on a 2-core CPU)."""
    monkeypatch.setattr(matrix_update, "momentum_directions_", lambda *args, **kwargs: None)
    monkeypatch.setattr(matrix_update, "apply_updates_", lambda *args, **kwargs: None)
    monkeypatch.setattr(adamw, "adamw_tensors_", lambda *args, **kwargs: None)
    monkeypatch.setattr(bucket_step, "orthogonalized", lambda directions, *others: directions)
    matrices = [nn.Parameter(torch.randn(8, 8, device=DEVICE)) for _ in range(360)]
    vectors = [nn.Parameter(torch.randn(8, device=DEVICE)) for _ in range(140)]
    optimizer = Muon([{"params": matrices}, {"params": vectors, "algorithm": "adamw"}], kernels="triton")
    for param in (*matrices, *vectors):
        param.grad = torch.randn_like(param)
    times = []
    for _ in range(30):
        start = time.perf_counter()
        optimizer.step()
        times.append(time.perf_counter() - start)
    assert min(times) < 2e-3


@pytest.mark.parametrize("count", [0, 1, 7, 1000, 10**6])
@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.0, 0.5), (0.99, 0.9999999)])
def test_corrections_of_adamw_at_any_count(betas, count):
    params = [nn.Parameter(torch.zeros(5, device=DEVICE)) for _ in range(150)]  # more than one program counts
    optimizer = Muon([{"params": params, "algorithm": "adamw"}], adamw_lr=1.0, betas=betas, eps=1e-12, kernels="triton")
    for number, param in enumerate(params):
        param.grad = torch.full_like(param, 0.5)
        optimizer.state[param]["step"].fill_(count + number)
    optimizer.step()
    for number, param in enumerate(params):
        step = count + number + 1
        assert float(optimizer.state[param]["step"]) == step
        powers = [step * math.log(beta) if beta else -math.inf for beta in betas]
        first, second = (0.5 * (1 - betas[0]) / -math.expm1(powers[0]), 0.25 * (1 - betas[1]) / -math.expm1(powers[1]))
        expected = torch.full((5,), -first / second**0.5, dtype=torch.float64)
        torch.testing.assert_close(param.double().cpu(), expected, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
def test_state_that_the_kernels_would_misread_is_brought_into_its_form(algorithm):
    param = nn.Parameter(torch.randn(8, 6, device=DEVICE))
    optimizer = Muon([{"params": [("w", param)], "algorithm": algorithm}], kernels="triton")
    param.grad = torch.randn_like(param)
    optimizer.step()
    key = "momentum_buffer" if algorithm == "muon" else "exp_avg_sq"
    sample = param.grad if algorithm == "muon" else param.grad.square()
    for broken in (optimizer.state[param][key].half(), optimizer.state[param][key].T.contiguous().T):
        optimizer.state[param][key] = broken
        expected = broken.float().lerp(sample, 0.05)
        optimizer.step()
        found = optimizer.state[param][key]
        assert (found.dtype, found.stride()) == (torch.float32, param.stride())
        torch.testing.assert_close(found, expected)


def test_some_matrices_of_a_launch_stay_as_they_are():
    layout = MatrixLayout(1, 5, 7, 35, 7, 1)
    gradient, momentum, weight = (torch.randn(3, 5, 7).to(DEVICE) for _ in range(3))
    before = momentum.clone(), weight.clone()
    table = torch.tensor([[t[i].data_ptr() for i in range(3)] for t in (gradient, momentum, weight, weight)]).to(DEVICE)
    hyperparameters = torch.tensor([0.1, 0.0, 0.9], dtype=torch.float64, device=DEVICE)
    apply_mask = torch.tensor([1, 0, 1], dtype=torch.int32, device=DEVICE)
    directions = torch.empty(3, 5, 7, device=DEVICE)
    matrix_update.momentum_directions_(
        table[:2],
        directions,
        hyperparameters,
        layout,
        gradient_dtype=torch.float32,
        mu_index=2,
        nesterov=False,
        apply_mask=apply_mask,
        aligned=False,
    )
    matrix_update.apply_updates_(
        table[2:],
        directions,
        torch.ones(1, 3, 1, 1, device=DEVICE),
        hyperparameters,
        layout,
        weight_dtype=torch.float32,
        master_dtype=None,
        lr_index=0,
        weight_decay_index=1,
        cautious=False,
        squared_lr_decay=False,
        apply_mask=apply_mask,
        aligned=False,
    )
    for found, kept in zip((momentum, weight), before, strict=True):
        assert [torch.equal(found[i], kept[i]) for i in range(3)] == [False, True, False]
    torch.testing.assert_close(momentum[::2], torch.lerp(before[0], gradient, 0.1)[::2])


@pytest.mark.parametrize("flags", [None, [True, False, True, True, False]])
@pytest.mark.parametrize("options", [{}, {"master": "fp32"}, {"scale_decay": True, "cautious": True}], ids=str)
def test_matrices_of_one_bucket_in_several_orders_of_memory(options, flags):
    """Ranks divide and exchange matrices of one shape together: each order's launch gets a part of one table."""
    update, factors = torch.randn(5, 12, 8).to(DEVICE), torch.rand(5, 12, 1).add(0.5).to(DEVICE)
    whole, middle = (), ((0, 12), (2, 10))
    # By columns, twice by rows, within longer rows, by columns.
    boxes, by_columns = [whole, whole, whole, middle, whole], [True, False, False, False, True]
    values = [torch.randn(2, 12, 12 if box is middle else 8) for box in boxes]
    members = tuple(Piece(str(i), i, (0,), box) for i, box in enumerate(boxes))
    stepped = flags or [True] * 5
    found = []
    for kernels in ("triton", "torch"):
        # float16 and products in float32: the interpreter has no reliable bfloat16.
        pairs = [value.to(DEVICE, torch.float16) for value in values]
        pairs = [pair.mT.contiguous().mT if order else pair for pair, order in zip(pairs, by_columns, strict=True)]
        params = [nn.Parameter(pair[0].clone()) for pair in pairs]
        common = {"momentum": 0.8, "weight_decay": 0.3, "compute_dtype": torch.float32, **options}
        optimizer = Muon(params, kernels=kernels, **common)
        bucket, group = optimizer.plan().buckets[0], optimizer._plans.current_groups()[0]
        states = [optimizer.state[param] for param in params]
        active = Operands(members, [param.detach() for param in params], [pair[1] for pair in pairs], states, 5)
        if kernels == "triton":
            hyperparameters = DeviceHyperparameters(torch.device(DEVICE))
            hyperparameters.update(group.hyperparameters, 1.0)
            apply_mask = None if flags is None else torch.tensor(flags, dtype=torch.int32, device=DEVICE)
            passes = TritonBackend(bucket, group, active, BucketCache(), hyperparameters, apply_mask)
        else:
            passes = TorchBackend(bucket, group, active, BucketCache(), flags)
        directions = passes.directions()
        decays = torch.arange(60, device=DEVICE).view(5, 12, 1) / 6 if group.scale_decay else factors[:0]
        passes.apply(update, torch.cat([factors, decays]))
        found.append((directions[stepped], params, [state[key] for state in states for key in sorted(state)]))
        assert [not torch.equal(param, pair[0]) for param, pair in zip(params, pairs, strict=True)] == stepped
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-5)
