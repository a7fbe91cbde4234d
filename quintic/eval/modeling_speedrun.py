"""The speedrun's model for the transformers library; every exported folder of such a model contains this file.

It needs only torch, transformers and copies of the files it imports from `quintic.model`, which have the layers of the
trained model. Around them it is simple, not made for fast training: rows of a batch go through it one after the other,
attention is PyTorch's own with masks, and without a key/value cache `generate` reads the whole text again for each
token. Shape suffixes as in speedrun_layers.py, with B rows.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from quintic.model.functions import rms_norm  # noqa: F401  (transformers 5.0 copies only the files imported here)
from quintic.model.speedrun_layers import (
    FlatRow,
    SpeedrunLayers,
    bigram_hashes,
    document_begins,
    half_rotary_tables,
    make_input_weights,
)
from quintic.model.speedrun_sizes import LayerPlan, SpeedrunConfig

__all__ = ["QuinticSpeedrunConfig", "QuinticSpeedrunForCausalLM"]


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
    features: dict[str, Any] | None = None  # fields of `SpeedrunConfig`
    tie_word_embeddings: bool = False
    use_cache: bool = False


class QuinticSpeedrunForCausalLM(SpeedrunLayers, PreTrainedModel, GenerationMixin):
    """A speedrun's model; a document starts at each `bos_token_id`, and positions see their own document only."""

    config_class = QuinticSpeedrunConfig
    _input_embed_layer = "embedding"
    _supports_sdpa = True
    _keep_in_fp32_modules_strict = (
        "skip_scale", "projection_scales", "residual_scales", "output_scales", "gate_scale", "smear_scale",
    )  # fmt: skip

    def __init__(self, config: QuinticSpeedrunConfig) -> None:
        super().__init__(config)
        sizes = SpeedrunConfig(**(config.features or {}))
        self.make_weights(sizes, torch.get_default_dtype())
        make_input_weights(self, sizes, torch.get_default_dtype())
        self.embedding = nn.Embedding(config.vocab_size, sizes.width)
        self.value_embeddings = nn.ModuleList(
            nn.Embedding(config.vocab_size, sizes.width) for _ in range(sizes.value_tables)
        )
        self.head = nn.Linear(sizes.width, config.vocab_size, bias=False)
        self.post_init()

    @property
    def inputs(self) -> nn.Module:
        """The model itself has the weights of the inputs."""
        return self

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
                x_BTC[row, real] = self._trunk(self._row(input_ids[row, real]))
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.capped(self.head(x_BTC[:, kept]).float())
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutput(loss, logits)

    def _row(self, tokens_T: Tensor) -> FlatRow:
        """Return the inputs of all layers for one row of documents."""
        frequencies = torch.tensor(self.config.frequencies, dtype=torch.float64, device=tokens_T.device)
        bigram_TC = signs_T = None
        if self.sizes.bigram_hash:
            rows_T, signs_T = bigram_hashes(tokens_T, self.sizes)
            bigram_TC = self.bigram_embedding[rows_T]
        return FlatRow(
            self.embedding(tokens_T),
            bigram_TC,
            signs_T,
            torch.stack([table(tokens_T) for table in self.value_embeddings]) if self.value_embeddings else None,
            document_begins(tokens_T, self.sizes.bos_id).unsqueeze(1),
            *(table.to(self.dtype) for table in half_rotary_tables(2 * len(tokens_T), frequencies)),
            torch.tensor(self.config.query_scale, dtype=torch.float64),
        )

    def attention(self, plan: LayerPlan, row: FlatRow, q_1NHD: Tensor, k_1NHD: Tensor, v_1NHD: Tensor) -> Tensor:
        """Return causal attention within documents and the layer's window, (1, N, H, D)."""
        short, long = self.config.windows
        documents_N = row.starts.squeeze(1).cumsum(0).repeat_interleave(2 if plan.paired else 1)
        places = torch.arange(len(documents_N), device=documents_N.device)
        distance_NN = places[:, None] - places
        visible_NN = (documents_N[:, None] == documents_N) & (distance_NN >= 0)
        visible_NN &= distance_NN <= (long if plan.long else short)
        q_1HND, k_1HND, v_1HND = (x.transpose(1, 2) for x in (q_1NHD, k_1NHD, v_1NHD))
        return F.scaled_dot_product_attention(q_1HND, k_1HND, v_1HND, attn_mask=visible_NN).transpose(1, 2)

    def mlp(self, x_TC: Tensor, up: Tensor, down: Tensor) -> Tensor:
        """Return relu(x @ up.T)^2 @ down, (T, C), for two (4C, C) matrices."""
        return F.relu(F.linear(x_TC, up)).square() @ down
