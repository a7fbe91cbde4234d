"""The layers of the speedrun's model: rotary positions, attention in its variants, blocks, coefficients per token.

Blocks own no weights: the model keeps them in banks, one tensor for all layers, and hands each block its slices.
Shape suffixes: T tokens of a row, N positions of attention (T, or 2T with paired heads), C width, H heads, D head
dimension.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quintic.kernels.attention.attention import DocumentMask, attention
from quintic.kernels.linear.linear import mlp_relu2
from quintic.model.layers import rms_norm
from quintic.model.speedrun_sizes import LayerPlan, Starts

__all__ = [
    "COEFFICIENT_SCALE",
    "BlockWeights",
    "FlatRow",
    "Mix",
    "Rotary",
    "SpeedrunBlock",
    "TokenCoefficients",
    "compose_heads",
    "previous",
    "rotate_half",
]

# Factor on what `TokenCoefficients` compute, so that Adam's steps are small against them.
COEFFICIENT_SCALE = 0.1


class Rotary(nn.Module):
    """Windows, and the rotary positions that follow them: half of the channels rotate, by YaRN's frequencies.

    Args:
        head_dim: channels of a head, a multiple of 4.
        base: the slowest channel turns by 1 / base per position, the fastest by 1 (radians).
        yarn: whether frequencies follow growing windows.
    """

    frequencies: Tensor
    """(head_dim / 4,) float64 radians per position."""
    query_scale: Tensor
    """() float64 factor of the products of queries and keys."""

    def __init__(self, head_dim: int, base: float, *, yarn: bool) -> None:
        super().__init__()
        self.base, self.yarn = base, yarn
        self.windows: tuple[int, int] | None = None
        """(short, long): tokens before its own that a query sees; None before `set_windows`."""
        self._tables: tuple[Tensor, Tensor] | None = None
        self.register_buffer("frequencies", torch.empty(head_dim // 4, dtype=torch.float64))
        self.register_buffer("query_scale", torch.empty((), dtype=torch.float64))

    @torch.no_grad()
    def reset(self) -> None:
        """Go back to the frequencies of the start; the next `set_windows` is a first one."""
        self.frequencies.copy_(self.base ** -torch.linspace(0, 1, len(self.frequencies), dtype=torch.float64))
        self.query_scale.fill_(0.1)
        self.windows = self._tables = None

    @torch.no_grad()
    def set_windows(self, short: int, long: int, *, stretch: bool) -> None:
        """See `SpeedrunGPT.set_windows`."""
        if min(short, long) < 1:
            raise ValueError(f"set_windows({short}, {long}): a query sees at least 1 token before its own")
        if self.windows is not None and self.windows[1] != long and stretch and self.yarn:
            # YaRN (arXiv 2309.00071, section 3.2): channels that turn less than once within the old window slow down
            # in proportion, those that turn more than 32 times stay.
            ratio = self.windows[1] / long
            kept = ((self.windows[1] * self.frequencies / (2 * torch.pi) - 1) / (32 - 1)).clamp(0, 1)
            self.frequencies.mul_(ratio + kept * (1 - ratio))
            self.query_scale.mul_(1 - 0.2 * math.log(ratio))
        self.windows, self._tables = (short, long), None

    def tables(self, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of the positions, (length, head_dim / 4) each, kept until windows change."""
        if self._tables is None or len(self._tables[0]) < length or self._tables[0].dtype != dtype:
            positions = torch.arange(length, dtype=torch.float64, device=self.frequencies.device)
            angles = torch.outer(positions, self.frequencies)
            self._tables = angles.cos().to(dtype), angles.sin().to(dtype)
        cos, sin = self._tables
        return cos[:length], sin[:length]

    def get_extra_state(self) -> Tensor:
        """Return the windows for a state dict; 0 for none yet."""
        return torch.tensor(self.windows or (0, 0))

    def set_extra_state(self, state: Tensor) -> None:
        """Restore what `get_extra_state` returned."""
        short, long = state.tolist()
        self.windows, self._tables = ((short, long) if long else None), None


def rotate_half(x_NHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate channel i against channel i + D/4 for i < D/4, by (N, D/4) angles; the last D/2 channels stay."""
    quarter = x_NHD.shape[-1] // 4
    first, second, rest = x_NHD.split([quarter, quarter, 2 * quarter], dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def previous(x: Tensor) -> Tensor:
    """Return each token's predecessor along the first dimension; the first token is its own."""
    return torch.cat([x[:1], x[:-1]])


class TokenCoefficients(nn.Module):
    """A few named numbers for each token, from a small MLP: scale * (down(gelu(up(x))) + bias).

    They gate attention, skips and injections, and mix streams (MUDDFormer, Xiao et al., arXiv 2502.12170). While `down`
    is zero, as initialised, each has the value given in `starts`.

    Args:
        width: channels of x.
        hidden: channels of the MLP; 0 for learned numbers that are the same for all tokens.
        starts: the numbers.
    """

    def __init__(self, width: int, hidden: int, starts: Starts) -> None:
        super().__init__()
        self.starts = starts
        count = sum(size for size, _ in starts.values())
        self.up = nn.Parameter(torch.empty(hidden, width)) if hidden else None
        self.down = nn.Parameter(torch.empty(count, hidden)) if hidden else None
        self.bias = nn.Parameter(torch.empty(count))

    def initial_bias(self) -> Tensor:
        """Return the bias, (count,), with which the coefficients start as they should."""
        return torch.cat([torch.full((size,), start / COEFFICIENT_SCALE) for size, start in self.starts.values()])

    def forward(self, x_TC: Tensor, scale: Tensor | float) -> dict[str, Tensor]:
        """Return name -> (T, size) in the dtype of `x_TC`."""
        values = self.bias.expand(x_TC.shape[0], -1)
        if self.up is not None and self.down is not None:
            values = F.linear(F.gelu(F.linear(x_TC, self.up)), self.down) + values
        values = values * (scale.to(x_TC.dtype) if isinstance(scale, Tensor) else scale)
        sizes = [size for size, _ in self.starts.values()]
        return dict(zip(self.starts, values.split(sizes, dim=-1), strict=True))


class FlatRow(NamedTuple):
    """What the layers share about one row of tokens."""

    starts: Tensor  # (T, 1) bool: where documents start
    cos: Tensor  # (2T, D / 4) of the rotary angles
    sin: Tensor
    query_scale: Tensor  # () factor of the products of queries and keys
    mask: DocumentMask
    paired_mask: DocumentMask  # of the 2T positions that paired heads have
    windows: tuple[int, ...]  # short, long: positions that a query sees, itself included


class Mix(NamedTuple):
    """Scales with which a sublayer's output joins the stream; None for none."""

    residual: Tensor | None = None
    output: Tensor | None = None

    def join(self, x_TC: Tensor, out_TC: Tensor) -> Tensor:
        """Return residual * stream + output * what the sublayer computed."""
        if self.residual is None or self.output is None:
            return x_TC + out_TC
        return self.residual.to(x_TC.dtype) * x_TC + self.output.to(x_TC.dtype) * out_TC


class BlockWeights(NamedTuple):
    """One layer's slices of the banks; None for what it does not have."""

    up: Tensor  # (4C, C)
    down: Tensor  # (4C, C), transposed
    mixes: tuple[Mix, Mix]  # of attention and of the MLP
    attention: tuple[Tensor, Tensor, Tensor] | None = None  # (2C, C) queries and keys, (C, C) values, (C, C) outputs
    projection_scales: Tensor | None = None  # (2,) factors of values and outputs
    value_gate: Tensor | None = None  # (H, 2 x channels)
    skip_scale: Tensor | None = None  # (1,): the skip's gate is multiplied by its sigmoid


# Tokens that composition looks at, the query's own included, and queries that are computed together.
_COMPOSED_WINDOW, _COMPOSED_BLOCK = 112, 128


def compose_heads(q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, weights_TH: Tensor, documents_T: Tensor) -> Tensor:
    """Return what each head reads with the attention of all heads, mixed by (T, H) weights of unit RMS: (T, H, D).

    Causal, within documents and the last 112 tokens. The speedrun's part of dynamically composable attention (Xiao et
    al., arXiv 2405.08553): attention of the heads is mixed after its softmax, in blocks of queries with two of keys.
    """
    length, num_heads, head_dim = q_THD.shape
    block, behind = _COMPOSED_BLOCK, -length % _COMPOSED_BLOCK

    def blocks(x: Tensor, *, pairs: bool, fill: int = 0) -> Tensor:
        """Return (blocks, queries or keys, ...); with `pairs` each block follows the one before it."""
        padding = (0, 0) * (x.ndim - 1)
        x = F.pad(x, (*padding, 0, behind), value=fill).unflatten(0, (-1, block))
        return torch.cat([F.pad(x[:-1], (*padding, 0, 0, 1, 0), value=-1), x], dim=1) if pairs else x

    documents = documents_T.unsqueeze(1)
    query = torch.arange(block, 2 * block, device=q_THD.device).unsqueeze(1)
    distance = query - torch.arange(2 * block, device=q_THD.device)
    visible = (distance >= 0) & (distance < _COMPOSED_WINDOW)
    # Padding is a document of its own, so that every query sees something.
    same = blocks(documents, pairs=False, fill=-2) == blocks(documents, pairs=True, fill=-2).mT
    keys, values = blocks(k_THD, pairs=True).transpose(1, 2), blocks(v_THD, pairs=True).flatten(2)
    scores = blocks(q_THD, pairs=False).transpose(1, 2) @ keys.mT * head_dim**-0.5  # (blocks, H, queries, keys)
    shares = scores.masked_fill(~(same & visible).unsqueeze(1), float("-inf")).softmax(-1)
    mixing = blocks(rms_norm(weights_TH), pairs=False).mT.unsqueeze(-1)
    seen_TC: Tensor = ((mixing * shares).sum(1) @ values).flatten(0, 1)[:length]
    return seen_TC.view(length, num_heads, head_dim)


class SpeedrunBlock(nn.Module):
    """One layer: attention, unless it has none, and a squared-ReLU MLP (Primer, arXiv 2109.08668)."""

    def __init__(self, plan: LayerPlan, num_heads: int) -> None:
        super().__init__()
        self.plan, self.num_heads = plan, num_heads

    def forward(
        self,
        x_TC: Tensor,
        row: FlatRow,
        weights: BlockWeights,
        window: int,
        gates: dict[str, Tensor],
        injected: dict[str, Tensor],
        *,
        read_TC: Tensor | None = None,
        value_TC: Tensor | None = None,
        skipped_TC: Tensor | None = None,
        dense_value_TC: Tensor | None = None,
    ) -> Tensor:
        """Return the residual stream after this layer, (T, C).

        Args:
            x_TC: the stream.
            row: of these tokens.
            weights: of this layer.
            window: positions that a query sees, itself included.
            gates: of the layer by kind, (T, H) or, for the skip and for what is injected, (T, 1).
            injected: name -> (T, C) that is added after attention, times the gate of that name.
            read_TC: the stream that attention reads; None for `x_TC`.
            value_TC: value embeddings of the tokens.
            skipped_TC: the stream that the skip brings.
            dense_value_TC: what dense connections add to the values.
        """
        if skipped_TC is not None and weights.skip_scale is not None:
            x_TC = x_TC + torch.sigmoid(weights.skip_scale).to(x_TC.dtype) * gates["skip"] * skipped_TC
        if self.plan.attends:
            read_TC = rms_norm(x_TC if read_TC is None else read_TC)
            if value_TC is not None:
                gate_TH = gates["value"] if weights.value_gate is None else _value_gate(read_TC, value_TC, weights)
                value_TC = (gate_TH.unsqueeze(-1) * value_TC.unflatten(-1, (self.num_heads, -1))).flatten(1)
            if dense_value_TC is not None:
                value_TC = dense_value_TC if value_TC is None else value_TC + dense_value_TC
            x_TC = weights.mixes[0].join(x_TC, self._attend(read_TC, row, weights, window, gates, value_TC))
            for name, added_TC in injected.items():
                x_TC = x_TC + gates[name] * added_TC
        return weights.mixes[1].join(x_TC, mlp_relu2(rms_norm(x_TC), weights.up, weights.down.mT))

    def _attend(
        self,
        read_TC: Tensor,
        row: FlatRow,
        weights: BlockWeights,
        window: int,
        gates: dict[str, Tensor],
        value_TC: Tensor | None,
    ) -> Tensor:
        """Return what attention writes, (T, C)."""
        plan, length, num_heads = self.plan, read_TC.shape[0], self.num_heads
        assert weights.attention is not None
        query_key, value_weight, out_weight = weights.attention
        if weights.projection_scales is not None:
            value_scale, out_scale = weights.projection_scales.to(read_TC.dtype).unbind()
            value_weight, out_weight = value_scale * value_weight, out_scale * out_weight
        projected = F.linear(read_TC, torch.cat([query_key, value_weight]))
        q_THD, k_THD, v_THD = projected.unflatten(-1, (3, num_heads, -1)).unbind(1)
        if value_TC is not None:
            v_THD = v_THD + value_TC.view(v_THD.shape)
        # Paired heads: heads h and h + H/2 are one, with the even and the odd positions of a row twice as long.
        copies, mask = (2, row.paired_mask) if plan.paired else (1, row.mask)
        q_NHD, k_NHD, v_NHD = (
            x.reshape(copies * length, num_heads // copies, -1) for x in (rms_norm(q_THD), rms_norm(k_THD), v_THD)
        )
        cos, sin = row.cos[: copies * length], row.sin[: copies * length]
        sharpness = row.query_scale * q_NHD.shape[-1] ** 0.5  # `attention` divides by sqrt(D)
        q_NHD = rotate_half(q_NHD * sharpness.to(q_NHD.dtype), cos, sin)
        k_NHD = rotate_half(k_NHD, cos, sin)
        if plan.key_offset:
            rotating, still = k_NHD.chunk(2, dim=-1)
            still = torch.where(row.starts.unsqueeze(-1), still, previous(still))
            k_NHD = torch.cat([rotating, still], dim=-1)
        out_THD = attention(q_NHD[None], k_NHD[None], v_NHD[None], mask, window).reshape(v_THD.shape)
        if plan.composed:
            assert mask.documents is not None
            seen_THD = compose_heads(q_NHD, k_NHD, v_NHD, gates["compose_in"], mask.documents[0])
            out_THD = out_THD + gates["compose_out"].unsqueeze(-1) * seen_THD
        if plan.exclusive:
            along = (out_THD * v_THD).sum(-1, keepdim=True) / v_THD.square().sum(-1, keepdim=True).clamp_min(1e-8)
            out_THD = out_THD - torch.tanh(gates["exclusive"]).unsqueeze(-1) * along * v_THD
        if plan.gated:
            out_THD = out_THD * gates["attention"].unsqueeze(-1)
        return F.linear(out_THD.flatten(1), out_weight)


def _value_gate(read_TC: Tensor, value_TC: Tensor, weights: BlockWeights) -> Tensor:
    """Return the gates of a value embedding, (T, H), from a few channels of what attention reads and of itself."""
    assert weights.value_gate is not None
    channels = weights.value_gate.shape[1] // 2
    seen = torch.cat([read_TC[:, :channels], value_TC[:, :channels]], dim=-1)
    return 2 * torch.sigmoid(F.linear(seen, weights.value_gate))  # 1 for a gate that has learned nothing
