"""The large lookup layer (L3): a table of embeddings per token, read with attention by the hidden state.

Tseng and De Sa, L3: Large Lookup Layers (2026), https://arxiv.org/abs/2601.21461. For a hidden state x with token t,
whose rows of the tables of keys and values are K_t and V_t:

    L3(x, t) = W_mix [norm(W_up (V_t^T softmax(K_t x))); x] + x

The token alone decides which rows are read, so there is nothing to route or to balance. As in the paper, what was
looked up stands before x in the product with W_mix, and the sum with x makes it a layer of its own between two blocks.
One thing differs: like every layer of this model it reads the residual stream through its normalisation, so x is
rms_norm(x) inside of the products, and itself in the sum.
"""

import torch
from torch import Tensor, nn

from quintic.kernels.lookup.lookup import LookupPlan, lookup
from quintic.model.layers import Linear, rms_norm

__all__ = ["LookupLayer"]


class LookupLayer(nn.Module):
    """One lookup layer. Which rows belong to which token is given with the input: it is the same for all layers.

    Args:
        width: channels of the residual stream, of keys and of values.
        rows: of the tables.
        d_up: channels between the read and the mixing product.
        tied: the values are the keys (the paper finds no loss of quality), which halves the tables.
    """

    def __init__(self, width: int, rows: int, d_up: int, *, tied: bool) -> None:
        super().__init__()
        self.keys = nn.Parameter(torch.empty(rows, width))
        self.values = None if tied else nn.Parameter(torch.empty(rows, width))
        self.up = Linear(width, d_up)
        self.mix = Linear(d_up + width, width)

    def tables(self) -> list[nn.Parameter]:
        """Return the tables: the keys and, where they are others, the values."""
        return [self.keys] if self.values is None else [self.keys, self.values]

    def forward(self, x_BTC: Tensor, offsets: Tensor, plan: LookupPlan) -> Tensor:
        """Return the residual stream after this layer, (B, T, C).

        Args:
            x_BTC: the residual stream.
            offsets: (vocabulary + 1,) int32: where each token's rows begin, and their number.
            plan: from `plan_lookup`, for the tokens of these positions.
        """
        read_BTC = rms_norm(x_BTC)
        raised_BTU = rms_norm(self.up(lookup(read_BTC, self.keys, self.values, offsets, plan)))
        out_BTC: Tensor = x_BTC + self.mix(torch.cat([raised_BTU, read_BTC], dim=-1))
        return out_BTC
