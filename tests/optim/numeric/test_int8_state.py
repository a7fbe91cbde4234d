"""`state_dtype="int8"`: the bytes of momentum and moments, which state has them, and what steps make of them.

`encoded` and `decoded` are the form of the bytes (`int8_state.py`) a second time, in NumPy and float64.
"""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import quintic
from quintic import Experts, Heads, Matrix, Rows, Split
from quintic.optim.numeric.bf16_state import MAX_BF16_BETA
from quintic.optim.numeric.int8_state import read_packed, store_packed_

# Of momentum and first moments, and of second moments.
KINDS = (torch.int8, torch.uint8)
DTYPES = {"momentum_buffer": torch.int8, "exp_avg": torch.int8, "exp_avg_sq": torch.uint8}
ORTHOGONALIZE = {"orthogonalizer": "polar_express", "compute_dtype": torch.float32}


def encoded(values, kind, step=0):
    """Bytes, 0 to 255, of values (..., a multiple of 8) after so many steps."""
    values = np.asarray(values, dtype=np.float32)
    groups = values.reshape(*values.shape[:-1], values.shape[-1] // 8, 8)
    squares = kind == torch.uint8
    with np.errstate(invalid="ignore"):
        groups = np.sqrt(groups) if squares else groups
    largest = np.abs(groups).max(-1, keepdims=True, initial=0)
    is_good = np.isfinite(largest)
    largest, groups = np.where(is_good, largest, 0), np.where(is_good, groups, 0).astype(np.float32)
    # The exponent of a float32, which is 0 below the least normal number.
    exponent = np.where(largest >= 2.0**-126, np.frexp(largest)[1] + 126, 0)
    shift = 6 if squares else 5
    scaled = groups.astype(np.float64) / np.ldexp(1.0, np.maximum(exponent, shift + 1) - 127 - shift)
    if squares:
        hashed = groups.view(np.uint32) ^ np.uint32(step * 0x85EBCA77 % 2**32)
        hashed = hashed.astype(np.uint64) * np.uint64(0x9E3779B1)
        chance = ((hashed >> np.uint64(16)) & np.uint64(0xFFFF)).astype(np.float32) / np.float32(65536)
        whole = np.floor(scaled.astype(np.float32) + chance)
        whole = np.minimum(np.maximum(whole, groups > 0), 127)
    else:
        whole = np.clip(np.rint(scaled), -63, 63)  # ties to even
    exponent = np.where(is_good, exponent, 255)
    bits = (exponent.astype(np.int64) >> np.arange(8)) & 1
    return ((whole.astype(np.int64) * 2 + bits) % 256).reshape(values.shape)


def decoded(numbers, kind):
    """Values in float64 of bytes, 0 to 255."""
    groups = numbers.reshape(*numbers.shape[:-1], numbers.shape[-1] // 8, 8)
    exponent = ((groups % 2) << np.arange(8)).sum(-1, keepdims=True)
    squares = kind == torch.uint8
    whole = groups // 2 if squares else (groups - 256 * (groups >= 128)) // 2
    shift = 6 if squares else 5
    values = np.ldexp(whole.astype(np.float64), np.maximum(exponent, shift + 1) - 127 - shift)
    values = np.where(exponent == 255, np.nan, values**2 if squares else values)
    return values.reshape(numbers.shape)


def bytes_of(state):
    return state.detach().contiguous().view(torch.uint8).numpy().astype(np.int64)


def stored(values, kind):
    state = torch.empty(values.shape, dtype=kind)
    store_packed_(state, values)
    return state


def spread(seed, shape=(50, 8), kind=torch.int8, exponents=(-90, 90)):
    """Numbers of all sizes, whose groups have sizes of their own; squares of numbers for second moments."""
    generator = np.random.default_rng(seed)
    low, high = (limit // 2 for limit in exponents) if kind == torch.uint8 else exponents
    groups = np.ldexp(1.0, generator.integers(low, high, (*shape[:-1], shape[-1] // 8, 1)))
    numbers = generator.standard_normal((*shape[:-1], shape[-1] // 8, 8)) * groups
    numbers *= np.ldexp(1.0, -generator.integers(0, 9, numbers.shape)) * (generator.random(numbers.shape) > 0.1)
    numbers = numbers**2 if kind == torch.uint8 else numbers
    return torch.from_numpy(numbers.reshape(shape).astype(np.float32))


# -- the bytes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS, ids=str)
@given(seed=st.integers(0, 2**32 - 1), shape=st.sampled_from([(8,), (50, 8), (3, 40), (2, 5, 16), (0, 8)]))
def test_bytes_and_values_are_those_of_the_oracle(kind, seed, shape):
    values = spread(seed, shape, kind)
    state = stored(values, kind)
    assert np.array_equal(bytes_of(state), encoded(values.numpy(), kind))
    found = read_packed(state)
    assert found.dtype == torch.float32
    assert np.array_equal(found.double().numpy(), decoded(bytes_of(state), kind))


@pytest.mark.parametrize("kind", KINDS, ids=str)
@given(st.lists(st.integers(0, 255), min_size=8, max_size=8))
def test_any_bytes_are_read(kind, numbers):
    state = torch.tensor(numbers, dtype=torch.uint8).view(kind)
    expected = decoded(np.array(numbers), kind)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(read_packed(state).numpy(), expected.astype(np.float32))


@pytest.mark.parametrize("kind", KINDS, ids=str)
@given(seed=st.integers(0, 2**32 - 1))
def test_storing_what_was_read_keeps_the_bytes(kind, seed):
    state = stored(spread(seed, (40, 16), kind), kind)
    assert torch.equal(stored(read_packed(state), kind), state)


@given(seed=st.integers(0, 2**32 - 1))
def test_an_entry_is_off_by_at_most_one_part_in_64_of_the_largest_of_its_group(seed):
    values = spread(seed, (60, 24))
    found = read_packed(stored(values, torch.int8)).double().numpy().reshape(60, 3, 8)
    exact = values.double().numpy().reshape(60, 3, 8)
    largest = np.abs(exact).max(-1, keepdims=True)
    assert (np.abs(found - exact) <= 2.0**-6 * largest).all()
    # By half a step, where the whole number is not the largest one.
    step = np.ldexp(1.0, np.frexp(largest)[1] - 6)
    assert (np.abs(found - exact) <= np.where(np.abs(exact) <= 63.5 * step, 0.5, 1.0) * step).all()
    assert (np.sign(found) * np.sign(exact) >= 0).all()


@given(seed=st.integers(0, 2**32 - 1))
def test_roots_of_second_moments_are_off_by_less_than_a_step_and_none_becomes_zero(seed):
    values = spread(seed, (60, 24), torch.uint8)
    found = read_packed(stored(values, torch.uint8)).double().sqrt().numpy().reshape(60, 3, 8)
    exact = values.sqrt().double().numpy().reshape(60, 3, 8)
    step = np.ldexp(1.0, np.frexp(exact.max(-1, keepdims=True))[1] - 7)
    assert (np.abs(found - exact) <= step).all()
    assert ((found == 0) == (exact == 0)).all()


def test_ties_go_to_even_and_the_largest_saturate():
    # Of a group whose largest entry is 63.75 steps of 2^-5.
    steps = torch.tensor([63.75, 0.5, 1.5, 2.5, -0.5, -1.5, -62.5, -63.5])
    found = read_packed(stored(steps / 32, torch.int8)) * 32
    assert found.tolist() == [63, 0, 2, 2, 0, -2, -62, -63]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_zeros_are_zero_bytes(kind):
    values = torch.zeros(3, 16)
    assert not stored(values, kind).any()
    assert not stored(-values, kind).any()
    assert not read_packed(torch.zeros(3, 16, dtype=kind)).any()


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_bad_entry_makes_its_group_nan_and_no_other(kind, bad):
    values = spread(1, (4, 24), kind)
    values[2, 11] = bad
    state = stored(values, kind)
    assert np.array_equal(bytes_of(state), encoded(values.numpy(), kind))
    found = read_packed(state)
    assert found.isnan().sum() == 8
    assert found[2, 8:16].isnan().all()
    # It stays so.
    assert torch.equal(stored(found, kind), state)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_least_and_the_largest_numbers(kind):
    info = torch.finfo(torch.float32)
    values = torch.tensor(
        [
            [info.max, 1.0, info.max / 2, 0.0, 3e38, 1e30, 2e38, 1e38],
            [info.tiny, 2 * info.tiny, 0.0, 3.5 * info.tiny, 60 * info.tiny, info.tiny / 4, info.tiny / 2, 1e-45],
            [info.tiny / 4, 0.0, 1e-45, 1e-42, 1e-40, 1e-39, 5e-39, 1e-38],
        ]
    )
    state = stored(values, kind)
    assert np.array_equal(bytes_of(state), encoded(values.numpy(), kind))
    found = read_packed(state)
    assert found.isfinite().all()
    torch.testing.assert_close(found[0, 0], values[0, 0], rtol=2.0**-5, atol=0)
    # No average of numbers this small is exact, but it is as small, and reading and storing changes it no more.
    assert (found[1:] <= 64 * info.tiny).all()
    if kind == torch.int8:
        assert torch.equal(read_packed(stored(found, kind)), found)


def test_the_chance_is_unbiased():
    # A group's first entry sets the step; the others lie at each height between two whole numbers.
    generator = torch.Generator().manual_seed(0)
    roots = torch.rand(200_000, 8, generator=generator, dtype=torch.float64) * 60 + 1
    roots[:, 0] = 100
    values = (roots * 2.0**-9).square().float()
    exact = values.double().sqrt() * 2.0**9
    found = (read_packed(stored(values, torch.uint8)).double().sqrt() * 2.0**9)[:, 1:]
    exact = exact[:, 1:]
    assert torch.equal(found, found.round())
    assert float((found - exact).abs().max()) <= 1
    # Of 1.4 million the mean is off by 0.0004 as a rule.
    assert abs(float((found - exact).mean())) < 0.002
    place = exact - exact.floor()
    for low in (0.0, 0.2, 0.4, 0.6, 0.8):
        inside = (place >= low) & (place < low + 0.2)
        went_up = (found > exact)[inside].double().mean()
        assert float(went_up) == pytest.approx(float(place[inside].mean()), abs=0.005)


@pytest.mark.parametrize("gradient", [0.0, 0.01])
@pytest.mark.parametrize("beta", [0.9, 0.95, 0.98])
def test_second_moments_decay_though_each_change_is_less_than_a_step(beta, gradient):
    """Rounded to the nearest they would stand still: 0.98 moves none of the 127 roots by more than 1.3 steps."""
    generator, count = torch.Generator().manual_seed(0), round(3 / (1 - beta))
    state = stored(torch.randn(4000, 8, generator=generator).square(), torch.uint8)
    start = read_packed(state).double()
    for step in range(1, count + 1):
        # Rows of tables have gradients of zero where their tokens are absent.
        square = (torch.randn(4000, 8, generator=generator) * gradient).square()
        store_packed_(state, read_packed(state).lerp_(square, 1 - beta), torch.tensor(float(step)))
    expected = start * beta**count + gradient**2 * (1 - beta**count)
    found = read_packed(state).double()
    assert float(found.mean() / expected.mean()) == pytest.approx(1, abs=0.06)
    # Also of the large and of the middling ones by themselves: no entry stands still.
    for low, high in ((0.25, 0.75), (0.75, 1.0)):
        part = (start >= start.quantile(low)) & (start <= start.quantile(high))
        assert float(found[part].mean() / expected[part].mean()) == pytest.approx(1, abs=0.1)


def test_roots_do_not_depend_on_where_an_entry_lies():
    """One last bit would decide by chance about a whole step."""
    values = torch.rand(64, 256, generator=torch.Generator().manual_seed(0))
    state = stored(values, torch.uint8)
    assert torch.equal(stored(values.mT.contiguous().mT, torch.uint8), state)
    assert torch.equal(torch.stack([stored(row, torch.uint8) for row in values]), state)
    assert torch.equal(torch.cat([stored(one, torch.uint8) for one in values.split(8, dim=1)], dim=1), state)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_state_in_another_memory_order(kind):
    values = spread(3, (24, 16), kind)
    state = torch.zeros(16, 24, dtype=kind).mT
    store_packed_(state, values)
    assert torch.equal(state, stored(values, kind))
    found = read_packed(state)
    assert found.stride() == state.stride()
    assert torch.equal(found, read_packed(state.contiguous()))


# -- which state is of 8 bits ------------------------------------------------------------------------------------------


def state_dtypes(param, **group):
    optimizer = quintic.Muon([{"params": [param], **group}], state_dtype="int8", **ORTHOGONALIZE)
    param.grad = torch.randn_like(param)
    optimizer.step()
    return {key: value.dtype for key, value in optimizer.state[param].items() if key in DTYPES}


@pytest.mark.parametrize(
    ("shape", "view"),
    [
        ((6, 16), Matrix()),
        ((6, 16), Matrix(transposed=True)),
        ((6, 16), Heads(3)),
        ((4, 16), Heads(2, dim=1)),
        ((6, 24), Split((8, 16), transposed=True)),
        ((2, 3, 8), Experts()),
        ((2, 3, 8), Experts(transposed=True)),
        ((6, 8), Rows(2)),
    ],
    ids=str,
)
def test_matrices_of_whole_groups_have_a_byte_for_each_weight(shape, view):
    assert state_dtypes(nn.Parameter(torch.randn(shape)), view=view) == {"momentum_buffer": torch.int8}


@pytest.mark.parametrize(
    ("shape", "view"),
    [
        ((6, 12), Matrix()),  # a row has one group and a half
        ((5, 16), Heads(4, dim=1)),  # heads of 4 columns
        ((6, 24), Split((12, 12), transposed=True)),
    ],
    ids=str,
)
def test_momentum_whose_groups_a_row_or_a_matrix_would_cut_is_float32(shape, view):
    assert state_dtypes(nn.Parameter(torch.randn(shape)), view=view) == {"momentum_buffer": torch.float32}


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (lambda: torch.randn(6, 16), torch.int8),
        (lambda: torch.randn(6, 16).bfloat16(), torch.int8),
        (lambda: torch.randn(2, 3, 8), torch.int8),
        (lambda: torch.randn(16), torch.float32),
        (lambda: torch.randn(()), torch.float32),
        (lambda: torch.randn(6, 15), torch.float32),
        (lambda: torch.randn(16, 8).mT, torch.float32),
        (lambda: torch.randn(6, 32)[:, :16], torch.float32),
        (lambda: torch.randn(6, 16, dtype=torch.float64), torch.float64),
    ],
)
def test_which_moments_are_of_8_bits(make, dtype):
    found = state_dtypes(nn.Parameter(make()), algorithm="adamw")
    second = torch.uint8 if dtype == torch.int8 else dtype
    assert found == {"exp_avg": dtype, "exp_avg_sq": second}


@pytest.mark.parametrize("make", [lambda: torch.randn(16, 8).mT, lambda: torch.randn(8, 16, dtype=torch.float64)])
def test_momentum_of_other_matrices_is_not_of_8_bits(make):
    param = nn.Parameter(make())
    assert state_dtypes(param) == {"momentum_buffer": param.dtype}


def test_other_dtypes_are_refused():
    with pytest.raises(ValueError, match="state_dtype='int4' must be None or 'bf16' or 'int8'"):
        quintic.Muon([nn.Parameter(torch.ones(8, 8))], state_dtype="int4")


@pytest.mark.parametrize(("algorithm", "option"), [("muon", {"momentum": 0.99}), ("adamw", {"betas": (0.9, 0.999)})])
def test_averages_too_slow_for_8_bits_are_refused(algorithm, option):
    group = {"params": [("p", nn.Parameter(torch.ones(8, 8)))], "algorithm": algorithm}
    with pytest.raises(ValueError, match=r"parameter group 0 \(p\): .* with state_dtype='int8': above 0\.98.*None"):
        quintic.Muon([group], state_dtype="int8", **option)
    quintic.Muon([group], state_dtype="int8", momentum=MAX_BF16_BETA, betas=(MAX_BF16_BETA, MAX_BF16_BETA))


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_momentum_takes_one_byte_for_each_weight_and_moments_two(dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64, bias=False), nn.Linear(64, 40)).to(dtype)
    embedding = nn.Embedding(50, 16).to(dtype)
    groups = [
        {"params": list(model[0].parameters())},
        {"params": [*model[1].parameters(), embedding.weight], "algorithm": "adamw"},
    ]
    optimizer = quintic.Muon(groups, state_dtype="int8", **ORTHOGONALIZE)
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.randn_like(param)
    optimizer.step()
    sizes = [
        sum(value.nbytes for key, value in optimizer.state[param].items() if key in DTYPES)
        for group in optimizer.param_groups
        for param in group["params"]
    ]
    assert sizes == [32 * 64, 2 * 64 * 40, 8 * 40, 2 * 50 * 16]  # the bias keeps float32


def test_the_explanation_tells_of_the_bytes():
    model = nn.Sequential(nn.Linear(32, 64, bias=False), nn.LayerNorm(64))
    rows = quintic.explain(model, state_dtype="int8").rows
    # The two vectors of the norm keep float32, and AdamW counts its steps.
    assert sum(row.state_bytes for row in rows) == 32 * 64 + 2 * 8 * 64 + 2 * 4
