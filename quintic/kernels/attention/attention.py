"""Attention with documents, sliding windows and grouped queries: one function over several implementations.

A row of a batch holds several documents one after the other. A token sees the tokens of its own document that lie at
most `window - 1` positions back. All implementations compute the same function:

- `"fa3"`, `"fa4"`: FlashAttention 3 and 4, if they are installed; see `flash.py`.
- `"varlen"`: `torch.nn.attention.varlen` (FlashAttention over variable-length sequences); CUDA, bfloat16 or float16.
- `"flex"`: FlexAttention with a block mask; CUDA, best under `torch.compile`.
- `"sdpa"`: scaled dot-product attention with an explicit mask; on all devices.

A forward pass chooses an implementation once (`choose_attention`), makes one mask per batch (`document_mask`), and
calls `attention` in every layer. For QK-clip, `max_logits` returns the largest logit of each head, and
`attention_with_max_logits` returns both. Shape suffixes: B rows, T positions, H query heads, G key/value heads, D head
dimension.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeGuard, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from quintic.kernels.attention.flash import FlashName, attend, obstacle_to_flash
from quintic.kernels.attention.flex import (
    block_mask_of,
    flex_function,
    flex_with_maxima,
    returns_maxima,
    shared_block_mask,
    visibility,
)

__all__ = [
    "AttentionName",
    "DocumentMask",
    "attention",
    "attention_with_max_logits",
    "choose_attention",
    "choose_max_logits",
    "document_mask",
    "fastest_attention",
    "max_logits",
    "needs_document_starts",
    "obstacle_to_attention",
]

AttentionName = Literal["sdpa", "flex", "varlen", "fa3", "fa4"]

_FLASH = get_args(FlashName)

# The order in which "auto" tries implementations before "sdpa".
_FASTEST_FIRST: tuple[FlashName, ...] = ("fa3", "fa4", "varlen")

# Largest number of scores that `max_logits` holds at a time in plain PyTorch.
_MAX_SCORES = 2**24


def choose_attention(
    requested: AttentionName | Literal["auto"], *, device: torch.device, dtype: torch.dtype
) -> AttentionName:
    """Return the implementation to use: the requested one, or for `"auto"` the fastest one for the device and dtype.

    Raises:
        ValueError: the requested implementation cannot run on this device or dtype, its package is not installed, or
            its name is unknown.
    """
    if requested == "auto":
        return fastest_attention(device, dtype)[0]
    if requested not in get_args(AttentionName):
        names = ", ".join(map(repr, get_args(AttentionName)))
        raise ValueError(f"attention={requested!r}: choose 'auto' or one of {names}")
    obstacle = obstacle_to_attention(requested, device, dtype)
    if obstacle is not None:
        raise ValueError(f"attention={requested!r} {obstacle}; use 'sdpa'")
    return requested


def fastest_attention(device: torch.device, dtype: torch.dtype) -> tuple[AttentionName, list[str]]:
    """Return the implementation that `"auto"` takes, and for each faster one the reason why it cannot run."""
    reasons: list[str] = []
    for name in _FASTEST_FIRST:
        obstacle = obstacle_to_flash(name, device, dtype)
        if obstacle is None:
            return name, reasons
        reasons.append(f"{name} {obstacle}")
    return "sdpa", reasons


def obstacle_to_attention(name: AttentionName, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why an implementation cannot run, as a sentence without its subject, the name; None if it can."""
    if name == "sdpa":
        return None
    if name == "flex":
        return None if device.type == "cuda" else f"needs a CUDA device, this run has {device.type}"
    return obstacle_to_flash(name, device, dtype)


def needs_document_starts(name: AttentionName) -> TypeGuard[FlashName]:
    """Return whether `document_mask` needs `document_starts` for an implementation."""
    return name in _FLASH


@dataclass(frozen=True, eq=False)
class DocumentMask:
    """The attention mask of one batch, in the form of one implementation; make it with `document_mask`."""

    implementation: AttentionName
    per_window: dict[int, Any] = field(default_factory=dict)
    """Window -> its mask. sdpa: (B, 1, T, T) additive mask; flex: block mask; others: empty."""
    document_starts: Tensor | None = None
    """varlen, fa3, fa4: (num_documents + 1,) int32 cumulative offsets into the flattened B*T positions."""
    documents: Tensor | None = None
    """(B, T) number of each position's document within its row."""
    longest: int | None = None
    """varlen, fa3, fa4: upper bound of a document's length; None for T."""


def document_mask(
    inputs: Tensor,
    *,
    bos_id: int,
    windows: Iterable[int],
    implementation: AttentionName,
    dtype: torch.dtype,
    document_starts: Tensor | None = None,
    longest: int | None = None,
) -> DocumentMask:
    """Return the attention mask of a batch, for all layers.

    Args:
        inputs: (B, T) int64 tokens; a document starts at every `bos_id` and at the start of each row.
        bos_id: token that starts a document.
        windows: window sizes of the layers, in positions, the query's own included.
        implementation: from `choose_attention`.
        dtype: dtype of queries and keys.
        document_starts: (num_documents + 1,) int32 cumulative offsets on the device of `inputs`, for implementations
            that need them (`needs_document_starts`); may be padded at the end with B*T, so that all batches have the
            same size.
        longest: upper bound of a document's length, which saves these implementations work on long rows; None for T.

    Raises:
        ValueError: `document_starts` is needed and missing.
    """
    # Index of each position's document within its row.
    document_BT = (inputs == bos_id).cumsum(dim=1)
    if needs_document_starts(implementation):
        if document_starts is None:
            raise ValueError(
                f"attention={implementation!r} needs document_starts; the data loader's batches carry them"
            )
        return DocumentMask(implementation, {}, document_starts, document_BT, longest)
    length = inputs.shape[1]
    if implementation == "flex":
        per_window = {window: block_mask_of(document_BT, window) for window in set(windows)}
        return DocumentMask("flex", per_window, documents=document_BT)
    position = torch.arange(length, device=inputs.device)
    distance = position[:, None] - position[None, :]
    same_document = document_BT[:, :, None] == document_BT[:, None, :]
    per_window = {}
    for window in set(windows):
        # (B, T, T), then (B, 1, T, T) for all heads.
        visible = same_document & (distance >= 0) & (distance < window)
        bias = torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, float("-inf"))
        per_window[window] = bias.unsqueeze(1)
    return DocumentMask("sdpa", per_window, documents=document_BT)


def attention(q_BTHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, mask: DocumentMask, window: int) -> Tensor:
    """Return softmax(q k^T / sqrt(D)) v, causal, within documents and window.

    Args:
        q_BTHD: (B, T, H, D) queries.
        k_BTGD: (B, T, G, D) keys, H a multiple of G.
        v_BTGD: (B, T, G, D) values.
        mask: from `document_mask` for this batch, with `window` among its windows.
        window: number of positions that a query sees, its own included; T or more for no limit.

    Returns:
        (B, T, H, D) in the dtype of the queries.
    """
    if needs_document_starts(mask.implementation):
        assert mask.document_starts is not None
        # All rows as one sequence of N = B*T positions.
        q_NHD, k_NGD, v_NGD = (x.flatten(0, 1) for x in (q_BTHD, k_BTGD, v_BTGD))
        rows, length = q_BTHD.shape[:2]
        longest = length if mask.longest is None else min(length, mask.longest)
        out_NHD = attend(mask.implementation, q_NHD, k_NGD, v_NGD, mask.document_starts, longest=longest, window=window)
        flash_BTHD: Tensor = out_NHD.unflatten(0, (rows, length))
        return flash_BTHD
    groups = q_BTHD.shape[2] // k_BTGD.shape[2]
    q_BHTD = q_BTHD.transpose(1, 2)
    if mask.implementation == "flex":
        out_BHTD = flex_function()(
            q_BHTD, k_BTGD.transpose(1, 2), v_BTGD.transpose(1, 2), block_mask=mask.per_window[window], enable_gqa=True
        )
        flex_BTHD: Tensor = out_BHTD.transpose(1, 2)
        return flex_BTHD
    if groups > 1:
        # SDPA with a mask wants as many key heads as query heads.
        k_BTGD, v_BTGD = (kv.repeat_interleave(groups, dim=2) for kv in (k_BTGD, v_BTGD))
    out_BHTD = F.scaled_dot_product_attention(
        q_BHTD, k_BTGD.transpose(1, 2), v_BTGD.transpose(1, 2), attn_mask=mask.per_window[window]
    )
    return out_BHTD.transpose(1, 2)


def attention_with_max_logits(
    q_BTHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, mask: DocumentMask, window: int
) -> tuple[Tensor, Tensor]:
    """Return `attention(...)` and the largest logit of each query head, (H,) float32 without gradient.

    Implementation "flex" computes both in one pass. For the others, `max_logits` makes another pass over queries and
    keys.
    """
    if mask.implementation == "flex":
        q_BHTD, k_BGTD, v_BGTD = (x.transpose(1, 2) for x in (q_BTHD, k_BTGD, v_BTGD))
        out_BHTD, maxima_BHT = flex_with_maxima(q_BHTD, k_BGTD, v_BGTD, block_mask=mask.per_window[window])
        return out_BHTD.transpose(1, 2), maxima_BHT.amax(dim=(0, 2))
    out_BTHD = attention(q_BTHD, k_BTGD, v_BTGD, mask, window)
    return out_BTHD, max_logits(q_BTHD, k_BTGD, window=window, documents=mask.documents)


def choose_max_logits(q_BTHD: Tensor) -> Literal["flex", "chunked"]:
    """Return the implementation of `max_logits` that `"auto"` takes for these queries."""
    return "flex" if returns_maxima(q_BTHD) else "chunked"


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
        window: number of positions that a query sees, its own included; None for no limit.
        documents: (B, T) integers; positions with different numbers do not see each other. None for one document per
            row.
        causal: whether a query sees no later keys.
        scale: factor of q.k; None for 1 / sqrt(D).
        implementation: `"flex"` is FlexAttention (CUDA only; scores are never in memory), `"chunked"` is plain PyTorch
            with a chunk of scores at a time, exact to the rounding of float32 products; `"auto"` takes "flex" if it
            runs.

    Returns:
        (H,) float32 on the device of the queries, without waiting for it; -inf for a head without visible keys.

    Raises:
        ValueError: shapes do not fit, or "flex" cannot run.
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
    if implementation == "flex" and not returns_maxima(q_BTHD):
        raise ValueError(
            f"implementation='flex' needs a CUDA device, 16 or more channels per head, at most 32 bits and a torch "
            f"whose FlexAttention returns max_scores; got {q_BTHD.device.type}, {head_dim} channels and "
            f"{str(q_BTHD.dtype).removeprefix('torch.')}; use 'chunked'"
        )
    # A window that hides nothing is dropped, so that cached block masks are shared.
    if window is not None and window >= max(length, k_BTGD.shape[1]):
        window = None
    if implementation == "flex" or (implementation == "auto" and choose_max_logits(q_BTHD) == "flex"):
        return _flex_max_logits(q_BTHD, k_BTGD, window, documents, causal, scale)
    return _chunked_max_logits(q_BTHD, k_BTGD, visibility(documents, window, causal), scale)


def _flex_max_logits(
    q_BTHD: Tensor, k_BTGD: Tensor, window: int | None, documents: Tensor | None, causal: bool, scale: float | None
) -> Tensor:
    def within_document(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        assert documents is not None
        return torch.where(documents[b, q] == documents[b, k], score, float("-inf"))

    q_BHTD, k_BGTD = q_BTHD.transpose(1, 2), k_BTGD.transpose(1, 2)
    _, maxima_BHT = flex_with_maxima(
        q_BHTD,
        k_BGTD,
        # Values do not affect the maxima: 16 channels are the fewest that the kernel takes.
        k_BGTD[..., :16].contiguous(),
        # The block mask ignores documents, which `score_mod` hides: computing a block mask of documents takes longer
        # than the scores that it would skip.
        block_mask=shared_block_mask(q_BTHD.shape[1], k_BTGD.shape[1], window, causal, q_BTHD.device),
        score_mod=None if documents is None else within_document,
        scale=scale,
    )
    return maxima_BHT.amax(dim=(0, 2))


def _chunked_max_logits(q_BTHD: Tensor, k_BTGD: Tensor, visible: Callable[..., Tensor], scale: float | None) -> Tensor:
    rows, length, num_heads, head_dim = q_BTHD.shape
    num_keys, groups = k_BTGD.shape[1:3]
    dtype = torch.promote_types(q_BTHD.dtype, torch.float32)
    # R = H / G query heads for each key head.
    q_BGRTD = q_BTHD.to(dtype).unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4)
    k_BGDT = k_BTGD.to(dtype).permute(0, 2, 3, 1)
    row = torch.arange(rows, device=q_BTHD.device)[:, None, None]
    query = torch.arange(length, device=q_BTHD.device)[:, None]
    key = torch.arange(num_keys, device=q_BTHD.device)
    largest_H = torch.full((num_heads,), float("-inf"), device=q_BTHD.device)
    # Queries at a time.
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
