"""The key/value cache for generation: keys and values of each layer, for one document.

Shapes: T new positions, S positions that one of them sees, H query heads, G key/value heads, D head dimension.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["KVCache"]


class KVCache:
    """Keys and values of all layers, and the last embedding, which smear mixes into the next token.

    Args:
        shape: (layers, 1, G, capacity, D) of the keys, and of the values.
        dtype: dtype of keys and values.
        device: device of keys and values.
    """

    def __init__(self, shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> None:
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty_like(self.keys)
        self.length = 0
        """Number of filled positions, including the current forward pass."""
        self.last_embedding: Tensor | None = None
        """(1, 1, C) embedding of the last token, before smear; None before the first token."""

    def advance(self, new: int) -> slice:
        """Add `new` positions and return them.

        Raises:
            ValueError: the capacity is too small.
        """
        capacity = self.keys.shape[3]
        if self.length + new > capacity:
            raise ValueError(f"{self.length} + {new} tokens do not fit into a cache of {capacity} positions")
        self.length += new
        return slice(self.length - new, self.length)

    def attend(self, layer: int, q_1THD: Tensor, k_1TGD: Tensor, v_1TGD: Tensor, window: int) -> Tensor:
        """Store a layer's T new keys and values and return the attention of the T queries, (1, T, H, D)."""
        begin, end = self.length - q_1THD.shape[1], self.length
        self.keys[layer, :, :, begin:end] = k_1TGD.transpose(1, 2)
        self.values[layer, :, :, begin:end] = v_1TGD.transpose(1, 2)
        first = max(0, begin - window + 1)  # the earliest position that the first query sees
        positions = torch.arange(first, end, device=self.keys.device)
        distance_TS = positions[begin - first :, None] - positions
        out_1HTD = F.scaled_dot_product_attention(
            q_1THD.transpose(1, 2),
            self.keys[layer, :, :, first:end],
            self.values[layer, :, :, first:end],
            attn_mask=(distance_TS >= 0) & (distance_TS < window),
            enable_gqa=q_1THD.shape[2] != k_1TGD.shape[2],
        )
        return out_1HTD.transpose(1, 2)
