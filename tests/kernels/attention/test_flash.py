"""FlashAttention's packages, with modules of this file in their place: what is called, with which arguments, and when.

The stand-ins compute what the real functions document, one document and one query at a time.
"""

import importlib
import importlib.util
import sys
import types

import pytest
import torch
from newer import needs_torch

from quintic.kernels.attention.attention import attention, choose_attention, document_mask

BOS = 0
CUDA = torch.device("cuda")
NEEDS_VARLEN = needs_torch("2.11", "torch.nn.attention.varlen with windows")
MODULES = {"fa3": "flash_attn_interface", "fa4": "flash_attn.cute", "varlen": "torch.nn.attention.varlen"}


def shares(q, k, starts, left, right):
    """(heads, queries, keys) attention over documents, windows as FlashAttention has them: -1 or None for no limit."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    position = torch.arange(q.shape[0])
    document = (position[:, None] >= starts[1:]).sum(1)
    distance = position[:, None] - position
    visible = document[:, None] == document
    if left not in (-1, None):
        visible = visible & (distance <= left)
    if right not in (-1, None):
        visible = visible & (-distance <= right)
    logits = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    return torch.softmax(logits.masked_fill(~visible, float("-inf")), dim=-1)


def reference(q, k, v, starts, left, right):
    v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    return torch.einsum("hqk,khd->qhd", shares(q, k, starts, left, right), v)


def reference_backward(grad, q, k, v, starts, left, right):
    """The gradients by hand: an operator's backward pass cannot ask autograd."""
    groups, weights = q.shape[1] // k.shape[1], shares(q, k, starts, left, right)
    of_weights = torch.einsum("qhd,khd->hqk", grad, v.repeat_interleave(groups, dim=1))
    of_logits = weights * (of_weights - (weights * of_weights).sum(-1, keepdim=True)) / q.shape[-1] ** 0.5
    of_k, of_v = torch.einsum("hqk,qhd->khd", of_logits, q), torch.einsum("hqk,qhd->khd", weights, grad)
    of_q = torch.einsum("hqk,khd->qhd", of_logits, k.repeat_interleave(groups, dim=1))
    return of_q, *(x.unflatten(1, (-1, groups)).sum(2) for x in (of_k, of_v))


class Calls(list):
    """The arguments of a stand-in's calls."""

    def add(self, q, k, v, starts, keys_starts, longest, longest_keys, window, deterministic=False):
        assert starts is keys_starts
        assert longest == longest_keys
        assert (k.shape, q.shape[::2]) == (v.shape, k.shape[::2])
        self.append({"heads": (q.shape[1], k.shape[1]), "starts": starts, "longest": longest, "window": window})
        self.deterministic = deterministic


def fa3_function(calls):
    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None,
        softmax_scale=None, causal=False, qv=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0,
        deterministic=False, return_attn_probs=False,
    ):  # fmt: skip
        assert causal
        calls.add(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, window_size, deterministic)
        return reference(q, k, v, cu_seqlens_q, *window_size)

    return flash_attn_varlen_func


def fa4_function(calls):
    def flash_attn_varlen_func(
        q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
        min_seqlen_k=None, softmax_scale=None, causal=False, window_size=(None, None), deterministic=False,
        return_lse=False,
    ):  # fmt: skip
        assert causal
        assert qv is None
        assert return_lse
        assert -1 not in window_size
        calls.add(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, window_size, deterministic)
        # The sums are not looked at, only handed from pass to pass.
        sums = torch.arange(q.shape[0] * q.shape[1], dtype=torch.float32).view(q.shape[1], q.shape[0])
        return reference(q, k, v, cu_seqlens_q, *window_size), sums

    return flash_attn_varlen_func


def fa4_backward(calls):
    def _flash_attn_bwd(
        q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
        window_size_right=None, m_block_size=64, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None,
        max_seqlen_k=None, deterministic=False,
    ):  # fmt: skip
        assert causal
        assert (softmax_scale, softcap, m_block_size) == (None, 0.0, 64)
        assert torch.equal(lse.flatten(), torch.arange(lse.numel()).float())
        assert deterministic == calls.deterministic
        assert (max_seqlen_q, max_seqlen_k) == (calls[-1]["longest"],) * 2
        assert cu_seqlens_q is cu_seqlens_k
        assert (window_size_left, window_size_right) in [call["window"] for call in calls]
        torch.testing.assert_close(out, reference(q, k, v, cu_seqlens_q, window_size_left, window_size_right))
        return reference_backward(dout, q, k, v, cu_seqlens_q, window_size_left, window_size_right)

    return _flash_attn_bwd


def varlen_function(calls, takes_groups):
    def varlen_attn(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False):
        assert q.shape[1] == k.shape[1] or enable_gqa
        calls.add(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, window_size)
        return reference(q, k, v, cu_seq_q, *window_size)

    def before_groups(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
        return varlen_attn(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, window_size=window_size)

    return varlen_attn if takes_groups else before_groups


def module(name, **content):
    found = types.ModuleType(name)
    found.__spec__ = importlib.util.spec_from_loader(name, loader=None)
    found.__path__ = []
    vars(found).update(content)
    return found


@pytest.fixture
def install(monkeypatch):
    """Put a stand-in where the package's module would be, and a device of some generation under it."""

    def put(name, capability=(9, 0), takes_groups=True, **content):
        calls = Calls()
        made = {
            "fa3": lambda: {"flash_attn_varlen_func": fa3_function(calls)},
            "fa4": lambda: {"flash_attn_varlen_func": fa4_function(calls)},
            "varlen": lambda: {"varlen_attn": varlen_function(calls, takes_groups)},
        }[name]()
        path = MODULES[name]
        if name == "fa4":
            monkeypatch.setitem(sys.modules, "flash_attn", module("flash_attn"))
            made["interface"] = module(f"{path}.interface", _flash_attn_bwd=fa4_backward(calls))
            monkeypatch.setitem(sys.modules, f"{path}.interface", made["interface"])
        monkeypatch.setitem(sys.modules, path, module(path, **made | content))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        return calls

    return put


def case(kv_heads=2):
    inputs = torch.randint(1, 9, (2, 12))
    inputs[:, 0] = inputs[0, 5] = inputs[0, 6] = inputs[1, 9] = BOS
    starts = torch.tensor([0, 5, 6, 12, 21, 24, 24, 24], dtype=torch.int32)
    q, k, v = (torch.randn(2, 12, heads, 8) for heads in (4, kv_heads, kv_heads))
    return inputs, starts, q, k, v


@pytest.mark.parametrize("name", ["fa3", "fa4", "varlen"])
@pytest.mark.parametrize("window", [1, 3, 11, 12, 500])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_equals_sdpa_and_passes_heads_as_they_are(name, window, kv_heads, install):
    calls = install(name)
    inputs, starts, *leaves = case(kv_heads)
    results = []
    for implementation in ("sdpa", name):
        q, k, v = (leaf.clone().requires_grad_() for leaf in leaves)
        mask = document_mask(
            inputs, bos_id=BOS, windows=[window], implementation=implementation, dtype=q.dtype, document_starts=starts
        )
        out = attention(q, k, v, mask, window)
        results.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    (call,) = calls
    assert call["starts"] is starts
    no_limit = {"fa4": None, "fa3": -1, "varlen": window - 1}[name]  # compiled code is for any window of varlen
    expected = {"heads": (4, kv_heads), "longest": 12, "window": (window - 1 if window < 12 else no_limit, 0)}
    assert {key: call[key] for key in expected} == expected


def test_the_longest_document_limits_the_window_and_what_kernels_prepare(install):
    calls = install("fa3")
    inputs, starts, q, k, v = case()
    outs = []
    for longest, window in ((None, 12), (7, 7), (7, 3), (100, 3)):
        mask = document_mask(
            inputs,
            bos_id=BOS,
            windows=[window],
            implementation="fa3",
            dtype=q.dtype,
            document_starts=starts,
            longest=longest,
        )
        outs.append(attention(q, k, v, mask, window))
    torch.testing.assert_close(outs[1], outs[0])
    assert [call["longest"] for call in calls] == [12, 7, 7, 12]
    assert [call["window"][0] for call in calls] == [-1, -1, 2, 2]


def test_a_pytorch_whose_kernel_takes_no_groups_gets_repeated_heads(install):
    calls = install("varlen", takes_groups=False)
    inputs, starts, q, k, v = case()
    outs = []
    for implementation in ("sdpa", "varlen"):
        mask = document_mask(
            inputs, bos_id=BOS, windows=[4], implementation=implementation, dtype=q.dtype, document_starts=starts
        )
        outs.append(attention(q, k, v, mask, 4))
    torch.testing.assert_close(outs[1], outs[0])
    assert calls[0]["heads"] == (4, 4)


@pytest.mark.parametrize("name", ["fa3", "fa4"])
@pytest.mark.parametrize("wanted", [False, True])
def test_deterministic_algorithms_are_passed_on(name, wanted, install):
    calls = install(name)
    inputs, starts, q, k, v = case()
    mask = document_mask(inputs, bos_id=BOS, windows=[4], implementation=name, dtype=q.dtype, document_starts=starts)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(wanted)
    try:
        attention(q, k, v, mask, 4)
    finally:
        torch.use_deterministic_algorithms(before)
    assert calls.deterministic == wanted


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # PyTorch's compiler, after a break
@pytest.mark.parametrize("name", ["fa3", "fa4", "varlen"])
def test_attention_compiles_as_one_graph(name, install):
    install(name)
    inputs, starts, q, k, v = case()

    def attend(q, k, v):
        mask = document_mask(
            inputs, bos_id=BOS, windows=[4], implementation=name, dtype=q.dtype, document_starts=starts
        )
        return attention(q * 2, k, v, mask, 4).square()

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    q.requires_grad_()
    found, expected = compiled(q, k, v), attend(q, k, v)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found.sum(), q), torch.autograd.grad(expected.sum(), q))


@pytest.fixture
def nothing_installed(monkeypatch):
    for path in ("flash_attn_interface", "flash_attn", "flash_attn.cute"):
        monkeypatch.delitem(sys.modules, path, raising=False)
    find = importlib.util.find_spec

    def without(name, package=None):
        if name.startswith("flash_attn"):
            if "." in name and "flash_attn" not in sys.modules:
                raise ModuleNotFoundError("No module named 'flash_attn'", name="flash_attn")
            return sys.modules[name].__spec__ if name in sys.modules else None
        return find(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without)


@NEEDS_VARLEN
@pytest.mark.usefixtures("nothing_installed")
@pytest.mark.parametrize(
    ("installed", "capability", "chosen"),
    [
        ([], (9, 0), "varlen"),
        (["fa3"], (9, 0), "fa3"),
        (["fa3"], (10, 0), "varlen"),
        (["fa3"], (8, 0), "varlen"),
        (["fa4"], (9, 0), "fa4"),
        (["fa4"], (10, 3), "fa4"),
        (["fa4"], (8, 9), "varlen"),
        (["fa3", "fa4"], (9, 0), "fa3"),
        (["fa3", "fa4"], (10, 0), "fa4"),
    ],
)
def test_what_auto_takes(installed, capability, chosen, install):
    for name in installed:
        install(name, capability)
    for dtype in (torch.bfloat16, torch.float16):
        assert choose_attention("auto", device=CUDA, dtype=dtype) == chosen
        assert choose_attention(chosen, device=CUDA, dtype=dtype) == chosen
    assert choose_attention("auto", device=CUDA, dtype=torch.float32) == "sdpa"
    assert choose_attention("auto", device=torch.device("cpu"), dtype=torch.bfloat16) == "sdpa"


@pytest.mark.usefixtures("nothing_installed")
@pytest.mark.parametrize(
    ("name", "package"),
    [("fa3", "flash_attn_3, from the folder hopper of https://github.com/Dao-AILab/"), ("fa4", "flash-attn-4")],
)
def test_what_is_not_installed_is_an_error_that_says_what_to_install(name, package, monkeypatch):
    expected = f"attention='{name}' needs a package that is not installed: {package}.*; use 'sdpa'"
    with pytest.raises(ValueError, match=expected):
        choose_attention(name, device=CUDA, dtype=torch.bfloat16)
    if name == "fa4":  # FlashAttention-2 alone
        monkeypatch.setitem(sys.modules, "flash_attn", module("flash_attn"))
        with pytest.raises(ValueError, match=expected):
            choose_attention(name, device=CUDA, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "capability", "message"),
    [
        ("fa3", (10, 0), "attention='fa3' needs a device of compute capability 9.x; this one has 10.0; use 'sdpa'"),
        (
            "fa4",
            (8, 0),
            "attention='fa4' needs a device of compute capability 9.x or 10.x or 11.x or 12.x; this one has",
        ),
    ],
)
def test_a_device_of_another_generation_is_an_error(name, capability, message, install):
    install(name, capability)
    with pytest.raises(ValueError, match=message):
        choose_attention(name, device=CUDA, dtype=torch.bfloat16)


def test_other_dtypes_are_errors(install):
    install("fa3")
    with pytest.raises(
        ValueError, match="attention='fa3' needs a CUDA device and bfloat16 or float16; this run has cuda"
    ):
        choose_attention("fa3", device=CUDA, dtype=torch.float32)


@NEEDS_VARLEN
def test_a_version_too_old_is_said(install):
    calls = Calls()

    def flash_attn_varlen_func(q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, causal=False, window_size=(None, None)):
        calls.append(q)

    install("fa4", flash_attn_varlen_func=flash_attn_varlen_func)
    expected = "needs a newer flash-attn-4 .*: flash_attn_varlen_func takes no deterministic"
    with pytest.raises(ValueError, match=expected):
        choose_attention("fa4", device=CUDA, dtype=torch.bfloat16)
    assert choose_attention("auto", device=CUDA, dtype=torch.bfloat16) == "varlen"


@pytest.mark.usefixtures("nothing_installed")
def test_an_older_pytorch_s_attention_has_no_windows(install):
    def varlen_attn(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None):
        raise NotImplementedError

    install("varlen", varlen_attn=varlen_attn)
    expected = "attention='varlen' needs a newer PyTorch, 2.11 or later: varlen_attn takes no window_size; use 'sdpa'"
    with pytest.raises(ValueError, match=expected):
        choose_attention("varlen", device=CUDA, dtype=torch.bfloat16)
    assert choose_attention("auto", device=CUDA, dtype=torch.bfloat16) == "sdpa"


@NEEDS_VARLEN
@pytest.mark.parametrize(
    "error",
    [ImportError("undefined symbol: _ZN3c10"), AttributeError("no TiledCopy"), ModuleNotFoundError("x", name="x")],
)
def test_a_broken_installation_is_said_and_not_taken(error, install, monkeypatch):
    install("fa3")
    importing = importlib.import_module

    def fail(name, package=None):
        if name == "flash_attn_interface":
            raise error
        return importing(name, package)

    monkeypatch.setattr(importlib, "import_module", fail)
    expected = f"attention='fa3' needs flash_attn_3.*importing it failed with {type(error).__name__}: {error}"
    with pytest.raises(ValueError, match=expected):
        choose_attention("fa3", device=CUDA, dtype=torch.bfloat16)
    assert choose_attention("auto", device=CUDA, dtype=torch.bfloat16) == "varlen"
