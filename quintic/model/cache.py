"""The key/value cache of generation: keys and values of each layer, one document per row.

Rows need not be equally long. Prompts are padded at their end and read in one pass; `KVCache.rewind` then forgets the
padding, and each row goes on behind its own last token. The cache knows no document boundaries, because generation
continues a single document.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["KVCache", "LayerCache"]


class _Places:
    """The cache positions of the current forward pass's tokens, the same for all layers."""

    def __init__(self, rows: int, capacity: int, device: torch.device) -> None:
        self.capacity = capacity
        self.lengths = [0] * rows
        self.starts = [0] * rows
        self.rows = torch.arange(rows, device=device).unsqueeze(1)
        self.positions = torch.empty((rows, 0), dtype=torch.int64, device=device)
        self._visible: dict[int, tuple[int, int, Tensor]] = {}

    def advance(self, new: int) -> None:
        """Give each row `new` more positions."""
        if max(self.lengths) + new > self.capacity:
            raise ValueError(f"{max(self.lengths)} + {new} tokens: this cache has room for {self.capacity}")
        device = self.rows.device
        self.starts = list(self.lengths)
        self.positions = torch.tensor(self.starts, device=device).unsqueeze(1) + torch.arange(new, device=device)
        self.lengths = [length + new for length in self.lengths]
        self._visible.clear()

    def visible(self, window: int) -> tuple[int, int, Tensor]:
        """Return the range of positions that matter, and their mask for each query, (B, 1, T, end - first)."""
        if window not in self._visible:
            first, end = max(0, min(self.starts) - window + 1), max(self.lengths)
            distance = self.positions.unsqueeze(2) - torch.arange(first, end, device=self.rows.device)
            self._visible[window] = first, end, ((distance >= 0) & (distance < window)).unsqueeze(1)
        return self._visible[window]


class LayerCache:
    """Keys and values of one layer; room for all positions is taken at once."""

    def __init__(self, places: _Places, num_kv_heads: int, head_dim: int, *, dtype: torch.dtype) -> None:
        self._places = places
        shape = (len(places.rows), num_kv_heads, places.capacity, head_dim)
        # Zeros: masked positions have weight zero, but zero times what was left in memory may not be a number.
        self.keys = torch.zeros(shape, dtype=dtype, device=places.rows.device)
        self.values = torch.zeros_like(self.keys)

    def attend(self, q_BTHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, window: int) -> Tensor:
        """Add T positions to each row and return attention of their queries over the last `window`, (B, T, H, D)."""
        places = self._places
        self.keys[places.rows, :, places.positions] = k_BTGD
        self.values[places.rows, :, places.positions] = v_BTGD
        first, end, visible = places.visible(window)
        out_BHTD = F.scaled_dot_product_attention(
            q_BTHD.transpose(1, 2),
            self.keys[:, :, first:end],
            self.values[:, :, first:end],
            attn_mask=visible,
            enable_gqa=q_BTHD.shape[2] != k_BTGD.shape[2],
        )
        return out_BHTD.transpose(1, 2)


class KVCache:
    """The caches of all layers, and the embeddings that smear mixes into the tokens after them.

    Args:
        num_layers: layers of the model.
        rows: documents.
        capacity: most positions of a row.
        num_kv_heads: key/value heads of a layer.
        head_dim: channels of a head.
        dtype: of keys and values.
        device: where they are.
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
        self._places = _Places(rows, capacity, device)
        self._embeddings_BTC: Tensor | None = None
        self.layers = [LayerCache(self._places, num_kv_heads, head_dim, dtype=dtype) for _ in range(num_layers)]
        self.last_embedding: Tensor | None = None
        """(B, 1, C) of each row's last token, before smear; None before the first token."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of positions of each row that are filled."""
        return tuple(self._places.lengths)

    def advance(self, new: int) -> Tensor:
        """Make room for `new` tokens behind the last of each row and return their positions, (B, new) int64.

        Raises:
            ValueError: they do not fit.
        """
        self._places.advance(new)
        return self._places.positions

    def remember(self, embeddings_BTC: Tensor) -> None:
        """Keep the embeddings of the tokens of this forward pass."""
        self._embeddings_BTC = embeddings_BTC
        self.last_embedding = embeddings_BTC[:, -1:]

    def rewind(self, lengths: Sequence[int]) -> None:
        """Forget all but the first `lengths[b]` positions of row b, which end among those of the last forward pass.

        Raises:
            ValueError: they end before it, or there are not so many.
        """
        places = self._places
        for length, start, end in zip(lengths, places.starts, places.lengths, strict=True):
            if not start < length <= end:
                raise ValueError(f"lengths={list(lengths)}: a row with {end} positions keeps {start + 1} to {end}")
        assert self._embeddings_BTC is not None
        last = [length - start - 1 for length, start in zip(lengths, places.starts, strict=True)]
        rows = places.rows.squeeze(1)
        self.last_embedding = self._embeddings_BTC[rows, torch.tensor(last, device=rows.device)].unsqueeze(1)
        places.lengths = list(lengths)
