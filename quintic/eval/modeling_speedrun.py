"""The speedrun's model for the transformers library; every exported folder of such a model contains this file.

It needs only torch and transformers. It is a simple version of `quintic.model.speedrun`, not made for fast training:
rows of a batch go through it one after the other, attention is PyTorch's own with masks, and without a key/value cache
`generate` reads the whole text again for each token. Shape suffixes: T tokens of a row, N positions of attention (T, or
2T with paired heads), C width, H heads, D channels of a head.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

__all__ = ["QuinticSpeedrunConfig", "QuinticSpeedrunForCausalLM"]

_COEFFICIENT_SCALE = 0.1


class QuinticSpeedrunConfig(PreTrainedConfig):
    """Sizes and features of a speedrun's model; an export's `config.json` has all of them."""

    model_type = "quintic_speedrun"

    vocab_size: int = 257
    num_hidden_layers: int = 4
    hidden_size: int = 32  # width of the residual stream
    head_dim: int = 16
    num_attention_heads: int = 2
    max_position_embeddings: int = 128  # tokens of the longest training documents
    windows: tuple[int, ...] = (48, 160)  # earlier tokens that a query sees, in layers with short and with long windows
    frequencies: tuple[float, ...] = (1.0, 0.1, 0.01, 0.001)  # radians per position of the rotating channels
    query_scale: float = 0.1  # factor of the products of queries and keys
    layers: tuple[dict[str, Any], ...] = ()  # features of each layer, by name
    coefficients: dict[str, list[tuple[str, int]]] | None = None  # name of each small MLP -> its results, with counts
    sources: dict[str, int] | None = None  # name -> layer whose output later layers read
    value_tables: int = 0  # value embeddings
    shapes: dict[str, list[int]] | None = None  # name -> shape of each parameter that belongs to no module
    bigram_sign_rows: int = 1  # rows of the table of signs of token pairs
    gate_channels: int = 0  # hidden channels of the small MLPs; 0 for coefficients that are the same for all tokens
    shared_attention_input: bool = True  # attention of the last layers reads the output of the source "shared"
    sigmoid_logits: bool = True  # logits are 23 sigmoid((x + 5) / 7.5), otherwise 15 tanh(x / 15)
    tie_word_embeddings: bool = False
    use_cache: bool = False


def _norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],))


def _previous(x: Tensor) -> Tensor:
    return torch.cat([x[:1], x[:-1]])


class QuinticCoefficients(nn.Module):
    """A small MLP that computes a few named coefficients for each token."""

    def __init__(self, width: int, hidden: int, sizes: list[tuple[str, int]]) -> None:
        super().__init__()
        self.sizes = dict(sizes)
        count = sum(self.sizes.values())
        self.up = nn.Parameter(torch.zeros(hidden, width)) if hidden else None
        self.down = nn.Parameter(torch.zeros(count, hidden)) if hidden else None
        self.bias = nn.Parameter(torch.zeros(count))

    def forward(self, x_TC: Tensor, scale: Tensor | float) -> dict[str, Tensor]:
        """Return name -> (T, size)."""
        values = self.bias.expand(len(x_TC), -1)
        if self.up is not None and self.down is not None:
            values = F.linear(F.gelu(F.linear(x_TC, self.up)), self.down) + values
        values = values * (scale.to(x_TC.dtype) if isinstance(scale, Tensor) else scale)
        return dict(zip(self.sizes, values.split(list(self.sizes.values()), dim=-1), strict=True))


class QuinticSpeedrunForCausalLM(PreTrainedModel, GenerationMixin):
    """A speedrun's model; a document starts at each `bos_token_id`, and positions see their own document only."""

    config_class = QuinticSpeedrunConfig
    _input_embed_layer = "embedding"
    _supports_sdpa = True
    _keep_in_fp32_modules_strict = (
        "skip_scale", "projection_scales", "residual_scales", "output_scales", "gate_scale", "smear_scale",
    )  # fmt: skip

    def __init__(self, config: QuinticSpeedrunConfig) -> None:
        super().__init__(config)
        width, vocab = config.hidden_size, config.vocab_size
        self.embedding = nn.Embedding(vocab, width)
        self.value_embeddings = nn.ModuleList(nn.Embedding(vocab, width) for _ in range(config.value_tables))
        self.head = nn.Linear(width, vocab, bias=False)
        # Banks of matrices, scales and gates. A model that lacks a feature lacks its parameters.
        for name, shape in config.shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))
        if "bigram_embedding" in config.shapes:
            self.register_buffer("bigram_signs", torch.zeros(config.bigram_sign_rows, width))
        for name, sizes in config.coefficients.items():
            self.add_module(name, QuinticCoefficients(width, config.gate_channels, sizes))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.hidden_size**-0.5)

    def get_output_embeddings(self) -> nn.Module:
        """Return the head."""
        return self.head

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Module:
        """Raise ValueError: other tables of the model, such as that of token pairs, also depend on the vocabulary."""
        raise ValueError(
            "resize_token_embeddings: a speedrun's model has more tables for its vocabulary, which must stay"
        )

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        past_key_values: Any = None,
        cache: Any = None,
        position_ids: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutput:
        """Return logits, (B, T, vocab_size) float32 after the soft cap.

        Arguments are as in transformers. Padding, where `attention_mask` (B, T) is zero, is left out, and positions
        follow from it. There is no cache: `past_key_values`, from transformers 5.24 on `cache`, must be None.
        """
        if past_key_values is not None or cache is not None:
            raise ValueError("a speedrun's model keeps no cache: pass use_cache=False, which is its default")
        real_BT = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask != 0
        x_BTC = torch.zeros((*input_ids.shape, self.config.hidden_size), dtype=self.dtype, device=input_ids.device)
        for row, real in enumerate(real_BT):
            if real.any():
                x_BTC[row, real] = self._row(input_ids[row, real])
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.head(x_BTC[:, kept]).float()
        if self.config.sigmoid_logits:
            logits = 23 * torch.sigmoid((logits + 5) / 7.5)
        else:
            logits = 15 * torch.tanh(logits / 15)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutput(loss, logits)

    def _row(self, tokens_T: Tensor) -> Tensor:
        """Return the head's input for one row of documents, (T, C)."""
        config, width = self.config, self.config.hidden_size
        # Also true for the first token, whether or not it is a bos.
        begins_T = tokens_T == config.bos_token_id
        begins_T[0] = True
        x_TC, injected = self._inputs(tokens_T, begins_T)
        gates = self.early_gates(x_TC, self.gate_scale) if "early_gates" in config.coefficients else {}
        injected["embedding"] = x_TC
        if "bigram" in injected:
            x_TC = x_TC + gates.pop("bigram.0") * injected["bigram"]
        # Outputs that later layers read, by name, and the value embeddings (T, C).
        streams, values = {"entry": x_TC}, [table(tokens_T) for table in self.value_embeddings]
        # The banks hold the weights of layers that have them, in order: each layer takes the next ones.
        query_keys = iter(self.qk_bank.view(-1, 2 * width, width))
        value_outs = iter(self.vo_bank.view(-1, width, width))
        mlps = self.mlp_bank.view(-1, 2, 4 * width, width)
        has_scales = "residual_scales" in config.shapes
        scales = iter(zip(self.residual_scales, self.output_scales, strict=True) if has_scales else ())
        projections = iter(self.projection_scales if has_scales else ())
        for index, layer in enumerate(config.layers):
            if index == config.sources["early"] + 1 and "late_gates" in config.coefficients:
                # The second MLP's coefficients are computed from the stream after the early source.
                gates |= self.late_gates(x_TC, self.gate_scale)
            # The coefficients of this layer, "name.index", by name.
            own = {name.partition(".")[0]: gate for name, gate in gates.items() if name.endswith(f".{index}")}
            dense_value_TC = None
            if "last_connections" in config.coefficients and index == config.num_hidden_layers - 1:
                streams["last"], injected["embedding"] = x_TC, streams["entry"]
                # The last layer mixes earlier streams into its input and its values.
                computed = self.last_connections(x_TC, _COEFFICIENT_SCALE)
                sources = streams["entry"], streams["shared"], x_TC
                of_streams, of_values = computed.pop("streams").unsqueeze(-1), computed.pop("values").unsqueeze(-1)
                x_TC = x_TC + sum(of_streams[:, number] * source for number, source in enumerate(sources))
                dense_value_TC = sum(of_values[:, number] * source for number, source in enumerate(sources))
                if "value_gates" in computed:
                    heads = config.num_attention_heads
                    computed["value"] = computed.pop("value_gates").repeat_interleave(heads // 2, dim=-1)
                own |= computed
            # A gated skip connection from an early layer.
            if layer["skips"]:
                x_TC = x_TC + torch.sigmoid(self.skip_scale).to(x_TC.dtype) * own["skip"] * streams["early"]
            if layer["attends"]:
                table = layer["value_table"]
                # Attention reads the normalised stream, or a shared earlier one.
                read_TC = _norm(streams.get("shared", x_TC) if config.shared_attention_input else x_TC)
                added_TC = dense_value_TC
                if table is not None:
                    # A value embedding, times a gate for each head.
                    if "value" not in own:
                        channels = self.value_gates.shape[-1] // 2
                        seen = torch.cat([read_TC[:, :channels], values[table][:, :channels]], dim=-1)
                        own["value"] = 2 * torch.sigmoid(F.linear(seen, self.value_gates[table]))
                    gated = own["value"].unsqueeze(-1) * values[table].unflatten(-1, (own["value"].shape[-1], -1))
                    added_TC = gated.flatten(1) if added_TC is None else gated.flatten(1) + added_TC
                weights = next(query_keys), next(value_outs), next(value_outs)
                out_TC = self._attend(layer, weights, next(projections, None), read_TC, added_TC, begins_T, own)
                x_TC = _joined("attention", x_TC, out_TC, own, scales)
                for name in (name for name in injected if name in own):
                    x_TC = x_TC + own[name] * injected[name]
            # (T, C) by (C, 4C), squared ReLU, and (T, 4C) by (4C, C).
            out_TC = F.relu(_norm(x_TC) @ mlps[index, 0].T).square() @ mlps[index, 1]
            x_TC = _joined("mlp", x_TC, out_TC, own, scales)
            streams |= {name: x_TC for name, source in config.sources.items() if source == index}
        if values:
            streams["value"] = values[0]
        if "head_connections" in config.coefficients:
            for name, factor in self.head_connections(x_TC, _COEFFICIENT_SCALE).items():
                x_TC = x_TC + factor * streams[name]
        return _norm(x_TC)

    def _inputs(self, tokens_T: Tensor, begins_T: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the normalised embeddings (T, C), and other inputs (T, C) that layers add to the stream, by name."""
        config, injected, x_TC = self.config, {}, self.embedding(tokens_T)
        if "smear_gate" in config.shapes:
            # A gated fraction of the previous token's embedding, within documents.
            gate_T1 = torch.sigmoid(F.linear(x_TC[:, : self.smear_gate.shape[1]], self.smear_gate))
            gate_T1 = gate_T1.masked_fill(begins_T.unsqueeze(1), 0)
            x_TC = x_TC + self.smear_scale.to(x_TC.dtype) * gate_T1 * _previous(x_TC)
        if "bigram_embedding" in config.shapes:
            # Hashes give a table row and signs for each pair of tokens; a document's first token has fixed ones.
            before_T, last_row = _previous(tokens_T), len(self.bigram_embedding) - 1
            rows_T = ((36313 * tokens_T) ^ (27191 * before_T)) % last_row
            signs_T = (tokens_T ^ before_T) % config.bigram_sign_rows
            found_TC = self.bigram_embedding[rows_T.masked_fill(begins_T, last_row)]
            injected["bigram"] = found_TC * self.bigram_signs[signs_T.masked_fill(begins_T, 0)]
        return _norm(x_TC), injected

    def _attend(
        self,
        layer: dict[str, Any],
        weights: tuple[Tensor, Tensor, Tensor],
        scales: Tensor | None,
        read_TC: Tensor,
        value_TC: Tensor | None,
        begins_T: Tensor,
        gates: dict[str, Tensor],
    ) -> Tensor:
        """Return the output of a layer's attention, (T, C)."""
        config, length, copies = self.config, len(read_TC), 2 if layer["paired"] else 1
        heads, window = config.num_attention_heads, config.windows[1 if layer["long"] else 0]
        query_key, value_weight, out_weight = weights
        if scales is not None:
            value_weight, out_weight = (s * w for s, w in zip(scales.to(read_TC.dtype), weights[1:], strict=True))
        # One product for queries, keys and values: (T, C) by (3C, C) transposed.
        q_THD, k_THD, v_THD = (
            F.linear(read_TC, torch.cat([query_key, value_weight])).unflatten(-1, (3, heads, -1)).unbind(1)
        )
        if value_TC is not None:
            v_THD = v_THD + value_TC.view(v_THD.shape)
        # Paired heads: heads h and h + H/2 become one head with the even and the odd positions of a row of length 2T.
        q, k, v = (x.unflatten(1, (copies, -1)) for x in (_norm(q_THD), _norm(k_THD), v_THD))
        positions = torch.arange(copies * length, dtype=torch.float64, device=read_TC.device)
        frequencies = torch.tensor(config.frequencies, dtype=torch.float64, device=read_TC.device)
        angles = torch.outer(positions, frequencies).view(length, copies, 1, -1)
        q, k = (_rotate(x, angles.cos().to(x.dtype), angles.sin().to(x.dtype)) for x in (q, k))
        # The channels of keys that do not rotate come from the previous token, within documents.
        if layer["key_offset"]:
            rotating, still = k.chunk(2, dim=-1)
            k = torch.cat([rotating, torch.where(begins_T[:, None, None, None], still, _previous(still))], dim=-1)
        documents_N = begins_T.cumsum(0).repeat_interleave(copies)
        distance_NN = (positions[:, None] - positions).long()
        visible_NN = (documents_N[:, None] == documents_N) & (distance_NN >= 0) & (distance_NN <= window)
        # (T, copies, H, D) to (1, H, N, D).
        q_1HND, k_1HND, v_1HND = (x.flatten(0, 1).transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        out_1HND = F.scaled_dot_product_attention(
            q_1HND, k_1HND, v_1HND, attn_mask=visible_NN, scale=config.query_scale
        )
        out_THD = out_1HND.squeeze(0).transpose(0, 1).reshape(length, heads, -1)
        # Removes a gated fraction of the output along the token's own value.
        if layer["exclusive"]:
            along = (out_THD * v_THD).sum(-1, keepdim=True) / v_THD.square().sum(-1, keepdim=True).clamp_min(1e-8)
            out_THD = out_THD - torch.tanh(gates["exclusive"]).unsqueeze(-1) * along * v_THD
        if layer["gated"]:
            out_THD = out_THD * gates["attention"].unsqueeze(-1)
        return F.linear(out_THD.flatten(1), out_weight)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first and the second quarter of the channels against each other; the rest stays."""
    first, second, still = x.split([cos.shape[-1], cos.shape[-1], x.shape[-1] // 2], dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, still], dim=-1)


def _joined(name: str, x_TC: Tensor, out_TC: Tensor, gates: dict[str, Tensor], scales: Any) -> Tensor:
    """Return the stream plus a sublayer's output, scaled per token (`gates`), per layer (`scales`), or not at all."""
    if f"{name}_residual" in gates:
        return gates[f"{name}_residual"] * x_TC + gates[f"{name}_output"] * out_TC
    residual, output = next(scales, (None, None))
    if residual is None:
        return x_TC + out_TC
    return residual.to(x_TC.dtype) * x_TC + output.to(x_TC.dtype) * out_TC
