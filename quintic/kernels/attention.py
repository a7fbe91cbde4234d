"""Attention: one call over PyTorch's implementations, with documents, sliding windows and grouped queries.

A batch row holds several documents one after the other; a token sees the tokens of its own document that lie at most
`window - 1` positions back. Three implementations compute the same function:

- `"varlen"`: `torch.nn.attention.varlen` (FlashAttention over variable-length sequences); CUDA, bfloat16 or float16.
- `"flex"`: FlexAttention with a block mask; CUDA, best under `torch.compile`.
- `"sdpa"`: scaled dot-product attention with an explicit mask; everywhere.

`choose_attention` is the only place that picks one. `max_logits` returns the largest logit of each head, for QK-clip;
`attention_with_max_logits` does both. Shape suffixes: B rows, T positions, H query heads, G key/value heads, D head
dimension.
"""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "AttentionName",
    "DocumentMask",
    "attention",
    "attention_with_max_logits",
    "choose_attention",
    "document_mask",
    "max_logits",
]

AttentionName = Literal["sdpa", "flex", "varlen"]

# Scores that `max_logits` holds at a time in plain PyTorch.
_MAX_SCORES = 2**24


def choose_attention(
    requested: AttentionName | Literal["auto"], *, device: torch.device, dtype: torch.dtype
) -> AttentionName:
    """Return the implementation to use: the requested one, or for `"auto"` the fastest that the device and dtype allow.

    Raises:
        ValueError: the requested implementation cannot run on this device or dtype, or its name is unknown.
    """
    varlen_runs = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16) and _varlen_attn() is not None
    if requested == "auto":
        return "varlen" if varlen_runs else "sdpa"
    if requested not in get_args(AttentionName):
        names = ", ".join(map(repr, get_args(AttentionName)))
        raise ValueError(f"attention={requested!r}: choose 'auto' or one of {names}")
    if requested == "varlen" and not varlen_runs:
        raise ValueError(
            f"attention='varlen' needs a CUDA device, bfloat16 or float16 and torch.nn.attention.varlen; "
            f"this run has {device.type} and {str(dtype).removeprefix('torch.')}; use 'sdpa'"
        )
    if requested == "flex" and device.type != "cuda":
        raise ValueError(f"attention='flex' needs a CUDA device, this run has {device.type}; use 'sdpa'")
    return requested


@dataclass(frozen=True, eq=False)
class DocumentMask:
    """Who may look at whom in one batch, in the form one implementation wants; make it with `document_mask`."""

    implementation: AttentionName
    per_window: dict[int, Any] = field(default_factory=dict)
    """sdpa: (B, 1, T, T) additive mask per window; flex: block mask per window; varlen: empty."""
    document_starts: Tensor | None = None
    """varlen: (num_documents + 1,) int32 cumulative offsets into the flattened B*T positions."""
    documents: Tensor | None = None
    """(B, T) number of each position's document within its row."""


def document_mask(
    inputs: Tensor,
    *,
    bos_id: int,
    windows: Iterable[int],
    implementation: AttentionName,
    dtype: torch.dtype,
    document_starts: Tensor | None = None,
) -> DocumentMask:
    """Prepare the mask of a batch once for all layers.

    Args:
        inputs: (B, T) int64 tokens; a document starts at every `bos_id` and at the start of each row.
        bos_id: token that starts a document.
        windows: window sizes (positions, itself included) that the layers use.
        implementation: what `choose_attention` returned.
        dtype: dtype of queries and keys.
        document_starts: (num_documents + 1,) int32 cumulative offsets on the device of `inputs`, needed by "varlen";
            may be padded at the end with B*T, so that its size stays the same from batch to batch.

    Raises:
        ValueError: `"varlen"` without `document_starts`.
    """
    document_BT = (inputs == bos_id).cumsum(dim=1)
    if implementation == "varlen":
        if document_starts is None:
            raise ValueError("attention='varlen' needs document_starts; the data loader's batches carry them")
        return DocumentMask("varlen", document_starts=document_starts, documents=document_BT)
    length = inputs.shape[1]
    if implementation == "flex":
        per_window = {window: _block_mask(document_BT, window) for window in set(windows)}
        return DocumentMask("flex", per_window, documents=document_BT)
    position = torch.arange(length, device=inputs.device)
    distance = position[:, None] - position[None, :]
    same_document = document_BT[:, :, None] == document_BT[:, None, :]
    per_window = {}
    for window in set(windows):
        visible = same_document & (distance >= 0) & (distance < window)
        bias = torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, float("-inf"))
        per_window[window] = bias.unsqueeze(1)
    return DocumentMask("sdpa", per_window, documents=document_BT)


def attention(q_BTHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, mask: DocumentMask, window: int) -> Tensor:
    """Return softmax(q k^T / sqrt(D)) v within documents and window.

    Args:
        q_BTHD: (B, T, H, D) queries.
        k_BTGD: (B, T, G, D) keys, H a multiple of G.
        v_BTGD: (B, T, G, D) values.
        mask: from `document_mask` for this batch, made with this `window` among its windows.
        window: positions a query sees, itself included; at least T for all of them.

    Returns:
        (B, T, H, D) in the dtype of the queries.
    """
    if mask.implementation == "varlen":
        return _varlen(q_BTHD, k_BTGD, v_BTGD, mask, window)
    groups = q_BTHD.shape[2] // k_BTGD.shape[2]
    q_BHTD = q_BTHD.transpose(1, 2)
    if mask.implementation == "flex":
        out_BHTD = _flex_attention()(
            q_BHTD, k_BTGD.transpose(1, 2), v_BTGD.transpose(1, 2), block_mask=mask.per_window[window], enable_gqa=True
        )
        flex_BTHD: Tensor = out_BHTD.transpose(1, 2)
        return flex_BTHD
    if groups > 1:
        k_BTGD, v_BTGD = (kv.repeat_interleave(groups, dim=2) for kv in (k_BTGD, v_BTGD))
    out_BHTD = F.scaled_dot_product_attention(
        q_BHTD, k_BTGD.transpose(1, 2), v_BTGD.transpose(1, 2), attn_mask=mask.per_window[window]
    )
    return out_BHTD.transpose(1, 2)


def attention_with_max_logits(
    q_BTHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, mask: DocumentMask, window: int
) -> tuple[Tensor, Tensor]:
    """Return `attention(...)` and the largest logit of each query head, (H,) float32 without gradient.

    Implementation "flex" computes both in one pass. The others keep no maxima, so `max_logits` makes another one over
    queries and keys.
    """
    if mask.implementation == "flex":
        q_BHTD, k_BGTD, v_BGTD = (x.transpose(1, 2) for x in (q_BTHD, k_BTGD, v_BTGD))
        out_BHTD, maxima_BHT = _flex_with_maxima(q_BHTD, k_BGTD, v_BGTD, block_mask=mask.per_window[window])
        return out_BHTD.transpose(1, 2), maxima_BHT.amax(dim=(0, 2))
    out_BTHD = attention(q_BTHD, k_BTGD, v_BTGD, mask, window)
    return out_BTHD, max_logits(q_BTHD, k_BTGD, window=window, documents=mask.documents)


@torch.no_grad()
def max_logits(
    q_BTHD: Tensor,
    k_BTGD: Tensor,
    *,
    window: int | None = None,
    documents: Tensor | None = None,
    causal: bool = True,
    scale: float | None = None,
    implementation: Literal["auto", "flex", "chunked"] = "auto",
) -> Tensor:
    """Return the largest logit of each query head over all rows and all (query, key) pairs that see each other.

    Args:
        q_BTHD: (B, T, H, D) queries, as they enter attention: after rotary positions and normalisation.
        k_BTGD: (B, T, G, D) keys, H a multiple of G; query head h meets key head h // (H / G).
        window: positions a query sees, itself included; None for all.
        documents: (B, T) integers; positions see each other only where these are equal. None for one document per row.
        causal: a query sees no later key.
        scale: factor on q.k; None for 1 / sqrt(D).
        implementation: `"flex"` is FlexAttention (CUDA; no scores in memory), `"chunked"` plain PyTorch, exact to the
            rounding of float32 products and a part of the scores at a time; `"auto"` is "flex" where it runs.

    Returns:
        (H,) float32, on the device of the queries and without waiting for it; -inf for a head that sees nothing.

    Raises:
        ValueError: shapes that do not fit, or "flex" where it cannot run.
    """
    rows, length, num_heads, head_dim = q_BTHD.shape
    if k_BTGD.shape[0] != rows or k_BTGD.shape[3] != head_dim or num_heads % k_BTGD.shape[2]:
        raise ValueError(
            f"queries {tuple(q_BTHD.shape)} and keys {tuple(k_BTGD.shape)}: need (B, T, H, D), (B, T, G, D)"
        )
    if k_BTGD.shape[1] != length and (causal or window is not None or documents is not None):
        raise ValueError(f"{length} queries and {k_BTGD.shape[1]} keys: a mask needs as many keys as queries")
    if implementation not in ("auto", "flex", "chunked"):
        raise ValueError(f"implementation={implementation!r}: choose 'auto', 'flex' or 'chunked'")
    if implementation == "flex" and not _flex_runs(q_BTHD):
        raise ValueError(
            f"implementation='flex' needs a CUDA device, 16 or more channels per head, at most 32 bits and a torch "
            f"whose FlexAttention returns max_scores; got {q_BTHD.device.type}, {head_dim} channels and "
            f"{str(q_BTHD.dtype).removeprefix('torch.')}; use 'chunked'"
        )
    if window is not None and window >= max(length, k_BTGD.shape[1]):
        window = None
    if implementation != "chunked" and _flex_runs(q_BTHD):
        return _flex_max_logits(q_BTHD, k_BTGD, window, documents, causal, scale)
    return _chunked_max_logits(q_BTHD, k_BTGD, _visible(documents, window, causal), scale)


def _flex_max_logits(
    q_BTHD: Tensor, k_BTGD: Tensor, window: int | None, documents: Tensor | None, causal: bool, scale: float | None
) -> Tensor:
    def within_document(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        assert documents is not None
        return torch.where(documents[b, q] == documents[b, k], score, float("-inf"))

    q_BHTD, k_BGTD = q_BTHD.transpose(1, 2), k_BTGD.transpose(1, 2)
    _, maxima_BHT = _flex_with_maxima(
        q_BHTD,
        k_BGTD,
        k_BGTD[..., :16].contiguous(),  # the values do not matter: as few channels as the kernel takes
        # Making a block mask of the documents takes longer than looking at all that the window allows.
        block_mask=_shared_block_mask(q_BTHD.shape[1], k_BTGD.shape[1], window, causal, q_BTHD.device),
        score_mod=None if documents is None else within_document,
        scale=scale,
    )
    return maxima_BHT.amax(dim=(0, 2))


def _flex_with_maxima(
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    *,
    block_mask: Any,
    score_mod: Any = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return FlexAttention's output and its row maxima, (B, H, T) float32 without gradient."""
    flex = _flex_and_maxima if torch.compiler.is_compiling() else _compiled_flex_and_maxima()
    out_BHTD, maxima_BHT = flex(q_BHTD, k_BGTD, v_BGTD, block_mask, score_mod, scale)
    return out_BHTD, maxima_BHT.detach()


def _chunked_max_logits(q_BTHD: Tensor, k_BTGD: Tensor, visible: Callable[..., Tensor], scale: float | None) -> Tensor:
    rows, length, num_heads, head_dim = q_BTHD.shape
    num_keys, groups = k_BTGD.shape[1:3]
    dtype = torch.promote_types(q_BTHD.dtype, torch.float32)
    q_BGRTD = q_BTHD.to(dtype).unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4)
    k_BGDT = k_BTGD.to(dtype).permute(0, 2, 3, 1)
    row = torch.arange(rows, device=q_BTHD.device)[:, None, None]
    query = torch.arange(length, device=q_BTHD.device)[:, None]
    key = torch.arange(num_keys, device=q_BTHD.device)
    largest_H = torch.full((num_heads,), float("-inf"), device=q_BTHD.device)
    chunk = max(1, _MAX_SCORES // max(1, rows * num_heads * num_keys))
    for first in range(0, length, chunk):
        q_chunk = q_BGRTD[:, :, :, first : first + chunk]
        scores = (q_chunk.flatten(2, 3) @ k_BGDT).unflatten(2, q_chunk.shape[2:4])  # (B, G, R, chunk, keys)
        scores = scores * (head_dim**-0.5 if scale is None else scale)
        hidden = ~visible(row, None, query[first : first + chunk], key)  # (chunk, keys), or with documents (B, ...)
        hidden = hidden.view(-1, 1, 1, *hidden.shape[-2:])
        chunk_H = scores.masked_fill(hidden, float("-inf")).amax(dim=(0, 3, 4)).flatten()
        largest_H = torch.maximum(largest_H, chunk_H.float())
    return largest_H


def _varlen(q_BTHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, mask: DocumentMask, window: int) -> Tensor:
    varlen_attn = _varlen_attn()
    assert varlen_attn is not None
    rows, length, num_heads, _ = q_BTHD.shape
    groups = num_heads // k_BTGD.shape[2]
    if groups > 1:
        k_BTGD, v_BTGD = (kv.repeat_interleave(groups, dim=2) for kv in (k_BTGD, v_BTGD))
    left = -1 if window >= length else window - 1
    out = varlen_attn(
        q_BTHD.flatten(0, 1),
        k_BTGD.flatten(0, 1),
        v_BTGD.flatten(0, 1),
        mask.document_starts,
        mask.document_starts,
        length,
        length,
        window_size=(left, 0),
    )
    attended: Tensor = out.unflatten(0, (rows, length))
    return attended


def _varlen_attn() -> Callable[..., Any] | None:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn


def _flex_attention() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    # Uncompiled it would write all scores to memory. A model that is being compiled takes it in as it is.
    if torch.compiler.is_compiling():
        plain: Callable[..., Any] = flex_attention
        return plain
    return _compiled_flex_attention()


@functools.cache
def _compiled_flex_attention() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Callable[..., Any] = torch.compile(flex_attention)
    return compiled


# A function of its own: PyTorch limits how often it compiles one function, for other masks, sizes and options.
def _flex_and_maxima(
    q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, block_mask: Any, score_mod: Any, scale: float | None
) -> tuple[Tensor, Tensor]:
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    out_BHTD, aux = flex_attention(
        q_BHTD,
        k_BGTD,
        v_BGTD,
        score_mod=score_mod,
        block_mask=block_mask,
        scale=scale,
        enable_gqa=True,
        return_aux=AuxRequest(max_scores=True),
    )
    assert aux.max_scores is not None
    return out_BHTD, aux.max_scores


@functools.cache
def _compiled_flex_and_maxima() -> Callable[..., tuple[Tensor, Tensor]]:
    compiled: Callable[..., tuple[Tensor, Tensor]] = torch.compile(_flex_and_maxima)
    return compiled


def _flex_runs(q_BTHD: Tensor) -> bool:
    """Return whether FlexAttention can return maxima for these queries: its CPU kernel cannot."""
    from torch.nn.attention import flex_attention

    dtype_fits = q_BTHD.dtype in (torch.bfloat16, torch.float16, torch.float32)
    return q_BTHD.is_cuda and dtype_fits and q_BTHD.shape[3] >= 16 and hasattr(flex_attention, "AuxRequest")


def _visible(document_BT: Tensor | None, window: int | None, causal: bool) -> Callable[..., Tensor]:
    """Return who sees whom, as FlexAttention asks for it: (row, head, query, key) -> bool, broadcast."""

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        result = (q >= k) if causal else (q >= 0) | (k >= 0)
        if window is not None:
            result = result & (q - k < window)
            if not causal:
                result = result & (k - q < window)
        if document_BT is not None:
            result = result & (document_BT[b, q] == document_BT[b, k])
        return result

    return visible


# Not compiled: fused into an evaluation graph, the mask was read out of bounds (torch 2.11 on an H200, 2026-11).
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _block_mask(document_BT: Tensor, window: int) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    rows, length = document_BT.shape
    mask_mod = _visible(document_BT, window, causal=True)
    return create_block_mask(mask_mod, rows, None, length, length, device=document_BT.device)


@torch.compiler.disable  # type: ignore[untyped-decorator]
@functools.lru_cache(maxsize=16)
def _shared_block_mask(length: int, num_keys: int, window: int | None, causal: bool, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(_visible(None, window, causal), None, None, length, num_keys, device=device)
