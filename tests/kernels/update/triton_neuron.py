"""Cases of test_triton.py: NorMuon's neuron factors by their kernels, in the interpreter or on a CUDA device."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from on_device import DEVICE, poison_new_tensors
from torch import nn

from quintic import Experts, Muon, Split
from quintic.kernels.update import neuron, square_sums
from quintic.kernels.update.neuron import advance_neuron_factors_
from quintic.optim.rules.update import neuron_factors_, second_moment_shape

# The interpreter has no reliable bfloat16.
DTYPES = [torch.float32, torch.float64, torch.float16] + [torch.bfloat16] * (DEVICE == "cuda")
LAYOUTS = ["rows", "columns", "slice"]

# One neuron, one entry, whole blocks, ragged ones, several segments, more than are added at a time, several blocks of
# neurons in the second launch.
SHAPES = [
    (1, 1, 1),
    (3, 1, 9),
    (2, 9, 1),
    (3, 64, 128),
    (2, 65, 63),
    (2, 300, 129),
    (1, 130, 300),
    (1, 2100, 5),
    (1, 3, 2300),
]
if DEVICE == "cuda":
    SHAPES += [
        (1, 1100, 1030),
        (1, 7168, 7168),
        (3, 2048, 6144),
        (40, 768, 768),
        (2, 50304, 768),
        (500, 64, 512),
        (1, 5, 100_001),
    ]

needs_device = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
from_numpy = pytest.mark.filterwarnings("ignore:invalid value encountered")  # the interpreter computes with it


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    poison_new_tensors(monkeypatch)


def made(shape, dtype=torch.float32, layout="rows"):
    """Return matrices on the device, with poison between the rows of a slice."""
    b, m, n = shape
    if layout == "columns":
        return made((b, n, m), dtype).mT
    # Neurons of sizes that differ; as an orthogonalised matrix, of a norm near the root of its shorter side.
    values = torch.randn(shape) * torch.rand(b, m, 1).add(0.1) * torch.rand(b, 1, n).add(0.1) / max(m, n) ** 0.5
    if layout == "rows":
        return values.to(DEVICE, dtype)
    wide = torch.full((b, m + 2, n + 7), float("nan"))
    wide[:, 1:-1, 3:-4] = values
    return wide.to(DEVICE, dtype)[:, 1:-1, 3:-4]


def moments_of(shape, parts=None):
    """Return second moments as tensors of some matrices each, within one buffer that has guards between them."""
    b, m, n = shape
    size = max(m, n)
    parts = parts or [b]
    buffer = torch.full((b * size + 3 * len(parts) + 3,), 7.0, device=DEVICE)
    found, start = [], 3
    for count in parts:
        moment = buffer[start : start + count * size].view(count, *second_moment_shape(m, n))
        found.append(moment.copy_(torch.rand(moment.shape) / size))
        start += count * size + 3
    return buffer, found


def table_of(moments):
    addresses = [m.data_ptr() + i * m[0].nbytes for m in moments for i in range(len(m))]
    return torch.tensor(addresses, dtype=torch.int64, device=DEVICE)


def scale_of(count):
    """Return scales that lie apart, as those of one kind of several."""
    return torch.rand(count, 3).add(0.5).to(DEVICE)[:, 1].view(-1, 1, 1)


def run(update, moments, scale, beta=0.95, apply_mask=None):
    """Return factors and new second moments; those that were given stay."""
    after = moments.clone()
    factors = advance_neuron_factors_(update, table_of([after]), scale, beta=beta, apply_mask=apply_mask)
    return factors, after


def exact(update, moments, scale, beta):
    """The definition, in float64 and over whole matrices."""
    u, v = update.double(), moments.double()
    v = v + (1 - beta) * (u.square().mean(dim=2 if u.shape[1] >= u.shape[2] else 1, keepdim=True) - v)
    factors = v.clamp_min(1e-10).rsqrt()
    norm = (u * factors).norm(dim=(1, 2), keepdim=True)
    return factors * scale.double() * u.norm(dim=(1, 2), keepdim=True) / norm.clamp_min(1e-10), v


# Entries of other dtypes are float32 as soon as they are loaded: in the interpreter, one shape shows that.
ANY_DTYPE = [(2, 65, 63)] if DEVICE == "cpu" else SHAPES


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [(shape, dtype) for shape in SHAPES for dtype in DTYPES if dtype == torch.float32 or shape in ANY_DTYPE],
    ids=str,
)
def test_like_the_definition_and_the_twin(shape, dtype, layout):
    update, scale = made(shape, dtype, layout), scale_of(shape[0])
    before, (moments,) = update.clone(), moments_of(shape)[1]
    factors, after = run(update, moments, scale, 0.9)
    expected, expected_after = exact(update, moments, scale, 0.9)
    torch.testing.assert_close(factors.double(), expected, rtol=4e-6, atol=0)
    torch.testing.assert_close(after.double(), expected_after, rtol=2e-6, atol=0)
    twin_moments = moments.clone()
    twin = scale * neuron_factors_(update, twin_moments, beta=0.9)
    torch.testing.assert_close(factors, twin, rtol=1e-5, atol=0)
    torch.testing.assert_close(after, twin_moments, rtol=1e-5, atol=0)
    assert torch.equal(update, before)
    for again, first in zip(run(update, moments, scale, 0.9), (factors, after), strict=True):
        assert torch.equal(again, first)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        (shape, dtype)
        for shape in [*(shape for shape in SHAPES if shape[0] > 1), (4, 70, 300), (2, 600, 3)]
        for dtype in (DTYPES[0], DTYPES[-1])
        if dtype == torch.float32 or shape in ANY_DTYPE or DEVICE == "cuda"
    ],
    ids=str,
)
def test_a_matrix_has_the_same_bits_in_any_batch_and_layout(shape, dtype):
    update, scale, (moments,) = made(shape, dtype), scale_of(shape[0]), moments_of(shape)[1]
    factors, after = run(update, moments, scale)
    others = made((2, *shape[1:]), dtype), moments_of((2, *shape[1:]))[1][0], scale_of(2)
    together = [torch.cat(pair).flip(0) for pair in zip((update, moments, scale), others, strict=True)]
    for found, expected in zip(run(*together), (factors, after), strict=True):
        assert torch.equal(found.flip(0)[: shape[0]], expected)
    apply_mask = torch.ones((), dtype=torch.int32, device=DEVICE)
    for number in range(min(shape[0], 3)):
        one = slice(number, number + 1)
        columns, spread = update[one].mT.contiguous().mT, update.repeat_interleave(2, 2)[one, :, ::2]
        for stored, guard in (
            (update[one], None),
            (update[one], apply_mask),
            (columns, None),
            (spread, apply_mask.view(1)),
        ):
            found = run(stored, moments[one], scale[one], apply_mask=guard)
            assert torch.equal(found[0], factors[one])
            assert torch.equal(found[1], after[one])


@pytest.mark.parametrize(("programs", "shape"), [(1, (2, 1100, 1030)), (4, (1, 400, 500)), (10**6, (1, 1100, 1030))])
def test_segments_of_any_length(shape, programs, monkeypatch):
    monkeypatch.setattr(square_sums, "_PROGRAMS", programs)
    update, scale, (moments,) = made(shape), scale_of(shape[0]), moments_of(shape)[1]
    for found, expected in zip(run(update, moments, scale), exact(update, moments, scale, 0.95), strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=2e-6, atol=0)


@settings(max_examples=20)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 140), st.integers(1, 140)),
    seed=st.integers(0, 2**32 - 1),
    beta=st.sampled_from([0.0, 0.3, 0.5, 0.95, 1 - 2**-20]),
    layout=st.sampled_from(LAYOUTS),
)
def test_the_norm_of_an_update_stays(shape, seed, beta, layout):
    torch.manual_seed(seed)
    update, scale = made(shape, layout=layout), scale_of(shape[0])
    factors, after = run(update, moments_of(shape)[1][0], scale, beta)
    norms = (update.double() * factors).norm(dim=(1, 2))
    torch.testing.assert_close(norms, update.double().norm(dim=(1, 2)) * scale.view(-1), rtol=1e-5, atol=0)
    assert after.min() > 0


@pytest.mark.parametrize("beta", [0.0, 0.4, 0.6])
def test_second_moments_that_were_far_off(beta):
    """From the old value, a coefficient near zero would leave the rounding errors of the old value."""
    shape = (2, 70, 40)
    update, scale = made(shape), scale_of(2)
    moments = torch.full((2, 70, 1), 1e6, device=DEVICE)
    for found, expected in zip(run(update, moments, scale, beta), exact(update, moments, scale, beta), strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-6 if beta else 2e-6, atol=0)


@pytest.mark.parametrize("shape", [(3, 40, 20), (3, 20, 40)], ids=str)
def test_tiny_updates_and_zeros_have_finite_factors(shape):
    update, scale = made(shape) * torch.tensor([1e-7, 0.0, 1.0], device=DEVICE).view(3, 1, 1), scale_of(3)
    update[2].select(int(shape[1] < shape[2]), 5).zero_()  # a neuron
    moments = torch.zeros_like(moments_of(shape)[1][0])
    factors, after = run(update, moments, scale)
    expected, expected_after = exact(update, moments, scale, 0.95)
    torch.testing.assert_close(factors.double(), expected, rtol=2e-6, atol=0)
    torch.testing.assert_close(after.double(), expected_after, rtol=1e-6, atol=0)
    assert not factors[1].any()
    twin = scale * neuron_factors_(update, moments, beta=0.95)
    torch.testing.assert_close(factors, twin, rtol=2e-6, atol=0)


@pytest.mark.parametrize(
    ("parts", "apply_mask"),
    [([5], None), ([1, 1, 1, 1, 1], 1), ([2, 3], 0), ([2, 3], [1, 0, 1, 1, 0]), ([1, 1, 1, 1, 1], [0, 1, 0, 0, 1])],
)
@pytest.mark.parametrize("shape", [(5, 33, 70), (5, 300, 7)], ids=str)
def test_second_moments_lie_anywhere_and_stay_where_nothing_goes(shape, apply_mask, parts):
    update, scale = made(shape), scale_of(5)
    buffer, moments = moments_of(shape, parts)
    before = torch.cat(moments)
    expected, advanced = run(update, before, scale)
    flags = None if apply_mask is None else torch.tensor(apply_mask, dtype=torch.int32, device=DEVICE)
    factors = advance_neuron_factors_(update, table_of(moments), scale, beta=0.95, apply_mask=flags)
    assert torch.equal(factors, expected)
    each = torch.ones(5, dtype=torch.int32, device=DEVICE) if flags is None else flags.expand(5)
    assert torch.equal(torch.cat(moments), torch.where(each.view(-1, 1, 1) != 0, advanced, before))
    for moment in moments:
        moment.fill_(7.0)
    assert (buffer == 7).all()


@from_numpy
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("shape", [(3, 90, 40), (3, 40, 90)], ids=str)
def test_not_a_number_stays_in_its_matrix(shape, bad):
    update, scale, (moments,) = made(shape), scale_of(3), moments_of(shape)[1]
    clean = run(update, moments, scale)
    update[1, 17, 21] = bad
    factors, after = run(update, moments, scale)
    place = 17 if shape[1] > shape[2] else 21
    assert factors[1].isnan().all()
    assert (~after[1].flatten().isfinite()).nonzero().flatten().tolist() == [place]
    for found, expected in zip((factors, after), clean, strict=True):
        assert torch.equal(found[::2], expected[::2])
    stop = torch.tensor([1, 0, 1], dtype=torch.int32, device=DEVICE)
    assert torch.equal(run(update, moments, scale, apply_mask=stop)[1][1], moments[1])
    moments[1].view(-1)[3] = bad
    factors, _ = run(made(shape), moments, scale)
    assert factors[1].isnan().all()
    assert factors[::2].isfinite().all()


@from_numpy
@pytest.mark.parametrize("shape", [(0, 5, 3), (0, 3, 5), (2, 0, 0), (2, 0, 4), (2, 4, 0)], ids=str)
def test_matrices_without_entries_are_accepted(shape):
    _, m, n = shape
    update, scale = torch.zeros(shape, device=DEVICE), scale_of(shape[0])
    moments = torch.ones(shape[0], *second_moment_shape(m, n), device=DEVICE)
    factors, after = run(update, moments, scale)
    if shape[0] == 0:
        assert factors.shape == moments.shape
    else:
        twin = scale * neuron_factors_(update, moments, beta=0.95)
        torch.testing.assert_close(factors, twin, equal_nan=True)
        torch.testing.assert_close(after, moments, equal_nan=True)


def test_an_optimizer_gives_matrices_the_same_bits_alone_and_together():
    values = [torch.randn(33, 90) for _ in range(2)] + [torch.randn(2, 33, 90), torch.randn(99, 90)]
    views = [None, None, Experts(), Split((33, 66))]
    gradients = [[torch.randn_like(value) for value in values] for _ in range(2)]
    options = {"normalize": "neuron", "orthogonalizer": lambda x: x, "kernels": "triton", "weight_decay": 0.1}

    def stepped(numbers, on_nonfinite):
        params = [nn.Parameter(values[i].to(DEVICE)) for i in numbers]
        groups = [
            {"params": [param]} | ({} if views[i] is None else {"view": views[i]})
            for i, param in zip(numbers, params, strict=True)
        ]
        if numbers[:2] == [0, 1]:  # one bucket
            groups = [{"params": params[:2]}, *groups[2:]]
        optimizer = Muon(groups, on_nonfinite=on_nonfinite, **options)
        for found in gradients:
            for i, param in zip(numbers, params, strict=True):
                param.grad = found[i].to(DEVICE)
            optimizer.step()
        return [tensor for param in params for tensor in (param, *optimizer.state[param].values())]

    together = stepped([0, 1, 2, 3], "propagate")
    alone = [tensor for number in range(4) for tensor in stepped([number], "skip")]
    assert all(torch.equal(first, second) for first, second in zip(together, alone, strict=True))


def test_second_moments_that_the_kernel_would_misread_are_brought_into_their_form():
    found = {}
    for kernels in ("triton", "torch"):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(8, 6).to(DEVICE)) for _ in range(2)]
        groups = [{"params": [("v", params[0]), ("w", params[1])]}]
        optimizer = Muon(groups, kernels=kernels, normalize="neuron", compute_dtype=torch.float32)
        for param in params:
            param.grad = torch.randn(8, 6).to(DEVICE)
        optimizer.step()
        given = optimizer.state[params[1]]["second_momentum_buffer"]
        found[kernels] = []
        for broken in (given.half(), given.repeat_interleave(2)[::2]):
            optimizer.state[params[1]]["second_momentum_buffer"] = broken
            optimizer.step()
            value = optimizer.state[params[1]]["second_momentum_buffer"]
            assert value.dtype == torch.float32
            assert value.shape == given.shape
            found[kernels].append(value.clone())
    torch.testing.assert_close(found["triton"], found["torch"])


@needs_device
@pytest.mark.parametrize(
    ("shape", "place"), [((3, 30_000, 40_000), 2), ((1, 70_000, 40_000), 0), ((1, 1000, 3_000_000), 0)]
)
@pytest.mark.parametrize("transposed", [False, True])
def test_more_entries_than_32_bits_count(shape, place, transposed):
    b, m, n = shape
    update = torch.empty((b, n, m) if transposed else shape, dtype=torch.bfloat16, device=DEVICE)
    update = (update.mT if transposed else update).fill_(0)
    update[:, -1, -1] = 2.0
    update[place, -1, -3:] = 1.0
    moments = torch.zeros(b, *second_moment_shape(m, n), device=DEVICE)
    _, after = run(update, moments, scale_of(b), 0.5)
    dim = 2 if m >= n else 1
    sums = torch.zeros_like(moments)
    sums[:, -1, -1] = 4.0
    if m >= n:
        sums[place, -1] = 3.0
    else:
        sums[place, 0, -3:] = 1.0
    torch.testing.assert_close(after, sums / (2 * shape[dim]), rtol=1e-6, atol=0)


@needs_device
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_another_beta_neither_compiles_nor_waits():
    update, scale, (moments,) = made((3, 100, 70), torch.bfloat16), scale_of(3), moments_of((3, 100, 70))[1]
    table = table_of([moments])
    advance_neuron_factors_(update, table, scale, beta=0.5, apply_mask=None)

    def compiled():
        kernels = (square_sums._sum_kernel, neuron._factor_kernel)
        return [len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values()]

    before = compiled()
    assert sum(before) > 0
    torch.cuda.set_sync_debug_mode("error")
    try:
        for beta in (0.0, 0.95, 1 - 2**-24):
            advance_neuron_factors_(update, table, scale, beta=beta, apply_mask=None)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert compiled() == before


@needs_device
def test_captured_in_a_graph(monkeypatch):
    monkeypatch.undo()
    update, scale, (moments,) = made((4, 200, 500), torch.bfloat16), scale_of(4), moments_of((4, 200, 500))[1]
    apply_mask = torch.tensor([1, 1, 0, 1], dtype=torch.int32, device=DEVICE)
    captured = moments.clone()
    table = table_of([captured])
    run(update, moments, scale, apply_mask=apply_mask)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        factors = advance_neuron_factors_(update, table, scale, beta=0.95, apply_mask=apply_mask)
    for _ in range(3):
        update.normal_()
        graph.replay()
        expected, moments = run(update, moments, scale, apply_mask=apply_mask)
        assert torch.equal(factors, expected)
        assert torch.equal(captured, moments)
