"""The layers of the speedrun's model: tables, rotary positions, coefficients per token, attention, residual sums.

Attention owns no weights: the model keeps them in banks, one tensor for all layers, and passes slices.
Shape suffixes: T tokens of a row, N positions of attention (T, or 2T with paired heads), C width, H heads, D head
dimension, K tables of value embeddings.
"""

import math
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quintic.kernels.attention.attention import DocumentMask, attention
from quintic.kernels.lookup.rows import embedding_into_grad
from quintic.model.layers import rms_norm, rotate
from quintic.model.speedrun_sizes import LayerPlan, SpeedrunConfig, Starts

__all__ = ["FlatRow", "InputTables", "Rotary", "TokenCoefficients", "attend", "joined"]

_SMEAR_CHANNELS = 12  # leading channels of an embedding that the smear gate reads


def document_begins(inputs: Tensor, bos_id: int) -> Tensor:
    """Return which tokens start a document, (T,) bool: the first one and each `bos_id`."""
    return (inputs == bos_id) | (torch.arange(len(inputs), device=inputs.device) == 0)


def previous(x: Tensor) -> Tensor:
    """Shift (T, ...) by one along T: each token gets its predecessor's entry, the first token keeps its own."""
    return torch.cat([x[:1], x[:-1]])


class FlatRow(NamedTuple):
    """The inputs of all layers for one row of tokens."""

    embedding: Tensor  # (T, C) embeddings, not normalised
    bigram: Tensor | None  # (T, C) bigram embeddings, without signs
    signs: Tensor | None  # (T,) int64 rows of the table of signs
    values: Tensor | None  # (K, T, C) value embeddings
    starts: Tensor  # (T, 1) bool: True where a document starts
    cos: Tensor  # (2T, D), as sin: `Rotary.tables`
    sin: Tensor
    query_scale: Tensor  # () factor of the products of queries and keys
    masks: tuple[DocumentMask, DocumentMask]  # for T positions, and for the 2T positions of paired heads
    # An empty tensor of shape (short, long, longest, 0): windows in positions, the query's own included, and tokens of
    # the longest document. They change during a run. Compiled code keeps sizes dynamic, but would bake in numbers.
    limits: Tensor


class InputTables(nn.Module):
    """The embedding tables of the model, and smear.

    The tables of value embeddings are stacked, (K x vocab_size, C). A hash assigns pairs of tokens to rows of
    `bigram_embedding`; another hash selects a vector of signs, which distinguishes pairs that share a row. `dtype` is
    the tables'.
    """

    bigram_signs: Tensor
    """(bigram_sign_rows, C), entries 1 and -1."""

    def __init__(self, config: SpeedrunConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.adds_to_gradients = False
        """If true, the backward pass accumulates into the tables' `grad` directly (`embedding_into_grad`)."""
        vocab, width = config.vocab_size, config.width
        self.embedding = nn.Parameter(torch.empty(vocab, width, dtype=dtype))
        if config.value_embeddings:
            self.value_embeddings = nn.Parameter(torch.empty(config.value_tables * vocab, width, dtype=dtype))
        if config.bigram_hash:
            self.bigram_embedding = nn.Parameter(torch.empty(config.bigram_rows, width, dtype=dtype))
            self.register_buffer("bigram_signs", torch.empty(config.bigram_sign_rows, width, dtype=dtype))
        if config.smear:
            self.smear_gate = nn.Parameter(torch.empty(1, min(_SMEAR_CHANNELS, width), dtype=dtype))
            self.smear_scale = nn.Parameter(torch.empty(1))

    def look_up(self, inputs: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor]:
        """Look (T,) tokens up and return the first fields of a `FlatRow`: embedding, bigram, signs, values, starts."""
        look_up, config = embedding_into_grad if self.adds_to_gradients else F.embedding, self.config
        bigram_TC = signs_T = values_KTC = None
        if config.bigram_hash:
            rows_T, signs_T = self.bigram_hashes(inputs)
            bigram_TC = look_up(rows_T, self.bigram_embedding)
        if config.value_embeddings:
            # One lookup in all K tables, so that there is one gradient. Table k begins at row k x vocab_size.
            first = torch.arange(0, len(self.value_embeddings), config.vocab_size, device=inputs.device)
            values_KTC = look_up(first.unsqueeze(1) + inputs, self.value_embeddings)
        starts_T1 = document_begins(inputs, config.bos_id).unsqueeze(1)
        return look_up(inputs, self.embedding), bigram_TC, signs_T, values_KTC, starts_T1

    def forward(self, row: FlatRow) -> tuple[Tensor, Tensor | None]:
        """Return (T, C) normalised embeddings after smear, and (T, C) bigram embeddings times their signs or None."""
        x_TC, bigram_TC = row.embedding, row.bigram
        if self.config.smear:
            gate_T1 = torch.sigmoid(F.linear(x_TC[:, : self.smear_gate.shape[1]], self.smear_gate))
            x_TC = x_TC + self.smear_scale.to(x_TC.dtype) * gate_T1.masked_fill(row.starts, 0) * previous(x_TC)
        if bigram_TC is not None and row.signs is not None:
            bigram_TC = bigram_TC * F.embedding(row.signs, self.bigram_signs)
        return rms_norm(x_TC), bigram_TC

    def bigram_hashes(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return for (T,) tokens their rows of the bigram embedding and of the signs, (T,) int64 each.

        Tokens that start a document get the embedding's last row and the first row of signs.
        """
        before, begins = previous(inputs), document_begins(inputs, self.config.bos_id)
        last_row = self.config.bigram_rows - 1
        rows = ((36313 * inputs) ^ (27191 * before)) % last_row
        signs = (inputs ^ before) % self.config.bigram_sign_rows
        return rows.masked_fill(begins, last_row), signs.masked_fill(begins, 0)


class Rotary(nn.Module):
    """Attention windows, and rotary positions with frequencies adapted to the windows (YaRN).

    Half of a head's channels rotate, D/4 pairs; the other half has no position.

    Args:
        head_dim: channels of a head, a multiple of 4.
        base: the fastest pair rotates by 1 radian per position, the slowest by 1 / base.
        yarn: adapt frequencies and `query_scale` when the long window changes.
    """

    frequencies: Tensor
    """(head_dim / 4,) float64 angles per position, in radians."""
    query_scale: Tensor
    """() float64 factor of the products of queries and keys."""

    def __init__(self, head_dim: int, base: float, *, yarn: bool) -> None:
        super().__init__()
        self.base, self.yarn = base, yarn
        self.windows: tuple[int, int] | None = None
        """(short, long): number of tokens before its own that a query sees; None before `set_windows`."""
        self._tables: Tensor | None = None
        """(2, length, head_dim): cosines and sines for `tables`, updated in place because CUDA graphs read them."""
        self.register_buffer("frequencies", torch.empty(head_dim // 4, dtype=torch.float64))
        self.register_buffer("query_scale", torch.empty((), dtype=torch.float64))

    @torch.no_grad()
    def reset(self) -> None:
        """Restore the initial frequencies; the next `set_windows` counts as the first one."""
        self.frequencies.copy_(self.base ** -torch.linspace(0, 1, len(self.frequencies), dtype=torch.float64))
        self.query_scale.fill_(0.1)
        self.windows = None
        self._renew()

    @torch.no_grad()
    def set_windows(self, short: int, long: int, *, stretch: bool = True) -> None:
        """Set the number of tokens before its own that a query sees in layers with short and with long windows, >= 1.

        When a later call changes the long window, YaRN adapts the frequencies, and `query_scale` grows by a factor of
        1 + 0.2 ln(new / old); not with `stretch=False`, as in the race's last validation.
        """
        if min(short, long) < 1:
            raise ValueError(f"set_windows({short}, {long}): a query sees at least 1 token before its own")
        if self.windows is not None and self.windows[1] != long and stretch and self.yarn:
            # YaRN (arXiv 2309.00071, section 3.2): frequencies with less than one turn within the old window are scaled
            # by old / new, those with more than 32 turns are kept, and between these the factor is interpolated.
            ratio = self.windows[1] / long
            kept = ((self.windows[1] * self.frequencies / (2 * torch.pi) - 1) / (32 - 1)).clamp(0, 1)
            self.frequencies.mul_(ratio + kept * (1 - ratio))
            self.query_scale.mul_(1 - 0.2 * math.log(ratio))
        self.windows = short, long
        self._renew()

    def tables(self, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosines and signed sines for `rotate`, (length, head_dim) each.

        They are views that change with the windows. A larger length or another dtype allocates new memory.
        """
        if self._tables is None or self._tables.shape[1] < length or self._tables.dtype != dtype:
            shape = (2, length, 4 * len(self.frequencies))
            self._tables = torch.empty(shape, dtype=dtype, device=self.frequencies.device)
            self._renew()
        return self._tables[0, :length], self._tables[1, :length]

    def _renew(self) -> None:
        """Recompute the tables in place from the frequencies."""
        if self._tables is not None:
            positions = torch.arange(self._tables.shape[1], dtype=torch.float64, device=self._tables.device)
            angles = torch.outer(positions, self.frequencies)
            # Channels in quarters of D/4: the first rotates with the second, the others have angle 0.
            cos, sin, zero = angles.cos(), angles.sin(), torch.zeros_like(angles)
            self._tables[0] = torch.cat([cos, cos, zero + 1, zero + 1], dim=-1)
            self._tables[1] = torch.cat([-sin, sin, zero, zero], dim=-1)

    def get_extra_state(self) -> Tensor:
        """Return the windows for a state dict, (2,) int64; zeros if they have not been set."""
        return torch.tensor(self.windows or (0, 0))

    def set_extra_state(self, state: Tensor) -> None:
        """Restore a result of `get_extra_state`."""
        short, long = state.tolist()
        self.windows = (short, long) if long else None
        self._renew()


class TokenCoefficients(nn.Module):
    """Computes named coefficients for each token with a small MLP: scale * (down(gelu(up(x))) + bias).

    They gate attention, skips and injections, and mix streams (MUDDFormer, Xiao et al., arXiv 2502.12170). `down` is
    zero at first, so each coefficient begins at its value in `starts`.

    Args:
        width: channels of x.
        hidden: hidden channels of the MLP; 0 for only a bias, the same for all tokens.
        starts: the coefficients' names, numbers and initial values.
    """

    def __init__(self, width: int, hidden: int, starts: Starts) -> None:
        super().__init__()
        self.starts = starts
        count = sum(size for size, _ in starts.values())
        self.up = nn.Parameter(torch.empty(hidden, width)) if hidden else None
        self.down = nn.Parameter(torch.empty(count, hidden)) if hidden else None
        self.bias = nn.Parameter(torch.empty(count))

    def forward(self, x_TC: Tensor, scale: Tensor | float) -> dict[str, Tensor]:
        """Return name -> (T, size) coefficients in the dtype of `x_TC`, (T, C)."""
        values = self.bias.expand(x_TC.shape[0], -1)
        if self.up is not None and self.down is not None:
            values = F.linear(F.gelu(F.linear(x_TC, self.up)), self.down) + values
        values = values * (scale.to(x_TC.dtype) if isinstance(scale, Tensor) else scale)
        sizes = [size for size, _ in self.starts.values()]
        return dict(zip(self.starts, values.split(sizes, dim=-1), strict=True))


def attend(
    plan: LayerPlan,
    weights: tuple[Tensor, Tensor, Tensor],
    row: FlatRow,
    *,
    read_TC: Tensor,
    scales: Tensor | None,
    value_TC: Tensor | None,
    value_gate: Tensor | None,
    dense_value_TC: Tensor | None,
    gates: dict[str, Tensor],
) -> Tensor:
    """Return the output of a layer's attention, (T, C).

    Args:
        plan: the layer's features.
        weights: its slices of the banks: (2C, C) queries and keys, (C, C) values, (C, C) outputs.
        row: the inputs of all layers.
        read_TC: (T, C) stream that it reads.
        scales: (2,) factors of the weights of values and outputs.
        value_TC: (T, C) value embeddings, added to the values times a gate.
        value_gate: (H, 2 x channels) weight of that gate; None for `gates["value"]`.
        dense_value_TC: (T, C) addition to the values by dense connections.
        gates: kind -> (T, H).
    """
    query_key, value_weight, out_weight = weights
    length, copies = len(read_TC), 2 if plan.paired else 1
    cos, sin = (x[: copies * length].view(length, copies, -1) for x in (row.cos, row.sin))
    num_heads = len(query_key) // (2 * cos.shape[-1])
    read_TC = rms_norm(read_TC)
    if value_TC is not None:
        if value_gate is None:
            gate_TH = gates["value"]
        else:  # computed from leading channels of the stream that attention reads and of the value embedding
            channels = value_gate.shape[1] // 2
            seen = torch.cat([read_TC[:, :channels], value_TC[:, :channels]], dim=-1)
            gate_TH = 2 * torch.sigmoid(F.linear(seen, value_gate))  # 1 at the gate's initial weight 0
        value_TC = (gate_TH.unsqueeze(-1) * value_TC.unflatten(-1, (num_heads, -1))).flatten(1)
    if dense_value_TC is not None:
        value_TC = dense_value_TC if value_TC is None else value_TC + dense_value_TC
    if scales is not None:
        value_scale, out_scale = scales.to(read_TC.dtype).unbind()
        value_weight, out_weight = value_scale * value_weight, out_scale * out_weight
    projected = F.linear(read_TC, torch.cat([query_key, value_weight]))  # (T, 3C): one product instead of two
    q_THD, k_THD, v_THD = projected.unflatten(-1, (3, num_heads, -1)).unbind(1)
    if value_TC is not None:
        v_THD = v_THD + value_TC.view(v_THD.shape)
    # Paired heads h and h + H/2 become one head on 2T positions: (T, 2, H/2, D) is flattened to (2T, H/2, D) below.
    q, k, v = (x.unflatten(1, (copies, -1)) for x in (rms_norm(q_THD), rms_norm(k_THD), v_THD))
    sharpness = row.query_scale * q.shape[-1] ** 0.5  # `attention` divides by sqrt(D)
    q, k = (rotate(x, cos, sin, parts=2) for x in (q * sharpness.to(q.dtype), k))
    if plan.key_offset:
        rotating, still = k.chunk(2, dim=-1)  # (T, copies, H / copies, D / 2) each
        still = torch.where(row.starts[..., None, None], still, previous(still))
        k = torch.cat([rotating, still], dim=-1)
    q_1NHD, k_1NHD, v_1NHD = (x.flatten(0, 1).contiguous()[None] for x in (q, k, v))
    short, long, longest, _ = row.limits.shape  # dynamic sizes in compiled code
    mask = replace(row.masks[copies - 1], longest=copies * longest)
    out_1NHD = attention(q_1NHD, k_1NHD, v_1NHD, mask, long if plan.long else short)
    out_THD = out_1NHD.view(length, num_heads, -1)
    if plan.exclusive:
        along = (out_THD * v_THD).sum(-1, keepdim=True) / v_THD.square().sum(-1, keepdim=True).clamp_min(1e-8)
        out_THD = out_THD - torch.tanh(gates["exclusive"]).unsqueeze(-1) * along * v_THD
    if plan.gated:
        out_THD = out_THD * gates["attention"].unsqueeze(-1)
    return F.linear(out_THD.flatten(1), out_weight)


def joined(name: str, x_TC: Tensor, out_TC: Tensor, mix: Tensor | None, gates: dict[str, Tensor]) -> Tensor:
    """Return a * stream + b * sublayer, (T, C), with a and b from `gates` (per token), from `mix` (2,), or 1."""
    if f"{name}_residual" in gates:
        return gates[f"{name}_residual"] * x_TC + gates[f"{name}_output"] * out_TC
    if mix is None:
        return x_TC + out_TC
    return mix[0].to(x_TC.dtype) * x_TC + mix[1].to(x_TC.dtype) * out_TC
