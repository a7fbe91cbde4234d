"""Attention: one call over PyTorch's implementations, with documents, sliding windows and grouped queries.

A batch row holds several documents one after the other; a token sees the tokens of its own document that lie at most
`window - 1` positions back. Three implementations compute the same function:

- `"varlen"`: `torch.nn.attention.varlen` (FlashAttention over variable-length sequences); CUDA, bfloat16 or float16.
- `"flex"`: FlexAttention with a block mask; CUDA, best under `torch.compile`.
- `"sdpa"`: scaled dot-product attention with an explicit mask; everywhere.

`choose_attention` is the only place that picks one. Shape suffixes: B rows, T positions, H query heads, G key/value
heads, D head dimension.
"""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["AttentionName", "DocumentMask", "attention", "choose_attention", "document_mask"]

AttentionName = Literal["sdpa", "flex", "varlen"]


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
    if implementation == "varlen":
        if document_starts is None:
            raise ValueError("attention='varlen' needs document_starts; the data loader's batches carry them")
        return DocumentMask("varlen", document_starts=document_starts)
    length = inputs.shape[1]
    document_BT = (inputs == bos_id).cumsum(dim=1)
    if implementation == "flex":
        return DocumentMask("flex", {window: _block_mask(document_BT, window) for window in set(windows)})
    position = torch.arange(length, device=inputs.device)
    distance = position[:, None] - position[None, :]
    same_document = document_BT[:, :, None] == document_BT[:, None, :]
    per_window = {}
    for window in set(windows):
        visible = same_document & (distance >= 0) & (distance < window)
        bias = torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, float("-inf"))
        per_window[window] = bias.unsqueeze(1)
    return DocumentMask("sdpa", per_window)


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


# Not compiled: fused into an evaluation graph, the mask was read out of bounds (torch 2.11 on an H200, 2026-11).
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _block_mask(document_BT: Tensor, window: int) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (document_BT[b, q] == document_BT[b, k]) & (q >= k) & (q - k < window)

    rows, length = document_BT.shape
    return create_block_mask(visible, rows, None, length, length, device=document_BT.device)
