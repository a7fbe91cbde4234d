"""The two ends of the speedrun's model: embeddings of tokens, of pairs, and for values; targets."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quintic.kernels.lookup.rows import embedding_into_grad
from quintic.model.layers import rms_norm
from quintic.model.speedrun_layers import FlatRow, previous
from quintic.model.speedrun_sizes import IGNORED, SpeedrunConfig

__all__ = ["SpeedrunInputs", "all_targets", "document_begins"]

_SMEAR_CHANNELS = 12  # leading channels of an embedding that the smear gate reads


def document_begins(inputs: Tensor, bos_id: int) -> Tensor:
    """Mark the tokens that start documents: (T,) bool, True for the first token and each `bos_id`."""
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
        self.adds_to_gradients = False
        """The backward pass adds to the gradients of tables by itself (`embedding_into_grad`)."""
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

    def look_up(self, inputs: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Look the tokens up; return the first fields of a `FlatRow`: embedding, bigram, signs and values."""
        look_up, config = embedding_into_grad if self.adds_to_gradients else F.embedding, self.config
        bigram_TC = signs_T = values_KTC = None
        if config.bigram_hash:
            rows_T, signs_T = self.bigram_hashes(inputs)
            bigram_TC = look_up(rows_T, self.bigram_embedding)
        if config.value_embeddings:
            # One lookup in all tables, and one gradient.
            first = torch.arange(0, len(self.value_embeddings), config.vocab_size, device=inputs.device)
            values_KTC = look_up(first.unsqueeze(1) + inputs, self.value_embeddings)
        return look_up(inputs, self.embedding), bigram_TC, signs_T, values_KTC

    def forward(self, row: FlatRow) -> tuple[Tensor, Tensor | None]:
        """Return normalised embeddings and bigrams with their signs, (T, C), from the results of `look_up`."""
        x_TC, bigram_TC = row.embedding, row.bigram
        if self.config.smear:
            gate_T1 = torch.sigmoid(F.linear(x_TC[:, : self.smear_gate.shape[1]], self.smear_gate))
            x_TC = x_TC + self.smear_scale.to(x_TC.dtype) * gate_T1.masked_fill(row.starts, 0) * previous(x_TC)
        if bigram_TC is not None and row.signs is not None:
            bigram_TC = bigram_TC * F.embedding(row.signs, self.bigram_signs)
        return rms_norm(x_TC), bigram_TC

    def bigram_hashes(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows that tokens take of the bigram embedding, and of the signs: (T,) int64 each, on any device.

        Tokens that start a document take the embedding's last row and the first signs.
        """
        before, begins = previous(inputs), document_begins(inputs, self.config.bos_id)
        last_row = self.config.bigram_rows - 1
        rows = ((36313 * inputs) ^ (27191 * before)) % last_row
        signs = (inputs ^ before) % self.config.bigram_sign_rows
        return rows.masked_fill(begins, last_row), signs.masked_fill(begins, 0)


def all_targets(starts: Tensor, targets: Tensor, count: int, prefixes: Tensor | None) -> Tensor:
    """Return each token's targets, (T, K): the next `count` tokens, those of other documents ignored, and a prefix.

    Args:
        starts: (T,) bool, from `document_begins`.
        targets: (T,) next tokens.
        count: number of next tokens.
        prefixes: (vocab_size,) target for each next token, or None.
    """
    columns, outside = [targets], torch.zeros_like(starts)
    for ahead in range(1, count):
        outside = outside | F.pad(starts[ahead:], (0, ahead), value=True)
        columns.append(F.pad(targets[ahead:], (0, ahead)).masked_fill(outside, IGNORED))
    return torch.stack(columns if prefixes is None else [*columns, prefixes[targets]], dim=-1)
