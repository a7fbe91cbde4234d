"""`SpeedrunGPT`: the model of the modded-nanogpt speedrun, with a switch for each of its features.

The race (https://github.com/KellerJordan/modded-nanogpt, at commit f411b3d3) trains a 124M-class GPT to a loss of 3.28
on FineWeb in the least time. Its contributors found the features; speedrun_sizes.py lists them with their papers, and
speedrun_layers.py has the layers. The input is one row of T tokens, documents one after the other, without a batch
dimension. Phases: table lookups (`_row`), the compiled layers (`_trunk`), head and loss. Shape suffixes as in
speedrun_layers.py, with K targets per token and V tokens in the vocabulary. Differences from the race's model:

- nothing crosses the start of a document; in the race, smear, key offset, bigrams and later targets do;
- paired heads are h and h + H/2, also for their rotary positions; in the race, positions alternate between neighbours;
- channels rotate in pairs (i, i + D/4); in the race, pairs are neighbours, which is a permutation of this;
- banks have no padding, coefficients no unused entries.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quintic.kernels.attention.attention import AttentionName, document_mask
from quintic.kernels.linear.mlp import mlp_relu2
from quintic.kernels.loss.loss import Fp8Scales, SigmoidCap, softcap_cross_entropy
from quintic.model.layers import learns, rms_norm
from quintic.model.speedrun_layers import FlatRow, InputTables, Rotary, TokenCoefficients, attend, joined
from quintic.model.speedrun_sizes import COEFFICIENT_SCALE, IGNORED, RESIDUAL_SCALE, SpeedrunConfig

__all__ = ["SpeedrunConfig", "SpeedrunGPT"]

_VALUE_CHANNELS = 6  # the gate of a value embedding reads this many leading channels of it, and of the stream
_SIGMOID_CAP = SigmoidCap(height=23.0, shift=5.0, width=7.5)
_TANH_CAP = 15.0
# Scales of the head's 8-bit products: for hidden states up to 100, weights up to 1.6, gradients of logits up to 0.75.
_FP8_SCALES = (100 / 448, 1.6 / 448, 0.75 / 448)


class SpeedrunGPT(nn.Module):
    """The model. Build it on any device, or on the meta device and move it with `to_empty`; then call `init_weights`.

    Matrices are stacked in banks with rows of C, stored (out, in), but the MLP's second one (in, out):

    - `qk_bank` (A x 2C, C): per layer with attention queries, then keys; by pairs of heads, `Rows(2 * head_dim)`;
    - `vo_bank` (A x 2C, C): per layer with attention values, then outputs, `Rows(width)`;
    - `mlp_bank` (L x 8C, C): per layer its two matrices, `Rows(4 * width)`.

    Args:
        config: sizes and features.
        attention: implementation, as for `GPT`.
        dtype: dtype of matrices, tables and activations; scalars are float32.
    """

    def __init__(
        self, config: SpeedrunConfig, *, attention: AttentionName = "sdpa", dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.config, self.attention_name = config, attention
        width, heads = config.width, config.num_heads
        attending = sum(plan.attends for plan in config.layers)

        def parameter(*shape: int, dtype: torch.dtype = dtype) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=dtype))

        self.inputs = InputTables(config, dtype)
        self.head = parameter(width, config.vocab_size)
        self.qk_bank = parameter(attending * 2 * width, width)
        self.vo_bank = parameter(attending * 2 * width, width)
        self.mlp_bank = parameter(config.num_layers * 2 * 4 * width, width)
        if config.value_embeddings:
            # With dense connections, the last layer's gate is computed per token and needs no parameter here.
            self.value_gates = parameter(config.value_tables - config.dense_connections, heads, 2 * _VALUE_CHANNELS)
        if config.skip:
            self.skip_scale = parameter(1, dtype=torch.float32)
        if config.residual_scalars:
            sublayers = attending + config.num_layers - 2 * config.dense_connections
            self.projection_scales = parameter(attending, 2, dtype=torch.float32)
            self.residual_scales = parameter(sublayers, dtype=torch.float32)
            self.output_scales = parameter(sublayers, dtype=torch.float32)
        early, late = config.gate_starts()
        self.early_gates = TokenCoefficients(width, config.gate_channels, early).to(dtype) if early else None
        self.late_gates = TokenCoefficients(width, config.gate_channels, late).to(dtype) if late else None
        if early or late:
            self.gate_scale = nn.Parameter(torch.empty(()))
        if config.dense_connections:
            last, top = config.dense_starts()
            self.last_connections = TokenCoefficients(width, config.gate_channels, last).to(dtype)
            self.head_connections = TokenCoefficients(width, config.gate_channels, top).to(dtype)
        self.rotary = Rotary(config.head_dim, config.rotary_base, yarn=config.yarn)
        self.register_buffer("prefixes", torch.empty(config.vocab_size, dtype=torch.int64))

    prefixes: Tensor
    """(vocab_size,) int64: for each token, the longest other token that it begins with, or `IGNORED`; set by `Race`."""

    @torch.no_grad()
    def init_weights(self, seed: int = 0) -> None:
        """Initialise every parameter and buffer in place; drawn on the CPU from `seed`, so equal on every device."""
        config, width = self.config, self.config.width
        generator = torch.Generator().manual_seed(seed)

        def normal(param: Tensor, std: float) -> None:
            param.copy_(torch.randn(param.shape, generator=generator, device="cpu") * std)

        def uniform(param: Tensor, std: float) -> None:
            param.copy_((torch.rand(param.shape, generator=generator, device="cpu") * 2 - 1) * (3**0.5 * std))

        # Everything that writes to the stream or gates it starts at zero, except as set below.
        for name, param in self.named_parameters():
            param.fill_(COEFFICIENT_SCALE if name == "gate_scale" else 0.0)
        normal(self.head, 0.005)
        self.inputs.embedding.copy_(self.head.mT)
        ups = self.mlp_bank.view(config.num_layers, 2, 4 * width, width)[:, 0]
        for bank in (self.qk_bank, self.vo_bank, ups):
            uniform(bank, 0.5 * width**-0.5)
        if config.value_embeddings:
            normal(self.inputs.value_embeddings, 0.01)
        if config.bigram_hash:
            signs = self.inputs.bigram_signs
            signs.copy_(torch.randint(0, 2, signs.shape, generator=generator, device="cpu") * 2 - 1)
        if config.skip:
            self.skip_scale.fill_(-1.5)
        if config.residual_scalars:
            self.projection_scales.copy_(torch.tensor([0.5, 1.0]))
            self.residual_scales.fill_(RESIDUAL_SCALE)
            self.output_scales.fill_(1.0)
        for module in self.modules():
            if isinstance(module, TokenCoefficients):
                # The bias that gives the coefficients their initial values.
                starts = [torch.full((size,), start / COEFFICIENT_SCALE) for size, start in module.starts.values()]
                module.bias.copy_(torch.cat(starts))
                if module.up is not None:
                    uniform(module.up, (3 * width) ** -0.5)
        self.prefixes.fill_(IGNORED)
        self.rotary.reset()

    def forward(
        self,
        inputs: Tensor,
        targets: Tensor,
        *,
        document_starts: Tensor | None = None,
        loss_weights: Tensor | None = None,
        longest_document: int | None = None,
        reduction: Literal["sum", "none"] = "sum",
    ) -> Tensor:
        """Return the loss in nats, float32: the weighted sum of cross entropies over all tokens and their targets.

        Args:
            inputs: (T,) int64 tokens; a document starts at the first of them and at each `bos_id`.
            targets: (T,) int64 next tokens.
            document_starts: (num_documents + 1,) int32 offsets, for attention "varlen", "fa3" and "fa4"; may be padded
                at the end with T.
            loss_weights: (K + 1,) float32 weights on the device: [k] is the weight of the token k + 1 positions ahead,
                for k > 0 only within the document and with `multi_token`; [K] the weight of the longest token that the
                next token begins with, with `prefix_tokens`. None counts only the next token.
            longest_document: upper bound of the tokens of a document; None for T.
            reduction: `"sum"` for a scalar, `"none"` for the loss of each token, (T,).

        Raises:
            ValueError: the windows have not been set, or the attention needs `document_starts`.
        """
        config = self.config
        row = self._row(inputs, document_starts, longest_document)
        x_TC = self._trunk(row)
        if loss_weights is None:
            loss_weights = F.pad(torch.ones(1, device=inputs.device), (0, 1))
        ahead = loss_weights[:-1] if config.multi_token else loss_weights[:1]
        prefixes = self.prefixes if config.prefix_tokens else None
        targets_TK = _all_targets(row.starts.squeeze(1), targets, len(ahead), prefixes)
        weights = ahead if prefixes is None else torch.cat([ahead, loss_weights[-1:]])
        fp8 = None
        if config.fp8_head and learns(self):
            fp8 = Fp8Scales(*(x_TC.new_full((), scale, dtype=torch.float32) for scale in _FP8_SCALES))
        return softcap_cross_entropy(
            x_TC,
            self.head,
            targets_TK,
            softcap=_SIGMOID_CAP if config.sigmoid_logits else _TANH_CAP,
            target_weights=weights,
            ignore_index=IGNORED,
            transposed=True,
            fp8=fp8,
            reduction=reduction,
        )

    def logits(self, inputs: Tensor, positions: Tensor, *, document_starts: Tensor | None = None) -> Tensor:
        """Return the logits at some positions of a row, (N, vocab_size) float32 after the soft cap.

        Args:
            inputs: (T,) int64 tokens, as for `forward`.
            positions: (N,) int64 indices into `inputs`.
            document_starts: as for `forward`.
        """
        x_NC = self._trunk(self._row(inputs, document_starts, None))[positions]
        logits_NV = (x_NC @ self.head).float()  # the head is stored (C, V)
        if not self.config.sigmoid_logits:
            return _TANH_CAP * torch.tanh(logits_NV / _TANH_CAP)
        height, shift, width = _SIGMOID_CAP
        return height * torch.sigmoid((logits_NV + shift) / width)

    def _row(self, inputs: Tensor, document_starts: Tensor | None, longest: int | None) -> FlatRow:
        """Return the inputs common to all layers: embeddings, document starts, rotary tables and masks."""
        if self.rotary.windows is None:
            raise ValueError("the model has no windows yet; call rotary.set_windows(short, long)")
        short, long = (window + 1 for window in self.rotary.windows)
        dtype = self.qk_bank.dtype
        mask, paired_mask = (
            document_mask(
                # For paired heads each token has two positions; only the first one may start a document.
                F.pad(inputs.unsqueeze(1), (0, copies - 1), value=-1).view(1, -1),
                bos_id=self.config.bos_id,
                windows=(short, long),
                implementation=self.attention_name,
                dtype=dtype,
                document_starts=None if document_starts is None else copies * document_starts,
            )
            for copies in (1, 2)
        )
        cos, sin = self.rotary.tables(2 * len(inputs), dtype)
        limits = torch.empty((short, long, longest or len(inputs), 0))
        torch._dynamo.maybe_mark_dynamic(limits, [0, 1, 2])
        return FlatRow(*self.inputs.look_up(inputs), cos, sin, self.rotary.query_scale, (mask, paired_mask), limits)

    def _trunk(self, row: FlatRow) -> Tensor:
        """Return the head's input, (T, C): run all layers on a row."""
        config = self.config
        x_TC, bigram_TC = self.inputs(row)
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
                out_TC = attend(
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
            # Squared ReLU: Primer, arXiv 2109.08668. The second matrix is stored transposed.
            up, down, fp8 = next(mlps), next(mlps).mT, config.fp8_mlp and learns(self)
            out_TC = mlp_relu2(rms_norm(x_TC), up, down, fp8=fp8, fp8_backward=fp8 and config.fp8_mlp_backward)
            x_TC = joined("mlp", x_TC, out_TC, next(mixes, None), own)
            streams |= {name: x_TC for name, source in sources.items() if source == index}
        if values:
            streams["value"] = values[0]
        if config.dense_connections:
            for name, factor in self.head_connections(x_TC, COEFFICIENT_SCALE).items():
                x_TC = x_TC + factor * streams[name]
        return rms_norm(x_TC)

    def _connect(self, x_TC: Tensor, entry_TC: Tensor, shared_TC: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return the last layer's input (T, C), the addition to its values (T, C), and its coefficients per token."""
        computed: dict[str, Tensor] = self.last_connections(x_TC, COEFFICIENT_SCALE)
        streams, of_values = computed.pop("streams"), computed.pop("values")
        mixed_TC, value_TC = x_TC, torch.zeros_like(x_TC)
        for number, source_TC in enumerate((entry_TC, shared_TC, x_TC)):
            mixed_TC = mixed_TC + streams[:, number : number + 1] * source_TC
            value_TC = value_TC + of_values[:, number : number + 1] * source_TC
        if "value_gates" in computed:
            computed["value"] = computed.pop("value_gates").repeat_interleave(self.config.num_heads // 2, dim=-1)
        return mixed_TC, value_TC, computed

    def compile_trunk(self) -> None:
        """Compile the layers between lookups and loss, once for each length of rows in training and in validation."""
        self._trunk = torch.compile(self._trunk, dynamic=False, fullgraph=True)  # type: ignore[method-assign]

    def names_by_role(self) -> Mapping[str, Sequence[str]]:
        """Return role -> names of parameters; each role is a group of the optimizer (quintic/speedrun/recipe.py)."""
        renamed = dict.fromkeys(("projection_scales", "smear_scale", "skip_scale"), "scalars")
        renamed |= {"value_embeddings": "value_embedding", "bigram_embedding": "bigram", "gate_scale": "gate_bias"}
        names = defaultdict[str, list[str]](list)
        for name, _ in self.named_parameters():
            owner, _, part = name.rpartition(".")
            role = renamed.get(part, part)
            if owner.endswith(("_gates", "_connections")):
                kind = "gate" if owner.endswith("_gates") else "connection"
                role = f"{kind}_bias" if part == "bias" else f"{kind}_weights"
            names[role].append(name)
        return names


def _all_targets(starts: Tensor, targets: Tensor, count: int, prefixes: Tensor | None) -> Tensor:
    """Return each token's targets, (T, count) or with prefixes (T, count + 1): the next tokens, then the prefix.

    `starts` (T,) bool and `targets` (T,) are per token, `prefixes` is (vocab_size,) or None. Targets after the start of
    a new document are `IGNORED`; the start itself counts.
    """
    columns, outside = [targets], torch.zeros_like(starts)
    for ahead in range(1, count):
        outside = outside | F.pad(starts[ahead:], (0, ahead), value=True)
        columns.append(F.pad(targets[ahead:], (0, ahead)).masked_fill(outside, IGNORED))
    return torch.stack(columns if prefixes is None else [*columns, prefixes[targets]], dim=-1)
