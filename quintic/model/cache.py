"""The key/value cache for generation: keys and values of each layer, with one document per row.

Shapes: B rows, T new positions, C width, H query heads, G key/value heads, D head dimension.

Rows may have different lengths. Prompts are padded at their end and read in one forward pass; `KVCache.rewind` then
drops the padding, and each row continues after its own last token. The cache ignores document boundaries, because
generation continues a single document.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["KVCache", "LayerCache"]


class _Positions:
    """The cache positions of the tokens of the current forward pass, common to all layers."""

    def __init__(self, rows: int, capacity: int, device: torch.device) -> None:
        self.capacity = capacity
        self.lengths = [0] * rows
        self.starts = [0] * rows
        self.rows = torch.arange(rows, device=device).unsqueeze(1)  # (B, 1)
        self.positions = torch.empty((rows, 0), dtype=torch.int64, device=device)  # (B, T)
        self._visible: dict[int, tuple[int, int, Tensor]] = {}

    def advance(self, new: int) -> None:
        """Add `new` positions to each row."""
        if max(self.lengths) + new > self.capacity:
            raise ValueError(f"{max(self.lengths)} + {new} tokens do not fit into a cache of {self.capacity} positions")
        device = self.rows.device
        self.starts = list(self.lengths)
        self.positions = torch.tensor(self.starts, device=device).unsqueeze(1) + torch.arange(new, device=device)
        self.lengths = [length + new for length in self.lengths]
        self._visible.clear()

    def visible(self, window: int) -> tuple[int, int, Tensor]:
        """Return (first, end, mask): the positions that any query sees, and a (B, 1, T, end - first) bool mask."""
        if window not in self._visible:
            # The earliest position that the first query of the shortest row sees, to the end of the longest row.
            first, end = max(0, min(self.starts) - window + 1), max(self.lengths)
            distance = self.positions.unsqueeze(2) - torch.arange(first, end, device=self.rows.device)
            self._visible[window] = first, end, ((distance >= 0) & (distance < window)).unsqueeze(1)
        return self._visible[window]


class LayerCache:
    """Keys and values of one layer: (B, G, capacity, D) each, allocated at construction."""

    def __init__(self, positions: _Positions, num_kv_heads: int, head_dim: int, *, dtype: torch.dtype) -> None:
        self._positions = positions
        shape = (len(positions.rows), num_kv_heads, positions.capacity, head_dim)
        # Zeros, because a masked position has weight 0, but 0 times uninitialised memory may be NaN.
        self.keys = torch.zeros(shape, dtype=dtype, device=positions.rows.device)
        self.values = torch.zeros_like(self.keys)

    def attend(self, q_BTHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, window: int) -> Tensor:
        """Store T new keys and values per row and return the attention of the T queries, (B, T, H, D)."""
        current = self._positions
        # Index tensors (B, 1) and (B, T) around a slice: the assigned values are (B, T, G, D).
        self.keys[current.rows, :, current.positions] = k_BTGD
        self.values[current.rows, :, current.positions] = v_BTGD
        first, end, visible = current.visible(window)
        # Only the positions that some query of the batch may see: (B, G, end - first, D).
        out_BHTD = F.scaled_dot_product_attention(
            q_BTHD.transpose(1, 2),
            self.keys[:, :, first:end],
            self.values[:, :, first:end],
            attn_mask=visible,
            enable_gqa=q_BTHD.shape[2] != k_BTGD.shape[2],
        )
        return out_BHTD.transpose(1, 2)


class KVCache:
    """The caches of all layers, and the last embeddings, which smear mixes into the next tokens.

    Args:
        num_layers: number of layers.
        rows: number of documents.
        capacity: largest number of positions of a row.
        num_kv_heads: key/value heads of a layer.
        head_dim: channels of a head.
        dtype: dtype of keys and values.
        device: device of keys and values.
    """

    def __init__(
        self,
        num_layers: int,
        rows: int,
        capacity: int,
        *,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._positions = _Positions(rows, capacity, device)
        self._embeddings_BTC: Tensor | None = None
        self.layers = [LayerCache(self._positions, num_kv_heads, head_dim, dtype=dtype) for _ in range(num_layers)]
        self.last_embedding: Tensor | None = None
        """(B, 1, C) embedding of each row's last token, before smear; None before the first token."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of filled positions of each row."""
        return tuple(self._positions.lengths)

    def advance(self, new: int) -> Tensor:
        """Add `new` positions to each row and return them, (B, new) int64.

        Raises:
            ValueError: the capacity is too small.
        """
        self._positions.advance(new)
        return self._positions.positions

    def remember(self, embeddings_BTC: Tensor) -> None:
        """Keep the embeddings of this forward pass for `rewind`, and each row's last one for smear."""
        self._embeddings_BTC = embeddings_BTC
        self.last_embedding = embeddings_BTC[:, -1:]

    def rewind(self, lengths: Sequence[int]) -> None:
        """Keep only the first `lengths[b]` positions of row b, at least one of them from the last forward pass.

        Raises:
            ValueError: a length exceeds the row, or drops positions of an earlier forward pass.
        """
        current = self._positions
        for length, start, end in zip(lengths, current.starts, current.lengths, strict=True):
            if not start < length <= end:
                raise ValueError(f"lengths={list(lengths)}: a row of {end} positions can keep {start + 1} to {end}")
        assert self._embeddings_BTC is not None
        # The last kept token's index within the last forward pass, for each row.
        last = [length - start - 1 for length, start in zip(lengths, current.starts, strict=True)]
        rows = current.rows.squeeze(1)
        self.last_embedding = self._embeddings_BTC[rows, torch.tensor(last, device=rows.device)].unsqueeze(1)
        current.lengths = list(lengths)
