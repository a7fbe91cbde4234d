import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quintic.kernels.attention import attention as attention_module
from quintic.kernels.attention.attention import attention, attention_with_max_logits, document_mask, max_logits
from quintic.kernels.attention.max_logits import MaxLogits

BOS = 0


def naive(q, k, *, window=math.inf, documents=None, causal=True, scale=None):
    """One product at a time, in float64."""
    rows, length, heads, dim = q.shape
    shared = heads // k.shape[2]
    largest = [-math.inf] * heads
    for row in range(rows):
        for query in range(length):
            for key in range(k.shape[1]):
                distance = query - key if causal else abs(query - key)
                if not 0 <= distance < window:
                    continue
                if documents is not None and documents[row, query] != documents[row, key]:
                    continue
                for head in range(heads):
                    product = float(q[row, query, head].double() @ k[row, key, head // shared].double())
                    largest[head] = max(largest[head], product * (dim**-0.5 if scale is None else scale))
    return torch.tensor(largest)


def case(rows=2, length=12, heads=4, kv_heads=2, dim=8):
    return torch.randn(rows, length, heads, dim), torch.randn(rows, length, kv_heads, dim)


def documents_of(rows, length):
    return (torch.rand(rows, length) < 0.3).cumsum(dim=1)


@given(
    rows=st.integers(1, 2),
    length=st.integers(1, 9),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    window=st.one_of(st.none(), st.integers(1, 10)),
    has_documents=st.booleans(),
    causal=st.booleans(),
    scale=st.one_of(st.none(), st.floats(0.1, 2)),
)
def test_equals_the_naive_loop(rows, length, kv_heads, group, window, has_documents, causal, scale):
    q, k = case(rows, length, kv_heads * group, kv_heads, dim=3)
    options = {"documents": documents_of(rows, length) if has_documents else None, "causal": causal, "scale": scale}
    found = max_logits(q, k, window=window, **options)
    expected = naive(q, k, window=window or math.inf, **options)
    torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("budget", [1, 100, 500])
def test_chunks_do_not_show(budget, monkeypatch):
    q, k = case()
    documents = documents_of(2, 12)
    whole = max_logits(q, k, window=5, documents=documents)
    monkeypatch.setattr(attention_module, "_MAX_SCORES", budget)
    torch.testing.assert_close(max_logits(q, k, window=5, documents=documents), whole)


def test_other_numbers_of_keys_without_a_mask():
    q, k = torch.randn(2, 5, 4, 8), torch.randn(2, 9, 2, 8)
    torch.testing.assert_close(max_logits(q, k, causal=False), naive_cross(q, k))
    with pytest.raises(ValueError, match="5 queries and 9 keys"):
        max_logits(q, k)


def naive_cross(q, k):
    logits = torch.einsum("bthd,bshd->bhts", q, k.repeat_interleave(2, dim=2)) / 8**0.5
    return logits.amax(dim=(0, 2, 3))


def test_a_head_that_sees_nothing():
    q, k = case()
    k[:, :, 0] = math.nan
    found = max_logits(q, k)
    assert found[:2].isnan().all()  # QK-clip takes a NaN for "unknown"
    assert found[2:].isfinite().all()
    assert max_logits(q[:, :0], k[:, :0]).eq(-math.inf).all()


def test_low_precision_is_multiplied_in_float32():
    q, k = (x.bfloat16() for x in case())
    found = max_logits(q, k)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, max_logits(q.float(), k.float()))


def test_maxima_have_no_gradient():
    q, k = (x.requires_grad_() for x in case())
    assert not max_logits(q, k).requires_grad
    mask = document_mask(torch.ones(2, 12).long(), bos_id=BOS, windows=[12], implementation="sdpa", dtype=q.dtype)
    out, found = attention_with_max_logits(q, k, k, mask, 12)
    assert out.requires_grad
    assert not found.requires_grad


@pytest.mark.parametrize("window", [1, 4, 100])
def test_attention_with_max_logits_is_attention(window):
    q, k = case()
    v = torch.randn_like(k)
    inputs = torch.randint(0, 4, (2, 12))
    mask = document_mask(inputs, bos_id=BOS, windows=[window], implementation="sdpa", dtype=q.dtype)
    out, found = attention_with_max_logits(q, k, v, mask, window)
    assert torch.equal(out, attention(q, k, v, mask, window))
    expected = naive(q, k, window=window, documents=(inputs == BOS).cumsum(dim=1))
    torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("q", "k", "options", "message"),
    [
        ((2, 5, 4, 8), (2, 5, 3, 8), {}, r"need \(B, T, H, D\)"),
        ((2, 5, 4, 8), (1, 5, 4, 8), {}, r"queries \(2, 5, 4, 8\) and keys \(1, 5, 4, 8\)"),
        ((2, 5, 4, 8), (2, 5, 4, 4), {}, r"keys \(2, 5, 4, 4\)"),
        ((2, 5, 4, 8), (2, 5, 4, 8), {"implementation": "flash"}, "implementation='flash': choose 'auto'"),
        ((2, 5, 4, 16), (2, 5, 4, 16), {"implementation": "flex"}, "needs a CUDA device.*got cpu.*use 'chunked'"),
    ],
)
def test_mistakes_are_named(q, k, options, message):
    with pytest.raises(ValueError, match=message):
        max_logits(torch.randn(q), torch.randn(k), **options)


# -- collecting --------------------------------------------------------------------------------------------------------


def test_the_recorder_keeps_the_largest_and_begins_again():
    recorder = MaxLogits()
    recorder.add("a", torch.tensor([1.0, 5.0]))
    recorder.add("b", torch.tensor([0.0]))
    recorder.add("a", torch.tensor([2.0, 4.0], requires_grad=True))
    taken = recorder.take()
    assert {layer: found.tolist() for layer, found in taken.items()} == {"a": [2.0, 5.0], "b": [0.0]}
    assert not taken["a"].requires_grad
    assert recorder.take() == {}


def test_the_recorder_takes_what_flex_attention_returns():
    recorder = MaxLogits()
    recorder.add("a", torch.tensor([[[1.0, 7.0], [3.0, 2.0]], [[0.0, 0.0], [4.0, 0.0]]], dtype=torch.bfloat16))
    assert recorder.take()["a"].tolist() == [7.0, 4.0]
    with pytest.raises(ValueError, match=r"a: maxima have shape \(2, 3\); need \(H,\) or \(B, H, T\)"):
        recorder.add("a", torch.ones(2, 3))


def test_the_recorder_over_microbatches_equals_one_batch():
    q, k = case(rows=4)
    recorder = MaxLogits()
    for rows in range(4):
        recorder.record("a", q[rows : rows + 1], k[rows : rows + 1], window=3)
    torch.testing.assert_close(recorder.take()["a"], max_logits(q, k, window=3))


# -- CUDA --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def freshly_compiled():
    """PyTorch compiles a function for at most eight kinds of arguments; the tests together have more."""
    torch.compiler.reset()


@pytest.mark.gpu
@pytest.mark.usefixtures("freshly_compiled")
@pytest.mark.filterwarnings("ignore")  # PyTorch's compiler warns about its own ways
@pytest.mark.parametrize(
    ("window", "has_documents", "causal", "scale", "kv_heads", "dim", "dtype"),
    [
        (None, False, True, None, 4, 64, torch.bfloat16),
        (100, False, True, 0.5, 1, 64, torch.bfloat16),
        (None, True, True, None, 2, 192, torch.bfloat16),
        (16, True, True, None, 2, 64, torch.float32),
        (None, False, False, None, 4, 192, torch.float32),
    ],
)
def test_flex_equals_chunked(window, has_documents, causal, scale, kv_heads, dim, dtype):
    q, k = (x.cuda().to(dtype) for x in case(rows=3, length=300, kv_heads=kv_heads, dim=dim))
    documents = documents_of(3, 300).cuda() if has_documents else None
    flex, chunked = (
        max_logits(q, k, window=window, documents=documents, causal=causal, scale=scale, implementation=name)
        for name in ("flex", "chunked")
    )
    torch.testing.assert_close(flex, chunked, rtol=2e-3, atol=2e-3)


@pytest.mark.gpu
@pytest.mark.usefixtures("freshly_compiled")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["varlen", "flex"])
@pytest.mark.parametrize("window", [16, 256])
def test_gpu_attention_with_max_logits(name, window):
    q, k = (x.cuda().bfloat16() for x in case(rows=3, length=256, dim=64))
    v = torch.randn_like(k)
    inputs = torch.randint(0, 20, (3, 256), device="cuda")
    inputs[:, 0] = BOS
    starts = torch.cat([(inputs.flatten() == BOS).nonzero().flatten(), torch.tensor([768], device="cuda")]).int()
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    mask = document_mask(
        inputs, bos_id=BOS, windows=[window], implementation=name, dtype=q.dtype, document_starts=starts
    )
    out, found = attention_with_max_logits(*leaves, mask, window)
    torch.testing.assert_close(out.detach(), attention(q, k, v, mask, window))
    out.float().square().sum().backward()
    assert all(leaf.grad is not None for leaf in leaves)
    expected = max_logits(q, k, window=window, documents=(inputs == BOS).cumsum(dim=1), implementation="chunked")
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)


@pytest.mark.gpu
@pytest.mark.usefixtures("freshly_compiled")
@pytest.mark.filterwarnings("ignore")
def test_gpu_does_not_wait_for_the_device():
    q, k = (x.cuda().bfloat16() for x in case(rows=3, length=256, dim=64))
    max_logits(q, k)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        max_logits(q, k)
        max_logits(q, k, implementation="chunked")
    finally:
        torch.cuda.set_sync_debug_mode("default")
