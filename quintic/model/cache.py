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

__all__ = ["KVCache"]


class KVCache:
    """Keys and values of all layers, and the last embeddings, which smear mixes into the next tokens.

    Args:
        shape: (layers, B, G, capacity, D) of the keys, and of the values.
        dtype: dtype of keys and values.
        device: device of keys and values.
    """

    def __init__(self, shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> None:
        # Zeros, because a masked position has weight 0, but 0 times uninitialised memory may be NaN.
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        rows = shape[1]
        self.lengths = [0] * rows
        """Number of filled positions of each row."""
        self.last_embedding: Tensor | None = None
        """(B, 1, C) embedding of each row's last token, before smear; None before the first token."""
        # For the current forward pass: lengths before it, positions of its tokens (B, T), embeddings (B, T, C), and by
        # window what `attend` sees, which layers share.
        self._starts = self.lengths
        self._rows = torch.arange(rows, device=device)
        self._positions = torch.empty((rows, 0), dtype=torch.int64, device=device)
        self._embeddings: Tensor | None = None
        self._visible: dict[int, tuple[int, int, Tensor]] = {}

    def advance(self, new: int) -> Tensor:
        """Add `new` positions to each row and return them, (B, new) int64.

        Raises:
            ValueError: the capacity is too small.
        """
        capacity, device = self.keys.shape[3], self.keys.device
        if max(self.lengths) + new > capacity:
            raise ValueError(f"{max(self.lengths)} + {new} tokens do not fit into a cache of {capacity} positions")
        self._starts = self.lengths
        self._positions = torch.tensor(self._starts, device=device).unsqueeze(1) + torch.arange(new, device=device)
        self.lengths = [length + new for length in self.lengths]
        self._visible = {}
        return self._positions

    def attend(self, layer: int, q_BTHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, window: int) -> Tensor:
        """Store a layer's T new keys and values per row and return the attention of the T queries, (B, T, H, D)."""
        # Index tensors (B, 1) and (B, T) around a slice: the assigned values are (B, T, G, D).
        self.keys[layer][self._rows.unsqueeze(1), :, self._positions] = k_BTGD
        self.values[layer][self._rows.unsqueeze(1), :, self._positions] = v_BTGD
        if window not in self._visible:
            # Only the positions that some query of the batch may see: from the earliest one that the first query of the
            # shortest row sees, to the end of the longest row.
            first, end = max(0, min(self._starts) - window + 1), max(self.lengths)
            distance = self._positions.unsqueeze(2) - torch.arange(first, end, device=self.keys.device)
            self._visible[window] = first, end, ((distance >= 0) & (distance < window)).unsqueeze(1)
        first, end, visible_B1TS = self._visible[window]
        out_BHTD = F.scaled_dot_product_attention(
            q_BTHD.transpose(1, 2),
            self.keys[layer, :, :, first:end],
            self.values[layer, :, :, first:end],
            attn_mask=visible_B1TS,
            enable_gqa=q_BTHD.shape[2] != k_BTGD.shape[2],
        )
        return out_BHTD.transpose(1, 2)

    def remember(self, embeddings_BTC: Tensor) -> None:
        """Keep the embeddings of this forward pass for `rewind`, and each row's last one for smear."""
        self._embeddings = embeddings_BTC
        self.last_embedding = embeddings_BTC[:, -1:]

    def rewind(self, lengths: Sequence[int]) -> None:
        """Keep only the first `lengths[b]` positions of row b, at least one of them from the last forward pass.

        Raises:
            ValueError: a length exceeds the row, or drops positions of an earlier forward pass.
        """
        for length, start, end in zip(lengths, self._starts, self.lengths, strict=True):
            if not start < length <= end:
                raise ValueError(f"lengths={list(lengths)}: a row of {end} positions can keep {start + 1} to {end}")
        assert self._embeddings is not None
        # The last kept token's index within the last forward pass, for each row.
        last = [length - start - 1 for length, start in zip(lengths, self._starts, strict=True)]
        self.last_embedding = self._embeddings[self._rows, torch.tensor(last, device=self.keys.device)].unsqueeze(1)
        self.lengths = list(lengths)
