"""FlexAttention for attention.py: the compiled function, a version that also returns row maxima, and block masks.

Shape suffixes: B rows, T positions, H query heads, G key/value heads, D head dimension.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quintic.versions import flex_returns_maxima

__all__ = [
    "block_mask_of",
    "flex_function",
    "flex_with_maxima",
    "returns_maxima",
    "shared_block_mask",
    "visibility",
]


def flex_with_maxima(
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    *,
    block_mask: Any,
    score_mod: Any = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return FlexAttention's output (B, H, T, D) and each query's largest logit (B, H, T), float32 without gradient."""
    flex = _flex_and_maxima if torch.compiler.is_compiling() else _compiled_flex_and_maxima()
    out_BHTD, maxima_BHT = flex(q_BHTD, k_BGTD, v_BGTD, block_mask, score_mod, scale)
    return out_BHTD, maxima_BHT.detach()


def flex_function() -> Callable[..., Any]:
    """Return `flex_attention`, compiled unless a surrounding function is being compiled."""
    from torch.nn.attention.flex_attention import flex_attention

    # Uncompiled it would write all scores to memory. A model that is being compiled includes it in its own graph.
    if torch.compiler.is_compiling():
        plain: Callable[..., Any] = flex_attention
        return plain
    return _compiled_flex_attention()


@functools.cache
def _compiled_flex_attention() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Callable[..., Any] = torch.compile(flex_attention)
    return compiled


# Compiled separately from `flex_attention`: PyTorch limits the number of variants that it compiles of one function.
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


def returns_maxima(q_BTHD: Tensor) -> bool:
    """Return whether FlexAttention can return maxima for these queries; on CPUs it cannot."""
    dtype_fits = q_BTHD.dtype in (torch.bfloat16, torch.float16, torch.float32)
    return q_BTHD.is_cuda and dtype_fits and q_BTHD.shape[3] >= 16 and flex_returns_maxima()


def visibility(document_BT: Tensor | None, window: int | None, causal: bool) -> Callable[..., Tensor]:
    """Return a mask function for FlexAttention: (row, head, query, key) -> whether the query sees the key."""

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        # Without a condition: true, but broadcast to the shape of queries and keys.
        result = (q >= k) if causal else (q >= 0) | (k >= 0)
        if window is not None:
            result = result & (q - k < window)
            if not causal:
                result = result & (k - q < window)
        if document_BT is not None:
            result = result & (document_BT[b, q] == document_BT[b, k])
        return result

    return visible


# Never compiled: when a model's evaluation graph included it, the mask was read out of bounds (torch 2.11 on an H200,
# 2026-11).
@torch.compiler.disable  # type: ignore[untyped-decorator]
def block_mask_of(document_BT: Tensor, window: int) -> Any:
    """Return the causal block mask for documents, numbered in (B, T), and a window."""
    from torch.nn.attention.flex_attention import create_block_mask

    rows, length = document_BT.shape
    mask_mod = visibility(document_BT, window, causal=True)
    return create_block_mask(mask_mod, rows, None, length, length, device=document_BT.device)


@torch.compiler.disable  # type: ignore[untyped-decorator]
@functools.lru_cache(maxsize=16)
def shared_block_mask(length: int, num_keys: int, window: int | None, causal: bool, device: torch.device) -> Any:
    """Return the block mask for a window without documents; it applies to all rows, and is cached."""
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(visibility(None, window, causal), None, None, length, num_keys, device=device)
