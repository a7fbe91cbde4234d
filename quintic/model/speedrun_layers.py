"""The layers of the speedrun's model between table lookups and head: gates, attention, MLPs, residual sums.

The file needs only torch, because exports have a copy of it. Matrices are in banks, one tensor for all layers. Shape
suffixes: T tokens of a row, N positions of attention (T, or 2T with paired heads), C width, H heads, D head dimension,
K tables of value embeddings.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quintic.model.functions import rms_norm, rotate
from quintic.model.speedrun_sizes import COEFFICIENT_SCALE, LayerPlan, SpeedrunConfig, Starts

__all__ = [
    "SIGMOID_CAP",
    "TANH_CAP",
    "FlatRow",
    "SpeedrunLayers",
    "TokenCoefficients",
    "bigram_hashes",
    "document_begins",
    "half_rotary_tables",
    "make_input_weights",
]

_SMEAR_CHANNELS = 12  # leading channels of an embedding that the smear gate reads
_VALUE_CHANNELS = 6  # the gate of a value embedding reads this many leading channels of it, and of the stream

SIGMOID_CAP = (23.0, 5.0, 7.5)
"""Logits are a sigmoid((x + b) / c) of the product with the head..."""
TANH_CAP = 15.0
"""... or, without `sigmoid_logits`, a tanh(x / a)."""


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
    cos: Tensor  # (2T, D), as sin: `half_rotary_tables`
    sin: Tensor
    query_scale: Tensor  # () factor of the products of queries and keys
    masks: Any = None  # for the model's own `attention`


def bigram_hashes(inputs: Tensor, sizes: SpeedrunConfig) -> tuple[Tensor, Tensor]:
    """Return for (T,) tokens their rows of the bigram embedding and of the signs, (T,) int64 each.

    Tokens that start a document get the embedding's last row and the first row of signs.
    """
    before, begins = previous(inputs), document_begins(inputs, sizes.bos_id)
    last_row = sizes.bigram_rows - 1
    rows = ((36313 * inputs) ^ (27191 * before)) % last_row
    signs = (inputs ^ before) % sizes.bigram_sign_rows
    return rows.masked_fill(begins, last_row), signs.masked_fill(begins, 0)


def half_rotary_tables(length: int, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and signed sines for `rotate(..., parts=2)`, (length, D) each, from (D / 4,) frequencies."""
    positions = torch.arange(length, dtype=frequencies.dtype, device=frequencies.device)
    angles = torch.outer(positions, frequencies)
    # Channels in quarters of D/4: the first rotates with the second, the others have angle 0.
    cos, sin, zero = angles.cos(), angles.sin(), torch.zeros_like(angles)
    return torch.cat([cos, cos, zero + 1, zero + 1], dim=-1), torch.cat([-sin, sin, zero, zero], dim=-1)


def make_input_weights(module: nn.Module, sizes: SpeedrunConfig, dtype: torch.dtype) -> None:
    """Give a module the weights of smear and the table of token pairs, zeros at first; `dtype` is the tables'.

    A hash assigns pairs of tokens to rows of `bigram_embedding`; another hash selects a vector of `bigram_signs`, 1 and
    -1, which distinguishes pairs that share a row.
    """
    width = sizes.width
    if sizes.bigram_hash:
        module.bigram_embedding = nn.Parameter(torch.zeros(sizes.bigram_rows, width, dtype=dtype))
        module.register_buffer("bigram_signs", torch.zeros(sizes.bigram_sign_rows, width, dtype=dtype))
    if sizes.smear:
        module.smear_gate = nn.Parameter(torch.zeros(1, min(_SMEAR_CHANNELS, width), dtype=dtype))
        module.smear_scale = nn.Parameter(torch.zeros(1))


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
        self.up = nn.Parameter(torch.zeros(hidden, width)) if hidden else None
        self.down = nn.Parameter(torch.zeros(count, hidden)) if hidden else None
        self.bias = nn.Parameter(torch.zeros(count))

    def forward(self, x_TC: Tensor, scale: Tensor | float) -> dict[str, Tensor]:
        """Return name -> (T, size) coefficients in the dtype of `x_TC`, (T, C)."""
        values = self.bias.expand(x_TC.shape[0], -1)
        if self.up is not None and self.down is not None:
            values = F.linear(F.gelu(F.linear(x_TC, self.up)), self.down) + values
        values = values * (scale.to(x_TC.dtype) if isinstance(scale, Tensor) else scale)
        sizes = [size for size, _ in self.starts.values()]
        return dict(zip(self.starts, values.split(sizes, dim=-1), strict=True))


class SpeedrunLayers(nn.Module):
    """The layers and their weights. A subclass has the tables and the head, and its own `attention` and `mlp`."""

    inputs: Any
    """The module to which `make_input_weights` gave its weights."""

    def make_weights(self, sizes: SpeedrunConfig, dtype: torch.dtype) -> None:
        """Make the weights of all layers, zeros until they are initialised; scalars are float32."""
        self.sizes, width = sizes, sizes.width
        attending = sum(plan.attends for plan in sizes.layers)

        def parameter(*shape: int, dtype: torch.dtype = dtype) -> nn.Parameter:
            return nn.Parameter(torch.zeros(shape, dtype=dtype))

        self.qk_bank = parameter(attending * 2 * width, width)
        self.vo_bank = parameter(attending * 2 * width, width)
        self.mlp_bank = parameter(sizes.num_layers * 2 * 4 * width, width)
        if sizes.value_embeddings:
            # With dense connections, the last layer's gate is computed per token and needs no parameter here.
            tables = sizes.value_tables - sizes.dense_connections
            self.value_gates = parameter(tables, sizes.num_heads, 2 * _VALUE_CHANNELS)
        if sizes.skip:
            self.skip_scale = parameter(1, dtype=torch.float32)
        if sizes.residual_scalars:
            sublayers = attending + sizes.num_layers - 2 * sizes.dense_connections
            self.projection_scales = parameter(attending, 2, dtype=torch.float32)
            self.residual_scales = parameter(sublayers, dtype=torch.float32)
            self.output_scales = parameter(sublayers, dtype=torch.float32)
        early, late = sizes.gate_starts()
        self.early_gates = TokenCoefficients(width, sizes.gate_channels, early).to(dtype) if early else None
        self.late_gates = TokenCoefficients(width, sizes.gate_channels, late).to(dtype) if late else None
        if early or late:
            self.gate_scale = parameter(dtype=torch.float32)
        if sizes.dense_connections:
            last, top = sizes.dense_starts()
            self.last_connections = TokenCoefficients(width, sizes.gate_channels, last).to(dtype)
            self.head_connections = TokenCoefficients(width, sizes.gate_channels, top).to(dtype)

    def attention(self, plan: LayerPlan, row: FlatRow, q_1NHD: Tensor, k_1NHD: Tensor, v_1NHD: Tensor) -> Tensor:
        """Return causal attention within documents and the layer's window, (1, N, H, D)."""
        raise NotImplementedError

    def mlp(self, x_TC: Tensor, up: Tensor, down: Tensor) -> Tensor:
        """Return relu(x @ up.T)^2 @ down, (T, C), for two (4C, C) matrices (Primer, arXiv 2109.08668)."""
        raise NotImplementedError

    def capped(self, logits: Tensor) -> Tensor:
        """Return logits after the soft cap."""
        if not self.sizes.sigmoid_logits:
            return TANH_CAP * torch.tanh(logits / TANH_CAP)
        height, shift, width = SIGMOID_CAP
        return height * torch.sigmoid((logits + shift) / width)

    def _trunk(self, row: FlatRow) -> Tensor:
        """Return the head's input, (T, C): run all layers on a row."""
        config = self.sizes
        x_TC, bigram_TC = self._enter(row)
        gates: dict[str, Tensor] = {} if self.early_gates is None else self.early_gates(x_TC, self.gate_scale)
        injected = {"embedding": x_TC}
        if bigram_TC is not None:
            injected["bigram"] = bigram_TC
            x_TC = x_TC + gates.pop("bigram.0") * bigram_TC
        values = () if row.values is None else row.values.unbind()
        streams, sources = {"entry": x_TC}, {"early": config.skip_source, "shared": config.shared_source}
        # The banks hold the weights of the layers that have them, in order: each layer takes the next ones. There is
        # one `unbind` for each bank, so that its gradient is stacked once.
        width = config.width
        query_keys = iter(self.qk_bank.view(-1, 2 * width, width).unbind())  # (2C, C) per layer with attention
        value_outs = iter(self.vo_bank.view(-1, width, width).unbind())  # (C, C) twice per layer with attention
        mlps = iter(self.mlp_bank.view(-1, 4 * width, width).unbind())  # (4C, C) twice per layer
        value_gates = self.value_gates.unbind() if config.value_embeddings else ()  # (H, 2 x channels) per table
        scales: Iterator[Tensor] = iter(())
        mixes: Iterator[Tensor] = iter(())
        if config.residual_scalars:
            scales = iter(self.projection_scales.unbind())  # (2,) per layer with attention
            # (2,) per sublayer; the last layer's are computed per token with dense connections.
            mixes = iter(torch.stack([self.residual_scales, self.output_scales], dim=1).unbind())
        for index, plan in enumerate(config.layers):
            table, dense_value_TC = plan.value_table, None
            if index == config.skip_source + 1 and self.late_gates is not None:
                gates |= self.late_gates(x_TC, self.gate_scale)
            # This layer's gates. The last layer gets most of its coefficients from dense connections instead.
            own = {name.partition(".")[0]: gate for name, gate in gates.items() if name.endswith(f".{index}")}
            if config.dense_connections and index == config.num_layers - 1:
                streams["last"], injected["embedding"] = x_TC, streams["entry"]
                x_TC, dense_value_TC, computed = self._connect(x_TC, streams["entry"], streams["shared"])
                own |= computed
            if plan.skips:
                x_TC = x_TC + torch.sigmoid(self.skip_scale).to(x_TC.dtype) * own["skip"] * streams["early"]
            if plan.attends:
                out_TC = self._attend(
                    plan,
                    (next(query_keys), next(value_outs), next(value_outs)),
                    row,
                    read_TC=streams.get("shared", x_TC) if config.shared_attention_input else x_TC,
                    scales=next(scales, None),
                    value_TC=None if table is None else values[table],
                    value_gate=value_gates[table] if table is not None and table < len(value_gates) else None,
                    dense_value_TC=dense_value_TC,
                    gates=own,
                )
                x_TC = joined("attention", x_TC, out_TC, next(mixes, None), own)
                for name in (name for name in injected if name in own):
                    x_TC = x_TC + own[name] * injected[name]
            out_TC = self.mlp(rms_norm(x_TC), next(mlps), next(mlps))
            x_TC = joined("mlp", x_TC, out_TC, next(mixes, None), own)
            streams |= {name: x_TC for name, source in sources.items() if source == index}
        if values:
            streams["value"] = values[0]
        if config.dense_connections:
            for name, factor in self.head_connections(x_TC, COEFFICIENT_SCALE).items():
                x_TC = x_TC + factor * streams[name]
        return rms_norm(x_TC)

    def _enter(self, row: FlatRow) -> tuple[Tensor, Tensor | None]:
        """Return (T, C) normalised embeddings after smear, and (T, C) bigram embeddings times their signs or None."""
        inputs, x_TC, bigram_TC = self.inputs, row.embedding, row.bigram
        if self.sizes.smear:
            gate_T1 = torch.sigmoid(F.linear(x_TC[:, : inputs.smear_gate.shape[1]], inputs.smear_gate))
            x_TC = x_TC + inputs.smear_scale.to(x_TC.dtype) * gate_T1.masked_fill(row.starts, 0) * previous(x_TC)
        if bigram_TC is not None and row.signs is not None:
            bigram_TC = bigram_TC * F.embedding(row.signs, inputs.bigram_signs)
        return rms_norm(x_TC), bigram_TC

    def _connect(self, x_TC: Tensor, entry_TC: Tensor, shared_TC: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return the last layer's input (T, C), the addition to its values (T, C), and its coefficients per token."""
        computed: dict[str, Tensor] = self.last_connections(x_TC, COEFFICIENT_SCALE)
        streams, of_values = computed.pop("streams"), computed.pop("values")
        mixed_TC, value_TC = x_TC, torch.zeros_like(x_TC)
        for number, source_TC in enumerate((entry_TC, shared_TC, x_TC)):
            mixed_TC = mixed_TC + streams[:, number : number + 1] * source_TC
            value_TC = value_TC + of_values[:, number : number + 1] * source_TC
        if "value_gates" in computed:
            computed["value"] = computed.pop("value_gates").repeat_interleave(self.sizes.num_heads // 2, dim=-1)
        return mixed_TC, value_TC, computed

    def _attend(
        self,
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

        `weights` are its slices of the banks: (2C, C) queries and keys, (C, C) values, (C, C) outputs; `scales` (2,)
        are factors of the last two. Added to the values are `dense_value_TC`, and value embeddings times a gate per
        token and head (T, H): `gates["value"]`, or one that the weight `value_gate` (H, 2 x channels) computes.
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
        out_1NHD = self.attention(plan, row, q_1NHD, k_1NHD, v_1NHD)
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
