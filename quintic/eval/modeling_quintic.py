"""The GPT of Quintic for the transformers library; `quintic export --to hf` copies this file to every exported folder.

It needs only torch, transformers and a copy of functions.py. It is a simple version of `quintic.model.gpt` with equal
names of weights, not made for fast training: attention is PyTorch's own, with masks. Shape suffixes: B rows, T
positions, S positions including earlier ones in the cache, C width, H query heads, G key/value heads, D channels of a
head.
"""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

from quintic.model.functions import rms_norm, rotate

__all__ = ["QuinticConfig", "QuinticForCausalLM"]


class QuinticConfig(PreTrainedConfig):
    """Sizes of a Quintic GPT; an export's `config.json` has all of them."""

    model_type = "quintic"
    keys_to_ignore_at_inference = ("past_key_values", "cache")

    vocab_size: int = 257
    num_hidden_layers: int = 1  # blocks
    hidden_size: int = 64  # width of the residual stream
    head_dim: int = 64
    num_attention_heads: int = 1  # hidden_size / head_dim
    num_key_value_heads: int = 1
    max_position_embeddings: int = 256  # length of a training row
    windows: tuple[int, ...] = (256,)  # positions that a query of each block sees, its own included
    value_embedding_layers: tuple[int, ...] = (0,)  # blocks with a value embedding
    backout_layer: int = 0  # the block whose output is subtracted at the end
    gate_channels: int = 12  # leading channels that value gates read
    smear_channels: int = 24  # leading channels that the smear gate reads
    value_gate_gain: float = 2.0  # value gates are at most this
    qk_gain: float = 1.2  # factor on normalised queries and keys
    softcap: float = 15.0  # logits are softcap tanh(logits / softcap)
    rotary_base: float = 100_000.0
    lookup_layers: tuple[int, ...] = ()  # blocks that are followed by a lookup layer
    lookup_rows: int = 0  # rows of a lookup layer's tables
    lookup_d_up: int = 0  # channels between the lookup and its mixing product
    lookup_tied: bool = True  # whether the values of a lookup layer are its keys
    tie_word_embeddings: bool = False


def _linear(in_features: int, out_features: int) -> nn.Linear:
    return nn.Linear(in_features, out_features, bias=False)


@torch.no_grad()
def _resized(old: nn.Embedding, size: int) -> nn.Embedding:
    """Return an embedding of `size` tokens with the rows of `old`; additional rows are their mean."""
    weight = old.weight
    rows = weight.float().mean(0, keepdim=True).to(weight.dtype).expand(max(0, size - len(weight)), -1)
    return nn.Embedding.from_pretrained(torch.cat([weight, rows])[:size], freeze=not weight.requires_grad)


class QuinticBlock(nn.Module):
    """Attention and MLP, each added to the residual stream.

    Attention has rotary positions, normalised queries and keys, and in some blocks gated value embeddings. The MLP has
    a squared ReLU.
    """

    def __init__(self, config: QuinticConfig, layer: int) -> None:
        super().__init__()
        width, kv_width = config.hidden_size, config.num_key_value_heads * config.head_dim
        self.layer, self.head_dim = layer, config.head_dim
        self.qk_gain, self.value_gate_gain = config.qk_gain, config.value_gate_gain
        self.attention = nn.ModuleDict(
            {
                "query": _linear(width, width),
                "key": _linear(width, kv_width),
                "value": _linear(width, kv_width),
                "out": _linear(width, width),
            }
        )
        if layer in config.value_embedding_layers:
            self.attention["value_gate"] = _linear(config.gate_channels, config.num_key_value_heads)
        self.mlp = nn.ModuleDict({"up": _linear(width, 4 * width), "down": _linear(4 * width, width)})

    def forward(
        self,
        x_BTC: Tensor,
        value_embedding_BTC: Tensor | None,
        rotary: tuple[Tensor, Tensor],
        visible_BTS: Tensor,
        cache: DynamicCache | None,
    ) -> Tensor:
        """Return (B, T, C)."""
        read_BTC, attention = rms_norm(x_BTC), self.attention
        q_BTHD, k_BTGD, v_BTGD = (
            attention[name](read_BTC).unflatten(-1, (-1, self.head_dim)) for name in ("query", "key", "value")
        )
        if value_embedding_BTC is not None:
            gate = attention["value_gate"]
            gate_BTG = self.value_gate_gain * torch.sigmoid(gate(read_BTC[..., : gate.in_features]))
            v_BTGD = v_BTGD + gate_BTG.unsqueeze(-1) * value_embedding_BTC.view_as(v_BTGD)
        q_BHTD, k_BGSD = (
            (rms_norm(rotate(x_BTHD, *rotary)) * self.qk_gain).transpose(1, 2) for x_BTHD in (q_BTHD, k_BTGD)
        )
        v_BGSD = v_BTGD.transpose(1, 2)
        if cache is not None:
            k_BGSD, v_BGSD = cache.update(k_BGSD, v_BGSD, self.layer)
        out_BHTD = F.scaled_dot_product_attention(
            q_BHTD, k_BGSD, v_BGSD, attn_mask=visible_BTS.unsqueeze(1), enable_gqa=q_BHTD.shape[1] != k_BGSD.shape[1]
        )
        x_BTC = x_BTC + attention["out"](out_BHTD.transpose(1, 2).flatten(-2))
        return x_BTC + self.mlp["down"](F.relu(self.mlp["up"](rms_norm(x_BTC))).square())


class QuinticLookup(nn.Module):
    """A lookup layer: attention of the hidden state over the table rows of its token."""

    def __init__(self, config: QuinticConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.keys = nn.Parameter(torch.zeros(config.lookup_rows, width))
        self.values = None if config.lookup_tied else nn.Parameter(torch.zeros(config.lookup_rows, width))
        self.up = _linear(width, config.lookup_d_up)
        self.mix = _linear(config.lookup_d_up + width, width)

    def forward(self, x_BTC: Tensor, input_ids: Tensor, offsets: Tensor) -> Tensor:
        """Return the residual stream after this layer, (B, T, C); token t owns rows offsets[t] to offsets[t + 1]."""
        read_BTC = rms_norm(x_BTC)
        found_BTC = torch.empty_like(read_BTC)
        values = self.keys if self.values is None else self.values
        for token in input_ids.unique().tolist():
            rows, places = slice(int(offsets[token]), int(offsets[token + 1])), input_ids == token
            scores = (read_BTC[places] @ self.keys[rows].T).float()
            found_BTC[places] = scores.softmax(dim=-1).to(values.dtype) @ values[rows]
        return x_BTC + self.mix(torch.cat([rms_norm(self.up(found_BTC)), read_BTC], dim=-1))


class QuinticForCausalLM(PreTrainedModel, GenerationMixin):
    """A Quintic GPT; a document starts at each `bos_token_id`, and positions see their own document only."""

    config_class = QuinticConfig
    _no_split_modules = ("QuinticBlock",)
    _input_embed_layer = "embedding"
    _supports_sdpa = True
    supports_gradient_checkpointing = True
    # Used if a configuration ties the weights; exported models are untied.
    _tied_weights_keys: ClassVar[dict[str, str]] = {"head.weight": "embedding.weight"}

    def __init__(self, config: QuinticConfig) -> None:
        super().__init__(config)
        width, depth = config.hidden_size, config.num_hidden_layers
        kv_width = config.num_key_value_heads * config.head_dim
        self.embedding = nn.Embedding(config.vocab_size, width)
        self.value_embeddings = nn.ModuleDict(
            {str(layer): nn.Embedding(config.vocab_size, kv_width) for layer in config.value_embedding_layers}
        )
        self.blocks = nn.ModuleList(QuinticBlock(config, layer) for layer in range(depth))
        self.lookups = nn.ModuleDict({str(layer): QuinticLookup(config) for layer in config.lookup_layers})
        if config.lookup_layers:
            self.register_buffer("lookup_offsets", torch.zeros(config.vocab_size + 1, dtype=torch.int32))
        self.head = _linear(width, config.vocab_size)
        self.residual_scales = nn.Parameter(torch.ones(depth))
        self.x0_scales = nn.Parameter(torch.zeros(depth))
        self.smear_gate = _linear(config.smear_channels, 1)
        self.smear_scale = nn.Parameter(torch.zeros(1))
        self.backout_scale = nn.Parameter(torch.zeros(1))
        self.gradient_checkpointing = False
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.hidden_size**-0.5)
        elif module is self:
            nn.init.ones_(self.residual_scales)
            for scales in (self.x0_scales, self.smear_scale, self.backout_scale):
                nn.init.zeros_(scales)

    def get_output_embeddings(self) -> nn.Module:
        """Return the head."""
        return self.head

    def set_output_embeddings(self, value: nn.Module) -> None:
        """Replace the head."""
        self.head = value

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Module:
        """Resize all tables with an entry per token to `new_num_tokens`, and return the token embedding.

        New value embeddings are the mean of the old ones. New tokens own no rows in lookup layers, which find zeros.
        """
        embedding = super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        size = embedding.weight.shape[0]
        for layer, old in self.value_embeddings.items():
            if old.weight.shape[0] != size:
                self.value_embeddings[layer] = _resized(old, size)
        if self.config.lookup_layers:
            last = self.lookup_offsets[-1:].expand(max(0, size + 1 - len(self.lookup_offsets)))
            self.lookup_offsets = torch.cat([self.lookup_offsets, last])[: size + 1]
        return embedding

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: DynamicCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cache: DynamicCache | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Return logits, (B, T, vocab_size) float32 after the soft cap.

        Arguments are as in transformers. `attention_mask` (B, S) includes the positions in the cache, which is in
        `past_key_values`, from transformers 5.24 on in `cache`. Only differences of `position_ids` matter. Hidden
        states are the residual stream before the first block and after each one, the last one as the head reads it.
        """
        if input_ids is None:
            raise ValueError("give input_ids: value embeddings are looked up by token, which inputs_embeds do not tell")
        config, length = self.config, input_ids.shape[1]
        checkpointing = self.gradient_checkpointing and self.training
        if checkpointing:
            # Blocks are computed twice, which would add their keys to a cache twice.
            cache = past_key_values = use_cache = None
        if cache is None:
            cache = DynamicCache() if past_key_values is None and use_cache else past_key_values
        if cache is not None and not all(isinstance(layer, DynamicLayer) for layer in cache.layers):
            raise ValueError("the cache of a Quintic model must be a DynamicCache: leave cache_implementation out")
        past = 0 if cache is None else cache.get_seq_length()
        if attention_mask is None:
            attention_mask = input_ids.new_ones(len(input_ids), past + length)
        if position_ids is None:
            position_ids = (attention_mask.long().cumsum(1) - 1).clamp(min=0)[:, -length:]
        channels = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=input_ids.device)
        angle_BTD = position_ids.float().unsqueeze(-1) * config.rotary_base ** (-channels / config.head_dim)
        cos_BTD, sin_BTD = angle_BTD.cos(), angle_BTD.sin()
        rotary = torch.cat([cos_BTD, cos_BTD], dim=-1), torch.cat([-sin_BTD, sin_BTD], dim=-1)

        x_BTC = rms_norm(self.embedding(input_ids))
        x_BTC, documents_BS = self._smear(x_BTC, input_ids, attention_mask[:, -length:] != 0, cache)
        total = documents_BS.shape[1]
        places = torch.arange(total, device=input_ids.device)
        distance_TS = places[total - length :, None] - places
        same_BTS = documents_BS[:, total - length :, None] == documents_BS[:, None, :]
        x0_BTC, halfway_BTC = x_BTC, x_BTC
        hidden = [x_BTC]
        for layer, block in enumerate(self.blocks):
            # Every block sees a mixture of the stream and the normalised embeddings.
            x_BTC = self.residual_scales[layer] * x_BTC + self.x0_scales[layer] * x0_BTC
            name = str(layer)
            value_embedding = self.value_embeddings[name](input_ids) if name in self.value_embeddings else None
            # Causal, within the document and the block's window.
            visible_BTS = same_BTS & (distance_TS >= 0) & (distance_TS < config.windows[layer])
            arguments = x_BTC, value_embedding, rotary, visible_BTS, cache
            # `gradient_checkpointing_enable` of transformers sets the function.
            x_BTC = self._gradient_checkpointing_func(block, *arguments) if checkpointing else block(*arguments)
            if name in self.lookups:
                x_BTC = self.lookups[name](x_BTC, input_ids, self.lookup_offsets)
            if layer == config.backout_layer:
                halfway_BTC = x_BTC
            hidden.append(x_BTC)
        hidden[-1] = x_BTC = rms_norm(x_BTC - self.backout_scale * halfway_BTC)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.head(x_BTC[:, kept]).float()
        logits = config.softcap * torch.tanh(logits / config.softcap)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=config.vocab_size, **kwargs)
        is_asked = config.output_hidden_states if output_hidden_states is None else output_hidden_states
        # By position, because the name of the third field differs between versions of transformers.
        output = CausalLMOutputWithPast(loss, logits, cache, hidden_states=tuple(hidden) if is_asked else None)
        return output.to_tuple() if return_dict is False else output

    def _smear(
        self, x_BTC: Tensor, input_ids: Tensor, real_BT: Tensor, cache: DynamicCache | None
    ) -> tuple[Tensor, Tensor]:
        """Add a gated fraction of the previous token's embedding, within documents.

        Returns:
            (B, T, C), and the index of each position's document, (B, S) float32, -1 for padding.
        """
        starts_BT = (input_ids == self.config.bos_token_id) & real_BT
        documents_BT = starts_BT.cumsum(1).float()
        embeddings_BSC, documents_BS = x_BTC, documents_BT.where(real_BT, -1.0)
        if cache is not None:
            # An additional layer of the cache holds embeddings and documents, so that all operations on a cache,
            # reordering for example, apply to them, too.
            extra = self.config.num_hidden_layers
            while len(cache.layers) <= extra:
                cache.layers.append(DynamicLayer())
            if cache.layers[extra].get_seq_length():
                before_B1 = cache.layers[extra].values[:, 0, -1].clamp(min=0)
                documents_BS = (documents_BT + before_B1).where(real_BT, -1.0)
            keys, values = cache.update(x_BTC.unsqueeze(1), documents_BS[:, None, :, None], extra)
            embeddings_BSC, documents_BS = keys.squeeze(1), values[:, 0, :, 0]
        length = x_BTC.shape[1]
        previous_BTC = F.pad(embeddings_BSC[:, :-1], (0, 0, 1, 0))[:, -length:]
        same_BS = documents_BS == F.pad(documents_BS[:, :-1], (1, 0), value=-2.0)
        gate = torch.sigmoid(self.smear_gate(x_BTC[..., : self.smear_gate.in_features]))
        within = same_BS[:, -length:].unsqueeze(-1).to(x_BTC.dtype)
        return x_BTC + self.smear_scale * gate * within * previous_BTC, documents_BS
