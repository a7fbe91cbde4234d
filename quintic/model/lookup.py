"""The large lookup layer (L3): each token has rows of embeddings, which its hidden state reads with attention.

Tseng and De Sa, L3: Large Lookup Layers (2026), https://arxiv.org/abs/2601.21461. For a hidden state x of token t, with
the token's rows K_t of the table of keys and V_t of the table of values:

    L3(x, t) = W_mix [norm(W_up (V_t^T softmax(K_t x))); x] + x

Only the token decides which rows are read, so no routing or load balancing is needed. The layer stands between two
blocks. One thing differs from the paper: like every layer of this model, it reads the normalised residual stream, so x
is rms_norm(x) in the products, and x itself in the sum.

Shape suffixes: B rows, T positions, C width, U channels of W_up's output.
"""

import torch
from torch import Tensor, nn

from quintic.kernels.lookup.lookup import LookupPlan, lookup
from quintic.model.functions import rms_norm
from quintic.model.layers import Linear

__all__ = ["LookupLayer"]


class LookupLayer(nn.Module):
    """One lookup layer. The assignment of rows to tokens is an argument of `forward`, because all layers share it.

    Args:
        width: channels of the residual stream, of keys and of values.
        rows: rows of each table.
        d_up: channels of W_up's output.
        tied: use the keys as values. This halves the tables; the paper finds no loss of quality.
    """

    def __init__(self, width: int, rows: int, d_up: int, *, tied: bool) -> None:
        super().__init__()
        self.keys = nn.Parameter(torch.empty(rows, width))
        self.values = None if tied else nn.Parameter(torch.empty(rows, width))
        self.up = Linear(width, d_up)
        self.mix = Linear(d_up + width, width)

    def tables(self) -> list[nn.Parameter]:
        """Return the tables, (rows, C) each: keys and, unless tied, values."""
        return [self.keys] if self.values is None else [self.keys, self.values]

    def forward(self, x_BTC: Tensor, offsets: Tensor, plan: LookupPlan) -> Tensor:
        """Return the residual stream after this layer, (B, T, C).

        Args:
            x_BTC: (B, T, C) residual stream.
            offsets: (vocab_size + 1,) int32: token t has the rows from offsets[t] to offsets[t + 1].
            plan: from `plan_lookup`, for the batch's tokens.
        """
        read_BTC = rms_norm(x_BTC)
        # norm(W_up (V_t^T softmax(K_t x))): the token's rows, read by its hidden state.
        raised_BTU = rms_norm(self.up(lookup(read_BTC, self.keys, self.values, offsets, plan)))
        out_BTC: Tensor = x_BTC + self.mix(torch.cat([raised_BTU, read_BTC], dim=-1))
        return out_BTC
