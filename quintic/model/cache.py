"""The key/value cache of generation: what each layer has seen of one document.

Positions of all rows are the same (a batch of equally long prompts); the cache holds no padding and no document
boundaries, because generation continues a single document.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["KVCache", "LayerCache"]


class LayerCache:
    """Keys and values of one layer; room for `capacity` positions is taken at once."""

    def __init__(
        self, rows: int, capacity: int, num_kv_heads: int, head_dim: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (rows, num_kv_heads, capacity, head_dim)
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self.length = 0

    def attend(self, q_BTHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, window: int) -> Tensor:
        """Add T new positions and return attention of their queries over the last `window` positions, (B, T, H, D)."""
        new = q_BTHD.shape[1]
        start, end = self.length, self.length + new
        self.keys[:, :, start:end] = k_BTGD.transpose(1, 2)
        self.values[:, :, start:end] = v_BTGD.transpose(1, 2)
        self.length = end
        first = max(0, start - window + 1)  # nothing before this is visible to any of the new queries
        query = torch.arange(start, end, device=q_BTHD.device)[:, None]
        key = torch.arange(first, end, device=q_BTHD.device)[None, :]
        visible = (key <= query) & (query - key < window)
        out_BHTD = F.scaled_dot_product_attention(
            q_BTHD.transpose(1, 2),
            self.keys[:, :, first:end],
            self.values[:, :, first:end],
            attn_mask=visible,
            enable_gqa=q_BTHD.shape[2] != k_BTGD.shape[2],
        )
        return out_BHTD.transpose(1, 2)


class KVCache:
    """The caches of all layers, and the last embedding, which smear mixes into the next token."""

    def __init__(self, layers: list[LayerCache], capacity: int) -> None:
        self.layers = layers
        self.capacity = capacity
        self.last_embedding: Tensor | None = None

    @property
    def length(self) -> int:
        """Return how many positions have been seen."""
        return self.layers[0].length
