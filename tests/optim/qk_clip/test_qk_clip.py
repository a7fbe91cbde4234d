"""QK-clip's arithmetic against attention written out: after the clip, every head's largest logit is min(S, t)."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from whole_clip import clip_

from quintic.optim.layout.views import Matrix, Split
from quintic.optim.qk_clip.clip import LayerClip, QKClip, RowFactors

LENGTH, WIDTH, DIM = 7, 10, 4


def normal(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def uneven(weight, num_heads):
    """Give the heads of a weight's rows different sizes, so that some exceed a threshold and others do not."""
    sizes = torch.linspace(0.3, 3.0, num_heads, dtype=torch.float64).repeat_interleave(weight.shape[0] // num_heads)
    return weight * sizes.view(-1, *[1] * (weight.ndim - 1))


def rotary(x):
    """Rotate channel i against channel i + d/2 at position t by the angle t / 100^(2 i / d): (T, d) -> (T, d)."""
    length, dim = x.shape
    out = torch.empty_like(x)
    for t in range(length):
        for i in range(dim // 2):
            angle = t / 100 ** (2 * i / dim)
            first, second = x[t, i], x[t, i + dim // 2]
            out[t, i] = first * math.cos(angle) - second * math.sin(angle)
            out[t, i + dim // 2] = first * math.sin(angle) + second * math.cos(angle)
    return out


def causal_logits(queries, keys):
    """Logits of heads (T, d) each, one (T, T) matrix per query head; future positions are -inf."""
    shared = len(queries) // len(keys)
    future = torch.ones(LENGTH, LENGTH).triu(1).bool()
    return torch.stack(
        [
            (q @ keys[head // shared].T / q.shape[1] ** 0.5).masked_fill(future, -math.inf)
            for head, q in enumerate(queries)
        ]
    )


def maxima(logits):
    return logits.amax(dim=(1, 2))


class Separate:
    """q_proj and k_proj with biases, rotary positions."""

    def __init__(self, num_heads, num_kv_heads):
        self.num_heads, self.num_kv_heads, self.views = num_heads, num_kv_heads, {}
        self.x = normal(LENGTH, WIDTH)
        self.params = {
            "attn.q_proj.weight": uneven(normal(num_heads * DIM, WIDTH), num_heads),
            "attn.q_proj.bias": normal(num_heads * DIM),
            "attn.k_proj.weight": normal(num_kv_heads * DIM, WIDTH),
            "attn.k_proj.bias": normal(num_kv_heads * DIM),
            "attn.v_proj.weight": normal(num_kv_heads * DIM, WIDTH),
            "attn.o_proj.weight": normal(WIDTH, num_heads * DIM),
        }

    def logits(self):
        p = {name.removeprefix("attn."): param for name, param in self.params.items()}
        q = self.x @ p["q_proj.weight"].T + p["q_proj.bias"]
        k = self.x @ p["k_proj.weight"].T + p["k_proj.bias"]
        return causal_logits([rotary(h) for h in q.split(DIM, 1)], [rotary(h) for h in k.split(DIM, 1)])


class Fused:
    """One weight; `order` lists, per group, what its blocks of DIM rows are."""

    def __init__(self, num_heads, num_kv_heads, order, sizes, *, transposed=False):
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.transposed = transposed
        self.order = [kind for group in order for kind in group]
        self.views = {"attn.qkv.weight": Split([s * DIM for s in sizes], groups=len(order), transposed=transposed)}
        self.x = normal(LENGTH, WIDTH)
        weight = normal(len(self.order) * DIM, WIDTH)
        queries = [i for i, kind in enumerate(self.order) if kind == "q"]
        for size, block in zip(torch.linspace(0.3, 3.0, num_heads).tolist(), queries, strict=True):
            weight[block * DIM : (block + 1) * DIM] *= size
        stored = weight.T.contiguous() if transposed else weight
        self.params = {"attn.qkv.weight": stored, "attn.qkv.bias": normal(weight.shape[0])}

    def logits(self):
        weight = self.params["attn.qkv.weight"]
        out = self.x @ (weight if self.transposed else weight.T) + self.params["attn.qkv.bias"]
        blocks = list(zip(self.order, out.split(DIM, 1), strict=True))
        return causal_logits([b for kind, b in blocks if kind == "q"], [b for kind, b in blocks if kind == "k"])


class Latent:
    """DeepSeek-V2's multi-latent attention, arXiv 2405.04434, equations 37 to 46."""

    nope, rope, value, rank, query_rank = 6, 4, 5, 8, 9

    def __init__(self, num_heads, *, query_lora):
        self.num_heads, self.num_kv_heads, self.views = num_heads, num_heads, {}
        self.query_lora = query_lora
        self.x = normal(LENGTH, WIDTH)
        head = self.nope + self.rope
        self.params = {
            "attn.kv_a_proj_with_mqa.weight": normal(self.rank + self.rope, WIDTH),
            "attn.kv_a_layernorm.weight": normal(self.rank),
            "attn.kv_b_proj.weight": normal(num_heads * (self.nope + self.value), self.rank),
        }
        if query_lora:
            self.params["attn.q_a_proj.weight"] = normal(self.query_rank, WIDTH)
            self.params["attn.q_a_layernorm.weight"] = normal(self.query_rank)
            self.params["attn.q_b_proj.weight"] = uneven(normal(num_heads * head, self.query_rank), num_heads)
        else:
            self.params["attn.q_proj.weight"] = uneven(normal(num_heads * head, WIDTH), num_heads)

    def logits(self):
        p = {name.removeprefix("attn.").removesuffix(".weight"): param for name, param in self.params.items()}

        def norm(x, weight):
            return x / x.square().mean(dim=-1, keepdim=True).sqrt() * weight

        if self.query_lora:
            q = norm(self.x @ p["q_a_proj"].T, p["q_a_layernorm"]) @ p["q_b_proj"].T
        else:
            q = self.x @ p["q_proj"].T
        down = self.x @ p["kv_a_proj_with_mqa"].T
        latent, shared_key = norm(down[:, : self.rank], p["kv_a_layernorm"]), rotary(down[:, self.rank :])
        up = latent @ p["kv_b_proj"].T
        queries, keys = [], []
        for q_head, up_head in zip(q.chunk(self.num_heads, 1), up.chunk(self.num_heads, 1), strict=True):
            queries.append(torch.cat([q_head[:, : self.nope], rotary(q_head[:, self.nope :])], dim=1))
            keys.append(torch.cat([up_head[:, : self.nope], shared_key], dim=1))
        return causal_logits(queries, keys)


CASES = {
    "multi-head": lambda: Separate(6, 6),
    "grouped": lambda: Separate(6, 2),
    "one key": lambda: Separate(6, 1),
    "sections": lambda: Fused(3, 3, [["q"] * 3 + ["k"] * 3 + ["v"] * 3], (3, 3, 3)),
    "grouped sections": lambda: Fused(6, 2, [["q"] * 6 + ["k"] * 2 + ["v"] * 2], (6, 2, 2)),
    "per head": lambda: Fused(3, 3, [["q", "k", "v"]] * 3, (1, 1, 1)),
    "per key head": lambda: Fused(6, 2, [["q", "q", "q", "k", "v"]] * 2, (3, 1, 1)),
    "Conv1D": lambda: Fused(3, 3, [["q"] * 3 + ["k"] * 3 + ["v"] * 3], (3, 3, 3), transposed=True),
    "Conv1D per key head": lambda: Fused(6, 2, [["q", "q", "q", "k", "v"]] * 2, (3, 1, 1), transposed=True),
    "multi-latent": lambda: Latent(3, query_lora=True),
    "multi-latent without query LoRA": lambda: Latent(3, query_lora=False),
}


def resolved(case, **options):
    shapes = {name: param.shape for name, param in case.params.items()}
    return QKClip(**options).resolve("attn", shapes, case.num_heads, case.views)


@pytest.mark.parametrize("quantile", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("name", CASES)
def test_clipped_heads_end_at_the_threshold_and_others_keep_their_logits(name, quantile):
    case = CASES[name]()
    before = case.logits()
    largest = maxima(before)
    assert float(largest.min()) > 0
    threshold = float(0.99 * largest.quantile(quantile))
    clip = resolved(case, threshold=threshold)
    clip_(clip, case.params, largest)
    after = case.logits()
    torch.testing.assert_close(maxima(after), largest.clamp(max=threshold), rtol=1e-13, atol=0)
    # Not the maximum alone: each logit by the same factor.
    expected = before * (largest.clamp(max=threshold) / largest)[:, None, None]
    torch.testing.assert_close(after, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", CASES)
def test_below_the_threshold_nothing_changes_a_bit(name):
    case = CASES[name]()
    before = {name: param.clone() for name, param in case.params.items()}
    largest = maxima(case.logits())
    clip = resolved(case, threshold=float(largest.max()))
    clip_(clip, case.params, largest)
    assert all(torch.equal(param, before[name]) for name, param in case.params.items())


def test_only_queries_and_keys_change():
    for name in CASES:
        case = CASES[name]()
        before = {key: param.clone() for key, param in case.params.items()}
        clip = resolved(case, threshold=1e-3)
        clip_(clip, case.params, maxima(case.logits()))
        changed = {key for key, param in case.params.items() if not torch.equal(param, before[key])}
        assert changed == set(clip.names)
        assert not changed & {"attn.v_proj.weight", "attn.o_proj.weight", "attn.kv_a_proj_with_mqa.weight"}


def test_values_of_the_latent_up_projection_stay():
    case = Latent(3, query_lora=True)
    before = case.params["attn.kv_b_proj.weight"].clone().unflatten(0, (3, -1))
    clip_(resolved(case, threshold=1e-3), case.params, maxima(case.logits()))
    after = case.params["attn.kv_b_proj.weight"].unflatten(0, (3, -1))
    assert torch.equal(after[:, case.nope :], before[:, case.nope :])
    assert (after[:, : case.nope] != before[:, : case.nope]).all()


def test_values_of_a_fused_weight_stay():
    case = CASES["per key head"]()
    before = case.params["attn.qkv.weight"].clone().unflatten(0, (2, 5, DIM))
    clip_(resolved(case, threshold=1e-3), case.params, maxima(case.logits()))
    after = case.params["attn.qkv.weight"].unflatten(0, (2, 5, DIM))
    assert torch.equal(after[:, 4], before[:, 4])
    assert (after[:, :4] != before[:, :4]).all()


def test_multi_head_factors_are_the_square_roots():
    clip = resolved(Separate(3, 3), threshold=50.0)
    factors = clip.factors(torch.tensor([200.0, 50.0, 25.0]))
    expected = torch.tensor([0.5, 1.0, 1.0]).repeat_interleave(DIM)
    for name in ("attn.q_proj.weight", "attn.q_proj.bias", "attn.k_proj.weight", "attn.k_proj.bias"):
        assert torch.equal(factors[name].factor, expected)
        assert factors[name].dim == 0
        assert factors[name].factor.dtype == torch.float32


def test_grouped_factors_by_hand():
    clip = resolved(Separate(4, 2), threshold=100.0)
    # Gammas 1/4, 1 and 1/16, 1/4: keys 1/2 and 1/4; queries make up for what the shared key lost.
    factors = clip.factors(torch.tensor([400.0, 10.0, 1600.0, 400.0]))
    assert factors["attn.k_proj.weight"].factor.view(2, DIM)[:, 0].tolist() == [0.5, 0.25]
    assert factors["attn.q_proj.weight"].factor.view(4, DIM)[:, 0].tolist() == [0.5, 2.0, 0.25, 1.0]


def test_grouped_sqrt_leaves_the_neighbours_flatter():
    case = Separate(4, 2)
    clip = resolved(case, threshold=100.0, grouped="sqrt")
    factors = clip.factors(torch.tensor([400.0, 10.0, 1600.0, 400.0]))
    assert factors["attn.k_proj.weight"].factor.view(2, DIM)[:, 0].tolist() == [0.5, 0.25]
    assert factors["attn.q_proj.weight"].factor.view(4, DIM)[:, 0].tolist() == [0.5, 1.0, 0.25, 0.5]


def test_latent_factors_by_hand():
    case = Latent(2, query_lora=True)
    factors = resolved(case, threshold=100.0).factors(torch.tensor([400.0, 1.0]))
    assert factors.keys() == {"attn.q_b_proj.weight", "attn.kv_b_proj.weight"}
    assert factors["attn.q_b_proj.weight"].factor.tolist() == [0.5] * 6 + [0.25] * 4 + [1.0] * 10
    assert factors["attn.kv_b_proj.weight"].factor.tolist() == [0.5] * 6 + [1.0] * (5 + 11)


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf, 0.0, -5.0, 99.9])
def test_maxima_that_say_nothing_give_exactly_one(broken):
    factors = resolved(Separate(2, 1), threshold=100.0).factors(torch.tensor([broken, broken]))
    assert all((found.factor == 1.0).all() for found in factors.values())


numbers = st.floats(width=32, allow_nan=True, allow_infinity=True)


@given(st.data(), st.integers(1, 4), st.integers(1, 4), st.floats(10, 1e3))
def test_factors_multiply_to_what_the_logits_need(data, num_kv_heads, group, threshold):
    num_heads = num_kv_heads * group
    largest = torch.tensor(data.draw(st.lists(numbers, min_size=num_heads, max_size=num_heads)))
    factors = resolved(Separate(num_heads, num_kv_heads), threshold=threshold).factors(largest)
    query = factors["attn.q_proj.weight"].factor.view(num_heads, DIM).double()
    key = factors["attn.k_proj.weight"].factor.view(num_kv_heads, DIM).double()
    assert ((key > 0) & (key <= 1)).all()
    assert (query > 0).all()
    for head, size in enumerate(largest.tolist()):
        needed = threshold / size if threshold < size < math.inf else 1.0
        product = query[head, 0] * key[head // group, 0]
        assert float(product) == pytest.approx(needed, rel=1e-5)
        assert (query[head] == query[head, 0]).all()
    for head in range(num_kv_heads):
        of_group = largest[head * group : (head + 1) * group]
        if not ((of_group > threshold) & of_group.isfinite()).any():
            assert (key[head] == 1).all()
            assert (query[head * group : (head + 1) * group] == 1).all()


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=3).flatmap(
        lambda shape: st.tuples(st.just(shape), st.permutations(range(len(shape))), st.integers(0, len(shape) - 1))
    ),
    st.tuples(st.integers(0, 125), st.integers(0, 125)),
)
def test_factors_of_a_run_are_those_of_its_entries(layout, places):
    shape, order, dim = layout
    sizes = [shape[place] for place in order]
    param = torch.empty(sizes).permute([order.index(place) for place in range(len(shape))])
    assert list(param.shape) == shape
    start, stop = sorted(min(place, param.numel()) for place in places)
    numbers = torch.arange(param.numel()).view(sizes).permute([order.index(place) for place in range(len(shape))])
    expected = torch.empty(param.numel())
    for index in itertools.product(*map(range, shape)):
        expected[numbers[index]] = 10.0 + index[dim]
    found = RowFactors(10.0 + torch.arange(shape[dim]), dim).factor_for_range(start, stop, param)
    assert torch.equal(found, expected[start:stop])


@pytest.mark.parametrize("stride", [0, 1, 4, 2**40])
def test_the_stride_of_a_single_row_means_nothing(stride):
    param = torch.empty(6).as_strided((1, 6), (stride, 1))
    assert torch.equal(RowFactors(torch.tensor([3.0]), 0).factor_for_range(2, 5, param), torch.full((3,), 3.0))


class NoSync(TorchDispatchMode):
    """Fails where the device would have to be waited for."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket not in (
            torch.ops.aten._local_scalar_dense,
            torch.ops.aten.nonzero,
            torch.ops.aten.masked_select,
            torch.ops.aten.index,
            torch.ops.aten.equal,
        ), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", CASES)
def test_nothing_waits_for_the_device(name):
    case = CASES[name]()
    clip, largest = resolved(case, threshold=1.0), maxima(case.logits())
    with NoSync():
        clip_(clip, case.params, largest)
    with NoSync(), pytest.raises(AssertionError, match="_local_scalar_dense"):
        largest[0].item()


def test_no_gradient_is_recorded():
    case = Separate(2, 2)
    params = {name: param.requires_grad_() for name, param in case.params.items()}
    largest = maxima(case.logits())
    clip = resolved(case, threshold=0.1)
    clip_(clip, params, largest)
    assert all(param.is_leaf for param in params.values())
    assert not any(found.factor.requires_grad for found in clip.factors(largest).values())


def test_low_precision_weights_and_maxima():
    case = Separate(4, 2)
    weights = {name: param.bfloat16() for name, param in case.params.items()}
    expected = {name: param.clone() for name, param in weights.items()}
    clip = resolved(case, threshold=100.0)
    clip_(clip, weights, torch.tensor([400.0, 1.0, 1.0, 1.0], dtype=torch.bfloat16))
    expected["attn.q_proj.weight"][:DIM] *= 0.5
    expected["attn.q_proj.weight"][DIM : 2 * DIM] *= 2
    expected["attn.q_proj.bias"][:DIM] *= 0.5
    expected["attn.q_proj.bias"][DIM : 2 * DIM] *= 2
    expected["attn.k_proj.weight"][:DIM] *= 0.5
    expected["attn.k_proj.bias"][:DIM] *= 0.5
    assert all(torch.equal(weights[name], expected[name]) for name in weights)


def test_row_factors_scale_along_their_dimension():
    factors = RowFactors(torch.tensor([1.0, 2.0, 3.0]), 1)
    assert factors.over(torch.ones(2, 3)).expand(2, 3).tolist() == [[1, 2, 3], [1, 2, 3]]
    assert factors.over(torch.ones(1, 3, 1)).flatten().tolist() == [1, 2, 3]


def test_the_number_of_maxima_is_checked():
    clip = resolved(Separate(4, 2))
    for wrong in (torch.ones(2), torch.ones(4, 1), torch.ones(())):
        with pytest.raises(ValueError, match=r"qk_logits\['attn'\].*each of the 4 query heads"):
            clip.factors(wrong)


def test_a_resolved_layer_is_a_value():
    first, second = resolved(Separate(4, 2)), resolved(Separate(4, 2))
    assert isinstance(first, LayerClip)
    assert first == second
    assert hash(first) == hash(second)
    assert hash(QKClip()) == hash(QKClip(layouts={}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threshold": 0.0}, "threshold=0.0 must be a positive, finite number"),
        ({"threshold": math.nan}, "threshold=nan must be"),
        ({"threshold": "a"}, "threshold='a' must be a positive, finite number"),
        ({"threshold": None}, "threshold=None must be"),
        ({"threshold": math.inf}, "threshold=inf"),
        ({"grouped": "mean"}, "grouped='mean' must be 'exact' or 'sqrt'"),
        ({"parts": (1, 1)}, r"parts=\(1, 1\)"),
        ({"parts": (0, 1, 2)}, r"parts=\(0, 1, 2\)"),
        ({"parts": 3}, "parts=3 must be two different part numbers"),
        ({"parts": "qk"}, "parts='qk'"),
        ({"rope_dim": -1}, "rope_dim=-1"),
        ({"rope_dim": "64"}, "rope_dim='64' must be an integer of at least 0, or None"),
        ({"layouts": Matrix()}, r"layouts=Matrix\(.*\) must be a mapping"),
        ({"names": ["theta"]}, r"names=\['theta'\] must be a mapping"),
        ({"layouts": {"*qkv*": (4, 4)}}, r"layouts\['\*qkv\*'\].*quintic.Split or quintic.Matrix"),
        ({"names": {"theta": "queery"}}, r"names\['theta'\]='queery'"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        QKClip(**options)
    assert QKClip(layouts={"*": Matrix(transposed=True)}).threshold == 100.0
