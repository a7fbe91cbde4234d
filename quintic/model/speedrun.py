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

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quintic.kernels.attention.attention import AttentionName, attention, document_mask
from quintic.kernels.linear.mlp import mlp_relu2
from quintic.kernels.lookup.rows import embedding_into_grad
from quintic.kernels.loss.loss import Fp8Scales, SigmoidCap, softcap_cross_entropy
from quintic.model.layers import learns
from quintic.model.speedrun_layers import (
    SIGMOID_CAP,
    TANH_CAP,
    FlatRow,
    SpeedrunLayers,
    TokenCoefficients,
    bigram_hashes,
    document_begins,
    half_rotary_tables,
    make_input_weights,
)
from quintic.model.speedrun_sizes import COEFFICIENT_SCALE, IGNORED, RESIDUAL_SCALE, LayerPlan, SpeedrunConfig

__all__ = ["SpeedrunConfig", "SpeedrunGPT"]

# Scales of the head's 8-bit products: for hidden states up to 100, weights up to 1.6, gradients of logits up to 0.75.
_FP8_SCALES = (100 / 448, 1.6 / 448, 0.75 / 448)


class InputTables(nn.Module):
    """The embedding tables of the model, and smear.

    The tables of value embeddings are stacked, (K x vocab_size, C). `dtype` is the tables'.
    """

    bigram_embedding: nn.Parameter
    bigram_signs: Tensor

    def __init__(self, config: SpeedrunConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.adds_to_gradients = False
        """If true, the backward pass accumulates into the tables' `grad` directly (`embedding_into_grad`)."""
        vocab, width = config.vocab_size, config.width
        self.embedding = nn.Parameter(torch.empty(vocab, width, dtype=dtype))
        if config.value_embeddings:
            self.value_embeddings = nn.Parameter(torch.empty(config.value_tables * vocab, width, dtype=dtype))
        make_input_weights(self, config, dtype)

    def look_up(self, inputs: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor]:
        """Look (T,) tokens up and return the first fields of a `FlatRow`: embedding, bigram, signs, values, starts."""
        look_up, config = embedding_into_grad if self.adds_to_gradients else F.embedding, self.config
        bigram_TC = signs_T = values_KTC = None
        if config.bigram_hash:
            rows_T, signs_T = bigram_hashes(inputs, config)
            bigram_TC = look_up(rows_T, self.bigram_embedding)
        if config.value_embeddings:
            # One lookup in all K tables, so that there is one gradient. Table k begins at row k x vocab_size.
            first = torch.arange(0, len(self.value_embeddings), config.vocab_size, device=inputs.device)
            values_KTC = look_up(first.unsqueeze(1) + inputs, self.value_embeddings)
        starts_T1 = document_begins(inputs, config.bos_id).unsqueeze(1)
        return look_up(inputs, self.embedding), bigram_TC, signs_T, values_KTC, starts_T1


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
            for table, values in zip(
                self._tables, half_rotary_tables(self._tables.shape[1], self.frequencies), strict=True
            ):
                table.copy_(values)

    def get_extra_state(self) -> Tensor:
        """Return the windows for a state dict, (2,) int64; zeros if they have not been set."""
        return torch.tensor(self.windows or (0, 0))

    def set_extra_state(self, state: Tensor) -> None:
        """Restore a result of `get_extra_state`."""
        short, long = state.tolist()
        self.windows = (short, long) if long else None
        self._renew()


class SpeedrunGPT(SpeedrunLayers):
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

    inputs: InputTables

    def __init__(
        self, config: SpeedrunConfig, *, attention: AttentionName = "sdpa", dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.config, self.attention_name = config, attention
        self.inputs = InputTables(config, dtype)
        self.head = nn.Parameter(torch.empty(config.width, config.vocab_size, dtype=dtype))
        self.make_weights(config, dtype)
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
            softcap=SigmoidCap(*SIGMOID_CAP) if config.sigmoid_logits else TANH_CAP,
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
        return self.capped((x_NC @ self.head).float())  # the head is stored (C, V)

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
        # An empty tensor whose sizes are windows in positions, the query's own included, and tokens of the longest
        # document. They change during a run: compiled code keeps sizes dynamic, but would bake in numbers.
        limits = torch.empty((short, long, longest or len(inputs), 0))
        torch._dynamo.maybe_mark_dynamic(limits, [0, 1, 2])
        masks = mask, paired_mask, limits
        return FlatRow(*self.inputs.look_up(inputs), cos, sin, self.rotary.query_scale, masks)

    def attention(self, plan: LayerPlan, row: FlatRow, q_1NHD: Tensor, k_1NHD: Tensor, v_1NHD: Tensor) -> Tensor:
        """Return causal attention within documents and the layer's window, (1, N, H, D)."""
        mask, paired_mask, limits = row.masks
        short, long, longest, _ = limits.shape  # dynamic sizes in compiled code
        mask = replace(paired_mask, longest=2 * longest) if plan.paired else replace(mask, longest=longest)
        return attention(q_1NHD, k_1NHD, v_1NHD, mask, long if plan.long else short)

    def mlp(self, x_TC: Tensor, up: Tensor, down: Tensor) -> Tensor:
        """Return relu(x @ up.T)^2 @ down, (T, C), for two (4C, C) matrices."""
        fp8 = self.config.fp8_mlp and learns(self)
        return mlp_relu2(x_TC, up, down.mT, fp8=fp8, fp8_backward=fp8 and self.config.fp8_mlp_backward)

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
