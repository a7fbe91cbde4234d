"""`BatchedSpeedrun` gives a trained `SpeedrunGPT` the interface of a `GPT`, for scoring and sampling."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quintic.model.gpt import GPT
from quintic.model.speedrun import SpeedrunConfig, SpeedrunGPT
from quintic.model.speedrun_layers import document_begins

__all__ = ["BatchedSpeedrun", "LanguageModel"]


class BatchedSpeedrun(nn.Module):
    """Returns losses or logits of (B, T) batches as `GPT` does; rows go through the model one after the other.

    The head is padded beyond the tokenizer's vocabulary. Logits are returned without the padding; losses are those of
    the speedrun, with the padding in the softmax.

    Args:
        model: the model, with its windows set.
        vocab_size: size of the tokenizer's vocabulary; None for that of the head.
        seq_len: number of tokens of the longest documents that the model was trained on.
    """

    def __init__(self, model: SpeedrunGPT, *, vocab_size: int | None = None, seq_len: int = 2048) -> None:
        super().__init__()
        self.model, self.vocab_size, self.seq_len = model, vocab_size or model.config.vocab_size, seq_len
        self.head = nn.Linear(model.config.width, model.config.vocab_size, bias=False, device="meta")
        # A view of the model's own head.
        self.head.weight = nn.Parameter(model.head.detach().mT)

    @property
    def config(self) -> SpeedrunConfig:
        """Sizes and features."""
        return self.model.config

    def new_cache(self, capacity: int) -> list[Tensor]:
        """Return an empty cache for one document of any length: its tokens, all read again each time."""
        del capacity
        return []

    @torch.no_grad()
    def forward(
        self,
        inputs: Tensor,
        targets: Tensor | None = None,
        *,
        document_starts: Tensor | None = None,
        reduction: Literal["mean", "none"] = "mean",
        cache: list[Tensor] | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Return the loss in nats per token, or without targets the logits; for the arguments see `GPT`.

        `document_starts` is ignored: the starts are found in each row.
        """
        del document_starts
        if targets is not None:
            losses = torch.stack(
                [
                    self.model(row, target, document_starts=self._starts(row), reduction="none")
                    for row, target in zip(inputs, targets, strict=True)
                ]
            )
            return losses if reduction == "none" else losses.mean()
        rows, num_new = list(inputs), inputs.shape[1]
        if cache is not None:
            cache += rows
            rows = [torch.cat(cache)]
        # Flattened positions whose logits are returned.
        wanted = torch.arange(inputs.numel(), device=inputs.device) if positions is None else positions
        logits = inputs.new_empty((len(wanted), self.vocab_size), dtype=torch.float32)
        for number, row in enumerate(rows):
            asked = wanted // num_new == number
            if asked.any():
                # The new tokens are at the end of the row.
                places = wanted[asked] % num_new + len(row) - num_new
                found = self.model.logits(row, places, document_starts=self._starts(row))
                logits[asked] = found[:, : self.vocab_size]
        return logits if positions is not None else logits.view(*inputs.shape, -1)

    def _starts(self, row: Tensor) -> Tensor:
        """Return the offsets of a row's documents, 0 first, followed by the row's length: int32."""
        begins = document_begins(row, self.config.bos_id).nonzero().squeeze(1)
        return F.pad(begins, (0, 1), value=len(row)).to(torch.int32)


LanguageModel = GPT | BatchedSpeedrun
"""The models that can be scored and sampled."""
