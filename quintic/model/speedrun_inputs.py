"""What tokens become before the first layer of the speedrun's model: embeddings of tokens, of pairs, and for values."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quintic.model.layers import rms_norm
from quintic.model.speedrun_layers import previous
from quintic.model.speedrun_sizes import SpeedrunConfig

__all__ = ["SpeedrunInputs", "document_begins"]

_SMEAR_CHANNELS = 12  # leading channels of an embedding that the smear gate reads


def document_begins(inputs: Tensor, bos_id: int) -> Tensor:
    """Return where documents start among (T,) tokens: bool, True for the first token and each `bos_id`."""
    return (inputs == bos_id) | (torch.arange(len(inputs), device=inputs.device) == 0)


class SpeedrunInputs(nn.Module):
    """The tables of the model, with smear: a gated share of the previous token's embedding.

    The tables of values lie one below the other. Pairs of tokens share rows of `bigram_embedding`, by a hash, and take
    one of a few random vectors of signs, by another, which tells them apart.

    Args:
        config: sizes and features.
        dtype: of the tables.
    """

    bigram_signs: Tensor
    """(bigram_sign_rows, C): 1 and -1."""

    def __init__(self, config: SpeedrunConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
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

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
        """Return normalised embeddings, bigrams and, for each layer that has one, value embeddings: (T, C) each."""
        config = self.config
        x_TC = F.embedding(inputs, self.embedding)
        if config.smear:
            gate_T1 = torch.sigmoid(F.linear(x_TC[:, : self.smear_gate.shape[1]], self.smear_gate))
            gate_T1 = gate_T1.masked_fill(document_begins(inputs, config.bos_id).unsqueeze(1), 0)
            x_TC = x_TC + self.smear_scale.to(x_TC.dtype) * gate_T1 * previous(x_TC)
        bigram_TC, values = None, list[Tensor]()
        if config.bigram_hash:
            rows, signs = self.bigram_hashes(inputs)
            bigram_TC = F.embedding(rows, self.bigram_embedding) * F.embedding(signs, self.bigram_signs)
        if config.value_embeddings:
            # One lookup in all tables, and one gradient.
            first = torch.arange(0, len(self.value_embeddings), config.vocab_size, device=inputs.device)
            values += F.embedding(first.unsqueeze(1) + inputs, self.value_embeddings).unbind()
        return rms_norm(x_TC), bigram_TC, tuple(values)

    def bigram_hashes(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows that tokens take of the bigram embedding, and of the signs: (T,) int64 each, on any device.

        Tokens that start a document take the embedding's last row and the first signs.
        """
        before, begins = previous(inputs), document_begins(inputs, self.config.bos_id)
        last_row = self.config.bigram_rows - 1
        rows = ((36313 * inputs) ^ (27191 * before)) % last_row
        signs = (inputs ^ before) % self.config.bigram_sign_rows
        return rows.masked_fill(begins, last_row), signs.masked_fill(begins, 0)
