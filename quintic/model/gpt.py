"""`GPT`: the model that `quintic train` trains. Its sizes, `GPTConfig`, are in sizes.py.

A decoder-only transformer: token embedding, blocks of attention and squared-ReLU MLP, untied output head. It departs
from the textbook as follows (ideas of the modded-nanogpt speedrun and nanochat unless a source is named):

- rotary positions, QK-norm, no biases, normalisations without parameters, soft-capped logits (Gemma 2, 2408.00118);
- value embeddings with gates on alternating layers (2410.17897);
- per layer, learned scales of the residual stream and of the initial embedding (x0) that is added to it;
- smear: the previous token's embedding, times a learned gate, is added to each token's;
- backout: the stream at half depth, times a learned scale, is subtracted before the head;
- after chosen layers, a lookup layer (lookup.py);
- neither attention nor smear crosses a document boundary.

Phases of a forward pass: `_stem` (B, T) -> (B, T, C), blocks and lookup layers (B, T, C) -> (B, T, C), `_top`
(B, T, C) -> (B, T, C), then the head with logits or loss. Shape suffixes as in layers.py.
"""

import functools
from collections.abc import Iterator
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quintic.kernels.attention.attention import AttentionName, DocumentMask, document_mask
from quintic.kernels.lookup.lookup import plan_lookup
from quintic.kernels.loss.loss import softcap_cross_entropy
from quintic.model.cache import KVCache
from quintic.model.fp8 import FP8_BOTH, FP8_FORWARD, Fp8Recipe, head_scales, obstacle_to_fp8_layer
from quintic.model.functions import rms_norm, rotary_tables
from quintic.model.layers import Block, Linear, distribute_like, learns
from quintic.model.lookup import LookupLayer
from quintic.model.sizes import SMEAR_CHANNELS, VARIANTS, GPTConfig

__all__ = ["GPT", "GPTConfig"]


class GPT(nn.Module):
    """A GPT. Build it on the meta device, move it with `to_empty`, then call `init_weights`.

    With lookup layers, call `allocate_lookups` next. The buffers `lookup_offsets` and `lookup_mean_rows` save its
    assignment of table rows to tokens with the weights.

    Args:
        config: sizes.
        compute_dtype: dtype of the activations; weights keep theirs.
        attention: implementation, from `quintic.kernels.attention.attention.choose_attention`.
    """

    def __init__(
        self,
        config: GPTConfig,
        *,
        compute_dtype: torch.dtype = torch.float32,
        attention: AttentionName = "sdpa",
    ) -> None:
        super().__init__()
        self.config, self.compute_dtype, self.attention_name = config, compute_dtype, attention
        width, kv_width = config.width, config.num_kv_heads * config.head_dim
        self.embedding = nn.Embedding(config.vocab_size, width)
        self.value_embeddings = nn.ModuleDict(
            {
                str(layer): nn.Embedding(config.vocab_size, kv_width)
                for layer in range(config.depth)
                if config.has_value_embedding(layer)
            }
        )
        gain = VARIANTS[config.variant].value_gate_gain
        self.blocks = nn.ModuleList(
            Block(
                width,
                config.num_heads,
                config.num_kv_heads,
                value_embedding=config.has_value_embedding(layer),
                value_gate_gain=gain,
            )
            for layer in range(config.depth)
        )
        self.lookups = nn.ModuleDict(
            {
                str(layer): LookupLayer(width, config.l3_embeddings, config.l3_d_up or 4 * width, tied=config.l3_tied)
                for layer in config.l3_layers
            }
        )
        if config.l3_layers:
            self.register_buffer("lookup_offsets", torch.empty(config.vocab_size + 1, dtype=torch.int32))
            self.register_buffer("lookup_mean_rows", torch.empty((), dtype=torch.float64))
        self.head = Linear(width, config.vocab_size)
        self.residual_scales = nn.Parameter(torch.empty(config.depth))
        self.x0_scales = nn.Parameter(torch.empty(config.depth))
        self.smear_gate = Linear(min(SMEAR_CHANNELS, width), 1)
        self.smear_scale = nn.Parameter(torch.empty(1))
        self.backout_scale = nn.Parameter(torch.empty(1))

    lookup_offsets: Tensor
    """(vocab_size + 1,) int32: token t has the rows from [t] to [t + 1] in the tables of every lookup layer."""
    lookup_mean_rows: Tensor
    """() float64: mean number of rows that a token of the training text reads from a lookup layer."""

    @torch.no_grad()
    def init_weights(self, seed: int = 0) -> None:
        """Initialise every parameter in place, with the same values on every device and in every layout.

        Values are drawn on the CPU from `seed`; for a sharded parameter (`DTensor`), each rank draws all and keeps its
        shard. Matrices that read the residual stream have variance 1 / width. Matrices that write to it start at zero,
        so that every block starts as the identity. The head starts near zero, so that the first loss is ln(vocab_size).
        """
        generator = torch.Generator().manual_seed(seed)

        def fill(param: Tensor, draw: Tensor) -> None:
            param.copy_(distribute_like(draw.to(param.dtype), param))

        def normal(param: Tensor, std: float) -> None:
            fill(param, torch.randn(param.shape, generator=generator, device="cpu") * std)

        def uniform(param: Tensor, std: float) -> None:
            fill(param, (torch.rand(param.shape, generator=generator, device="cpu") * 2 - 1) * (3**0.5 * std))

        def gate(weight: Tensor) -> None:
            if variant.gate_init:
                fill(weight, torch.rand(weight.shape, generator=generator, device="cpu") * variant.gate_init)
            else:
                weight.zero_()

        variant, std = VARIANTS[self.config.variant], self.config.width**-0.5
        normal(self.embedding.weight, variant.embedding_std)
        normal(self.head.weight, 0.001)
        for weight in self.value_embeddings.parameters():
            uniform(weight, std)
        for block in self._blocks():
            for linear in (block.attention.query, block.attention.key, block.attention.value):
                uniform(linear.weight, std)
            uniform(block.mlp.up.weight, variant.up_scale * std)
            block.attention.out.weight.zero_()
            block.mlp.down.weight.zero_()
            if block.attention.value_gate is not None:
                gate(block.attention.value_gate.weight)
        for lookup in self._lookups():
            for table in lookup.tables():
                normal(table, std)
            uniform(lookup.up.weight, std)
            lookup.mix.weight.zero_()
        if self.config.l3_layers:
            rows, vocab_size = self.config.l3_embeddings, self.config.vocab_size
            # As evenly as possible, until `allocate_lookups` is called.
            even = torch.full((vocab_size,), rows // vocab_size)
            even[: rows % vocab_size] += 1
            self.allocate_lookups(even, mean_rows=rows / vocab_size)
        gate(self.smear_gate.weight)
        self.smear_scale.zero_()
        self.backout_scale.fill_(0.2)
        depth_frac = torch.linspace(0, 1, self.config.depth)
        # Early layers add more of the embedding and amplify the stream; late layers almost keep it.
        fill(self.residual_scales, 1.15 - 0.10 * depth_frac)
        fill(self.x0_scales, 0.20 - 0.15 * depth_frac)

    def forward(
        self,
        inputs: Tensor,
        targets: Tensor | None = None,
        *,
        document_starts: Tensor | None = None,
        reduction: Literal["mean", "none"] = "mean",
        cache: KVCache | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Return the loss in nats per token, or without targets the logits.

        Args:
            inputs: (B, T) int64 tokens. Without a cache, a document starts at each `bos_id`.
            targets: (B, T) int64 next tokens.
            document_starts: (num_documents + 1,) int32 cumulative offsets, for attention "varlen", "fa3" and "fa4".
            reduction: `"mean"` for a scalar loss, `"none"` for (B, T) losses.
            cache: keys and values of the tokens before these inputs, in generation, for one row; updated.
            positions: (N,) int64 indices into the flattened inputs. If given, only their logits are computed.

        Returns:
            float32: the loss, scalar or (B, T); or the logits after the soft cap, (B, T, vocab_size), with `positions`
            (N, vocab_size).
        """
        x_BTC = self._trunk(inputs, document_starts, cache)
        # Inference: logits (B, T, V) or (N, V). Computing them only at `positions` saves most of their memory.
        if targets is None:
            if positions is not None:
                x_BTC = x_BTC.flatten(0, 1)[positions]
            logits = self.head(x_BTC).float()
            return self.config.softcap * torch.tanh(logits / self.config.softcap)
        # Training: the loss in chunks of rows, so that (B x T, V) logits never exist at once.
        in_8_bits = self.head.fp8 is not None and learns(self.head)
        return softcap_cross_entropy(
            x_BTC,
            self.head.weight,
            targets,
            softcap=self.config.softcap,
            fp8=head_scales(x_BTC, self.head.weight) if in_8_bits else None,
            reduction=reduction,
        )

    def use_fp8(self, recipe: Fp8Recipe) -> dict[str, str]:
        """Switch training to 8-bit products in the head and in linear layers; evaluation keeps the compute dtype.

        Args:
            recipe: `"tensorwise"` or `"rowwise"` is the scaling for all linear layers whose sizes suit tensor cores.
                `"auto"` scales tensorwise, only in layers that become faster; other MLPs then use 8 bits in the
                forward pass only. The head is always scaled tensorwise.

        Returns:
            Name of each linear layer -> `FP8_BOTH`, `FP8_FORWARD`, or the reason why it does not use 8 bits.
        """
        uses = {}
        for name, module in self.named_modules():
            if isinstance(module, Linear):
                needs_gain = recipe == "auto" and module is not self.head
                uses[name] = obstacle_to_fp8_layer(module.weight, needs_gain=needs_gain)
                if not uses[name]:
                    module.fp8, uses[name] = "tensorwise" if recipe == "auto" else recipe, FP8_BOTH
        for index, block in enumerate(self._blocks()):
            # With "auto", an MLP below the size that pays in both passes still gains in the forward pass.
            if recipe == "auto" and not block.mlp.up.fp8 and not obstacle_to_fp8_layer(block.mlp.up.weight):
                block.mlp.fp8_forward = True
                uses |= {f"blocks.{index}.mlp.{part}": FP8_FORWARD for part in ("up", "down")}
        return uses

    @torch.no_grad()
    def allocate_lookups(self, rows_per_token: Tensor, *, mean_rows: float) -> None:
        """Assign the table rows of the lookup layers to tokens.

        Args:
            rows_per_token: (vocab_size,) integers from 1 to `l3_k_max`, with the sum `l3_embeddings`.
            mean_rows: mean number of rows of a token of the training text, for `flops_per_token`.
        """
        self.lookup_offsets[0] = 0
        self.lookup_offsets[1:] = rows_per_token.cumsum(0)
        self.lookup_mean_rows.fill_(mean_rows)

    def new_cache(self, capacity: int) -> KVCache:
        """Return an empty cache for a document of at most `capacity` tokens."""
        attention = next(self._blocks()).attention  # of this rank's heads, under tensor parallelism
        shape = (self.config.depth, 1, attention.num_kv_heads, capacity, attention.head_dim)
        return KVCache(shape, dtype=self.compute_dtype, device=self.head.weight.device)

    def compile_parts(self) -> None:
        """Compile each block and lookup layer, `_stem` and `_top`, for one shape of inputs.

        Blocks of the same kind share compiled code, so the time to compile hardly depends on the depth. Where shapes
        change, as in generation, use `torch.compiler.set_stance("force_eager")`.
        """
        # One compilation for each kind of block (window, value embedding), in training and in evaluation.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 32)
        for part in (*self._blocks(), *self._lookups()):
            part.compile(dynamic=False)
        self._stem = torch.compile(self._stem, dynamic=False)  # type: ignore[method-assign]
        self._top = torch.compile(self._top, dynamic=False)  # type: ignore[method-assign]

    def num_parameters(self) -> dict[str, int]:
        """Return the number of parameters by purpose, with the sum of all parameters.

        Matrices of lookup layers count as `blocks`, their tables as `lookup_tables`, which only such models have.
        """
        tables = sum(table.numel() for lookup in self._lookups() for table in lookup.tables())
        parts = {
            "embedding": self.embedding.weight.numel(),
            "value_embeddings": sum(p.numel() for p in self.value_embeddings.parameters()),
            "blocks": sum(p.numel() for part in (self.blocks, self.lookups) for p in part.parameters()) - tables,
            "head": self.head.weight.numel(),
        }
        if tables:
            parts["lookup_tables"] = tables
        parts["scalars"] = sum(p.numel() for p in self.parameters()) - sum(parts.values())
        return parts

    def flops_per_token(self) -> int:
        """Return the floating-point operations per token of the sizes, with the rows of lookup layers as allocated."""
        known = bool(self.lookups) and not self.lookup_mean_rows.is_meta
        return self.config.flops_per_token(float(self.lookup_mean_rows) if known else None)

    def _lookups(self) -> Iterator[LookupLayer]:
        for lookup in self.lookups.values():
            assert isinstance(lookup, LookupLayer)
            yield lookup

    def _blocks(self) -> Iterator[Block]:
        for block in self.blocks:
            assert isinstance(block, Block)
            yield block

    def _trunk(self, inputs: Tensor, document_starts: Tensor | None, cache: KVCache | None) -> Tensor:
        """Return the head's input, (B, T, C), for (B, T) tokens."""
        config = self.config
        length = inputs.shape[1]
        # Positions of the tokens: 0 to T - 1, or with a cache those after its last token.
        places = slice(length) if cache is None else cache.advance(length)
        tables = rotary_tables(places.stop, config.head_dim, base=config.rotary_base, device=inputs.device)
        rotary = tuple(table[places] for table in tables)
        if cache is None:
            mask = document_mask(
                inputs,
                bos_id=config.bos_id,
                windows=config.windows,
                implementation=self.attention_name,
                dtype=self.compute_dtype,
                document_starts=document_starts,
            )
        else:
            mask = DocumentMask("sdpa")  # unused: the cache makes the mask
        x0_BTC = x_BTC = halfway_BTC = self._stem(inputs, cache)
        # The plan groups the batch's tokens by their table rows; all lookup layers use it.
        plan = plan_lookup(inputs, self.lookup_offsets, config.l3_embeddings) if self.lookups else None
        for layer, block in enumerate(self._blocks()):
            x_BTC = block(
                x_BTC,
                x0_BTC,
                (self.residual_scales[layer], self.x0_scales[layer]),
                self.value_embeddings[str(layer)] if config.has_value_embedding(layer) else None,
                inputs,
                rotary,
                mask,
                config.windows[layer],
                None if cache is None else functools.partial(cache.attend, layer),
            )
            if plan is not None and str(layer) in self.lookups:
                x_BTC = self.lookups[str(layer)](x_BTC, self.lookup_offsets, plan)
            if layer == config.depth // 2:
                halfway_BTC = x_BTC
        return self._top(x_BTC, halfway_BTC)

    def _stem(self, inputs: Tensor, cache: KVCache | None) -> Tensor:
        """Return the first block's input, (B, T, C): normalised embeddings with smear."""
        x_BTC = rms_norm(self.embedding(inputs).to(self.compute_dtype))
        # The previous token's embedding: zeros or the cached one before the first, and masked at document starts.
        if cache is None or cache.last_embedding is None:
            previous = F.pad(x_BTC[:, :-1], (0, 0, 1, 0))
        else:
            previous = torch.cat([cache.last_embedding, x_BTC[:, :-1]], dim=1)
        if cache is not None:
            cache.last_embedding = x_BTC[:, -1:]
        gate = torch.sigmoid(self.smear_gate(x_BTC[..., : self.smear_gate.in_features]))
        within_document = (inputs != self.config.bos_id).unsqueeze(-1).to(x_BTC.dtype)
        return x_BTC + self.smear_scale.to(x_BTC.dtype) * gate * within_document * previous

    def _top(self, x_BTC: Tensor, halfway_BTC: Tensor) -> Tensor:
        """Return the head's input, (B, T, C): the stream after backout, normalised."""
        return rms_norm(x_BTC - self.backout_scale.to(x_BTC.dtype) * halfway_BTC)
