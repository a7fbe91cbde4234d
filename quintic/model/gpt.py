"""`GPT`: the model the harness trains. Its sizes, `GPTConfig` with the depth dial, are in sizes.py.

A decoder-only transformer: token embedding, blocks of attention and squared-ReLU MLP, untied output head. What departs
from the textbook, and where the ideas come from (modded-nanogpt speedrun and nanochat unless named):

- rotary positions, QK-norm, no biases, normalisations without parameters, soft-capped logits (Gemma 2, 2408.00118);
- value embeddings with gates on alternating layers (2410.17897);
- per layer, a learned scale on the residual stream and on the embedding added back to it (x0);
- smear: a learned, gated share of the previous token's embedding is added to each token's;
- backout: a learned share of the stream half-way up is subtracted before the head, which need not see it;
- after chosen layers, a lookup layer (lookup.py) reads what it keeps for each token;
- attention, and smear, never cross a document boundary.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quintic.kernels.attention.attention import AttentionName, DocumentMask, document_mask
from quintic.kernels.attention.max_logits import MaxLogits
from quintic.kernels.lookup.lookup import plan_lookup
from quintic.kernels.loss.loss import softcap_cross_entropy
from quintic.model.cache import KVCache
from quintic.model.fp8 import FP8_BOTH, FP8_FORWARD, Fp8Recipe, head_scales, obstacle_to_fp8_layer, takes_fp8
from quintic.model.layers import Block, Linear, distribute_like, learns, rms_norm, rotary_tables
from quintic.model.lookup import LookupLayer
from quintic.model.sizes import GPTConfig

__all__ = ["GPT", "GPTConfig"]

# Leading channels the smear gate reads.
_SMEAR_CHANNELS = 24


class GPT(nn.Module):
    """A GPT. Build it on the meta device, move it with `to_empty`, then call `init_weights`.

    With lookup layers, `allocate_lookups` comes next: which rows of their tables belong to which token is then a part
    of the model, saved with its weights as the buffers `lookup_offsets` and `lookup_mean_rows`.

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
        self.blocks = nn.ModuleList(
            Block(width, config.num_heads, config.num_kv_heads, value_embedding=config.has_value_embedding(layer))
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
        self.smear_gate = Linear(min(_SMEAR_CHANNELS, width), 1)
        self.smear_scale = nn.Parameter(torch.empty(1))
        self.backout_scale = nn.Parameter(torch.empty(1))

    lookup_offsets: Tensor
    """(vocab_size + 1,) int32: where each token's rows begin in every lookup layer's tables, and their number."""
    lookup_mean_rows: Tensor
    """() float64: rows that a token of the training text reads from a lookup layer, on average."""

    @torch.no_grad()
    def init_weights(self, seed: int = 0) -> None:
        """Initialise every parameter in place, the same on every device (drawn on the CPU from `seed`).

        Of a parameter that is divided among ranks (a `DTensor`) each rank draws all and keeps its part.

        Matrices that read the residual stream have variance 1 / width; those that write to it start at zero, so that
        every block starts as the identity; the head starts near zero, so that the first loss is ln(vocab_size).
        """
        generator = torch.Generator().manual_seed(seed)

        def fill(param: Tensor, draw: Tensor) -> None:
            param.copy_(distribute_like(draw.to(param.dtype), param))

        def normal(param: Tensor, std: float) -> None:
            fill(param, torch.randn(param.shape, generator=generator, device="cpu") * std)

        def uniform(param: Tensor, std: float) -> None:
            fill(param, (torch.rand(param.shape, generator=generator, device="cpu") * 2 - 1) * (3**0.5 * std))

        std = self.config.width**-0.5
        normal(self.embedding.weight, 1.0)
        normal(self.head.weight, 0.001)
        for weight in self.value_embeddings.parameters():
            uniform(weight, std)
        for block in self._blocks():
            for linear in (block.attention.query, block.attention.key, block.attention.value):
                uniform(linear.weight, std)
            uniform(block.mlp.up.weight, 0.5 * std)
            block.attention.out.weight.zero_()
            block.mlp.down.weight.zero_()
            if block.attention.value_gate is not None:
                block.attention.value_gate.weight.zero_()
        for lookup in self._lookups():
            for table in lookup.tables():
                normal(table, std)
            uniform(lookup.up.weight, std)
            lookup.mix.weight.zero_()
        if self.config.l3_layers:
            rows, vocab_size = self.config.l3_embeddings, self.config.vocab_size
            even = torch.full((vocab_size,), rows // vocab_size)
            even[: rows % vocab_size] += 1
            self.allocate_lookups(even, mean_rows=rows / vocab_size)
        self.smear_gate.weight.zero_()
        self.smear_scale.zero_()
        self.backout_scale.fill_(0.2)
        depth_frac = torch.linspace(0, 1, self.config.depth)
        # Early layers lean on the embedding and amplify the stream; late ones leave it alone.
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
        """Return the loss in nats per token, or the logits where there are no targets.

        Args:
            inputs: (B, T) int64 tokens. Without a cache a document starts at each `bos_id`.
            targets: (B, T) int64 next tokens.
            document_starts: (num_documents + 1,) int32 cumulative offsets, for attention "varlen", "fa3" and
                "fa4".
            reduction: of losses: `"mean"` for a scalar, `"none"` for (B, T).
            cache: keys and values of the tokens before these inputs (generation); updated.
            positions: (N,) int64 places in the flattened inputs: without targets the only ones whose logits are
                computed.

        Returns:
            float32: scalar, (B, T), or logits after the soft cap: (B, T, vocab_size), with `positions`
            (N, vocab_size).
        """
        x_BTC = self._trunk(inputs, document_starts, cache)
        if targets is None:
            if positions is not None:
                x_BTC = x_BTC.flatten(0, 1)[positions]
            logits = self.head(x_BTC).float()
            return self.config.softcap * torch.tanh(logits / self.config.softcap)
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
        """Multiply in 8 bits from now on in training: in the head, and in linear layers.

        Weights stay as they are. Evaluation, and whatever needs no gradient, keeps the dtype of the activations.

        Args:
            recipe: where scales come from in linear layers, of which all that suit tensor cores take part, or
                `"auto"`: those that become faster, with one scale for each tensor, and the forward pass alone of MLPs
                that do not. The head has one for each tensor with all of them.

        Returns:
            Of each linear layer by name, in which passes it multiplies in 8 bits, or why it does not: `FP8_BOTH`,
            `FP8_FORWARD`, or a reason.
        """
        linears = {name: module for name, module in self.named_modules() if isinstance(module, Linear)}
        found = {
            name: obstacle_to_fp8_layer(linear.weight, needs_gain=recipe == "auto" and linear is not self.head)
            for name, linear in linears.items()
        }
        for name, linear in linears.items():
            if not found[name]:
                linear.fp8, found[name] = "tensorwise" if recipe == "auto" else recipe, FP8_BOTH
        for index, block in enumerate(self._blocks()):
            mlp = block.mlp
            mlp.fp8_forward = recipe == "auto" and takes_fp8(mlp.up.weight) and mlp.up.fp8 is None
            if mlp.fp8_forward:
                found |= {f"blocks.{index}.mlp.{part}": FP8_FORWARD for part in ("up", "down")}
        return found

    @torch.no_grad()
    def allocate_lookups(self, rows_per_token: Tensor, *, mean_rows: float) -> None:
        """Say which rows of the lookup layers' tables belong to which token; from `init_weights` on, even shares.

        Args:
            rows_per_token: (vocab_size,) integers from 1 to `l3_k_max` that add up to `l3_embeddings`.
            mean_rows: rows that a token of the training text has on average, for the count of operations.

        Raises:
            ValueError: `rows_per_token` does not fit the tables.
        """
        config = self.config
        rows = rows_per_token.cpu()
        if rows.shape != (config.vocab_size,) or not 1 <= int(rows.min()) <= int(rows.max()) <= config.l3_k_max:
            raise ValueError(
                f"rows_per_token: need 1 to {config.l3_k_max} rows for each of {config.vocab_size:,} tokens"
            )
        if int(rows.sum()) != config.l3_embeddings:
            raise ValueError(f"rows_per_token: {int(rows.sum()):,} rows; the tables have {config.l3_embeddings:,}")
        self.lookup_offsets[0] = 0
        self.lookup_offsets[1:] = rows.cumsum(0)
        self.lookup_mean_rows.fill_(mean_rows)

    def new_cache(self, rows: int, capacity: int) -> KVCache:
        """Return an empty cache for `rows` documents of at most `capacity` tokens."""
        attention = next(self._blocks()).attention
        return KVCache(
            self.config.depth,
            rows,
            capacity,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            dtype=self.compute_dtype,
            device=self.head.weight.device,
        )

    @contextmanager
    def recording_max_logits(self, recorder: MaxLogits) -> Iterator[None]:
        """Let every forward pass (without a cache) inside add each layer's largest logits per head to `recorder`.

        QK-norm bounds them already, so here they are something to watch and not something to clip.
        """
        attentions = [block.attention for block in self._blocks()]
        before = [attention.on_max_logits for attention in attentions]
        for layer, attention in enumerate(attentions):
            attention.on_max_logits = functools.partial(recorder.add, f"blocks.{layer}.attention")
        try:
            yield
        finally:
            for attention, on_max_logits in zip(attentions, before, strict=True):
                attention.on_max_logits = on_max_logits

    @torch.no_grad()
    def max_logits(self, inputs: Tensor, *, document_starts: Tensor | None = None) -> dict[str, Tensor]:
        """Return the largest attention logit of each head over a batch: layer name -> (H,) float32."""
        recorder = MaxLogits()
        with self.recording_max_logits(recorder):
            self._trunk(inputs, document_starts, None)
        return recorder.take()

    def compile_parts(self) -> None:
        """Compile each block, and the parts before and after them, for one shape of inputs.

        Blocks of a kind share their compiled code, so the first step takes as long as that of a few blocks, whatever
        the depth. Leave it out where shapes change, as in generation: `torch.compiler.set_stance("force_eager")`.
        """
        # Kinds of blocks (window, value embedding) times training and evaluation.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 32)
        for part in (*self._blocks(), *self._lookups()):
            part.compile(dynamic=False)
        self._stem = torch.compile(self._stem, dynamic=False)  # type: ignore[method-assign]
        self._top = torch.compile(self._top, dynamic=False)  # type: ignore[method-assign]

    def num_parameters(self) -> dict[str, int]:
        """Return the number of parameters of each part; the values add up to all of them.

        The matrices of lookup layers count among the blocks; their tables are a part of their own, where there are any.
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
        """Return the floating-point operations of forward and backward per token.

        6 for each weight of a matrix product, and 12 x width x visible positions for each attention layer (PaLM,
        arXiv 2204.02311, appendix B), where a causal query sees half of its window on average only if the window is
        the whole row; the usual convention counts the full window, and so do we. In each lookup layer, 12 x width for
        each row that a token has on average, which multiplies as a key and as a value.
        """
        matmul = sum(m.weight.numel() for m in self.modules() if isinstance(m, Linear))
        visible = sum(12 * self.config.width * window for window in self.config.windows)
        rows = self.config.l3_embeddings / self.config.vocab_size
        if self.lookups and not self.lookup_mean_rows.is_meta:
            rows = float(self.lookup_mean_rows)
        return 6 * matmul + visible + round(12 * self.config.width * rows * len(self.lookups))

    def _lookups(self) -> Iterator[LookupLayer]:
        for lookup in self.lookups.values():
            assert isinstance(lookup, LookupLayer)
            yield lookup

    def _blocks(self) -> Iterator[Block]:
        for block in self.blocks:
            assert isinstance(block, Block)
            yield block

    def _trunk(self, inputs: Tensor, document_starts: Tensor | None, cache: KVCache | None) -> Tensor:
        config = self.config
        length = inputs.shape[1]
        places = slice(length) if cache is None else cache.advance(length)
        end = length if cache is None else max(cache.lengths)
        tables = rotary_tables(end, config.head_dim, base=config.rotary_base, device=inputs.device)
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
            mask = DocumentMask("sdpa")  # the cache knows what is visible
        x0_BTC = x_BTC = halfway_BTC = self._stem(inputs, cache)
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
                None if cache is None else cache.layers[layer],
            )
            if plan is not None and str(layer) in self.lookups:
                x_BTC = self.lookups[str(layer)](x_BTC, self.lookup_offsets, plan)
            if layer == config.depth // 2:
                halfway_BTC = x_BTC
        return self._top(x_BTC, halfway_BTC)

    def _stem(self, inputs: Tensor, cache: KVCache | None) -> Tensor:
        """Return the first block's input, (B, T, C): embeddings, with a share of the one before, within documents."""
        x_BTC = rms_norm(self.embedding(inputs).to(self.compute_dtype))
        if cache is None or cache.last_embedding is None:
            previous = F.pad(x_BTC[:, :-1], (0, 0, 1, 0))
        else:
            previous = torch.cat([cache.last_embedding, x_BTC[:, :-1]], dim=1)
        if cache is not None:
            cache.remember(x_BTC)
        gate = torch.sigmoid(self.smear_gate(x_BTC[..., : self.smear_gate.in_features]))
        within_document = (inputs != self.config.bos_id).unsqueeze(-1).to(x_BTC.dtype)
        return x_BTC + self.smear_scale.to(x_BTC.dtype) * gate * within_document * previous

    def _top(self, x_BTC: Tensor, halfway_BTC: Tensor) -> Tensor:
        """Return the head's input, (B, T, C)."""
        return rms_norm(x_BTC - self.backout_scale.to(x_BTC.dtype) * halfway_BTC)
