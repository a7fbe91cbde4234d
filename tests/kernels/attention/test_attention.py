from typing import get_args, get_type_hints

import pytest
import torch

from quintic.kernels.attention.attention import (
    AttentionName,
    DocumentMask,
    attention,
    choose_attention,
    document_mask,
    needs_document_starts,
    obstacle_to_attention,
)
from quintic.train.config import RunConfig

BOS = 0
CPU = torch.device("cpu")


def naive(q, k, v, inputs, window):
    """One query at a time, in float64."""
    rows, length, heads, dim = q.shape
    groups = heads // k.shape[2]
    out = torch.zeros_like(q, dtype=torch.float64)
    for row in range(rows):
        start = 0
        for query in range(length):
            if inputs[row, query] == BOS:
                start = query
            first = max(start, query - window + 1)
            for head in range(heads):
                keys = k[row, first : query + 1, head // groups].double()
                weights = torch.softmax(keys @ q[row, query, head].double() / dim**0.5, dim=0)
                out[row, query, head] = weights @ v[row, first : query + 1, head // groups].double()
    return out


def case(rows=2, length=24, heads=4, kv_heads=2, dim=8):
    inputs = torch.randint(1, 9, (rows, length))
    inputs[:, 0] = BOS
    inputs[0, 5] = inputs[0, 6] = inputs[-1, 17] = BOS
    q = torch.randn(rows, length, heads, dim)
    k, v = torch.randn(rows, length, kv_heads, dim), torch.randn(rows, length, kv_heads, dim)
    return inputs, q, k, v


@pytest.mark.parametrize("window", [1, 3, 7, 24, 1000])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_sdpa_equals_the_naive_loop(window, kv_heads):
    inputs, q, k, v = case(kv_heads=kv_heads)
    mask = document_mask(inputs, bos_id=BOS, windows=[window, 2], implementation="sdpa", dtype=q.dtype)
    out = attention(q, k, v, mask, window)
    torch.testing.assert_close(out.double(), naive(q, k, v, inputs, window), rtol=1e-5, atol=1e-5)


def test_nothing_leaks_across_documents():
    inputs, q, k, v = case()
    mask = document_mask(inputs, bos_id=BOS, windows=[24], implementation="sdpa", dtype=q.dtype)
    before = attention(q, k, v, mask, 24)
    k[0, :5] += 100.0
    v[0, :5] += 100.0
    after = attention(q, k, v, mask, 24)
    assert torch.equal(before[0, 5:], after[0, 5:])
    assert not torch.equal(before[0, :5], after[0, :5])


def test_auto_is_sdpa_on_the_cpu():
    assert choose_attention("auto", device=CPU, dtype=torch.bfloat16) == "sdpa"
    assert choose_attention("sdpa", device=CPU, dtype=torch.float32) == "sdpa"


@pytest.mark.parametrize("name", ["varlen", "flex", "fa3", "fa4"])
def test_what_cannot_run_here_is_an_error(name):
    with pytest.raises(ValueError, match=f"attention='{name}' needs a CUDA device"):
        choose_attention(name, device=CPU, dtype=torch.bfloat16)


def test_unknown_names_are_errors():
    with pytest.raises(ValueError, match=r"attention='flash'.*'sdpa', 'flex', 'varlen', 'fa3', 'fa4'"):
        choose_attention("flash", device=CPU, dtype=torch.float32)


def test_a_run_can_ask_for_every_implementation():
    assert get_args(get_type_hints(RunConfig)["attention"]) == ("auto", *get_args(AttentionName))


@pytest.mark.parametrize("name", ["varlen", "fa3", "fa4"])
def test_flash_attention_needs_the_starts(name):
    with pytest.raises(ValueError, match=f"attention='{name}' needs document_starts"):
        document_mask(torch.zeros(1, 4).long(), bos_id=BOS, windows=[4], implementation=name, dtype=torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # PyTorch's compiler warns about its own ways
@pytest.mark.parametrize("name", ["varlen", "flex", "fa3", "fa4"])
@pytest.mark.parametrize("window", [16, 100, 256])
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_gpu_implementations_equal_sdpa(name, window, kv_heads):
    if obstacle_to_attention(name, torch.device("cuda"), torch.bfloat16) is not None:
        pytest.skip(f"{name} is not installed, or not for this device")
    inputs, q, k, v = (t.cuda() for t in case(rows=3, length=256, kv_heads=kv_heads, dim=64))
    q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
    starts = torch.cat(
        [(inputs.flatten() == BOS).nonzero().flatten(), torch.tensor([768, 768, 768], device="cuda")]
    ).int()
    outs = []
    for implementation in ("sdpa", name):
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        mask = document_mask(
            inputs,
            bos_id=BOS,
            windows=[window],
            implementation=implementation,
            dtype=q.dtype,
            document_starts=starts if needs_document_starts(implementation) else None,
        )
        out = attention(*leaves, mask, window)
        out.float().square().sum().backward()
        outs.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for reference, found in zip(*outs, strict=True):
        error = (found.float() - reference.float()).norm() / reference.float().norm()
        assert float(error) < 2e-2


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # captured on another
@pytest.mark.parametrize("name", ["varlen", "fa3", "fa4"])
def test_gpu_in_a_graph_of_the_device(name):
    """Both passes, captured: the race does so, and lets documents change between replays."""
    if obstacle_to_attention(name, torch.device("cuda"), torch.bfloat16) is not None:
        pytest.skip(f"{name} is not installed, or not for this device")
    q, k, v = (t.cuda().bfloat16().requires_grad_() for t in case(rows=1, length=256, dim=64)[1:])
    starts = torch.tensor([0, 100, 256, 256], dtype=torch.int32, device="cuda")

    def both():
        out = attention(q, k, v, DocumentMask(name, document_starts=starts), 50)
        return [out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        both()  # compiles
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both()
    starts.copy_(torch.tensor([0, 30, 40, 256]))
    graph.replay()
    for found, expected in zip(captured, both(), strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
