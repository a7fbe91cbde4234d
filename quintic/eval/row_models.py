"""`BatchedSpeedrun`: a trained `SpeedrunGPT`, called as a `GPT` is, for whatever scores or samples."""

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quintic.model.gpt import GPT
from quintic.model.speedrun import SpeedrunConfig, SpeedrunGPT

__all__ = ["BatchedSpeedrun", "LanguageModel", "TextCache"]


class TextCache:
    """The tokens of each row so far: the model keeps no keys and values, and reads them again for every new token."""

    def __init__(self, rows: int) -> None:
        self.rows = [torch.empty(0, dtype=torch.int64)] * rows

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of tokens of each row."""
        return tuple(map(len, self.rows))

    def rewind(self, lengths: Sequence[int]) -> None:
        """Forget all but the first `lengths[b]` tokens of row b."""
        self.rows = [row[:length] for row, length in zip(self.rows, lengths, strict=True)]


class BatchedSpeedrun(nn.Module):
    """Takes (B, T) batches, and gives losses or logits as `GPT` does. Each row goes through the model alone.

    Logits are those of the tokenizer's tokens: the head is padded, and no text has the tokens behind them. Losses are
    the race's, with the padding in the sum.

    Args:
        model: with its windows set.
        vocab_size: tokens that text can have; None for all of the head's.
        seq_len: tokens of the longest documents that it was trained on.
    """

    def __init__(self, model: SpeedrunGPT, *, vocab_size: int | None = None, seq_len: int = 2048) -> None:
        super().__init__()
        self.model, self.vocab_size, self.seq_len = model, vocab_size or model.config.vocab_size, seq_len
        self.head = nn.Linear(model.config.width, model.config.vocab_size, bias=False, device="meta")
        self.head.weight = nn.Parameter(model.head.detach().mT)  # the same memory

    @property
    def config(self) -> SpeedrunConfig:
        """Sizes and features."""
        return self.model.config

    def new_cache(self, rows: int, capacity: int) -> TextCache:
        """Return an empty cache for `rows` documents; any number of tokens has room."""
        del capacity
        return TextCache(rows)

    @torch.no_grad()
    def forward(
        self,
        inputs: Tensor,
        targets: Tensor | None = None,
        *,
        document_starts: Tensor | None = None,
        reduction: Literal["mean", "none"] = "mean",
        cache: TextCache | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Return the loss in nats per token, or the logits where there are no targets; arguments are those of `GPT`.

        `document_starts` are found anew for each row.
        """
        del document_starts
        if targets is not None:
            losses = [
                self.model(row, target, document_starts=self._starts(row), reduction="none")
                for row, target in zip(inputs, targets, strict=True)
            ]
            return torch.stack(losses) if reduction == "none" else torch.stack(losses).mean()
        wanted = torch.arange(inputs.numel(), device=inputs.device) if positions is None else positions
        before, num_new = [0] * len(inputs), inputs.shape[1]
        if cache is not None:
            before = list(cache.lengths)
            cache.rows = [torch.cat([old.to(new.device), new]) for old, new in zip(cache.rows, inputs, strict=True)]
        logits = inputs.new_empty((len(wanted), self.vocab_size), dtype=torch.float32)
        for row, tokens in enumerate(inputs if cache is None else cache.rows):
            asked = (wanted // num_new == row).nonzero().squeeze(1)
            if len(asked):
                places = wanted[asked] % num_new + before[row]
                logits[asked] = self.model.logits(tokens, places, document_starts=self._starts(tokens))[
                    :, : self.vocab_size
                ]
        return logits if positions is not None else logits.view(*inputs.shape, -1)

    def _starts(self, row: Tensor) -> Tensor:
        """Return the offsets of a row's documents, the first of which starts with it, and its end: int32."""
        starts = (row[1:] == self.config.bos_id).nonzero().squeeze(1) + 1
        return F.pad(F.pad(starts, (1, 0)), (0, 1), value=len(row)).to(torch.int32)


LanguageModel = GPT | BatchedSpeedrun
"""What can be scored and sampled."""
